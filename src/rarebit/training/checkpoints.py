"""Checkpoints as folders: written whole or not at all, read back to the bit. Never pickle.

    folder/
      lock                       held, with its process id inside, by the process that writes here
      NAME/tensors.safetensors   the tensors, numbered
      NAME/state.json            its own sha256; then the rest, and the sha256 of the tensors
      .NAME.PID.writing/         being written, or left behind by a process that died
      .NAME.PID.removing/        being removed, or left behind in the same way

A checkpoint is written under the hidden name, synced, and renamed: under NAME it is always complete.
A NAME that is taken is refused, so an old one is never gone before the new one is there.

Write a training loop down every few minutes and after every longer epoch, and take it up again.

    at-000003-0000000400/    the loop before batch 400 of epoch 3
    best-000002/             the weights of the best epoch, which the states after it refer to

What is to be written is copied between two steps; the files are written while training goes on. The two
newest states are kept, so that one damaged by the disk leaves another.
"""

import hashlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rarebit.errors import CheckpointError, NewerFormatError, RarebitError, TrainingInterrupted
from rarebit.storage.disk import Disk, file_lock, is_alive, open_file, open_folder, plain_words
from rarebit.storage.encoding import Decoder, Encoder
from rarebit.training.identity import describe_environment, differences, environment_warnings
from rarebit.training.loop import TrainingLoop
from rarebit.training.not_finite import raise_if_weights_are_not_finite
from rarebit.training.step import first_line
from rarebit.training.stopping import StopRequests

__all__ = ["FORMAT", "CheckpointFolder", "Checkpoints", "Found"]

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


CHECKPOINTS_STATE, BEST = "at-", "best-"
KEEP = 2
"""States that are kept."""
SHORT = 1 / 60
"""An epoch that ends within this part of the time between two checkpoints after the last one is not written:
where epochs take a second, writing them would take longer than they do."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own."""

    def __init__(
        self,
        folder: CheckpointFolder,
        run: Mapping[str, Any],
        stop: StopRequests,
        *,
        minutes: float,
        say: Callable[[str], object],
    ) -> None:
        self.folder, self.run, self.stop, self.say = folder, run, stop, say
        self.seconds = 60.0 * minutes
        self.due = time.monotonic() + self.seconds
        self.written_at = -float("inf")
        """When the last one was begun."""
        self.best_epoch: int | None = None
        """The best epoch whose weights are written."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def after_step(self, loop: TrainingLoop) -> None:
        """Write the loop down when it is time, or when it is to stop."""
        if self.stop.requested:
            self._stop(loop)
        if time.monotonic() >= self.due:
            self.save(loop)

    def after_epoch(self, loop: TrainingLoop) -> None:
        """Write the loop down after a longer epoch; the last one's is on the disk when training ends."""
        if loop.is_finished or time.monotonic() - self.written_at >= SHORT * self.seconds:
            self.save(loop)
        if loop.is_finished:
            self.wait()
        elif self.stop.requested:
            self._stop(loop)

    def save(self, loop: TrainingLoop) -> None:
        """Copy the loop's state and begin to write it."""
        loop.step.raise_if_not_finite()
        raise_if_weights_are_not_finite(loop.step.model)
        self.wait()  # for the last one: two copies at once would be one too many
        name = f"{CHECKPOINTS_STATE}{loop.epoch:06d}-{loop.batch:010d}"
        best = None
        if loop.best.epoch not in (None, self.best_epoch):
            best, self.best_epoch = _copied(loop.best.weights), loop.best.epoch
        state = _copied(loop.state()) | {
            "run": dict(self.run),
            "environment": describe_environment(),
        }
        self._written = self._writer.submit(self._write, name, state, best)
        self.written_at = time.monotonic()
        self.due = self.written_at + self.seconds

    def wait(self) -> None:
        """Wait until what was begun is written; raise what went wrong with it."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown(wait=True)

    def resume(self, loop: TrainingLoop) -> bool:
        """Take the newest good state up, if there is one; return whether there was."""
        found = self.folder.newest(CHECKPOINTS_STATE)
        if found is None:
            return False
        try:
            self._take_up(found, loop)
        except RarebitError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.name!r} in {str(self.folder.folder)!r} does not hold the state of this "
                f"training: {first_line(error)}; choose another folder"
            ) from None
        return True

    def _take_up(self, found: Found, loop: TrainingLoop) -> None:
        changed = differences(found.state["run"], self.run)
        if changed:
            raise CheckpointError(
                f"{str(self.folder.folder)!r} holds the checkpoints of another run: "
                f"{'; '.join(changed[:3])}; choose another folder, or the same settings and data"
            )
        for line in environment_warnings(found.state["environment"], describe_environment()):
            self.say(line)
        epoch = found.state["best"]["epoch"]
        weights = None if epoch is None else self.folder.read(f"{BEST}{epoch:06d}")["weights"]
        loop.load(found.state, weights)
        self.best_epoch = epoch
        for name, reason in found.damaged:
            self.say(f"the checkpoint {name} is passed over: {reason}")
        damaged = {name for name, _ in found.damaged}  # their names are needed again
        self.folder.prune([name for name in self.folder.names() if name not in damaged])
        self.say(f"resumed from {found.name}: epoch {loop.epoch}, batch {loop.batch}")

    def _stop(self, loop: TrainingLoop) -> None:
        self.save(loop)
        self.wait()
        assert self.stop.signal is not None
        raise TrainingInterrupted(
            f"stopped after batch {loop.batch} of epoch {loop.epoch}, which is written to "
            f"{str(self.folder.folder)!r}; train again with resume to go on",
            signal=self.stop.signal,
        )

    def _write(self, name: str, state: dict[str, Any], best: dict[str, Tensor] | None) -> None:
        names = self.folder.names()
        if best is not None:
            weights = f"{BEST}{self.best_epoch:06d}"
            if weights not in names:
                self.folder.write(weights, {"weights": best})
        if name not in names:
            self.folder.write(name, state)
        names = self.folder.names()
        # the two newest states were written after the two newest best weights, and refer to no others
        self.folder.prune(
            [name for kind in (CHECKPOINTS_STATE, BEST) for name in _of_kind(names, kind)[-KEEP:]]
        )


def _of_kind(names: list[str], kind: str) -> list[str]:
    return [name for name in names if name.startswith(kind)]


def _copied(tree: Any) -> Any:
    """Return a copy of nested values with its tensors on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        copies = [_copied(value) for value in tree]
        return copies if isinstance(tree, list) else tuple(copies)
    return tree
