"""Which bytes of a text file are records: exactly, quotes and all, by a few passes of numpy.

A record ends at the end of a line that is not inside quotes. A value may stand in quotes, and then a
quote inside it is written twice or after an escape; a quote anywhere else is a mistake in the file.
Where a record is a mistake, only its first line is given up and reading goes on at the next one, so
that a stray quote costs a few lines and never the rest of the file.

    good rows    written again without quotes, with two control characters the block does not have as
                 separator and end of row: what is left to parse has one meaning only
    bad rows     spans of the block, each with its reason
    the rest     the beginning of a record that ends in the next block
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rarebit.errors import DataError

__all__ = [
    "LINE_FEED",
    "LONG_LINE",
    "MAX_RECORD_BYTES",
    "BadSpan",
    "Marks",
    "Records",
    "count_columns",
    "end_without_blank_lines",
    "first_record",
    "has_long_line",
    "is_utf8",
    "split_records",
    "without_quotes",
]

MAX_RECORD_BYTES = 1 << 20
SMALL_WINDOW = 1 << 12
LINE_FEED, CARRIAGE_RETURN = 10, 13

WRONG_COLUMNS = "wrong number of columns"
BLANK = "a blank line"
STRAY_QUOTE = "a quote in the middle of a value"
OPEN_QUOTE = "a quote that is never closed"
LONG_LINE = f"a line longer than {MAX_RECORD_BYTES:,} bytes"
NOT_UTF8 = "not valid utf-8"

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Marks:
    """The bytes that structure a file; -1 for one that it does not have."""

    separator: int
    quote: int = -1
    escape: int = -1


@dataclass(frozen=True)
class BadSpan:
    """Some bytes of a block that are no row, and why."""

    start: int
    end: int
    reason: str
    detail: str = ""


@dataclass
class Records:
    """What a block holds."""

    separator: str
    newline: str
    used: int = 0
    """Where the rest begins."""
    pieces: list[bytes] = field(default_factory=list)
    starts: list[Positions] = field(default_factory=list)
    ends: list[Positions] = field(default_factory=list)
    bad: list[BadSpan] = field(default_factory=list)

    @property
    def text(self) -> bytes:
        """The good rows, written again."""
        return b"".join(self.pieces)

    @property
    def bounds(self) -> tuple[Positions, Positions]:
        """Where each good row starts and ends in the block."""
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *self.starts]), np.concatenate([nothing, *self.ends])


def split_records(block: bytes, marks: Marks, columns: int, *, final: bool) -> Records:
    r"""Divide a block that starts with a record and, if `final`, ends with the end of a line.

    >>> marks = Marks(separator=ord(","), quote=ord('"'))
    >>> records = split_records(b'1,"a,b"' + b"\n1" + b"\n2,c" + b"\n3,", marks, 2, final=False)
    >>> records.text, [span.reason for span in records.bad], records.used
    (b'1\x1fa,b\x1e2\x1fc\x1e', ['wrong number of columns'], 14)
    """
    separator, newline = _unused_bytes(block)
    records = Records(chr(separator), chr(newline))
    all_utf8 = is_utf8(block)
    position, window = 0, len(block)
    while position < len(block):
        stop = min(position + window, len(block))
        scan = _Scan(block, position, stop, marks)
        good = scan.until_problem(columns)
        _take(records, scan, good, columns, all_utf8=all_utf8)
        position += int(scan.ends[good - 1]) if good else 0
        window *= 2
        at_end = stop == len(block)
        never_ends = stop - position > MAX_RECORD_BYTES or (final and at_end and position < stop)
        if good < scan.count or never_ends:
            end = block.find(b"\n", position) + 1
            if not end:
                break
            records.bad.append(_first_line(position, end, scan, good))
            # most of a large window would be looked at again for every stray quote in it
            position, window = end, SMALL_WINDOW
        elif at_end:
            break
    records.used = position
    return records


def count_columns(text: bytes, marks: Marks) -> list[int]:
    """Return the number of columns of each record at the beginning of a file; 0 for a bad one."""
    text = text[: end_without_blank_lines(text, len(text))]
    text = text if text.endswith(b"\n") else text + b"\n"
    counts: list[int] = []
    position, window = 0, SMALL_WINDOW
    while position < len(text):
        stop = min(position + window, len(text))
        scan = _Scan(text, position, stop, marks)
        good = scan.until_problem(columns=None)
        counts += scan.columns[:good].tolist()
        position += int(scan.ends[good - 1]) if good else 0
        window *= 2
        if good < scan.count or (stop == len(text) and position < stop):
            counts.append(0)
            position, window = text.find(b"\n", position) + 1, SMALL_WINDOW
    return counts


def first_record(text: bytes, marks: Marks) -> tuple[list[str], int] | None:
    r"""Return the values of the first record and where it ends; none if it is a mistake or not whole.

    >>> first_record(b"user,item" + b"\n1,2", Marks(separator=ord(",")))
    (['user', 'item'], 10)
    """
    window = SMALL_WINDOW
    scan = _Scan(text, 0, min(window, len(text)), marks)
    while not scan.count and window < len(text):
        window *= 2
        scan = _Scan(text, 0, min(window, len(text)), marks)
    end = int(scan.ends[0]) if scan.until_problem(columns=None) else 0
    if not end or not is_utf8(text[:end]):
        return None
    separator, newline = _unused_bytes(text[:end])
    values = scan.written_again(1, np.ones(1, bool), (separator, newline))
    return values.decode().removesuffix(chr(newline)).split(chr(separator)), end


def without_quotes(block: bytes, marks: Marks) -> bytes | None:
    r"""Return whole lines without their quotes, where those are not needed: the usual case, made fast.

    None where a value has a separator, a quote or the end of a line in it, or a quote is stray.

    >>> without_quotes(b'"1","a"' + b"\n", Marks(ord(","), ord('"')))
    b'1,a\n'
    """
    if marks.escape >= 0 and marks.escape in block:
        return None
    values = np.frombuffer(block, np.uint8)
    is_quote, is_end = values == marks.quote, (values == marks.separator) | (values == LINE_FEED)
    found = np.flatnonzero(is_quote | is_end)
    quotes = np.flatnonzero(is_quote[found])
    if len(quotes) % 2:
        return None
    openers, closers = quotes[0::2], quotes[1::2]
    if (closers - openers != 1).any():
        return None
    # before the first byte comes the end of a line, and so does the last byte, at -1
    if not is_end[found[openers] - 1].all():
        return None
    after = found[closers] + 1
    if not (is_end[after] | (values[after] == CARRIAGE_RETURN)).all():
        return None
    return block.translate(None, bytes([marks.quote]))


def has_long_line(block: bytes) -> bool:
    """Return whether a line of a block, which ends with the end of one, is longer than allowed."""
    position = 0
    while len(block) - position > MAX_RECORD_BYTES + 1:
        end = block.rfind(b"\n", position, position + MAX_RECORD_BYTES + 1) + 1
        if not end:
            return True
        position = end
    return False


def end_without_blank_lines(block: bytes, end: int) -> int:
    r"""Return where a block ends when the blank lines before `end` are left out.

    >>> end_without_blank_lines(b"a" + 3 * b"\n", 4)
    2
    """
    while end and block[end - 1] == LINE_FEED:
        shorter = end - 1
        if shorter and block[shorter - 1] == CARRIAGE_RETURN:
            shorter -= 1
        if shorter and block[shorter - 1] != LINE_FEED:
            return end
        end = shorter
    return end


class _Scan:
    """The whole records of one window of a block, by the parity of quotes. Offsets are the window's."""

    def __init__(self, block: bytes, start: int, stop: int, marks: Marks) -> None:
        self.start = start
        self.bytes = np.frombuffer(block, np.uint8, stop - start, start)
        self.quotes, self.escapes = self._find_quotes(marks)
        found = np.flatnonzero((self.bytes == marks.separator) | (self.bytes == LINE_FEED))
        is_end = self.bytes[found] == LINE_FEED
        self.lines = found[is_end]
        outside = self._are_outside(found)
        self.newlines = found[outside & is_end]
        self.separators = found[outside & ~is_end]
        self.ends = self.newlines + 1
        self.count = len(self.ends)
        self.starts = np.concatenate([np.zeros(1, np.int64), self.ends])[: self.count]
        self.columns = np.diff(np.searchsorted(self.separators, self.ends), prepend=0) + 1
        self.stray = self._find_stray(marks.separator)

    def _find_quotes(self, marks: Marks) -> tuple[Positions, Positions]:
        """Return the quotes that open or close, and the escapes of those that do not."""
        none = np.zeros(0, np.int64)
        if marks.quote < 0:
            return none, none
        quotes = np.flatnonzero(self.bytes == marks.quote)
        if marks.escape < 0 or not len(quotes):
            return quotes, none
        found = np.flatnonzero(self.bytes == marks.escape)
        # of several escapes in a row, the first stands for the second, the third for the fourth
        is_first = np.diff(found, prepend=-2) != 1
        run_starts = found[is_first][np.cumsum(is_first) - 1]
        active = found[(found - run_starts) % 2 == 0]
        following = self._byte(active + 1)
        escapes = active[(following == marks.quote) | (following == marks.escape)]
        escaped = escapes[self._byte(escapes + 1) == marks.quote] + 1
        quotes = np.delete(quotes, np.searchsorted(quotes, escaped))
        inside = np.searchsorted(quotes, escapes) % 2 == 1
        return quotes, escapes[inside]

    def _are_outside(self, positions: Positions) -> NDArray[np.bool_]:
        """Return whether each position has as many quotes before it that open as that close."""
        if not len(self.quotes):
            return np.ones(len(positions), bool)
        return np.asarray(np.searchsorted(self.quotes, positions) % 2 == 0)

    def _find_stray(self, separator: int) -> Positions:
        """Return quotes that open after the beginning of a value or close before its end."""
        openers, closers = self.quotes[0::2], self.quotes[1::2]
        before = self._byte(openers - 1)
        opens = (before == separator) | (before == LINE_FEED) | (openers == 0)
        after, second = self._byte(closers + 1), self._byte(closers + 2)
        closes = (after == separator) | (after == LINE_FEED)
        closes |= (after == CARRIAGE_RETURN) & (second == LINE_FEED)
        doubled = closers[: len(openers) - 1] + 1 == openers[1 : len(closers) + 1]
        opens[1 : len(doubled) + 1] |= doubled
        closes[: len(doubled)] |= doubled
        return np.sort(np.concatenate([openers[~opens], closers[~closes]]))

    def _byte(self, positions: Positions) -> NDArray[np.uint8]:
        """Return the bytes at some positions; any byte for one outside."""
        return self.bytes[np.clip(positions, 0, len(self.bytes) - 1)]

    def until_problem(self, columns: int | None) -> int:
        """Return how many records come before one that cannot be what its writer meant.

        A record of one line with the wrong number of columns is bad and no more; of several lines, it
        is likely that a stray quote joined them.
        """
        problem = (self.ends - self.starts) > MAX_RECORD_BYTES + 1
        if len(self.stray):
            inside = np.searchsorted(self.ends, self.stray, side="right")
            problem[inside[inside < self.count]] = True
        if columns is not None and len(self.lines) != self.count:
            lines = np.diff(np.searchsorted(self.lines, self.ends), prepend=0)
            problem |= (lines > 1) & (self.columns != columns)
        return int(problem.argmax()) if problem.any() else self.count

    def written_again(self, good: int, keep: NDArray[np.bool_], marks: tuple[int, int]) -> bytes:
        """Return the records among the first `good` that are to be kept, without quotes."""
        stop = int(self.ends[good - 1])
        out = self.bytes[:stop].copy()
        out[self.separators[: np.searchsorted(self.separators, stop)]] = marks[0]
        out[self.newlines[:good]] = marks[1]
        kept = np.repeat(keep, self.ends[:good] - self.starts[:good])
        quotes = self.quotes[: np.searchsorted(self.quotes, stop)]
        openers, closers = quotes[0::2], quotes[1::2]
        kept[closers] = False
        is_second = np.zeros(len(openers), bool)
        is_second[1:] = closers[:-1] + 1 == openers[1:]
        kept[openers[~is_second]] = False
        kept[self.escapes[: np.searchsorted(self.escapes, stop)]] = False
        before = self.newlines[:good][self.newlines[:good] > 0] - 1
        kept[before[self.bytes[before] == CARRIAGE_RETURN]] = False
        return out[kept].tobytes()


def _take(records: Records, scan: _Scan, good: int, columns: int, *, all_utf8: bool) -> None:
    """Add the first records of a window to the good rows or the bad ones."""
    if not good:
        return
    keep: NDArray[np.bool_] = scan.columns[:good] == columns
    wrong = np.flatnonzero(~keep)
    bad = [_wrong_columns(scan, int(record), columns) for record in wrong]
    if not all_utf8:
        for record, span in _not_utf8(scan, good, keep):
            keep[record] = False
            bad.append(span)
        bad.sort(key=lambda span: span.start)
    records.bad += bad
    marks = (ord(records.separator), ord(records.newline))
    text = scan.written_again(good, keep, marks)
    if b"\r" in text:
        for mark in (bytes([mark]) for mark in marks):
            # Polars takes one carriage return from the end of every value
            text = text.replace(b"\r" + mark, b"\r\r" + mark)
    records.pieces.append(text)
    records.starts.append(scan.starts[:good][keep] + scan.start)
    records.ends.append(scan.ends[:good][keep] + scan.start)


def _wrong_columns(scan: _Scan, record: int, columns: int) -> BadSpan:
    start, end = int(scan.starts[record]), int(scan.ends[record])
    here = (start + scan.start, end + scan.start)
    if scan.bytes[start:end].tobytes() in (b"\n", b"\r\n"):
        return BadSpan(*here, BLANK)
    return BadSpan(*here, WRONG_COLUMNS, f" ({scan.columns[record]}, expected {columns})")


def _not_utf8(scan: _Scan, good: int, keep: NDArray[np.bool_]) -> list[tuple[int, BadSpan]]:
    """Return the records that are not UTF-8, of those to be kept."""
    high = np.flatnonzero(scan.bytes[: scan.ends[good - 1]] >= 128)
    found = []
    for record in np.unique(np.searchsorted(scan.ends, high, side="right")):
        start, end = int(scan.starts[record]), int(scan.ends[record])
        try:
            scan.bytes[start:end].tobytes().decode()
        except UnicodeDecodeError as error:
            if keep[record]:
                detail = f" (the byte 0x{error.object[error.start]:02x}; is the file latin-1?)"
                span = BadSpan(start + scan.start, end + scan.start, NOT_UTF8, detail)
                found.append((int(record), span))
    return found


def _first_line(start: int, end: int, scan: _Scan, record: int) -> BadSpan:
    """Return the first line of a record that is a mistake, with the reason."""
    if end - start > MAX_RECORD_BYTES + 1:
        return BadSpan(start, end, LONG_LINE)
    if record == scan.count or scan.ends[record] - scan.starts[record] > MAX_RECORD_BYTES + 1:
        return BadSpan(start, end, OPEN_QUOTE)
    inside = np.searchsorted(scan.ends, scan.stray, side="right")
    if record in inside:
        return BadSpan(start, end, STRAY_QUOTE)
    return BadSpan(start, end, WRONG_COLUMNS, f" ({scan.columns[record]} in several lines)")


def is_utf8(block: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    if block.isascii():
        return True
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unused_bytes(block: bytes) -> tuple[int, int]:
    """Return two control characters that do not occur in a block."""
    candidates = (31, 30, 29, 28, *range(1, 9), 11, 12, *range(14, 28), 127)
    unused = [byte for byte in candidates if bytes([byte]) not in block][:2]
    if len(unused) < 2:
        raise DataError("the file has every control character in it, so it is no text file")
    return unused[0], unused[1]
