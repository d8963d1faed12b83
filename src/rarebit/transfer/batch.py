"""What a transfer loss sees of a step: the rows that may move, rows to move to, and random numbers.

The rows are those of one group of tables (`row_gradients/lookups.py:RowGroup`), each row once, sorted by table.
A number per row names its table, so that all tables are one operation: no loop over fields, and no size that
depends on the ids. Means are over the rare rows of a table that are in the batch.

Random numbers are drawn on the device and depend on seed, step and place alone:

    bits(place) = mix(key + (step * 2^32 + place) * GOLDEN)      splitmix64, as in `data/counter_random.py`

All processes draw the same numbers, whatever their device; a resumed run needs only the number of its step, and
a recorded step draws new numbers at every replay.

Shapes: U distinct rows, F tables, M embedding sets that lie side by side in a row (1 for most), D the width
of one set, S rows sampled from each table, P rows picked from each table.
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
    """Random numbers, new ones in each step."""

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = _signed(key % (1 << 64))
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self._unit = torch.tensor(2.0**-53, dtype=torch.float64).to(device)
        self._known: dict[tuple[int, int], Tensor] = {}

    def advance(self) -> None:
        """Move to the numbers of the next step."""
        self.step.add_(1)

    def uniform(self, *shape: int, first: int = 0) -> Tensor:
        """Return numbers in [0, 1), float64; the places of a step begin at `first`."""
        size = torch.Size(shape)
        key = (first, size.numel())
        if key not in self._known:  # what the places add to the bits in every step
            places = torch.arange(first, first + size.numel(), device=self.step.device)
            self._known[key] = places * _GOLDEN + self.key
        bits = torch.add(self._known[key], self.step, alpha=_STEP)
        bits = (bits ^ _shifted(bits, 30)) * _FIRST
        bits = (bits ^ _shifted(bits, 27)) * _SECOND
        bits = bits ^ _shifted(bits, 31)
        return (_shifted(bits, 11) * self._unit).reshape(size)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right with zeros; torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Picked:
    """At most P of each table's rows that may move."""

    index: Tensor
    """Their places among the rows, `(F, P)`; any place where a table has fewer."""
    is_there: Tensor
    """Which of them exist, `(F, P)`."""
    rows: Tensor
    """The number of rows of each table that may move, `(F,)`."""
    dtype: torch.dtype

    @property
    def number(self) -> Tensor:
        """The number picked from each table, `(F,)`."""
        return self.rows.clamp(max=self.index.shape[1])

    @property
    def weight(self) -> Tensor:
        """The weight of each, `(F, P)`: 1 over their number, 0 where there is none."""
        return self.is_there / self.number.clamp(min=1).to(self.dtype).unsqueeze(1)


@dataclass(frozen=True)
class TransferBatch:
    """The distinct rows of a step, and sampled rows to move to."""

    ids: Tensor
    """The number of each row in the group, `(U,)`."""
    table: Tensor
    """The table of each row, ascending except in slots without a row, `(U,)`."""
    rows: Tensor
    """The values of the rows, `(U, M, D)`."""
    moves: Tensor
    """Which rows the loss may move, `(U,)`: the rare ones that were selected."""
    others: Tensor
    """Rows to move to, `(F, S, M, D)`: a sample of the frequent ones, detached."""
    turn: Tensor
    """A random number in [0, 1) for each table, `(F,)`."""
    draws: Draws
    """More random numbers of the step."""
    look_up: Callable[[Tensor], Tensor]
    """Ids `(n, F)` of each table to rows `(n, F, M, D)`, detached."""
    flipped: bool = False
    """Whether frequent rows move, to a sample of the rare ones."""

    @property
    def num_tables(self) -> int:
        """F."""
        return len(self.others)

    @cached_property
    def member(self) -> Tensor:
        """Whether each row that may move belongs to each table, as 0 or 1, `(F, U)`."""
        tables = torch.arange(self.num_tables, device=self.table.device)
        # numbers at once: a tensor of this size is written twice, not four times
        shape = (self.num_tables, len(self.table))
        member = torch.eq(tables.unsqueeze(1), self.table, out=self.rows.new_empty(shape))
        return member.mul_(self.moves)

    @cached_property
    def number(self) -> Tensor:
        """The number of rows of each table that may move, `(F,)`."""
        return self.member.sum(dim=1)

    @cached_property
    def divisor(self) -> Tensor:
        """The divisor for means over the rows of each table, `(F,)`: their number, or 1."""
        return self.number.clamp(min=1.0)

    @cached_property
    def share(self) -> Tensor:
        """The weight of each row in the mean of its table, `(U,)`; 0 for rows that do not move."""
        return self.moves.to(self.rows.dtype) / self.divisor.index_select(0, self.table)

    @cached_property
    def present(self) -> Tensor:
        """Whether each table has rows to move, as 0 or 1, `(F,)`."""
        return self.number.clamp(max=1.0)

    def with_totals(self) -> "TransferBatch":
        """Return the batch with its totals computed: a compiler cannot follow properties that cache."""
        _ = self.divisor, self.present
        return self

    def total(self, values: Tensor) -> Tensor:
        """Return the sums `(F, ...)` over those rows `(U, ...)` of each table that may move.

        By a matrix product: a GPU adds in any order otherwise, and all processes must get the same bits.
        """
        flat = values.reshape(len(values), -1)
        return (self.member @ flat).reshape(self.num_tables, *values.shape[1:])

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values `(F, ...)` of each row's table, `(U, ...)`."""
        flat = values.reshape(self.num_tables, -1)
        return F.embedding(self.table, flat).reshape(len(self.table), *values.shape[1:])

    def pick(self, most: int) -> Picked:
        """Return at most `most` rows of each table that may move, each with the same chance."""
        number = self.number.long().unsqueeze(1)  # (F, 1)
        # The rows that may move have ranks from 1 on, table after table. Of each table's ranks, take `most`
        # neighbours in a ring from a random start: no size varies.
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
