"""Frequency decay: rows of rare ids are held near zero, by how often they were seen (a neighbour of `shrinkage`).

    loss = loss of the model + strength / 2 · mean over the batch of  sum over its values i of  s_i ||e(i)||²

    s_i    c / (n_i + c): near one for a rare id, near zero for a frequent one
    n_i    how often training saw the id
    e(i)   the row that is looked up

It is the exact gradient of that loss, added to the gradient of each looked-up row; so an optimizer treats it as
it treats the loss. Unlike shrinkage it works through the optimizer, step by step: how far a rare row is held
back depends on the learning rate and on how long it is trained, and an id that is never seen stays as it was drawn.

Not by itself: it is there to be compared with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rarebit.callbacks import Callback, TrainingData
from rarebit.research._lookup_shares import OpenShares, find_lookups
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require

__all__ = ["FrequencyDecay"]


@dataclass(frozen=True, kw_only=True)
class FrequencyDecay(Neighbour):
    """Add the squares of looked-up rows to the loss, those of rare ids with the most weight.

    >>> FrequencyDecay(strength=0.01)
    FrequencyDecay(strength=0.01, c=10.0)
    """

    title: ClassVar[str] = "weight decay on looked-up rows, stronger on rare ids"
    paper: ClassVar[str] = "none: L2 regularisation by how often an id was seen"
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a step looks up one number beside each row and adds a multiple of the row to its gradient; tables "
        "are served as they are"
    )
    applies: ClassVar[str] = (
        "beside shrinkage, to tell rows that count less from rows that are held small; not by itself"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "strength": (0.01, 0.1, 0.001, 1.0),
        "c": (10.0, 100.0, 1.0),
    }
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("row-rate", "shrinkage"), "both hold rare rows back by their counts; use one of them"
    )

    strength: float = 0.01
    """What the squares are multiplied by, of an id that was never seen."""
    c: float = 10.0
    """How often an id must be seen for half of that."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("strength", "c"):
            value = getattr(self, name)
            require(
                0 <= value < math.inf, f"{name} must be 0 or more and finite, got {name}={value}"
            )

    def callback(self) -> "_Decaying":
        """Return what decays looked-up rows, by how often the training rows have them."""
        return _Decaying(self)


class _Decaying(Callback):
    """Adds to the gradients of rows on their way back from the network."""

    def __init__(self, method: FrequencyDecay) -> None:
        self.method = method

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Put hooks on all lookups."""
        counts = data.train.counts()
        self.handles = [
            place.module.register_forward_hook(
                _hook(OpenShares(place, counts, self.method.c), self.method.strength)
            )
            for place in find_lookups(model)
        ]

    def close(self) -> None:
        """Leave gradients as they are without it."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


def _hook(open_shares: OpenShares, strength: float) -> Any:
    def hold(module: nn.Module, args: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return rows
        ids = args[0]
        # the loss is a mean over the batch, and so is what is added to it
        factors = open_shares(ids).mul_(strength / len(ids)).to(rows.dtype)
        held: Tensor = _Held.apply(rows, factors.unsqueeze(-1))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return held

    return hold


class _Held(torch.autograd.Function):
    """The rows as they are, with a multiple of them added to their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factors)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows, factors = ctx.saved_tensors
        return torch.addcmul(gradient, rows, factors), None
