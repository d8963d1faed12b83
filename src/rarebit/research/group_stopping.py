"""Group stopping: rare and frequent rows each stop at their own best epoch (a neighbour of `shrinkage`).

    g(i)      = floor(5 · share of its field's training values that are of rarer ids)
    L_g(t)    mean loss of validation rows after epoch t, each as often as it has a value of group g
    row i     = row i after the epoch t with the lowest L_g(i)(t)

So each group of a field has about a fifth of its values in a log, and the rarest has the most rows. The network is
that of the best epoch, as ever; so a row may be older than the network, or younger. Rows of a group without
validation rows are those of the best epoch.

Not by itself: it is there to be compared with.
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
from rarebit.errors import DataError, UnsupportedTableError
from rarebit.research._neighbours import Neighbour
from rarebit.settings import check_types, require
from rarebit.tables.find import find_sites
from rarebit.tables.table import home_of
from rarebit.technique import Rank, Technique

__all__ = ["GroupStopping", "frequency_groups"]

BATCH = 8192
"""Validation rows that are scored at once."""
NEVER = 0
"""The best epoch of a group that no validation row has a value of."""


@dataclass(frozen=True, kw_only=True)
class GroupStopping(Neighbour):
    """Keep rows as they were after the epoch that was best for rows as rare as they are.

    >>> GroupStopping(groups=3)
    GroupStopping(groups=3)
    """

    title: ClassVar[str] = "rows kept from the epoch that was best for their frequency"
    paper: ClassVar[str] = "none: early stopping by how often an id was seen"
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "validation rows are scored once more an epoch; a second copy of the tables"
    )
    applies: ClassVar[str] = (
        "beside shrinkage, where rare rows overfit before frequent ones are learned; not by itself"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"groups": (5, 2, 10)}

    groups: int = 5
    """Into how many groups of about as many training values each the rows of a field are cut."""

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
        """Return what watches the groups of a model on the validation rows."""
        return _Stopping(self.groups)


def frequency_groups(counts: Tensor, groups: int) -> Tensor:
    """Return the group of each row of a field `(N,)`, 0 the rarest, from how often each was seen.

    Rows that were seen equally often are in one group.

    >>> frequency_groups(torch.tensor([4, 0, 1, 1, 4]), groups=5)
    tensor([1, 0, 0, 0, 1])
    """
    ordered = counts.sort().values
    # all that is rarer comes before the first row that was seen as often
    before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    rarer = before[torch.searchsorted(ordered, counts)]
    return rarer * groups // counts.sum().clamp(min=1)


class _Kept:
    """The rows of a table, each as it was after the best epoch of its group so far."""

    def __init__(self, weight: Tensor, group: Tensor) -> None:
        self.weight, self.group = weight, group  # (N, D), (N,)
        self.rows = weight.clone()

    def take(self, better: Tensor) -> None:
        """Keep the rows of groups that are better than ever, `(G,)`, as they are now."""
        chosen = better[self.group].unsqueeze(1)
        self.rows.copy_(torch.where(chosen, self.weight, self.rows))

    def put_back(self, has_best: Tensor) -> None:
        """Let the table have the rows that were kept."""
        chosen = has_best[self.group].unsqueeze(1)
        self.weight.copy_(torch.where(chosen, self.rows, self.weight))


class _Stopping(Callback):
    """Looks at validation rows after each epoch."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def start(self, model: nn.Module, data: TrainingData) -> None:
        """Cut the rows of each field into groups."""
        if data.valid is None or not len(data.valid):
            raise DataError("group-stopping needs validation rows, and there are none; give some")
        num_groups, device = self.num_groups, home_of(model)
        groups = {
            name: frequency_groups(count, num_groups) for name, count in data.train.counts().items()
        }
        self.shadow: nn.Module | None = _shadow_of(model)
        self.valid = data.valid.to(device)
        # numbered through all fields
        self.groups = {
            name: group.to(device) + number * num_groups
            for number, (name, group) in enumerate(groups.items())
        }
        self.steps_per_epoch = data.steps_per_epoch
        self.tables = {
            name: _Kept(weight, self.groups[name.rpartition(".")[2]])
            for name, weight in _plain_weights(model, self.groups).items()
        }
        self.best_loss = torch.full(
            (len(groups) * num_groups,), torch.inf, dtype=torch.float64, device=device
        )
        self.best_epoch = torch.full((len(groups) * num_groups,), NEVER, device=device)

    @torch.no_grad()
    def after_step(self, num_steps: int) -> None:
        """After the last step of an epoch, keep the rows of the groups for which it was the best."""
        epoch, rest = divmod(num_steps, self.steps_per_epoch)
        if rest or self.shadow is None:
            return
        loss = self._loss_by_group(self.shadow)
        better = loss < self.best_loss
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best_epoch = torch.where(better, epoch, self.best_epoch)
        for table in self.tables.values():
            table.take(better)

    def _loss_by_group(self, model: nn.Module) -> Tensor:
        """Return the mean loss of validation rows over the values of each group, `(G,)`; inf of none."""
        total = torch.zeros_like(self.best_loss)
        values = torch.zeros_like(self.best_loss)
        for batch in self.valid.batches(BATCH):
            logits = model(batch).double()
            loss = F.binary_cross_entropy_with_logits(
                logits, batch.label.double(), reduction="none"
            )
            for field in batch.schema.table_fields:
                ids = batch.ids[:, batch.schema.slots[field.name]].long()  # (B, L)
                counted = torch.ones_like(ids, dtype=torch.float64)
                if field.kind == "multi":
                    counted = (ids != PADDING).double()
                group = self.groups[field.name][ids].reshape(-1)
                total.index_add_(0, group, (loss.unsqueeze(1) * counted).reshape(-1))
                values.index_add_(0, group, counted.reshape(-1))
        return torch.where(values > 0, total / values, torch.inf)

    @torch.no_grad()
    def end(self) -> None:
        """Give each group the rows of its best epoch."""
        for table in self.tables.values():
            table.put_back(self.best_epoch != NEVER)

    def report(self) -> dict[str, Any]:
        """Return the best epoch of each group by field, the rarest first; 0 where no validation row tells."""
        epochs = self.best_epoch.view(len(self.groups), -1).tolist()
        return {"best_epoch": dict(zip(self.groups, epochs, strict=True))}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that were kept, and how good they were."""
        return {
            "rows": {name: table.rows for name, table in self.tables.items()},
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them."""
        for name, table in self.tables.items():
            table.rows.copy_(state["rows"][name])
        self.best_loss.copy_(state["best_loss"])
        self.best_epoch.copy_(state["best_epoch"])

    def close(self) -> None:
        """Let go of the shadow."""
        self.shadow = None


def _plain_weights(model: nn.Module, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of all tables by name, in the memory that is trained."""
    found = {}
    for site in find_sites(model):
        if not isinstance(site.table, nn.Embedding) or site.info.field not in fields:
            raise UnsupportedTableError(
                f"group-stopping takes plain tables of the fields of the data, got {site.info.name!r}; merge "
                "it first"
            )
        found[site.info.name] = site.table.weight.detach()
    return found


def _shadow_of(model: nn.Module) -> nn.Module:
    """Return a second set of modules over the same weights and buffers, in evaluation mode.

    So scoring changes no mode and no statistic of the model, and its hooks do not see these lookups.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        # a schema may hold all values of a log, and never changes
        shared += [value for value in vars(module).values() if isinstance(value, Schema)]
    return copy.deepcopy(model, {id(thing): thing for thing in shared}).eval()
