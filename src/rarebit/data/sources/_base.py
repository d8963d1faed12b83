"""What a well-known data set is: files of its publisher, and the rows and columns made of them.

    files       what must lie in the folder
    protocols   what the columns are, how rows are split and values counted: the papers' ways, by name
    rows        the files as chunks with the columns of the protocols

A protocol changes what is made of the rows, never the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import polars as pl

from rarebit.data.log_schema import LogSchema
from rarebit.data.raw.bad_rows import BadRows
from rarebit.data.raw.chunk import Place, RawChunk
from rarebit.data.raw.readers import read_raw
from rarebit.data.raw.text import TextFormat
from rarebit.data.sources._file_facts import FileFacts
from rarebit.errors import DataError, SettingsError
from rarebit.settings import suggest

__all__ = ["Progress", "Source", "keep", "read_table", "set_aside", "split_lines"]

Progress = Callable[[int, int], None]
"""Told how many bytes of the largest file are read, and how many there are."""

LEAK = (
    "Values are counted over all rows, as in the paper: training knows the values of the test rows."
)
# A byte that no text has: the whole line is one column.
WHOLE_LINES = TextFormat(
    separator="\x1f", quote="", encoding="latin-1", header=False, names=("line",)
)


class Source(ABC):
    """One well-known data set."""

    title: ClassVar[str]
    """The set and what a row of it is, in one line."""
    publisher: ClassVar[str]
    """Who publishes the files, and under which name."""
    files: ClassVar[tuple[str, ...]]
    """The files it needs, by name."""
    facts: ClassVar[tuple[str, ...]] = ()
    """What a user has to know about the rows, a line each."""
    protocols: ClassVar[dict[str, LogSchema]]
    """The columns, the split and the counting, by name; the first is used where none is named."""
    text: ClassVar[TextFormat | None] = None
    """How its file is written, where its rows are those of one file: new rows can be scored."""
    remarks: ClassVar[dict[str, str]] = {}
    """What a user has to know about one of the protocols, in a line."""

    in_files: FileFacts | None = None
    """What the files hold, counted while `rows` are read, where rows are left out or added."""

    def schema(self, protocol: str = "") -> LogSchema:
        """Return what a protocol says of the columns, the split and the counting."""
        name = protocol or next(iter(self.protocols))
        if name not in self.protocols:
            raise SettingsError(f"unknown protocol {name!r}{suggest(name, self.protocols)}")
        return self.protocols[name]

    def notes(self, protocol: str = "") -> tuple[str, ...]:
        """Return what a user of a protocol has to know, a line each."""
        name = protocol or next(iter(self.protocols))
        remark = (self.remarks[name],) if name in self.remarks else ()
        leak = (LEAK,) if self.schema(name).counts == "all" else ()
        counted = (self.in_files.line(),) if self.in_files is not None else ()
        return (*self.facts, *counted, *remark, *leak)

    @abstractmethod
    def rows(
        self, folder: Path, bad: BadRows, progress: Progress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the rows, with the label and every column of the protocols."""

    def paths(self, folder: Path) -> list[Path]:
        """Return where the files are, or say which are missing and who has them."""
        found = [folder / name for name in self.files]
        missing = [path.name for path in found if not path.is_file()]
        if missing:
            raise DataError(f"{str(folder)!r} has no {', '.join(missing)}; {self._needs()}")
        return found

    def only_file(self, place: Path, patterns: Sequence[str]) -> Path:
        """Return the one file of a set that is one file: itself, or the first name that fits."""
        if place.is_file():
            return place
        for pattern in patterns:
            found = sorted(path for path in place.glob(pattern) if path.is_file())
            if len(found) > 1:
                names = ", ".join(path.name for path in found)
                raise DataError(f"{str(place)!r} has {names}; name the one to read, not the folder")
            if found:
                return found[0]
        raise DataError(f"{str(place)!r} has none of {', '.join(patterns)}; {self._needs()}")

    def _needs(self) -> str:
        return (
            f"this set needs {', '.join(self.files)}, published by {self.publisher}: "
            "download and unpack it first, Rarebit does not"
        )


def keep(chunk: RawChunk, wanted: pl.Series) -> RawChunk:
    """Return the rows of a chunk that are wanted; each still knows its place.

    >>> from rarebit.data.raw.chunk import Place
    >>> chunk = RawChunk(pl.DataFrame({"x": [7, 8, 9]}), lambda row: Place("a.csv", row + 1, ""))
    >>> kept = keep(chunk, chunk.frame["x"] != 8)
    >>> kept.frame["x"].to_list(), kept.locate(1).number
    ([7, 9], 3)
    """
    if wanted.all():
        return chunk
    rows = wanted.arg_true()

    def locate(row: int) -> Place:
        return chunk.locate(int(rows[row]))

    return RawChunk(chunk.frame.filter(wanted), locate, chunk.part)


def set_aside(chunk: RawChunk, right: pl.Series, bad: BadRows, reason: str) -> RawChunk:
    """Return the rows that are right; the others are bad, and so are those where it is not known."""
    right = right.fill_null(value=False)
    for row in (~right).arg_true():
        bad.add(chunk.locate(row), reason)
    return keep(chunk, right)


def split_lines(
    path: Path, names: Sequence[str], bad: BadRows, progress: Progress | None = None
) -> Iterator[RawChunk]:
    """Yield the rows of a file with `::` between its values, which no reader of CSV takes."""
    last = len(names) - 1
    for chunk in read_raw(path, ("line",), bad, format=WHOLE_LINES, progress=progress):
        # One value more than there should be tells a line that has too many.
        values = chunk.frame["line"].str.split_exact("::", last + 1).struct.unnest()
        values = values.rename(dict(zip(values.columns, (*names, "::"), strict=True)))
        right = values[names[last]].is_not_null() & values["::"].is_null()
        filled = values.drop("::").with_columns(pl.all().replace("", None))
        split = RawChunk(filled, chunk.locate, chunk.part)
        yield set_aside(split, right, bad, f"wrong number of values (expected {len(names)})")


def read_table(chunks: Iterator[RawChunk], key: str, bad: BadRows) -> pl.DataFrame:
    """Return a small table whole, for looking rows up by a key that no two rows share."""
    seen: pl.DataFrame | None = None
    for chunk in chunks:
        new = chunk.frame[key].is_first_distinct()
        if seen is not None:
            new &= ~chunk.frame[key].is_in(seen[key].implode())
        right = set_aside(chunk, new, bad, f"a second row for the same {key}").frame
        seen = right if seen is None else pl.concat([seen, right])
    assert seen is not None, "a reader refuses an empty file"
    return seen
