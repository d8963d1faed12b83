"""A rule is asked for the gradients of a step: each distinct row once, then back to the lookups."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rarebit.errors import TrainingError
from rarebit.tables.distinct import find_distinct
from rarebit.tables.group_rule import GroupRule, RowStep, Rule
from rarebit.tables.looked_up import LookedUpRows
from rarebit.tables.ranks import world_size
from rarebit.tables.row_sums import KnownRows, over_losses, places_of, rows_of, sum_lookups
from rarebit.tables.tied import TiedTable

__all__ = ["AskedRule"]


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
