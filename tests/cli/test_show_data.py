"""What people see of a schema and of a prepared data set, at the widths of their terminals."""

import io
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rarebit.cli.data import BLOCKS, show_dataset, show_schema, tail_chart
from rarebit.data.log_schema import Column, LogSchema, Split
from rarebit.data.prepared import DataStatistics, FieldStatistics, value_statistics

SCHEMA = LogSchema(
    label="click",
    columns=(
        Column(name="user"),
        Column(name="item", min_count=3, vocabulary="things"),
        Column(name="last_item", min_count=3, vocabulary="things"),
        Column(name="ip", buckets=5000),
        Column(name="tags", kind="multi", separator="|", max_length=6, pooling="sum"),
        Column(name="list", kind="multi", max_length=2),
        Column(name="price", kind="numeric"),
        Column(name="views", kind="numeric", treatment="log_square"),
        Column(name="age", kind="numeric", treatment="quantile", bins=7),
        Column(name="when", kind="time"),
        Column(name="created", kind="time"),
        Column(name="note", kind="ignored"),
    ),
    split=Split(kind="time", column="when"),
)
TREATMENTS = {
    "user": "one id per value",
    "item": "one id per value seen 3 times, ids shared with last_item",
    "last_item": "one id per value seen 3 times, ids shared with item",
    "ip": "hashed to 5,000 ids",
    "tags": "one id per value, split at '|', up to 6 per row, sum",
    "list": "one id per value, from lists, up to 2 per row, mean",
    "price": "(x - mean) / std",
    "views": "one id per floor(ln(x)^2)",
    "age": "7 bins of equally many rows",
    "when": "decides the split, no feature",
    "created": "no feature",
    "note": "not read",
}


def screen(width=160, encoding="utf-8"):
    """Return a console that is no terminal, of a given width, and what is printed on it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(width=width, file=out, highlight=False), out


def shown(show, *values, width=160, encoding="utf-8", **options):
    console, out = screen(width, encoding)
    show(*values, to=console, **options)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def line_of(name, printed):
    return next(line for line in printed.splitlines() if line.split()[:1] == [name])


def field(name, counts, **values):
    seen = value_statistics(np.array(counts, dtype=np.int64))
    usual = {"kind": "categorical", "rows": seen["distinct"] + 3, "missing_share": 0.0}
    shares = {"unknown_shares": (0.1, 0.2, 0.3)}
    return FieldStatistics(**{"name": name, **usual, **shares, **seen, **values})


def data(*fields, rows=(80, 10, 10), label_rates=(0.25, 0.5, 0.0), bad_rows=0):
    return DataStatistics(rows=rows, label_rates=label_rates, bad_rows=bad_rows, fields=fields)


LONG_TAIL = field("item", np.floor(9000 / np.arange(1, 5001)))
FLAT = field("day", [6000] * 7)
NUMBER = FieldStatistics(
    name="price",
    kind="numeric",
    distinct=0,
    rows=0,
    top_share=0.0,
    rare_share=0.0,
    missing_share=0.125,
    unknown_shares=(),
    tail=(),
)


@pytest.mark.parametrize("name", TREATMENTS)
def test_each_column_says_in_words_what_becomes_of_it(name):
    line = line_of(name, shown(show_schema, SCHEMA)).strip()
    assert line.split(maxsplit=2) == [name, SCHEMA[name].kind, TREATMENTS[name]]


def test_reasons_stand_beside_the_columns():
    reasons = {"user": "texts, 9 distinct", "note": "every row has its own value"}
    printed = shown(show_schema, SCHEMA, reasons)
    assert line_of("user", printed).rstrip().endswith(" texts, 9 distinct")
    assert "every row has its own value" in line_of("note", printed)
    assert "why" in printed
    assert "why" not in shown(show_schema, SCHEMA)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(seed=7), "Split: 80 : 10 : 10 percent, random, seed 7."),
        (
            Split(kind="order", shares=(0.5, 0.25, 0.25)),
            "50 : 25 : 25 percent, in file order",
        ),
        (Split(kind="time", column="when"), "80 : 10 : 10 percent, by the time in 'when'."),
        (Split(kind="user", column="user"), "each 'user' in one part, seed 0."),
        (Split(kind="given", column="part"), "Split: given by the column 'part'."),
        (Split(kind="given"), "Split: given by the files."),
    ],
)
def test_the_split_is_said_in_words(split, words):
    schema = LogSchema(label="click", columns=SCHEMA.columns, split=split)
    printed = shown(show_schema, schema)
    assert "Label: click. " in printed
    assert words in printed


def test_what_leaks_or_stands_for_missing_is_said():
    printed = shown(show_schema, SCHEMA)
    assert "Missing" not in printed
    assert "leak" not in printed
    schema = LogSchema(label="y", columns=SCHEMA.columns, missing=("NULL", "-"), counts="all")
    printed = shown(show_schema, schema)
    assert "Missing: an empty value, or 'NULL', '-'." in printed
    assert "the vocabulary leaks into training" in " ".join(printed.split())


def test_a_schema_fits_a_narrow_terminal_and_keeps_long_names():
    name = "a_very_long_name_of_a_column_" * 4
    schema = LogSchema(label="y", columns=(Column(name=name), Column(name="user")))
    printed = shown(show_schema, schema, {name: "texts, " * 20, "user": "x"}, width=80)
    assert max(map(len, printed.splitlines())) <= 80
    column = "".join(line[1:].split()[0] for line in printed.splitlines()[3:] if line[1:2] > " ")
    assert name in column


def test_names_are_not_taken_for_markup():
    schema = LogSchema(label="[bold]", columns=(Column(name="[red]a[/red]"),))
    printed = shown(show_schema, schema, {"[red]a[/red]": "[i]why"})
    assert "[red]a[/red]" in printed
    assert "[i]why" in printed
    assert "Label: [bold]." in printed
    printed = shown(show_dataset, data(field("[red]", [1])), title="[b]", notes=["[/nothing]"])
    for text in ("[red]", "[b]", "[/nothing]"):
        assert text in printed


def test_rows_and_label_rates_stand_by_split():
    printed = shown(show_dataset, data(FLAT, bad_rows=1234), title="clicks", notes=["A note."])
    assert printed.startswith("clicks\n")
    assert line_of("train", printed).split() == ["train", "80", "25.0", "%"]
    assert line_of("valid", printed).split() == ["valid", "10", "50.0", "%"]
    assert line_of("test", printed).split() == ["test", "10", "0", "%"]
    assert line_of("all", printed).split() == ["all", "100", "25.0", "%"]
    assert "1,234 malformed rows were skipped." in printed
    assert "A note.\n" in printed
    assert "malformed" not in shown(show_dataset, data(FLAT), title="clicks")


def test_bad_rows_are_counted_in_words():
    for bad, words in (
        (1, "1 malformed row was skipped."),
        (1200, "1,200 malformed rows were skipped."),
    ):
        assert words in shown(show_dataset, data(bad_rows=bad), title="clicks")
    assert "skipped" not in shown(show_dataset, data(), title="clicks")


def test_a_split_without_rows_has_no_rate():
    empty = data(FLAT, rows=(9, 0, 0), label_rates=(1.0, 0.0, 0.0))
    printed = shown(show_dataset, empty, title="clicks")
    assert line_of("test", printed).split() == ["test", "0", "-"]
    assert line_of("all", printed).split() == ["all", "9", "100", "%"]


@pytest.mark.parametrize(
    ("width", "kinds"), [(80, ["cat", "num"]), (160, ["categorical", "numeric"])]
)
def test_a_field_has_its_line_of_figures(width, kinds):
    # 12 of 16 rows are in the top one of three values, 4 are of values seen fewer than 10 times
    user = field("user", [3, 12, 1], missing_share=0.0004)
    printed = shown(show_dataset, data(user, NUMBER), title="clicks", width=width)
    figures = ["3", "6", "75.0", "%", "25.0", "%", "<0.1", "%", "30.0", "%"]
    assert line_of("user", printed).split()[:-1] == ["user", kinds[0], *figures]
    nothing = ["-", "-", "-", "-", "12.5", "%", "-"]
    assert line_of("price", printed).split() == ["price", kinds[1], *nothing]


@pytest.mark.parametrize("width", [80, 109, 110, 200])
def test_many_fields_of_large_numbers_fit_the_terminal(width):
    large = {"distinct": 123_456_789, "rows": 123_456_792, "tail": (), "missing_share": 0.9999}
    fields = [field(f"column_with_a_name_{i}", [1], **large) for i in range(45)]
    printed = shown(show_dataset, data(*fields, LONG_TAIL), title="clicks", width=width)
    assert max(map(len, printed.splitlines())) <= width
    assert printed.count("123,456,789") == 45
    assert printed.count(">99.9 %") == 45
    assert "…" not in printed
    assert "..." not in printed


def test_a_part_of_thousands_of_columns_is_shown():
    fields = [field(f"f{number}", [1]) for number in range(1234)]
    printed = shown(show_dataset, data(*fields), title="clicks")
    assert "and 1,034 more fields: they are in manifest.json" in printed
    schema = LogSchema(label="click", columns=tuple(Column(name=f.name) for f in fields))
    printed += shown(show_schema, schema)
    assert "and 1,034 more columns: rarebit data schema --out FILE" in printed
    assert printed.count("f199 ") == 2
    assert "f200 " not in printed


def test_the_columns_are_explained_by_their_names():
    for width, names in ((80, "top rare miss unk tail"), (160, "missing unknown rare tail")):
        printed = shown(show_dataset, data(FLAT), title="clicks", width=width)
        header = next(line for line in printed.splitlines() if "distinct" in line)
        for name in names.split():
            assert name in header
            assert f"{name}: " in " ".join(printed.split())


def test_a_data_set_may_have_no_fields_with_ids_or_none_at_all():
    assert "price" in shown(show_dataset, data(NUMBER), title="clicks")
    assert "It has no fields." in shown(show_dataset, data(), title="clicks")


def test_a_screen_that_knows_ascii_only_gets_ascii():
    fields = data(LONG_TAIL, FLAT)
    printed = shown(show_dataset, fields, title="clicks", encoding="ascii")
    assert "##*" in next(line for line in printed.splitlines() if "item" in line)
    assert shown(show_schema, SCHEMA, {}, encoding="ascii").isascii()


def test_a_tail_falls_and_a_flat_field_does_not():
    printed = shown(show_dataset, data(LONG_TAIL, FLAT), title="clicks")
    tail, flat = (line_of(name, printed).split()[-1] for name in ("item", "day"))
    assert (len(tail), tail[0], tail[-1]) == (24, "█", "▁")
    assert len(set(flat)) == 1
    assert list(tail) == sorted(tail, key=BLOCKS.index, reverse=True)
    assert len(flat) < len(tail), "seven values are a shorter tail than five thousand"


def test_a_tail_that_falls_by_a_power_is_drawn_as_a_straight_line():
    ranks = np.arange(1, 4097)
    chart = tail_chart(field("x", 4096 // ranks), width=8, most=4096, longest=4096)
    assert chart == "█▇▆▅▄▃▂▁"


def test_values_seen_once_are_the_lowest_block():
    chart = tail_chart(field("x", [1] * 100), width=10, most=1, longest=100)
    assert chart == "▁" * 10
    assert tail_chart(field("x", [1]), width=10, most=1, longest=1) == "▁"
    assert tail_chart(field("x", [5]), width=10, most=5, longest=1) == "█"
    assert tail_chart(NUMBER, width=10, most=5, longest=9) == ""


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300), st.integers(1, 30))
def test_any_tail_is_drawn_within_its_width_and_never_rises(counts, width):
    seen = field("x", counts)
    chart = tail_chart(seen, width=width, most=max(counts), longest=300)
    heights = [BLOCKS.index(block) for block in chart]
    assert 1 <= len(chart) <= width
    assert heights[0] == 7 or max(counts) == 1
    assert all(before >= after for before, after in itertools.pairwise(heights))
    if len(heights) > 1 and max(counts) > 1:
        last = round(7 * math.log(min(counts)) / math.log(max(counts)))
        assert heights[-1] == last
