"""Checkpoints of a training loop: written while training continues, read back to the bit. Never pickle.

    folder/
      lock                       held by the process that writes here, with its number inside
      NAME/tensors.safetensors   the tensors, numbered
      NAME/state.json            its own sha256; then the rest, and the sha256 of the tensors

A checkpoint is a folder that gets its name when it is complete. A name that is taken is refused, so an
old checkpoint is never gone before the new one is there. Names of a training loop:

    at-000003-0000000400/    the loop before batch 400 of epoch 3
    best-000002/             the weights of the best epoch, which later states refer to

The state is copied between two steps, and a thread writes it. The two newest states are kept, so that
there is another one if the disk damages the newest.
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
from rarebit.storage.disk import DISK, Disk, explain, file_lock, open_file, open_folder
from rarebit.storage.encoding import Decoder, Encoder
from rarebit.storage.files import file_checksum, fresh_folder, hidden, leftovers, make_folder
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
LOOP, BEST = "at-", "best-"
KEEP = 2
"""States that are kept."""
SHORT = 1 / 60
"""An epoch that ends within this part of the checkpoint interval after the last checkpoint gets none:
where epochs take a second, writing checkpoints would take longer."""

# What malformed content raises: nothing worse may come out of a file.
NONSENSE = (
    *(AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(OverflowError, RecursionError, SafetensorError, struct.error),
)


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint."""

    name: str
    state: dict[str, Any]
    damaged: tuple[tuple[str, str], ...]
    """Name and reason of each newer one that is damaged, newest first."""


class CheckpointFolder:
    """A folder of checkpoints, made by the first write. Names sort from old to new.

    A state consists of dictionaries with str or int keys, lists, tuples, tensors, None, bool, int,
    float and str. Tensors come back on the CPU, without gradient; a tensor that is in the state twice
    is stored once and comes back as one. Only the process inside `locked()` should write and prune.
    """

    def __init__(self, folder: str | os.PathLike[str], disk: Disk = DISK) -> None:
        self.folder, self.disk = Path(folder), disk
        self._one_at_a_time = threading.Lock()

    def write(self, name: str, state: Mapping[str, Any]) -> Path:
        """Write a state under a free name; an error leaves nothing, or all if the last sync failed."""
        from rarebit import __version__

        target, encoder = self._path(name), Encoder()
        description = {"format": FORMAT, "rarebit": __version__}
        structure = encoder.encode(dict(state))
        needed = len(json.dumps(structure)) + sum(t.nbytes for t in encoder.tensors.values())
        with self._one_at_a_time, self._explained(f"write the checkpoint {name!r} to", needed):
            if os.path.lexists(target):
                raise CheckpointError(f"{str(target)!r} is taken; use another name")
            make_folder(self.folder, self.disk)
            with fresh_folder(target, disk=self.disk) as partial:
                tensors = partial / TENSORS
                self.disk.save_tensors(tensors, encoder.tensors)
                size, checksum = tensors.stat().st_size, file_checksum(tensors)
                files = {TENSORS: {"bytes": size, "sha256": checksum}}
                sealed = _sealed({**description, "files": files, "state": structure})
                self.disk.write_bytes(partial / STATE, sealed)
        return target

    def read(self, name: str) -> dict[str, Any]:
        """Return a state as it was written; a damaged checkpoint is an error."""
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
        """Return the names of the finished checkpoints, oldest first, including damaged ones."""
        with self._explained("look for checkpoints in"), suppress(FileNotFoundError):
            return sorted(
                path.name
                for path in self.folder.iterdir()
                if NAME.fullmatch(path.name) and any(os.path.lexists(path / part) for part in PARTS)
            )
        return []

    def newest(self, prefix: str = "") -> Found | None:
        """Return the newest complete checkpoint whose name starts with a prefix; None without such a name.

        Where all of them are damaged, that is an error: starting over would lose them.
        """
        damaged: list[tuple[str, str]] = []
        for name in reversed([name for name in self.names() if name.startswith(prefix)]):
            try:
                return Found(name, self.read(name), tuple(damaged))
            except CheckpointError as error:
                damaged.append((name, str(error)))
        if damaged:
            why = damaged[0][1].removesuffix("; use an older checkpoint")
            raise CheckpointError(f"{why}; no older one is complete either: choose another folder")
        return None

    def prune(self, keep: Collection[str]) -> None:
        """Remove the other checkpoints, and what dead processes left behind.

        A folder that holds anything but the files of a checkpoint stays.
        """
        if isinstance(keep, str):
            raise CheckpointError(f"keep must be a collection of names, got keep={keep!r}")
        with self._one_at_a_time, self._explained("remove old checkpoints from"):
            others = [self.folder / name for name in self.names() if name not in keep]
            gone = [path for path in others if {part.name for part in path.iterdir()} <= PARTS]
            for path in gone:
                # Renamed first: an interrupted removal must not look like damage.
                away = hidden(path, "removing")
                self.disk.remove(away)
                self.disk.rename(path, away)
            if gone:
                self.disk.sync_folder(self.folder)
            for path in leftovers(self.folder):
                self.disk.remove(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the system releases the lock when this process ends, in any way."""
        with self._explained("lock"):
            make_folder(self.folder, self.disk)
        with file_lock(self.folder / LOCK):
            yield

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name) or name == LOCK:
            raise CheckpointError(
                f"{name!r} cannot be the name of a checkpoint; use a word of letters and digits"
            )
        return self.folder / name

    @contextmanager
    def _explained(self, what: str, needed: int = 0) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = explain(error, needed)
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


class Checkpoints:
    """The checkpoints of one run, in their own folder."""

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
        """When the last checkpoint was started."""
        self.best_epoch: int | None = None
        """The best epoch whose weights are written."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def after_step(self, loop: TrainingLoop) -> None:
        """Save a checkpoint when one is due, or when training is asked to stop."""
        if self.stop.requested:
            self._stop(loop)
        if time.monotonic() >= self.due:
            self.save(loop)

    def after_epoch(self, loop: TrainingLoop) -> None:
        """Save a checkpoint after a longer epoch; that of the last epoch is complete when training ends."""
        if loop.is_finished or time.monotonic() - self.written_at >= SHORT * self.seconds:
            self.save(loop)
        if loop.is_finished:
            self.wait()
        elif self.stop.requested:
            self._stop(loop)

    def save(self, loop: TrainingLoop) -> None:
        """Copy the state of the loop and start writing it."""
        loop.step.raise_if_not_finite()
        raise_if_weights_are_not_finite(loop.step.model)
        self.wait()  # for the last one: there is memory for one copy
        name = f"{LOOP}{loop.epoch:06d}-{loop.batch:010d}"
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
        """Wait until the last checkpoint is written; raise the error of the thread if it failed."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown(wait=True)

    def resume(self, loop: TrainingLoop) -> bool:
        """Load the newest complete state into the loop; return whether there was one."""
        found = self.folder.newest(LOOP)
        if found is None:
            return False
        try:
            self._load(found, loop)
        except RarebitError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.name!r} in {str(self.folder.folder)!r} does not hold the state of this "
                f"training: {first_line(error)}; choose another folder"
            ) from None
        return True

    def _load(self, found: Found, loop: TrainingLoop) -> None:
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
            self.say(f"the checkpoint {name} is skipped: {reason}")
        damaged = {name for name, _ in found.damaged}  # their names are needed again
        self.folder.prune([name for name in self.folder.names() if name not in damaged])
        self.say(f"resumed from {found.name}: epoch {loop.epoch}, batch {loop.batch}")

    def _stop(self, loop: TrainingLoop) -> None:
        self.save(loop)
        self.wait()
        assert self.stop.signal is not None
        raise TrainingInterrupted(
            f"stopped after batch {loop.batch} of epoch {loop.epoch}; the checkpoint is in "
            f"{str(self.folder.folder)!r}: train again with resume to continue",
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
        kinds = ([name for name in names if name.startswith(kind)] for kind in (LOOP, BEST))
        self.folder.prune([name for kind in kinds for name in kind[-KEEP:]])


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
