"""Frequency decay: weight decay that is stronger on the rows of rare ids (a neighbour of `shrinkage`).

    loss = loss of the model + strength / 2 · mean over the batch of  sum over its values i of  s_i ||e(i)||²

    s_i    c / (n_i + c): near one for a rare id, near zero for a frequent one
    n_i    how often training saw the id
    e(i)   the looked-up row

The gradient of this term is added to that of each looked-up row. Unlike shrinkage it works through the optimizer, so the
effect on a rare row depends on the learning rate and the length of training, and an id never seen keeps its initial row.
Only for comparisons.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rarebit.callbacks import Callback, TrainingData
from rarebit.research._neighbours import Neighbour, OpenShares, find_lookups
from rarebit.settings import check_types, require

__all__ = ["FrequencyDecay"]


@dataclass(frozen=True, kw_only=True)
class FrequencyDecay(Neighbour):
    """Add the squares of looked-up rows to the loss, with the most weight on rare ids.

    >>> FrequencyDecay(strength=0.01)
    FrequencyDecay(strength=0.01, c=10.0)
    """

    title: ClassVar[str] = "weight decay on looked-up rows, stronger on rare ids"
    paper: ClassVar[str] = "none: L2 regularization by how often training saw an id"
    cost: ClassVar[str] = "one more lookup per row and step, and one more term of its gradient"
    applies: ClassVar[str] = "to compare small rare rows with shrunk ones in a study"
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "strength": (0.01, 0.1, 0.001, 1.0),
        "c": (10.0, 100.0, 1.0),
    }
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("row-rate", "shrinkage"), "both treat rare rows by their counts; use one of them"
    )

    strength: float = 0.01
    """The factor of the squares for an id that training never saw."""
    c: float = 10.0
    """How often training must see an id to halve that factor."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("strength", "c"):
            x = getattr(self, name)
            require(0 <= x < math.inf, f"{name} must be 0 or more and finite, got {name}={x}")

    def callback(self) -> "_Decaying":
        """Return the callback that decays looked-up rows."""
        return _Decaying(self)


class _Decaying(Callback):
    def __init__(self, method: FrequencyDecay) -> None:
        self.method = method

    def start(self, model: nn.Module, data: TrainingData) -> None:
        counts, strength = data.train.counts(), self.method.strength

        def hook(open_shares: OpenShares) -> Any:
            def decay(module: nn.Module, args: tuple[Tensor, ...], rows: Tensor) -> Tensor:
                if not (module.training and torch.is_grad_enabled()):
                    return rows
                # the loss is a mean over the batch, and so is the added term
                factors = open_shares(args[0]).mul_(strength / len(args[0])).to(rows.dtype)
                decayed: Tensor = _Decayed.apply(rows, factors.unsqueeze(-1))  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return decayed

            return decay

        self.handles = [
            place.module.register_forward_hook(hook(OpenShares(place, counts, self.method.c)))
            for place in find_lookups(model)
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Decayed(torch.autograd.Function):
    """The same rows; the backward pass adds a multiple of them to their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factors)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows, factors = ctx.saved_tensors
        return torch.addcmul(gradient, rows, factors), None
