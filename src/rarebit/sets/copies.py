"""Several embedding sets for a backbone of any kind: copies of it, and the mean of their features.

    features = mean over m of project_m(backbone_m(x))

    backbone_1                  the backbone itself, with the weights it has
    backbone_2, ..., backbone_M copies with weights drawn anew
    project_m                   a projection per set, if the user gives one

The mean is taken tensor by tensor. Copies that are equal get equal gradients and stay equal, so a weight that cannot be
drawn anew is an error.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from rarebit.errors import NoTableError, UnsupportedTableError
from rarebit.sets.sets import SetsMethod, sets_of
from rarebit.tables.apply import find_tables
from rarebit.tables.collection import TableCollection
from rarebit.tables.holders import refuse_holders


class AveragedSets(nn.Module):
    """The mean of the features of several backbones."""

    def __init__(
        self, sets: Sequence[nn.Module], made_by: object, projections: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        self.sets = nn.ModuleList(sets)
        self.projections = nn.ModuleList(projections)
        """One per set, or none."""
        self.made_by = made_by
        """The method that made the sets."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the mean of the features, tensor by tensor."""
        features = [one(*arguments, **options) for one in self.sets]
        if self.projections:
            pairs = zip(self.projections, features, strict=True)
            features = [project(feature) for project, feature in pairs]
        return mean_of_features(features)


def mean_of_features(features: Sequence[Any]) -> Any:
    """Return the mean of tensors, or of tuples, lists and dicts of them, tensor by tensor.

    What is no floating point is the same for all sets, as a mask is: it is taken from the first.
    """
    first = features[0]
    if isinstance(first, Tensor):
        return torch.stack(list(features)).mean(dim=0) if first.is_floating_point() else first
    if isinstance(first, Mapping):
        values = {key: mean_of_features([one[key] for one in features]) for key in first}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]  # a mapping takes one
    if isinstance(first, tuple | list):
        means = [mean_of_features(parts) for parts in zip(*features, strict=True)]
        return type(first)(*means) if hasattr(first, "_fields") else type(first)(means)
    if first is None:
        return None
    raise UnsupportedTableError(
        "several embedding sets are averaged tensor by tensor, so a backbone must return tensors, or "
        f"tuples, lists or dicts of them, got {type(first).__name__}"
    )


def set_copies(
    backbone: nn.Module, num_sets: int, model: nn.Module | None = None
) -> list[nn.Module]:
    """Return the backbone, and copies of it with other weights; what it holds of the model around it is not copied.

    >>> first, second = set_copies(nn.Sequential(nn.Embedding(9, 4)), 2)
    >>> bool((first[0].weight == second[0].weight).any())
    False
    """
    whole = () if model is None else (*model.modules(), *model.parameters())
    own = {id(one) for one in (*backbone.modules(), *backbone.parameters())}
    around = {id(one): one for one in whole if id(one) not in own}
    copies = [copy.deepcopy(backbone, dict(around)) for _ in range(num_sets - 1)]
    for one in copies:
        draw_anew_(one, name="backbone")
    sets = [backbone, *copies]
    _refuse_equal(sets, "embedding sets")
    return sets


def set_projections(
    make: Callable[[], nn.Module], backbone: nn.Module, num_sets: int
) -> list[nn.Module]:
    """Return a projection for each set, on the backbone's device and in its precision.

    >>> first, second = set_projections(lambda: nn.Linear(4, 4), nn.Embedding(9, 4), 2)
    >>> bool((first.weight == second.weight).any())
    False
    """
    like = next(backbone.parameters())
    made: list[object] = [make() for _ in range(num_sets)]
    modules = [one for one in made if isinstance(one, nn.Module)]
    if len(modules) < num_sets:
        raise UnsupportedTableError(
            f"project must return a module, a new one for each set, got a {type(made[0]).__name__}"
        )
    projections = [one.to(like.device, like.dtype).train(backbone.training) for one in modules]
    _refuse_equal(projections, "the projections of embedding sets")
    return projections


def draw_anew_(module: nn.Module, name: str = "") -> None:
    """Draw all weights of a module anew, in place, each part by its own `reset_parameters()`.

    Tables keep the spread of their rows: models often start them smaller than torch does. A part comes
    after what it is made of, so that a backbone may draw the weights of its layers itself.
    """
    for place, part in reversed(list(module.named_modules(prefix=name))):
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            _draw_table_(part)
        elif reset is not None:
            reset()
        else:
            _refuse_random(place, part)


def _draw_table_(table: nn.Embedding | nn.EmbeddingBag) -> None:
    with torch.no_grad():
        spread = _spread(table)
        table.weight.normal_().mul_(spread)
        if table.padding_idx is not None:
            table.weight[table.padding_idx] = 0.0


def _spread(table: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    rows = table.weight.detach()
    if table.padding_idx is not None:
        rows = rows[torch.arange(len(rows), device=rows.device) != table.padding_idx]
    return rows.std(correction=0) if rows.numel() else rows.new_zeros(())


def _refuse_random(place: str, part: nn.Module) -> None:
    """Raise for weights that were drawn at random and cannot be drawn again."""
    for own, parameter in part.named_parameters(recurse=False):
        if not _is_constant(parameter):
            raise UnsupportedTableError(
                f"{'.'.join(filter(None, [place, own]))!r} would start equal in all embedding sets, which "
                f"would then never differ: give {type(part).__name__} a reset_parameters() that draws it"
            )


def _is_constant(parameter: Tensor) -> bool:
    return parameter.numel() == 0 or bool((parameter == parameter.flatten()[0]).all())


def _refuse_equal(sets: Sequence[nn.Module], what: str) -> None:
    """Raise when two of several modules start with the same weights, all of them."""
    for (i, first), (j, second) in itertools.combinations(enumerate(sets, start=1), 2):
        pairs = list(zip(first.named_parameters(), second.parameters(), strict=True))
        if pairs and all(torch.equal(ours, theirs) for (_, ours), theirs in pairs):
            raise UnsupportedTableError(
                f"{what} {i} and {j} start equal, {pairs[0][0][0]!r} and all else, and would never differ; "
                "draw their weights from torch's random numbers, each time anew"
            )


@runtime_checkable
class ModelWithSets(Protocol):
    """A model that knows its own form with several embedding sets.

    Methods only: parts of a module are no attributes of its class, and Python 3.12 would not find them.
    """

    def with_sets(self, num_sets: int) -> Self:
        """Return a new model with the same settings and several embedding sets."""

    def take_sets_(self, num_sets: int, made_by: SetsMethod) -> TableCollection:
        """Become that model, in place, and return its tables."""


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
    refuse_holders(model, [backbone], str(method))
    projections = set_projections(project, backbone, method.num_sets) if project else []
    copies = set_copies(backbone, method.num_sets, model)
    model.backbone = AveragedSets(copies, method, projections)


def _what_it_has(model: nn.Module) -> str:
    return ", ".join(f".{name}" for name, _ in model.named_children()) or "no parts"
