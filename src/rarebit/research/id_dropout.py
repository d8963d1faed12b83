"""Id dropout: in training, replace rare ids by an unknown one at random (a neighbour of `shrinkage`).

    e(i) = m with probability c / (n_i + c), else v_i        in training
    e(i) = v_i                                               at inference

    n_i    how often training saw the id
    c      `IdDropout.c`: an id seen c times is dropped in half of its lookups
    v_i    the table's row
    m      a learned row of the table that starts at zero

Shrinkage weakens a row in every lookup; this replaces it at random, so inference uses the full row. A dropped value is dropped
from all tables of its field at once: else first-order weights would still reveal it. Only for comparisons.
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
from rarebit.research._neighbours import LookupPlace, Neighbour, OpenShares, find_lookups
from rarebit.settings import check_types, require

__all__ = ["IdDropout"]

UNKNOWN = "unknown"
"""The submodule with the rows for dropped ids, during training."""


@dataclass(frozen=True, kw_only=True)
class IdDropout(Neighbour):
    """Replace rare ids by an unknown one in some of their lookups, in training only.

    >>> IdDropout(c=3)
    IdDropout(c=3.0)
    """

    title: ClassVar[str] = "rare ids replaced by an unknown one at random, in training"
    paper: ClassVar[str] = "none: dropout of whole ids, by how often training saw them"
    cost: ClassVar[str] = "a step draws a random number per lookup; nothing at inference"
    applies: ClassVar[str] = "to compare rare rows that are left out with shrunk ones in a study"
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (3.0, 1.0, 30.0, 0.3, 10.0)}
    excludes: ClassVar[Mapping[str, str]] = {
        "harmless-transfer": "transfer would take a dropped row for the row itself; use one of them",
        **dict.fromkeys(
            ("row-rate", "shrinkage"), "both treat rare rows by their counts; use one of them"
        ),
    }

    c: float = 3.0
    """How often training must see an id to drop it in half of its lookups."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.c < math.inf, f"c must be 0 or more and finite, got c={self.c}")

    def callback(self) -> "_Dropping":
        """Return the callback that drops ids."""
        return _Dropping(self.c)


class _Unknown(nn.Module):
    """The learned rows for dropped ids of a place, one per table."""

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
        of_slot = [columns[table.field] + n for table in place.tables for n in range(table.length)]
        self.register_buffer("field_of_slot", field_of_slot.to(home), persistent=False)
        self.register_buffer("column_of_slot", torch.tensor(of_slot, device=home), persistent=False)

    def replace(self, ids: Tensor, rows: Tensor, chances: Tensor) -> Tensor:
        """Return the rows, with those of dropped ids replaced, given random numbers in [0, 1)."""
        own = chances.index_select(-1, self.column_of_slot) if self.has_slots else chances
        dropped = own < self.open_shares(ids)
        unknown = F.embedding(self.field_of_slot, self.rows) if self.has_slots else self.rows[0]
        return torch.where(dropped.unsqueeze(-1), unknown, rows)


class _Dropping(Callback):
    def __init__(self, c: float) -> None:
        self.c = c

    def start(self, model: nn.Module, data: TrainingData) -> None:
        self.places, counts = find_lookups(model), data.train.counts()
        columns: dict[str, int] = {}  # of each field, its first column of the random numbers
        self.num_columns = 0
        for table in (table for place in self.places for table in place.tables):
            if table.field not in columns:
                columns[table.field] = self.num_columns
                self.num_columns += table.length
        self.chances: Tensor | None = None
        self.handles: list[RemovableHandle] = []
        for place in self.places:
            unknown = _Unknown(place, OpenShares(place, counts, self.c), columns)
            place.module.add_module(UNKNOWN, unknown.train(place.module.training))
            self.handles.append(place.module.register_forward_hook(self._replace))

    def _replace(self, module: nn.Module, args: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        # from the module: a deep copy of the model has the same hook, and its own rows for dropped ids
        unknown = getattr(module, UNKNOWN)
        assert isinstance(unknown, _Unknown)
        if not module.training:
            return rows
        ids = args[0]
        if not unknown.has_slots:
            return unknown.replace(ids, rows, torch.rand(ids.shape, device=ids.device))
        shape = (*ids.shape[:-1], self.num_columns)
        if self.chances is None or self.chances.shape != shape:  # shared by all tables of a field
            self.chances = torch.rand(shape, device=ids.device)
        return unknown.replace(ids, rows, self.chances)

    def after_step(self, num_steps: int) -> None:
        del num_steps
        self.chances = None

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        for place in self.places:
            delattr(place.module, UNKNOWN)
        self.handles, self.places = [], []
