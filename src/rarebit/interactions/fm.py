"""Factorization machine: all pairwise products of fields at once (Rendle, 2010).

    sum over i < j of  v_i * v_j  =  1/2 [ (sum_i v_i)² - sum_i v_i² ]      elementwise, eq. (1) and lemma 3.1

The right side costs F D instead of F² D. Summed over D it is the second-order term of the score.

Inner products of all pairs of fields (Qu et al., 2016; Naumov et al., 2019).

    p_ij = <v_i, v_j>      i < j

One batched product gives all F² of them, of which the upper triangle is taken. Some fields may be
kept beside the products: all in a product network, in DLRM the one vector of all numbers.
"""

import torch
from torch import Tensor, nn

from rarebit.settings import require

__all__ = ["FactorizationMachine", "InnerProducts"]


class FactorizationMachine(nn.Module):
    """Sum of the elementwise products of all pairs of fields, `(..., F, D)` to `(..., D)`.

    >>> import torch
    >>> FactorizationMachine()(torch.tensor([[[1.0], [2.0], [3.0]]]))  # 1*2 + 1*3 + 2*3
    tensor([[11.]])
    """

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the pooled pairwise products."""
        square_of_sum = embeddings.sum(dim=-2).square()
        sum_of_squares = embeddings.square().sum(dim=-2)
        return 0.5 * (square_of_sum - sum_of_squares)


class InnerProducts(nn.Module):
    """The first `num_kept` fields side by side, then every pair's inner product.

    `(..., F, D)` to `(..., num_kept * D + F (F - 1) / 2)`. One field alone has no pair: its product
    with itself stands in. Nothing is learned here, so sets need no parameters of their own.

    >>> InnerProducts(num_fields=3, dim=1)(torch.tensor([[[2.0], [3.0], [5.0]]]))
    tensor([[ 6., 10., 15.]])
    """

    places: Tensor
    """Where in the F² products, row by row, the pairs lie."""

    def __init__(self, num_fields: int, dim: int, *, num_kept: int = 0) -> None:
        super().__init__()
        require(num_fields >= 1, f"num_fields must be at least 1, got num_fields={num_fields}")
        require(dim >= 1, f"dim must be at least 1, got dim={dim}")
        require(
            0 <= num_kept <= num_fields,
            f"num_kept must lie in [0, num_fields], got num_kept={num_kept} of {num_fields}",
        )
        rows, columns = torch.triu_indices(num_fields, num_fields, offset=min(num_fields - 1, 1))
        self.num_kept = num_kept
        self.register_buffer("places", rows * num_fields + columns, persistent=False)
        self.out_width = num_kept * dim + len(rows)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the kept fields and the products."""
        squared = (embeddings @ embeddings.mT).flatten(-2)  # (..., F * F)
        products = squared.index_select(-1, self.places)
        if not self.num_kept:
            return products
        kept = embeddings[..., : self.num_kept, :].flatten(-2)
        return torch.cat([kept, products], dim=-1)
