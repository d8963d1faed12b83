"""The rows that the tables of a model store, for methods that change them between two epochs.

StoredRows      rows in the memory that is trained: of a plain table, of a factor, of buckets
restart_        lets an optimizer know nothing of rows any more
BetweenEpochs   changes rows when an epoch has begun, from the second one on
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rarebit.errors import DataError, UnsupportedTableError
from rarebit.methods._shrinkage_counts import Counts, counts_of_rows, counts_of_table
from rarebit.methods._shrinkage_priors import Prior
from rarebit.tables.find import Site, find_sites, table_parameters
from rarebit.tables.training_method import Attached, TrainingData

__all__ = ["BetweenEpochs", "StoredRows", "restart_", "stored_rows"]


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of a table, `(N, D)`; what a prior has learned is none of them."""

    site: Site
    weight: Tensor
    padding: int | None

    def counts(self, counts: Counts) -> Tensor:
        """Return how often each row was seen, `(N,)` on the device of the rows; of a bucket, all its ids."""
        table = self.site.table
        of_ids = counts_of_table(self.site.info.name, table.num_embeddings, counts)
        return counts_of_rows(table, of_ids).to(self.weight.device)


def stored_rows(model: nn.Module, asked_by: str) -> list[StoredRows]:
    """Return the rows of all tables of a model, or say that one of them stores none.

    >>> [tuple(rows.weight.shape) for rows in stored_rows(nn.Sequential(nn.Embedding(9, 4)), "a test")]
    [(9, 4)]
    """
    found = [
        StoredRows(site, plain.weight.detach(), plain.padding_idx)
        for site in find_sites(model)
        for plain in _plain_tables(site)
    ]
    trained = {_memory(parameter) for parameter in table_parameters(model).values()}
    # writing to a copy of what is trained would be lost
    if not found or any(_memory(rows.weight) not in trained for rows in found):
        raise UnsupportedTableError(
            f"{asked_by} changes rows of tables that store rows, and a table of this model does not"
        )
    return found


def restart_(optimizer: Optimizer, rows: Sequence[StoredRows]) -> None:
    """Let an optimizer start again with rows, in the memory that a recorded step writes to.

    >>> import torch
    >>> table = nn.Embedding(3, 2)
    >>> adam = torch.optim.Adam(table.parameters())
    >>> table(torch.tensor([1])).sum().backward(); adam.step()
    >>> restart_(adam, stored_rows(table, "a test"))
    >>> float(adam.state[table.weight]["step"])
    0.0
    """
    memory = {_memory(each.weight) for each in rows}
    for parameter, state in optimizer.state.items():
        if _memory(parameter) in memory:
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()


class BetweenEpochs(Attached):
    """Changes rows when the first step of an epoch has been made, from the second epoch on.

    Not before it: the last step of an epoch ends with its validation, which is of the rows as they are then.
    """

    def __init__(self, model: nn.Module, data: TrainingData, asked_by: str) -> None:
        if data.steps_per_epoch < 2:
            raise DataError(
                f"{asked_by} changes rows after the first step of an epoch, and an epoch has only one; use "
                "smaller batches"
            )
        self.steps_per_epoch = data.steps_per_epoch
        self.rows = stored_rows(model, asked_by)
        self.optimizer: Optimizer | None = None
        """The optimizer that has the tables, once it has made a step."""
        self.handle = register_optimizer_step_pre_hook(self._before_update)

    def after_step(self, num_steps: int) -> None:
        """Change rows after the first step of an epoch, and let the optimizer start again with them."""
        epochs, step = divmod(num_steps - 1, self.steps_per_epoch)
        if epochs == 0 or step != 0 or not self.change_(epochs):
            return
        if self.optimizer is not None:
            restart_(self.optimizer, self.rows)

    @abstractmethod
    def change_(self, num_epochs: int) -> bool:
        """Change the rows and return whether they are others; so many epochs are over."""

    def close(self) -> None:
        """Look at no optimizer any more."""
        self.handle.remove()
        self.optimizer = None

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self.optimizer is None:
            held = {_memory(p) for group in optimizer.param_groups for p in group["params"]}
            if any(_memory(rows.weight) in held for rows in self.rows):
                self.optimizer = optimizer


def _plain_tables(site: Site) -> list[nn.Embedding]:
    parts = list(site.table.modules())
    of_priors = {id(one) for part in parts if isinstance(part, Prior) for one in part.modules()}
    return [p for p in parts if isinstance(p, nn.Embedding) and id(p) not in of_priors]


def _memory(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from any other, also where it is a part of it."""
    return tensor.untyped_storage().data_ptr()
