"""A log in parts, each counted and encoded by itself: the folder of one process, byte for byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from capabilities import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data import count_part, encode_part, merge_parts  # noqa: E402  # the same
from rarebit.data.log_schema import Column, LogSchema, Split, TextFormat  # noqa: E402  # the same
from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.data.prepared import PreparedFolder  # noqa: E402  # the same
from rarebit.data.raw import parts as parts_module  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows, Place, RawChunk  # noqa: E402  # the same
from rarebit.data.raw.encode import encode_log  # noqa: E402  # the same
from rarebit.data.raw.parts import (  # noqa: E402  # the same
    count_log,
    encode_counted,
    merge_counted,
)
from rarebit.errors import DataError, SettingsError  # noqa: E402  # the same

SRC = Path(rb.__file__).parents[1]
SPLITS = {
    "random": Split(seed=3),
    "order": Split(kind="order"),
    "time": Split(kind="time", column="t"),
    "user": Split(kind="user", column="user"),
    "given": Split(kind="given", column="part"),
    "files": Split(kind="given"),
}
COLUMNS = (
    Column(name="user"),
    Column(name="ad", vocabulary="ads"),
    Column(name="seen", kind="multi", separator="|", max_length=2, vocabulary="ads"),
    Column(name="site", buckets=5),
    Column(name="price", kind="numeric"),
    Column(name="age", kind="numeric", treatment="quantile", bins=3),
    Column(name="views", kind="numeric", treatment="log_square"),
    Column(name="t", kind="time"),
)
PARTS = ("train", "valid", "test")


def schema_of(split, columns=COLUMNS, **options):
    return LogSchema(label="click", columns=columns, split=SPLITS[split], **options)


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same(one, other):
    """Both folders have the same files, and these the same bytes."""
    wanted, found = files_of(one), files_of(other)
    assert list(found) == list(wanted)
    for name, content in wanted.items():
        assert found[name] == content, name


def random_rows(n, seed):
    rng = np.random.default_rng(seed)
    words = ["ünï", "a", "b", "日本", "0", "00", "x y", None, *map(str, range(10))]
    word = lambda: words[int(len(words) * rng.random() ** 2)]  # noqa: E731  # a draw
    return [
        {
            "click": "7" if rng.random() < 0.05 else str(i % 2),
            "user": word(),
            "ad": word(),
            "seen": "|".join(word() or "" for _ in range(int(rng.integers(0, 4)))) or None,
            "site": word(),
            "price": "cheap" if rng.random() < 0.05 else f"{rng.normal():.3f}",
            "age": None if rng.random() < 0.2 else str(int(rng.integers(0, 60))),
            "views": str(int(rng.integers(0, 50))),
            "t": str(int(rng.integers(0, 9))),
            "part": PARTS[i] if i < 3 else PARTS[min(2, int(rng.integers(0, 6)) // 2)],
        }
        for i in range(n)
    ]


def chunks_of(rows, start, stop, size, part=""):
    """Some rows of a log in chunks."""
    types = dict.fromkeys(rows[0], pl.String)
    for first in range(start, stop, size):
        yield RawChunk(
            pl.DataFrame(rows[first : min(first + size, stop)], schema=types),
            lambda row, first=first: Place("log", first + row + 1, str(first + row), "row"),
            part,
        )


@pytest.mark.parametrize("split", SPLITS)
@given(st.data())
@settings(max_examples=2)
def test_parts_make_the_folder_of_one_process(tmp_path_factory, split, data):
    assert_parts_make_the_same_folder(tmp_path_factory, split, data)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@given(st.data())
@settings(max_examples=40)
def test_parts_of_any_log_make_the_folder_of_one_process(tmp_path_factory, split, data):
    assert_parts_make_the_same_folder(tmp_path_factory, split, data)


def assert_parts_make_the_same_folder(tmp_path_factory, split, data):
    """Draw a log, cut it into parts and these into chunks, and encode the parts in any order."""
    folder = tmp_path_factory.mktemp("log")
    rows = random_rows(data.draw(st.integers(30, 60)), data.draw(st.integers(0, 999)))
    cuts = data.draw(st.lists(st.integers(1, len(rows) - 1), min_size=1, max_size=4, unique=True))
    bounds = [0, *sorted(cuts), len(rows)]
    if split == "files":
        bounds = [0, len(rows) // 2, len(rows) - 9, len(rows)]
    names = PARTS if split == "files" else [""] * len(bounds)
    spans = list(zip(bounds, bounds[1:], names, strict=False))
    schema = schema_of(
        split,
        counts=data.draw(st.sampled_from(["train", "all"])),
        unknown_share=data.draw(st.sampled_from([0.0, 0.3])),
        missing=data.draw(st.sampled_from([(), ("0",)])),
    )
    size = st.integers(1, 20)
    whole = (chunk for *span, part in spans for chunk in chunks_of(rows, *span, 8, part))
    origin = ", ".join(f"part {start}" for start, _, _ in spans)
    encode_log(
        whole,
        schema,
        folder / "one",
        origin=origin,
        notes=schema.notes,
        bad=BadRows("aside"),
    )

    counted = []
    for start, stop, part in spans:
        counted.append(folder / f"part-{start}")
        count_log(
            chunks_of(rows, start, stop, data.draw(size), part),
            schema,
            counted[-1],
            origin=f"part {start}",
            log=[],
            notes=schema.notes,
            bad=BadRows("aside"),
        )
    merge_counted(counted, folder / "parts")
    order = data.draw(st.permutations(counted))
    for number, part in enumerate(order):
        missing = encode_counted(part, folder / "parts")
        assert len(missing) == len(counted) - number - 1
        if data.draw(st.booleans()):
            assert encode_counted(part, folder / "parts") == missing
    assert_same(folder / "one", folder / "parts")
    PreparedFolder(folder / "parts").verify()
    shutil.rmtree(folder)


def write_files(folder, num_parts=3, rows=24):
    """A log in files, one row with a wrong label among the first ones of each."""
    files = [folder / f"day-{number}.csv" for number in range(num_parts)]
    for number, file in enumerate(files):
        lines = [f"u{(i + number) % 7},{i % 5}.5,{i % 2},{i}" for i in range(rows)]
        lines[2] = f"u2,2.5,{'x' * (number + 1)},9"
        file.write_text("user,price,click,t\n" + "\n".join(lines) + "\n")
    return files


SMALL = LogSchema(
    label="click",
    columns=(Column(name="user"), Column(name="price", kind="numeric")),
    split=Split(seed=1),
    text=TextFormat(),
)


@pytest.fixture
def log(tmp_path):
    return write_files(tmp_path)


@pytest.fixture
def counted(tmp_path, log):
    """The folders of the counted parts of a log."""
    folders = [tmp_path / "counts" / file.stem for file in log]
    for file, folder in zip(log, folders, strict=True):
        count_part(file, folder, schema=SMALL, bad_rows="aside")
    return folders


@pytest.fixture
def merged(tmp_path, log, counted):
    """A folder whose parts are not encoded yet, and beside it what one process makes of the log."""
    prepare(log, tmp_path / "one", schema=SMALL, bad_rows="aside")
    merge_parts(counted, tmp_path / "out")
    return tmp_path / "out"


def test_files_with_malformed_rows_make_the_same_folder(tmp_path, counted, merged):
    assert encode_part(counted[2], merged) == ["day-0.csv", "day-1.csv"]
    with pytest.raises(DataError, match=r"holds no prepared log: .* still to be encoded"):
        rb.Dataset.open(merged)
    assert encode_part(counted[0], merged) == ["day-1.csv"]
    assert encode_part(counted[0], merged) == ["day-1.csv"]
    assert encode_part(counted[1], merged) == []
    assert_same(tmp_path / "one", merged)
    assert len((merged / "bad_rows.jsonl").read_text().splitlines()) == 3
    before = files_of(merged)
    assert encode_part(counted[1], merged) == []
    assert files_of(merged) == before


def test_a_part_may_have_one_class_or_no_good_row(tmp_path):
    rows = ["u1,1,0\n" * 9 + "u1,1,x\n", "u2,cheap,1\n", "u3,2,1\n" * 9]
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    for file, text in zip(files, rows, strict=True):
        file.write_text("user,price,click\n" + text)
    prepare(files, tmp_path / "one", schema=SMALL, bad_rows="aside")
    folders = [tmp_path / "counts" / file.stem for file in files]
    for file, folder in zip(files, folders, strict=True):
        count_part(file, folder, schema=SMALL, bad_rows="aside")
    merge_parts(folders, tmp_path / "out")
    for folder in folders:
        encode_part(folder, tmp_path / "out")
    assert_same(tmp_path / "one", tmp_path / "out")
    for wrong, message in (
        (folders[:2], "the label 'click' must be 0 or 1"),
        ([folders[1]], "no row of"),
    ):
        with pytest.raises(DataError, match=message):
            merge_parts(wrong, tmp_path / "other")


def test_files_that_are_split_already(tmp_path, log):
    files = dict(zip(PARTS, log, strict=True))
    prepare(files, tmp_path / "one", schema=SMALL, bad_rows="aside")
    for part, file in files.items():
        count_part({part: file}, tmp_path / part, schema=SMALL, bad_rows="aside")
    folders = [tmp_path / part for part in PARTS]
    merge_parts(folders, tmp_path / "out")
    for folder in folders:
        encode_part(folder, tmp_path / "out")
    assert_same(tmp_path / "one", tmp_path / "out")


def test_two_processes_may_encode_the_same_part_at_once(tmp_path, counted, merged):
    with ThreadPoolExecutor(max_workers=6) as pool:
        list(pool.map(encode_part, [*counted, *counted], [merged] * 6))
    assert encode_part(counted[0], merged) == []
    assert_same(tmp_path / "one", merged)


KILLED = """
import os, signal, sys
from rarebit.data import encode_part
from rarebit.data.raw import parts
from rarebit.storage.files import DISK, Disk

part, out, when = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(stage, done, total):
    if when == "writing":
        die()

if when == "manifest":
    parts.write_manifest = die
if when == "renaming":
    really = Disk.rename
    Disk.rename = lambda self, a, b: die() if b.name == "manifest.json" else really(self, a, b)
if when == "removing":
    really_remove = Disk.remove
    Disk.remove = lambda self, path: die() if path.name == ".parts" else really_remove(self, path)
if when == "done":
    parts.write_file = die
encode_part(part, out, progress=progress)
"""


@pytest.mark.parametrize(
    "when", slow_after(["writing", "done", "manifest", "renaming", "removing"])
)
def test_a_killed_process_is_run_again(tmp_path, counted, merged, when):
    for part in counted[1:]:
        encode_part(part, merged)
    command = [sys.executable, "-c", KILLED, counted[0], merged, when]
    environment = dict(os.environ, PYTHONPATH=str(SRC))
    done = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (merged / "manifest.json").exists() == (when == "removing")
    assert encode_part(counted[0], merged) == []
    assert_same(tmp_path / "one", merged)


def test_the_order_of_the_parts_is_that_of_the_log(tmp_path, log, counted):
    prepare(log[::-1], tmp_path / "one", schema=SMALL, bad_rows="aside")
    merge_parts(counted[::-1], tmp_path / "out")
    for part in counted:
        encode_part(part, tmp_path / "out")
    assert_same(tmp_path / "one", tmp_path / "out")


def test_parts_of_one_log_are_merged_once_each(tmp_path, log, counted):
    out = tmp_path / "out"
    other = tmp_path / "other"
    count_part(log[0], other, schema=replace(SMALL, unknown_share=0.5), bad_rows="aside")
    with pytest.raises(
        DataError,
        match=r"'.*other' was counted with another schema than '.*day-1' \(unknown_share\)",
    ):
        merge_parts([counted[1], other], out)
    with pytest.raises(DataError, match="are the same part of the log; give each part once"):
        merge_parts([*counted, counted[0]], out)
    with pytest.raises(DataError, match=r"holds no counted part: manifest.json is missing"):
        merge_parts([*counted, tmp_path / "nowhere"], out)
    with pytest.raises(DataError, match="is a file, and a counted part is a folder; count the log"):
        merge_parts([log[0]], out)
    prepare(log, out, schema=SMALL, bad_rows="aside")
    with pytest.raises(DataError, match="is a prepared log, not a counted part"):
        merge_parts([out], tmp_path / "more")
    with pytest.raises(DataError, match=r"is a counted part, not a prepared log; .* data prepare"):
        rb.Dataset.open(counted[0])
    with pytest.raises(DataError, match=r"exists already; .*\(--overwrite\)"):
        merge_parts(counted, out)
    merge_parts(counted, out, overwrite=True)
    with pytest.raises(DataError, match="exists already; it waits for its parts"):
        merge_parts(counted, out, overwrite=True)
    with pytest.raises(DataError, match=r"exists already; .*\(--overwrite\)"):
        count_part(log[0], counted[0], schema=SMALL)


def test_a_part_that_was_not_merged_is_refused(tmp_path, log, counted):
    merge_parts(counted[:2], tmp_path / "out")
    with pytest.raises(
        DataError, match=r"'.*day-2' \(day-2.csv\) is none of the parts that were merged"
    ):
        encode_part(counted[2], tmp_path / "out")
    with pytest.raises(DataError, match="is no merged log; merge all parts first"):
        encode_part(counted[0], tmp_path / "nowhere")
    other = replace(SMALL, unknown_share=0.5)
    prepare(log, tmp_path / "whole", schema=other, bad_rows="aside")
    with pytest.raises(DataError, match="is complete, and was made with another schema"):
        encode_part(counted[0], tmp_path / "whole")


@pytest.mark.parametrize("name", ["codes.spill", "numbers.spill", "label.npy", "values.parquet"])
def test_a_damaged_part_is_refused(tmp_path, counted, merged, name):
    file = counted[1] / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = f"{name}' is damaged: it is not what its checksum says; count the log again"
    with pytest.raises(DataError, match=message):
        merge_parts(counted, tmp_path / "other")
    with pytest.raises(DataError, match=message):
        encode_part(counted[1], merged)
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match="is missing or not as long as it was written; count it"):
        encode_part(counted[1], merged)


@pytest.mark.parametrize("name", ["0.npz", "merge.json", "../ids.npy"])
def test_a_damaged_merge_is_refused(counted, merged, name):
    file = merged / ".parts" / name
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"damaged"):
        encode_part(counted[0], merged)
    assert not (merged / ".parts" / "0.done").exists()


def test_a_changed_merge_is_refused(counted, merged):
    file = merged / ".parts" / "merge.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": 5}))
    with pytest.raises(DataError, match=r"merge.json' is damaged; merge the parts again"):
        encode_part(counted[0], merged)


def test_parts_of_another_version_are_refused(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module.pl, "__version__", "99.0")
    with pytest.raises(
        DataError, match=r"was counted with rarebit .*, polars .*, and this is .*99.0"
    ):
        merge_parts(counted, tmp_path / "out")


def test_malformed_rows_stop_the_count_and_a_schema_is_needed(tmp_path, log):
    with pytest.raises(DataError, match=r"day-0.csv, line 4: the label is not 0 or 1 \(got 'x'\)"):
        count_part(log[0], tmp_path / "out", schema=SMALL)
    with pytest.raises(SettingsError, match="parts of a log need a schema"):
        count_part(log[0], tmp_path / "out", schema=None)
    assert not (tmp_path / "out").exists()


def test_users_have_the_same_hash_in_every_process():
    """Polars promises it for a single version, which all parts must have."""
    command = "import polars; print(polars.Series(['', 'ann', 'ünï' * 9]).hash().to_list())"
    done = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
    assert json.loads(done.stdout) == pl.Series(["", "ann", "ünï" * 9]).hash().to_list()
