import datetime as dt

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rarebit as rb
from rarebit.data.log_schema import Column, LogSchema, Split
from rarebit.errors import DataError

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")
from polars.testing.parametric import dataframes  # noqa: E402  # after the check that it is there

from rarebit.data.raw.infer import infer_schema  # noqa: E402  # the same

N = 2000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(low, high, size=N):
    return np.random.default_rng(0).integers(low, high, size)


def counts(size=N):
    """Return whole numbers such as clicks a user: mostly small, a few large."""
    return np.floor(np.random.default_rng(0).lognormal(2, 2, size)).astype(int)


def guess(values, name="x", **options):
    """Return the guessed column and the reason, beside one column that is always of use."""
    frame = pl.DataFrame({"click": ["0"] * len(values), name: values}, strict=False)
    frame = frame.with_columns(other=pl.Series([f"v{i % 7}" for i in range(len(values))]))
    found = infer_schema(frame, "click", **options)
    return found.schema[name], found.reasons[name]


def text(values):
    return [None if value is None else str(value) for value in values]


def test_texts_are_categories_and_counted():
    column, reason = guess([f"u{value}" for value in draw(0, 50)])
    assert column == Column(name="x")
    assert reason == "texts, 50 distinct in 2,000 rows"


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", ["user_id", "userId", "userid", "ID", "zip", "item", "OS version"])
def test_integers_with_the_name_of_an_id_are_categories(name, as_text):
    values = counts()
    column, reason = guess(text(values) if as_text else values, name)
    assert (column.kind, column.name) == ("categorical", name)
    assert "an id by its name" in reason


def test_names_that_only_look_like_ids_are_not():
    assert guess(counts(), "bid")[0].kind == "numeric"
    assert guess(counts(), "paid")[0].kind == "numeric"


def test_integers_that_spread_over_their_range_are_ids():
    column, reason = guess(text(draw(0, 1 << 20)))
    assert column == Column(name="x", min_count=2)
    assert "taken for an id; over 10 % of the rows, so values seen once are unknown" in reason
    hashes = np.repeat(draw(-(1 << 31), 1 << 31), 2)
    assert guess(hashes)[0].kind == "categorical"
    assert guess(text(draw(5000, 5150)))[0] == Column(name="x")


def test_leading_zeros_make_a_text():
    values = [f"{value:05d}" for value in counts()]
    column, reason = guess(values, "amount")
    assert column.kind == "categorical"
    assert reason.startswith("texts, ")
    assert guess(["0.5", "0", "-0.5", "1.5"], "amount")[0].kind == "numeric"


def test_few_integers_are_categories():
    column, reason = guess(text(draw(0, 20)), "clicks")
    assert (column, reason) == (Column(name="clicks"), "integers, 20 distinct in 2,000 rows: few")
    assert guess(text(draw(0, 21)), "clicks")[0].kind == "numeric"


def test_integers_that_a_float_cannot_hold_are_ids():
    values = [2**60 + int(value) for value in draw(0, 300)]
    column, reason = guess(text(values), "amount")
    assert column.kind == "categorical"
    assert "too long for amounts" in reason


def test_booleans_and_polars_categories_are_categories():
    assert guess([True, False, None, True])[0] == Column(name="x")
    for dtype in (pl.Categorical, pl.Enum(["1", "2"])):
        assert guess(pl.Series(["1", "2", "1", None], dtype=dtype))[0] == Column(name="x")


def test_min_count_is_two_above_a_tenth_of_the_rows():
    for distinct, min_count in ((200, 1), (201, 2)):
        values = [f"v{i % distinct}" for i in range(N)]
        assert guess(values)[0].min_count == min_count
    assert guess([f"v{i}" for i in range(900)] + ["v0"])[0].min_count == 1, "too few rows to tell"


def test_one_value_in_every_row_is_ignored():
    ignored = Column(name="x", kind="ignored")
    assert guess(["a"] * 50) == (ignored, "the same value in the first 50 rows")
    assert guess([1.5] * 50)[0].kind == "ignored"
    assert guess(["a"] * 49 + [None])[0].kind == "categorical", "missing is a second value"


def test_one_value_is_kept_where_the_name_says_that_it_will_change():
    column, reason = guess(["14102100"] * 50, "hour")
    assert column.kind == "categorical"
    assert "times change" in reason


def test_no_value_is_ignored():
    for values in ([None, None], pl.Series([None, None], dtype=pl.Date), [None] * 3):
        ignored = Column(name="x", kind="ignored")
        assert guess(values) == (ignored, f"no value in the first {len(values)} rows")
    frame = pl.DataFrame({"y": [1], "a": ["x"], "b": [None]})
    assert infer_schema(frame, "y").reasons["b"] == "no value in the first row"


@pytest.mark.parametrize(
    "name", ["__index_level_0__", "__index_level_12__", "Unnamed: 0", "Unnamed: 0.1"]
)
def test_the_index_of_a_table_is_ignored(name):
    column, reason = guess(counts(), name)
    assert column.kind == "ignored"
    assert reason == "the index of a table by its name: the number of the row"
    split = Split(kind="time", column=name)
    assert guess(counts(), name, split=split)[0].kind == "time", "asked for"


def test_names_that_only_hold_that_of_an_index_are_read():
    for name in ("index_level_0", "my Unnamed: 0", "Unnamed", "Unnamed: x"):
        assert guess(draw(0, 9), name)[0].kind == "categorical"


def test_a_column_without_a_name_is_ignored_where_others_have_one():
    values = [f"v{i % 9}" for i in range(50)]
    frame = pl.DataFrame({"column_1": values, "y": [0, 1] * 25, "column_4": values, "u": values})
    found = infer_schema(frame, "y")
    kinds = [column.kind for column in found.schema.columns]
    assert kinds == ["ignored", "categorical", "categorical"], "column_4 is third: its own name"
    assert found.reasons["column_1"].startswith("it has no name in the file")
    bare = pl.DataFrame({"column_1": [0, 1] * 25, "column_2": values})
    assert infer_schema(bare, "column_1").schema["column_2"].kind == "categorical", "no header"


@pytest.mark.parametrize(
    "values", [[f"http://{i}" for i in range(N)], [2**60 + i for i in range(N)]]
)
def test_a_value_of_its_own_in_every_row_is_ignored(values):
    ignored = Column(name="id", kind="ignored")
    assert guess(values, "id") == (ignored, "every row has its own value")
    assert guess([*values[:-1], values[0]], "id")[0].kind == "categorical"
    assert guess(values[:999], "id")[0].kind == "categorical", "too few rows to tell"


@pytest.mark.parametrize(
    "series",
    [
        pl.Series([{"a": 1}, {"a": 2}]),
        pl.Series([b"a", b"b"]),
        pl.Series([dt.timedelta(1), dt.timedelta(2)]),
        pl.Series([dt.time(1), dt.time(2)]),
        pl.Series([[0.5, 0.1], [0.2, 0.3]]),
        pl.Series([[[1]], [[2]]]),
        pl.Series([[0.5, 1.5], [2.5, 3]], dtype=pl.Array(pl.Float64, 2)),
        pl.Series([[[1], [2]], [[2], [3]]], dtype=pl.Array(pl.Int64, (2, 1))),
        pl.Series([object(), object()], dtype=pl.Object),
    ],
)
def test_types_that_are_not_read_are_ignored(series):
    column, reason = guess(series)
    assert column.kind == "ignored"
    assert reason.endswith("which is not read")


@pytest.mark.parametrize(
    "values",
    [
        ["2014-10-21", "2014-10-22"],
        ["2014-10-21 08:30", "2014-10-22 08:30:01"],
        ["2014-10-21T08:30:00.123Z", "2014-10-22T08:30:00+02:00", None],
        [dt.date(2014, 10, 21), None],
        [dt.datetime(2014, 10, 21, 8, tzinfo=dt.UTC), None],
    ],
)
def test_dates_are_times(values):
    assert guess(values)[0] == Column(name="x", kind="time")


@pytest.mark.parametrize(
    "values", [["2014-13-21", "2014-10-22"], ["2014-10-21 or so", "2014-10-22"]]
)
def test_what_only_looks_like_a_date_is_a_text(values):
    assert guess(values)[0].kind == "categorical"


def test_numbers_since_1970_are_times_by_their_name_or_if_all_differ():
    seconds = 1_414_000_000 + draw(0, 500)
    for name in ("timestamp", "event_time", "createdAt", "ts"):
        assert guess(text(seconds), name)[0].kind == "time"
        assert guess(seconds * 1000, name)[0].kind == "time"
    assert guess(seconds, "x")[0].kind == "categorical"
    assert guess(np.arange(N) + 1_414_000_000, "x")[0].kind == "time"
    assert guess(np.arange(N) + 1_414_000_000, "user_id")[0].kind == "ignored"


def test_numbers_outside_1990_to_2040_are_no_times():
    for start in (631_152_000 - 1, 2_240_611_200 - N + 1):
        assert guess(np.arange(N) + start, "time")[0].kind != "time"
    for start in (631_152_000, 2_240_611_200 - N):
        assert guess(np.arange(N) + start, "time")[0].kind == "time"


def test_an_hour_written_as_digits_is_a_category():
    assert guess(text(draw(14_102_100, 14_102_124)), "hour")[0] == Column(name="hour")


def test_texts_with_a_bar_are_several_values():
    genres = ["Action", "Comedy", "Drama", "Horror", "Crime"]
    values = ["|".join(genres[i] for i in range(5) if mask >> i & 1) for mask in range(1, 32)]
    column, reason = guess(values * 3)
    assert column == Column(name="x", kind="multi", separator="|", max_length=5)
    assert reason == "texts with '|' in them, 5 distinct values, up to 5 a row"


@pytest.mark.parametrize("separator", ["|", ";", "^", ",", " ", ", ", "; "])
def test_each_separator_is_found(separator):
    lengths = draw(1, 6)
    values = [
        separator.join(f"i{(i * 7 + j * j) % 40}" for j in range(n)) for i, n in enumerate(lengths)
    ]
    column, _ = guess(values)
    assert (column.kind, column.separator, column.max_length) == ("multi", separator, 5)


def test_rows_of_very_many_values_are_cut():
    values = ["|".join(f"i{(i + j) % 90}" for j in range(60)) for i in range(80)]
    values += [f"i{i}|i{i + 1}" for i in range(80)]
    column, reason = guess(values)
    assert column.max_length == 50
    assert "up to 60 a row, of which 50 are kept" in reason


def test_many_distinct_parts_have_a_min_count_of_two():
    values = ["|".join(f"i{j}" for j in draw(0, 400, 8) + i % 300) for i in range(N)]
    column, reason = guess([f"{value}|u{i % 700}" for i, value in enumerate(values)])
    assert (column.kind, column.min_count) == ("multi", 2)
    assert "values seen once are unknown" in reason


@pytest.mark.parametrize(
    "values",
    [
        [f"name {i}; town {i}" for i in range(200)],  # parts do not come again
        [*"abcdefgh", "a|b", "c|d"],  # nor often enough
        ["a|b|c|d", "a|b|c|d|e", "e|b|c|d|a"] * 9,  # fewer wholes than parts
        [*LETTERS, *("|".join(LETTERS[i:]) for i in range(2))],  # few texts have the sign
        [f"{i // 25},{i % 25}" for i in range(900)],  # numbers with a decimal comma
        [f"the {i} words of a {i * i} sentence, and {i}" for i in range(200)],
        [f"[{i // 10}|{i % 10}]" for i in range(100)],  # lists as JSON
        ["New York", "Los Angeles", "Rome"] * 50,
    ],
)
def test_other_texts_with_such_signs_are_one_value(values):
    assert guess(values)[0].kind == "categorical"


def test_lists_are_several_values():
    for dtype in (pl.List(pl.String), pl.List(pl.Int64), pl.List(pl.Categorical)):
        series = pl.Series([["1", "2", "3"], [], None, ["2"]]).cast(dtype)
        column, reason = guess(series)
        assert column == Column(name="x", kind="multi", max_length=3)
        assert reason == "lists, 3 distinct values, up to 3 a row"
    assert guess(pl.Series([[], None], dtype=pl.List(pl.String)))[0].max_length == 1


def test_arrays_of_equal_length_are_several_values():
    series = pl.Series([["1", "2"], ["2", "3"], None])
    for inner in (pl.String, pl.Int64):
        column, reason = guess(series.cast(pl.List(inner)).cast(pl.Array(inner, 2)))
        assert column == Column(name="x", kind="multi", max_length=2)
        assert reason == "lists, 3 distinct values, up to 2 a row"


@pytest.mark.parametrize("as_text", [True, False])
def test_fractions_are_standardised(as_text):
    values = [None, *np.random.default_rng(0).normal(size=N).tolist()]
    column, reason = guess(text(values) if as_text else values)
    assert column == Column(name="x", kind="numeric")
    assert reason.startswith("numbers with fractions, 2,000 distinct in 2,001 rows")


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("as_float", [True, False])
def test_mostly_small_integers_are_log_squares(as_text, as_float):
    values = counts().astype(float) if as_float else counts()
    column, reason = guess(text(values) if as_text else values)
    assert column == Column(name="x", kind="numeric", treatment="log_square")
    assert "mostly small: taken for amounts" in reason


def test_negative_amounts_are_standardised():
    assert guess(counts() - 3)[0].treatment == "log_square"
    column, reason = guess(counts() - 4)
    assert (column.kind, column.treatment) == ("numeric", "standardised")
    assert reason.endswith("some negative")
    assert guess(draw(-200, 400), "x")[0] == Column(name="x", kind="numeric"), "temperatures"


@pytest.mark.parametrize("name", ["age", "num_friends", "item_price", "dwellSeconds"])
def test_the_name_of_an_amount_makes_a_number(name):
    column, reason = guess(text(draw(5, 95)), name)
    assert column == Column(name=name, kind="numeric", treatment="log_square")
    assert reason.endswith("an amount by its name")


def test_numbers_that_are_not_finite_are_left_out_of_the_guess():
    column, _ = guess([0.5, 1.5, float("nan"), float("inf")])
    assert column.kind == "numeric"
    assert guess([float("nan"), float("nan")])[0].kind != "numeric"
    assert guess(["1e999", "1", "2.5"])[0].kind == "categorical"


def test_words_that_keep_a_column_from_being_numbers_are_missing():
    prices = ["1.5", "NULL", "2.25", "N/A"]
    frame = pl.DataFrame({"y": ["0"] * 4, "price": prices, "country": ["NA", "DE", "FR", "NULL"]})
    found = infer_schema(frame, "y")
    assert found.schema.missing == ("N/A", "NULL")
    assert found.schema["price"].kind == "numeric"
    assert found.reasons["price"].endswith("; 'N/A', 'NULL' counts as missing")
    assert found.reasons["country"] == "texts, 3 distinct in 4 rows; 'NULL' counts as missing"


@pytest.mark.parametrize(
    "values",
    [["NA", "DE", "FR"], ["1", "2", "many", "NULL"], ["NULL", "NULL", "NA"], ["null", None]],
)
def test_words_are_texts_where_nothing_says_otherwise(values):
    frame = pl.DataFrame({"y": ["0"] * len(values), "x": values, "other": range(len(values))})
    assert infer_schema(frame, "y").schema.missing == ()


def test_the_split_decides_what_its_column_is():
    ids = [f"u{i}" for i in range(N)]
    split = Split(kind="user", column="x")
    column, reason = guess(ids, split=split)
    assert column == Column(name="x", kind="ignored")
    assert reason == "the split is by it: no value of a test row is known in training"
    split = Split(kind="time", column="x")
    assert guess(text(draw(0, 9)), split=split)[0] == Column(name="x", kind="time")
    split = Split(kind="given", column="x")
    column, reason = guess(["train", "test"] * 5, split=split)
    assert (column.kind, reason) == ("ignored", "says which split a row is for")


@pytest.mark.parametrize("column", ["when", "click"])
def test_a_split_needs_its_column(column):
    with pytest.raises(
        DataError, match=f"a split by time needs the column '{column}', and the log"
    ):
        guess(["a", "b"], split=Split(kind="time", column=column))


def test_a_missing_label_is_suggested():
    frame = pl.DataFrame({"click": [0], "user": [1]})
    with pytest.raises(DataError, match=r"no column 'clik' for the label; did you mean 'click'\?"):
        infer_schema(frame, "clik")


def test_a_log_that_tells_nothing_is_refused():
    with pytest.raises(DataError, match="the log has no rows"):
        infer_schema(pl.DataFrame({"click": [], "user": []}), "click")
    with pytest.raises(DataError, match="column 2 of the log has no name"):
        infer_schema(pl.DataFrame({"click": [1], "": [1]}), "click")
    with pytest.raises(
        DataError, match=r"no column besides the label 'click' looks useful .*\(none\)"
    ):
        infer_schema(pl.DataFrame({"click": [1, 0]}), "click")
    with pytest.raises(
        DataError, match=r"\(a: the same value in the first 2 rows\); write the schema"
    ):
        infer_schema(pl.DataFrame({"click": [1, 0], "a": [1, 1]}), "click")


def check_any(frame):
    """Guess a schema of any frame: it names every column, or the frame is refused in words."""
    label = frame.columns[0]
    try:
        found = infer_schema(frame, label)
    except DataError:
        return
    assert [column.name for column in found.schema.columns] == frame.columns[1:]
    assert list(found.reasons) == frame.columns[1:]
    assert all(found.reasons.values())
    assert LogSchema.from_mapping(found.schema.to_mapping()) == found.schema


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(dataframes(min_cols=2, max_cols=4, max_size=12, allow_null=True))
def test_any_frame_gives_a_schema_or_is_refused(frame):
    check_any(frame)


CELLS = st.none() | st.text(max_size=5) | st.text("0123456789.-+eE|;, NUL", max_size=6)


@pytest.mark.slow
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1)
    )
)
def test_any_texts_give_a_schema_or_are_refused(columns):
    names = {f"c{i}": pl.Series(values, dtype=pl.String) for i, values in enumerate(columns)}
    check_any(pl.DataFrame(names))


@given(st.lists(st.floats() | st.integers() | st.none(), min_size=1))
def test_any_numbers_as_texts_give_a_schema_or_are_refused(values):
    check_any(pl.DataFrame({"y": [0] * len(values), "x": pl.Series(text(values), dtype=pl.String)}))


PRICES = np.random.default_rng(0).random(N) * 2000


def warnings_of(values, name="x", label=None):
    """Return the warnings about a column."""
    label = draw(0, 2) if label is None else label
    frame = pl.DataFrame({"click": label, name: values, "other": [f"v{i % 7}" for i in range(N)]})
    return infer_schema(frame, "click").warnings


SHORT = "9" * 120 + "... (400 characters)"


def german(price):
    return f"{price:,.2f}".translate(str.maketrans(",.", ".,"))


@pytest.mark.parametrize(
    ("values", "share", "example", "advice"),
    [
        ([german(p) for p in PRICES], "2,000 of 2,000", german(PRICES[0]), "write them as 1234.56"),
        ([f"${p:,.2f}" for p in PRICES], "2,000 of 2,000", f"${PRICES[0]:,.2f}", "as 1234.56"),
        ([*["inf"] * 3, *map(str, PRICES[3:])], "3 of 2,000", "inf", "missing = ['inf']"),
        ([*["9" * 400] * 3, *map(str, PRICES[3:])], "3 of 2,000", SHORT, "for missing values"),
        ([*["?"] * 900, *map(str, PRICES[900:])], "900 of 2,000", "?", "missing = ['?']"),
        (
            [*[f"p{i}" for i in range(99)], *map(str, PRICES[99:])],
            "99 of 2,000",
            "p0",
            "['p0', 'p1', 'p10']",
        ),
    ],
)
def test_numbers_that_a_few_texts_make_categories_are_reported(values, share, example, advice):
    (found,) = warnings_of(values, "price")
    start = f"'price' is not numeric, because {share} values are not written as numbers, such as "
    assert found.startswith(f"{start}{example!r}; ")
    assert advice in found


@pytest.mark.parametrize(
    "values",
    [
        [f"A{n}" if n % 2 else str(n) for n in draw(0, 900)],  # half of them are no numbers
        [f"{n:05}" for n in draw(0, 99_999)],
        [f"{n}.{n}.1.2" for n in draw(0, 99)],
        [f"{n}/10/2014" for n in draw(1, 28)],
        ["?", *(str(n % 5) for n in range(1, N))],  # few numbers are categories anyway
        [f"v{n}" for n in draw(0, 9)],
    ],
)
def test_other_texts_are_not_reported(values):
    assert warnings_of(values) == ()


def test_what_a_warning_says_makes_the_column_numeric():
    values = pl.Series([*["inf"] * 3, *map(str, PRICES[3:])])
    schema = LogSchema(
        label="click", columns=(Column(name="price", kind="numeric"),), missing=("inf",)
    )
    data = rb.Dataset.from_frame({"price": values, "click": draw(0, 2)}, schema=schema)
    assert data.numeric.isfinite().all()


@pytest.mark.parametrize("name", ["conversion", "is_click", "wasPurchased", "label", "my_target"])
def test_a_second_label_is_reported_by_its_name(name):
    (found,) = warnings_of(np.random.default_rng(1).integers(0, 2, N), name)
    assert found.startswith(
        f"{name!r} is a feature, and its name is like a label's; if it is one, "
    )
    assert found.endswith(f"keep it out of the model: --label click --label {name}")


@pytest.mark.parametrize("name", ["sample_weight", "weight"])
def test_a_weight_is_reported_by_its_name(name):
    (found,) = warnings_of(PRICES, name)
    assert found == f"{name!r} is a feature; if it is the weight of a row, say so: --weight {name}"


def test_columns_with_a_role_are_what_they_are_named():
    frame = pl.DataFrame(
        {
            "click": draw(0, 2),
            "buy": draw(0, 2),
            "user": draw(0, 50),
            "w": PRICES,
            "age": draw(1, 90),
        }
    )
    found = infer_schema(frame, "click", weight="w", group="user", other_labels=["buy"])
    assert (found.schema.weight, found.schema.group) == ("w", "user")
    kinds = {column.name: column.kind for column in found.schema.columns}
    assert (kinds["buy"], kinds["w"]) == ("ignored", "ignored"), "a model must not read them"
    assert kinds["user"] == "categorical", "what rows are grouped by may be a feature as well"
    assert not found.warnings
    assert LogSchema.from_mapping(found.schema.to_mapping()) == found.schema
    with pytest.raises(DataError, match=r"no column 'wieght'; did you mean|no column 'wieght'"):
        infer_schema(frame, "click", weight="wieght")


def leaks(label):
    """Return columns that tell the label: by value, by being there, by being above 0, with few errors."""
    noisy = np.where(np.arange(N) < 5, 1 - label, label)
    seconds = pl.Series(PRICES)
    return {
        "noisy": noisy,
        "word": np.where(label == 1, "yes", "no"),
        "revenue": np.where(label == 1, PRICES, 0),
        "seconds": seconds.zip_with(pl.Series(label == 1), pl.Series([None] * N, dtype=pl.Float64)),
    }


@pytest.mark.parametrize("name", leaks(np.zeros(N)))
@pytest.mark.parametrize("rate", [0.5, 0.05])
def test_what_tells_the_label_is_reported(name, rate):
    label = (np.random.default_rng(2).random(N) < rate).astype(int)
    expected = 0 if name == "noisy" and rate < 0.1 else 1  # 5 errors are many for 100 clicks
    found = warnings_of(leaks(label)[name], name, label)
    assert len(found) == expected
    assert all(f"{name!r} is a feature, and it tells the label 'click'" in text for text in found)


def test_features_are_not_reported():
    rare = (np.arange(N) == 7).astype(int)
    assert warnings_of(np.random.default_rng(3).integers(0, 2, N)) == ()
    assert warnings_of(rare, label=rare) == (), "one click says nothing"
    assert warnings_of(counts(), "num_clicks") == ()
    assert warnings_of(text(draw(0, 50)), "target_city") == ()


def test_warnings_reach_python(tmp_path):
    rows = {"user": ["a", "b", "c"] * 9, "bought": [0, 1, 1] * 9, "click": [0, 1] * 13 + [1]}
    with pytest.warns(UserWarning, match="'bought' is a feature") as caught:
        rb.Dataset.from_frame(rows, label="click")
    assert caught[0].filename == __file__
    pl.DataFrame(rows).write_csv(tmp_path / "log.csv")
    with pytest.warns(UserWarning, match="'bought' is a feature") as caught:
        rb.prepare(tmp_path / "log.csv", tmp_path / "out", label="click")
    assert caught[0].filename == __file__
