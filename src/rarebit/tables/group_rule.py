"""Rules: a plain function of ids and gradients, or one that is told more of the rows of a step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["GroupRule", "RowStep", "Rule"]

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Ids `(U,)` and gradients `(K, U, D)` of distinct rows to one gradient a row, `(U, D)`."""


@dataclass(frozen=True)
class RowStep:
    """The distinct rows of one group in one step."""

    number: int
    """Which of `RowGradients.tables` they are of."""
    ids: Tensor
    """Their numbers in the group, ascending, `(U,)`; -1 in slots without a row."""
    gradients: Tensor
    """The gradient of each loss, `(K, U, D)`."""
    rows: Tensor
    """What the tables hold, `(U, D)`, in the precision of the gradients; any numbers in slots without a row."""
    prepared: Any = None
    """What the rule prepared for them."""


class GroupRule(ABC):
    """A rule that is told which tables its rows are of, and what is in the rows."""

    def absent_ids(self, number: int) -> Tensor | None:
        """Return ids of more rows that it wants to see in a step, `(n, F)` for the tables of a group.

        Below zero is none. The main gradient of rows that are not in the batch is zero.
        """
        del number
        return None

    def prepare(self, number: int, ids: Tensor, rows: Tensor) -> Any:
        """Return what it can know of a step without the gradients; the arguments are as in `RowStep`.

        Called once a step before `answer`. In a recorded step it runs beside the backward.
        """
        del number, ids, rows

    @abstractmethod
    def answer(self, step: RowStep) -> Tensor:
        """Return one gradient a row, `(U, D)`."""

    def recording_key(self) -> Hashable:
        """Return what its answer depends on but for the step and tensors that stay where they are.

        On a GPU, a rule with a key is recorded after some steps, and again when the key is another one.
        One without is called in every step.
        """
        return None
