"""Rows of a table, and their gradient: dense in memory that stays, or one row a lookup.

torch allocates a dense gradient afresh in every step. Beyond 32 MB the C library gets such memory
from the system each time and gives it back each time, so every step pays for having all its pages
mapped and cleared again: at 968k rows of 16 numbers, a third of a training step on two cores.

What the compiler must leave alone: it does not know gradients by rows.

A file of its own, imported while a model is compiled: to say so loads the compiler, which takes a
second and 70 MB that nobody else should pay.

The tables of several fields behind one lookup.

A stack takes ids `(..., S)`, per field, one column a slot (a multi-valued field has several slots),
and returns rows `(..., S, D)`. Offsets belong to the stack and are never stored. Stacks nest as
tables nest: a method's stack holds the stack of its tables' inner tables.

Any stack equals the loop over its tables; a contract test holds each method's stack to that. Only
padding is left to the collection, which leaves it out when it pools a multi-valued field.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rarebit.tables.sparse import row_gradient
from rarebit.tables.table import AnyTable, Table, home_of, is_trainable, methods_of, plain_like

__all__ = [
    "GradientMemory",
    "LoopStack",
    "PlainStack",
    "Stack",
    "gather",
    "gather_uncompiled",
    "stack_key",
    "stack_tables",
    "take_rows",
]


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
        from rarebit.tables.stack import gather_uncompiled

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


gather_uncompiled = torch.compiler.disable(gather_eagerly)


class Stack(nn.Module, ABC):
    """Several tables of one width behind one lookup."""

    field_of_slot: Tensor
    """For each slot, which table it reads, `(S,)`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = tuple(lengths)
        field_of_slot = torch.repeat_interleave(torch.tensor(self.lengths))
        self.register_buffer("field_of_slot", field_of_slot, persistent=False)

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, `(..., S)` to `(..., S, D)`."""

    @abstractmethod
    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows in the tables' own precision, whatever autocast says."""
        with torch.autocast(ids.device.type, enabled=False):
            return self.rows(ids)


class PlainStack(Stack):
    """Plain tables as one `nn.Embedding` of all their rows."""

    offsets: Tensor

    def __init__(self, tables: Sequence[nn.Embedding], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.gradient_memory = GradientMemory()
        self.sizes = tuple(table.num_embeddings for table in tables)
        self.padding = tuple(table.padding_idx for table in tables)
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        small = sum(self.sizes) < torch.iinfo(torch.int32).max
        offsets = first_rows[self.field_of_slot].to(torch.int32 if small else torch.int64)
        weight = torch.cat([table.weight.detach() for table in tables])
        self.embedding = plain_like(tables[0], weight)
        self.register_buffer("offsets", offsets.to(weight.device), persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows by one gather."""
        return gather(self.embedding, ids + self.offsets, self.gradient_memory)

    def split(self) -> list[AnyTable]:
        """Return one plain table a field; weights are shared with the stack, not copied."""
        weights = self.embedding.weight.detach().split(self.sizes)
        return [
            plain_like(self.embedding, weight, padding_idx=padding)
            for weight, padding in zip(weights, self.padding, strict=True)
        ]


class LoopStack(Stack):
    """Any tables, one lookup each: right for every method, fast for few fields."""

    def __init__(self, tables: Sequence[AnyTable], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.tables = nn.ModuleList(tables)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows table by table."""
        columns = ids.split(self.lengths, dim=-1)
        tables = zip(self.tables, columns, strict=True)
        return torch.cat([table(column) for table, column in tables], dim=-2)

    def split(self) -> list[AnyTable]:
        """Return the tables themselves."""
        return [table for table in self.tables if isinstance(table, nn.Embedding | Table)]


def stack_key(table: AnyTable) -> tuple[object, ...]:
    """Return what tables must share to be kept in one stack."""
    return (table.embedding_dim, methods_of(table), table.sparse, is_trainable(table))


def stack_tables(tables: Sequence[AnyTable], lengths: Sequence[int]) -> Stack:
    """Return equal-kind tables behind one lookup, in the method's own stacked form."""
    plain = [table for table in tables if isinstance(table, nn.Embedding)]
    made = [table for table in tables if isinstance(table, Table)]
    stack = made[0].method.stack(made, lengths) if made else PlainStack(plain, lengths)
    # what a stack knows of its slots is made on the CPU
    return stack.to(home_of(tables[0]))
