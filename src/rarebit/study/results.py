"""The result of a study: the runs of every variant, each method against its control, and their tables.

A result holds figures of runs, not models. Tables and verdicts are computed from them, so the file of a result is
enough to show it again.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from rarebit.errors import StudyError, import_extra
from rarebit.settings import from_mapping, require, size, suggest
from rarebit.storage.files import make_folder, read_json, write_file
from rarebit.study.runs import UNREADABLE, RunRecord
from rarebit.study.statistics import Comparison, Doubt, PairedAUC, judge
from rarebit.text import NOTHING, TextTable

FORMAT = 1
RESULTS = "results.json"
"""The file of a result in the folder of its study."""
START_RATIO = 2.0
"""Tables that start so many times as large as those of the control, or as small, do not start alike."""
TENTHS = 10
"""Parts of the test rows, by how frequent their values are in training."""

Figure: TypeAlias = str | Callable[[RunRecord], float | None]
"""A figure of a run, by its name or by a function."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that were tried."""

    settings: Mapping[str, Any]
    """What differs from trial to trial."""
    valid_auc: float | None
    """Mean validation AUC, by which trials are picked; None for one that diverged."""


@dataclass(frozen=True, kw_only=True)
class VariantResult:
    """One variant: its settings, its trials, and its runs, one per seed."""

    name: str
    control: str | None
    """The variant it must beat; None for a variant that is only a control."""
    settings: Mapping[str, Any]
    """Model, training and methods, without the seed."""
    trials: tuple[Trial, ...]
    """Empty where nothing was tuned."""
    runs: tuple[RunRecord, ...]
    edge: tuple[str, ...] = ()
    """Settings whose best value is the last one tried, so that more trials would find a better one."""
    axes: tuple[str, ...] = ()
    """Settings that were tuned."""
    start: float | None = None
    """Size of the numbers in the tables before the first step: the root mean square over looked-up rows."""

    @property
    def num_trials(self) -> int:
        """How many settings were tried."""
        return max(len(self.trials), 1)

    @property
    def cut_off(self) -> int:
        """Runs whose best epoch is the last one allowed, or that patience ended while validation was still rising.

        One epoch is a protocol, and cuts nothing off.
        """
        allowed = self.settings.get("training", {}).get("epochs", 1)
        return sum(run.best_epoch >= allowed > 1 or run.still_rising for run in self.runs)

    def figures(self, figure: Figure) -> dict[int, float]:
        """Return one figure of every run that has it, by seed."""
        get = attrgetter(figure) if isinstance(figure, str) else figure
        return {run.seed: value for run in self.runs if (value := get(run)) is not None}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The best possible figures on a generated log: those of the true click probabilities."""

    auc: float | None
    rarest_auc: float | None


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result on one model and log."""

    model: str
    data: str
    """The name of the log."""
    checksum: str | None
    """Of a prepared log."""
    variants: tuple[VariantResult, ...]
    ceiling: Ceiling | None
    rows: Mapping[str, PairedAUC]
    """Each method against its control, by scores averaged over seeds: how much other test rows would change."""
    missing: tuple[str, ...]
    """Runs of the plan that are missing, and why."""

    def variant(self, name: str) -> VariantResult:
        """Return a variant by its name."""
        return {variant.name: variant for variant in self.variants}[name]

    @property
    def methods(self) -> list[VariantResult]:
        """The variants that have a control."""
        return [variant for variant in self.variants if variant.control is not None]

    def against(self, control: str) -> "CellResult":
        """Return the same runs with one variant as the control of all methods."""
        names = [variant.name for variant in self.variants]
        if control not in names:
            raise StudyError(
                f"there is no variant {control!r} on {self.model} and {self.data}{suggest(control, names)}"
            )
        methods = {variant.name for variant in self.methods} - {control}
        variants = tuple(
            replace(variant, control=control if variant.name in methods else None)
            for variant in self.variants
        )
        return replace(self, variants=variants, rows={})

    def differences(self, method: VariantResult, figure: Figure) -> list[float]:
        """Return the paired differences of a method to its control, seed by seed."""
        assert method.control is not None
        ours, theirs = method.figures(figure), self.variant(method.control).figures(figure)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]

    def compare(self, minimum_effect: float) -> dict[str, Comparison]:
        """Return the verdict on every method, corrected for their number; none where a comparison is not fair."""
        found = self.judged(minimum_effect)
        for method in self.methods:
            doubt = self.doubt(method)
            if doubt is not None:
                kind, why = doubt
                found[method.name] = replace(found[method.name], verdict=kind, why=why)
        return found

    def judged(self, minimum_effect: float) -> dict[str, Comparison]:
        """Return the verdict of the differences alone, corrected for their number, fair or not."""
        differences = {method.name: self.differences(method, "auc") for method in self.methods}
        return judge(differences, minimum_effect=minimum_effect)

    def doubt(self, method: VariantResult) -> tuple[Doubt, str] | None:
        """Return why a method and its control are not compared fairly, and what to do; None where they are."""
        assert method.control is not None
        control = self.variant(method.control)
        if method.start and control.start and "start" not in control.axes:
            ratio = method.start / control.start
            if not 1 / START_RATIO <= ratio <= START_RATIO:
                return "unequal start", (
                    f"the tables of {method.name} start {ratio:.2g} times as large as those of {control.name}; "
                    "let them start alike, as with the model setting init, or use the control matched-rate"
                )
        for one in (method, control):
            if one.cut_off > len(one.runs) / 2:
                return "cut off", (
                    f"{one.name} is best in its last epoch, or still rises, in {one.cut_off} of {len(one.runs)} "
                    "runs; allow more epochs (--epochs 30), or more patience (--set training.patience=10)"
                )
        for one in (method, control):
            if one.edge:
                return "edge of the grid", (
                    f"{one.name} is best at the last {' and '.join(one.edge)} tried; allow more trials than "
                    f"{one.num_trials}"
                )
        return None

    def mean_difference(self, method: VariantResult, figure: Figure) -> float | None:
        """Return the mean difference in a figure; None without a seed that both have."""
        return _mean(self.differences(method, figure))

    def decile_differences(self, method: VariantResult) -> list[float | None]:
        """Return the mean difference in AUC on each tenth of the test rows, the rarest first."""

        def auc_of(tenth: int) -> Figure:
            return lambda run: run.decile_aucs[tenth] if run.decile_aucs else None

        return [self.mean_difference(method, auc_of(tenth)) for tenth in range(TENTHS)]

    def time_ratio(self, variant: VariantResult) -> float | None:
        """Return the training time per row relative to the first variant: the median over seeds.

        Runs on different devices are not compared.
        """
        theirs = {(run.seed, run.device): run.microseconds_a_row for run in self.variants[0].runs}
        ratios = [
            run.microseconds_a_row / theirs[run.seed, run.device]
            for run in variant.runs
            if (run.seed, run.device) in theirs
        ]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The result of a study. `str()` is its tables."""

    plan: Mapping[str, Any]
    """The plan, in the form of a plan file."""
    cells: tuple[CellResult, ...]
    """One per model and log."""

    @property
    def minimum_effect(self) -> float:
        """The smallest difference in AUC worth having."""
        return float(self.plan["minimum_effect"])

    @property
    def is_complete(self) -> bool:
        """Whether every run of the plan is finished."""
        return not any(cell.missing for cell in self.cells)

    def against(self, control: str) -> "StudyResult":
        """Return the same runs with one variant of the study, by its name, as the control of all methods.

        Intervals of averaged scores are left out: the scores are not part of a result.
        """
        return replace(self, cells=tuple(cell.against(control) for cell in self.cells))

    def __str__(self) -> str:
        parts: list[object] = []
        for cell in self.cells:
            parts.append(variant_table(cell))
            if cell.methods:
                parts.append(comparison_table(cell, self.minimum_effect))
                parts.append("\n".join(verdict_lines(cell, self.minimum_effect)))
            parts += [f"missing: {line}" for line in cell.missing]
        return "\n\n".join(map(str, parts))

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON. Verdicts are for people who read the file; they are computed again."""
        cells = []
        for cell in self.cells:
            values = asdict(cell)
            values["sides"] = values.pop("variants")  # their name in format 1
            values["verdicts"] = {
                # JSON has no infinities
                name: {
                    key: None if isinstance(value, float) and not math.isfinite(value) else value
                    for key, value in {**asdict(found), "words": found.summary}.items()
                }
                for name, found in cell.compare(self.minimum_effect).items()
            }
            cells.append(values)
        return {"format": FORMAT, "plan": dict(self.plan), "cells": cells}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StudyResult":
        """Read the values that `to_mapping` returned."""
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, this version reads {FORMAT}")
        cells = tuple(map(_read_cell, values["cells"]))
        result = cls(plan=values["plan"], cells=cells)
        assert result.minimum_effect > 0
        for cell in cells:
            cell.compare(result.minimum_effect)  # reports a control that is missing
        return result


def _read_cell(values: Mapping[str, Any]) -> CellResult:
    values = {"variants": values["sides"], **values}
    del values["sides"], values["verdicts"]
    rows = {name: from_mapping(PairedAUC, rows) for name, rows in values["rows"].items()}
    return from_mapping(CellResult, {**values, "rows": rows})


def read_result(path: str | os.PathLike[str]) -> StudyResult:
    """Read a result from its JSON file, or from the folder of its study."""
    path = Path(path)
    file = path / RESULTS if path.is_dir() else path
    try:
        return StudyResult.from_mapping(read_json(file)["study"])
    except FileNotFoundError:
        raise StudyError(f"there is no result of a study at {str(path)!r}") from None
    except OSError as error:
        raise StudyError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (AssertionError, *UNREADABLE) as error:
        raise StudyError(f"{str(file)!r} is not the result of a study: {error}") from None


def write_runs(result: StudyResult, path: str | os.PathLike[str]) -> Path:
    """Write all runs of a study as one Parquet file, a row per run; needs PyArrow."""
    parquet = import_extra("pyarrow.parquet", "data", "writing runs as Parquet")
    arrow = import_extra("pyarrow", "data", "writing runs as Parquet")
    rows = []
    for cell in result.cells:
        for variant in cell.variants:
            settings = json.dumps(variant.settings)
            known: dict[str, Any] = {"model": cell.model, "log": cell.data, "variant": variant.name}
            known |= {"control": variant.control, "settings": settings}
            for run in variant.runs:
                values = asdict(run)
                values["reports"] = json.dumps(values["reports"])
                rows.append(known | values)
    require(bool(rows), "the study has no finished runs")
    target = Path(path)
    make_folder(target.absolute().parent)
    table = arrow.Table.from_pylist(rows)
    return write_file(target, lambda partial: parquet.write_table(table, partial), error=StudyError)


def variant_table(cell: CellResult) -> TextTable:
    """Return the figures of each variant: mean and standard deviation over its seeds."""
    has_abundance = any(variant.figures("abundance") for variant in cell.variants)
    is_tuned = any(variant.num_trials > 1 for variant in cell.variants)
    figures = measured(cell)
    header = [
        "variant",
        *(["trials"] if is_tuned else []),
        "n",
        *figures,
        "weights",
        "tables",
        "time",
    ]
    if has_abundance:  # older results have none
        header.append("IA")
    rows: list[tuple[str, ...]] = []
    for variant in cell.variants:
        first = variant.runs[0] if variant.runs else None
        row = (
            variant.name,
            *([str(variant.num_trials)] if is_tuned else []),
            str(len(variant.runs)),
            *(with_spread(variant.figures(name).values()) for name in figures.values()),
            f"{first.parameters:,}" if first else NOTHING,
            size(first.table_bytes) if first else NOTHING,
            NOTHING if (ratio := cell.time_ratio(variant)) is None else f"x {ratio:.2f}",
        )
        abundances = with_spread(variant.figures("abundance").values(), 2)
        rows.append((*row, abundances) if has_abundance else row)
    if cell.ceiling is not None:
        best = [formatted(value, ".4f") for value in (cell.ceiling.auc, cell.ceiling.rarest_auc)]
        before, after = header.index("AUC") - 1, len(header) - header.index("AUC") - 2
        rows.append(("best possible", *[""] * before, *best, *[""] * after))
    return TextTable(f"{cell.model} on {cell.data}", tuple(header), rows)


def measured(cell: CellResult) -> dict[str, str]:
    """Return the figures of the test rows that tables show, by what they are called there."""
    groups = {"grouped AUC": "grouped_auc"}
    has_groups = any(variant.figures("grouped_auc") for variant in cell.variants)
    return {
        "AUC": "auc",
        "rarest fifth": "rarest_auc",
        **(groups if has_groups else {}),
        "logloss": "logloss",
    }


def comparison_table(cell: CellResult, minimum_effect: float) -> TextTable:
    """Return each method against its control: differences in AUC, paired by seed."""
    parts = {
        title: name
        for title, name in measured(cell).items()
        if title in ("rarest fifth", "grouped AUC")
    }
    header = ("method", "control", "AUC", "interval", "verdict", *parts, "averaged", "wins")
    found = cell.compare(minimum_effect)
    rows = []
    for method in cell.methods:
        ours, averaged = found[method.name], cell.rows.get(method.name)
        rows.append(
            (
                method.name,
                method.control or "",
                formatted(ours.mean, "+.4f"),
                ends(ours if ours.n > 1 else None),
                ours.verdict,
                *(formatted(cell.mean_difference(method, name), "+.4f") for name in parts.values()),
                ends(averaged),
                f"{ours.wins} of {ours.n}",
            )
        )
    return TextTable("Difference to the control", header, rows)


def decile_table(cell: CellResult) -> TextTable:
    """Return the mean differences of each method to its control on tenths of the test rows, the rarest first.

    In units of 1/10,000, so that ten columns fit into a terminal.
    """
    rows = []
    for method in cell.methods:
        differences = cell.decile_differences(method)
        rows.append((method.name, *(formatted(one, "+.0f", 10_000) for one in differences)))
    title = "Difference in AUC x 10,000 by tenths of the test rows, rarest first"
    return TextTable(title, ("method", *map(str, range(1, TENTHS + 1))), rows)


def verdict_lines(cell: CellResult, minimum_effect: float) -> list[str]:
    """Return the verdict on each method, one per line, and how to read the intervals."""
    found = cell.compare(minimum_effect)
    lines = [f"{method.name}: {found[method.name].summary}." for method in cell.methods]
    lines += [
        f"{method.name}: {method.num_trials} setting{'s' * (method.num_trials > 1)} tried, and "
        f"{theirs.num_trials} of its control {theirs.name}."
        for method in cell.methods
        for theirs in [cell.variant(method.control or "")]
        if theirs.num_trials != method.num_trials
    ]
    if lines:
        among = f", corrected for {len(found)} methods" if len(found) > 1 else ""
        least = 100 * min(comparison.confidence for comparison in found.values())
        lines.append(
            f"interval: over seeds, at {least:.4g} % or more{among}: at most 5 % of studies report a false "
            '"helps", even if a few seeds differ much from the others; averaged: 95 % over test rows, '
            "of scores averaged over seeds."
        )
    return lines


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def formatted(value: float | None, form: str, factor: int = 1) -> str:
    """Return a number as text; a dash where there is none."""
    return NOTHING if value is None or math.isnan(value) else format(factor * value, form)


def with_spread(figures: Iterable[float], digits: int = 4) -> str:
    """Return mean and standard deviation over seeds as text."""
    values = list(figures)
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{formatted(_mean(values), f'.{digits}f')}{spread}"


def ends(interval: Comparison | PairedAUC | None) -> str:
    """Return the ends of an interval as text; a dash where there is none."""
    return NOTHING if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
