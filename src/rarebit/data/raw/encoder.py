"""The encoder of a log: what turns raw rows into ids and numbers, as when the log was prepared.

A prepared folder has it, and so has every model trained on one, so that new raw rows can be scored.

    encoder/encoder.json      the schema, the scales of numbers, the edges of bins
    encoder/values.parquet    the values of all vocabularies, one after the other, in the order of their ids: how often and
                              on which day they were seen
    encoder/waiting.npy       counts of values without an id, in a sketch; only where there are such values
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.prepared import StoredEncoder
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.coding import CodedRows, RowCoder
from rarebit.data.schema import FIRST_VALUE, MISSING, UNKNOWN, Field, Schema
from rarebit.errors import DataError
from rarebit.storage.files import read_json

FORMAT = 2
DESCRIPTION, VALUES, WAITING = "encoder.json", "values.parquet", "waiting.npy"
FREE = "\uffff"
"""Before the place of a value that was dropped, as its text: no character, so in no text of a log."""
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, pl.exceptions.PolarsError)
LARGEST = float(np.finfo(np.float32).max)
PIECE = 1 << 20
"""Values hashed at once."""


class Finisher:
    """Turns coded columns into rows of ids and numbers: the last step of preparing and of scoring.

    `ids` has, for each slot with codes, the id of each code; nothing where codes are ids already.
    """

    def __init__(
        self,
        schema: LogSchema,
        ids: list[NDArray[np.int32]] | None,
        scales: Mapping[str, tuple[float, float]],
        edges: Mapping[str, tuple[float, ...]],
    ) -> None:
        self.schema, self.ids, self.scales, self.edges = schema, ids, scales, edges
        self.num_slots = sum(column.max_length for column in schema.id_columns)
        self.num_numbers = sum(c.is_number and not c.has_ids for c in schema.columns)

    def __call__(self, coded: CodedRows) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids `(rows, slots)` and numbers `(rows, columns)`."""
        ids = np.empty((len(coded), self.num_slots), np.int32)
        for slot, found in enumerate(self._slots(coded)):
            ids[:, slot] = found
        numeric = np.empty((len(coded), self.num_numbers), np.float32)
        columns = [column for column in self.schema.columns if column.is_number]
        numbers = zip(columns, coded.numbers, strict=True)
        standardised = [(column.name, found) for column, found in numbers if not column.has_ids]
        for place, (name, number) in enumerate(standardised):
            mean, std = self.scales[name]
            with np.errstate(over="ignore"):
                scaled = (number - mean) / std
            scaled[np.isnan(number)] = 0.0  # missing: the mean
            # they fit 32 bits, however far they are from the training rows
            numeric[:, place] = np.clip(scaled, -LARGEST, LARGEST)
        return ids, numeric

    def bins(self, name: str, number: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the ids of the quantile bins that numbers of a column lie in."""
        edges = self.edges[name]
        if len(edges) <= np.iinfo(np.int8).max:  # a search is up to 10 times as slow
            below: NDArray[Any] = np.zeros(len(number), np.int8)
            for edge in edges:
                below += number >= edge
        else:
            below = np.searchsorted(edges, number, side="right")
        ids = below.astype(np.int32) + FIRST_VALUE
        ids[np.isnan(number)] = MISSING
        return ids

    def _slots(self, coded: CodedRows) -> Iterator[NDArray[np.int32]]:
        codes, numbers = iter(enumerate(coded.codes)), iter(coded.numbers)
        for column in self.schema.columns:
            if column.is_number:
                number = next(numbers)
                if column.treatment == "quantile":
                    yield self.bins(column.name, number)
            elif column.has_ids:
                for _ in range(column.max_length):
                    slot, found = next(codes)
                    ids = self.ids[slot] if self.ids is not None else ()
                    yield found if len(ids) == 0 else np.take(ids, found)


@dataclass(frozen=True)
class EncodedRows:
    """Some rows as a model takes them."""

    ids: NDArray[np.int32]
    numeric: NDArray[np.float32]
    label: NDArray[np.uint8]
    """Empty where the rows have no label."""
    kept: NDArray[np.bool_] | None = None
    """Which of the raw rows these are, where some were malformed."""


@dataclass(frozen=True, kw_only=True)
class Sightings:
    """How often and when the values of an encoder were seen: what decides which values get and keep an id."""

    day: int = 0
    """Days since the log was prepared: how often the vocabularies grew."""
    parent: str = ""
    """Checksum of the encoder of the day before."""
    counts: Mapping[str, NDArray[np.float64]] = field(repr=False)
    """For each vocabulary, how often each value was seen, older days counting less."""
    last_seen: Mapping[str, NDArray[np.int32]] = field(repr=False)
    """For each vocabulary, the last day on which each value was seen."""
    waiting: NDArray[np.float32] | None = field(default=None, repr=False)
    """Counts of values without an id: a sketch, of a size that does not grow. None: there are none."""

    @classmethod
    def of(
        cls, values: Mapping[str, pl.Series], counts: Mapping[str, NDArray[np.float64]] | None
    ) -> "Sightings":
        """Return those of the first day; without counts, every value was seen once."""
        return cls(
            counts=counts or {name: np.ones(len(found)) for name, found in values.items()},
            last_seen={name: np.zeros(len(found), np.int32) for name, found in values.items()},
        )


@dataclass(frozen=True, kw_only=True)
class LogEncoder:
    """Turns raw rows into ids and numbers, and back."""

    schema: LogSchema
    values: Mapping[str, pl.Series] = field(repr=False)
    """For each vocabulary, its values in the order of their ids."""
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For each standardised column, mean and standard deviation of its training rows."""
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For each column of quantile bins, the edges between bins."""
    seen: Sightings | None = field(default=None, repr=False, compare=False)
    """How often and when values were seen; None in folders that earlier versions wrote."""

    @cached_property
    def checksum(self) -> str:
        """The identity of the encoder: of everything that decides which id a value gets."""
        return hashlib.sha256(json.dumps(self.fields.to_mapping()).encode()).hexdigest()[:16]

    @cached_property
    def fields(self) -> Schema:
        """The schema that a model is built with."""
        columns = self.schema.columns
        used = [column for column in columns if column.has_ids or column.kind == "numeric"]
        return Schema(tuple(map(self._field, used)), encoder=self)

    def _field(self, column: Column) -> Field:
        # a checksum of everything that decides which id a value of the column gets
        parts: list[Any] = [column.kind, column.treatment, column.buckets, column.separator]
        parts += [self.schema.missing, self.scales.get(column.name), self.edges.get(column.name)]
        if column.vocabulary_name in self.values and column.has_ids:
            parts.append(self._digests[column.vocabulary_name])
        vocabulary = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        if not column.has_ids:
            return Field(name=column.name, kind="numeric", vocabulary=vocabulary)
        return Field(
            name=column.name,
            kind="multi" if column.kind == "multi" else "categorical",
            rows=FIRST_VALUE + self._num_values(column),
            max_length=column.max_length,
            pooling=column.pooling,
            vocabulary=vocabulary,
        )

    def _num_values(self, column: Column) -> int:
        """Return how many ids a column has for real values."""
        if column.buckets is not None:
            return column.buckets
        if column.name in self.edges:
            return len(self.edges[column.name]) + 1
        return len(self.values[column.vocabulary_name])

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {name: _digest(values) for name, values in self.values.items()}

    def columns_read(self, *, with_label: bool) -> list[str]:
        """Return the columns that raw rows need, with or without the label."""
        used = {found.name for found in self.fields.fields}
        names = [name for name in self.schema.columns_read if name in used]
        return [self.schema.label, *names] if with_label else names

    def encode(self, chunk: RawChunk, bad: BadRows, *, with_label: bool = False) -> EncodedRows:
        """Return raw rows as ids and numbers, without malformed rows, which go to `bad`."""
        coded = self._coders[with_label].code(chunk, bad)
        ids, numeric = Finisher(self.schema, None, self.scales, self.edges)(coded)
        return EncodedRows(ids, numeric, coded.label, coded.kept)

    @cached_property
    def _coders(self) -> tuple[RowCoder, RowCoder]:
        """The coders of rows without and with a label, kept: they plan once for all chunks of a log."""
        enums = {name: pl.Enum(values) for name, values in self.values.items()}
        make = partial(RowCoder, self.schema, enums, with_key=False)
        return make(with_label=False), make(with_label=True)

    def decode(self, ids: NDArray[np.int32]) -> pl.DataFrame:
        """Return the raw values of ids `(rows, slots)`.

        Null where missing, "<unknown>" for the unknown id, and the number of the bucket or bin where a
        column is hashed or cut by quantiles.
        """
        columns: dict[str, pl.Series] = {}
        for column in self.schema.id_columns:
            slots = self.fields.slots[column.name]
            texts = [self._texts(column, ids[:, slot]) for slot in range(slots.start, slots.stop)]
            if column.kind == "multi":
                listed = pl.select(pl.concat_list(texts).list.drop_nulls())
                columns[column.name] = listed.to_series()
            else:
                columns[column.name] = texts[0]
        return pl.DataFrame(columns)

    def _texts(self, column: Column, ids: NDArray[np.int32]) -> pl.Series:
        if column.vocabulary_name in self.values and column.buckets is None:
            values = self.values[column.vocabulary_name].cast(pl.String)
        else:
            values = pl.Series([str(number) for number in range(self._num_values(column))])
        special = pl.Series([None, "<unknown>", None], dtype=pl.String)
        return pl.concat([special, values]).gather(pl.Series(ids))

    def save(self, folder: Path) -> None:
        """Write it to a new folder."""
        folder.mkdir(parents=True)
        description = {
            "format": FORMAT,
            "schema": self.schema.to_mapping(),
            "scales": {name: list(scale) for name, scale in self.scales.items()},
            "edges": {name: list(edges) for name, edges in self.edges.items()},
            "values": write_values(folder, self.values, self.seen),
            "digests": self._digests,
            "day": None if self.seen is None else self.seen.day,
            "parent": "" if self.seen is None else self.seen.parent,
        }
        text = json.dumps(description, indent=1, ensure_ascii=False) + "\n"
        (folder / DESCRIPTION).write_text(text, encoding="utf-8")

    @classmethod
    def open(cls, folder: Path) -> "LogEncoder":
        """Read it back from a folder."""
        try:
            description = read_json(folder / DESCRIPTION)
            _check_format(folder, description["format"])
            encoder = cls(
                schema=LogSchema.from_mapping(description["schema"]),
                values=read_values(folder, description["values"]),
                seen=_read_sightings(folder, description),
                scales={name: (mean, std) for name, (mean, std) in description["scales"].items()},
                edges={name: tuple(edges) for name, edges in description["edges"].items()},
            )
            digests = dict(description["digests"])
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{str(folder)!r} holds no vocabulary: {error}") from None
        except DAMAGE as error:
            raise DataError(f"the vocabulary in {str(folder)!r} is damaged: {error}") from None
        for name, wanted in digests.items():
            if encoder._digests.get(name) != wanted:
                raise DataError(f"the vocabulary {name!r} in {str(folder)!r} is damaged")
        return encoder


def write_values(
    folder: Path, values: Mapping[str, pl.Series], seen: Sightings | None = None
) -> dict[str, int]:
    """Write the values of all vocabularies, and return how many each has, for `read_values`."""
    every = [pl.Series("value", dtype=pl.String)]
    every += [texts.cast(pl.String) for texts in values.values()]
    # one file for all: a file for each of thousands of columns takes a minute to write
    frame = pl.concat(every, rechunk=False).to_frame()
    if seen is not None:
        counts = [np.empty(0), *(seen.counts[name] for name in values)]
        last = [np.empty(0, np.int32), *(seen.last_seen[name] for name in values)]
        frame = frame.with_columns(
            count=pl.Series(np.concatenate(counts)), last_seen=pl.Series(np.concatenate(last))
        )
        if seen.waiting is not None:
            np.save(folder / WAITING, seen.waiting)
    frame.write_parquet(folder / VALUES)
    return {name: len(texts) for name, texts in values.items()}


def read_values(folder: Path, stored: Mapping[str, Any]) -> dict[str, pl.Series]:
    """Return each vocabulary's part of the file of values; format 1 had a file for each."""
    if all(isinstance(file, str) for file in stored.values()):
        files = {name: folder / Path(file).name for name, file in stored.items()}
        return {name: pl.read_parquet(file)["value"] for name, file in files.items()}
    values = pl.read_parquet(folder / VALUES, columns=["value"])["value"]
    starts = [0, *accumulate(stored.values())]
    parts = zip(stored, starts, starts[1:], strict=False)
    return {name: values[start:end] for name, start, end in parts}


def _read_sightings(folder: Path, description: Mapping[str, Any]) -> Sightings | None:
    """Return how often and when values were seen; None from an earlier version."""
    day, sizes = description.get("day"), description["values"]
    if day is None:
        return None
    stored = pl.read_parquet(folder / VALUES, columns=["count", "last_seen"])
    starts = [0, *accumulate(sizes.values())]
    parts = dict(zip(sizes, map(slice, starts, starts[1:]), strict=False))
    counts, last_seen = (stored[name].to_numpy() for name in ("count", "last_seen"))
    if type(day) is not int or not np.isfinite(counts).all() or last_seen.max(initial=0) > day:
        raise ValueError(f"values cannot be seen on day {day!r} so")
    waiting = None
    if (folder / WAITING).exists():
        waiting = np.load(folder / WAITING, allow_pickle=False)
    return Sightings(
        day=day,
        parent=str(description["parent"]),
        counts={name: counts[part].astype(np.float64) for name, part in parts.items()},
        last_seen={name: last_seen[part].astype(np.int32) for name, part in parts.items()},
        waiting=waiting,
    )


def _check_format(folder: Path, version: int) -> None:
    if version > FORMAT:
        raise DataError(
            f"{str(folder)!r} was written in format {version}; this version reads up to {FORMAT}: "
            "upgrade it"
        )


def encoder_of(thing: Any) -> LogEncoder:
    """Return the encoder of a data set or a model, read from disk if need be."""
    encoder = thing.schema.encoder
    if isinstance(encoder, StoredEncoder):
        encoder = LogEncoder.open(encoder.folder)
    if not isinstance(encoder, LogEncoder):
        raise DataError("the data set was not encoded from raw rows, so its values are not known")
    return encoder


def _digest(values: pl.Series) -> str:
    """Return a checksum of values and their order."""
    found = hashlib.sha256()
    texts = values.cast(pl.String)
    for start in range(0, len(texts), PIECE):
        piece = texts.slice(start, PIECE)
        found.update(piece.str.len_bytes().to_numpy().astype("<u4").tobytes())
        found.update(piece.str.join("").item().encode())
    return found.hexdigest()


def unknown_values(schema: Schema, ids: NDArray[np.int32]) -> dict[str, int]:
    """Return how many values of each field are unknown."""
    return {
        field.name: int((ids[:, schema.slots[field.name]] == UNKNOWN).sum())
        for field in schema.table_fields
    }
