"""Aligned sets: multi-embedding with similar interactions in all sets (a control for `multi_embedding`).

    loss + weight · P        P = mean over l, i, j of  Var_m( ‖W_ij^(m,l)‖² )

    W_ij^(m,l)   the K x K block of layer l's matrix in set m for the fields i and j;
                 together they are the cross network's `weight`, M x L x N K x N K
    weight       `AlignedSets.weight`
    Var_m        the variance over the M sets, divided by M - 1

The interaction pattern of a set is how strongly each pair of fields interacts. Multi-embedding lets every set learn its own
pattern; here a penalty makes all patterns similar. If that costs nothing, separate patterns are not the reason why
multi-embedding works. Only for models with such a matrix (`dcn_v2`), and only for comparisons.
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

__all__ = ["AlignedSets"]


@dataclass(frozen=True, kw_only=True)
class AlignedSets(SetsMethod):
    """Give a model several embedding sets with similar interaction patterns.

    >>> AlignedSets(num_sets=10)
    AlignedSets(num_sets=10, weight=1.0)
    """

    title: ClassVar[str] = "several embedding sets with similar interaction patterns"
    control: ClassVar[str] = "multi-embedding"
    cost: ClassVar[str] = "that of multi-embedding, and a sum over the interaction's weights"
    applies: ClassVar[str] = "to test in a study whether multi-embedding needs separate patterns"

    weight: float = 1.0
    """The factor of the variance of the patterns in the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.weight
        require(0 <= weight < math.inf, f"weight must be 0 or more and finite, got weight={weight}")

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place, and return its tables."""
        names, num_fields = [], 0
        if isinstance(model, ModelWithSets):
            one: Any = model.with_sets(1)
            num_fields = len(one.schema.fields)
            shape = (num_fields * one.backbone.tables.dim,) * 2
            weights = one.backbone.interaction.named_parameters()
            names = [name for name, w in weights if w.ndim == 4 and w.shape[-2:] == shape]
        if not names or not isinstance(model, ModelWithSets):
            raise UnsupportedTableError(
                f"{self} needs a cross network with a matrix for each pair of fields, as dcn_v2 has, got "
                f"a {type(model).__name__}"
            )
        tables = model.take_sets_(self.num_sets, self)
        backbone: Any = model.backbone
        aligned = AlignedInteraction(backbone.interaction, names[0], num_fields, self.weight)
        backbone.interaction = aligned.train(backbone.training)
        return tables


class AlignedInteraction(nn.Module):
    """An interaction with a penalty on different patterns in training; its features are the same.

    The penalty has a gradient and no value, so the reported loss is that of the model. It counts once per backward of an
    unscaled loss.
    """

    def __init__(self, interaction: nn.Module, name: str, num_fields: int, weight: float) -> None:
        super().__init__()
        self.interaction, self.num_fields, self.weight = interaction, num_fields, weight
        self.name = name
        """The weight of the interaction that holds the patterns."""

    def penalty(self) -> Tensor:
        """Return the term of the loss."""
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
    """The same features, and a gradient of one for the penalty."""

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
    """Return ‖W_ij‖² for each pair of fields, `(..., N K, N K)` to `(..., N, N)`."""
    blocks = weight.unflatten(-1, (num_fields, -1)).unflatten(-3, (num_fields, -1))
    summed: Tensor = blocks.square().sum(dim=(-3, -1))  # (..., N, K, N, K)
    return summed


def pattern_variance(weight: Tensor, num_fields: int) -> Tensor:
    """Return the variance of ‖W_ij‖² over sets, averaged over layers and pairs; from `(M, L, N K, N K)`."""
    if len(weight) == 1:
        return weight.sum() * 0.0
    return squared_patterns(weight, num_fields).var(dim=0).mean()
