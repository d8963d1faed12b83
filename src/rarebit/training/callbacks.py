"""What the methods of a run do in its training, as one thing: attached, asked in each step, and taken off.

    with taking_part(methods, model, data) as part:
        fit(model, ..., backward=part.backward, after_step=part.after_step)
        part.finish()                 the model has the weights of its best epoch

A method takes part by its `attach` (`callbacks.py`). Its state is in the checkpoints of the run,
with the settings it was made by: another transfer does not go on with the state of this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rarebit.callbacks import Attached, TrainingData
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import CheckpointError, SettingsError
from rarebit.methods import method_text
from rarebit.pruning._prune import Trained
from rarebit.tables.table import Method, method_name
from rarebit.training.fit import fit
from rarebit.training.metrics import evaluate
from rarebit.training.progress import Progress
from rarebit.training.run_settings import PreparedLog, RunSettings
from rarebit.training.step import Backward

__all__ = [
    "TakesPart",
    "TakingPart",
    "fit_with_methods",
    "measured",
    "taking_part",
    "training_data",
]


@runtime_checkable
class TakesPart(Protocol):
    """A method that takes part in training; one that changes tables as well may return None."""

    def attach(self, model: nn.Module, data: TrainingData) -> Attached | None:
        """Take part in the training of a model that is on its device, with all methods applied."""


class TakingPart:
    """All that takes part in one training, by the names of the methods."""

    def __init__(self) -> None:
        self.attached: dict[str, Attached] = {}
        self.settings: dict[str, str] = {}
        """Each method as people type it."""

    def add(self, method: Method, attached: Attached) -> None:
        """Let one more take part."""
        name = method_name(method)
        if attached.backward is not None and self._with_backward:
            raise SettingsError(
                f"{self._with_backward[0]} and {name} both turn the loss into gradients in a way of their "
                "own, and there is one way at a time; leave one of them out"
            )
        self.attached[name] = attached
        self.settings[name] = method_text(method)

    @property
    def backward(self) -> Backward | None:
        """What turns the loss into gradients, where one of them has a way of its own."""
        return self._backward if self._with_backward else None

    def after_step(self, num_steps: int) -> None:
        """Let all of them look at the model between two steps."""
        for attached in self.attached.values():
            attached.after_step(num_steps)

    def finish(self) -> bool:
        """Let all of them have the last word; return whether any has one, so that weights may be others."""
        for attached in self.attached.values():
            attached.finish()
        return any(type(each).finish is not Attached.finish for each in self.attached.values())

    def reports(self) -> dict[str, Any]:
        """Return what there is to tell, by method."""
        told = {name: attached.report() for name, attached in self.attached.items()}
        return {name: report for name, report in told.items() if report}

    def state_dict(self) -> dict[str, Any]:
        """Return what the coming steps depend on, and by which settings it came to be."""
        return {
            name: {"settings": self.settings[name], "state": attached.state_dict()}
            for name, attached in self.attached.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned for the same methods."""
        was = {name: part["settings"] for name, part in state.items()}
        if was != self.settings:
            raise CheckpointError(
                f"the checkpoint is of a training with {_listed(was)}, and now there is "
                f"{_listed(self.settings)}; use the same methods, or choose another folder"
            )
        for name, attached in self.attached.items():
            attached.load_state_dict(state[name]["state"])

    @property
    def _with_backward(self) -> list[str]:
        return [name for name, each in self.attached.items() if each.backward is not None]

    def _backward(self, loss: Tensor) -> object:
        # a method of this object: its state is how fit finds what to write down
        backward = self.attached[self._with_backward[0]].backward
        assert backward is not None
        return backward(loss)


def fit_with_methods(
    model: nn.Module,
    settings: RunSettings,
    train: Dataset,
    valid: Dataset | None,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | bool = True,
) -> Trained:
    """Train a model that has the tables of its methods, with those methods that take part in training.

    >>> from rarebit.models.fm import FM
    >>> train = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> run = RunSettings.from_mapping({"training": {"epochs": 2}})
    >>> len(fit_with_methods(FM(train.schema, dim=4), run, train, None, progress=False).history.epochs)
    2
    """
    with taking_part(settings.methods, model, training_data(settings, train, valid)) as part:
        if part.attached:  # what training draws does not depend on what they drew
            torch.manual_seed(settings.training.seed)
        history = fit(
            model,
            train,
            valid,
            settings=settings.training,
            backward=part.backward,
            after_step=part.after_step if part.attached else None,
            folder=folder,
            resume=resume,
            progress=progress,
        )
        is_changed = part.finish()
        history.reports = part.reports()
    trained = Trained(model, history)
    return measured(trained, valid) if is_changed else trained


def measured(trained: Trained, valid: Dataset | None, *, epoch: int | None = None) -> Trained:
    """Return a model that is no longer as an epoch left it, with what it is worth on validation rows now."""
    model, history = trained
    epoch = epoch or history.best_epoch
    if valid is None or epoch is None:
        return Trained(model, replace(history, best_epoch=None))
    records = list(history.epochs)
    records[epoch - 1] = replace(records[epoch - 1], valid=evaluate(model, valid).overall)
    return Trained(model, replace(history, epochs=records, best_epoch=epoch))


@contextmanager
def taking_part(
    methods: Sequence[Method], model: nn.Module, data: TrainingData
) -> Iterator[TakingPart]:
    """Attach the methods that take part in training, and take them off again however it ends.

    >>> from rarebit.data.dataset import Dataset
    >>> train = Dataset.from_columns({"user": [0, 1]}, label=[0, 1])
    >>> data = TrainingData(train=train, valid=None, batch_size=2, steps_per_epoch=1, seed=0)
    >>> with taking_part([], nn.Embedding(2, 4), data) as part:
    ...     part.backward, part.reports()
    (None, {})
    """
    part = TakingPart()
    with ExitStack() as stack:
        for method in methods:
            attached = method.attach(model, data) if isinstance(method, TakesPart) else None
            if attached is not None:
                stack.callback(attached.close)
                part.add(method, attached)
        yield part


def training_data(settings: RunSettings, train: Dataset, valid: Dataset | None) -> TrainingData:
    """Return what methods may know of the training of a run.

    >>> train = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    >>> training_data(RunSettings.from_mapping({"training": {"batch_size": 2}}), train, None).steps_per_epoch
    2
    """
    batch_size = settings.training.batch_size
    data = TrainingData(
        train=train,
        valid=valid,
        batch_size=batch_size,
        steps_per_epoch=len(batch_bounds(len(train), batch_size)),
        seed=settings.training.seed,
    )
    log = settings.data
    if isinstance(log, PreparedLog) and log.checksum:
        return replace(data, folder=Path(log.folder), checksum=log.checksum)
    return data


def _listed(settings: Mapping[str, str]) -> str:
    return " and ".join(settings.values()) or "none of its methods taking part"
