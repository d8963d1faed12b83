"""Fresh tables: redraw all rows before every epoch, and keep the network (Liu et al.; a neighbour of `shrinkage`).

https://arxiv.org/abs/2305.19531

    row' = keep · row + (1 - keep) · fresh        fresh ~ N(mean, std²) of the table at the start

    keep   `FreshTables.keep`: 0 redraws rows completely, 1 leaves them unchanged

**Several sets.** With `sets` = K the rows of K epochs ago come back, in place of fresh ones: K tables, each of which is trained in every
K-th epoch, and one network for all of them. So MEDA trains on data that keeps coming (Fan et al., https://arxiv.org/abs/2407.01607):
no table meets the same rows twice until K epochs are over.

In a second epoch the network finds tables that remember the labels, and learns to trust them. With fresh tables every epoch is
the first one for the tables.

The optimizer restarts for the tables unless `keep` is 1; the network, and what a method learns besides rows, such as a
prior, continue. An average of the weights mixes fresh rows with trained ones. Only for comparisons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.callbacks import Callback, TrainingData
from rarebit.methods.forgetting import restart_, stored_rows
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require
from rarebit.tables.table import CHUNK

__all__ = ["FreshTables"]

STRIDE = 1_000_003
"""Distance between the seeds of two epochs, so that close seeds of runs do not collide."""


@dataclass(frozen=True, kw_only=True)
class FreshTables(Neighbour):
    """Redraw the rows of all tables before every epoch, fully or in part.

    >>> FreshTables(keep=0.5)
    FreshTables(keep=0.5, sets=0)
    """

    title: ClassVar[str] = "rows redrawn before every epoch; the network is kept"
    paper: ClassVar[str] = (
        "Liu et al., Multi-Epoch Learning for Deep Click-Through Rate Prediction Models, 2023"
    )
    cost: ClassVar[str] = "nothing per step; writes all rows once per epoch"
    applies: ClassVar[str] = (
        "logs on which one epoch is best; not where tables learn for many epochs"
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
    """How much of a row stays; the rest is fresh."""
    sets: int = 0
    """Tables that take turns, an epoch each; 0: no rows come back."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.sets >= 0, f"sets must be 0 or more, got sets={self.sets}")
        require(0 <= self.keep <= 1, f"keep must be from 0 to 1, got keep={self.keep}")

    def callback(self) -> "_Refreshing":
        """Return the callback that redraws rows."""
        return _Refreshing(self.keep, self.sets)


class _Refreshing(Callback):
    def __init__(self, keep: float, sets: int) -> None:
        self.keep, self.sets = keep, sets
        self.resting: dict[str, Tensor] = {}
        """The rows of the sets that wait, by set and table."""

    def start(self, model: nn.Module, data: TrainingData) -> None:
        rows, self.seed = stored_rows(model, "fresh-tables"), data.seed
        self.rows = [replace(each, table=None) for each in rows]
        weights = [rows.weight for rows in self.rows]
        self.starts = [(float(w.mean()), float(w.std()) if w.numel() > 1 else 0.0) for w in weights]

    @torch.no_grad()
    def between_epochs(self, epoch: int, optimizer: Optimizer) -> None:
        if self.keep == 1 or self.sets == 1:
            return
        if self.sets:
            last, now = (epoch - 2) % self.sets, (epoch - 1) % self.sets
            for place, table in enumerate(self.rows):
                self.resting[f"{last}.{place}"] = table.weight.clone()
            if f"{now}.0" in self.resting:
                for place, table in enumerate(self.rows):
                    table.weight.copy_(self.resting.pop(f"{now}.{place}"))
                restart_(optimizer, self.rows)
                return
        draw = torch.Generator(self.rows[0].weight.device)
        draw.manual_seed(self.seed + STRIDE * (epoch - 1))
        for table, (mean, std) in zip(self.rows, self.starts, strict=True):
            for rows in table.weight.split(CHUNK):
                fresh = torch.randn(
                    rows.shape, generator=draw, device=rows.device, dtype=rows.dtype
                )
                rows.mul_(self.keep).add_(fresh.mul_(std).add_(mean), alpha=1 - self.keep)
            if table.padding is not None:
                table.weight[table.padding] = 0.0
        restart_(optimizer, self.rows)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.resting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resting = {name: rows.clone() for name, rows in state.items()}
