"""What a transfer loss sees of a step: the rows that may move, and rows of the other side to move to.

The rows are those of one group of tables (`tables/lookups.py:RowGroup`), each row once, sorted by table.
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

from rarebit.transfer.draws import Draws

__all__ = ["Picked", "TransferBatch"]


@dataclass(frozen=True)
class Picked:
    """At most P of the rows that may move, of each table."""

    index: Tensor
    """Where they are among the rows, `(F, P)`; any row where a table has fewer."""
    weight: Tensor
    """What each counts, `(F, P)`: 1 over their number, 0 where there is none."""
    number: Tensor
    """How many each table has, `(F,)`."""


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
        """Which rows are of which table, as numbers 0 and 1, `(F, U)`."""
        tables = torch.arange(self.num_tables, device=self.table.device)
        return (tables.unsqueeze(1) == self.table).to(self.rows.dtype)

    @cached_property
    def number(self) -> Tensor:
        """How many rows of each table may move, `(F,)`."""
        return self.member @ self.moves.to(self.rows.dtype)

    @cached_property
    def share(self) -> Tensor:
        """What each row counts in the mean of its table, `(U,)`; 0 for rows that do not move."""
        number = self.number.clamp(min=1.0).index_select(0, self.table)
        return self.moves.to(self.rows.dtype) / number

    @property
    def present(self) -> Tensor:
        """Which tables have rows to move, as numbers 0 and 1, `(F,)`."""
        return (self.number > 0).to(self.rows.dtype)

    def total(self, values: Tensor) -> Tensor:
        """Return the sums `(F, ...)` over the rows `(U, ...)` of each table.

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
        number = self.number.long()
        rank = self.moves.long().cumsum(0)  # one more than the neighbour, within a table as well
        # neighbours in a ring that begins anywhere: as many as asked, without a size that varies
        shift = (self.turn * number).long()
        place = (rank + shift[self.table]) % number.clamp(min=1)[self.table]
        nowhere = self.num_tables * most
        place = torch.where(self.moves & (place < most), self.table * most + place, nowhere)
        index = torch.zeros(nowhere + 1, dtype=torch.int64, device=place.device)
        index.scatter_(0, place, torch.arange(len(place), device=place.device))
        number = number.clamp(max=most)
        is_there = torch.arange(most, device=place.device) < number.unsqueeze(1)
        weight = is_there.to(self.rows.dtype) / number.clamp(min=1).unsqueeze(1)
        return Picked(index[:-1].reshape(self.num_tables, most), weight, number)

    def rows_at(self, index: Tensor) -> Tensor:
        """Return the rows at places of any shape, `(..., M, D)`."""
        return self.rows.index_select(0, index.reshape(-1)).reshape(
            *index.shape, *self.rows.shape[1:]
        )
