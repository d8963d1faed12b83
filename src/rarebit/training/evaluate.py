"""Score a data set with a model and measure the scores, on rare rows too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch, Dataset
from rarebit.data.schema import PADDING
from rarebit.errors import DataError, TrainingError
from rarebit.training.checks import check_counts, check_schema
from rarebit.training.metrics import Metrics, measure

__all__ = [
    "Evaluation",
    "Forward",
    "device_of",
    "evaluate",
    "evaluate_scores",
    "predict",
    "rarity",
    "score",
]

Forward: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""How to get one score a row out of a model: `forward(model, batch)`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics over all rows, over the rarest and the most frequent fifth, and by frequency decile."""

    overall: Metrics
    rarest: Metrics | None = None
    """The fifth of the rows whose values were seen least in training; None without counts."""
    frequent: Metrics | None = None
    """The fifth whose values were seen most."""
    deciles: tuple[Metrics, ...] = ()
    """Ten groups of rows of equal size, from the rarest to the most frequent."""
    ceiling: Metrics | None = None
    """The best any model could reach: the true chances' own metrics, on generated data."""
    rarest_ceiling: Metrics | None = None
    """The same on the rarest fifth."""

    @property
    def auc(self) -> float | None:
        """AUC over all rows."""
        return self.overall.auc

    @property
    def logloss(self) -> float:
        """Logloss over all rows."""
        return self.overall.logloss

    @property
    def pr_auc(self) -> float | None:
        """PR-AUC over all rows."""
        return self.overall.pr_auc

    def __str__(self) -> str:
        parts = {
            "overall": self.overall,
            "rarest fifth": self.rarest,
            "ceiling": self.ceiling,
            "ceiling, rarest fifth": self.rarest_ceiling,
        }
        return "\n".join(f"{name}: {metrics}" for name, metrics in parts.items() if metrics)


def predict(
    model: nn.Module, data: Dataset, *, batch_size: int = 8192, forward: Forward | None = None
) -> Tensor:
    """Return the model's logits for every row of a data set, `(n,)`, in the order of the rows.

    >>> from rarebit import Dataset
    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2]}, label=[0, 1, 0])
    >>> predict(FM(data.schema, dim=4), data).shape
    torch.Size([3])
    """
    check_schema(model, data)
    if not len(data):
        raise DataError("there are no rows to score; choose a part of the data that has some")
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            data = data.to(device_of(model))
            scores = [score(model, batch, forward) for batch in data.batches(batch_size)]
    finally:
        for module in was_training:  # one by one: a frozen part stays in evaluation mode
            module.training = True
    return torch.cat(scores)


def evaluate(
    model: nn.Module,
    data: Dataset,
    *,
    counts: Mapping[str, Tensor] | None = None,
    batch_size: int = 8192,
    forward: Forward | None = None,
) -> Evaluation:
    """Measure a model on a data set. With the training counts, on its rare rows as well.

    >>> from rarebit import Dataset
    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 1, 0]}, label=[0, 1, 1, 0])
    >>> evaluate(FM(data.schema, dim=4), data, counts=data.counts()).overall.rows
    4
    """
    logits = predict(model, data, batch_size=batch_size, forward=forward)
    return evaluate_scores(logits, data, counts=counts)


def evaluate_scores(
    logits: Tensor, data: Dataset, *, counts: Mapping[str, Tensor] | None = None
) -> Evaluation:
    """Measure scores that a model gave to the rows of a data set, as `predict` returns them.

    >>> from rarebit import Dataset
    >>> data = Dataset.from_columns({"user": [0, 1, 1, 0]}, label=[0, 1, 1, 0])
    >>> evaluate_scores(torch.tensor([-1.0, 2.0, 3.0, 0.0]), data).auc
    1.0
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not bool(torch.isfinite(logits).all()):
        row = int((~torch.isfinite(logits)).nonzero()[0])
        raise TrainingError(
            f"the model's score for row {row} is {float(logits[row])}, so nothing can be measured; "
            "a lower learning rate usually keeps training finite"
        )
    data = data.to(logits.device)
    truth = None if data.probability is None else torch.logit(data.probability.double(), eps=1e-12)
    ceiling = None if truth is None else measure(truth, data.label)
    if counts is None:
        return Evaluation(overall=measure(logits, data.label), ceiling=ceiling)
    order = torch.argsort(rarity(data, counts), stable=True)  # ties by row order
    size = max(len(order) // 5, 1)
    fifth, frequent = order[:size], order[-size:]
    return Evaluation(
        overall=measure(logits, data.label),
        rarest=measure(logits[fifth], data.label[fifth]),
        frequent=measure(logits[frequent], data.label[frequent]),
        deciles=tuple(
            measure(logits[rows], data.label[rows]) for rows in order.tensor_split(10) if len(rows)
        ),
        ceiling=ceiling,
        rarest_ceiling=None if truth is None else measure(truth[fifth], data.label[fifth]),
    )


def rarity(data: Dataset, counts: Mapping[str, Tensor]) -> Tensor:
    """Return how much was seen of each row's values in training: lowest is rarest, `(n,)`.

    The sum over fields of log(1 + training count); a multi-valued field counts once, by the mean
    over its values.
    """
    check_counts(data, counts)
    evidence = torch.zeros(len(data), dtype=torch.float64, device=data.device)
    for field in data.schema.table_fields:
        ids = data.ids[:, data.schema.slots[field.name]]
        seen = torch.log1p(counts[field.name].to(data.device, torch.float64))[ids.long()]
        if field.kind == "multi":
            present = (ids != PADDING).double()
            evidence += (seen * present).sum(dim=1) / present.sum(dim=1).clamp(min=1.0)
        else:
            evidence += seen[:, 0]
    # Equal sums in another order differ in the last digit; ties are to be broken by row order.
    return evidence.round(decimals=9)


def score(model: nn.Module, batch: Batch, forward: Forward | None) -> Tensor:
    """Return one score a row, `(B,)`, or say what the model returned instead."""
    output = model(batch) if forward is None else forward(model, batch)
    if not isinstance(output, Tensor):
        raise TrainingError(
            f"a model returns one score a row, got a {type(output).__name__}; "
            "pass forward=lambda model, batch: ... to pick it"
        )
    if output.dim() == 2 and output.shape[1] == 1:
        output = output[:, 0]
    if output.shape != batch.label.shape:
        raise TrainingError(
            f"a model returns one score a row, {tuple(batch.label.shape)}, "
            f"got {tuple(output.shape)}; pass forward=lambda model, batch: ... to reduce it"
        )
    return output


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter is; the CPU for a model without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
