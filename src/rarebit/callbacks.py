"""Methods that change how tables are trained and leave the tables themselves as they are.

    attach      before the first step: returns what takes part in training
    Attached    turns the loss into gradients, looks at the model between steps, has a last word at the end

They are named beside the others, as `--methods mlet+harmless-transfer`, so runs and studies treat them alike;
but there is no table to wrap, and nothing of them is served.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from rarebit.data.dataset import Dataset
from rarebit.errors import UnsupportedTableError
from rarebit.tables.table import AnyTable, Method, method_name

__all__ = ["Attached", "TrainingData", "TrainingMethod"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a method may know of the training it takes part in."""

    train: Dataset
    valid: Dataset | None
    batch_size: int
    steps_per_epoch: int
    seed: int
    folder: Path | None = None
    """The folder of the prepared log, where what is computed of its rows may be kept for the next run."""
    checksum: str = ""
    """What tells this log from any other; empty where that is not known."""


class Attached:
    """What takes part in one training; all of it may be left out.

    `state_dict` is written with each checkpoint and `load_state_dict` gets it back, so that training goes on
    after a break as if there had been none.
    """

    backward: Callable[[Tensor], object] | None = None
    """What turns the loss into gradients, in place of `loss.backward()`."""

    def after_step(self, num_steps: int) -> None:
        """Look at the model between two steps; `num_steps` were made since the start of training."""

    def finish(self) -> None:
        """Have the last word: training is over, and the model has the weights of its best epoch."""

    def report(self) -> dict[str, Any]:
        """Return what is worth telling of the training, as plain values."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the coming steps depend on and that is not in the model: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    def close(self) -> None:
        """Take everything off the model again, also after an error."""


class TrainingMethod(Method):
    """A method that takes part in training and leaves tables as they are."""

    training_only: ClassVar[bool] = True

    @abstractmethod
    def attach(self, model: nn.Module, data: TrainingData) -> Attached:
        """Take part in the training of a model that is on its device, with all other methods applied."""

    def check_beside(self, methods: Sequence[Method]) -> None:
        """Raise where it cannot take part in a run with these methods; pairs alone do not tell all."""
        del methods

    def wrap(self, base: AnyTable) -> NoReturn:
        """Raise: there is nothing to wrap."""
        del base
        raise UnsupportedTableError(
            f"{method_name(self)} takes part in training and changes no table; name it among the methods of a "
            "run, or attach it in a loop of your own"
        )
