"""Compressed interaction network, CIN: products of growing degree, field by field (Lian et al., 2018).

    x^{k+1}_h = sum over i, j of W^{k,h}_ij (x^k_i * x^0_j)      eq. (6)
    features  = [ sum over D of x^k_h,  all k >= 1 and h ]

    x^0      the fields, F of them
    W^{k,h}  row h of `weights[k]`, which holds i and j side by side, (i, j) at i F + j

Two variants of released code: with `relu`, x^{k+1} = relu(... + b^k), `biases[k]`; and with
`split_half`, a layer pools one half of its rows and passes the other on; the last layer pools all.

A layer makes the products x^k_i * x^0_j once, by far its largest tensor, and sums them with one matrix
product.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.interactions.basic import require_sizes, sets_axis
from rarebit.settings import require


class CompressedInteraction(nn.Module):
    """Pooled feature maps of all layers, `(..., F, D)` to `(..., out_width)`."""

    def __init__(
        self,
        num_fields: int,
        layers: Sequence[int],
        *,
        relu: bool = False,
        split_half: bool = False,
        num_sets: int | None = None,
    ) -> None:
        super().__init__()
        require_sizes(num_fields=num_fields)
        require(len(layers) >= 1, "a compressed interaction network needs a layer, got none")
        require(
            all(size >= 1 for size in layers), f"layers need at least 1 feature map, got {layers}"
        )
        require(
            not split_half or all(size % 2 == 0 for size in layers[:-1]),
            f"split_half needs layers of even size, except the last, got {layers}",
        )
        sets = sets_axis(num_sets)
        kept = [size // 2 if split_half else size for size in layers[:-1]]
        inputs = [maps * num_fields for maps in (num_fields, *kept)]
        self.num_sets = num_sets
        self.relu = relu
        self.split_half = split_half
        self.kept = (*kept, 0)  # maps of each layer that the next one uses
        self.weights = nn.ParameterList(
            _uniform(*sets, size, width, bound=width**-0.5)  # as nn.Linear starts
            for size, width in zip(layers, inputs, strict=True)
        )
        self.biases = nn.ParameterList(
            _uniform(*sets, size, bound=width**-0.5)
            for size, width in zip(layers, inputs, strict=True)
            if relu
        )
        self.out_width = sum(layers) - (sum(kept) if split_half else 0)

    def forward(self, embeddings: Tensor) -> Tensor:
        first = maps = embeddings.mT  # x^0: (..., D, F)
        pooled = []
        for layer, kept in enumerate(self.kept):
            found = self._layer(layer, maps, first)  # x^{k+1}: (..., D, H)
            maps = found[..., :kept]
            pooled.append((found[..., kept:] if self.split_half else found).sum(dim=-2))
        return torch.cat(pooled, dim=-1)

    def _layer(self, layer: int, maps: Tensor, first: Tensor) -> Tensor:
        # a matrix product, not `*`: its backward needs no second tensor of this size
        products = maps.unsqueeze(-1) @ first.unsqueeze(-2)  # (..., D, H, F)
        bias = self.biases[layer] if self.relu else None
        summed = self._sum(products.flatten(-2), self.weights[layer], bias)
        return F.relu(summed) if self.relu else summed

    def _sum(self, products: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the weighted sums of the products, `(..., D, H * F)` to the next `(..., D, H)`."""
        if self.num_sets is None:
            return F.linear(products, weight, bias)
        rows = products.flatten(1, 2)  # (M, B * D, H * F)
        if bias is None:
            summed = torch.bmm(rows, weight.mT)
        else:
            summed = torch.baddbmm(bias.unsqueeze(-2), rows, weight.mT)
        sets: Tensor = summed.unflatten(1, (-1, products.shape[-2]))
        return sets


def _uniform(*shape: int, bound: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
