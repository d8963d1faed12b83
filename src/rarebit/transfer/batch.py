"""Random numbers on the device that depend on seed, step and place alone.

    bits(place) = mix(key + (step * 2^32 + place) * GOLDEN)      splitmix64, as in `data/counter_random.py`

All processes draw the same numbers, whatever their device; a run that goes on from a checkpoint needs
the number of its step only, and a recorded step draws new numbers at every replay.

What a transfer loss sees of a step: the rows that may move, and rows of the other side to move to.

The rows are those of one group of tables (`row_gradients/lookups.py:RowGroup`), each row once, sorted by table.
Tables are told apart by a number a row, so that all of them are one operation: no loop over fields, and no
size that depends on the ids. Means are over the rare rows of a table that are in the batch.

Shapes: U distinct rows, F tables, M embedding sets that lie side by side in a row (1 for most), D the width
of one set, S rows sampled of each table, P rows picked of each table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Draws", "Picked", "TransferBatch"]


def _signed(bits: int) -> int:
    """Return 64 bits as the integer that torch keeps them in."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_STEP = _signed((_GOLDEN << 32) % (1 << 64))


class Draws:
    """A source of random numbers that moves on by one step at a time.

    >>> draws = Draws(key=1234567, device=torch.device("cpu"))
    >>> first = draws.uniform(3)
    >>> draws.advance()
    >>> torch.equal(draws.uniform(3), first)
    False
    """

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = _signed(key % (1 << 64))
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self._unit = torch.tensor(2.0**-53, dtype=torch.float64).to(device)
        self._known: dict[tuple[int, int], Tensor] = {}

    def advance(self) -> None:
        """Go on to the numbers of the next step."""
        self.step.add_(1)

    def uniform(self, *shape: int, first: int = 0) -> Tensor:
        """Return numbers in [0, 1), float64; the places of a step begin at `first`."""
        size = torch.Size(shape)
        bits = torch.add(self._keys(first, size.numel()), self.step, alpha=_STEP)
        bits = (bits ^ _shifted(bits, 30)) * _FIRST
        bits = (bits ^ _shifted(bits, 27)) * _SECOND
        bits = bits ^ _shifted(bits, 31)
        return (_shifted(bits, 11) * self._unit).reshape(size)

    def _keys(self, first: int, number: int) -> Tensor:
        """Return what the places add to the bits in every step, `(number,)`."""
        if (first, number) not in self._known:
            places = torch.arange(first, first + number, device=self.step.device)
            self._known[first, number] = places * _GOLDEN + self.key
        return self._known[first, number]


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right with zeros coming in; torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Picked:
    """At most P of the rows that may move, of each table."""

    index: Tensor
    """Where they are among the rows, `(F, P)`; any row where a table has fewer."""
    is_there: Tensor
    """Which of them there are, `(F, P)`."""
    rows: Tensor
    """How many rows that may move each table has, `(F,)`."""
    dtype: torch.dtype

    @property
    def number(self) -> Tensor:
        """How many each table has, `(F,)`."""
        return self.rows.clamp(max=self.index.shape[1])

    @property
    def weight(self) -> Tensor:
        """What each counts, `(F, P)`: 1 over their number, 0 where there is none."""
        return self.is_there / self.number.clamp(min=1).to(self.dtype).unsqueeze(1)


@dataclass(frozen=True)
class TransferBatch:
    """The distinct rows of a step, and sampled rows of the other side."""

    ids: Tensor
    """The number of each row in the group, `(U,)`."""
    table: Tensor
    """Which table each row is of, ascending but for slots without a row, `(U,)`."""
    rows: Tensor
    """What the tables hold, `(U, M, D)`."""
    moves: Tensor
    """Which rows the loss may move, `(U,)`: the rare ones that were selected."""
    others: Tensor
    """Rows to move to, `(F, S, M, D)`: a sample of the frequent ones, without a history."""
    turn: Tensor
    """A random number in [0, 1) for each table, `(F,)`."""
    draws: Draws
    """More random numbers of the step."""
    look_up: Callable[[Tensor], Tensor]
    """Ids `(n, F)` of each table to rows `(n, F, M, D)`, without a history."""
    flipped: bool = False
    """Whether the sides are exchanged: frequent rows move, to a sample of the rare ones."""

    @property
    def num_tables(self) -> int:
        """How many tables there are: F."""
        return len(self.others)

    @cached_property
    def member(self) -> Tensor:
        """Which rows that may move are of which table, as numbers 0 and 1, `(F, U)`."""
        tables = torch.arange(self.num_tables, device=self.table.device)
        # numbers at once: what is as long as all rows of all tables is written twice, not four times
        shape = (self.num_tables, len(self.table))
        member = torch.eq(tables.unsqueeze(1), self.table, out=self.rows.new_empty(shape))
        return member.mul_(self.moves)

    @cached_property
    def number(self) -> Tensor:
        """How many rows of each table may move, `(F,)`."""
        return self.member.sum(dim=1)

    @cached_property
    def divisor(self) -> Tensor:
        """What sums over the rows of each table are divided by for a mean, `(F,)`: their number, or 1."""
        return self.number.clamp(min=1.0)

    @cached_property
    def share(self) -> Tensor:
        """What each row counts in the mean of its table, `(U,)`; 0 for rows that do not move."""
        return self.moves.to(self.rows.dtype) / self.divisor.index_select(0, self.table)

    @cached_property
    def present(self) -> Tensor:
        """Which tables have rows to move, as numbers 0 and 1, `(F,)`."""
        return self.number.clamp(max=1.0)

    def with_totals(self) -> "TransferBatch":
        """Return the batch, which now knows how many rows of each table may move.

        Else that is found out where it is first asked for, which a compiler cannot follow.
        """
        _ = self.divisor, self.present
        return self

    def total(self, values: Tensor) -> Tensor:
        """Return the sums `(F, ...)` over those rows `(U, ...)` of each table that may move.

        As a product of matrices: additions on a GPU come in any order else, and all processes must
        get the same bits.
        """
        flat = values.reshape(len(values), -1)
        return (self.member @ flat).reshape(self.num_tables, *values.shape[1:])

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values `(F, ...)` of each row's table, `(U, ...)`."""
        flat = values.reshape(self.num_tables, -1)
        return F.embedding(self.table, flat).reshape(len(self.table), *values.shape[1:])

    def pick(self, most: int) -> Picked:
        """Return at most so many rows of each table that may move, each with the same chance."""
        number = self.number.long().unsqueeze(1)  # (F, 1)
        # The rows that may move have ranks from 1 on, table after table. Of each table's ranks, `most`
        # neighbours in a ring that begins anywhere are taken: no size varies.
        rank = self.moves.cumsum(0)
        before = number.cumsum(0) - number + 1
        shift = (self.turn.unsqueeze(1) * number).long() + before
        places = torch.arange(most, device=rank.device)
        wanted = (places - shift) % number.clamp(min=1) + before  # (F, P)
        index = torch.searchsorted(rank, wanted).clamp(max=len(rank) - 1)
        return Picked(index, places < number, number.squeeze(1), self.rows.dtype)

    def rows_at(self, index: Tensor) -> Tensor:
        """Return the rows at places of any shape, `(..., M, D)`."""
        return self.rows.index_select(0, index.reshape(-1)).reshape(
            *index.shape, *self.rows.shape[1:]
        )
