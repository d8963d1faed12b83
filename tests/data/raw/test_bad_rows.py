import json
import re
from contextlib import closing, contextmanager
from threading import Thread

import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.prepare import prepare  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.chunks import (  # noqa: E402  # the same
    WAITING_CHARACTERS,
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


class Interrupted:
    """Lets another thread add a row in the middle of an addition, unless that one locks it out."""

    def __init__(self, bad: BadRows, place: Place) -> None:
        self.other = Thread(target=bad.add, args=(place, "wrong"))

    def __call__(self) -> None:
        self.other.start()
        self.other.join(timeout=0.05)


def test_a_row_is_kept_that_comes_while_others_are_written(tmp_path):
    class File(type(tmp_path)):
        @contextmanager
        def open(self, *args, **options):
            with super().open(*args, **options) as file:
                yield file
            if not interrupted.other.ident:
                interrupted()

    bad = BadRows("aside", File(tmp_path / "bad.jsonl"))
    interrupted = Interrupted(bad, Place("a.csv", 2, "y"))
    bad.add(Place("a.csv", 1, "x" * WAITING_CHARACTERS), "wrong")
    interrupted.other.join()
    bad.close()
    lines = (tmp_path / "bad.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 2]


def test_the_first_row_is_the_first_of_all_threads():
    class Late:
        """A place that is found slowly."""

        file = "a.csv"

        @property
        def number(self) -> int:
            if not interrupted.other.ident:
                interrupted()
            return 5

    bad = BadRows()
    bad.add(Place("a.csv", 9, ""), "wrong")
    interrupted = Interrupted(bad, Place("a.csv", 2, ""))
    bad.add(Late(), "wrong")
    interrupted.other.join()
    assert bad.count == 3
    assert bad.first[0].number == 2


def test_no_file_is_made_where_nothing_is_set_aside(tmp_path):
    stop = BadRows("stop", tmp_path / "stop.jsonl")
    stop.add(Place("a.csv", 1, ""), "wrong")
    for rows in (stop, BadRows("aside", tmp_path / "bad.jsonl")):
        rows.close()
    assert list(tmp_path.iterdir()) == []


def test_long_texts_are_shortened_and_short_ones_are_not():
    assert shortened("x" * 120) == "x" * 120
    assert shortened("é" * 121) == "é" * 120 + "... (121 characters)"


LABELS = [
    (
        ["-1", "1"],
        [150, 150],
        "'-1' (150), '1' (150)",
        '--label "y=1" (in a schema: positive = "=1")',
    ),
    (
        ["-1", "1"],
        [10, 290],
        "'1' (290), '-1' (10)",
        '--label "y=1" (in a schema: positive = "=1")',
    ),
    (
        list("12345"),
        [9, 8, 7, 6, 5],
        "'1' (9), '2' (8), '3' (7), '4' (6), '5' (5)",
        '--label "y>=4"',
    ),
    (["yes", "no"], [20, 80], "'no' (80), 'yes' (20)", '--label "y=yes"'),
    ([">50K", "<=50K"], [20, 40], "'<=50K' (40), '>50K' (20)", '--label "y=>50K"'),
    (["5"], [9], "'5' (9)", '--label "y>=5"'),
    (list("0123456789"), [9] * 10, "'5' (9), 4 others", '--label "y>=5"'),
    (
        ["0", "1", ""],
        [9, 8, 50],
        "'0' (9), '1' (8), missing (50)",
        "Leave rows without a label out",
    ),
]


@pytest.mark.parametrize("keep", ["stop", "aside"])
@pytest.mark.parametrize("case", LABELS)
def test_labels_that_are_not_0_or_1_are_shown_with_their_counts(tmp_path, case, keep):
    """To skip such rows would leave one class, or few rows: no advice, and no success."""
    values, counts, seen, advice = case
    rows = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    log = tmp_path / "log.csv"
    log.write_text("user,y\n" + "".join(f"u{n % 9},{value}\n" for n, value in enumerate(rows)))
    with pytest.raises(DataError, match="the label 'y' must be 0 or 1, but") as caught:
        prepare(log, tmp_path / "out", label="y", bad_rows=keep)
    assert seen in str(caught.value)
    assert advice in str(caught.value)
    assert "aside" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    named = re.search(r'--label "(.*?)"', str(caught.value))
    if named and len(values) > 1 and len(rows) > 30:  # what the message proposes works
        assert len(prepare(log, tmp_path / "out", label=named[1])) == len(rows)


def test_a_few_wrong_labels_are_skipped(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("user,y\n" + "a,0\nb,1\n" * 20 + "a,2\n" * 20)
    with pytest.raises(DataError, match=r"line 42: the label is not 0 or 1 .*--bad-rows aside"):
        prepare(log, tmp_path / "out", label="y")
    assert len(prepare(log, tmp_path / "out", label="y", bad_rows="aside")) == 40


def test_other_malformed_rows_may_not_take_a_class_with_them(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("user,y\n" + "a,0\nc,0\nb,1,\n" * 20)
    message = (
        r"without its 20 malformed rows \(20 x wrong .*\), every row of log.csv has the label 0"
    )
    with pytest.raises(DataError, match=message):
        prepare(log, tmp_path / "out", label="y", bad_rows="aside")
