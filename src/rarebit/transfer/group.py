"""The tables behind one lookup, as a transfer sees them: their sides, their loss, their ledger."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection
from rarebit.errors import DataError, TrainingError, UnsupportedTableError
from rarebit.tables.find import Site, find_sites
from rarebit.tables.lookups import RowGroup, wide
from rarebit.tables.row_gradients import RowGradients
from rarebit.tables.sets import SetsMethod
from rarebit.tables.table import method_name, methods_of
from rarebit.transfer.batch import Picked, TransferBatch
from rarebit.transfer.compiled import Part
from rarebit.transfer.draws import Draws
from rarebit.transfer.ledger import REMEMBERED, GroupLedger
from rarebit.transfer.lexico import Barrier
from rarebit.transfer.sides import Sides, find_selection, selection_name
from rarebit.transfer.transfer_loss import LossTables, TransferLoss

__all__ = ["BarrierRule", "Found", "TransferGroup", "start_groups"]

BarrierRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Barrier]
"""Main and transfer gradients `(U, M, D)`, the main loss and alpha to one gradient a row."""

MASKED = frozenset({"masked", "pruned"})
"""Methods whose tables have entries that are zero for good."""
ABSENT = 3 << 29
"""Where the places of random numbers begin that say which rare rows outside the batch move."""
OTHER_SIDE = 1 << 30
"""Where the places of random numbers begin that are drawn for a sample of rare rows."""


class Found(NamedTuple):
    """What the transfer loss wants of the rows of a step."""

    gradient: Tensor
    """The transfer gradient, `(U, M, D)`."""
    losses: Tensor
    """The transfer loss of each table, `(F,)`."""
    accuracy: Tensor | None
    """The share of rows that a discriminator told right, `(F,)`, where there is one."""
    picked: Picked
    """Rows for the ledger to remember."""


class TransferGroup:
    """One group of `RowGradients.tables` with all that a transfer needs of it."""

    def __init__(
        self,
        rows: RowGradients,
        number: int,
        sites: Sequence[Site],
        parts: Sequence[FieldSelection],
        *,
        loss: TransferLoss,
        samples: int,
        both: bool,
    ) -> None:
        group, table = rows.tables[number], sites[0].table
        weight = next(table.parameters())
        self.names = tuple(site.info.name for site in sites)
        self.parts = tuple(parts)
        self.starts = group.first_rows[: len(sites)]
        self.device, self.dtype = weight.device, wide(weight.dtype)
        self.is_masked = any(method_name(method) in MASKED for method in methods_of(table))
        sides = Sides.of(parts, sites, skip_empty=self.is_masked)
        self.sides = sides.to(self.device)
        self.first_rows = torch.tensor(self.starts).to(self.device)
        self._num_sets, self._width = _sets(sites[0], group)
        self._rows, self._number = rows, number
        self._samples, self._both, self._every_row = samples, both, loss.every_row
        shape = (self._num_sets, self._width)
        tables = LossTables(self.names, *shape, self.device, self.dtype, sides.relatives)
        self.running = loss.start(tables)
        # one more, which slots without a row have: their id is -1
        moves = sides.target | sides.source if loss.every_row else sides.target
        self._may_move = torch.cat([moves, moves.new_zeros(1)]).to(self.device)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.ledger = GroupLedger(self.names, *shape, like)
        self._draw = Part(TransferGroup.draw, self, "the sample")
        self._find = Part(TransferGroup.find, self, "the loss")
        self._weigh = Part(TransferGroup.weigh, self, "the barrier")

    def compile(self, say: Callable[[str], object]) -> None:
        """Let the parts of a step be compiled; `say` takes a line for each that cannot be."""
        for part in (self._draw, self._find, self._weigh):
            part.compile(say)

    def check_home(self, rows: Tensor) -> None:
        """Raise when the model was moved after the transfer was made."""
        if (rows.device, rows.dtype) != (self.device, self.dtype):
            raise TrainingError(
                f"the transfer was made for {self.names[0]!r} in {self.dtype} on {self.device}, which is now "
                f"in {rows.dtype} on {rows.device}; make it after the model is where it trains"
            )

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows `(n, F, M, D)` for ids `(n, F)` of each table, without their history."""
        rows = self._rows.look_up(self._number, ids)
        return rows.reshape(*ids.shape, self._num_sets, self._width).to(self.dtype)

    def prepare(self, ids: Tensor, rows: Tensor, draws: Draws) -> tuple[TransferBatch, Found]:
        """Return the rows of a step, and what the transfer loss wants of them."""
        turn, wanted = self._draw(0, draws)
        read = self.look_up(wanted)
        batch = TransferBatch(
            ids=ids,
            table=torch.bucketize(ids, self.first_rows[1:], right=True),
            rows=rows.reshape(-1, self._num_sets, self._width).detach().requires_grad_(),
            moves=self._may_move[ids],
            others=read[: self._samples].transpose(0, 1),
            turn=turn,
            draws=draws,
            look_up=self.look_up,
        ).with_totals()
        flipped = self._flipped(batch) if self._both and not self._every_row else None
        return batch, self._find(len(ids), batch, flipped, read[self._samples :])

    def answer(
        self,
        rule: BarrierRule,
        batch: TransferBatch,
        main: Tensor,
        found: Found,
        loss: Tensor,
        *,
        alpha: float,
    ) -> Tensor:
        """Return one gradient a row, `(U, M, D)`."""
        return self._weigh(len(main), rule, batch, main, found, loss, alpha=alpha)

    def draw(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return a random number a table, `(F,)`, and ids to look up, `(n, F)`.

        One lookup for both: a sample of frequent rows, then what the ledger wants to see again.
        """
        uniform = draws.uniform(1 + self._samples, len(self.names))
        sampled = self.sides.frequent.sample(uniform[1:])  # (S, F)
        return uniform[0], torch.cat([sampled, self.ledger.ids])

    def find(self, batch: TransferBatch, flipped: TransferBatch | None, again: Tensor) -> Found:
        """Return what the transfer loss wants; the ledger sees its rows `(P, F, M, D)` again."""
        self.ledger.compare(again)
        accuracy = self.running.learn(batch)
        losses, gradient = self.running.loss_and_gradient(batch)
        if flipped is not None:
            gradient = gradient + self.running.loss_and_gradient(flipped)[1]
        if self.is_masked:
            gradient = gradient * (batch.rows.detach() != 0)
        return Found(gradient, losses, accuracy, batch.pick(REMEMBERED))

    def weigh(
        self,
        rule: BarrierRule,
        batch: TransferBatch,
        main: Tensor,
        found: Found,
        loss: Tensor,
        *,
        alpha: float,
    ) -> Tensor:
        """Return one gradient a row, `(U, M, D)`, and tell the ledger."""
        if self.is_masked:
            main = main * (batch.rows.detach() != 0)
        made = rule(main, found.gradient, loss, alpha)
        self.ledger.add(batch, made, found.gradient, found.losses, found.accuracy, alpha=alpha)
        self.ledger.remember(batch, found.picked, main, made, self.first_rows)
        return made.gradient

    def absent_ids(self, draws: Draws, number: int) -> Tensor:
        """Return ids of so many rare rows of each table, in the batch or not, `(n, F)`."""
        return self.sides.rare.ring(draws.uniform(len(self.names), first=ABSENT), number)

    def _flipped(self, batch: TransferBatch) -> TransferBatch:
        """Return the batch with the sides exchanged: its frequent rows move to a sample of rare ones."""
        ids = batch.ids.clamp(min=0)
        uniform = batch.draws.uniform(self._samples, len(self.names), first=OTHER_SIDE)
        others = self.look_up(self.sides.rare.sample(uniform)).transpose(0, 1)
        has_rare = (self.sides.rare.counts > 0).index_select(0, batch.table)
        moves = self.sides.source.index_select(0, ids) & (batch.ids >= 0) & has_rare
        return replace(batch, moves=moves, others=others, flipped=True).with_totals()


def start_groups(
    rows: RowGradients,
    select: Selection | CoOccurrence | FrequencySplit | None,
    counts: Mapping[str, Tensor] | Tensor | None,
    data: Dataset | Tensor | None,
    *,
    loss: TransferLoss,
    samples: int,
    both: bool,
) -> list[TransferGroup]:
    """Return the groups of tables of a model, each with its sides and its loss."""
    known = {site.info.name: site for site in find_sites(rows.model)}
    sites = [[known[name] for name in _distinct(group)] for group in rows.tables]
    every = [site for group in sites for site in group]
    for site in every:
        if any(method_name(method) == "pep" for method in methods_of(site.table)):
            raise UnsupportedTableError(
                f"{site.info.name!r} has thresholds that are still learned, which a transfer would move, "
                "too; prune first, and transfer while the pruned tables are trained again"
            )
    if isinstance(counts, Tensor):
        counts = _counts_of_one(counts, every)
    offered = list(select.fields if isinstance(select, Selection) else counts or ())
    names = {site.info.name: selection_name(site, offered) for site in every} if offered else {}
    selection = find_selection(select, counts, data, list(dict.fromkeys(names.values())))
    groups = []
    for number, group in enumerate(sites):
        parts = [selection[names[site.info.name]] for site in group]
        for part, site in zip(parts, group, strict=True):
            _check_rows(part, site)
        made = TransferGroup(rows, number, group, parts, loss=loss, samples=samples, both=both)
        groups.append(made)
    return groups


def _distinct(group: RowGroup) -> Sequence[str]:
    """Return the names of a group's tables; of one weight under several names, the first."""
    return group.names[: len(set(group.first_rows))]


def _counts_of_one(counts: Tensor, sites: Sequence[Site]) -> dict[str, Tensor]:
    if len(sites) != 1:
        raise DataError(
            f"one tensor of counts is for one table, but {len(sites)} are chosen: "
            f"{', '.join(site.info.name for site in sites)}; give a mapping by name, or choose with where="
        )
    return {sites[0].info.name: counts}


def _check_rows(part: FieldSelection, site: Site) -> None:
    if len(part.source) != site.info.rows:
        raise DataError(
            f"{site.info.name!r} has {site.info.rows} rows, but was counted in {len(part.source)}; give the "
            "counts of the data that it is trained on"
        )


def _sets(site: Site, group: RowGroup) -> tuple[int, int]:
    """Return the number of embedding sets that lie side by side in a row, and the width of one."""
    methods = [method for method in methods_of(site.table) if isinstance(method, SetsMethod)]
    sets = methods[0].num_sets if methods else 1
    return sets, group.width // sets
