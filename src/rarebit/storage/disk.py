"""The disk: the few operations by which a checkpoint changes it, so that a test can make any of
them fail; files opened without following links; and what the system says, in plain words.
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

__all__ = ["Disk", "file_lock", "is_alive", "open_file", "open_folder", "plain_words"]


class Disk:
    """The disk as it is. What these operations raise is what the system said.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     disk, file = Disk(), Path(folder) / "new" / "file"
    ...     disk.make_folder(file.parent)
    ...     disk.write_bytes(file, b"abc")
    ...     disk.sync_file(file)
    ...     disk.rename(file, file.with_name("other"))
    ...     sorted(path.name for path in file.parent.iterdir())
    ['other']
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it; one that is there already is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a file, over an old one if need be."""
        path.write_bytes(data)

    def save_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as safetensors: contiguous ones, on the CPU, none sharing memory."""
        save_file(dict(tensors), path)

    def sync_file(self, path: Path) -> None:
        """Wait until the content of a file would survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder would survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such operation: they keep names safe by themselves.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name on the same disk, in one go."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with all that is in it; a missing one is fine."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Open a folder that is no symbolic link, for `open_file`; ValueError if there is none.

    >>> with open_folder(Path("nowhere")) as folder: pass
    Traceback (most recent call last):
    ValueError: it does not exist
    """
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
    """Open a plain file of an open folder, and give its size; ValueError for anything else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     Disk().write_bytes(Path(path) / "file", b"abc")
    ...     with open_folder(Path(path)) as folder, open_file("file", folder) as (file, size):
    ...         size, file.read()
    (3, b'abc')
    """
    try:
        # The last flag: opening a pipe must not wait for somebody to write into it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, dir_fd=folder)
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
    """Hold a lock that one process at a time has; the system lifts it when that process ends.

    Where another one has it, that is an error, or it is waited for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = Path(folder) / "lock"
    ...     with file_lock(lock):
    ...         int(lock.read_text()) == os.getpid()
    True
    """
    import fcntl

    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _no_lock(path, plain_words(error, 0)) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = re.match(rb"[0-9]{1,9}\n", os.pread(lock, 16, 0))
            who = f"process {int(holder[0])}" if holder else "another process"
            advice = "wait until it has ended, or choose another folder"
            raise _no_lock(path, f"it is in use by {who}; {advice}") from None
        except OSError as error:
            raise _no_lock(path, plain_words(error, 0)) from None
        with suppress(OSError):  # the number only helps a message: a full disk is no reason to stop
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _no_lock(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot lock {str(path.parent)!r}: {reason}")


def plain_words(error: Exception, needed: int) -> str:
    """Return what went wrong with a folder, and what to do, from an error of the system.

    >>> plain_words(OSError(errno.ENOSPC, "No space left on device"), needed=1200)
    'the disk is full and 1,200 bytes are needed; free some, or use another disk'
    """
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # safetensors has its own error, with the system's number in its text
        number = re.search(r"\(os error ([0-9]{1,5})\)", str(error))
        code = int(number[1]) if number else None
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk is full and {needed:,} bytes are needed; free some, or use another disk"
    if code in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "it is read-only or not yours; choose a folder that you may write to"
    if code in {errno.EEXIST, errno.ENOTDIR}:
        return "it is a file or lies below one; choose another folder"
    said = str(error) if code is None else os.strerror(code)
    return f"the system said {said!r}; look after the disk, or choose another folder"


def is_alive(process: int) -> bool:
    """Return whether a process of this number runs on this machine.

    >>> is_alive(os.getpid())
    True
    """
    try:
        os.kill(process, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
