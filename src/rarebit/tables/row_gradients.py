"""Row gradients: a rule rewrites the gradient of each looked-up row before the optimizer sees it.

    rule(ids, gradients) -> gradient        ids (U,)   gradients (K, U, D)   gradient (U, D)

    U    distinct rows of the step          K    losses          D    width of a row

A rule is pure and works on rows, so it holds for plain tables and for tables made by methods alike.
It is called once an optimizer step for each group of `RowGradients.tables`, on row gradients that are
unscaled, summed over the micro-batches and averaged over the processes: rules are not linear, and one
called on parts would give another answer. It sees float32, or float64 where the table is that wide.
On a GPU, where no size may depend on the ids, some slots hold no row: their id is -1, their gradients
are zero, and what the rule returns for them is ignored. A `GroupRule` is told more: which tables the rows
are of, and what is in them.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from rarebit.errors import TrainingError
from rarebit.tables.distinct import Distinct, find_distinct
from rarebit.tables.find import TableInfo, refuse_wrapped_model
from rarebit.tables.lookups import LookedUpRows, RowGroup, Watch, Watched, WatchedTable, wide
from rarebit.tables.pooled import PooledRows, single_rows
from rarebit.tables.ranks import gather_counts, ignore_in_ddp, keep_from_ddp, world_size
from rarebit.tables.tied import TiedTable, add_gradient
from rarebit.tables.watching import choose_sites, watch_tables, watch_tied

__all__ = ["GroupRule", "RowGradients", "RowStep", "Rule", "sum_losses"]

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


class GroupRule(ABC):
    """A rule that is told which tables its rows are of, and what is in the rows."""

    @abstractmethod
    def answer(self, step: RowStep) -> Tensor:
        """Return one gradient a row, `(U, D)`."""


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
        # a stack reads all its slots, whichever of its tables are asked
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
                self._collect(
                    losses if scaler is None else [_scaled(scaler, loss) for loss in losses]
                )
                self._num_losses = len(losses)
                if last:
                    one = torch.ones((), device=losses[0].device)
                    self._finish(None if scaler is None else _scaled(scaler, one))
        except BaseException:
            self.discard()  # a step that failed must not be a part of the next one
            raise

    def discard(self) -> None:
        """Forget the micro-batches of a step that will not be finished, as `zero_grad` forgets theirs."""
        self._num_losses = None
        for table in self._all():
            table.drop_step()

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
            for number, counts in enumerate(self._counts()):
                found = self._tables[number].looked_up(self._num_losses, counts)
                if found is not None:
                    parts += found.cut(*self._answer(number, found, scale))
            for number, tied in enumerate(self._tied, start=len(self._tables)):
                self._answer_tied(number, tied, scale)
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

    @torch.no_grad()
    def _answer(
        self, number: int, found: LookedUpRows, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient `(T, D)` of each lookup, and which lookups keep their own.

        The rule's answer goes to the first lookup of a row, zero to its others.
        """
        keys, gradients = found.keys, found.gradients
        distinct = find_distinct(keys, static=self._static)
        is_row = (distinct.ids >= 0).unsqueeze(-1)
        sums = torch.where(is_row, _sum_lookups(distinct, gradients), 0.0)
        needs_rows = isinstance(self.rule, GroupRule)
        rows = _rows_of(found, distinct) if needs_rows else sums[0]
        answer, is_sum = self._ask(RowStep(number, distinct.ids, sums, rows), scale)
        keep = keys < 0
        if world_size() == 1:
            # The sum is left where it came from: adding it up elsewhere rounds in another order.
            # Several processes take it from here, or each would add it up in an order of its own.
            keep = keep | is_sum.index_select(0, distinct.slot_of)
        first = distinct.at_first_lookups(answer)
        return torch.where(keep.unsqueeze(-1), _over_losses(gradients), first), keep

    @torch.no_grad()
    def _answer_tied(self, number: int, tied: TiedTable, scale: Tensor | None) -> None:
        gradients = tied.gradients()
        ids = torch.arange(tied.group.num_rows, device=gradients.device)
        rows = tied.weight.detach().to(gradients.dtype)
        tied.add(self._ask(RowStep(number, ids, gradients, rows), scale)[0])

    def _ask(self, step: RowStep, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rule's answer for each slot, scaled again, and which answers are the plain sum."""
        ids, sums = step.ids, step.gradients
        is_static = ids.is_cuda if self._static is None else self._static
        # in the compact form, lookups without a rule have the first slot
        skip = 0 if is_static else int((ids[:1] < 0).sum())
        unscaled = sums if scale is None else sums * scale.reciprocal()
        plain = _over_losses(unscaled)
        answer = plain.clone()
        if ids.shape[0] > skip:
            asked = RowStep(step.number, ids[skip:], unscaled[:, skip:], step.rows[skip:])
            answer[skip:] = self._call_rule(asked)
        is_sum = (answer == plain).all(dim=-1)
        if scale is None:
            return answer, is_sum
        # a scaler skips a step whose gradients are not finite; a rule must not hide that
        is_finite = torch.isfinite(sums).all()
        return torch.where(is_finite, answer * scale, torch.nan), is_sum & is_finite

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


def _sum_lookups(distinct: Distinct, gradients: Tensor) -> Tensor:
    """Return the sum of each row's lookups `(K, U, D)`, the same bits in all processes."""
    if world_size() == 1 or not gradients.is_cuda or gradients.numel() == 0:
        return torch.stack([distinct.sum(loss) for loss in gradients])
    # additions on a GPU come in any order, but for those within a bag
    order, starts = distinct.order, distinct.starts
    return torch.stack([F.embedding_bag(order, loss, starts, mode="sum") for loss in gradients])


def _over_losses(gradients: Tensor) -> Tensor:
    """Return the sum over the losses; of one there is nothing to add, nor to copy."""
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


def _rows_of(found: LookedUpRows, distinct: Distinct) -> Tensor:
    """Return what the tables hold in each slot, `(U, D)`: the row of its first lookup."""
    width, dtype = found.gradients.shape[-1], wide(found.gradients.dtype)
    looked_up = [
        single_rows(part.bag, part.ids) if isinstance(part, PooledRows) else part.detach()
        for part in found.parts
    ]
    parts = [part.reshape(-1, width) for part in looked_up]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)  # (T, D)
    # a slot without a row starts where the lookups end
    starts = distinct.starts.clamp(max=distinct.order.shape[0] - 1)
    return rows.index_select(0, distinct.order.index_select(0, starts)).to(dtype)


def _first_slots(table: WatchedTable) -> Tensor:
    """Return the first slot of each table of a stack; nothing for a table of its own."""
    if table.numbering.first_row.dim() == 0:
        return torch.empty(0, dtype=torch.int64)
    first_rows = table.numbering.first_row.tolist()
    return torch.tensor([first_rows.index(first_row) for first_row in table.group.first_rows])


def _scaled(scaler: GradScaler, tensor: Tensor) -> Tensor:
    scaled: Tensor = scaler.scale(tensor)
    return scaled
