"""The disk: the operations that change it, locks, files opened without following links.

Everything that Rarebit stores changes the disk through `Disk`, so that a test can make any operation
fail or kill the process there.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rarebit.errors import CheckpointError

__all__ = ["DISK", "Disk", "explain", "file_lock", "is_alive", "open_file", "open_folder"]


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

    def refused(reason: str) -> CheckpointError:
        return CheckpointError(f"cannot lock {str(path.parent)!r}: {reason}")

    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise refused(explain(error)) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = re.match(rb"[0-9]{1,9}\n", os.pread(lock, 16, 0))
            who = f"process {int(holder[0])}" if holder else "another process"
            advice = "wait until it has ended, or choose another folder"
            raise refused(f"it is in use by {who}; {advice}") from None
        except OSError as error:
            raise refused(explain(error)) from None
        with suppress(OSError):  # the number is only for a message: a full disk does not matter
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
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
        os.kill(process, 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
