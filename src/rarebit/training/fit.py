"""Train a model: check everything first, then run the loop, and leave nothing behind."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.callbacks import Callback, Callbacks, TrainingData, TrainingMethod, started
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import CheckpointError, DataError, NotFiniteError, TrainingError
from rarebit.row_gradients.lookups import is_watched
from rarebit.settings import require, updated
from rarebit.tables.apply import check
from rarebit.tables.rows import row_gradients_kept
from rarebit.training.checkpoints import CheckpointFolder, Checkpoints
from rarebit.training.ema import EMA
from rarebit.training.identity import describe_run
from rarebit.training.loop import History, LineProgress, NoKeeper, Progress, Silence, TrainingLoop
from rarebit.training.memory import estimate_memory
from rarebit.training.metrics import Forward, check_labels, check_schema, device_of, evaluate
from rarebit.training.not_finite import find_source
from rarebit.training.optimizers import Kind
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.settings import Training
from rarebit.training.step import (
    Backward,
    Loss,
    RecordedSteps,
    Steps,
    TrainingStep,
    why_not_recorded,
)
from rarebit.training.stopping import stop_requests

__all__ = ["History", "fit", "fit_started", "measured", "training_data"]

OPTIMIZER_SETTINGS = (
    "lr",
    "tables",
    "table_lr",
    "weight_decay",
    "table_weight_decay",
    "threshold_weight_decay",
    "decoupled",
    "momentum",
)
"""What only an optimizer that `fit` builds listens to."""


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
    callbacks: Sequence[Callback | TrainingMethod] = (),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
    **overrides: Any,
) -> History:
    """Train a model in place, on the device it is on, and return its history.

    Any setting of `Training` can be given by name. With validation data the weights of the best epoch are kept.
    `forward=lambda model, batch: ...` calls a model that does not take a batch; `backward=rows.backward` trains with
    row gradients. `callbacks` act around training (`Callback`, or the settings of a `TrainingMethod`), and their state
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
        _refuse_unused(overrides)
    settings = updated(settings, overrides)
    require(not resume or folder is not None, "resume=True needs the folder of the checkpoints")
    _check_data(model, train, valid, settings, loss)
    with started(callbacks, model, training_data(settings, train, valid)) as group:
        return fit_started(
            model,
            train,
            valid,
            group if backward is None else _with_backward(group, backward),
            settings=settings,
            optimizer=optimizer,
            loss=loss,
            forward=forward,
            folder=folder,
            resume=resume,
            progress=progress,
        )


def training_data(settings: Training, train: Dataset, valid: Dataset | None) -> TrainingData:
    """Return what callbacks may know about a training."""
    return TrainingData(
        train=train,
        valid=valid,
        batch_size=settings.batch_size,
        steps_per_epoch=len(batch_bounds(len(train), settings.batch_size)),
        seed=settings.seed,
    )


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
) -> History:
    """Train with callbacks that have started, and let them end."""
    tell = progress if not isinstance(progress, bool) else LineProgress() if progress else Silence()
    _check_backward(model, callbacks.backward)
    estimate = estimate_memory(
        model,
        train,
        valid,
        settings=settings,
        optimizer=optimizer,
        checkpoints=folder is not None,
    )
    from_host = not estimate.fits and estimate.with_training_data_elsewhere().fits
    if from_host:
        estimate = estimate.with_training_data_elsewhere()
    tell.say(estimate.line())
    estimate.check()
    if from_host:
        tell.say(f"the training data does not fit on {estimate.device}: copied batch by batch")
    with row_gradients_kept(model):
        optimizer = optimizer or _optimizer(model, settings, callbacks)
        check(model, optimizer)
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
            say=tell.say,
        )
        try:
            with _averaging(step, settings) as ema:
                steps = _steps(step, train, settings, tell)
                loop = TrainingLoop(steps, valid, settings, tell, ema=ema, callbacks=callbacks)
                if folder is None:
                    history = loop.run(NoKeeper())
                else:
                    history = _train_in(CheckpointFolder(folder), loop, resume=resume)
        finally:
            step.release()
    callbacks.end()
    history.reports = callbacks.report()
    return measured(model, history, valid) if callbacks.changes_model_at_end else history


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


def _with_backward(callbacks: Callbacks, backward: Backward) -> Callbacks:
    """Add the backward of a user's own; where it is a method of an object with a state, that is checkpointed."""
    one = _Backward(backward)
    return Callbacks(
        {**callbacks.callbacks, one.name: one}, {**callbacks.settings, one.name: one.name}
    )


class _Backward(Callback):
    """A function that turns the loss into gradients, and the state of its owner."""

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


def _train_in(folder: CheckpointFolder, loop: TrainingLoop, *, resume: bool) -> History:
    """Train with checkpoints in a folder that is this process's alone."""
    train, valid, settings = loop.steps.train, loop.valid, loop.settings
    with folder.locked(), stop_requests() as stop:
        checkpoints = Checkpoints(
            folder,
            describe_run(loop.step.model, train, valid, settings),
            stop,
            minutes=settings.checkpoint_minutes,
            say=loop.tell.say,
        )
        try:
            if not resume and folder.names():
                raise CheckpointError(
                    f"{str(folder.folder)!r} holds the checkpoints of a run; go on with it by "
                    "resume=True, or choose another folder"
                )
            if not (resume and checkpoints.resume(loop)):
                checkpoints.save(loop)  # to go back to, should the first steps fail
            return loop.run(checkpoints)
        except NotFiniteError as error:
            raise _explained(error, checkpoints, loop) from None
        finally:
            checkpoints.close()


def _explained(error: NotFiniteError, checkpoints: Checkpoints, loop: TrainingLoop) -> Exception:
    """Return the error with where the bad number came from, found from the last checkpoint on."""
    checkpoints.wait()
    loop.tell.say(f"{error}; going back to the last checkpoint to find where it began")
    checkpoints.say = Silence().say
    checkpoints.resume(loop)
    return NotFiniteError(
        f"{find_source(loop)}. The last good checkpoint is in {str(checkpoints.folder.folder)!r}; "
        "lower the learning rate, clip gradients, or look for extreme numbers in the data"
    )


def _steps(step: TrainingStep, train: Dataset, settings: Training, tell: Progress) -> Steps:
    """Return how to run the steps: recorded on a GPU, one by one elsewhere."""
    if train.device.type != "cuda" or not settings.cuda_graph:
        return Steps(step, train)
    reason = why_not_recorded(step.optimizer)
    if reason is not None:
        tell.say(f"the step is not recorded as a CUDA graph: {reason}")
        return Steps(step, train)
    return RecordedSteps(step, train, settings.batch_size, tell.say)


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


def _check_backward(model: nn.Module, backward: Backward | None) -> None:
    """Raise when row gradients are attached that a plain backward would leave without an answer."""
    if backward is None and any(is_watched(module) for module in model.modules()):
        raise TrainingError(
            "the model has row gradients, which need their own backward: fit(..., "
            "backward=rows.backward), or rows.close() first"
        )


def _refuse_unused(overrides: Mapping[str, Any]) -> None:
    """Raise for settings that an optimizer of the user's own would not listen to."""
    unused = [name for name in overrides if name in OPTIMIZER_SETTINGS]
    require(
        not unused,
        f"{', '.join(unused)} would not be used: the optimizer given has its own. Set it there, or "
        "pass the optimizer's kind, such as optimizer='adam'",
    )


def _optimizer(model: nn.Module, settings: Training, callbacks: Callbacks) -> Optimizer:
    return build_optimizer(
        model,
        change_groups=callbacks.parameter_groups,
        kind=settings.optimizer,
        lr=settings.lr,
        tables=settings.tables,
        table_lr=settings.table_lr,
        weight_decay=settings.weight_decay,
        table_weight_decay=settings.table_weight_decay,
        threshold_weight_decay=settings.threshold_weight_decay,
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
