"""Files and folders get their names when they are complete, and errors leave nothing behind."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

import rarebit as rb
from rarebit.errors import DataError, StudyError
from rarebit.storage.files import (
    Disk,
    fresh_folder,
    is_own_checksum,
    leftovers,
    make_folder,
    own_checksum,
    write_file,
    write_files,
    write_json,
)


class FailingDisk(Disk):
    """A disk on which one operation finds no space."""

    def __init__(self, name):
        self.name = name

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "name"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return object.__getattribute__(self, name)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_json_file_is_written_over_an_old_one(tmp_path):
    for values in ({"a": [1, 2.5, None]}, {"b": "ü"}):
        assert write_json(tmp_path / "x.json", values, error=StudyError) == tmp_path / "x.json"
        assert json.loads((tmp_path / "x.json").read_text("utf-8")) == values
    assert names_in(tmp_path) == ["x.json"]


@pytest.mark.parametrize("operation", ["write_bytes", "sync_file", "rename"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(operation, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(StudyError, match=r"cannot write '.*file': the disk is full; free some"):
        write_file(tmp_path / "file", b"new", error=StudyError, disk=FailingDisk(operation))
    assert names_in(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_function_writes_the_content_and_its_error_leaves_nothing(tmp_path):
    write_file(tmp_path / "file", lambda path: path.write_bytes(b"new"), error=DataError)
    assert (tmp_path / "file").read_bytes() == b"new"

    def fail(path):
        path.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError):
        write_file(tmp_path / "file", fail, error=DataError)
    assert names_in(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_files_are_written_to_a_new_folder_and_not_below_a_file(tmp_path):
    written = write_files(tmp_path / "a" / "b", {"x": b"1", "y": b"2"}, error=DataError)
    assert [(path.name, path.read_bytes()) for path in written] == [("x", b"1"), ("y", b"2")]
    with pytest.raises(DataError, match="it is a file or lies below one; choose another folder"):
        write_files(written[0] / "c", {"x": b"1"}, error=DataError)


def test_a_fresh_folder_replaces_one_only_if_asked(tmp_path):
    with fresh_folder(tmp_path / "a") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("1")
        assert not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="not empty"), fresh_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("2")
    assert names_in(tmp_path / "a") == ["below"]
    with fresh_folder(tmp_path / "a", replace=True) as folder:
        (folder / "file").write_text("2")
    assert (names_in(tmp_path), names_in(tmp_path / "a")) == (["a"], ["file"])


class InterruptedDisk(Disk):
    """Ctrl-C comes before a rename, and the system cannot exchange two names."""

    def __init__(self, left):
        self.left = left

    def rename(self, source, target):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        super().rename(source, target)

    def exchange(self, one, other):
        return False


@pytest.mark.parametrize("left", [1, 2])
def test_an_interrupted_replacement_leaves_the_old_folder(left, tmp_path):
    with fresh_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("old")

    def replace():
        with fresh_folder(tmp_path / "a", replace=True, disk=InterruptedDisk(left)) as folder:
            (folder / "file").write_text("new")

    with pytest.raises(KeyboardInterrupt):
        replace()
    assert names_in(tmp_path) == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "old"


class UnsyncedDisk(Disk):
    """Names of the folder above cannot be synced."""

    def __init__(self, folder):
        self.folder = folder

    def sync_folder(self, path):
        if path == self.folder:
            raise OSError(errno.EIO, "Input/output error")
        super().sync_folder(path)


def test_an_old_folder_is_kept_until_the_new_one_would_survive_a_power_loss(tmp_path):
    with fresh_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("old")

    def replace():
        with fresh_folder(tmp_path / "a", replace=True, disk=UnsyncedDisk(tmp_path)) as folder:
            (folder / "file").write_text("new")

    with pytest.raises(OSError, match="Input/output"):
        replace()
    assert {path.read_text() for path in tmp_path.glob("*/file")} == {"old", "new"}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_asks_for(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        write_json(tmp_path / "a.json", {}, error=DataError)
        rb.save_model(torch.nn.Linear(1, 1), tmp_path / "model")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_leftovers_are_those_of_dead_processes(tmp_path):
    dead = dead_process()
    ours = [f".a.{dead}.writing", f".a.b.{dead}.removing", f".a.{os.getpid()}.writing"]
    others = [f".a.{os.getppid()}.writing", ".a.x.writing", f"a.{dead}.writing", ".git"]
    for name in ours + others:
        (tmp_path / name).touch()
    assert {path.name for path in leftovers(tmp_path)} == set(ours)
    assert [path.name for path in leftovers(tmp_path, "a.b")] == [ours[1]]
    assert leftovers(tmp_path / "missing") == []
    write_file(tmp_path / "a", b"", error=DataError)
    assert names_in(tmp_path) == sorted(["a", ours[1], *others])


def test_names_of_new_folders_are_synced(tmp_path):
    synced = []

    class NotingDisk(Disk):
        def sync_folder(self, path):
            synced.append(path)

    make_folder(tmp_path / "a" / "b", NotingDisk())
    assert synced == [tmp_path / "a", tmp_path]
    make_folder(tmp_path / "a" / "b", NotingDisk())
    assert len(synced) == 2


def test_a_description_knows_its_checksum_however_it_was_spaced():
    description = {"a": 1, "b": [None]}
    for separators in ((",", ":"), (", ", ": ")):
        checksum = own_checksum(description, "key", separators)
        assert is_own_checksum({"key": checksum, **description}, "key")
        assert not is_own_checksum({"key": checksum, **description, "a": 2}, "key")
    for wrong in ([], None, "0"):
        assert not is_own_checksum({"key": wrong, **description}, "key")
