"""The lookups of a step, added up row by row, and what the tables hold in those rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rarebit.tables.distinct import Distinct
from rarebit.tables.gather import take_rows
from rarebit.tables.looked_up import LookedUpRows
from rarebit.tables.lookups import wide
from rarebit.tables.ranks import world_size

__all__ = ["KnownRows", "over_losses", "places_of", "rows_of", "sum_lookups"]

SPREAD = 1024
"""Places that take what is added up for no row."""


@dataclass(frozen=True)
class KnownRows:
    """What is known of the rows of a step before their gradients."""

    distinct: Distinct
    ids: Tensor
    """The number of each slot's row in its group, `(U,)`; -1 in slots without a row."""
    is_empty: Tensor
    """Which slots are without a row, `(U,)`."""
    has_no_rule: Tensor
    """Which lookups keep their own gradient, `(T,)`."""
    places: Tensor | None
    """Where each lookup is added up, `(T,)`: its slot, or one of some behind the last; None: by `distinct`."""
    rows: Tensor | None
    """What the tables hold, `(U, D)`, where the rule wants to know."""
    skip: int
    """How many slots no rule is asked for: in the compact form, lookups without a rule have the first."""
    prepared: Any
    """What the rule prepared for the slots that it is asked for."""


def places_of(distinct: Distinct, has_no_rule: Tensor) -> Tensor | None:
    """Return `KnownRows.places`, where additions may come in any order."""
    if not has_no_rule.is_cuda or world_size() > 1:
        return None
    # lookups without a rule would wait for each other at one slot: they are spread behind the last
    behind = torch.arange(len(has_no_rule), device=has_no_rule.device) % SPREAD + len(distinct.ids)
    return torch.where(has_no_rule, behind, distinct.slot_of)


def sum_lookups(known: KnownRows, gradients: Tensor) -> Tensor:
    """Return the sum of each row's lookups `(K, U, D)`, the same bits in all processes."""
    distinct, size = known.distinct, len(known.ids)
    if gradients.numel() == 0:
        sums = [gradients[0]] * len(gradients)
    elif known.places is not None:
        zeros = [loss.new_zeros(size + SPREAD, loss.shape[1]) for loss in gradients]
        sums = [
            zero.index_add_(0, known.places, loss)[:size]
            for zero, loss in zip(zeros, gradients, strict=True)
        ]
    elif gradients.is_cuda:
        # additions on a GPU come in any order, but for those within a bag
        order, starts = distinct.order, distinct.starts
        sums = [F.embedding_bag(order, loss, starts, mode="sum") for loss in gradients]
    else:
        sums = [distinct.sum(loss) for loss in gradients]
    return sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)


def over_losses(gradients: Tensor) -> Tensor:
    """Return the sum over the losses; of one there is nothing to add, nor to copy."""
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


def rows_of(found: LookedUpRows, distinct: Distinct) -> Tensor:
    """Return what the tables hold in each slot, `(U, D)`: the row of its first lookup."""
    parts = [part.reshape(-1, found.group.width) for part in found.rows()]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)  # (T, D)
    return take_rows(rows, distinct.first).to(wide(rows.dtype))
