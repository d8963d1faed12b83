"""A packed table as one file of its own: safetensors, read by mapping it into memory.

What a lookup does not touch is not read, save for one look at everything but the values: offsets and
columns of a file may be anything, and must fit each other before a row is looked up.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rarebit.errors import ModelFileError
from rarebit.tables.packed import Pack, PackedTable, Shape
from rarebit.tables.packed_check import problem_of
from rarebit.tables.packed_parts import Parts

__all__ = ["load_packed", "save_packed"]

KIND = "rarebit packed table 1"
MAX_DIGITS = 18
NAMES = set(Parts._fields)


def save_packed(table: PackedTable, path: str | os.PathLike[str]) -> Path:
    """Write a packed table to a file, over an old one if need be, and return the file.

    >>> import tempfile
    >>> from torch import nn
    >>> dense = nn.Embedding.from_pretrained(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_packed(Pack().wrap(dense), Path(folder) / "items.safetensors")
    ...     table = load_packed(file)
    >>> table(torch.tensor([2]))
    tensor([[6., 7.]])
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    about = {"kind": KIND, "rows": table.num_embeddings, "width": table.embedding_dim}
    if table.padding_idx is not None:
        about["padding"] = table.padding_idx
    tensors = {name: tensor.cpu().contiguous() for name, tensor in table.state_dict().items()}
    try:
        save_file(tensors, partial, {key: str(value) for key, value in about.items()})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ModelFileError(
            f"cannot write the table to {str(path)!r}: {error}; choose a folder you may write to"
        ) from None
    return path


def load_packed(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", trainable: bool = False
) -> PackedTable:
    """Return the packed table of a file, mapped into memory on the CPU.

    >>> load_packed("nowhere")
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: 'nowhere' does not exist
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        table = _table(about, tensors)
    except FileNotFoundError:
        raise ModelFileError(f"{str(path)!r} does not exist") from None
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{str(path)!r} is no packed table, or damaged: {error}; write it again or take an older copy"
        ) from None
    return table.requires_grad_(trainable and "scale" not in tensors).to(device)


def _table(about: dict[str, str], tensors: dict[str, Tensor]) -> PackedTable:
    if about.get("kind") != KIND:
        raise ValueError(f"it does not call itself a {KIND}")
    scale = tensors.pop("scale", None)
    if set(tensors) != NAMES:
        raise ValueError(f"it has the parts {sorted(tensors)}")
    shape = Shape(
        _whole_number(about.get("rows", "")),
        _whole_number(about.get("width", "")),
        _whole_number(about["padding"]) if "padding" in about else None,
    )
    parts = Parts(**tensors)
    problem = problem_of(parts, rows=shape.rows, width=shape.width, padding=shape.padding)
    if problem is not None:
        raise ValueError(problem)
    if (scale is None) == (parts.values.dtype == torch.int8):
        raise ValueError("integers have a scale, and other values have none")
    if scale is not None and (scale.dim() or not scale.is_floating_point()):
        raise ValueError(f"its scale is {scale.dtype} of shape {tuple(scale.shape)}")
    return PackedTable(Pack(bits=None if scale is None else 8), parts, shape, scale=scale)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"{text[:MAX_DIGITS]!r} is no number of rows or columns")
    return int(text)
