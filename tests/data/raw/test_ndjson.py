"""NDJSON logs: one JSON object on each line. Every line is a row, or a malformed one with its place."""

import gzip
import json

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # the same
from rarebit.data.raw.readers import read_raw  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

ROWS = [
    {"click": n % 2, "user": f"u{n % 7}", "tags": ["a", "b"][: n % 3], "price": n / 4}
    for n in range(60)
]


def text_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(path, columns=None, **options):
    bad = BadRows("aside")
    chunks = list(read_raw(path, columns, bad, **options))
    return chunks, bad


def test_the_same_rows_give_the_same_log_as_parquet(tmp_path):
    (tmp_path / "log.ndjson").write_text(text_of(ROWS))
    pl.DataFrame(ROWS).write_parquet(tmp_path / "log.parquet")
    made = [
        prepare(tmp_path / f"log.{kind}", tmp_path / kind, label="click")
        for kind in ("ndjson", "parquet")
    ]
    assert made[0].schema == made[1].schema
    assert {field.name: field.kind for field in made[0].schema.fields} == {
        "user": "categorical", "tags": "multi", "price": "numeric"
    }  # fmt: skip
    for name in ("ids", "numeric", "label"):
        assert (getattr(made[0], name) == getattr(made[1], name)).all()


@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_blocks_of_any_size_give_the_same_rows(tmp_path, block):
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(text_of(ROWS).encode()))
    chunks, bad = read(path, ["user", "click"], block_bytes=block)
    assert bad.count == 0
    found = pl.concat([chunk.frame for chunk in chunks])
    assert found.columns == ["user", "click"]
    assert found["user"].to_list() == [row["user"] for row in ROWS]
    assert np.concatenate([chunk.numbers() for chunk in chunks]).tolist() == list(range(1, 61))


def test_malformed_lines_are_reported_with_their_place(tmp_path):
    path = tmp_path / "log.ndjson"
    lines = ['{"a": 1}', "nope", "", '{"a": 2}', "[3]", "5", '{"a": 1e999}', '{"a": 4']
    path.write_text("\n".join(lines) + "\n")
    bad = BadRows()
    [chunk] = read_raw(path, None, bad)
    assert chunk.frame["a"].to_list() == [1, 2]
    assert chunk.numbers().tolist() == [1, 4]
    assert chunk.locate(1).text == '{"a": 2}'
    assert bad.reasons == {
        "not valid JSON": 2, "no JSON object": 2, "a number that is too large": 1
    }  # fmt: skip
    assert (bad.first[0].number, bad.first[0].text) == (2, "nope")


def test_a_key_that_a_line_lacks_is_missing(tmp_path):
    path = tmp_path / "log.ndjson"
    path.write_text('{"a": 1, "b": "x"}\n{"a": 2}\n{"a": 3, "b": ""}\n')
    chunks, _ = read(path, ["b", "a"], block_bytes=1)
    assert chunks[0].frame.row(0) == ("x", 1)
    found = pl.concat([chunk.frame for chunk in chunks], how="vertical_relaxed")
    assert found["b"].to_list() == ["x", None, None]
    with pytest.raises(DataError, match="has no column 'c'"):
        read(path, ["c"])


def test_a_misspelt_column_is_refused_after_a_malformed_line_too(tmp_path):
    path = tmp_path / "log.ndjson"
    path.write_text('nope\n{"a": 1}\n')
    with pytest.raises(DataError, match="has no column 'c'"):
        read(path, ["c"])


def test_large_ids_stay_whole_numbers(tmp_path):
    path = tmp_path / "log.ndjson"
    path.write_text('{"id": 9007199254740993, "click": 1}\n{"id": 9007199254740992, "click": 0}\n')
    [chunk], _ = read(path)
    assert chunk.frame["id"].to_list() == [9007199254740993, 9007199254740992]


def test_lines_that_do_not_agree_on_a_column_are_refused(tmp_path):
    path = tmp_path / "log.ndjson"
    path.write_text('{"a": 1}\n{"a": {"b": 1}}\n')
    with pytest.raises(DataError, match=r"lines 1 to 2 of .* do not agree"):
        read(path)


def test_a_cut_off_file_is_refused(tmp_path):
    path = tmp_path / "log.ndjson.gz"
    path.write_bytes(gzip.compress(text_of(ROWS * 500).encode(), mtime=0)[:-200])
    with pytest.raises(DataError, match="cut off or damaged"):
        read(path, block_bytes=1 << 10)


def test_an_array_of_objects_names_what_is_read(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match=r"\.ndjson, \.jsonl"):
        prepare(tmp_path / "log.json", tmp_path / "out", label="click")
