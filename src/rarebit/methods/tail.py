"""The tail: shrink, forget and average, as one method without a dial (ours).

    e(i) = w_i v_i + (1 - w_i) p        w_i = n_i / (n_i + c)       in every lookup: `shrinkage`
    v_i' = n_i / (n_i + f) v_i          the optimizer restarts      between two epochs: `forgetting`
    a_t  = a_(t-1) + s (θ_t - a_(t-1))  a is evaluated and kept     in every step: `EMA`

    n_i    how often training sees the id in an epoch; 1 for the row of unknown values
    c      `Tail.c`: the median count of the table's ids, at most 100
    f      `Tail.forget`: 30
    v, p   `ShrunkTable.inner`, `ShrunkTable.prior`
    θ      the network, the priors, and rows with n_i >= f; s, the share of the newest weights, makes a an average over `Tail.memory` epochs: one

Each part covers for another. Shrinkage weighs a row by its evidence. Forgetting lets a rare row relearn in every epoch, so
that the network does not learn to trust rows that remember their labels, and keeps learning. The average takes the noise of the last
steps out of what training knows. It leaves rare rows out: one that is touched a few times in an epoch would be evaluated as it
was on its way, which is a second shrinkage. `Tail.average` has the other forms, for studies.

The memory is in epochs, so that batch size and log do not matter. The count of the row of unknown values, which stands for values
that training sees about once, is theirs.

Where no table has a tail, that is `LEAST_SHARE` of its lookups on ids that training sees less than `RARE` times, all of it is
plain training. Not for training that ends after a few epochs: the best epoch comes later, so it asks for more patience.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.callbacks import Average, Callback, TrainingData
from rarebit.data.dataset import Dataset
from rarebit.data.schema import UNKNOWN
from rarebit.ema import EMA, Batch
from rarebit.methods._counts import Evidence, set_counts_
from rarebit.methods.forgetting import PATIENCE, counted_rows, forget_rows_, restart_
from rarebit.methods.forgetting import C as RARE
from rarebit.methods.shrinkage import Shrinkage, Strength
from rarebit.settings import require
from rarebit.tables.apply import apply_, check_optimizer, merge_
from rarebit.tables.counts import Counts

__all__ = ["Tail"]

LEAST_SHARE = 0.01
"""The share of a table's lookups on rare ids from which on it has a tail."""
MEMORY = 1.0
"""Epochs that the average remembers."""
STEPS_IN_ONE_PASS = 40
"""Steps that count as an epoch in training in one pass, for the memory of the average."""

Averaged = Literal["network", "known", "all", "rows-anew", "all-anew"]


@dataclass(frozen=True, kw_only=True)
class Tail(Shrinkage):
    """Shrink and forget rare rows, and average the weights.

    Through `fit`: `fit(model, train, valid, callbacks=[Tail()])`. In your own loop, `start` returns what to call.

    >>> Tail()
    Tail(c='rare', prior='mean', forget=30.0, memory=1.0, average='known')
    """

    title: ClassVar[str] = "rare rows shrunk and forgotten, weights averaged: no dial"
    paper: ClassVar[str] = "none: shrinkage, forgetting and an average of the weights as one method"
    cost: ClassVar[str] = (
        "that of shrinkage and of an average of the weights per step; writes all rows once per epoch"
    )
    applies: ClassVar[str] = (
        "logs with many rare ids; where there are none it is plain training; not where training ends before "
        "validation says so"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "forget": (RARE, 10.0, 100.0),
        "memory": (MEMORY, 0.3, 3.0),
    }
    patience: ClassVar[int] = PATIENCE
    averages: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        "forgetting": "tail forgets rows already; use one of them",
        "pep": "learned thresholds would cut what is forgotten; prune first",
        "pruned": "it trains in two stages; use shrinkage:prior=zero+pruned+forgetting",
    }

    c: Strength = "rare"
    forget: float = RARE
    """How often training must see an id in an epoch to keep half of its row from one epoch to the next."""
    memory: float = MEMORY
    """Epochs that the average of the weights remembers: its decay is exp(-1 / (memory * steps per epoch)). Settings of
    training that average in another way come first."""
    average: Averaged = "known"
    """What is averaged: all but rows that training sees less than `forget` times, the "known" ones; the "network" and no rows;
    "all"; all, but "rows-anew" when they are forgotten; or "all-anew" then. Rows that are not averaged stay as the last step left
    them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("forget", "memory"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name} must be above 0 and finite, got {name}={value}")

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.forget, self.memory, self.average))

    @classmethod
    def suggestion(cls, counts: Mapping[str, Tensor]) -> str:
        """Suggest the method where a table has a long tail."""
        shares = {name: tail_share(numbers) for name, numbers in counts.items()}
        name = max(shares, key=shares.__getitem__, default="")
        if not name or shares[name] < LEAST_SHARE:
            return ""
        return (
            f"{shares[name]:.0%} of the lookups of {name!r} are of ids seen less than {RARE:g} times: try --methods tail. On six "
            "logs it changed the AUC by +0.002 to +0.013, and compared with tuned plain tables by -0.001 to +0.011 (docs/tail.md)."
        )

    def prepare_(self, model: nn.Module, train: Dataset) -> None:
        """Count how often training will see each row."""
        set_counts_(model, known_counts(train))

    def callback(self) -> "_Tail":
        """Return what forgets rows between epochs, and says how to average."""
        return _Tail(self)

    def start(
        self, model: nn.Module, optimizer: Optimizer, counts: Counts, *, steps_per_epoch: int
    ) -> "RunningTail":
        """Shrink the tables of a model and follow its optimizer, in your own loop.

        Counts come by the names of tables or of their fields: how often an epoch has each id. One optimizer holds the
        tables and the network.

        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> tail = Tail().start(model, optimizer, torch.tensor([90, 0, 5]), steps_per_epoch=1)
        >>> for epoch in range(2):
        ...     model(torch.tensor([0, 2])).sum().backward()
        ...     optimizer.step()
        ...     with tail.averaged():  # evaluate and save here
        ...         scores = model(torch.tensor([0, 2]))
        ...     tail.between_epochs()
        >>> tail.end()  # the averages, in plain tables
        >>> model
        Sequential(
          (0): Embedding(3, 2)
          (1): Linear(in_features=2, out_features=1, bias=True)
        )
        """
        return RunningTail(self.callback(), model, optimizer, counts, steps_per_epoch)


class _Tail(Callback):
    def __init__(self, method: Tail) -> None:
        self.method = method

    def start(self, model: nn.Module, data: TrainingData) -> None:
        steps = STEPS_IN_ONE_PASS if data.one_pass else data.steps_per_epoch
        self.begin(model, known_counts(data.train), steps, is_known=not data.one_pass)

    def begin(
        self,
        model: nn.Module,
        counts: Counts,
        steps_per_epoch: int,
        *,
        optimizer: Optimizer | None = None,
        is_known: bool = True,
    ) -> None:
        """Shrink the tables, unless that was done, and see whether they have a tail, if counts are known already."""
        self.model = model
        shrunk = [m for m in model.modules() if isinstance(getattr(m, "method", None), Tail)]
        self.has_applied = not shrunk
        if self.has_applied:
            apply_(model, self.method.with_counts(counts), optimizer=optimizer, verbose=False)
        self.rows, self.seen = counted_rows(model, "tail", counts)
        self.share = max(map(tail_share, self.seen))
        self.has_tail = self.share >= LEAST_SHARE or not is_known
        if self.has_tail:
            decay = math.exp(-1.0 / (self.method.memory * steps_per_epoch))
            rows = tuple(each.parameter for each in self.rows)
            held = {id(parameter) for parameter in rows}
            has_more = any(p.requires_grad and id(p) not in held for p in model.parameters())
            if self.method.average == "known":
                self.average = Average(decay, leave_out_rows=tuple(self._unknown()))
            elif self.method.average != "network":
                self.average = Average(decay)
            elif has_more:  # a model may be nothing but tables
                self.average = Average(decay, rows)
            return
        self.note = (
            f"tail: at most {self.share:.1%} of the lookups of a table are of ids seen less than {RARE:g} times, so "
            "there is no tail, and training is plain"
        )
        for module in model.modules():
            if isinstance(module, Evidence):
                module.strength.zero_()

    def _unknown(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the rows that training sees less than `Tail.forget` times, with the parameter that holds them."""
        found: dict[nn.Parameter, list[Tensor]] = {}
        for rows, seen in zip(self.rows, self.seen, strict=True):
            held = rows.parameter
            first = rows.start // held.stride(0)
            rare = (seen < self.method.forget).nonzero().flatten()
            found.setdefault(held, []).append(rare + first)
        for parameter, places in found.items():
            yield parameter, torch.cat(places).unique()

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> Collection[nn.Parameter]:
        del epoch
        if not self.has_tail:
            return ()
        forget_rows_(self.rows, self.seen, self.method.forget)
        restart_(optimizer, self.rows)
        if self.method.average == "rows-anew":
            return [each.parameter for each in self.rows]
        return list(self.model.parameters()) if self.method.average == "all-anew" else ()

    def report(self) -> dict[str, Any]:
        return {"share": self.share, "has_tail": self.has_tail}

    def close(self) -> None:
        if self.has_applied:
            merge_(self.model, verbose=False)


class RunningTail:
    """The method in your own loop."""

    def __init__(
        self,
        parts: _Tail,
        model: nn.Module,
        optimizer: Optimizer,
        counts: Counts,
        steps_per_epoch: int,
    ) -> None:
        check_optimizer(model, optimizer)
        require(
            steps_per_epoch >= 1,
            f"an epoch has at least one step, got steps_per_epoch={steps_per_epoch}",
        )
        parts.begin(model, counts, steps_per_epoch, optimizer=optimizer)
        self._parts, self._optimizer = parts, optimizer
        average = parts.average
        self._ema: EMA | None = None
        if average is not None:
            self._ema = EMA(
                model,
                optimizer,
                average.decay,
                leave_out=average.leave_out,
                leave_out_rows=average.leave_out_rows,
            )

    def averaged(
        self,
        batches: Iterable[Batch] | None = None,
        call: Callable[[nn.Module, Batch], object] | None = None,
    ) -> AbstractContextManager[None]:
        """Put the averages into the model for the time of a `with` block: to evaluate and to save.

        A network with batch normalisation needs batches of training data, some 16,000 rows; `call(model, batch)` runs the model on one, by
        default `model(batch)`.
        """
        return nullcontext() if self._ema is None else self._ema.applied(batches, call)

    def between_epochs(self) -> None:
        """Forget rows; call it after each epoch, and after its evaluation."""
        if self._ema is not None:
            self._ema.bring_up_to_date()
        begun = self._parts.between_epochs(0, self._optimizer)
        if self._ema is not None:
            self._ema.restart(begun)

    def state_dict(self) -> dict[str, Any]:
        """Return what the coming steps depend on besides model and optimizer; the tensors are not copies."""
        return {} if self._ema is None else self._ema.training_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to the last bit from what `state_dict` returned for a model like this one."""
        if self._ema is not None:
            self._ema.load_training_state(state)

    def end(
        self,
        batches: Iterable[Batch] | None = None,
        call: Callable[[nn.Module, Batch], object] | None = None,
    ) -> None:
        """Leave the averages in the model, in plain tables, and follow the optimizer no more; batches as in `averaged`."""
        if self._ema is not None:
            self._ema.copy_to(self._parts.model, batches, call)
            self._ema.close()
            self._ema = None
        self._parts.close()


def known_counts(train: Dataset) -> dict[str, Tensor]:
    """Return how often training sees each id; the row of unknown values counts as one.

    It stands for values that training sees about once, and new data looks it up far more often than training does. So it
    must be treated as the rows are that it stands for.
    """
    counts = train.counts()
    for field in train.schema.table_fields:
        if field.vocabulary:  # else ids are the user's own
            counts[field.name] = counts[field.name].clone()
            counts[field.name][UNKNOWN] = counts[field.name][UNKNOWN].clamp(max=1)
    return counts


def tail_share(counts: Tensor) -> float:
    """Return the share of the lookups of a table that are of rare ids, from the counts of its rows.

    >>> import torch
    >>> tail_share(torch.tensor([60, 15, 0, 25]))
    0.4
    """
    total = int(counts.sum())
    return int(counts[counts < RARE].sum()) / total if total else 0.0
