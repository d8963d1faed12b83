"""MMD: the distance of two samples by kernels of several widths (Gretton et al., 2012).

l = mean k(x, x') - 2 mean k(x, y) + mean k(y, y')
k(a, b) = mean over widths w of exp(-||a - b||^2 / (w * v))

x, y    at most `sample` rare rows of the batch, and as many sampled frequent ones
v       the mean of ||x - y||^2, a plain number: the kernels grow and shrink with the table
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rarebit.settings import check_types, require
from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import StatelessLoss

__all__ = ["MMD"]


@dataclass(frozen=True, kw_only=True)
class MMD(StatelessLoss):
    """Move rare rows until their sample looks like one of frequent rows, by the kernel distance.

    >>> MMD(sample=32).widths
    (0.25, 0.5, 1.0, 2.0, 4.0)
    """

    widths: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Widths of the kernels, in mean squared distances of a rare and a frequent row."""
    sample: int = 64
    """Rows of each side and table that are held against each other; the cost is its square."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            bool(self.widths) and min(self.widths) > 0, f"widths must be above 0, got {self.widths}"
        )
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the squared distance of the two samples of each table, `(F,)`."""
        picked = batch.pick(self.sample)
        rare = batch.rows_at(picked.index).transpose(1, 2)  # (F, M, P, D)
        frequent = batch.others[:, : self.sample].transpose(1, 2)  # (F, M, S, D)
        weight = picked.weight.unsqueeze(1)  # (F, 1, P)
        even = torch.full_like(frequent[..., 0], 1 / frequent.shape[2])  # (F, M, S)
        apart = _squares(rare, frequent)
        scale = _mean(apart.detach(), weight, even)
        scale = torch.where(scale > 0, scale, 1.0)  # (F, M)
        within = _mean(self._kernel(_squares(rare, rare), scale), weight, weight)
        across = _mean(self._kernel(apart, scale), weight, even)
        theirs = _mean(self._kernel(_squares(frequent, frequent), scale), even, even)
        return (within - 2 * across + theirs).sum(dim=1) * batch.present

    def _kernel(self, squares: Tensor, scale: Tensor) -> Tensor:
        widths = [(squares / (scale[..., None, None] * width)).neg().exp() for width in self.widths]
        return sum(widths[1:], start=widths[0]) / len(widths)


def _squares(first: Tensor, second: Tensor) -> Tensor:
    """Return the squared distances `(..., P, S)` of rows `(..., P, D)` and `(..., S, D)`."""
    lengths = first.square().sum(-1).unsqueeze(-1) + second.square().sum(-1).unsqueeze(-2)
    return (lengths - 2 * first @ second.transpose(-1, -2)).clamp(min=0.0)


def _mean(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of `(..., P, S)` with weights `(..., P)` and `(..., S)`."""
    return ((values @ second.unsqueeze(-1)).squeeze(-1) * first).sum(dim=-1)
