"""How the values of a generated click log are drawn: Zipf-like tails, topics, parents.

Value v of a field with D values is the (v + 1)-th most frequent one, and in each row

    v = floor(D * u ** power)       u uniform in [0, 1): the top share x of the values holds
                                    x ** (1 / power) of the rows
    v = v - v % T + topic % T       in three rows of four, and for v >= T only, with the row's topic
                                    and the number T of the field's topics

so values of one topic, v % T, meet in the same rows, and a move takes v to a value of about the
same popularity. The first T values are everybody's: no topic decides on them.

A rare value (outside the most frequent fifth) has a parent: a frequent value of the same topic.
What the two have in common beyond their company is up to the teacher.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rarebit.data.counter_random import bell, random_bits, stream_key, uniform
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, Field

__all__ = ["Column", "Counters", "Ids", "Numbers", "draw_column", "draw_topics", "parent_ids"]

_MAX_TOPICS = 256
_VALUES_PER_TOPIC = 20  # at least, so that every topic has four frequent values
# The lower 11 of the 64 random bits do not enter u, so coins can be cut from them.
_STAY_BITS = np.uint64(0b11)  # all zero in a quarter of the rows: the value stays in its own topic
_MISSING_BITS = np.uint64(0b11111100)  # all zero in one row of 64: the value is missing

Counters = NDArray[np.uint64]
Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class Column:
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


def parent_ids(column: Column, seed: int) -> Ids:
    """Return the parent of each id of a field: a frequent value of its topic, or the id itself.

    >>> parents = parent_ids(Column("brand", num_values=160), seed=0)  # 32 of them frequent
    >>> bool(parents[150] < 3 + 32 and (parents[150] - 150) % 8 == 0)
    True
    """
    ids, topics = np.arange(column.field.rows), column.num_topics
    if topics == 1:
        return ids
    u = uniform(random_bits(stream_key(seed, "parent", column.name), ids.astype(np.uint64)))
    # A block has one value a topic; block 0 is everybody's. Parents have a Zipf-like tail as well.
    blocks = 1 + (u * u * u * (column.num_frequent // topics - 1)).astype(np.int64)
    values = ids - FIRST_VALUE
    parents = FIRST_VALUE + blocks * topics + values % topics
    return np.where(values < column.num_frequent, ids, parents)


def draw_topics(seed: int, counters: Counters) -> Ids:
    """Return the topic of each row; its lowest bits are the topic in fields with fewer topics."""
    bits = random_bits(stream_key(seed, "topic"), counters)
    return (bits % np.uint64(_MAX_TOPICS)).astype(np.int64)


def draw_column(column: Column, seed: int, counters: Counters, topics: Ids) -> Ids | Numbers:
    """Return one field of some rows: ids `(max_length, n)`, or numbers `(n,)` of variance 1.

    >>> counters = np.arange(4, dtype=np.uint64)
    >>> draw_column(Column("hour", 24), 0, counters, draw_topics(0, counters)).shape
    (1, 4)
    """
    if not column.num_values:
        return bell(random_bits(stream_key(seed, "number", column.name), counters))
    keys = [stream_key(seed, "value", column.name, slot) for slot in range(column.max_length)]
    ids = np.stack([_draw_ids(column, random_bits(key, counters), topics) for key in keys])
    if column.max_length > 1:
        _pad(ids, random_bits(stream_key(seed, "length", column.name), counters))
    return ids


def _draw_ids(column: Column, bits: NDArray[np.uint64], topics: Ids) -> Ids:
    u = uniform(bits)
    position = column.num_values * u
    for _ in range(column.power - 1):
        position *= u
    values = position.astype(np.int64)
    if column.num_topics > 1:
        _move_to_topic(column, values, bits, topics)
    values += FIRST_VALUE
    if column.can_be_missing:
        values[(bits & _MISSING_BITS) == 0] = MISSING
    return values


def _move_to_topic(column: Column, values: Ids, bits: NDArray[np.uint64], topics: Ids) -> None:
    topic_bits = column.num_topics - 1  # a mask: the number of topics is a power of two
    moved = (values & ~topic_bits) | (topics & topic_bits)
    moves = (bits & _STAY_BITS) != 0
    moves &= values >= column.num_topics
    moves &= moved < column.num_values  # the last block may be cut short
    np.copyto(values, moved, where=moves)


def _pad(ids: Ids, bits: NDArray[np.uint64]) -> None:
    """Cut each row's list to a length between 0 and max_length, all equally likely."""
    lengths = (uniform(bits) * (len(ids) + 1)).astype(np.int64)
    for slot, values in enumerate(ids):
        values[lengths <= slot] = PADDING
