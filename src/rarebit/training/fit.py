"""The training loop: shuffle, step, validate, keep the best."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rarebit.data.dataset import Dataset, batch_bounds, shuffled_order
from rarebit.errors import DataError
from rarebit.settings import require, updated
from rarebit.tables.optimizer_state import check
from rarebit.tables.sparse import row_gradients_kept
from rarebit.training.checks import check_labels, check_schema
from rarebit.training.ema import EMA
from rarebit.training.evaluate import Forward, device_of, evaluate
from rarebit.training.memory import estimate_memory
from rarebit.training.optimizers import Kind
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.progress import EpochRecord, LineProgress, Progress, Silence
from rarebit.training.settings import Training
from rarebit.training.step import Backward, Loss, TrainingStep
from rarebit.training.steps import RecordedSteps, Steps, why_not_recorded

__all__ = ["History", "fit"]

TELL_EVERY = 10
"""Steps between two calls of the progress bar."""
LOOK_EVERY = 100
"""Steps between two looks at whether the loss is still finite: a look waits for the device."""
OPTIMIZER_SETTINGS = (
    "lr",
    "tables",
    "table_lr",
    "weight_decay",
    "table_weight_decay",
    "decoupled",
    "momentum",
)
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
    backward: Backward | None = None,
    progress: Progress | bool = True,
    **overrides: Any,
) -> History:
    """Train a model in place, on the device it is on, and return what happened.

    Any setting of `Training` can be given by name. With validation data the best epoch's weights
    are kept. `forward=lambda model, batch: ...` calls a model that does not take a batch;
    `backward=rows.backward` trains with row gradients.

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
    estimate = estimate_memory(model, train, valid, settings=settings, optimizer=optimizer)
    tell.say(estimate.line())
    estimate.check()
    with row_gradients_kept(model):
        optimizer = optimizer or _optimizer(model, settings)
        check(model, optimizer)
        device = device_of(model)
        train, valid = train.to(device), None if valid is None else valid.to(device)
        step = TrainingStep(
            model,
            optimizer,
            loss,
            forward=forward,
            backward=backward,
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            compiled_size=settings.batch_size if settings.compile else None,
            say=tell.say,
        )
        try:
            return _train(step, train, valid, settings, tell)
        finally:
            step.release()


def _train(
    step: TrainingStep, train: Dataset, valid: Dataset | None, settings: Training, tell: Progress
) -> History:
    steps = _steps(step, train, settings, tell)
    with _averaging(step, settings) as ema:
        best = _Best(step.model, step.optimizer, settings)
        history = History()
        for epoch in range(1, settings.epochs + 1):
            tell.start_epoch(epoch, settings.epochs, len(train))
            lr = float(step.optimizer.param_groups[0]["lr"])
            num_steps, seconds, mean_loss = _train_epoch(steps, settings, epoch, tell)
            with nullcontext() if ema is None else ema.applied():
                metrics = None
                if valid is not None:
                    metrics = evaluate(step.model, valid, forward=step.forward).overall
                    stalled = best.has_stalled(epoch, getattr(metrics, settings.monitor))
            record = EpochRecord(
                epoch=epoch,
                steps=num_steps,
                train_loss=mean_loss,
                lr=lr,
                seconds=seconds,
                samples_per_second=len(train) / seconds,
                valid=metrics,
            )
            history.epochs.append(record)
            tell.finish_epoch(record)
            if metrics is not None and stalled:
                history.stopped_early = True
                break
        if ema is not None:
            ema.copy_to(step.model)
        history.best_epoch = best.restore()
        return history


def _steps(step: TrainingStep, train: Dataset, settings: Training, tell: Progress) -> Steps:
    """Return how to run the steps: recorded on a GPU, one by one elsewhere."""
    if train.device.type != "cuda" or not settings.cuda_graph:
        return Steps(step, train)
    reason = why_not_recorded(step.optimizer)
    if reason is not None:
        tell.say(f"the step is not recorded as a CUDA graph: {reason}")
        return Steps(step, train)
    return RecordedSteps(step, train, settings.batch_size, tell.say)


def _train_epoch(
    steps: Steps, settings: Training, epoch: int, tell: Progress
) -> tuple[int, float, float]:
    """Train on every row once; return the number of steps, the seconds and the mean loss."""
    step, train = steps.step, steps.train
    step.model.train()
    bounds = batch_bounds(len(train), settings.batch_size)
    begin, untold = time.perf_counter(), 0
    order = shuffled_order(len(train), seed=settings.seed, epoch=epoch, device=train.device)
    steps.start_epoch(order)
    for number, (start, stop) in enumerate(bounds, start=1):
        steps(start, stop)
        untold += stop - start
        if number % TELL_EVERY == 0:
            tell.advance(untold)
            untold = 0
        if number % LOOK_EVERY == 0:
            step.raise_if_not_finite()
    step.raise_if_not_finite()
    tell.advance(untold)
    return len(bounds), time.perf_counter() - begin, step.take_mean_loss(len(train))


@contextmanager
def _averaging(step: TrainingStep, settings: Training) -> Iterator[EMA | None]:
    if settings.ema_decay is None:
        yield None
        return
    ema = EMA(step.model, step.optimizer, settings.ema_decay)
    try:
        yield ema
    finally:
        ema.close()


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
            self._keep(self.model.state_dict())
        if self.plateau is not None:
            self.plateau.step(value)
        waited = epoch - (self.epoch or 0)
        return self.settings.patience is not None and waited >= self.settings.patience

    def _keep(self, weights: dict[str, Tensor]) -> None:
        """Copy the weights, over the last copy where there is one: a second would double the memory."""
        for name, weight in weights.items():
            if name in self.weights:
                self.weights[name].copy_(weight)
            else:
                self.weights[name] = weight.detach().clone()

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
        tables=settings.tables,
        table_lr=settings.table_lr,
        weight_decay=settings.weight_decay,
        table_weight_decay=settings.table_weight_decay,
        decoupled=settings.decoupled,
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
