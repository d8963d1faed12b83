"""Train a model: check everything first, then run the loop, and leave nothing behind."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.data.dataset import Dataset
from rarebit.errors import CheckpointError, DataError, NotFiniteError, TrainingError
from rarebit.row_gradients.lookups import is_watched
from rarebit.settings import require, updated
from rarebit.tables.optimizer_state import check
from rarebit.tables.sparse import row_gradients_kept
from rarebit.training.checkpoints import CheckpointFolder, Checkpoints
from rarebit.training.ema import EMA
from rarebit.training.identity import describe_run
from rarebit.training.loop import AfterStep, History, NoKeeper, Stateful, TrainingLoop
from rarebit.training.memory import estimate_memory
from rarebit.training.metrics import Forward, check_labels, check_schema, device_of
from rarebit.training.not_finite import find_source
from rarebit.training.optimizers import Kind
from rarebit.training.optimizers import optimizer as build_optimizer
from rarebit.training.progress import LineProgress, Progress, Silence
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

__all__ = ["History", "fit"]

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
    after_step: AfterStep | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
    **overrides: Any,
) -> History:
    """Train a model in place, on the device it is on, and return what happened.

    Any setting of `Training` can be given by name. With validation data the best epoch's weights
    are kept. `forward=lambda model, batch: ...` calls a model that does not take a batch;
    `backward=rows.backward` trains with row gradients. `after_step` is called between two steps with how
    many were made since the start, and ends training by returning true. With a `folder`, checkpoints are
    written there, Ctrl-C and SIGTERM stop after the step with nothing lost, and `resume=True` goes on from
    the newest one, to the same bits as without the break. Where `backward` or `after_step` is a method of
    an object with `state_dict` and `load_state_dict`, that state is in the checkpoints, too; anything else
    they keep beyond the model is their own affair.

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
    tell = progress if not isinstance(progress, bool) else LineProgress() if progress else Silence()
    _check_data(model, train, valid, settings, loss)
    _check_backward(model, backward)
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
        optimizer = optimizer or _optimizer(model, settings)
        check(model, optimizer)
        device = device_of(model)
        train = train if from_host else train.to(device)
        valid = None if valid is None else valid.to(device)
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
            with _averaging(step, settings) as ema:
                steps = _steps(step, train, settings, tell)
                loop = TrainingLoop(
                    steps,
                    valid,
                    settings,
                    tell,
                    ema=ema,
                    after_step=after_step,
                    others=_with_state(backward, after_step),
                )
                if folder is None:
                    return loop.run(NoKeeper())
                return _train_in(CheckpointFolder(folder), loop, resume=resume)
        finally:
            step.release()


def _with_state(*given: Callable[..., object] | None) -> list[Stateful]:
    """Return the objects that functions are methods of and that have a state, each once."""
    owners = [getattr(function, "__self__", None) for function in given]
    # a model is written down by itself
    found = [x for x in owners if isinstance(x, Stateful) and not isinstance(x, nn.Module)]
    return list({id(owner): owner for owner in found}.values())


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


def _optimizer(model: nn.Module, settings: Training) -> Optimizer:
    return build_optimizer(
        model,
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
