"""What a run's harmless transfer did, for people: its ledger as cells and sentences.

The ledger (`transfer/ledger.py`) is in the `run.json` of a run, under the reports of its methods.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rarebit.diagnosis.text import Cells, spoken_share

__all__ = ["LEDGER_TITLE", "barrier_cells", "ledger_cells", "ledger_notes"]

LEDGER_TITLE = "Harmless transfer: rare rows, in every step they were in"
NOTHING = "-"
BINS = {"0": 0.0, "below": 0.999, "alpha": 1.001, "to 2": 2.0, "above": float("inf")}
"""Columns of the table of lambda, and where they end in multiples of alpha."""
AT_CHANCE = 0.05
"""A discriminator that is right in half of the cases, give or take so much, knows nothing."""
NEGLIGIBLE = 0.01
"""A transfer gradient of less than this share of the main one changes nothing that could be seen."""


def ledger_cells(ledger: Mapping[str, Any]) -> Cells:
    """Return what a transfer asked of rows and what became of it, a line a table.

    >>> ledger = {"tables": {"tables.user": {"rows": 1200, "opposed": 0.25, "realised_over_promised": 0.9}}}
    >>> ledger_cells(ledger)[1]
    [['user', '1,200', '25 %', '0.90', '-', '-', '-', '-']]
    """
    headers = ["table", "rare", "opposed", "realised", "met", "strength", "loss", "told"]
    lines = [
        [
            name.rpartition(".")[2],
            f"{table['rows']:,}",
            _share(table.get("opposed")),
            _number(table.get("realised_over_promised"), ".2f"),
            _share(table.get("realised_kept")),
            _number(_strength(table), ".3g"),
            _number(table.get("transfer_loss"), ".3f"),
            _share(table.get("discriminator_accuracy")),
        ]
        for name, table in ledger["tables"].items()
    ]
    return headers, lines


def barrier_cells(ledger: Mapping[str, Any]) -> Cells:
    """Return how lambda, the weight of the main gradient, is spread over rows, a line a table.

    >>> ledger = {"tables": {"user": {"lambda": {"0": 0.5, "0.25": 0.1, "1.001": 0.3, "5": 0.1}}}}
    >>> barrier_cells(ledger)
    (['lambda of', '0', 'below', 'alpha', 'to 2', 'above'], [['user', '50 %', '10 %', '30 %', '0 %', '10 %']])
    """
    lines = [
        [name.rpartition(".")[2], *map(spoken_share, _binned(table["lambda"]))]
        for name, table in ledger["tables"].items()
        if table.get("lambda")
    ]
    return ["lambda of", *BINS], lines


def ledger_notes(ledger: Mapping[str, Any]) -> list[str]:
    """Return what the ledger means, a sentence each.

    >>> ledger = {"steps": 90, "main_loss": 0.5, "tables": {"user": {"discriminator_accuracy": 0.51}}}
    >>> for note in ledger_notes(ledger):
    ...     print(note)
    90 steps of transfer, with a mean main loss of 0.5000.
    user: the discriminator is at chance, so rare rows cannot be told from frequent ones by it.
    """
    loss = _number(ledger.get("main_loss"), ".4f")
    notes = [f"{ledger.get('steps', 0):,} steps of transfer, with a mean main loss of {loss}."]
    for name, table in ledger["tables"].items():
        notes += [f"{name.rpartition('.')[2]}: {said}" for said in _suspicions(table)]
    return notes + [
        f"{name.rpartition('.')[2]}: none of its frequent rows is there to learn from, so it took no part."
        for name in ledger.get("left_out", ())
    ]


def _suspicions(table: Mapping[str, Any]) -> Iterator[str]:
    if table.get("rows") == 0:
        yield "no rare row with a main gradient was in any batch."
    accuracy, strength = table.get("discriminator_accuracy"), _strength(table)
    if accuracy is not None and abs(accuracy - 0.5) < AT_CHANCE:
        yield "the discriminator is at chance, so rare rows cannot be told from frequent ones by it."
    if strength is not None and strength < NEGLIGIBLE:
        yield "the transfer gradient is negligible beside the main one; try a larger scale."
    if table.get("not_finite"):
        yield f"{table['not_finite']:,} rows had a transfer gradient that was not finite and was left out."


def _strength(table: Mapping[str, Any]) -> float | None:
    """Return the mean length of the transfer gradient over that of the main one."""
    main, transfer = table.get("main_norm"), table.get("transfer_norm")
    return transfer / main if main and transfer is not None else None


def _binned(spread: Mapping[str, float]) -> list[float]:
    """Return the share of rows in each of a few bins, of many finer ones by where they end."""
    found, lowest = [], -1.0
    for end in BINS.values():
        found.append(sum(share for at, share in spread.items() if lowest < float(at) <= end))
        lowest = end
    return found


def _share(value: float | None) -> str:
    return NOTHING if value is None else spoken_share(value)


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else format(value, spec)
