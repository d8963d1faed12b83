"""Masked: a table of which only some entries are left, for good (stage two of Liu et al., ICLR 2021).

    e(i) = m_i ⊙ V_i

    m    `MaskedTable.kept`, N x D of bools: the entries that survive
    V    `MaskedTable.inner`, N x D

The mask comes from a ticket, which pruning leaves, or is what is not zero in the table as it is. Entries that
are cut get no gradient and are zero in every lookup, whatever momentum, weight decay or averaging make of
the numbers that are stored for them; merged, they are zero in the table.

Not for finding a mask: see `pep`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn

from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.pruning._ticket import Ticket, load_ticket
from rarebit.settings import check_types
from rarebit.tables.stack import Stack, stack_tables, take_rows
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    num_weights,
    plain_like,
    wrap,
)
from rarebit.technique import Rank

__all__ = ["Masked", "MaskedStack", "MaskedTable"]


@dataclass(frozen=True)
class Masked(Method):
    """Keep the entries of a ticket, or those that are not zero, and hold all others at zero.

    >>> Masked(Ticket({"user": torch.eye(3).bool()}))
    Masked(ticket=Ticket(1 table, 3 of 9 entries))
    """

    title: ClassVar[str] = "a fixed mask of the entries that survived pruning"
    paper: ClassVar[str] = (
        "Liu et al., Learnable Embedding Sizes for Recommender Systems, ICLR 2021"
    )
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a step looks up a byte beside each entry; a table is a quarter larger in training, and its zeros "
        "save memory only once it is packed"
    )
    applies: ClassVar[str] = (
        "tables that are trained again from a ticket, or trained on after pruning; not to find what to "
        "prune"
    )
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    masks_entries: ClassVar[bool] = True

    ticket: Ticket | str | None = None
    """The ticket, or the folder it is in; None: the entries that are not zero now."""

    def __post_init__(self) -> None:
        check_types(self)

    def wrap(self, base: AnyTable) -> "MaskedTable":
        """Return the table with its mask; the ticket, if any, must be of one table."""
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        if self.ticket is None:
            return MaskedTable(Masked(), inner, full_table(base) != 0)
        ticket = _read(self.ticket)
        if len(ticket.kept) != 1:
            raise UnsupportedTableError(
                f"{ticket} is of several tables, which are told apart by name; use apply_ on the model"
            )
        [(name, kept)] = ticket.kept.items()
        _check_shape(name, base, kept)
        if name in ticket.start:
            inner = _started(name, base, ticket.start[name])
        # what is saved with a model is the mask itself, so the table need not remember the ticket
        return MaskedTable(Masked(), inner, kept.to(next(base.parameters()).device, copy=True))

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table with the mask that the ticket has under its name."""
        if self.ticket is None:
            return super().wrap_all(tables)
        ticket = _read(self.ticket)
        _check_names(list(tables), list(ticket.kept))
        return [wrap(table, Masked(ticket.of(name))) for name, table in tables.items()]

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return masked tables behind one lookup of their rows and one of their masks."""
        masked = [table for table in tables if isinstance(table, MaskedTable)]
        return MaskedStack(self, masked, lengths)


class MaskedTable(Table):
    """A table with entries that are zero for good."""

    kept: Tensor

    def __init__(self, method: Method, inner: AnyTable, kept: Tensor) -> None:
        super().__init__(
            method,
            inner,
            num_embeddings=inner.num_embeddings,
            embedding_dim=inner.embedding_dim,
            padding_idx=inner.padding_idx,
        )
        self.register_buffer("kept", kept)  # m

    def rows(self, ids: Tensor) -> Tensor:
        """Return m_i ⊙ V_i."""
        return _masked(self.inner(ids), take_rows(self.kept, ids.long()))

    @property
    def num_weights(self) -> int:
        """Numbers that are stored: a mask is none."""
        return num_weights(self.inner)


class MaskedStack(Stack):
    """Masked tables behind one lookup of their rows and one of their masks."""

    kept: Tensor
    offsets: Tensor

    def __init__(
        self, method: Method, tables: Sequence[MaskedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.sizes = [table.num_embeddings for table in tables]
        self.inner = stack_tables([table.inner for table in tables], lengths)
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        self.register_buffer("kept", torch.cat([table.kept for table in tables]))
        self.register_buffer("offsets", first_rows[self.field_of_slot], persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Return m_i ⊙ V_i for the ids of each field."""
        return _masked(self.inner(ids), take_rows(self.kept, ids + self.offsets))

    def split(self) -> list[AnyTable]:
        """Return the masked tables one by one; masks are shared with the stack, not copied."""
        parts = zip(self.inner.split(), self.kept.split(self.sizes), strict=True)
        return [MaskedTable(self.method, *part) for part in parts]


def _masked(rows: Tensor, kept: Tensor) -> Tensor:
    # not a product: what is stored in a masked entry may have grown beyond all bounds
    return torch.where(kept, rows, 0.0)


def _read(ticket: Ticket | str | None) -> Ticket:
    assert ticket is not None
    return load_ticket(ticket) if isinstance(ticket, str) else ticket


def _check_names(tables: list[str], in_ticket: list[str]) -> None:
    missing = [name for name in in_ticket if name not in tables]
    if missing:
        raise NoTableError(
            f"the ticket has a mask for {missing[0]!r}, which is not among the tables chosen: "
            f"{', '.join(tables)}; use the model that the ticket was taken from"
        )
    unknown = [name for name in tables if name not in in_ticket]
    if unknown:
        raise NoTableError(
            f"the ticket has no mask for {unknown[0]!r}, only for {', '.join(in_ticket)}; "
            "leave other tables out with where=lambda t: t.name in ticket.kept"
        )


def _check_shape(name: str, base: AnyTable, kept: Tensor) -> None:
    rows, width = base.num_embeddings, base.embedding_dim
    if kept.shape != (rows, width):
        raise UnsupportedTableError(
            f"the ticket has a mask of {kept.shape[0]:,} x {kept.shape[1]} for {name!r}, which is "
            f"{rows:,} x {width}; use the model that the ticket was taken from"
        )


def _started(name: str, base: AnyTable, start: Tensor) -> nn.Embedding:
    if not isinstance(base, nn.Embedding):
        raise UnsupportedTableError(
            f"the ticket has first values for {name!r}, which is no plain table; merge it first, or use "
            "ticket.with_start(None)"
        )
    return plain_like(base, start.to(base.weight, copy=True), padding_idx=base.padding_idx)
