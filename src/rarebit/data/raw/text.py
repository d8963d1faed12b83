"""Finding out how a text file is written, from its beginning."""

import codecs
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rarebit.data.log_schema import TextFormat
from rarebit.data.raw.byte_stream import ByteStream
from rarebit.data.raw.csv_structure import count_columns, first_record
from rarebit.errors import DataError

__all__ = ["TextFormat", "sniff_format", "sniff_like"]

SNIFFED_BYTES = 1 << 16
SEPARATORS = (",", "\t", ";", "|")
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def sniff_format(path: Path) -> TextFormat:
    """Guess from its beginning how a text file is written. A header is taken for granted.

    The separator is the one that gives most lines as many columns as the header, more than one.
    Quotes are taken for plain characters, and a backslash for one that stands before a quote, only
    where that fits more lines.
    """
    with ByteStream(path) as stream:
        start, whole = stream.read(SNIFFED_BYTES)
    if start.startswith(WIDE_MARKS):
        raise DataError(f"{str(path)!r} is written in UTF-16; write it as UTF-8 first")
    start = start.removeprefix(codecs.BOM_UTF8)
    if not whole:
        start = start[: start.rfind(b"\n") + 1] or start
    encoding = _encoding(start)
    best, best_fit = TextFormat(encoding=encoding), (0.0, 1)
    for separator in SEPARATORS:
        for quote, escape in _quotings(start):
            guess = TextFormat(separator=separator, quote=quote, escape=escape, encoding=encoding)
            fit = _fit(start, guess)
            if fit > best_fit:
                best, best_fit = guess, fit
    return best


def sniff_like(path: Path, known: TextFormat) -> TextFormat:
    """Guess how a text file is written that comes after one whose format is known.

    Another program may have written it with another separator or encoding; but what a quote means is
    no guess any more: guessed anew, it could make another value of the same text.
    """
    if not known.header:
        return known
    return replace(sniff_format(path), quote=known.quote, escape=known.escape)


def _quotings(start: bytes) -> list[tuple[str, str]]:
    """Return the pairs of quote and escape that are worth a try, the usual one first."""
    if b'"' not in start:
        return [('"', "")]
    backslashes = [('"', "\\")] if b'\\"' in start else []
    return [('"', ""), *backslashes, ("", "")]


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


def _encoding(start: bytes) -> Literal["utf-8", "latin-1"]:
    """Return latin-1 where most lines with other characters than ASCII are not UTF-8.

    One broken line does not make a file latin-1: it is a bad row.
    """
    lines = [line for line in start.split(b"\n") if not line.isascii()]
    broken = sum(not _is_utf8(line) for line in lines)
    return "latin-1" if 2 * broken > len(lines) else "utf-8"


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
