"""Shrunk tables of a model: their counts, and the strength that their rows speak for.

Let the true rows of a table spread around the prior p with variance τ² in each entry, and let a row that was
seen n times be its true row and noise of variance σ² / n, as a mean of n observations is. Then

    E (v_i - p)² = τ² + σ² / n_i                                                                 (1)

and of all w the one with the least error E (w (v_i - p) - (true row - p))² is

    w_i = τ² / (τ² + σ² / n_i) = n_i / (n_i + c)        c = σ² / τ²                              (2)

so c is the slope of (1) over 1 / n divided by where it meets 1 / n = 0. Rows are put into groups of about the
same count, and a line is laid through the groups' means. A mean of m squares with expectation f has a
variance of 2 f² / m: groups are weighted by m / f², f being the line itself, a few times over.

Trained rows are no means. Where frequent rows have gone further from the prior than rare ones, as in a
table that has hardly been trained, the line falls and c is 0: nothing is shrunk.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from rarebit.errors import DataError, NoTableError
from rarebit.methods._shrinkage_counts import Counts, counts_of_all
from rarebit.methods._shrinkage_parts import CountedTable, Evidence, counted_in
from rarebit.methods.shrinkage import Shrinkage, ShrunkTable
from rarebit.tables.find import find_sites
from rarebit.tables.table import CHUNK, home_of

__all__ = ["MOST", "estimate_c_", "set_counts_", "strength_of_spread"]

MOST = 1e6
"""The largest strength: a row seen a thousand times is then the prior but for a thousandth."""
ROUNDS = 20
"""How often groups are weighted by the line that was found last."""
FLOOR = 1e-6
"""The least that a group may be expected to spread, in parts of the group that spreads most."""


@torch.no_grad()
def set_counts_(model: nn.Module, counts: Counts) -> None:
    """Set how often the rows of all tables of a model that count them were seen, in place.

    Counts are by the names of tables or of their fields, as in `Shrinkage`. Where more data has come,
    they are replaced by those of all data.

    >>> from rarebit import apply_
    >>> model = nn.ModuleDict({"user": nn.Embedding(3, 8)})
    >>> changes = apply_(model, Shrinkage(c=10), verbose=False)
    >>> set_counts_(model, {"user": torch.tensor([90, 0, 10])})
    >>> model["user"].evidence.counts
    tensor([90,  0, 10])
    """
    tables = {site.info.name: site.table for site in find_sites(model) if counted_in(site.table)}
    if not tables:
        raise NoTableError("no table of the model has counts to set; apply_ Shrinkage first")
    given = counts_of_all(tables, counts)
    for name, table in tables.items():
        for counted in counted_in(table):
            counted.set_counts_(given[name])
    # the tables of a stack were looked at one by one, and it has their counts now
    for module in model.modules():
        if isinstance(module, Evidence):
            module.is_known = True


@torch.no_grad()
def estimate_c_(model: nn.Module) -> dict[str, float]:
    """Estimate c of all tables with `Shrinkage(c="estimated")`, in place, and return it by table.

    Call it between epochs. A table whose rows tell nothing keeps the c it has: where all were seen about
    equally often, or all are at the prior. It looks at each row once.

    >>> from rarebit import apply_
    >>> model = nn.ModuleDict({"user": nn.Embedding(4, 8)})
    >>> model["user"].weight.data = torch.tensor([[2.0], [-2.0], [1.0], [-1.0]]).expand(4, 8).clone()
    >>> counts = torch.tensor([1, 1, 4, 4])  # squares of 4 and 1: tau² = 0, all of it is noise
    >>> changes = apply_(model, Shrinkage(counts=counts, c="estimated"), verbose=False)
    >>> estimate_c_(model)
    {'user': 1000000.0}
    """
    found = {}
    for site in find_sites(model):
        tables = [table for table in counted_in(site.table) if _is_estimated(table)]
        for number, table in enumerate(tables):
            if not table.evidence.is_known:
                raise DataError(
                    f"{site.info.name!r} does not know how often its rows were seen; use set_counts_ first"
                )
            c = strength_of_spread(_counts_of(table), _spread(table))
            if c is not None:
                table.evidence.strength.fill_(c)
            name = site.info.name if len(tables) == 1 else f"{site.info.name}, set {number}"
            found[name] = float(table.evidence.c)
    if not found:
        raise NoTableError(
            'no table of the model has a c to estimate; use Shrinkage(c="estimated")'
        )
    return found


def strength_of_spread(counts: Tensor, spread: Tensor) -> float | None:
    """Return c = σ² / τ² of rows by their counts and mean squares `(N,)`; None where nothing is told.

    >>> spread = torch.tensor([1 + 6.0, 1 + 3.0, 1 + 1.5])
    >>> round(strength_of_spread(torch.tensor([1, 2, 4]), spread), 6)
    6.0
    """
    seen = counts > 0
    group = counts[seen].double().log2().long()
    size = torch.bincount(group).double()
    filled = size > 0
    size = size[filled]

    def means(values: Tensor) -> Tensor:
        return torch.bincount(group, weights=values.double())[filled] / size

    x, y = means(1 / counts[seen].double()), means(spread[seen])  # (G,)
    if len(size) < 2 or float(y.max()) == 0:
        return None
    slope, level = _line(x, y, size)
    if slope <= 0:
        return 0.0
    return MOST if level <= slope / MOST else slope / level


def _line(x: Tensor, y: Tensor, size: Tensor) -> tuple[float, float]:
    """Return the slope of the line through the groups, and its level at x = 0."""
    weights = size
    for _ in range(ROUNDS):
        share = weights / weights.sum()
        away = x - share @ x
        slope = (share * away) @ y / ((share * away) @ away)
        level = share @ y - slope * (share @ x)
        expected = (level + slope * x).clamp(min=FLOOR * float(y.max()))
        weights = size / expected.square()
    return float(slope), float(level)


def _counts_of(table: ShrunkTable) -> Tensor:
    """Return the counts of rows that are handed out, `(N,)` on the CPU; 0 of padding."""
    counts = table.evidence.counts.cpu()
    if table.padding_idx is None:
        return counts
    return counts.index_fill(0, torch.tensor([table.padding_idx]), 0)


def _spread(table: ShrunkTable) -> Tensor:
    """Return the mean square of v_i - p over the entries of each row, `(N,)` on the CPU."""
    spread = []
    for ids in torch.arange(table.num_embeddings, device=home_of(table)).split(CHUNK):
        rows = table.inner(ids)
        away = rows if table.prior is None else rows - table.prior.rows(ids, table.inner)
        spread.append(away.double().square().mean(dim=-1).cpu())
    return torch.cat(spread)


def _is_estimated(table: CountedTable) -> TypeGuard[ShrunkTable]:
    return isinstance(table.method, Shrinkage) and table.method.c == "estimated"
