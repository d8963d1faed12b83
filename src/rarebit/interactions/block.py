"""Layers that all interactions use: fast matrix products, and `Linear, [BatchNorm,] ReLU, [Dropout]`.

    with embedding sets, h_m = dropout(relu(norm_m(W_m x_m + b_m)))      W `weight[m]`, b `bias[m]`

Multi-embedding puts one such `Block` behind each set's interaction: without a nonlinearity there, several
sets are no more than one wide set (Guo et al., 2024).

In half precision, the matrix units of a GPU read rows in pieces of sixteen bytes, which is eight numbers, and
only rows whose length is a multiple of that. Those of 39 fields of width 10 are not, and their product takes
three times as long. Columns of zeros fill such rows up; they change no sum.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.settings import require

__all__ = [
    "Block",
    "Blocks",
    "Linear",
    "SetBatchNorm",
    "affine",
    "as_autocast",
    "filled_up",
    "require_sizes",
    "sets_axis",
]

MULTIPLES = {"cuda": 8}
"""Numbers of half precision that a device reads at a time, where it matters."""


def require_sizes(**sizes: int) -> None:
    """Raise where a size, given by its name, is below 1."""
    for name, size in sizes.items():
        require(size >= 1, f"{name} must be at least 1, got {name}={size}")


def sets_axis(num_sets: int | None) -> tuple[int, ...]:
    """Return the leading axis of parameters that each embedding set has its own of; none without sets."""
    return () if num_sets is None else (num_sets,)


def as_autocast(x: Tensor) -> Tensor:
    """Return a tensor in the precision that autocast uses for products, where it is on.

    Between two products it is then not written in full precision.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def filled_up(x: Tensor, dims: int = 1) -> Tensor:
    """Return a tensor with zeros at the end of its last dimensions, where a product is faster with them."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    multiple = MULTIPLES.get(kind, 1) if dtype in (torch.bfloat16, torch.float16) else 1
    missing = [-size % multiple for size in reversed(x.shape[-dims:])]
    if not any(missing):
        return x
    return F.pad(x, [size for end in missing for size in (0, end)])


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W x + b of rows `(B, W)`, or of each embedding set's `(M, B, W)` with its own weights."""
    x, weight = filled_up(x), filled_up(weight)
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)  # (M, B, U)


class Linear(nn.Linear):
    """A linear layer that is fast at any width."""

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b."""
        return affine(input, self.weight, self.bias)


class Block(nn.Module):
    """One layer, `(B, W)` to `(B, U)`; with `num_sets`, `(M, B, W)` to `(M, B, U)`."""

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
        sets = sets_axis(num_sets)
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
    """Batch norm of features `(B, W)`, or of each embedding set's `(M, B, W)` on its own."""

    def __init__(self, width: int, num_sets: int | None = None) -> None:
        super().__init__(width * (num_sets or 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, each with the same mean and spread over the batch."""
        if features.ndim == 2:
            return super().forward(features)
        channels = super().forward(features.transpose(0, 1).flatten(1))  # one per set and feature
        sets: Tensor = channels.unflatten(1, (features.shape[0], -1))
        return sets.transpose(0, 1)


class Blocks(nn.Sequential):
    """Several layers in sequence; the last is `out_width` wide."""

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
