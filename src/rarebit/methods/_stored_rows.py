"""The rows that the tables of a model store, for methods that change them between two epochs.

StoredRows      rows in the memory that is trained: of a plain table, of a factor, of buckets
restart_        lets an optimizer know nothing of rows any more
BetweenEpochs   changes rows when an epoch has begun, from the second one on
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rarebit.callbacks import Attached, TrainingData
from rarebit.errors import DataError, UnsupportedTableError
from rarebit.methods._shrinkage_counts import Counts, counts_of_rows, counts_of_table
from rarebit.methods._shrinkage_priors import Prior
from rarebit.methods.hashing import HashedTable
from rarebit.tables.find import Site, find_sites, table_parameters

__all__ = ["BetweenEpochs", "StoredRows", "restart_", "stored_rows"]


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of a table, `(N, D)`; what a prior has learned is none of them."""

    site: Site
    weight: Tensor
    padding: int | None
    parameter: nn.Parameter
    """What is trained, in whose memory they lie."""

    def counts(self, counts: Counts) -> Tensor:
        """Return how often each row was seen, `(N,)` on the CPU; of a bucket, all its ids."""
        table = self.site.table
        of_ids = counts_of_table(self.site.info.name, table.num_embeddings, counts)
        # buckets may lie deeper, as in a mask of several sets; all of a table's are alike
        hashed = (part for part in table.modules() if isinstance(part, HashedTable))
        return counts_of_rows(next(hashed, table), of_ids)


def stored_rows(model: nn.Module, asked_by: str) -> list[StoredRows]:
    """Return the rows of all tables of a model, or say that one of them stores none that are trained.

    >>> [tuple(rows.weight.shape) for rows in stored_rows(nn.Sequential(nn.Embedding(9, 4)), "a test")]
    [(9, 4)]
    """
    parameters = sorted(table_parameters(model).values(), key=Tensor.data_ptr)
    found = [rows for site in find_sites(model) for rows in _rows_of(site, parameters, asked_by)]
    if not found:
        raise UnsupportedTableError(
            f"{asked_by} changes rows of tables that store rows, and a table of this model does not"
        )
    _refuse_shared(found, asked_by)
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
    changed = {id(each.parameter) for each in rows}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in changed and parameter in optimizer.state:
                _restart_state(optimizer.state[parameter], group)


class BetweenEpochs(Attached):
    """Changes rows when the first step of an epoch has been made, from the second epoch on.

    Not before it: the last step of an epoch ends with its validation, which is of the rows as they are then.
    """

    def __init__(self, rows: Sequence[StoredRows], data: TrainingData, asked_by: str) -> None:
        if data.steps_per_epoch < 2:
            raise DataError(
                f"{asked_by} changes rows after the first step of an epoch, and an epoch has only one; use "
                "smaller batches"
            )
        self.steps_per_epoch = data.steps_per_epoch
        self.rows = rows
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
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(rows.parameter) in held for rows in self.rows):
                self.optimizer = optimizer


def _rows_of(site: Site, parameters: Sequence[nn.Parameter], asked_by: str) -> Iterator[StoredRows]:
    """Yield the rows of a table, whose parameters are among these, in the order of their memory."""
    tables = _plain_tables(site)
    homes = [_home(table.weight, parameters) for table in tables]
    # writing to a copy of what is trained would be lost
    if not homes or not all(home is not None and home.requires_grad for home in homes):
        raise UnsupportedTableError(
            f"{asked_by} changes rows that are stored and trained, and those of {site.info.name!r} are not; "
            "give the part of the model whose tables are"
        )
    for table, home in zip(tables, homes, strict=True):
        assert home is not None
        yield StoredRows(site, table.weight.detach(), table.padding_idx, home)


def _plain_tables(site: Site) -> list[nn.Embedding]:
    parts = list(site.table.modules())
    of_priors = {id(one) for part in parts if isinstance(part, Prior) for one in part.modules()}
    return [p for p in parts if isinstance(p, nn.Embedding) and id(p) not in of_priors]


def _home(weight: Tensor, parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """Return the parameter in whose memory a weight lies; parameters may be parts of one memory."""
    place = bisect_right(parameters, weight.data_ptr(), key=Tensor.data_ptr)
    home = parameters[place - 1] if place else None
    inside = home is not None and weight.data_ptr() < home.data_ptr() + home.nbytes
    return home if inside else None


def _refuse_shared(found: Sequence[StoredRows], asked_by: str) -> None:
    first: dict[int, str] = {}
    for rows in found:
        name = rows.site.info.name
        other = first.setdefault(rows.weight.data_ptr(), name)
        if other != name:
            raise UnsupportedTableError(
                f"{asked_by} changes each row once, and the tables {other!r} and {name!r} have the same ones; "
                "use one table in both places"
            )


def _restart_state(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    starts = {
        "sum": group.get("initial_accumulator_value", 0.0),  # Adagrad
        "mu_product": 1.0,  # NAdam
        "mu": 1.0,  # ASGD
        "eta": group["lr"],  # ASGD
        "step_size": group["lr"],  # Rprop
    }
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(starts.get(key, 0.0))
        elif key == "step":  # SparseAdam's is a number
            state[key] = 0
