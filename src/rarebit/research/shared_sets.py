"""Shared sets: several embedding sets that go through one interaction (a control; see `multi_embedding`).

    h^m = I(e_1^m, ..., e_N^m)        h = (h^1 + ... + h^M) / M        score = F(h)

    M       `SharedSets.num_sets`
    e_i^m   columns m K to (m + 1) K of the row of field i
    I       `backbone.interaction.shared`: one for all sets, with the layer behind it
    F       `head`, with one layer less

It has the tables of multi-embedding and the network of a single set. Held against it, multi-embedding shows
what interactions of their own do; this one held against plain tables of the same width shows what is left
when they are taken away.

Not for use by itself: it is there to be compared with.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rarebit.errors import UnsupportedTableError
from rarebit.sets.copies import ModelWithSets
from rarebit.sets.sets import SetsMethod
from rarebit.tables.collection import TableCollection

__all__ = ["SharedInteraction", "SharedSets"]


@dataclass(frozen=True, kw_only=True)
class SharedSets(SetsMethod):
    """Give a model several embedding sets that share one interaction.

    >>> SharedSets(num_sets=10)
    SharedSets(num_sets=10)
    """

    title: ClassVar[str] = "several embedding sets that go through one interaction"
    control: ClassVar[str] = "wide"
    cost: ClassVar[str] = (
        "tables and their optimizer state are num_sets times as large; a step goes through the "
        "interaction as many times"
    )
    applies: ClassVar[str] = (
        "beside multi-embedding, to tell what the interactions do from what the sets do; not by itself"
    )

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place, and return its tables."""
        if not isinstance(model, ModelWithSets):
            raise UnsupportedTableError(
                f"{self} is a control on models of Rarebit, which know their interaction, got a "
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
    """An interaction of one set that is called for each of several, `(M, B, F, D)` to `(M, B, ...)`."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, embeddings: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the features of all sets."""
        # one by one: batch norm looks at one set at a time, as it does where each has its own
        features = [self.shared(one) for one in embeddings.split(1)]
        if isinstance(features[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*features, strict=True))
        return torch.cat(features)
