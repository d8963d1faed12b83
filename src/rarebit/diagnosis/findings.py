"""What is wasted in tables, and what to try, in plain words.

    not finite    rows with NaN or an infinite number
    collapsed     information abundance below half of a random table's
    rare          a third of the rows or more were never trained or seen once
    dead          a twentieth of the rows or more are zero or nearly

A finding on a table that a method has made smaller on purpose would tell what its user knows, so these
are looked at for numbers that are not finite and for dead rows only. What would save less than a
hundredth of the bytes of all tables is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rarebit.diagnosis.table import TableDiagnosis
from rarebit.diagnosis.text import spoken_share
from rarebit.settings import to_mapping
from rarebit.words import size

__all__ = ["Finding", "find_waste"]

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
