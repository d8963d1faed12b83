"""The pieces of a spread model on disk, and the plain model from them, in one process without TorchRec.

folder/
  00000-of-00003.safetensors   the pieces of one process; the first one's file has the rest of the model, too
  ...
  shards.json                  for each file its sha256, and which rectangle of which weight each piece is; written last
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rarebit.errors import ModelFileError
from rarebit.sharding.sharded import Rectangle, is_spread, pieces_of
from rarebit.storage.files import file_checksum, make_folder, read_json, write_json

DESCRIPTION = "shards.json"


def save_shards(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the pieces of a model that `shard` spread over processes; every process calls it.

    No process needs memory for more than its own pieces. The folder must be the same for all of them.
    """
    if not is_spread(model):
        raise ModelFileError(
            "the model is not spread over processes; save it as any other, with save_model"
        )
    out, rank, world = Path(folder), dist.get_rank(), dist.get_world_size()
    make_folder(out)
    (out / DESCRIPTION).unlink(missing_ok=True)
    dist.barrier()  # nobody reads old and new files together
    rectangles = pieces_of(model)
    tensors = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if (name in rectangles and value.numel()) or (name not in rectangles and rank == 0)
    }
    path = out / _file(rank, world)
    part = path.with_suffix(".part")
    save_file(tensors, part)
    part.replace(path)
    dist.barrier()
    if rank == 0:
        values = [_described(out, model, each, world) for each in range(world)]
        write_json(out / DESCRIPTION, {"files": values}, error=ModelFileError)
    dist.barrier()


def unshard(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state of the plain model from the pieces in a folder: `model.load_state_dict(unshard(folder))`.

    It needs one process, neither TorchRec nor `torchrun`, and memory for the model.
    """
    where = Path(folder)
    try:
        files = read_json(where / DESCRIPTION)["files"]
    except FileNotFoundError:
        raise ModelFileError(
            f"{str(where)!r} holds no complete set of pieces: {DESCRIPTION} is missing; write them with save_shards"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{str(where / DESCRIPTION)!r} is damaged: {error}") from None
    found: dict[str, Tensor] = {}
    for values in files:
        _read(where / values["name"], values, found)
    return found


def _file(rank: int, world: int) -> str:
    return f"{rank:05}-of-{world:05}.safetensors"


def _described(out: Path, model: nn.Module, rank: int, world: int) -> dict[str, Any]:
    name = _file(rank, world)
    places = {
        name: list(place)
        for name, place in pieces_of(model, rank).items()
        if place.rows * place.columns
    }
    return {"name": name, "sha256": file_checksum(out / name), "pieces": places}


def _read(path: Path, values: dict[str, Any], found: dict[str, Tensor]) -> None:
    try:
        if file_checksum(path) != values["sha256"]:
            raise ModelFileError(
                f"{str(path)!r} is damaged: its checksum is not the one in {DESCRIPTION}"
            )
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # a file, not a mapping
                value = tensors.get_tensor(name)
                if name not in values["pieces"]:
                    found[name] = value
                    continue
                at = Rectangle(*values["pieces"][name])
                whole = found.setdefault(at.weight, torch.empty(tuple(at.shape), dtype=value.dtype))
                rows = slice(at.first_row, at.first_row + at.rows)
                whole[rows, at.first_column : at.first_column + at.columns] = value
    except FileNotFoundError:
        raise ModelFileError(f"{str(path)!r} is missing; copy all files of the folder") from None
    except SafetensorError as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None
