"""The training loop: shuffle, step, validate, keep the best."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rarebit.data.dataset import Dataset, shuffled_order
from rarebit.errors import DataError
from rarebit.settings import require, updated
from rarebit.tables.optimizer_state import check
from rarebit.training.checks import check_labels, check_schema
from rarebit.training.evaluate import Forward, device_of, evaluate
from rarebit.training.optimizers import Kind
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.progress import EpochRecord, LineProgress, Progress, Silence
from rarebit.training.settings import Training
from rarebit.training.step import Loss, TrainingStep

__all__ = ["History", "fit"]

TELL_EVERY = 10
"""Steps between two calls of the progress bar."""
LOOK_EVERY = 100
"""Steps between two looks at whether the loss is still finite: a look waits for the device."""
OPTIMIZER_SETTINGS = ("lr", "table_lr", "weight_decay", "table_weight_decay", "momentum")
"""What only an optimizer that `fit` builds listens to."""


@dataclass
class History:
    """What training did, epoch by epoch, and which epoch's weights the model has."""

    epochs: list[EpochRecord] = field(default_factory=list)
    best_epoch: int | None = None
    """The epoch whose weights the model has, from 1; None without validation data."""
    stopped_early: bool = False

    @property
    def samples_per_second(self) -> float:
        """Median over the epochs, training steps only."""
        speeds = sorted(record.samples_per_second for record in self.epochs)
        return speeds[len(speeds) // 2]


def fit(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None = None,
    *,
    settings: Training = Training(),
    optimizer: Optimizer | Kind | None = None,
    loss: Loss = F.binary_cross_entropy_with_logits,
    forward: Forward | None = None,
    progress: Progress | bool = True,
    **overrides: Any,
) -> History:
    """Train a model in place, on the device it is on, and return what happened.

    Any setting of `Training` can be given by name. With validation data the best epoch's weights
    are kept. `forward=lambda model, batch: ...` calls a model that does not take a batch.

    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> history = fit(FM(data.schema, dim=4), data, epochs=2, lr=0.1, progress=False)
    >>> len(history.epochs)
    2
    """
    if isinstance(optimizer, str):
        overrides["optimizer"], optimizer = optimizer, None
    elif optimizer is not None:
        _refuse_unused(overrides)
    settings = updated(settings, overrides)
    tell = progress if not isinstance(progress, bool) else LineProgress() if progress else Silence()
    _check_data(model, train, valid, settings, loss)
    device = device_of(model)
    train, valid = train.to(device), None if valid is None else valid.to(device)
    optimizer = optimizer or _optimizer(model, settings)
    check(model, optimizer)
    step = TrainingStep(model, optimizer, loss, forward=forward, precision=settings.precision)
    best = _Best(model, optimizer, settings)
    history = History()
    for epoch in range(1, settings.epochs + 1):
        tell.start_epoch(epoch, settings.epochs, len(train))
        steps, seconds, mean_loss = _train_epoch(step, train, settings, epoch, tell)
        metrics = None if valid is None else evaluate(model, valid, forward=forward).overall
        record = EpochRecord(
            epoch=epoch,
            steps=steps,
            train_loss=mean_loss,
            lr=optimizer.param_groups[0]["lr"],
            seconds=seconds,
            samples_per_second=len(train) / seconds,
            valid=metrics,
        )
        history.epochs.append(record)
        tell.finish_epoch(record)
        if metrics is not None and best.has_stalled(epoch, getattr(metrics, settings.monitor)):
            history.stopped_early = True
            break
    step.release()
    history.best_epoch = best.restore()
    return history


def _train_epoch(
    step: TrainingStep, train: Dataset, settings: Training, epoch: int, tell: Progress
) -> tuple[int, float, float]:
    """Train on every row once; return the number of steps, the seconds and the mean loss."""
    step.model.train()
    order = shuffled_order(len(train), seed=settings.seed, epoch=epoch).to(train.device)
    first, untold, start = step.steps, 0, time.perf_counter()
    for batch in train.batches(settings.batch_size, order):
        step(batch)
        untold += len(batch)
        if step.steps % TELL_EVERY == 0:
            tell.advance(untold)
            untold = 0
        if step.steps % LOOK_EVERY == 0:
            step.raise_if_not_finite()
    step.raise_if_not_finite()
    tell.advance(untold)
    return step.steps - first, time.perf_counter() - start, step.take_mean_loss(len(train))


class _Best:
    """The best epoch so far: its weights, and how long ago it was."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, settings: Training) -> None:
        self.model, self.settings = model, settings
        self.sign = 1.0 if settings.monitor == "auc" else -1.0
        self.value, self.epoch = float("-inf"), None  # type: float, int | None
        self.weights: dict[str, Tensor] = {}
        self.plateau = None
        if settings.plateau_factor < 1.0:
            self.plateau = ReduceLROnPlateau(
                optimizer,
                mode="max",
                factor=settings.plateau_factor,
                patience=settings.plateau_patience - 1,
                threshold=0.0,
            )

    def has_stalled(self, epoch: int, value: float) -> bool:
        """Take note of an epoch's validation metric; return whether to stop."""
        value *= self.sign
        if value > self.value:
            self.value, self.epoch = value, epoch
            self.weights = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        if self.plateau is not None:
            self.plateau.step(value)
        waited = epoch - (self.epoch or 0)
        return self.settings.patience is not None and waited >= self.settings.patience

    def restore(self) -> int | None:
        """Give the model the best epoch's weights and return which epoch that was."""
        if self.weights:
            self.model.load_state_dict(self.weights)
        return self.epoch


def _refuse_unused(overrides: Mapping[str, Any]) -> None:
    """Raise for settings that an optimizer of the user's own would not listen to."""
    unused = [name for name in overrides if name in OPTIMIZER_SETTINGS]
    require(
        not unused,
        f"{', '.join(unused)} would not be used: the optimizer given has its own. Set it there, or "
        "pass the optimizer's kind, such as optimizer='adam'",
    )


def _optimizer(model: nn.Module, settings: Training) -> Optimizer:
    return build_optimizer(
        model,
        kind=settings.optimizer,
        lr=settings.lr,
        table_lr=settings.table_lr,
        weight_decay=settings.weight_decay,
        table_weight_decay=settings.table_weight_decay,
        momentum=settings.momentum,
    )


def _check_data(
    model: nn.Module, train: Dataset, valid: Dataset | None, settings: Training, loss: Loss
) -> None:
    is_bce = loss is F.binary_cross_entropy_with_logits
    if len(train) < 2:
        raise DataError(f"training needs at least two rows, got {len(train)}")
    check_schema(model, train)
    check_labels(train, "training", are_chances=is_bce, both_classes=is_bce)
    if valid is not None:
        check_schema(model, valid)
        picks_by_auc = settings.monitor == "auc"
        check_labels(valid, "validation", are_chances=is_bce, both_classes=picks_by_auc)
