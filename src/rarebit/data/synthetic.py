"""The built-in click log: generated, so the true probability of every click is known.

**Values.** Value v of a field with D values is the (v + 1)-th most frequent one. Each row has a latent
topic, and in each row

    v = floor(D * u ** power)       u uniform in [0, 1): the top share x of the values holds
                                    x ** (1 / power) of the rows
    v = v - v % T + topic % T       in three rows of four, and for v >= T only, with the row's topic
                                    and the number T of the field's topics

so values of one topic, v % T, co-occur. A rare value (outside the most frequent fifth) has a parent: a
frequent value of the same topic.

**Clicks.** A teacher deals the fields out at random to 2P groups: A_p and B_p for each of the P patterns.
In its group a value has a scalar effect and a numeric field a weight; the effects of the values of a
multi-valued field are averaged. Effects are added up per group, and with [.] for "minus its mean, over
its spread":

    score       = SPREAD / sqrt(P) * sum over p of (MAIN [A_p] + MAIN [B_p] + CROSS [A_p] [B_p])
    probability = (1 - noise) * logistic(bias + score) + noise * CLICK_RATE

Without patterns all fields form one group S, and the score is SPREAD [S]: additive. Means, spreads and
the bias are measured on a sample of rows, so that click rate and signal hardly depend on the seed.
The effect of a rare value is `s * its parent's + sqrt(1 - s * s) * its own`: the tail similarity s is
their correlation. Redundant values have no effect in any group.

**Drift.** With drift d, the score of row t of N is ((1 - x) s + x s') / sqrt(x² + (1 - x)²), x = d t / N, where s' has other
effects: what a model learns grows old.

`Dataset.probability` keeps the probability: its AUC is the ceiling of any model. Rows are split 8:1:1
in memory order. A value with fewer than MIN_COUNT training rows becomes UNKNOWN in all three splits.

The seed decides every bit, on every machine. The settings change labels and probabilities, never the
values. A longer log begins with the rows of a shorter one, apart from which values are UNKNOWN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rarebit.data.dataset import Dataset, Splits
from rarebit.data.order import bell, random_bits, stream_key, uniform
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN, Field, Schema
from rarebit.settings import check_types, require

_LATER_SEED = 1_000_003
"""From the seed of the first effects to that of those that clicks drift to."""
_MAX_TOPICS = 256
_VALUES_PER_TOPIC = 20  # at least, so that every topic has four frequent values
# The lower 11 of the 64 random bits do not enter u, so coins can be cut from them.
_STAY_BITS = np.uint64(0b11)  # all zero in a quarter of the rows: the value stays in its own topic
_MISSING_BITS = np.uint64(0b11111100)  # all zero in one row of 64: the value is missing

Counters = NDArray[np.uint64]
Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class DrawnColumn:
    """How one field is drawn."""

    name: str
    num_values: int = 0
    """Values of the field; zero for a numeric one."""
    power: int = 3
    """Values are drawn as floor(num_values * u ** power): the higher, the fewer hold most rows."""
    max_length: int = 1
    """Most values in a row; above 1, the field is multi-valued."""
    can_be_missing: bool = False
    """Whether one row of 64 has no value."""

    @property
    def field(self) -> Field:
        """The field as the schema knows it."""
        if not self.num_values:
            return Field(name=self.name, kind="numeric")
        return Field(
            name=self.name,
            kind="multi" if self.max_length > 1 else "categorical",
            rows=FIRST_VALUE + self.num_values,
            max_length=self.max_length,
        )

    @property
    def num_frequent(self) -> int:
        """How many values count as frequent: a fifth."""
        return self.num_values // 5

    @property
    def num_topics(self) -> int:
        """How many topics the values fall into: a power of two; 1 for a field with few values."""
        topics = max(1, self.num_values // _VALUES_PER_TOPIC)
        return min(_MAX_TOPICS, 1 << (topics.bit_length() - 1))


def parent_ids(column: DrawnColumn, seed: int) -> Ids:
    """Return the parent of each id of a field: a frequent value of its topic, or the id itself."""
    ids, topics = np.arange(column.field.rows), column.num_topics
    if topics == 1:
        return ids
    u = uniform(random_bits(stream_key(seed, "parent", column.name), ids.astype(np.uint64)))
    # A block has one value per topic; block 0 has no topics. Parents have a Zipf-like tail as well.
    blocks = 1 + (u * u * u * (column.num_frequent // topics - 1)).astype(np.int64)
    values = ids - FIRST_VALUE
    parents = FIRST_VALUE + blocks * topics + values % topics
    return np.where(values < column.num_frequent, ids, parents)


def draw_topics(seed: int, counters: Counters) -> Ids:
    """Return the topic of each row; its lowest bits are the topic in fields with fewer topics."""
    bits = random_bits(stream_key(seed, "topic"), counters)
    return (bits % np.uint64(_MAX_TOPICS)).astype(np.int64)


def draw_column(column: DrawnColumn, seed: int, counters: Counters, topics: Ids) -> Ids | Numbers:
    """Return one field of some rows: ids `(max_length, n)`, or numbers `(n,)` of variance 1."""
    if not column.num_values:
        return bell(random_bits(stream_key(seed, "number", column.name), counters))
    keys = [stream_key(seed, "value", column.name, slot) for slot in range(column.max_length)]
    ids = np.stack([_draw_ids(column, random_bits(key, counters), topics) for key in keys])
    if column.max_length > 1:  # cut to a length between 0 and max_length, all equally likely
        bits = random_bits(stream_key(seed, "length", column.name), counters)
        lengths = (uniform(bits) * (len(ids) + 1)).astype(np.int64)
        for slot, values in enumerate(ids):
            values[lengths <= slot] = PADDING
    return ids


def _draw_ids(column: DrawnColumn, bits: NDArray[np.uint64], topics: Ids) -> Ids:
    u = uniform(bits)
    position = column.num_values * u
    for _ in range(column.power - 1):
        position *= u
    values = position.astype(np.int64)
    if column.num_topics > 1:
        topic_bits = column.num_topics - 1  # a mask: the number of topics is a power of two
        moved = (values & ~topic_bits) | (topics & topic_bits)
        moves = (bits & _STAY_BITS) != 0
        moves &= values >= column.num_topics
        moves &= moved < column.num_values  # the last block may be cut short
        np.copyto(values, moved, where=moves)
    values += FIRST_VALUE
    if column.can_be_missing:
        values[(bits & _MISSING_BITS) == 0] = MISSING
    return values


CLICK_RATE = 0.25
SPREAD = 1.6  # of the scores: the best AUC is about 0.84
MAIN, CROSS = 0.62, 0.48  # MAIN**2 + MAIN**2 + CROSS**2 = 1: a quarter of the signal is interaction

Rows = Mapping[str, Ids | Numbers]
"""Some rows of the log: for each field, ids `(max_length, n)` or numbers `(n,)`."""
Group = dict[str, Numbers]
"""For each field of a group, the effects of its ids; the weight alone for a numeric field."""


def draw_effects(
    columns: Sequence[DrawnColumn],
    *,
    seed: int,
    tail_similarity: float,
    redundancy: float,
    num_patterns: int,
) -> list[Group]:
    """Return the effects of all values: groups A_1, B_1, A_2, B_2 and so on, or S alone."""
    return [
        {
            column.name: _effects(column, number, seed, tail_similarity, redundancy)
            for column in members
        }
        for number, members in enumerate(_deal(columns, num_patterns, seed))
    ]


def logistic(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-score)) by exactly rounded operations, so the same on every machine.

    exp(x) is ((1 + x/2048) / (1 - x/2048)) ** 1024, exact to 1e-4 for |x| < 10.
    """
    small = np.clip(scores, -30.0, 30.0) / 2048.0
    power = (1.0 + small) / (1.0 - small)
    for _ in range(10):
        power *= power
    return power / (1.0 + power)


class Teacher:
    """Knows the true probability of a click for any row, after measuring a sample of rows."""

    def __init__(self, effects: Sequence[Group], sample: Rows, *, noise: float) -> None:
        self._effects, self._noise = effects, noise
        sums = [_sum(group, sample) for group in effects]
        self._means = [_mean(total) for total in sums]
        self._spreads = [_spread(total) for total in sums]
        self._bias = _bias(self._scores(sample))

    def probability(
        self,
        rows: Rows,
        later: "Teacher | None" = None,
        share: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return the probability of a click for each row, `(n,)`; a `share` of its score is that of a `later` teacher."""
        scores = self._scores(rows)
        if later is None or share is None:
            scores = self._bias + scores
        else:
            both = np.sqrt(share * share + (1 - share) * (1 - share))  # keeps the spread
            mixed = (1 - share) * scores + share * later._scores(rows)  # noqa: SLF001  # its own class
            bias = (1 - share) * self._bias + share * later._bias  # noqa: SLF001  # its own class
            scores = bias + mixed / both
        chance = logistic(scores)
        return (1 - self._noise) * chance + self._noise * CLICK_RATE

    def _scores(self, rows: Rows) -> NDArray[np.float64]:
        sums = [
            (_sum(group, rows) - np.float32(mean)) / np.float32(spread)
            for group, mean, spread in zip(self._effects, self._means, self._spreads, strict=True)
        ]
        if len(sums) == 1:
            return SPREAD * sums[0].astype(np.float64)
        total = np.zeros_like(sums[0])
        for left, right in zip(sums[::2], sums[1::2], strict=True):
            total += np.float32(MAIN) * (left + right) + np.float32(CROSS) * (left * right)
        return SPREAD / math.sqrt(len(sums) // 2) * total.astype(np.float64)


def _deal(columns: Sequence[DrawnColumn], num_patterns: int, seed: int) -> list[list[DrawnColumn]]:
    """Deal all fields to the groups; then all again, where patterns are left without a field."""
    if num_patterns == 0:
        return [list(columns)]
    groups: list[list[DrawnColumn]] = []
    while len(groups) < 2 * num_patterns:
        bits = random_bits(
            stream_key(seed, "deal", len(groups)), np.arange(len(columns), dtype=np.uint64)
        )
        shuffled = [columns[position] for position in np.argsort(bits, kind="stable")]
        num_groups = min(2 * num_patterns - len(groups), len(columns) // 2 * 2)
        groups.extend(shuffled[first::num_groups] for first in range(num_groups))
    return groups


def _effects(
    column: DrawnColumn, group: int, seed: int, tail_similarity: float, redundancy: float
) -> Numbers:
    ids = np.arange(max(1, column.field.rows), dtype=np.uint64)
    own = bell(random_bits(stream_key(seed, "effect", column.name, group), ids))
    if not column.num_values:
        return own  # the weight of a numeric field
    parents = parent_ids(column, seed)
    own_share = math.sqrt(1 - tail_similarity * tail_similarity)
    blend = np.float32(tail_similarity) * own[parents] + np.float32(own_share) * own
    effects = np.where(parents == np.arange(len(ids)), own, blend)
    chance = uniform(random_bits(stream_key(seed, "redundant", column.name), ids))
    effects[(ids >= FIRST_VALUE) & (chance < redundancy)] = 0
    effects[PADDING] = 0
    return effects


def _sum(group: Group, rows: Rows) -> Numbers:
    """Return the effects of each row, added up field by field: the order decides the last bit."""
    total = np.zeros(next(iter(rows.values())).shape[-1], np.float32)
    for name, effects in group.items():
        column = rows[name]
        effect = np.zeros_like(total)
        if column.ndim == 1:
            effect += effects[0] * column
        for ids in column if column.ndim > 1 else ():
            effect += effects[ids]
        if column.ndim > 1 and len(column) > 1:
            num_values = (column != PADDING).sum(axis=0)
            effect /= np.maximum(num_values, 1).astype(np.float32)
        total += effect
    return total


def _mean(numbers: Numbers | NDArray[np.float64]) -> float:
    # fsum rounds once, at the end: no order of addition, no difference between machines.
    return math.fsum(numbers.tolist()) / len(numbers)


def _spread(numbers: Numbers) -> float:
    """Return the standard deviation, or 1 where all numbers are equal."""
    deviations = numbers - np.float32(_mean(numbers))
    return math.sqrt(_mean(deviations * deviations)) or 1.0


def _bias(scores: NDArray[np.float64]) -> float:
    """Return the bias that brings the sample's click rate to CLICK_RATE, by bisection."""
    low, high = -16.0, 16.0
    for _ in range(24):
        middle = (low + high) / 2
        if _mean(logistic(middle + scores)) < CLICK_RATE:
            low = middle
        else:
            high = middle
    return low


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

PRESETS: dict[str, tuple[DrawnColumn, ...]] = {
    "default": (
        DrawnColumn("user", 12_000, power=12),
        DrawnColumn("item", 2_500, power=8),
        DrawnColumn("brand", 300, power=4),
        DrawnColumn("category", 40, power=2),
        DrawnColumn("city", 100, can_be_missing=True),
        DrawnColumn("device", 5, power=2),
        DrawnColumn("hour", 24, power=1),
        DrawnColumn("tags", 100, max_length=4),
        DrawnColumn("price"),
        DrawnColumn("age"),
    ),
    "criteo": tuple(map(DrawnColumn, _CRITEO_NAMES, _CRITEO_CARDINALITIES)),
}
"""The columns of each preset."""


@dataclass(frozen=True, kw_only=True)
class SyntheticLog:
    """Settings of the generated click log.

    >>> SyntheticLog(rows=10_000, noise=0.5).num_patterns
    3
    """

    preset: Literal["default", "criteo"] = "default"
    """Ten readable fields ("default"), or 39 with the cardinalities of Criteo's ("criteo")."""
    rows: int = 1_250_000
    """Rows of the three splits together."""
    seed: int = 0
    """Random seed: decides every bit of the log."""
    tail_similarity: float = 0.7
    """Correlation of a rare value's effects with those of the frequent value it co-occurs with."""
    redundancy: float = 0.2
    """Share of the values that have no effect: capacity spent on them is wasted."""
    num_patterns: int = 3
    """Independent interactions between groups of fields; 0 makes all effects additive."""
    noise: float = 0.0
    """Share of the labels that are coin flips at the click rate, whatever the row."""
    drift: float = 0.0
    """How far clicks drift to other effects from the first row to the last: 0 not at all, 1 completely."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rows >= 10, f"rows must be at least 10, got rows={self.rows}")
        require(self.seed >= 0, f"seed must be at least 0, got seed={self.seed}")
        require(
            0 <= self.num_patterns <= 100,
            f"num_patterns must lie between 0 and 100, got num_patterns={self.num_patterns}",
        )
        for name in ("tail_similarity", "redundancy", "noise", "drift"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must lie between 0 and 1, got {name}={value}")


def generate(
    settings: SyntheticLog = SyntheticLog(),
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Splits:
    """Return the log's three splits; calls `progress(done_rows, total_rows)` as it draws rows.

    It uses as many threads as torch (`torch.set_num_threads`); the result does not depend on them.

    >>> train, valid, test = generate(SyntheticLog(rows=1000))
    >>> len(train), len(valid), len(test), train.schema.fields[0].name
    (800, 100, 100, 'user')
    """
    log, starts = _Log(settings), range(0, settings.rows, _CHUNK_ROWS)
    chunks = [slice(start, min(start + _CHUNK_ROWS, settings.rows)) for start in starts]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for chunk, _ in zip(chunks, pool.map(log.draw, chunks), strict=True):
            if progress is not None:
                progress(chunk.stop, settings.rows)
        new_ids = list(pool.map(log.new_ids, log.schema.table_fields))
        list(pool.map(lambda chunk: log.rename(chunk, new_ids), chunks))
    return Splits(*(log.part(rows) for rows in _split(settings.rows)))


def _split(num_rows: int) -> tuple[slice, slice, slice]:
    """Return the rows of train, valid and test: 8:1:1."""
    train = num_rows * 8 // 10
    valid = train + (num_rows - train) // 2
    return slice(0, train), slice(train, valid), slice(valid, num_rows)


class _Log:
    """A log's arrays. Threads fill them, a chunk of rows each."""

    def __init__(self, settings: SyntheticLog) -> None:
        self.columns, self.seed = PRESETS[settings.preset], settings.seed
        self.schema = Schema(tuple(column.field for column in self.columns))
        counters = np.arange(_SAMPLE_ROWS, dtype=np.uint64) + np.uint64(_SAMPLE_START)
        sample = self._rows(counters)
        self.drift = settings.drift
        self.teacher, self.later = (
            Teacher(
                draw_effects(
                    self.columns,
                    seed=seed,
                    tail_similarity=settings.tail_similarity,
                    redundancy=settings.redundancy,
                    num_patterns=settings.num_patterns,
                ),
                sample,
                noise=settings.noise,
            )
            for seed in (settings.seed, settings.seed + (_LATER_SEED if self.drift else 0))
        )
        self.ids = np.empty((settings.rows, self.schema.num_slots), np.int32)
        self.numeric = np.empty((settings.rows, len(self.schema.numeric_fields)), np.float32)
        self.label, self.probability = np.empty((2, settings.rows), np.float32)

    def _rows(self, counters: Counters) -> Rows:
        topics = draw_topics(self.seed, counters)
        return {
            column.name: draw_column(column, self.seed, counters, topics) for column in self.columns
        }

    def draw(self, chunk: slice) -> None:
        counters = np.arange(chunk.start, chunk.stop, dtype=np.uint64)
        rows = self._rows(counters)
        later = self.later if self.drift else None
        share = self.drift * counters.astype(np.float64) / len(self.ids)
        probability = self.teacher.probability(rows, later, share)
        self.probability[chunk] = probability
        u = uniform(random_bits(stream_key(self.seed, "label"), counters))
        self.label[chunk] = u < probability
        for name, slots in self.schema.slots.items():
            self.ids[chunk, slots] = rows[name].T
        for position, field in enumerate(self.schema.numeric_fields):
            self.numeric[chunk, position] = rows[field.name]

    def new_ids(self, field: Field) -> NDArray[np.int32]:
        """Return the new id of each id of a field: itself, or UNKNOWN where training lacks it."""
        train, _, _ = _split(len(self.ids))
        ids = self.ids[train, self.schema.slots[field.name]].ravel()
        is_rare = np.bincount(ids, minlength=field.rows) < MIN_COUNT
        is_rare[:FIRST_VALUE] = False
        return np.where(is_rare, UNKNOWN, np.arange(field.rows)).astype(np.int32)

    def rename(self, chunk: slice, new_ids: Sequence[NDArray[np.int32]]) -> None:
        ids = self.ids[chunk]
        for slots, new in zip(self.schema.slots.values(), new_ids, strict=True):
            ids[:, slots] = new[ids[:, slots]]

    def part(self, rows: slice) -> Dataset:
        arrays = (self.ids[rows], self.numeric[rows], self.label[rows])
        return Dataset(self.schema, *arrays, probability=self.probability[rows])
