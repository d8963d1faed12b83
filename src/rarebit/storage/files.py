"""Atomic files and folders: what has its name is complete.

    .NAME.PID.writing     being written, or left by a process that died
    .NAME.PID.removing    making way for a new folder, or left in the same way

A file or folder is written under a hidden name beside its target, synced, and renamed. Rarebit changes the disk through `Disk`
alone, so that a test can make any operation fail, or kill the process there.

`TensorFolder` keeps tensors with a description, saved over an older one in one atomic step:

    NAME.json                   the description: a checksum of each file, and one of its own
    STEM-<hash>.safetensors     the tensors
    PART-<hash>/                more files, such as the vocabulary of a model

It writes data first, under names that depend on its content, so it never replaces older data. Renaming the description
commits the save: until then the folder holds the old content, from then on the new. Data without a description is removed last.

`StateEncoder` and `StateDecoder` turn nested states into JSON values and numbered tensors, and back to the bit. Plain values
and lists stand for themselves. Every JSON object has exactly one key, which names its kind, so a user's dictionary is never
mistaken for one of them:

    {"dict": [[key, value], ...]}   {"tuple": [...]}       {"tensor": "12"}
    {"int": "0x..."}                beyond 64 bits         {"float": "7ff8000000000000"}   not finite
    {"text": "6162..."}             not valid Unicode, in hexadecimal
"""

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rarebit.errors import CheckpointError, RarebitError, TrainingError


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
        path.touch()
        mode = (
            path.stat().st_mode
        )  # as the user's umask has it; safetensors makes the file unreadable to others
        save_file(separate, path, dict(metadata) if metadata else None)
        path.chmod(mode)

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

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two names in one atomic step; return whether the system could."""
        swap: Any = getattr(ctypes.CDLL(None), "renameat2", None)
        here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return swap is not None and swap(here, bytes(one), here, bytes(other), both) == 0

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
        missing = Path(os.fsdecode(error.filename))
        missing = missing.parent if HIDDEN.fullmatch(missing.name) else missing
        return f"{str(missing)!r} is missing; choose another folder"
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; ValueError for anything else."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  # of a file, not of an argument
    return values


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
    partial, old, is_kept = hidden(target, "writing"), hidden(target, "removing"), False
    try:
        disk.remove(partial)
        disk.make_folder(partial)
        yield partial
        sync_tree(partial, disk)
        if not (replace and target.exists() and disk.exchange(partial, target)):
            if replace and target.exists():  # in two steps, where the system has no better
                disk.rename(target, old)
            disk.rename(partial, target)
        is_kept = True  # the old folder, until the new one would survive a power loss
        disk.sync_folder(target.parent)
        is_kept = False
    finally:
        with suppress(OSError):
            if os.path.lexists(old) and not os.path.lexists(target):
                disk.rename(old, target)
            for path in (partial, old):
                if not is_kept and os.path.lexists(path):
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


MAX_DEPTH = 64
"""Levels of a state: far more than any has, far fewer than Python can follow."""
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
SURROGATE = re.compile("[\ud800-\udfff]")  # two in a row would come back from JSON as one character


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells the memory of a tensor from that of others."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class StateEncoder:
    """Turns a state into JSON values, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return a value as JSON holds it; `path` is where in the state it stands."""
        if len(path) > MAX_DEPTH:
            raise CheckpointError(
                f"{_dotted(path[:8])} has more than {MAX_DEPTH} levels or holds itself; make it flatter"
            )
        if isinstance(value, Tensor):
            return {"tensor": self._number(value, path)}
        if isinstance(value, dict):
            return {"dict": [self._pair(key, inner, path) for key, inner in value.items()]}
        if type(value) in {list, tuple}:
            items = [self.encode(inner, (*path, place)) for place, inner in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        return _encode_plain(value, path)

    def _pair(self, key: Any, value: Any, path: tuple[Any, ...]) -> list[Any]:
        if type(key) not in {str, int}:
            raise CheckpointError(
                f"{_dotted(path)} has the key {key!r}, which is {_kind(key)}; use str or int keys"
            )
        return [_encode_plain(key, path), self.encode(value, (*path, key))]

    def _number(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Return the number that a tensor is stored under; the same for the same memory."""
        has_data = type(tensor) in {Tensor, nn.Parameter} and not tensor.is_meta
        is_dense = tensor.layout is torch.strided and not tensor.is_neg()
        if not has_data or not is_dense or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{_dotted(path)} is {_kind(tensor)} of {tensor.dtype}, {tensor.layout}, on "
                f"{tensor.device}, which a checkpoint cannot hold; make it an ordinary tensor first"
            )
        place = place_of(tensor)
        if tensor.numel() and place in self._numbers:
            return self._numbers[place]
        number = self._numbers[place] = str(len(self.tensors))
        self.tensors[number] = tensor
        return number


def _encode_plain(value: Any, path: tuple[Any, ...]) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if type(value) is str:
        is_text = SURROGATE.search(value) is None
        return value if is_text else {"text": value.encode("utf-8", "surrogatepass").hex()}
    raise CheckpointError(
        f"{_dotted(path)} is {_kind(value)}, which a checkpoint cannot hold; "
        "use tensors, plain numbers, str, None, and dict, list and tuple of them"
    )


class StateDecoder:
    """Turns JSON values back into a state. Whatever is not as the encoder made it is an error."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self._unused = tensors, set(tensors)

    def decode_all(self, content: Any) -> dict[str, Any]:
        """Return a whole state, all of whose tensors are used."""
        state = self.decode(content, 0)
        if isinstance(state, dict) and not self._unused:
            return state
        raise ValueError("the state does not describe its tensors")

    def decode(self, content: Any, depth: int) -> Any:
        """Return a value from what JSON held."""
        if depth > MAX_DEPTH:
            raise ValueError(f"the state is nested deeper than {MAX_DEPTH} levels")
        if isinstance(content, list):
            return [self.decode(inner, depth + 1) for inner in content]
        return self._decode_object(content, depth) if isinstance(content, dict) else content

    def _decode_object(self, content: dict[str, Any], depth: int) -> Any:
        match content if len(content) == 1 else None:
            case {"dict": list(pairs)}:
                decoded = {self.decode(k, depth + 1): self.decode(v, depth + 1) for k, v in pairs}
                if len(decoded) != len(pairs) or not {type(key) for key in decoded} <= {str, int}:
                    raise ValueError("the state has a dictionary with wrong keys")
                return decoded
            case {"tuple": list(items)}:
                return tuple(self.decode(items, depth))
            case {"tensor": str(number)} if number in self.tensors:
                self._unused.discard(number)
                return self.tensors[number]
            case {"int": str(digits)}:
                return int(digits, 16)
            case {"float": str(bits)}:
                return struct.unpack(">d", bytes.fromhex(bits))[0]
            case {"text": str(coded)}:
                return bytes.fromhex(coded).decode("utf-8", "surrogatepass")
        raise ValueError(
            "the state has a value of an unknown kind or names a tensor that is missing"
        )


def spell_tensor(value: object) -> str:
    """Return type and shape of a tensor in a few words; of anything else, what it is."""
    if not isinstance(value, Tensor):
        return "missing" if value is None else _kind(value)
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def check_tensors(own: Mapping[str, Any], given: Any, what: str) -> None:
    """Raise unless stored tensors have the names, shapes and types of those here.

    What is not a tensor here is left to whoever loads it.
    """
    found = given if isinstance(given, Mapping) else {}
    more = [name for name, value in found.items() if name not in own and isinstance(value, Tensor)]
    for name in (*(name for name, value in own.items() if isinstance(value, Tensor)), *more):
        here, there = spell_tensor(own.get(name)), spell_tensor(found.get(name))
        if here != there:
            raise TrainingError(
                f"{what}: {name!r} is {there} in the state and {here} here; use the same model and settings"
            )


@torch.no_grad()
def load_tensors_(own: Mapping[str, Tensor], given: Any, what: str) -> None:
    """Copy stored tensors into those here, of the same shapes and types; torch would stretch and convert others."""
    check_tensors(own, given, what)
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the state"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


FORMAT = 2
"""Format 1: the checksum of the tensors is `sha256`; models have files with fixed names."""
HASH = "[0-9a-f]{16}"
NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
MAX_DESCRIPTION_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorFolder:
    """How one kind of thing is stored in a folder."""

    what: str
    """The name of the kind, and a key that every description of it has."""
    description: str
    """The file name of the description."""
    error: type[RarebitError]
    when_damaged: str
    """What to do about a damaged folder."""
    stem: str = "tensors"
    """How the name of the tensors' file starts."""
    older: tuple[str, ...] = ()
    """Fixed names of data in format 1, which a new save replaces."""

    def write(
        self,
        folder: str | os.PathLike[str],
        description: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, Callable[[Path], object] | None] | None = None,
        disk: Disk = DISK,
    ) -> Path:
        """Write to a folder, over an older one if there is one, and return the folder.

        Each of the parts is a function that makes and fills a folder, or None where there is none now.
        """
        folder, parts = Path(folder), parts or {}
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            json.dumps(description)  # before anything is written
            make_folder(folder, disk)
            data = self._write(folder, description, tensors, parts, disk)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            # else JSON cannot hold a value, or it is an error of a part
            of_disk = isinstance(error, OSError | SafetensorError)
            reason = explain(error, needed) if of_disk else str(error)
            raise self.error(f"cannot write the {self.what} to {str(folder)!r}: {reason}") from None
        finally:
            with suppress(OSError):
                for path in leftovers(folder):
                    disk.remove(path)
        kinds = [rf"{self.stem}-{HASH}\.safetensors", *(f"{part}-{HASH}" for part in parts)]
        is_data = re.compile("|".join([*kinds, *map(re.escape, self.older)])).fullmatch
        with suppress(OSError):  # the save is complete
            for path in list(folder.iterdir()):
                if is_data(path.name) and path not in data:
                    disk.remove(path)
        return folder

    def _write(
        self,
        folder: Path,
        description: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, Callable[[Path], object] | None],
        disk: Disk,
    ) -> list[Path]:
        """Write the data, then the description; return where the data lies."""
        from rarebit import __version__

        partial = hidden(folder / self.stem, "writing")
        disk.save_tensors(partial, tensors)
        disk.sync_file(partial)
        checksum = file_checksum(partial)
        name = f"{self.stem}-{checksum[:16]}.safetensors"
        files, named, places = {name: checksum}, {}, [(partial, folder / name)]
        for part, fill in parts.items():
            if fill is not None:
                found, place = _fill_part(folder / part, fill, disk)
                named[part] = place.name
                files |= {f"{place.name}/{file}": found[file] for file in found}
                places.append((hidden(folder / part, "writing"), place))
        for source, target in places:
            if not (source.is_dir() and target.exists()):  # the same files, from an earlier save
                disk.rename(source, target)
        disk.sync_folder(folder)
        described = {"format": FORMAT, "rarebit": __version__, **description}
        described |= {"tensors": name, "parts": named, "files": files}
        described[OWN_CHECKSUM] = own_checksum(described)
        text = json.dumps(described, indent=1) + "\n"
        write_file(folder / self.description, text.encode(), error=self.error, disk=disk)
        return [place for _, place in places]

    def read(self, folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the description and the tensors, after checking every file against its checksum."""
        folder = Path(folder)
        description = self.read_description(folder)
        place = folder
        try:
            for name in description["parts"].values():
                place = folder / name
                for path in (place, *sorted(place.iterdir())):
                    if path.is_symlink() or not (path.is_file() or path == place):
                        raise self.error(f"{str(path)!r} is not a plain file; {self.when_damaged}")
            for name, checksum in description["files"].items():
                place = folder / name
                self._require_plain_file(folder, place)
                if file_checksum(place) != checksum:
                    raise self.error(
                        f"{str(place)!r} is damaged or belongs to another save: its checksum is not the "
                        f"one in {self.description}; {self.when_damaged} or take an older copy"
                    )
            place = folder / description["tensors"]
            return description, load_file(place)
        except FileNotFoundError:
            missing = place.relative_to(folder)
            raise self.error(f"{str(folder)!r} is incomplete: {missing} is missing") from None
        except (OSError, SafetensorError) as error:
            raise self.error(f"cannot read {str(place)!r}: {error}") from None

    def read_description(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the description alone, in today's format."""
        path = Path(folder) / self.description
        try:
            self._require_plain_file(Path(folder), path, MAX_DESCRIPTION_BYTES)
            description: Any = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise self.error(
                f"{str(folder)!r} holds no {self.what}: {self.description} is missing"
            ) from None
        except OSError as error:
            raise self.error(f"cannot read {str(path)!r}: {error.strerror}") from None
        except self.error:
            raise
        except (ValueError, RecursionError) as error:  # invalid JSON, not UTF-8, or too deep
            raise self.error(f"{str(path)!r} is damaged: {error}; {self.when_damaged}") from None
        if not isinstance(description, dict) or self.what not in description:
            raise self.not_described(folder)
        self._check_version(path, description)
        if description["format"] == 1:
            description = self._of_today(description)
        if not _names_its_files(description):
            raise self.not_described(folder)
        return dict(description)

    def _check_version(self, path: Path, description: Mapping[str, Any]) -> None:
        """Raise where a description is of a later version, or not what its checksum says."""
        version = description.get("format")
        if type(version) is not int or version < 1:
            raise self.not_described(path.parent)
        if version > FORMAT:
            raise self.error(
                f"{str(path)!r} was written in format {version} by Rarebit "
                f"{description.get('rarebit')}; this version reads up to format {FORMAT}: upgrade it"
            )
        # the first models had no checksum of the description
        may_lack_it = version == 1 and bool(self.older)
        if not ((may_lack_it and OWN_CHECKSUM not in description) or is_own_checksum(description)):
            raise self.error(
                f"{str(path)!r} is damaged: it does not match its checksum; {self.when_damaged} or "
                "take an older copy"
            )

    def _of_today(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Return a description of format 1 in today's format."""
        tensors = self.older[0] if self.older else description.get("tensors")
        files, parts = {tensors: description.get("sha256")}, {}
        for part in self.older[1:]:
            checksums = description.get(part) or {}
            if not isinstance(checksums, dict):
                return {}
            if checksums:
                parts[part] = part
                files |= {f"{part}/{name}": value for name, value in checksums.items()}
        return {**description, "tensors": tensors, "parts": parts, "files": files}

    def not_described(self, folder: str | os.PathLike[str]) -> RarebitError:
        """Return the error for a description of something else."""
        path = Path(folder) / self.description
        return self.error(f"{str(path)!r} does not describe a {self.what} of Rarebit")

    def unreadable(self, folder: str | os.PathLike[str], reason: Exception) -> RarebitError:
        """Return the error for tensors that do not fit the description."""
        return self.error(f"{str(Path(folder))!r} holds no readable {self.what}: {reason}")

    def _require_plain_file(self, folder: Path, path: Path, most_bytes: float = math.inf) -> None:
        status = path.stat()
        if not path.resolve().is_relative_to(folder.resolve()):
            raise self.error(
                f"{str(path)!r} is a link that leads out of its folder, which is not followed; copy the "
                "file itself into the folder"
            )
        if not stat.S_ISREG(status.st_mode):
            raise self.error(f"{str(path)!r} is not a plain file; {self.when_damaged}")
        if status.st_size > most_bytes:
            raise self.error(f"{str(path)!r} is too large to be the description of a {self.what}")


def _fill_part(
    place: Path, fill: Callable[[Path], object], disk: Disk
) -> tuple[dict[str, str], Path]:
    """Fill a hidden folder; return the checksums of its files, and the place where it belongs."""
    partial = hidden(place, "writing")
    disk.remove(partial)
    fill(partial)
    sync_tree(partial, disk)
    checksums = _checksums(partial)
    if not checksums:
        raise ValueError(f"{place.name} must be a folder of plain files")
    named = place.with_name(f"{place.name}-{own_checksum(checksums)[:16]}")
    for target in (place, named):  # the first is a name of format 1
        if checksums.items() <= _checksums(target).items():  # other files in it do no harm
            return checksums, target
    disk.remove(named)  # it is damaged: no model can be loaded with it
    return checksums, named


def _names_its_files(description: Mapping[str, Any]) -> bool:
    """Return whether a description names files of its own folder, its tensors among them."""
    match description:
        case {"tensors": str(tensors), "files": dict(files), "parts": dict(parts)}:
            folders = [
                isinstance(part, str) and re.fullmatch(NAME, part) for part in parts.values()
            ]
            names = [re.fullmatch(f"(?:{NAME}/)?{NAME}", name) for name in files]
            return tensors in files and all(folders) and all(names)
    return False


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the files in a folder; none where it is no folder of plain files."""
    if folder.is_symlink() or not folder.is_dir():
        return {}
    paths = sorted(folder.iterdir())
    if any(path.is_symlink() or not path.is_file() for path in paths):
        return {}
    return {path.name: file_checksum(path) for path in paths}
