"""Factorization machine, and inner products of all pairs of fields.

    FactorizationMachine    sum over i < j of  v_i * v_j  =  1/2 [ (sum_i v_i)² - sum_i v_i² ]
    InnerProducts           p_ij = <v_i, v_j>      i < j

The first is elementwise (Rendle, 2010, eq. 1 and lemma 3.1). Its right side costs F D instead of F² D. Summed
over D it is the second-order term of the score.

The second is the product network's and DLRM's (Qu et al., 2016; Naumov et al., 2019): one batched product
gives all F² of them, of which the upper triangle is taken. Some fields may be kept before the products: all in
a product network, in DLRM the one vector of all numbers.
"""

import torch
from torch import Tensor, nn

from rarebit.interactions.block import require_sizes
from rarebit.settings import require

__all__ = ["FactorizationMachine", "InnerProducts"]


class FactorizationMachine(nn.Module):
    """Sum of the elementwise products of all pairs of fields, `(..., F, D)` to `(..., D)`."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the pooled pairwise products."""
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
        """Return the kept fields and the products."""
        squared = (embeddings @ embeddings.mT).flatten(-2)  # (..., F * F)
        products = squared.index_select(-1, self.places)
        if not self.num_kept:
            return products
        kept = embeddings[..., : self.num_kept, :].flatten(-2)
        return torch.cat([kept, products], dim=-1)
