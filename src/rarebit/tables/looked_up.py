"""The lookups of a step as a rule needs them: which row of its group each went to, and with what gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rarebit.tables.distinct import NO_ROW
from rarebit.tables.pooled import PooledRows, single_rows

__all__ = ["LookedUpRows", "Numbering", "RowGroup"]

SHORT_KEYS = torch.iinfo(torch.int32).max
"""Keys of groups with fewer rows are sorted as 32-bit numbers, on a GPU in half the time."""


@dataclass(frozen=True)
class RowGroup:
    """Tables whose rows a rule sees together, numbered one table after the other."""

    names: tuple[str, ...]
    """The tables, such as `backbone.tables.user`."""
    first_rows: tuple[int, ...]
    """For each table, the number of its row 0."""
    num_rows: int
    """Rows of all its tables."""
    width: int
    """How long a row is."""


class Numbering:
    """The key of a lookup: the number of its row in the group, `NO_ROW` for rows without a rule."""

    def __init__(self, first_row: Sequence[int] | int, padding: Sequence[int] | int) -> None:
        self.first_row = torch.tensor(first_row)  # of each slot's table; below zero: not chosen
        self.padding = torch.tensor(padding)  # of each slot's table; below zero: it has none
        self._is_left_out = self.first_row < 0
        self._all_chosen = not bool(self._is_left_out.any())
        self._has_padding = bool((self.padding >= 0).any())
        self._first_rows = self.first_row.reshape(-1).tolist()

    def keys(self, ids: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the key of each id; for a stack the last axis is its slots."""
        if self.first_row.device != ids.device:
            self.first_row = self.first_row.to(ids.device)
            self.padding = self.padding.to(ids.device)
            self._is_left_out = self._is_left_out.to(ids.device)
        # in place from here on: each would be a kernel more
        keys = torch.add(ids, self.first_row, out=ids.new_empty(ids.shape, dtype=dtype))
        if not self._all_chosen:
            keys.masked_fill_(self._is_left_out, NO_ROW)
        return keys.masked_fill_(ids == self.padding, NO_ROW) if self._has_padding else keys

    def most(self, num_lookups: int, group: RowGroup) -> int:
        """Return how many keys, no row being one, so many lookups in each slot can have at most."""
        sizes = dict(zip(group.first_rows, _sizes(group), strict=True))
        return 1 + sum(min(num_lookups, sizes.get(first, 0)) for first in self._first_rows)


@dataclass(frozen=True)
class LookedUpRows:
    """All lookups of a step, T in number, and the rows from which the backward goes on."""

    ids: Tensor
    """What was looked up, `(T,)`, or for a stack `(T / S, S)`."""
    parts: Sequence[Tensor | PooledRows]
    """The rows, in the order of the lookups."""
    numbering: Numbering
    group: RowGroup

    @cached_property
    def keys(self) -> Tensor:
        """The key of each lookup, `(T,)`."""
        dtype = torch.int32 if self.group.num_rows < SHORT_KEYS else torch.int64
        return self.numbering.keys(self.ids, dtype).reshape(-1)

    @property
    def most_keys(self) -> int:
        """How many different keys there can be, no row being one."""
        return self.numbering.most(len(self.ids), self.group)

    def rows(self) -> list[Tensor]:
        """Return what the tables hold, part by part."""
        return [
            single_rows(part.bag, part.ids) if isinstance(part, PooledRows) else part.detach()
            for part in self.parts
        ]

    def cut(self, gradients: Tensor, keep: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut gradients `(T, D)` into one for each of the rows; `keep` says which are as they came."""
        sizes = [_num_rows(part) for part in self.parts]
        cut = zip(self.parts, gradients.split(sizes), keep.split(sizes), strict=True)
        return [
            part.rows_and_gradients(own, kept)
            if isinstance(part, PooledRows)
            else (part, own.reshape(part.shape).to(part.dtype))
            for part, own, kept in cut
        ]


def _sizes(group: RowGroup) -> list[int]:
    """Return the number of rows of each table of a group."""
    ends = [*group.first_rows[1:], group.num_rows]
    return [end - first for first, end in zip(group.first_rows, ends, strict=True)]


def _num_rows(part: Tensor | PooledRows) -> int:
    return len(part.ids) if isinstance(part, PooledRows) else part.shape[:-1].numel()
