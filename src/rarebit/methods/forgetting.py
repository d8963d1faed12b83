"""Forgetting: from one epoch to the next a row keeps as much of itself as it has evidence (ours).

    row' = n / (n + c) · row        and the optimizer starts again with the tables

    n      how often training sees the id in an epoch
    c      `Forgetting.c`: an id seen c times keeps half of its row

In its first epoch a rare row is fitted to the few labels it has. In the second one the network finds a row that
remembers the label it is asked for, and learns to trust such rows; that is why models of logs with many rare ids
are best after one epoch. A row that has forgotten its label is as honest in the second epoch as in the first, and the
network goes on learning. Rows of frequent ids have nothing to unlearn, and keep what they are.

The optimizer starts again with the tables, also with c = 0: its moments are those of rows that were. Under Adam with weight
decay that forgets, too: without moments the decay carries rows to zero that are not looked up (`docs/tail.md`). The
network, and what a method learns beside rows, such as a prior, goes on.

Where `fresh-tables` lets go of every row alike, this is `shrinkage` from epoch to epoch: the same weight, n / (n + c). Both
go together. Not for training in one pass, nor where training is cut off after a few epochs: what is forgotten is learned
again, and the best epoch comes later, up to four times as late in our studies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.callbacks import TrainingData, TrainingMethod
from rarebit.methods._neighbour_pairs import neighbour_pairs
from rarebit.methods._shrinkage_counts import Counts
from rarebit.methods._stored_rows import BetweenEpochs, StoredRows, restart_, stored_rows
from rarebit.settings import check_types, require
from rarebit.tables.optimizer_state import check
from rarebit.tables.table import CHUNK, Pair

__all__ = ["Forgetting", "forget_"]

C = 30.0
"""How often an id must be seen to keep half of its row."""

AFTER, BEFORE = neighbour_pairs(
    "the rows that it stores are forgotten in part",
    {"pep": "thresholds that are being learned would cut what is forgotten; prune first"},
)


@dataclass(frozen=True, kw_only=True)
class Forgetting(TrainingMethod):
    """Let rows keep n / (n + c) of themselves from one epoch to the next.

    >>> Forgetting()
    Forgetting(c=30.0)
    """

    title: ClassVar[str] = "rows of rare ids forgotten in part after each epoch"
    paper: ClassVar[str] = (
        "none: the weights of shrinkage for what Liu et al., Multi-Epoch Learning, 2023, draw anew"
    )
    control: ClassVar[str] = "tuned"
    cost: ClassVar[str] = "nothing in a step; all rows are written once an epoch"
    applies: ClassVar[str] = (
        "logs with many rare ids, on which models are best after one epoch or a few; not where training ends "
        "before validation says so"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"c": (C, 10.0, 100.0, 0.0)}
    pairs: ClassVar[Mapping[str, Pair]] = AFTER
    pairs_before: ClassVar[Mapping[str, Pair]] = BEFORE

    c: float = C
    """How often an id must be seen in an epoch to keep half of its row; 0: rows stay, and only the optimizer
    starts again."""

    def __post_init__(self) -> None:
        check_types(self)
        _check(self.c)

    def attach(self, model: nn.Module, data: TrainingData) -> "_Forgetting":
        """Let the rows of a model be forgotten in part in every epoch of its training but the first."""
        return _Forgetting(model, data, self.c)


def forget_(model: nn.Module, optimizer: Optimizer, counts: Counts, *, c: float = C) -> None:
    """Let all rows of a model's tables keep n / (n + c) of themselves, in place: between two epochs.

    The optimizer starts again with the tables. Counts are by the names of tables or of their fields, as
    in `Shrinkage`: how often an epoch has each id.

    >>> table = nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False)
    >>> forget_(table, torch.optim.Adam(table.parameters()), torch.tensor([90, 0, 30]))
    >>> table.weight.detach()
    tensor([[0.7500, 0.7500],
            [0.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    _check(c)
    rows = stored_rows(model, "forget_")
    check(model, optimizer)
    _forget_(rows, [each.counts(counts) for each in rows], c)
    restart_(optimizer, rows)


class _Forgetting(BetweenEpochs):
    """Lets rows be forgotten between two steps."""

    def __init__(self, model: nn.Module, data: TrainingData, c: float) -> None:
        # first: where counts are refused, no hook may be left
        rows, counts = stored_rows(model, "forgetting"), data.train.counts()
        self.c, self.seen = c, [each.counts(counts) for each in rows]
        super().__init__(rows, data, "forgetting")

    def change_(self, num_epochs: int) -> bool:
        """Let rows keep what they have evidence for."""
        del num_epochs
        _forget_(self.rows, self.seen, self.c)
        return True


@torch.no_grad()
def _forget_(tables: Sequence[StoredRows], seen: Sequence[Tensor], c: float) -> None:
    """Let rows `(N, D)` of each table keep what they have evidence for, by counts `(N,)`."""
    if c == 0:
        return
    for table, counts in zip(tables, seen, strict=True):
        for rows, n in zip(table.weight.split(CHUNK), counts.split(CHUNK), strict=True):
            share = n / (n.double() + c)  # (n,), in double precision: c may be as small as you like
            rows.mul_(share.unsqueeze(1).to(rows))


def _check(c: float) -> None:
    require(0 <= c < math.inf, f"c must be 0 or more and finite, got c={c}")
