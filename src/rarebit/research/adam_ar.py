"""AdamAR: a touched row decays by the time since its last update (a neighbour of `forgetting`).

https://arxiv.org/abs/2511.06374

    row' = (1 - min(1, alpha · Δt)) · row + update        Δt = steps since the row's last update

    alpha  `AdamAR.alpha`: a row that no step touched for 1 / alpha steps starts anew
    update what the optimizer adds in this step, from the gradient at the row before the decay

Frequent rows hardly decay, and rare rows forget what they learned long ago: the restart of `forgetting` between two epochs does so
for all rows at once. The decay comes between backward and step, whatever the optimizer.

NOTE[DIFF]: the paper's optimizer is lazy Adam. Here dense tables have it, too: their touched rows are those with a gradient. With row-wise
optimizers, do not average weights: the average of a row would take the decayed row for what it was before. Only for comparisons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rarebit.callbacks import Callback, TrainingData
from rarebit.methods.forgetting import stored_rows
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require
from rarebit.storage.files import load_tensors_
from rarebit.tables.collection import lookups_of

__all__ = ["AdamAR"]


@dataclass(frozen=True, kw_only=True)
class AdamAR(Neighbour):
    """Decay each row that a step touches by the steps since its last update.

    >>> AdamAR(alpha=1e-3)
    AdamAR(alpha=0.001)
    """

    title: ClassVar[str] = "touched rows decayed by the steps since their last update"
    paper: ClassVar[str] = "AdamAR, ICLR 2026"
    cost: ClassVar[str] = "two more passes over the touched rows per step; 8 bytes per row"
    applies: ClassVar[str] = "to compare decay by age with forgetting between epochs in a study"
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"alpha": (1e-3, 1e-4, 1e-2)}

    alpha: float = 1e-3
    """How much a row decays per step without an update."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.alpha <= 1, f"alpha must be from 0 to 1, got alpha={self.alpha}")

    def callback(self) -> "_Aging":
        """Return the callback that decays touched rows."""
        return _Aging(self.alpha)


class _Aging(Callback):
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def start(self, model: nn.Module, data: TrainingData) -> None:
        del data
        held = {id(each.parameter): each.parameter for each in stored_rows(model, "adam-ar")}
        self.ages = [_Ages(parameter, self.alpha) for parameter in held.values()]
        self.handles = [
            ages.parameter.register_post_accumulate_grad_hook(ages.decay_) for ages in self.ages
        ]

    def state_dict(self) -> dict[str, Tensor]:
        named = {f"last{place}": ages.last for place, ages in enumerate(self.ages)}
        return named | {f"step{place}": ages.step for place, ages in enumerate(self.ages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_tensors_(self.state_dict(), state, "adam-ar")

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class _Ages:
    """When each row of a parameter was last updated. All in place: a recorded step repeats it."""

    def __init__(self, parameter: nn.Parameter, alpha: float) -> None:
        self.parameter, self.alpha = parameter, alpha
        self.last = torch.zeros(len(parameter), dtype=torch.int64, device=parameter.device)
        self.step = torch.zeros((), dtype=torch.int64, device=parameter.device)

    @torch.no_grad()
    def decay_(self, parameter: Tensor) -> None:
        """Decay the rows that have a gradient, and note that this step updates them."""
        gradient = parameter.grad
        assert gradient is not None
        self.step += 1
        if gradient.is_sparse:
            rows = lookups_of(gradient)[0]  # a row that comes twice gets the same value twice
            kept = self._kept(self.last.index_select(0, rows), parameter)
            parameter.index_copy_(0, rows, parameter.index_select(0, rows) * kept)
            self.last.index_copy_(0, rows, self.step.expand(rows.shape))
        else:
            touched = (gradient != 0).any(dim=1)
            kept = self._kept(self.last, parameter)
            parameter.mul_(torch.where(touched.unsqueeze(1), kept, 1.0))
            self.last.copy_(torch.where(touched, self.step, self.last))

    def _kept(self, last: Tensor, like: Tensor) -> Tensor:
        ages = (self.step - last).to(like.dtype)
        return 1 - (self.alpha * ages).clamp(max=1.0).unsqueeze(1)
