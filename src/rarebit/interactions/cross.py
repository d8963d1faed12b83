"""Cross networks: explicit products of growing degree.

    CrossNetwork          x_{l+1} = x_0 * (W_l x_l + b_l) + x_l        DCN-V2 (Wang et al., 2021, eq. 1)
    VectorCrossNetwork    x_{l+1} = x_0 (w_l . x_l) + b_l + x_l        DCN (Wang et al., 2017, eq. 3)

    x_0               the fields side by side, F D wide
    W_l or w_l, b_l   `weight[l]`, `bias[l]`; with embedding sets, `weight[m, l]`, `bias[m, l]`

The first takes one matrix product per layer; sets are one batched product. In the second, every x_l is x_0
times a number, plus a vector that is the same for all rows, so only the number is carried from layer to layer:

    x_l = a_l x_0 + c_l        c_l = b_0 + ... + b_{l-1}
    a_{l+1} = a_l + a_l (w_l . x_0) + w_l . c_l        a_0 = 1

The products w_l . x_0 of all layers are one matrix product, and x_L is made once.
"""

import torch
from torch import Tensor, nn

from rarebit.interactions.basic import affine, as_autocast, filled_up, require_sizes, sets_axis


class CrossNetwork(nn.Module):
    """Crossed features of all fields, `(..., F, D)` to `(..., F * D)`, by one matrix per layer."""

    def __init__(
        self, num_fields: int, dim: int, num_layers: int, *, num_sets: int | None = None
    ) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields, dim=dim, num_layers=num_layers)
        width = num_fields * dim
        sets = sets_axis(num_sets)
        self.num_sets = num_sets
        self.weight = nn.Parameter(torch.empty(*sets, num_layers, width, width))
        self.bias = nn.Parameter(torch.zeros(*sets, num_layers, width))
        for matrix in self.weight.detach().view(-1, width, width):
            nn.init.xavier_uniform_(matrix)

    def forward(self, embeddings: Tensor) -> Tensor:
        rows = as_autocast(embeddings).flatten(-2)
        first = filled_up(rows)  # x_0: (..., F * D), once for all layers
        weights, biases = filled_up(self.weight, dims=2), filled_up(self.bias)
        crossed = first
        # unbind, not weight[l]: its backward is one stack, not a zero-filled copy per layer
        for weight, bias in zip(weights.unbind(-3), biases.unbind(-2), strict=True):
            crossed = first * affine(crossed, weight, bias) + crossed
        return crossed[..., : rows.shape[-1]]


class VectorCrossNetwork(nn.Module):
    """Crossed features of all fields, `(..., F, D)` to `(..., F * D)`, by one vector per layer."""

    def __init__(
        self, num_fields: int, dim: int, num_layers: int, *, num_sets: int | None = None
    ) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields, dim=dim, num_layers=num_layers)
        width = num_fields * dim
        sets = sets_axis(num_sets)
        spread = (2.0 / (width + 1)) ** 0.5  # Xavier's, of a matrix with one column
        self.weight = nn.Parameter(spread * torch.randn(*sets, num_layers, width))
        self.bias = nn.Parameter(torch.zeros(*sets, num_layers, width))

    def forward(self, embeddings: Tensor) -> Tensor:
        first = embeddings.flatten(-2)  # x_0: (..., F * D)
        # only the matrix product is in half precision, not the sums that follow
        products = (first @ self.weight.mT).to(first.dtype)  # w_l . x_0: (..., L)
        before = self.bias.cumsum(dim=-2) - self.bias  # c_l: ([M,] L, F * D)
        shifts = (self.weight * before).sum(dim=-1).unsqueeze(-2)  # w_l . c_l: ([M,] 1, L)
        factor = torch.ones_like(products[..., 0])  # a_l: (...)
        for product, shift in zip(products.unbind(-1), shifts.unbind(-1), strict=True):
            factor = factor + factor * product + shift
        return factor.unsqueeze(-1) * first + self.bias.sum(dim=-2).unsqueeze(-2)
