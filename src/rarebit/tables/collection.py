"""All tables of a model's fields: one lookup a step, yet each field is a table of its own.

A collection keeps one stack per kind of table. Changing some fields splits a stack; merging them
joins equal stacks again. A field of another width than the model's has a projection of its own,
`v_i = P_i row_i`, applied to all fields of that width in one batched product.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rarebit.data.schema import PADDING, Field
from rarebit.settings import require, suggest
from rarebit.tables.stack import PlainStack, Stack, stack_key, stack_tables
from rarebit.tables.table import AnyTable, home_of

__all__ = ["RowMove", "TableCollection", "TableInit"]

TableInit = Literal["normal", "xavier"]
"""How rows start: N(0, std²); or uniform in ±sqrt(6 / (rows of all fields + width)), as the papers of
learned pruning and multi-embedding start one table of all fields."""


class RowMove(NamedTuple):
    """Plain rows that went from one parameter to another, as when a stack was split."""

    source: Tensor
    source_rows: slice
    target: Tensor
    target_rows: slice


class TableCollection(nn.Module):
    """The tables of several fields: ids `(B, S)` to rows `(B, F, D)`, multi-valued fields pooled.

    >>> fields = (Field(name="user", rows=9), Field(name="tags", kind="multi", rows=5, max_length=3))
    >>> tables = TableCollection(fields, dim=4)
    >>> tables(torch.tensor([[8, 1, 4, 0]])).shape
    torch.Size([1, 2, 4])
    """

    slot_order: Tensor | None
    """The slots in the order the stacks read them; None when one stack reads them as they lie."""
    slot_place: Tensor | None
    """For each slot, its place in that order."""

    def __init__(
        self,
        fields: Sequence[Field],
        dim: int,
        *,
        init: TableInit = "normal",
        std: float = 0.01,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.fields = tuple(fields)
        self.dim = dim
        own = _check_widths(self.fields, widths or {})
        self.projections = nn.ParameterDict(
            {
                str(index): _new_projection(own[field.name], dim)
                for index, field in enumerate(self.fields)
                if own.get(field.name, dim) != dim
            }
        )
        self.members: tuple[tuple[int, ...], ...] = ()
        self.stacks = nn.ModuleList()
        self.register_buffer("slot_order", None, persistent=False)
        self.register_buffer("slot_place", None, persistent=False)
        rows = sum(field.rows for field in self.fields)
        self._arrange(
            [
                _new_table(field, own.get(field.name, dim), init=init, std=std, all_rows=rows)
                for field in self.fields
            ]
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return one row a field, `(B, S)` to `(B, F, D)`."""
        return self._pool(self._look_up(ids), ids)

    def tables(self) -> list[AnyTable]:
        """Return the table of each field, in order. Weights are shared, not copied."""
        tables: dict[int, AnyTable] = {}
        for members, stack in zip(self.members, self._stacks(), strict=True):
            tables |= zip(members, stack.split(), strict=True)
        return [tables[index] for index in range(len(self.fields))]

    def replace(self, tables: Mapping[int, AnyTable]) -> list[RowMove]:
        """Put other tables in place of some fields' and regroup the stacks.

        Returns the rows of unchanged plain tables that moved, so that an optimizer's state can.
        """
        before = self._plain_rows()
        self._arrange(
            [tables.get(index, table) for index, table in enumerate(self.tables())], set(tables)
        )
        after = self._plain_rows()
        kept = [index for index in before if index in after and index not in tables]
        moves = [RowMove(*before[index], *after[index]) for index in kept]
        return [move for move in moves if move.source is not move.target]

    def _look_up(self, ids: Tensor) -> Tensor:
        stacks = self._stacks()
        if self.slot_order is None or self.slot_place is None:
            return self._project(stacks[0](ids), self.members[0])
        lengths = [sum(stack.lengths) for stack in stacks]
        columns = ids.index_select(1, self.slot_order).split(lengths, dim=1)
        looked_up = [
            self._project(stack(ids), members)
            for stack, ids, members in zip(stacks, columns, self.members, strict=True)
        ]
        return torch.cat(looked_up, dim=1).index_select(1, self.slot_place)

    def _project(self, rows: Tensor, members: Sequence[int]) -> Tensor:
        """Return the rows of a stack's slots in the model's width, `(B, S, W)` to `(B, S, D)`."""
        if str(members[0]) not in self.projections:
            return rows
        own = [
            self.projections[str(index)]
            for index in members
            for _ in range(self.fields[index].max_length)
        ]
        return torch.einsum("bsw,swd->bsd", rows, torch.stack(own))

    def _pool(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Pool the slots of multi-valued fields, `(B, S, D)` to `(B, F, D)`."""
        if all(field.kind != "multi" for field in self.fields):
            return rows
        lengths = [field.max_length for field in self.fields]
        pooled = [
            _pool_slots(columns, slots, field) if field.kind == "multi" else columns
            for field, columns, slots in zip(
                self.fields, rows.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True
            )
        ]
        return torch.cat(pooled, dim=1)

    def _arrange(self, tables: Sequence[AnyTable], changed: AbstractSet[int] = frozenset()) -> None:
        """Group the tables into stacks; a stack whose members did not change is kept as it is."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, table in enumerate(tables):
            groups.setdefault(stack_key(table), []).append(index)
        old = dict(zip(self.members, self._stacks(), strict=True))
        self.members = tuple(tuple(group) for group in groups.values())
        self.stacks = nn.ModuleList(
            old[members]
            if members in old and not changed & set(members)
            else stack_tables(
                [tables[i] for i in members], [self.fields[i].max_length for i in members]
            )
            for members in self.members
        )
        self.stacks.train(self.training)
        self.slot_order = self._order_slots()
        self.slot_place = None if self.slot_order is None else torch.argsort(self.slot_order)

    def _order_slots(self) -> Tensor | None:
        if len(self.members) == 1:
            return None
        ends = torch.tensor([field.max_length for field in self.fields]).cumsum(0).tolist()
        slots = [
            torch.arange(ends[index] - self.fields[index].max_length, ends[index])
            for members in self.members
            for index in members
        ]
        return torch.cat(slots).to(home_of(self.stacks))

    def _plain_rows(self) -> dict[int, tuple[Tensor, slice]]:
        """For each field that lies in a plain stack: the parameter and its rows there."""
        found = {}
        for members, stack in zip(self.members, self._stacks(), strict=True):
            if not isinstance(stack, PlainStack):
                continue
            start = 0
            for index, size in zip(members, stack.sizes, strict=True):
                found[index] = (stack.embedding.weight, slice(start, start + size))
                start += size
        return found

    def _stacks(self) -> list[Stack]:
        return [stack for stack in self.stacks if isinstance(stack, Stack)]


def _new_table(
    field: Field, width: int, *, init: TableInit, std: float, all_rows: int
) -> nn.Embedding:
    padding = PADDING if field.kind == "multi" else None
    if init == "xavier":
        bound = (6.0 / (all_rows + width)) ** 0.5
        weight = torch.empty(field.rows, width).uniform_(-bound, bound)
    else:
        weight = torch.randn(field.rows, width).mul_(std)
    if padding is not None:
        weight[padding] = 0.0
    table: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding)
    return table


def _new_projection(width: int, dim: int) -> nn.Parameter:
    """Return a projection that keeps the size of a row's numbers as it is, on average."""
    return nn.Parameter(torch.randn(width, dim).div_(width**0.5))


def _check_widths(fields: Sequence[Field], widths: Mapping[str, int]) -> dict[str, int]:
    names = [field.name for field in fields]
    for name, width in widths.items():
        require(name in names, f"widths: no field {name!r} with a table{suggest(name, names)}")
        require(width >= 1, f"widths: the width of {name!r} must be at least 1, got {width!r}")
    return dict(widths)


def _pool_slots(rows: Tensor, ids: Tensor, field: Field) -> Tensor:
    """Return the sum or mean of the rows that are no padding, `(B, L, D)` to `(B, 1, D)`."""
    weights = (ids != PADDING).to(rows.dtype)
    if field.pooling == "mean":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    return (rows * weights.unsqueeze(-1)).sum(dim=1, keepdim=True)
