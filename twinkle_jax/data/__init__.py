"""What goes in: input features, batches, and the sizes that they are padded to."""

from twinkle_jax.data.batch import Batch
from twinkle_jax.data.buckets import bucket_size

__all__ = ["Batch", "bucket_size"]
