"""The ledger of a transfer as tables and notes for people; `ledger.py` says what it records."""

from collections.abc import Iterator, Mapping
from typing import Any

from rarebit.text import NOTHING, TextTable, percent

__all__ = ["explain_ledger"]

BINS = {"0": 0.0, "below": 0.999, "alpha": 1.001, "to 2": 2.0, "above": float("inf")}
"""Columns of the table of lambda, and where they end in multiples of alpha."""
AT_CHANCE = 0.05
"""A discriminator whose accuracy is this close to one half has learned nothing."""
NEGLIGIBLE = 0.01
"""A transfer gradient below this share of the main one changes nothing visible."""


def explain_ledger(ledger: Mapping[str, Any]) -> list[TextTable | str]:
    """Return the figures of each table, how lambda is distributed, and what looks suspicious.

    >>> ledger = {"steps": 90, "main_loss": 0.5, "tables": {"user": {"rows": 7, "opposed": 0.25}}}
    >>> table, note = explain_ledger(ledger)
    >>> table.rows, note
    ([['user', '7', '25 %', '-', '-', '-', '-', '-']], '90 transfer steps, mean main loss 0.5000.')
    """
    tables = [(name.rpartition(".")[2], table) for name, table in ledger["tables"].items()]
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
        notes.append(
            f"{name.rpartition('.')[2]}: skipped, because it has no frequent rows to learn from."
        )
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
