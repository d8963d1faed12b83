"""Train a model (`fit`): check everything first, run the loop, and leave nothing behind.

    fit           checks settings, data, memory and optimizer, then runs a `TrainingLoop`
    TrainingLoop  epoch after epoch: shuffle, step, validate, keep the best weights
    random_state  the global random generators of torch (CPU and CUDA), Python and numpy

The loop can stop between any two steps and resume to the same bits. `state()` returns everything that decides how training
continues, as tensors and plain values, and `load(state)` continues from there. Seed and epoch decide the order of the rows,
so it needs no saving. Times are measured: only they differ after a resume.

A step records on the device which step had the first loss that was not finite, and weights are checked before a checkpoint.
To find the source of a bad number, the loop returns to its last checkpoint and repeats its steps, checking everything.
"""

import dataclasses
import math
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rarebit.callbacks import Callback, Callbacks, TrainingData, started
from rarebit.data.dataset import Batch, Dataset
from rarebit.data.order import batch_bounds
from rarebit.ema import EMA
from rarebit.errors import CheckpointError, DataError, NotFiniteError, TrainingError
from rarebit.settings import check_types, from_mapping, require, updated
from rarebit.sharding.processes import ONE, processes_of
from rarebit.storage.files import check_tensors
from rarebit.tables.apply import check_optimizer
from rarebit.tables.collection import is_watched, row_gradients_kept
from rarebit.technique import Technique
from rarebit.training.checkpoints import (
    CheckpointFolder,
    Checkpoints,
    SpreadFolder,
    describe_run,
    map_tensors,
    stop_requests,
)
from rarebit.training.memory import estimate_memory
from rarebit.training.metrics import (
    Forward,
    Metrics,
    check_labels,
    check_schema,
    device_of,
    evaluate,
    evaluate_scores,
    predict,
    score,
)
from rarebit.training.one_pass import ProgressiveScores
from rarebit.training.optimizers import Kind, fitting_state
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.settings import Training
from rarebit.training.step import (
    Backward,
    Loss,
    RecordedSteps,
    Steps,
    TrainingStep,
    raise_if_weights_are_not_finite,
    where_not_finite,
    why_not_recorded,
)

STATISTICS_ROWS = 1 << 14
"""Training rows by which averaged weights get statistics of batch normalisation."""
OPTIMIZER_SETTINGS = (
    *("lr", "tables", "table_lr", "weight_decay", "table_weight_decay"),
    *("threshold_weight_decay", "decoupled", "momentum"),
)
"""Settings of the optimizer that `fit` builds; another optimizer has its own."""
PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""What changes of torch's `ReduceLROnPlateau` while training."""
REPORT_EVERY = 10
"""Steps between two updates of the progress bar."""
CHECK_EVERY = 100
"""Steps between two checks whether the loss is still finite: a check waits for the device."""
SMOOTHED = 3
"""Epochs over which validation is smoothed, to see whether it still rises."""
WORDS = 624
"""32-bit words of a Mersenne twister, which Python and numpy share."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """The result of one epoch."""

    epoch: int
    """From 1."""
    steps: int
    train_loss: float
    """Mean over the epoch's rows, while the weights were changing."""
    lr: float
    """Learning rate of the first group."""
    seconds: float
    """Time spent in training steps, evaluation left out."""
    samples_per_second: float
    valid: Metrics | None = None

    @property
    def figures(self) -> dict[str, float]:
        """What callbacks hear of it; a metric that is not defined is left out."""
        names = ("train_loss", "lr", "samples_per_second")
        values = {name: getattr(self, name) for name in names}
        if self.valid is not None:
            values |= {"valid_auc": self.valid.auc, "valid_logloss": self.valid.logloss}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class History:
    """The epochs of a training, and which epoch's weights the model has."""

    epochs: list[EpochRecord] = field(default_factory=list)
    best_epoch: int | None = None
    """The epoch whose weights the model has, from 1; None without validation data."""
    stopped_early: bool = False
    """Whether training ended before its last step."""
    still_rising: bool = False
    """Whether patience ended training while validation, smoothed over epochs, was still getting better."""
    reports: dict[str, Any] = field(default_factory=dict)
    """The reports of callbacks, by name."""
    scores: Tensor | None = None
    """In one pass, the score of each row before training on it."""

    @property
    def samples_per_second(self) -> float:
        """Median over the epochs, training steps only."""
        speeds = sorted(record.samples_per_second for record in self.epochs)
        return speeds[len(speeds) // 2]


def is_rising(values: Sequence[float]) -> bool:
    """Return whether a curve that is noisy from epoch to epoch still rises at its end.

    It does if its last three values have the highest mean of any three in a row, and the last is above the one before.

    >>> is_rising([0.70, 0.73, 0.72, 0.725]), is_rising([0.70, 0.73, 0.72, 0.715])
    (True, False)
    """
    means = [sum(values[i : i + SMOOTHED]) for i in range(len(values) - SMOOTHED + 1)]
    return len(means) > 1 and means[-1] > max(means[:-1]) and values[-1] > values[-2]


class Wanted(NamedTuple):
    """What a training wants next: some steps, or fewer of them."""

    loop: "TrainingLoop"
    bounds: Sequence[tuple[int, int]]
    """Where each batch begins and ends in the order of the rows."""


class Made(NamedTuple):
    """Steps that were made for a training, together with those of others."""

    steps: int
    seconds: float
    """Its share of the time."""


class WantedScores(NamedTuple):
    """What a training wants between two epochs: the scores of the validation rows."""

    loop: "TrainingLoop"
    data: Dataset


T = TypeVar("T")
Course: TypeAlias = Generator[Wanted | WantedScores, Made | Tensor | None, T]
"""A training that says which steps and scores it wants, and makes the first step, or the scores, itself where nobody did."""


def alone(course: Course[T]) -> T:
    """Train to the end, and return the result."""
    while True:
        try:
            next(course)
        except StopIteration as end:
            result: T = end.value
            return result


class Progress(Protocol):
    """What `fit` calls to report its progress."""

    def say(self, line: str) -> None:
        """Report a message."""

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Report the start of an epoch of so many rows."""

    def advance(self, rows: int) -> None:
        """Report that so many more rows are done."""

    def finish_epoch(self, record: EpochRecord) -> None:
        """Report the result of an epoch."""


class Silence:
    """Reports nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Do nothing."""

    def advance(self, rows: int) -> None:
        """Do nothing."""

    def finish_epoch(self, record: EpochRecord) -> None:
        """Do nothing."""


class LineProgress(Silence):
    """Prints one line per epoch to standard error."""

    def say(self, line: str) -> None:
        """Print a message."""
        sys.stderr.write(f"{line}\n")

    def finish_epoch(self, record: EpochRecord) -> None:
        """Print the result of an epoch."""
        valid = "" if record.valid is None else f", valid {record.valid}"
        sys.stderr.write(
            f"epoch {record.epoch}: train loss {record.train_loss:.5f}{valid}, "
            f"{record.samples_per_second:,.0f} samples/s\n"
        )


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
    callbacks: Sequence[Callback | Technique] = (),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
    **overrides: Any,
) -> History:
    """Train a model in place, on its device, and return its history.

    Any setting of `Training` can be given by name. With validation data the weights of the best epoch are kept.
    `forward=lambda model, batch: ...` calls a model that does not take a batch; `backward=rows.backward` trains with
    row gradients. `callbacks` act around training (`Callback`, or a method such as `Tail()`), and their state
    is part of the checkpoints. With a `folder`, checkpoints are written there, Ctrl-C and SIGTERM stop after the step
    with nothing lost, and `resume=True` resumes from the newest one, to the same bits as without the interruption.

    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> history = fit(FM(data.schema, dim=4), data, epochs=2, lr=0.1, progress=False)
    >>> len(history.epochs)
    2
    """
    if isinstance(optimizer, str):
        overrides["optimizer"], optimizer = optimizer, None
    elif optimizer is not None:
        unused = [name for name in overrides if name in OPTIMIZER_SETTINGS]
        require(
            not unused,
            f"{', '.join(unused)} would not be used: the optimizer given has its own. Set it there, or "
            "pass the optimizer's kind, such as optimizer='adam'",
        )
    settings = updated(settings, overrides)
    require(not resume or folder is not None, "resume=True needs the folder of the checkpoints")
    check_data(model, train, valid, settings, loss)
    with started(callbacks, model, training_data(settings, train, valid)) as given:
        group = given if backward is None else given.joined(_Backward(backward))
        course = fit_started(
            model,
            train,
            valid,
            group,
            settings=settings,
            optimizer=optimizer,
            loss=loss,
            forward=forward,
            folder=folder,
            resume=resume,
            progress=progress,
        )
        return alone(course)


def check_data(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None,
    settings: Training,
    loss: Loss = F.binary_cross_entropy_with_logits,
) -> None:
    """Raise for data that the model cannot be trained or validated on."""
    is_bce = loss is F.binary_cross_entropy_with_logits
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise TrainingError(
            f"{empty[0]!r} is on the meta device, which holds no numbers; draw or load the weights on a real device first"
        )
    if len(train) < 2:
        raise DataError(f"training needs at least two rows, got {len(train)}")
    check_schema(model, train)
    check_labels(train, "training", are_chances=is_bce, both_classes=is_bce)
    if valid is not None:
        check_schema(model, valid)
        picks_by_auc = settings.monitor == "auc"
        check_labels(valid, "validation", are_chances=is_bce, both_classes=picks_by_auc)


def training_data(settings: Training, train: Dataset, valid: Dataset | None) -> TrainingData:
    """Return what callbacks know about a training."""
    return TrainingData(
        train=train,
        valid=valid,
        batch_size=settings.batch_size,
        steps_per_epoch=len(batch_bounds(len(train), settings.batch_size)),
        seed=settings.seed,
        one_pass=settings.one_pass,
    )


class _Backward(Callback):
    """The user's function that turns the loss into gradients, with the state of its owner if that has one."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.owner: Any = getattr(backward, "__self__", None)

    @property
    def name(self) -> str:
        return type(self.owner).__name__ if self.owner is not None else "backward"

    @property
    def _has_state(self) -> bool:
        # a model is checkpointed by itself
        return hasattr(self.owner, "load_state_dict") and not isinstance(self.owner, nn.Module)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.owner.state_dict()) if self._has_state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._has_state:
            self.owner.load_state_dict(state)


def fit_started(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None,
    callbacks: Callbacks,
    *,
    settings: Training,
    optimizer: Optimizer | None = None,
    loss: Loss = F.binary_cross_entropy_with_logits,
    forward: Forward | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
) -> Course[History]:
    """Train with callbacks that have started, and let them end."""
    processes = processes_of(model)
    if isinstance(progress, bool):
        progress = LineProgress() if progress and processes.rank == 0 else Silence()
    scores = _progressive_scores(model, train, valid, settings, forward)
    if scores is not None:
        callbacks, settings = callbacks.joined(scores), replace(settings, epochs=1)
    settings = settings.with_patience(callbacks.patience)
    left_out: tuple[nn.Parameter, ...] = ()
    left_rows: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    if callbacks.average is not None and settings.average_decay(1) is None:
        decay, left_out, left_rows = callbacks.average
        settings = replace(settings, ema_decay=decay)
    if callbacks.backward is None and any(is_watched(module) for module in model.modules()):
        raise TrainingError(
            "the model has row gradients, which need their own backward: fit(..., "
            "backward=rows.backward), or rows.close() first"
        )
    require(
        processes is ONE or not settings.one_pass,
        "training in one pass scores the rows in their order, which one process does: leave the engine out",
    )
    from_host = _check_memory(
        model,
        train,
        valid,
        settings=settings,
        optimizer=optimizer,
        progress=progress,
        checkpoints=folder is not None,
        not_averaged=left_out,
    )
    for note in callbacks.notes:
        progress.say(note)
    with row_gradients_kept(model):
        if optimizer is None:
            optimizer = make_optimizer(model, settings, callbacks.parameter_groups)
        check_optimizer(model, optimizer)
        device = device_of(model)
        train = train if from_host else train.to(device)
        valid = None if valid is None else valid.to(device)
        step = TrainingStep(
            model,
            optimizer,
            loss,
            forward=forward,
            backward=callbacks.backward,
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            compiled_size=settings.batch_size if settings.compile else None,
            say=progress.say,
        )
        try:
            averaging: AbstractContextManager[EMA | None] = nullcontext()
            share = settings.average_decay(len(batch_bounds(len(train), settings.batch_size)))
            if share is not None:
                averaging = closing(
                    EMA(model, optimizer, share, leave_out=left_out, leave_out_rows=left_rows)
                )
            with averaging as ema:
                steps = _steps(step, train, settings, progress)
                loop = TrainingLoop(steps, valid, settings, progress, ema=ema, callbacks=callbacks)
                if scores is not None:
                    scores.ema, loop.scores, step.before_update = ema, scores, scores.score
                    scores.is_same &= settings.precision == "float32" and not settings.compile
                if folder is None:
                    history = yield from loop.run()
                else:
                    where = (
                        CheckpointFolder(folder)
                        if processes is ONE
                        else SpreadFolder(folder, model, optimizer)
                    )
                    history = yield from _train_in(where, loop, resume=resume)
        finally:
            step.release()
    callbacks.end()
    history.reports = callbacks.report()
    history.scores = None if scores is None else scores.scores
    return measured(model, history, valid) if callbacks.changes_model_at_end else history


def make_optimizer(
    model: nn.Module,
    settings: Training,
    change_groups: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
) -> Optimizer:
    """Return the optimizer that these settings describe."""
    options = {name: getattr(settings, name) for name in OPTIMIZER_SETTINGS}
    return build_optimizer(model, kind=settings.optimizer, change_groups=change_groups, **options)


def _progressive_scores(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None,
    settings: Training,
    forward: Forward | None,
) -> ProgressiveScores | None:
    """Return what scores the rows of training in one pass, and let counts grow; None for other training."""
    if not settings.one_pass:
        return None
    require(
        valid is None, "training in one pass scores the rows it trains on; give no validation rows"
    )
    for module in model.modules():
        start: Callable[[], None] | None = getattr(module, "start_pass_", None)
        if start is not None:  # a table that keeps counts
            start()
    scores = ProgressiveScores(forward)
    scores.start(model, training_data(settings, train, valid))
    return scores


def _check_memory(
    model: nn.Module,
    train: Dataset,
    valid: Dataset | None,
    *,
    settings: Training,
    optimizer: Optimizer | None,
    progress: Progress,
    **options: Any,
) -> bool:
    """Report the memory that training takes, or raise; return whether the training data stays on the host."""
    estimate = estimate_memory(
        model, train, valid, settings=settings, optimizer=optimizer, **options
    )
    if estimate.available is not None:
        estimate = replace(estimate, available=estimate.available // processes_of(model).here)
    from_host = not estimate.fits and estimate.with_training_data_elsewhere().fits
    if from_host:
        estimate = estimate.with_training_data_elsewhere()
    progress.say(estimate.line())
    estimate.check()
    if from_host:
        progress.say(f"the training data does not fit on {estimate.device}: copied batch by batch")
    return from_host


def _steps(step: TrainingStep, train: Dataset, settings: Training, progress: Progress) -> Steps:
    """Return how to run the steps: as a CUDA graph on a GPU, one by one elsewhere."""
    if train.device.type != "cuda" or not settings.cuda_graph or settings.one_pass:
        return Steps(step, train)
    reason = why_not_recorded(step.optimizer)
    if reason is not None:
        progress.say(f"the step is not recorded as a CUDA graph: {reason}")
        return Steps(step, train)
    return RecordedSteps(step, train, settings.batch_size, progress.say)


def _train_in(folder: CheckpointFolder, loop: "TrainingLoop", *, resume: bool) -> Course[History]:
    """Train with checkpoints in a folder that only this process writes."""
    train, valid, settings = loop.steps.train, loop.valid, loop.settings
    with folder.locked(), stop_requests() as stop:
        checkpoints = Checkpoints(
            folder,
            describe_run(loop.step.model, train, valid, settings),
            stop,
            minutes=settings.checkpoint_minutes,
            say=loop.progress.say,
        )
        try:
            if not resume and folder.names():
                raise CheckpointError(
                    f"{str(folder.folder)!r} holds the checkpoints of a run; resume it with resume=True, "
                    "or choose another folder"
                )
            if not (resume and checkpoints.resume(loop)):
                checkpoints.save(loop)  # to return to if the first steps fail
            return (yield from loop.run(checkpoints))
        except NotFiniteError as error:
            if loop.step.processes is not ONE:  # one alone may have seen it
                raise
            raise _explained(error, checkpoints, loop) from None
        finally:
            checkpoints.close()


def _explained(error: NotFiniteError, checkpoints: Checkpoints, loop: "TrainingLoop") -> Exception:
    """Return the error with the source of the bad number, found by repeating the steps since the last checkpoint."""
    checkpoints.wait()
    loop.progress.say(f"{error}; returning to the last checkpoint to find its source")
    checkpoints.say = Silence().say
    checkpoints.resume(loop)
    loop.progress = Silence()
    loop.steps = Steps(loop.step, loop.steps.train)  # a CUDA graph could not be inspected
    loop.step.inspect = lambda loss: _inspect(loop.step.model, loss)
    source = (
        "all steps since the last checkpoint were finite when repeated: the machine may be at fault"
    )
    try:
        alone(loop.run())
    except NotFiniteError as found:
        source = f"{found} (batch {loop.batch + 1} of epoch {loop.epoch})"
    return NotFiniteError(
        f"{source}. The last good checkpoint is in {str(checkpoints.folder.folder)!r}; "
        "lower the learning rate, clip gradients, or look for extreme numbers in the data"
    )


def _inspect(model: nn.Module, loss: Tensor) -> None:
    """Raise with the weight, loss or gradient that is not finite, between backward and update."""
    for name, parameter in model.named_parameters():
        place = where_not_finite(model, parameter, parameter.detach())
        if place is not None:
            raise NotFiniteError(f"the weights of {name} were not finite{place}")
    if not bool(torch.isfinite(loss).all()):
        raise NotFiniteError(
            "the loss was not finite, though all weights were: check the numbers of the batch"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        place = where_not_finite(model, parameter, parameter.grad)
        if place is not None:
            raise NotFiniteError(f"the gradient of {name} was not finite{place}")


def measured(
    model: nn.Module, history: History, valid: Dataset | None, *, epoch: int | None = None
) -> History:
    """Return the history with a new validation of the model, which changed after its best epoch."""
    epoch = epoch or history.best_epoch
    if valid is None or epoch is None:
        return replace(history, best_epoch=None)
    records = list(history.epochs)
    records[epoch - 1] = replace(records[epoch - 1], valid=evaluate(model, valid).overall)
    return replace(history, epochs=records, best_epoch=epoch)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a training stands: the next batch, its epoch from 1, and the time spent on the epoch."""

    epoch: int
    batch: int
    seconds: float

    def __post_init__(self) -> None:
        check_types(self)
        require(self.epoch >= 1 and self.batch >= 0, f"a training cannot stand at {self}")


class TrainingLoop:
    """Epoch after epoch: shuffle, step, validate, keep the best weights."""

    def __init__(
        self,
        steps: Steps,
        valid: Dataset | None,
        settings: Training,
        progress: Progress,
        *,
        ema: EMA | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.steps, self.valid, self.settings = steps, valid, settings
        self.progress, self.ema, self.callbacks = progress, ema, callbacks or Callbacks({}, {})
        self.bounds = batch_bounds(len(steps.train), settings.batch_size)
        self.best = Best(self.step.model, self.step.optimizer, settings)
        self.scores: ProgressiveScores | None = None
        """In one pass, what scores each batch."""
        self.history = History()
        self.epoch, self.batch = 1, 0
        """The next batch to train on, and its epoch, from 1."""
        self.seconds = 0.0
        """Time spent on this epoch so far."""

    @property
    def step(self) -> TrainingStep:
        """The step."""
        return self.steps.step

    @property
    def num_steps(self) -> int:
        """Steps since the start of training, those before a resume included."""
        return (self.epoch - 1) * len(self.bounds) + self.batch

    @property
    def last_step(self) -> int:
        """Maximum steps."""
        return self.settings.epochs * len(self.bounds)

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to train."""
        # an epoch that ended early is still to be validated
        ended = self.history.stopped_early and self.batch == 0
        return self.epoch > self.settings.epochs or ended

    def run(self, checkpoints: Checkpoints | None = None) -> Course[History]:
        """Train to the end; leave the best weights in the model."""
        while not self.is_finished:
            self.progress.start_epoch(self.epoch, self.settings.epochs, len(self.steps.train))
            if self.epoch > 1 and self.batch == 0:
                self._between_epochs()
            self.progress.advance(self.bounds[self.batch - 1][1] if self.batch else 0)
            yield from self._train_epoch(checkpoints)
            yield from self._finish_epoch()
            if checkpoints is not None:
                checkpoints.after_epoch(self)
        if self.ema is not None:
            self.ema.copy_to(self.step.model, self._sample(), self._score)
        self.history.best_epoch = self.best.restore()
        if self.history.still_rising:
            patience = self.settings.patience
            self.progress.say(
                f"stopped after {patience} epochs without improvement, while validation was still rising "
                f"over the last epochs; a patience above {patience} may be better"
            )
        return self.history

    def _between_epochs(self) -> None:
        """Let callbacks act; the averages cover the weights as they were, and begin anew where a callback says so."""
        if self.ema is not None:
            self.ema.bring_up_to_date()
        begun = self.callbacks.between_epochs(self.epoch, self.step.optimizer)
        if self.ema is not None and begun:
            self.ema.restart(begun)

    def _train_epoch(self, checkpoints: Checkpoints | None) -> Course[None]:
        self.step.model.train()
        train, settings = self.steps.train, self.settings
        since, unreported = time.perf_counter(), 0
        self.steps.start_epoch(
            torch.arange(len(train), device=train.device)
            if settings.one_pass
            else train.order(seed=settings.seed, epoch=self.epoch)
        )
        while self.batch < len(self.bounds) and not self.history.stopped_early:
            coming = self.bounds[self.batch : self.batch + self._at_once]
            made = yield Wanted(self, coming)
            if not isinstance(made, Made):
                self.steps(*coming[0])
                made = Made(1, time.perf_counter() - since)
            since = time.perf_counter()
            self.seconds += made.seconds
            self.batch += made.steps
            unreported += coming[made.steps - 1][1] - coming[0][0]
            if self.batch % REPORT_EVERY == 0:
                self.progress.advance(unreported)
                unreported = 0
            if self.batch % CHECK_EVERY == 0:
                self.step.raise_if_not_finite()
            if self.callbacks.after_step(self.num_steps):
                self.history.stopped_early = self.num_steps < self.last_step
            if checkpoints is not None:
                checkpoints.after_step(self)
        self.step.raise_if_not_finite()
        self.seconds += time.perf_counter() - since
        self.progress.advance(unreported)

    @property
    def _at_once(self) -> int:
        """Steps that may be made before anything else has to happen."""
        return 1 if self.callbacks.acts_after_steps else REPORT_EVERY - self.batch % REPORT_EVERY

    def _finish_epoch(self) -> Course[None]:
        """Validate, record the epoch, and start the next."""
        lr = float(self.step.optimizer.param_groups[0]["lr"])
        metrics = yield from self._validate()
        rows = self.bounds[self.batch - 1][1]
        record = EpochRecord(
            epoch=self.epoch,
            steps=self.batch,
            train_loss=self.step.take_mean_loss(rows),
            lr=lr,
            seconds=self.seconds,
            samples_per_second=rows / self.seconds,
            valid=metrics,
        )
        self.history.epochs.append(record)
        self.progress.finish_epoch(record)
        self.callbacks.after_epoch(record.epoch, record.figures)
        self.epoch, self.batch, self.seconds = self.epoch + 1, 0, 0.0

    def _validate(self) -> Course[Metrics | None]:
        if self.valid is None and self.scores is None:
            return None
        averages: AbstractContextManager[None] = nullcontext()
        if self.ema is not None:
            averages = self.ema.applied(self._sample(), self._score)
        with averages:
            if self.scores is not None:
                metrics = self.scores.metrics()
            else:
                assert self.valid is not None
                logits = yield WantedScores(self, self.valid)
                if not isinstance(logits, Tensor):
                    logits = predict(self.step.model, self.valid, forward=self.step.forward)
                metrics = evaluate_scores(logits, self.valid).overall
            value = getattr(metrics, self.settings.monitor)
            stalled = self.best.has_stalled(self.epoch, value)
            if stalled and self.epoch < self.settings.epochs:
                self.history.still_rising = is_rising([*self._validated, self.best.sign * value])
            self.history.stopped_early = self.history.stopped_early or stalled
        return metrics

    def _sample(self) -> Iterator[Batch]:
        """Return batches of training rows for the statistics of averages: each from all of the log, or in one pass its last rows."""
        total = len(self.steps.train)
        number = max(min(total, STATISTICS_ROWS) // self.settings.batch_size, 1)
        size = min(total, STATISTICS_ROWS) // number
        rows = torch.arange(number * size, device=self.steps.train.device)
        rows = rows + total - len(rows) if self.settings.one_pass else rows * total // len(rows)
        return self.steps.batches([rows[first::number] for first in range(number)])

    def _score(self, model: nn.Module, batch: Batch) -> Tensor:
        return score(model, batch, self.step.forward)

    @property
    def _validated(self) -> list[float]:
        """The metric that picks the best epoch, so far: more is better."""
        name, records = self.settings.monitor, self.history.epochs
        return [self.best.sign * getattr(r.valid, name) for r in records if r.valid is not None]

    def state(self) -> dict[str, Any]:
        """Return everything that decides how training continues; the best weights are kept apart."""
        optimizer = self.step.optimizer.state_dict()
        if self.ema is not None and self.step.processes is not ONE:
            self.ema.bring_up_to_date()  # what lags behind differs between the processes
        return {
            "position": {"epoch": self.epoch, "batch": self.batch, "seconds": self.seconds},
            "model": dict(self.step.model.state_dict()),
            "optimizer": optimizer,
            "stateless": _stateless(optimizer),
            "step": self.step.state(),
            "ema": None if self.ema is None else self.ema.training_state(),
            "best": self.best.state(),
            "history": {
                "epochs": [dataclasses.asdict(record) for record in self.history.epochs],
                "stopped_early": self.history.stopped_early,
                "still_rising": self.history.still_rising,
            },
            "random": random_state(),
            "callbacks": self.callbacks.state_dict(),
        }

    def load(self, state: Mapping[str, Any], best_weights: Mapping[str, Tensor] | None) -> None:
        """Continue from what `state` returned, and the weights of its best epoch."""
        model, optimizer = self.step.model, self.step.optimizer
        weights = model.state_dict()
        check_tensors(weights, state["model"], "the model")
        if best_weights is not None:
            check_tensors(weights, best_weights, "the model of the best epoch")
            trained = best_weights.keys() & dict(model.named_parameters())
            sums = [float(best_weights[name].sum(dtype=torch.float64)) for name in trained]
            if not _is_finite(sums):
                raise TrainingError("the weights of the best epoch are not finite")
        fitting = fitting_state(optimizer, state["optimizer"], state.get("stateless"))
        position = from_mapping(Position, state["position"])
        records = [from_mapping(EpochRecord, record) for record in state["history"]["epochs"]]
        epochs, stopped_early = [r.epoch for r in records], state["history"]["stopped_early"]
        still_rising = state["history"].get("still_rising", False)
        has_figures = self.valid is not None or self.settings.one_pass
        is_whole = all((record.valid is not None) == has_figures for record in records)
        if epochs != list(range(1, position.epoch)) or position.batch > len(self.bounds):
            raise TrainingError(f"it has the epochs {epochs} and stands at {position}")
        are_bools = type(stopped_early) is type(still_rising) is bool
        if not is_whole or not are_bools or not _is_finite(state["history"]):
            raise TrainingError("its history is not that of a training")
        model.load_state_dict(state["model"])
        raise_if_weights_are_not_finite(model)
        optimizer.load_state_dict(fitting)
        self.step.load(state["step"])
        if self.ema is not None:
            self.ema.load_training_state(state["ema"])
        self.best.load(state["best"], best_weights)
        if "callbacks" not in state:
            state = {**state, "callbacks": _older_states(state.get("others", []), self.callbacks)}
        device = self.steps.device
        self.callbacks.load_state_dict(map_tensors(state["callbacks"], lambda t: t.to(device)))
        self.history = History(records, stopped_early=stopped_early, still_rising=still_rising)
        self.epoch, self.batch, self.seconds = dataclasses.astuple(position)
        set_random_state(state["random"])


class Best:
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
        """Record an epoch's validation metric; return whether to stop."""
        value *= self.sign
        if value > self.value:
            self.value, self.epoch = value, epoch
            self._keep(self.model.state_dict())
        if self.plateau is not None:
            self.plateau.step(value)
        waited, patience = epoch - (self.epoch or 0), self.settings.patience
        return isinstance(patience, int) and waited >= patience

    def restore(self) -> int | None:
        """Give the model the best epoch's weights and return which epoch that was."""
        if self.weights:
            self.model.load_state_dict(self.weights)
        return self.epoch

    def state(self) -> dict[str, Any]:
        """Return which epoch was the best, and where the learning rate stands."""
        plateau = None if self.plateau is None else self.plateau.state_dict()
        return {"value": self.value, "epoch": self.epoch, "plateau": plateau}

    def load(self, state: Mapping[str, Any], weights: Mapping[str, Tensor] | None) -> None:
        """Continue from a state, and the weights of its epoch."""
        value, epoch = state["value"], state["epoch"]
        is_epoch = epoch is None or (type(epoch) is int and math.isfinite(value))
        if type(value) is not float or not is_epoch or (epoch is None) != (weights is None):
            raise TrainingError(f"the best epoch cannot be {epoch!r} with {value!r}")
        self.value, self.epoch = value, epoch
        if self.plateau is not None and state["plateau"] is not None:
            # what changes; the rest are settings, and torch would replace any attribute
            now, there = self.plateau.state_dict(), state["plateau"]
            moving = {name: there[name] for name in PLATEAU}
            if (
                any(type(moving[name]) is not type(now[name]) for name in PLATEAU)
                or moving["best"] != self.value
            ):
                raise TrainingError(f"the learning rate's plateau cannot be {moving}")
            self.plateau.load_state_dict(moving)
        if weights is not None:
            like = self.model.state_dict()
            self._keep({name: weights[name].to(like[name].device) for name in like})

    def _keep(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights, over the last copy where there is one: a second would double the memory."""
        for name, weight in weights.items():
            if name in self.weights:
                self.weights[name].copy_(weight)
            else:
                self.weights[name] = weight.detach().clone()


def _is_finite(tree: Any) -> bool:
    """Return whether all numbers of nested values are finite."""
    if isinstance(tree, Mapping | list):
        return all(map(_is_finite, tree.values() if isinstance(tree, Mapping) else tree))
    return not isinstance(tree, float) or math.isfinite(tree)


def _stateless(state: Mapping[str, Any]) -> list[int] | None:
    """Return the numbers of the parameters that an optimizer's state lacks: those that had no gradient yet."""
    if state.keys() != {"state", "param_groups"}:
        return None
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return [number for number in numbers if number not in state["state"]]


def _older_states(states: Sequence[Mapping[str, Any]], callbacks: Callbacks) -> dict[str, Any]:
    """Return the states of callbacks from a checkpoint that holds them as a list of at most one.

    Its entry is the states by name, or the state of one callback. A callback without state had no entry.
    """
    now = callbacks.state_dict()
    found = {name: part for name, part in now.items() if not part["state"]}
    if not states:
        return found
    [state] = states
    if all(isinstance(p, Mapping) and p.keys() == {"settings", "state"} for p in state.values()):
        return found | dict(state)
    [*names] = [name for name in now if name not in found] or ["a callback"]
    return found | {names[0]: {"settings": callbacks.settings.get(names[0], ""), "state": state}}


def random_state() -> dict[str, Any]:
    """Return the states of the global generators: dictionaries of numbers and uint8 tensors."""
    version, (*words, position), gauss = random.getstate()
    python = {"version": version, **_twister(words, position, gauss)}
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  # libraries still draw from it
    if numpy["bit_generator"] != "MT19937":
        raise TrainingError(
            f"numpy's global generator is {numpy['bit_generator']}, whose state cannot be stored; use numpy's "
            "own MT19937"
        )
    words, position = numpy["state"]["key"], int(numpy["state"]["pos"])
    gauss = float(numpy["gauss"]) if numpy["has_gauss"] else None
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": python,
        "numpy": _twister(words, position, gauss),
    }
    if torch.cuda.is_initialized():
        generators = torch.cuda.get_rng_state_all()
        state["cuda"] = {str(device): generator for device, generator in enumerate(generators)}
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; CUDA devices that are not there are left out."""
    before = torch.get_rng_state()
    try:
        # everything is read before anything is set: half a state would belong to neither run
        words, position, gauss = _read_twister(state["python"])
        python = (state["python"]["version"], (*words.tolist(), position), gauss)
        words, position, gauss = _read_twister(state["numpy"])
        cuda = {int(device): _bytes(value) for device, value in state.get("cuda", {}).items()}
        torch.set_rng_state(_bytes(state["torch"]))
        random.setstate(python)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        torch.set_rng_state(before)
        raise TrainingError(
            f"the random state is damaged: {error}; start from another checkpoint"
        ) from None
    numpy = {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": position},
        "has_gauss": int(gauss is not None),
        "gauss": gauss or 0.0,
    }
    np.random.set_state(numpy)  # noqa: NPY002  # the global state is what is restored
    for device, value in cuda.items():
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, device)


def _twister(words: Any, position: int, gauss: float | None) -> dict[str, Any]:
    as_bytes = torch.from_numpy(np.array(words, dtype="<u4").view(np.uint8))
    return {"words": as_bytes, "position": position, "gauss": gauss}


def _read_twister(state: Mapping[str, Any]) -> tuple[Any, int, float | None]:
    words, position, gauss = _bytes(state["words"]), state["position"], state["gauss"]
    if words.shape != (4 * WORDS,):
        raise ValueError(f"a generator has {4 * WORDS} bytes, got {tuple(words.shape)}")
    # numpy does not check the position, and would read beyond its words
    if type(position) is not int or not 0 <= position <= WORDS:
        raise ValueError(f"a position must lie in [0, {WORDS}], got {position!r}")
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError(f"a stored draw must be a number, got {gauss!r}")
    return words.numpy().view("<u4").astype(np.uint32), position, gauss


def _bytes(values: object) -> Tensor:
    if not isinstance(values, Tensor) or values.dtype != torch.uint8:
        raise TypeError("a generator's state must be a tensor of bytes")
    return values.cpu().contiguous()
