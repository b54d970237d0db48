"""Files of data sets on the Hugging Face hub, and the Parquet files that they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinkle_jax.data.missing_extra import require


def download_split(repository: str, split: str, *, subset: str = "main") -> list[Path]:
    """Download a split of a data set, unless it is in huggingface_hub's cache.

    Args:
        repository: its id, such as `openai/gsm8k`.
        split: `train` or `test`.
        subset: the folder that the files are in.

    Returns:
        Its Parquet files, in their order.

    Raises:
        ValueError: if the data set has no such files.
        ImportError: if huggingface_hub or pyarrow is not installed.
    """
    require("huggingface_hub", "hub")
    require("pyarrow", "hub")
    from huggingface_hub import snapshot_download

    pattern = f"{subset}/{split}-*.parquet"
    folder = snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern])
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise ValueError(f"task must be a data set with files {pattern}, got {repository!r}")
    return files


def parquet_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows of a Parquet file, each with the words that name it.

    Raises:
        ImportError: if pyarrow is not installed.
    """
    require("pyarrow", "hub")
    from pyarrow import parquet

    for number, record in enumerate(parquet.read_table(path).to_pylist(), 1):
        yield f"{path}: record {number}", record
