"""Aligned sets: multi-embedding whose interactions are held alike (a control; see `multi_embedding`).

    loss + weight · P        P = mean over l, i, j of  Var_m( ‖W_ij^(m,l)‖² )

    W_ij^(m,l)   the block of layer l's matrix in set m that field j meets field i in, K x K;
                 all of them are the cross network's `weight`, M x L x N K x N K
    weight       `AlignedSets.weight`
    Var_m        the variance over the M sets, divided by M - 1

The interaction pattern of a set is how strongly each field meets each other one. Multi-embedding lets the
sets find patterns of their own; here all are drawn to one. If that costs nothing, patterns of their own are
not what multi-embedding lives by. Only for models with such a matrix: `dcn_v2`.

Not for use by itself: it is there to be compared with.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rarebit.errors import UnsupportedTableError
from rarebit.sets.copies import ModelWithSets
from rarebit.sets.sets import SetsMethod
from rarebit.settings import require
from rarebit.tables.collection import TableCollection

__all__ = ["AlignedInteraction", "AlignedSets", "pattern_variance", "squared_patterns"]


@dataclass(frozen=True, kw_only=True)
class AlignedSets(SetsMethod):
    """Give a model several embedding sets, and draw their interaction patterns to one.

    >>> AlignedSets(num_sets=10)
    AlignedSets(num_sets=10, weight=1.0)
    """

    title: ClassVar[str] = "several embedding sets whose interaction patterns are held alike"
    control: ClassVar[str] = "multi-embedding"
    cost: ClassVar[str] = (
        "that of multi-embedding, and a sum over the interaction's weights in each step"
    )
    applies: ClassVar[str] = (
        "beside multi-embedding on dcn_v2, to tell whether patterns of their own matter; not by itself"
    )

    weight: float = 1.0
    """What the variance of the patterns is multiplied by before it is added to the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.weight < math.inf,
            f"weight must be 0 or more and finite, got weight={self.weight}",
        )

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place, and return its tables."""
        found = _cross_weight(model.with_sets(1)) if isinstance(model, ModelWithSets) else None
        if found is None or not isinstance(model, ModelWithSets):
            raise UnsupportedTableError(
                f"{self} needs a cross network with a matrix for each pair of fields, as dcn_v2 has, got "
                f"a {type(model).__name__}"
            )
        tables = model.take_sets_(self.num_sets, self)
        name, num_fields = found
        backbone: Any = model.backbone
        aligned = AlignedInteraction(backbone.interaction, name, num_fields, self.weight)
        backbone.interaction = aligned.train(backbone.training)
        return tables


class AlignedInteraction(nn.Module):
    """An interaction whose patterns are drawn to one while it is trained; its features are the same.

    The penalty has a gradient and no value: the loss that is told stays the model's own, and any loop
    trains with it. It counts once for each backward of an unscaled loss.
    """

    def __init__(self, interaction: nn.Module, name: str, num_fields: int, weight: float) -> None:
        super().__init__()
        self.interaction = interaction
        self.name = name
        """Which weight of the interaction holds the patterns."""
        self.num_fields = num_fields
        self.weight = weight

    def penalty(self) -> Tensor:
        """Return what is added to the loss."""
        matrices = self.interaction.get_parameter(self.name)
        exact = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        return self.weight * pattern_variance(exact, self.num_fields)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the features of the interaction."""
        features: Tensor = self.interaction(embeddings)
        if not (self.training and torch.is_grad_enabled()):
            return features
        with_penalty: Tensor = _WithPenalty.apply(features, self.penalty())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return with_penalty


class _WithPenalty(torch.autograd.Function):
    """Features as they are, and a gradient of one for the penalty."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(penalty.detach())
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (penalty,) = ctx.saved_tensors
        return gradient, torch.ones_like(penalty)


def squared_patterns(weight: Tensor, num_fields: int) -> Tensor:
    """Return ‖W_ij‖² for each pair of fields, `(..., N K, N K)` to `(..., N, N)`.

    >>> squared_patterns(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), num_fields=2)
    tensor([[1., 4.],
            [0., 9.]])
    """
    blocks = weight.unflatten(-1, (num_fields, -1)).unflatten(-3, (num_fields, -1))
    summed: Tensor = blocks.square().sum(dim=(-3, -1))  # (..., N, K, N, K)
    return summed


def pattern_variance(weight: Tensor, num_fields: int) -> Tensor:
    """Return the variance over sets of ‖W_ij‖², its mean over layers and pairs: `(M, L, N K, N K)` to one.

    >>> pattern_variance(torch.tensor([[[[1.0]]], [[[2.0]]]]), num_fields=1)  # of 1 and 4
    tensor(4.5000)
    """
    if len(weight) == 1:
        return weight.sum() * 0.0
    return squared_patterns(weight, num_fields).var(dim=0).mean()


def _cross_weight(model: nn.Module) -> tuple[str, int] | None:
    """Return the weight of the cross network, by its name in the interaction, and the fields it is for."""
    backbone: Any = model.backbone
    num_fields = len(model.schema.fields)  # type: ignore[union-attr, arg-type]  # models of ours have a schema
    width = num_fields * backbone.tables.dim
    for name, parameter in backbone.interaction.named_parameters():
        if parameter.ndim == 4 and parameter.shape[-2:] == (width, width):
            return name, num_fields
    return None
