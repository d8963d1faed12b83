"""What is compared: no transfer, the plain sum of both losses, and lexico, with two transfer losses."""

from collections.abc import Mapping
from dataclasses import dataclass

import rarebit as rb
from rarebit.transfer.lexico import TransferRule

__all__ = ["ARMS", "Arm"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training."""

    loss: rb.transfer.TransferLoss | None = None
    rule: TransferRule = "lexico"
    scale: float = 1.0
    """The weight of the transfer loss."""
    per_word: bool = False
    """Whether that is divided by the number of words."""
    select: bool = False
    """Whether rare words without a frequent relative are left out, by what they co-occur with."""

    def scale_for(self, words: int) -> float:
        """Return the weight of the transfer loss for so many words."""
        return self.scale / words if self.per_word else self.scale


ARMS: Mapping[str, Arm] = {
    "baseline": Arm(),
    # Gao et al. divide by the square of the number of words and have a weight of 1; CosReg divides by it once
    "cosreg-sum": Arm(loss=rb.transfer.CosReg(), rule="sum", per_word=True),
    # the weight of FRAGE
    "adversarial-sum": Arm(loss=rb.transfer.Adversarial(), rule="sum", scale=0.02),
    "cosreg-lexico": Arm(loss=rb.transfer.CosReg(), per_word=True),
    "adversarial-lexico": Arm(loss=rb.transfer.Adversarial()),
    "adversarial-select-lexico": Arm(loss=rb.transfer.Adversarial(), select=True),
}
