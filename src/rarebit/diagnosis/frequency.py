"""How the norms of a table's rows go with how often their values were seen in training.

What is said of them:

dead           a row whose norm is at most a thousandth of the root mean square of all norms:
               weight decay erases what no batch looks up, to 1e-9 of its size in 300 steps of Adam
correlation    Spearman's: 1 where a more frequent value always has a longer row, -1 where never;
               of the values that training saw
bins           mean norm of the rows seen 0, 1, 2-3, 4-7, 8-15, ... times
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DEAD", "NormBin", "count_dead", "norm_bins", "spearman"]

DEAD = 1e-3


@dataclass(frozen=True, kw_only=True)
class NormBin:
    """The rows whose values were seen about equally often."""

    least: int
    """The values were seen at least so often."""
    most: int
    """And at most so often."""
    rows: int
    """Rows of such values."""
    mean_norm: float
    """Mean length of these rows."""


def count_dead(norms: Tensor) -> int:
    """Return how many norms are next to nothing beside the others; all, where all are zero.

    >>> count_dead(torch.tensor([1.0, 0.9, 1e-9, 0.0]))
    2
    """
    norms = norms.double()
    return int((norms <= DEAD * norms.square().mean().sqrt()).sum())


def norm_bins(norms: Tensor, counts: Tensor) -> tuple[NormBin, ...]:
    """Return the mean norm by how often a value was seen, in powers of two; empty bins are left out.

    >>> [(b.least, b.most, b.mean_norm) for b in norm_bins(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))]
    [(0, 0, 1.0), (2, 3, 3.0)]
    """
    # the exponent of a count: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7; exact, unlike a logarithm
    place = torch.frexp(counts.double()).exponent.long()
    rows = torch.bincount(place)
    totals = torch.bincount(place, weights=norms.double())
    return tuple(
        NormBin(
            least=1 << (power - 1) if power else 0,
            most=(1 << power) - 1,
            rows=int(rows[power]),
            mean_norm=float(totals[power] / rows[power]),
        )
        for power in rows.nonzero().flatten().tolist()
    )


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Return the rank correlation of two lists; None where one of them has but one value.

    >>> spearman(torch.tensor([1, 2, 3]), torch.tensor([10, 30, 1000]))
    1.0
    """
    x, y = _centred_ranks(x), _centred_ranks(y)
    scale = float(x.square().sum() * y.square().sum()) ** 0.5
    return float((x * y).sum()) / scale if scale else None


def _centred_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value less the mean rank; equal values share the mean of their ranks."""
    _, place, times = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = times.cumsum(0).double() - (times - 1) / 2
    return ranks[place] - (len(values) + 1) / 2
