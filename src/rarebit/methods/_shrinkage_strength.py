"""c learned on rows that the tables were not fitted to, between two steps of training.

    log c  ←  one step of Adam on the loss of such rows

    "held-out"      a batch of validation rows, every few steps
    "first-pass"    the coming batch of training rows, in the first epoch only; then c stays as it is

By the gradient of training itself c gets too small: a row that is fitted to its few observations explains
them best when it counts fully. On rows that no table has seen yet that is not so.

The loss is that of a shadow of the model: modules of its own over the same weights. It stays in evaluation,
so nothing of the model changes mode, no statistic is moved, and hooks on its tables do not see these lookups.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.callbacks import Attached, TrainingData
from rarebit.data.dataset import Batch
from rarebit.data.order import batch_bounds
from rarebit.data.schema import Schema
from rarebit.errors import DataError
from rarebit.methods._shrinkage_parts import CountedStack, CountedTable, Evidence, counted_in
from rarebit.tables.find import find_sites
from rarebit.tables.table import Method, home_of

__all__ = ["StrengthSteps", "coming_batches", "held_out_batches", "shadow_of"]

Batches: TypeAlias = Callable[[int], Batch | None]
"""The rows to learn c from after so many steps of training; None where there is nothing to learn."""

RATE = 0.1
"""How far a step moves log c at most: from 10 to 100 it takes a few dozen."""
LEAST, MOST = 1e-3, 1e6
"""c stays between these, or its gradient would be lost in rounding."""
EVERY_HELD_OUT = 8
"""Training steps for one step of c on validation rows: so many times less work than training."""
EVERY_COMING = 2
"""The same on coming rows: an epoch has to be enough."""

M = TypeVar("M", bound=nn.Module)


class StrengthSteps(Attached):
    """Learns c of all tables whose method is meant, on batches that the number of steps decides."""

    def __init__(
        self, model: nn.Module, is_own: Callable[[Method], bool], batches: Batches
    ) -> None:
        self.model, self.is_own, self.batches = model, is_own, batches
        self.evidence = _evidence_of(model, is_own)
        self.shadow: nn.Module | None = shadow_of(model)
        self.log_c = [
            _learned_from_now_on(evidence) for evidence in _evidence_of(self.shadow, is_own)
        ]
        self.optimizer = torch.optim.Adam(self.log_c, lr=RATE)

    def after_step(self, num_steps: int) -> None:
        """Move c where a batch that was not trained on wants it."""
        batch = self.batches(num_steps)
        if batch is None or self.shadow is None:
            return
        with torch.enable_grad():
            logits = self.shadow(batch)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.binary_cross_entropy_with_logits(logits, batch.label.to(logits.dtype))
        # of these alone: the tables and the network learn nothing here
        gradients = torch.autograd.grad(loss, self.log_c, materialize_grads=True)
        for log_c, gradient in zip(self.log_c, gradients, strict=True):
            log_c.grad = gradient
        self.optimizer.step()
        self._hand_over()

    @torch.no_grad()
    def _hand_over(self) -> None:
        for log_c, evidence in zip(self.log_c, self.evidence, strict=True):
            log_c.clamp_(math.log(LEAST), math.log(MOST))
            evidence.strength.copy_(log_c.exp())

    def report(self) -> dict[str, Any]:
        """Return c by table."""
        found = {}
        for site in find_sites(self.model):
            own = [t for t in counted_in(site.table) if self.is_own(t.method)]
            for number, table in enumerate(own):
                name = site.info.name if len(own) == 1 else f"{site.info.name}, set {number}"
                found[name] = float(table.evidence.c)
        return {"c": found}

    def state_dict(self) -> dict[str, Any]:
        """Return log c and the moments of its steps."""
        log_c = {str(number): value.detach() for number, value in enumerate(self.log_c)}
        return {"log_c": log_c, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for number, value in enumerate(self.log_c):
            value.copy_(state["log_c"][str(number)])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Let go of the shadow."""
        self.shadow = None


def held_out_batches(model: nn.Module, data: TrainingData) -> Batches:
    """Return batches of validation rows, pass after pass in orders that the seed decides."""
    if data.valid is None or not len(data.valid):
        raise DataError(
            'c="held-out" is learned on validation rows, and there are none; give some, or choose c="learned"'
        )
    valid = data.valid.to(home_of(model))
    bounds = batch_bounds(len(valid), data.batch_size)
    orders: dict[int, Tensor] = {}

    def batch_after(num_steps: int) -> Batch | None:
        if num_steps % EVERY_HELD_OUT:
            return None
        number, place = divmod(num_steps // EVERY_HELD_OUT - 1, len(bounds))
        if number not in orders:
            orders.clear()
            orders[number] = valid.order(seed=data.seed, epoch=number + 1)
        start, stop = bounds[place]
        return valid[orders[number][start:stop]]

    return batch_after


def coming_batches(model: nn.Module, data: TrainingData) -> Batches:
    """Return the batch that the next step of the first epoch trains on, every other step."""
    device, train = home_of(model), data.train
    bounds = batch_bounds(len(train), data.batch_size)
    orders: dict[int, Tensor] = {}

    def batch_after(num_steps: int) -> Batch | None:
        if num_steps >= len(bounds):
            orders.clear()
        if num_steps % EVERY_COMING or num_steps >= len(bounds):
            return None
        if 1 not in orders:
            orders[1] = train.order(seed=data.seed, epoch=1)
        start, stop = bounds[num_steps]
        return train[orders[1][start:stop]].to(device)

    return batch_after


def shadow_of(model: M) -> M:
    """Return modules of their own over the very weights and buffers of a model, in evaluation.

    >>> model = nn.Linear(2, 1)
    >>> shadow = shadow_of(model)
    >>> shadow is model, shadow.weight is model.weight, shadow.training
    (False, True, False)
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        # a schema may know all values of a log, and is never changed
        shared += [value for value in vars(module).values() if isinstance(value, Schema)]
    return copy.deepcopy(model, {id(thing): thing for thing in shared}).eval()


def _evidence_of(model: nn.Module, is_own: Callable[[Method], bool]) -> list[Evidence]:
    """Return the evidence of all tables with a method that is meant, in the order of the model."""
    return [
        module.evidence
        for module in model.modules()
        if isinstance(module, CountedTable | CountedStack) and is_own(module.method)
    ]


def _learned_from_now_on(evidence: Evidence) -> nn.Parameter:
    """Let log c be learned in place of a c that is given, and return it, `(F,)`."""
    log_c = nn.Parameter(evidence.strength.detach().clamp(LEAST, MOST).log())
    del evidence.strength
    evidence.strength = log_c
    return log_c
