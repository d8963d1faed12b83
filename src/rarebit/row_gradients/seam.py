"""Row gradients: a rule rewrites the gradient of each looked-up row before the optimizer sees it.

    rule(ids, gradients) -> gradient        ids (U,)   gradients (K, U, D)   gradient (U, D)

    U    distinct rows of the step          K    losses          D    width of a row          T    lookups

A rule is pure and works on rows, so it holds for plain tables and for tables made by methods alike. It is called
once per optimizer step for each group of `RowGradients.tables`, on row gradients that are unscaled, summed over
the micro-batches and averaged over the processes: rules are not linear. It sees float32, or float64 where the
table is that wide. On a GPU, where no size may depend on the ids, some slots hold no row: their id is -1, their
gradients are zero, and what the rule returns for them is ignored. A `GroupRule` also sees which tables the rows
belong to and their values. On a GPU it can be recorded and replayed (`row_gradients/recorded.py`); in a step that
is recorded as a whole, what needs no gradients runs beside the backward.

Where a rule returns the sum over the losses, a row's gradient is what plain `backward()` gives: for one loss in
one process on the CPU to the last bit, else within the rounding of a sum. In a bfloat16 model each lookup's
gradient has 8 bits and only their sum is float32; under autocast tables are float32.

Where the losses of a step use a plain table's weight without a lookup, as `x @ table.weight.T` or a penalty on it
does, the rule sees all rows of that table in this step, with the weight's own gradient plus that of the lookups.
The same holds for a lookup inside `torch.utils.checkpoint` with `use_reentrant=True`. The `.weight` of a table made
by methods is a lookup of all rows; a loss that reaches the parameters inside such a table raises.

Several processes (`DistributedDataParallel`):

- Make `RowGradients` first, then wrap the same model. DDP does not average the tables; their lookups are
  gathered, so all processes make the same update of each table. The first forward of DDP gives all processes the
  tables of the first one. Without DDP, processes do not wait for each other.
- All processes call `backward` with the same number of losses. Batches may differ in size.
- The first loss must reach every parameter outside the tables, the others only the model's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
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
    WatchedTable,
    add_gradient,
    choose_sites,
    ignore_in_ddp,
    join_parts,
    keep_from_ddp,
    watch_own,
    watch_tables,
    watch_tied,
    wide,
)
from rarebit.row_gradients.recorded import Recorded, aside, is_recording, join
from rarebit.tables.apply import TableInfo, refuse_wrapped_model
from rarebit.tables.collection import Distinct, PlainStack, find_distinct, take_rows

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Ids `(U,)` and gradients `(K, U, D)` of distinct rows to one gradient per row, `(U, D)`."""

SPREAD = 1024
"""Places behind the last slot that take the sums of lookups without a rule."""


@dataclass(frozen=True)
class RowStep:
    """The distinct rows of one group in one step."""

    number: int
    """The group's place in `RowGradients.tables`."""
    ids: Tensor
    """Row numbers in the group, ascending, `(U,)`; -1 in slots without a row."""
    gradients: Tensor
    """The gradient of each loss, `(K, U, D)`."""
    rows: Tensor
    """The rows' values, `(U, D)`, in the precision of the gradients; undefined in slots without a row."""
    prepared: Any = None
    """What the rule prepared for them."""


class GroupRule(ABC):
    """A rule that also sees which tables its rows belong to, and the rows' values."""

    def absent_ids(self, number: int) -> Tensor | None:
        """Return ids of more rows to include in a step, `(n, F)` for the F tables of a group.

        Below zero is none. The main gradient of rows that are not in the batch is zero.
        """
        del number
        return None

    def prepare(self, number: int, ids: Tensor, rows: Tensor) -> Any:
        """Return what is known of a step without the gradients; the arguments are as in `RowStep`.

        Called once per step before `answer`. In a recorded step it runs beside the backward.
        """
        del number, ids, rows

    @abstractmethod
    def answer(self, step: RowStep) -> Tensor:
        """Return one gradient per row, `(U, D)`."""

    def recording_key(self) -> Hashable:
        """Return what the answer depends on, apart from the step and tensors that stay in place.

        On a GPU, a rule with a key is recorded after some steps, and again when the key changes. A rule
        without a key is called in every step.
        """
        return None


def sum_losses(ids: Tensor, gradients: Tensor) -> Tensor:
    """Return the sum over the losses: the rule that changes nothing.

    >>> sum_losses(torch.tensor([3]), torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]]))
    tensor([[11., 22.]])
    """
    del ids
    return gradients.sum(dim=0)


@dataclass(frozen=True)
class KnownRows:
    """What is known of the rows of a step before their gradients."""

    distinct: Distinct
    ids: Tensor  # the row number of each slot, (U,); -1 in slots without a row
    is_empty: Tensor  # slots without a row, (U,)
    has_no_rule: Tensor  # lookups that keep their own gradient, (T,)
    places: Tensor | None
    """Where each lookup is summed, `(T,)`: its slot, or a place behind the last; None: by `distinct`."""
    rows: Tensor | None  # the rows' values, (U, D), for a GroupRule
    skip: int  # slots without a rule: in the compact form, lookups without a rule share the first
    prepared: Any  # what the rule prepared for its slots

    def sum_lookups(self, gradients: Tensor) -> Tensor:
        """Return the sum of each row's lookups `(K, U, D)`, the same bits in all processes."""
        distinct, size = self.distinct, len(self.ids)
        if gradients.numel() == 0:
            sums = [gradients[0]] * len(gradients)
        elif self.places is not None:
            zeros = [loss.new_zeros(size + SPREAD, loss.shape[1]) for loss in gradients]
            sums = [
                zero.index_add_(0, self.places, loss)[:size]
                for zero, loss in zip(zeros, gradients, strict=True)
            ]
        elif gradients.is_cuda:
            # a GPU adds in any order, except within a bag
            order, starts = distinct.order, distinct.starts
            sums = [F.embedding_bag(order, loss, starts, mode="sum") for loss in gradients]
        else:
            sums = [distinct.sum(loss) for loss in gradients]
        return sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)


@dataclass(frozen=True)
class AskedRule:
    """Asks a rule for the gradients of a step: each distinct row once, then back to the lookups."""

    rule: Rule | GroupRule
    static: bool | None
    """Whether no size depends on the ids; by default on a GPU."""
    alone: bool
    """Whether no other process trains the same tables."""

    @torch.no_grad()
    def prepare(self, number: int, found: LookedUpRows) -> KnownRows:
        distinct = find_distinct(found.keys, static=self.static, most=found.most_keys)
        ids = distinct.ids.long()
        # in the compact form, lookups without a rule share the first slot
        skip = 0 if self._is_static(ids) else int((ids[:1] < 0).sum())
        rows = prepared = None
        if isinstance(self.rule, GroupRule) and ids.shape[0] > skip:
            parts = join_parts([part.reshape(-1, found.group.width) for part in found.rows()])
            rows = take_rows(parts, distinct.first).to(wide(parts.dtype))  # of a row's first lookup
            prepared = self._ask_to_prepare(self.rule, number, ids[skip:], rows[skip:])
        has_no_rule, places = found.keys < 0, None
        if has_no_rule.is_cuda and self.alone:
            # additions in any order; lookups without a rule would queue at one slot, so they are spread
            behind = torch.arange(len(has_no_rule), device=has_no_rule.device) % SPREAD + len(ids)
            places = torch.where(has_no_rule, behind, distinct.slot_of)
        return KnownRows(distinct, ids, ids < 0, has_no_rule, places, rows, skip, prepared)

    @torch.no_grad()
    def answer(
        self, number: int, known: KnownRows, gradients: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient `(T, D)` of each lookup, and which lookups keep their own.

        The rule's answer goes to the first lookup of a row, zero to its others.
        """
        distinct, keep, leave = known.distinct, known.has_no_rule, known.is_empty
        sums = known.sum_lookups(gradients)
        if self._is_static(keep) and known.places is None:
            sums = sums.masked_fill(leave.unsqueeze(-1), 0.0)
        rows = sums[0] if known.rows is None else known.rows
        step = RowStep(number, known.ids, sums, rows, known.prepared)
        answer, is_sum = self._ask(step, scale, skip=known.skip)
        if is_sum is not None:
            keep = keep | is_sum.index_select(0, distinct.slot_of)
            leave = leave | is_sum
        return distinct.put_first(answer, _over_losses(gradients), keep, leave), keep

    @torch.no_grad()
    def answer_all(
        self, number: int, table: WatchedTable | TiedTable, gradients: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Return one gradient `(N, D)` for all rows of a weight, from those of each loss `(K, N, D)`."""
        assert table.weight is not None
        rows, chosen, of_group = table.weight.detach().to(gradients.dtype), table.chosen, gradients
        if chosen is not None:
            chosen = table.chosen = chosen.to(gradients.device)
            rows, of_group = rows.index_select(0, chosen), gradients.index_select(1, chosen)
        ids = torch.arange(table.group.num_rows, device=gradients.device)
        prepared = None
        if isinstance(self.rule, GroupRule):
            prepared = self._ask_to_prepare(self.rule, number, ids, rows)
        answer, _ = self._ask(RowStep(number, ids, of_group, rows, prepared), scale, skip=0)
        # rows of a stack that were not chosen keep their gradient
        return answer if chosen is None else _over_losses(gradients).index_copy(0, chosen, answer)

    def _ask_to_prepare(self, rule: GroupRule, number: int, ids: Tensor, rows: Tensor) -> Any:
        with torch.autocast(rows.device.type, enabled=False):
            return rule.prepare(number, ids, rows)

    def _ask(
        self, step: RowStep, scale: Tensor | None, *, skip: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rule's answer for each slot, scaled again, and which answers are the plain sum.

        A plain sum stays with its lookups: adding it up elsewhere rounds in another order. Not on a
        GPU, which adds in any order, nor with several processes, whose orders differ.
        """
        ids, sums = step.ids, step.gradients
        unscaled = sums if scale is None else sums * scale.reciprocal()
        plain = answer = _over_losses(unscaled)
        if ids.shape[0] > skip:
            asked = replace(
                step, ids=ids[skip:], gradients=unscaled[:, skip:], rows=step.rows[skip:]
            )
            answer = self._call_rule(asked).to(plain.dtype)
            answer = torch.cat([plain[:skip], answer]) if skip else answer
        is_sum = None
        if not ids.is_cuda and self.alone:
            is_sum = (answer == plain).all(dim=-1)
        if scale is None:
            return answer, is_sum
        # a scaler skips a step whose gradients are not finite; a rule must not hide that
        is_finite = torch.isfinite(sums).all()
        is_sum = None if is_sum is None else is_sum & is_finite
        return torch.where(is_finite, answer * scale, torch.nan), is_sum

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
                f"the rule must return one gradient per row, a tensor of shape {expected}, got {got}"
            )
        return answer

    def _is_static(self, ids: Tensor) -> bool:
        """Return whether all slots are kept, so that no size depends on the ids."""
        return ids.is_cuda if self.static is None else self.static


def require_losses(losses: Sequence[object], name: str) -> None:
    """Raise unless there are losses, each of them a tensor; `name` is the caller's word for who takes them."""
    wrong = [type(loss).__name__ for loss in losses if not isinstance(loss, Tensor)]
    if wrong or not losses:
        raise TrainingError(
            f"backward takes at least one loss, as in {name}.backward(loss) or "
            f"{name}.backward(first, second), got {f'a {wrong[0]}' if wrong else 'none'}"
        )


def _over_losses(gradients: Tensor) -> Tensor:
    """Return the sum over the losses; a single loss is neither added nor copied."""
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


class Early(NamedTuple):
    """What the rule prepared for a table before the backward."""

    lookups: list[Lookup]
    absent: list[Lookup]
    known: KnownRows


class RowGradients:
    """Lets a rule rewrite the row gradients of a model's tables; `backward` replaces `loss.backward()`.

    `where` chooses tables as for `apply_`; tables narrower than `min_width` and frozen ones are skipped.
    Tables behind one lookup form one group: `tables` lists the groups with their row numbers. A table
    whose weight another module also uses is a group of all its rows.

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
        if not callable(rule) and not isinstance(rule, GroupRule):
            raise TrainingError(
                "RowGradients takes a rule, a function of ids and gradients, after the model; got a "
                f"{type(rule).__name__}"
            )
        chosen = choose_sites(model, where, min_width)
        self.model = model
        self.rule = rule
        self._watch = Watch()
        self._tables = watch_tables(self._watch, chosen)
        self._tied = watch_tied(self._watch, chosen)
        watch_own(model, self._tables)
        self._slots = [table.numbering.slots_of(table.group) for table in self._tables]
        self._recorded = [Recorded() for _ in self._tables]
        self._early: dict[int, Early] = {}
        self._always_early = False
        self._static: bool | None = None
        self._num_losses: int | None = None
        self._ignored_before = keep_from_ddp(model, self._parameters())
        self._watch.shared = self._parameters()
        # tables spread over processes are looked up by all of them, whatever wraps the model
        parts = (part for table in self._tables for part in table.module.modules())
        groups = (getattr(part, "process_group", None) for part in parts)
        self._watch.processes = next((group for group in groups if group is not None), None)
        # a weight may be used without a lookup, so the model itself says when a forward begins
        self._entry = model.register_forward_pre_hook(torch.compiler.disable(self._enter))

    @property
    def tables(self) -> tuple[RowGroup, ...]:
        """The groups of tables; each step calls the rule once for each, in this order."""
        return tuple(table.group for table in self._all())

    @torch.no_grad()
    def look_up(self, number: int, ids: Tensor) -> Tensor:
        """Return rows `(n, F, D)` of a group of F tables, for ids `(n, F)` of each, without their history.

        A weight that several tables share is one table here.
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
        # any other stack reads all its slots, whichever tables were asked for
        of_slots = ids.new_zeros(len(ids), table.numbering.first_row.shape[0])
        rows = table.look_up(of_slots.index_copy_(1, slots, ids))
        return rows.index_select(1, slots)

    def backward(
        self, *losses: Tensor, scaler: GradScaler | None = None, last: bool = True
    ) -> None:
        """Leave gradients in all parameters, as `backward()` of the summed losses does.

        With micro-batches, pass `last=False` for all but the last one of a step: the tables get their
        gradient with the last. Divide each loss by their number, as with plain accumulation. Pass the
        `scaler` instead of scaling the losses.
        """
        self._check(losses)
        try:
            with self._watch.pass_through():
                if last and self._is_early():
                    self._prepare_early(len(losses))
                scale: Callable[[Tensor], Tensor] | None = scaler.scale if scaler else None
                self._collect([scale(loss) for loss in losses] if scale else losses)
                self._num_losses = len(losses)
                if last:
                    home = losses[0].device
                    self._finish(scale(torch.ones((), device=home)) if scale else None)
        except BaseException:
            self.discard()  # a failed step must not be part of the next one
            raise

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes that train together."""
        return self._watch.average(tensor)

    def discard(self) -> None:
        """Forget the micro-batches of an unfinished step, as `zero_grad` forgets theirs."""
        self._num_losses = None
        self._early = {}
        for table in self._all():
            table.drop_step()

    def forget_recordings(self) -> None:
        """Drop the recordings: for a rule that changed in ways its `recording_key` does not show."""
        for recorded in self._recorded:
            recorded.forget()

    def close(self) -> None:
        """Remove everything from the model; raise when a step was left unfinished."""
        unfinished = self._take_off()
        self._watch.raise_if_forgotten()
        if unfinished:
            raise TrainingError(
                "the row gradients of the last micro-batches were dropped; "
                "call rows.backward(loss, last=True) for the last one of a step"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._take_off()

    def _enter(self, *_: object) -> None:
        self._watch.meet()

    def _take_off(self) -> bool:
        """Remove all hooks; return whether micro-batches were waiting for the end of their step."""
        if not self._watch.passing:
            self._watch.passing = True
            for table in self._all():
                table.detach()
            self._entry.remove()
            ignore_in_ddp(self.model, self._ignored_before)
        return sum(table.drop_step() for table in self._all()) > 0

    def _all(self) -> list[WatchedTable | TiedTable]:
        return [*self._tables, *self._tied]

    @property
    def _home(self) -> torch.device:
        return next(self.model.parameters()).device

    def _parameters(self) -> list[nn.Parameter]:
        tables = [p for table in self._tables for p in table.module.parameters()]
        return [*tables, *(p for tied in self._tied for p in tied.modules[0].parameters())]

    def _check(self, losses: Sequence[Tensor]) -> None:
        if self._watch.passing:
            raise TrainingError("these row gradients are closed; make new ones or call backward()")
        self._watch.raise_if_forgotten()
        for table in self._all():
            table.refuse_other_parameters()
        require_losses(losses, "rows")
        if self._num_losses not in (None, len(losses)):
            raise TrainingError(
                f"all micro-batches of a step have the same number of losses, got {len(losses)} "
                f"after {self._num_losses}"
            )

    def _collect(self, losses: Sequence[Tensor]) -> None:
        for table in self._all():
            table.begin(len(losses))
        try:
            # the first loss comes last: its backward ends the step of a DDP model
            for number in reversed(range(len(losses))):
                if number == 0 or self._watch.num_processes == 1:
                    losses[number].backward(retain_graph=number > 0)
                else:
                    self._backward_past_ddp(losses[number])
                for table in self._all():
                    table.take(number)
        finally:
            for table in self._all():
                table.end()

    def _backward_past_ddp(self, loss: Tensor) -> None:
        """Add the gradients of a loss unseen by DDP, which takes a backward for the only one of the step."""
        leaves = [leaf for table in self._tables for *_, leaf in table.leaves]
        inputs = [*leaves, *(p for p in self.model.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is not None:
                add_gradient(tensor, gradient.clone())

    def _finish(self, scale: Tensor | None) -> None:
        assert self._num_losses is not None
        parts: list[tuple[Tensor, Tensor]] = []
        try:
            self._add_absent(self._num_losses)
            counts: Sequence[list[int] | None] = [None] * len(self._tables)
            directly = [table.came for table in self._tables]
            if self._watch.num_processes > 1 and self._tables:
                known = [*(table.count() for table in self._tables), *directly]
                gathered = self._watch.gather_counts(known, self._home)
                counts = gathered[: len(directly)]
                directly = [any(ranks) for ranks in gathered[len(directly) :]]
            for number, (table, of_ranks) in enumerate(zip(self._tables, counts, strict=True)):
                if directly[number]:
                    self._answer_all(number, table, scale)
                    continue
                looked_up = table.looked_up(self._num_losses, of_ranks)
                if looked_up is not None:
                    found, gradients = looked_up
                    parts += found.split(*self._answer(number, found, gradients, scale))
            for number, tied in enumerate(self._tied, start=len(self._tables)):
                self._answer_all(number, tied, scale)
        finally:
            self.discard()
        if not parts and not self._tied and not any(directly):
            raise TrainingError(
                "the losses depend on no row of the tables with row gradients; look rows up with "
                "gradients enabled after making RowGradients, then call rows.backward(loss)"
            )
        torch.autograd.backward([rows for rows, _ in parts], [gradient for _, gradient in parts])

    def _answer_all(
        self, number: int, table: WatchedTable | TiedTable, scale: Tensor | None
    ) -> None:
        assert self._num_losses is not None
        assert table.weight is not None
        gradients = table.all_gradients(self._num_losses)
        answer = self._asked.answer_all(number, table, gradients, scale)
        add_gradient(table.weight, answer.to(table.weight.dtype))

    @property
    def _asked(self) -> AskedRule:
        return AskedRule(self.rule, self._static, self._watch.num_processes == 1)

    def _is_early(self) -> bool:
        """Return whether the rule prepares its answer while the backward runs: in a recorded step.

        A recording whose lookups turn out to differ from those the backward reaches can be thrown away.
        """
        is_whole = self._num_losses is None and self._watch.num_processes == 1
        return (
            is_whole and isinstance(self.rule, GroupRule) and (self._always_early or is_recording())
        )

    def _prepare_early(self, num_losses: int) -> None:
        home = self._home
        for number, table in enumerate(self._tables):
            lookups = table.waiting()
            if lookups and not table.is_used_directly:
                absent = self._absent(number, lookups, num_losses)
                with aside(home):
                    known = self._asked.prepare(number, table.rows_of([*lookups, *absent]))
                self._early[number] = Early(lookups, absent, known)

    def _add_absent(self, num_losses: int) -> None:
        """Add the further rows that the rule asks for to the lookups of the step."""
        for number, table in enumerate(self._tables):
            early = self._early.get(number)
            if early is None:
                table.step += [] if table.came else self._absent(number, table.step, num_losses)
                continue
            join(self._home)
            if early.lookups != table.step or table.came:
                raise TrainingError(
                    "a step cannot be recorded with lookups that its loss does not depend on, or a weight that "
                    f"no earlier step used, as of {', '.join(table.group.names)}"
                )
            table.step += early.absent

    def _absent(self, number: int, lookups: Sequence[Lookup], num_losses: int) -> list[Lookup]:
        """Return the lookup of further rows that the rule asks for, where there are lookups at all."""
        ids = self.rule.absent_ids(number) if isinstance(self.rule, GroupRule) else None
        if ids is None or not lookups:
            return []
        # a slot that needs none reads again what it has read: that moves no other row
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

    def _answer(
        self, number: int, found: LookedUpRows, gradients: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what `AskedRule.answer` does, from a recording where the rule has a key for one."""
        early = self._early.get(number)
        key = self.rule.recording_key() if isinstance(self.rule, GroupRule) else None
        if key is None or early is not None or self._watch.num_processes > 1:
            known = self._asked.prepare(number, found) if early is None else early.known
            return self._asked.answer(number, known, gradients, scale)
        rows, last = found.rows(), [] if scale is None else [scale]

        def answer(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            gradients, ids, *others = inputs
            given = self._asked.prepare(number, replace(found, ids=ids, parts=others[: len(rows)]))
            return self._asked.answer(number, given, gradients, others[-1] if last else None)

        # a recording reads the tables at the addresses they had when it was made
        module = self._tables[number].module
        homes = tuple(tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))
        inputs = [gradients, found.ids, *rows, *last]
        gradients, keep = self._recorded[number]((key, homes), answer, inputs)
        return gradients, keep
