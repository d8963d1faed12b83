"""Any table of texts, encoded and decoded, comes back; an encoder outlives the log it was made of."""

import csv
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit import Dataset  # noqa: E402  # after the check that Polars is there
from rarebit.data.log_schema import (  # noqa: E402  # the same
    Column,
    LogSchema,
    Split,
    TextFormat,  # the same
)
from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # the same
from rarebit.data.raw.encode import split_rows  # noqa: E402  # the same
from rarebit.data.raw.encoder import (  # noqa: E402  # the same
    LogEncoder,
    encoder_of,  # the same
    unknown_values,
)
from rarebit.data.raw.readers import read_frame  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None,
    reason="capability: package pyarrow: it is not installed",
)
ODD = ["", "0", " 0 ", '"', '""', "a,b", ",", "\n", "\r", "\r\n", "a\nb", "\\", "'", "\t", "\x00"]
ODD += ["\x7f", "\ufeff", "日本", "e\u0301", "é", "NULL", "nan", "None", "-1", "1.0", "<unknown>"]
TEXT = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from("ab"),
)


@st.composite
def tables(draw):
    """A log of two columns of texts and a label; ten rows or more, so that every part has some."""
    rows = draw(st.lists(st.tuples(TEXT, TEXT, st.integers(0, 1)), min_size=10, max_size=30))
    return [list(column) for column in zip(*rows, strict=True)]


def write_csv(path, left, right, label):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["left", "right", "click"])
        writer.writerows(zip(left, right, label, strict=True))
    return path


def in_folder_order(values, split):
    parts = split_rows(split, len(values), np.empty(0))
    return [values[row] for row in np.argsort(parts, kind="stable")]


@pytest.mark.slow
@needs_pyarrow
@settings(max_examples=60)
@given(table=tables(), min_count=st.integers(1, 2), seed=st.integers(0, 5))
def test_any_table_comes_back_but_for_what_was_folded_into_unknown(table, min_count, seed):
    left, right, label = table
    split = Split(seed=seed)
    schema = LogSchema(
        label="click",
        columns=(Column(name="left", min_count=min_count), Column(name="right")),
        split=split,
    )
    frame = pl.DataFrame({"left": left, "right": right, "click": label})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        frame.write_parquet(folder / "log.parquet")
        plain = TextFormat()
        logs = [(write_csv(folder / "log.csv", *table), plain), (folder / "log.parquet", None)]
        found = [
            prepare(log, folder / f"out{number}", schema=schema, format=written)
            for number, (log, written) in enumerate(logs)
        ]
        found.append(Dataset.from_frame(frame, schema=schema))
        encoders = [encoder_of(data) for data in found]
        statistics = json.loads((folder / "out0" / "manifest.json").read_text())["statistics"]
    for data in found[1:]:
        assert np.array_equal(data.ids, found[0].ids)
        assert np.array_equal(data.label, found[0].label)
    ids = found[0].ids.numpy()
    sizes = [len(part) for part in found[0].splits]
    assert found[0].label.tolist() == in_folder_order(label, split)
    for slot, (name, values) in enumerate((("left", left), ("right", right))):
        expected = [value or None for value in in_folder_order(values, split)]
        is_unknown = ids[:, slot] == 1
        for encoder in encoders:
            decoded = encoder.decode(ids)[name].to_list()
            for raw, back, folded in zip(expected, decoded, is_unknown, strict=True):
                assert back == ("<unknown>" if folded else raw)
        told = next(field for field in statistics["fields"] if field["name"] == name)
        shares = [part.mean() for part in np.split(is_unknown, np.cumsum(sizes)[:2])]
        assert told["unknown_shares"] == pytest.approx(shares)
        assert told["distinct"] == len({value for value in expected if value})


LOG = {
    "user": ["ann", "bob", "ann", None, "ann", "bob"] * 5,
    "friend": ["bob", "ann", "eve", "ann", None, "ann"] * 5,
    "ad": ["x", "y", "z", "x", "x", None] * 5,
    "tags": ["a b", "b", None, "c a b", "a", "a a"] * 5,
    "price": [1.0, 2.0, None, 4.0, 5.0, 60.0] * 5,
    "age": [18, None, 30, 40, 50, 60] * 5,
    "views": [0, 1, 2, 3, 100, None] * 5,
    "click": [0, 1, 1, 0, 1, 0] * 5,
}
SCHEMA = LogSchema(
    label="click",
    columns=(
        Column(name="user", vocabulary="people"),
        Column(name="price", kind="numeric"),
        Column(name="friend", vocabulary="people"),
        Column(name="age", kind="numeric", treatment="quantile", bins=3),
        Column(name="ad", buckets=4),
        Column(name="tags", kind="multi", separator=" ", max_length=2),
        Column(name="views", kind="numeric", treatment="log_square"),
    ),
    split=Split(kind="order"),
)


def encode(encoder, frame, **options):
    [chunk] = read_frame(frame, None)
    return encoder.encode(chunk, BadRows(), **options)


def test_raw_rows_get_the_ids_they_had_in_the_log():
    data = Dataset.from_frame(LOG, schema=SCHEMA)
    again = encode(encoder_of(data), pl.DataFrame(LOG), with_label=True)
    assert np.array_equal(again.ids, data.ids)
    assert np.array_equal(again.numeric, data.numeric)
    assert np.array_equal(again.label, data.label)
    assert again.kept is None


def test_new_values_are_unknown_and_counted():
    encoder = encoder_of(Dataset.from_frame(LOG, schema=SCHEMA))
    new = pl.DataFrame(
        {
            "user": ["zoe", "ann"],
            "friend": ["", "zoe"],
            "ad": ["new", ""],
            "tags": ["q a", "q"],
            "price": ["", "1"],
            "age": [-1000, 1000],
            "views": [10**6, None],
        }
    )
    found = encode(encoder, new)
    assert unknown_values(encoder.fields, found.ids) == {
        "user": 1,
        "friend": 1,
        "age": 0,
        "ad": 0,
        "tags": 2,
        "views": 1,
    }
    assert found.numeric[0].tolist() == [0.0]
    assert found.label.size == 0
    decoded = encoder.decode(found.ids).to_dicts()
    assert [row["tags"] for row in decoded] == [["<unknown>", "a"], ["<unknown>"]]
    assert [row["user"] for row in decoded] == ["<unknown>", "ann"]
    assert [row["age"] for row in decoded] == ["0", "2"]
    assert [row["views"] for row in decoded] == ["<unknown>", None]


def test_rows_without_a_label_or_numbers_have_nothing_to_check():
    schema = LogSchema(label="click", columns=(Column(name="user"),))
    encoder = encoder_of(Dataset.from_frame(LOG, schema=schema))
    assert encode(encoder, pl.DataFrame({"user": ["ann", None]})).ids.tolist() == [[3], [2]]


def test_bad_rows_are_left_out_and_handed_over():
    encoder = encoder_of(Dataset.from_frame(LOG, schema=SCHEMA))
    frame = pl.DataFrame(LOG).with_columns(price=pl.Series(["1", "?", "3"] * 10))
    [chunk] = read_frame(frame, None)
    bad = BadRows("aside")
    found = encoder.encode(chunk, bad)
    assert found.ids.shape[0] == 20
    assert found.kept.tolist() == [True, False, True] * 10
    assert bad.reasons == {"price is not a number": 10}


def test_saved_and_opened_it_is_the_same(tmp_path):
    encoder = encoder_of(Dataset.from_frame(LOG, schema=SCHEMA))
    encoder.save(tmp_path / "encoder")
    opened = LogEncoder.open(tmp_path / "encoder")
    assert opened.schema == encoder.schema == SCHEMA
    assert (opened.scales, opened.edges) == (encoder.scales, encoder.edges)
    assert opened.fields == encoder.fields
    frame = pl.DataFrame(LOG)
    assert np.array_equal(encode(opened, frame).ids, encode(encoder, frame).ids)
    assert encoder.columns_read(with_label=False) == [c.name for c in SCHEMA.columns]


def test_marks_tell_fields_of_other_values_apart():
    marks = encoder_of(Dataset.from_frame(LOG, schema=SCHEMA)).fields
    other = dict(LOG, user=["ann", "bobby"] * 15, price=[1.0, 2.0] * 15)
    others = encoder_of(Dataset.from_frame(other, schema=SCHEMA)).fields
    changed = [f.name for f in marks.fields if others[f.name].vocabulary != f.vocabulary]
    assert changed == ["user", "price", "friend"]


@pytest.mark.parametrize("file", ["encoder.json", "values.parquet"])
@pytest.mark.parametrize("damage", ["gone", "empty", "garbage"])
def test_a_damaged_encoder_is_a_data_error(tmp_path, file, damage):
    encoder_of(Dataset.from_frame(LOG, schema=SCHEMA)).save(tmp_path / "encoder")
    path = tmp_path / "encoder" / file
    path.unlink()
    if damage != "gone":
        path.write_bytes(b"" if damage == "empty" else b"[1, 2]")
    with pytest.raises(DataError, match=r"holds no vocabulary|is damaged"):
        LogEncoder.open(tmp_path / "encoder")


def test_values_of_another_log_are_noticed(tmp_path):
    encoder_of(Dataset.from_frame(LOG, schema=SCHEMA)).save(tmp_path / "encoder")
    path = tmp_path / "encoder" / "values.parquet"
    pl.read_parquet(path).reverse().write_parquet(path)
    with pytest.raises(DataError, match=r"the vocabulary 'people' in .* is damaged"):
        LogEncoder.open(tmp_path / "encoder")


@pytest.mark.parametrize(("version", "words"), [(3, "reads up to 2: upgrade it"), ("x", "damaged")])
def test_a_newer_encoder_is_refused_by_name(tmp_path, version, words):
    encoder_of(Dataset.from_frame(LOG, schema=SCHEMA)).save(tmp_path / "encoder")
    path = tmp_path / "encoder" / "encoder.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(DataError, match=words):
        LogEncoder.open(tmp_path / "encoder")


def test_a_file_holds_all_vocabularies_where_format_1_had_one_for_each(tmp_path):
    encoder = encoder_of(Dataset.from_frame(LOG, schema=SCHEMA))
    folder = tmp_path / "encoder"
    encoder.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["encoder.json", "values.parquet"]
    path = folder / "encoder.json"
    files = {name: f"values-{number:03}.parquet" for number, name in enumerate(encoder.values)}
    for name, file in files.items():
        pl.DataFrame({"value": encoder.values[name]}).write_parquet(folder / file)
    (folder / "values.parquet").unlink()
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"format": 1, "values": files, "day": None})
    )
    assert LogEncoder.open(folder).fields == encoder.fields


@needs_pyarrow
def test_the_encoder_of_a_folder_is_read_when_it_is_asked_for(tmp_path):
    pl.DataFrame(LOG).write_parquet(tmp_path / "log.parquet")
    data = prepare(tmp_path / "log.parquet", tmp_path / "out", schema=SCHEMA)
    decoded = encoder_of(data).decode(data.ids.numpy())
    in_training = decoded.head(24)
    assert in_training["user"].to_list() == LOG["user"][:24]
    assert in_training["tags"].to_list() == [(row or "").split()[:2] for row in LOG["tags"][:24]]
    data.schema.encoder.save(tmp_path / "copy")
    assert LogEncoder.open(tmp_path / "copy").schema == SCHEMA


def test_ids_without_raw_values_have_no_encoder():
    with pytest.raises(DataError, match="was not encoded from raw rows"):
        encoder_of(Dataset.from_columns({"user": [0, 1]}, label=[0, 1]))
