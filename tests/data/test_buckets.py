"""Buckets: what fits, how much is lost, how many there are."""

import pytest

from twinkle_jax.model import bucket_size


def test_every_size_fits_and_little_is_lost():
    buckets = [bucket_size(n) for n in range(1, 1025)]
    for n, bucket in enumerate(buckets, 1):
        assert n <= bucket and (bucket - n) * 3 < bucket
    assert sorted(set(buckets))[:12] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert len(set(buckets)) == 20
    assert all(bucket_size(b) == b for b in buckets)


def test_smallest_and_multiple():
    assert [bucket_size(n, smallest=16) for n in (0, 16, 17)] == [16, 16, 24]
    assert [bucket_size(n, multiple=8) for n in (0, 1, 9, 25)] == [8, 8, 16, 32]
    assert bucket_size(0) == 1


@pytest.mark.parametrize(
    "bad", [{"size": -1}, {"size": 1, "smallest": 0}, {"size": 1, "multiple": 0}]
)
def test_what_is_refused(bad):
    with pytest.raises(ValueError, match="size must be at least 0"):
        bucket_size(**bad)
