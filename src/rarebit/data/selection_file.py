"""A selection as a folder, to be kept beside prepared data.

selection.json                the fields by name, the settings, and the checksum of the data it was made of
tensors-<name>.safetensors    counts, masks, similarities and relatives of each field
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rarebit.data.selection import CoOccurrence, FieldSelection, FrequencySplit, Selection
from rarebit.errors import DataError, SettingsError
from rarebit.settings import from_mapping, to_mapping
from rarebit.tensor_folder import TensorFolder

__all__ = ["DESCRIPTION", "load_selection", "save_selection"]

DESCRIPTION = "selection.json"
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
