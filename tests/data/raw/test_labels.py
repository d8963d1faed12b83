"""Labels that are texts or ratings: what counts as 1 is compared, and each row is accounted for."""

import bz2
import random

import numpy as np
import pyarrow as pa
import pytest

import rarebit as rb
from rarebit.data.log_schema import Column, Comparison, LogSchema
from rarebit.errors import DataError, SettingsError

ORDER = rb.data.Split(kind="order", shares=(1.0, 0.0, 0.0))
"""All rows for training, in the order of the file."""


def csv_of(folder, values, name="log.csv"):
    users = [f"u{number % 7}" for number in range(len(values))]
    lines = [f"{user},{value}" for user, value in zip(users, values, strict=True)]
    (folder / name).write_text("\n".join(["user,answer", *lines]) + "\n")
    return folder / name


def labels_of(data):
    """The labels in the order of the file."""
    return data.label.int().tolist()


@pytest.mark.parametrize(
    ("label", "values", "expected"),
    [
        ("answer>=4", ["5", "4.0", "3.9", " 4", "-1", "1e9"], [1, 1, 0, 1, 0, 1]),
        ("answer > 4", ["5", "4", "3"], [1, 0, 0]),
        ("answer<4", ["5", "4", "3"], [0, 0, 1]),
        ("answer<=4", ["5", "4", "3"], [0, 1, 1]),
        ("answer=>50K", [">50K", "<=50K", " >50K "], [1, 0, 1]),
        ("answer==yes", ["yes", "no", "Yes"], [1, 0, 0]),
        ("answer!=no", ["yes", "no", "maybe"], [1, 0, 1]),
        ("answer=4", ["4", "4.0", "5", "04"], [1, 1, 0, 1]),
        ("answer=4", ["4", "four", "5"], [1, 0, 0]),
    ],
)
def test_what_counts_as_one_is_compared(label, values, expected, tmp_path):
    times = 40
    log = csv_of(tmp_path, values * times)
    data = rb.prepare(log, tmp_path / "data", label=label, split=ORDER)
    assert labels_of(data) == expected * times
    asked = Comparison.read(Comparison.split(label)[1])
    naive = {">=": float.__ge__, ">": float.__gt__, "<": float.__lt__, "<=": float.__le__}
    if asked.operator in naive:
        compare = naive[asked.operator]
        assert expected == [int(compare(float(value), asked.number)) for value in values]
    frame = {"user": ["a"] * len(values), "answer": values}
    schema = LogSchema(
        label="answer",
        positive=label.removeprefix("answer").strip(),
        columns=(Column(name="user"),),
        split=ORDER,
    )
    assert labels_of(rb.Dataset.from_frame(frame, schema=schema)) == expected


def test_numbers_and_booleans_are_compared_too():
    schema = LogSchema(label="y", positive=">2", columns=(Column(name="x"),), split=ORDER)
    frame = {"x": ["a"] * 4, "y": np.array([1.0, 2.0, 2.5, 7.0])}
    assert labels_of(rb.Dataset.from_frame(frame, schema=schema)) == [0, 0, 1, 1]
    schema = LogSchema(label="y", positive="=false", columns=(Column(name="x"),), split=ORDER)
    frame = {"x": ["a"] * 2, "y": [True, False]}
    assert labels_of(rb.Dataset.from_frame(frame, schema=schema)) == [0, 1]


def test_rows_without_an_answer_are_reported_and_set_aside(tmp_path):
    log = csv_of(tmp_path, ["5", "1", "", "4", "no idea"] * 20)
    with pytest.raises(
        DataError, match=r"the label is not a value for '>=4'.*40 malformed rows in total"
    ):
        rb.prepare(log, tmp_path / "data", label="answer>=4")
    data = rb.prepare(log, tmp_path / "data", label="answer>=4", bad_rows="aside")
    assert len(data) == 60
    assert data.label.sum() == 40
    log = csv_of(tmp_path, ["yes", "no", ""] * 20)  # what is missing is neither
    with pytest.raises(
        DataError, match="20 malformed rows in total: 20 x the label is not a value for '!=no'"
    ):
        rb.prepare(log, tmp_path / "other", label="answer!=no")


def test_a_comparison_is_kept_with_the_log(tmp_path):
    log = csv_of(tmp_path, ["5", "1", "4"] * 30)
    data = rb.prepare(log, tmp_path / "data", label="answer>=4")
    schema = LogSchema.read(tmp_path / "data" / "schema.toml")
    assert (schema.label, schema.positive) == ("answer", ">=4")
    again = rb.prepare(log, tmp_path / "again", schema=schema)
    assert labels_of(again) == labels_of(data)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("answer>=", "the label is compared with nothing: '>='; give a value after '>='"),
        ("answer>many", "> compares numbers, got 'many'; for a text, use = or !="),
        ("answer!4", "a comparison of a label is like >=4 or =yes, got '!4'"),
    ],
)
def test_comparisons_that_mean_nothing_are_refused(label, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        rb.prepare(csv_of(tmp_path, ["1", "0"] * 20), tmp_path / "data", label=label)


def test_a_column_may_be_called_like_a_comparison(tmp_path):
    (tmp_path / "log.csv").write_text("user,a>=b\n" + "x,1\ny,0\n" * 30)
    data = rb.prepare(tmp_path / "log.csv", tmp_path / "data", label="a>=b")
    assert data.label.sum() == 30


def test_zstd_is_read_like_any_other_compression(tmp_path):
    text = csv_of(tmp_path, ["1", "0"] * 3000).read_bytes()
    (tmp_path / "log.csv.zst").write_bytes(pa.compress(text, codec="zstd", asbytes=True))
    (tmp_path / "log.csv.bz2").write_bytes(bz2.compress(text))
    one, other = (
        rb.prepare(tmp_path / f"log.csv.{name}", tmp_path / name, label="answer")
        for name in ("zst", "bz2")
    )
    assert labels_of(one) == labels_of(other)
    assert one.ids.equal(other.ids)
    whole = (tmp_path / "log.csv.zst").read_bytes()
    (tmp_path / "cut.csv.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cut off or damaged"):
        rb.prepare(tmp_path / "cut.csv.zst", tmp_path / "cut", label="answer")
    (tmp_path / "plain.csv").write_bytes(whole)
    with pytest.raises(DataError, match=r"compressed with zstd; let its name end in .csv.zst"):
        rb.prepare(tmp_path / "plain.csv", tmp_path / "plain", label="answer")


def test_a_pattern_is_its_files_by_name(tmp_path):
    values = [random.Random(4).choice("01") for _ in range(300)]  # noqa: S311  # data, not secrets
    whole = rb.prepare(csv_of(tmp_path, values), tmp_path / "whole", label="answer", split=ORDER)
    for number in range(3):
        part = values[100 * number : 100 * (number + 1)]
        lines = [f"u{(100 * number + place) % 7},{value}" for place, value in enumerate(part)]
        (tmp_path / f"day-{number}.csv").write_text("\n".join(["user,answer", *lines]) + "\n")
    parts = rb.prepare(tmp_path / "day-*.csv", tmp_path / "parts", label="answer", split=ORDER)
    assert labels_of(parts) == labels_of(whole)
    with pytest.raises(DataError, match="no file is like"):
        rb.prepare(tmp_path / "night-*.csv", tmp_path / "none", label="answer")
