"""Single columns to numbers: every type that a file or a frame may bring, and what is refused."""

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import Column, LogSchema, Split  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.chunks import (  # noqa: E402  # the same
    BadRows,  # the same
    Place,
    RawChunk,
)
from rarebit.data.raw.coding import GrowingDictionary, RowCoder  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

FIVE = pl.Enum(["5", "-1", "2.5", "x", "true"])
KNOWN = {"5": 3, "-1": 4, "2.5": 5, "x": 6, "true": 7}


def schema_of(column, missing=()):
    split = Split(kind="given", column="part") if column.name != "part" else Split()
    return LogSchema(label="click", columns=(column,), split=split, missing=missing)


def code(values, column=None, *, dtype=FIVE, label=None, part=None, bad=None, missing=()):
    """The coded rows of one column."""
    column = column or Column(name="a")
    rows = len(values)
    frame = pl.DataFrame(
        {
            "a": values,
            "click": [0] * rows if label is None else label,
            "part": ["train"] * rows if part is None else part,
        }
    )
    coder = RowCoder(schema_of(column, missing), {"a": dtype})
    chunk = RawChunk(frame, lambda row: Place("log.csv", row + 2, f"line of row {row}"))
    return coder.code(chunk, bad or BadRows())


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        (pl.Series(["5", "x", None, "y"]), [3, 6, 2, 1]),
        (pl.Series([5, -1, None, 6]), [3, 4, 2, 1]),
        (pl.Series([5, 6], dtype=pl.UInt8), [3, 1]),
        (pl.Series([5.0, -1.0, 2.5, None, float("nan"), 7.0]), [3, 4, 5, 2, 2, 1]),
        (pl.Series([5.0, 2.5], dtype=pl.Float32), [3, 5]),
        (pl.Series([True, None, False]), [7, 2, 1]),
        (pl.Series(["5", "x", None, ""], dtype=pl.Categorical), [3, 6, 2, 2]),
        (pl.Series(["x", "5"], dtype=pl.Enum(["x", "5"])), [6, 3]),
        (pl.Series([None, None]), [2, 2]),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_values_of_every_type_are_the_same_texts(values, ids):
    found = code(values).codes
    assert found.dtype == np.int32
    assert found.tolist() == [ids]


def test_texts_that_stand_for_missing_in_categories():
    values = pl.Series(["NULL", "x"], dtype=pl.Categorical)
    assert code(values, missing=("NULL",)).codes.tolist() == [[2, 6]]


def test_spaces_and_zeros_are_part_of_a_value():
    dictionary = GrowingDictionary()
    values = ["0", " 0", "0 ", "00", "0.0", "\x00", "é", "e\u0301"]
    found = code(values, dtype=dictionary.dtype).codes[0]
    assert len(set(found.tolist())) == len(values)
    assert dictionary.texts(found.astype(np.int64) - 3).to_list() == values


@pytest.mark.parametrize("dtype", [pl.Float64, pl.Float32])
def test_ids_as_floats_that_cannot_be_told_apart_are_refused(dtype):
    exact = 2.0**53 if dtype == pl.Float64 else 2.0**24
    assert len(code(pl.Series([exact, None], dtype=dtype))) == 2
    for too_large in (exact * 2, -exact * 2, float("inf")):
        with pytest.raises(DataError, match="'a' holds ids as floats, as large as"):
            code(pl.Series([1.0, too_large], dtype=dtype))


@pytest.mark.parametrize(
    ("values", "label"),
    [
        (pl.Series(["0", "1", "0.0", "1.0", "false", "true", "False", "True"]), [0, 1] * 4),
        (pl.Series(["-0", "+1", "00", "01", " 0", "1 "]), [0, 1] * 3),
        (pl.Series([0, 1]), [0, 1]),
        (pl.Series([0.0, 1.0]), [0, 1]),
        (pl.Series([False, True]), [0, 1]),
        (pl.Series(["1", "0"], dtype=pl.Categorical), [1, 0]),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_labels_of_every_type(values, label):
    found = code(["x"] * len(values), label=values).label
    assert found.dtype == np.uint8
    assert found.tolist() == label


@pytest.mark.parametrize(
    "values",
    [
        pl.Series(["1", "2", "", "0x1", "yes", None, "nan"]),
        pl.Series([1, 2, -1, None, 256, 257, 10**18]),
        pl.Series([1.0, 0.5, -1.0, None, float("nan"), float("inf"), 1e300]),
    ],
    ids=["text", "integers", "floats"],
)
def test_other_labels_are_bad_rows(values):
    bad = BadRows("aside")
    found = code(["x"] * 7, label=values, bad=bad)
    assert found.label.tolist() == [1]
    assert found.kept.tolist() == [True] + [False] * 6
    assert bad.reasons == {"the label is not 0 or 1": 6}


def test_the_first_bad_row_is_named_with_its_line_and_value():
    bad = BadRows()
    code(["x"] * 4, label=["1", "2", None, "0"], bad=bad)
    with pytest.raises(DataError) as error:
        bad.raise_if_any()
    assert str(error.value).startswith(
        "log.csv, line 3: the label is not 0 or 1 (got '2'): 'line of row 1'. 2 malformed rows in total: "
        "2 x the label is not 0 or 1."
    )


def test_a_number_of_spaces_is_missing():
    bad = BadRows("aside")
    found = code(["1", " ", None, "x"], Column(name="a", kind="numeric"), bad=bad)
    assert np.isnan(found.numbers).tolist() == [[False, True, True]]
    assert bad.reasons == {"a is not a number": 1}


def test_a_missing_label_was_nothing():
    bad = BadRows()
    code(["x"], label=pl.Series([None], dtype=pl.Int64), bad=bad)
    assert bad.first[1] == "the label is not 0 or 1 (got nothing)"


@pytest.mark.parametrize("treatment", ["standardised", "quantile"])
@pytest.mark.parametrize(
    ("values", "numbers", "bad_rows"),
    [
        (pl.Series(["1", " 2.5 ", "-3e2", None, "+4"]), [1, 2.5, -300, None, 4], 0),
        (pl.Series(["1", "x", "nan", "inf", "1e200", "1,5", "--1"]), [1], 6),
        (pl.Series([1.0, float("nan"), float("inf"), -1e39, None]), [1, None], 3),
        (pl.Series([1, None, -(2**60)]), [1, None, -(2.0**60)], 0),
        (pl.Series([True, False, None]), [1, 0, None], 0),
        (pl.Series(["7", None, "x"], dtype=pl.Categorical), [7, None], 1),
    ],
    ids=["text", "bad text", "floats", "integers", "booleans", "categories"],
)
def test_numbers_of_every_type(values, numbers, bad_rows, treatment):
    bad = BadRows("aside")
    found = code(values, Column(name="a", kind="numeric", treatment=treatment), bad=bad)
    expected = [np.nan if number is None else number for number in numbers]
    assert np.array_equal(found.numbers, [expected], equal_nan=True)
    assert bad.reasons == ({"a is not a number": bad_rows} if bad_rows else {})
    assert len(found) == len(numbers)


def test_given_parts_other_than_the_three_are_bad_rows():
    bad = BadRows("aside")
    found = code(["x"] * 5, part=["test", " Train", "val", "holdout", None], bad=bad)
    assert found.key.tolist() == [2, 0, 1]
    assert bad.reasons == {"part is not train, valid or test": 2}


def test_a_row_with_two_faults_is_one_bad_row():
    bad = BadRows("aside")
    column = Column(name="a", kind="numeric")
    assert len(code(["?", "1"], column, label=["7", "1"], bad=bad)) == 1
    assert bad.reasons == {"the label is not 0 or 1": 1}


@pytest.mark.parametrize("values", [[["5", "x"], ["x", "y"]], np.array([[5, 7], [7, 5]])])
def test_lists_and_arrays_of_equal_length_are_multi_valued(values):
    column = Column(name="a", kind="multi", max_length=2)
    found = code(values, column).codes.T.tolist()
    texts = [[str(value) for value in row] for row in values]
    assert found == [[KNOWN.get(text, 1) for text in row] for row in texts]


@pytest.mark.parametrize(
    ("values", "column", "message"),
    [
        (["a b"], Column(name="a", kind="multi"), "is multi-valued and holds String: give the sep"),
        ([["a"]], Column(name="a"), r"holds List\(String\), which cannot be categorical"),
        ([[1.0]], Column(name="a", kind="numeric"), "which cannot be numeric"),
        ([b"a"], Column(name="a"), "holds Binary, which cannot be categorical"),
        (pl.Series([object()], dtype=pl.Object), Column(name="a"), "holds Object, which cannot"),
    ],
)
def test_types_that_cannot_be_what_the_schema_says(values, column, message):
    with pytest.raises(DataError, match=message):
        code(values, column)
