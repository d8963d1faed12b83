import json
from contextlib import closing

import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.raw.chunks import (  # noqa: E402  # after the check that Polars is there
    BadRows,
    Place,  # the same
    shortened,
)
from rarebit.errors import DataError  # noqa: E402  # the same


def test_nothing_bad_is_no_reason_to_stop():
    bad = BadRows()
    bad.raise_if_any()
    assert (bad.count, bad.stops, bad.first, bad.summary()) == (0, False, None, "")


def test_the_first_bad_row_is_named_and_the_others_counted_by_reason():
    bad = BadRows()
    bad.add(Place("a.csv", 1204, "x,y"), "wrong number of columns", " (2, expected 3)")
    bad.add(Place("a.csv", 1300, ""), "a blank line")
    bad.add(Place("a.csv", 1301, ""), "a blank line")
    assert bad.stops
    assert bad.count == 3
    assert bad.reasons == {"wrong number of columns": 1, "a blank line": 2}
    with pytest.raises(DataError) as caught:
        bad.raise_if_any()
    message = str(caught.value)
    assert message.startswith("a.csv, line 1,204: wrong number of columns (2, expected 3): 'x,y'.")
    assert "3 malformed rows in total: 2 x a blank line, 1 x wrong number of columns." in message


def test_one_bad_row_in_memory_is_named_by_its_row():
    bad = BadRows()
    bad.add(Place("", 7, "label=2", "row"), "a label other than 0 and 1")
    with pytest.raises(DataError, match=r"^row 7: a label other than 0 and 1: 'label=2'\. Fix"):
        bad.raise_if_any()


def test_rows_set_aside_are_lines_of_json(tmp_path):
    file = tmp_path / "bad.jsonl"
    bad = BadRows("aside", file)
    bad.add(Place("a.csv", 3, 'say "hä"\n'), "wrong", " (5)")
    bad.add(Place("b.parquet", 9, "x", "row"), "wrong")
    bad.close()
    bad.add(Place("b.parquet", 10, "\udcff", "row"), "late")
    bad.close()
    bad.raise_if_any()
    assert not bad.stops
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"file": "a.csv", "line": 3, "reason": "wrong (5)", "text": 'say "hä"\n'},
        {"file": "b.parquet", "row": 9, "reason": "wrong", "text": "x"},
        {"file": "b.parquet", "row": 10, "reason": "late", "text": "\udcff"},
    ]


def test_many_rows_are_written_before_the_end_and_none_twice(tmp_path):
    file = tmp_path / "bad.jsonl"
    with closing(BadRows("aside", file)) as bad:
        for number in range(5000):
            bad.add(Place("a.csv", number, "x" * 1000), "wrong")
        assert file.stat().st_size > 4_000_000
        assert bad._waiting_characters < 1 << 20
    numbers = [json.loads(line)["line"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert numbers == list(range(5000))


def test_no_file_is_made_where_nothing_is_set_aside(tmp_path):
    stop = BadRows("stop", tmp_path / "stop.jsonl")
    stop.add(Place("a.csv", 1, ""), "wrong")
    for rows in (stop, BadRows("aside", tmp_path / "bad.jsonl")):
        rows.close()
    assert list(tmp_path.iterdir()) == []


def test_long_texts_are_shortened_and_short_ones_are_not():
    assert shortened("x" * 120) == "x" * 120
    assert shortened("é" * 121) == "é" * 120 + "... (121 characters)"
