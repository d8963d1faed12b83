"""Which entries of a model's tables survive, and where they start: in memory and as a folder. Never pickle.

    ticket.json                   the tables by name, facts, and the checksums of both files
    tensors-<name>.safetensors    a mask for each table, and its first values and thresholds where there
                                  are any

The tensors' file is named by its content and written first; the description then takes the place of the
old one in one go. So a folder holds the old ticket or the new one, whenever the machine stops.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rarebit.errors import ModelFileError, TableError

__all__ = ["DESCRIPTION", "Ticket", "load_ticket", "save_ticket"]

FORMAT = 1
DESCRIPTION = "ticket.json"
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
PARTS = ("kept", "start", "levels")
"""What a ticket may hold of a table; the mask is never missing."""
OWN_CHECKSUM = "description_sha256"
MAX_DESCRIPTION_BYTES = 16 << 20


class Ticket:
    """The surviving entries of tables, by the names the tables have in their model.

    >>> ticket = Ticket({"user": torch.tensor([[True, False], [False, False]])}, facts={"step": 300})
    >>> ticket
    Ticket(1 table, 1 of 4 entries, step=300)
    """

    def __init__(
        self,
        kept: Mapping[str, Tensor],
        *,
        start: Mapping[str, Tensor] | None = None,
        levels: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.kept = dict(kept)
        """For each table, which entries survive, `(N, D)` of bools."""
        self.start = dict(start or {})
        """First values of tables `(N, D)`, for some of them, all or none."""
        self.levels = dict(levels or {})
        """The learned thresholds that cut the tables, where there were any."""
        self.facts = dict(facts or {})
        """What else is to be known of it, such as the step it was taken at: plain values."""
        if not self.kept:
            raise TableError("a ticket needs the mask of at least one table, got none")
        for name, mask in self.kept.items():
            _check_mask(name, mask)
        for name, values in self.start.items():
            _check_start(name, values, self.kept.get(name))
        for name in self.levels:
            if name not in self.kept:
                raise TableError(f"there are thresholds of {name!r}, but no mask; leave them out")

    @property
    def num_kept(self) -> int:
        """How many entries survive in all tables."""
        return sum(int(torch.count_nonzero(mask)) for mask in self.kept.values())

    @property
    def num_entries(self) -> int:
        """How many entries the tables have."""
        return sum(mask.numel() for mask in self.kept.values())

    def of(self, name: str) -> "Ticket":
        """Return the ticket of one of its tables."""
        start, levels = (
            {name: found[name]} if name in found else None for found in (self.start, self.levels)
        )
        return Ticket({name: self.kept[name]}, start=start, levels=levels, facts=self.facts)

    def with_start(self, start: Mapping[str, Tensor] | None) -> "Ticket":
        """Return the same ticket with other first values of its tables, or with none."""
        return Ticket(self.kept, start=start, levels=self.levels, facts=self.facts)

    def __repr__(self) -> str:
        tables = "1 table" if len(self.kept) == 1 else f"{len(self.kept)} tables"
        facts = [f"{key}={value!r}" for key, value in self.facts.items()]
        entries = f"{self.num_kept:,} of {self.num_entries:,} entries"
        return f"Ticket({', '.join([tables, entries, *facts])})"


def save_ticket(ticket: Ticket, folder: str | os.PathLike[str]) -> Path:
    """Write a ticket to a folder, which is made if need be, and return the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_ticket(Ticket({"user": torch.eye(3).bool()}), folder)
    ...     load_ticket(saved)
    Ticket(1 table, 3 of 9 entries)
    """
    folder = Path(folder)
    names, tensors = list(ticket.kept), {}
    for index, name in enumerate(names):
        for part in PARTS:
            found = getattr(ticket, part)
            if name in found:
                tensors[f"{index}.{part}"] = _to_write(found[name])
    description = {"format": FORMAT, "ticket": names, "facts": ticket.facts}
    partial = [folder / f"{what}.{os.getpid()}.partial" for what in ("tensors", DESCRIPTION)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial[0])
        checksum = _checksum(partial[0])
        file = f"tensors-{checksum[:16]}.safetensors"
        described = description | {"tensors": file, "sha256": checksum}
        described[OWN_CHECKSUM] = _own_checksum(described)
        partial[1].write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        _put_in_place(folder, partial, file)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        with suppress(OSError):
            for path in partial:
                path.unlink(missing_ok=True)
        raise ModelFileError(
            f"cannot write the ticket to {str(folder)!r}: {error}; facts must be what JSON can hold, "
            "and the folder one that you may write to"
        ) from None
    return folder


def load_ticket(folder: str | os.PathLike[str]) -> Ticket:
    """Read a ticket from a folder.

    >>> load_ticket("nowhere")
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: 'nowhere' holds no ticket: ticket.json is missing
    """
    folder = Path(folder)
    description = _read_description(folder)
    path = folder / description["tensors"]
    if path.resolve().parent != folder.resolve():
        raise ModelFileError(
            f"{str(path)!r} is a link that leads out of its folder; copy the file there"
        )
    try:
        if _checksum(path) != description["sha256"]:
            raise ModelFileError(
                f"{str(path)!r} is damaged: it is not what its checksum says; save the ticket again or "
                "take an older copy"
            )
        tensors = load_file(path)
        names = dict(enumerate(description["ticket"]))
        kept, start, levels = (
            {
                name: tensors[f"{index}.{part}"]
                for index, name in names.items()
                if part == PARTS[0] or f"{index}.{part}" in tensors
            }
            for part in PARTS
        )
        return Ticket(kept, start=start, levels=levels, facts=description["facts"])
    except FileNotFoundError:
        raise ModelFileError(f"{str(folder)!r} is incomplete: {path.name} is missing") from None
    except (OSError, SafetensorError, LookupError, TableError) as error:
        raise ModelFileError(f"{str(folder)!r} holds no ticket that can be read: {error}") from None


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise TableError(
            f"the mask of {name!r} must be rows x width of torch.bool, got {tuple(mask.shape)} of "
            f"{mask.dtype}"
        )


def _check_start(name: str, values: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        raise TableError(f"there are first values of {name!r}, but no mask; leave them out")
    if values.shape != mask.shape or not values.is_floating_point():
        raise TableError(
            f"the first values of {name!r} must be {tuple(mask.shape)} of floats as its mask is, got "
            f"{tuple(values.shape)} of {values.dtype}"
        )


def _to_write(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share memory
    return tensor.detach().to("cpu", copy=True).contiguous()


def _put_in_place(folder: Path, partial: list[Path], file: str) -> None:
    for path in partial:
        _sync(path)
    partial[0].replace(folder / file)
    partial[1].replace(folder / DESCRIPTION)
    _sync(folder)
    for old in folder.iterdir():
        if TENSORS.fullmatch(old.name) and old.name != file:
            old.unlink()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        _check_size(path)
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{str(folder)!r} holds no ticket: {DESCRIPTION} is missing") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:  # JSON that is wrong, not UTF-8, or too deep
        raise ModelFileError(f"{str(path)!r} is damaged: {error}; save the ticket again") from None
    _check_description(path, description)
    found: dict[str, Any] = description
    return found


def _check_size(path: Path) -> None:
    if path.stat().st_size > MAX_DESCRIPTION_BYTES:
        raise ModelFileError(f"{str(path)!r} is too large to be the description of a ticket")


def _check_description(path: Path, description: Any) -> None:
    if not isinstance(description, dict) or not isinstance(description.get("ticket"), list):
        raise ModelFileError(f"{str(path)!r} does not describe a ticket of Rarebit")
    if description.get("format") != FORMAT:
        raise ModelFileError(
            f"{str(path)!r} is in format {description.get('format')}, this version reads format "
            f"{FORMAT}; use the version of Rarebit that wrote it"
        )
    if description.get(OWN_CHECKSUM) != _own_checksum(description):
        raise ModelFileError(
            f"{str(path)!r} is damaged: it is not what its checksum says; save the ticket again or take "
            "an older copy"
        )
    named = all(isinstance(name, str) for name in description["ticket"])
    facts = isinstance(description.get("facts"), dict)
    # a name that leads elsewhere is none of ours
    if not named or not facts or not TENSORS.fullmatch(str(description.get("tensors"))):
        raise ModelFileError(f"{str(path)!r} does not describe a ticket of Rarebit")


def _own_checksum(description: Mapping[str, Any]) -> str:
    said = {key: value for key, value in description.items() if key != OWN_CHECKSUM}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
