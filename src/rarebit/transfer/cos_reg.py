"""CosReg: rows that point in all directions (Gao et al., 2019), in linear time.

    l = 1/N sum_i sum_{j != i} cos(e_i, e_j) = (||sum_i e_i / ||e_i|| ||^2 - N) / N

    N    the rows of a table that are in the batch, frequent and rare ones; rows of zeros are left out

Its other side is a uniform distribution over the sphere, so it takes no frequent rows. A batch of pairs
would be N x N; the sum of unit vectors is the same number.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rarebit.transfer.batch import TransferBatch
from rarebit.transfer.transfer_loss import StatelessLoss

__all__ = ["CosReg"]


@dataclass(frozen=True, kw_only=True)
class CosReg(StatelessLoss):
    """Move rows apart until their cosines cancel out.

    >>> CosReg()
    CosReg()
    """

    every_row: ClassVar[bool] = True

    def loss(self, batch: TransferBatch) -> Tensor:
        """Return the mean over the rows of their cosines with all others, `(F,)`."""
        square = batch.rows.square().sum(dim=-1, keepdim=True)  # (U, M, 1)
        counts = (square > 0) & batch.moves.reshape(-1, 1, 1)
        unit = torch.where(counts, batch.rows, 0.0) * torch.where(counts, square, 1.0).rsqrt()
        number = batch.total(counts.squeeze(-1).to(unit.dtype))  # (F, M)
        total = batch.total(unit).square().sum(dim=-1)
        return ((total - number) / number.clamp(min=1.0)).sum(dim=1)
