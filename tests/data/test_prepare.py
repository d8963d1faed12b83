"""A log to a folder by one call: every row is encoded or set aside, and a kill leaves nothing finished."""

import bz2
import gzip
import importlib.util
import json
import lzma
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import slow_after

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit import Dataset  # noqa: E402  # after the check that Polars is there
from rarebit.data.log_schema import (  # noqa: E402  # the same
    Column,
    LogSchema,
    Split,
    TextFormat,  # the same
)
from rarebit.data.prepare import infer_log, prepare  # noqa: E402  # the same
from rarebit.data.prepared import PreparedFolder  # noqa: E402  # the same
from rarebit.data.raw.encoder import encoder_of  # noqa: E402  # the same
from rarebit.errors import DataError, SettingsError  # noqa: E402  # the same

SRC = Path(__file__).parents[2] / "src"
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None,
    reason="capability: package pyarrow: it is not installed",
)
SCHEMA = LogSchema(
    label="click",
    columns=(
        Column(name="user"),
        Column(name="price", kind="numeric"),
        Column(name="views", kind="numeric", treatment="log_square"),
        Column(name="t", kind="time"),
    ),
    split=Split(kind="time", column="t"),
)
REASONS = {
    "u,1,1,7,2024-01-01": "the label is not 0 or 1 (got '7')",
    "u,1,1,,2024-01-01": "the label is not 0 or 1 (got nothing)",
    "u,cheap,1,1,2024-01-01": "price is not a number (got 'cheap')",
    "u,NaN,1,1,2024-01-01": "price is not a number (got 'NaN')",
    "u,inf,1,1,2024-01-01": "price is not a number (got 'inf')",
    "u,1,-inf,1,2024-01-01": "views is not a number (got '-inf')",
    "u,1,many,1,2024-01-01": "views is not a number (got 'many')",
    "u,1,1,1,soon": "t is not a time (got 'soon')",
    "u,1,1,1,": "t is not a time (got nothing)",
}
TOO_FEW, TOO_MANY = "u,1,1", "u,1,1,1,2024-01-01,more"


def good(row):
    return f"u{row % 7},{row / 4},{row},{row % 2},2024-01-{1 + row % 28:02}"


def write_log(path, bad, rows=60):
    """A log with a bad line after every third good one; return the numbers of the bad lines."""
    lines, places = ["user,price,views,click,t"], {}
    waiting = list(bad)
    for row in range(rows):
        lines.append(good(row))
        if row % 3 == 2 and waiting:
            lines.append(waiting.pop(0))
            places[len(lines)] = lines[-1]
    path.write_text("\n".join(lines) + "\n")
    return places


@pytest.mark.parametrize("integers_fit", [False, True])
def test_every_row_is_encoded_or_set_aside(tmp_path, integers_fit):
    bad = [line for line in REASONS if not integers_fit or "many" not in line]
    bad += [TOO_FEW, TOO_MANY]
    places = write_log(tmp_path / "log.csv", bad)
    data = prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, bad_rows="aside")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(data) == sum(manifest["rows"]) == 60
    assert sum(manifest["bad_rows"].values()) == manifest["statistics"]["bad_rows"] == len(bad)
    assert manifest["rows_read"] == 60 + len(bad)
    aside = [
        json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()
    ]
    assert {row["line"]: row["text"] for row in aside} == places
    assert len(aside) == len(bad)
    for row in aside:
        assert row["file"] == "log.csv"
        if row["text"] in REASONS:
            assert row["reason"] == REASONS[row["text"]]
        else:
            assert "columns" in row["reason"]
    clean = tmp_path / "clean.csv"
    write_log(clean, [])
    expected = prepare(clean, tmp_path / "expected", schema=SCHEMA)
    assert np.array_equal(data.ids, expected.ids)
    assert np.array_equal(data.numeric, expected.numeric)
    assert np.array_equal(data.label, expected.label)


def stopped(tmp_path, bad):
    """What is said of a log with these bad lines, the first of which is line 5."""
    write_log(tmp_path / "log.csv", bad)
    with pytest.raises(DataError) as error:
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    message = str(error.value)
    assert f"{len(bad)} malformed rows in total: " in message
    assert "3 x price is not a number" in message
    return message


@pytest.mark.parametrize("first", REASONS)
def test_stopping_names_the_first_bad_value_and_counts_the_rest(tmp_path, first):
    message = stopped(tmp_path, [first] + [line for line in REASONS if line != first])
    assert message.startswith(
        f"log.csv, line 5: {REASONS[first]}: {first!r}. 9 malformed rows in total"
    )


@pytest.mark.parametrize("first", [TOO_FEW, TOO_MANY])
def test_stopping_names_the_first_line_of_wrong_columns_and_counts_the_rest(tmp_path, first):
    message = stopped(tmp_path, [first, *REASONS])
    assert message.startswith("log.csv, line 5: wrong number of columns")
    assert f"{first!r}. 10 malformed rows in total" in message


def test_stopping_names_a_bad_value_that_stands_before_a_line_of_wrong_columns(tmp_path):
    message = stopped(tmp_path, [*REASONS, TOO_FEW])
    assert message.startswith("log.csv, line 5: the label is not 0 or 1 (got '7')")


@pytest.mark.parametrize("label", ["01", " 1", "+1", "-0"])
def test_a_label_is_the_same_beside_integers_and_beside_text(tmp_path, label):
    schema = LogSchema(
        label="click", columns=(Column(name="user"),), split=Split(kind="order"), unknown_share=0.0
    )
    for number, other in enumerate(("0", "0.0")):
        rows = f"a,{label}\nb,{other}\n" * 10
        (tmp_path / "log.csv").write_text(f"user,click\n{rows}")
        data = prepare(tmp_path / "log.csv", tmp_path / f"{number}", schema=schema)
        assert data.label.tolist() == [float(label), 0.0] * 10


def test_a_good_log_has_no_file_of_bad_rows(tmp_path):
    write_log(tmp_path / "log.csv", [])
    prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, bad_rows="aside")
    assert not (tmp_path / "out" / "bad_rows.jsonl").exists()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["rows_read"], manifest["bad_rows"]) == (60, {})
    assert manifest["origin"] == "log.csv"


def test_nothing_but_bad_rows(tmp_path):
    (tmp_path / "log.csv").write_text("user,price,views,click,t\n" + "u,1,1,5\n" * 3)
    with pytest.raises(DataError, match=r"no row of log.csv could be read: 3 x wrong number"):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, bad_rows="aside")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "log.csv").write_text("user,price,click,t\nu,1,0,2024-01-01\n")
    with pytest.raises(DataError, match="has no column 'views'"):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA)


RANDOM = replace(SCHEMA, split=Split(seed=3))
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@needs_pyarrow
def test_the_file_format_does_not_matter(tmp_path):
    write_log(tmp_path / "log.csv", [], rows=200)
    text = (tmp_path / "log.csv").read_bytes()
    logs = [tmp_path / "log.csv", tmp_path / "log.tsv", tmp_path / "log.parquet"]
    logs[1].write_bytes(text.replace(b",", b"\t"))
    pl.read_csv(logs[0]).write_parquet(logs[2], row_group_size=70)
    for suffix, compress in PACKED.items():
        logs.append(tmp_path / f"log.csv{suffix}")
        logs[-1].write_bytes(compress(text))
    found = [
        prepare(log, tmp_path / f"out{number}", schema=RANDOM) for number, log in enumerate(logs)
    ]
    for data in found:
        assert [len(part) for part in data.splits] == [160, 20, 20]
        assert np.array_equal(data.ids, found[0].ids)
        assert np.array_equal(data.numeric, found[0].numeric)
        assert np.array_equal(data.label, found[0].label)
    other = prepare(logs[0], tmp_path / "other", schema=RANDOM, split=Split(seed=4))
    assert not np.array_equal(other.numeric, found[0].numeric)


def test_files_that_are_split_already(tmp_path):
    files = {}
    for number, part in enumerate(("test", "train", "valid")):
        files[part] = tmp_path / f"{part}.csv"
        write_log(files[part], [], rows=10 * (number + 1))
    data = prepare(files, tmp_path / "out", schema=SCHEMA)
    assert [len(part) for part in data.splits] == [20, 30, 10]
    users = encoder_of(data).decode(data.ids.numpy())["user"].to_list()
    expected = [f"u{row % 7}" for rows in (20, 30, 10) for row in range(rows)]
    assert users == expected
    only_train = prepare({"train": files["train"]}, tmp_path / "one", label="click")
    assert [len(part) for part in only_train.splits] == [20, 0, 0]
    with pytest.raises(SettingsError, match="needs one for train"):
        prepare({"test": files["test"]}, tmp_path / "two", schema=SCHEMA)
    with pytest.raises(SettingsError, match="two files for valid, the second 'dev'"):
        prepare(files | {"dev": files["test"]}, tmp_path / "two", schema=SCHEMA)
    with pytest.raises(SettingsError, match="unknown part 'holdout'"):
        prepare(files | {"holdout": files["test"]}, tmp_path / "two", schema=SCHEMA)
    files["val"] = files.pop("valid")
    renamed = prepare(files, tmp_path / "renamed", schema=SCHEMA)
    assert [len(part) for part in renamed.splits] == [20, 30, 10]


def test_a_split_by_user_or_by_a_column(tmp_path):
    write_log(tmp_path / "log.csv", [], rows=280)
    by_user = Split(kind="user", column="user", shares=(0.5, 0.25, 0.25))
    data = prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, split=by_user)
    counted = [set(), set(), set()]
    frame = pl.read_csv(tmp_path / "log.csv")
    prices = {price: user for user, price in frame.select("user", "price").rows()}
    mean, std = encoder_of(data).scales["price"]
    for users, part in zip(counted, data.splits, strict=True):
        raw = np.round((part.numeric[:, 0].numpy() * std + mean) * 4) / 4
        users.update(prices[price] for price in raw.tolist())
    assert sorted(map(len, counted)) == [2, 2, 3] or sorted(map(len, counted)) == [1, 2, 4]
    assert len(set.union(*counted)) == sum(map(len, counted)) == 7
    lines = ["user,click,part"] + [f"u{n},{n % 2},{'test' if n < 3 else 'train'}" for n in range(9)]
    (tmp_path / "given.csv").write_text("\n".join(lines))
    schema = LogSchema(
        label="click", columns=(Column(name="user"),), split=Split(kind="given", column="part")
    )
    given = prepare(tmp_path / "given.csv", tmp_path / "given", schema=schema)
    assert [len(part) for part in given.splits] == [6, 0, 3]


def test_what_is_guessed_needs_a_label(tmp_path):
    write_log(tmp_path / "log.csv", [])
    with pytest.raises(SettingsError, match="which column is the label"):
        prepare(tmp_path / "log.csv", tmp_path / "out")
    guessed = infer_log(tmp_path / "log.csv", "click").schema
    data = prepare(tmp_path / "log.csv", tmp_path / "out", label="click")
    assert LogSchema.read(tmp_path / "out" / "schema.toml") == guessed
    assert "user" in data.schema.names


def test_a_file_without_a_header_of_any_name(tmp_path):
    (tmp_path / "log.dat").write_text("".join(f"u{row % 3};{row % 2}\n" for row in range(20)))
    plain = TextFormat(separator=";", header=False, names=("user", "click"))
    schema = LogSchema(label="click", columns=(Column(name="user"),))
    data = prepare(tmp_path / "log.dat", tmp_path / "out", schema=schema, format=plain)
    assert len(data) == 20


def test_progress_tells_every_stage(tmp_path):
    write_log(tmp_path / "log.csv", [])
    told = []
    prepare(
        tmp_path / "log.csv",
        tmp_path / "out",
        schema=SCHEMA,
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    size = (tmp_path / "log.csv").stat().st_size
    assert told[0] == ("reading", size, size)
    assert told[-1] == ("writing", 60, 60)
    assert [stage for stage, _, _ in told] == ["reading", "counting", "writing"]
    assert all(done <= total for _, done, total in told)


@pytest.mark.parametrize("when", ["reading", "counting", "writing"])
def test_ctrl_c_leaves_nothing(tmp_path, when):
    write_log(tmp_path / "log.csv", [])

    def interrupt(stage, done, total):
        if stage == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    before = prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA).ids.clone()
    with pytest.raises(KeyboardInterrupt):
        prepare(
            *(tmp_path / "log.csv", tmp_path / "out"),
            schema=RANDOM,
            overwrite=True,
            progress=interrupt,
        )
    assert np.array_equal(Dataset.open(tmp_path / "out", verify=True).ids, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "out"]


KILLED = """
import os, signal, sys
from rarebit.storage.files import Disk
from rarebit.data.raw import encode
from rarebit.data.prepare import prepare

log, out, when = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(stage, done, total):
    if stage == when:
        die()

if when == "manifest":
    encode.write_manifest = die
if when == "renaming":
    really = Disk.rename
    def rename(self, source, target):
        if source.name.endswith(".writing"):
            die()
        really(self, source, target)
    Disk.rename = rename
prepare(log, out, label="click", progress=progress)
"""
MOMENTS = ["writing", "reading", "counting", "manifest", "renaming"]


@pytest.mark.slow
@pytest.mark.parametrize("when", slow_after(MOMENTS))
def test_a_killed_run_leaves_nothing_that_opens(tmp_path, when):
    write_log(tmp_path / "log.csv", [])
    command = [sys.executable, "-c", KILLED, tmp_path / "log.csv", tmp_path / "out", when]
    environment = dict(os.environ, PYTHONPATH=str(SRC))
    done = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    left = [path.name for path in tmp_path.iterdir() if path.name != "log.csv"]
    assert len(left) == 1
    with pytest.raises(DataError, match="holds no prepared log"):
        Dataset.open(tmp_path / "out")
    if when in ("reading", "counting", "writing", "manifest"):
        with pytest.raises(DataError):
            Dataset.open(tmp_path / left[0])
    data = prepare(tmp_path / "log.csv", tmp_path / "out", label="click")
    assert len(data) == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "out"]


def rows_of(number, rows=60):
    return "".join(f"{(number + n) % 2}\t{n % 9}\t{n % 4}\tx{n % 5}\n" for n in range(rows))


def test_a_list_of_files_is_one_log(tmp_path):
    files = [tmp_path / "day1.tsv", tmp_path / "day2.tsv"]
    for number, file in enumerate(files):
        file.write_text("click\tuser\titem\tad\n" + rows_of(number))
    data = prepare(files, tmp_path / "out", label="click", split=Split(kind="order"))
    assert len(data) == 120
    assert PreparedFolder(tmp_path / "out").manifest["origin"] == "day1.tsv, day2.tsv"
    train = prepare(files[0], tmp_path / "one", label="click", split=Split(kind="order"))
    assert torch.equal(data.label[:60], train.label)


@pytest.mark.parametrize(
    ("log", "settings", "message"),
    [
        ([], {}, r"a log needs at least one file, got \[\]"),
        (5, {}, r"prepare reads files: .*; got int. Rows in memory: rb.Dataset.from_frame"),
        ([5], {}, "prepare reads files: .*; got int"),
        ({"train": ["a.csv"]}, {}, "prepare reads files: .*; got list"),
        ({"a": [1]}, {}, "unknown part 'a'"),
        ("a.csv", {"label": 0}, "label must be of type str, got 0"),
        ("a.csv", {"schema": {"a": 1}}, "schema must be of type LogSchema, got {'a': 1}"),
        ("a.csv", {"split": "time"}, "split must be of type Split, got 'time'"),
        ("a.csv", {"format": "csv"}, "format must be of type TextFormat, got 'csv'"),
    ],
)
def test_what_is_no_log_is_refused_by_name(tmp_path, log, settings, message):
    with pytest.raises(SettingsError, match=message):
        prepare(log, tmp_path / "out", **settings)


def test_malformed_rows_stop_or_are_skipped_and_nothing_else(tmp_path):
    (tmp_path / "log.tsv").write_text("click\tuser\titem\tad\n" + rows_of(0))
    with pytest.raises(SettingsError, match="bad_rows must be 'stop' or 'aside', got 'skip'"):
        prepare(tmp_path / "log.tsv", tmp_path / "out", label="click", bad_rows="skip")


@pytest.mark.parametrize("label", ["click", "0"])
def test_a_first_row_of_data_is_no_header(tmp_path, label):
    (tmp_path / "log.tsv").write_text("0\t8\t3\tx3\n" + rows_of(0))
    message = (
        r"the first row of .*log.tsv' looks like data \('0', '8', '3', 'x3'\), .* --names click,"
    )
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "log.tsv", tmp_path / "out", label=label)
    names = TextFormat(separator="\t", header=False, names=("click", "user", "item", "ad"))
    data = prepare(tmp_path / "log.tsv", tmp_path / "out", label="click", format=names)
    assert len(data) == 61


def test_numbers_may_be_the_names_of_columns(tmp_path):
    """Pandas calls columns 0, 1, 2; and a column for each item is called by its id."""
    (tmp_path / "log.tsv").write_text("0\t1\t2\t3\n" + rows_of(0))
    assert len(prepare(tmp_path / "log.tsv", tmp_path / "a", label="0")) == 60
    (tmp_path / "log.tsv").write_text("1193\t661\t914\t3408\n" + rows_of(0))
    assert len(prepare(tmp_path / "log.tsv", tmp_path / "b", label="1193")) == 60
