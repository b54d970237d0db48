"""The examples in the docstrings print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import twinkle_jax.loss

MODULES = [module.name for module in pkgutil.iter_modules(twinkle_jax.loss.__path__)]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"twinkle_jax.loss.{module}")).failed == 0
