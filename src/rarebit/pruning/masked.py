"""Masked: a table of which only some entries are left, for good (stage two of Liu et al., ICLR 2021).

    e(i) = m_i ⊙ V_i

    m    `MaskedTable.kept`, N x D of bools: the entries that survive
    V    `MaskedTable.inner`, N x D

The mask comes from a ticket, the result of pruning, or from the zeros of the table. Cut entries get no gradient and are zero
in every lookup, whatever momentum, weight decay or averaging do to the stored numbers; merged, they are zero in the table.

A `Ticket` names the entries of a model's tables that survive, and their initial values. As a folder it is

    ticket.json                   the tables by name, and facts
    tensors-<name>.safetensors    a mask per table, with its initial values and thresholds where there are any

`keep_largest` makes a ticket of the largest entries of several tables, in chunks on their device: no copy of a table is made.

Not for finding a mask: see `pep`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rarebit.errors import ModelFileError, NoTableError, TableError, UnsupportedTableError, warn
from rarebit.settings import check_types, require
from rarebit.storage.files import TensorFolder
from rarebit.tables.collection import Stack, stack_tables, take_rows
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    grow_table,
    home_of,
    num_weights,
    plain_like,
    row_chunks,
    wrap,
)
from rarebit.technique import Rank

__all__ = ["Masked"]

DESCRIPTION = "ticket.json"
PARTS = ("kept", "start", "levels")
"""What a ticket may hold for a table; there is always a mask."""
FOLDER = TensorFolder("ticket", DESCRIPTION, ModelFileError, "save the ticket again")


class Ticket:
    """The surviving entries of tables, by the name of the table in its model.

    >>> ticket = Ticket({"user": torch.tensor([[True, False], [False, False]])}, facts={"step": 300})
    >>> ticket
    Ticket(1 table, 1 of 4 entries, step=300)
    """

    def __init__(
        self,
        kept: Mapping[str, Tensor],
        *,
        start: Mapping[str, Tensor] | None = None,
        levels: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.kept = dict(kept)
        """The mask of each table, `(N, D)` of bools: True survives."""
        self.start = dict(start or {})
        """Initial values `(N, D)` of all tables, some or none."""
        self.levels = dict(levels or {})
        """The learned thresholds that cut the tables, if any."""
        self.facts = dict(facts or {})
        """Plain values, such as the step when the ticket was taken."""
        if not self.kept:
            raise TableError("a ticket needs the mask of at least one table, got none")
        for name, mask in self.kept.items():
            if mask.dim() != 2 or mask.dtype != torch.bool:
                raise TableError(
                    f"the mask of {name!r} must be rows x width of torch.bool, got {tuple(mask.shape)} of "
                    f"{mask.dtype}"
                )
        for what, values in (("initial values", self.start), ("thresholds", self.levels)):
            for name in values:
                if name not in self.kept:
                    raise TableError(f"there are {what} of {name!r}, but no mask; leave them out")
        for name, value in self.start.items():
            shape = self.kept[name].shape
            if value.shape != shape or not value.is_floating_point():
                raise TableError(
                    f"the initial values of {name!r} must be {tuple(shape)} of floats like its mask, got "
                    f"{tuple(value.shape)} of {value.dtype}"
                )

    @property
    def num_kept(self) -> int:
        """Entries that survive in all tables."""
        return sum(int(torch.count_nonzero(mask)) for mask in self.kept.values())

    @property
    def num_entries(self) -> int:
        """Entries of all tables."""
        return sum(mask.numel() for mask in self.kept.values())

    def of(self, name: str) -> "Ticket":
        """Return the ticket of one of its tables."""
        start, levels = (
            {name: found[name]} if name in found else None for found in (self.start, self.levels)
        )
        return Ticket({name: self.kept[name]}, start=start, levels=levels, facts=self.facts)

    def with_start(self, start: Mapping[str, Tensor] | None) -> "Ticket":
        """Return the same ticket with other initial values of its tables, or with none."""
        return Ticket(self.kept, start=start, levels=self.levels, facts=self.facts)

    def __repr__(self) -> str:
        tables = "1 table" if len(self.kept) == 1 else f"{len(self.kept)} tables"
        facts = [f"{key}={value!r}" for key, value in self.facts.items()]
        entries = f"{self.num_kept:,} of {self.num_entries:,} entries"
        return f"Ticket({', '.join([tables, entries, *facts])})"


def save_ticket(ticket: Ticket, folder: str | os.PathLike[str]) -> Path:
    """Write a ticket to a folder, new or not, and return the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_ticket(Ticket({"user": torch.eye(3).bool()}), folder)
    ...     load_ticket(saved)
    Ticket(1 table, 3 of 9 entries)
    """
    names = list(ticket.kept)
    tensors = {
        f"{index}.{part}": found[name]
        for index, name in enumerate(names)
        for part in PARTS
        if name in (found := getattr(ticket, part))
    }
    return FOLDER.write(folder, {"ticket": names, "facts": ticket.facts}, tensors)


def load_ticket(folder: str | os.PathLike[str]) -> Ticket:
    """Read a ticket from a folder.

    >>> load_ticket("nowhere")
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: 'nowhere' holds no ticket: ticket.json is missing
    """
    description, tensors = FOLDER.read(folder)
    names, facts = description["ticket"], description.get("facts")
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_names or not isinstance(facts, dict):
        raise FOLDER.not_described(folder)
    try:
        kept, start, levels = (
            {
                name: tensors[f"{index}.{part}"]
                for index, name in enumerate(names)
                if part == PARTS[0] or f"{index}.{part}" in tensors
            }
            for part in PARTS
        )
        return Ticket(kept, start=start, levels=levels, facts=facts)
    except (LookupError, TableError) as error:
        raise FOLDER.unreadable(folder, error) from None


DIGIT = 16
"""Bits of a number that one pass of the search for the k-th largest looks at."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by the bytes of a number."""


def kth_largest(tables: Sequence[AnyTable], k: int) -> Tensor:
    """Return the k-th largest magnitude of all entries, exactly, as a tensor on the tables' device.

    Numbers that are not negative are ordered as their bits are, read as integers. So a few passes suffice: each counts
    the next bits of all numbers that agree in the bits found so far. Nothing is sorted, and no copy of a table is made.
    Padding rows count as zeros.
    """
    total = _num_entries(tables)
    require(1 <= k <= total, f"k must be from 1 to {total:,}, the number of entries, got k={k}")
    dtype = next(tables[0].parameters()).dtype
    bits, found = dtype.itemsize * 8, 0
    for shift in range(bits - DIGIT, -1, -DIGIT):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64)
        for rows in (rows for table in tables for rows in row_chunks(table)):
            codes = rows.abs().to(dtype).view(INTEGERS[dtype.itemsize]).reshape(-1)
            # in the first pass no bits are found yet
            alike = codes if shift == bits - DIGIT else codes[codes >> (shift + DIGIT) == found]
            digits = (alike >> shift) & ((1 << DIGIT) - 1)
            counts += torch.bincount(digits, minlength=1 << DIGIT).cpu()
        # numbers with this digit or a larger one, largest first
        at_least = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(at_least, k))
        k -= int(at_least[place - 1]) if place else 0
        found = found << DIGIT | ((1 << DIGIT) - 1 - place)
    code = torch.tensor(found, dtype=INTEGERS[dtype.itemsize], device=home_of(tables[0]))
    return code.view(dtype)


def find_borders(tables: Sequence[AnyTable], k: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the magnitude above which entries are among the k largest, and others for some tables, by index.

    A table whose entries are all smaller keeps its largest one, for which another table gives one up: an empty table
    would never learn. Where k is below the number of tables, some are left empty. Entries that are equal at a border
    are all cut, so there are never more than k.
    """
    require(k >= 1, f"at least one entry must be kept, got {k}")
    largest = [max(float(rows.abs().max()) for rows in row_chunks(table)) for table in tables]
    least: set[int] = set()
    while True:
        others = [table for index, table in enumerate(tables) if index not in least]
        left = k - len(least)
        border = torch.zeros((), device=home_of(tables[0]))
        if left < _num_entries(others):
            border = kth_largest(others, left + 1)
        more = {i for i, top in enumerate(largest) if 0 < top <= float(border)} - least
        if not more or len(least | more) >= k:
            break
        least |= more
    return border, {
        index: kth_largest([tables[index]], 2)
        if _num_entries([tables[index]]) > 1
        else torch.zeros_like(border)
        for index in sorted(least)
    }


def keep_largest(tables: Mapping[str, AnyTable], k: int, **facts: Any) -> Ticket:
    """Return the ticket of the k largest entries of all tables, of each at least one, with facts that JSON can hold."""
    border, borders = find_borders(list(tables.values()), k)
    if borders:
        few = ", ".join(repr(name) for index, name in enumerate(tables) if index in borders)
        warn(
            f"the largest {k:,} entries of all tables are in others than {few}, of which only the largest is kept; keep "
            "more entries, or leave such a table out with where="
        )
    kept = {}
    for index, (name, table) in enumerate(tables.items()):
        own = borders.get(index, border)
        kept[name] = torch.cat([(rows.abs() > own).cpu() for rows in row_chunks(table)])
    return Ticket(kept, facts=facts)


def _num_entries(tables: Sequence[AnyTable]) -> int:
    return sum(table.num_embeddings * table.embedding_dim for table in tables)


@dataclass(frozen=True)
class Masked(Method):
    """Keep the entries of a ticket, or those that are not zero; all others stay zero.

    >>> Masked(Ticket({"user": torch.eye(3).bool()}))
    Masked(ticket=Ticket(1 table, 3 of 9 entries))
    """

    title: ClassVar[str] = "a fixed mask of the entries that survived pruning"
    paper: ClassVar[str] = (
        "Liu et al., Learnable Embedding Sizes for Recommender Systems, ICLR 2021"
    )
    cost: ClassVar[str] = (
        "one more byte per entry in training; zeros save memory only after packing"
    )
    applies: ClassVar[str] = "tables that are retrained from a ticket; not to find what to prune"
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    masks_entries: ClassVar[bool] = True

    ticket: Ticket | str | None = None
    """The ticket, or its folder; None: the entries that are not zero now."""

    def __post_init__(self) -> None:
        check_types(self)

    def wrap(self, base: AnyTable) -> "MaskedTable":
        """Return the table with its mask; the ticket, if any, must be of one table."""
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        if self.ticket is None:
            return MaskedTable(Masked(), inner, full_table(base) != 0)
        ticket = load_ticket(self.ticket) if isinstance(self.ticket, str) else self.ticket
        if len(ticket.kept) != 1:
            raise UnsupportedTableError(
                f"{ticket} has masks of several tables, by name; use apply_ on the model"
            )
        [(name, kept)] = ticket.kept.items()
        rows, width = base.num_embeddings, base.embedding_dim
        if kept.shape != (rows, width):
            raise UnsupportedTableError(
                f"the ticket has a mask of {kept.shape[0]:,} x {kept.shape[1]} for {name!r}, which is "
                f"{rows:,} x {width}; use the model that the ticket was taken from"
            )
        if name in ticket.start:
            if not isinstance(base, nn.Embedding):
                raise UnsupportedTableError(
                    f"the ticket has initial values for {name!r}, which is no plain table; merge it first, or "
                    "use ticket.with_start(None)"
                )
            start = ticket.start[name].to(base.weight, copy=True)
            inner = plain_like(base, start, padding_idx=base.padding_idx)
        # a model file stores the mask itself, so the table need not remember the ticket
        return MaskedTable(Masked(), inner, kept.to(next(base.parameters()).device, copy=True))

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table with the mask that the ticket has under its name."""
        if self.ticket is None:
            return super().wrap_all(tables)
        ticket = load_ticket(self.ticket) if isinstance(self.ticket, str) else self.ticket
        for name in ticket.kept:
            if name not in tables:
                raise NoTableError(
                    f"the ticket has a mask for {name!r}, which is not among the tables chosen: "
                    f"{', '.join(tables)}; use the model that the ticket was taken from"
                )
        for name in tables:
            if name not in ticket.kept:
                raise NoTableError(
                    f"the ticket has no mask for {name!r}, only for {', '.join(ticket.kept)}; leave other "
                    "tables out with where=lambda t: t.name in ticket.kept"
                )
        return [wrap(table, Masked(ticket.of(name))) for name, table in tables.items()]

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return masked tables behind one lookup of their rows and one of their masks."""
        masked = [table for table in tables if isinstance(table, MaskedTable)]
        return MaskedStack(self, masked, lengths)


class MaskedTable(Table):
    """A table with entries that stay zero."""

    kept: Tensor

    def __init__(self, method: Method, inner: AnyTable, kept: Tensor) -> None:
        super().__init__(method, inner)
        self.register_buffer("kept", kept)  # m

    def rows(self, ids: Tensor) -> Tensor:
        """Return m_i ⊙ V_i."""
        return _masked(self.inner(ids), take_rows(self.kept, ids.long()))

    def grown(self, start: Tensor) -> "MaskedTable":
        """Return the table with more ids, of which all entries are kept."""
        kept = torch.cat([self.kept, torch.ones_like(start, dtype=torch.bool)])
        return MaskedTable(self.method, grow_table(self.inner, start), kept)

    @property
    def num_weights(self) -> int:
        """Stored numbers, without the mask."""
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
    # not a product: the stored number of a masked entry may be infinite
    return torch.where(kept, rows, 0.0)
