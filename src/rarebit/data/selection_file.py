"""A selection as a folder, to be kept beside prepared data.

selection.json                the fields by name, the settings, and the checksum of the data it was made of
tensors-<name>.safetensors    counts, masks, similarities and relatives of each field

In the folder of a prepared log, selections/DIGEST/ is the selection by some settings of some fields.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rarebit.data.dataset import Dataset
from rarebit.data.selection import (
    CoOccurrence,
    FieldSelection,
    FrequencySplit,
    Selection,
    select,
)
from rarebit.errors import DataError, SettingsError
from rarebit.settings import from_mapping, to_mapping
from rarebit.tensor_folder import TensorFolder

__all__ = ["DESCRIPTION", "SELECTIONS", "load_selection", "save_selection", "stored_selection"]

DESCRIPTION = "selection.json"
SELECTIONS = "selections"
"""The folder of selections in that of a prepared log."""
DIGITS = 20
FOLDER = TensorFolder(
    "selection", DESCRIPTION, DataError, "select again", "choose a folder that you may write to"
)
KINDS: dict[str, type[CoOccurrence] | type[FrequencySplit]] = {
    "co-occurrence": CoOccurrence,
    "frequency-split": FrequencySplit,
}
PARTS: dict[str, tuple[torch.dtype, int]] = {
    "counts": (torch.int64, 1),
    "source": (torch.bool, 1),
    "target": (torch.bool, 1),
    "similarity": (torch.float32, 1),
    "relatives": (torch.int64, 2),
    "weights": (torch.float32, 2),
}
"""What is kept of a field, of which type, and with how many dimensions."""


def save_selection(selection: Selection, folder: str | os.PathLike[str]) -> Path:
    """Write a selection to a folder, which is made if need be, and return the folder.

    >>> import tempfile
    >>> from rarebit.data.selection import select
    >>> selection = select(None, {"user": torch.tensor([9, 1, 1])}, FrequencySplit(threshold=5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load_selection(save_selection(selection, folder))
    >>> again["user"].target
    tensor([False,  True,  True])
    """
    tensors = {
        f"{index}.{part}": getattr(field, part)
        for index, field in enumerate(selection.fields.values())
        for part in PARTS
    }
    [kind] = [kind for kind, settings in KINDS.items() if isinstance(selection.settings, settings)]
    description = {
        "selection": list(selection.fields),
        "kind": kind,
        "settings": to_mapping(selection.settings),
        "data_sha256": selection.data_checksum,
    }
    return FOLDER.write(folder, description, tensors)


def load_selection(
    folder: str | os.PathLike[str], *, data_checksum: str | None = None
) -> Selection:
    """Read a selection from a folder; where a checksum is given, it must be of the data of that checksum.

    >>> load_selection("nowhere")
    Traceback (most recent call last):
    rarebit.errors.DataError: 'nowhere' holds no selection: selection.json is missing
    """
    made_of = FOLDER.read_description(folder).get("data_sha256")
    if data_checksum is not None and made_of != data_checksum:
        raise DataError(
            f"the selection in {str(folder)!r} was made of other data than this; select again"
        )
    description, tensors = FOLDER.read(folder)
    try:
        settings = from_mapping(KINDS[description["kind"]], description["settings"])
        fields = {
            name: _field(index, tensors) for index, name in enumerate(description["selection"])
        }
    except (LookupError, SettingsError, TypeError) as error:
        raise FOLDER.unreadable(folder, error) from None
    return Selection(fields, settings, description["data_sha256"])


def stored_selection(
    train: Dataset,
    settings: CoOccurrence | FrequencySplit = CoOccurrence(),
    *,
    fields: Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    data_checksum: str = "",
) -> Selection:
    """Return the selection of training rows; in the folder of a prepared log it is made once and kept.

    Several processes may ask at once: whoever is done first leaves his there. A folder that cannot be
    written to is no reason to stop, and neither is a selection there that cannot be read.

    >>> import tempfile
    >>> train = Dataset.from_columns({"user": [0, 0, 1], "item": [0, 1, 1]}, label=[0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = stored_selection(train, fields=["user"], folder=folder, data_checksum="abc")
    ...     kept = stored_selection(train, fields=["user"], folder=folder, data_checksum="abc")
    >>> kept["user"].source
    tensor([ True, False])
    """
    counts = {name: count.cpu() for name, count in train.counts().items()}
    place = None if folder is None else Path(folder) / SELECTIONS / _digest(settings, fields)
    if place is not None:
        with suppress(DataError):
            found = load_selection(place, data_checksum=data_checksum)
            if _is_of(found, settings, {name: counts[name] for name in fields}):
                return found
    selection = select(
        train.to("cpu"), counts, settings, fields=fields, data_checksum=data_checksum
    )
    if place is not None:
        _keep(selection, place)
    return selection


def _digest(settings: CoOccurrence | FrequencySplit, fields: Sequence[str]) -> str:
    values = [type(settings).__name__, to_mapping(settings), list(fields)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _is_of(
    found: Selection, settings: CoOccurrence | FrequencySplit, counts: Mapping[str, Tensor]
) -> bool:
    """Return whether a selection is of these settings and rows: a part of a log has other counts."""
    return found.settings == settings and all(
        name in found.fields and torch.equal(found.fields[name].counts, count)
        for name, count in counts.items()
    )


def _keep(selection: Selection, place: Path) -> None:
    """Put a selection into its place, whole or not at all."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        save_selection(selection, partial)
        if place.exists():  # one that cannot be read, or is of other rows
            save_selection(selection, place)
        else:
            partial.rename(place)
    except (DataError, OSError):  # another process was first, or the folder is not ours to write to
        pass
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _field(index: int, tensors: Mapping[str, Tensor]) -> FieldSelection:
    """Return the selection of one field, where its parts fit each other."""
    field = FieldSelection(
        *(tensors[f"{index}.{part.name}"] for part in dataclasses.fields(FieldSelection))
    )
    rows = len(field.counts)
    for part, (dtype, dimensions) in PARTS.items():
        found = getattr(field, part)
        if found.dtype != dtype or found.dim() != dimensions or len(found) != rows:
            raise TypeError(f"its {part} are {tuple(found.shape)} of {found.dtype}")
    inside = (field.relatives >= 0) & (field.relatives < rows)
    if field.relatives.shape != field.weights.shape or not bool(inside.all()):
        raise TypeError("its relatives are not rows with a weight each")
    return field
