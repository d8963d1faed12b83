"""A value is one value in whatever file it comes: CSV, Parquet, pandas, Polars, spelled by any of them."""

import itertools

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")
pd = pytest.importorskip("pandas", reason="capability: package pandas: it is not installed")

from rarebit import Dataset  # noqa: E402  # after the check that Polars is there
from rarebit.data.log_schema import Column, LogSchema  # noqa: E402  # the same
from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # the same
from rarebit.data.raw.encoder import encoder_of  # noqa: E402  # the same
from rarebit.data.raw.readers import find_format, read_raw  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

ROWS = 300
SCHEMA = LogSchema(
    label="click",
    missing=("-1",),
    unknown_share=0.0,
    counts="all",
    columns=(
        Column(name="user"),
        Column(name="gap"),
        Column(name="mobile"),
        Column(name="hashed", buckets=50),
        Column(name="hashed_truth", buckets=50),
        Column(name="bins", kind="numeric", treatment="log_square"),
        Column(name="cuts", kind="numeric", treatment="quantile", bins=5),
        Column(name="price", kind="numeric"),
        Column(name="day"),
    ),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same rows as people write them: by pandas and by Polars, as CSV and as Parquet."""
    folder = tmp_path_factory.mktemp("spellings")
    rng = np.random.default_rng(0)
    gap = rng.integers(0, 30, ROWS).astype(float)
    gap[rng.random(ROWS) < 0.2] = np.nan
    frame = pd.DataFrame(
        {
            "user": rng.integers(0, 40, ROWS) - 1,  # -1 stands for missing
            "gap": gap,  # whole numbers that pandas writes as 15.0
            "mobile": rng.random(ROWS) < 0.5,  # True by pandas, true by Polars
            "hashed": gap,
            "hashed_truth": rng.random(ROWS) < 0.5,
            "bins": rng.integers(-1, 1000, ROWS),
            "cuts": rng.integers(0, 100, ROWS),
            "price": rng.normal(size=ROWS).round(2),
            "day": pd.date_range("2026-01-01", periods=7)
            .astype("datetime64[us]")
            .date[rng.integers(0, 7, ROWS)],
            "click": rng.integers(0, 2, ROWS),
        }
    )
    frame.to_csv(folder / "pandas.csv", index=False)
    frame.to_parquet(folder / "pandas.parquet", index=False)
    polars = pl.from_pandas(frame, nan_to_null=True)
    polars.write_csv(folder / "polars.csv")
    polars.write_parquet(folder / "polars.parquet")
    return folder


NAMES = ("pandas.csv", "pandas.parquet", "polars.csv", "polars.parquet")


@pytest.mark.parametrize(("trained", "scored"), list(itertools.permutations(NAMES, 2)))
def test_a_model_of_one_file_reads_the_other_the_same(files, tmp_path, trained, scored):
    encoder = encoder_of(prepare(files / trained, tmp_path / "data", schema=SCHEMA))
    encoded = []
    for name in (trained, scored):
        bad = BadRows()
        path = files / name
        written = find_format(path, encoder.schema.text)
        columns = encoder.columns_read(with_label=False)
        [chunk] = read_raw(path, columns, bad, format=written, missing=encoder.schema.missing)
        encoded.append(encoder.encode(chunk, bad))
        assert bad.count == 0
    np.testing.assert_array_equal(encoded[0].ids, encoded[1].ids)
    np.testing.assert_allclose(encoded[0].numeric, encoded[1].numeric)
    assert not (encoded[1].ids == 1).any()  # nothing is unknown


def test_a_log_keeps_the_spelling_of_its_file(tmp_path):
    data = Dataset.from_frame(
        {"user": ["15", "15.0", "True", "true"] * 9, "click": [0, 1] * 18},
        schema=LogSchema(label="click", columns=(Column(name="user"),), unknown_share=0.0),
    )
    assert set(encoder_of(data).values["user"]) == {"15", "15.0", "True", "true"}


def test_numbers_that_stand_for_missing_are_missing_in_any_file(files, tmp_path):
    for name in ("pandas.csv", "pandas.parquet"):
        data = prepare(files / name, tmp_path / name, schema=SCHEMA)
        raw = pd.read_csv(files / "pandas.csv")
        assert int((data[slice(None)]["user"] == 2).sum()) == int((raw["user"] == -1).sum()) > 0
        assert int((data[slice(None)]["bins"] == 2).sum()) == int((raw["bins"] == -1).sum())


def test_a_folder_of_files_that_spell_time_differently_is_split_by_time(tmp_path):
    days = pl.date_range(pl.date(2020, 1, 1), pl.date(2020, 4, 9), eager=True)
    old = pl.DataFrame({"day": days.cast(pl.Datetime), "user": ["a"] * 100, "click": [0, 1] * 50})
    new = old.with_columns(pl.col("day").dt.offset_by("1y"), user=pl.lit("b"))
    (tmp_path / "log").mkdir()
    old.write_parquet(tmp_path / "log" / "2.parquet")
    new.write_csv(tmp_path / "log" / "1.csv", datetime_format="%Y-%m-%dT%H:%M:%S")
    schema = LogSchema(
        label="click",
        columns=(Column(name="day", kind="time"), Column(name="user")),
        split={"kind": "time", "column": "day", "shares": (0.5, 0.0, 0.5)},
        unknown_share=0.0,
        counts="all",
    )
    data = prepare(tmp_path / "log", tmp_path / "data", schema=schema)
    values = encoder_of(data).decode(data.splits.train.ids.numpy())["user"].unique().to_list()
    assert values == ["a"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"tags": [[["a"]], [["b"]]] * 10}, "holds lists of List"),
        ({"click": [[0], [1]] * 10}, r"the label 'click' holds List"),
    ],
)
def test_nested_values_are_refused(column, message):
    frame = {"tags": [["a"], ["b"]] * 10, "click": [0, 1] * 10} | column
    columns = (Column(name="tags", kind="multi", max_length=2),)
    with pytest.raises(DataError, match=message):
        Dataset.from_frame(frame, schema=LogSchema(label="click", columns=columns))


def test_files_of_a_folder_may_order_their_columns_differently(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "1.csv").write_text("user,click\n" + "ann,0\nbob,1\n" * 10)
    (tmp_path / "log" / "2.csv").write_text("click,user\n" + "0,ann\n1,bob\n" * 10)
    data = prepare(tmp_path / "log", tmp_path / "data", label="click")
    assert (len(data), data.schema["user"].rows) == (40, 5)


def test_not_a_number_is_missing_in_every_frame():
    price = np.array([1.0, np.nan, 3.0, 5.0] * 10)
    user = np.array(["a", "b"] * 20)
    click = np.array([0, 1] * 20)
    schema = LogSchema(
        label="click", columns=(Column(name="price", kind="numeric"), Column(name="user"))
    )
    arrays = {"price": price, "user": user, "click": click}
    found = [
        Dataset.from_frame(f, schema=schema)
        for f in (arrays, pl.DataFrame(arrays), pd.DataFrame(arrays))
    ]
    for data in found[1:]:
        np.testing.assert_array_equal(data.numeric, found[0].numeric)
