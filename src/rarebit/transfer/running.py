"""A running transfer: rare rows of a model learn from frequent ones as far as the main loss lets them (Gong et al.).

    select    which rows are frequent, and which rare ones have a frequent relative    `data/selection.py`
    loss      how far rare rows are from frequent ones                                 `transfer/losses.py`
    rule      how the two gradients of a row become one                                `transfer/lexico.py`

The distinct rows of the batch are known in each step (`row_gradients/seam.py`). The transfer loss compares them
with a sample of frequent rows, once per optimizer step; its gradient needs no backward through the network, and
is the same in all processes. Rows outside the batch do not move unless asked for, some or all in each step: they have
no main gradient, so they get the transfer gradient. A weight that is tied to an output has a gradient for all its
rows, so all of them take part.

It works on rows, so it holds for plain, factorised and masked tables alike. Of a masked table only the entries
that are left count. Each embedding set of a table has its own barrier and discriminator. Not for thresholds that
are still being learned (PEP): the transfer would move those, too.

Parts of a step may be compiled: a few kernels in place of dozens of small ones, each of which costs its launch on
a GPU. Where sizes depend on the ids, as on the CPU, most steps have their own size and run uncompiled.

Shapes: N rows of a group of tables, F its tables, U distinct rows of a step, M embedding sets, D the width of one.
"""

import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from rarebit.callbacks import Callback
from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection, select
from rarebit.errors import DataError, TrainingError, UnsupportedTableError
from rarebit.row_gradients.lookups import wide
from rarebit.row_gradients.recorded import is_recording
from rarebit.row_gradients.seam import GroupRule, RowGradients, RowStep, require_losses
from rarebit.sets.sets import SetsMethod
from rarebit.settings import require, suggest
from rarebit.storage.files import load_tensors_
from rarebit.tables.apply import Site, TableInfo, find_sites
from rarebit.tables.table import field_of, full_table, methods_of
from rarebit.technique import technique_name
from rarebit.transfer.ledger import REMEMBERED, GroupLedger, Ledger
from rarebit.transfer.lexico import RULES, BarrierRule, TransferRule
from rarebit.transfer.losses import (
    HELD_OUT,
    Draws,
    LossTables,
    Picked,
    TransferBatch,
    TransferLoss,
    num_held_out,
)

ABSENT = 3 << 29
"""The first place of the random numbers that choose rare rows outside the batch."""
OTHER_SIDE = 1 << 30
"""The first place of the random numbers that sample rare rows."""


@dataclass(frozen=True)
class Listed:
    """The frequent or the rare ids of each table, one table after the other."""

    ids: Tensor
    starts: Tensor  # where the list of each table begins, (F,)
    ends: Tensor  # its last place, (F,)
    counts: Tensor  # the number of ids of each table, (F,); a table without any lists row 0

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device | None = None) -> "Listed":
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

    def spread(self, turn: Tensor, number: int) -> Tensor:
        """Return ids of each table, evenly spaced in its list, `(number, F)`: all of them where it has fewer.

        Random numbers `(F,)` in [0, 1) shift them, so that each has the same chance.
        """
        step = torch.arange(number, device=self.ids.device).unsqueeze(1)
        places = ((step + turn) * self.counts / number).long() + self.starts
        places = torch.minimum(places, self.ends)
        return self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)

    def ring(self, turn: Tensor, number: int) -> Tensor:
        """Return different ids of each table, `(number, F)`, below zero where it has fewer.

        They are neighbours in a ring that begins where random numbers `(F,)` in [0, 1) point.
        """
        step = torch.arange(number, device=self.ids.device).unsqueeze(1)
        places = ((turn * self.counts).long() + step) % self.counts.clamp(min=1) + self.starts
        ids = self.ids.index_select(0, places.reshape(-1)).reshape(places.shape)
        return torch.where(step < self.counts, ids, -1)


Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class CompiledPart(Generic[Given, Result]):
    """A method of an object that is compiled on request, for the first size that comes twice in a row.

    Where the compiler cannot follow all of it, it runs uncompiled, which is logged once. It may change the
    object's state, so it must never run twice: it is compiled as a whole or not at all.
    """

    def __init__(
        self,
        name: str,
        method: Callable[Concatenate[Owner, Given], Result],
        owner: Owner,
        say: Callable[[str], object] | None,
    ) -> None:
        self.name = name
        self._run: Callable[Given, Result] = types.MethodType(method, owner)
        # a copy of the function: torch compiles one only so many times, and many tables share ours
        assert isinstance(method, types.FunctionType)
        own = types.FunctionType(
            method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__
        )
        self._copy: Callable[Given, Result] = types.MethodType(own, owner)
        self._say = (
            say  # takes the line that explains why it is not compiled; None: it is not asked for
        )
        self._last_size: int | None = None
        self._compiled: tuple[int, Callable[Given, Result]] | None = None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """The size that came last, and the one it is compiled for.

        Compiled code rounds otherwise, so a run resumes to the same bits only with these of the run before.
        """
        return self._last_size, None if self._compiled is None else self._compiled[0]

    @sizes.setter
    def sizes(self, sizes: Sequence[int | None]) -> None:
        self._last_size, size = sizes
        self._compiled = None
        if size is not None:
            compiled = torch.compile(self._copy, dynamic=False, fullgraph=True)
            self._compiled = size, compiled

    def __call__(self, size: int, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        # `size` is that of its tensors where it may change
        if self._say is None:
            return self._run(*args, **kwargs)
        # no compiler while a step is recorded: its own work on the device would be in the recording
        if self._compiled is None and size == self._last_size and not is_recording():
            self.sizes = size, size
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


class FoundRows(NamedTuple):
    """What the transfer loss wants of the rows of a step."""

    gradient: Tensor  # the transfer gradient, (U, M, D)
    losses: Tensor  # the transfer loss of each table, (F,)
    accuracy: Tensor | None  # the accuracy of the discriminators, (F,), where there are any
    picked: Picked  # rows for the ledger to remember


class TransferGroup:
    """One group of `RowGradients.tables` with its frequent and rare rows, loss and ledger."""

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
        absent: int | Literal["all"],
        say: Callable[[str], object] | None,
    ) -> None:
        group, table = rows.tables[number], sites[0].table
        weight, methods = next(table.parameters()), methods_of(table)
        self.names = tuple(site.info.name for site in sites)
        self.parts = tuple(parts)
        self.starts = group.first_rows[: len(sites)]
        self.device, self.dtype = weight.device, wide(weight.dtype)
        self.is_masked = any(method.masks_entries for method in methods)
        sources, targets = self._split_rows(sites)
        self.source = torch.cat(sources).to(self.device)  # frequent rows, (N,)
        self.target = torch.cat(targets).to(self.device)  # rare rows that may move, (N,)
        self.frequent = Listed.of(sources, self.device)
        self.rare = Listed.of(targets, self.device)
        most = max(int(mask.sum()) for mask in targets)
        self._absent = most if absent == "all" else min(absent, most)
        self.first_rows = torch.tensor(self.starts).to(self.device)
        # embedding sets lie side by side in a row
        num_sets = next((m.num_sets for m in methods if isinstance(m, SetsMethod)), 1)
        self._shape = shape = (num_sets, group.width // num_sets)
        self._rows, self._number = rows, number
        self._samples, self._flips = samples, both and not loss.every_row
        # what a loss learns from apart from the batch: frequent and rare rows, of each those held out last
        sides = (sources, targets) if loss.learns_apart else ()
        self._apart = [
            Listed.of(masks, self.device)
            for side in sides
            for masks in zip(*_held_out(side), strict=True)
        ]
        self.running = loss.start(
            LossTables(self.names, *shape, self.device, self.dtype, self._relatives())
        )
        # one more, for slots without a row: their id is -1
        moves = self.target | self.source if loss.every_row else self.target
        self._may_move = torch.cat([moves, moves.new_zeros(1)])
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.ledger = GroupLedger(self.names, *shape, like)
        self._draw = CompiledPart("the sample", TransferGroup._draw_ids, self, say)
        self._find = CompiledPart("the loss", TransferGroup._find_gradient, self, say)
        self.weigh = CompiledPart("the barrier", TransferGroup._weigh_gradients, self, say)
        self.parts_of_step: tuple[CompiledPart[..., Any], ...] = (
            self._draw,
            self._find,
            self.weigh,
        )

    def _split_rows(self, sites: Sequence[Site]) -> tuple[list[Tensor], list[Tensor]]:
        """Return masks of frequent and rare rows; padding and rows of zeros are neither."""
        sources, targets = [], []
        for part, site in zip(self.parts, sites, strict=True):
            table, name = site.table, site.info.name
            out = torch.zeros(table.num_embeddings, dtype=torch.bool)
            if self.is_masked:
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
        return sources, targets

    def _relatives(self) -> tuple[Tensor, Tensor] | None:
        """Return ids and weights of each row's frequent relatives, `(N, R)` on the CPU, where they are known.

        The loss that uses them moves them: they are as large as a narrow table.
        """
        widths = {part.relatives.shape[1] for part in self.parts}
        if len(widths) > 1:
            raise DataError(
                "the tables of one stack need the same number of relatives per row, got "
                f"{sorted(widths)}; select all fields with the same settings"
            )
        if widths == {0}:
            return None
        ids = torch.cat([part.relatives.cpu() for part in self.parts])
        return ids, torch.cat([part.weights.cpu() for part in self.parts])

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows `(n, F, M, D)` for ids `(n, F)` of each table, detached."""
        rows = self._rows.look_up(self._number, ids)
        return rows.reshape(*ids.shape, *self._shape).to(self.dtype)

    def prepare(self, ids: Tensor, rows: Tensor, draws: Draws) -> tuple[TransferBatch, FoundRows]:
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
            rare=read[self._samples : -REMEMBERED].transpose(0, 1) if self._apart else None,
        ).with_totals()
        flipped = self._flipped(batch) if self._flips else None
        return batch, self._find(len(ids), batch, flipped, read[-REMEMBERED:])

    def absent_ids(self, draws: Draws) -> Tensor | None:
        """Return ids of rare rows of each table, in the batch or not, `(n, F)`; None where none are asked for."""
        if not self._absent:
            return None
        return self.rare.ring(draws.uniform(len(self.names), first=ABSENT), self._absent)

    def _draw_ids(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return a random number per table, `(F,)`, and ids to look up, `(n, F)`.

        One lookup for all: a sample of frequent rows, one of rare rows where the loss learns apart from the batch,
        then the ledger's remembered rows.
        """
        if self._apart:
            held = num_held_out(self._samples)
            uniform = draws.uniform(1 + len(self._apart), len(self.names))
            sampled = [
                listed.spread(turn, number)
                for listed, turn, number in zip(
                    self._apart, uniform[1:], [self._samples - held, held] * 2, strict=True
                )
                if number
            ]
        else:
            uniform = draws.uniform(1 + self._samples, len(self.names))
            sampled = [self.frequent.sample(uniform[1:])]  # (S, F)
        return uniform[0], torch.cat([*sampled, self.ledger.ids])

    def _find_gradient(
        self, batch: TransferBatch, flipped: TransferBatch | None, again: Tensor
    ) -> FoundRows:
        """Return what the transfer loss wants; the ledger compares its rows `(P, F, M, D)`."""
        self.ledger.compare(again)
        accuracy = self.running.learn(batch)
        losses, gradient = self.running.loss_and_gradient(batch)
        if flipped is not None:
            gradient = gradient + self.running.loss_and_gradient(flipped)[1]
        if self.is_masked:
            gradient = gradient * (batch.rows.detach() != 0)
        return FoundRows(gradient, losses, accuracy, batch.pick(REMEMBERED))

    def _weigh_gradients(
        self,
        rule: BarrierRule,
        batch: TransferBatch,
        main: Tensor,
        found: FoundRows,
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
        others = self.look_up(self.rare.sample(uniform)).transpose(0, 1)
        has_rare = (self.rare.counts > 0).index_select(0, batch.table)
        moves = self.source.index_select(0, ids) & (batch.ids >= 0) & has_rare
        return replace(batch, moves=moves, others=others, flipped=True).with_totals()


def _held_out(masks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each table which rows to learn from, and which are held out; of few rows both are all."""
    for mask in masks:
        held = mask & (mask.cumsum(0) % HELD_OUT == 0)
        yield (mask & ~held, held) if bool(held.any()) else (mask, mask)


def _selected(
    rows: RowGradients,
    chosen: Selection | CoOccurrence | FrequencySplit | None,
    counts: Mapping[str, Tensor] | Tensor | None,
    data: Dataset | Tensor | None,
) -> list[tuple[list[Site], list[FieldSelection]]]:
    """Return the tables of each group, and what is selected of each: as given, or by counts and data."""
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
    if isinstance(chosen, Selection):
        selection, names = chosen, _selection_names(sites, chosen.fields)
    elif counts is None:
        raise DataError(
            "harmless transfer must know which rows are frequent; pass counts=dataset.counts(), or a "
            "Selection as select="
        )
    else:
        names = _selection_names(sites, counts)
        fields = list(dict.fromkeys(names.values()))
        selection = select(data, counts, chosen or FrequencySplit(), fields=fields)
    for site in sites:
        size = len(selection[names[site.info.name]].source)
        if size != site.info.rows:
            raise DataError(
                f"{site.info.name!r} has {site.info.rows} rows, but its counts have {size}; pass the "
                "counts of the data that it is trained on"
            )
    return [(group, [selection[names[site.info.name]] for site in group]) for group in groups]


def _selection_names(sites: Sequence[Site], known: Collection[str]) -> dict[str, str]:
    """Return the name of each table in counts and selections: its own, or its field's."""
    names = {}
    for info in (site.info for site in sites):
        found = [name for name in (info.name, info.field) if name in known]
        if not found:
            raise DataError(
                f"there are no counts of the table {info.name!r}{suggest(info.field, list(known))}"
            )
        names[info.name] = found[0]
    return names


@dataclass(frozen=True)
class Explanation:
    """What a transfer does with one row, and why."""

    table: str
    id: int
    count: int
    """How often training saw it."""
    side: Literal["frequent", "rare", "neither"]
    """Rare rows learn from frequent ones; a row on neither side is left alone."""
    relatives: tuple[tuple[int, float], ...]
    """Ids of its frequent relatives and how much it is like them, the nearest first."""


class RunningTransfer(Callback):
    """A transfer at work on a model; `backward` replaces `loss.backward()`.

    `rarebit.HarmlessTransfer(...).start(model, ...)` makes one. `ledger` counts what it does. Use it in a `with`
    block, or `close` it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        counts: Mapping[str, Tensor] | Tensor | None,
        select: Selection | CoOccurrence | FrequencySplit | None,
        data: Dataset | Tensor | None,
        loss: TransferLoss,
        where: Callable[[TableInfo], bool],
        rule: TransferRule,
        scale: float,
        alpha: float,
        samples: int,
        both: bool,
        seed: int,
        absent: int | Literal["all"],
        say: Callable[[str], object] | None,
    ) -> None:
        self.rule, self.alpha, self.scale = rule, alpha, scale
        self.ledger = Ledger()
        self._main_loss: Tensor | None = None
        self._loss_of_step: Tensor | None = None  # always in the same memory
        self.rows = RowGradients(model, _Asked(self), where)
        try:
            self.groups = [
                TransferGroup(
                    self.rows,
                    number,
                    *group,
                    loss=loss,
                    samples=samples,
                    both=both,
                    absent=absent,
                    say=say,
                )
                for number, group in enumerate(_selected(self.rows, select, counts, data))
            ]
        except BaseException:
            self.rows.close()
            raise
        self.ledger.groups = [group.ledger for group in self.groups]
        self.draws = Draws(seed, self.groups[0].device)

    def backward(
        self, *losses: Tensor, scaler: GradScaler | None = None, last: bool = True
    ) -> None:
        """Leave gradients in all parameters: those of the summed losses, and in the rows those of the rule.

        With micro-batches, pass `last=False` for all but the last one of a step, and divide each loss by their
        number. Pass the `scaler` instead of scaling the losses.
        """
        require_losses(losses, "transfer")
        loss = sum(losses[1:], start=losses[0]).squeeze()  # some losses have shape (1,)
        seen = loss.detach()
        self._main_loss = seen if self._main_loss is None else self._main_loss + seen
        try:
            if last:
                self._begin_step()
            self.rows.backward(loss, scaler=scaler, last=last)
        except BaseException:
            self._main_loss = None
            raise
        if last:
            self._main_loss = None

    def discard(self) -> None:
        """Forget the micro-batches of an unfinished step."""
        self._main_loss = None
        self.rows.discard()

    def explain(self, table: str, id: int) -> Explanation:
        """Return what the transfer does with one row of a table, by its name or its field's."""
        known = [(group, number) for group in self.groups for number in range(len(group.names))]
        for group, number in known:
            name, part = group.names[number], group.parts[number]
            if table not in (name, field_of(name)):
                continue
            last = len(part.counts) - 1
            require(0 <= id <= last, f"{name!r} has ids from 0 to {last}, got {id}")
            row = group.starts[number] + id
            is_source, is_target = bool(group.source[row]), bool(group.target[row])
            pairs = zip(part.relatives[id].tolist(), part.weights[id].tolist(), strict=True)
            return Explanation(
                table=name,
                id=id,
                count=int(part.counts[id]),
                side="frequent" if is_source else "rare" if is_target else "neither",
                relatives=tuple((other, weight) for other, weight in pairs if weight > 0),
            )
        names = ", ".join(group.names[number] for group, number in known)
        raise TrainingError(f"the transfer does not use a table {table!r}; it uses {names}")

    def report(self) -> dict[str, Any]:
        """Return the ledger as plain values."""
        return self.ledger.read()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next steps depend on, and the ledger: its own tensors, not copies."""
        return {
            "step": self.draws.step,
            "losses": {group.names[0]: group.running.state_dict() for group in self.groups},
            "ledger": self.ledger.state_dict(),
            "compiled": {g.names[0]: [part.sizes for part in g.parts_of_step] for g in self.groups},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned for the same tables and the same loss."""
        ours, given = {group.names[0] for group in self.groups}, set(state["losses"])
        if ours != given:
            raise TrainingError(
                f"this transfer has the tables {', '.join(sorted(ours))}, the state given is of "
                f"{', '.join(sorted(given))}; use the same model"
            )
        load_tensors_({"step": self.draws.step}, {"step": state["step"]}, "the transfer")
        for group in self.groups:
            group.running.load_state_dict(state["losses"][group.names[0]])
            sizes = state.get("compiled", {}).get(group.names[0])  # older states have none
            for part, own in zip(group.parts_of_step, sizes, strict=True) if sizes else ():
                part.sizes = own
        self.ledger.load_state_dict(state["ledger"])
        self.rows.forget_recordings()

    def close(self) -> None:
        """Remove everything from the model; raise when a step was left unfinished."""
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.rows.__exit__(*error)

    def _begin_step(self) -> None:
        """Prepare for the rule: one main loss for all micro-batches and processes, new random numbers."""
        assert self._main_loss is not None
        self._main_loss = self.rows.average(self._main_loss)
        kept, loss = self._loss_of_step, self._main_loss
        if kept is None or (kept.device, kept.dtype) != (loss.device, loss.dtype):
            kept = self._loss_of_step = torch.empty_like(loss)
        kept.copy_(loss)
        self.draws.advance()
        self.ledger.add_step(kept)


class _Asked(GroupRule):
    """The rule of a transfer: one gradient per row, from the main and the transfer gradient."""

    def __init__(self, transfer: RunningTransfer) -> None:
        self.transfer = transfer

    def absent_ids(self, number: int) -> Tensor | None:
        return self.transfer.groups[number].absent_ids(self.transfer.draws)

    def prepare(self, number: int, ids: Tensor, rows: Tensor) -> Any:
        transfer = self.transfer
        batch, found = transfer.groups[number].prepare(ids, rows, transfer.draws)
        if transfer.scale != 1.0:
            found = found._replace(gradient=found.gradient * transfer.scale)
        return batch, found

    def answer(self, step: RowStep) -> Tensor:
        transfer, loss = self.transfer, self.transfer._loss_of_step  # noqa: SLF001  # a part of the transfer
        assert loss is not None
        batch, found = step.prepared
        main = step.gradients[0].reshape(batch.rows.shape)  # (U, M, D)
        gradient = transfer.groups[step.number].weigh(
            len(main), RULES[transfer.rule], batch, main, found, loss, alpha=transfer.alpha
        )
        return gradient.reshape(step.rows.shape)

    def recording_key(self) -> Hashable:
        transfer, loss = self.transfer, self.transfer._loss_of_step  # noqa: SLF001  # as above
        return transfer.rule, transfer.alpha, transfer.scale, loss is not None and loss.data_ptr()
