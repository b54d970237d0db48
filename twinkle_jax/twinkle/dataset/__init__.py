"""Twinkle's `dataset`: data sets in memory, lazy, as streams, and packed."""

from twinkle_jax.twinkle.dataset.base import Dataset, DatasetMeta, IterableDataset
from twinkle_jax.twinkle.dataset.lazy import LazyDataset
from twinkle_jax.twinkle.dataset.packing import IterablePackingDataset, PackingDataset

__all__ = [
    "Dataset",
    "DatasetMeta",
    "IterableDataset",
    "IterablePackingDataset",
    "LazyDataset",
    "PackingDataset",
]
