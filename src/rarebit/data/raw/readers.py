"""Parquet files as chunks.

Read by PyArrow in buffers of one megabyte a column: memory is that of a chunk, whatever the size of
the file and of its row groups. Polars' own batches hold whole row groups: on 5 M rows and 10 columns
in one row group, 505 MB above the start; this, 137 MB.

Any log as chunks of rows: text files, Parquet files, folders of them, and frames in memory.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rarebit.data.raw.byte_stream import COMPRESSED, ByteStream
from rarebit.data.raw.rows import BadRows, Place, RawChunk
from rarebit.data.raw.text import TextFormat, sniff_format, sniff_like
from rarebit.data.raw.text_reader import BLOCK_BYTES, TextColumns, TextReader
from rarebit.errors import DataError, MissingExtraError
from rarebit.settings import suggest

__all__ = [
    "CHUNK_ROWS",
    "column_names",
    "find_format",
    "parquet_names",
    "read_frame",
    "read_parquet",
    "read_raw",
    "values_as_text",
    "with_nulls",
]

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


TEXT = (".csv", ".tsv", ".txt", ".dat")
PARQUET = (".parquet", ".pq")

Progress = Callable[[int, int], None]


def read_raw(
    path: Path,
    columns: Sequence[str] | None,
    bad: BadRows,
    *,
    format: TextFormat | None = None,
    integers: Collection[str] = (),
    missing: Sequence[str] = (),
    progress: Progress | None = None,
    part: str = "",
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RawChunk]:
    """Yield the rows of a log in order, in memory that does not grow with the log.

    The name says what a file is: .csv, .tsv, .txt and .dat are text, also with .gz, .bz2 or .xz after
    it; .parquet and .pq are Parquet. A folder is its files, by name, one after the other. `columns`
    are those to read, in this order; all if none. Rows that have no structure go to `bad`: the
    records of the files are the rows yielded and those. `format` says how text is written; it is
    guessed if not given. `integers` are columns of text to return as integers, where a whole block
    of them are. `progress` is told how many bytes of the files on the disk are read, of how many.
    """
    files, rows = _files(path, is_text=format is not None), 0
    total = sum(_size(file) for file in files)
    done = 0
    for file in files:
        known = bad.count

        def tell(position: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + position, total)

        if _is_parquet(file):
            names = None if columns is None else _chosen(file, parquet_names(file), columns)
            chunks = read_parquet(file, names, missing=missing, progress=tell, part=part)
        else:
            chunks = _read_text(
                file,
                columns,
                bad,
                format=format,
                integers=integers,
                missing=missing,
                progress=tell,
                part=part,
                block_bytes=block_bytes,
            )
        for chunk in chunks:
            rows += chunk.frame.height
            yield chunk
        rows += bad.count - known
        done += _size(file)
    if not rows:
        raise DataError(
            f"{str(path)!r} has no rows, only column names; a log needs at least one row"
        )


def find_format(path: Path, known: TextFormat | None = None) -> TextFormat | None:
    """Return how the text files of a log are written, like a known format if there is one.

    None for a log without text files.
    """
    texts = [file for file in _files(path, is_text=known is not None) if not _is_parquet(file)]
    if not texts:
        return None
    return sniff_format(texts[0]) if known is None else sniff_like(texts[0], known)


def column_names(path: Path, format: TextFormat | None = None) -> list[str]:
    """Return the names of the columns of a log, from its beginning."""
    file = _files(path, is_text=format is not None)[0]
    if _is_parquet(file):
        return parquet_names(file)
    with ByteStream(file) as stream:
        reader = TextReader(stream, format or sniff_format(file), block_bytes=1 << 20)
        return _distinct(file, reader.read_names())


def read_frame(
    frame: pl.DataFrame,
    columns: Sequence[str] | None,
    bad: BadRows,  # noqa: ARG001  # one call for all kinds of logs: a frame's rows have their structure
    *,
    missing: Sequence[str] = (),
    part: str = "",
) -> Iterator[RawChunk]:
    """Yield the rows of a frame.

    >>> frame = pl.DataFrame({"user": ["anna", "-"], "click": [1, 0]})
    >>> [chunk] = read_frame(frame, ["user"], BadRows(), missing=["-"])
    >>> chunk.frame["user"].to_list(), chunk.locate(0).text
    (['anna', None], 'user=anna')
    """
    names = frame.columns if columns is None else _chosen(None, frame.columns, columns)
    if not frame.height:
        raise DataError("the frame has no rows; a log needs at least one")
    for start in range(0, frame.height, CHUNK_ROWS):
        yield _frame_chunk(frame.select(names), start, missing, part)


def _frame_chunk(frame: pl.DataFrame, start: int, missing: Sequence[str], part: str) -> RawChunk:
    raw = frame.slice(start, CHUNK_ROWS)

    def locate(row: int) -> Place:
        return Place("", start + row + 1, values_as_text(raw, row), "row")

    return RawChunk(
        with_nulls(raw, missing), locate, part, lambda: start + 1 + np.arange(raw.height)
    )


def _read_text(
    file: Path,
    columns: Sequence[str] | None,
    bad: BadRows,
    *,
    format: TextFormat | None,
    integers: Collection[str],
    missing: Sequence[str],
    progress: Progress,
    part: str,
    block_bytes: int,
) -> Iterator[RawChunk]:
    with ByteStream(file) as stream:
        reader = TextReader(stream, format or sniff_format(file), block_bytes=block_bytes)
        names = _distinct(file, reader.read_names())
        wanted = names if columns is None else _chosen(file, names, columns)
        chosen = TextColumns(names=names, wanted=wanted, integers=integers, missing=missing)
        yield from reader.read_rows(chosen, bad, progress=progress, part=part)


def _chosen(file: Path | None, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the wanted columns, each once, or say which there is not."""
    for column in columns:
        if column not in names:
            where = f"{str(file)!r}" if file else "the frame"
            listed = ", ".join(map(repr, names))
            close = suggest(column, names)
            meant = f"{close} Its" if "?" in close else "; its"
            raise DataError(f"{where} has no column {column!r}{meant} columns: {listed}")
    return list(dict.fromkeys(columns))


def _distinct(file: Path, names: list[str]) -> list[str]:
    """Return the names of columns, which must differ; a column without one is numbered."""
    names = [name or f"column_{number}" for number, name in enumerate(names, 1)]
    repeated = [name for name, n in Counter(names).items() if n > 1]
    if repeated:
        raise DataError(
            f"{str(file)!r} has columns of the same name: {', '.join(map(repr, repeated))}; rename "
            "them, or give the names if the file has no header"
        )
    return names


def _files(path: Path, *, is_text: bool = False) -> list[Path]:
    """Return the files of a log: the one, or those of a folder by name."""
    if not path.is_dir():
        if not is_text:  # whoever says how a text is written knows that it is one
            _check_suffix(path)
        return [path]
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file()
        and not file.name.startswith((".", "_"))
        and _suffix(file) in TEXT + PARQUET
    )
    if not files:
        known = ", ".join(TEXT + PARQUET)
        raise DataError(f"the folder {str(path)!r} has no file of a log in it ({known})")
    return files


def _check_suffix(path: Path) -> None:
    if _suffix(path) not in TEXT + PARQUET:
        known = ", ".join(TEXT + PARQUET)
        raise DataError(
            f"cannot tell what {path.name!r} is from its name; known are {known}, "
            f"text also with {', '.join(COMPRESSED)} after it"
        )


def _suffix(path: Path) -> str:
    """Return what a file is by its name, compressed or not."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def _is_parquet(path: Path) -> bool:
    return _suffix(path) in PARQUET


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
