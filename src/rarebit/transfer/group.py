"""The tables behind one lookup, as a transfer sees them: who is frequent and rare, their loss, their ledger.

A selection is a property of the data, by field and id (`data/selection.py`). Here it becomes masks over the rows
of a group, and lists that a step can sample from, on the device of the tables.

Parts of a step may be compiled: a few kernels in place of dozens of small ones. On a GPU each kernel costs its
launch, and the parts of a transfer are small. Where sizes depend on the ids, as on the CPU, most steps have
their own size and run uncompiled.

Shapes: N rows of the group, F tables, U distinct rows of a step, M embedding sets, D the width of one.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection, select
from rarebit.errors import DataError, TrainingError, UnsupportedTableError
from rarebit.row_gradients.lookups import wide
from rarebit.row_gradients.recorded import is_recording
from rarebit.row_gradients.seam import RowGradients
from rarebit.sets.sets import SetsMethod
from rarebit.settings import suggest
from rarebit.tables.apply import Site, find_sites
from rarebit.tables.table import full_table, methods_of
from rarebit.technique import technique_name
from rarebit.transfer.batch import Draws, Picked, TransferBatch
from rarebit.transfer.ledger import REMEMBERED, GroupLedger
from rarebit.transfer.lexico import BarrierRule
from rarebit.transfer.losses import LossTables, TransferLoss

__all__ = ["Found", "TransferGroup", "start_groups"]

ABSENT = 3 << 29
"""The first place of the random numbers that choose rare rows outside the batch."""
OTHER_SIDE = 1 << 30
"""The first place of the random numbers that sample rare rows."""


@dataclass(frozen=True)
class Listed:
    """The frequent or the rare ids of each table, one table after the other."""

    ids: Tensor
    starts: Tensor
    """Where the list of each table begins, `(F,)`."""
    ends: Tensor
    """Its last place, `(F,)`."""
    counts: Tensor
    """The number of ids of each table, `(F,)`; a table without any lists row 0."""

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device | None = None) -> "Listed":
        """Return the ids that masks hold, on a device."""
        ids = [mask.nonzero()[:, 0] for mask in masks]
        counts = torch.tensor([len(part) for part in ids])
        listed = [part if len(part) else torch.zeros(1, dtype=torch.int64) for part in ids]
        ends = counts.clamp(min=1).cumsum(0)
        tensors = (torch.cat(listed), ends - counts.clamp(min=1), ends - 1, counts)
        return cls(*(tensor.to(device) for tensor in tensors))

    def sample(self, uniform: Tensor) -> Tensor:
        """Return ids of each table by random numbers in [0, 1), `(S, F)`, with replacement."""
        # a product may be rounded up to the count itself
        places = torch.minimum((uniform * self.counts).long() + self.starts, self.ends)
        return self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)

    def ring(self, turn: Tensor, number: int) -> Tensor:
        """Return different ids of each table, `(number, F)`, below zero where it has fewer.

        They are neighbours in a ring that begins where random numbers `(F,)` in [0, 1) point.
        """
        step = torch.arange(number, device=self.ids.device).unsqueeze(1)
        places = ((turn * self.counts).long() + step) % self.counts.clamp(min=1) + self.starts
        ids = self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)
        return torch.where(step < self.counts, ids, -1)


@dataclass(frozen=True)
class Sides:
    """The frequent and the rare rows of a group."""

    source: Tensor
    """The frequent rows, `(N,)` of bools."""
    target: Tensor
    """The rare rows that may move, `(N,)` of bools."""
    frequent: Listed
    rare: Listed
    relatives: tuple[Tensor, Tensor] | None
    """Ids and weights of each row's frequent relatives, `(N, R)` on the CPU, where they are known.

    The loss that uses them moves them: they are as large as a narrow table.
    """

    @classmethod
    def of(
        cls,
        parts: Sequence[FieldSelection],
        sites: Sequence[Site],
        device: torch.device,
        *,
        skip_empty: bool,
    ) -> "Sides":
        """Return the sides of tables one after the other; padding and rows of zeros are on neither."""
        sources, targets = [], []
        for part, site in zip(parts, sites, strict=True):
            table, name = site.table, site.info.name
            out = torch.zeros(table.num_embeddings, dtype=torch.bool)
            if skip_empty:
                out = ~full_table(table).cpu().any(dim=1)
            if table.padding_idx is not None:
                out[table.padding_idx] = True
            sources.append(part.source.cpu() & ~out)
            targets.append(part.target.cpu() & ~out)
            if not bool(sources[-1].any()):
                raise DataError(
                    f"{name!r} has no frequent rows that rare ones could learn from; leave it out "
                    f"with where=lambda t: t.name != {name!r}, or check its counts"
                )
        widths = {part.relatives.shape[1] for part in parts}
        if len(widths) > 1:
            raise DataError(
                "the tables of one stack need the same number of relatives per row, got "
                f"{sorted(widths)}; select all fields with the same settings"
            )
        relatives = None
        if widths != {0}:
            ids = torch.cat([part.relatives.cpu() for part in parts])
            relatives = ids, torch.cat([part.weights.cpu() for part in parts])
        return cls(
            torch.cat(sources).to(device),
            torch.cat(targets).to(device),
            Listed.of(sources, device),
            Listed.of(targets, device),
            relatives,
        )


Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Part(Generic[Given, Result]):
    """A method of an object that is compiled on request, for the first size that comes twice in a row.

    Where the compiler cannot follow all of it, it runs uncompiled, which is logged once. It may change the
    object's state, so it must never run twice: it is compiled as a whole or not at all.
    """

    def __init__(
        self, method: Callable[Concatenate[Owner, Given], Result], owner: Owner, name: str
    ) -> None:
        self.name = name
        self._run: Callable[Given, Result] = types.MethodType(method, owner)
        # a copy of the function: torch compiles one only so many times, and many tables share ours
        assert isinstance(method, types.FunctionType)
        own = types.FunctionType(
            method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__
        )
        self._copy: Callable[Given, Result] = types.MethodType(own, owner)
        self._say: Callable[[str], object] | None = None
        self._last_size: int | None = None
        self._compiled: tuple[int, Callable[Given, Result]] | None = None

    def compile(self, say: Callable[[str], object]) -> None:
        """Compile it at the first suitable call; `say` takes the line that explains why not."""
        self._say = say

    def __call__(self, size: int, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return what the method returns; `size` is that of its tensors where it may change."""
        if self._say is None:
            return self._run(*args, **kwargs)
        # no compiler while a step is recorded: its own work on the device would be in the recording
        if self._compiled is None and size == self._last_size and not is_recording():
            self._compiled = size, torch.compile(self._copy, dynamic=False, fullgraph=True)
        self._last_size = size
        if self._compiled is not None and self._compiled[0] == size:
            try:
                return self._compiled[1](*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # a fault of the method itself comes again below
                # the first line may only name who raised it
                reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
                self._say(f"{self.name} of the transfer is not compiled: {reason}")
                self._say = None
        return self._run(*args, **kwargs)


class Found(NamedTuple):
    """What the transfer loss wants of the rows of a step."""

    gradient: Tensor
    """The transfer gradient, `(U, M, D)`."""
    losses: Tensor
    """The transfer loss of each table, `(F,)`."""
    accuracy: Tensor | None
    """The accuracy of the discriminators, `(F,)`, where there are any."""
    picked: Picked
    """Rows for the ledger to remember."""


class TransferGroup:
    """One group of `RowGradients.tables` with its sides, loss and ledger."""

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
        weight, methods = next(table.parameters()), methods_of(table)
        self.names = tuple(site.info.name for site in sites)
        self.parts = tuple(parts)
        self.starts = group.first_rows[: len(sites)]
        self.device, self.dtype = weight.device, wide(weight.dtype)
        self.is_masked = any(method.masks_entries for method in methods)
        self.sides = Sides.of(parts, sites, self.device, skip_empty=self.is_masked)
        self.first_rows = torch.tensor(self.starts).to(self.device)
        # embedding sets lie side by side in a row
        num_sets = next((m.num_sets for m in methods if isinstance(m, SetsMethod)), 1)
        self._shape = shape = (num_sets, group.width // num_sets)
        self._rows, self._number = rows, number
        self._samples, self._both, self._every_row = samples, both, loss.every_row
        tables = LossTables(self.names, *shape, self.device, self.dtype, self.sides.relatives)
        self.running = loss.start(tables)
        # one more, for slots without a row: their id is -1
        moves = self.sides.target | self.sides.source if loss.every_row else self.sides.target
        self._may_move = torch.cat([moves, moves.new_zeros(1)])
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.ledger = GroupLedger(self.names, *shape, like)
        self._draw = Part(TransferGroup._draw_ids, self, "the sample")
        self._find = Part(TransferGroup._find_gradient, self, "the loss")
        self.weigh = Part(TransferGroup._weigh_gradients, self, "the barrier")

    def compile(self, say: Callable[[str], object]) -> None:
        """Compile the parts of a step; `say` takes a line for each that cannot be compiled."""
        for part in (self._draw, self._find, self.weigh):
            part.compile(say)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows `(n, F, M, D)` for ids `(n, F)` of each table, detached."""
        rows = self._rows.look_up(self._number, ids)
        return rows.reshape(*ids.shape, *self._shape).to(self.dtype)

    def prepare(self, ids: Tensor, rows: Tensor, draws: Draws) -> tuple[TransferBatch, Found]:
        """Return the rows of a step, and what the transfer loss wants of them."""
        if (rows.device, rows.dtype) != (self.device, self.dtype):
            raise TrainingError(
                f"the transfer was made for {self.names[0]!r} in {self.dtype} on {self.device}, which is now "
                f"in {rows.dtype} on {rows.device}; move the model first, then start the transfer"
            )
        turn, wanted = self._draw(0, draws)
        read = self.look_up(wanted)
        batch = TransferBatch(
            ids=ids,
            table=torch.bucketize(ids, self.first_rows[1:], right=True),
            rows=rows.reshape(-1, *self._shape).detach().requires_grad_(),
            moves=self._may_move[ids],
            others=read[: self._samples].transpose(0, 1),
            turn=turn,
            draws=draws,
            look_up=self.look_up,
        ).with_totals()
        flipped = self._flipped(batch) if self._both and not self._every_row else None
        return batch, self._find(len(ids), batch, flipped, read[self._samples :])

    def absent_ids(self, draws: Draws, number: int) -> Tensor:
        """Return ids of rare rows of each table, in the batch or not, `(number, F)`."""
        return self.sides.rare.ring(draws.uniform(len(self.names), first=ABSENT), number)

    def _draw_ids(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return a random number per table, `(F,)`, and ids to look up, `(n, F)`.

        One lookup for both: a sample of frequent rows, then the ledger's remembered rows.
        """
        uniform = draws.uniform(1 + self._samples, len(self.names))
        sampled = self.sides.frequent.sample(uniform[1:])  # (S, F)
        return uniform[0], torch.cat([sampled, self.ledger.ids])

    def _find_gradient(
        self, batch: TransferBatch, flipped: TransferBatch | None, again: Tensor
    ) -> Found:
        """Return what the transfer loss wants; the ledger compares its rows `(P, F, M, D)`."""
        self.ledger.compare(again)
        accuracy = self.running.learn(batch)
        losses, gradient = self.running.loss_and_gradient(batch)
        if flipped is not None:
            gradient = gradient + self.running.loss_and_gradient(flipped)[1]
        if self.is_masked:
            gradient = gradient * (batch.rows.detach() != 0)
        return Found(gradient, losses, accuracy, batch.pick(REMEMBERED))

    def _weigh_gradients(
        self,
        rule: BarrierRule,
        batch: TransferBatch,
        main: Tensor,
        found: Found,
        loss: Tensor,
        *,
        alpha: float,
    ) -> Tensor:
        """Return one gradient per row, `(U, M, D)`, and update the ledger."""
        if self.is_masked:
            main = main * (batch.rows.detach() != 0)
        made = rule(main, found.gradient, loss, alpha)
        self.ledger.add(batch, made, found.gradient, found.losses, found.accuracy, alpha=alpha)
        self.ledger.remember(batch, found.picked, main, made, self.first_rows)
        return made.gradient

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
    chosen: Selection | CoOccurrence | FrequencySplit | None,
    counts: Mapping[str, Tensor] | Tensor | None,
    data: Dataset | Tensor | None,
    *,
    loss: TransferLoss,
    samples: int,
    both: bool,
) -> list[TransferGroup]:
    """Return the groups of tables of a model, each with its sides and its loss.

    The selection is the one given, or made of counts and data.
    """
    known = {site.info.name: site for site in find_sites(rows.model)}
    # of one weight under several names, the first
    groups = [[known[n] for n in g.names[: len(set(g.first_rows))]] for g in rows.tables]
    sites = [site for group in groups for site in group]
    for site in sites:
        if any(technique_name(method) == "pep" for method in methods_of(site.table)):
            raise UnsupportedTableError(
                f"{site.info.name!r} has thresholds that are still learned, which a transfer would move, "
                "too; prune first, and transfer while the pruned tables are trained again"
            )
    if isinstance(counts, Tensor):
        if len(sites) != 1:
            raise DataError(
                f"one tensor of counts is for one table, but {len(sites)} are chosen: "
                f"{', '.join(site.info.name for site in sites)}; pass a mapping by name, or choose with "
                "where="
            )
        counts = {sites[0].info.name: counts}
    if not isinstance(chosen, Selection) and counts is None:
        raise DataError(
            "harmless transfer must know which rows are frequent; pass counts=dataset.counts(), or a "
            "Selection as select="
        )
    offered = list(chosen.fields if isinstance(chosen, Selection) else counts or ())
    names = {site.info.name: _selection_name(site, offered) for site in sites}
    if isinstance(chosen, Selection):
        selection = chosen
    else:
        assert counts is not None
        fields = list(dict.fromkeys(names.values()))
        selection = select(data, counts, chosen or FrequencySplit(), fields=fields)
    started = []
    for number, group in enumerate(groups):
        parts = [selection[names[site.info.name]] for site in group]
        for part, site in zip(parts, group, strict=True):
            if len(part.source) != site.info.rows:
                raise DataError(
                    f"{site.info.name!r} has {site.info.rows} rows, but its counts have "
                    f"{len(part.source)}; pass the counts of the data that it is trained on"
                )
        made = TransferGroup(rows, number, group, parts, loss=loss, samples=samples, both=both)
        started.append(made)
    return started


def _selection_name(site: Site, known: Sequence[str]) -> str:
    """Return the name of a table in counts and selections: its own, or its field's."""
    for name in (site.info.name, site.info.field):
        if name in known:
            return name
    raise DataError(
        f"there are no counts of the table {site.info.name!r}{suggest(site.info.field, known)}"
    )
