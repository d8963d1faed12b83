"""The protocol of transfer losses: how far the rare rows of each table are from the frequent ones.

A loss is settings (`TransferLoss`, frozen) that start something that runs (`RunningLoss`). One that has
nothing to remember is both. `RunningLoss.loss` returns one number a table; their sum is what the rows get
their transfer gradient of. Tables share no space, so no loss mixes rows of two of them, nor of two
embedding sets. Reductions are means over the rows of a table, never sums over rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rarebit.transfer.batch import TransferBatch

__all__ = ["LossTables", "RunningLoss", "StatelessLoss", "TransferLoss"]


@dataclass(frozen=True)
class LossTables:
    """The tables that a loss is started for."""

    names: tuple[str, ...]
    """What they are called, F of them."""
    num_sets: int
    """Embedding sets side by side in a row: M."""
    width: int
    """How wide a row of one set is: D."""
    device: torch.device
    dtype: torch.dtype
    relatives: tuple[Tensor, Tensor] | None = None
    """Ids in their table and weights of the frequent relatives of each row of the group, `(N, R)` both."""


class RunningLoss(ABC):
    """A transfer loss at work on one group of tables."""

    @abstractmethod
    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the loss of each table, `(F,)`; 0 for a table without rows to move."""

    @torch.enable_grad()
    def loss_and_gradient(self, batch: TransferBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of each table, `(F,)`, and the gradient of their sum for the rows, `(U, M, D)`."""
        losses = self.loss(batch)
        [gradient] = torch.autograd.grad(losses.sum(), batch.rows)
        return losses.detach(), gradient

    def learn(self, batch: TransferBatch) -> Tensor | None:
        """Take one step of what the loss itself learns, on rows without a history.

        Returns the share of rows that a discriminator told right, `(F,)`, where there is one.
        """
        del batch
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what the coming steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        del state


class TransferLoss(ABC):
    """The settings of a transfer loss: a frozen dataclass."""

    every_row: ClassVar[bool] = False
    """Whether it moves frequent rows as well as rare ones."""

    @abstractmethod
    def start(self, tables: LossTables) -> RunningLoss:
        """Return the loss at work on some tables."""


class StatelessLoss(TransferLoss, RunningLoss):
    """A loss that remembers nothing."""

    def start(self, tables: LossTables) -> RunningLoss:
        """Return the loss itself."""
        del tables
        return self
