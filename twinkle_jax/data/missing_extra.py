"""The error for a missing optional package."""

from importlib.util import find_spec


def require(package: str, extra: str) -> None:
    """Raise an error that names the extra, unless the package can be imported."""
    if find_spec(package) is None:
        raise ImportError(
            f"{package} must be installed for this: pip install 'twinkle-jax[{extra}]'",
            name=package,
        )
