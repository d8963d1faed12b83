"""What a study found: the runs of every side, and every method against its control.

A result is small plain values: runs as figures, not as models. Tables and verdicts are computed from them,
so a file of a result is enough to show it again.

A study's result as tables: what each side gives, and each method against its control.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rarebit.errors import StudyError
from rarebit.settings import from_mapping, size, suggest
from rarebit.study.runs import RunRecord
from rarebit.study.statistics import Comparison, PairedAUC, judge

__all__ = [
    "RESULTS",
    "TENTHS",
    "Ceiling",
    "CellResult",
    "SideResult",
    "StudyResult",
    "TextTable",
    "Trial",
    "comparison_table",
    "decile_table",
    "pick",
    "plain_text",
    "read_result",
    "side_table",
    "verdict_lines",
]

FORMAT = 1
RESULTS = "results.json"
"""The file of a result in the folder of its study."""
TENTHS = 10
"""Parts of the test rows, by how often their values were seen."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that were tried, and the mean AUC on validation rows that picks among them."""

    settings: Mapping[str, Any]
    """What differs from trial to trial."""
    valid_auc: float | None
    """None of one that failed."""


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """One side: its settings, what was tried, and its runs, one a seed."""

    name: str
    control: str | None
    """The side it is held against."""
    settings: Mapping[str, Any]
    """Model, training and methods, without the seed."""
    trials: tuple[Trial, ...]
    runs: tuple[RunRecord, ...]

    def figures(self, name: str) -> dict[int, float]:
        """Return one figure of every run by seed, where there is one.

        >>> SideResult(name="baseline", control=None, settings={}, trials=(), runs=()).figures("auc")
        {}
        """
        values = {run.seed: getattr(run, name) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The best any model could reach: the true chances' own AUC, on a generated log."""

    auc: float | None
    rarest_auc: float | None


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """Everything on one model and log."""

    model: str
    data: str
    """What the log is called."""
    checksum: str | None
    """Of a prepared log."""
    sides: tuple[SideResult, ...]
    ceiling: Ceiling | None
    rows: Mapping[str, PairedAUC]
    """Scores averaged over the seeds, against the control's: what other test rows would change."""
    missing: tuple[str, ...]
    """Runs of the plan that are not there, and why."""

    def side(self, name: str) -> SideResult:
        """Return a side by its name."""
        return {side.name: side for side in self.sides}[name]

    @property
    def methods(self) -> list[SideResult]:
        """The sides that are held against another."""
        return [side for side in self.sides if side.control is not None]

    def against(self, control: str) -> "CellResult":
        """Return the same runs with all methods held against one side."""
        names = [side.name for side in self.sides]
        if control not in names:
            raise StudyError(
                f"there is no side {control!r} on {self.model} and {self.data}{suggest(control, names)}"
            )
        sides = tuple(
            replace(side, control=None if side.name == control else control)
            if side.control is not None or side.name == control
            else side
            for side in self.sides
        )
        return replace(self, sides=sides, rows={})

    def differences(self, side: SideResult, figure: str) -> list[float]:
        """Return the paired differences of a method to its control, seed by seed."""
        assert side.control is not None
        ours, theirs = side.figures(figure), self.side(side.control).figures(figure)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]

    def compare(self, minimum_effect: float) -> dict[str, Comparison]:
        """Return the verdict on every method, all of them as one family."""
        differences = {side.name: self.differences(side, "auc") for side in self.methods}
        return judge(differences, minimum_effect=minimum_effect)

    def mean_difference(self, side: SideResult, figure: str) -> float | None:
        """Return the mean difference in a figure; None without a seed that both have."""
        return _mean_of(self.differences(side, figure))

    def decile_differences(self, side: SideResult) -> list[float | None]:
        """Return the mean difference in AUC on each tenth of the test rows, the rarest first."""
        assert side.control is not None
        ours, theirs = (
            {run.seed: run.decile_aucs for run in one.runs}
            for one in (side, self.side(side.control))
        )
        seeds = sorted(ours.keys() & theirs.keys())
        pairs = [list(zip(ours[seed], theirs[seed], strict=False)) for seed in seeds]
        tenths = list(zip(*pairs, strict=False)) or [()] * TENTHS
        return [
            _mean_of([a - b for a, b in tenth if not (a is None or b is None)]) for tenth in tenths
        ]

    def time_ratio(self, side: SideResult) -> float | None:
        """Return the time of training a row, over that of the first side; the median over seeds.

        Runs on two kinds of device tell nothing of each other.
        """
        theirs = {(run.seed, run.device): run.microseconds_a_row for run in self.sides[0].runs}
        ratios = [
            run.microseconds_a_row / theirs[run.seed, run.device]
            for run in side.runs
            if (run.seed, run.device) in theirs
        ]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What a study found. `str()` is its tables."""

    plan: Mapping[str, Any]
    """What was asked for, as a plan file holds it."""
    cells: tuple[CellResult, ...]

    @property
    def minimum_effect(self) -> float:
        """The smallest difference in AUC worth having."""
        return float(self.plan["minimum_effect"])

    @property
    def is_complete(self) -> bool:
        """Whether every run of the plan is there."""
        return not any(cell.missing for cell in self.cells)

    def against(self, control: str) -> "StudyResult":
        """Return the same runs with all methods held against one side of the study, by its name.

        What scores averaged over seeds say is left out: they are not stored.
        """
        return replace(self, cells=tuple(cell.against(control) for cell in self.cells))

    def __str__(self) -> str:
        from rarebit.study.results import plain_text

        return plain_text(self)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, for JSON. Verdicts are written for readers; they are computed again."""
        cells = []
        for cell in self.cells:
            verdicts = cell.compare(self.minimum_effect)
            values = asdict(cell)
            values["verdicts"] = {name: _comparison(found) for name, found in verdicts.items()}
            cells.append(values)
        return {"format": FORMAT, "plan": dict(self.plan), "cells": cells}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StudyResult":
        """Read back what `to_mapping` returned."""
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, this version reads {FORMAT}")
        cells = tuple(_read_cell(cell) for cell in values["cells"])
        result = cls(plan=values["plan"], cells=cells)
        assert result.minimum_effect > 0
        for cell in cells:
            cell.compare(result.minimum_effect)  # a control that is not there is told here
        return result


def read_result(path: str | os.PathLike[str]) -> StudyResult:
    """Read a result from its JSON file, or from the folder of its study."""
    path = Path(path)
    file = path / RESULTS if path.is_dir() else path
    try:
        return StudyResult.from_mapping(json.loads(file.read_text("utf-8"))["study"])
    except FileNotFoundError:
        raise StudyError(f"there is no result of a study at {str(path)!r}") from None
    except OSError as error:
        raise StudyError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (
        AssertionError,
        AttributeError,
        LookupError,
        StudyError,
        TypeError,
        ValueError,
    ) as error:
        raise StudyError(f"{str(file)!r} is not the result of a study: {error}") from None


def _read_cell(values: Mapping[str, Any]) -> CellResult:
    return CellResult(
        model=values["model"],
        data=values["data"],
        checksum=values["checksum"],
        sides=tuple(_read_side(side) for side in values["sides"]),
        ceiling=None if values["ceiling"] is None else from_mapping(Ceiling, values["ceiling"]),
        rows={name: from_mapping(PairedAUC, rows) for name, rows in values["rows"].items()},
        missing=tuple(values["missing"]),
    )


def _read_side(values: Mapping[str, Any]) -> SideResult:
    return SideResult(
        name=values["name"],
        control=values["control"],
        settings=values["settings"],
        trials=tuple(from_mapping(Trial, trial) for trial in values["trials"]),
        runs=tuple(from_mapping(RunRecord, run) for run in values["runs"]),
    )


def _comparison(found: Comparison) -> dict[str, Any]:
    """Return a verdict for a file: JSON has no infinities."""
    values = {**asdict(found), "words": found.words}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _mean_of(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def pick(trials: Sequence[Sequence[RunRecord]]) -> int | None:
    """Return which trial has the highest mean AUC on validation rows; the first of equals.

    None where a trial has no run.
    """
    if not all(trials):
        return None
    means = [statistics.fmean(run.valid_auc for run in runs) for runs in trials]
    return means.index(max(means))


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
