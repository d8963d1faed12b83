"""Exact ranking metrics over all rows at once, on whatever device the scores are on.

No sampling, no mean of batch values: one sort. Tied scores count half in AUC and fall together in
PR-AUC, so neither depends on the order of the rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Metrics", "auc", "average_precision", "logloss", "measure"]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """How well scores rank and predict some rows."""

    rows: int
    """Rows measured."""
    positives: int
    """Rows with a click."""
    auc: float | None
    """Chance that a clicked row scores above another one; None when all labels are the same."""
    logloss: float
    """Mean cross entropy, in nats."""
    pr_auc: float | None
    """Average precision; None when no row was clicked."""

    def __str__(self) -> str:
        return (
            f"AUC {_show(self.auc)}, logloss {self.logloss:.5f}, PR-AUC {_show(self.pr_auc)}, "
            f"{self.rows:,} rows"
        )


def measure(logits: Tensor, labels: Tensor) -> Metrics:
    """Return all metrics of some rows."""
    return Metrics(
        rows=len(labels),
        positives=int((labels > 0.5).sum()),
        auc=auc(logits, labels),
        logloss=logloss(logits, labels),
        pr_auc=average_precision(logits, labels),
    )


def auc(scores: Tensor, labels: Tensor) -> float | None:
    """Return the area under the ROC curve; None when only one class is there.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    0.875
    """
    ties = _tied_groups(scores, labels)
    positives, negatives = int(ties.positives.sum()), int(ties.negatives.sum())
    if positives == 0 or negatives == 0:
        return None
    below = ties.negatives.cumsum(0) - ties.negatives
    # Twice the number of pairs in the right order, in whole numbers: exact to the last pair.
    doubled = int((ties.positives * (2 * below + ties.negatives)).sum())
    return doubled / (2 * positives * negatives)


def average_precision(scores: Tensor, labels: Tensor) -> float | None:
    """Return the area under the precision-recall curve as a step function; None without a click.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.8]), torch.tensor([1.0, 0.0, 1.0]))
    0.8333333333333333
    """
    ties = _tied_groups(scores, labels)
    positives = ties.positives.flip(0).double()  # best scores first
    if int(positives.sum()) == 0:
        return None
    selected = (ties.positives + ties.negatives).flip(0).double().cumsum(0)
    precision = positives.cumsum(0) / selected
    return float((precision * positives).sum() / positives.sum())


def logloss(logits: Tensor, labels: Tensor) -> float:
    """Return the mean cross entropy of logits against labels, in nats.

    >>> round(logloss(torch.tensor([0.0]), torch.tensor([1.0])), 6)
    0.693147
    """
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


class _Ties(NamedTuple):
    """For each distinct score, lowest first: how many rows of either class have it."""

    positives: Tensor
    negatives: Tensor


def _tied_groups(scores: Tensor, labels: Tensor) -> _Ties:
    ordered, order = scores.sort()
    clicked = (labels > 0.5)[order].long()
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    last = is_last.nonzero().flatten()
    start = last.new_zeros(1)
    positives = clicked.cumsum(0)[last].diff(prepend=start)
    sizes = (last + 1).diff(prepend=start)
    return _Ties(positives, sizes - positives)


def _show(value: float | None) -> str:
    return "undefined (one class)" if value is None else f"{value:.5f}"
