r"""Text logs: blocks of whole lines, parsed by PyArrow's CSV reader with every column as text.

PyArrow decides what the values of a row are. Four things it cannot do, so they are here:

    where a row is     it reports neither the line nor the text of a row that it accepts; here a block
                       is kept while its rows are in use, and a row is found by counting records
    stray quotes       it accepts a quote in the middle of a value, and an unclosed quote swallows the
                       rows up to the next quote; one regular expression matches a run of well-formed
                       records: where it stops, one line is malformed, and reading resumes at the next
    lone \r and \      it ends a row at a lone carriage return, and drops every backslash where a
                       quote may be escaped; both are replaced before it parses, and kept as values
    blank lines        it drops them; they are malformed rows, except at the end of the file

Only blocks with quotes, blank lines, invalid UTF-8 or ragged rows meet the regular expression, which
checks 45-150 MB/s.
"""

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, cast

import numpy as np
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # it comes without types
from numpy.typing import NDArray
from pyarrow import csv

from rarebit.data.log_schema import TextFormat
from rarebit.data.raw.chunks import BadRows, Place, RawChunk
from rarebit.errors import DataError

BLOCK_BYTES = 6 << 20
MAX_RECORD_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
PARSED_BYTES = 2 << 20
"""What PyArrow parses at once: longer than a line may be, and fast in the processor's cache."""
SNIFFED_BYTES = 1 << 16
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAGIC = {
    codecs.BOM_UTF16_LE: "written in UTF-16 or UTF-32; write it as UTF-8 first",
    codecs.BOM_UTF16_BE: "written in UTF-16; write it as UTF-8 first",
    b"\x1f\x8b": "compressed with gzip; let its name end in .csv.gz",
    b"BZh91AY&SY": "compressed with bzip2; let its name end in .csv.bz2",
    b"\xfd7zXZ": "compressed with xz; let its name end in .csv.xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; let its name end in .csv.zst",
    b"PAR1\x15": "a Parquet file; let its name end in .parquet",
    b"PK\x03\x04": "an archive or a spreadsheet; write it as CSV or Parquet first",
}
"""What files of other kinds begin with."""
SEPARATORS = (",", "\t", ";", "|")
CONTROLS = (31, 30, 29, 28, *range(1, 9), 11, 12, *range(14, 28), 127)
LONE_RETURN = re.compile(rb"\r(?!\n)")
VALID_UTF8 = re.compile(
    rb"(?:[\x00-\x7f]++|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}"
    rb"|\xf4[\x80-\x8f][\x80-\xbf]{2})*+"
)

# These reasons are stored in the manifests of prepared logs.
WRONG_COLUMNS = "wrong number of columns"
BLANK = "a blank line"
STRAY_QUOTE = "a quote in the middle of a value"
OPEN_QUOTE = "a quote that is never closed"
LONG_LINE = f"a line longer than {MAX_RECORD_BYTES:,} bytes"
NOT_UTF8 = "not valid utf-8"

Positions = NDArray[np.int64]


class ByteStream:
    """The bytes of one file, decompressed, in order.

    Damage in a compressed file shows where it is: whole bytes before it are returned first, and
    `failure` then has the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.failure = path, ""
        try:
            if path.is_dir():
                raise DataError(f"{str(path)!r} is a folder where a file was expected")
            self.disk = path.open("rb")
        except FileNotFoundError:
            raise DataError(
                f"{str(path)!r} does not exist; check the name and the folder"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
        self._before = self._state()
        self._file: IO[bytes] = self.disk
        match path.suffix.lower():
            case ".gz":
                self._file = cast("IO[bytes]", gzip.GzipFile(fileobj=self.disk))
            case ".bz2":
                self._file = bz2.BZ2File(self.disk)
            case ".xz":
                self._file = lzma.LZMAFile(self.disk)  # noqa: SIM115  # `__exit__` closes it
            case ".zst":
                stream = pa.CompressedInputStream(pa.PythonFile(self.disk, "r"), "zstd")
                self._file = cast("IO[bytes]", io.BufferedReader(stream))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.disk.close()

    @property
    def position(self) -> int:
        """Bytes of the file on disk read so far."""
        return self.disk.tell()

    @property
    def total(self) -> int:
        """Bytes of the file on disk."""
        return self._before[0]

    def read(self, size: int) -> tuple[bytes, bool]:
        """Return the next bytes, up to the end of a line if it is near, and whether they are the last."""
        pieces, left = [], size
        while left:
            whole = self._file is self.disk
            piece = self._read_piece(left if whole else min(left, PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        if not left and not pieces[-1].endswith(b"\n"):
            pieces.append(self._read_piece(PIECE_BYTES, to_line_end=True))
        return b"".join(pieces), bool(left)

    def _read_piece(self, size: int, *, to_line_end: bool = False) -> bytes:
        if self.failure:
            return b""
        try:
            if to_line_end:
                return self._file.readline(size)
            # read1 returns what is decompressed so far; read would lose it where damage follows
            return cast("gzip.GzipFile", self._file).read1(size)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            self.failure = f"the file is cut off or damaged ({str(error).rstrip('.')})"
        return b""

    def check_end(self, rows: int) -> None:
        """Raise if the file is damaged, or changed since it was opened; `rows` were whole."""
        self.check_unchanged()
        if self.failure:
            raise DataError(
                f"{str(self.path)!r}: {self.failure} after {rows:,} whole rows; get the file again"
            )

    def check_unchanged(self) -> None:
        """Raise if another program wrote to the file since it was opened."""
        after = self._state()
        if after != self._before:
            raise DataError(
                f"{str(self.path)!r} changed while it was read: {self._before[0]:,} bytes before, "
                f"{after[0]:,} after; read it again when nothing writes to it"
            )

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self.disk.fileno())
        return status.st_size, status.st_mtime_ns


class _Malformed(NamedTuple):
    """Bytes of a block that are no row."""

    start: int
    end: int
    reason: str
    detail: str = ""


class _Grammar:
    """What a well-formed record is, as regular expressions that never backtrack."""

    def __init__(self, format: TextFormat) -> None:
        s, q, e = map(re.escape, (format.separator, format.quote, format.escape))
        self.quote, self.escape = format.quote.encode(), format.escape.encode()
        value, loose = f"[^{s}\n]*+", r"[^\n]*+"
        if q:
            # outside of quotes an escape is a plain character, and so is the quote after it
            escaped_outside, escaped_inside = (f"|{e}[{q}{e}]?+", f"|{e}.") if e else ("", "")
            quoted = rf"{q}(?:[^{q}{e}]++{escaped_inside}|{q}{q})*+{q}(?={s}|\r?\n)"
            value = rf"(?:{quoted}|(?:[^{q}{e}{s}\n]++{escaped_outside})*+)"
            in_quotes = f"{q}(?:[^{q}{e}]++{escaped_inside})*+{q}"
            loose = rf"(?:[^{q}{e}\n]++{escaped_outside}|{in_quotes})*+"
        self._value, self._separator = value, s
        self.value = _compiled(rf"{value}(?:{s}|\r?\n)")
        self.record = _compiled(rf"{value}(?:{s}{value})*+\r?\n")
        """A record of any number of columns."""
        self.loose = _compiled(rf"{loose}\n")
        """Up to the end of a line outside of quotes, wherever the quotes are."""
        self.escaped = _compiled(f"{e}[{q}{e}]" if e else "(?!)")

    def records(self, columns: int) -> re.Pattern[bytes]:
        value, s = self._value, self._separator
        return _compiled(rf"(?:{value}(?:{s}{value}){{{columns - 1}}}\r?\n)*+")

    def find_malformed(
        self, block: bytes, columns: int, *, is_last: bool
    ) -> tuple[int, list[_Malformed]]:
        """Return where the whole records of some lines end, and the lines that are no record.

        Unless the block `is_last`, a quote that is open at its end may be closed in the next one.
        """
        records, position, found = self.records(columns), 0, []
        while True:
            position = cast("re.Match[bytes]", records.match(block, position)).end()
            if position == len(block):
                break
            end = block.index(b"\n", position) + 1
            limit = position + MAX_RECORD_BYTES + 1
            record = self.record.match(block, position, limit)
            if block[position:end] in (b"\n", b"\r\n"):
                reason = (BLANK, "")
            elif record is not None:
                number = len(self.value.findall(record[0]))
                detail = f", expected {columns}" if record.end() == end else " in several lines"
                reason = (WRONG_COLUMNS, f" ({number}{detail})")
            elif self.loose.match(block, position, limit):
                reason = (STRAY_QUOTE, "")
            elif is_last or len(block) - position > MAX_RECORD_BYTES:
                reason = (OPEN_QUOTE, "")
            else:
                break
            found.append(_Malformed(position, end, *reason))
            position = end
        return position, found

    def record_ends(self, text: bytes) -> Positions:
        """Return where the well-formed records of a text end: at newlines outside of quotes."""
        newlines, quotes = _find(text, b"\n"), self._quotes(text)
        ends: Positions = newlines[np.searchsorted(quotes, newlines) % 2 == 0] + 1
        return ends

    def _quotes(self, text: bytes) -> Positions:
        """Return the quotes of a text that are not escaped."""
        if not self.quote:
            return np.empty(0, np.int64)
        if self.escape and self.escape in text:
            text = self.escaped.sub(b"  ", text)
        return _find(text, self.quote)

    def with_doubled_quotes(self, text: bytes) -> bytes:
        """Return well-formed records without escapes: an escaped quote is written twice instead."""
        if not self.escape or self.escape not in text:
            return text
        before, hidden = (
            np.frombuffer(found, np.uint8) for found in (text, self.escaped.sub(b"  ", text))
        )
        escapes = np.flatnonzero(before != hidden)[::2]
        escapes = escapes[np.searchsorted(self._quotes(text), escapes) % 2 == 1]
        is_quote = before[escapes + 1] == ord(self.quote)
        after = before.copy()
        after[escapes[is_quote]] = ord(self.quote)
        return np.delete(after, escapes[~is_quote]).tobytes()


def _compiled(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), re.DOTALL)


def _find(text: bytes, byte: bytes) -> Positions:
    return np.flatnonzero(np.frombuffer(text, np.uint8) == ord(byte))


@dataclass(frozen=True, kw_only=True)
class _Parser:
    format: TextFormat
    names: Sequence[str]
    """All columns of the file."""
    wanted: Sequence[str]
    """The columns to return, in this order."""
    integers: Collection[str] = ()
    """Columns to return as integers, where all values of a block are integers."""
    missing: Sequence[str] = ()
    """Texts that mean a missing value, besides the empty one."""

    def parse(self, text: bytes) -> pl.DataFrame:
        """Return rows; raise PyArrow's error for one with the wrong number of columns."""
        mark = b""
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
            mark = next((bytes([byte]) for byte in CONTROLS if byte not in text), b"")
            if not mark:
                raise DataError("the file has every control character in it, so it is no text file")
            text = LONE_RETURN.sub(mark, text)
        if text.startswith(codecs.BOM_UTF8):  # PyArrow would drop it, and it is part of a value
            text = codecs.BOM_UTF8 + text
        nulls = ["", *(word.replace("\r", mark.decode()) for word in self.missing)]
        types = dict.fromkeys(self.wanted, pa.string())
        # PyArrow reads hexadecimal integers, which are no numbers anywhere else; one byte is found fast
        has_integers = bool(self.integers) and not (b"x" in text and b"0x" in text)
        has_integers = has_integers and not (b"X" in text and b"0X" in text)
        counts = {name: pa.int64() for name in self.wanted if name in self.integers}
        try:
            frame = self._read(text, types | counts if has_integers else types, nulls)
        except pa.ArrowInvalid:  # a text among the integers: the encoder checks it
            frame = self._read(text, types, nulls)
        if mark:
            texts = pl.selectors.string()
            frame = frame.with_columns(texts.str.replace_all(mark.decode(), "\r", literal=True))
        return frame

    def _read(self, text: bytes, types: dict[str, Any], nulls: list[str]) -> pl.DataFrame:
        has_quotes = bool(self.format.quote) and self.format.quote.encode() in text
        table = csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(
                use_threads=False,
                block_size=len(text) if has_quotes else PARSED_BYTES,
                column_names=self.names,
            ),
            parse_options=csv.ParseOptions(
                delimiter=self.format.separator,
                quote_char=self.format.quote or False,
                newlines_in_values=has_quotes,
                ignore_empty_lines=len(self.names) > 1,  # in a single column, it is a missing value
            ),
            convert_options=csv.ConvertOptions(
                check_utf8=False,  # it is checked before
                column_types=types,
                include_columns=self.wanted,
                null_values=nulls,
                strings_can_be_null=True,
            ),
        )
        return cast("pl.DataFrame", pl.from_arrow(table, rechunk=False))


@dataclass
class _Block:
    """Some whole lines of a file, and the malformed ones among them."""

    data: bytes
    first_line: int
    file: str
    grammar: _Grammar
    malformed: list[_Malformed] = field(default_factory=list)

    def good(self) -> bytes:
        """Return the well-formed records, without what is between them."""
        if not self.malformed:
            return self.data
        starts = [0, *(span.end for span in self.malformed)]
        ends = [*(span.start for span in self.malformed), len(self.data)]
        return b"".join(self.data[start:end] for start, end in zip(starts, ends, strict=True))

    def num_lines(self) -> int:
        """Return the number of lines, without the cost of finding them."""
        return int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == ord("\n")))

    @cached_property
    def newlines(self) -> Positions:
        return _find(self.data, b"\n")

    @cached_property
    def bounds(self) -> tuple[Positions, Positions]:
        """Where each well-formed record starts and ends."""
        ends = self.grammar.record_ends(self.good())
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        spans = np.array([span[:2] for span in self.malformed], np.int64).reshape(-1, 2)
        cut = np.concatenate([np.zeros(1, np.int64), (spans[:, 1] - spans[:, 0]).cumsum()])
        shift = cut[np.searchsorted(spans[:, 0] - cut[:-1], starts, side="right")]
        return starts + shift, ends + shift

    def skip_invalid_utf8(self) -> None:
        """Add well-formed records that are not UTF-8 to the malformed ones."""
        starts, ends = self.bounds
        text, position = self.good(), 0
        last = (ends - starts).cumsum()
        while (position := VALID_UTF8.match(text, position).end()) < len(text):  # type: ignore[union-attr]  # it matches
            record = int(np.searchsorted(last, position, side="right"))
            detail = f" (the byte 0x{text[position]:02x}; is the file latin-1?)"
            span = _Malformed(int(starts[record]), int(ends[record]), NOT_UTF8, detail)
            self.malformed.append(span)
            position = int(last[record])
        self.malformed.sort()
        del self.bounds

    def place(self, start: int, end: int) -> Place:
        line = self.first_line + int(np.searchsorted(self.newlines, start))
        text = self.data[start : min(end, start + MAX_RECORD_BYTES)]
        return Place(self.file, line, _decoded(text))

    def locate(self, row: int) -> Place:
        starts, ends = self.bounds
        return self.place(int(starts[row]), int(ends[row]))

    def numbers(self) -> Positions:
        return self.first_line + np.searchsorted(self.newlines, self.bounds[0])


def _decoded(line: bytes) -> str:
    """Return the text of a record without its line end."""
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    return line.decode("utf-8", errors="backslashreplace")


class TextReader:
    """Reads one text file from its beginning to its end, once."""

    def __init__(
        self, stream: ByteStream, format: TextFormat, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.stream, self.format, self.block_bytes = stream, format, block_bytes
        self.rows = 0
        """Records read so far, malformed ones included."""
        self._grammar = _Grammar(format)
        self._rest, self._is_final, self._line = b"", False, 1
        self._read_more()
        self._rest = self._rest.removeprefix(codecs.BOM_UTF8)

    def read_names(self) -> list[str]:
        """Return the names of the columns; call it once, before reading rows."""
        path, names = str(self.stream.path), self.format.names
        if not self._rest:
            if self.stream.failure:
                self.stream.check_end(self.rows)
            raise DataError(f"{path!r} is empty; a log needs at least one row")
        values, end = self._first_record()
        if not values and (self.format.header or not names):
            raise DataError(
                f"the first line of {path!r} is not one of column names or values: it has a stray "
                f"quote, is not valid {self.format.encoding}, or is too long; check the file's format"
            )
        if not self.format.header:
            return list(names) or [f"column_{i + 1}" for i in range(len(values))]
        self._line += self._rest.count(b"\n", 0, end)
        self._rest = self._rest[end:]
        return values

    def _first_record(self) -> tuple[list[str], int]:
        """Return the values of the first record and where it ends; none if it is malformed."""
        start = self._rest[: MAX_RECORD_BYTES + 1]
        if self._is_final and not start.endswith(b"\n"):
            start += b"\n"
        found = self._grammar.record.match(start)
        if found is None or found.end() > MAX_RECORD_BYTES + 1 or not _is_utf8(found[0]):
            return [], 0
        names = [str(i) for i in range(len(self._grammar.value.findall(found[0])))]
        parser = _Parser(format=self.format, names=names, wanted=names)
        frame = parser.parse(self._grammar.with_doubled_quotes(found[0]))
        return [value or "" for value in frame.row(0)], found.end()

    def read_rows(
        self,
        names: Sequence[str],
        wanted: Sequence[str],
        bad: BadRows,
        *,
        integers: Collection[str] = (),
        missing: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[RawChunk]:
        """Yield the wanted columns of all rows, block by block; raise if the file is damaged."""
        parser = _Parser(
            format=self.format, names=names, wanted=wanted, integers=integers, missing=missing
        )
        while True:
            is_whole = self._is_final and not self.stream.failure
            if is_whole and self._rest and not self._rest.endswith(b"\n"):
                self._rest += b"\n"
            end, before_long_line = _end_of_short_lines(self._rest)
            if before_long_line and not end:
                self._skip_line(bad)
                continue
            is_huge = len(self._rest) > self.block_bytes + MAX_RECORD_BYTES
            if len(names) > 1 and (self._is_final or not (before_long_line or is_huge)):
                # at the end of the file, blank lines mean nothing; elsewhere they are malformed rows
                end = _end_without_blank_lines(self._rest, end)
            is_last = before_long_line or is_whole
            if end:
                chunk = self._read_block(end, parser, bad, is_last=is_last)
                if chunk is not None:
                    yield chunk
            if before_long_line:
                continue
            if progress is not None:
                progress(self.stream.position, self.stream.total)
            if self._is_final:
                break
            self._read_more()
        self.stream.check_end(self.rows)

    def _read_more(self) -> None:
        data, self._is_final = self.stream.read(self.block_bytes)
        if self._line == 1 and not self._rest and self.format.header:
            _refuse_binary(self.stream.path, data)
        if self.format.encoding == "latin-1" and not data.isascii():
            data = data.decode("latin-1").encode()
        self._rest = self._rest + data if self._rest else data

    def _skip_line(self, bad: BadRows) -> None:
        """Skip a line that is too long, however long it is; only its beginning is kept."""
        start = self._rest[:MAX_RECORD_BYTES]
        while b"\n" not in self._rest and not self._is_final:
            self._rest = b""
            self._read_more()
        self._rest = self._rest.partition(b"\n")[2]
        bad.add(Place(self.stream.path.name, self._line, _decoded(start)), LONG_LINE)
        self._line += 1
        self.rows += 1

    def _read_block(
        self, end: int, parser: _Parser, bad: BadRows, *, is_last: bool
    ) -> RawChunk | None:
        """Take lines from what has been read, up to `end`, and return their rows."""
        data, self._rest = self._rest[:end], self._rest[end:]
        block = _Block(data, self._line, self.stream.path.name, self._grammar)
        frame = None
        quoted = bool(self._grammar.quote) and self._grammar.quote in data
        if not quoted and _is_utf8(data):
            with suppress(pa.ArrowInvalid):
                frame = parser.parse(data)
        if frame is None or frame.height != block.num_lines():  # a line is no record, or blank
            columns = len(parser.names)
            used, malformed = self._grammar.find_malformed(data, columns, is_last=is_last)
            if used < len(data):
                self._rest, data = data[used:] + self._rest, data[:used]
            block = _Block(data, self._line, block.file, self._grammar, malformed)
            if not _is_utf8(data):
                block.skip_invalid_utf8()
            good = self._grammar.with_doubled_quotes(block.good())
            frame = parser.parse(good) if good else pl.DataFrame()
        for span in block.malformed:
            bad.add(block.place(span.start, span.end), span.reason, span.detail)
        self._line += block.num_lines()
        self.rows += frame.height + len(block.malformed)
        return RawChunk(frame, block.locate, number_rows=block.numbers) if frame.height else None


def _end_of_short_lines(data: bytes) -> tuple[int, bool]:
    """Return where the lines before the first one that is too long end, and whether there is one."""
    position = 0
    while end := data.rfind(b"\n", position, position + MAX_RECORD_BYTES + 1) + 1:
        position = end
    return position, len(data) - position > MAX_RECORD_BYTES


def _end_without_blank_lines(data: bytes, end: int) -> int:
    """Return where some lines that stop at `end` stop without the blank ones at their end."""
    while data.endswith((b"\n\n", b"\n\r\n"), 0, end) or data[: min(end, 3)] in (b"\n", b"\r\n"):
        end -= 2 if data.endswith(b"\r\n", 0, end) else 1
    return end


def _refuse_binary(path: Path, start: bytes) -> None:
    """Raise for a file that begins as no text with a header does."""
    what = next((what for magic, what in MAGIC.items() if start.startswith(magic)), "")
    first_line, newline, _ = start[:MAX_RECORD_BYTES].partition(b"\n")
    if not what and b"\0" in first_line:
        what = "no text, or UTF-16: its first line has bytes of 0; write it as UTF-8 first"
    if not what and not newline and first_line.count(b"\r") > 1:
        what = "text with a lone carriage return after each line; write it with line feeds first"
    if what:
        raise DataError(f"{str(path)!r} is {what}")


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def sniff_format(path: Path) -> TextFormat:
    """Guess from its beginning how a text file is written, and assume that it has a header.

    The separator is the one that gives most lines as many columns as the header, more than one.
    Quotes are plain characters, and a backslash escapes a quote, only where that fits more lines.
    """
    with ByteStream(path) as stream:
        start, whole = stream.read(SNIFFED_BYTES)
    _refuse_binary(path, start)
    start = start.removeprefix(codecs.BOM_UTF8)
    if not whole:
        start = start[: start.rfind(b"\n") + 1] or start
    # one broken line does not make a file latin-1: it is a malformed row
    lines = [line for line in start.split(b"\n") if not line.isascii()]
    is_latin = 2 * sum(not _is_utf8(line) for line in lines) > len(lines)
    encoding: Literal["utf-8", "latin-1"] = "latin-1" if is_latin else "utf-8"
    quotings = [('"', "")]
    if b'"' in start:
        backslash = [('"', "\\")] if b'\\"' in start else []
        quotings += [*backslash, ("", "")]
    best, best_fit = TextFormat(encoding=encoding), (0.0, 1)
    for separator in SEPARATORS:
        for quote, escape in quotings:
            guess = TextFormat(separator=separator, quote=quote, escape=escape, encoding=encoding)
            fit = _fit(start, guess)
            if fit > best_fit:
                best, best_fit = guess, fit
    return best


def sniff_like(path: Path, known: TextFormat) -> TextFormat:
    """Guess how a text file is written that another program wrote after one of a known format.

    Quotes keep their meaning: guessed again, they could turn the same text into another value.
    """
    if not known.header:
        return known
    return replace(sniff_format(path), quote=known.quote, escape=known.escape)


def _fit(start: bytes, guess: TextFormat) -> tuple[float, int]:
    """Return the share of lines with as many columns as the first, and how many: (0, 1) if not more.

    A share up to a half means nothing: another character separates the values then.
    """
    grammar, counts, position = _Grammar(guess), [], 0
    text = start if start.endswith(b"\n") else start + b"\n"
    text = text[: _end_without_blank_lines(text, len(text))] or text
    while position < len(text):
        record = grammar.record.match(text, position)
        counts.append(len(grammar.value.findall(record[0])) if record else 0)
        position = record.end() if record else text.index(b"\n", position) + 1
    columns, share = counts[0], round(counts.count(counts[0]) / len(counts), 2)
    return (share, columns) if columns > 1 and share > 0.5 else (0.0, 1)
