"""What all methods of several embedding sets share: the model they change, and what goes with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import nn

from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.tables.collection import TableCollection
from rarebit.tables.find import find_tables
from rarebit.tables.set_copies import AveragedSets, set_copies, set_projections
from rarebit.tables.sets import SetsMethod, sets_of
from rarebit.tables.table import Pair

__all__ = ["ModelWithSets", "SetsOfModel", "copy_backbone_"]

GONE = (
    "the sets are drawn anew with the network behind them, so the first method would be gone; give the "
    "model its sets first"
)
TWICE = "a model has one kind of sets; use one of the two, with as many sets as wanted"


@runtime_checkable
class ModelWithSets(Protocol):
    """A model that knows its own form with several embedding sets.

    Methods only: parts of a module are no attributes of its class, and Python 3.12 would not find them.
    """

    def with_sets(self, num_sets: int) -> Self:
        """Return a new model with the same settings and several embedding sets."""

    def take_sets_(self, num_sets: int, made_by: SetsMethod) -> TableCollection:
        """Become that model, in place, and return its tables."""


TABLE_METHODS = {
    "hashing": Pair(allowed=True, words="the same ids share a row in every set"),
    "low-rank": Pair(allowed=True, words="each set is a product of its own"),
    "masked": Pair(allowed=True, words="a mask of the entries of all sets"),
    "mlet": Pair(allowed=True, words="each set is a product of its own"),
    "pep": Pair(allowed=True, words="entries of all sets are cut, within one budget"),
    "product-start": Pair(allowed=True, words="each set starts at a product of its own"),
    "pruned": Pair(allowed=True, words="entries of all sets are cut, within one budget"),
    "quantize": Pair(allowed=True, words="each set has a scale of its own"),
}
"""What it means to apply a method to a model that has its sets."""
SETS_METHODS = ("aligned-sets", "multi-embedding", "shared-sets")


@dataclass(frozen=True, kw_only=True)
class SetsOfModel(SetsMethod):
    """A method of several embedding sets, and what goes with it."""

    paper: ClassVar[str] = (
        "Guo et al., On the Embedding Collapse when Scaling up Recommendation Models, ICML 2024"
    )
    pairs: ClassVar[Mapping[str, Pair]] = {
        name: Pair(allowed=False, words=GONE) for name in TABLE_METHODS
    } | {name: Pair(allowed=False, words=TWICE) for name in SETS_METHODS}
    pairs_before: ClassVar[Mapping[str, Pair]] = TABLE_METHODS


def copy_backbone_(
    model: nn.Module, method: SetsMethod, project: Callable[[], nn.Module] | None
) -> None:
    """Put copies of a model's backbone, and the mean of their features, in its place.

    >>> from rarebit.methods.multi_embedding import MultiEmbedding
    >>> model = nn.Module()
    >>> model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    >>> copy_backbone_(model, MultiEmbedding(num_sets=3), None)
    >>> len(model.backbone.sets)
    3
    """
    backbone, head = (getattr(model, name, None) for name in ("backbone", "head"))
    if not isinstance(backbone, nn.Module) or not isinstance(head, nn.Module):
        raise UnsupportedTableError(
            f"{method} needs to know which part of a model has a copy for each set: a model of your own "
            "must have .backbone, from its input to features, and .head, from features to scores; "
            f"{type(model).__name__} has {_what_it_has(model)}"
        )
    if sets_of(model) is not None:
        raise UnsupportedTableError(f"{type(model).__name__} has several embedding sets already")
    if not find_tables(backbone):
        raise NoTableError(f"{method} matched no table: the .backbone of the model has none")
    projections = set_projections(project, backbone, method.num_sets) if project else []
    model.backbone = AveragedSets(set_copies(backbone, method.num_sets), method, projections)


def _what_it_has(model: nn.Module) -> str:
    return ", ".join(f".{name}" for name, _ in model.named_children()) or "no parts"
