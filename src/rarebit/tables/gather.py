"""Rows of a table, and their gradient: dense in memory that stays, or one row a lookup.

torch allocates a dense gradient afresh in every step. Beyond 32 MB the C library gets such memory
from the system each time and gives it back each time, so every step pays for having all its pages
mapped and cleared again: at 968k rows of 16 numbers, a third of a training step on two cores.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rarebit.tables.sparse import row_gradient

__all__ = ["GradientMemory", "gather", "take_rows"]


class GradientMemory:
    """The memory of one table's gradient, kept from one step to the next."""

    def __init__(self) -> None:
        self._spare: Tensor | None = None
        self._made: int | None = None

    def take(self, weight: Tensor) -> Tensor:
        """Return zeros for the gradient of a table: those that were kept, or new ones."""
        spare, self._spare = self._spare, None  # nobody else may hold it, or torch would copy it
        if spare is None or spare.shape != weight.shape or spare.dtype != weight.dtype:
            spare = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self._made = spare.data_ptr()
        return spare

    def keep(self, weight: Tensor) -> None:
        """Take the gradient off a table after the optimizer's step, if it was made here."""
        gradient = weight.grad
        if gradient is None or gradient.is_sparse:
            return
        if gradient.data_ptr() == self._made:
            self._spare, weight.grad = gradient.zero_(), None

    def release(self) -> None:
        """Give the memory back."""
        self._spare = None


def gather(table: nn.Embedding, ids: Tensor, memory: GradientMemory) -> Tensor:
    """Return the rows of these ids, as `F.embedding` does, with the same gradient to the last bit."""
    compiling = torch.compiler.is_compiling()
    # On a GPU torch's own backward is as fast, and scatter_add_ would differ from run to run there.
    if not table.sparse and (ids.device.type != "cpu" or compiling):
        return F.embedding(ids, table.weight)
    if compiling:
        from rarebit.tables.uncompiled import gather_uncompiled

        uncompiled: Tensor = gather_uncompiled(table, ids, memory)
        return uncompiled
    return gather_eagerly(table, ids, memory)


def gather_eagerly(table: nn.Embedding, ids: Tensor, memory: GradientMemory) -> Tensor:
    """Return the rows of these ids, in a way that the compiler cannot follow."""
    if table.sparse and ids.is_cuda:
        by_rows: Tensor = _GatherByRows.apply(table.weight, ids)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return by_rows
    if table.sparse:
        return F.embedding(ids, table.weight, sparse=True)
    rows: Tensor = _Gather.apply(table.weight, ids, memory)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


def take_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of these ids `(..., D)`, without a gradient.

    >>> take_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1]))
    tensor([[3., 4.],
            [3., 4.]])
    """
    if not weight.is_cuda or weight.dim() == 1 or not weight.is_contiguous():
        return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, *weight.shape[1:])
    # There torch gives every row a block of threads, far too many for a row of 16 numbers: one number
    # at a time takes a fifth of the time.
    width = weight.shape[1]
    columns = torch.arange(width, device=ids.device)
    return torch.take(weight, ids.unsqueeze(-1) * width + columns)


class _GatherByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return take_rows(weight, ids.long())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        values = rows.reshape(-1, ctx.shape[1])
        return row_gradient(ctx.shape, ids.reshape(-1).long(), values), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, memory: GradientMemory) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.memory = weight.detach(), memory  # its values are not needed any more
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        index = ids.reshape(-1, 1).long().expand(-1, ctx.weight.shape[1])
        gradient = ctx.memory.take(ctx.weight)
        return gradient.scatter_add_(0, index, rows.reshape(index.shape)), None, None
