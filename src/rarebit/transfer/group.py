"""The two sides of a transfer: which rows of a group of tables are frequent, and which rare ones may move.

What is selected is a property of the data, by field and id (`data/selection.py`). Here it becomes masks
over the rows of a group, and lists that a step can sample from, on the device of the tables.

Shapes: N rows of the group, F tables.

Parts of a step that may be compiled: a few kernels in place of dozens of small ones.

On a GPU each kernel costs its start, and the parts of a transfer are small. Where sizes depend on the ids, as
on the CPU, most steps have a size of their own and are run as they are.

The tables behind one lookup, as a transfer sees them: their sides, their loss, their ledger.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection, select
from rarebit.errors import DataError, TrainingError, UnsupportedTableError
from rarebit.row_gradients.lookups import RowGroup, wide
from rarebit.row_gradients.recorded import is_recording
from rarebit.row_gradients.seam import RowGradients
from rarebit.sets.sets import SetsMethod
from rarebit.settings import suggest
from rarebit.tables.find import Site, find_sites
from rarebit.tables.table import full_table, methods_of
from rarebit.technique import technique_name
from rarebit.transfer.batch import Draws, Picked, TransferBatch
from rarebit.transfer.ledger import REMEMBERED, GroupLedger
from rarebit.transfer.lexico import Barrier
from rarebit.transfer.losses import LossTables, TransferLoss

__all__ = [
    "BarrierRule",
    "Found",
    "Listed",
    "Part",
    "Sides",
    "TransferGroup",
    "find_selection",
    "selection_name",
    "start_groups",
]


@dataclass(frozen=True)
class Sides:
    """Who is frequent and who is rare among the rows of a group."""

    source: Tensor
    """Which rows are frequent, `(N,)` of bools."""
    target: Tensor
    """Which rows are rare and may move, `(N,)` of bools."""
    frequent: "Listed"
    rare: "Listed"
    relatives: tuple[Tensor, Tensor] | None
    """Ids in the table and weights of each row's frequent relatives, `(N, R)`, where they are known."""

    @classmethod
    def of(
        cls, parts: Sequence[FieldSelection], sites: Sequence[Site], *, skip_empty: bool
    ) -> "Sides":
        """Return the sides of tables one after the other; padding is on neither, nor rows of zeros."""
        left_out = [_left_out(site, skip_empty=skip_empty) for site in sites]
        pairs = list(zip(parts, left_out, strict=True))
        sources = [part.source.cpu() & ~out for part, out in pairs]
        targets = [part.target.cpu() & ~out for part, out in pairs]
        for site, source in zip(sites, sources, strict=True):
            if not bool(source.any()):
                raise DataError(
                    f"{site.info.name!r} has no frequent rows that rare ones could learn from; leave it out "
                    f"with where=lambda t: t.name != {site.info.name!r}, or look at its counts"
                )
        return cls(
            torch.cat(sources),
            torch.cat(targets),
            Listed.of(sources),
            Listed.of(targets),
            _relatives(parts),
        )

    def to(self, device: torch.device) -> "Sides":
        """Return the same on another device."""
        # relatives are moved by the loss that uses them: they are as large as a narrow table
        return Sides(
            self.source.to(device),
            self.target.to(device),
            self.frequent.to(device),
            self.rare.to(device),
            self.relatives,
        )


@dataclass(frozen=True)
class Listed:
    """The ids on one side, of each table, one table after the other."""

    ids: Tensor
    starts: Tensor
    """Where the list of each table begins, `(F,)`."""
    ends: Tensor
    """Its last place, `(F,)`."""
    counts: Tensor
    """How many each table has, `(F,)`; where it has none, the list has row 0."""

    @classmethod
    def of(cls, masks: Sequence[Tensor]) -> "Listed":
        """Return the ids that masks hold."""
        ids = [mask.nonzero()[:, 0] for mask in masks]
        counts = torch.tensor([len(part) for part in ids])
        # a table without any lists one that is there
        listed = [part if len(part) else torch.zeros(1, dtype=torch.int64) for part in ids]
        ends = counts.clamp(min=1).cumsum(0)
        return cls(torch.cat(listed), ends - counts.clamp(min=1), ends - 1, counts)

    def to(self, device: torch.device) -> "Listed":
        """Return the same on another device."""
        tensors = (self.ids, self.starts, self.ends, self.counts)
        return Listed(*(tensor.to(device) for tensor in tensors))

    def sample(self, uniform: Tensor) -> Tensor:
        """Return ids of each table by random numbers in [0, 1), `(S, F)`, with replacement."""
        # a product may be rounded up to the count itself
        places = torch.minimum((uniform * self.counts).long() + self.starts, self.ends)
        return self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)

    def ring(self, turn: Tensor, number: int) -> Tensor:
        """Return so many different ids of each table, `(n, F)`, below zero where it has fewer.

        They are neighbours in a ring that begins where random numbers `(F,)` in [0, 1) say.
        """
        step = torch.arange(number, device=self.ids.device).unsqueeze(1)
        places = ((turn * self.counts).long() + step) % self.counts.clamp(min=1) + self.starts
        ids = self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)
        return torch.where(step < self.counts, ids, -1)


def find_selection(
    chosen: Selection | CoOccurrence | FrequencySplit | None,
    counts: Mapping[str, Tensor] | None,
    data: Dataset | Tensor | None,
    fields: Sequence[str],
) -> Selection:
    """Return the selection for these fields: the one given, or one made of counts and data.

    >>> counts = {"item": torch.tensor([9, 1, 1, 1, 1])}
    >>> find_selection(None, counts, None, ["item"])["item"].source
    tensor([ True, False, False, False, False])
    """
    if isinstance(chosen, Selection):
        return chosen
    if counts is None:
        raise DataError(
            "harmless transfer must know which rows are frequent; give counts=dataset.counts(), or a "
            "Selection as select="
        )
    return select(data, counts, chosen or FrequencySplit(), fields=fields)


def selection_name(site: Site, known: Sequence[str]) -> str:
    """Return the name that a table goes by in counts and selections: its own, or its field's."""
    for name in (site.info.name, site.info.field):
        if name in known:
            return name
    raise DataError(
        f"there are no counts of the table {site.info.name!r}{suggest(site.info.field, known)}"
    )


def _left_out(site: Site, *, skip_empty: bool) -> Tensor:
    """Return which rows are on neither side, whatever was selected, `(N,)` of bools."""
    table = site.table
    out = torch.zeros(table.num_embeddings, dtype=torch.bool)
    if skip_empty:
        out = ~full_table(table).cpu().any(dim=1)
    if table.padding_idx is not None:
        out[table.padding_idx] = True
    return out


def _relatives(parts: Sequence[FieldSelection]) -> tuple[Tensor, Tensor] | None:
    widths = {part.relatives.shape[1] for part in parts}
    if widths in ({0}, set()):
        return None
    if len(widths) > 1:
        raise DataError(
            f"the tables of one stack need as many relatives a row, got {sorted(widths)}; select all "
            "fields with the same settings"
        )
    ids = torch.cat([part.relatives.cpu() for part in parts])
    return ids, torch.cat([part.weights.cpu() for part in parts])


Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Part(Generic[Given, Result]):
    """A method of an object that is compiled, once asked, for the first size that comes twice in a row.

    Where the compiler cannot follow all of it, it is run as it is, which is said once. It may change what the
    object keeps, so it is never begun twice: it is compiled as a whole or not at all.

    >>> class Numbers:
    ...     def add(self, first, second):
    ...         return first + second
    >>> add = Part(Numbers.add, Numbers(), "the sum")
    >>> add(2, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([4., 6.])
    """

    def __init__(
        self, method: Callable[Concatenate[Owner, Given], Result], owner: Owner, name: str
    ) -> None:
        self.name = name
        self._run: Callable[Given, Result] = types.MethodType(method, owner)
        # torch compiles a function only so many times, and many tables share ours
        self._copy: Callable[Given, Result] = types.MethodType(_copied(method), owner)
        self._say: Callable[[str], object] | None = None
        self._last_size: int | None = None
        self._compiled: tuple[int, Callable[Given, Result]] | None = None

    def compile(self, say: Callable[[str], object]) -> None:
        """Compile it when its time comes; `say` takes the line that says why it is not."""
        self._say = say

    def __call__(self, size: int, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return what the method returns; `size` is that of its tensors where it may change."""
        if self._say is None:
            return self._run(*args, **kwargs)
        # no compiler while a step is recorded: whatever it does on the device would be in the recording
        if self._compiled is None and size == self._last_size and not is_recording():
            self._compiled = size, torch.compile(self._copy, dynamic=False, fullgraph=True)
        self._last_size = size
        if self._compiled is not None and self._compiled[0] == size:
            try:
                return self._compiled[1](*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # a fault of the method's own comes again below
                # the first line may be no more than who raised it
                reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
                self._say(f"{self.name} of the transfer is not compiled: {reason}")
                self._say = None
        return self._run(*args, **kwargs)


def _copied(method: Callable[..., object]) -> types.FunctionType:
    """Return the same function as one of its own."""
    assert isinstance(method, types.FunctionType)
    return types.FunctionType(
        method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__
    )


BarrierRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Barrier]
"""Main and transfer gradients `(U, M, D)`, the main loss and alpha to one gradient a row."""

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
        self.is_masked = any(method.masks_entries for method in methods_of(table))
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
        if any(technique_name(method) == "pep" for method in methods_of(site.table)):
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
