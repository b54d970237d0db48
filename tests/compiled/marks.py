"""What marks tests of a compiler; apart, so that the tables are printed without pytest."""

import pytest

from tests.compiled.described import how_to_install, installed


def compiled_by(platform: str) -> list[pytest.MarkDecorator]:
    """Mark tests that look further, where the compiler is installed."""
    return [
        pytest.mark.exhaustive,
        pytest.mark.skipif(not installed(platform), reason=how_to_install(platform)),
    ]
