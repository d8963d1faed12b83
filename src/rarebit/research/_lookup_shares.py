"""Where rows of a model are looked up, and how much of each row its evidence leaves open: c / (n + c).

    LookupPlace     a stack, or a table by itself, with the tables that it looks rows up in
    OpenShares      the share of each of their rows, by one lookup

For methods that act between a table and the network, in training only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from rarebit.data.schema import PADDING
from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.methods._counts import counts_of_table
from rarebit.tables.bag import Bag
from rarebit.tables.collection import TableCollection
from rarebit.tables.find import ModuleSite, find_sites
from rarebit.tables.stack import Stack
from rarebit.tables.table import home_of

__all__ = ["LookupPlace", "OpenShares", "TableShape", "find_lookups"]


@dataclass(frozen=True)
class TableShape:
    """A table as its lookups see it."""

    name: str
    rows: int
    width: int
    length: int
    """Slots of a lookup: more than one for a multi-valued field."""
    padding: int | None
    """The row that stands for no value."""


@dataclass(frozen=True)
class LookupPlace:
    """A module that takes ids and returns rows."""

    module: nn.Module
    tables: tuple[TableShape, ...]
    """In the order of its slots."""
    has_slots: bool
    """Whether the last axis of ids is slots, as for a stack."""


def find_lookups(model: nn.Module) -> list[LookupPlace]:
    """Return every place of a model where rows are looked up.

    >>> [place.tables[0].rows for place in find_lookups(nn.Sequential(nn.Embedding(9, 4)))]
    [9]
    """
    places = [
        place
        for module in model.modules()
        if isinstance(module, TableCollection)
        for place in _places_of(module)
    ]
    for site in find_sites(model):
        if not isinstance(site, ModuleSite):
            continue
        if isinstance(site.module, nn.EmbeddingBag | Bag):
            raise UnsupportedTableError(
                f"{site.info.name!r} pools its rows itself, so there is no row to get at; use nn.Embedding"
            )
        shape = TableShape(
            site.info.name, site.info.rows, site.info.width, 1, site.module.padding_idx
        )
        places.append(LookupPlace(site.module, (shape,), has_slots=False))
    if not places:
        raise NoTableError("the model has no table")
    return places


def _places_of(collection: TableCollection) -> list[LookupPlace]:
    tables = collection.tables()
    places = []
    for members, stack in zip(collection.members, collection.stacks, strict=True):
        assert isinstance(stack, Stack)
        shapes = tuple(
            TableShape(
                field.name,
                field.rows,
                tables[index].embedding_dim,
                field.max_length,
                PADDING if field.kind == "multi" else None,
            )
            for index, field in ((index, collection.fields[index]) for index in members)
        )
        places.append(LookupPlace(stack, shapes, has_slots=True))
    return places


class OpenShares(nn.Module):
    """c / (n + c) of the rows of a place; zero of padding, and of all rows where c is zero."""

    shares: Tensor
    offsets: Tensor

    def __init__(self, place: LookupPlace, counts: Mapping[str, Tensor], c: float) -> None:
        super().__init__()
        shares = torch.cat([_shares(table, counts, c) for table in place.tables])
        home = home_of(place.module)
        # neither is saved: both are known from the data
        self.register_buffer("shares", shares.to(home), persistent=False)  # (N,)
        self.register_buffer("offsets", _offsets(place).to(home), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the share of each id, in the shape of the ids."""
        rows = ids + self.offsets
        return self.shares.index_select(0, rows.reshape(-1)).view(rows.shape)


def _shares(table: TableShape, counts: Mapping[str, Tensor], c: float) -> Tensor:
    n = counts_of_table(table.name, table.rows, counts).double()
    shares = c / (n + c) if c > 0 else torch.zeros_like(n)
    if table.padding is not None:
        shares[table.padding] = 0.0
    return shares.float()


def _offsets(place: LookupPlace) -> Tensor:
    """Return where the rows of each slot's table begin, `(S,)`; of a single table, a number."""
    if not place.has_slots:
        return torch.zeros((), dtype=torch.int64)
    first_rows = torch.tensor([0, *accumulate(table.rows for table in place.tables)][:-1])
    return first_rows.repeat_interleave(_lengths(place.tables))


def _lengths(tables: Sequence[TableShape]) -> Tensor:
    return torch.tensor([table.length for table in tables])
