"""Reading ahead: the next rows are read while these are encoded.

What `rarebit data show` tells of a prepared log, from the counts of its values.

From a raw log to a folder that trains, in one reading and bounded memory.

    read     chunks of rows ─► codes of a growing dictionary ─► spilled to disk      all of the log, once
    split    train, valid, test
    count    codes of the training rows ─► vocabularies: which value has which id
    write    codes ─► ids, the rows of each part side by side ─► ids.npy

Reading a text is the slow part, so it is done once; what follows are passes over integers.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema
from rarebit.data.prepare import Progress, no_progress
from rarebit.data.prepared import (
    BAD_ROWS,
    ENCODER,
    SCHEMA,
    ArrayWriter,
    new_folder,
    write_manifest,
)
from rarebit.data.raw.coding import LOWEST_BIN, GrowingDictionary, RowCoder
from rarebit.data.raw.encoder import Encoder, Finisher
from rarebit.data.raw.passes import (
    NumberSummary,
    Spill,
    Vocabulary,
    add_counts,
    count_codes,
    make_vocabulary,
    slot_columns,
    split_rows,
    summarise_numbers,
)
from rarebit.data.raw.rows import BadRows, RawChunk
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN, Field
from rarebit.data.statistics import DataStatistics, FieldStatistics, value_statistics
from rarebit.errors import DataError

__all__ = ["Origin", "describe", "encode_log", "one_ahead"]

T = TypeVar("T")


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items in order, each while a thread makes the next one.

    >>> list(one_ahead(range(3)))
    [0, 1, 2]
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]  # not the end, so an item


Counts = Mapping[str, NDArray[np.int64]]


def describe(
    encoder: Encoder,
    codes: Counts,
    ids: Counts,
    *,
    missing: Mapping[str, int],
    parts: NDArray[np.uint8],
    label: NDArray[np.uint8],
    bad_rows: int,
) -> DataStatistics:
    """Describe a log: `codes` and `ids` count raw and encoded values by column, `(3, n)` each.

    `missing` counts the rows without a number, for columns that have no ids.
    """
    rows = np.bincount(parts, minlength=3)
    positives = np.bincount(parts, weights=label, minlength=3)
    return DataStatistics(
        rows=tuple(rows.tolist()),
        label_rates=tuple((positives / np.maximum(rows, 1)).tolist()),
        bad_rows=bad_rows,
        fields=tuple(
            _numeric(field.name, missing[field.name] / len(parts))
            if field.kind == "numeric"
            else _with_table(
                field,
                encoder.kind_of(field.name),
                codes[field.name],
                ids[field.name],
                len(parts),
            )
            for field in encoder.fields.fields
        ),
    )


def _numeric(name: str, missing_share: float) -> FieldStatistics:
    return FieldStatistics(
        name=name,
        kind="numeric",
        rows=0,
        missing_share=missing_share,
        unknown_shares=(0.0, 0.0, 0.0),
        **value_statistics(np.zeros(0, np.int64)),
    )


def _with_table(
    field: Field,
    kind: str,
    codes: NDArray[np.int64],
    ids: NDArray[np.int64],
    log_rows: int,
) -> FieldStatistics:
    values = ids.sum(axis=1) - ids[:, PADDING]
    return FieldStatistics(
        name=field.name,
        kind=kind,
        rows=field.rows,
        missing_share=int(ids[:, MISSING].sum()) / log_rows,  # once a row, multi-valued or not
        unknown_shares=tuple((ids[:, UNKNOWN] / np.maximum(values, 1)).tolist()),
        **value_statistics(codes[:, FIRST_VALUE:].sum(axis=0)),
    )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a log came from, for the manifest."""

    name: str
    """The file, or the name of a well-known set."""
    notes: Callable[[], Sequence[str]] = tuple
    """What whoever uses the data should know; asked when all rows are read."""


@dataclass
class _Reading:
    """What one reading of the log left: codes on disk, the rest in memory, a few bytes a row."""

    spill: Spill
    dictionaries: Mapping[str, GrowingDictionary]
    labels: list[NDArray[np.uint8]] = field(default_factory=list)
    keys: list[NDArray[Any]] = field(default_factory=list)
    cut: int = 0

    @property
    def label(self) -> NDArray[np.uint8]:
        return np.concatenate(self.labels)

    @property
    def key(self) -> NDArray[Any]:
        return np.concatenate(self.keys)


def encode_log(
    chunks: Iterable[RawChunk],
    schema: LogSchema,
    out: str | os.PathLike[str],
    *,
    origin: Origin,
    bad: BadRows | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Encode the chunks of a raw log into a folder.

    `bad` is what the chunks' reader hands its own bad rows to.
    """
    bad = bad or BadRows()
    with new_folder(Path(out), overwrite=overwrite) as folder:
        if bad.keep == "aside":
            bad.file = folder / BAD_ROWS
        with closing(Spill(folder)) as spill:
            reading = _read(chunks, schema, spill, bad)
            bad.close()
            bad.raise_if_any()
            if not len(spill):
                raise DataError(
                    f"no row of {origin.name} could be read: {bad.summary() or 'it is empty'}"
                )
            _write(folder, reading, schema, bad=bad, origin=origin, progress=progress)


def _read(chunks: Iterable[RawChunk], schema: LogSchema, spill: Spill, bad: BadRows) -> _Reading:
    dictionaries = {name: GrowingDictionary() for name in schema.vocabularies}
    reading = _Reading(spill, dictionaries)
    coder = RowCoder(schema, {name: found.dtype for name, found in dictionaries.items()})
    # rows set aside are written in the order they are met, which a second thread would leave to chance
    for chunk in chunks if bad.keep == "aside" else one_ahead(chunks):
        coded = coder.code(chunk, bad)
        if bad.stops:
            continue  # nothing will come of it, but the bad rows are counted to the end
        key = coded.key
        if schema.split.kind == "given" and not schema.split.column:
            key = np.full(len(coded), _part_of(chunk), np.uint8)
        spill.append(coded)
        reading.labels.append(coded.label)
        reading.keys.append(key)
        reading.cut += coded.cut
    return reading


def _part_of(chunk: RawChunk) -> int:
    if chunk.part not in SPLIT_NAMES:
        raise DataError(
            "the split is given by the files, but a file was not said to be for train, valid or test"
        )
    return SPLIT_NAMES.index(chunk.part)


def _write(
    folder: Path,
    reading: _Reading,
    schema: LogSchema,
    *,
    bad: BadRows,
    origin: Origin,
    progress: Progress,
) -> None:
    spill, label = reading.spill, reading.label
    parts = split_rows(schema.split, len(spill), reading.key)
    codes = count_codes(spill, parts, schema, _sizes(schema, reading), progress)
    columns = [column for column in schema.columns if column.is_number]
    numbers = dict(zip(columns, summarise_numbers(spill, parts, columns), strict=True))
    encoder, ids_of = _make_encoder(schema, reading, codes, numbers)
    lookups = [ids_of[column.name] for column in slot_columns(schema)]
    finisher = Finisher(schema, lookups, encoder.scales, encoder.edges)
    binned = _write_arrays(folder, spill, finisher, parts=parts, label=label, progress=progress)
    ids = binned | {
        name: _count_ids(ids_of[name], counted, encoder.fields[name].rows)
        for name, counted in codes.items()
    }
    np.save(folder / "counts.npy", _training_counts(encoder, ids))
    encoder.save(folder / ENCODER)
    (folder / SCHEMA).write_text(schema.to_toml(), encoding="utf-8")
    rows_read = len(spill) + bad.count
    spill.close()
    statistics = describe(
        encoder,
        codes | binned,
        ids,
        missing={column.name: found.missing for column, found in numbers.items()},
        parts=parts,
        label=label,
        bad_rows=bad.count,
    )
    write_manifest(
        folder,
        {
            "schema": encoder.fields.to_mapping(),
            "rows": list(statistics.rows),
            "rows_read": rows_read,
            "values_cut": reading.cut,
            "bad_rows": dict(bad.reasons),
            "origin": origin.name,
            "notes": list(origin.notes()),
            "statistics": statistics.to_mapping(),
        },
    )


def _training_counts(encoder: Encoder, ids: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how often each id of each field occurs in training, field after field; padding never."""
    counts = [ids[field.name][0].copy() for field in encoder.fields.table_fields]
    for count in counts:
        count[PADDING] = 0
    return np.concatenate(counts) if counts else np.zeros(0, np.int64)


def _count_ids(ids: NDArray[np.int32], counts: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Return how often each id occurs in each part, from how often each code does."""
    found = [np.bincount(ids, weights=part, minlength=rows) for part in counts]
    return np.stack(found).astype(np.int64)


def _sizes(schema: LogSchema, reading: _Reading) -> dict[str, int]:
    """Return how many codes each column has."""
    highest: dict[str, int] = {}
    slots = slot_columns(schema)
    for column, code in zip(slots, reading.spill.highest.tolist(), strict=True):
        name = column.vocabulary_name
        if column.buckets is None:
            highest[name] = max(highest.get(name, 0), code + 1)
    return {
        column.name: highest[column.vocabulary_name]
        if column.buckets is None
        else FIRST_VALUE + column.buckets
        for column in slots
    }


def _make_encoder(
    schema: LogSchema,
    reading: _Reading,
    codes: Mapping[str, NDArray[np.int64]],
    numbers: Mapping[Column, NumberSummary],
) -> tuple[Encoder, dict[str, NDArray[np.int32]]]:
    """Return the encoder, and for each column with codes the id of every code."""
    vocabularies = {
        name: _vocabulary(schema, name, reading, [codes[column.name] for column in columns])
        for name, columns in schema.vocabularies.items()
    }
    encoder = Encoder(
        schema=schema,
        values={name: found.values for name, found in vocabularies.items()},
        scales={
            column.name: (found.mean, found.std)
            for column, found in numbers.items()
            if not column.has_ids
        },
        edges={column.name: found.quantiles for column, found in numbers.items() if column.has_ids},
    )
    ids = {
        column.name: np.arange(FIRST_VALUE + column.buckets, dtype=np.int32)
        if column.buckets is not None
        else vocabularies[column.vocabulary_name].ids
        for column in slot_columns(schema)
    }
    return encoder, ids


def _vocabulary(
    schema: LogSchema, name: str, reading: _Reading, codes: Sequence[NDArray[np.int64]]
) -> Vocabulary:
    """Make the vocabulary of the columns whose codes these counts are of."""
    counts = np.sum(codes, axis=0)
    column = schema.vocabularies[name][0]
    return make_vocabulary(
        (counts.sum(axis=0) if schema.counts == "all" else counts[0])[FIRST_VALUE:],
        _bin_texts if column.kind == "numeric" else reading.dictionaries[name].texts,
        min_count=column.min_count,
        unknown_share=schema.unknown_share,
        stream=name,
        seed=schema.split.seed,
    )


def _bin_texts(codes: NDArray[np.int64]) -> pl.Series:
    return pl.Series(codes + LOWEST_BIN).cast(pl.String)


def _write_arrays(
    folder: Path,
    spill: Spill,
    finisher: Finisher,
    *,
    parts: NDArray[np.uint8],
    label: NDArray[np.uint8],
    progress: Progress,
) -> dict[str, NDArray[np.int64]]:
    """Write ids, numbers and labels: the rows of a chunk go to the next places of their parts.

    Return how often each id of each column of quantile bins occurs: only now are they known.
    """
    rows = len(spill)
    sizes = np.bincount(parts, minlength=3).tolist()
    places = [0, sizes[0], sizes[0] + sizes[1]]
    binned = finisher.empty_bin_counts()
    with (
        closing(ArrayWriter(folder / "ids.npy", (rows, finisher.num_slots), np.int32)) as to_ids,
        closing(
            ArrayWriter(folder / "numeric.npy", (rows, finisher.num_numbers), np.float32)
        ) as to_numeric,
        closing(ArrayWriter(folder / "label.npy", (rows,), np.uint8)) as to_label,
    ):
        for which, coded in spill.chunks():
            ids, numeric = finisher(coded)
            for part in range(3):
                chosen = np.flatnonzero(parts[which] == part)
                part_ids = ids.take(chosen, axis=0)
                to_ids.write(places[part], part_ids)
                to_numeric.write(places[part], numeric.take(chosen, axis=0))
                to_label.write(places[part], label[which].take(chosen))
                places[part] += len(chosen)
                for name, slot in finisher.bin_slots.items():
                    add_counts(binned[name][part], part_ids[:, slot])
            progress("writing", which.stop, rows)
    return binned
