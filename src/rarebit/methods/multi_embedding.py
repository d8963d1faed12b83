"""Multi-embedding: several embedding sets, each with an interaction of its own (Guo et al., 2024).

    h^m = I^m(e_1^m, ..., e_N^m)        h = (h^1 + ... + h^M) / M        score = F(h)

    M       `MultiEmbedding.num_sets`
    e_i^m   columns m K to (m + 1) K of the row of field i; K is the model's own width
    I^m     `backbone.interaction`, whose weights have a leading axis of M; behind it a layer a set
    F       `head`, with one layer less

A wide embedding collapses into few directions; sets that meet in interactions of their own do not. The layer
behind an interaction is what makes M sets more than one wide set: without a nonlinearity before the mean,
they are no more than that, and models whose score is linear in each embedding are refused.

A model of your own has its sets as copies of its `.backbone`, which run one after the other; the head sees
the mean of their features. Where the backbone is linear in its embeddings, `project` makes what follows it,
for each set anew: something with a nonlinearity that returns features of the same shapes.

The sets stay: merging folds what other methods made of them, and leaves M of them side by side.

Not for models that do not profit from wider tables: the sets cost as much as these.
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
    """Give a model several embedding sets in place of one, each as wide as the one it has.

    >>> MultiEmbedding(num_sets=10)
    MultiEmbedding(num_sets=10)
    """

    title: ClassVar[str] = "several embedding sets, each with an interaction of its own"
    control: ClassVar[str] = "wide"
    cost: ClassVar[str] = (
        "tables, their optimizer state and the interaction are num_sets times as large; a step takes one "
        "lookup as before, of rows as much wider, and one batched product where it took one product"
    )
    applies: ClassVar[str] = (
        "models that shall grow and do not get better with wider embeddings, as diagnose shows by their "
        "collapse; not models without a nonlinearity behind their embeddings"
    )

    project: Callable[[], nn.Module] | None = field(default=None, repr=False)
    """Makes a projection for each set of a model of your own, whose backbone has no nonlinearity."""

    @property
    def stored(self) -> "MultiEmbedding":
        """The method without its projections, which a file cannot hold."""
        return replace(self, project=None)

    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place; return the tables in which they lie side by side, if any."""
        if not isinstance(model, ModelWithSets):
            copy_backbone_(model, self, self.project)
            return None
        require(
            self.project is None,
            f"project is for models of your own: {type(model).__name__} has a projection a set already",
        )
        return model.take_sets_(self.num_sets, self)
