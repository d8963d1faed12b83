"""What most models are made of: fast layers, features side by side, and products of pairs of fields.

    Block                   dropout(relu(norm(W x + b))); with embedding sets, one per set: W `weight[m]`, b `bias[m]`
    Concatenation           [v_1, ..., v_F], for a network that finds the interactions itself
    Parallel                [ interaction_1(v), interaction_2(v), ... ]
    TwoStreams              two networks over the same fields (Mao et al., 2023)
    FactorizationMachine    sum over i < j of  v_i * v_j  =  1/2 [ (sum_i v_i)² - sum_i v_i² ]
    InnerProducts           p_ij = <v_i, v_j>      i < j

Multi-embedding puts one `Block` behind each set's interaction: without a nonlinearity there, several sets are no more than one
wide set (Guo et al., 2024). In that paper, as here, two streams differ only by how they start; the gate of Mao et al. is left out.

The factorization machine is elementwise (Rendle, 2010, eq. 1 and lemma 3.1): the right side costs F D instead of F² D, and summed
over D it is the second-order term of the score. Inner products (Qu et al., 2016; Naumov et al., 2019) come from one batched
product, of which the upper triangle is taken. Some fields may be kept before the products: all of them in a product network, in DLRM
the one vector of all numbers.

In half precision, the matrix units of a GPU read rows in pieces of sixteen bytes, and only rows whose length is a multiple of that.
Those of 39 fields of width 10 are not, and their product is three times slower. Columns of zeros fill such rows up; they change
no sum.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.settings import require

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
        out = affine(features, self.weight, self.bias)
        activated: Tensor = self.dropout(F.relu(self.norm(out)))
        return activated


class SetBatchNorm(nn.BatchNorm1d):
    """Batch norm of features `(B, W)`, or of each embedding set's `(M, B, W)` on its own."""

    def __init__(self, width: int, num_sets: int | None = None) -> None:
        super().__init__(width * (num_sets or 1))

    def forward(self, features: Tensor) -> Tensor:
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


class Concatenation(nn.Module):
    """All fields in one vector, `(..., F, D)` to `(..., F * D)`."""

    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings.flatten(-2)


class Parallel(nn.Module):
    """Each interaction's features, `(..., F, D)` to a tuple with one tensor per interaction."""

    def __init__(self, *interactions: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(interactions)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(embeddings) for branch in self.branches)


class TwoStreams(nn.Module):
    """The features of both streams, `(..., F, D)` to `(..., X)` and `(..., Y)`."""

    def __init__(
        self,
        width: int,
        first: Sequence[int],
        second: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = (
            Blocks(width, hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
            for hidden in (first, second)
        )

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        fields = embeddings.flatten(-2)  # (..., F * D)
        return self.first(fields), self.second(fields)


class FactorizationMachine(nn.Module):
    """Sum of the elementwise products of all pairs of fields, `(..., F, D)` to `(..., D)`."""

    def forward(self, embeddings: Tensor) -> Tensor:
        square_of_sum = embeddings.sum(dim=-2).square()
        sum_of_squares = embeddings.square().sum(dim=-2)
        return 0.5 * (square_of_sum - sum_of_squares)


class InnerProducts(nn.Module):
    """The first `num_kept` fields side by side, then every pair's inner product.

    `(..., F, D)` to `(..., num_kept * D + F (F - 1) / 2)`. One field alone has no pair: its product
    with itself stands in. There are no parameters, so sets need nothing else.
    """

    places: Tensor
    """Where in the F² products, row by row, the pairs lie."""

    def __init__(self, num_fields: int, dim: int, *, num_kept: int = 0) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields, dim=dim)
        require(
            0 <= num_kept <= num_fields,
            f"num_kept must lie in [0, num_fields], got num_kept={num_kept} of {num_fields}",
        )
        rows, columns = torch.triu_indices(num_fields, num_fields, offset=min(num_fields - 1, 1))
        self.num_kept = num_kept
        self.register_buffer("places", rows * num_fields + columns, persistent=False)
        self.out_width = num_kept * dim + len(rows)

    def forward(self, embeddings: Tensor) -> Tensor:
        squared = (embeddings @ embeddings.mT).flatten(-2)  # (..., F * F)
        products = squared.index_select(-1, self.places)
        if not self.num_kept:
            return products
        kept = embeddings[..., : self.num_kept, :].flatten(-2)
        return torch.cat([kept, products], dim=-1)
