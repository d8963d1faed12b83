"""Frames of every kind give the same ids; what is no frame is refused."""

import importlib.util

import numpy as np
import pytest
import torch

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data.log_schema import Column, LogSchema, Split  # noqa: E402  # the same
from rarebit.data.raw.encoder import encoder_of  # noqa: E402  # the same
from rarebit.data.raw.readers import as_polars  # noqa: E402  # the same
from rarebit.errors import DataError, SettingsError  # noqa: E402  # the same
from rarebit.models.fm import FM  # noqa: E402  # the same

needs_pandas = pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None or importlib.util.find_spec("pyarrow") is None,
    reason="capability: package pandas: it is not installed",
)
USERS = ["ann", "bob", None, "ann"] * 10
ITEMS = [1, 2, 3, None] * 10
PRICES = [1.5, None, 2.5, 3.5] * 10
CLICKS = [0, 1, 1, 0] * 10
SCHEMA = LogSchema(
    label="click",
    columns=(Column(name="user"), Column(name="item"), Column(name="price", kind="numeric")),
)


def polars_frame():
    return pl.DataFrame({"user": USERS, "item": ITEMS, "price": PRICES, "click": CLICKS})


def expected():
    return rb.Dataset.from_frame(polars_frame(), schema=SCHEMA)


def pandas_frames():
    import pandas as pd

    base = pd.DataFrame({"price": np.array(PRICES, float), "click": CLICKS})
    users = {
        "object": pd.Series(USERS, dtype=object),
        "string": pd.Series(USERS, dtype="string"),
        "str": pd.Series(USERS, dtype="str"),
        "category": pd.Series(USERS, dtype="category"),
    }
    items = {
        "floats": pd.Series(ITEMS, dtype=float),
        "Int64": pd.Series(ITEMS, dtype="Int64"),
        "category": pd.Series(ITEMS, dtype="Int64").astype("category"),
        "object": pd.Series([None if i is None else str(i) for i in ITEMS], dtype=object),
    }
    for user in users.values():
        yield base.assign(user=user, item=items["floats"])
    for item in items.values():
        yield base.assign(user=users["object"], item=item)
    yield base.assign(user=users["object"], item=items["Int64"], click=np.array(CLICKS, bool))
    yield base.assign(user=users["object"], item=items["Int64"]).set_index(np.arange(40) * 3 + 7)


def same(first, second):
    assert np.array_equal(first.ids, second.ids)
    assert np.array_equal(first.numeric, second.numeric)
    assert np.array_equal(first.label, second.label)
    assert first.schema == second.schema


@needs_pandas
@pytest.mark.parametrize("number", range(10))
def test_every_pandas_type_gives_the_ids_of_polars(number):
    frame = list(pandas_frames())[number]
    same(rb.Dataset.from_frame(frame, schema=SCHEMA), expected())


@needs_pandas
def test_there_are_as_many_pandas_frames_as_are_tried():
    assert len(list(pandas_frames())) == 10


def test_whole_floats_are_the_texts_of_whole_numbers():
    decoded = encoder_of(expected()).decode(expected().ids.numpy())
    assert set(decoded["item"].to_list()) == {"1", "2", "3", None}


@pytest.mark.parametrize(
    "frame",
    [
        polars_frame(),
        polars_frame().lazy(),
        polars_frame().to_dict(as_series=False),
        {
            "user": np.array(USERS, dtype=object),
            "item": np.array(ITEMS, dtype=float),
            "price": polars_frame()["price"],
            "click": np.array(CLICKS, np.int8),
        },
    ],
    ids=["frame", "lazy", "lists", "arrays"],
)
def test_polars_frames_and_mappings_of_arrays(frame):
    same(rb.Dataset.from_frame(frame, schema=SCHEMA), expected())


def test_numpy_texts_and_matrices():
    columns = {
        "user": np.array(["a", "b"] * 20),
        "tags": np.arange(80).reshape(40, 2) % 3,
        "click": np.array([True, False] * 20),
    }
    schema = LogSchema(
        label="click",
        columns=(Column(name="user"), Column(name="tags", kind="multi", max_length=2)),
        split=Split(kind="order"),
    )
    data = rb.Dataset.from_frame(columns, schema=schema)
    decoded = encoder_of(data).decode(data.ids.numpy())
    assert decoded["tags"].to_list() == columns["tags"].astype(str).tolist()
    assert decoded["user"].to_list() == columns["user"].tolist()
    assert data.label.tolist() == [1.0, 0.0] * 20


def test_without_a_schema_it_is_guessed_and_it_trains():
    data = rb.Dataset.from_frame(polars_frame(), label="click")
    assert [len(part) for part in data.splits] == [32, 4, 4]
    assert len(data) == 40
    counts = data.splits.train.counts()
    for field in data.schema.table_fields:
        ids = data.splits.train.ids[:, data.schema.slots[field.name]].reshape(-1)
        assert torch.equal(counts[field.name], torch.bincount(ids, minlength=field.rows))
    model = FM(data.schema, dim=2)
    rb.fit(model, data.splits.train, data.splits.valid, epochs=1, progress=False)


def test_a_split_can_be_given_with_or_without_a_schema():
    split = Split(kind="order", shares=(0.5, 0.25, 0.25))
    for options in ({"label": "click"}, {"schema": SCHEMA}):
        data = rb.Dataset.from_frame(polars_frame(), split=split, **options)
        assert [len(part) for part in data.splits] == [20, 10, 10]
        assert data.label.tolist() == CLICKS


def test_rows_like_those_of_another_data_set():
    data = expected()
    new = pl.DataFrame({"price": [2.5, None], "item": ["2", "77"], "user": ["bob", "zoe"]})
    found = rb.Dataset.from_frame(new, like=data)
    assert encoder_of(data).decode(found.ids.numpy()).rows() == [("bob", "2"), ("<unknown>",) * 2]
    assert found.numeric[1].tolist() == [0.0]
    assert found.schema == data.schema
    with_label = rb.Dataset.from_frame(new.with_columns(click=pl.Series([1, 0])), like=data)
    assert with_label.label.tolist() == [1.0, 0.0]
    order = rb.Dataset.from_frame(polars_frame(), schema=SCHEMA, split=Split(kind="order"))
    same(rb.Dataset.from_frame(polars_frame(), like=order), order)
    with pytest.raises(DataError, match="has no column 'user'"):
        rb.Dataset.from_frame(new.drop("user"), like=data)
    with pytest.raises(SettingsError, match="have its schema and are not split"):
        rb.Dataset.from_frame(new, like=data, schema=SCHEMA)
    with pytest.raises(DataError, match="was not encoded from raw rows"):
        rb.Dataset.from_frame(new, like=rb.Dataset.from_columns({"a": [1]}, label=[0]))


def test_a_bad_row_stops_with_its_number():
    frame = polars_frame().with_columns(click=pl.Series([0, 1, 2, 3] * 10))
    with pytest.raises(
        DataError, match=r"row 3: the label is not 0 or 1 \(got '2'\).* 20 malformed rows"
    ):
        rb.Dataset.from_frame(frame, schema=SCHEMA)


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (polars_frame(), {}, "which column is the label"),
        (polars_frame(), {"label": "clack"}, "clack"),
        (polars_frame().head(0), {"schema": SCHEMA}, "the frame has no rows"),
        (polars_frame().drop("user"), {"schema": SCHEMA}, "the frame has no column 'user'"),
        (
            [1, 2, 3],
            {"label": "click"},
            "expected a Polars or pandas frame, or a mapping of arrays",
        ),
        (np.zeros((3, 2)), {"label": "click"}, "got ndarray"),
        ({"user": [1, 2], "click": [0]}, {"label": "click"}, "the frame cannot be read"),
        (polars_frame().head(3), {"schema": SCHEMA}, "the split leaves no row for"),
    ],
)
def test_what_is_no_log(frame, options, message):
    with pytest.raises((DataError, SettingsError), match=message):
        rb.Dataset.from_frame(frame, **options)


@needs_pandas
def test_a_pandas_column_of_mixed_types_is_refused():
    import pandas as pd

    frame = pd.DataFrame({"user": pd.Series([1, "a", None], dtype=object)})
    with pytest.raises(DataError, match="the frame cannot be read"):
        as_polars(frame)


@needs_pandas
def test_levels_of_pandas_are_refused():
    import pandas as pd

    frame = pd.DataFrame({("a", "x"): ["u", "v"] * 9, ("a", "y"): [0, 1] * 9})
    with pytest.raises(
        DataError, match=r"a MultiIndex as its columns; make it plain: frame\.columns"
    ):
        rb.Dataset.from_frame(frame, label=("a", "y"))
    frame.columns = frame.columns.map("_".join)
    indexed = frame.set_index(["a_x", "a_y"])
    with pytest.raises(DataError, match=r"a MultiIndex as its index; .* frame.reset_index\(\)"):
        rb.Dataset.from_frame(indexed, label="a_y")
    assert len(rb.Dataset.from_frame(frame, label="a_y")) == 18
    with pytest.raises(SettingsError, match="label must be of type str, got 1"):
        rb.Dataset.from_frame(frame, label=1)
