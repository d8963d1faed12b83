"""Harmless transfer: rare rows learn from frequent ones as far as the main loss lets them (Gong et al.).

    select    which rows are frequent, and which rare ones have a frequent relative    `data/selection.py`
    loss      how far rare rows are from frequent ones      `Adversarial`, `MMD`, ...
    rule      how the two gradients of a row become one     `transfer/lexico.py`

In each step the distinct rows of the batch are there anyway (`row_gradients/seam.py`). The transfer loss
is computed on them, once an optimizer step, beside a sample of frequent rows; its gradient costs no
backward through the network, and is the same in all processes. Rows outside the batch do not move unless
they are asked for, a few in each step: they have no main gradient, so the transfer gradient is theirs. A
weight that is tied to an output has a gradient for all its rows, so all of them take part.

It works on rows, so it holds for plain, factorised and masked tables alike. Of a masked table only the
entries that are left count. Each embedding set of a table has a barrier and a discriminator of its own.

Not for thresholds that are still being learned (PEP): the transfer would move those, too.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, distributed, nn
from torch.amp.grad_scaler import GradScaler

from rarebit.data.dataset import Dataset
from rarebit.data.selection import CoOccurrence, FrequencySplit, Selection
from rarebit.errors import TrainingError
from rarebit.row_gradients.processes import world_size
from rarebit.row_gradients.seam import GroupRule, RowGradients, RowStep
from rarebit.settings import require
from rarebit.tables.find import TableInfo
from rarebit.transfer.batch import Draws, TransferBatch
from rarebit.transfer.group import Found, TransferGroup, start_groups
from rarebit.transfer.ledger import Ledger
from rarebit.transfer.lexico import RULES, TransferRule
from rarebit.transfer.losses import Adversarial, TransferLoss

__all__ = ["Explanation", "HarmlessTransfer", "TransferRule"]

LEAST_ROWS = 100
"""Tables with more rows than this are chosen where nobody chooses."""


@dataclass(frozen=True)
class Explanation:
    """What a transfer does with one row, and why."""

    table: str
    id: int
    count: int
    """How often training saw it."""
    side: Literal["frequent", "rare", "neither"]
    """Frequent rows are learned from; rare ones learn; what is on neither side is left alone."""
    relatives: tuple[tuple[int, float], ...]
    """Ids of its nearest frequent relatives and how much it is like them, the nearest first."""


class HarmlessTransfer:
    """Lets rare rows learn from frequent ones; `backward` replaces `loss.backward()`.

    `counts` says how often training saw each id: a mapping by field or table, as `dataset.counts()` gives
    it, or one tensor where one table is chosen. Without `select`, the top fifth of the ids that training
    saw is frequent and the others are rare; a `Selection` says it better, and so does `CoOccurrence()` with
    the `data` to count in. By default tables with more than 100 rows are chosen.

    Rows outside the batch stay where they are. `update_absent` is a number of rare rows of each table, drawn
    anew in each step, that are moved all the same: by the transfer alone.

    `compile` lets torch compile what is done in a step, for the first size of a step that comes twice: a GPU
    then has a third of the kernels to start. `say` takes a line for each part that cannot be compiled.

    `samples` frequent rows of each table are drawn in a step; with `both`, frequent rows move, too. Rows outside
    the batch do not move, but for `update_absent` rare ones of each table a step. With `compile` the parts of a
    step go through `torch.compile`, and `say` is told where one does not.

    Make it when the model is on its device, and before it is compiled or wrapped. One that is under DDP
    needs nothing else.

    >>> model = nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 1))
    >>> counts = torch.arange(200).flip(0)
    >>> with HarmlessTransfer(model, counts=counts) as transfer:
    ...     transfer.backward(model(torch.tensor([3, 150, 150])).square().mean())
    >>> transfer.explain("0", 150).side, transfer.ledger.read()["steps"]
    ('rare', 1)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        counts: Mapping[str, Tensor] | Tensor | None = None,
        select: Selection | CoOccurrence | FrequencySplit | None = None,
        data: Dataset | Tensor | None = None,
        loss: TransferLoss = Adversarial(),
        where: Callable[[TableInfo], bool] | None = None,
        rule: TransferRule = "lexico",
        transfer_scale: float = 1.0,
        alpha: float = 2.0,
        samples: int = 256,
        both: bool = False,
        seed: int = 0,
        update_absent: int = 0,
        compile: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        require(rule in RULES, f"rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")
        require(alpha > 0, f"alpha must be above 0, got alpha={alpha}")
        require(
            transfer_scale >= 0,
            f"transfer_scale must be at least 0, got transfer_scale={transfer_scale}",
        )
        require(samples >= 1, f"samples must be at least 1, got samples={samples}")
        require(
            update_absent >= 0,
            f"update_absent must be at least 0, got update_absent={update_absent}",
        )
        self.rule, self.alpha, self.transfer_scale = rule, alpha, transfer_scale
        self.update_absent = update_absent
        self.ledger = Ledger()
        self._main_loss: Tensor | None = None
        self._loss_of_step: Tensor | None = None  # always in the same memory
        self.rows = RowGradients(model, _Asked(self), where or _is_large)
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
        self, loss: Tensor, *, scaler: GradScaler | None = None, last: bool = True
    ) -> None:
        """Leave gradients in all parameters: those of the loss, and in the rows those of the rule.

        `last` says which micro-batch ends the step; divide each loss by their number. Give the `scaler`
        instead of scaling the loss.
        """
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
        """Forget the micro-batches of a step that will not be finished."""
        self._main_loss = None
        self.rows.discard()

    def explain(self, table: str, id: int) -> Explanation:
        """Return what the transfer does with one row of a table, by its name or its field's."""
        for group in self.groups:
            for number, name in enumerate(group.names):
                if table in (name, name.rpartition(".")[2]):
                    return self._explanation(group, number, id)
        known = ", ".join(name for group in self.groups for name in group.names)
        raise TrainingError(
            f"no table {table!r} takes part in the transfer; those that do: {known}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that the coming steps depend on, and the ledger: the living tensors."""
        return {
            "step": self.draws.step,
            "losses": {group.names[0]: group.running.state_dict() for group in self.groups},
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned for the same tables and the same loss."""
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
        """Take everything off the model again; raise when a step was left unfinished."""
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.rows.__exit__(kind, error, traceback)

    def _begin_step(self) -> None:
        """Get ready for the rule: one main loss for all micro-batches and processes, new numbers."""
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

    def _prepare(self, number: int, ids: Tensor, rows: Tensor) -> tuple[TransferBatch, Found]:
        """Return the transfer gradient of rows, and all else that needs no main gradient."""
        group = self.groups[number]
        batch, found = group.prepare(ids, rows, self.draws)
        if self.transfer_scale != 1.0:
            found = found._replace(gradient=found.gradient * self.transfer_scale)
        return batch, found

    def _answer(self, step: RowStep) -> Tensor:
        """Return one gradient a row, `(U, D)`."""
        assert self._loss_of_step is not None
        batch, found = step.prepared
        main = step.gradients[0].reshape(batch.rows.shape)  # (U, M, D)
        rule, loss = RULES[self.rule], self._loss_of_step
        gradient = self.groups[step.number].answer(rule, batch, main, found, loss, alpha=self.alpha)
        return gradient.reshape(step.rows.shape)

    def _settings(self) -> Hashable:
        """Return what `_answer` depends on but for the step and tensors that stay where they are."""
        loss = self._loss_of_step
        return self.rule, self.alpha, self.transfer_scale, loss is not None and loss.data_ptr()

    def _explanation(self, group: TransferGroup, number: int, id: int) -> Explanation:
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


class _Asked(GroupRule):
    """Passes the rows of a step on to the transfer."""

    def __init__(self, transfer: HarmlessTransfer) -> None:
        self.transfer = transfer

    def absent_ids(self, number: int) -> Tensor | None:
        transfer, absent = self.transfer, self.transfer.update_absent
        return transfer.groups[number].absent_ids(transfer.draws, absent) if absent else None

    def prepare(self, number: int, ids: Tensor, rows: Tensor) -> Any:
        return self.transfer._prepare(number, ids, rows)  # noqa: SLF001  # as below

    def answer(self, step: RowStep) -> Tensor:
        return self.transfer._answer(step)  # noqa: SLF001  # a part of the same class, kept out of its surface

    def recording_key(self) -> Hashable:
        return self.transfer._settings()  # noqa: SLF001  # as above


def _is_large(table: TableInfo) -> bool:
    return table.rows > LEAST_ROWS
