"""Group stopping: rare and frequent rows each stop at their own best epoch (a neighbour of `shrinkage`).

    g(i)      = floor(5 · share of its field's training values that belong to rarer ids)
    L_g(t)    mean validation loss after epoch t over all values of group g
    row i     = row i after the epoch t with the lowest L_g(i)(t)

So each group of a field has about a fifth of its values in a log, and the rarest group has the most rows. The network comes
from the best epoch of the model. A group without validation values keeps the rows of that epoch. Only for comparisons.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.callbacks import Callback, TrainingData
from rarebit.data.schema import PADDING, Schema
from rarebit.errors import DataError, NoTableError, UnsupportedTableError
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require
from rarebit.storage.files import load_tensors_
from rarebit.tables.apply import find_sites
from rarebit.tables.counts import counts_of_table
from rarebit.tables.table import home_of
from rarebit.technique import Rank, Technique

__all__ = ["GroupStopping"]

BATCH = 8192
"""Batch size of validation."""
NEVER = 0
"""The best epoch of a group without validation values."""


@dataclass(frozen=True, kw_only=True)
class GroupStopping(Neighbour):
    """Keep the rows of each frequency group from the epoch that was best for the group.

    >>> GroupStopping(groups=3)
    GroupStopping(groups=3)
    """

    title: ClassVar[str] = "rows kept from the epoch that was best for their frequency"
    paper: ClassVar[str] = "none: early stopping by how often training saw an id"
    cost: ClassVar[str] = "one more validation per epoch; a second copy of the tables"
    applies: ClassVar[str] = (
        "to test in a study whether rare rows overfit before frequent ones learn"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"groups": (5, 2, 10)}

    groups: int = 5
    """Number of groups per field; each has about the same number of training values."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.groups >= 1, f"groups must be at least 1, got groups={self.groups}")

    @classmethod
    def refuses(cls, other: type[Technique]) -> str | None:
        """Refuse methods whose tables are not plain while they are trained."""
        if other.composition_rank is not None and other.composition_rank < Rank.QUANTISATION:
            return "a group stops with the rows of plain tables; merge first, or use one of the two"
        return super().refuses(other)

    def callback(self) -> "_Stopping":
        """Return the callback that keeps the best rows of each group."""
        return _Stopping(self.groups)


def frequency_groups(counts: Tensor, groups: int) -> Tensor:
    """Return the group of each row of a field `(N,)`; 0 is the rarest, and equal counts are in one group."""
    ordered = counts.sort().values
    # rarer rows come before the first row with the same count
    before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    rarer = before[torch.searchsorted(ordered, counts)]
    return rarer * groups // counts.sum().clamp(min=1)


class _Stopping(Callback):
    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def start(self, model: nn.Module, data: TrainingData) -> None:
        if data.valid is None or not len(data.valid):
            raise DataError("group-stopping needs validation rows, and there are none; give some")
        device, counts = home_of(model), data.train.counts()
        self.groups = {  # (N,) each, numbered through all fields
            name: frequency_groups(count, self.num_groups).to(device) + number * self.num_groups
            for number, (name, count) in enumerate(counts.items())
        }
        self.weights: dict[str, Tensor] = {}  # (N, D), in the memory that is trained
        self.group_of: dict[str, Tensor] = {}  # (N, 1)
        for site in find_sites(model):
            if not isinstance(site.table, nn.Embedding) or site.info.field not in self.groups:
                raise UnsupportedTableError(
                    f"group-stopping takes plain tables of the fields of the data, got {site.info.name!r}; "
                    "merge it first"
                )
            counts_of_table(site.info.name, site.info.rows, counts)  # raises where they are others
            self.weights[site.info.name] = site.table.weight.detach()
            self.group_of[site.info.name] = self.groups[site.info.field].unsqueeze(1)
        if not self.weights:
            raise NoTableError(
                "group-stopping keeps the rows of tables, and the model has no table"
            )
        self.best_rows = {name: weight.clone() for name, weight in self.weights.items()}
        num_groups = len(counts) * self.num_groups
        self.best_loss = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=device)
        self.best_epoch = torch.full((num_groups,), NEVER, device=device)
        self.steps_per_epoch, self.valid = data.steps_per_epoch, data.valid.to(device)
        # A second set of modules over the same weights, in evaluation mode: scoring changes no mode and no statistic of
        # the model, and its hooks do not see these lookups. A schema may hold all values of a log, and never changes.
        shared: list[Any] = [*model.parameters(), *model.buffers()]
        every = [value for module in model.modules() for value in vars(module).values()]
        shared += [value for value in every if isinstance(value, Schema)]
        self.shadow: nn.Module | None = copy.deepcopy(
            model, {id(one): one for one in shared}
        ).eval()

    @torch.no_grad()
    def after_step(self, num_steps: int) -> None:
        epoch, rest = divmod(num_steps, self.steps_per_epoch)
        if rest or self.shadow is None:
            return
        loss = self._loss_by_group(self.shadow)
        better = loss < self.best_loss
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best_epoch = torch.where(better, epoch, self.best_epoch)
        for name, rows in self.best_rows.items():
            rows.copy_(torch.where(better[self.group_of[name]], self.weights[name], rows))

    def _loss_by_group(self, model: nn.Module) -> Tensor:
        """Return the mean validation loss over the values of each group, `(G,)`; inf without values."""
        total = torch.zeros_like(self.best_loss)
        values = torch.zeros_like(self.best_loss)
        for batch in self.valid.batches(BATCH):
            logits, label = model(batch).double(), batch.label.double()
            loss = F.binary_cross_entropy_with_logits(logits, label, reduction="none")
            for field in batch.schema.table_fields:
                ids = batch.ids[:, batch.schema.slots[field.name]].long()  # (B, L)
                is_multi = field.kind == "multi"
                counted = (ids != PADDING if is_multi else torch.ones_like(ids)).double()
                group = self.groups[field.name][ids].reshape(-1)
                total.index_add_(0, group, (loss.unsqueeze(1) * counted).reshape(-1))
                values.index_add_(0, group, counted.reshape(-1))
        return torch.where(values > 0, total / values, torch.inf)

    @torch.no_grad()
    def end(self) -> None:
        has_best = self.best_epoch != NEVER
        for name, rows in self.best_rows.items():
            weight = self.weights[name]
            weight.copy_(torch.where(has_best[self.group_of[name]], rows, weight))

    def report(self) -> dict[str, Any]:
        """Return the best epoch of each group by field, the rarest first; 0 without validation values."""
        epochs = self.best_epoch.view(len(self.groups), -1).tolist()
        return {"best_epoch": dict(zip(self.groups, epochs, strict=True))}

    def state_dict(self) -> dict[str, Any]:
        best = {"best_loss": self.best_loss, "best_epoch": self.best_epoch}
        return {"rows": self.best_rows, **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        load_tensors_(own.pop("rows"), state["rows"], "group-stopping")
        load_tensors_(own, {name: state[name] for name in own}, "group-stopping")

    def close(self) -> None:
        self.shadow = None
