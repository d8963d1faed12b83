"""The tables of several fields behind one lookup.

A stack takes ids `(..., S)`, per field, one column a slot (a multi-valued field has several slots),
and returns rows `(..., S, D)`. Offsets belong to the stack and are never stored. Stacks nest as
tables nest: a method's stack holds the stack of its tables' inner tables.

Any stack equals the loop over its tables; a contract test holds each method's stack to that. Only
padding is left to the collection, which leaves it out when it pools a multi-valued field.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from rarebit.tables.gather import GradientMemory, gather
from rarebit.tables.table import AnyTable, Table, home_of, is_trainable, methods_of, plain_like

__all__ = ["LoopStack", "PlainStack", "Stack", "stack_key", "stack_tables"]


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
