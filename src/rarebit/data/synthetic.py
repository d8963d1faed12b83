"""The built-in click log: generated, so the true chance of every click is known.

Each row has a latent topic. Each field draws a value with a Zipf-like tail and, more often than
not, moves it to the row's topic (`rarebit.data.synthetic_columns`). A teacher turns the row into
the chance of a click, with additive effects and interaction patterns, and the label is drawn from
it (`rarebit.data.synthetic_teacher`). `Dataset.probability` keeps the chance: its AUC is the
ceiling that no model can pass but by luck.

Rows are split 8:1:1 as they lie. A value that the training rows hold fewer than MIN_COUNT times
becomes UNKNOWN in all three splits: those it does hold train the UNKNOWN row for the others.

The seed decides every bit, on every machine: each random number is a hash of (seed, purpose, row),
and floats meet exactly rounded operations only, in a fixed order. The dials change labels and
probabilities, never the values. A longer log begins with the rows of a shorter one, apart from
which values are UNKNOWN.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rarebit.data.counter_random import random_bits, stream_key, uniform
from rarebit.data.dataset import Dataset, Splits
from rarebit.data.schema import FIRST_VALUE, UNKNOWN, Field, Schema
from rarebit.data.synthetic_columns import Column, Counters, draw_column, draw_topics
from rarebit.data.synthetic_teacher import Rows, Teacher, draw_effects
from rarebit.settings import check_types, require

__all__ = ["MIN_COUNT", "SyntheticLog", "generate"]

MIN_COUNT = 3
"""A value seen less often in training is UNKNOWN."""
_CHUNK_ROWS = 2**15  # a chunk's columns stay in the processor's cache
_SAMPLE_ROWS = 2**14
_SAMPLE_START = 2**63  # the teacher's sample lies far behind the last row of any log

_CRITEO_CARDINALITIES = (
    *(43, 98, 121, 41, 219, 111, 79, 68, 91, 5, 26, 36, 70),
    *(1441, 553, 175782, 128509, 302, 19, 11887, 630, 3, 49223, 5194, 174835, 3176),
    *(27, 11070, 148912, 10, 4540, 2009, 4, 154563, 17, 16, 53030, 81, 40954),
)
_CRITEO_NAMES = (*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))

_PRESETS: dict[str, tuple[Column, ...]] = {
    "default": (
        Column("user", 12_000, power=12),
        Column("item", 2_500, power=8),
        Column("brand", 300, power=4),
        Column("category", 40, power=2),
        Column("city", 100, can_be_missing=True),
        Column("device", 5, power=2),
        Column("hour", 24, power=1),
        Column("tags", 100, max_length=4),
        Column("price"),
        Column("age"),
    ),
    "criteo": tuple(map(Column, _CRITEO_NAMES, _CRITEO_CARDINALITIES)),
}


@dataclass(frozen=True, kw_only=True)
class SyntheticLog:
    """What the generated click log is like.

    >>> SyntheticLog(rows=10_000, noise=0.5).num_patterns
    3
    """

    preset: Literal["default", "criteo"] = "default"
    """Ten readable fields ("default"), or 39 with the cardinalities of Criteo's ("criteo")."""
    rows: int = 1_250_000
    """Rows of the three splits together."""
    seed: int = 0
    """Decides every bit of the log."""
    tail_similarity: float = 0.7
    """Correlation of a rare value's effects with those of the frequent value it co-occurs with."""
    redundancy: float = 0.2
    """Share of the values that have no effect: capacity spent on them is wasted."""
    num_patterns: int = 3
    """Independent interactions between groups of fields; 0 makes all effects additive."""
    noise: float = 0.0
    """Share of the labels that are coin flips at the click rate, whatever the row."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rows >= 10, f"rows must be at least 10, got rows={self.rows}")
        require(self.seed >= 0, f"seed must be at least 0, got seed={self.seed}")
        require(
            0 <= self.num_patterns <= 100,
            f"num_patterns must lie between 0 and 100, got num_patterns={self.num_patterns}",
        )
        for name in ("tail_similarity", "redundancy", "noise"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must lie between 0 and 1, got {name}={value}")


def generate(
    settings: SyntheticLog = SyntheticLog(),
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Splits:
    """Return the log's three splits; `progress(done_rows, total_rows)` is called as rows are drawn.

    Uses as many threads as torch does (`torch.set_num_threads`); the result does not depend on it.

    >>> train, valid, test = generate(SyntheticLog(rows=1000))
    >>> len(train), len(valid), len(test), train.schema.fields[0].name
    (800, 100, 100, 'user')
    """
    log, chunks = _Log(settings), _chunks(settings.rows)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for chunk, _ in zip(chunks, pool.map(log.draw, chunks), strict=True):
            if progress is not None:
                progress(chunk.stop, settings.rows)
        new_ids = list(pool.map(log.new_ids, log.schema.table_fields))
        for _ in pool.map(lambda chunk: log.rename(chunk, new_ids), chunks):
            pass
    return Splits(*(log.part(rows) for rows in _split(settings.rows)))


def _chunks(num_rows: int) -> list[slice]:
    starts = range(0, num_rows, _CHUNK_ROWS)
    return [slice(start, min(start + _CHUNK_ROWS, num_rows)) for start in starts]


def _split(num_rows: int) -> tuple[slice, slice, slice]:
    """Return the rows of train, valid and test: 8:1:1."""
    train = num_rows * 8 // 10
    valid = train + (num_rows - train) // 2
    return slice(0, train), slice(train, valid), slice(valid, num_rows)


class _Log:
    """A log's arrays. Threads fill them, a chunk of rows each."""

    def __init__(self, settings: SyntheticLog) -> None:
        self.columns, self.seed = _PRESETS[settings.preset], settings.seed
        self.schema = Schema(tuple(column.field for column in self.columns))
        self.teacher = self._teacher(settings)
        num_rows, num_numeric = settings.rows, len(self.schema.numeric_fields)
        self.ids = np.empty((num_rows, self.schema.num_slots), np.int32)
        self.numeric = np.empty((num_rows, num_numeric), np.float32)
        self.label = np.empty(num_rows, np.float32)
        self.probability = np.empty(num_rows, np.float32)

    def _teacher(self, settings: SyntheticLog) -> Teacher:
        effects = draw_effects(
            self.columns,
            seed=settings.seed,
            tail_similarity=settings.tail_similarity,
            redundancy=settings.redundancy,
            num_patterns=settings.num_patterns,
        )
        counters = np.arange(_SAMPLE_ROWS, dtype=np.uint64) + np.uint64(_SAMPLE_START)
        return Teacher(effects, self._rows(counters), noise=settings.noise)

    def _rows(self, counters: Counters) -> Rows:
        topics = draw_topics(self.seed, counters)
        return {
            column.name: draw_column(column, self.seed, counters, topics) for column in self.columns
        }

    def draw(self, chunk: slice) -> None:
        """Draw a chunk's values, chances and labels."""
        counters = np.arange(chunk.start, chunk.stop, dtype=np.uint64)
        rows = self._rows(counters)
        probability = self.teacher.probability(rows)
        self.probability[chunk] = probability
        u = uniform(random_bits(stream_key(self.seed, "label"), counters))
        self.label[chunk] = u < probability
        for name, slots in self.schema.slots.items():
            self.ids[chunk, slots] = rows[name].T
        for position, field in enumerate(self.schema.numeric_fields):
            self.numeric[chunk, position] = rows[field.name]

    def new_ids(self, field: Field) -> NDArray[np.int32]:
        """Return what each id of a field becomes: itself, or UNKNOWN where training lacks it."""
        train, _, _ = _split(len(self.ids))
        ids = self.ids[train, self.schema.slots[field.name]].ravel()
        is_rare = np.bincount(ids, minlength=field.rows) < MIN_COUNT
        is_rare[:FIRST_VALUE] = False
        return np.where(is_rare, UNKNOWN, np.arange(field.rows)).astype(np.int32)

    def rename(self, chunk: slice, new_ids: Sequence[NDArray[np.int32]]) -> None:
        """Give a chunk's rare values the id UNKNOWN."""
        ids = self.ids[chunk]
        for slots, new in zip(self.schema.slots.values(), new_ids, strict=True):
            ids[:, slots] = new[ids[:, slots]]

    def part(self, rows: slice) -> Dataset:
        """Return one split; it shares the log's memory."""
        return Dataset(
            self.schema,
            self.ids[rows],
            self.numeric[rows],
            self.label[rows],
            probability=self.probability[rows],
        )
