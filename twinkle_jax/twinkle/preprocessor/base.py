"""What a data set's `map` and `filter` take besides functions."""

from collections.abc import Sequence
from typing import Any

from twinkle_jax.data import Row
from twinkle_jax.data.rows import to_columns, to_rows


class Preprocessor:
    """Turns rows of a data set into others; a subclass says how for one row, or for columns.

    Example:
        >>> class Shout(Preprocessor):
        ...     def preprocess(self, row):
        ...         return {"text": row["text"].upper()}
        >>> Shout()({"text": ["a", "b"]})
        {'text': ['A', 'B']}
    """

    def preprocess(self, row: Row) -> Any:
        """Return the columns of one row."""
        raise NotImplementedError(f"{type(self).__name__} must have preprocess or __call__")

    def __call__(self, rows: Any) -> Any:
        """Return the columns of many."""
        return self.map_row_to_col([self.preprocess(row) for row in self.map_col_to_row(rows)])

    @staticmethod
    def map_col_to_row(rows: Any) -> list[dict[str, Any]]:
        """Turn columns into rows; rows stay."""
        return rows if isinstance(rows, list) else to_rows(rows)

    @staticmethod
    def map_row_to_col(rows: Any, keys: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Turn rows into columns; columns stay."""
        if isinstance(rows, dict):
            return rows
        columns = to_columns(rows)
        return columns if keys is None else {key: columns.get(key, []) for key in keys}


class DataFilter:
    """Says which rows of a data set stay."""

    def __call__(self, row: Row) -> bool:
        """Whether this row stays."""
        raise NotImplementedError(f"{type(self).__name__} must have __call__")
