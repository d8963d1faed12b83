"""The embedding sets of a model as plain values, for the file it is saved in."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rarebit.errors import ModelFileError, SettingsError
from rarebit.sets.sets import SetsMethod, sets_of
from rarebit.technique import technique_class, technique_from_mapping, technique_to_mapping

__all__ = ["describe_sets", "only_sets_in", "restore_sets_"]

PROJECTED = "projected"
"""The key that says that the sets have projections, which a file cannot hold."""


def describe_sets(model: nn.Module) -> dict[str, Any] | None:
    """Return the method that gave a model its sets as plain values, None where it has none.

    >>> from rarebit.tables.apply import apply_
    >>> model = nn.Module()
    >>> model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    >>> changes = apply_(model, MultiEmbedding(num_sets=3), verbose=False)
    >>> describe_sets(model)
    {'method': 'multi_embedding', 'num_sets': 3, 'project': None, 'projected': False}
    """
    method = sets_of(model)
    if method is None:
        return None
    return {**technique_to_mapping(method.stored), PROJECTED: method.stored != method}


def restore_sets_(model: nn.Module, described: Mapping[str, Any] | None) -> None:
    """Give a fresh model the sets that a saved one had, unless it has them; the weights come after.

    >>> model = nn.Module()
    >>> model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    >>> restore_sets_(model, {"method": "multi_embedding", "num_sets": 3})
    >>> len(model.backbone.sets)
    3
    """
    there = sets_of(model)
    if described is None:
        if there is not None:
            raise ModelFileError(f"it has one embedding set, and this model has those of {there}")
        return
    method = technique_from_mapping({k: v for k, v in described.items() if k != PROJECTED})
    if not isinstance(method, SetsMethod):
        raise ModelFileError(f"{method} gives no model its embedding sets")
    if there is not None:
        if (type(there), there.num_sets) != (type(method), method.num_sets):
            raise ModelFileError(f"its sets are those of {method}, and this model's of {there}")
    elif described.get(PROJECTED):
        raise ModelFileError(
            f"the sets of {method} have projections of your own; apply_ it with the same project= to the "
            "model that is given as into="
        )
    else:
        method.change_(model)


def only_sets_in(methods: Any) -> bool:
    """Return whether saved tables have their sets and no other method that may have made them smaller.

    What came from a file may be anything; nonsense is told where the methods are read.

    >>> only_sets_in({"user": [{"method": "multi_embedding", "num_sets": 3}]}), only_sets_in({})
    (True, True)
    >>> only_sets_in({"user": [{"method": "hashing", "buckets": 3}]}), only_sets_in("nonsense")
    (False, False)
    """
    if not isinstance(methods, Mapping):
        return False
    steps = [step for steps in methods.values() for step in (steps or [None])]
    return all(isinstance(step, Mapping) and _gives_sets(step.get("method")) for step in steps)


def _gives_sets(name: object) -> bool:
    try:
        return issubclass(technique_class(str(name)), SetsMethod)
    except SettingsError:
        return False
