"""Parquet files as chunks.

Read by PyArrow in buffers of one megabyte a column: memory is that of a chunk, whatever the size of
the file and of its row groups. Polars' own batches hold whole row groups: on 5 M rows and 10 columns
in one row group, 505 MB above the start; this, 137 MB.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rarebit.data.raw.byte_stream import ByteStream
from rarebit.data.raw.chunk import Place, RawChunk
from rarebit.errors import DataError, MissingExtraError

__all__ = ["CHUNK_ROWS", "parquet_names", "read_parquet", "values_as_text", "with_nulls"]

CHUNK_ROWS = 100_000
BUFFER_BYTES = 1 << 20


def parquet_names(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet file."""
    with ByteStream(path) as stream:
        return list(_open(stream).schema_arrow.names)


def read_parquet(
    path: Path,
    columns: Sequence[str] | None,
    *,
    missing: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    part: str = "",
) -> Iterator[RawChunk]:
    """Yield the rows of a Parquet file in order, their types kept."""
    start = 0
    with ByteStream(path) as stream:
        file = _open(stream)
        total = max(file.metadata.num_rows, 1)
        for frame in _frames(file, path, columns):
            yield _chunk(frame, path.name, start, missing, part)
            start += frame.height
            if progress is not None:
                progress(stream.total * start // total, stream.total)
        stream.check_unchanged()


def values_as_text(frame: pl.DataFrame, row: int) -> str:
    """Return a row for people.

    >>> values_as_text(pl.DataFrame({"user": ["anna"], "age": [None]}), 0)
    'user=anna, age=None'
    """
    return ", ".join(f"{name}={value}" for name, value in frame.row(row, named=True).items())


def with_nulls(frame: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return a frame with null for the empty text and for those that stand for a missing value."""
    texts = pl.selectors.string()
    return frame.with_columns(pl.when(~texts.is_in(["", *missing])).then(texts))


def _chunk(
    frame: pl.DataFrame, name: str, start: int, missing: Sequence[str], part: str
) -> RawChunk:
    def locate(row: int) -> Place:
        return Place(name, start + row + 1, values_as_text(frame, row), "row")

    return RawChunk(
        with_nulls(frame, missing), locate, part, lambda: start + 1 + np.arange(frame.height)
    )


def _open(stream: ByteStream) -> Any:
    """Return the file as PyArrow's reader."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]  # it comes without types
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it comes without types
    except ImportError:
        raise MissingExtraError("pyarrow", "data", "reading Parquet files") from None
    if not stream.total:
        raise DataError(f"{str(stream.path)!r} is empty; a log needs at least one row")
    try:
        file = pq.ParquetFile(stream.disk, buffer_size=BUFFER_BYTES, pre_buffer=False)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _damaged(stream.path, error) from None
    repeated = [name for name, n in Counter(names).items() if n > 1]
    if repeated:
        raise DataError(
            f"{str(stream.path)!r} has columns of the same name: {', '.join(map(repr, repeated))}; "
            "write it again with a name of its own for each"
        )
    return file


def _frames(file: Any, path: Path, columns: Sequence[str] | None) -> Iterator[pl.DataFrame]:
    import pyarrow as pa

    order = list(columns) if columns is not None else None
    _refuse_long_decimals(file.schema_arrow, path, order)
    batches = file.iter_batches(batch_size=CHUNK_ROWS, columns=order)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None
        if batch is None:
            return
        frame = pl.DataFrame(batch)
        yield frame if order is None else frame.select(order)


def _refuse_long_decimals(schema: Any, path: Path, columns: Sequence[str] | None) -> None:
    """Raise for decimals of more than 38 digits: Polars panics at them, with pages of its own calls."""
    for field in schema:
        if (columns is None or field.name in columns) and _has_long_decimals(field.type):
            raise DataError(
                f"the column {field.name!r} of {str(path)!r} holds {field.type}: decimals of more than "
                "38 digits are not read; write it as text or as floats, or without the column"
            )


def _has_long_decimals(dtype: Any) -> bool:
    import pyarrow as pa

    inner = (dtype.field(number).type for number in range(dtype.num_fields))
    return bool(pa.types.is_decimal256(dtype)) or any(map(_has_long_decimals, inner))


def _damaged(path: Path, error: Exception) -> DataError:
    what = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{str(path)!r} is no Parquet file, or is damaged: {what}; get the file again")
