"""Self-attention over fields (Song et al., 2019, eq. 5 to 8).

    a_ik^h = softmax over k of <Q^h e_i, K^h e_k>                 how much field i looks at field k
    e_i'   = relu( [sum over k of a_ik^h V^h e_k, for each h] + R e_i )

    Q, K, V, R  the four parts of a layer's `weight`, all heads of one side by side

These are the paper's equations. Its code adds a relu and a bias on each of the four parts, a division by the
root of a head's width, and layer norm at the end of a layer.

`OneResidual` is the form in the code of learned pruning (Liu et al., 2021), from pytorch-fm:
layers of torch's `MultiheadAttention`, which have biases, divide <Q e, K e> by the root of a head's
width and mix the heads once more, between one projection at the start and one residual at the end.

Q, K, V and R are one matrix product, sets one batched product. The weights a_ik are never stored
where torch has a fused kernel for them: otherwise they are F² numbers per row, head and layer.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.interactions.basic import require_sizes, sets_axis
from rarebit.settings import require


class SelfAttention(nn.Module):
    """Layers of attention with a residual each, `(..., F, D)` to `(..., F * heads * head_dim)`."""

    def __init__(
        self,
        dim: int,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        _check(dim, num_layers, num_heads, head_dim, dropout)
        self.num_heads, self.dropout = num_heads, dropout
        width = num_heads * head_dim
        self.layers = nn.ModuleList(
            SetLinear(width if layer else dim, width, parts=4, bias=False, num_sets=num_sets)
            for layer in range(num_layers)
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        fields = embeddings
        for layer in self.layers:
            query, key, value, residual = layer(fields).chunk(4, dim=-1)  # (..., F, H * A)
            dropout = self.dropout if self.training else 0.0
            attended = _attend(query, key, value, self.num_heads, scale=1.0, dropout=dropout)
            fields = F.relu(attended + residual)
        return fields.flatten(-2)


class OneResidual(nn.Module):
    """Layers of attention and one residual for all, `(..., F, D)` to `(..., F * heads * head_dim)`.

    relu( attention_L( ... attention_1(P e_i) ) + R e_i )

    P, R  `project`, `residual`
    """

    def __init__(
        self,
        dim: int,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        _check(dim, num_layers, num_heads, head_dim, dropout)
        self.num_heads, self.dropout, self.scale = num_heads, dropout, head_dim**-0.5
        width = num_heads * head_dim
        self.project = _as_linear_starts(SetLinear(dim, width, num_sets=num_sets))
        self.residual = _as_linear_starts(SetLinear(dim, width, num_sets=num_sets))
        self.into = nn.ModuleList(
            _as_one_matrix_starts(SetLinear(width, width, parts=3, num_sets=num_sets))
            for _ in range(num_layers)
        )
        self.out_of = nn.ModuleList(
            _as_linear_starts(SetLinear(width, width, num_sets=num_sets), bias=False)
            for _ in range(num_layers)
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        fields = self.project(embeddings)  # (..., F, H * A)
        for into, out_of in zip(self.into, self.out_of, strict=True):
            query, key, value = into(fields).chunk(3, dim=-1)
            dropout = self.dropout if self.training else 0.0
            fields = out_of(
                _attend(query, key, value, self.num_heads, scale=self.scale, dropout=dropout)
            )
        return F.relu(fields + self.residual(embeddings)).flatten(-2)


class SetLinear(nn.Module):
    """An affine map of each field, `(..., F, W)` to `(..., F, parts * U)`; one for each of the sets."""

    bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        units: int,
        *,
        parts: int = 1,
        bias: bool = True,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        sets = sets_axis(num_sets)
        bound = math.sqrt(6.0 / (width + units))  # Xavier's, of each part
        weight = torch.empty(*sets, parts * units, width).uniform_(-bound, bound)
        self.num_sets = num_sets
        self.weight = nn.Parameter(weight)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(*sets, parts * units)) if bias else None
        )

    def forward(self, fields: Tensor) -> Tensor:
        if self.num_sets is None:
            return F.linear(fields, self.weight, self.bias)
        num_fields = fields.shape[-2]
        rows = fields.flatten(1, 2)  # (M, B * F, W)
        mapped = torch.bmm(rows, self.weight.mT)
        if self.bias is not None:
            mapped = mapped + self.bias.unsqueeze(-2)
        images: Tensor = mapped.unflatten(1, (-1, num_fields))
        return images


def _attend(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, *, scale: float, dropout: float
) -> Tensor:
    """Return the values that each field looks at, heads side by side, `(..., F, H * A)`."""
    num_fields, width = query.shape[-2:]
    q, k, v = (
        part.reshape(-1, num_fields, num_heads, width // num_heads).transpose(1, 2)
        for part in (query, key, value)
    )  # (M * B, H, F, A): with more axes torch has no fused kernel
    attended = F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout)
    return attended.transpose(1, 2).reshape(query.shape)


def _as_linear_starts(layer: SetLinear, *, bias: bool = True) -> SetLinear:
    bound = 1.0 / math.sqrt(layer.weight.shape[-1])
    nn.init.uniform_(layer.weight, -bound, bound)
    if bias and layer.bias is not None:
        nn.init.uniform_(layer.bias, -bound, bound)
    return layer


def _as_one_matrix_starts(layer: SetLinear) -> SetLinear:
    """Let Q, K and V start as Xavier's rule has it for one matrix of all three."""
    bound = math.sqrt(6.0 / sum(layer.weight.shape[-2:]))
    nn.init.uniform_(layer.weight, -bound, bound)
    return layer


def _check(dim: int, num_layers: int, num_heads: int, head_dim: int, dropout: float) -> None:
    require_sizes(dim=dim, num_layers=num_layers, num_heads=num_heads, head_dim=head_dim)
    require(
        0.0 <= dropout < 1.0,
        f"attention_dropout must lie in [0, 1), got attention_dropout={dropout}",
    )
