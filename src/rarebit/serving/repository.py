"""Where models are: a file, a run folder, or a folder of both; and a private copy of each version.

    clicks.onnx                 rarebit serve clicks.onnx
    runs/clicks/model.json      rarebit serve runs/clicks
    models/clicks.onnx          rarebit serve models
    models/clicks.*.delta       what changed since: applied to the copy of clicks.onnx, each to the version that it is for
    models/clicks/1/model.onnx  the same, as Triton lays out its models; the highest number is served

A version is served from a copy, so that the file can be replaced at any time, and a worker that starts later loads
what the others have loaded.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from rarebit.errors import RarebitError, ServingError
from rarebit.export.delta import Delta, read_delta
from rarebit.settings import suggest

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder that `rarebit` is imported from, so that other processes import the same."""
CHUNK = 1 << 22
PREFIX, LOCK, YOUNG = "rarebit-serve-", "lock", 60.0
"""Names of private folders and of the lock in them; seconds in which a folder may have no lock yet."""


@dataclass(frozen=True)
class Source:
    """A model to serve."""

    name: str
    path: Path
    version: str = ""
    """The number of the folder in Triton's layout; otherwise a checksum is the version."""


class PrivateFolder:
    """A temporary folder with a lock that ends with the process: what a killed server leaves is removed by the next."""

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ServingError(
                f"cannot make a temporary folder: {error.strerror}; choose another one with TMPDIR"
            ) from None

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def remove_leftovers() -> None:
        """Delete the folders of servers that were killed."""
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):  # not ours, or somebody else removes it
                if time.time() - path.stat().st_mtime < YOUNG:
                    continue
                with (path / LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Snapshot:
    """A private copy of a version."""

    folder: PrivateFolder
    path: Path
    """The file, or the run folder that only torch can score."""
    version: str
    num_bytes: int
    note: str = ""
    """Why torch scores it."""
    deltas: tuple[str, ...] = ()
    """The deltas that were applied, in this order."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run."""
    return (folder / "model.json").is_file()


def find_sources(path: Path) -> dict[str, Source]:
    """Return the models at a path, by name."""
    if path.is_file():
        return {path.stem: Source(path.stem, path)}
    if not path.is_dir():
        raise ServingError(
            f"{str(path)!r} does not exist; expected a .onnx file, a run folder or a folder of models"
        )
    if is_run(path):
        name = path.resolve().name
        return {name: Source(name, path)}
    found: dict[str, Source] = {}
    for entry in sorted(path.iterdir()):
        source = _source(entry)
        if source is not None:
            if source.name in found:
                raise ServingError(
                    f"two models are named {source.name!r}: {found[source.name].path.name!r} and "
                    f"{entry.name!r} in {str(path)!r}"
                )
            found[source.name] = source
    if not found:
        raise ServingError(
            f"{str(path)!r} has no model; expected .onnx files, run folders or NAME/1/model.onnx"
        )
    return found


def _source(entry: Path) -> Source | None:
    if entry.name.startswith("."):
        return None
    if entry.is_file():
        return Source(entry.stem, entry) if entry.suffix == ".onnx" else None
    if is_run(entry):
        return Source(entry.name, entry)
    numbers = [
        int(one.parent.name) for one in entry.glob("*/model.onnx") if one.parent.name.isdecimal()
    ]
    if not numbers:
        return None
    highest = max(numbers)
    return Source(entry.name, entry / str(highest) / "model.onnx", str(highest))


def find_source(path: Path, name: str) -> Source:
    """Return one model as it is on disk now."""
    sources = find_sources(path)
    if name not in sources:
        raise ServingError(f"no model {name!r} in {str(path)!r}{suggest(name, sources)}")
    return sources[name]


def take_snapshot(source: Source) -> Snapshot:
    """Copy a model to a new folder, with its deltas applied; a run folder is exported there, or copied for torch."""
    folder, note, deltas = PrivateFolder(), "", dict[str, Delta]()
    try:
        if source.path.is_dir():
            path = folder.path / f"{source.name}.onnx"
            note = _export(source.path, path)
            if note:
                path = folder.path / "run"
                shutil.copytree(source.path, path)
        else:
            path = folder.path / source.path.name
            deltas = _deltas_of(source.path)
            if deltas:
                _apply(deltas, source.path, path)
            else:
                _copy(source.path, path)
                for external in _external_data(source.path.parent, path):
                    _copy(external, folder.path / external.name)
        digest, num_bytes = hashlib.sha256(), 0
        for file in sorted(one for one in folder.path.rglob("*") if one.is_file()):
            num_bytes += file.stat().st_size
            with file.open("rb") as opened:
                while not deltas and (chunk := opened.read(CHUNK)):
                    digest.update(chunk)
        version = source.version or digest.hexdigest()[:12]
        if deltas:  # which have checked what they made
            version = list(deltas.values())[-1].version
        return Snapshot(folder, path, version, num_bytes, note, tuple(deltas))
    except OSError as error:
        folder.remove()
        raise ServingError(f"cannot copy {str(source.path)!r}: {error.strerror or error}") from None
    except BaseException:
        folder.remove()
        raise


def _external_data(folder: Path, file: Path) -> list[Path]:
    """Return the files next to a model that it names: weights beyond 2 GB lie in such a file."""
    found = [path for path in folder.glob("*.data") if path.is_file()]
    if not found or not file.stat().st_size:
        return []
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        return [path for path in found if content.find(os.fsencode(path.name)) >= 0]


def _copy(path: Path, target: Path) -> None:
    """Copy a file, unless somebody is writing it."""
    with path.open("rb") as source, target.open("xb") as out:
        before = os.fstat(source.fileno())
        shutil.copyfileobj(source, out, CHUNK)
        after, size = os.fstat(source.fileno()), out.tell()
    if before.st_mtime_ns != after.st_mtime_ns or size != after.st_size:
        raise ServingError(
            f"{str(path)!r} changed while it was read; load it again when it is complete"
        )


def _deltas_of(model: Path) -> dict[str, Delta]:
    """Return the deltas next to a model, each before the one that is for the version it makes."""
    names = [one.stem for one in model.parent.glob("*.onnx")]

    def owner(delta: Path) -> str:
        # of two models clicks and clicks.new, the second one has clicks.new.delta
        return max((n for n in names if delta.name.startswith(f"{n}.")), key=len, default="")

    found = sorted(one for one in model.parent.glob("*.delta") if owner(one) == model.stem)
    return _in_order({one.name: read_delta(one) for one in found})


def _apply(deltas: Mapping[str, Delta], model: Path, target: Path) -> None:
    """Write what deltas make of a model."""
    for name, delta in deltas.items():
        changed = target.with_name(f"{target.name}.changed")
        try:
            delta.apply(target if target.exists() else model, changed)
        except RarebitError as error:
            raise ServingError(f"cannot apply {name!r}: {error}") from None
        changed.replace(target)


def _in_order(deltas: Mapping[str, Delta]) -> dict[str, Delta]:
    """Return deltas in the order in which each makes the version that the next one is for."""
    by_base = {delta.base: name for name, delta in deltas.items()}
    made = {delta.result for delta in deltas.values()}
    ordered = dict[str, Delta]()
    names = [name for name, delta in deltas.items() if delta.base not in made]
    while len(names) == 1 and names[0] not in ordered:
        name = names[0]
        ordered[name] = deltas[name]
        names = [found] if (found := by_base.get(deltas[name].result)) else []
    if len(ordered) < len(deltas):
        shown = ", ".join(deltas)
        raise ServingError(
            f"these deltas do not follow one another: {shown}; remove the wrong ones"
        )
    return ordered


def _export(run: Path, target: Path) -> str:
    """Export a run folder; return why it cannot be exported, or nothing."""
    words = ["export", str(run), "--to", "onnx", "--out", str(target)]
    done = subprocess.run(  # noqa: S603  # our own command line, in a process that ends: it imports torch
        [sys.executable, "-m", "rarebit", *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and target.is_file():
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("rarebit: ")]
    why = lines[-1].removeprefix("rarebit: ") if lines else "see rarebit export"
    return f"scored by torch, which is slower, because it cannot be exported: {why}"


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the same package, without the token."""
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    found.pop("RAREBIT_TOKEN", None)
    return found
