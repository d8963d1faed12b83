"""A prepared folder on disk: written in one step, checked when it is opened, never half there."""

import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.data.prepared import (
    ArrayWriter,
    DataStatistics,
    PreparedFolder,
    new_folder,
    write_manifest,
)
from rarebit.errors import DataError
from rarebit.settings import to_mapping
from rarebit.storage.files import own_checksum

SCHEMA = Schema(
    (
        Field(name="user", rows=6),
        Field(name="age", kind="numeric"),
        Field(name="tags", kind="multi", rows=5, max_length=2),
    )
)
ROWS = (6, 2, 2)
IDS = np.array([[3 + row % 3, 3 + row % 2, 0] for row in range(10)], np.int32)
LABEL = np.arange(10, dtype=np.uint8) % 2
NUMERIC = np.linspace(-1, 1, 10, dtype=np.float32)[:, None]


def fill(folder, **changes):
    """Write a small prepared log by hand."""
    counts = [np.bincount(IDS[:6, 0], minlength=6), np.bincount(IDS[:6, 1], minlength=5)]
    arrays = {"ids": IDS, "numeric": NUMERIC, "label": LABEL, "counts": np.concatenate(counts)}
    for name, array in (arrays | changes).items():
        np.save(folder / f"{name}.npy", array)
    (folder / "encoder").mkdir()
    (folder / "encoder" / "encoder.json").write_text("{}\n")
    statistics = DataStatistics(rows=ROWS, label_rates=(0.5, 0.5, 0.5), bad_rows=0, fields=())
    write_manifest(
        folder,
        {
            "schema": SCHEMA.to_mapping(),
            "rows": list(ROWS),
            "statistics": to_mapping(statistics),
        },
    )


def make(target, **options):
    with new_folder(target, **options) as folder:
        fill(folder)
    return target


def fail(target, error, **options):
    with new_folder(target, **options) as folder:
        fill(folder, label=1 - LABEL)
        raise error


def resign(target, **changes):
    """Change the manifest as someone would who also mends its checksum."""
    manifest = json.loads((target / "manifest.json").read_text()) | changes
    manifest["manifest_sha256"] = own_checksum(manifest, "manifest_sha256")
    (target / "manifest.json").write_text(json.dumps(manifest))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(0, 3)),
    dtype=st.sampled_from([np.int32, np.float32, np.uint8]),
    seed=st.integers(0, 99),
)
def test_rows_written_in_any_order_are_the_file_of_numpy(tmp_path_factory, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 100, shape).astype(dtype)
    folder = tmp_path_factory.mktemp("arrays")
    writer = ArrayWriter(folder / "ours.npy", shape, dtype)
    bounds = sorted({0, shape[0], *rng.integers(0, shape[0] + 1, 3).tolist()})
    pieces = list(itertools.pairwise(bounds))
    for start, stop in rng.permutation(pieces).tolist():
        writer.write(start, array[start:stop])
    writer.close()
    np.save(folder / "numpy.npy", array)
    assert (folder / "ours.npy").read_bytes() == (folder / "numpy.npy").read_bytes()


def test_a_folder_gets_its_name_when_it_is_full(tmp_path):
    target = tmp_path / "deep" / "data"
    with new_folder(target) as folder:
        assert not target.exists()
        fill(folder)
    assert names_in(tmp_path / "deep") == ["data"]
    assert len(Dataset.open(target, verify=True)) == 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        fail(tmp_path / "data", error)
    assert names_in(tmp_path) == []


def test_a_failing_overwrite_leaves_the_folder_as_it_was(tmp_path):
    target = make(tmp_path / "data")
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        fail(target, KeyboardInterrupt, overwrite=True)
    assert names_in(tmp_path) == ["data"]
    assert (target / "manifest.json").read_bytes() == before
    with pytest.raises(DataError, match=r"exists already; choose another, or overwrite it"):
        make(target)
    with new_folder(target, overwrite=True) as folder:
        fill(folder, label=1 - LABEL)
    assert Dataset.open(target, verify=True).label.tolist() == (1 - LABEL).tolist()
    assert names_in(tmp_path) == ["data"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_was_not_prepared_is_never_overwritten(tmp_path, kind):
    target = tmp_path / "thesis"
    if kind == "folder":
        target.mkdir()
        (target / "chapter").write_text("1")
    else:
        target.write_text("1")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="not prepared by Rarebit, so it stays as it is"):
            make(target, overwrite=overwrite)
    assert names_in(tmp_path) == ["thesis"]


@pytest.mark.parametrize("name", ["notes.txt", "encoder/notes.txt", "runs", "runs/fm/model.json"])
def test_what_else_lies_in_a_prepared_folder_is_never_deleted(tmp_path, name):
    target = make(tmp_path / "data")
    stranger = target / name
    stranger.parent.mkdir(parents=True, exist_ok=True)
    if name == "runs":
        stranger.mkdir()
    else:
        stranger.write_text("mine")
    with pytest.raises(
        DataError, match=rf"would delete '{name.split('/fm')[0]}', which is no part"
    ):
        make(target, overwrite=True)
    assert stranger.exists()
    assert len(Dataset.open(target, verify=True)) == 10


def test_what_comes_into_a_prepared_folder_meanwhile_is_not_deleted(tmp_path):
    target = make(tmp_path / "data")

    def replace():
        with new_folder(target, overwrite=True) as folder:
            fill(folder)
            (target / "notes.txt").write_text("mine")

    with pytest.raises(DataError, match=r"would delete 'notes.txt'"):
        replace()
    assert (target / "notes.txt").read_text() == "mine"
    assert names_in(tmp_path) == ["data"]


def test_a_folder_is_overwritten_with_an_edited_schema_and_without_a_vocabulary(tmp_path):
    target = make(tmp_path / "data")
    (target / "schema.toml").write_text('label = "click"  # edited\n')
    shutil.rmtree(target / "encoder")
    make(target, overwrite=True)
    assert len(Dataset.open(target, verify=True)) == 10
    assert not (target / "schema.toml").exists()


@pytest.mark.parametrize("text", ["{}", '{"name": "a web page"}', "no JSON"])
def test_a_manifest_of_something_else_protects_its_folder_only(tmp_path, text):
    page = tmp_path / "page"
    page.mkdir()
    (page / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="does not say what in it was prepared by Rarebit"):
        make(page, overwrite=True)
    assert names_in(page) == ["manifest.json"]
    assert len(Dataset.open(make(page / "data"))) == 10


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["inner", "encoder", "deep/inner"])
def test_nothing_is_prepared_inside_of_a_prepared_folder(tmp_path, name, overwrite):
    target = make(tmp_path / "data")
    before = sorted(target.rglob("*"))
    with pytest.raises(DataError, match=r"lies in the prepared log .*data', which would no longer"):
        make(target / name, overwrite=overwrite)
    assert sorted(target.rglob("*")) == before


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    make(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    make(tmp_path / "link", overwrite=True)
    assert names_in(tmp_path) == ["data", "link"]
    assert (tmp_path / "link").is_symlink()
    assert len(Dataset.open(tmp_path / "link")) == 10


def ended_process():
    """The number of a process that is over."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("name", ["data", "da[t]a*"])
def test_leftovers_of_killed_processes_are_removed(tmp_path, name):
    # a process in a container often has the number of the one before it
    for number in (ended_process(), os.getpid()):
        for kind in ("writing", "partial"):  # the last by an older version
            (tmp_path / f".{name}.{number}.{kind}").mkdir()
    others = [f".{name}.{os.getppid()}.writing", f".{name}.x.writing", ".other.1.writing"]
    for other in others:
        (tmp_path / other).mkdir()
    make(tmp_path / name)
    assert names_in(tmp_path) == sorted([name, *others])


@pytest.mark.parametrize("names", [("removing", "writing"), ("partial.old", "partial")])
def test_a_folder_that_was_out_of_place_comes_back(tmp_path, names):
    target = make(tmp_path / "data")
    away, partial = (f".data.{ended_process()}.{name}" for name in names)
    target.rename(tmp_path / away)
    (tmp_path / partial).mkdir()
    with pytest.raises(DataError, match="exists already"):
        make(target)
    assert names_in(tmp_path) == ["data"]
    assert len(Dataset.open(target)) == 10


def test_two_at_once_in_one_process(tmp_path):
    with new_folder(tmp_path / "data") as folder:
        with pytest.raises(DataError, match="is being prepared by this process already"):
            make(tmp_path / "data")
        fill(folder)
    assert len(Dataset.open(tmp_path / "data")) == 10


def test_no_place_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*it is a file or lies below one"):
        make(tmp_path / "file" / "data")


def test_a_damaged_byte_in_any_file_is_found(tmp_path):
    target = make(tmp_path / "data")
    files = [path for path in sorted(target.rglob("*")) if path.is_file()]
    assert [path.name for path in files] == [
        *("counts.npy", "encoder.json", "ids.npy", "label.npy", "manifest.json", "numeric.npy")
    ]
    for path in files:
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 1
            path.write_bytes(bad)
            with pytest.raises(DataError):
                Dataset.open(target, verify=True)
        path.write_bytes(good)
    Dataset.open(target, verify=True)


@pytest.mark.parametrize("how", ["cut", "longer", "gone"])
def test_a_file_of_another_length_is_found_without_reading_it(tmp_path, how):
    target = make(tmp_path / "data")
    for path in [path for path in sorted(target.rglob("*")) if path.is_file()]:
        good = path.read_bytes()
        path.write_bytes(good[:-2] if how == "cut" else good + b"x")
        if how == "gone":
            path.unlink()
        with pytest.raises(DataError):
            Dataset.open(target)
        path.write_bytes(good)
    Dataset.open(target)


def test_a_damaged_log_is_found_by_default_and_read_once(tmp_path):
    target = make(tmp_path / "data")
    path, before = target / "ids.npy", (target / "ids.npy").stat()
    good = path.read_bytes()

    def damage():
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    damage()
    with pytest.raises(DataError, match="is not what its checksum says"):
        Dataset.open(target)
    assert len(Dataset.open(target, verify=False)) == 10
    path.write_bytes(good)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    Dataset.open(target)
    # unseen by anyone who does not read it again: same file, size and time
    damage()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    Dataset.open(target)
    os.utime(path)
    with pytest.raises(DataError, match="is not what its checksum says"):
        Dataset.open(target)


def test_no_manifest_or_another_file_in_its_place(tmp_path):
    with pytest.raises(
        DataError, match=r"manifest.json is missing; make one with rarebit data prep"
    ):
        Dataset.open(tmp_path / "nothing")
    for text in ("[]", "{}", "{", "null", '{"format": "1"}', "[" * 100_000, "\xff"):
        (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"is damaged|does not describe a prepared log"):
            Dataset.open(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        Dataset.open(tmp_path)


def test_a_newer_format_says_upgrade(tmp_path):
    target = make(tmp_path / "data")
    resign(target, format=2, rarebit="9.9")
    with pytest.raises(
        DataError, match=r"in format 2 by Rarebit 9.9; .* up to format 1: upgrade it"
    ):
        Dataset.open(target)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [6, 2, 3]},
        {"rows": [6, 4]},
        {"rows": [11, -1, 0]},
        {"rows": None},
        {"rows": ["a", "b", "c"]},
        {"schema": {"fields": [{"name": "user", "rows": 6}]}},
        {"schema": {"fields": [{"name": "user", "rows": "six"}]}},
        {"schema": None},
        {"files": None},
        {"files": {"ids.npy": {}}},
    ],
)
def test_a_wrong_manifest_is_a_data_error(tmp_path, changes):
    target = make(tmp_path / "data")
    resign(target, **changes)
    with pytest.raises(DataError, match=r"is damaged|prepare it again"):
        Dataset.open(target)


def test_wrong_statistics_are_a_data_error_when_they_are_asked_for(tmp_path):
    target = make(tmp_path / "data")
    resign(target, statistics={})
    assert len(Dataset.open(target)) == len(LABEL)
    with pytest.raises(DataError, match="is damaged"):
        PreparedFolder(target).statistics  # noqa: B018  # reading it is the test


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": IDS.astype(np.int64)},
        {"ids": np.asfortranarray(IDS)},
        {"label": LABEL[:-1]},
        {"numeric": NUMERIC.astype(np.float64)},
        {"counts": np.zeros(3, np.int64)},
        {"label": np.array([object()] * 10)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_arrays_of_another_kind_are_refused(tmp_path, changes):
    with new_folder(tmp_path / "data") as folder:
        fill(folder, **changes)
    with pytest.raises(DataError, match="prepare it again"):
        Dataset.open(tmp_path / "data")


def test_ids_that_no_table_has_are_found_by_verify(tmp_path):
    with new_folder(tmp_path / "data") as folder:
        fill(folder, ids=IDS + 5)
    with pytest.raises(DataError, match="'user' has a table of 6 rows"):
        Dataset.open(tmp_path / "data", verify=True)


def test_arrays_are_mapped_and_writing_stays_in_this_process(tmp_path):
    target = make(tmp_path / "data")
    assert isinstance(PreparedFolder(target).array("ids"), np.memmap)
    data = Dataset.open(target)
    data.ids.fill_(4)
    data.numeric.add_(1)
    data.label.zero_()
    assert (data.splits.train.ids == 4).all()
    again = Dataset.open(target, verify=True)
    assert np.array_equal(again.ids, IDS)
    assert np.array_equal(again.numeric, NUMERIC)
    assert again.label.tolist() == LABEL.tolist()


def test_a_data_set_read_into_memory_outlives_its_folder(tmp_path):
    target = make(tmp_path / "data")
    data = Dataset.open(target).in_memory()
    np.save(target / "ids.npy", IDS * 0)
    assert np.array_equal(data.ids, IDS)
    assert [len(part) for part in data.splits] == list(ROWS)
    assert data.splits.train.counts()["user"].tolist() == [0, 0, 0, 2, 2, 2]


def test_moved_to_another_device_it_keeps_its_splits(tmp_path):
    moved = Dataset.open(make(tmp_path / "data")).to("meta")
    assert moved.device == torch.device("meta")
    assert [len(part) for part in moved.splits] == list(ROWS)
    assert {part.device for part in moved.splits} == {torch.device("meta")}
    assert set(moved.splits.train.known_counts) == {"user", "tags"}
