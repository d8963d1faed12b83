"""Figures for people: the same cells for the plain text of a diagnosis and for the command line."""

from collections import Counter
from collections.abc import Sequence

from rarebit.diagnosis.measure import TableDiagnosis
from rarebit.settings import size

__all__ = [
    "Cells",
    "explanation",
    "reweighting_cells",
    "short_names",
    "spoken_share",
    "table_cells",
    "text_table",
]

Cells = tuple[list[str], list[list[str]]]
"""The headers of a table, and its lines."""

NOTHING = "-"
MEANINGS = {
    "IA": "information abundance, the sum of the singular values over the largest one",
    "random": "that of a random table of the same size",
    "sets": "the information abundance of each embedding set by itself",
    "rank": "stable rank",
    "dead": "rows that are zero or nearly",
    "never": "rows that training never saw",
    "once": "of the values it saw, those it saw once",
    "norm": "correlation of a row's length with how often its value was seen",
    "inner": "width of the rows that MLET trains",
    "fastest": "how many times as fast as a plain table SGD learns the fastest direction",
    "mean": "the same, the mean of all directions",
    "learned": "directions that are learned at all",
    "shared": "those of them that carry what is learned of one id to others",
    "rare": "rare rows with a main gradient, counted in each step",
    "opposed": "those whose transfer gradient points against the main one",
    "realised": "how far the update went along the main gradient, over what the barrier asked for",
    "met": "rows of which it went that far",
    "strength": "length of the transfer gradient over that of the main one",
    "loss": "mean transfer loss",
    "told": "rows that the discriminator told right; 50 % is chance",
    "lambda of": "how many times the main gradient is added to the transfer gradient, in multiples of alpha: "
    "0 is transfer alone, alpha the barrier without any transfer",
}


def explanation(headers: Sequence[str]) -> str:
    """Return what the headers of a table mean, in one sentence.

    >>> explanation(["table", "rank"])
    'rank: stable rank.'
    """
    meant = [f"{name}: {meaning}" for name, meaning in MEANINGS.items() if name in headers]
    return "; ".join(meant) + "."


def table_cells(tables: Sequence[TableDiagnosis], *, wide: bool) -> Cells:
    """Return the figures of tables as text, a line each; `wide` adds what needs room.

    A column that would be empty is left out.
    """
    columns = {
        "table": short_names(tables),
        "rows": [f"{table.rows:,}" for table in tables],
        "width": [str(table.width) for table in tables],
        "size": [size(table.num_bytes) for table in tables],
        "IA": [_number(table.information_abundance) for table in tables],
        "random": [_number(table.random_abundance) for table in tables],
        "sets": [" ".join(map(_number, table.set_abundances)) or NOTHING for table in tables],
        "rank": [_number(table.stable_rank) for table in tables],
        "dead": [_percent(table.dead_rows, table.rows) for table in tables],
        "never": [_percent(table.never_trained_rows, table.rows) for table in tables],
        "once": [_share(table.seen_once_share) for table in tables],
    }
    if wide:
        columns["norm"] = [_number(table.norm_correlation, "+.2f") for table in tables]
        columns["methods"] = [", ".join(table.methods) or NOTHING for table in tables]
    shown = {name: cells for name, cells in columns.items() if set(cells) != {NOTHING}}
    return list(shown), [list(line) for line in zip(*shown.values(), strict=True)]


def reweighting_cells(tables: Sequence[TableDiagnosis]) -> Cells:
    """Return how tables trained as products learn, a line each; no lines where there are none."""
    products = [table for table in tables if table.reweighting]
    lines = [
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
    ]
    return ["table", "inner", "fastest", "mean", "learned", "shared"], lines


def text_table(cells: Cells) -> str:
    """Return cells as lines of text: the first column to the left, numbers to the right.

    >>> print(text_table((["table", "rows"], [["user", "9"], ["it", "12"]])))
    table  rows
    user      9
    it       12
    """
    headers, lines = cells
    widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (headers, *lines)
    )


def short_names(tables: Sequence[TableDiagnosis]) -> list[str]:
    """Return the last part of each table's name, or the whole name where that says too little.

    In a file, the last part of most names is "weight"; and two tables may end alike.
    """
    if any(table.field == "weight" for table in tables):
        return [table.name.removesuffix(".weight") for table in tables]
    times = Counter(table.field for table in tables)
    return [table.field if times[table.field] == 1 else table.name for table in tables]


def spoken_share(share: float) -> str:
    """Return a share for people; a small one is not shown as none, nor a large one as all.

    >>> [spoken_share(share) for share in (0, 0.0001, 0.1234, 0.9999, 1)]
    ['0 %', '<1 %', '12 %', '>99 %', '100 %']
    """
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{100 * share:.0f} %"


def _percent(rows: int | None, of: int) -> str:
    return _share(None if rows is None or not of else rows / of)


def _share(share: float | None) -> str:
    return NOTHING if share is None else spoken_share(share)


def _number(value: float | None, form: str = ".1f") -> str:
    # + 0.0 makes of a rounded -0.0 a 0.0
    return NOTHING if value is None else format(round(value, 2) + 0.0, form)
