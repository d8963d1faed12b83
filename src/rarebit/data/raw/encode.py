"""Encode a raw log into a folder that trains: one reading, then passes over integers, bounded memory.

    read     chunks of rows -> codes of a growing dictionary -> spilled to disk     the whole log, once
    split    train, valid, test
    count    codes of the training rows -> vocabularies: which value has which id
    write    codes -> ids, the rows of each part next to each other -> ids.npy

Parsing text is the slow part, so it happens once. Ids do not depend on how the log was cut into chunks:
the most frequent value comes first, values of equal count are ordered by their text.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import (
    ROW_ARRAYS,
    SPLIT_NAMES,
    Column,
    LogSchema,
    Split,
    check_arguments,
)
from rarebit.data.order import random_bits, stream_key
from rarebit.data.prepared import (
    BAD_ROWS,
    CHANGES,
    ENCODER,
    SCHEMA,
    ArrayWriter,
    DataStatistics,
    FieldStatistics,
    Progress,
    new_folder,
    no_progress,
    value_statistics,
    write_manifest,
)
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.coding import LOWEST_BIN, CodedRows, GrowingDictionary, RowCoder
from rarebit.data.raw.encoder import Finisher, LogEncoder, Sightings, encoder_of
from rarebit.data.raw.infer import SAMPLE_ROWS, infer_schema
from rarebit.data.raw.readers import as_polars, read_frame
from rarebit.data.raw.vocabulary import (
    Growth,
    VocabularyDay,
    grow_encoder,
    save_days,
    seen_values,
)
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.errors import DataError, SettingsError
from rarebit.settings import to_mapping

T = TypeVar("T")
Counts = Mapping[str, NDArray[np.int64]]
"""How often each code or id of each column occurs, `(3, n)`: in train, valid and test."""

BLOCK = 1 << 20
"""Random numbers drawn at once."""
QUANTILE_ROWS = 1_000_000
"""About how many training rows the edges of quantile bins are computed from, at most."""
SUMMED_AT_ONCE = 1 << 16
"""Numbers summed at once: the same ones however the log was cut into chunks."""
SMALLEST_SPREAD = 1e-12
"""Of the mean: a smaller spread is the rounding of numbers that are all the same."""


def encode_log(
    chunks: Iterable[RawChunk],
    schema: LogSchema,
    out: str | os.PathLike[str],
    *,
    origin: str,
    notes: Callable[[], Sequence[str]] = tuple,
    bad: BadRows | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
    grow: "Growing | None" = None,
) -> None:
    """Encode the chunks of a raw log into a folder; the reader adds malformed rows to the same `bad`.

    `origin` names the log in the manifest; `notes` returns what its users should know, once all rows are read. With `grow`
    it is another day of a log: its vocabularies are those of the day before, and grow.
    """
    bad = bad or BadRows()
    with new_folder(Path(out), overwrite=overwrite) as folder:
        if bad.keep == "aside":
            bad.file = folder / BAD_ROWS
        with tempfile.TemporaryDirectory(dir=folder) as spilled:
            reading = read_log(chunks, schema, Spill(Path(spilled)), bad)
            description = describe_reading(reading, bad, origin, notes())
            frozen = freeze(folder, reading, schema, description, progress=progress, grow=grow)
            write_arrays(
                *(folder, reading, frozen.finisher),
                parts=frozen.parts,
                places=frozen.places,
                rows=len(reading),
                progress=progress,
            )
        write_manifest(folder, frozen.manifest)


class Growing(NamedTuple):
    """How the vocabularies of a log grow."""

    encoder: LogEncoder
    """The encoder of the day before."""
    growth: Growth


def encode_frame(
    frame: Any,
    label: str | None = None,
    *,
    schema: LogSchema | None = None,
    split: Split | None = None,
    like: Dataset | None = None,
) -> Dataset:
    """Encode raw rows in memory, with a new vocabulary or with that of another data set."""
    rows = as_polars(frame)
    check_arguments(label, schema, split)
    if like is not None:
        if schema is not None or split is not None:
            raise SettingsError("rows like another data set's have its schema and are not split")
        return encode_like(rows, encoder_of(like))
    if schema is None:
        if label is None:
            raise SettingsError("which column is the label? Give label=, or a schema")
        found = infer_schema(rows.head(SAMPLE_ROWS), label, split=split)
        found.warn(stacklevel=4)
        schema = found.schema
    elif split is not None:
        schema = replace(schema, split=split)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "data"
        chunks = read_frame(rows, schema.columns_read, missing=schema.missing)
        encode_log(chunks, schema, place, origin="a frame")
        return Dataset.open(place, verify=False).in_memory(LogEncoder.open(place / ENCODER))


def encode_like(rows: pl.DataFrame, encoder: LogEncoder) -> Dataset:
    """Encode raw rows with the vocabulary of another data set."""
    bad = BadRows()
    with_label = encoder.schema.label in rows.columns
    columns = encoder.columns_read(with_label=with_label)
    encoded = [
        encoder.encode(chunk, bad, with_label=with_label)
        for chunk in read_frame(rows, columns, missing=encoder.schema.missing)
    ]
    bad.raise_if_any()
    return Dataset(
        encoder.fields,
        np.concatenate([part.ids for part in encoded]),
        np.concatenate([part.numeric for part in encoded]),
        np.concatenate([part.label for part in encoded]) if with_label else None,
    )


class Spill:
    """Codes and numbers of rows, in two files of a folder: new ones, or those that another process wrote.

    Plain reads and writes: a memory map of gigabytes would count as memory of the process.
    """

    def __init__(self, folder: Path, written: Mapping[str, Any] | None = None) -> None:
        self.codes, self.numbers = folder / "codes.spill", folder / "numbers.spill"
        if written is None:
            written = {"sizes": [], "columns": 0, "highest": []}
            self.codes.touch()
            self.numbers.touch()
        self.sizes: list[int] = list(written["sizes"])
        self.columns: int = written["columns"]
        self.highest: NDArray[np.int32] = np.array(written["highest"], np.int32)
        """The highest code of each slot."""
        self.recoded: list[NDArray[np.int32]] | None = None
        """For each slot, the code in another dictionary of each code; nothing where it is the same."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def append(self, rows: CodedRows) -> None:
        if len(rows) == 0:
            return
        self.columns = len(rows.numbers)
        for file, array in ((self.codes, rows.codes), (self.numbers, rows.numbers)):
            with file.open("ab") as end:
                end.write(np.ascontiguousarray(array).data)
        self.sizes.append(len(rows))
        highest = rows.codes.max(axis=1, initial=0)
        self.highest = np.maximum(self.highest, highest) if len(self.highest) else highest

    def written(self) -> dict[str, Any]:
        """Return what it takes to open the files again."""
        return {"sizes": self.sizes, "columns": self.columns, "highest": self.highest.tolist()}

    def recode(self, codes: list[NDArray[np.int32]]) -> None:
        """Give codes of another dictionary from now on."""
        self.recoded = codes
        pairs = zip(codes, self.highest, strict=True)
        self.highest = np.array([new.max() if len(new) else old for new, old in pairs], np.int32)

    def chunks(self, *, codes: bool = True, numbers: bool = True) -> Iterator[CodedRows]:
        """Yield the rows, chunk after chunk; without codes or numbers if they are not needed."""
        slots, columns = len(self.highest) * codes, self.columns * numbers
        with self.codes.open("rb") as from_codes, self.numbers.open("rb") as from_numbers:
            for rows in self.sizes:
                coded = np.frombuffer(from_codes.read(4 * slots * rows), np.int32)
                coded = coded.reshape(slots, rows)
                if slots and self.recoded is not None:
                    pairs = zip(self.recoded, coded, strict=True)
                    coded = np.stack([new.take(old) if len(new) else old for new, old in pairs])
                found = np.frombuffer(from_numbers.read(8 * columns * rows))
                yield CodedRows(coded, found.reshape(columns, rows))


@dataclass
class Reading:
    """The result of reading the log: codes on disk, the rest in memory, a few bytes per row."""

    spills: list[Spill]
    dictionaries: Mapping[str, GrowingDictionary]
    """For each vocabulary, the values of the codes."""
    rows: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    """Label, weight and group, as far as the log has them: the arrays of each chunk."""
    keys: list[NDArray[Any]] = field(default_factory=list)
    cut: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.spills))

    def chunks(self, **needed: bool) -> Iterator[tuple[slice, CodedRows]]:
        """Yield which rows a chunk has, and its codes and numbers."""
        start = 0
        for spill in self.spills:
            for rows in spill.chunks(**needed):
                yield slice(start, start + len(rows)), rows
                start += len(rows)


def read_log(chunks: Iterable[RawChunk], schema: LogSchema, spill: Spill, bad: BadRows) -> Reading:
    """Read all rows; codes and numbers go to `spill`, malformed rows to `bad`."""
    dictionaries = {name: GrowingDictionary() for name in schema.vocabularies}
    reading = Reading([spill], dictionaries)
    coder = RowCoder(schema, {name: found.dtype for name, found in dictionaries.items()})
    # skipped rows are written in the order they are found, which a second thread would leave to chance
    for chunk in chunks if bad.keep == "aside" else _one_ahead(chunks):
        coded = coder.code(chunk, bad)
        if bad.stops:
            continue  # the result is an error, but malformed rows are counted to the end
        key = coded.key
        if schema.split.kind == "given" and not schema.split.column:
            if chunk.part not in SPLIT_NAMES:
                raise DataError("a file is not for train, valid or test, which the split needs")
            key = np.full(len(coded), SPLIT_NAMES.index(chunk.part), np.uint8)
        spill.append(coded)
        for name in schema.row_arrays:
            reading.rows.setdefault(name, []).append(getattr(coded, name))
        reading.keys.append(key)
        reading.cut += coded.cut
    bad.close()
    return reading


def describe_reading(
    reading: Reading, bad: BadRows, origin: str, notes: Sequence[str]
) -> dict[str, Any]:
    """Return what the manifest says about the rows that were read; raise if they cannot train a model."""
    bad.raise_if_any()
    if not len(reading):
        raise DataError(f"no row of {origin} could be read: {bad.summary() or 'it is empty'}")
    if bad.count and not bad.classes.all():
        raise DataError(
            f"without its {bad.count:,} malformed rows ({bad.summary()}), every row of {origin} has the "
            f"label {int(bad.classes[1] > 0)}, and a model learns nothing from one class; fix the rows"
        )
    return {
        "rows_read": len(reading) + bad.count,
        "values_cut": reading.cut,
        "bad_rows": dict(bad.reasons),
        "origin": origin,
        "notes": list(notes),
    }


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items in order, each while a thread makes the next one."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]  # not the end, so an item


class Frozen(NamedTuple):
    """What is decided once all rows are counted: all but the rows is written."""

    finisher: Finisher
    parts: NDArray[np.uint8]
    """Of each row: 0 train, 1 valid, 2 test."""
    manifest: dict[str, Any]
    """Everything but the checksums of the files."""

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the rows of train, valid and test begin."""
        return np.cumsum([0, *self.manifest["rows"][:2]])


def freeze(
    folder: Path,
    reading: Reading,
    schema: LogSchema,
    description: Mapping[str, Any],
    *,
    progress: Progress,
    grow: "Growing | None" = None,
) -> Frozen:
    """Split the rows, count, make the vocabulary, and write all files but the rows and the manifest."""
    label = np.concatenate(reading.rows["label"])
    parts = split_rows(schema.split, len(reading), np.concatenate(reading.keys))
    codes = _count_codes(reading, parts, schema, progress)
    columns = [column for column in schema.columns if column.is_number]
    numbers = dict(zip(columns, _summarise_numbers(reading, parts, columns), strict=True))
    if grow is None:
        encoder, ids_of = _make_encoder(schema, reading, codes, numbers)
    else:
        encoder, ids_of, days = _grow_encoder(grow, reading, codes)
        description = {**description, "days": save_days(folder / CHANGES, days)}
    lookups = [ids_of[column.name] for column in slot_columns(schema)]
    finisher = Finisher(schema, lookups, encoder.scales, encoder.edges)
    binned = _count_bins(reading, parts, finisher)
    ids = dict(binned)
    for name, counted in codes.items():
        size = encoder.fields[name].rows
        found = [np.bincount(ids_of[name], weights=part, minlength=size) for part in counted]
        ids[name] = np.stack(found).astype(np.int64)
    train_counts = [ids[table.name][0].copy() for table in encoder.fields.table_fields]
    for count in train_counts:
        count[PADDING] = 0
    np.save(folder / "counts.npy", np.concatenate([np.zeros(0, np.int64), *train_counts]))
    encoder.save(folder / ENCODER)
    (folder / SCHEMA).write_text(schema.to_toml(), encoding="utf-8")
    missing = {column.name: found.missing for column, found in numbers.items()}
    rows = np.bincount(parts, minlength=3)
    positives = np.bincount(parts, weights=label, minlength=3)
    statistics = DataStatistics(
        rows=tuple(rows.tolist()),
        label_rates=tuple((positives / np.maximum(rows, 1)).tolist()),
        bad_rows=sum(description["bad_rows"].values()),
        fields=tuple(_describe(encoder, codes | binned, ids, missing, len(parts))),
    )
    manifest = {
        "schema": encoder.fields.to_mapping(),
        "rows": list(statistics.rows),
        **description,
        "statistics": to_mapping(statistics),
    }
    return Frozen(finisher, parts, manifest)


def split_rows(split: Split, num_rows: int, key: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the part of each row: 0 train, 1 valid, 2 test. `key` has what the split goes by.

    Every split but a given one is by rank: rows with the smallest keys are for training, the next for
    validation, the last for testing. The key is a random number, the row's position, its time, or a
    random number of its user.
    """
    if split.kind == "given":
        parts = key.astype(np.uint8)
    elif split.kind == "user":
        # numbered as they appear: codes of a vocabulary shared with other columns depend on chunks
        _, first, of_row = np.unique(key, return_index=True, return_inverse=True)
        of_user = _by_rank(_random_keys(split.seed, len(first)), split.shares)
        parts = of_user[np.argsort(np.argsort(first))][of_row]
    else:
        if split.kind != "time":
            is_order = split.kind == "order"
            key = np.arange(num_rows) if is_order else _random_keys(split.seed, num_rows)
        parts = _by_rank(key, split.shares)
    shares = (1.0, 0.0, 0.0) if split.kind == "given" else split.shares
    for name, count, share in zip(
        SPLIT_NAMES, np.bincount(parts, minlength=3), shares, strict=True
    ):
        if share > 0 and count == 0:
            raise DataError(
                f"the split leaves no row for {name}: {len(parts):,} rows are too few for "
                f"kind={split.kind!r} with shares {split.shares}"
            )
    return parts


def _random_keys(seed: int, num_rows: int) -> NDArray[np.uint32]:
    """Return 32 random bits per row, drawn in blocks: 64 at once would be the peak of the memory."""
    keys = np.empty(num_rows, np.uint32)
    stream = stream_key(seed, "split")
    for start in range(0, num_rows, BLOCK):
        stop = min(start + BLOCK, num_rows)
        bits = random_bits(stream, np.arange(start, stop, dtype=np.uint64))
        keys[start:stop] = bits >> np.uint64(32)
    return keys


def _by_rank(keys: NDArray[Any], shares: tuple[float, ...]) -> NDArray[np.uint8]:
    first, second = round(len(keys) * shares[0]), round(len(keys) * (shares[0] + shares[1]))
    parts = np.full(len(keys), 2, np.uint8)
    parts[_smallest(keys, second)] = 1
    parts[_smallest(keys, first)] = 0
    return parts


def _smallest(keys: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Return which rows have the k smallest keys; of equal ones, the first rows."""
    if k in (0, len(keys)):
        return np.full(len(keys), k > 0)
    bound = np.partition(keys, k - 1)[k - 1]
    chosen: NDArray[np.bool_] = keys < bound
    equal = np.flatnonzero(keys == bound)
    chosen[equal[: k - int(chosen.sum())]] = True
    return chosen


def slot_columns(schema: LogSchema) -> list[Column]:
    """Return the column of each slot with codes, in order."""
    return [
        column
        for column in schema.columns
        if column.has_ids and not column.is_number
        for _ in range(column.max_length)
    ]


def _count_codes(
    reading: Reading, parts: NDArray[np.uint8], schema: LogSchema, progress: Progress
) -> dict[str, NDArray[np.int64]]:
    """Return how often each code of each column occurs in each part."""
    slots = slot_columns(schema)
    sizes: dict[str, int] = {}
    highest = np.max([spill.highest for spill in reading.spills], axis=0).tolist()
    for column, code in zip(slots, highest, strict=True):
        name = column.vocabulary_name
        if column.buckets is None:
            sizes[name] = max(sizes.get(name, 0), code + 1)
    counts = {}
    for column in slots:
        hashed = None if column.buckets is None else FIRST_VALUE + column.buckets
        counts[column.name] = np.zeros((3, hashed or sizes[column.vocabulary_name]), np.int64)
    for rows, coded in reading.chunks(numbers=False):
        rows_of = [np.flatnonzero(parts[rows] == part) for part in range(3)]
        for column, codes in zip(slots, coded.codes, strict=True):
            for part, chosen in enumerate(rows_of):
                add_counts(counts[column.name][part], codes.take(chosen))
        progress("counting", rows.stop, len(reading))
    return counts


def add_counts(counts: NDArray[np.int64], codes: NDArray[np.int32]) -> None:
    """Add how often each code occurs to the counts."""
    if len(counts) < 4 * len(codes):
        counts += np.bincount(codes, minlength=len(counts))
    else:
        np.add.at(counts, codes, 1)  # no array as long as a large vocabulary for every chunk


class _NumberSummary:
    """A numeric column in the training rows: mean, spread and quantiles.

    Mean and variance come from merging blocks (Chan et al., 1979), quantiles from a sample.
    """

    def __init__(self, column: Column, train_rows: int) -> None:
        self.column = column
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self.missing = 0
        """Rows of all parts without a number."""
        self._lowest, self._waiting = np.inf, np.empty(0)
        self._sample: list[NDArray[np.float64]] = []
        self._threshold = min(1.0, QUANTILE_ROWS / max(train_rows, 1))
        self._stream = stream_key(0, "quantiles", column.name)

    def add(self, rows: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
        present = ~np.isnan(numbers)
        rows, numbers = rows[present], numbers[present]
        self._lowest = min(self._lowest, float(numbers.min(initial=np.inf)))
        self._waiting = np.concatenate([self._waiting, numbers])
        while len(self._waiting) >= SUMMED_AT_ONCE:
            self._merge(self._waiting[:SUMMED_AT_ONCE])
            self._waiting = self._waiting[SUMMED_AT_ONCE:]
        if self.column.treatment == "quantile":
            bits = random_bits(self._stream, rows.astype(np.uint64)) >> np.uint64(11)
            self._sample.append(numbers[bits < self._threshold * 2.0**53])

    def _merge(self, numbers: NDArray[np.float64]) -> None:
        count, mean = len(numbers), float(numbers.mean())
        total, delta = self.count + count, mean - self.mean
        self._squares += float(((numbers - mean) ** 2).sum())
        self._squares += delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def finish(self) -> None:
        if len(self._waiting):
            self._merge(self._waiting)
            self._waiting = np.empty(0)

    @property
    def std(self) -> float:
        """The standard deviation; 1 where all numbers are the same."""
        std = float(np.sqrt(self._squares / self.count)) if self.count else 0.0
        return 1.0 if std <= SMALLEST_SPREAD * abs(self.mean) else std

    def edges(self) -> tuple[float, ...]:
        """Return distinct edges between bins of equally many rows; no bin is empty."""
        sample = np.concatenate([np.empty(0), *self._sample])
        if not len(sample):
            return ()
        inner = np.arange(1, self.column.bins) / self.column.bins
        found = np.unique(np.quantile(sample, inner, method="inverted_cdf"))
        # nothing lies below the smallest value: a bin there would have an id that is never trained
        return tuple(found[found > self._lowest].tolist())


def _summarise_numbers(
    reading: Reading, parts: NDArray[np.uint8], columns: list[Column]
) -> list[_NumberSummary]:
    summaries = [_NumberSummary(column, int((parts == 0).sum())) for column in columns]
    for rows, coded in reading.chunks(codes=False):
        train = np.flatnonzero(parts[rows] == 0)
        for summary, numbers in zip(summaries, coded.numbers, strict=True):
            summary.missing += int(np.isnan(numbers).sum())
            summary.add(train + rows.start, numbers.take(train))
    for summary in summaries:
        summary.finish()
    return summaries


def _count_bins(
    reading: Reading, parts: NDArray[np.uint8], finisher: Finisher
) -> dict[str, NDArray[np.int64]]:
    """Return how often each id of each column of quantile bins occurs in each part."""
    counts = {
        name: np.zeros((3, FIRST_VALUE + len(edges) + 1), np.int64)
        for name, edges in finisher.edges.items()
    }
    columns = [column.name for column in finisher.schema.columns if column.is_number]
    for rows, coded in reading.chunks(codes=False) if counts else ():
        for name, numbers in zip(columns, coded.numbers, strict=True):
            if name in counts:
                ids, size = finisher.bins(name, numbers), counts[name].shape[1]
                found = np.bincount(parts[rows].astype(np.int32) * size + ids, minlength=3 * size)
                counts[name] += found.reshape(3, size)
    return counts


def make_vocabulary(
    counts: NDArray[np.int64],
    texts: Callable[[NDArray[np.int64]], pl.Series],
    *,
    min_count: int = 1,
    unknown_share: float = 0.0,
    stream: str = "",
    seed: int = 0,
) -> tuple[pl.Series, NDArray[np.int32]]:
    """Return the values in the order of their ids, and the id of each code; `texts` gives a code's value.

    Every value counted at least `min_count` times gets an id. Where that is once, a random share of the
    values counted once stays unknown, at least one of them.
    """
    codes = np.flatnonzero(counts >= max(min_count, 1))
    kept = pl.DataFrame({"value": texts(codes), "count": counts[codes], "code": codes})
    kept = kept.sort("count", "value", descending=[True, False])
    if min_count == 1 and unknown_share > 0:
        singles = int((kept["count"] == 1).sum())  # they are last
        key = stream_key(seed, "unknown", stream)
        order = np.argsort(random_bits(key, np.arange(singles, dtype=np.uint64)), kind="stable")
        keep = np.ones(kept.height, dtype=bool)
        keep[kept.height - singles + order[: int(np.ceil(singles * unknown_share))]] = False
        kept = kept.filter(pl.Series(keep))
    ids = np.full(FIRST_VALUE + len(counts), UNKNOWN, np.int32)
    ids[:FIRST_VALUE] = np.arange(FIRST_VALUE)
    ids[FIRST_VALUE + kept["code"].to_numpy()] = FIRST_VALUE + np.arange(kept.height)
    return kept["value"].rechunk(), ids


def _make_encoder(
    schema: LogSchema, reading: Reading, codes: Counts, numbers: Mapping[Column, _NumberSummary]
) -> tuple[LogEncoder, dict[str, NDArray[np.int32]]]:
    """Return the encoder, and for each column with codes the id of every code."""
    values, ids_of, seen = {}, {}, {}
    for name, columns in schema.vocabularies.items():
        counts: NDArray[np.int64] = np.sum([codes[column.name] for column in columns], axis=0)
        values[name], ids_of[name] = make_vocabulary(
            (counts.sum(axis=0) if schema.counts == "all" else counts[0])[FIRST_VALUE:],
            _texts_of(reading, name, columns[0]),
            min_count=columns[0].min_count,
            unknown_share=schema.unknown_share,
            stream=name,
            seed=schema.split.seed,
        )
        size = FIRST_VALUE + len(values[name])
        found = np.bincount(ids_of[name], counts[0], minlength=size)[FIRST_VALUE:]
        seen[name] = found.astype(np.float64)
    encoder = LogEncoder(
        schema=schema,
        values=values,
        seen=Sightings.of(values, seen),
        scales={c.name: (found.mean, found.std) for c, found in numbers.items() if not c.has_ids},
        edges={c.name: found.edges() for c, found in numbers.items() if c.has_ids},
    )
    return encoder, _ids_by_column(schema, ids_of)


def _ids_by_column(
    schema: LogSchema, ids_of: Mapping[str, NDArray[np.int32]]
) -> dict[str, NDArray[np.int32]]:
    """Return the id of every code for each column with codes, from those of vocabularies."""
    return {
        column.name: ids_of[column.vocabulary_name]
        if column.buckets is None
        else np.arange(FIRST_VALUE + column.buckets, dtype=np.int32)
        for column in slot_columns(schema)
    }


def _texts_of(
    reading: Reading, name: str, column: Column
) -> Callable[[NDArray[np.int64]], pl.Series]:
    """Return what gives the value of a code."""
    if column.kind == "numeric":
        return lambda codes: pl.Series(codes + LOWEST_BIN).cast(pl.String)
    return reading.dictionaries[name].texts


def _grow_encoder(
    grow: Growing, reading: Reading, codes: Counts
) -> tuple[LogEncoder, dict[str, NDArray[np.int32]], dict[str, VocabularyDay]]:
    """Return the encoder of the next day, for each column with codes the id of every code, and what changed."""
    schema, totals, seen = grow.encoder.schema, {}, {}
    for name, columns in schema.vocabularies.items():
        totals[name] = np.sum([codes[column.name] for column in columns], axis=(0, 1))
        seen[name] = seen_values(totals[name], _texts_of(reading, name, columns[0]))
    grown, ids_of = grow_encoder(grow.encoder, seen, grow.growth), {}
    for name, total in totals.items():
        ids_of[name] = np.full(len(total), UNKNOWN, np.int32)
        ids_of[name][:FIRST_VALUE] = np.arange(FIRST_VALUE)
        ids_of[name][FIRST_VALUE + np.flatnonzero(total[FIRST_VALUE:])] = grown.ids[name]
    return grown.encoder, _ids_by_column(schema, ids_of), grown.days


def write_arrays(
    folder: Path,
    reading: Reading,
    finisher: Finisher,
    *,
    parts: NDArray[np.uint8],
    places: NDArray[np.int64],
    rows: int,
    is_new: bool = True,
    progress: Progress = no_progress,
) -> None:
    """Write ids, numbers, labels and the like: the rows of a chunk go to the next places of their parts.

    `places` are those of the first rows, `rows` are all that the arrays have.
    """
    places = places.copy()
    others = {name: np.concatenate(arrays) for name, arrays in reading.rows.items()}
    writer = partial(ArrayWriter, is_new=is_new)
    ids_file, numeric_file = folder / "ids.npy", folder / "numeric.npy"
    with ExitStack() as files:

        def opened(path: Path, shape: tuple[int, ...], dtype: type) -> ArrayWriter:
            return files.enter_context(closing(writer(path, shape, dtype)))

        to_ids = opened(ids_file, (rows, finisher.num_slots), np.int32)
        to_numeric = opened(numeric_file, (rows, finisher.num_numbers), np.float32)
        to_others = {
            name: opened(folder / f"{name}.npy", (rows,), ROW_ARRAYS[name]) for name in others
        }
        for which, coded in reading.chunks():
            ids, numeric = finisher(coded)
            for part in range(3):
                chosen = np.flatnonzero(parts[which] == part)
                to_ids.write(places[part], ids.take(chosen, axis=0))
                to_numeric.write(places[part], numeric.take(chosen, axis=0))
                for name, array in others.items():
                    to_others[name].write(places[part], array[which].take(chosen))
                places[part] += len(chosen)
            progress("writing", which.stop, len(reading))


def _describe(
    encoder: LogEncoder, codes: Counts, ids: Counts, missing: Mapping[str, int], num_rows: int
) -> Iterator[FieldStatistics]:
    """Yield the statistics of each field from the counts of its raw values and of its ids."""
    for table in encoder.fields.fields:
        raw, unknown = np.zeros(0, np.int64), (0.0, 0.0, 0.0)
        no_value = missing.get(table.name, 0)
        if table.kind != "numeric":
            raw, found = codes[table.name][:, FIRST_VALUE:].sum(axis=0), ids[table.name]
            num_values = found.sum(axis=1) - found[:, PADDING]
            unknown = tuple((found[:, UNKNOWN] / np.maximum(num_values, 1)).tolist())
            no_value = int(found[:, MISSING].sum())  # once per row, multi-valued or not
        column = encoder.schema[table.name]
        yield FieldStatistics(
            name=table.name,
            kind="binned" if column.kind == "numeric" and column.has_ids else column.kind,
            rows=table.rows,
            missing_share=no_value / num_rows,
            unknown_shares=unknown,
            **value_statistics(raw),
        )
