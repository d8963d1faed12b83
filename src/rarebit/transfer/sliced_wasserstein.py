"""Sliced Wasserstein: rare and frequent rows compared in order, along random directions (Rabin et al., 2011).

    l = mean over directions of mean over r of ( x_(r) - y(q_r) )^2        q_r = (r + 1/2) / n

    x_(r)     projections of the n rare rows in ascending order, at most `sample` of the batch
    y(q)      the q-th quantile of the projections of the sampled frequent rows

With as many frequent rows as rare ones, they are paired in their order. Directions are new in each step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rarebit.settings import check_types, require
from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import StatelessLoss

__all__ = ["SlicedWasserstein"]

DIRECTIONS = 1 << 31
"""Where the places of random numbers begin that directions are drawn from."""


@dataclass(frozen=True, kw_only=True)
class SlicedWasserstein(StatelessLoss):
    """Move rare rows until they are spread as frequent ones are in every direction.

    >>> SlicedWasserstein(directions=16)
    SlicedWasserstein(directions=16, sample=256)
    """

    directions: int = 32
    """Random directions of a step."""
    sample: int = 256
    """Rare rows of each table that are compared."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.directions >= 1, f"directions must be at least 1, got directions={self.directions}"
        )
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the mean squared distance along the directions, `(F,)`."""
        picked, directions = batch.pick(self.sample), self._directions(batch)
        is_there = (picked.weight > 0)[..., None, None]  # (F, P, 1, 1)
        own = batch.rows_at(picked.index) @ directions  # (F, P, M, L)
        own = torch.where(is_there, own, torch.inf).sort(dim=1).values
        theirs = (batch.others @ directions).sort(dim=1).values  # (F, S, M, L)
        pairs = theirs.gather(1, self._quantiles(picked.number, theirs).expand_as(own))
        squares = torch.where(is_there, own - pairs, 0.0).square()
        weight = picked.weight[..., None, None]
        return (weight * squares).sum(dim=1).mean(dim=-1).sum(dim=-1)

    def _quantiles(self, number: Tensor, theirs: Tensor) -> Tensor:
        """Return which frequent row each rare one is paired with, by their ranks, `(F, P, 1, 1)`."""
        ranks = torch.arange(self.sample, device=number.device)
        size = theirs.shape[1]
        # in whole numbers: floor of (r + 1/2) * size / n
        place = (2 * ranks + 1) * size // (2 * number.clamp(min=1).unsqueeze(1))
        return place.clamp(max=size - 1)[..., None, None]

    def _directions(self, batch: TransferBatch) -> Tensor:
        """Return unit vectors `(D, L)` that point anywhere with the same chance."""
        shape = (batch.rows.shape[-1], self.directions)
        uniform = batch.draws.uniform(*shape, first=DIRECTIONS)
        normal = torch.special.ndtri(uniform.clamp(min=2.0**-54))
        unit: Tensor = normal / normal.norm(dim=0, keepdim=True)
        return unit.to(batch.rows.dtype)
