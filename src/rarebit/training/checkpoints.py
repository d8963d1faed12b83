"""Checkpoints of a training loop: written by a thread while training continues, read back to the bit. Never pickle.

    folder/
      lock                       held by the process that writes here, with its number inside
      NAME/tensors.safetensors   the tensors, numbered
      NAME/state.json            its own sha256; then the rest, and the sha256 of the tensors

A checkpoint is a folder that gets its name when it is complete. A name that is taken is refused, so an old checkpoint is
never gone before the new one is there. The two newest states are kept, in case the disk damages the newest. Names:

    at-000003-0000000400/    the loop before batch 400 of epoch 3
    best-000002/             the weights of the best epoch, which later states refer to

A checkpoint also says what it belongs to (`describe_run`: model, data and settings; a resumed run needs the same ones) and
where it was written (`describe_environment`: versions, processor, threads; a change is allowed and reported with its
consequence). Data is compared by a checksum of every value and its position. With odd 64-bit keys k, over the values x of each
block and the blocks of each array:

    checksum = sum over blocks b of  K_b · (sum over j of  k_j · x_bj)        modulo 2^64

A change of one value always changes it; a swap of values does except with a chance below 2^-30.
"""

import dataclasses
import hashlib
import json
import os
import platform
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from rarebit.data.dataset import Dataset
from rarebit.data.order import random_bits, stream_key
from rarebit.errors import CheckpointError, NewerFormatError, TrainingInterrupted
from rarebit.settings import to_mapping
from rarebit.sharding.pieces import DESCRIPTION, METADATA, Layout, read_pieces, write_pieces
from rarebit.sharding.sharded import whole_parameters
from rarebit.storage.files import (
    DISK,
    Disk,
    StateDecoder,
    StateEncoder,
    explain,
    file_checksum,
    file_lock,
    fresh_folder,
    hidden,
    leftovers,
    make_folder,
    open_file,
    open_folder,
    spell_tensor,
)
from rarebit.tables.apply import find_sites, find_tables
from rarebit.tables.table import methods_of
from rarebit.training.optimizers import row_kernel
from rarebit.training.settings import Training
from rarebit.training.step import first_line, raise_if_weights_are_not_finite

if TYPE_CHECKING:
    from rarebit.training.fit import TrainingLoop

FORMAT = 1
STATE, TENSORS, LOCK = "state.json", "tensors.safetensors", "lock"
PARTS = frozenset({STATE, TENSORS})
MAX_STATE_BYTES = 64 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
LOOP, BEST = "at-", "best-"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
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

MAY_CHANGE = frozenset({"checkpoint_minutes", "epochs", "patience"})
"""Settings that may change when a run resumes: how long to train, and how often to checkpoint."""
BLOCK = 1 << 16
"""Values per block of a checksum: few enough for the processor's cache."""
MOST_LINES = 5
"""Reported differences between models: another model differs in hundreds of tensors."""

DATA_NAMES = {"train": "training data", "valid": "validation data"}

LAST_BITS = "the weights may differ in their last bits from an uninterrupted run"
CONSEQUENCES = {
    "rarebit": "the weights may differ from an uninterrupted run",
    "torch": LAST_BITS,
    "numpy": "the order of the rows may differ from an uninterrupted run",
    "python": "what your own code draws at random may differ from an uninterrupted run",
    "machine": LAST_BITS,
    "cpu": LAST_BITS,
    "device": "the order of the rows and the weights may differ from an uninterrupted run",
    "threads": LAST_BITS,
    "deterministic": LAST_BITS,
    "compiled row kernel": LAST_BITS,
}
"""What may follow when a part of the environment changes."""


class Checkpoints:
    """The checkpoints of one run, in their own folder."""

    def __init__(
        self,
        folder: "CheckpointFolder",
        run: Mapping[str, Any],
        stop: "StopRequests",
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

    def after_step(self, loop: "TrainingLoop") -> None:
        """Save a checkpoint when one is due, or when training is asked to stop."""
        processes = loop.step.processes
        if loop.batch % processes.agree_every:
            return
        # one number for all processes: which signal came, or whether a checkpoint is due
        is_due = time.monotonic() >= self.due
        asked = processes.largest(self.stop.signal or (-1 if is_due else -2))
        if asked > 0:
            self._stop(loop, asked)
        elif asked == -1:
            self.save(loop)

    def after_epoch(self, loop: "TrainingLoop") -> None:
        """Save a checkpoint after a longer epoch; that of the last epoch is complete when training ends."""
        processes = loop.step.processes
        is_due = loop.is_finished or time.monotonic() - self.written_at >= SHORT * self.seconds
        if processes.largest(int(is_due)):
            self.save(loop)
        if loop.is_finished:
            self.wait()
            return
        asked = processes.largest(self.stop.signal or 0)
        if asked:
            self._stop(loop, asked)

    def save(self, loop: "TrainingLoop") -> None:
        """Copy the state of the loop and start writing it."""
        loop.step.raise_if_not_finite()
        raise_if_weights_are_not_finite(loop.step.model)
        self.wait()  # for the last one: memory holds one copy
        name = f"{LOOP}{loop.epoch:06d}-{loop.batch:010d}"
        best = None
        if loop.best.epoch not in (None, self.best_epoch):
            best, self.best_epoch = _copied(loop.best.weights), loop.best.epoch
        described = {"run": dict(self.run), "environment": describe_environment()}
        state = _copied(loop.state()) | described
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

    def resume(self, loop: "TrainingLoop") -> bool:
        """Load the newest complete state into the loop; return whether there was one."""
        found = self.folder.newest(LOOP, _best_of)
        if found is None:
            return False
        try:
            self._load(found, loop)
        except CheckpointError:
            raise
        except NONSENSE as error:
            raise CheckpointError(
                f"{found.name!r} in {str(self.folder.folder)!r} does not hold the state of this "
                f"training: {first_line(error)}; choose another folder"
            ) from None
        return True

    def _load(self, found: "Found", loop: "TrainingLoop") -> None:
        changed = differences(found.state["run"], self.run)
        if changed:
            raise CheckpointError(
                f"{str(self.folder.folder)!r} holds the checkpoints of another run: "
                f"{'; '.join(changed[:3])}; choose another folder, or the same settings and data"
            )
        for line in environment_warnings(found.state["environment"], describe_environment()):
            self.say(line)
        weights = None if found.other is None else found.other["weights"]
        loop.load(found.state, weights)
        loop.step.processes.reseed(loop.settings.seed, loop.num_steps)
        self.best_epoch = loop.best.epoch
        for name, reason in found.damaged:
            self.say(f"the checkpoint {name} is skipped: {reason}")
        damaged = {name for name, _ in found.damaged}  # their names are needed again
        self.folder.prune([name for name in self.folder.names() if name not in damaged])
        self.say(f"resumed from {found.name}: epoch {loop.epoch}, batch {loop.batch}")

    def _stop(self, loop: "TrainingLoop", number: int) -> None:
        self.save(loop)
        self.wait()
        raise TrainingInterrupted(
            f"stopped after batch {loop.batch} of epoch {loop.epoch}; the checkpoint is in "
            f"{str(self.folder.folder)!r}: train again with resume to continue",
            signal=number,
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


def trained_state(
    folder: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the weights that a finished training left in its model, and its last state; None without checkpoints."""
    found = CheckpointFolder(folder).newest(LOOP, _best_of)
    if found is None:
        return None
    try:
        is_averaged = found.other is None and found.state["ema"] is not None
        weights = dict((found.other or {"weights": found.state["model"]})["weights"])
    except NONSENSE as error:
        raise CheckpointError(
            f"{found.name!r} in {str(folder)!r} does not hold the state of a training: {first_line(error)}"
        ) from None
    if is_averaged:
        raise CheckpointError(
            f"{str(folder)!r} is of a training that averaged the weights and had no validation rows, so it does not "
            "hold the weights that it ended with; train with validation rows, or without an average"
        )
    return weights, found.state


def _best_of(state: Mapping[str, Any]) -> str | None:
    """Return the name of the best weights that a state refers to; it may come from a file."""
    match state:
        case {"best": {"epoch": int(epoch)}}:
            return f"{BEST}{epoch:06d}"
    return None


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested values with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        changed = [map_tensors(value, change) for value in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    return tree


def _copied(tree: Any) -> Any:
    return map_tensors(tree, lambda tensor: tensor.detach().to("cpu", copy=True))


class StopRequests:
    """Ctrl-C and SIGTERM as a request: the loop looks at it between two steps, so nothing is lost.

    A second signal stops at once: `KeyboardInterrupt` for SIGINT, `SystemExit(143)` for SIGTERM.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self.signal is not None

    def note(self, number: int, _: FrameType | None) -> None:
        """Record a signal, or stop at once if there was one."""
        if self.signal is None:
            self.signal = int(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Record SIGINT and SIGTERM during a `with` block, then handle them as before.

    Only the main thread can; in another thread nothing is ever requested. A signal that is ignored stays
    ignored, as in a background job of a shell. Inside `shared_requests`, all blocks have the same requests.
    """
    if _SHARED:
        yield _SHARED[-1]
        return
    stop = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {number: signal.getsignal(number) for number in SIGNALS}
    # None is a handler that was not set from Python, which Python could not put back
    taken = [number for number in SIGNALS if old[number] not in (signal.SIG_IGN, None)]
    try:
        for number in taken:
            signal.signal(number, stop.note)
        yield stop
    finally:
        for number in taken:
            signal.signal(number, old[number])


_SHARED: list[StopRequests] = []
"""The requests of `shared_requests`."""


@contextmanager
def shared_requests() -> Iterator[None]:
    """Let all trainings within a `with` block hear of the same requests, in whatever order they begin and end."""
    with stop_requests() as stop:
        _SHARED.append(stop)
        try:
            yield
        finally:
            _SHARED.pop()


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint."""

    name: str
    state: dict[str, Any]
    damaged: tuple[tuple[str, str], ...]
    """Name and reason of each newer one that is damaged or refers to a damaged one, newest first."""
    other: dict[str, Any] | None = None
    """The checkpoint it refers to."""


class CheckpointFolder:
    """A folder of checkpoints, made by the first write. Names sort from old to new.

    A state consists of dictionaries with str or int keys, lists, tuples, tensors, None, bool, int,
    float and str. Tensors come back on the CPU, without gradient; a tensor that is in the state twice
    is stored once and comes back as one. Only the process inside `locked()` should write and prune.
    """

    parts: frozenset[str] = PARTS
    """The files of a checkpoint."""

    def __init__(self, folder: str | os.PathLike[str], disk: Disk = DISK) -> None:
        self.folder, self.disk = Path(folder), disk
        self._one_at_a_time = threading.Lock()

    def write(self, name: str, state: Mapping[str, Any]) -> Path:
        """Write a state under a free name; an error leaves nothing, or all if the last sync failed."""
        from rarebit import __version__

        target, encoder = self._path(name), StateEncoder()
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
            return StateDecoder(tensors).decode_all(description["state"])
        except CheckpointError:
            raise
        except NONSENSE as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"the checkpoint {str(path)!r} cannot be read: {reason}; use an older checkpoint"
            ) from None

    def names(self) -> list[str]:
        """Return the names of the finished checkpoints, oldest first, including damaged ones."""
        return self._listed()

    def _listed(self) -> list[str]:
        with self._explained("look for checkpoints in"), suppress(FileNotFoundError):
            return sorted(
                path.name
                for path in self.folder.iterdir()
                if NAME.fullmatch(path.name)
                and any(os.path.lexists(path / part) for part in self.parts)
            )
        return []

    def newest(
        self, prefix: str = "", other_of: Callable[[Mapping[str, Any]], str | None] | None = None
    ) -> Found | None:
        """Return the newest complete checkpoint whose name starts with a prefix; None without such a name.

        `other_of` names another checkpoint that a state refers to, which must be complete, too. Where all of them are
        damaged, that is an error: starting over would lose them.
        """
        damaged: list[tuple[str, str]] = []
        for name in reversed([name for name in self.names() if name.startswith(prefix)]):
            other = None
            try:
                state = self.read(name)
                other = None if other_of is None else other_of(state)
                referred = None if other is None else self.read(other)
                return Found(name, state, tuple(damaged), referred)
            except CheckpointError as error:
                damaged += [(each, str(error)) for each in (name, other) if each is not None]
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
            others = [self.folder / name for name in self._listed() if name not in keep]
            gone = [path for path in others if all(map(self._is_part, path.iterdir()))]
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

    def _is_part(self, path: Path) -> bool:
        """Return whether a file is one of a checkpoint."""
        return path.name in self.parts

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


class SpreadFolder(CheckpointFolder):
    """A folder of checkpoints of several processes: each writes its pieces, and reads its own whatever wrote them.

    All processes call every method. The first one looks, names and removes for all.
    """

    parts = frozenset({DESCRIPTION, METADATA})

    def __init__(
        self, folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
    ) -> None:
        super().__init__(folder)
        self.optimizer, self.layout = optimizer, Layout(model, optimizer)
        # of its own: a thread writes while training exchanges rows
        self.group = distributed.new_group(backend="gloo")
        self.is_first = distributed.get_rank() == 0

    def write(self, name: str, state: Mapping[str, Any]) -> Path:
        target = self._path(name)
        with self._explained(f"write the checkpoint {name!r} to"):
            if self.is_first:
                make_folder(self.folder, self.disk)
            write_pieces(target, state, self.layout, self.group)
        return target

    def read(self, name: str) -> dict[str, Any]:
        with self._explained(f"read the checkpoint {name!r} of"):
            return read_pieces(self._path(name), self.layout, self.optimizer)

    def names(self) -> list[str]:
        found: list[Any] = [self._listed() if self.is_first else None]
        distributed.broadcast_object_list(found, group=self.group)
        return list(found[0])

    def prune(self, keep: Collection[str]) -> None:
        distributed.barrier(self.group)  # others may still read
        if self.is_first:
            super().prune(keep)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with super().locked() if self.is_first else nullcontext():
            yield

    def _is_part(self, path: Path) -> bool:
        return super()._is_part(path) or path.suffix == ".distcp"


def _sealed(description: Mapping[str, Any]) -> bytes:
    """Return the content of `state.json`: the checksum of what follows, then what follows."""
    text = json.dumps(description, allow_nan=False, separators=(",", ":")).encode()
    if len(text) + 65 > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the state has {len(text):,} bytes besides its tensors; put long lists into tensors"
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

    def short_int(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError(f"{STATE} has a number of {len(digits)} digits")
        return int(digits)

    description = json.loads(text, parse_int=short_int)
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


def describe_run(
    model: nn.Module, train: Dataset, valid: Dataset | None, settings: Training
) -> dict[str, Any]:
    """Return what must be equal for a resumed run to be the same run, as plain values."""
    return {
        "model": _describe_model(model),
        "train": describe_data(train),
        "valid": None if valid is None else describe_data(valid),
        "settings": to_mapping(settings),
    }


def _describe_model(model: nn.Module) -> dict[str, Any]:
    parameters = {
        name: spell_tensor(parameter) + ("" if parameter.requires_grad else " frozen")
        for name, parameter in whole_parameters(model).items()
    }
    return {
        "class": type(model).__qualname__,
        "parameters": parameters,
        "buffers": {name: spell_tensor(buffer) for name, buffer in model.named_buffers()},
        "methods": {
            site.info.name: [_describe_method(method) for method in methods_of(site.table)]
            for site in find_sites(model)
            if methods_of(site.table)
        },
        "frozen": [info.name for info in find_tables(model) if not info.trainable],
    }


def _describe_method(method: Any) -> dict[str, Any]:
    """Return a method without its defaults: a new setting with a default does not change the run."""
    given = {}
    if dataclasses.is_dataclass(method):
        usual = {field.name: field.default for field in dataclasses.fields(method)}
        given = {name: v for name, v in to_mapping(method).items() if v != usual[name]}
    return {"method": type(method).__qualname__, **given}


def describe_data(data: Dataset) -> dict[str, Any]:
    """Return what tells a data set from others."""
    arrays = {"ids": data.ids, "numeric": data.numeric, "label": data.label}
    if data.weight is not None:
        arrays["weight"] = data.weight
    return {
        "schema": data.schema.to_mapping(),
        "rows": len(data),
        "chunks": None if data.chunks is None else list(data.chunks),
        "checksum": _checksum(arrays),
    }


def _checksum(arrays: Mapping[str, Tensor]) -> str:
    """Return the checksum of all arrays; it waits for the device once, at the end."""
    device = next(iter(arrays.values())).device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, array in arrays.items():
        if array.numel() == 0:
            continue
        block_rows = max(BLOCK // (array.numel() // len(array)), 1)
        rows = array.reshape(len(array), -1).view(torch.int32).split(block_rows)
        inner = _keys("value", rows[0].numel()).to(device)
        outer = _keys(name, len(rows)).tolist()
        for block, key in zip(rows, outer, strict=True):
            # sums of integers wrap around, so their order and the device do not matter
            total += (block.reshape(-1) * inner[: block.numel()]).sum() * key
    return f"{int(total) % (1 << 64):016x}"


def _keys(name: str, n: int) -> Tensor:
    """Return random odd 64-bit numbers, the same on every machine."""
    bits = random_bits(stream_key(0, "checksum", name), np.arange(n, dtype=np.uint64))
    return torch.from_numpy((bits | np.uint64(1)).view(np.int64))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how a saved run differs from this one, a line per difference; none for the same run."""
    lines = _model_differences(_part(saved, "model"), _part(now, "model"))
    for name in DATA_NAMES:
        lines += _data_differences(name, saved.get(name), now.get(name))
    # a setting that an older version did not have yet had the value that is now its default
    settings = _part(now, "settings")
    usual = {key: value for key, value in to_mapping(Training()).items() if key in settings}
    pair = (usual | dict(_part(saved, "settings")), settings)
    kept = [{k: v for k, v in one.items() if k not in MAY_CHANGE} for one in pair]
    return lines + list(_changed("settings", *kept))


def _model_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = list(_changed("model", saved, now, ("class", "frozen")))
    tensors = [
        line
        for kind in ("methods", "parameters", "buffers")
        for line in _changed(f"model.{kind}", _part(saved, kind), _part(now, kind))
    ]
    more = len(tensors) - MOST_LINES
    return lines + tensors[:MOST_LINES] + ([f"and {more} more of the model"] if more > 0 else [])


def _data_differences(name: str, saved: Any, now: Any) -> list[str]:
    what = DATA_NAMES[name]
    if not isinstance(saved, Mapping):
        return [f"there was no {what}"] if isinstance(now, Mapping) else []
    if not isinstance(now, Mapping):
        return [f"there is no {what}, there was"]
    what = f"the {what}"
    if saved.get("schema") != now.get("schema"):
        return [f"{what} has other fields"]
    if saved.get("rows") != now.get("rows"):
        return [f"{what} has {now.get('rows')} rows, it had {saved.get('rows')}"]
    if saved.get("chunks") != now.get("chunks"):
        return [f"{what} is mixed in other chunks, as the memory of the machine is another"]
    if saved.get("checksum") != now.get("checksum"):
        return [f"{what} has as many rows as before, but its values differ or lie in another order"]
    return []


def _changed(
    place: str, saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str] | None = None
) -> Iterator[str]:
    """Yield a line per key whose value differs, or that only one of the two has."""
    for key in keys or dict.fromkeys((*saved, *now)):
        if saved.get(key) != now.get(key) or (key in saved) != (key in now):
            was, comes = (_spell(one[key]) if key in one else "not there" for one in (saved, now))
            yield f"{place}.{key} was {was}, now {comes}"


def _part(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a description, which may be anything if it comes from a file."""
    part = run.get(name)
    return part if isinstance(part, Mapping) else {}


def _spell(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def describe_environment(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return what else the last bits of a training depend on, as plain values.

    Without a device, it is the current GPU where CUDA is in use, else the CPU.
    """
    from rarebit import __version__

    device = torch.device(device or ("cuda" if torch.cuda.is_initialized() else "cpu"))
    return {
        "rarebit": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiled row kernel": row_kernel() is not None,
    }


def environment_warnings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes of the environment, a line each, with what may follow."""
    return [
        f"{name} was {_spell(saved.get(name))}, now {_spell(now.get(name))}: {consequence}"
        for name, consequence in CONSEQUENCES.items()
        if saved.get(name) != now.get(name)
    ]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
