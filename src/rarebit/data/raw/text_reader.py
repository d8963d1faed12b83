"""Text files as chunks: blocks of bytes, cut at the end of a record, parsed by Polars.

A block without quotes, or with none that matter, needs two counts to be sure of its structure; any
other is divided record by record first. Polars gets whole rows of the right number of columns and no
quotes, so that what it takes for a row and a value is what the count and the division took for one.
"""

import codecs
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.raw.byte_stream import ByteStream
from rarebit.data.raw.csv_structure import (
    LINE_FEED,
    LONG_LINE,
    MAX_RECORD_BYTES,
    BadSpan,
    end_without_blank_lines,
    first_record,
    has_long_line,
    is_utf8,
    split_records,
    without_quotes,
)
from rarebit.data.raw.rows import BadRows, Place, RawChunk
from rarebit.data.raw.text import TextFormat
from rarebit.errors import DataError

__all__ = ["BLOCK_BYTES", "TextColumns", "TextReader"]

BLOCK_BYTES = 6 << 20
PIECE = 1 << 18
BYTE_ORDER_MARK = codecs.BOM_UTF8


@dataclass(frozen=True, kw_only=True)
class TextColumns:
    """Which columns of a text file are wanted, and as what."""

    names: list[str]
    """All columns of the file."""
    wanted: list[str]
    """Those to return, in this order."""
    integers: Collection[str] = ()
    """Those to return as integers, where all values of a block are."""
    missing: Sequence[str] = ()
    """Texts that stand for a missing value, beside the empty one."""

    @property
    def are_all_wanted(self) -> bool:
        """Whether every column of the file is returned."""
        return len(self.wanted) == len(self.names)

    def parse(self, text: bytes, separator: str, newline: str = "\n") -> pl.DataFrame:
        """Return whole rows without quotes as a frame."""
        if self.integers:
            try:
                return self._parse(text, separator, newline, self.integers)
            except pl.exceptions.PolarsError:
                pass  # a text among the numbers: whoever asked for them has to look at it
        return self._parse(text, separator, newline, ())

    def _parse(
        self, text: bytes, separator: str, newline: str, integers: Collection[str]
    ) -> pl.DataFrame:
        if text.startswith(BYTE_ORDER_MARK):
            # Polars takes the first one away, and this one is part of a value
            text = BYTE_ORDER_MARK + text
        schema: dict[str, type[pl.DataType]] = {
            f"column_{number}": pl.Int64 if name in integers else pl.String
            for number, name in enumerate(self.names, 1)
        }
        positions = [self.names.index(name) for name in self.wanted]
        frame = pl.read_csv(
            text,
            has_header=False,
            schema=schema,
            columns=None if self.are_all_wanted else positions,
            separator=separator,
            eol_char=newline,
            quote_char=None,
            null_values=list(self.missing) or None,
        )
        if self.are_all_wanted:
            frame.columns = self.names
            return frame.select(self.wanted)
        frame.columns = self.wanted
        return frame


@dataclass
class TextReader:
    """Reads one text file from its beginning to its end, once."""

    stream: ByteStream
    format: TextFormat
    block_bytes: int = BLOCK_BYTES
    rows: int = 0
    """Records met so far, good and bad."""
    _rest: bytes = field(default=b"", init=False)
    _is_final: bool = field(default=False, init=False)
    _line: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self._read_more()
        self._rest = self._rest.removeprefix(BYTE_ORDER_MARK)

    def read_names(self) -> list[str]:
        """Return the names of the columns; called once, before the rows."""
        path = str(self.stream.path)
        if not self._rest and self.stream.failure:
            self._check_end()
        if not self._rest:
            raise DataError(f"{path!r} is empty; a log needs at least one row")
        start = self._rest[: MAX_RECORD_BYTES + 1]
        if self._is_final and not start.endswith(b"\n"):
            start += b"\n"
        first = first_record(start, self.format.marks)
        if first is None and (self.format.header or not self.format.names):
            raise DataError(
                f"the first line of {path!r} is not one of column names or values: it has a stray "
                f"quote, is not valid {self.format.encoding}, or is too long; check the file's format"
            )
        if first is None or not self.format.header:
            found = [] if first is None else first[0]
            return list(self.format.names) or [f"column_{i + 1}" for i in range(len(found))]
        names, end = first
        self._line += start.count(b"\n", 0, end)
        self._rest = self._rest[end:]
        return names

    def read_rows(
        self,
        columns: TextColumns,
        bad: BadRows,
        *,
        progress: Callable[[int, int], None] | None = None,
        part: str = "",
    ) -> Iterator[RawChunk]:
        """Yield the rows, block by block, and check at the end that the file was whole."""
        while True:
            chunk = self._next_chunk(columns, bad, part)
            if chunk is not None:
                self.rows += chunk.frame.height
                yield chunk
            if progress is not None:
                progress(self.stream.position, self.stream.total)
            if self._is_final:
                break
            if len(self._rest) > MAX_RECORD_BYTES and b"\n" not in self._rest:
                self._skip_line(bad)
            self._read_more()
        self._check_end()

    def _read_more(self) -> None:
        data, self._is_final = self.stream.read(self.block_bytes)
        if self.format.encoding == "latin-1" and not data.isascii():
            data = data.decode("latin-1").encode()
        self._rest = self._rest + data if self._rest else data

    def _skip_line(self, bad: BadRows) -> None:
        """Give up a line that is too long, however long it is, keeping only its beginning."""
        start = self._rest[:MAX_RECORD_BYTES]
        while b"\n" not in self._rest and not self._is_final:
            self._rest = b""
            self._read_more()
        self._rest = self._rest.partition(b"\n")[2]
        bad.add(Place(self.stream.path.name, self._line, _decoded(start)), LONG_LINE)
        self._line += 1
        self.rows += 1

    def _next_chunk(self, columns: TextColumns, bad: BadRows, part: str) -> RawChunk | None:
        """Return the whole rows of what has been read; what is left waits for more."""
        block, is_last = self._whole_lines(len(columns.names))
        if not block:
            return None
        self._rest = self._rest[len(block) :]  # not held twice while it is parsed
        places = _Places(block, self._line, self.stream.path.name)
        frame = self._parse_plain(block, columns)
        if frame is not None:
            used, lines = len(block), frame.height
        else:
            marks = self.format.marks
            records = split_records(block, marks, len(columns.names), final=is_last)
            used, lines = records.used, block.count(b"\n", 0, records.used)
            places.bounds = records.bounds
            self._set_aside(records.bad, places, bad)
            frame = columns.parse(records.text, records.separator, records.newline)
            assert frame.height == len(places.bounds[0])
        self._line += lines
        if used < len(block):
            self._rest = block[used:] + self._rest
        return RawChunk(frame, places.find, part, places.numbers) if frame.height else None

    def _whole_lines(self, columns: int) -> tuple[bytes, bool]:
        """Return what has been read up to the end of a line, and whether no record goes on after it."""
        if self._is_final and not self.stream.failure and not self._rest.endswith(b"\n"):
            self._rest += b"\n" if self._rest else b""
        end = self._rest.rfind(b"\n") + 1
        # quotes around a line that is too long do not make it a value
        before_long_line = len(self._rest) - end > MAX_RECORD_BYTES
        are_too_many = len(self._rest) > self.block_bytes + MAX_RECORD_BYTES
        if columns > 1 and (self._is_final or not (before_long_line or are_too_many)):
            # at the end of the file, blank lines are nothing; elsewhere they are bad rows
            end = end_without_blank_lines(self._rest, end)
        is_last = (self._is_final and not self.stream.failure) or before_long_line
        return self._rest[:end], is_last

    def _parse_plain(self, block: bytes, columns: TextColumns) -> pl.DataFrame | None:
        """Return a block as a frame, fast; none where anything about it is not as usual."""
        if has_long_line(block) or not is_utf8(block):
            return None
        if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
            return None  # Polars would take it from the end of a value
        quote = self.format.quote.encode()
        if quote and quote in block:
            plain = without_quotes(block, self.format.marks)
            if plain is None:
                return None
            block = plain
        values = np.frombuffer(block, np.uint8)
        separator = ord(self.format.separator)
        rows = _count(values, LINE_FEED)
        if _count(values, separator) != rows * (len(columns.names) - 1):
            return None
        if not columns.are_all_wanted and not _is_even(values, separator, rows):
            return None
        try:
            # with all columns wanted, Polars itself refuses a row that has too many
            frame = columns.parse(block, self.format.separator)
        except pl.exceptions.PolarsError:
            return None
        return frame if frame.height == rows else None

    def _set_aside(self, spans: Sequence[BadSpan], places: "_Places", bad: BadRows) -> None:
        for span in spans:
            place = places.of_span(span.start, min(span.end, span.start + MAX_RECORD_BYTES))
            bad.add(place, span.reason, span.detail)
        self.rows += len(spans)

    def _check_end(self) -> None:
        """Raise where the file was damaged, or changed in the meantime."""
        self.stream.check_unchanged()
        if self.stream.failure:
            raise DataError(
                f"{str(self.stream.path)!r}: {self.stream.failure} after {self.rows:,} whole rows; "
                "get the file again"
            )


@dataclass
class _Places:
    """Where the rows of a block are in their file."""

    block: bytes
    first_line: int
    file: str
    bounds: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Where each row starts and ends; none if each is a line."""

    @cached_property
    def newlines(self) -> NDArray[np.int64]:
        """Where the lines of the block end."""
        return np.flatnonzero(np.frombuffer(self.block, np.uint8) == LINE_FEED)

    def find(self, row: int) -> Place:
        """Return the place of a row of the block's frame."""
        if self.bounds is None:
            start = int(self.newlines[row - 1]) + 1 if row else 0
            return self.of_span(start, int(self.newlines[row]))
        starts, ends = self.bounds
        return self.of_span(int(starts[row]), int(ends[row]))

    def numbers(self) -> NDArray[np.int64]:
        """Return the line of every row."""
        if self.bounds is None:
            return self.first_line + np.arange(len(self.newlines))
        return self.first_line + np.searchsorted(self.newlines, self.bounds[0])

    def of_span(self, start: int, end: int) -> Place:
        """Return the place of some bytes of the block."""
        line = self.first_line + int(np.searchsorted(self.newlines, start))
        return Place(self.file, line, _decoded(self.block[start:end]))


def _count(values: NDArray[np.uint8], byte: int) -> int:
    """Return how often a byte occurs, looking at a little at a time: the comparison takes memory."""
    pieces = range(0, len(values), PIECE)
    return sum(int(np.count_nonzero(values[i : i + PIECE] == byte)) for i in pieces)


def _is_even(values: NDArray[np.uint8], separator: int, rows: int) -> bool:
    """Return whether every row has as many separators as the others."""
    ends = values[(values == separator) | (values == LINE_FEED)].reshape(rows, -1)
    return bool((ends[:, -1] == LINE_FEED).all())


def _decoded(line: bytes) -> str:
    """Return the text of a record without the end of its line."""
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    return line.decode("utf-8", errors="backslashreplace")
