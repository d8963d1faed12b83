"""Checkpoints as folders: written whole or not at all, read back to the bit. Never pickle.

    folder/
      lock                       held, with its process id inside, by the process that writes here
      NAME/tensors.safetensors   the tensors, numbered
      NAME/state.json            its own sha256; then the rest, and the sha256 of the tensors
      .NAME.PID.writing/         being written, or left behind by a process that died
      .NAME.PID.removing/        being removed, or left behind in the same way

A checkpoint is written under the hidden name, synced, and renamed: under NAME it is always complete.
A NAME that is taken is refused, so an old one is never gone before the new one is there.
"""

import hashlib
import json
import os
import re
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rarebit.errors import CheckpointError, NewerFormatError
from rarebit.training.disk import Disk, file_lock, is_alive, open_file, open_folder, plain_words
from rarebit.training.state_encoding import Decoder, Encoder

__all__ = ["FORMAT", "CheckpointFolder", "Found"]

FORMAT = 1
STATE, TENSORS, LOCK = "state.json", "tensors.safetensors", "lock"
PARTS = {STATE, TENSORS}
MAX_STATE_BYTES = 64 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
TEMPORARY = re.compile(r"\..+\.([0-9]{1,9})\.(?:writing|removing)")

# What content that makes no sense raises, whatever it is: nothing worse may come out of a file.
NONSENSE = (
    *(AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(OverflowError, RecursionError, SafetensorError, struct.error),
)


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that reads back whole."""

    name: str
    state: dict[str, Any]
    damaged: tuple[tuple[str, str], ...]
    """Name and reason of each newer one that does not, newest first."""


class CheckpointFolder:
    """A folder of checkpoints, made when first written to. Names sort from old to new.

    A state is made of dictionaries with str or int keys, lists, tuples, tensors, None, bool, int,
    float and str. Tensors come back on the CPU, without gradient; one that is in the state twice is
    stored once and comes back as one. Only the process inside `locked()` should write and prune.

    >>> import torch
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = CheckpointFolder(folder)
    ...     with checkpoints.locked():
    ...         path = checkpoints.write("0001", {"step": 1, "weight": torch.ones(2)})
    ...         path = checkpoints.write("0002", {"step": 2, "weight": torch.zeros(2)})
    ...         checkpoints.prune(keep=["0002"])
    ...     checkpoints.names(), checkpoints.newest().state
    (['0002'], {'step': 2, 'weight': tensor([0., 0.])})
    """

    def __init__(self, folder: str | os.PathLike[str], disk: Disk = Disk()) -> None:
        self.folder, self.disk = Path(folder), disk
        self._one_at_a_time = threading.Lock()

    def write(self, name: str, state: Mapping[str, Any]) -> Path:
        """Write a state under a free name; an error leaves nothing, or the whole if the last sync failed."""
        target, encoder = self._path(name), Encoder()
        structure = encoder.encode(dict(state))
        needed = len(json.dumps(structure)) + sum(t.nbytes for t in encoder.tensors.values())
        partial = self.folder / f".{name}.{os.getpid()}.writing"
        with self._one_at_a_time, self._plain_errors(f"write the checkpoint {name!r} to", needed):
            if os.path.lexists(target):
                raise CheckpointError(f"{str(target)!r} is taken; use another name")
            self._make_folder()
            try:
                self._fill(partial, structure, encoder.tensors)
                self.disk.rename(partial, target)
            except BaseException:
                with suppress(OSError):
                    self.disk.remove(partial)
                raise
            self.disk.sync_folder(self.folder)
        return target

    def read(self, name: str) -> dict[str, Any]:
        """Return a state as it was written; a checkpoint that is not whole is an error."""
        path = self._path(name)
        try:
            with open_folder(path) as descriptor:
                description = _read_description(descriptor)
                tensors = _read_tensors(path, descriptor, description["files"][TENSORS])
            return Decoder(tensors).decode_all(description["state"])
        except CheckpointError:
            raise
        except NONSENSE as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"the checkpoint {str(path)!r} cannot be read: {reason}; use an older checkpoint"
            ) from None

    def names(self) -> list[str]:
        """Return the names of the finished checkpoints, oldest first, damaged ones among them."""
        with self._plain_errors("look for checkpoints in"), suppress(FileNotFoundError):
            entries = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
            held = {path.name: [os.path.lexists(path / part) for part in PARTS] for path in entries}
            return sorted(name for name, parts in held.items() if any(parts))
        return []

    def newest(self, prefix: str = "") -> Found | None:
        """Return the newest whole checkpoint whose name starts with a prefix; None if there is no such name.

        Where there are some and all of them are damaged, that is an error: starting over would lose them.
        """
        damaged: list[tuple[str, str]] = []
        for name in reversed([name for name in self.names() if name.startswith(prefix)]):
            try:
                return Found(name, self.read(name), tuple(damaged))
            except CheckpointError as error:
                damaged.append((name, str(error)))
        if damaged:
            why = damaged[0][1].removesuffix("; use an older checkpoint")
            raise CheckpointError(f"{why}; no older one is whole either: choose another folder")
        return None

    def prune(self, keep: Collection[str]) -> None:
        """Remove the other checkpoints, and what processes that died left behind.

        A folder that holds anything but the files of a checkpoint is somebody else's and stays.
        """
        if isinstance(keep, str):
            raise CheckpointError(f"keep must be a collection of names, got keep={keep!r}")
        with self._one_at_a_time, self._plain_errors("remove old checkpoints from"):
            others = [self.folder / name for name in self.names() if name not in keep]
            gone = [path for path in others if {part.name for part in path.iterdir()} <= PARTS]
            for path in gone:
                # Renamed first: a removal that is cut short must not look like damage.
                away = self.folder / f".{path.name}.{os.getpid()}.removing"
                self.disk.remove(away)
                self.disk.rename(path, away)
            if gone:
                self.disk.sync_folder(self.folder)
            for path in self._leftovers():
                self.disk.remove(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the system lifts the lock when this process ends, in any way."""
        with self._plain_errors("lock"):
            self._make_folder()
        with file_lock(self.folder / LOCK):
            yield

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name) or name == LOCK:
            raise CheckpointError(
                f"{name!r} cannot be the name of a checkpoint; use a word of letters and digits"
            )
        return self.folder / name

    def _make_folder(self) -> None:
        new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.disk.make_folder(self.folder)
        for path in new:
            self.disk.sync_folder(path.parent)

    def _fill(self, partial: Path, structure: Any, tensors: Mapping[str, Tensor]) -> None:
        from rarebit import __version__

        self.disk.remove(partial)
        self.disk.make_folder(partial)
        self.disk.save_tensors(partial / TENSORS, tensors)
        self.disk.sync_file(partial / TENSORS)
        with (partial / TENSORS).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        files = {TENSORS: {"bytes": size, "sha256": checksum}}
        description = {"format": FORMAT, "rarebit": __version__, "files": files, "state": structure}
        self.disk.write_bytes(partial / STATE, _sealed(description))
        self.disk.sync_file(partial / STATE)
        self.disk.sync_folder(partial)

    def _leftovers(self) -> Iterator[Path]:
        """Yield temporary folders that nobody writes to: this process does nothing else right now."""
        for path in list(self.folder.iterdir()) if self.folder.exists() else ():
            temporary = TEMPORARY.fullmatch(path.name)
            process = int(temporary[1]) if temporary else None
            if process is not None and (process == os.getpid() or not is_alive(process)):
                yield path

    @contextmanager
    def _plain_errors(self, what: str, needed: int = 0) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = plain_words(error, needed)
            raise CheckpointError(f"cannot {what} {str(self.folder)!r}: {reason}") from None


def _sealed(description: Mapping[str, Any]) -> bytes:
    """Return the content of `state.json`: the checksum of what follows, then what follows."""
    text = json.dumps(description, allow_nan=False, separators=(",", ":")).encode()
    if len(text) + 65 > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the state has {len(text):,} bytes beside its tensors; put long lists into tensors"
        )
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _read_description(folder: int) -> dict[str, Any]:
    with open_file(STATE, folder) as (file, size):
        if size > MAX_STATE_BYTES:
            raise ValueError(f"{STATE} has {size:,} bytes, at most {MAX_STATE_BYTES:,} are read")
        content = file.read(MAX_STATE_BYTES)
    text = content[65:]
    if content[:65] != hashlib.sha256(text).hexdigest().encode() + b"\n":
        raise ValueError(f"{STATE} is damaged: wrong checksum")
    description = json.loads(text, parse_int=_short_int)
    version = description["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"{STATE} does not describe a checkpoint")
    if version > FORMAT:
        writer = str(description.get("rarebit"))[:40]
        raise NewerFormatError(
            f"the checkpoint was written by Rarebit {writer!r} in format {version}; this version "
            f"reads up to format {FORMAT}: upgrade it, or use an older checkpoint"
        )
    return dict(description)


def _read_tensors(path: Path, folder: int, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    with open_file(TENSORS, folder) as (file, size):
        if size != expected["bytes"]:
            raise ValueError(f"{TENSORS} has {size:,} bytes in place of {expected['bytes']!r}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise ValueError(f"{TENSORS} is damaged or of another checkpoint: wrong checksum")
    # Copied: what safetensors returns is the file itself, mapped, and the file may be removed.
    return {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}


def _short_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"{STATE} has a number of {len(digits)} digits")
    return int(digits)
