"""Training in one pass: every row is scored before it is trained on (progressive validation).

    score_t = model after t - 1 steps, on batch t        then the model trains on batch t

So the scores of all rows are of a model that has not seen their labels, and no row is set aside. Where weights are averaged,
the averages give the scores. Tables that keep counts count what they look up, so that an id is new when it first comes.

Batch normalisation and dropout score as at inference time. A model of our parts and torch's without them has the scores already: they are
those that the loss was computed from. The scores are part of the checkpoints.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from rarebit.callbacks import Callback, TrainingData
from rarebit.data.dataset import Batch
from rarebit.ema import EMA
from rarebit.errors import CheckpointError
from rarebit.training.metrics import Forward, Metrics, device_of, measure, score

PARTS = 10
"""Parts of the log that a report has figures of."""


def _differs(module: nn.Module) -> bool:
    """Return whether a part of a model may compute something else in training than at inference time."""
    package = type(module).__module__.partition(".")[0]
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001  # torch has no other list of them
    dropout = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    return (
        package not in ("rarebit", "torch")  # nobody knows what it does
        or isinstance(module, _NormBase)
        or any(hooks)
        or (isinstance(dropout, float) and dropout > 0)
    )


class ProgressiveScores(Callback):
    """The score of each row before training on it."""

    def __init__(self, forward: Forward | None = None) -> None:
        self.forward = forward
        self.ema: EMA | None = None

    @property
    def name(self) -> str:
        return "one-pass"

    def start(self, model: nn.Module, data: TrainingData) -> None:
        self.model, self.label = model, data.train.label
        self.scores = torch.zeros(len(data.train), device=device_of(model))
        self.scored = 0
        self.is_same = not any(map(_differs, model.modules()))
        """Whether the model scores in training as it does at inference time."""

    @torch.no_grad()
    def score(self, batch: Batch, logits: Tensor) -> None:
        """Score a batch, between its backward and the step: the weights have not seen its labels."""
        found = logits if self.is_same and self.ema is None else self._at_inference(batch)
        self.scores[self.scored : self.scored + len(batch)] = found
        self.scored += len(batch)

    def _at_inference(self, batch: Batch) -> Tensor:
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        with nullcontext() if self.ema is None else self.ema.applied(to_gradients=True):
            found = score(self.model, batch, self.forward)
        for module in training:
            module.training = True
        return found

    def metrics(self, rows: slice = slice(None)) -> Metrics:
        """Return the figures of some rows."""
        return measure(self.scores[rows], self.label[rows].to(self.scores.device))

    def report(self) -> dict[str, Any]:
        parts = torch.arange(len(self.scores)).tensor_split(PARTS)
        found = [self.metrics(slice(int(p[0]), int(p[-1]) + 1)) for p in parts if len(p)]
        return {"auc": [one.auc for one in found], "logloss": [one.logloss for one in found]}

    def state_dict(self) -> dict[str, Tensor]:
        return {"scores": self.scores[: self.scored]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        scores = state["scores"]
        if scores.dim() != 1 or len(scores) > len(self.scores):
            raise CheckpointError(
                f"the checkpoint has {tuple(scores.shape)} scores of {len(self.scores)} rows; use another folder"
            )
        self.scored = len(scores)
        self.scores[: self.scored] = scores
