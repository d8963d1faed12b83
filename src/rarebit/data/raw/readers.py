"""Any log as chunks of rows: text files, NDJSON and Parquet files, folders of them, and frames in memory.

PyArrow reads Parquet files in buffers of 1 MiB per column, so memory is bounded by a chunk, whatever the
size of the file and its row groups. Polars' own batches hold whole row groups: on 5 M rows and 10
columns in one row group they take 505 MB, this takes 137 MB.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # it comes without types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it comes without types
from numpy.typing import NDArray

from rarebit.data.log_schema import TextFormat
from rarebit.data.raw.chunks import BadRows, Place, RawChunk, shortened
from rarebit.data.raw.text_files import (
    BLOCK_BYTES,
    COMPRESSED,
    ByteStream,
    TextReader,
    sniff_format,
    sniff_like,
)
from rarebit.errors import DataError
from rarebit.settings import suggest

CHUNK_ROWS = 100_000
MOST_LISTED = 40
BUFFER_BYTES = 1 << 20
TEXT = (".csv", ".tsv", ".txt", ".dat")
NDJSON = (".ndjson", ".jsonl")
PARQUET = (".parquet", ".pq")

FileProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in total, both on disk."""


def read_raw(
    path: Path,
    columns: Sequence[str] | None,
    bad: BadRows,
    *,
    format: TextFormat | None = None,
    integers: Collection[str] = (),
    missing: Sequence[str] = (),
    progress: FileProgress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RawChunk]:
    """Yield the rows of a log in order, in memory that does not grow with the log.

    The suffix decides the type: .csv, .tsv, .txt and .dat are text, .ndjson and .jsonl have a JSON object on each line, all
    of them also with .gz, .bz2, .xz or .zst after it; .parquet and .pq are Parquet. A folder is its files in the order of their names.

    `columns` are those to read, in this order, or all. Malformed rows go to `bad`: every record of the
    files is either yielded or there. `format` describes text files; it is guessed if not given.
    `integers` are text columns to return as integers, in blocks where all values are integers.
    """
    files, rows, done = log_files(path, is_text=format is not None), 0, 0
    total = sum(_size(file) for file in files)
    for file in files:
        known = bad.count

        def report(position: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + position, total)

        with ByteStream(file) as stream:
            if _is_parquet(file):
                chunks = _read_parquet(stream, columns, missing, report)
            elif _suffix(file) in NDJSON:
                chunks = _read_ndjson(
                    stream, columns, bad, missing=missing, progress=report, block_bytes=block_bytes
                )
            else:
                written = format or sniff_format(file)
                reader = TextReader(stream, written, block_bytes=block_bytes)
                names = _distinct(file, reader.read_names())
                wanted = names if columns is None else _chosen(file, names, columns)
                chunks = reader.read_rows(
                    names, wanted, bad, integers=integers, missing=missing, progress=report
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
    """Return how the text files of a log are written, close to a known format if there is one.

    None for a log without text files.
    """
    files = log_files(path, is_text=known is not None)
    texts = [file for file in files if _suffix(file) not in NDJSON + PARQUET]
    if not texts:
        return None
    return sniff_format(texts[0]) if known is None else sniff_like(texts[0], known)


def column_names(path: Path, format: TextFormat | None = None) -> list[str]:
    """Return the names of the columns of a log, from its first file."""
    file = log_files(path, is_text=format is not None)[0]
    with ByteStream(file) as stream:
        if _is_parquet(file):
            return list(_open_parquet(stream).schema_arrow.names)
        if _suffix(file) in NDJSON:
            return next(_read_ndjson(stream, None, BadRows())).frame.columns
        reader = TextReader(stream, format or sniff_format(file), block_bytes=1 << 20)
        return _distinct(file, reader.read_names())


def as_polars(frame: Any) -> pl.DataFrame:
    """Return a Polars, pandas or PyArrow frame, or a mapping of arrays, as a Polars frame."""
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    if isinstance(frame, pl.DataFrame):
        return frame.fill_nan(None)
    for axis, mend in (
        ("columns", "frame.columns.map('_'.join)"),
        ("index", "frame.reset_index()"),
    ):
        if getattr(getattr(frame, axis, None), "nlevels", 1) > 1:
            raise DataError(f"the frame has a MultiIndex as its {axis}; make it plain: {mend}")
    try:
        if isinstance(frame, Mapping):
            return pl.DataFrame(dict(frame)).fill_nan(None)
        if type(frame).__module__.partition(".")[0] in ("pandas", "pyarrow"):
            return pl.DataFrame(frame, nan_to_null=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, ImportError) as error:
        raise DataError(f"the frame cannot be read: {error}") from None
    raise DataError(
        f"expected a Polars or pandas frame, or a mapping of arrays, got {type(frame).__name__}"
    )


def read_frame(
    frame: pl.DataFrame, columns: Sequence[str] | None, *, missing: Sequence[str] = ()
) -> Iterator[RawChunk]:
    """Yield the rows of a frame."""
    names = frame.columns if columns is None else _chosen(None, frame.columns, columns)
    if not frame.height:
        raise DataError("the frame has no rows; a log needs at least one")
    for start in range(0, frame.height, CHUNK_ROWS):
        yield _typed_chunk(frame.select(names).slice(start, CHUNK_ROWS), "", start, missing)


def _read_parquet(
    stream: ByteStream,
    columns: Sequence[str] | None,
    missing: Sequence[str],
    progress: FileProgress,
) -> Iterator[RawChunk]:
    file, path = _open_parquet(stream), stream.path
    schema = file.schema_arrow
    names = schema.names if columns is None else _chosen(path, schema.names, columns)
    for name in names:
        if _has_long_decimals(schema.field(name).type):  # Polars panics at them
            raise DataError(
                f"the column {name!r} of {str(path)!r} holds {schema.field(name).type}: decimals of "
                "more than 38 digits are not read; write it as text or as floats, or without the column"
            )
    batches, start = file.iter_batches(batch_size=CHUNK_ROWS, columns=names), 0
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None
        if batch is None:
            break
        frame = pl.DataFrame(batch).select(names)
        yield _typed_chunk(frame, path.name, start, missing)
        start += frame.height
        progress(stream.total * start // file.metadata.num_rows, stream.total)
    stream.check_unchanged()


def _read_ndjson(
    stream: ByteStream,
    columns: Sequence[str] | None,
    bad: BadRows,
    *,
    missing: Sequence[str] = (),
    progress: FileProgress | None = None,
    block_bytes: int = 1 << 20,
) -> Iterator[RawChunk]:
    """Yield the rows of a file with a JSON object on each line; a key that a line lacks is a missing value."""
    path, first, rest, rows, is_last = stream.path, 1, b"", 0, False
    is_known = False  # whether the columns were found in a row
    while not is_last:
        data, is_last = stream.read(block_bytes)
        data = rest + data
        end = len(data) if is_last and not stream.failure else data.rfind(b"\n") + 1
        data, rest = data[:end], data[end:]
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        numbers = np.array([n for n, line in enumerate(lines) if line.strip()], np.int64)
        frame = _objects(data)
        if frame is None or frame.height != len(numbers):
            before = len(numbers)
            frame, numbers = _good_objects(path.name, first, lines, numbers, bad)
            rows += before - len(numbers)
            if frame is None or frame.height != len(numbers):
                raise DataError(
                    f"the lines {first:,} to {first + len(lines) - 1:,} of {str(path)!r} do not agree on what a column "
                    "holds: a value in one, an object or a list in another; write one type for each"
                )
        if frame.height:
            names = frame.columns if columns is None else columns
            if not is_known and columns is not None:
                _chosen(path, frame.columns, columns)  # a typing mistake, not a key that is rare
            is_known = True
            frame = frame.select(
                pl.col(name) if name in frame.columns else pl.lit(None).alias(name)
                for name in dict.fromkeys(names)
            )
            yield _json_chunk(_without_empty(frame, missing), path.name, first, lines, numbers)
        rows, first = rows + len(numbers), first + len(lines)
        if progress is not None:
            progress(stream.position, stream.total)
    stream.check_end(rows)


def _good_objects(
    file: str, first: int, lines: Sequence[bytes], numbers: NDArray[np.int64], bad: BadRows
) -> tuple[pl.DataFrame | None, NDArray[np.int64]]:
    """Return the rows and the places of the lines that are JSON objects; the others go to `bad`."""
    frame: pl.DataFrame | None = None
    for why in (_why_no_object, _why_not_read):  # the second one is slow, and seldom needed
        reasons = {number: why(lines[number]) for number in numbers.tolist()}
        for number, reason in reasons.items():
            if reason:
                bad.add(Place(file, first + number, lines[number].decode(errors="replace")), reason)
        numbers = np.array([n for n, reason in reasons.items() if not reason], np.int64)
        frame = _objects(b"\n".join(lines[number] for number in numbers))
        if frame is not None:
            break
    return frame, numbers


def _objects(lines: bytes) -> pl.DataFrame | None:
    """Return JSON objects as rows; None if a line is none, or they do not agree on types."""
    if not lines.strip():
        return pl.DataFrame()
    try:
        return pl.read_ndjson(BytesIO(lines), infer_schema_length=None)
    except pl.exceptions.PolarsError:
        return None


def _why_no_object(line: bytes) -> str:
    """Return why a line is no JSON object; nothing if it is one."""
    try:
        found = json.loads(line)
    except ValueError:  # not UTF-8, too
        return "not valid JSON"
    return "" if isinstance(found, dict) else "no JSON object"


def _why_not_read(line: bytes) -> str:
    """Return why a JSON object is not read; nothing if it is."""
    return "" if _objects(line) is not None else "a number that is too large"


def _json_chunk(
    frame: pl.DataFrame, file: str, first: int, lines: Sequence[bytes], numbers: NDArray[np.int64]
) -> RawChunk:
    """Return rows that know their lines: `numbers` are places in `lines`, whose first one is line `first`."""

    def locate(row: int) -> Place:
        number = int(numbers[row])
        return Place(file, first + number, lines[number].decode(errors="replace"))

    return RawChunk(frame, locate, number_rows=lambda: first + numbers)


def _without_empty(frame: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return rows in which empty texts and words for missing values are null."""
    texts = pl.selectors.string()
    return frame.with_columns(pl.when(~texts.is_in(["", *missing])).then(texts))


def _open_parquet(stream: ByteStream) -> Any:
    if not stream.total:
        raise DataError(f"{str(stream.path)!r} is empty; a log needs at least one row")
    try:
        file = pq.ParquetFile(stream.disk, buffer_size=BUFFER_BYTES, pre_buffer=False)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _damaged(stream.path, error) from None
    _refuse_repeated(stream.path, names, "write it again with a distinct name for each")
    return file


def _has_long_decimals(dtype: Any) -> bool:
    inner = (dtype.field(number).type for number in range(dtype.num_fields))
    return bool(pa.types.is_decimal256(dtype)) or any(map(_has_long_decimals, inner))


def _damaged(path: Path, error: Exception) -> DataError:
    what = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{str(path)!r} is no Parquet file, or is damaged: {what}; get the file again")


def _typed_chunk(frame: pl.DataFrame, name: str, start: int, missing: Sequence[str]) -> RawChunk:
    """Return rows that keep their types; empty texts and words for missing values become null."""

    def locate(row: int) -> Place:
        values = frame.row(row, named=True).items()
        text = ", ".join(f"{column}={value}" for column, value in values)
        return Place(name, start + row + 1, text, "row")

    rows = _without_empty(frame, missing)
    return RawChunk(rows, locate, number_rows=lambda: start + 1 + np.arange(frame.height))


def _chosen(file: Path | None, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the wanted columns, each once; raise for one that does not exist."""
    for column in columns:
        if column not in names:
            where = f"{str(file)!r}" if file else "the frame"
            listed = _listed(names)
            close = suggest(column, names)
            meant = f"{close} Its" if "?" in close else "; its"
            raise DataError(f"{where} has no column {column!r}{meant} columns: {listed}")
    return list(dict.fromkeys(columns))


def _distinct(file: Path, names: list[str]) -> list[str]:
    """Return distinct names of columns; a column without one is numbered."""
    names = [name or f"column_{number}" for number, name in enumerate(names, 1)]
    _refuse_repeated(file, names, "rename them, or give the names if the file has no header")
    return names


def _refuse_repeated(file: Path, names: Sequence[str], hint: str) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{str(file)!r} has columns of the same name: {_listed(repeated)}; {hint}")


def _listed(names: Sequence[str]) -> str:
    """Return the first names for a message: a file may have thousands, and long ones."""
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(repr(shortened(name)) for name in names[:MOST_LISTED]) + more


def log_files(path: Path, *, is_text: bool = False) -> list[Path]:
    """Return the files of a log: one, or those of a folder by name."""
    known = TEXT + NDJSON + PARQUET
    if not path.is_dir():
        if not is_text and _suffix(path) not in known:  # a given format means that it is text
            raise DataError(
                f"cannot tell what {path.name!r} is from its name; known are {', '.join(known)}, "
                f"all but Parquet also with {', '.join(COMPRESSED)} after it"
            )
        return [path]
    files = [
        file
        for file in sorted(path.iterdir())
        if file.is_file() and not file.name.startswith((".", "_")) and _suffix(file) in known
    ]
    if not files:
        raise DataError(f"the folder {str(path)!r} has no file of a log in it ({', '.join(known)})")
    return files


def _suffix(path: Path) -> str:
    """Return the suffix that tells the type of a file, compressed or not."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def _is_parquet(path: Path) -> bool:
    return _suffix(path) in PARQUET


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
