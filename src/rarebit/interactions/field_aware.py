"""Field-aware factorization machine: a field has another vector for each field it meets (Juan et al., 2016).

    sum over i < j of  v_i^j * v_j^i        elementwise

    v_i^j   the vector of field i for field j: a field's embedding holds those for all F fields,
            side by side, F D wide

Only the vectors that meet are gathered: half of them, F (F - 1) / 2, on each side of the product.
Summed over D it is the second-order term of the score.
"""

import torch
from torch import Tensor, nn

from rarebit.settings import require

__all__ = ["FieldAwareMachine"]


class FieldAwareMachine(nn.Module):
    """Sum of the elementwise products of all pairs of fields, `(..., F, F * D)` to `(..., D)`.

    >>> FieldAwareMachine(num_fields=2, dim=1)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))  # 2*3
    tensor([[6.]])
    """

    forth: Tensor
    """Where v_i^j lies among a row's F x F vectors, for each i < j."""
    back: Tensor
    """Where v_j^i lies."""

    def __init__(self, num_fields: int, dim: int) -> None:
        super().__init__()
        require(num_fields >= 1, f"num_fields must be at least 1, got num_fields={num_fields}")
        require(dim >= 1, f"dim must be at least 1, got dim={dim}")
        i, j = torch.triu_indices(num_fields, num_fields, offset=1)
        self.dim = dim
        self.register_buffer("forth", i * num_fields + j, persistent=False)
        self.register_buffer("back", j * num_fields + i, persistent=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the pooled pairwise products."""
        vectors = embeddings.flatten(-2).unflatten(-1, (-1, self.dim))  # (..., F * F, D)
        met: Tensor = vectors.index_select(-2, self.forth) * vectors.index_select(-2, self.back)
        return met.sum(dim=-2)
