"""Shared sets: several embedding sets with one shared interaction (a control for `multi_embedding`).

    h^m = I(e_1^m, ..., e_N^m)        h = (h^1 + ... + h^M) / M        score = F(h)

    M       `SharedSets.num_sets`
    e_i^m   columns m K to (m + 1) K of the row of field i
    I       `backbone.interaction.shared`: one for all sets, with the layer after it
    F       `head`, with one layer less

It has the tables of multi-embedding and the network of a single set. Multi-embedding compared with this method shows the effect
of separate interactions; this method compared with plain tables of the same width shows that of sets alone. Only for
comparisons.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rarebit.errors import UnsupportedTableError
from rarebit.sets.copies import ModelWithSets
from rarebit.sets.sets import SetsMethod
from rarebit.tables.collection import TableCollection

__all__ = ["SharedSets"]


@dataclass(frozen=True, kw_only=True)
class SharedSets(SetsMethod):
    """Give a model several embedding sets that share one interaction.

    >>> SharedSets(num_sets=10)
    SharedSets(num_sets=10)
    """

    title: ClassVar[str] = "several embedding sets with one shared interaction"
    control: ClassVar[str] = "wide"
    cost: ClassVar[str] = (
        "num_sets times the tables, their optimizer state and calls of the interaction"
    )
    applies: ClassVar[str] = (
        "to separate the interactions of multi-embedding from its sets in a study"
    )

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place, and return its tables."""
        if not isinstance(model, ModelWithSets):
            raise UnsupportedTableError(
                f"{self} needs a model of Rarebit, which knows its interaction, got a "
                f"{type(model).__name__}"
            )
        one: Any = model.with_sets(1).backbone
        tables = model.take_sets_(self.num_sets, self)
        like = next(tables.parameters())
        shared = SharedInteraction(one.interaction).to(like.device, like.dtype)
        backbone: Any = model.backbone
        backbone.interaction = shared.train(backbone.training)
        return tables


class SharedInteraction(nn.Module):
    """The interaction of one set, called once per set, `(M, B, F, D)` to `(M, B, ...)`."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, embeddings: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the features of all sets."""
        # one by one: batch norm sees one set at a time, as with separate interactions
        features = [self.shared(one) for one in embeddings.split(1)]
        if isinstance(features[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*features, strict=True))
        return torch.cat(features)
