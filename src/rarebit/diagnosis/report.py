"""A diagnosis: the figures of all tables, what is wasted, what to try, and the files of it.

    not finite    rows with NaN or an infinite number
    collapsed     information abundance below half of a random table's
    rare          a third of the rows or more were never trained or seen once
    dead          a twentieth of the rows or more are zero or nearly zero

What is beyond a threshold but no problem is reported with the reason: a method did it on purpose, or it would save less
than a hundredth of the bytes of all tables.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rarebit.diagnosis.measure import SubEmbeddings, TableDiagnosis, short_names
from rarebit.diagnosis.plots import draw_plots
from rarebit.errors import ModelFileError, SettingsError
from rarebit.settings import size, to_mapping
from rarebit.storage.files import write_files
from rarebit.technique import technique_class
from rarebit.text import NOTHING, TextTable, percent

Kind = Literal["not finite", "collapsed", "rare", "dead"]

FORMAT = 1
NUMBERS = "diagnosis.json"
COLLAPSED_BELOW = 0.5
RARE_FROM = 1 / 3
DEAD_FROM = 0.05
LEAST_SAVING = 0.01
"""Findings that would save less than this share of all bytes are left out."""
NARROWER = 0.8
"""A smaller table is worth trying if it has at most this share of the width, or of the rows."""
MOST_NAMES = 6
"""Names of tables in one note."""
NOTHING_WRONG = "No problem found, as far as that is known."
NO_COUNTS = (
    "Training counts are not known, so rows that were never trained, values seen once, and how norms relate "
    "to frequency are not shown; give the training data to see them."
)
MEANINGS = {
    "IA": "information abundance, the sum of the singular values divided by the largest one; a table has collapsed "
    f"below {percent(COLLAPSED_BELOW)} of random",
    "random": "that of a random table of the same size",
    "sets": "the information abundance of each embedding set",
    "rank": "stable rank",
    "dead": f"rows that are zero or nearly zero; a problem from {percent(DEAD_FROM)} on",
    "never": "rows that training never saw",
    "once": "values seen once, as a share of the values that training saw; a problem where never trained and seen "
    f"once make {percent(RARE_FROM)} of the rows",
    "norm": "correlation of a row's norm with its training count",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of one table."""

    table: str
    """The table's name."""
    kind: Kind
    wasted_bytes: int
    """About how many bytes could be saved; 0 if the problem is not about bytes."""
    problem: str
    """What is wrong, with numbers."""
    advice: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.table}: {self.problem}. {self.advice}."


def find_waste(
    tables: Sequence[TableDiagnosis], masked: Collection[str] = ()
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the problems of tables, the worst first, and notes on what is beyond a threshold but no problem.

    `masked` are the names of the tables with a method that makes entries zero on purpose.
    """
    least = LEAST_SAVING * sum(table.num_bytes for table in tables)
    found = [
        (table, finding, _excuse(table, finding, masked, max(least, 1)))
        for table in tables
        for rule in (_not_finite, _collapsed, _rare, _dead)
        if (finding := rule(table)) is not None
    ]
    of_wide = {(table.field, finding.kind) for table, finding, excuse in found if table.width > 1}
    worth = [
        finding
        for table, finding, excuse in found
        # first-order weights of a field have the same rows as its table: report them once
        if not excuse and (table.width > 1 or (table.field, finding.kind) not in of_wide)
    ]
    excused: dict[str, list[str]] = {}
    for name, (table, finding, excuse) in zip(
        short_names([t for t, *_ in found]), found, strict=True
    ):
        if excuse and table.width > 1:  # first-order weights are not shown
            figure = {
                "collapsed": f"IA {_number(table.information_abundance)} of {_number(table.random_abundance)}",
                "dead": _of_rows(table.dead_rows, table),
            }.get(finding.kind, size(finding.wasted_bytes))
            excused.setdefault(f"{finding.kind.capitalize()} but no problem: {excuse}", []).append(
                f"{name} ({figure})"
            )
    notes = []
    for reason, names in excused.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        notes.append(f"{reason}: {', '.join(names[:MOST_NAMES])}{more}.")
    worth.sort(key=lambda f: (f.kind != "not finite", -f.wasted_bytes))
    return tuple(worth), tuple(notes)


def _excuse(table: TableDiagnosis, finding: Finding, masked: Collection[str], least: float) -> str:
    """Return why something beyond a threshold is no problem; "" where it is one."""
    if finding.kind == "not finite":
        return ""
    if finding.kind == "dead" and table.name in masked:
        return "a method sets entries to zero on purpose"
    if finding.kind != "dead" and table.methods:
        return "a method makes the table smaller on purpose"
    if finding.kind == "collapsed" and (table.directions or 0) > NARROWER * min(
        table.rows, table.width
    ):
        return "one direction outweighs the others, but they are in use"
    if finding.wasted_bytes < least:
        return f"less than {percent(LEAST_SAVING)} of the bytes of all tables could be saved"
    return ""


def _not_finite(table: TableDiagnosis) -> Finding | None:
    if not table.not_finite_rows:
        return None
    return Finding(
        table=table.name,
        kind="not finite",
        wasted_bytes=0,
        problem=f"{table.not_finite_rows:,} of {table.rows:,} rows hold NaN or infinite numbers, so "
        "its spectrum is not known",
        advice="Train again with a lower lr, or with clip_norm=1",
    )


def _collapsed(table: TableDiagnosis) -> Finding | None:
    ratio, used = table.abundance_ratio, table.directions
    if ratio is None or used is None or ratio >= COLLAPSED_BELOW or not used:
        return None
    return Finding(
        table=table.name,
        kind="collapsed",
        wasted_bytes=round(table.num_bytes * (1 - used / table.width)),
        problem=f"its spectrum has collapsed: {used} of {table.width} directions hold 99 % of the "
        f"squared length of its rows; information abundance {table.information_abundance:.1f}, of a "
        f"random table {table.random_abundance:.1f}",
        advice=f"Try LowRank(rank={used}), or a width of {used} for this field",
    )


def _rare(table: TableDiagnosis) -> Finding | None:
    never, once = table.never_trained_rows, table.seen_once_rows
    if never is None or once is None or never + once < RARE_FROM * table.rows:
        return None
    problems = [f"{never:,} were never trained"] if never else []
    problems += [f"{once:,} were seen once in training"] if once else []
    advice = []
    # twice the values seen often: with as many buckets as those, many of them would share one
    buckets = _rounded_up(2 * (table.rows - never - once))
    if buckets <= NARROWER * table.rows:
        advice.append(f"Hashing(buckets={buckets})")
    if once:
        advice.append("min_count = 2 when the log is prepared")
    if never > once:
        advice.append("ids that are made from the training rows only")
    wasted = round(table.num_bytes * (never + once) / table.rows)
    return Finding(
        table=table.name,
        kind="rare",
        wasted_bytes=wasted,
        problem=f"of {table.rows:,} rows, {' and '.join(problems)}, {size(wasted)} of "
        f"{size(table.num_bytes)}",
        advice=f"Try {', or '.join(advice)}",
    )


def _dead(table: TableDiagnosis) -> Finding | None:
    if not table.rows or table.dead_rows < DEAD_FROM * table.rows:
        return None
    wasted = round(table.num_bytes * table.dead_rows / table.rows)
    return Finding(
        table=table.name,
        kind="dead",
        wasted_bytes=wasted,
        problem=f"{table.dead_rows:,} of {table.rows:,} rows ({percent(table.dead_rows / table.rows)}) "
        f"are zero or nearly zero, {size(wasted)}; weight decay does that to rows that batches seldom look "
        "up",
        advice='Train with tables="rowwise", or with table_weight_decay=0',
    )


def _rounded_up(number: int) -> int:
    """Return a number with two digits that is at least as large: 45,001 becomes 46,000."""
    step: int = 10 ** max(len(str(number)) - 2, 0)
    return max(-(-number // step) * step, 1)


def table_of_tables(tables: Sequence[TableDiagnosis], *, wide: bool) -> TextTable:
    """Return the figures of tables, one line each, without empty columns; `wide` adds two columns."""
    columns = {
        "table": short_names(tables),
        "rows": [f"{table.rows:,}" for table in tables],
        "width": [str(table.width) for table in tables],
        "size": [size(table.num_bytes) for table in tables],
        "IA": [_number(table.information_abundance) for table in tables],
        "random": [_number(table.random_abundance) for table in tables],
        "sets": [" ".join(map(_number, table.set_abundances)) or NOTHING for table in tables],
        "rank": [_number(table.stable_rank) for table in tables],
        "dead": [_of_rows(table.dead_rows, table) for table in tables],
        "never": [_of_rows(table.never_trained_rows, table) for table in tables],
        "once": [percent(table.seen_once_share) for table in tables],
    }
    if wide:
        columns["norm"] = [_number(table.norm_correlation, "+.2f") for table in tables]
        columns["methods"] = [", ".join(table.methods) or NOTHING for table in tables]
    shown = {name: cells for name, cells in columns.items() if set(cells) != {NOTHING}}
    meanings = [f"{name}: {meaning}" for name, meaning in MEANINGS.items() if name in shown]
    rows = list(zip(*shown.values(), strict=True))
    return TextTable("", list(shown), rows, "; ".join(meanings) + ".")


def product_table(tables: Sequence[TableDiagnosis]) -> TextTable:
    """Return how fast tables trained as products learn, one line each."""
    products = [table for table in tables if table.reweighting]
    return TextTable(
        "Tables that MLET trains as products, and how fast their directions learn",
        ["table", "inner", "fastest", "mean", "learned", "shared"],
        [
            [
                name,
                str(found.inner_dim),
                f"{found.largest_factor:.3g}",
                f"{found.mean_factor:.3g}",
                f"{found.num_nonzero:,} of {found.num_directions:,}",
                f"{found.num_informative:,}",
            ]
            for name, table in zip(short_names(products), products, strict=True)
            if (found := table.reweighting)
        ],
        "inner: width of the rows that MLET trains; fastest: speedup of the fastest direction over a plain "
        "table under SGD; mean: mean speedup of all directions; learned: directions that are learned at all; "
        "shared: those of them that carry what is learned of one id to others.",
    )


def _of_rows(rows: int | None, table: TableDiagnosis) -> str:
    return percent(None if rows is None or not table.rows else rows / table.rows)


def _number(value: float | None, form: str = ".1f") -> str:
    # + 0.0 turns a rounded -0.0 into 0.0
    return NOTHING if value is None else format(round(value, 2) + 0.0, form)


@dataclass(frozen=True)
class LeftAlone:
    """A tensor that is no table, or a table that cannot be read."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The figures and problems of the tables of a model or file. `str()` is text for people."""

    tables: tuple[TableDiagnosis, ...]
    sub_embeddings: tuple[SubEmbeddings, ...] = ()
    """What fields show to each other, for FFM and DCN-V2."""
    findings: tuple[Finding, ...] = ()
    """What is wasted and what to try, the worst first."""
    excused: tuple[str, ...] = ()
    """What is beyond a threshold but no problem, and why."""
    left_alone: tuple[LeftAlone, ...] = ()
    """What was not measured, and why."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """The reports of the methods that took part in training, by name."""

    def sections(self, *, wide: bool) -> list[TextTable | str]:
        """Return all tables for people, and the notes of the methods' reports."""
        sections: list[TextTable | str] = []
        shown = [table for table in self.tables if table.width > 1]  # all but first-order weights
        if shown:
            sections.append(table_of_tables(shown, wide=wide))
        if any(table.reweighting for table in self.tables):
            sections.append(product_table(self.tables))
        for name, report in self.reports.items():
            try:
                explain = getattr(technique_class(name), "explain_report", None)
            except SettingsError:  # the report of a method that is not installed here
                continue
            sections += [] if explain is None else explain(report)
        return sections

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what is not shown, not known, or not wrong."""
        single = [table for table in self.tables if table.width == 1]
        notes = []
        if single:
            what = "table has" if len(single) == 1 else "tables have"
            stored = size(sum(table.num_bytes for table in single))
            notes.append(
                f"{len(single)} more {what} rows of one number, {stored}, and no spectrum."
            )
        notes += map(str, self.sub_embeddings)
        if self.left_alone:
            names = ", ".join(thing.name for thing in self.left_alone)
            notes.append(f"Skipped, because they are no tables or cannot be read: {names}.")
        if self.tables and all(table.never_trained_rows is None for table in self.tables):
            notes.append(NO_COUNTS)
        notes += self.excused
        if self.tables and not self.findings:
            notes.append(NOTHING_WRONG)
        return tuple(notes)

    def __str__(self) -> str:
        findings = [f"- {finding}" for finding in self.findings]
        return "\n".join([*map(str, self.sections(wide=True)), *findings, *self.notes])

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values, as `diagnosis.json` holds it."""
        return {
            "format": FORMAT,
            "tables": [table.to_mapping() for table in self.tables],
            "sub_embeddings": [matrix.to_mapping() for matrix in self.sub_embeddings],
            "findings": [to_mapping(finding) for finding in self.findings],
            "excused": list(self.excused),
            "left_alone": [to_mapping(thing) for thing in self.left_alone],
            **({"reports": dict(self.reports)} if self.reports else {}),
        }

    def save(self, folder: str | os.PathLike[str], *, plots: bool = True) -> list[Path]:
        """Write `diagnosis.json` and the plots to a folder; return the files."""
        text = json.dumps(self.to_mapping(), indent=1, allow_nan=False) + "\n"
        files = {NUMBERS: text.encode()}
        if plots:
            files |= draw_plots(self.tables, self.sub_embeddings)
        return write_files(Path(folder), files, error=ModelFileError)
