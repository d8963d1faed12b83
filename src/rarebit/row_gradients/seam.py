"""Rules: a plain function of ids and gradients, or one that is told more of the rows of a step.

The lookups of a step, added up row by row, and what the tables hold in those rows.

A rule is asked for the gradients of a step: each distinct row once, then back to the lookups.

Row gradients: a rule rewrites the gradient of each looked-up row before the optimizer sees it.

    rule(ids, gradients) -> gradient        ids (U,)   gradients (K, U, D)   gradient (U, D)

    U    distinct rows of the step          K    losses          D    width of a row

A rule is pure and works on rows, so it holds for plain tables and for tables made by methods alike.
It is called once an optimizer step for each group of `RowGradients.tables`, on row gradients that are
unscaled, summed over the micro-batches and averaged over the processes: rules are not linear, and one
called on parts would give another answer. It sees float32, or float64 where the table is that wide.
On a GPU, where no size may depend on the ids, some slots hold no row: their id is -1, their gradients
are zero, and what the rule returns for them is ignored. A `GroupRule` is told more: which tables the rows
are of, and what is in them. On a GPU it can be recorded and replayed (`row_gradients/recorded.py`), and in a step
that is recorded as a whole, what needs no gradients runs beside the backward.

Where a rule returns the sum over the losses, a row's gradient is what plain `backward()` gives: for one
loss in one process on the CPU to the last bit, else within the rounding of a sum. In a bfloat16 model
each lookup's gradient has 8 bits and only their sum is float32; under autocast tables are float32.

What the tables hand out while a rule is attached is a leaf: torch refuses to change it in place. A
weight that is used without a module, as in `x @ table.weight.T`, adds its gradient past the rule, and
so does a lookup inside `torch.utils.checkpoint` with `use_reentrant=True`.

Several processes (`DistributedDataParallel`):

- Make `RowGradients` first, then wrap the same model. The tables are kept out of what the wrapper
  averages; their lookups are gathered, so all processes make the same update of each table.
- All processes call `backward` with as many losses as the others. Batches may differ in size.
- The first loss must reach every parameter outside the tables, the others none but the model's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from rarebit.errors import TrainingError
from rarebit.row_gradients.lookups import (
    LookedUpRows,
    Lookup,
    RowGroup,
    TiedTable,
    Watch,
    Watched,
    WatchedTable,
    add_gradient,
    choose_sites,
    watch_tables,
    watch_tied,
    wide,
)
from rarebit.row_gradients.processes import gather_counts, ignore_in_ddp, keep_from_ddp, world_size
from rarebit.row_gradients.recorded import Recorded, aside, is_recording, join
from rarebit.tables.distinct import Distinct, find_distinct
from rarebit.tables.find import TableInfo, refuse_wrapped_model
from rarebit.tables.stack import PlainStack, take_rows

__all__ = [
    "AskedRule",
    "GroupRule",
    "KnownRows",
    "RowGradients",
    "RowStep",
    "Rule",
    "over_losses",
    "places_of",
    "rows_of",
    "sum_lookups",
    "sum_losses",
]

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Ids `(U,)` and gradients `(K, U, D)` of distinct rows to one gradient a row, `(U, D)`."""


@dataclass(frozen=True)
class RowStep:
    """The distinct rows of one group in one step."""

    number: int
    """Which of `RowGradients.tables` they are of."""
    ids: Tensor
    """Their numbers in the group, ascending, `(U,)`; -1 in slots without a row."""
    gradients: Tensor
    """The gradient of each loss, `(K, U, D)`."""
    rows: Tensor
    """What the tables hold, `(U, D)`, in the precision of the gradients; any numbers in slots without a row."""
    prepared: Any = None
    """What the rule prepared for them."""


class GroupRule(ABC):
    """A rule that is told which tables its rows are of, and what is in the rows."""

    def absent_ids(self, number: int) -> Tensor | None:
        """Return ids of more rows that it wants to see in a step, `(n, F)` for the tables of a group.

        Below zero is none. The main gradient of rows that are not in the batch is zero.
        """
        del number
        return None

    def prepare(self, number: int, ids: Tensor, rows: Tensor) -> Any:
        """Return what it can know of a step without the gradients; the arguments are as in `RowStep`.

        Called once a step before `answer`. In a recorded step it runs beside the backward.
        """
        del number, ids, rows

    @abstractmethod
    def answer(self, step: RowStep) -> Tensor:
        """Return one gradient a row, `(U, D)`."""

    def recording_key(self) -> Hashable:
        """Return what its answer depends on but for the step and tensors that stay where they are.

        On a GPU, a rule with a key is recorded after some steps, and again when the key is another one.
        One without is called in every step.
        """
        return None


SPREAD = 1024
"""Places that take what is added up for no row."""


@dataclass(frozen=True)
class KnownRows:
    """What is known of the rows of a step before their gradients."""

    distinct: Distinct
    ids: Tensor
    """The number of each slot's row in its group, `(U,)`; -1 in slots without a row."""
    is_empty: Tensor
    """Which slots are without a row, `(U,)`."""
    has_no_rule: Tensor
    """Which lookups keep their own gradient, `(T,)`."""
    places: Tensor | None
    """Where each lookup is added up, `(T,)`: its slot, or one of some behind the last; None: by `distinct`."""
    rows: Tensor | None
    """What the tables hold, `(U, D)`, where the rule wants to know."""
    skip: int
    """How many slots no rule is asked for: in the compact form, lookups without a rule have the first."""
    prepared: Any
    """What the rule prepared for the slots that it is asked for."""


def places_of(distinct: Distinct, has_no_rule: Tensor) -> Tensor | None:
    """Return `KnownRows.places`, where additions may come in any order."""
    if not has_no_rule.is_cuda or world_size() > 1:
        return None
    # lookups without a rule would wait for each other at one slot: they are spread behind the last
    behind = torch.arange(len(has_no_rule), device=has_no_rule.device) % SPREAD + len(distinct.ids)
    return torch.where(has_no_rule, behind, distinct.slot_of)


def sum_lookups(known: KnownRows, gradients: Tensor) -> Tensor:
    """Return the sum of each row's lookups `(K, U, D)`, the same bits in all processes."""
    distinct, size = known.distinct, len(known.ids)
    if gradients.numel() == 0:
        sums = [gradients[0]] * len(gradients)
    elif known.places is not None:
        zeros = [loss.new_zeros(size + SPREAD, loss.shape[1]) for loss in gradients]
        sums = [
            zero.index_add_(0, known.places, loss)[:size]
            for zero, loss in zip(zeros, gradients, strict=True)
        ]
    elif gradients.is_cuda:
        # additions on a GPU come in any order, but for those within a bag
        order, starts = distinct.order, distinct.starts
        sums = [F.embedding_bag(order, loss, starts, mode="sum") for loss in gradients]
    else:
        sums = [distinct.sum(loss) for loss in gradients]
    return sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)


def over_losses(gradients: Tensor) -> Tensor:
    """Return the sum over the losses; of one there is nothing to add, nor to copy."""
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


def rows_of(found: LookedUpRows, distinct: Distinct) -> Tensor:
    """Return what the tables hold in each slot, `(U, D)`: the row of its first lookup."""
    parts = [part.reshape(-1, found.group.width) for part in found.rows()]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)  # (T, D)
    return take_rows(rows, distinct.first).to(wide(rows.dtype))


@dataclass(frozen=True)
class AskedRule:
    """A rule, and how the rows that it is asked for are kept."""

    rule: Rule | GroupRule
    static: bool | None
    """Whether no size depends on the ids; by default on a GPU."""

    @torch.no_grad()
    def prepare(self, number: int, found: LookedUpRows) -> KnownRows:
        """Return all that is known of a step before its gradients."""
        distinct = find_distinct(found.keys, static=self.static, most=found.most_keys)
        ids = distinct.ids.long()
        # in the compact form, lookups without a rule have the first slot
        skip = 0 if self._is_static(ids) else int((ids[:1] < 0).sum())
        rows = prepared = None
        if isinstance(self.rule, GroupRule) and ids.shape[0] > skip:
            rows = rows_of(found, distinct)
            prepared = self._ask_to_prepare(self.rule, number, ids[skip:], rows[skip:])
        has_no_rule = found.keys < 0
        places = places_of(distinct, has_no_rule)
        return KnownRows(distinct, ids, ids < 0, has_no_rule, places, rows, skip, prepared)

    @torch.no_grad()
    def answer(
        self, number: int, known: KnownRows, gradients: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient `(T, D)` of each lookup, and which lookups keep their own.

        The rule's answer goes to the first lookup of a row, zero to its others.
        """
        distinct, keep, leave = known.distinct, known.has_no_rule, known.is_empty
        sums = sum_lookups(known, gradients)
        if self._is_static(keep) and known.places is None:
            sums = sums.masked_fill(leave.unsqueeze(-1), 0.0)
        rows = sums[0] if known.rows is None else known.rows
        step = RowStep(number, known.ids, sums, rows, known.prepared)
        answer, is_sum = self._ask(step, scale, skip=known.skip)
        if is_sum is not None:
            keep = keep | is_sum.index_select(0, distinct.slot_of)
            leave = leave | is_sum
        return distinct.put_first(answer, over_losses(gradients), keep, leave), keep

    @torch.no_grad()
    def answer_tied(self, number: int, tied: TiedTable, scale: Tensor | None) -> Tensor:
        """Return the gradient `(N, D)` of all rows of a weight that is used elsewhere, too."""
        gradients = tied.gradients()
        ids = torch.arange(tied.group.num_rows, device=gradients.device)
        rows, prepared = tied.weight.detach().to(gradients.dtype), None
        if isinstance(self.rule, GroupRule):
            prepared = self._ask_to_prepare(self.rule, number, ids, rows)
        step = RowStep(number, ids, gradients, rows, prepared)
        return self._ask(step, scale, skip=0)[0]

    def _ask_to_prepare(self, rule: GroupRule, number: int, ids: Tensor, rows: Tensor) -> Any:
        with torch.autocast(rows.device.type, enabled=False):
            return rule.prepare(number, ids, rows)

    def _ask(
        self, step: RowStep, scale: Tensor | None, *, skip: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rule's answer for each slot, scaled again, and which answers are the plain sum.

        A plain sum is left where it came from: adding it up elsewhere rounds in another order. Not on a
        GPU, where additions come in any order, nor with several processes: each would have an order of
        its own.
        """
        ids, sums = step.ids, step.gradients
        unscaled = sums if scale is None else sums * scale.reciprocal()
        plain = answer = over_losses(unscaled)
        if ids.shape[0] > skip:
            asked = replace(
                step, ids=ids[skip:], gradients=unscaled[:, skip:], rows=step.rows[skip:]
            )
            answer = self._call_rule(asked).to(plain.dtype)
            answer = torch.cat([plain[:skip], answer]) if skip else answer
        is_sum = None
        if not ids.is_cuda and world_size() == 1:
            is_sum = (answer == plain).all(dim=-1)
        if scale is None:
            return answer, is_sum
        # a scaler skips a step whose gradients are not finite; a rule must not hide that
        is_finite = torch.isfinite(sums).all()
        is_sum = None if is_sum is None else is_sum & is_finite
        return torch.where(is_finite, answer * scale, torch.nan), is_sum

    def _is_static(self, ids: Tensor) -> bool:
        """Return whether all slots are kept, so that no size depends on the ids."""
        return ids.is_cuda if self.static is None else self.static

    def _call_rule(self, step: RowStep) -> Tensor:
        with torch.autocast(step.gradients.device.type, enabled=False):
            if isinstance(self.rule, GroupRule):
                answer = self.rule.answer(step)
            else:
                answer = self.rule(step.ids, step.gradients)
        expected = tuple(step.gradients.shape[1:])
        got = tuple(getattr(answer, "shape", ())) or type(answer).__name__
        if got != expected:
            raise TrainingError(
                f"the rule must return one gradient a row, a tensor of shape {expected}, got {got}"
            )
        return answer


class Early(NamedTuple):
    """What was prepared for a table before the backward."""

    lookups: list[Lookup]
    absent: list[Lookup]
    known: KnownRows


def sum_losses(ids: Tensor, gradients: Tensor) -> Tensor:
    """Return the sum over the losses: the rule that changes nothing.

    >>> sum_losses(torch.tensor([3]), torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]]))
    tensor([[11., 22.]])
    """
    del ids
    return gradients.sum(dim=0)


class RowGradients:
    """Lets a rule rewrite the row gradients of a model's tables; `backward` replaces `loss.backward()`.

    `where` chooses tables as for `apply_`; tables narrower than `min_width` and frozen ones are left
    alone. Tables that lie behind one lookup are one group: `tables` lists the groups with the numbers
    of their rows. A table whose weight is used elsewhere too is a group of all its rows.

    >>> model = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 1))
    >>> def half(ids, gradients):
    ...     return 0.5 * gradients.sum(dim=0)
    >>> with RowGradients(model, half) as rows:
    ...     rows.backward(model(torch.tensor([4, 4, 7])).sum())
    >>> torch.equal(model[0].weight.grad[4], model[1].weight[0])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule | GroupRule,
        where: Callable[[TableInfo], bool] | None = None,
        *,
        min_width: int = 2,
    ) -> None:
        refuse_wrapped_model(model)
        chosen = choose_sites(model, where, min_width)
        self.model = model
        self.rule = rule
        self._watch = Watch()
        self._tables = watch_tables(self._watch, chosen)
        self._tied = watch_tied(self._watch, chosen)
        self._slots = [_first_slots(table) for table in self._tables]
        self._recorded = [Recorded() for _ in self._tables]
        self._early: dict[int, Early] = {}
        self._always_early = False
        self._static: bool | None = None
        self._num_losses: int | None = None
        self._ignored_before = keep_from_ddp(model, self._parameters())
        self._watch.unshared = self._parameters()
        self._watch.share_start()

    @property
    def tables(self) -> tuple[RowGroup, ...]:
        """The groups of tables; the rule is called once a step for each, in this order."""
        return tuple(table.group for table in self._all())

    @torch.no_grad()
    def look_up(self, number: int, ids: Tensor) -> Tensor:
        """Return rows `(n, F, D)` of a group of F tables, for ids `(n, F)` of each, without their history.

        A weight that several tables share is one table here.

        >>> model = nn.Sequential(nn.Embedding.from_pretrained(torch.eye(3), freeze=False))
        >>> with RowGradients(model, sum_losses) as rows:
        ...     rows.look_up(0, torch.tensor([[2]]))
        tensor([[[0., 0., 1.]]])
        """
        if number >= len(self._tables):
            return F.embedding(ids, self._tied[number - len(self._tables)].weight)
        table, slots = self._tables[number], self._slots[number].to(ids.device)
        self._slots[number] = slots
        if slots.numel() == 0:
            return table.look_up(ids.reshape(-1)).unsqueeze(1)
        stack = table.module
        if isinstance(stack, PlainStack):
            return F.embedding(ids + stack.offsets.index_select(0, slots), stack.embedding.weight)
        # any other stack reads all its slots, whichever of its tables are asked
        of_slots = ids.new_zeros(len(ids), table.numbering.first_row.shape[0])
        rows = table.look_up(of_slots.index_copy_(1, slots, ids))
        return rows.index_select(1, slots)

    def backward(
        self, *losses: Tensor, scaler: GradScaler | None = None, last: bool = True
    ) -> None:
        """Leave gradients in all parameters, as `backward()` of the summed losses does.

        For micro-batches, `last` says which one ends the step: the tables get their gradient then.
        Divide each loss by their number, as with plain accumulation. Give the `scaler` instead of
        scaling the losses.
        """
        self._check(losses)
        try:
            with self._watch.pass_through():
                if last and self._is_early():
                    self._prepare_early(len(losses))
                self._collect(
                    losses if scaler is None else [_scaled(scaler, loss) for loss in losses]
                )
                self._num_losses = len(losses)
                if last:
                    self._finish(None if scaler is None else _scale_of(scaler, losses[0].device))
        except BaseException:
            self.discard()  # a step that failed must not be a part of the next one
            raise

    def discard(self) -> None:
        """Forget the micro-batches of a step that will not be finished, as `zero_grad` forgets theirs."""
        self._num_losses = None
        self._early = {}
        for table in self._all():
            table.drop_step()

    def forget_recordings(self) -> None:
        """Let a rule that was changed past its `recording_key` be recorded again."""
        for recorded in self._recorded:
            recorded.forget()

    def close(self) -> None:
        """Take everything off the model again; raise when a step was left unfinished."""
        unfinished = self._take_off()
        self._watch.raise_if_forgotten()
        if unfinished:
            raise TrainingError(
                "the row gradients of the last micro-batches were dropped; "
                "call rows.backward(loss, last=True) for the last one of a step"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._take_off()

    def _take_off(self) -> bool:
        """Take all hooks off; return whether micro-batches were waiting for the end of their step."""
        if not self._watch.passing:
            self._watch.passing = True
            for table in self._all():
                table.detach()
            ignore_in_ddp(self.model, self._ignored_before)
        return sum(table.drop_step() for table in self._all()) > 0

    def _all(self) -> list[Watched]:
        return [*self._tables, *self._tied]

    def _parameters(self) -> list[nn.Parameter]:
        tables = [p for table in self._tables for p in table.module.parameters()]
        return [*tables, *(tied.weight for tied in self._tied)]

    def _check(self, losses: Sequence[Tensor]) -> None:
        if self._watch.passing:
            raise TrainingError("these row gradients are closed; make new ones or call backward()")
        self._watch.raise_if_forgotten()
        if not losses:
            raise TrainingError("backward takes at least one loss, as in rows.backward(loss)")
        if self._num_losses not in (None, len(losses)):
            raise TrainingError(
                f"all micro-batches of a step have the same number of losses, got {len(losses)} "
                f"after {self._num_losses}"
            )

    def _collect(self, losses: Sequence[Tensor]) -> None:
        """Run the backward of each loss, and keep what it left in the leaves."""
        for table in self._all():
            table.begin(len(losses))
        try:
            # the first loss comes last: its backward ends the step of a DDP model
            for number in reversed(range(len(losses))):
                self._run_backward(losses[number], is_real=number == 0)
                for table in self._all():
                    table.take(number)
        finally:
            for table in self._all():
                table.end()

    def _run_backward(self, loss: Tensor, *, is_real: bool) -> None:
        if is_real or world_size() == 1:
            loss.backward(retain_graph=not is_real)
            return
        # DDP takes a backward for the only one of the step, so it must not see this one
        leaves = [leaf for table in self._tables for *_, leaf in table.leaves]
        inputs = [*leaves, *(p for p in self.model.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is not None:
                add_gradient(tensor, gradient.clone())

    def _finish(self, scale: Tensor | None) -> None:
        """Ask the rule, and go on with the backward into the tables."""
        assert self._num_losses is not None
        parts: list[tuple[Tensor, Tensor]] = []
        try:
            self._add_absent(self._num_losses)
            for number, counts in enumerate(self._counts()):
                looked_up = self._tables[number].looked_up(self._num_losses, counts)
                if looked_up is not None:
                    found, gradients = looked_up
                    early = self._early.get(number)
                    known = None if early is None else early.known
                    answer = self._replay_answer(number, found, gradients, known, scale)
                    parts += found.cut(*answer)
            for number, tied in enumerate(self._tied, start=len(self._tables)):
                tied.add(self._asked.answer_tied(number, tied, scale))
        finally:
            self.discard()
        if not parts and not self._tied:
            raise TrainingError(
                "the losses depend on no row of the tables with row gradients; look rows up with "
                "gradients enabled after RowGradients was made, then call rows.backward(loss)"
            )
        torch.autograd.backward([rows for rows, _ in parts], [gradient for _, gradient in parts])

    def _counts(self) -> list[list[int] | None]:
        """Return how much each process has looked up in each table; None when there is only one."""
        if world_size() == 1 or not self._tables:
            return [None for _ in self._tables]
        device = self._parameters()[0].device
        return [*gather_counts([table.count() for table in self._tables], device)]

    @property
    def _asked(self) -> AskedRule:
        return AskedRule(self.rule, self._static)

    def _is_early(self) -> bool:
        """Return whether the rule prepares its answer while the backward runs: in a recorded step.

        A recording that turns out to be of other lookups than the backward reaches can be thrown away.
        """
        is_whole = self._num_losses is None and world_size() == 1
        return (
            is_whole and isinstance(self.rule, GroupRule) and (self._always_early or is_recording())
        )

    def _prepare_early(self, num_losses: int) -> None:
        home = self._parameters()[0].device
        for number, table in enumerate(self._tables):
            lookups = table.waiting()
            if lookups:
                absent = self._absent(number, lookups, num_losses)
                with aside(home):
                    known = self._asked.prepare(number, table.rows_of([*lookups, *absent]))
                self._early[number] = Early(lookups, absent, known)

    def _add_absent(self, num_losses: int) -> None:
        """Add what the rule wants to see besides to the lookups of the step."""
        for number, table in enumerate(self._tables):
            early = self._early.get(number)
            if early is None:
                table.step += self._absent(number, table.step, num_losses)
                continue
            join(self._parameters()[0].device)
            if early.lookups != table.step:
                raise TrainingError(
                    "a step with lookups that its loss does not depend on cannot be recorded, as one of "
                    f"{', '.join(table.group.names)}"
                )
            table.step += early.absent

    def _absent(self, number: int, lookups: Sequence[Lookup], num_losses: int) -> list[Lookup]:
        """Return the lookup of rows that the rule wants to see besides, where there are lookups at all."""
        ids = self.rule.absent_ids(number) if isinstance(self.rule, GroupRule) else None
        if ids is None or not lookups:
            return []
        # a slot that needs none reads once more what it has read: that moves no other row
        table, slots = self._tables[number], self._slots[number].to(ids.device)
        read = table.rows_of(lookups).ids
        again = torch.arange(len(ids), device=ids.device) % len(read)
        wanted, is_there = ids.to(read.dtype), ids >= 0
        more = read.index_select(0, again)  # (n,), or (n, S) for a stack
        if slots.numel() == 0:
            more = torch.where(is_there[:, 0], wanted[:, 0], more)
        else:
            own = torch.where(is_there, wanted, more.index_select(1, slots))
            more = more.index_copy(1, slots, own)
        return [table.look_up_more(more, num_losses)]

    def _replay_answer(
        self,
        number: int,
        found: LookedUpRows,
        gradients: Tensor,
        known: KnownRows | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `_answer` does, from a recording where the rule allows that and there is one."""
        key = self.rule.recording_key() if isinstance(self.rule, GroupRule) else None
        if key is None or known is not None or world_size() > 1:
            return self._asked.answer(
                number, known or self._asked.prepare(number, found), gradients, scale
            )
        rows, last = found.rows(), [] if scale is None else [scale]

        def answer(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            gradients, ids, *others = inputs
            given = self._asked.prepare(number, replace(found, ids=ids, parts=others[: len(rows)]))
            return self._asked.answer(number, given, gradients, others[-1] if last else None)

        # a recording reads the tables where they lay when it was made
        homes = tuple(tensor.data_ptr() for tensor in self._tables[number].tensors())
        inputs = [gradients, found.ids, *rows, *last]
        gradients, keep = self._recorded[number]((key, homes), answer, inputs)
        return gradients, keep


def _first_slots(table: WatchedTable) -> Tensor:
    """Return the first slot of each table of a stack; nothing for a table of its own."""
    if table.numbering.first_row.dim() == 0:
        return torch.empty(0, dtype=torch.int64)
    first_rows = table.numbering.first_row.tolist()
    return torch.tensor([first_rows.index(first_row) for first_row in table.group.first_rows])


def _scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    return _scaled(scaler, torch.ones((), device=device))


def _scaled(scaler: GradScaler, tensor: Tensor) -> Tensor:
    scaled: Tensor = scaler.scale(tensor)
    return scaled
