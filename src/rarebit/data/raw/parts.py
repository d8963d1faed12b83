"""One log prepared by several processes or machines: count each part, merge the counts, encode each part.

    count     a part -> codes of its own dictionary, numbers, labels and split keys    each part, in any order
    merge     all parts -> split, vocabulary, and the id of each code of each part     once
    encode    a part -> its rows, at their places in the arrays                        each part, in any order

Every step calls what preparing in one process calls (`encode.py`), and the result is the same byte for byte.
A merged folder keeps what `encode` needs in a hidden folder:

    .parts/merge.json    the parts, where their rows go, and the manifest to be
    .parts/N.npz         part of the split of each row of part N, and the id of each code of each column
    .parts/N.done        part N is encoded

The process that encodes the last part writes the manifest and then removes `.parts`.
"""

import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rarebit.data.log_schema import ROW_ARRAYS, LogSchema
from rarebit.data.prepared import (
    BAD_ROWS,
    MANIFEST,
    PARTS,
    SCHEMA,
    ManifestFolder,
    Progress,
    new_folder,
    no_progress,
    write_manifest,
)
from rarebit.data.raw.chunks import BadRows, RawChunk
from rarebit.data.raw.coding import GrowingDictionary
from rarebit.data.raw.encode import (
    Reading,
    Spill,
    describe_reading,
    freeze,
    read_log,
    slot_columns,
    write_arrays,
)
from rarebit.data.raw.encoder import Finisher, read_values, write_values
from rarebit.data.schema import FIRST_VALUE
from rarebit.errors import CheckpointError, DataError
from rarebit.storage.files import (
    DISK,
    explain,
    file_lock,
    is_own_checksum,
    own_checksum,
    read_json,
    write_file,
    write_json,
)

MERGE = "merge.json"
OWN = "merge_sha256"


class CountedPart(ManifestFolder):
    """A folder that `count_log` wrote."""

    what, command = "counted part", "count"

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.check_files()
        # a user is known by a hash that Polars keeps for a single version
        made, here = self.manifest["versions"], _versions()
        if made != here:
            raise DataError(
                f"{str(folder)!r} was counted with {_listed(made)}, and this is {_listed(here)}; use the "
                "same versions for all parts"
            )

    @cached_property
    def schema(self) -> LogSchema:
        """The schema it was counted with."""
        return LogSchema.from_mapping(self.manifest["log_schema"])

    def reading(self) -> Reading:
        """Return the result of reading it, with codes of its own."""
        rows = {name: [np.load(self.folder / f"{name}.npy")] for name in self.schema.row_arrays}
        key, spill = np.load(self.folder / "key.npy"), Spill(self.folder, self.manifest["spill"])
        return Reading([spill], {}, rows, [key], self.manifest["values_cut"])

    def recode(self, spill: Spill, dictionaries: dict[str, GrowingDictionary]) -> None:
        """Change its codes to those of dictionaries that all parts share."""
        codes = {}
        for name, texts in read_values(self.folder, self.manifest["values"]).items():
            numbers = dictionaries[name].add(texts)
            special = np.arange(FIRST_VALUE)
            codes[name] = np.concatenate([special, FIRST_VALUE + numbers]).astype(np.int32)
        same = np.empty(0, np.int32)  # the code of a bucket or of a bin says which
        columns = slot_columns(self.schema)
        spill.recode(
            [codes.get(c.vocabulary_name, same) if c.buckets is None else same for c in columns]
        )


def count_log(
    chunks: Iterable[RawChunk],
    schema: LogSchema,
    out: Path,
    *,
    origin: str,
    log: Sequence[Path],
    notes: Callable[[], Sequence[str]],
    bad: BadRows,
    overwrite: bool = False,
) -> None:
    """Read a part of a log into a folder, for `merge_counted` and `encode_counted`."""
    with new_folder(out, overwrite=overwrite) as folder:
        if bad.keep == "aside":
            bad.file = folder / BAD_ROWS
        spill = Spill(folder)
        reading = read_log(chunks, schema, spill, bad)
        if bad.keep == "stop":
            bad.raise_if_any()  # skipped rows are judged when all parts are there
        sizes: dict[str, int] = {}
        for column, code in zip(slot_columns(schema), spill.highest, strict=bool(spill)):
            if column.buckets is None and column.kind != "numeric":
                name = column.vocabulary_name
                sizes[name] = max(sizes.get(name, 0), int(code) + 1 - FIRST_VALUE)
        values = {name: reading.dictionaries[name].texts(np.arange(n)) for name, n in sizes.items()}
        for name in schema.row_arrays:
            nothing: NDArray[Any] = np.empty(0, ROW_ARRAYS[name])
            np.save(folder / f"{name}.npy", np.concatenate([nothing, *reading.rows.get(name, ())]))
        np.save(folder / "key.npy", np.concatenate(reading.keys or [np.empty(0)]))
        manifest = {
            "kind": CountedPart.what,
            "versions": _versions(),
            "log_schema": schema.to_mapping(),
            "origin": origin,
            "log": [str(file.resolve()) for file in log],
            "notes": list(notes()),
            "values_cut": reading.cut,
            "bad": bad.counted(),
            "spill": spill.written(),
            "values": write_values(folder, values),
        }
        write_manifest(folder, manifest)


def merge_counted(
    folders: Sequence[Path], out: Path, *, overwrite: bool = False, progress: Progress = no_progress
) -> None:
    """Split and count the rows of all parts, and write everything but the rows, which `encode_counted` does."""
    parts = [CountedPart(folder) for folder in folders]
    _check_parts(parts)
    schema = parts[0].schema
    with new_folder(out, overwrite=overwrite) as folder:
        for part in parts:
            part.verify()
        readings = [part.reading() for part in parts]
        dictionaries = {name: GrowingDictionary() for name in schema.vocabularies}
        bad, all_rows = BadRows("aside"), Reading([], dictionaries)
        for part, reading in zip(parts, readings, strict=True):
            bad.add_counted(part.manifest["bad"])
            if (part.folder / BAD_ROWS).exists():
                with (
                    (part.folder / BAD_ROWS).open("rb") as rows,
                    (folder / BAD_ROWS).open("ab") as file,
                ):
                    shutil.copyfileobj(rows, file)
            all_rows.cut += reading.cut
            if len(reading):  # the keys of no rows have no type
                part.recode(reading.spills[0], dictionaries)
                all_rows.spills += reading.spills
                for name, arrays in reading.rows.items():
                    all_rows.rows.setdefault(name, []).extend(arrays)
                all_rows.keys += reading.keys
        origin = ", ".join(part.manifest["origin"] for part in parts)
        notes = list(dict.fromkeys(note for part in parts for note in part.manifest["notes"]))
        description = describe_reading(all_rows, bad, origin, notes)
        frozen = freeze(folder, all_rows, schema, description, progress=progress)
        empty: dict[str, list[NDArray[Any]]] = {
            name: [np.empty(0, ROW_ARRAYS[name])] for name in schema.row_arrays
        }
        places = frozen.places
        write_arrays(  # no rows yet
            *(folder, Reading([], {}, empty), frozen.finisher),
            parts=np.empty(0, np.uint8),
            places=places,
            rows=len(all_rows),
        )
        DISK.make_folder(folder / PARTS)
        start, listed = 0, []
        for number, (part, reading) in enumerate(zip(parts, readings, strict=True)):
            split = frozen.parts[start : start + len(reading)]
            ids = _part_ids(schema, frozen.finisher, reading.spills[0])
            np.savez(folder / PARTS / f"{number}.npz", split, *ids)
            origin = part.manifest["origin"]
            listed.append({"origin": origin, "checksum": part.checksum, "places": places.tolist()})
            start, places = start + len(reading), places + np.bincount(split, minlength=3)
        merge = {
            "parts": listed,
            "rows": len(all_rows),
            "scales": frozen.finisher.scales,
            "edges": frozen.finisher.edges,
            "manifest": frozen.manifest,
        }
        merge[OWN] = own_checksum(merge, OWN)
        write_json(folder / PARTS / MERGE, merge, error=DataError)


def encode_counted(folder: Path, out: Path, *, progress: Progress = no_progress) -> list[str]:
    """Write the rows of a part to a merged folder; return the parts that are still missing.

    The process that finds none missing finishes the folder. It may run twice, also at once: the rows are the
    same, and have the same places.
    """
    part, work = CountedPart(folder), out / PARTS
    try:
        if not (out / MANIFEST).exists():
            merge, number = _merge_of(part, out)
            done = [work / f"{n}.done" for n in range(len(merge["parts"]))]
            with file_lock(work / f"{number}.lock", wait=True):
                if not done[number].exists():
                    _encode(part, out, merge, number, progress)
                    write_file(done[number], b"", error=DataError)
            named = zip(merge["parts"], done, strict=True)
            missing = [found["origin"] for found, file in named if not file.exists()]
            if missing:
                return missing
            with file_lock(work / "lock", wait=True):
                if not (out / MANIFEST).exists():
                    write_manifest(out, merge["manifest"])
    except (OSError, DataError, CheckpointError) as error:
        # another process, with the same part or the last one, may just have finished the folder
        if not (out / MANIFEST).exists():
            if isinstance(error, OSError):
                raise DataError(f"cannot write {str(out)!r}: {explain(error)}") from error
            raise
    if (out / SCHEMA).read_text("utf-8") != part.schema.to_toml():
        raise DataError(
            f"{str(out)!r} is complete, and was made with another schema than {str(folder)!r}"
        )
    with suppress(OSError):  # another process removes it, too
        DISK.remove(work)
    return []


def _encode(
    part: CountedPart, out: Path, merge: dict[str, Any], number: int, progress: Progress
) -> None:
    """Write the rows of a part to their places."""
    part.verify()
    file = out / PARTS / f"{number}.npz"
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            split, *ids = (stored[name] for name in stored.files)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(file)!r} is damaged: {error}; merge the parts again") from None
    columns = slot_columns(part.schema)
    ids_of = dict(zip(dict.fromkeys(column.name for column in columns), ids, strict=True))
    lookups = [ids_of[column.name] for column in columns]
    finisher = Finisher(part.schema, lookups, merge["scales"], merge["edges"])
    write_arrays(
        *(out, part.reading(), finisher),
        parts=split,
        places=np.array(merge["parts"][number]["places"]),
        rows=merge["rows"],
        is_new=False,
        progress=progress,
    )
    for name in ("ids", "numeric", *part.schema.row_arrays):
        DISK.sync_file(out / f"{name}.npy")


def _part_ids(schema: LogSchema, finisher: Finisher, spill: Spill) -> list[NDArray[np.int32]]:
    """Return, for each column with codes, the id of each code of a part; nothing where they are the same."""
    found: dict[str, NDArray[np.int32]] = {}
    columns = slot_columns(schema)
    recoded = spill.recoded or [np.empty(0, np.int32)] * len(columns)  # a part without rows
    for column, ids, codes in zip(columns, finisher.ids or [], recoded, strict=True):
        same = ids if column.buckets is None else ids[:0]
        found[column.name] = ids.take(codes) if len(codes) else same
    return list(found.values())


def _check_parts(parts: Sequence[CountedPart]) -> None:
    """Raise unless the parts are different ones of one log."""
    if not parts:
        raise DataError("no parts to merge; give the folders that rarebit data count made")
    seen: dict[str, CountedPart] = {}
    first = parts[0].manifest["log_schema"]
    for part in parts:
        if part.checksum in seen:
            same = seen[part.checksum].folder
            raise DataError(
                f"{str(part.folder)!r} and {str(same)!r} are the same part of the log; give each part once"
            )
        seen[part.checksum] = part
        other = part.manifest["log_schema"]
        changed = [name for name in first | other if first.get(name) != other.get(name)]
        if changed:
            raise DataError(
                f"{str(part.folder)!r} was counted with another schema than {str(parts[0].folder)!r} "
                f"({', '.join(changed)}); count all parts with the same schema file"
            )


def _merge_of(part: CountedPart, out: Path) -> tuple[dict[str, Any], int]:
    """Return what the merge wrote for all parts, and the number of a part."""
    file = out / PARTS / MERGE
    try:
        merge = read_json(file)
    except FileNotFoundError:
        raise DataError(
            f"{str(out)!r} is no merged log; merge all parts first, with rarebit data merge"
        ) from None
    except ValueError as error:
        raise DataError(f"{str(file)!r} is damaged: {error}; merge the parts again") from None
    if not is_own_checksum(merge, OWN):
        raise DataError(f"{str(file)!r} is damaged; merge the parts again")
    checksums = [found["checksum"] for found in merge["parts"]]
    if part.checksum not in checksums:
        raise DataError(
            f"{str(part.folder)!r} ({part.manifest['origin']}) is none of the parts that were merged to "
            f"{str(out)!r}: {', '.join(found['origin'] for found in merge['parts'])}; if it was counted "
            "again, merge again"
        )
    return merge, checksums.index(part.checksum)


def _versions() -> dict[str, str]:
    from rarebit import __version__

    return {"rarebit": __version__, "polars": pl.__version__}


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
