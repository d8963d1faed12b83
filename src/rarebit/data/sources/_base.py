"""What a set's files hold before rows are left out or added: the figures that its publisher gives.

What a well-known data set is: files of its publisher, and the rows and columns made of them.

    files       what must lie in the folder
    protocols   what the columns are, how rows are split and values counted: the papers' ways, by name
    rows        the files as chunks with the columns of the protocols

A protocol changes what is made of the rows, never the rows.

Negative rows for a log of uses: items that the user did not use, drawn at random.

Draws that hit an item the user has used are drawn again, all of them at once, until none is left.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.log_schema import LogSchema, TextFormat
from rarebit.data.raw.coding import GrowingDictionary
from rarebit.data.raw.passes import add_counts
from rarebit.data.raw.readers import read_raw
from rarebit.data.raw.rows import BadRows, Place, RawChunk
from rarebit.data.statistics import value_statistics
from rarebit.errors import DataError, SettingsError
from rarebit.settings import suggest

__all__ = [
    "FileFacts",
    "Progress",
    "Source",
    "draw_unused",
    "keep",
    "negatives",
    "read_table",
    "set_aside",
    "split_lines",
]


class FileFacts:
    """Counts the values of some columns as the rows go by.

    >>> facts = FileFacts("ratings", ("user",))
    >>> facts.add(pl.DataFrame({"user": ["ann", "ann", "bob"]}))
    >>> facts.line()
    'The files hold 3 ratings: user 2 values, the top 20 % of them in 0.667 of the rows.'
    """

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
        """Return them in a sentence."""
        found = {name: value_statistics(counts) for name, counts in self.counts.items()}
        first, *others = [
            f"{name} {facts['distinct']:,}{{}} {facts['top_share']:.3f}"
            for name, facts in found.items()
        ]
        parts = [first.format(" values, the top 20 % of them in") + " of the rows"]
        parts += [other.format(",") for other in others]
        return f"The files hold {self.rows:,} {self.what}: {'; '.join(parts)}."


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

    >>> from rarebit.data.raw.rows import Place
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


Indices = NDArray[np.int64]


def draw_unused(users: Indices, used: NDArray[np.bool_], draws: int, seed: int) -> Indices:
    """Return `draws` items for each row, uniform over the items that its user has not used.

    `used` has a row a user and a column an item. A draw depends on the seed and its place only.

    >>> used = np.array([[True, False, True], [False, True, True]])
    >>> draw_unused(np.array([0, 1]), used, draws=2, seed=0).tolist()
    [[1, 1], [0, 0]]
    """
    places = np.arange(users.size * draws, dtype=np.uint64)
    owners = np.repeat(users, draws)
    drawn = np.empty(places.size, dtype=np.int64)
    open_places, attempt = places, 0
    while open_places.size:
        bits = random_bits(stream_key(seed, "negative", attempt), open_places)
        drawn[open_places] = bits % np.uint64(used.shape[1])
        refused = used[owners[open_places], drawn[open_places]]
        open_places, attempt = open_places[refused], attempt + 1
    return drawn.reshape(users.size, draws)


def negatives(
    users: pl.Series, items: pl.Series, all_items: pl.Series, draws: int, seed: int
) -> Indices:
    """Return the items drawn for each use, `(uses, draws)`, as places in the list of all items."""
    names = users.unique(maintain_order=True)
    rows = _places(users, names)
    used = np.zeros((names.len(), all_items.len()), dtype=np.bool_)
    used[rows, _places(items, all_items)] = True
    used_all = used.all(axis=1)
    if used_all.any():
        raise DataError(
            f"user {names[int(used_all.argmax())]!r} used all {all_items.len():,} items of the log, "
            "so no negative can be drawn; use the whole log, not a small part of it"
        )
    return draw_unused(rows, used, draws, seed)


def _places(values: pl.Series, known: pl.Series) -> Indices:
    """Return where each value stands in a list of distinct values that has them all."""
    where = pl.DataFrame({"value": known}).with_row_index("place")
    found = pl.DataFrame({"value": values}).join(where, on="value", maintain_order="left")
    return found["place"].cast(pl.Int64).to_numpy()
