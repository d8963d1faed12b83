"""Forgetting: after each epoch a row keeps only the part of itself that has evidence (ours).

    row' = n / (n + c) · row        and the optimizer restarts for the tables

    n      how often training sees the id in an epoch
    c      `Forgetting.c`: an id seen c times keeps half of its row

In its first epoch a rare row is fitted to its few labels. In the second epoch the network finds rows that remember the
label it has to predict, and learns to trust them; that is why models of logs with many rare ids are best after one epoch.
A row that has forgotten its labels does not reveal them in the second epoch, and the network continues to learn. Rows of
frequent ids stay as they are.

The optimizer restarts for the tables, also with c = 0: its moments belong to the rows before. Under Adam with weight decay
the restart itself forgets: without moments the decay moves rows to zero that no lookup touches (`docs/tail.md`). The network,
and what a method learns besides rows, such as a prior, continue.

Where `fresh-tables` resets all rows alike, this is `shrinkage` between epochs, with the same weight n / (n + c). Both
work together. Not for training in one pass, nor where training stops after a few epochs: rows must relearn what they forget,
and the best epoch comes up to four times later in our studies.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.errors import UnsupportedTableError, warn
from rarebit.methods._counts import counts_of_rows
from rarebit.methods.hashing import HashedTable
from rarebit.settings import check_types, require
from rarebit.tables.apply import check_optimizer, find_sites, table_parameters
from rarebit.tables.counts import Counts, counts_of_table
from rarebit.tables.table import CHUNK, AnyTable, TablePiece

__all__ = ["Forgetting"]

C = 30.0
"""How often training must see an id in an epoch to keep half of its row."""
PATIENCE = 6
"""Epochs without improvement before training stops: rows relearn what they forget, and validation rises in a zigzag."""
LEAST = 1e-6
"""A row that keeps no more of itself has forgotten everything."""


@dataclass(frozen=True, kw_only=True)
class Forgetting(TrainingMethod):
    """Let rows keep n / (n + c) of themselves from one epoch to the next.

    >>> Forgetting()
    Forgetting(c=30.0)
    """

    title: ClassVar[str] = "rows of rare ids partly forgotten after each epoch"
    paper: ClassVar[str] = (
        "none: the weights of shrinkage, where Liu et al., Multi-Epoch Learning, 2023, reset all rows"
    )
    control: ClassVar[str] = "tuned"
    cost: ClassVar[str] = "nothing per step; writes all rows once per epoch"
    applies: ClassVar[str] = (
        "logs with many rare ids, on which models are best after one epoch or a few; not where training ends "
        "before validation says so"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (C, 10.0, 100.0, 0.0)}
    patience: ClassVar[int] = PATIENCE
    excludes: ClassVar[Mapping[str, str]] = {
        "pep": "learned thresholds would cut what is forgotten; prune first"
    }

    c: float = C
    """How often training must see an id in an epoch to keep half of its row; 0: rows stay, and only the optimizer
    restarts."""

    def __post_init__(self) -> None:
        check_types(self)
        _check(self.c)

    def callback(self) -> "_Forgetting":
        """Return what forgets rows before every epoch but the first."""
        return _Forgetting(self.c)


def forget_(model: nn.Module, optimizer: Optimizer, counts: Counts, *, c: float = C) -> None:
    """Let all rows of a model's tables keep n / (n + c) of themselves, in place: call it between two epochs.

    The optimizer restarts for the tables. Counts come by the names of tables or of their fields, as in `Shrinkage`: how
    often an epoch has each id.

    >>> table = nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False)
    >>> forget_(table, torch.optim.Adam(table.parameters()), torch.tensor([90, 0, 30]))
    >>> table.weight.detach()
    tensor([[0.7500, 0.7500],
            [0.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    _check(c)
    rows = stored_rows(model, "forget_")
    check_optimizer(model, optimizer)
    forget_rows_(rows, [each.counts(counts) for each in rows], c)
    restart_(optimizer, rows)


@torch.no_grad()
def forget_rows_(tables: Sequence["StoredRows"], seen: Sequence[Tensor], c: float) -> None:
    if c == 0:
        return
    lost = [
        repr(table.name)
        for table, counts in zip(tables, seen, strict=True)
        if not bool((counts / (counts.double() + c) > LEAST).any())
    ]
    if lost:
        warn(
            f"with c={c:g} no row of {', '.join(dict.fromkeys(lost))} keeps anything of itself; use a smaller c, or the "
            "counts of the training data"
        )
    for table, counts in zip(tables, seen, strict=True):
        for rows, n in zip(table.weight.split(CHUNK), counts.split(CHUNK), strict=True):
            share = n / (n.double() + c)  # in double precision: c may be tiny
            rows.mul_(share.unsqueeze(1).to(rows))


def _check(c: float) -> None:
    require(0 <= c < math.inf, f"c must be 0 or more and finite, got c={c}")


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredRows:
    """The rows of a table, `(N, D)`: a part of a parameter, wherever its memory lies by then."""

    name: str
    """The name of the table."""
    table: AnyTable | None
    """What `counts` are asked of; None where they are known."""
    parameter: nn.Parameter
    """The trained parameter whose memory holds them."""
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    """Their first number in the parameter."""
    padding: int | None
    first_row: int = 0
    """The row of the table that is the first here, where other processes hold the others."""

    @property
    def weight(self) -> Tensor:
        """The rows, to be changed in place."""
        held = self.parameter.detach()
        return held.as_strided(self.shape, self.stride, held.storage_offset() + self.start)

    def counts(self, counts: Counts) -> Tensor:
        """Return how often training saw each row, `(N,)` on the CPU; a bucket has the counts of all its ids."""
        assert self.table is not None, "its counts are known"
        of_ids = counts_of_table(self.name, self.table.num_embeddings, counts)
        # buckets may lie deeper, as in a mask of several sets; all of a table's are alike
        hashed = (part for part in self.table.modules() if isinstance(part, HashedTable))
        seen = counts_of_rows(next(hashed, self.table), of_ids)
        return seen[self.first_row : self.first_row + self.shape[0]]


def counted_rows(
    model: nn.Module, asked_by: str, counts: Counts
) -> tuple[list[StoredRows], list[Tensor]]:
    """Return the rows of all tables of a model, and how often training saw each."""
    rows = stored_rows(model, asked_by)
    return [replace(each, table=None) for each in rows], [each.counts(counts) for each in rows]


def stored_rows(model: nn.Module, asked_by: str) -> list[StoredRows]:
    """Return the rows of all tables of a model, or raise where a table stores no trained rows."""
    parameters = sorted(table_parameters(model).values(), key=Tensor.data_ptr)
    found, names = [], dict[int, str]()
    for site in find_sites(model):
        name = site.info.name
        tables = [part for part in site.table.modules() if isinstance(part, nn.Embedding)]
        pieces = [table for table in tables if isinstance(table, TablePiece)]
        if pieces:
            tables = [piece for piece in pieces if piece.weight.numel()]
            if not tables:  # other processes hold all of it
                continue
        homes = [_home(table.weight, parameters) for table in tables]
        for table, home in zip(tables, homes, strict=True):
            if home is not None and home.requires_grad:
                weight, first = table.weight, getattr(table, "first_row", 0)
                found.append(
                    StoredRows(
                        name=name,
                        table=site.table,
                        parameter=home,
                        shape=weight.shape,
                        stride=weight.stride(),
                        start=int(weight.storage_offset() - home.storage_offset()),
                        padding=table.padding_idx,
                        first_row=first,
                    )
                )
            other = names.setdefault(table.weight.data_ptr(), name)
            if other != name:
                raise UnsupportedTableError(
                    f"{asked_by} changes each row once, and the tables {other!r} and {name!r} share their "
                    "rows; use one table in both places"
                )
        # a change to a copy of the trained weights would be lost
        if not homes or not all(home is not None and home.requires_grad for home in homes):
            raise UnsupportedTableError(
                f"{asked_by} changes stored rows that are trained, and those of {name!r} are not; give the "
                "part of the model whose tables are trained"
            )
    if not found:
        raise UnsupportedTableError(
            f"{asked_by} changes the stored rows of tables, and no table of this model stores rows"
        )
    return found


def _home(weight: Tensor, parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """Return the parameter, of these in memory order, whose memory holds a weight."""
    place = bisect_right(parameters, weight.data_ptr(), key=Tensor.data_ptr)
    home = parameters[place - 1] if place else None
    inside = home is not None and weight.data_ptr() < home.data_ptr() + home.nbytes
    return home if inside else None


def restart_(optimizer: Optimizer, rows: Sequence[StoredRows]) -> None:
    """Reset the optimizer state of rows, in the memory that a recorded step writes to."""
    changed = {id(each.parameter) for each in rows}
    for group in optimizer.param_groups:
        starts = {
            "sum": group.get("initial_accumulator_value", 0.0),  # Adagrad
            "mu_product": 1.0,  # NAdam
            "mu": 1.0,  # ASGD
            "eta": group.get("lr", 0.0),  # ASGD
            "step_size": group.get("lr", 0.0),  # Rprop
        }
        for parameter in group["params"]:
            if id(parameter) not in changed or parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.fill_(starts.get(key, 0.0))
                elif key == "step":  # a number in SparseAdam
                    state[key] = 0


class _Forgetting(Callback):
    def __init__(self, c: float) -> None:
        self.c = c

    def start(self, model: nn.Module, data: TrainingData) -> None:
        self.rows, self.seen = counted_rows(model, "forgetting", data.train.counts())

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> None:
        del epoch
        forget_rows_(self.rows, self.seen, self.c)
        restart_(optimizer, self.rows)
