"""What the neighbours of shrinkage share: they act in training only, and a study compares one at a time.

Neighbour       the settings of such a method
find_lookups    the modules of a model that look up rows: stacks, and single tables
OpenShares      c / (n + c) of the rows of such a module: the part of a row without evidence
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from rarebit.callbacks import TrainingMethod
from rarebit.data.schema import PADDING
from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.tables.apply import ModuleSite, find_sites
from rarebit.tables.bag import Bag
from rarebit.tables.collection import TableCollection
from rarebit.tables.counts import counts_of_table
from rarebit.tables.table import field_of, home_of, table_name
from rarebit.technique import Technique, technique_name


class Neighbour(TrainingMethod):
    """A known way to treat rare rows in training, compared with ours."""

    @classmethod
    def refuses(cls, other: type[Technique]) -> str | None:
        """Refuse another neighbour, forgetting and tail: each is compared by itself."""
        if issubclass(other, Neighbour) or technique_name(other) in ("forgetting", "tail"):
            return "both treat rare rows in training, and a study compares one at a time; use one"
        return super().refuses(other)


@dataclass(frozen=True)
class TableShape:
    """A table of a lookup."""

    name: str
    rows: int
    width: int
    length: int
    """Slots per lookup: more than one for a multi-valued field."""
    padding: int | None

    @property
    def field(self) -> str:
        """The last part of the name."""
        return field_of(self.name)


@dataclass(frozen=True)
class LookupPlace:
    """A module that takes ids and returns rows."""

    module: nn.Module
    tables: tuple[TableShape, ...]
    """In the order of its slots."""
    has_slots: bool
    """Whether the last axis of ids is slots, as for a stack."""


def find_lookups(model: nn.Module) -> list[LookupPlace]:
    """Return every module of a model that looks up rows."""
    places = []
    for collection in (part for part in model.modules() if isinstance(part, TableCollection)):
        shapes = [
            TableShape(
                table_name("", field.name),
                field.rows,
                table.embedding_dim,
                field.max_length,
                PADDING if field.kind == "multi" else None,
            )
            for field, table in zip(collection.fields, collection.tables(), strict=True)
        ]
        for members, stack in zip(collection.members, collection.stacks, strict=True):
            places.append(LookupPlace(stack, tuple(shapes[n] for n in members), has_slots=True))
    for site in find_sites(model):
        if not isinstance(site, ModuleSite):
            continue
        info = site.info
        if isinstance(site.module, nn.EmbeddingBag | Bag):
            raise UnsupportedTableError(
                f"{info.name!r} pools its rows, so single rows are out of reach; use nn.Embedding"
            )
        if not all(parameter.is_floating_point() for parameter in site.module.parameters()):
            raise UnsupportedTableError(f"{info.name!r} holds integers, which no training changes")
        shape = TableShape(info.name, info.rows, info.width, 1, site.module.padding_idx)
        places.append(LookupPlace(site.module, (shape,), has_slots=False))
    if not places:
        raise NoTableError("the model has no table")
    return places


class OpenShares(nn.Module):
    """c / (n + c) of the rows of a place; zero for padding, and for all rows if c is zero."""

    shares: Tensor
    offsets: Tensor

    def __init__(self, place: LookupPlace, counts: Mapping[str, Tensor], c: float) -> None:
        super().__init__()
        parts = []
        for table in place.tables:
            n = counts_of_table(table.name, table.rows, counts).double()
            share = c / (n + c) if c > 0 else torch.zeros_like(n)
            if table.padding is not None:
                share[table.padding] = 0.0
            parts.append(share.float())
        offsets = torch.zeros((), dtype=torch.int64)
        if place.has_slots:
            first_rows = torch.tensor([0, *accumulate(table.rows for table in place.tables)][:-1])
            lengths = torch.tensor([table.length for table in place.tables])
            offsets = first_rows.repeat_interleave(lengths)  # (S,)
        home = home_of(place.module)
        # not saved: both follow from the data
        self.register_buffer("shares", torch.cat(parts).to(home), persistent=False)  # (N,)
        self.register_buffer("offsets", offsets.to(home), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the share of each id, in the shape of the ids."""
        rows = ids + self.offsets
        return self.shares.index_select(0, rows.reshape(-1)).view(rows.shape)
