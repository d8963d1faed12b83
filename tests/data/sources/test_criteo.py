"""Criteo raw and Criteo-80k: hand-made files of their formats, and the facts of the real ones."""

import gzip

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import polars as pl
from capabilities import needs_real_data, real_data

from rarebit.data.raw.chunks import BadRows
from rarebit.data.sources import find_source
from rarebit.data.sources.criteo import NAMES
from rarebit.errors import DataError

FIRST = ["0", "1", "-2", "", *["5"] * 10, "68fd1e64", "", *["80e26c9b"] * 24]
SECOND = ["1", *[""] * 13, *["25c83c98"] * 25, 'a"b']
TEXT = "".join("\t".join(row) + "\n" for row in (FIRST, SECOND))


def test_rows_are_what_the_file_says(tmp_path, read):
    (tmp_path / "train.txt").write_text(TEXT, "utf-8")
    (tmp_path / "test.txt").write_text("no label here\n", "utf-8")
    reading = read("criteo", tmp_path)
    assert reading.frame.columns == list(find_source("criteo").schema().columns_read)
    assert [str(value) for value in reading.column("label")] == ["0", "1"]
    numbers = [1, -2, None, *[5] * 10]
    assert reading.rows[0][1:] == (*numbers, "68fd1e64", None, *["80e26c9b"] * 24)
    assert reading.rows[1][1:] == (*[None] * 13, *["25c83c98"] * 25, 'a"b')
    assert reading.lines() == [1, 2]


@pytest.mark.parametrize("name", ["train.txt.gz", "dac_sample.txt", "criteo_train_part.txt"])
def test_other_names_are_found(name, tmp_path, read):
    content = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "readme.txt").write_text("about\n", "utf-8")
    assert len(read("criteo", tmp_path).rows) == 2
    assert len(read("criteo", tmp_path / name).rows) == 2


def test_a_line_of_39_values_is_bad(tmp_path, read):
    short = "\t".join(FIRST[:-1]) + "\n"
    (tmp_path / "train.txt").write_text(TEXT + short + TEXT, "utf-8")
    reading = read("criteo", tmp_path, "aside")
    assert reading.lines() == [1, 2, 4, 5]
    assert (reading.bad.count, reading.bad.first[0].number) == (1, 3)


def test_the_papers_protocols_are_theirs():
    source = find_source("criteo")
    for name in ("pep", "me", "clean"):
        schema = source.schema(name)
        assert len(schema.id_columns) == 39
        assert {column.min_count for column in schema.columns} == {10}
        assert (schema.split.kind, schema.split.shares) == ("random", (0.8, 0.1, 0.1))
    mlet = source.schema("mlet")
    assert len(mlet.id_columns) == 26
    assert mlet.split.kind == "order"
    assert mlet.split.shares == pytest.approx((6 / 7, 1 / 14, 1 / 14))


def test_the_hashed_part_is_read_as_it_is(tmp_path, read):
    values = {name: [i, None] for i, name in enumerate(NAMES[1:])}
    frame = pl.DataFrame({"label": [1, 0], **values}, schema=dict.fromkeys(NAMES, pl.Int32))
    frame.write_parquet(tmp_path / "criteo_dac80k_hashed.parquet")
    assert read("criteo-80k", tmp_path).frame.equals(frame)


def test_a_hashed_part_without_a_column_is_refused(tmp_path):
    path = tmp_path / "criteo_dac80k_hashed.parquet"
    pl.DataFrame({name: [1] for name in NAMES if name != "C7"}).write_parquet(path)
    with pytest.raises(DataError, match="C7"):
        list(find_source("criteo-80k").rows(tmp_path, BadRows()))


@needs_real_data("criteo_train_first10000.txt")
def test_the_first_rows_of_the_real_set(read):
    reading = read("criteo", real_data("criteo_train_first10000.txt"))
    assert reading.frame.height == 10_000
    assert reading.frame["label"].cast(pl.Int64).sum() == 2182
    assert reading.distinct("I1", "I5", "C1", "C3", "C26") == [76, 5219, 175, 5520, 1938]
    assert reading.bad.count == 0


@needs_real_data("criteo_dac80k_hashed.parquet")
def test_the_real_hashed_part(read):
    reading = read("criteo-80k", real_data("criteo_dac80k_hashed.parquet").parent)
    assert reading.frame.height == 80_000
    assert reading.frame["label"].mean() == pytest.approx(0.2245, abs=5e-5)
    categories = [name for name in NAMES if name.startswith("C")]
    assert sum(reading.distinct(*categories)) == 200_012
    counts = reading.frame["C3"].drop_nulls().value_counts()["count"]
    assert (len(counts), (counts == 1).sum()) == (35_103, 29_726)
