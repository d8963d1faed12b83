"""The distinct rows of a batch: which lookups went to the same row, and the sums over them.

A batch looks the same row up many times. Optimizers and row rules work on each distinct row once:

    ids      7  3  7  3  9        one a lookup, T of them
    distinct       3  7  9        one a row, U of them, sorted
    values   a  b  c  d  e   ->   b+d  a+c  e

The number of distinct rows is only known after looking. Where that would make the host wait for the
device, all T slots are kept: the first U hold rows, the rest hold the id -1 and zeros. On the CPU sums
are taken in the order of the lookups, so two runs give the same bits on any number of threads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["NO_ROW", "Distinct", "find_distinct"]

NO_ROW = -1
"""The id of a slot that holds no row."""


@dataclass(frozen=True)
class Distinct:
    """The distinct ids among T lookups, in U slots (or T, of which the last hold no row)."""

    ids: Tensor
    """The id of each slot, in ascending order, then `NO_ROW` in slots without a row."""
    order: Tensor
    """The lookups `(T,)` sorted by id, equal ids in the order they came."""
    starts: Tensor
    """Where the lookups of each slot begin in `order`; T for a slot without a row."""
    slot_of: Tensor
    """The slot of each lookup `(T,)`."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the lookups' values `(T, D)` in each slot; zero where there is no row."""
        if self.order.numel() == 0:
            return values
        if values.is_cuda:
            # A bag is summed by one thread there, which may be half the batch for a frequent row.
            # These additions are atomic: fast, in any order.
            sums = values.new_zeros(len(self.ids), values.shape[1])
            return sums.index_add_(0, self.slot_of, values)
        return F.embedding_bag(self.order, values, self.starts, mode="sum")

    def at_first_lookups(self, rows: Tensor) -> Tensor:
        """Return rows `(U, D)` at the first lookup of each id, and zero at all others, `(T, D)`."""
        end = self.order.shape[0]
        first = self.order.index_select(0, self.starts.clamp(max=end - 1))
        # slots without a row start where the lookups end: one place more takes them
        first = torch.where(self.starts < end, first, end)
        return rows.new_zeros(end + 1, rows.shape[1]).index_copy_(0, first, rows)[:end]


def find_distinct(ids: Tensor, *, static: bool | None = None) -> Distinct:
    """Find the distinct ids `(T,)` among lookups; ids below zero stand for no row.

    `static` keeps all T slots, so that no size depends on the values: the default on a GPU.

    >>> rows = find_distinct(torch.tensor([7, 3, 7, 3, 9]))
    >>> rows.ids, rows.sum(torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])).flatten()
    (tensor([3, 7, 9]), tensor([6., 4., 5.]))
    >>> find_distinct(torch.tensor([7, 3, 7]), static=True).ids
    tensor([ 3,  7, -1])
    """
    static = ids.is_cuda if static is None else static
    ids, order = torch.sort(ids, stable=True)
    is_start = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=is_start[1:])
    slot = is_start.cumsum(0) - 1  # of each lookup, in sorted order
    slot_of = torch.empty_like(slot).scatter_(0, order, slot)
    if not static:
        starts = is_start.nonzero().squeeze(1)
        return Distinct(ids.index_select(0, starts), order, starts, slot_of)
    slots = torch.arange(ids.shape[0], device=ids.device)
    starts = torch.searchsorted(slot, slots)
    # equal ids write the same value into the same slot
    found = torch.full_like(ids, NO_ROW).scatter_(0, slot, ids)
    return Distinct(found, order, starts, slot_of)
