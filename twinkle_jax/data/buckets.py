"""Which sizes arrays are padded to, so that batches of many lengths share few compilations."""


def bucket_size(size: int, *, smallest: int = 1, multiple: int = 1) -> int:
    """Round a size up to a bucket: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 and so on.

    Buckets are powers of two and the numbers half-way between them, so at most a third of a padded
    array is padding, and there are two buckets for each doubling.

    Args:
        size: what has to fit, at least 0.
        smallest: the smallest bucket.
        multiple: what the result must be a multiple of, the number of devices for one.

    Returns:
        The bucket, rounded up to the multiple.

    Raises:
        ValueError: if the size is negative, or `smallest` or `multiple` not positive.

    Example:
        >>> [bucket_size(n, smallest=16) for n in (1, 17, 25, 33, 49, 100)]
        [16, 24, 32, 48, 64, 128]
        >>> bucket_size(5, multiple=4)
        8
    """
    if size < 0 or smallest < 1 or multiple < 1:
        raise ValueError(
            "size must be at least 0, smallest and multiple at least 1, "
            f"got size={size}, smallest={smallest}, multiple={multiple}"
        )
    size = max(size, smallest)
    power = 1 << (size - 1).bit_length()  # the next power of two
    bucket = max(3 * power // 4, 1)
    bucket = bucket if bucket >= size else power
    return -(-bucket // multiple) * multiple
