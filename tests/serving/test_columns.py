"""A value of a request means what it means to `rarebit data prepare`."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.coding import _number, text_of
from rarebit.errors import RequestError
from rarebit.serving.columns import Input, to_array

USER, PRICE = Input("user", "categorical"), Input("price", "numeric")
TAGS, LISTS = Input("tags", "multi", "|", 3), Input("tags", "multi", "", 3)


def polars_texts(values, dtype):
    frame = pl.DataFrame({"x": pl.Series(values, dtype=dtype)})
    return frame.select(x=text_of(pl.col("x"), dtype()))["x"].fill_null("").to_list()


@given(st.lists(st.floats(-(2.0**53), 2.0**53), min_size=1))
@example([1e-5, 9.999e-6, 0.00001234, -1.5e-5, 1e-4, 5e-324, -0.0, 0.1, 2.0**53, 1e15 + 0.5])
def test_a_float_is_spelled_as_polars_spells_it(values):
    assert to_array(USER, values).tolist() == polars_texts(values, pl.Float64)


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_an_integer_is_its_decimal_text(values):
    assert to_array(USER, values).tolist() == polars_texts(values, pl.Int64)


def test_booleans_and_missing_values():
    values = [True, False, None]
    assert to_array(USER, values).tolist() == polars_texts(values, pl.Boolean)


@given(
    st.one_of(
        st.text(),
        st.floats(allow_nan=False).map(repr),
        st.from_regex(r"[-+]?[\d.eE]{1,8}", fullmatch=True),
    )
)
@example(" 1.5 ")
@example("\x1c1")
@example("\u20031e5\x85")
@example("1_000")
@example("infinity")
@example("NaN")
@example("1e400")
@example("")
@example("٣")
def test_a_number_as_text_is_read_as_polars_reads_it(text):
    column = LogSchema(label="y", columns=(Column(name="price", kind="numeric"),))["price"]
    frame = pl.DataFrame({"price": [text]}, schema={"price": pl.String})
    [number] = frame.select(_number(column.name, pl.String()))["price"]
    if number is None and not frame["price"].str.strip_chars()[0]:
        assert math.isnan(to_array(PRICE, [text])[0])
    elif number is None or not np.isfinite(np.float32(number) if abs(number) < 1e39 else np.inf):
        with pytest.raises(RequestError, match="price"):
            to_array(PRICE, [text])
    else:
        assert to_array(PRICE, [text])[0] == number


def test_several_values():
    assert to_array(TAGS, [["a", 1, None, ""], [], None, "a|b", 7]).tolist() == [
        "a|1",
        "",
        "",
        "a|b",
        "7",
    ]
    found = to_array(LISTS, [["a", "", "b"], None, list("abcd")]).tolist()
    assert found == [["a", "b", ""], ["", "", ""], ["a", "b", "c"]]


def test_one_value_that_is_spelled_like_a_missing_one_stays_a_value():
    column = Input("tags", "multi", "|", 3, ("NULL",))
    assert to_array(column, [["NULL"], "NULL"]).tolist() == ["NULL|", "NULL"]


def test_numbers_that_mean_missing():
    column = Input("price", "numeric", missing=("NULL", "-1"))
    found = to_array(column, ["NULL", -1, "-1.0", 2, True])
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            USER,
            ["a"],
            "row 1: column 'user' must be text, a number, true, false or null, got a list",
        ),
        (USER, {"a": 1}, "row 1: column 'user' must be .* got an object"),
        (
            USER,
            2.0**54,
            r"row 1: column 'user' has the float 1.80144e\+16 as an id: .* send it as text",
        ),
        (USER, math.inf, "the float inf as an id"),
        (TAGS, ["a", "b|c"], r"row 1: column 'tags' has a value with '\|' in it"),
        (TAGS, [["a"]], "row 1: column 'tags' must be text"),
        (LISTS, "a", "row 1: column 'tags' must be a list of values, got 'a'"),
        (PRICE, "cheap", "row 1: column 'price' must be a number or null, got 'cheap'"),
        (PRICE, [1], "row 1: column 'price' must be a number or null, got a list"),
        (PRICE, 3.5e38, "row 1: column 'price' must be a number that fits 32 bits"),
        (PRICE, math.nan, "row 1: column 'price' must be a number that fits 32 bits"),
        (PRICE, "x" * 500, r"got 'x{59}\.\.\."),
    ],
)
def test_a_wrong_value_is_refused_with_its_column_and_row(column, value, message):
    with pytest.raises(RequestError, match=message):
        to_array(column, [None, value])
