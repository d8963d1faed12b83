"""Harmless transfer: its losses, and what a running transfer reports.

`rarebit.HarmlessTransfer` holds the settings and starts a transfer. Your own loss subclasses `StatelessLoss`, or
`TransferLoss` and `RunningLoss` where it has state.
"""

from rarebit.transfer.ledger import Ledger
from rarebit.transfer.losses import (
    MMD,
    Adversarial,
    AdversarialMLP,
    CosReg,
    LossTables,
    Moments,
    Relatives,
    RunningLoss,
    SlicedWasserstein,
    StatelessLoss,
    TransferBatch,
    TransferLoss,
)
from rarebit.transfer.running import Explanation, RunningTransfer

__all__ = [
    "MMD",
    "Adversarial",
    "AdversarialMLP",
    "CosReg",
    "Explanation",
    "Ledger",
    "LossTables",
    "Moments",
    "Relatives",
    "RunningLoss",
    "RunningTransfer",
    "SlicedWasserstein",
    "StatelessLoss",
    "TransferBatch",
    "TransferLoss",
]
