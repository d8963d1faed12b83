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

from rarebit.callbacks import TrainingData, TrainingMethod
from rarebit.methods._neighbour_pairs import neighbour_pairs
from rarebit.methods.forgetting import BetweenEpochs, StoredRows, stored_rows
from rarebit.settings import check_types, require
from rarebit.tables.table import CHUNK, Pair

__all__ = ["FreshTables"]

STRIDE = 1_000_003
"""Seeds of the draws of two epochs are so far apart that other seeds do not meet them."""

FACTORS = "its factors start in a way of their own, and would be drawn in another; use one of them"

AFTER, BEFORE = neighbour_pairs(
    "the rows that it stores are drawn anew",
    {
        "low-rank": FACTORS,
        "mlet": FACTORS,
        "pep": "the thresholds that are being learned would meet rows that start again; prune first",
        "product-start": FACTORS,
        "row-rate": "rows are stored divided by their rates, and would start far off; use one of them",
    },
)


@dataclass(frozen=True, kw_only=True)
class FreshTables(TrainingMethod):
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
    pairs: ClassVar[Mapping[str, Pair]] = AFTER
    pairs_before: ClassVar[Mapping[str, Pair]] = BEFORE

    keep: float = 0.0
    """How much of a row is kept; the rest is fresh."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.keep <= 1, f"keep must be from 0 to 1, got keep={self.keep}")

    def attach(self, model: nn.Module, data: TrainingData) -> "_Refreshing":
        """Draw the rows of a model anew in every epoch of its training but the first."""
        return _Refreshing(model, data, self.keep)


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


class _Refreshing(BetweenEpochs):
    """Draws rows anew between two steps."""

    def __init__(self, model: nn.Module, data: TrainingData, keep: float) -> None:
        super().__init__(stored_rows(model, "fresh-tables"), data, "fresh-tables")
        self.keep, self.seed = keep, data.seed
        self.tables = [_Start(rows) for rows in self.rows]

    def change_(self, num_epochs: int) -> bool:
        """Draw rows anew."""
        if self.keep == 1:
            return False
        generator = torch.Generator(self.tables[0].weight.device)
        generator.manual_seed(self.seed + STRIDE * num_epochs)
        for table in self.tables:
            table.draw(self.keep, generator)
        return True
