"""Keys of every implementation become threefry keys, each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinkle_jax.sampler.sampling import row_keys, threefry_keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_row_has_the_key_of_its_number(impl):
    rows = row_keys(jax.random.key(3, impl=impl), 5)
    assert jax.random.key_impl(rows) == "threefry2x32"
    assert len(np.unique(jax.random.key_data(rows), axis=0)) == 5
    own = [jax.random.fold_in(jax.random.key(3, impl=impl), row) for row in range(5)]
    for row, key in enumerate(own):
        np.testing.assert_array_equal(
            jax.random.key_data(threefry_keys(key)), jax.random.key_data(rows[row])
        )


def test_every_word_of_a_key_counts():
    words = jnp.zeros((5, 4), jnp.uint32).at[jnp.arange(4), jnp.arange(4)].set(1)
    keys = threefry_keys(jax.random.wrap_key_data(words, impl="rbg"))
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 5


def test_threefry_keys_stay_as_they_are():
    keys = jax.random.split(jax.random.key(0), 2)
    assert threefry_keys(keys) is keys
