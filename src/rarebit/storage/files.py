"""Atomic files and folders: what has its name is complete.

    .NAME.PID.writing     being written, or left by a process that died
    .NAME.PID.removing    making way for a new folder, or left in the same way

A file or folder is written under a hidden name beside its target, synced, and renamed. Rarebit changes the disk through `Disk`
alone, so that a test can make any operation fail, or kill the process there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rarebit.errors import CheckpointError, RarebitError


class Disk:
    """The operations that change the disk. They raise what the system raises."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a file, over an old one if there is one."""
        path.write_bytes(data)

    def save_tensors(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write tensors as safetensors."""
        storages: set[int] = set()
        separate = {}
        for name, tensor in tensors.items():
            written = tensor.detach().cpu().contiguous()
            storage = written.untyped_storage().data_ptr()
            # safetensors refuses tensors that share memory
            separate[name] = written.clone() if storage in storages else written
            storages.add(storage)
        save_file(separate, path, dict(metadata) if metadata else None)

    def sync_file(self, path: Path) -> None:
        """Wait until the content of a file would survive a power loss."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder would survive a power loss."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems lack this operation and keep names safe without it.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder in one atomic step; a file replaces an old one."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with its content; it may be missing."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()
"""The real disk."""


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Open a folder that is not a symbolic link, for `open_file`; ValueError if there is none."""
    if path.is_symlink():
        raise ValueError("it is a symbolic link, which is not followed")
    if not path.exists():
        raise ValueError("it does not exist")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_file(name: str, folder: int) -> Iterator[tuple[BufferedReader, int]]:
    """Open a plain file of an open folder, and give its size; ValueError for anything else."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{name} is a symbolic link, which is not followed") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ValueError(f"{name} is not a file")
    with os.fdopen(descriptor, "rb") as file:
        yield file, status.st_size


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock that one process at a time has; the system releases it when that process ends.

    A lock that another process holds is an error, unless `wait` is true.
    """
    import fcntl

    lock, reason = None, ""
    try:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert lock is not None
            holder = re.match(rb"[0-9]{1,9}\n", os.pread(lock, 16, 0))
            who = f"process {int(holder[0])}" if holder else "another process"
            reason = f"it is in use by {who}; wait until it has ended, or choose another folder"
        except OSError as error:
            reason = explain(error)
        if lock is None or reason:
            raise CheckpointError(f"cannot lock {str(path.parent)!r}: {reason}")
        with suppress(OSError):  # the number is only for a message: a full disk does not matter
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def explain(error: Exception, needed: int = 0) -> str:
    """Return the reason of a system error in plain English, and what to do about it."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # safetensors has its own error, with the system's number in its text
        number = re.search(r"\(os error ([0-9]{1,5})\)", str(error))
        code = int(number[1]) if number else None
    if code in {errno.ENOSPC, errno.EDQUOT}:
        room = f" and {needed:,} bytes are needed" if needed else ""
        return f"the disk is full{room}; free some space, or use another disk"
    if code in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "it is read-only or not yours; choose a folder that you may write to"
    if code in {errno.EEXIST, errno.ENOTDIR}:
        return "it is a file or lies below one; choose another folder"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{str(error.filename)!r} is missing; choose another folder"
    reason = str(error) if code is None else os.strerror(code)
    return f"the system reports {reason!r}; check the disk, or choose another folder"


def is_alive(process: int) -> bool:
    """Return whether a process with this number runs on this machine."""
    try:
        with suppress(PermissionError):  # another user's
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


OWN_CHECKSUM = "description_sha256"
# the last two: names that older versions used
HIDDEN = re.compile(r"\.(.+)\.([0-9]{1,9})\.(?:writing|removing|partial|partial\.old)")


def write_json(path: Path, values: Mapping[str, Any], *, error: type[RarebitError]) -> Path:
    """Write a JSON file atomically; raise `error` where that is impossible."""
    return write_file(path, f"{json.dumps(values, indent=1)}\n".encode(), error=error)


def write_file(
    path: Path,
    content: bytes | Callable[[Path], object],
    *,
    error: type[RarebitError],
    disk: Disk = DISK,
) -> Path:
    """Write a file atomically: bytes, or whatever a function writes to the path it gets."""
    partial = hidden(path, "writing")
    try:
        if isinstance(content, bytes):
            disk.write_bytes(partial, content)
        else:
            content(partial)
        disk.sync_file(partial)
        disk.rename(partial, path)
        disk.sync_folder(path.parent)
    except (OSError, SafetensorError) as failure:
        raise error(f"cannot write {str(path)!r}: {explain(failure)}") from None
    finally:
        with suppress(OSError):
            for old in (partial, *leftovers(path.parent, path.name)):
                if os.path.lexists(old):
                    disk.remove(old)
    return path


def write_files(
    folder: Path, files: Mapping[str, bytes], *, error: type[RarebitError]
) -> list[Path]:
    """Write files to a folder, which is made if it is missing, each of them atomically."""
    try:
        make_folder(folder)
    except OSError as failure:
        raise error(f"cannot write {str(folder)!r}: {explain(failure)}") from None
    return [write_file(folder / name, content, error=error) for name, content in files.items()]


@contextmanager
def fresh_folder(target: Path, *, replace: bool = False, disk: Disk = DISK) -> Iterator[Path]:
    """Give a folder to fill. It gets its name once it is filled and synced; an error removes it.

    With `replace`, it takes the place of a folder that has the name.
    """
    partial, old = hidden(target, "writing"), hidden(target, "removing")
    try:
        disk.remove(partial)
        disk.make_folder(partial)
        yield partial
        sync_tree(partial, disk)
        if replace and target.exists():
            disk.rename(target, old)
        disk.rename(partial, target)
        disk.sync_folder(target.parent)
    finally:
        with suppress(OSError):
            if os.path.lexists(old) and not os.path.lexists(target):
                disk.rename(old, target)
            for path in (partial, old):
                if os.path.lexists(path):
                    disk.remove(path)


def sync_tree(folder: Path, disk: Disk) -> None:
    """Sync a folder and everything in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        (disk.sync_folder if path.is_dir() else disk.sync_file)(path)
    disk.sync_folder(folder)


def make_folder(path: Path, disk: Disk = DISK) -> None:
    """Make a folder and its parents, and sync the names of the new ones."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    disk.make_folder(path)
    for folder in new:
        disk.sync_folder(folder.parent)


def hidden(path: Path, suffix: str) -> Path:
    """Return the name beside a path under which this process writes or removes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{suffix}")


def leftovers(folder: Path, name: str | None = None) -> list[Path]:
    """Return what dead processes left in a folder, of one name or of all.

    This process counts as dead: in a container, a new process often has the number of the last one.
    """
    found = []
    for path in list(folder.iterdir()) if folder.exists() else ():
        match = HIDDEN.fullmatch(path.name)
        if match and name in {None, match[1]}:
            process = int(match[2])
            if process == os.getpid() or not is_alive(process):
                found.append(path)
    return found


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_checksum(
    description: Mapping[str, Any],
    key: str = OWN_CHECKSUM,
    separators: tuple[str, str] = (",", ":"),
) -> str:
    """Return the checksum of a description without the checksum in it, however it is spaced."""
    values = {name: value for name, value in description.items() if name != key}
    text = json.dumps(values, sort_keys=True, separators=separators)
    return hashlib.sha256(text.encode()).hexdigest()


def is_own_checksum(description: Mapping[str, Any], key: str = OWN_CHECKSUM) -> bool:
    """Return whether a description is what the checksum in it says."""
    # tickets and selections of format 1 were spaced out
    spacings = ((",", ":"), (", ", ": "))
    return any(description.get(key) == own_checksum(description, key, each) for each in spacings)
