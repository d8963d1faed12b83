"""What a well-known data set is: the files of its publisher, and the rows and columns made from them.

    files       what must be in the folder
    protocols   the columns, the split and the counting of values: the ways of the papers, by name
    rows        the files as chunks with the columns of the protocols

A protocol never changes the rows. Titles, facts and remarks are stored in the manifests of prepared logs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl

from rarebit.data.log_schema import LogSchema, TextFormat
from rarebit.data.prepared import value_statistics
from rarebit.data.raw.chunks import BadRows, Place, RawChunk
from rarebit.data.raw.coding import GrowingDictionary
from rarebit.data.raw.encode import add_counts
from rarebit.data.raw.readers import FileProgress, read_raw
from rarebit.errors import DataError, SettingsError
from rarebit.settings import suggest

LEAK = (
    "Values are counted over all rows, as in the paper: training knows the values of the test rows."
)
NUMERIC_AGE = (
    "Age stays a number, standardised: a numeric field, which models such as DLRM treat apart."
)
# No text has this separator, so the whole line is one column.
WHOLE_LINES = TextFormat(
    separator="\x1f", quote="", encoding="latin-1", header=False, names=("line",)
)


def with_numbers(schema: LogSchema, *names: str) -> LogSchema:
    """Return a schema in which these columns stay numbers."""
    kinds = [replace(c, kind="numeric") if c.name in names else c for c in schema.columns]
    return replace(schema, columns=tuple(kinds))


class FileFacts:
    """Counts the values of some columns before rows are left out or added: the publisher's figures."""

    def __init__(self, what: str, columns: tuple[str, ...]) -> None:
        self.what, self.rows = what, 0
        self.dictionaries = {name: GrowingDictionary() for name in columns}
        self.counts = {name: np.zeros(0, np.int64) for name in columns}

    def add(self, frame: pl.DataFrame) -> None:
        """Count some rows."""
        self.rows += frame.height
        for name, dictionary in self.dictionaries.items():
            codes = frame[name].drop_nulls().cast(dictionary.dtype).to_physical().to_numpy()
            missing = int(codes.max(initial=0)) + 1 - len(self.counts[name])
            if missing > 0:
                self.counts[name] = np.pad(self.counts[name], (0, missing))
            add_counts(self.counts[name], codes.astype(np.int32))

    def line(self) -> str:
        """Return the figures as a sentence."""
        first, *others = [
            f"{name} {facts['distinct']:,}{{}} {facts['top_share']:.3f}"
            for name, facts in ((name, value_statistics(n)) for name, n in self.counts.items())
        ]
        parts = [first.format(" values, the top 20 % of them in") + " of the rows"]
        parts += [other.format(",") for other in others]
        return f"The files hold {self.rows:,} {self.what}: {'; '.join(parts)}."


class Source(ABC):
    """One well-known data set."""

    title: ClassVar[str]
    """The data set and what a row of it is, in one line."""
    publisher: ClassVar[str]
    """Who publishes the files, and under which name."""
    files: ClassVar[tuple[str, ...]]
    """The names of the files it needs."""
    facts: ClassVar[tuple[str, ...]] = ()
    """What users should know about the rows, a line each."""
    protocols: ClassVar[dict[str, LogSchema]]
    """The columns, the split and the counting, by name; the first is the default."""
    text: ClassVar[TextFormat | None] = None
    """The format of its file, where its rows are those of one file, so that new rows can be scored."""
    remarks: ClassVar[dict[str, str]] = {}
    """What users should know about a protocol, in a line."""
    in_files: FileFacts | None = None
    """Figures of the files, counted while `rows` are read, where rows are left out or added."""

    def schema(self, protocol: str = "") -> LogSchema:
        """Return the schema of a protocol."""
        name = protocol or next(iter(self.protocols))
        if name not in self.protocols:
            raise SettingsError(f"unknown protocol {name!r}{suggest(name, self.protocols)}")
        return self.protocols[name]

    def notes(self, protocol: str = "") -> tuple[str, ...]:
        """Return what users of a protocol should know, a line each."""
        name = protocol or next(iter(self.protocols))
        remark = (self.remarks[name],) if name in self.remarks else ()
        leak = (LEAK,) if self.schema(name).counts == "all" else ()
        counted = (self.in_files.line(),) if self.in_files is not None else ()
        return (*self.facts, *counted, *remark, *leak)

    @abstractmethod
    def rows(
        self, folder: Path, bad: BadRows, progress: FileProgress | None = None
    ) -> Iterator[RawChunk]:
        """Yield the rows, with the label and every column of the protocols."""

    def paths(self, folder: Path) -> list[Path]:
        """Return the paths of the files; raise if one is missing."""
        found = [folder / name for name in self.files]
        missing = [path.name for path in found if not path.is_file()]
        if missing:
            raise DataError(f"{str(folder)!r} has no {', '.join(missing)}; {self._needs()}")
        return found

    def only_file(self, place: Path, patterns: Sequence[str]) -> Path:
        """Return the file of a set of one file: `place` itself, or the first name in it that fits."""
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
    """Return the wanted rows of a chunk, with their places."""
    if wanted.all():
        return chunk
    rows = wanted.arg_true()

    def locate(row: int) -> Place:
        return chunk.locate(int(rows[row]))

    return RawChunk(chunk.frame.filter(wanted), locate, chunk.part)


def skip_wrong(chunk: RawChunk, right: pl.Series, bad: BadRows, reason: str) -> RawChunk:
    """Return the rows that are right; the others, and those where it is unknown, are malformed."""
    right = right.fill_null(value=False)
    for row in (~right).arg_true():
        bad.add(chunk.locate(row), reason)
    return keep(chunk, right)


def split_lines(
    path: Path, names: Sequence[str], bad: BadRows, progress: FileProgress | None = None
) -> Iterator[RawChunk]:
    """Yield the rows of a file with `::` between its values, which no CSV reader takes."""
    last = len(names) - 1
    for chunk in read_raw(path, ("line",), bad, format=WHOLE_LINES, progress=progress):
        # a value after the last one means that the line has too many
        values = chunk.frame["line"].str.split_exact("::", last + 1).struct.unnest()
        values = values.rename(dict(zip(values.columns, (*names, "::"), strict=True)))
        right = values[names[last]].is_not_null() & values["::"].is_null()
        filled = values.drop("::").with_columns(pl.all().replace("", None))
        reason = f"wrong number of values (expected {len(names)})"
        yield skip_wrong(replace(chunk, frame=filled), right, bad, reason)


def read_table(chunks: Iterator[RawChunk], key: str, bad: BadRows) -> pl.DataFrame:
    """Return a small table as a whole, for joins by a key that no two rows share."""
    seen: pl.DataFrame | None = None
    for chunk in chunks:
        new = chunk.frame[key].is_first_distinct()
        if seen is not None:
            new &= ~chunk.frame[key].is_in(seen[key].implode())
        right = skip_wrong(chunk, new, bad, f"a second row for the same {key}").frame
        seen = right if seen is None else pl.concat([seen, right])
    assert seen is not None, "a reader refuses an empty file"
    return seen
