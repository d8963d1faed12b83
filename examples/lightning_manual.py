"""Harmless transfer inside Lightning, by manual optimization.

    pip install "rarebit[examples]"
    python examples/lightning_manual.py

`transfer.backward(loss)` stands where `self.manual_backward(loss)` did. With precision="16-mixed", give it the
scaler: `scaler=self.trainer.precision_plugin.scaler`.
"""

import logging
from typing import Any

import lightning
import torch
from _shared import frequent_first, tell
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rarebit as rb

ITEMS, DIM, ROWS, BATCH = 1000, 16, 20_000, 500


class Ratings(lightning.LightningModule):
    """Items to the chance that they are liked."""

    def __init__(self, counts: Tensor) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.counts, self.losses = counts, []
        self.model = nn.Sequential(nn.Embedding(ITEMS, DIM), nn.Linear(DIM, 1))
        self.transfer: rb.transfer.RunningTransfer | None = None
        self.resumed: dict[str, Any] | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        """Start the transfer when the model is on its device."""
        self.transfer = rb.HarmlessTransfer().start(self.model, counts=self.counts)
        if self.resumed is not None:
            self.transfer.load_state_dict(self.resumed)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Train on a batch."""
        item, label = batch
        optimizer = self.optimizers()
        loss = F.binary_cross_entropy_with_logits(self.model(item).squeeze(1), label)
        self.transfer.backward(loss)  # the only changed line; it was self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())

    def on_fit_end(self) -> None:
        """Remove the transfer from the model."""
        self.transfer.close()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the next steps depend on."""
        checkpoint["transfer"] = self.transfer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume from there."""
        self.resumed = checkpoint["transfer"]


def make_trainer(epochs: int = 2) -> lightning.Trainer:
    """Return a trainer that says little and leaves nothing behind."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_ratings() -> tuple[Tensor, Tensor]:
    """Return items and whether they were liked."""
    random = torch.Generator().manual_seed(0)
    item = frequent_first(ITEMS, (ROWS,), random)
    return item, torch.bernoulli(torch.where(item % 4 == 0, 0.8, 0.2), generator=random)


def main() -> None:
    """Train, and tell what the transfer did."""
    torch.manual_seed(0)
    item, label = make_ratings()
    loader = DataLoader(TensorDataset(item, label), batch_size=BATCH, shuffle=True)
    ratings = Ratings(item.bincount(minlength=ITEMS))
    make_trainer().fit(ratings, loader)
    tell(ratings.transfer, ratings.losses)


if __name__ == "__main__":
    main()
