"""Fresh tables: rows are drawn anew in every epoch, and the network is kept (Liu et al.; a neighbour of `shrinkage`).

https://arxiv.org/abs/2305.19531

    row' = keep · row + (1 - keep) · fresh        fresh ~ N(mean, std²) of the table at the start

    keep   `FreshTables.keep`: 0 draws rows wholly anew, 1 leaves them alone

A network that goes over the same rows again finds tables that remember the labels, and learns to trust them. With
fresh tables every epoch is a first one for the tables, and the network learns to use what one pass can teach.

Rows are drawn when the first step of an epoch has been made, for the step before it ends with the epoch's
validation. What the optimizer remembers of them is forgotten, whatever `keep` is below 1; the network, and what a
method learns beside rows, such as a prior, goes on. An average of the weights takes fresh rows for trained ones.

Not by itself: it is there to be compared with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from rarebit.callbacks import Callback, TrainingData
from rarebit.methods.forgetting import StoredRows, restart_, stored_rows
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require
from rarebit.tables.table import CHUNK

__all__ = ["FreshTables"]

STRIDE = 1_000_003
"""Seeds of the draws of two epochs are so far apart that other seeds do not meet them."""


@dataclass(frozen=True, kw_only=True)
class FreshTables(Neighbour):
    """Draw the rows of all tables anew in every epoch, or in part.

    >>> FreshTables(keep=0.5)
    FreshTables(keep=0.5)
    """

    title: ClassVar[str] = "rows drawn anew in every epoch, with the network kept"
    paper: ClassVar[str] = (
        "Liu et al., Multi-Epoch Learning for Deep Click-Through Rate Prediction Models, 2023"
    )
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = "nothing in a step; all rows are written once an epoch"
    applies: ClassVar[str] = (
        "logs on which every model is best after one epoch; not where tables learn for many epochs"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"keep": (0.0, 0.5, 0.9)}
    excludes: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("low-rank", "mlet", "product-start"),
            "its factors start in their own way and would be redrawn in another; use one of them",
        ),
        "pep": "learned thresholds would meet rows that start again; prune first",
        "row-rate": "rows are stored divided by their rates and would start far off; use one of them",
    }

    keep: float = 0.0
    """How much of a row is kept; the rest is fresh."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.keep <= 1, f"keep must be from 0 to 1, got keep={self.keep}")

    def callback(self) -> "_Refreshing":
        """Return what redraws rows before every epoch but the first."""
        return _Refreshing(self.keep)


class _Start:
    """Rows of a table and what they were drawn from."""

    def __init__(self, rows: StoredRows) -> None:
        self.weight, self.padding = rows.weight, rows.padding
        self.mean = float(self.weight.mean())
        self.std = float(self.weight.std()) if self.weight.numel() > 1 else 0.0

    def draw(self, keep: float, generator: torch.Generator) -> None:
        """Let fresh rows take the place of a part of each row."""
        for rows in self.weight.split(CHUNK):
            fresh = torch.randn(
                rows.shape, generator=generator, device=rows.device, dtype=rows.dtype
            )
            rows.mul_(keep).add_(fresh.mul_(self.std).add_(self.mean), alpha=1 - keep)
        if self.padding is not None:
            self.weight[self.padding] = 0.0


class _Refreshing(Callback):
    """Redraws rows between two epochs."""

    def __init__(self, keep: float) -> None:
        self.keep = keep

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Look up how the rows were drawn."""
        self.rows, self.seed = stored_rows(model, "fresh-tables"), data.seed
        self.tables = [_Start(rows) for rows in self.rows]

    @torch.no_grad()
    def between_epochs(self, epoch: int, optimizer: Optimizer) -> None:
        """Redraw rows, and restart the optimizer for them."""
        if self.keep == 1:
            return
        generator = torch.Generator(self.tables[0].weight.device)
        generator.manual_seed(self.seed + STRIDE * (epoch - 1))
        for table in self.tables:
            table.draw(self.keep, generator)
        restart_(optimizer, self.rows)
