"""A prepared log as a folder. Reading it needs torch and numpy only.

    manifest.json    fields, rows of each part, statistics, and size and checksum of every file
    ids.npy          int32 (rows, slots): the rows for training, then validation, then testing
    numeric.npy      float32 (rows, columns)
    label.npy        uint8 (rows,)
    weight.npy       float32 (rows,), where rows have a weight
    group.npy        int64 (rows,), where rows are grouped: a hash of the value, 0 for none
    counts.npy       int64: how often each id of each field occurs in training, field after field
    schema.toml      the schema of the raw log, to edit and use again
    encoder/         the vocabulary, to encode other raw rows; training does without it
    .parts/          only while parts of the log are still to be encoded, and without a manifest

Opening compares every file with its checksum, and maps the arrays into memory.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rarebit.data.log_schema import ROW_ARRAYS
from rarebit.data.schema import Schema
from rarebit.errors import DataError
from rarebit.settings import check_types, from_mapping, require
from rarebit.storage.files import (
    DISK,
    explain,
    file_checksum,
    fresh_folder,
    is_own_checksum,
    leftovers,
    make_folder,
    own_checksum,
    write_file,
)

FORMAT = 1
MANIFEST, ENCODER, SCHEMA, BAD_ROWS = "manifest.json", "encoder", "schema.toml", "bad_rows.jsonl"
CHANGES = "changes.npz"
"""What a day did to the vocabularies of a log that grows."""
OWN = "manifest_sha256"
PARTS = ".parts"
"""What encoding the parts of a merged log needs; removed when all of them are there."""
SELECTIONS = "selections"
"""Selections that runs computed from the log; they are replaced with it."""
_at_work: set[Path] = set()
"""Folders that this process is filling now."""

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "counting", "writing"), how much of it is done, and of how much."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


RARE_BELOW = 10
TAIL_POINTS = 24


@dataclass(frozen=True, kw_only=True)
class FieldStatistics:
    """One field of a prepared log, over all splits, with raw values: before any becomes unknown."""

    name: str
    """The field's name."""
    kind: str
    """What it holds: categorical, multi or numeric."""
    distinct: int
    """Distinct values, without missing."""
    rows: int
    """Rows of its table; zero where it has none."""
    top_share: float
    """Share of the rows whose value is among the top fifth of the values, rounded up."""
    rare_share: float
    """Share of the rows whose value was seen fewer than 10 times."""
    missing_share: float
    """Share of the rows without a value."""
    unknown_shares: tuple[float, ...]
    """Share of the rows of train, valid and test whose value is unknown."""
    tail: tuple[int, ...]
    """Counts of the values at the ranks `tail_ranks(distinct)`, the most frequent first."""

    def __post_init__(self) -> None:
        check_types(self, where=str(self.name))
        ranks = len(tail_ranks(self.distinct))
        require(
            len(self.tail) in (0, ranks),
            f"{self.name}: {self.distinct} distinct values have a tail of {ranks} counts, "
            f"got {len(self.tail)}",
        )


@dataclass(frozen=True, kw_only=True)
class DataStatistics:
    """A prepared log: rows, label rates, and how long the tail of each field is."""

    rows: tuple[int, ...]
    """Rows of train, valid and test."""
    label_rates: tuple[float, ...]
    """Share of the rows of train, valid and test whose label is 1; zero where there are no rows."""
    bad_rows: int
    """Malformed rows that were skipped."""
    fields: tuple[FieldStatistics, ...]
    """The fields, in order."""

    def __post_init__(self) -> None:
        check_types(self, where="statistics")
        require(
            len(self.rows) == len(self.label_rates),
            f"statistics: every split has rows and a label rate, "
            f"got {len(self.rows)} and {len(self.label_rates)}",
        )


def tail_ranks(distinct: int) -> list[int]:
    """Return the ranks at which a tail is kept: from 1 to the last, evenly on a log scale."""
    if distinct < 1:
        return []
    return sorted({round(distinct ** (i / (TAIL_POINTS - 1))) for i in range(TAIL_POINTS)})


def value_statistics(counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return distinct, top_share, rare_share and tail of a field from the counts of its values."""
    ordered = np.sort(counts[counts > 0])[::-1]
    distinct, rows = len(ordered), max(int(ordered.sum()), 1)
    return {
        "distinct": distinct,
        "top_share": int(ordered[: -(-distinct // 5)].sum()) / rows,
        "rare_share": int(ordered[ordered < RARE_BELOW].sum()) / rows,
        "tail": tuple(int(ordered[rank - 1]) for rank in tail_ranks(distinct)),
    }


@dataclass(frozen=True)
class StoredEncoder:
    """The encoder in a folder, not read yet: reading needs Polars, copying does not."""

    folder: Path

    def save(self, folder: Path) -> None:
        """Copy it to a new folder."""
        shutil.copytree(self.folder, folder)


class ManifestFolder:
    """A folder with a manifest, which has the size and the checksum of every file."""

    what, command = "prepared log", "prepare"
    """What the folder is, and the command that makes it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder, self.what, self.command)
        kind = self.manifest.get("kind", ManifestFolder.what)
        if kind != self.what:
            raise DataError(
                f"{str(self.folder)!r} is a {kind}, not a {self.what}; make one with rarebit data "
                f"{self.command}"
            )

    @property
    def checksum(self) -> str:
        """The identity of the folder: the manifest's checksum, which covers the checksums of all files."""
        return str(self.manifest[OWN])

    def check_files(self) -> None:
        """Raise if a file is missing or has another size."""
        for name, file in self._files().items():
            path = self.folder / name
            if type(file["sha256"]) is not str:
                raise DataError(f"{str(self.folder)!r} is damaged: {name} has no checksum")
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise DataError(
                    f"{str(self.folder)!r} is damaged: {name} is missing or not as long as it was "
                    f"written; {self.command} it again"
                )

    def _files(self) -> dict[str, Any]:
        """Return the files that must exist."""
        files: dict[str, Any] = self.manifest["files"]
        return files

    def verify(self) -> None:
        """Read every file and compare checksums; raise if one is damaged."""
        for name, file in self._files().items():
            if file_checksum(self.folder / name) != file["sha256"]:
                raise DataError(
                    f"{str(self.folder / name)!r} is damaged: it is not what its checksum says; "
                    f"{self.command} the log again or take another copy"
                )


class PreparedFolder(ManifestFolder):
    """The contents of a prepared folder; arrays are opened when asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        try:
            encoder = self.folder / ENCODER
            self.schema = replace(
                Schema.from_mapping(self.manifest["schema"]),
                encoder=StoredEncoder(encoder) if encoder.exists() else None,
            )
            self.rows = tuple(int(rows) for rows in self.manifest["rows"])
            self.check_files()
        except DataError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
            raise DataError(f"{str(self.folder)!r} is damaged: {error}; prepare it again") from None

    @cached_property
    def statistics(self) -> DataStatistics:
        """Statistics of its rows and fields."""
        try:
            return from_mapping(DataStatistics, self.manifest["statistics"], where="statistics")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{str(self.folder)!r} is damaged: {error}; prepare it again") from None

    def check_files(self) -> None:
        """Raise if the rows cannot be so many, or a file is missing or has another size."""
        if len(self.rows) != 3 or min(self.rows) < 0:
            raise DataError(f"{str(self.folder)!r} is damaged: it has {self.rows} rows")
        super().check_files()

    def _files(self) -> dict[str, Any]:
        """Return the files that must exist: training does without the vocabulary."""
        files = super()._files()
        if (self.folder / ENCODER).exists():
            return files
        return {name: file for name, file in files.items() if not name.startswith(f"{ENCODER}/")}

    def array(self, name: str) -> NDArray[Any]:
        """Return an array, memory-mapped; changes to it stay in this process."""
        rows = sum(self.rows)
        num_ids = sum(field.rows for field in self.schema.table_fields)
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "ids": ((rows, self.schema.num_slots), np.int32),
            "numeric": ((rows, len(self.schema.numeric_fields)), np.float32),
            **{other: ((rows,), dtype) for other, dtype in ROW_ARRAYS.items()},
            "counts": ((num_ids,), np.int64),
        }
        shape, dtype = expected[name]
        path = self.folder / f"{name}.npy"
        try:  # an empty array cannot be mapped
            mode: Any = None if 0 in shape else "c"
            array: NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{str(path)!r} is damaged: {error}; prepare it again") from None
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise DataError(
                f"{str(path)!r} holds {array.dtype} {array.shape}, where {dtype} {shape} was written; "
                "prepare it again"
            )
        return array

    def has(self, name: str) -> bool:
        """Return whether the log has an array of this name."""
        return f"{name}.npy" in self.manifest["files"]

    def fingerprint(self) -> tuple[object, ...]:
        """Return what changes when a file of the folder is replaced or written to."""
        stats = [(self.folder / name).stat() for name in self._files()]
        return self.checksum, *((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)


class ArrayWriter:
    """Writes the rows of an array in any order, without holding it in memory.

    Several processes may write to one file, each its own rows, once it exists (`is_new=False`).
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: Any, *, is_new: bool = True
    ) -> None:
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
        header = BytesIO()
        np.lib.format.write_array_header_1_0(header, {**described, "shape": shape})
        self.start = header.tell()
        self.row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize
        size = self.start + shape[0] * self.row_bytes
        if not is_new and path.stat().st_size != size:
            raise DataError(f"{str(path)!r} is damaged: it is not as long as it was written")
        self.file: BinaryIO = path.open("wb" if is_new else "r+b")
        if is_new:
            self.file.write(header.getvalue())
            self.file.truncate(size)

    def write(self, row: int, rows: NDArray[Any]) -> None:
        """Write some rows, the first at this row."""
        self.file.seek(self.start + row * self.row_bytes)
        self.file.write(np.ascontiguousarray(rows).data)

    def close(self) -> None:
        """Finish the file."""
        self.file.close()


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which gets its name once it is complete; an error removes it."""
    target = target.resolve()
    if target in _at_work:
        raise DataError(f"{str(target)!r} is being prepared by this process already; wait for it")
    try:
        for path in leftovers(target.parent, target.name):
            if path.suffix in {".old", ".removing"} and not target.exists():
                path.rename(target)  # killed between the two steps of replacing it
            else:
                DISK.remove(path)
        _check_free(target, overwrite=overwrite)
        _at_work.add(target)
        make_folder(target.parent)
        with fresh_folder(target, replace=overwrite) as folder:
            yield folder
            _check_free(target, overwrite=overwrite)  # hours may have passed
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r}: {explain(error)}") from error
    finally:
        _at_work.discard(target)


def _check_free(target: Path, *, overwrite: bool) -> None:
    """Raise if the folder must not be replaced, has other files, or is inside another prepared log."""
    for parent in target.parents:
        if _listed(parent):
            raise DataError(
                f"{str(target)!r} lies in the prepared log {str(parent)!r}, which would no longer be "
                "what its manifest says; choose another place"
            )
    if not target.exists():
        return
    is_prepared = (target / MANIFEST).exists()
    if not (overwrite and is_prepared):
        hint = "choose another, or overwrite it (--overwrite)"
        if (target / PARTS).exists():
            hint = "it waits for its parts: rarebit data encode, or remove it by hand"
        elif not is_prepared:
            hint = "it was not prepared by Rarebit, so it stays as it is: choose another"
        raise DataError(f"{str(target)!r} exists already; {hint}")
    listed = _listed(target)
    if not listed:
        raise DataError(
            f"{str(target)!r} exists already, and its {MANIFEST} does not say what in it was "
            "prepared by Rarebit, so it stays as it is: remove it by hand, or choose another"
        )
    ours = {target / name for name in (MANIFEST, SCHEMA, BAD_ROWS, *listed)}
    ours |= {parent for path in ours for parent in path.parents}
    for path in sorted(target.rglob("*")):
        if path not in ours and path.relative_to(target).parts[0] != SELECTIONS:
            raise DataError(
                f"overwriting {str(target)!r} would delete {path.relative_to(target).as_posix()!r}, "
                "which is no part of the prepared log; move it away, or choose another folder"
            )


def _listed(folder: Path) -> list[str]:
    """Return the files that a folder's manifest lists; none without a valid manifest."""
    try:
        return list(_read_manifest(folder)["files"])
    except (DataError, LookupError, TypeError):
        return []


def write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the manifest, last: a folder without it is no prepared log."""
    from rarebit import __version__

    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
    }
    described = {
        name: {"bytes": path.stat().st_size, "sha256": file_checksum(path)}
        for name, path in files.items()
    }
    manifest = {"format": FORMAT, "rarebit": __version__, **values, "files": described}
    manifest[OWN] = own_checksum(manifest, OWN)
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    write_file(folder / MANIFEST, text.encode(), error=DataError)


def _read_manifest(
    folder: Path, what: str = ManifestFolder.what, command: str = ManifestFolder.command
) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"make one with rarebit data {command}"
        if (folder / PARTS).exists():
            hint = "parts of the log are still to be encoded, with rarebit data encode"
        raise DataError(f"{str(folder)!r} holds no {what}: {MANIFEST} is missing; {hint}") from None
    except NotADirectoryError:
        needed = ["--label", "LABEL"] if command == "prepare" else ["--schema", "SCHEMA"]
        words = ["rarebit", "data", command, str(folder), *needed]
        words += ["--out", f"data/{folder.name.split('.')[0]}"]
        raise DataError(
            f"{str(folder)!r} is a file, and a {what} is a folder; {command} the log first: "
            f"{shlex.join(words)}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is damaged: {error}; prepare the log again") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise DataError(f"{str(path)!r} does not describe a prepared log")
    if manifest["format"] > FORMAT:
        raise DataError(
            f"{str(folder)!r} was prepared in format {manifest['format']} by Rarebit "
            f"{manifest.get('rarebit')}; this version reads up to format {FORMAT}: upgrade it"
        )
    if not is_own_checksum(manifest, OWN):
        raise DataError(f"{str(path)!r} is damaged: it is not what its checksum says")
    return manifest
