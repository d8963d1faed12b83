"""The training loop, which can stop between any two steps and resume to the same bits.

    state()        everything that decides how training continues, as tensors and plain values
    load(state)    continue from there: the same weights to the last bit as without the interruption

The order of the rows needs no saving: seed and epoch decide it. Times are measured, so they are the only thing that differs
after a resume. `random_state` covers the global generators of torch (CPU and CUDA), Python and numpy; their words are stored
as uint8 tensors, so that a file of tensors holds them bit by bit.
"""

import dataclasses
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rarebit.callbacks import Callbacks
from rarebit.data.dataset import Dataset
from rarebit.data.order import batch_bounds
from rarebit.errors import TrainingError
from rarebit.training.ema import EMA
from rarebit.training.metrics import Metrics, evaluate
from rarebit.training.settings import Training
from rarebit.training.step import Steps, TrainingStep

__all__ = [
    "Best",
    "EpochRecord",
    "History",
    "Keeper",
    "LineProgress",
    "NoKeeper",
    "Progress",
    "Silence",
    "TrainingLoop",
    "random_state",
    "set_random_state",
]


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


WORDS = 624
"""32-bit words of a Mersenne twister, which Python and numpy share."""


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
    """Restore what `random_state` returned; CUDA devices that are not there are left out.

    >>> set_random_state({})
    Traceback (most recent call last):
    rarebit.errors.TrainingError: the random state is damaged: 'python'; start from another checkpoint
    """
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


TELL_EVERY = 10
"""Steps between two calls of the progress bar."""
LOOK_EVERY = 100
"""Steps between two looks at whether the loss is still finite: a look waits for the device."""


@dataclass
class History:
    """The epochs of a training, and which epoch's weights the model has."""

    epochs: list[EpochRecord] = field(default_factory=list)
    best_epoch: int | None = None
    """The epoch whose weights the model has, from 1; None without validation data."""
    stopped_early: bool = False
    """Whether training ended before its last step."""
    reports: dict[str, Any] = field(default_factory=dict)
    """The reports of callbacks, by name."""

    @property
    def samples_per_second(self) -> float:
        """Median over the epochs, training steps only."""
        speeds = sorted(record.samples_per_second for record in self.epochs)
        return speeds[len(speeds) // 2]


class Keeper(Protocol):
    """Decides between steps whether to write a checkpoint, or to stop."""

    def after_step(self, loop: "TrainingLoop") -> None:
        """Act after a step."""

    def after_epoch(self, loop: "TrainingLoop") -> None:
        """Act after an epoch."""


class NoKeeper:
    """Lets the loop run."""

    def after_step(self, loop: "TrainingLoop") -> None:
        """Do nothing."""

    def after_epoch(self, loop: "TrainingLoop") -> None:
        """Do nothing."""


class TrainingLoop:
    """Epoch after epoch: shuffle, step, validate, remember the best."""

    def __init__(
        self,
        steps: Steps,
        valid: Dataset | None,
        settings: Training,
        tell: Progress,
        *,
        ema: EMA | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.steps, self.valid, self.settings, self.tell = steps, valid, settings, tell
        self.ema, self.callbacks = ema, callbacks or Callbacks({}, {})
        self.bounds = batch_bounds(len(steps.train), settings.batch_size)
        self.best = Best(self.step.model, self.step.optimizer, settings)
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
        """Steps made since the start of training, those before a break included."""
        return (self.epoch - 1) * len(self.bounds) + self.batch

    @property
    def last_step(self) -> int:
        """Steps that training makes at most."""
        return self.settings.epochs * len(self.bounds)

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to train."""
        # an epoch that was ended on the way is still to be closed
        ended = self.history.stopped_early and self.batch == 0
        return self.epoch > self.settings.epochs or ended

    def run(self, keeper: Keeper) -> History:
        """Train to the end; leave the best weights in the model."""
        while not self.is_finished:
            self.tell.start_epoch(self.epoch, self.settings.epochs, len(self.steps.train))
            if self.epoch > 1 and self.batch == 0:
                self.callbacks.between_epochs(self.epoch, self.step.optimizer)
            self.tell.advance(self.bounds[self.batch - 1][1] if self.batch else 0)
            self._train_epoch(keeper)
            self._finish_epoch()
            keeper.after_epoch(self)
        if self.ema is not None:
            self.ema.copy_to(self.step.model)
        self.history.best_epoch = self.best.restore()
        return self.history

    def _train_epoch(self, keeper: Keeper) -> None:
        self.step.model.train()
        train, settings = self.steps.train, self.settings
        begin, before, untold = time.perf_counter(), self.seconds, 0
        self.steps.start_epoch(train.order(seed=settings.seed, epoch=self.epoch))
        while self.batch < len(self.bounds) and not self.history.stopped_early:
            start, stop = self.bounds[self.batch]
            self.steps(start, stop)
            self.batch += 1
            untold += stop - start
            if self.batch % TELL_EVERY == 0:
                self.tell.advance(untold)
                untold = 0
            if self.batch % LOOK_EVERY == 0:
                self.step.raise_if_not_finite()
            if self.callbacks.after_step(self.num_steps):
                self.history.stopped_early = self.num_steps < self.last_step
            self.seconds = before + time.perf_counter() - begin
            keeper.after_step(self)
        self.step.raise_if_not_finite()
        self.seconds = before + time.perf_counter() - begin
        self.tell.advance(untold)

    def _finish_epoch(self) -> None:
        """Validate, record the epoch, and move on to the next."""
        lr = float(self.step.optimizer.param_groups[0]["lr"])
        metrics = self._validate()
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
        self.tell.finish_epoch(record)
        self.epoch, self.batch, self.seconds = self.epoch + 1, 0, 0.0

    def _validate(self) -> Metrics | None:
        if self.valid is None:
            return None
        with nullcontext() if self.ema is None else self.ema.applied():
            metrics = evaluate(self.step.model, self.valid, forward=self.step.forward).overall
            value = getattr(metrics, self.settings.monitor)
            stalled = self.best.has_stalled(self.epoch, value)
            self.history.stopped_early = self.history.stopped_early or stalled
        return metrics

    def state(self) -> dict[str, Any]:
        """Return everything that decides how training continues; the best weights are kept apart."""
        return {
            "position": {"epoch": self.epoch, "batch": self.batch, "seconds": self.seconds},
            "model": dict(self.step.model.state_dict()),
            "optimizer": self.step.optimizer.state_dict(),
            "step": self.step.state(),
            "ema": None if self.ema is None else self.ema.training_state(),
            "best": self.best.state(),
            "history": {
                "epochs": [dataclasses.asdict(record) for record in self.history.epochs],
                "stopped_early": self.history.stopped_early,
            },
            "random": random_state(),
            "callbacks": self.callbacks.state_dict(),
        }

    def load(self, state: Mapping[str, Any], best_weights: Mapping[str, Tensor] | None) -> None:
        """Continue from what `state` returned, and the weights of its best epoch."""
        self.step.model.load_state_dict(state["model"])
        self.step.optimizer.load_state_dict(state["optimizer"])
        self.step.load(state["step"])
        if self.ema is not None:
            self.ema.load_training_state(state["ema"])
        self.best.load(state["best"], best_weights)
        if "callbacks" not in state:
            state = {**state, "callbacks": _older_states(state.get("others", []), self.callbacks)}
        self.callbacks.load_state_dict(_on(self.steps.device, state["callbacks"]))
        records = [_record(values) for values in state["history"]["epochs"]]
        self.history = History(records, stopped_early=state["history"]["stopped_early"])
        self.epoch, self.batch = state["position"]["epoch"], state["position"]["batch"]
        self.seconds = state["position"]["seconds"]
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
        waited = epoch - (self.epoch or 0)
        return self.settings.patience is not None and waited >= self.settings.patience

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
        self.value, self.epoch = state["value"], state["epoch"]
        if self.plateau is not None and state["plateau"] is not None:
            self.plateau.load_state_dict(state["plateau"])
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


def _older_states(states: Sequence[Mapping[str, Any]], callbacks: Callbacks) -> dict[str, Any]:
    """Return the states of callbacks as versions wrote them that had only methods, or one object, beside the model.

    Those versions wrote no state for a callback that has none.
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


def _on(device: torch.device, tree: Any) -> Any:
    """Return nested values with their tensors on a device: they were written from there."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: _on(device, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        moved = [_on(device, value) for value in tree]
        return moved if isinstance(tree, list) else tuple(moved)
    return tree


def _record(values: Mapping[str, Any]) -> EpochRecord:
    valid = values["valid"]
    return EpochRecord(**{**values, "valid": None if valid is None else Metrics(**valid)})
