"""Factorization machine: all pairwise products of fields at once (Rendle, 2010).

    sum over i < j of  v_i * v_j  =  1/2 [ (sum_i v_i)² - sum_i v_i² ]      elementwise, eq. (1) and lemma 3.1

The right side costs F D instead of F² D. Summed over D it is the second-order term of the score.
"""

from torch import Tensor, nn

__all__ = ["FactorizationMachine"]


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
