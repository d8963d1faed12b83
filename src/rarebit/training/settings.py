"""How to train: every dial of `fit`."""

from dataclasses import dataclass
from typing import Literal

from rarebit.settings import check_types, require
from rarebit.training.optimizers import Kind, TableMode

__all__ = ["Precision", "Training"]

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train.

    >>> Training(epochs=3, lr=1e-2).batch_size
    1024
    """

    epochs: int = 10
    """Most passes over the data."""
    batch_size: int = 1024
    """Rows a step."""
    optimizer: Kind = "adam"
    """Adam, SGD or Adagrad: torch's own, fused."""
    tables: TableMode = "dense"
    """"dense": the optimizer walks every row in every step, as papers do. "rowwise": only the rows that
    the step looked up, so that a step costs what its batch costs; Adam is then lazy."""
    lr: float = 1e-3
    """Learning rate."""
    table_lr: float | None = None
    """Learning rate of the tables; the same one if not given."""
    weight_decay: float = 0.0
    """L2 penalty inside the optimizer."""
    table_weight_decay: float | None = None
    """L2 penalty of the tables; the same one if not given."""
    threshold_weight_decay: float = 1e-5
    """L2 penalty of learned thresholds (`PEP`), which drives them up."""
    decoupled: bool = False
    """Weight decay shrinks weights directly, as AdamW does, in place of adding to gradients."""
    momentum: float = 0.0
    """Momentum, for SGD."""
    clip_norm: float | None = None
    """Scale gradients down to this norm, over network and tables together; None never does."""
    ema_decay: float | None = None
    """Measure and keep an exponential average of the weights with this decay, such as 0.999."""
    precision: Precision = "float32"
    """Precision of the network's products; tables and loss stay in float32."""
    compile: bool = False
    """Compile the network with `torch.compile`: a faster step after some ten seconds of waiting."""
    cuda_graph: bool = True
    """On a GPU, record the step once and replay it: the host's share of a step goes away."""
    monitor: Literal["auc", "logloss"] = "auc"
    """The validation metric that picks the best epoch."""
    patience: int | None = 2
    """Stop after so many epochs in a row without a better one; None never stops early."""
    plateau_factor: float = 1.0
    """Multiply the learning rate by this after `plateau_patience` epochs without a better one."""
    plateau_patience: int = 1
    """Epochs without a better one before the learning rate is cut."""
    checkpoint_minutes: float = 10.0
    """Write a checkpoint so often, where there is a folder for them, besides one after each epoch that ends
    later than a sixtieth of this after the last one."""
    seed: int = 0
    """Order of the rows, with the epoch."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("epochs", "batch_size", "plateau_patience"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {name}={value}")
        for name in ("lr", "table_lr", "clip_norm", "checkpoint_minutes"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be above 0, got {name}={value}")
        decays = ("weight_decay", "table_weight_decay", "threshold_weight_decay")
        for name in (*decays, "momentum", "seed"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} must be 0 or more, got {name}={value}")
        require(
            self.ema_decay is None or 0.0 < self.ema_decay < 1.0,
            f"ema_decay must lie in (0, 1), got ema_decay={self.ema_decay}",
        )
        require(
            self.patience is None or self.patience >= 1,
            f"patience must be at least 1, got patience={self.patience}",
        )
        require(
            0.0 < self.plateau_factor <= 1.0,
            f"plateau_factor must lie in (0, 1], got plateau_factor={self.plateau_factor}",
        )
