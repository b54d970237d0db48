"""What the suite's markers promise: programs optimised or not, and never mixed."""

import jax
import numpy as np
import pytest

_double = jax.jit(lambda x: 2 * x)


@pytest.mark.quick_compile
def test_quick_compile_leaves_programs_unoptimised(compilations):
    assert jax.config.values["jax_disable_most_optimizations"]
    _double(np.float32(1))
    assert len(compilations) == 1


@pytest.mark.as_users_compile
def test_as_users_compile_optimises_what_was_compiled_before_too(compilations):
    assert not jax.config.values["jax_disable_most_optimizations"]
    _double(np.float32(1))
    assert len(compilations) == 1
