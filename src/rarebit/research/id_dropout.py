"""Id dropout: in training, a rare id is now and then taken for an unknown one (a neighbour of `shrinkage`).

    e(i) = m with probability c / (n_i + c), else v_i        in training
    e(i) = v_i                                               when served

    n_i    how often training saw the id
    c      `IdDropout.c`: an id that was seen c times is dropped in half of its lookups
    v_i    the table's row
    m      a learned row of the table that starts at zero

What shrinkage does to a row in every lookup, this does at random, all or nothing; so the row itself is trained
as if it counted fully, and is served so. A value that is dropped is dropped from all tables of its field at once,
or first-order weights would tell what the rows do not.

Not by itself: it is there to be compared with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from rarebit.callbacks import Callback, TrainingData
from rarebit.research._lookup_shares import LookupPlace, OpenShares, find_lookups
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require

__all__ = ["IdDropout"]

UNKNOWN = "unknown"
"""The name under which a place of lookups has its rows for dropped ids while it is trained."""


@dataclass(frozen=True, kw_only=True)
class IdDropout(Neighbour):
    """Take rare ids for unknown ones in some of their lookups, in training only.

    >>> IdDropout(c=3)
    IdDropout(c=3.0)
    """

    title: ClassVar[str] = "rare ids taken for unknown ones now and then, in training"
    paper: ClassVar[str] = "none: dropout of whole ids, by how often they were seen"
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a step draws a random number for each lookup; tables are served as they are"
    )
    applies: ClassVar[str] = (
        "beside shrinkage, to tell rows that count less from rows that are left out; not by itself"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (3.0, 1.0, 30.0, 0.3, 10.0)}
    excludes: ClassVar[Mapping[str, str]] = {
        "harmless-transfer": "a dropped row would be taken for the row itself; use one of them",
        "row-rate": "both hold rare rows back by their counts; use one of them",
        "shrinkage": "both hold rare rows back by their counts; use one of them",
    }

    c: float = 3.0
    """How often an id must be seen to be dropped in half of its lookups."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.c < math.inf, f"c must be 0 or more and finite, got c={self.c}")

    def callback(self) -> "_Dropping":
        """Return what drops ids in training, by how often the training rows have them."""
        return _Dropping(self.c)


class _Unknown(nn.Module):
    """Learned rows for the dropped ids of a place, one a table, and which ids are dropped how often."""

    field_of_slot: Tensor
    column_of_slot: Tensor

    def __init__(
        self, place: LookupPlace, open_shares: OpenShares, columns: Mapping[str, int]
    ) -> None:
        super().__init__()
        home = open_shares.shares.device
        like = next(place.module.parameters())
        self.has_slots = place.has_slots
        self.open_shares = open_shares
        self.rows = nn.Parameter(like.new_zeros(len(place.tables), place.tables[0].width))  # m
        lengths = [table.length for table in place.tables]
        field_of_slot = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        of_slot = [columns[_field(t.name)] + n for t in place.tables for n in range(t.length)]
        self.register_buffer("field_of_slot", field_of_slot.to(home), persistent=False)
        self.register_buffer("column_of_slot", torch.tensor(of_slot, device=home), persistent=False)

    def replace(self, ids: Tensor, rows: Tensor, chances: Tensor) -> Tensor:
        """Return the rows with those of dropped ids replaced, given numbers in [0, 1)."""
        own = chances.index_select(-1, self.column_of_slot) if self.has_slots else chances
        dropped = own < self.open_shares(ids)
        unknown = F.embedding(self.field_of_slot, self.rows) if self.has_slots else self.rows[0]
        return torch.where(dropped.unsqueeze(-1), unknown, rows)


class _Dropping(Callback):
    """Replaces rows on their way to the network, in training."""

    def __init__(self, c: float) -> None:
        self.c = c

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Put hooks on all lookups."""
        places, counts = find_lookups(model), data.train.counts()
        self.num_columns = 0
        columns = self._columns(places)
        self.chances: Tensor | None = None
        self.places = places
        self.handles: list[RemovableHandle] = []
        for place in places:
            unknown = _Unknown(place, OpenShares(place, counts, self.c), columns)
            place.module.add_module(UNKNOWN, unknown.train(place.module.training))
            self.handles.append(place.module.register_forward_hook(self._hand_out))

    def _columns(self, places: list[LookupPlace]) -> dict[str, int]:
        """Return for each field the first of the random numbers of a row that are its own."""
        columns: dict[str, int] = {}
        for table in (table for place in places for table in place.tables):
            if _field(table.name) not in columns:
                columns[_field(table.name)] = self.num_columns
                self.num_columns += table.length
        return columns

    def _hand_out(self, module: nn.Module, args: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        # a deep copy of the model has the same hook, and rows of its own for dropped ids
        unknown = getattr(module, UNKNOWN)
        assert isinstance(unknown, _Unknown)
        if not module.training:
            return rows
        ids = args[0]
        return unknown.replace(ids, rows, self._draw(ids, has_slots=unknown.has_slots))

    def _draw(self, ids: Tensor, *, has_slots: bool) -> Tensor:
        """Return the random numbers of these lookups; tables of one field get the same ones."""
        if not has_slots:
            return torch.rand(ids.shape, device=ids.device)
        shape = (*ids.shape[:-1], self.num_columns)
        if self.chances is None or self.chances.shape != shape:
            self.chances = torch.rand(shape, device=ids.device)
        return self.chances

    def after_step(self, num_steps: int) -> None:
        """Forget the random numbers of the step."""
        del num_steps
        self.chances = None

    def close(self) -> None:
        """Leave tables as they are without it."""
        for handle in self.handles:
            handle.remove()
        for place in self.places:
            delattr(place.module, UNKNOWN)
        self.handles, self.places = [], []


def _field(name: str) -> str:
    return name.rpartition(".")[2]
