"""Atomic writes: files and folders that have their name only when they are complete.

    .NAME.PID.writing     being written, or left by a process that died
    .NAME.PID.removing    making way for a new folder, or left in the same way

A file or folder is written under a hidden name beside its target, synced, and renamed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rarebit.errors import RarebitError
from rarebit.storage.disk import DISK, Disk, explain, is_alive

__all__ = [
    "OWN_CHECKSUM",
    "file_checksum",
    "fresh_folder",
    "hidden",
    "is_own_checksum",
    "leftovers",
    "make_folder",
    "own_checksum",
    "write_file",
    "write_files",
    "write_json",
]

OWN_CHECKSUM = "description_sha256"
# the last two: names that older versions used
HIDDEN = re.compile(r"\.(.+)\.([0-9]{1,9})\.(?:writing|removing|partial|partial\.old)")


def write_json(path: Path, values: Mapping[str, Any], *, error: type[RarebitError]) -> Path:
    """Write a JSON file atomically; raise `error` where that is impossible."""
    text = json.dumps(values, indent=1) + "\n"
    return write_file(path, text.encode(), error=error)


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
        if match is None or name not in {None, match[1]}:
            continue
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
