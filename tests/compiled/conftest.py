"""What tests of real compilers share."""

import jax
import pytest


@pytest.fixture
def as_users_compile():
    """The tests' own setting asks compilers not to optimise."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
