"""Vocabularies that grow day by day.

    known      a value keeps its id for as long as it has one: ids are never renumbered
    waiting    a new value shares the row of unknown ones, and is counted in a sketch of bounded size
    admitted   a value whose count, rounded, is `min_count` gets an id: a free one, or the next
    dropped    between days, a value not seen for `drop_after` days whose count is below `drop_below` loses its id; the id
               is free from the next day on, and whoever gets it starts with a fresh row

Counts decay: c <- c · 2^(-1/h) + (how often the value was seen today), with a half-life of h days. The sketch is a count-min
sketch with conservative update: it may count a value too often, by other values, and never too rarely.

Ids do not depend on how a day's log was cut into chunks: of the values that get an id on one day, the most frequent comes
first, values of equal count are ordered by their text.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.chunks import BadRows
from rarebit.data.raw.coding import GrowingDictionary, RowCoder, other_spellings
from rarebit.data.raw.encoder import FREE, LogEncoder, Sightings, encoder_of
from rarebit.data.raw.readers import as_polars, read_frame
from rarebit.data.schema import FIRST_VALUE, UNKNOWN
from rarebit.errors import DataError
from rarebit.settings import check_types, require

DEPTH, WIDTH = 4, 1 << 16
"""Size of the sketch: 1 MB for all vocabularies. A value collides in all rows with about one in 2^64."""
NO_LABEL = "(no label)"
ID_LISTS = ("new", "reset", "dropped")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """When a new value gets an id, and when an old one loses it.

    >>> Growth(drop_after=30).min_count is None
    True
    """

    min_count: int | None = None
    """How often a value must be seen before it gets an id; None: as often as its column says."""
    half_life: float = 30.0
    """Days after which a sighting counts half."""
    drop_after: int | None = None
    """Days without a sighting after which a value may be dropped; None: never."""
    drop_below: float = 1.0
    """Values whose count, decayed, is at least this are never dropped."""

    def __post_init__(self) -> None:
        check_types(self, where="growth")
        for name in ("min_count", "drop_after"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {name}={value}")
        require(self.half_life > 0, f"half_life must be above 0, got {self.half_life}")
        require(self.drop_below >= 0, f"drop_below must be 0 or more, got {self.drop_below}")

    @property
    def decay(self) -> float:
        """What is left of a count after a day."""
        return float(2.0 ** (-1.0 / self.half_life))


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyDay:
    """What a day did to one vocabulary."""

    rows: int
    """Rows that a table of it has from now on."""
    waiting: int
    """Values of the day that have no id yet."""
    new: NDArray[np.int64]
    """Ids that a value got today, those of `reset` first."""
    reset: NDArray[np.int64]
    """Ids among them that once were another value's: their rows must start anew."""
    dropped: NDArray[np.int64]
    """Ids that lost their value."""


def save_days(path: Path, days: Mapping[str, VocabularyDay]) -> dict[str, Any]:
    """Write the ids of a day's changes to a file, and return the rest as plain values."""
    ids = {f"{name}/{part}": getattr(d, part) for name, d in days.items() for part in ID_LISTS}
    np.savez(path, **ids)
    return {name: {"rows": day.rows, "waiting": day.waiting} for name, day in days.items()}


def read_days(path: Path, values: Mapping[str, Any]) -> dict[str, VocabularyDay]:
    """Return what `save_days` wrote."""
    with np.load(path, allow_pickle=False) as ids:
        return {
            name: VocabularyDay(**rest, **{part: ids[f"{name}/{part}"] for part in ID_LISTS})
            for name, rest in values.items()
        }


class Grown(NamedTuple):
    """An encoder after a day."""

    encoder: LogEncoder
    ids: dict[str, NDArray[np.int32]]
    """For each vocabulary, the id of each value of the day."""
    days: dict[str, VocabularyDay]
    """For each vocabulary, what changed."""


def grow_encoder(
    encoder: LogEncoder,
    seen: Mapping[str, tuple[pl.Series, NDArray[np.int64]]],
    growth: Growth,
) -> Grown:
    """Return the encoder of the next day; `seen` has the distinct values of the day and their counts, by vocabulary."""
    before = encoder.seen or Sightings.of(encoder.values, None)
    day, waiting = before.day + 1, _Waiting(before.waiting, growth.decay)
    values, counts, last_seen = (
        dict(encoder.values),
        dict(before.counts),
        dict(before.last_seen),
    )
    ids, days = {}, {}
    columns = encoder.schema.vocabularies
    for name, old in encoder.values.items():
        texts, numbers = seen.get(name, (pl.Series([], dtype=pl.String), np.empty(0, np.int64)))
        least = growth.min_count or columns[name][0].min_count
        places = places_of(texts, old)
        count, last = counts[name] * growth.decay, last_seen[name].copy()
        known = places >= 0
        np.add.at(count, places[known], numbers[known])
        last[places[known]] = day
        was_free = old.str.starts_with(FREE).to_numpy()
        gone = np.zeros(len(old), dtype=bool)
        if growth.drop_after is not None and columns[name][0].kind != "numeric":
            gone = ~was_free & (day - last >= growth.drop_after) & (count < growth.drop_below)
        admitted, total = waiting.admit(name, texts.filter(~known), numbers[~known], least)
        fresh = pl.DataFrame(
            {
                "value": texts.filter(~known).filter(admitted),
                "count": total[admitted],
                "place": np.flatnonzero(~known)[admitted],
            }
        ).sort("count", "value", descending=[True, False])
        free = np.flatnonzero(was_free)[: len(fresh)]
        more = len(fresh) - len(free)
        own = np.concatenate([free, len(old) + np.arange(more)]).astype(np.int32)
        places[fresh["place"].to_numpy()] = own
        values[name] = _with_values(old, np.flatnonzero(gone), own, fresh["value"])
        count[gone] = 0.0
        counts[name] = np.concatenate([count, np.zeros(more)])
        last_seen[name] = np.concatenate([last, np.zeros(more, np.int32)])
        counts[name][own], last_seen[name][own] = fresh["count"].to_numpy(), day
        ids[name] = np.where(places >= 0, places + FIRST_VALUE, UNKNOWN).astype(np.int32)
        days[name] = VocabularyDay(
            rows=FIRST_VALUE + len(values[name]),
            waiting=int((places < 0).sum()),
            new=FIRST_VALUE + own.astype(np.int64),
            reset=FIRST_VALUE + free,
            dropped=FIRST_VALUE + np.flatnonzero(gone),
        )
    now = Sightings(
        day=day,
        parent=encoder.checksum,
        counts=counts,
        last_seen=last_seen,
        waiting=waiting.counts,
    )
    return Grown(replace(encoder, values=values, seen=now), ids, days)


def places_of(texts: pl.Series, values: pl.Series) -> NDArray[np.int32]:
    """Return the place of each text among the values, as it is spelled or in another way; -1 where it is none."""
    if not len(values):
        return np.full(len(texts), -1, np.int32)
    text, enum = pl.col("text"), pl.Enum(values)
    spellings = [text, *other_spellings(text)]
    numbers = [
        spelling.cast(enum, strict=False).to_physical().cast(pl.Int32) for spelling in spellings
    ]
    found = texts.alias("text").to_frame().select(pl.coalesce(numbers).fill_null(-1))
    return found.to_series().to_numpy().copy()


def _with_values(
    old: pl.Series, gone: NDArray[np.int64], own: NDArray[np.int32], fresh: pl.Series
) -> pl.Series:
    """Return the values with some gone, and fresh ones at their own places."""
    if not len(gone) and not len(own):
        return old
    more = int((own >= len(old)).sum())
    long = (
        pl.concat([old, pl.repeat("", more, dtype=pl.String, eager=True)]) if more else old.clone()
    )
    if len(gone):
        long = long.scatter(gone, [f"{FREE}{place}" for place in gone.tolist()])
    return long.scatter(own, fresh) if len(own) else long


class _Waiting:
    """Counts of values without an id."""

    def __init__(self, counts: NDArray[np.float32] | None, decay: float) -> None:
        if counts is not None and counts.shape != (DEPTH, WIDTH):
            raise DataError(f"the sketch of waiting values is damaged: it is {counts.shape}")
        self.counts = None if counts is None else counts * np.float32(decay)

    def admit(
        self, name: str, texts: pl.Series, numbers: NDArray[np.int64], least: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Count distinct values; return which of them were seen often enough, and how often each was seen."""
        total = numbers.astype(np.float64)
        if least <= 1 or not len(texts):
            return np.ones(len(texts), dtype=bool), total
        cells = _cells(name, texts)
        if self.counts is not None:
            total += np.min([self.counts[row][cells[row]] for row in range(DEPTH)], axis=0)
        # a value that gets its id now was counted before: its counts stay, and only make others wait less
        admitted = np.rint(total) >= least
        if not admitted.all():
            if self.counts is None:
                self.counts = np.zeros((DEPTH, WIDTH), np.float32)
            for row in range(DEPTH):
                kept = np.nextafter(total[~admitted].astype(np.float32), np.float32(np.inf))
                np.maximum.at(self.counts[row], cells[row][~admitted], kept)
        return admitted, total


def _cells(name: str, texts: pl.Series) -> NDArray[np.int64]:
    """Return the cell of each value in each row of the sketch, the same on every machine."""
    prefix = f"{name}\0".encode()
    made = b"".join(
        hashlib.blake2b(prefix + text.encode(), digest_size=4 * DEPTH).digest()
        for text in texts.to_list()
    )
    return (np.frombuffer(made, "<u4").reshape(-1, DEPTH).T % WIDTH).astype(np.int64)


@dataclass(frozen=True)
class DayChanges:
    """What a day did to the vocabularies of some columns."""

    columns: Mapping[str, VocabularyDay]
    """By the name of the column; columns that share a vocabulary have the same changes."""

    @classmethod
    def of(cls, schema: LogSchema, days: Mapping[str, VocabularyDay]) -> "DayChanges":
        """Return the changes by column from those by vocabulary."""
        columns = schema.vocabularies.items()
        return cls({c.name: days[name] for name, shared in columns for c in shared if name in days})

    @property
    def rows(self) -> dict[str, int]:
        """Rows that each table needs: the sizes for `grow_`."""
        return {name: day.rows for name, day in self.columns.items()}

    @property
    def reset(self) -> dict[str, Tensor]:
        """Ids whose rows start anew, for `grow_`."""
        days = self.columns.items()
        return {name: torch.from_numpy(day.reset) for name, day in days if len(day.reset)}


def _values_of(frame: Any, schema: LogSchema) -> dict[str, tuple[pl.Series, NDArray[np.int64]]]:
    """Return the distinct values of each vocabulary in a frame, and their counts."""
    dictionaries = {name: GrowingDictionary() for name in schema.vocabularies}
    dtypes = {name: found.dtype for name, found in dictionaries.items()}
    coder, bad = RowCoder(schema, dtypes, with_label=False, with_key=False), BadRows()
    columns = [c.name for c in schema.columns if c.has_ids]
    slots = [c.vocabulary_name for c in schema.id_columns for _ in range(c.max_length)]
    codes: dict[str, list[NDArray[np.int32]]] = {name: [] for name in dictionaries}
    for chunk in read_frame(as_polars(frame), columns, missing=schema.missing):
        for name, found in zip(slots, coder.code(chunk, bad).codes, strict=True):
            codes[name].append(found)
    bad.raise_if_any()
    return {
        name: seen_values(np.bincount(np.concatenate(found)), dictionaries[name].texts)
        for name, found in codes.items()
    }


def seen_values(
    counts: NDArray[np.int64], texts: Callable[[NDArray[np.int64]], pl.Series]
) -> tuple[pl.Series, NDArray[np.int64]]:
    """Return the values that codes stand for, and the counts of those that occur; `texts` gives a code's value."""
    codes = np.flatnonzero(counts[FIRST_VALUE:])
    return texts(codes), counts[FIRST_VALUE:][codes]


class Vocabulary:
    """The values of some columns and their ids: it grows day by day, and never renumbers.

    For your own model and loop. Ids 0 to 2 are padding, unknown and missing values.

    >>> vocabulary = Vocabulary("user", "item")
    >>> day = vocabulary.extend({"user": ["ann", "bob"], "item": ["tea", "tea"]})
    >>> vocabulary.rows
    {'user': 5, 'item': 4}
    >>> vocabulary.encode({"user": ["bob", "eve"], "item": ["tea", None]})
    {'user': array([4, 1], dtype=int32), 'item': array([3, 2], dtype=int32)}
    """

    def __init__(self, *columns: str | Column, growth: Growth = Growth()) -> None:
        made = tuple(c if isinstance(c, Column) else Column(name=c) for c in columns)
        for column in made:
            require(
                column.kind in ("categorical", "multi"),
                f"{column.name}: a vocabulary is of categorical and multi columns, got kind={column.kind!r}",
            )
        schema = LogSchema(label=NO_LABEL, columns=made)
        values = {name: pl.Series([], dtype=pl.String) for name in schema.vocabularies}
        self.growth = growth
        self.encoder = LogEncoder(schema=schema, values=values, seen=Sightings.of(values, None))

    @classmethod
    def of(cls, thing: Any, *, growth: Growth = Growth()) -> "Vocabulary":
        """Return the vocabulary that a prepared data set or a trained model has."""
        return cls._with(encoder_of(thing), growth)

    @classmethod
    def _with(cls, encoder: LogEncoder, growth: Growth) -> "Vocabulary":
        made = cls.__new__(cls)
        made.growth, made.encoder = growth, encoder
        return made

    @property
    def rows(self) -> dict[str, int]:
        """Rows that the table of each column needs: the sizes for `grow_`."""
        return {field.name: field.rows for field in self.encoder.fields.table_fields}

    @property
    def version(self) -> int:
        """How many days it has seen."""
        return 0 if self.encoder.seen is None else self.encoder.seen.day

    def extend(self, frame: Any) -> "DayChanges":
        """Take in a day's rows: count their values, give ids to new ones, and drop old ones."""
        self.encoder, _, days = grow_encoder(
            self.encoder, _values_of(frame, self.encoder.schema), self.growth
        )
        return DayChanges.of(self.encoder.schema, days)

    def encode(self, frame: Any) -> dict[str, NDArray[np.int32]]:
        """Return the ids of each column, `(rows,)`, or `(rows, max_length)` of a multi-valued one."""
        bad, encoder = BadRows(), self.encoder
        columns = encoder.columns_read(with_label=False)
        chunks = read_frame(as_polars(frame), columns, missing=encoder.schema.missing)
        ids = np.concatenate([encoder.encode(chunk, bad).ids for chunk in chunks])
        bad.raise_if_any()
        slots = encoder.fields.slots
        return {
            field.name: ids[:, slots[field.name]]
            if field.kind == "multi"
            else ids[:, slots[field.name].start]
            for field in encoder.fields.table_fields
        }

    def save(self, folder: Path | str) -> None:
        """Write it to a new folder."""
        self.encoder.save(Path(folder))

    @classmethod
    def open(cls, folder: Path | str, *, growth: Growth = Growth()) -> "Vocabulary":
        """Read it back from a folder."""
        return cls._with(LogEncoder.open(Path(folder)), growth)
