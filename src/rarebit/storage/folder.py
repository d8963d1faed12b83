"""Tensors in a folder with a description of them, whole at any moment. Never pickle.

    NAME.json                     what the tensors are, and the checksums of both files
    tensors-<name>.safetensors    the tensors

The tensors' file is named by its content and written first; the description then takes the place of the
old one in one go. So a folder holds the old contents or the new ones, whenever the machine stops.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rarebit.errors import RarebitError

__all__ = ["OWN_CHECKSUM", "TensorFolder", "file_checksum", "own_checksum"]

FORMAT = 1
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
OWN_CHECKSUM = "description_sha256"
MAX_DESCRIPTION_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorFolder:
    """How one kind of thing is kept in a folder.

    >>> import tempfile
    >>> import torch
    >>> from rarebit.errors import DataError
    >>> kind = TensorFolder("list", "list.json", DataError, "write it again", "use another folder")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = kind.write(place, {"list": ["a"]}, {"0": torch.arange(3)})
    ...     kind.read(place)[1]
    {'0': tensor([0, 1, 2])}
    """

    what: str
    """What it is called, and the key of the description that every such folder has."""
    description: str
    """The name of the description's file."""
    error: type[RarebitError]
    """What is raised."""
    when_damaged: str
    """What to do about one that is damaged, in words."""
    when_unwritable: str
    """What to do where it cannot be written, in words."""

    def write(
        self,
        folder: str | os.PathLike[str],
        description: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Path:
        """Write to a folder, which is made if need be, and return the folder."""
        folder = Path(folder)
        partial = [
            folder / f"{what}.{os.getpid()}.partial" for what in ("tensors", self.description)
        ]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: _to_write(tensor) for name, tensor in tensors.items()}, partial[0])
            checksum = file_checksum(partial[0])
            file = f"tensors-{checksum[:16]}.safetensors"
            described = {"format": FORMAT, **description, "tensors": file, "sha256": checksum}
            described[OWN_CHECKSUM] = own_checksum(described)
            partial[1].write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
            self._put_in_place(folder, partial, file)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            with suppress(OSError):
                for path in partial:
                    path.unlink(missing_ok=True)
            raise self.error(
                f"cannot write the {self.what} to {str(folder)!r}: {error}; {self.when_unwritable}"
            ) from None
        return folder

    def read(self, folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the description and the tensors, once both are what their checksums say."""
        folder = Path(folder)
        description = self.read_description(folder)
        path = folder / description["tensors"]
        if path.resolve().parent != folder.resolve():
            raise self.error(
                f"{str(path)!r} is a link that leads out of its folder; copy the file there"
            )
        try:
            if file_checksum(path) != description["sha256"]:
                raise self.error(
                    f"{str(path)!r} is damaged: it is not what its checksum says; {self.when_damaged} or "
                    "take an older copy"
                )
            return description, load_file(path)
        except FileNotFoundError:
            raise self.error(f"{str(folder)!r} is incomplete: {path.name} is missing") from None
        except (OSError, SafetensorError) as error:
            raise self.unreadable(folder, error) from None

    def read_description(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the description alone."""
        path = Path(folder) / self.description
        try:
            self._check_size(path)
            description = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self.error(
                f"{str(folder)!r} holds no {self.what}: {self.description} is missing"
            ) from None
        except OSError as error:
            raise self.error(f"cannot read {str(path)!r}: {error.strerror}") from None
        except self.error:
            raise
        except (ValueError, RecursionError) as error:  # JSON that is wrong, not UTF-8, or too deep
            raise self.error(f"{str(path)!r} is damaged: {error}; {self.when_damaged}") from None
        self._check(path, description)
        found: dict[str, Any] = description
        return found

    def no_such_thing(self, folder: str | os.PathLike[str]) -> RarebitError:
        """Return the error for a description that is of something else."""
        path = Path(folder) / self.description
        return self.error(f"{str(path)!r} does not describe a {self.what} of Rarebit")

    def unreadable(self, folder: str | os.PathLike[str], why: Exception) -> RarebitError:
        """Return the error for tensors that are not what the description needs."""
        return self.error(f"{str(Path(folder))!r} holds no {self.what} that can be read: {why}")

    def _check_size(self, path: Path) -> None:
        if path.stat().st_size > MAX_DESCRIPTION_BYTES:
            raise self.error(f"{str(path)!r} is too large to be the description of a {self.what}")

    def _check(self, path: Path, description: Any) -> None:
        if not isinstance(description, dict) or not isinstance(description.get(self.what), list):
            raise self.no_such_thing(path.parent)
        if description.get("format") != FORMAT:
            raise self.error(
                f"{str(path)!r} is in format {description.get('format')}, this version reads format "
                f"{FORMAT}; use the version of Rarebit that wrote it"
            )
        if description.get(OWN_CHECKSUM) != own_checksum(description):
            raise self.error(
                f"{str(path)!r} is damaged: it is not what its checksum says; {self.when_damaged} or take "
                "an older copy"
            )
        # a name that leads elsewhere is none of ours
        if not TENSORS.fullmatch(str(description.get("tensors"))):
            raise self.no_such_thing(path.parent)

    def _put_in_place(self, folder: Path, partial: list[Path], file: str) -> None:
        for path in partial:
            _sync(path)
        partial[0].replace(folder / file)
        partial[1].replace(folder / self.description)
        _sync(folder)
        for old in folder.iterdir():
            if TENSORS.fullmatch(old.name) and old.name != file:
                old.unlink()


def own_checksum(description: Mapping[str, Any]) -> str:
    """Return the checksum of a description, that of itself left out.

    >>> own_checksum({"a": 1}) == own_checksum({"a": 1, OWN_CHECKSUM: "x"})
    True
    """
    said = {key: value for key, value in description.items() if key != OWN_CHECKSUM}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_write(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share memory
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
