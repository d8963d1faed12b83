"""The rows of a plain `nn.EmbeddingBag`, one by one, with gradients rounded as torch's own bag does.

    pooled(b) = sum over t in b of weight(t) * row(t)

What a rule sees of a row is weight(t) * gradient(b), rounded. torch's bag adds that product to the
table without rounding it first; where a rule leaves a row alone, so does `PooledRows`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PooledRows", "rounds_once", "single_rows", "watch_pooling"]


@dataclass(eq=False)
class PooledRows:
    """T rows that were pooled, and the gradient that came back for their bags."""

    bag: nn.EmbeddingBag
    ids: Tensor
    """The row of each lookup, `(T,)`."""
    bag_of: Tensor
    """The bag each lookup went to, `(T,)`."""
    weights: Tensor
    """What each lookup counted in its bag, `(T,)`."""
    gradient: Tensor | None = None
    """The gradient of the bags, summed over the losses."""

    def saw_gradient(self, gradient: Tensor) -> None:
        """Add the gradient of one loss."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def rows_and_gradients(self, gradients: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows to go on from: the bags' gradient for lookups to keep, else the one given."""
        assert self.gradient is not None
        weights = torch.where(keep, self.weights, 1.0)
        own = self.gradient.index_select(0, self.bag_of)
        with torch.enable_grad():
            rows = single_rows(self.bag, self.ids, weights)
        return rows, torch.where(keep.unsqueeze(-1), own, gradients.to(own.dtype))


def single_rows(bag: nn.EmbeddingBag, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the rows of these ids `(T,)`, with a gradient added up in the order of torch's own bag."""
    if bag.mode == "max":
        return F.embedding(ids, bag.weight, padding_idx=bag.padding_idx, sparse=bag.sparse)
    each = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)
    return F.embedding_bag(
        ids,
        bag.weight,
        each,
        mode="sum",
        sparse=bag.sparse,
        per_sample_weights=weights,
        padding_idx=bag.padding_idx,
    )


def rounds_once(bag: nn.EmbeddingBag, per_sample_weights: Tensor | None) -> bool:
    """Return whether torch's bag adds products to the table that it does not round first."""
    is_weighted = bag.mode == "mean" or per_sample_weights is not None
    return is_weighted and not bag.sparse and bag.weight.device.type == "cpu"


def watch_pooling(
    bag: nn.EmbeddingBag,
    pooled: Tensor,
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
) -> PooledRows:
    """Return what will be known of these pooled rows after a backward."""
    ids = input.reshape(-1)
    places = torch.arange(ids.shape[0])
    if offsets is None:
        bag_of = places // max(input.shape[-1], 1)
    else:
        bag_of = torch.searchsorted(offsets.long(), places, right=True) - 1
    if per_sample_weights is None:
        weights = _mean_weights(bag, ids, bag_of, pooled)
    else:
        weights = per_sample_weights.detach().reshape(-1)
    rows = PooledRows(bag, ids, bag_of, weights)
    pooled.register_hook(rows.saw_gradient)
    return rows


def _mean_weights(bag: nn.EmbeddingBag, ids: Tensor, bag_of: Tensor, pooled: Tensor) -> Tensor:
    counted = torch.ones_like(ids) if bag.padding_idx is None else ids != bag.padding_idx
    sizes = torch.zeros(pooled.shape[0], dtype=torch.float64)
    sizes = sizes.index_add_(0, bag_of, counted.double()).clamp_(min=1.0)
    return sizes.reciprocal().to(pooled.dtype).index_select(0, bag_of)
