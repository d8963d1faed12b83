"""The ledger of a transfer: what it asked of the rows, what the barrier let through, and the effect.

It is kept on the device, per table, and read on request: no step waits for it. Of the rare rows of the batches
that have a main gradient, it counts those whose gradients are opposed, and how lambda is spread. The
barrier promises an inner product of at least phi between the update and the main gradient; momentum, Adam
and weight decay make another update of it. So it remembers where a few rows per table were, and compares in the
next step where they are:

    realised = <old - new, g> * ||mu|| / ||old - new||        to be compared with phi

which does not depend on the learning rate: the update at the length that the rule gave it.

`explain_ledger` shows it as tables and notes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rarebit.storage.files import load_tensors_
from rarebit.tables.table import field_of
from rarebit.text import NOTHING, TextTable, percent
from rarebit.transfer.lexico import Barrier
from rarebit.transfer.losses import Picked, TransferBatch

EDGES = (0.0, 0.25, 0.5, 0.75, 0.999, 1.001, 1.5, 2.0, 5.0, 20.0, 100.0)
"""Ends of the bins of lambda, in multiples of alpha; alpha itself has its own bin."""
REMEMBERED = 16
"""Rows of each table that are compared after the update."""
CLOSE = 0.99
"""The share of phi that counts as met: updates are rounded."""
BINS = {"0": 0.0, "below": 0.999, "alpha": 1.001, "to 2": 2.0, "above": float("inf")}
"""Columns of the table of lambda, and where they end in multiples of alpha."""
AT_CHANCE = 0.05
"""A discriminator whose accuracy is this close to one half has learned nothing."""
NEGLIGIBLE = 0.01
"""A transfer gradient below this share of the main one changes nothing visible."""

SUMS = ("rows", "opposed", "not_finite", "loss_is_barrier", "main_norm", "transfer_norm")
STEPS = ("steps", "transfer_loss", "judged", "accuracy")
REALISED = ("moved", "kept", "realised", "promised")


class GroupLedger:
    """The ledger of one group of tables."""

    def __init__(self, names: Sequence[str], sets: int, width: int, like: Tensor) -> None:
        self.names = tuple(names)
        size = len(self.names)
        self.edges = torch.tensor(EDGES, dtype=like.dtype).to(like.device)
        totals = like.new_zeros(0, dtype=torch.float64)
        self.sums = totals.new_zeros(size, len(SUMS) + len(EDGES))
        self.steps = totals.new_zeros(size, len(STEPS))
        self.realised = totals.new_zeros(size, len(REALISED))
        # of each remembered row: its old value, its main gradient, then phi, ||mu||, and whether there is one
        self.ids = torch.zeros(REMEMBERED, size, dtype=torch.int64, device=like.device)
        self.old = like.new_zeros(size, REMEMBERED, sets, width)
        self.main = torch.zeros_like(self.old)
        self.promise = like.new_zeros(size, REMEMBERED, sets, 3)

    def add(
        self,
        batch: TransferBatch,
        found: Barrier,
        transfer: Tensor,
        losses: Tensor,
        accuracy: Tensor | None,
        *,
        alpha: float,
    ) -> None:
        """Add a step: rows `(U, M, ...)` and figures of each table `(F,)`."""
        square = found.square
        counts = (square > 0) & (square < math.inf)  # (U, M)
        several = [counts, found.agreement < 0, found.not_finite, found.barrier < alpha * square]
        spread = found.coefficient.unsqueeze(-1) <= alpha * self.edges
        norms = torch.stack([square.sqrt(), transfer.norm(dim=-1)], dim=-1)
        # joined as bools first, then converted at once
        answers = torch.cat([torch.stack(several, dim=-1), spread], dim=-1).to(square.dtype)
        values = torch.cat([answers[..., : len(several)], norms, answers[..., len(several) :]], -1)
        self.sums += batch.total(torch.where(counts.unsqueeze(-1), values, 0.0)).sum(dim=1)
        judged = torch.zeros_like(losses) if accuracy is None else batch.present
        right = judged if accuracy is None else accuracy * judged
        self.steps += torch.stack([batch.present, losses, judged, right], dim=1)

    def compare(self, rows: Tensor) -> None:
        """Compare the remembered rows with their values after the update, `(P, F, M, D)`."""
        moved = self.old - rows.transpose(0, 1)  # (F, P, M, D)
        phi, length, is_there = self.promise.unbind(dim=-1)
        # not finite where there is no row, or it has not moved
        way = moved.norm(dim=-1) * is_there
        realised = (moved * self.main).sum(dim=-1) * length / way
        counts = realised.abs() < math.inf
        kept = realised >= CLOSE * phi
        values = torch.stack([realised, phi], dim=-1)
        values = torch.cat([torch.stack([counts, kept], dim=-1).to(phi.dtype), values], dim=-1)
        self.realised += torch.where(counts.unsqueeze(-1), values, 0.0).sum(dim=(1, 2))

    def remember(
        self, batch: TransferBatch, picked: Picked, main: Tensor, found: Barrier, first_rows: Tensor
    ) -> None:
        """Remember a few rows that are about to be updated."""
        index, is_there = picked.index.reshape(-1), picked.is_there
        torch.index_select(batch.rows.detach(), 0, index, out=self.old.flatten(0, 1))
        torch.index_select(main, 0, index, out=self.main.flatten(0, 1))
        ids = batch.ids.index_select(0, index).reshape(is_there.shape) - first_rows.unsqueeze(1)
        torch.mul(ids.T, is_there.T, out=self.ids)
        length = found.gradient.index_select(0, index).norm(dim=-1)  # (F P, M)
        known = torch.stack([found.barrier, found.square], dim=-1).index_select(0, index)
        barrier, square = known.unbind(dim=-1)
        is_there = is_there.reshape(-1, 1) & (square > 0)
        parts = [barrier, length, is_there.to(length.dtype)]
        torch.stack(parts, dim=-1, out=self.promise.flatten(0, 1))

    def tensors(self) -> dict[str, Tensor]:
        """Return the ledger's own tensors by name."""
        names = ("sums", "steps", "realised", "ids", "old", "main", "promise")
        return {name: getattr(self, name) for name in names}


class Ledger:
    """What a transfer did so far; `read` returns it as plain values."""

    def __init__(self) -> None:
        self.groups: list[GroupLedger] = []
        self.total: Tensor | None = None

    def add_step(self, loss: Tensor) -> None:
        """Count a step and its main loss."""
        if self.total is None:
            self.total = torch.zeros(2, dtype=torch.float64, device=loss.device)
        self.total[0].add_(1)
        self.total[1].add_(loss)

    def read(self) -> dict[str, Any]:
        """Return the ledger as plain values, which JSON can hold; waits for the device once.

        Shares are of the rare rows of the batches, each counted in every step it is in. `lambda` has the
        share of rows in each bin, by the bin's end in multiples of alpha.
        """
        if self.total is None:
            return {"steps": 0, "main_loss": None, "tables": {}}
        parts = [self.total]
        for group in self.groups:
            parts += [group.sums.flatten(), group.steps.flatten(), group.realised.flatten()]
        numbers = iter(torch.cat([part.to(self.total.device) for part in parts]).tolist())
        steps, loss = next(numbers), next(numbers)
        tables: dict[str, Any] = {}
        for group in self.groups:
            kept = [
                [[next(numbers) for _ in range(part.shape[1])] for _ in group.names]
                for part in (group.sums, group.steps, group.realised)
            ]
            for name, *values in zip(group.names, *kept, strict=True):
                tables[name] = _readable(*values)
        return {"steps": int(steps), "main_loss": _mean(loss, steps), "tables": tables}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's own tensors, for a checkpoint."""
        groups = {group.names[0]: group.tensors() for group in self.groups}
        return {"groups": groups} if self.total is None else {"groups": groups, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        for group in self.groups:
            load_tensors_(group.tensors(), state["groups"][group.names[0]], "the ledger")
        if "total" in state:
            home = self.groups[0].sums.device if self.groups else None  # the state's may be another
            self.total = torch.zeros(2, dtype=torch.float64, device=home)
            load_tensors_({"total": self.total}, {"total": state["total"]}, "the ledger")
        else:
            self.total = None


def _readable(
    sums: Sequence[float], steps: Sequence[float], realised: Sequence[float]
) -> dict[str, Any]:
    of_rows = dict(zip(SUMS, sums, strict=False))
    of_steps = dict(zip(STEPS, steps, strict=True))
    of_moved = dict(zip(REALISED, realised, strict=True))
    rows, seen, moved = of_rows["rows"], of_steps["steps"], of_moved["moved"]
    up_to = sums[len(SUMS) :]
    bins = zip([*EDGES, math.inf], [*up_to, rows], [0.0, *up_to], strict=True)
    return {
        "rows": int(rows),
        "steps": int(seen),
        "opposed": _mean(of_rows["opposed"], rows),
        # the share of rows in each bin, by the bin's end
        "lambda": {f"{end:g}": (now - before) / rows for end, now, before in bins}
        if rows
        else None,
        "not_finite": int(of_rows["not_finite"]),
        "loss_is_barrier": _mean(of_rows["loss_is_barrier"], rows),
        "main_norm": _mean(of_rows["main_norm"], rows),
        "transfer_norm": _mean(of_rows["transfer_norm"], rows),
        "transfer_loss": _mean(of_steps["transfer_loss"], seen),
        "discriminator_accuracy": _mean(of_steps["accuracy"], of_steps["judged"]),
        "realised_rows": int(moved),
        "realised_kept": _mean(of_moved["kept"], moved),
        "realised_over_promised": _mean(of_moved["realised"], of_moved["promised"]),
    }


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None


def explain_ledger(ledger: Mapping[str, Any]) -> list[TextTable | str]:
    """Return the figures of each table, how lambda is distributed, and what looks suspicious."""
    tables = [(field_of(name), table) for name, table in ledger["tables"].items()]
    figures = TextTable(
        "Harmless transfer: rare rows, counted in each step they occur in",
        ["table", "rare", "opposed", "realised", "met", "strength", "loss", "accuracy"],
        [
            [
                name,
                f"{table['rows']:,}",
                percent(table.get("opposed")),
                _number(table.get("realised_over_promised"), ".2f"),
                percent(table.get("realised_kept")),
                _number(_strength(table), ".3g"),
                _number(table.get("transfer_loss"), ".3f"),
                percent(table.get("discriminator_accuracy")),
            ]
            for name, table in tables
        ],
        "rare: rare rows with a main gradient; opposed: those whose transfer gradient points against "
        "it; realised: how far the update moved along the main gradient, divided by what the barrier "
        "requires; met: rows that moved that far; strength: length of the transfer gradient divided by "
        "that of the main one; loss: mean transfer loss; accuracy: rows that the discriminator classified "
        "correctly (50 % is chance).",
    )
    barrier = TextTable(
        "Lambda: how much of the main gradient is added, in multiples of alpha",
        ["table", *BINS],
        [
            [name, *map(percent, _binned(table["lambda"]))]
            for name, table in tables
            if table.get("lambda")
        ],
        "0: transfer alone; alpha: the barrier without any transfer.",
    )
    loss = _number(ledger.get("main_loss"), ".4f")
    notes = [f"{ledger.get('steps', 0):,} transfer steps, mean main loss {loss}."]
    for name, table in tables:
        notes += [f"{name}: {suspicion}" for suspicion in _suspicions(table)]
    for name in ledger.get("left_out", ()):
        notes.append(f"{field_of(name)}: skipped, because it has no frequent rows to learn from.")
    return [*(table for table in (figures, barrier) if table.rows), *notes]


def _suspicions(table: Mapping[str, Any]) -> Iterator[str]:
    if table.get("rows") == 0:
        yield "no batch had a rare row with a main gradient."
    accuracy, strength = table.get("discriminator_accuracy"), _strength(table)
    if accuracy is not None and abs(accuracy - 0.5) < AT_CHANCE:
        yield "the discriminator is at chance: it cannot tell rare rows from frequent ones."
    if strength is not None and strength < NEGLIGIBLE:
        yield "the transfer gradient is negligible compared with the main one; try a larger scale."
    if table.get("not_finite"):
        yield f"{table['not_finite']:,} rows had a non-finite transfer gradient, which was ignored."


def _strength(table: Mapping[str, Any]) -> float | None:
    """Return the mean length of the transfer gradient divided by that of the main one."""
    main, transfer = table.get("main_norm"), table.get("transfer_norm")
    return transfer / main if main and transfer is not None else None


def _binned(spread: Mapping[str, float]) -> list[float]:
    """Return the share of rows in each of `BINS`, from the ledger's finer bins by their ends."""
    found, lowest = [], -1.0
    for end in BINS.values():
        found.append(sum(share for at, share in spread.items() if lowest < float(at) <= end))
        lowest = end
    return found


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
