"""Seam 4: what acts around training, such as forgetting, transfer, pruning schedules and group stopping.

    start(model, data)                 before the first step: look at the model and the training data
    parameter_groups(groups)           change the groups of the optimizer that `fit` builds
    backward(loss)                     turn the loss into gradients in place of `loss.backward()`
    after_step(num_steps)              between two steps; return True to end training
    between_epochs(epoch, optimizer)   after the validation of an epoch, before the first step of the next one; return
                                       the parameters whose average begins anew
    end()                              training is over, and the model has the weights of its best epoch
    state_dict(), load_state_dict()    part of every checkpoint
    report()                           plain values for the result of the run
    close()                            leave the model as it was found, also after an error

Subclass `Callback` and pass an instance to `fit(callbacks=[...])`, or call the same hooks in your own loop.
A `TrainingMethod` is a callback with settings: named among the methods of a run, as `mlet+harmless-transfer`, it is
compared, tuned and resumed like the others.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.data.dataset import Dataset
from rarebit.errors import CheckpointError, SettingsError
from rarebit.technique import Rank, Technique, technique_text

__all__ = ["Average", "Callback", "TrainingData", "TrainingMethod", "started"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a callback may know about the training it acts in."""

    train: Dataset
    valid: Dataset | None
    batch_size: int
    steps_per_epoch: int
    seed: int
    one_pass: bool = False
    """Whether training is one pass over rows in order of time: what comes later must not be used."""
    folder: Path | None = None
    """The folder of the prepared log, where results computed from its rows may be kept for the next run."""
    checksum: str = ""
    """Identifies the log; empty where that is unknown."""


class Average(NamedTuple):
    """An average of the weights, which is evaluated and kept."""

    decay: float
    leave_out: tuple[nn.Parameter, ...] = ()
    """Parameters that are not averaged."""
    leave_out_rows: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    """Parameters with indices of rows that are not averaged."""


class Callback:
    """Acts around training; every hook may be left out.

    >>> class PrintSteps(Callback):
    ...     def after_step(self, num_steps):
    ...         print(f"step {num_steps}")
    >>> from rarebit import Dataset, fit
    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> history = fit(FM(data.schema, dim=4), data, epochs=2, callbacks=[PrintSteps()], progress=False)
    step 1
    step 2
    """

    backward: Callable[[Tensor], object] | None = None
    """Turns the loss into gradients, in place of `loss.backward()`; known once `start` was called."""
    average: "Average | None" = None
    """How to average weights where the settings do not say; known once `start` was called."""
    note: str = ""
    """A line for whoever trains; known once `start` was called."""

    @property
    def name(self) -> str:
        """The name and settings that identify it in checkpoints and reports."""
        return type(self).__name__

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Begin: the model is on its device, with all methods applied."""

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups for the optimizer that `fit` builds."""
        return groups

    def after_step(self, num_steps: int) -> bool | None:
        """Act between two steps; `num_steps` were made since training began. True ends training."""

    def after_epoch(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Hear the figures of an epoch, from 1 on: training loss, learning rate, speed, and those of validation."""

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> Collection[nn.Parameter] | None:
        """Act before the first step of an epoch, from the second one on.

        Return the parameters whose average, where weights are averaged, shall not remember what they were before.
        """

    def end(self) -> None:
        """Act after training: the model has the weights of its best epoch."""

    def report(self) -> dict[str, Any]:
        """Return what the result of the run should say, as plain values."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything the coming steps depend on that is not in the model: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""

    def close(self) -> None:
        """Detach from the model, also after an error."""


class LogTo(Callback):
    """Sends the figures of each epoch to your own tools: a TensorBoard writer, `mlflow`, a W&B run, or a function.

    A function gets name, value and epoch. Nothing is imported here.

    >>> from rarebit import Dataset, fit
    >>> from rarebit.models.fm import FM
    >>> data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> seen = []
    >>> log = LogTo(lambda name, value, epoch: seen.append((name, epoch)))
    >>> history = fit(FM(data.schema, dim=4), data, data, epochs=1, callbacks=[log], progress=False)
    >>> seen
    [('train_loss', 1), ('lr', 1), ('samples_per_second', 1), ('valid_auc', 1), ('valid_logloss', 1)]
    """

    def __init__(self, target: Any, *, prefix: str = "") -> None:
        self.prefix = prefix
        """What the names of figures begin with, such as "train/"."""
        self.log: Callable[[str, float, int], object]
        if hasattr(target, "add_scalar"):  # torch.utils.tensorboard.SummaryWriter
            self.log = target.add_scalar
        elif hasattr(target, "log_metric"):  # the module mlflow
            self.log = lambda name, value, epoch: target.log_metric(name, value, step=epoch)
        elif hasattr(target, "log"):  # a run of wandb
            self.log = lambda name, value, epoch: target.log({name: value}, step=epoch)
        elif callable(target):
            self.log = target
        else:
            raise SettingsError(
                "LogTo takes a TensorBoard SummaryWriter, the module mlflow, a wandb run, or a function of name, value and "
                f"epoch; got {type(target).__name__}"
            )

    def after_epoch(self, epoch: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.log(f"{self.prefix}{name}", value, epoch)


class TrainingMethod(Technique):
    """Settings of a callback that can be named among the methods of a run."""

    composition_rank: ClassVar[Rank] = Rank.TRAINING
    training_only: ClassVar[bool] = True

    @abstractmethod
    def callback(self) -> Callback:
        """Return a new callback with these settings."""

    def start(self, model: nn.Module, data: TrainingData) -> Callback:
        """Return a callback that has started: for your own loop."""
        callback = self.callback()
        callback.start(model, data)
        return callback


class Callbacks(Callback):
    """Several callbacks as one."""

    def __init__(
        self, callbacks: Mapping[str, Callback], settings: Mapping[str, str], patience: int = 0
    ) -> None:
        self.callbacks = dict(callbacks)
        self.settings = dict(settings)
        """Name and settings of each, which a checkpoint must agree with."""
        self.patience = patience
        """The patience that the techniques among them ask for."""
        self.notes = [one.note for one in self.callbacks.values() if one.note]
        averages = [one.average for one in self.callbacks.values() if one.average is not None]
        self.average = averages[0] if averages else None
        with_backward = [name for name, one in self.callbacks.items() if one.backward is not None]
        if len(with_backward) > 1:
            raise SettingsError(
                f"{' and '.join(with_backward)} both turn the loss into gradients; use one of them"
            )
        if with_backward:
            self.backward = self.callbacks[with_backward[0]].backward

    def joined(self, callback: Callback) -> "Callbacks":
        """Return these and another one that has started."""
        name = callback.name
        return Callbacks(
            {**self.callbacks, name: callback}, {**self.settings, name: name}, self.patience
        )

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for callback in self.callbacks.values():
            groups = callback.parameter_groups(groups)
        return groups

    @property
    def acts_after_steps(self) -> bool:
        """Whether anything happens between two steps."""
        return any(
            type(one).after_step is not Callback.after_step for one in self.callbacks.values()
        )

    def after_step(self, num_steps: int) -> bool:
        wanted = [callback.after_step(num_steps) for callback in self.callbacks.values()]  # all act
        return any(wanted)

    def after_epoch(self, epoch: int, figures: Mapping[str, float]) -> None:
        for callback in self.callbacks.values():
            callback.after_epoch(epoch, figures)

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> list[nn.Parameter]:
        begun = [one.between_epochs(epoch, optimizer) for one in self.callbacks.values()]  # all act
        return [parameter for parameters in begun for parameter in parameters or ()]

    def end(self) -> None:
        for callback in self.callbacks.values():
            callback.end()

    @property
    def changes_model_at_end(self) -> bool:
        return any(type(one).end is not Callback.end for one in self.callbacks.values())

    def report(self) -> dict[str, Any]:
        reports = {name: callback.report() for name, callback in self.callbacks.items()}
        return {name: report for name, report in reports.items() if report}

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"settings": self.settings[name], "state": callback.state_dict()}
            for name, callback in self.callbacks.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        was = {name: part["settings"] for name, part in state.items()}
        if was != self.settings:
            raise CheckpointError(
                f"the checkpoint has {_listed(was)}, and this training has {_listed(self.settings)}; use the "
                "same methods and callbacks, or another folder"
            )
        for name, callback in self.callbacks.items():
            callback.load_state_dict(state[name]["state"])


@contextmanager
def started(
    callbacks: Sequence[Callback | Technique], model: nn.Module, data: TrainingData
) -> Iterator[Callbacks]:
    """Start callbacks, and those of techniques that have one; close them however training ends.

    Random numbers that they draw do not change those of training.
    """
    found: dict[str, Callback] = {}
    settings: dict[str, str] = {}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        with torch.random.fork_rng(devices=list(devices)):
            for one in callbacks:
                callback = one.callback() if isinstance(one, Technique) else one
                if callback is None:
                    continue
                text = technique_text(one) if isinstance(one, Technique) else callback.name
                name = text.partition(":")[0]
                if name in found:
                    raise SettingsError(f"{name} is there twice; use one")
                callback.start(model, data)
                stack.callback(callback.close)
                found[name], settings[name] = callback, text
        asked = [one.patience for one in callbacks if isinstance(one, Technique)]
        yield Callbacks(found, settings, max(asked, default=0))


def _listed(settings: Mapping[str, str]) -> str:
    return " and ".join(settings.values()) or "no callbacks"
