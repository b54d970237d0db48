"""Fixtures of the model's tests."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    """Compile in half the time, to code that small batches do not notice."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
