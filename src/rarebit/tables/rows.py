"""Gradients by rows: the distinct rows of a batch, and the sums over the lookups of each.

A batch looks the same row up many times. Optimizers and row rules work on each distinct row once:

    ids      7  3  7  3  9        one per lookup, T of them
    distinct       3  7  9        one per row, U of them, sorted
    values   a  b  c  d  e   ->   b+d  a+c  e

Where counting the distinct rows would make the host wait for the device, all T slots are kept: the first U hold rows, the
rest the id -1 and zeros. On the CPU sums are taken in the order of the lookups, so that two runs give the same bits on any
number of threads.

A plain table's gradient is either a tensor of the table's size, zero nearly everywhere, or a sparse one with a row per
lookup; only the second costs what the batch costs. `set_row_gradients` switches between them.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import OptimizerError

__all__ = [
    "NO_ROW",
    "Distinct",
    "find_distinct",
    "is_watched",
    "lookups_of",
    "row_gradient",
    "row_gradients_kept",
    "set_row_gradients",
]

NO_ROW = -1
"""The id of a slot that holds no row."""
WATCHED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Tables whose lookups stop the backward, so that a rule can change the gradient of each row (`row_gradients`)."""


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

    @cached_property
    def first(self) -> Tensor:
        """The first lookup of each slot `(U,)`; any lookup for a slot that has none."""
        return self.order.index_select(0, self.starts.clamp(max=self.order.shape[0] - 1))

    def put_first(self, rows: Tensor, own: Tensor, keep: Tensor, leave: Tensor) -> Tensor:
        """Return rows `(U, D)` at the first lookup of their slot, and zero at all others, `(T, D)`.

        Lookups to `keep` `(T,)` have their `own` values `(T, D)` instead. `leave` `(U,)` are slots whose
        row is put nowhere: those of lookups to keep, and those without a lookup.
        """
        end = self.order.shape[0]
        # one place more takes what goes nowhere
        found = own.new_empty(end + 1, own.shape[1])
        torch.where(keep.unsqueeze(-1), own, own.new_zeros(()), out=found[:end])
        return found.index_copy_(0, torch.where(leave, end, self.first), rows)[:end]


def find_distinct(ids: Tensor, *, static: bool | None = None, most: int | None = None) -> Distinct:
    """Find the distinct ids `(T,)` among lookups; ids below zero stand for no row.

    `static` keeps all T slots, so that no size depends on the values: the default on a GPU. Where there
    cannot be so many distinct ids, no row counting as one, `most` slots are kept.
    """
    static = ids.is_cuda if static is None else static
    ids, order = torch.sort(ids, stable=True)
    is_next = torch.zeros_like(ids, dtype=torch.bool)  # where another slot begins than the first
    torch.ne(ids[1:], ids[:-1], out=is_next[1:])
    slot = is_next.cumsum(0)  # of each lookup, in sorted order
    slot_of = torch.empty_like(slot).scatter_(0, order, slot)
    if not static:
        is_next[:1] = True
        starts = is_next.nonzero().squeeze(1)
        return Distinct(ids.index_select(0, starts), order, starts, slot_of)
    size = ids.shape[0] if most is None else min(most, ids.shape[0])
    starts = torch.searchsorted(slot, torch.arange(size, device=ids.device))
    # equal ids write the same value into the same slot
    found = ids.new_full((size,), NO_ROW).scatter_(0, slot, ids)
    return Distinct(found, order, starts, slot_of)


def is_watched(module: nn.Module) -> bool:
    """Return whether a table waits for the backward of row gradients."""
    return module in WATCHED


Plain = nn.Embedding | nn.EmbeddingBag


def set_row_gradients(model: nn.Module, *, by_rows: bool) -> None:
    """Let every plain table of a model give its gradient by rows, or not.

    A table stays dense where torch has no row gradients for it: one that shares its weight with
    another layer, scales gradients by frequency, or takes the maximum over a bag.
    """
    shared = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, Plain)
        for parameter in module.parameters(recurse=False)
    }

    def can_be_sparse(table: Plain) -> bool:
        takes_maximum = isinstance(table, nn.EmbeddingBag) and table.mode == "max"
        return not (takes_maximum or table.scale_grad_by_freq or id(table.weight) in shared)

    wanted = {table: by_rows and can_be_sparse(table) for table in _plain_tables(model)}
    _refuse_in_ddp(model, [table for table, sparse in wanted.items() if sparse != table.sparse])
    for table, sparse in wanted.items():
        table.sparse = sparse


@contextmanager
def row_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the tables back to the gradients they gave before, after a `with` block."""
    before = {table: table.sparse for table in _plain_tables(model)}
    try:
        yield
    finally:
        for table, sparse in before.items():
            table.sparse = sparse


def row_gradient(shape: torch.Size, ids: Tensor, values: Tensor) -> Tensor:
    """Return a table's gradient with one row per lookup, ids `(T,)` and values `(T, D)`."""
    # unchecked, as torch's own lookup makes it: a check would wait for the device
    make = torch.ops.aten._sparse_coo_tensor_unsafe  # noqa: SLF001  # it has no other name
    gradient: Tensor = make(ids.unsqueeze(0), values, shape)
    return gradient


def lookups_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids `(T,)` and values `(T, D)` of a gradient by rows, rows that came twice and all."""
    # the public names ask for sums over equal rows first, which is a sort
    return gradient._indices()[0], gradient._values()  # noqa: SLF001  # not coalesced


def _refuse_in_ddp(model: nn.Module, changed: list[Plain]) -> None:
    """Raise when a wrapper has already noted for good which gradients are sparse."""
    weights = {id(table.weight) for table in changed}
    for wrapper in model.modules():
        if type(wrapper).__name__ != "DistributedDataParallel":
            continue
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        named = wrapper.module.named_parameters()  # type: ignore[union-attr]  # the wrapped model
        if any(id(p) in weights and name not in ignored for name, p in named):
            raise OptimizerError(
                "DistributedDataParallel notes when it is made which gradients come by rows; "
                "build the optimizer of the model first, then wrap it"
            )


def _plain_tables(model: nn.Module) -> Iterator[Plain]:
    for module in model.modules():
        if isinstance(module, Plain):
            yield module
