"""What is wasted in tables, and what to try, in plain words.

    not finite    rows with NaN or an infinite number
    collapsed     information abundance below half of a random table's
    rare          a third of the rows or more were never trained or seen once
    dead          a twentieth of the rows or more are zero or nearly

A finding on a table that a method has made smaller on purpose would tell what its user knows, so these
are looked at for numbers that are not finite and for dead rows only. What would save less than a
hundredth of the bytes of all tables is left out.

A diagnosis: figures of all tables, what they mean in words, and both as files.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rarebit.diagnosis.measure import SubEmbeddings, TableDiagnosis
from rarebit.diagnosis.plots import draw_plots
from rarebit.diagnosis.text import (
    explanation,
    reweighting_cells,
    spoken_share,
    table_cells,
    text_table,
)
from rarebit.diagnosis.transfer import LEDGER_TITLE, barrier_cells, ledger_cells, ledger_notes
from rarebit.errors import ModelFileError
from rarebit.settings import size, to_mapping

__all__ = ["TRAINED_AS_PRODUCTS", "Diagnosis", "Finding", "LeftAlone", "find_waste"]

Kind = Literal["not finite", "collapsed", "rare", "dead"]

COLLAPSED_BELOW = 0.5
RARE_FROM = 1 / 3
DEAD_FROM = 0.05
WORTH_TELLING = 0.01
ZEROS_ARE_WANTED = ("Masked(", "PEP(", "Pack(", "Pruned(")
"""Methods that make rows zero on purpose."""
NARROWER = 0.8
"""A smaller table is worth trying where it has at most this share of the width, or of the rows."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with one table."""

    table: str
    """The table's name."""
    kind: Kind
    """What it is."""
    wasted_bytes: int
    """Bytes that could be saved, about; 0 where it is not bytes that are lost."""
    problem: str
    """What is wrong, with numbers."""
    advice: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.table}: {self.problem}. {self.advice}."

    def to_mapping(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return to_mapping(self)


def find_waste(tables: Sequence[TableDiagnosis]) -> tuple[Finding, ...]:
    """Return what is wrong with tables, the worst first: wrong numbers, then the most bytes.

    >>> find_waste([])
    ()
    """
    least = WORTH_TELLING * sum(table.num_bytes for table in tables)
    found = [(table, finding) for table in tables for finding in _findings(table)]
    said = {(table.field, finding.kind) for table, finding in found if table.width > 1}
    worth = [
        finding
        for table, finding in found
        if finding.kind == "not finite" or finding.wasted_bytes >= max(least, 1)
        # first-order weights of a field have the same rows as its table: say it once
        if table.width > 1 or (table.field, finding.kind) not in said
    ]
    return tuple(sorted(worth, key=lambda f: (f.kind != "not finite", -f.wasted_bytes)))


def _findings(table: TableDiagnosis) -> Iterator[Finding]:
    rules = [_not_finite, _dead] if table.methods else [_not_finite, _collapsed, _rare, _dead]
    for rule in rules:
        finding = rule(table)
        if finding is not None:
            yield finding


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
    ratio, used = table.abundance_ratio, table.directions()
    if ratio is None or used is None or ratio >= COLLAPSED_BELOW or not used:
        return None
    if used > NARROWER * min(table.rows, table.width):
        return None  # one direction outweighs the others, which are in use all the same
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
    wasted = round(table.num_bytes * (never + once) / table.rows)
    return Finding(
        table=table.name,
        kind="rare",
        wasted_bytes=wasted,
        problem=f"of {table.rows:,} rows, {' and '.join(_rare_words(never, once))}, {size(wasted)} of "
        f"{size(table.num_bytes)}",
        advice=f"Try {', or '.join(_against_rare_rows(table.rows, never, once))}",
    )


def _rare_words(never: int, once: int) -> list[str]:
    words = [f"{never:,} were never trained"] if never else []
    return [*words, f"{once:,} were seen once in training"] if once else words


def _against_rare_rows(rows: int, never: int, once: int) -> list[str]:
    advice = []
    # twice the values seen often: with as many buckets as those, many of them would share one
    buckets = _rounded_up(2 * (rows - never - once))
    if buckets <= NARROWER * rows:
        advice.append(f"Hashing(buckets={buckets})")
    if once:
        advice.append("min_count = 2 when the log is prepared")
    if never > once:
        advice.append("ids that are made from the training rows only")
    return advice


def _dead(table: TableDiagnosis) -> Finding | None:
    if any(method.startswith(ZEROS_ARE_WANTED) for method in table.methods):
        return None
    if not table.rows or table.dead_rows < DEAD_FROM * table.rows:
        return None
    wasted = round(table.num_bytes * table.dead_rows / table.rows)
    return Finding(
        table=table.name,
        kind="dead",
        wasted_bytes=wasted,
        problem=f"{table.dead_rows:,} of {table.rows:,} rows ({spoken_share(table.dead_rows / table.rows)}) "
        f"are zero or nearly, {size(wasted)}; weight decay does that to rows that batches seldom look up",
        advice='Train with tables="rowwise", or with table_weight_decay=0',
    )


def _rounded_up(number: int) -> int:
    """Return a number with two digits that is at least as large, for people to type.

    >>> [_rounded_up(number) for number in (0, 7, 123, 45_001)]
    [1, 7, 130, 46000]
    """
    step: int = 10 ** max(len(str(number)) - 2, 0)
    return max(-(-number // step) * step, 1)


FORMAT = 1
NUMBERS = "diagnosis.json"
NOTHING_WRONG = (
    "Nothing stands out: no table has collapsed, and no table has rows that are dead, or rare and many, "
    "as far as that is known."
)
TRAINED_AS_PRODUCTS = "Tables that MLET trains as products, and how fast their directions learn"
NO_COUNTS = (
    "Training counts are not known, so rows that were never trained, values seen once, and how norms go "
    "with frequency are left open; give the training data to see them."
)


@dataclass(frozen=True)
class LeftAlone:
    """Something that is no table, or one that cannot be looked at."""

    name: str
    """Its name."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the tables of a model or file are like. `str()` is text for people."""

    tables: tuple[TableDiagnosis, ...]
    """Every table, or each field's slice of a stacked one."""
    sub_embeddings: tuple[SubEmbeddings, ...] = ()
    """What fields show to each other, for FFM and DCN-V2."""
    findings: tuple[Finding, ...] = ()
    """What is wasted and what to try, the worst first."""
    left_alone: tuple[LeftAlone, ...] = ()
    """What was not looked at, and why."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """What methods that took part in the training tell of it, by their names."""

    @property
    def transfer(self) -> Mapping[str, Any] | None:
        """The ledger of harmless transfer, where the run had one."""
        return self.reports.get("harmless-transfer")

    @property
    def wide_tables(self) -> tuple[TableDiagnosis, ...]:
        """The tables with rows of several numbers: all but first-order weights."""
        return tuple(table for table in self.tables if table.width > 1)

    @property
    def counts_known(self) -> bool:
        """Whether it is known of any table how often its values were seen in training."""
        return any(table.never_trained_rows is not None for table in self.tables)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say, a sentence each: what is not shown, not known, or not wrong."""
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
            notes.append(f"Left alone, as no tables or not to be read: {names}.")
        if self.tables and not self.counts_known:
            notes.append(NO_COUNTS)
        if self.tables and not self.findings:
            notes.append(NOTHING_WRONG)
        return tuple(notes)

    def __str__(self) -> str:
        parts = []
        if self.wide_tables:
            cells = table_cells(self.wide_tables, wide=True)
            parts += [text_table(cells), explanation(cells[0])]
        products = reweighting_cells(self.tables)
        if products[1]:
            parts += ["", TRAINED_AS_PRODUCTS, text_table(products), explanation(products[0]), ""]
        if self.transfer is not None:
            parts += ["", *_ledger_text(self.transfer), ""]
        parts += [f"- {finding}" for finding in self.findings]
        return "\n".join([*parts, *self.notes])

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values, as `diagnosis.json` holds it."""
        return {
            "format": FORMAT,
            "tables": [table.to_mapping() for table in self.tables],
            "sub_embeddings": [matrix.to_mapping() for matrix in self.sub_embeddings],
            "findings": [finding.to_mapping() for finding in self.findings],
            "left_alone": [to_mapping(thing) for thing in self.left_alone],
            **({"reports": dict(self.reports)} if self.reports else {}),
        }

    def save(self, folder: str | os.PathLike[str], *, plots: bool = True) -> list[Path]:
        """Write `diagnosis.json` and the plots to a folder; return the files.

        Each file is written under another name and renamed, so that one with its name is whole.
        """
        folder = Path(folder)
        text = json.dumps(self.to_mapping(), indent=1, allow_nan=False) + "\n"
        files = {NUMBERS: text.encode()}
        if plots:
            files |= draw_plots(self.tables, self.sub_embeddings)
        written = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                partial = folder / f"{name}.partial"
                partial.write_bytes(content)
                written.append(partial.replace(folder / name))
        except OSError as error:
            raise ModelFileError(
                f"cannot write the diagnosis to {str(folder)!r}: {error.strerror}; choose a folder "
                "you may write to"
            ) from None
        return written


def _ledger_text(ledger: Mapping[str, Any]) -> list[str]:
    both = [cells for cells in (ledger_cells(ledger), barrier_cells(ledger)) if cells[1]]
    shown = [line for cells in both for line in (text_table(cells), explanation(cells[0]))]
    return [LEDGER_TITLE, *shown, *ledger_notes(ledger)]
