"""The vocabulary beside a model: a copy of what turned raw rows into the ids it was trained on."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rarebit.data.folder import StoredEncoder
from rarebit.data.schema import Schema
from rarebit.errors import ModelFileError

__all__ = ["ENCODER", "find_encoder", "write_encoder"]

ENCODER = "encoder"


def write_encoder(schema: Schema | None, folder: Path) -> dict[str, str]:
    """Write what turned raw rows into ids beside a model; return the checksums of its files."""
    target = folder / ENCODER
    if schema is None or schema.encoder is None:
        shutil.rmtree(target, ignore_errors=True)  # of the model that was here before
        return {}
    partial = folder / f"{ENCODER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        schema.encoder.save(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {path.name: _checksum(path) for path in sorted(target.iterdir())}


def find_encoder(folder: Path, checksums: Mapping[str, Any]) -> StoredEncoder | None:
    """Return the encoder beside a model, where it was saved with one; its files must be as they were."""
    if not checksums:
        return None
    place = folder / ENCODER
    try:
        inside = {path.name for path in place.iterdir()} if place.is_dir() else set()
        for name in sorted(inside | set(checksums)):
            if place.is_symlink() or not _is_as_saved(place / Path(name).name, checksums.get(name)):
                raise ModelFileError(
                    f"the vocabulary in {str(folder)!r} is damaged: {str(place / name)!r} is missing "
                    "or not as it was saved; save the model again or take an older copy"
                )
    except OSError as error:
        raise ModelFileError(
            f"cannot read the vocabulary in {str(place)!r}: {error.strerror}"
        ) from None
    return StoredEncoder(place)


def _is_as_saved(path: Path, wanted: object) -> bool:
    """Return whether a file is the one that was saved: a link may lead anywhere, so it is not.

    What was not saved with the model is not read, and no harm where it is a plain file.
    """
    if path.is_symlink() or not path.is_file():
        return False
    return wanted is None or _checksum(path) == wanted


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
