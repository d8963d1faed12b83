"""The teacher of a generated click log: the effect of every value, and the chance of a click.

The fields are dealt out at random to 2P groups: A_p and B_p for each of the P patterns. In its
group a value has a scalar, its effect; a numeric field has a weight; the effects of the values of
a multi-valued field are averaged. A row's effects are added up group by group, and with [.] for
"minus its mean, over its spread":

    score       = SPREAD / sqrt(P) * sum over p of (MAIN [A_p] + MAIN [B_p] + CROSS [A_p] [B_p])
    probability = (1 - noise) * logistic(bias + score) + noise * CLICK_RATE

Without patterns all fields form one group S, and the score is SPREAD [S]: additive. Means, spreads
and the bias are measured on a sample of rows, so that the click rate and the strength of the
signal hardly depend on the seed and the dials.

The effect of a rare value is `s * its parent's + sqrt(1 - s * s) * one of its own`: the tail
similarity s is their correlation. Redundant values have no effect in any group.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rarebit.data.counter_random import bell, random_bits, stream_key, uniform
from rarebit.data.schema import FIRST_VALUE, PADDING
from rarebit.data.synthetic_columns import Column, Ids, Numbers, parent_ids

__all__ = ["CLICK_RATE", "Rows", "Teacher", "draw_effects", "logistic"]

CLICK_RATE = 0.25
SPREAD = 1.6  # of the scores: the best AUC is about 0.84
MAIN, CROSS = 0.62, 0.48  # MAIN**2 + MAIN**2 + CROSS**2 = 1: a quarter of the signal is interaction

Rows = Mapping[str, Ids | Numbers]
"""Some rows of the log: for each field, ids `(max_length, n)` or numbers `(n,)`."""
Group = dict[str, Numbers]
"""For each field of a group, the effects of its ids; the weight alone for a numeric field."""


def draw_effects(
    columns: Sequence[Column],
    *,
    seed: int,
    tail_similarity: float,
    redundancy: float,
    num_patterns: int,
) -> list[Group]:
    """Return the effects of all values: groups A_1, B_1, A_2, B_2 and so on, or S alone.

    >>> hour, age = Column("hour", 24), Column("age")
    >>> dials = dict(seed=0, tail_similarity=0.5, redundancy=0.0, num_patterns=1)
    >>> [list(group) for group in draw_effects([hour, age], **dials)]
    [['hour'], ['age']]
    """
    return [
        {
            column.name: _effects(column, number, seed, tail_similarity, redundancy)
            for column in members
        }
        for number, members in enumerate(_deal(columns, num_patterns, seed))
    ]


def logistic(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-score)) by exactly rounded operations, so the same on every machine.

    Takes exp(x) as ((1 + x/2048) / (1 - x/2048)) ** 1024, true to 1e-4 for |x| < 10.

    >>> logistic(np.array([0.0, 2.0])).round(6).tolist()
    [0.5, 0.880797]
    """
    small = np.clip(scores, -30.0, 30.0) / 2048.0
    power = (1.0 + small) / (1.0 - small)
    for _ in range(10):
        power *= power
    return power / (1.0 + power)


class Teacher:
    """Knows the true chance of a click of any row, once it has seen a sample of rows."""

    def __init__(self, effects: Sequence[Group], sample: Rows, *, noise: float) -> None:
        self._effects, self._noise = effects, noise
        sums = [_sum(group, sample) for group in effects]
        self._means = [_mean(total) for total in sums]
        self._spreads = [_spread(total) for total in sums]
        self._bias = _bias(self._scores(sample))

    def probability(self, rows: Rows) -> NDArray[np.float64]:
        """Return the chance of a click of each row, `(n,)`."""
        chance = logistic(self._bias + self._scores(rows))
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


def _deal(columns: Sequence[Column], num_patterns: int, seed: int) -> list[list[Column]]:
    """Deal all fields to the groups; then all again, where patterns are left without a field."""
    if num_patterns == 0:
        return [list(columns)]
    groups: list[list[Column]] = []
    while len(groups) < 2 * num_patterns:
        shuffled = _shuffled(columns, stream_key(seed, "deal", len(groups)))
        num_groups = min(2 * num_patterns - len(groups), len(columns) // 2 * 2)
        groups.extend(shuffled[first::num_groups] for first in range(num_groups))
    return groups


def _shuffled(columns: Sequence[Column], key: int) -> list[Column]:
    bits = random_bits(key, np.arange(len(columns), dtype=np.uint64))
    return [columns[position] for position in np.argsort(bits, kind="stable")]


def _effects(
    column: Column, group: int, seed: int, tail_similarity: float, redundancy: float
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
        total += _effect(effects, rows[name])
    return total


def _effect(effects: Numbers, column: Ids | Numbers) -> Numbers:
    """Return one field's effect in each row, `(n,)`."""
    total = np.zeros(column.shape[-1], np.float32)
    if column.ndim == 1:
        total += effects[0] * column
        return total
    for ids in column:
        total += effects[ids]
    if len(column) > 1:
        num_values = (column != PADDING).sum(axis=0)
        total /= np.maximum(num_values, 1).astype(np.float32)
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
