"""The two sides of a transfer: which rows of a group of tables are frequent, and which rare ones may move.

What is selected is a property of the data, by field and id (`data/selection.py`). Here it becomes masks
over the rows of a group, and lists that a step can sample from, on the device of the tables.

Shapes: N rows of the group, F tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection, select
from rarebit.errors import DataError
from rarebit.settings import suggest
from rarebit.tables.find import Site
from rarebit.tables.table import full_table

__all__ = ["Listed", "Sides", "find_selection", "selection_name"]


@dataclass(frozen=True)
class Sides:
    """Who is frequent and who is rare among the rows of a group."""

    source: Tensor
    """Which rows are frequent, `(N,)` of bools."""
    target: Tensor
    """Which rows are rare and may move, `(N,)` of bools."""
    frequent: "Listed"
    rare: "Listed"
    relatives: tuple[Tensor, Tensor] | None
    """Ids in the table and weights of each row's frequent relatives, `(N, R)`, where they are known."""

    @classmethod
    def of(
        cls, parts: Sequence[FieldSelection], sites: Sequence[Site], *, skip_empty: bool
    ) -> "Sides":
        """Return the sides of tables one after the other; padding is on neither, nor rows of zeros."""
        left_out = [_left_out(site, skip_empty=skip_empty) for site in sites]
        pairs = list(zip(parts, left_out, strict=True))
        sources = [part.source.cpu() & ~out for part, out in pairs]
        targets = [part.target.cpu() & ~out for part, out in pairs]
        for site, source in zip(sites, sources, strict=True):
            if not bool(source.any()):
                raise DataError(
                    f"{site.info.name!r} has no frequent rows that rare ones could learn from; leave it out "
                    f"with where=lambda t: t.name != {site.info.name!r}, or look at its counts"
                )
        return cls(
            torch.cat(sources),
            torch.cat(targets),
            Listed.of(sources),
            Listed.of(targets),
            _relatives(parts),
        )

    def to(self, device: torch.device) -> "Sides":
        """Return the same on another device."""
        # relatives are moved by the loss that uses them: they are as large as a narrow table
        return Sides(
            self.source.to(device),
            self.target.to(device),
            self.frequent.to(device),
            self.rare.to(device),
            self.relatives,
        )


@dataclass(frozen=True)
class Listed:
    """The ids on one side, of each table, one table after the other."""

    ids: Tensor
    starts: Tensor
    """Where the list of each table begins, `(F,)`."""
    ends: Tensor
    """Its last place, `(F,)`."""
    counts: Tensor
    """How many each table has, `(F,)`; where it has none, the list has row 0."""

    @classmethod
    def of(cls, masks: Sequence[Tensor]) -> "Listed":
        """Return the ids that masks hold."""
        ids = [mask.nonzero()[:, 0] for mask in masks]
        counts = torch.tensor([len(part) for part in ids])
        # a table without any lists one that is there
        listed = [part if len(part) else torch.zeros(1, dtype=torch.int64) for part in ids]
        ends = counts.clamp(min=1).cumsum(0)
        return cls(torch.cat(listed), ends - counts.clamp(min=1), ends - 1, counts)

    def to(self, device: torch.device) -> "Listed":
        """Return the same on another device."""
        tensors = (self.ids, self.starts, self.ends, self.counts)
        return Listed(*(tensor.to(device) for tensor in tensors))

    def sample(self, uniform: Tensor) -> Tensor:
        """Return ids of each table by random numbers in [0, 1), `(S, F)`, with replacement."""
        # a product may be rounded up to the count itself
        places = torch.minimum((uniform * self.counts).long() + self.starts, self.ends)
        return self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)

    def ring(self, turn: Tensor, number: int) -> Tensor:
        """Return so many different ids of each table, `(n, F)`, below zero where it has fewer.

        They are neighbours in a ring that begins where random numbers `(F,)` in [0, 1) say.
        """
        step = torch.arange(number, device=self.ids.device).unsqueeze(1)
        places = ((turn * self.counts).long() + step) % self.counts.clamp(min=1) + self.starts
        ids = self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)
        return torch.where(step < self.counts, ids, -1)


def find_selection(
    chosen: Selection | CoOccurrence | FrequencySplit | None,
    counts: Mapping[str, Tensor] | None,
    data: Dataset | Tensor | None,
    fields: Sequence[str],
) -> Selection:
    """Return the selection for these fields: the one given, or one made of counts and data.

    >>> counts = {"item": torch.tensor([9, 1, 1, 1, 1])}
    >>> find_selection(None, counts, None, ["item"])["item"].source
    tensor([ True, False, False, False, False])
    """
    if isinstance(chosen, Selection):
        return chosen
    if counts is None:
        raise DataError(
            "harmless transfer must know which rows are frequent; give counts=dataset.counts(), or a "
            "Selection as select="
        )
    return select(data, counts, chosen or FrequencySplit(), fields=fields)


def selection_name(site: Site, known: Sequence[str]) -> str:
    """Return the name that a table goes by in counts and selections: its own, or its field's."""
    for name in (site.info.name, site.info.field):
        if name in known:
            return name
    raise DataError(
        f"there are no counts of the table {site.info.name!r}{suggest(site.info.field, known)}"
    )


def _left_out(site: Site, *, skip_empty: bool) -> Tensor:
    """Return which rows are on neither side, whatever was selected, `(N,)` of bools."""
    table = site.table
    out = torch.zeros(table.num_embeddings, dtype=torch.bool)
    if skip_empty:
        out = ~full_table(table).cpu().any(dim=1)
    if table.padding_idx is not None:
        out[table.padding_idx] = True
    return out


def _relatives(parts: Sequence[FieldSelection]) -> tuple[Tensor, Tensor] | None:
    widths = {part.relatives.shape[1] for part in parts}
    if widths in ({0}, set()):
        return None
    if len(widths) > 1:
        raise DataError(
            f"the tables of one stack need as many relatives a row, got {sorted(widths)}; select all "
            "fields with the same settings"
        )
    ids = torch.cat([part.relatives.cpu() for part in parts])
    return ids, torch.cat([part.weights.cpu() for part in parts])
