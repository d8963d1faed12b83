"""A study's result as tables: what each side gives, and each method against its control."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rarebit.study.delong import PairedAUC
from rarebit.study.results import TENTHS, CellResult, SideResult, StudyResult
from rarebit.study.verdict import Comparison
from rarebit.words import size

__all__ = [
    "TextTable",
    "comparison_table",
    "decile_table",
    "plain_text",
    "side_table",
    "verdict_lines",
]

NOTHING = "-"


class TextTable(NamedTuple):
    """A table of texts."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def side_table(cell: CellResult) -> TextTable:
    """Return what each side gives: mean and spread over its seeds."""
    header = ["side", "n", "AUC", "rarest fifth", "logloss", "weights", "tables", "time"]
    rows = [
        [
            side.name,
            str(len(side.runs)),
            _mean(side, "auc"),
            _mean(side, "rarest_auc"),
            _mean(side, "logloss"),
            f"{side.runs[0].parameters:,}" if side.runs else NOTHING,
            size(side.runs[0].table_bytes) if side.runs else NOTHING,
            _ratio(cell.time_ratio(side)),
        ]
        for side in cell.sides
    ]
    if any(side.figures("abundance") for side in cell.sides):  # older results have none
        header.append("IA")
        for row, side in zip(rows, cell.sides, strict=True):
            row.append(_mean(side, "abundance", digits=2))
    if cell.ceiling is not None:
        best = ["best possible", "", _number(cell.ceiling.auc), _number(cell.ceiling.rarest_auc)]
        rows.append([*best, *[""] * (len(header) - len(best))])
    return TextTable(f"{cell.model} on {cell.data}", tuple(header), [tuple(row) for row in rows])


def comparison_table(cell: CellResult, minimum_effect: float) -> TextTable:
    """Return each method against its control: differences in AUC, seed by seed."""
    header = (
        "method",
        "against",
        "AUC",
        "interval",
        "rarest fifth",
        "averaged",
        "wins",
        "verdict",
    )
    found = cell.compare(minimum_effect)
    rows = [
        (
            side.name,
            side.control or "",
            _signed(found[side.name].mean),
            _ends(found[side.name]) if found[side.name].n > 1 else NOTHING,
            _signed(cell.mean_difference(side, "rarest_auc")),
            _ends(cell.rows[side.name]) if side.name in cell.rows else NOTHING,
            f"{found[side.name].wins} of {found[side.name].n}",
            found[side.name].verdict,
        )
        for side in cell.methods
    ]
    return TextTable("Difference to the control", header, rows)


def decile_table(cell: CellResult) -> TextTable:
    """Return each method against its control on tenths of the test rows, the rarest first: mean differences.

    In ten thousandths, so that ten columns are as wide as a terminal.
    """
    rows = [
        (side.name, *map(_in_ten_thousandths, cell.decile_differences(side)))
        for side in cell.methods
    ]
    return TextTable(
        "Difference in AUC x 10,000 by tenths of the test rows, rarest first",
        ("method", *map(str, range(1, TENTHS + 1))),
        rows,
    )


def verdict_lines(cell: CellResult, minimum_effect: float) -> list[str]:
    """Return what follows, a sentence a method, and how to read the intervals."""
    found = cell.compare(minimum_effect)
    lines = [f"{side.name}: {found[side.name].words}." for side in cell.methods]
    if lines:
        among = f", corrected for {len(lines)} methods" if len(lines) > 1 else ""
        lines.append(
            f"interval: over seeds, 95 %{among}; averaged: of scores averaged over seeds, 95 % over test "
            "rows."
        )
    return lines


def plain_text(result: StudyResult) -> str:
    """Return all tables of a result as aligned text."""
    parts = []
    for cell in result.cells:
        parts.append(_aligned(side_table(cell)))
        if cell.methods:
            parts.append(_aligned(comparison_table(cell, result.minimum_effect)))
            parts.append("\n".join(verdict_lines(cell, result.minimum_effect)))
        parts += [f"missing: {line}" for line in cell.missing]
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _mean(side: SideResult, figure: str, *, digits: int = 4) -> str:
    values = list(side.figures(figure).values())
    if not values:
        return NOTHING
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _ratio(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"x {ratio:.2f}"


def _signed(value: float | None) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{value:+.4f}"


def _in_ten_thousandths(value: float | None) -> str:
    return NOTHING if value is None else f"{10_000 * value:+.0f}"


def _ends(interval: Comparison | PairedAUC) -> str:
    return f"{interval.low:+.4f} to {interval.high:+.4f}"


def _aligned(table: TextTable) -> str:
    columns = list(zip(table.header, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([table.title, line(table.header), *map(line, table.rows)])
