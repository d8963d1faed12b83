"""How training tells what it is doing."""

import sys
from dataclasses import dataclass
from typing import Protocol

from rarebit.training.metrics import Metrics

__all__ = ["EpochRecord", "LineProgress", "Progress", "Silence"]


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """What one epoch did."""

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
    """What `fit` calls as it goes."""

    def say(self, line: str) -> None:
        """Tell something worth knowing."""

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Tell that an epoch of so many rows begins."""

    def advance(self, rows: int) -> None:
        """Tell that so many more rows are done."""

    def finish_epoch(self, record: EpochRecord) -> None:
        """Tell what the epoch gave."""


class Silence:
    """Tells nothing."""

    def say(self, line: str) -> None:
        """Tell nothing."""

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        """Tell nothing."""

    def advance(self, rows: int) -> None:
        """Tell nothing."""

    def finish_epoch(self, record: EpochRecord) -> None:
        """Tell nothing."""


class LineProgress(Silence):
    """Prints a line an epoch to standard error."""

    def say(self, line: str) -> None:
        """Print it."""
        sys.stderr.write(f"{line}\n")

    def finish_epoch(self, record: EpochRecord) -> None:
        """Print what the epoch gave."""
        valid = "" if record.valid is None else f", valid {record.valid}"
        sys.stderr.write(
            f"epoch {record.epoch}: train loss {record.train_loss:.5f}{valid}, "
            f"{record.samples_per_second:,.0f} samples/s\n"
        )
