"""Relatives: a rare row is drawn to the weighted mean of its frequent relatives.

    l = mean over T of 1/2 || e_i - sum_r w_ir e_r ||^2        sum_r w_ir = 1

    r       the frequent relatives of item i: those that meet the same items as it does
    w_ir    how much it is like each of them

The other losses move rare rows to where frequent ones lie as a crowd; this one says to which of them. It
needs relatives, which a selection by co-occurrence finds. Rows without any do not move.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rarebit.errors import SettingsError
from rarebit.settings import check_types, require
from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import LossTables, RunningLoss, TransferLoss

__all__ = ["Relatives", "RunningRelatives"]


@dataclass(frozen=True, kw_only=True)
class Relatives(TransferLoss):
    """Draw each rare row to its frequent relatives.

    >>> Relatives(sample=64)
    Relatives(sample=64)
    """

    sample: int = 256
    """Rare rows of each table that are moved in a step."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.sample >= 1, f"sample must be at least 1, got sample={self.sample}")

    def start(self, tables: LossTables) -> "RunningRelatives":
        """Return the loss with the relatives of the tables' rows."""
        if tables.relatives is None:
            raise SettingsError(
                f"Relatives needs to know the relatives of {', '.join(tables.names)}; give "
                "HarmlessTransfer a selection that has them, as select="
            )
        ids, weights = tables.relatives
        weights = weights.to(tables.device, tables.dtype)
        return RunningRelatives(self.sample, ids.to(tables.device), weights)


class RunningRelatives(RunningLoss):
    """The relatives of each row of a group, and how much each of them counts."""

    def __init__(self, sample: int, ids: Tensor, weights: Tensor) -> None:
        total = weights.sum(dim=1, keepdim=True)
        self.sample = sample
        self.ids = ids  # r, (N, R): in the row's own table
        self.weights = weights / torch.where(total > 0, total, 1.0)  # w, (N, R)

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return half the mean squared distance of rare rows from their relatives, `(F,)`."""
        picked = batch.pick(self.sample)
        numbers = batch.ids.index_select(0, picked.index.reshape(-1)).clamp(min=0)  # (F P,)
        weights = self.weights.index_select(0, numbers)  # (F P, R)
        has_relatives = weights.sum(dim=1) > 0
        means = self._means(batch, numbers, weights)
        own = batch.rows_at(picked.index)  # (F, P, M, D)
        squares = 0.5 * (own - means.reshape(own.shape)).square().sum(dim=(2, 3))
        share = picked.weight * has_relatives.reshape(picked.weight.shape)
        return (share * squares).sum(dim=1)

    def _means(self, batch: TransferBatch, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of the relatives of these rows, `(F, P, M, D)`."""
        tables, relatives = batch.num_tables, weights.shape[1]
        ids = self.ids.index_select(0, numbers).reshape(tables, -1)  # (F, P R)
        rows = batch.look_up(ids.T).transpose(0, 1).to(weights.dtype)  # (F, P R, M, D)
        rows = rows.reshape(tables, -1, relatives, *rows.shape[2:])
        return torch.einsum("fprmd,fpr->fpmd", rows, weights.reshape(tables, -1, relatives))
