"""The disk changes as told; links are not followed; what the system says is said plainly."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from capabilities import needs
from safetensors import SafetensorError
from safetensors.torch import load_file

import rarebit
from rarebit.errors import CheckpointError
from rarebit.storage.files import Disk, explain, file_lock, is_alive, open_file, open_folder

HOLD = """
import sys, time
from pathlib import Path
from rarebit.storage.files import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_folders_are_made_with_those_above_and_may_be_there(tmp_path):
    Disk().make_folder(tmp_path / "a" / "b")
    Disk().make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_files_and_folders_are_written_synced_renamed_and_removed(tmp_path):
    disk, folder = Disk(), tmp_path / "old"
    disk.make_folder(folder)
    disk.write_bytes(folder / "file", b"first")
    disk.write_bytes(folder / "file", b"next")
    disk.sync_file(folder / "file")
    disk.sync_folder(folder)
    disk.rename(folder, tmp_path / "new")
    assert (tmp_path / "new" / "file").read_bytes() == b"next"
    assert not folder.exists()
    disk.remove(tmp_path / "new")
    disk.remove(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_written_as_safetensors(tmp_path):
    Disk().save_tensors(tmp_path / "file", {"a": torch.arange(3)})
    assert load_file(tmp_path / "file")["a"].tolist() == [0, 1, 2]


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    Disk().remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "file").read_text() == "x"


@pytest.mark.parametrize("operation", ["sync_file", "sync_folder"])
def test_syncing_what_is_missing_is_an_error(operation, tmp_path):
    with pytest.raises(FileNotFoundError):
        getattr(Disk(), operation)(tmp_path / "missing")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_disk_that_cannot_sync_folders_is_taken_as_it_is(code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(code, "no")))
    Disk().sync_folder(tmp_path)


def test_a_folder_that_fails_to_sync_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    with pytest.raises(OSError, match="no"):
        Disk().sync_folder(tmp_path)


def read(folder, name):
    with open_folder(folder) as descriptor, open_file(name, descriptor) as (file, size):
        return size, file.read()


def test_a_plain_file_is_opened_with_its_size(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert read(tmp_path, "file") == (3, b"abc")


def test_links_pipes_and_folders_are_not_files(tmp_path):
    (tmp_path / "real").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    for name, message in [
        ("link", "link is a symbolic link"),
        ("folder", "folder is not a file"),
        ("pipe", "pipe is not a file"),
        ("missing", "missing is missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(tmp_path, name)
    with pytest.raises(ValueError, match="it is a symbolic link"):
        read(tmp_path / "linked", "real")
    with pytest.raises(ValueError, match="it does not exist"):
        read(tmp_path / "nowhere", "real")


def test_refused_files_are_closed_again(tmp_path):
    (tmp_path / "folder").mkdir()
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ValueError, match="not a file"):
            read(tmp_path, "folder")
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, ""), "the disk is full and 1,234 bytes are needed"),
        (OSError(errno.EDQUOT, ""), "the disk is full and 1,234 bytes are needed"),
        (OSError(errno.EROFS, ""), "read-only or not yours"),
        (OSError(errno.EACCES, ""), "read-only or not yours"),
        (OSError(errno.ENOTDIR, ""), "it is a file or lies below one"),
        (OSError(errno.EIO, ""), "the system reports 'Input/output error'"),
        (SafetensorError("I/O error: No space left (os error 28)"), "the disk is full and 1,234"),
        (SafetensorError("something else"), "the system reports 'something else'"),
    ],
)
def test_errors_are_said_plainly_with_what_to_do(error, words):
    said = explain(error, 1234)
    assert said.startswith(words) or words in said
    assert "; " in said


def test_what_safetensors_says_when_a_file_cannot_grow_is_understood(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(SafetensorError) as caught:
            Disk().save_tensors(tmp_path / "file", {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the system reports 'File too large'" in explain(caught.value, 0)


def test_processes_are_told_from_dead_ones():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert not is_alive(child.pid)
    assert not is_alive(10**30)


def hold(path):
    """Start a process that holds a lock until its standard input ends."""
    source = str(Path(rarebit.__file__).parent.parent)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert child.stdout.readline() == b"held\n"
    return child


def test_a_lock_keeps_others_out_until_its_holder_ends_in_any_way(tmp_path):
    path = tmp_path / "lock"
    child = hold(path)
    try:
        with (
            pytest.raises(CheckpointError, match=f"in use by process {child.pid}; wait"),
            file_lock(path),
        ):
            pass
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    with file_lock(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_lock_is_free_again_after_use_and_after_an_error(tmp_path):
    def fail():
        with file_lock(tmp_path / "lock"):
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    with file_lock(tmp_path / "lock"):
        pass


def test_a_holder_that_wrote_nonsense_is_not_named(tmp_path):
    path = tmp_path / "lock"
    with file_lock(path):
        path.write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match="in use by another process"), file_lock(path):
            pass


def test_a_lock_that_another_has_can_be_waited_for(tmp_path):
    path, order = tmp_path / "lock", []
    asked = threading.Event()

    def wait_for_it():
        asked.set()
        with file_lock(path, wait=True):
            order.append("second")

    other = threading.Thread(target=wait_for_it)
    with file_lock(path):
        other.start()
        asked.wait()
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_a_lock_that_is_a_link_or_a_folder_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(CheckpointError, match="cannot lock"), file_lock(tmp_path / name):
            pass
    assert not (tmp_path / "target").exists()


@needs("file permissions", os.geteuid() != 0, "root may write anywhere")
def test_a_lock_in_a_read_only_folder_is_told(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with (
            pytest.raises(CheckpointError, match="read-only or not yours"),
            file_lock(tmp_path / "lock"),
        ):
            pass
    finally:
        tmp_path.chmod(stat.S_IRWXU)
