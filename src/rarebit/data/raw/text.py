"""How a text file of a log is written: its separator, its quotes, its encoding, its header."""

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rarebit.data.raw.byte_stream import ByteStream
from rarebit.data.raw.csv_structure import Marks, count_columns, first_record
from rarebit.errors import DataError
from rarebit.settings import check_types, require

__all__ = ["TextFormat", "sniff_format"]

SNIFFED_BYTES = 1 << 16
SEPARATORS = (",", "\t", ";", "|")
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How a text file is written. As it comes: a CSV file of RFC 4180 with a header.

    >>> TextFormat(separator=";", escape=chr(92), encoding="latin-1").header
    True
    """

    separator: str = ","
    """Stands between two values: one ASCII character."""
    quote: str = '"'
    """Stands around a value that holds a separator, a quote or the end of a line. Empty for none."""
    escape: str = ""
    """Stands before a quote inside a quoted value. Empty where such a quote is written twice."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    """How characters are written as bytes."""
    header: bool = True
    """Whether the first record is the names of the columns."""
    names: tuple[str, ...] = ()
    """Names of the columns of a file without a header; column_1, column_2 and so on if empty."""

    def __post_init__(self) -> None:
        check_types(self, where="format")
        for name, least in (("separator", 1), ("quote", 0), ("escape", 0)):
            text = getattr(self, name)
            require(
                least <= len(text) <= 1 and text.isascii() and text not in ("\n", "\r", "\0"),
                f"format: {name} must be one ASCII character, got {text!r}",
            )
        marks = [mark for mark in (self.separator, self.quote, self.escape) if mark]
        require(
            len(set(marks)) == len(marks),
            f"format: separator, quote and escape must differ, got {', '.join(map(repr, marks))}",
        )
        require(
            not self.escape or bool(self.quote),
            "format: an escape stands before a quote, so it needs one; got quote=''",
        )
        require(
            not (self.names and self.header),
            "format: names are for a file without a header; give header=False with them",
        )

    @property
    def marks(self) -> Marks:
        """The bytes that structure the file."""
        quote, escape = (ord(mark) if mark else -1 for mark in (self.quote, self.escape))
        return Marks(ord(self.separator), quote, escape)


def sniff_format(path: Path) -> TextFormat:
    """Guess from its beginning how a text file is written. A header is taken for granted.

    The separator is the one that gives most lines as many columns as the header, more than one.
    Quotes are taken for plain characters where reading them as quotes fits fewer lines.
    """
    with ByteStream(path) as stream:
        start, whole = stream.read(SNIFFED_BYTES)
    if start.startswith(WIDE_MARKS):
        raise DataError(f"{str(path)!r} is written in UTF-16; write it as UTF-8 first")
    start = start.removeprefix(codecs.BOM_UTF8)
    encoding: Literal["utf-8", "latin-1"] = "utf-8" if _is_utf8(start, whole) else "latin-1"
    if not whole:
        start = start[: start.rfind(b"\n") + 1] or start
    escape = "\\" if b'\\"' in start else ""
    best, best_fit = TextFormat(quote='"' if b'"' in start else "", encoding=encoding), (0.0, 1)
    for separator in SEPARATORS:
        for quote in ('"', "") if b'"' in start else ("",):
            guess = TextFormat(
                separator=separator, quote=quote, escape=escape if quote else "", encoding=encoding
            )
            fit = _fit(start, guess)
            if fit > best_fit:
                best, best_fit = guess, fit
    return best


def _fit(start: bytes, guess: TextFormat) -> tuple[float, int]:
    """Return the share of lines with as many columns as the first, and how many: (0, 1) if not more.

    The number of a half of the lines says nothing: another character stands between the values then.
    """
    header = first_record(start if start.endswith(b"\n") else start + b"\n", guess.marks)
    if header is None or len(header[0]) == 1:
        return 0.0, 1
    columns = count_columns(start, guess.marks)
    share = round(columns.count(len(header[0])) / len(columns), 2)
    return (share, len(header[0])) if share > 0.5 else (0.0, 1)


def _is_utf8(text: bytes, whole: bool) -> bool:
    """Return whether the bytes are UTF-8, but for a last character that may be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text, final=whole)
    except UnicodeDecodeError:
        return False
    return True
