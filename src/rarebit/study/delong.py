"""The difference of two AUCs on the same rows, with its interval (DeLong et al., 1988).

Seeds tell how much training varies. This tells how much the test rows do: other rows of the same kind
would give another difference. Every row has a placement, the share of the other class that it is on the
right side of, ties counted half:

    V10(i) = share of rows without a click that score below click i;  their mean is the AUC
    V01(j) = share of clicks that score above row j;                  so is theirs
    variance of the difference = var(V10a - V10b) / clicks + var(V01a - V01b) / others

One sort a model gives all placements at once (Sun and Xu, 2014, from midranks; here from the counts below
and above each group of equal scores, which are the same numbers without their rounding).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from rarebit.errors import DataError
from rarebit.settings import require

__all__ = ["PairedAUC", "delong"]


@dataclass(frozen=True, kw_only=True)
class PairedAUC:
    """Two AUCs of the same rows and how sure their difference is."""

    auc_a: float
    """Of the first scores."""
    auc_b: float
    """Of the second scores."""
    difference: float
    """First minus second."""
    standard_error: float
    """Of the difference, over other rows of the same kind."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of it."""
    confidence: float
    """How often such an interval has the true difference."""


def delong(scores_a: Tensor, scores_b: Tensor, labels: Tensor, *, level: float = 0.05) -> PairedAUC:
    """Return the AUCs of two models on the same rows, and their difference with its interval.

    All are (N,), on one device; a label above one half is a click.

    >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> good = torch.tensor([0.1, 0.2, 0.6, 0.5, 0.8, 0.9])
    >>> found = delong(good, torch.zeros(6), labels)
    >>> round(found.auc_a, 3), found.auc_b, round(found.low, 3), round(found.high, 3)
    (0.889, 0.5, 0.081, 0.697)
    """
    require(0 < level < 1, f"level must be between 0 and 1, got {level}")
    _check(scores_a, scores_b, labels)
    clicked = labels > 0.5
    a, b = _placements(scores_a, clicked), _placements(scores_b, clicked)
    variance = sum(
        float((ours - theirs).var()) / len(ours)
        for ours, theirs in ((a.clicks, b.clicks), (a.others, b.others))
    )
    error = math.sqrt(variance)
    difference = a.auc - b.auc
    reach = NormalDist().inv_cdf(1 - level / 2) * error
    return PairedAUC(
        auc_a=a.auc,
        auc_b=b.auc,
        difference=difference,
        standard_error=error,
        low=difference - reach,
        high=difference + reach,
        confidence=1 - level,
    )


def _check(scores_a: Tensor, scores_b: Tensor, labels: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (scores_a, scores_b, labels)]
    if labels.dim() != 1 or len(set(shapes)) > 1:
        raise DataError(f"both scores and the labels must have one shape, (rows,); got {shapes}")
    if bool(scores_a.isnan().any() | scores_b.isnan().any()):
        raise DataError(
            "scores must be numbers to be ranked, got nan; look at the model's training"
        )
    clicks = int((labels > 0.5).sum())
    if min(clicks, len(labels) - clicks) < 2:
        raise DataError(
            "an interval of the AUC needs at least two rows with a click and two without, "
            f"got {clicks} and {len(labels) - clicks}; give it more rows"
        )


class _Placements(NamedTuple):
    """The AUC, and in float64 the placements of the rows with a click and of the others."""

    auc: float
    clicks: Tensor
    others: Tensor


def _placements(scores: Tensor, clicked: Tensor) -> _Placements:
    ordered, order = scores.sort()
    is_last = torch.ones_like(clicked)  # of its group of equal scores
    is_last[:-1] = ordered[1:] != ordered[:-1]
    last = is_last.nonzero().flatten()
    start = last.new_zeros(1)
    clicks = clicked[order].long().cumsum(0)[last].diff(prepend=start)
    others = (last + 1).diff(prepend=start) - clicks
    # twice the counts, so that half a tie is a whole number: below for clicks, above for others
    below = 2 * (others.cumsum(0) - others) + others
    above = 2 * (clicks.sum() - clicks.cumsum(0)) + clicks
    group = torch.empty_like(order)
    group[order] = is_last.long().cumsum(0) - is_last.long()
    num_clicks, num_others = int(clicks.sum()), int(others.sum())
    return _Placements(
        auc=int((clicks * below).sum()) / (2 * num_clicks * num_others),
        clicks=below[group[clicked]].double() / (2 * num_others),
        others=above[group[~clicked]].double() / (2 * num_clicks),
    )
