"""A layer of a network: `Linear, [BatchNorm,] ReLU, [Dropout]`, for one embedding set or for each.

    with embedding sets, h_m = dropout(relu(norm_m(W_m x_m + b_m)))      W `weight[m]`, b `bias[m]`

Multi-embedding puts one behind each set's interaction: without a nonlinearity there, several sets
are no more than one wide set (Guo et al., 2024).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.interactions.aligned import affine
from rarebit.settings import require

__all__ = ["Block", "Blocks", "SetBatchNorm"]


class Block(nn.Module):
    """One layer, `(B, W)` to `(B, U)`; with `num_sets`, `(M, B, W)` to `(M, B, U)`.

    >>> Block(6, 4, num_sets=3)(torch.zeros(3, 5, 6)).shape
    torch.Size([3, 5, 4])
    """

    def __init__(
        self,
        width: int,
        units: int,
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        require(units >= 1, f"hidden layers need at least 1 unit, got {units}")
        require(0.0 <= dropout < 1.0, f"dropout must lie in [0, 1), got dropout={dropout}")
        sets = () if num_sets is None else (num_sets,)
        bound = 1.0 / math.sqrt(width)  # as nn.Linear starts
        self.num_sets = num_sets
        self.weight = nn.Parameter(torch.empty(*sets, units, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(*sets, units).uniform_(-bound, bound))
        self.norm = SetBatchNorm(units, num_sets) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Return the layer's output."""
        out = affine(features, self.weight, self.bias)
        activated: Tensor = self.dropout(F.relu(self.norm(out)))
        return activated


class SetBatchNorm(nn.BatchNorm1d):
    """Batch norm of features `(B, W)`, or of each embedding set's `(M, B, W)` for itself."""

    def __init__(self, width: int, num_sets: int | None = None) -> None:
        super().__init__(width * (num_sets or 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, each with the same mean and spread over the batch."""
        if features.ndim == 2:
            return super().forward(features)
        channels = super().forward(features.transpose(0, 1).flatten(1))  # one a set and feature
        sets: Tensor = channels.unflatten(1, (features.shape[0], -1))
        return sets.transpose(0, 1)


class Blocks(nn.Sequential):
    """Several layers, one behind the other; `width` of the last is `out_width`."""

    def __init__(
        self,
        width: int,
        hidden: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
    ) -> None:
        widths = [width, *hidden]
        super().__init__(
            *(
                Block(before, after, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
                for before, after in pairwise(widths)
            )
        )
        self.out_width = widths[-1]
