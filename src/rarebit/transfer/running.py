"""A running transfer: rare rows of a model learn from frequent ones as far as the main loss lets them (Gong et al.).

    select    which rows are frequent, and which rare ones have a frequent relative    `data/selection.py`
    loss      how far rare rows are from frequent ones                                 `transfer/losses.py`
    rule      how the two gradients of a row become one                                `transfer/lexico.py`

The distinct rows of the batch are known in each step (`row_gradients/seam.py`). The transfer loss compares them
with a sample of frequent rows, once per optimizer step; its gradient needs no backward through the network, and
is the same in all processes. Rows outside the batch do not move unless asked for, a few in each step: they have
no main gradient, so they get the transfer gradient. A weight that is tied to an output has a gradient for all its
rows, so all of them take part.

It works on rows, so it holds for plain, factorised and masked tables alike. Of a masked table only the
entries that are left count. Each embedding set of a table has its own barrier and discriminator.

Not for thresholds that are still being learned (PEP): the transfer would move those, too.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, distributed, nn
from torch.amp.grad_scaler import GradScaler

from rarebit.callbacks import Callback
from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FrequencySplit, Selection
from rarebit.errors import TrainingError
from rarebit.row_gradients.processes import world_size
from rarebit.row_gradients.seam import GroupRule, RowGradients, RowStep
from rarebit.settings import require
from rarebit.tables.find import TableInfo
from rarebit.transfer.batch import Draws
from rarebit.transfer.group import TransferGroup, start_groups
from rarebit.transfer.ledger import Ledger
from rarebit.transfer.lexico import RULES, TransferRule
from rarebit.transfer.losses import TransferLoss

__all__ = ["Explanation", "RunningTransfer"]


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
        update_absent: int,
        compile: bool,
        say: Callable[[str], object],
    ) -> None:
        require(
            update_absent >= 0,
            f"update_absent must be at least 0, got update_absent={update_absent}",
        )
        self.rule, self.alpha, self.scale = rule, alpha, scale
        self.update_absent = update_absent
        self.ledger = Ledger()
        self._main_loss: Tensor | None = None
        self._loss_of_step: Tensor | None = None  # always in the same memory
        self.rows = RowGradients(model, _Asked(self), where)
        try:
            self.groups = start_groups(
                self.rows, select, counts, data, loss=loss, samples=samples, both=both
            )
        except BaseException:
            self.rows.close()
            raise
        self.ledger.groups = [group.ledger for group in self.groups]
        self.draws = Draws(seed, self.groups[0].device)
        if compile:
            for group in self.groups:
                group.compile(say)

    def backward(
        self, *losses: Tensor, scaler: GradScaler | None = None, last: bool = True
    ) -> None:
        """Leave gradients in all parameters: those of the summed losses, and in the rows those of the rule.

        With micro-batches, pass `last=False` for all but the last one of a step, and divide each loss by their
        number. Pass the `scaler` instead of scaling the losses.
        """
        if not losses:
            raise TrainingError("backward takes at least one loss, as in transfer.backward(loss)")
        loss = sum(losses[1:], start=losses[0])
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
        for group in self.groups:
            for number, name in enumerate(group.names):
                if table in (name, name.rpartition(".")[2]):
                    return _explanation(group, number, id)
        known = ", ".join(name for group in self.groups for name in group.names)
        raise TrainingError(f"the transfer does not use a table {table!r}; it uses {known}")

    def report(self) -> dict[str, Any]:
        """Return the ledger as plain values."""
        return self.ledger.read()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next steps depend on, and the ledger: its own tensors, not copies."""
        return {
            "step": self.draws.step,
            "losses": {group.names[0]: group.running.state_dict() for group in self.groups},
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned for the same tables and the same loss."""
        ours, given = {group.names[0] for group in self.groups}, set(state["losses"])
        if ours != given:
            raise TrainingError(
                f"this transfer has the tables {', '.join(sorted(ours))}, the state given is of "
                f"{', '.join(sorted(given))}; use the same model"
            )
        self.draws.step.copy_(state["step"])
        for group in self.groups:
            group.running.load_state_dict(state["losses"][group.names[0]])
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
        if world_size() > 1:
            total = self._main_loss.clone()
            distributed.all_reduce(total)
            self._main_loss = total / world_size()
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
        transfer, absent = self.transfer, self.transfer.update_absent
        return transfer.groups[number].absent_ids(transfer.draws, absent) if absent else None

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


def _explanation(group: TransferGroup, number: int, id: int) -> Explanation:
    part = group.parts[number]
    require(
        0 <= id < len(part.counts),
        f"{group.names[number]!r} has ids from 0 to {len(part.counts) - 1}, got {id}",
    )
    row = group.starts[number] + id
    is_source, is_target = bool(group.sides.source[row]), bool(group.sides.target[row])
    pairs = zip(part.relatives[id].tolist(), part.weights[id].tolist(), strict=True)
    return Explanation(
        table=group.names[number],
        id=id,
        count=int(part.counts[id]),
        side="frequent" if is_source else "rare" if is_target else "neither",
        relatives=tuple((row, weight) for row, weight in pairs if weight > 0),
    )
