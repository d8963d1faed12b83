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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rarebit.errors import DataError, UnsupportedTableError
from rarebit.methods._neighbour_pairs import neighbour_pairs
from rarebit.methods._shrinkage_priors import Prior
from rarebit.settings import check_types, require
from rarebit.tables.find import find_sites, table_parameters
from rarebit.tables.table import CHUNK, Pair
from rarebit.tables.training_method import Attached, TrainingData, TrainingMethod

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
        if data.steps_per_epoch < 2:
            raise DataError(
                "fresh-tables draws rows after the first step of an epoch, and an epoch has only one; use "
                "smaller batches"
            )
        return _Refreshing(model, data, self.keep)


class _Start:
    """A plain table and what its rows were drawn from."""

    def __init__(self, table: nn.Embedding) -> None:
        self.weight, self.padding = table.weight.detach(), table.padding_idx
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


class _Refreshing(Attached):
    """Draws rows anew between two steps."""

    def __init__(self, model: nn.Module, data: TrainingData, keep: float) -> None:
        self.keep, self.seed, self.steps_per_epoch = keep, data.seed, data.steps_per_epoch
        self.parameters = list(table_parameters(model).values())
        self.tables = [_Start(table) for table in _plain_tables(model)]
        self._refuse_copies()
        self.optimizer: Optimizer | None = None
        self.handle = register_optimizer_step_pre_hook(self._before_update)

    def after_step(self, num_steps: int) -> None:
        """Draw rows anew after the first step of an epoch."""
        epochs, step = divmod(num_steps - 1, self.steps_per_epoch)
        if epochs == 0 or step != 0 or self.keep == 1:
            return
        generator = torch.Generator(self.parameters[0].device)
        generator.manual_seed(self.seed + STRIDE * epochs)
        for table in self.tables:
            table.draw(self.keep, generator)
        self._forget()

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Take note of the optimizer that has the tables, when it makes its first step."""
        if self.optimizer is None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(parameter) in held for parameter in self.parameters):
                self.optimizer = optimizer

    def _forget(self) -> None:
        """Let the optimizer start again with the rows, in the memory that a recorded step writes to."""
        if self.optimizer is None:
            return
        fresh = {_memory(table.weight) for table in self.tables}
        for parameter in self.parameters:
            if _memory(parameter) in fresh:
                for value in self.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def _refuse_copies(self) -> None:
        """Raise where a table is not the memory that is trained, so that writing to it would be lost."""
        trained = {_memory(parameter) for parameter in self.parameters}
        if not self.tables or any(_memory(table.weight) not in trained for table in self.tables):
            raise UnsupportedTableError(
                "fresh-tables draws rows of tables that store rows, and a table of this model does not"
            )

    def close(self) -> None:
        """Look at no optimizer any more."""
        self.handle.remove()
        self.optimizer = None


def _plain_tables(model: nn.Module) -> list[nn.Embedding]:
    """Return the plain tables that hold the rows of a model's tables; what a prior has is not among them."""
    found = []
    for site in find_sites(model):
        parts = list(site.table.modules())
        of_priors = {id(one) for part in parts if isinstance(part, Prior) for one in part.modules()}
        found += [p for p in parts if isinstance(p, nn.Embedding) and id(p) not in of_priors]
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
