"""What the command line shows of data: a schema with its reasons, and a prepared data set."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rarebit.cli.show import console
from rarebit.data.log_schema import SPLIT_NAMES, Column, LogSchema, Split
from rarebit.data.statistics import DataStatistics, FieldStatistics, tail_ranks

__all__ = ["show_dataset", "show_schema", "tail_chart", "treatment"]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "._-:=+*#"
WIDE = 110
"""From this width of the terminal on, nothing is shortened."""
SHORT_KINDS = {"categorical": "cat", "multi": "multi", "numeric": "num"}
NOTHING = "-"


def show_schema(
    schema: LogSchema, reasons: Mapping[str, str] | None = None, *, to: Console = console
) -> None:
    """Print what each column of a log is, how it is treated and, if known, why."""
    table = _table("column", "kind", "how it is treated", *(["why"] if reasons is not None else []))
    table.columns[0].min_width = 8
    table.columns[1].no_wrap = True
    for column in schema.columns:
        style = "dim" if column.kind == "ignored" else ""
        cells = [column.name, column.kind, treatment(column, schema)]
        if reasons is not None:
            cells.append(reasons.get(column.name, ""))
        table.add_row(*(Text(cell) for cell in cells), style=style)
    to.print(table)
    for line in _schema_lines(schema):
        to.print(Text(line))


def treatment(column: Column, schema: LogSchema) -> str:
    """Return in words what becomes of a column.

    >>> price = Column(name="price", kind="numeric", treatment="quantile", bins=10)
    >>> treatment(price, LogSchema(label="click", columns=(price,)))
    '10 bins of equally many rows'
    """
    if column.kind == "ignored":
        return "not read"
    if column.kind == "time":
        by_time = schema.split.kind == "time" and schema.split.column == column.name
        return "decides the split, not for the model" if by_time else "not for the model"
    if column.kind == "numeric":
        return {
            "standardised": "(x - mean) / std",
            "log_square": "an id per floor(ln(x)^2)",
            "quantile": f"{column.bins} bins of equally many rows",
        }[column.treatment]
    return ", ".join(_id_words(column, schema))


def _id_words(column: Column, schema: LogSchema) -> list[str]:
    if column.buckets is not None:
        words = [f"hashed to {column.buckets:,} ids"]
    elif column.min_count > 1:
        words = [f"an id if seen {column.min_count} times"]
    else:
        words = ["an id per value"]
    if column.kind == "multi":
        between = f"split at {column.separator!r}" if column.separator else "from lists"
        words.append(f"{between}, up to {column.max_length} a row, {column.pooling}")
    if column.vocabulary:
        same = [other.name for other in schema.vocabularies[column.vocabulary] if other != column]
        words += [f"ids shared with {', '.join(same)}"] if same else []
    return words


def _schema_lines(schema: LogSchema) -> list[str]:
    lines = [f"Label: {schema.label}. Split: {_split_words(schema.split)}."]
    if schema.missing:
        lines.append(f"Missing: an empty value, or {', '.join(map(repr, schema.missing))}.")
    if schema.counts == "all":
        lines.append(
            "Ids are made from all rows, as some papers did: what is only in the test rows gets an "
            "id, too, so the vocabulary leaks into training."
        )
    return lines


def _split_words(split: Split) -> str:
    if split.kind == "given":
        return f"as the column {split.column!r} says" if split.column else "as the files say"
    shares = " : ".join(f"{100 * share:g}" for share in split.shares)
    how = {
        "random": f"random, seed {split.seed}",
        "order": "in the order of the file",
        "time": f"by the time in {split.column!r}",
        "user": f"each {split.column!r} in one part, seed {split.seed}",
    }[split.kind]
    return f"{shares} percent, {how}"


def show_dataset(
    statistics: DataStatistics, *, title: str, notes: Sequence[str] = (), to: Console = console
) -> None:
    """Print the rows of a prepared data set, its fields, and a drawing of each field's tail."""
    to.print(Text(title, style="bold"))
    to.print(_splits_table(statistics))
    if statistics.bad_rows:
        rows = "bad row was" if statistics.bad_rows == 1 else "bad rows were"
        to.print(Text(f"{statistics.bad_rows:,} {rows} set aside."))
    if statistics.fields:
        to.print(_fields_table(statistics.fields, to))
        to.print(Text(_explanation(to)))
    else:
        to.print(Text("It has no fields."))
    for note in notes:
        to.print(Text(note))


def _splits_table(statistics: DataStatistics) -> Table:
    table = _table("split", "rows", "label rate", right=(1, 2))
    splits = list(zip(SPLIT_NAMES, statistics.rows, statistics.label_rates, strict=True))
    for name, rows, rate in splits:
        table.add_row(name, f"{rows:,}", _percent(rate, of=rows))
    total = sum(statistics.rows)
    clicks = sum(rows * rate for _, rows, rate in splits)
    table.add_row("all", f"{total:,}", _percent(clicks / max(total, 1), of=total))
    return table


def _fields_table(fields: Iterable[FieldStatistics], to: Console) -> Table:
    fields = list(fields)
    wide = to.width >= WIDE
    headers = ["field", "kind", "distinct", "table rows", "top 20 %", "rare", "missing", "unknown"]
    if not wide:
        headers = ["field", "kind", "distinct", "rows", "top", "rare", "miss", "unk"]
    table = _table(*headers, "tail", right=range(2, 8))
    table.columns[0].min_width = 6
    for column in table.columns[1:]:
        column.no_wrap = True
    most = max((field.tail[0] for field in fields if field.tail), default=1)
    longest = max((field.distinct for field in fields if field.tail), default=1)
    width = 24 if wide else 12
    for field in fields:
        chart = tail_chart(field, width=width, most=most, longest=longest)
        if to.options.ascii_only:
            chart = chart.translate(str.maketrans(BLOCKS, ASCII_BLOCKS))
        table.add_row(Text(field.name), *_field_cells(field, wide=wide), Text(chart, style="cyan"))
    return table


def _field_cells(field: FieldStatistics, *, wide: bool) -> list[str]:
    kind = field.kind if wide else SHORT_KINDS.get(field.kind, field.kind)
    has_values = len(field.tail) > 0
    unknown = field.unknown_shares[-1] if field.unknown_shares and field.rows else None
    return [
        kind,
        f"{field.distinct:,}" if field.distinct else NOTHING,
        f"{field.rows:,}" if field.rows else NOTHING,
        _percent(field.top_share) if has_values else NOTHING,
        _percent(field.rare_share) if has_values else NOTHING,
        _percent(field.missing_share),
        NOTHING if unknown is None else _percent(unknown),
    ]


def tail_chart(field: FieldStatistics, *, width: int, most: int, longest: int) -> str:
    """Draw how often the values of a field occur, the most frequent first, on two log scales.

    A full block is `most` rows, the lowest is one row; a field of `longest` values is `width` wide.

    >>> values = {"name": "user", "kind": "categorical", "distinct": 4, "rows": 7, "top_share": 0.6}
    >>> values |= {"rare_share": 0.2, "missing_share": 0.0, "unknown_shares": (), "tail": (64, 8, 2, 1)}
    >>> tail_chart(FieldStatistics(**values), width=8, most=64, longest=4)
    '█▇▆▅▄▃▂▁'
    """
    if not field.tail:
        return ""
    length = max(1, round(width * math.log(field.distinct) / max(math.log(longest), 1e-9)))
    ranks = np.log(tail_ranks(field.distinct))
    places = np.linspace(0, ranks[-1], length)
    heights = np.interp(places, ranks, np.log(field.tail)) / max(math.log(most), 1e-9)
    return "".join(BLOCKS[round(float(height) * (len(BLOCKS) - 1))] for height in heights)


def _explanation(to: Console) -> str:
    short = to.width < WIDE
    top, missing, unknown = ("top", "miss", "unk") if short else ("top 20 %", "missing", "unknown")
    return (
        f"{top}: rows whose value is among the 20 % most frequent ones; rare: rows whose value is seen "
        f"fewer than 10 times; {missing}: rows without a value; {unknown}: test rows whose value has "
        "no id. tail: how often the values occur, from the most frequent to the rarest, on log scales "
        "that all fields share."
    )


def _table(*headers: str, right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for place in right:
        table.columns[place].justify = "right"
    return table


def _percent(share: float, *, of: int = 1) -> str:
    """Return a share for people; a small one is not shown as none, nor a large one as all.

    >>> [_percent(share) for share in (0, 0.00001, 0.1234, 0.99999, 1)]
    ['0 %', '<0.1 %', '12.3 %', '>99.9 %', '100 %']
    """
    if not of:
        return NOTHING
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if share < 0.001:
        return "<0.1 %"
    if share > 0.999:
        return ">99.9 %"
    return f"{100 * share:.1f} %"
