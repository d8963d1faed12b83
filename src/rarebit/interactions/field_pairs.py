"""Products of pairs of fields that know which fields meet.

    FieldAwareMachine       sum over i < j of    v_i^j * v_j^i         FFM (Juan et al., 2016)
    FieldWeightedMachine    sum over i < j of    r_ij (v_i * v_j)      FwFM (Pan et al., 2018)
    FieldWeightedPooling    sum over all i, j of w_ij (v_i * v_j)      NFwFM (Guo et al., 2024); i = j too

    v_i^j   the vector of field i for field j: a field's embedding holds those for all F fields,
            side by side, F D wide
    r_ij    `strength`, one number per pair: the upper triangle of a matrix, row by row
    w_ij    `weight`, F x F
    with embedding sets, `strength[m]` and `weight[m]`

All products are elementwise; summed over D they are the second-order term of the score. The first gathers only
the vectors that meet: half of them, F (F - 1) / 2, on each side of the product. The other two are
`sum over i of v_i * (W v)_i`: one matrix product over the fields of all rows of a batch, without F x F
numbers per row.
"""

import torch
from torch import Tensor, nn

from rarebit.interactions.basic import require_sizes, sets_axis


class FieldAwareMachine(nn.Module):
    """Sum of the products of all pairs of fields, `(..., F, F * D)` to `(..., D)`."""

    forth: Tensor
    """Where v_i^j lies among a row's F x F vectors, for each i < j."""
    back: Tensor
    """Where v_j^i lies."""

    def __init__(self, num_fields: int, dim: int) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields, dim=dim)
        i, j = torch.triu_indices(num_fields, num_fields, offset=1)
        self.dim = dim
        self.register_buffer("forth", i * num_fields + j, persistent=False)
        self.register_buffer("back", j * num_fields + i, persistent=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        vectors = embeddings.flatten(-2).unflatten(-1, (-1, self.dim))  # (..., F * F, D)
        met: Tensor = vectors.index_select(-2, self.forth) * vectors.index_select(-2, self.back)
        return met.sum(dim=-2)


class FieldWeightedMachine(nn.Module):
    """Weighted sum of the products of all pairs of fields, `(..., F, D)` to `(..., D)`.

    It starts with all weights one, as a factorization machine.
    """

    pair: Tensor
    """For each i, j the number of the pair; for all but i < j that of a zero behind the last."""

    def __init__(self, num_fields: int, *, num_sets: int | None = None) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields)
        i, j = torch.triu_indices(num_fields, num_fields, offset=1)
        num_pairs = len(i)
        pair = torch.full((num_fields, num_fields), num_pairs)
        pair[i, j] = torch.arange(num_pairs)
        self.num_sets = num_sets
        self.register_buffer("pair", pair.flatten(), persistent=False)
        # NOTE[DIFF]: the paper does not say how r starts; here as FM, which is r = 1
        self.strength = nn.Parameter(torch.ones(*sets_axis(num_sets), num_pairs))  # r

    def forward(self, embeddings: Tensor) -> Tensor:
        with_zero = nn.functional.pad(self.strength, (0, 1))
        upper = with_zero.index_select(-1, self.pair).unflatten(-1, (embeddings.shape[-2], -1))
        return _pool(embeddings, upper, self.num_sets)


class FieldWeightedPooling(nn.Module):
    """Weighted sum of the products of all fields with all fields, `(..., F, D)` to `(..., D)`."""

    def __init__(self, num_fields: int, *, num_sets: int | None = None) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields)
        self.num_sets = num_sets
        self.weight = nn.Parameter(torch.randn(*sets_axis(num_sets), num_fields, num_fields))  # w

    def forward(self, embeddings: Tensor) -> Tensor:
        return _pool(embeddings, self.weight, self.num_sets)


def _pool(embeddings: Tensor, weight: Tensor, num_sets: int | None) -> Tensor:
    """Return the sum over i and j of w_ij (v_i * v_j)."""
    first = 0 if num_sets is None else 1
    fields = embeddings.movedim(-2, first).flatten(first + 1)  # ([M,] F, B * D)
    pooled = (fields * (weight @ fields)).sum(dim=-2)  # ([M,] B * D)
    return pooled.reshape(*embeddings.shape[:-2], embeddings.shape[-1])
