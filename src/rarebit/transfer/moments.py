"""Moments: rare rows with the mean, spread and further moments of frequent ones, column by column.

    l = mean over columns of sum_k ( mean over T of z^k - mean over S of z^k )^2        z = (e - m) / s

    m    the mean of the sampled frequent rows S, of each column
    s    how far rows of both sides are from m, by the mean of the squares; a plain number
    k    1 to `moments`: the mean, the spread, then what skewness and kurtosis are made of

In units of s the loss does not depend on how large a table's rows are, and powers of z stay small.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rarebit.settings import check_types, require
from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import StatelessLoss

__all__ = ["Moments"]


@dataclass(frozen=True, kw_only=True)
class Moments(StatelessLoss):
    """Move rare rows until their moments are those of frequent rows.

    >>> Moments(moments=4)
    Moments(moments=4)
    """

    moments: int = 2
    """How many moments count."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.moments >= 1, f"moments must be at least 1, got moments={self.moments}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the squared distances of the moments of each table, `(F,)`."""
        mean = batch.others.mean(dim=1)  # (F, M, D)
        theirs = batch.others - mean.unsqueeze(1)  # (F, S, M, D)
        own = batch.rows - batch.of_rows(mean)  # (U, M, D)
        share = batch.share.reshape(-1, 1, 1)
        far = 0.5 * (theirs.square().mean(dim=1) + batch.total(share * own.detach().square()))
        spread = torch.where(far > 0, far, 1.0).sqrt()
        own, theirs = own / batch.of_rows(spread), theirs / spread.unsqueeze(1)
        apart = [
            (batch.total(share * own**k) - (theirs**k).mean(dim=1)).square().mean(dim=-1)
            for k in range(1, self.moments + 1)
        ]
        return torch.stack(apart).sum(dim=(0, 2)) * batch.present
