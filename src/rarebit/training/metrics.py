"""Score a data set with a model and measure the scores, on rare rows too; check that data fits a model and a loss.

Metrics are exact, over all rows at once, on the device of the scores: no sampling, no mean of batch values, one sort. Tied
scores count half in AUC and fall together in PR-AUC, so neither depends on the order of the rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.data.dataset import Batch, Dataset
from rarebit.data.order import batch_bounds
from rarebit.data.schema import PADDING
from rarebit.errors import DataError, NotFiniteError, TrainingError
from rarebit.models._base import RankingModel
from rarebit.settings import require
from rarebit.sharding.processes import ONE, processes_of


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """How well scores rank and predict some rows."""

    rows: int
    """Rows measured."""
    positives: int
    """Rows with a click."""
    auc: float | None
    """Chance that a clicked row scores above another one; None when all labels are the same."""
    logloss: float
    """Mean cross entropy, in nats."""
    pr_auc: float | None
    """Average precision; None when no row was clicked."""

    def __post_init__(self) -> None:
        require(
            0 <= self.positives <= self.rows,
            f"positives must lie between 0 and {self.rows} rows, got {self.positives}",
        )

    def __str__(self) -> str:
        auc, pr_auc = (
            "undefined (one class)" if value is None else f"{value:.5f}"
            for value in (self.auc, self.pr_auc)
        )
        return f"AUC {auc}, logloss {self.logloss:.5f}, PR-AUC {pr_auc}, {self.rows:,} rows"


def measure(logits: Tensor, labels: Tensor) -> Metrics:
    """Return all metrics of some rows."""
    return Metrics(
        rows=len(labels),
        positives=int((labels > 0.5).sum()),
        auc=auc(logits, labels),
        logloss=logloss(logits, labels),
        pr_auc=average_precision(logits, labels),
    )


def auc(scores: Tensor, labels: Tensor) -> float | None:
    """Return the area under the ROC curve; None when only one class is there."""
    positives, negatives = _tied_groups(scores, labels)
    pairs = int(positives.sum()) * int(negatives.sum())
    if pairs == 0:
        return None
    below = negatives.cumsum(0) - negatives
    # Twice the number of pairs in the right order, in whole numbers: exact to the last pair.
    doubled = int((positives * (2 * below + negatives)).sum())
    return doubled / (2 * pairs)


def grouped_auc(scores: Tensor, labels: Tensor, groups: Tensor) -> float | None:
    """Return the mean AUC within groups, each weighed by its rows; None where no group has both classes.

    Groups of one class say nothing about a ranking and do not count, and neither do rows of group 0, which have none.

    >>> scores, labels = torch.tensor([0.1, 0.9, 0.5, 0.4]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> grouped_auc(scores, labels, torch.tensor([7, 7, 8, 8])), auc(scores, labels)
    (1.0, 1.0)
    """
    known = groups != 0
    order = scores[known].argsort(stable=True)
    scores, labels, groups = (part[known][order] for part in (scores, labels, groups))
    order = groups.argsort(stable=True)  # by group, and by score within each
    scores, clicked, groups = scores[order], (labels[order] > 0.5).long(), groups[order]
    if not len(groups):
        return None
    starts = torch.ones_like(groups, dtype=torch.bool)
    starts[1:] = groups[1:] != groups[:-1]
    place = starts.cumsum(0) - 1
    tied = starts.clone()
    tied[1:] |= scores[1:] != scores[:-1]
    tie = tied.cumsum(0) - 1
    num_groups, num_ties = int(place[-1]) + 1, int(tie[-1]) + 1
    positives = clicked.new_zeros(num_ties).index_add_(0, tie, clicked)
    negatives = clicked.new_zeros(num_ties).index_add_(0, tie, 1 - clicked)
    of_tie = place[tied]
    totals = clicked.new_zeros(2, num_groups)
    totals.index_add_(1, of_tie, torch.stack([positives, negatives]))
    below = negatives.cumsum(0) - negatives  # of all groups before, too
    below = below - (totals[1].cumsum(0) - totals[1])[of_tie]
    doubled = clicked.new_zeros(num_groups)
    doubled.index_add_(0, of_tie, (2 * below + negatives) * positives)
    pairs, rows = totals.prod(dim=0), totals.sum(dim=0).double()
    mixed = pairs > 0
    if not bool(mixed.any()):
        return None
    aucs = doubled[mixed].double() / (2 * pairs[mixed]).double()
    return float((aucs * rows[mixed]).sum() / rows[mixed].sum())


def average_precision(scores: Tensor, labels: Tensor) -> float | None:
    """Return the area under the precision-recall curve as a step function; None without a click."""
    positives, negatives = (group.flip(0).double() for group in _tied_groups(scores, labels))
    if int(positives.sum()) == 0:  # best scores first
        return None
    selected = (positives + negatives).cumsum(0)
    precision = positives.cumsum(0) / selected
    return float((precision * positives).sum() / positives.sum())


def logloss(logits: Tensor, labels: Tensor) -> float:
    """Return the mean cross entropy of logits against labels, in nats."""
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def _tied_groups(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many positive and how many negative rows have each distinct score, lowest first."""
    ordered, order = scores.sort()
    clicked = (labels > 0.5)[order].long()
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    last = is_last.nonzero().flatten()
    start = last.new_zeros(1)
    positives = clicked.cumsum(0)[last].diff(prepend=start)
    sizes = (last + 1).diff(prepend=start)
    return positives, sizes - positives


Forward: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""How to get one score per row out of a model: `forward(model, batch)`."""


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
    grouped_auc: float | None = None
    """Mean AUC within groups of rows, such as those of a user; None where rows have no groups."""

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
        lines = [f"{name}: {metrics}" for name, metrics in parts.items() if metrics]
        if self.grouped_auc is not None:
            lines.insert(1, f"grouped AUC {self.grouped_auc:.5f}")
        return "\n".join(lines)


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
            processes = processes_of(model)
            scores = []
            for start, stop in batch_bounds(len(data), batch_size):
                rows: slice | Tensor = slice(start, stop)
                if processes is not ONE:
                    rows, _ = processes.share(torch.arange(start, stop, device=data.device))
                part = score(model, data[rows], forward)
                scores.append(processes.join(part, stop - start))
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
        raise NotFiniteError(
            f"the model's score for row {row} is {float(logits[row])}, so nothing can be measured; "
            "a lower learning rate usually keeps training finite"
        )
    data = data.to(logits.device)
    truth = None if data.probability is None else torch.logit(data.probability.double(), eps=1e-12)
    ceiling = None if truth is None else measure(truth, data.label)
    within = None if data.group is None else grouped_auc(logits, data.label, data.group)
    if counts is None:
        overall = measure(logits, data.label)
        return Evaluation(overall=overall, ceiling=ceiling, grouped_auc=within)
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
        grouped_auc=within,
        rarest_ceiling=None if truth is None else measure(truth[fifth], data.label[fifth]),
    )


def rarity(data: Dataset, counts: Mapping[str, Tensor]) -> Tensor:
    """Return how much was seen of each row's values in training: lowest is rarest, `(n,)`.

    The sum over fields of log(1 + training count); a multi-valued field counts once, by the mean over its values.
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
    """Return one score per row, `(B,)`; raise for a model that returns something else."""
    output = model(batch) if forward is None else forward(model, batch)
    if not isinstance(output, Tensor):
        raise TrainingError(
            f"a model returns one score per row, got a {type(output).__name__}; "
            "pass forward=lambda model, batch: ... to pick it"
        )
    if output.dim() == 2 and output.shape[1] == 1:
        output = output[:, 0]
    if output.shape != batch.label.shape:
        raise TrainingError(
            f"a model returns one score per row, {tuple(batch.label.shape)}, "
            f"got {tuple(output.shape)}; pass forward=lambda model, batch: ... to reduce it"
        )
    return output


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter is; the CPU for a model without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def check_schema(model: nn.Module, data: Dataset) -> None:
    """Raise when a model of ours was built for other fields than the data has."""
    if not isinstance(model, RankingModel) or model.schema == data.schema:
        return
    built_for = {field.name: field for field in model.schema.fields}
    for field in data.schema.fields:
        known = built_for.get(field.name)
        # ids of other raw values, whatever else is the same
        only_marks = known is not None and replace(known, vocabulary=field.vocabulary) == field
        if (
            known is not None
            and known.vocabulary != field.vocabulary
            and ((known.vocabulary and field.vocabulary) or only_marks)
        ):
            raise DataError(
                f"the model was trained with another vocabulary of {field.name!r} than the data has: "
                "the same id means another value. Encode the rows with the model's own vocabulary: "
                "rarebit predict --model RUN --input FILE, or Dataset.from_frame(frame, like=data)"
            )
        if known != field:
            raise DataError(
                "the model was built for other data: "
                f"it has {built_for.get(field.name, f'no field {field.name!r}')}, "
                f"the data has {field}"
            )
    raise DataError(
        f"the model was built for other data: it has the fields {list(built_for)}, "
        f"the data has {[field.name for field in data.schema.fields]}"
    )


def check_counts(data: Dataset, counts: Mapping[str, Tensor]) -> None:
    """Raise when training counts do not belong to the data's fields."""
    for field in data.schema.table_fields:
        count = counts.get(field.name)
        if count is None or len(count) != field.rows:
            came = "none" if count is None else f"{len(count)}"
            raise DataError(
                f"counts need one number for each of the {field.rows} ids of {field.name!r}, got "
                f"{came}; take them from the training split: counts=train.counts()"
            )


def check_labels(data: Dataset, name: str, *, are_chances: bool, both_classes: bool) -> None:
    """Raise when labels cannot be learned from or ranked by. `name` is what to call the data."""
    lowest, highest = (float(bound) for bound in torch.aminmax(data.label))
    if are_chances and not 0.0 <= lowest <= highest <= 1.0:
        raise DataError(
            f"labels must lie in [0, 1] for this loss, the {name} data has "
            f"{lowest:g} to {highest:g}; pass loss= for other targets"
        )
    if both_classes and (highest <= 0.5 or lowest > 0.5):
        raise DataError(
            f"all {len(data):,} labels of the {name} data are of one class "
            f"({'clicked' if lowest > 0.5 else 'not clicked'}), so AUC is undefined and there is "
            "nothing to learn to rank; check the label column and the split"
        )
