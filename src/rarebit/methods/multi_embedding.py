"""Multi-embedding: several embedding sets, each with its own interaction (Guo et al., 2024).

    h^m = I^m(e_1^m, ..., e_N^m)        h = (h^1 + ... + h^M) / M        score = F(h)

    M       `MultiEmbedding.num_sets`
    e_i^m   columns m K to (m + 1) K of the row of field i; K is the model's width
    I^m     `backbone.interaction`, whose weights have a leading axis of M, followed by one layer per set
    F       `head`, with one layer less

A wide embedding collapses into few directions; sets with separate interactions do not. The layer after each interaction
makes M sets more than one wide set: without a nonlinearity before the mean they are equivalent, so models whose score is
linear in each embedding are refused.

In your own model the sets are copies of its `.backbone`, and the head gets the mean of their features. Where the backbone is
linear in its embeddings, `project` creates a module with a nonlinearity for each set, which keeps the shapes.

Merging keeps the sets. Not for models that do not gain from wider tables: the sets cost as much as those.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import nn

from rarebit.sets.copies import ModelWithSets, copy_backbone_
from rarebit.sets.sets import SetsMethod
from rarebit.settings import require
from rarebit.tables.collection import TableCollection

__all__ = ["MultiEmbedding"]


@dataclass(frozen=True, kw_only=True)
class MultiEmbedding(SetsMethod):
    """Give a model several embedding sets, each as wide as the one it has.

    >>> MultiEmbedding(num_sets=10)
    MultiEmbedding(num_sets=10)
    """

    title: ClassVar[str] = "several embedding sets, each with its own interaction"
    control: ClassVar[str] = "wide"
    cost: ClassVar[str] = (
        "tables, their optimizer state and the interaction are num_sets times as large; a step still takes "
        "one lookup, of wider rows, and batched products in place of single ones"
    )
    applies: ClassVar[str] = (
        "models that should grow but do not improve with wider embeddings, as the collapse in diagnose "
        "shows; not models without a nonlinearity after their embeddings"
    )

    project: Callable[[], nn.Module] | None = field(default=None, repr=False)
    """Creates a projection for each set of your own model, where its backbone has no nonlinearity."""

    @property
    def stored(self) -> "MultiEmbedding":
        """The method without its projections, which a file cannot hold."""
        return replace(self, project=None)

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place; return the tables that hold them side by side, if any."""
        if not isinstance(model, ModelWithSets):
            copy_backbone_(model, self, self.project)
            return None
        require(
            self.project is None,
            f"project is for your own models: {type(model).__name__} already has a projection per set",
        )
        return model.take_sets_(self.num_sets, self)
