"""The state of a spread model on disk, as the plain model has it: any number of processes reads it, one without TorchRec, too.

folder/
  __0_0.distcp, __1_0.distcp, ...   the pieces of each process, of weights and of the optimizer's state, in the format of
  .metadata                         torch.distributed.checkpoint: which rectangle of which tensor lies where
  pieces.json                       its own checksum; the rest of the state, and bytes and sha256 of every file; written last

A tensor of the state is stored by the place that it has in one process: a piece of a table by the name of the plain weight. So
processes that hold other pieces read theirs, and `unshard` reads whole weights.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import CheckpointError
from rarebit.sharding.sharded import Rectangle, is_spread, pieces_of, sharded_rows
from rarebit.storage.files import (
    DISK,
    StateDecoder,
    StateEncoder,
    file_checksum,
    is_own_checksum,
    own_checksum,
    read_json,
    sync_tree,
    write_json,
)

DESCRIPTION, METADATA, OWN = "pieces.json", ".metadata", "checksum"
MODELS = ("weights", "model")
"""Parts of a state that have the weights of a model; the first are those of the best epoch."""
EMA_PARTS = ("values", "starts")
REST = "rest"
"""Where the tensors are that belong to no parameter."""

State: TypeAlias = dict[str, Any]
Fill: TypeAlias = Callable[[str, Any], None]
"""Notes a tensor to be read, by its place."""


class Layout:
    """Which process holds which part of which plain weight."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.numbered: list[str] = []
        """The names of the parameters, by their numbers in the state of the optimizer."""
        if optimizer is not None:
            groups = (group["params"] for group in optimizer.param_groups)
            self.numbered = [names[id(parameter)] for group in groups for parameter in group]
        self.here: dict[str, list[Rectangle]] = {}
        for name, rectangle in pieces_of(model):
            self.here.setdefault(name, []).append(rectangle)
        self.everywhere = {
            rows.weight: {
                rank: [*rows.rectangles(rank).values()] for rank in range(dist.get_world_size())
            }
            for rows in sharded_rows(model)
        }

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return tensors by the names of parameters as those of the plain weights, of which each process has parts."""
        found = {name: value for name, value in values.items() if name not in self.here}
        parts: dict[str, list[tuple[Rectangle, Tensor]]] = {}
        for name, rectangles in self.here.items():
            value = values.get(name)
            for at in rectangles:
                if value is None:
                    continue
                if value.dim() == 0:  # such as a count of steps
                    found[at.weight] = value
                    continue
                rows = value[at.first_here : at.first_here + at.rows]
                parts.setdefault(at.weight, []).append((at, rows))
        return found | {weight: self._spread(weight, own) for weight, own in parts.items()}

    def parted(self, stored: Mapping[str, Tensor], fill: Fill) -> dict[str, Tensor]:
        """Return empty tensors by the names of parameters for what is `stored`, shapes on the meta device, to fill."""
        found = {
            name: torch.empty_like(like, device="cpu")
            for name, like in stored.items()
            if name not in self.everywhere
        }
        for name, tensor in found.items():
            fill(name, tensor)
        parts: dict[str, list[tuple[Rectangle, Tensor]]] = {}
        counts: dict[str, Tensor] = {}  # one of each weight, which all its parameters have
        for name, rectangles in self.here.items():
            weight = rectangles[0].weight
            if weight not in stored:
                continue
            axes, dtype = stored[weight].dim(), stored[weight].dtype
            if axes == 0:
                found[name] = counts.setdefault(weight, torch.empty((), dtype=dtype))
                fill(weight, found[name])
                continue
            found[name] = torch.empty(self.shapes[name][:axes], dtype=dtype)
            parts.setdefault(weight, []).extend(
                (at, found[name][at.first_here : at.first_here + at.rows]) for at in rectangles
            )
        for weight, own in parts.items():
            fill(weight, self._spread(weight, own))
        return found

    def _spread(self, weight: str, own: list[tuple[Rectangle, Tensor]]) -> Any:
        """Return parts of a weight, or of one number per row, as torch's tensor over several processes."""
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import (
            ShardedTensorMetadata,
            TensorProperties,
        )
        from torch.distributed._shard.sharded_tensor.shard import Shard

        axes, rank = own[0][1].dim(), dist.get_rank()

        def described(at: Rectangle, rank: int) -> ShardMetadata:
            return ShardMetadata(
                [at.first_row, at.first_column][:axes],
                [at.rows, at.columns][:axes],
                f"rank:{rank}/{own[0][1].device}",
            )

        metadata = ShardedTensorMetadata(
            [described(at, r) for r, parts in self.everywhere[weight].items() for at in parts],
            torch.Size(own[0][0].shape[:axes]),
            TensorProperties(dtype=own[0][1].dtype),
        )
        shards = [Shard(part, described(at, rank)) for at, part in own]
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)  # noqa: SLF001  # torch's only way without a message between processes


def write_pieces(target: Path, state: Mapping[str, Any], layout: Layout, group: Any = None) -> None:
    """Write a state; all processes call it, and the folder gets its name when all of them are done."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    rank, partial = dist.get_rank(group), target.with_name(f".{target.name}.pieces")
    structure, tensors = _apart(state, layout)
    if rank == 0:
        DISK.remove(partial)  # what a killed run left
    dist.barrier(group)
    writer = FileSystemWriter(partial)
    save(tensors, storage_writer=writer, process_group=group)
    own = {path.name: _described(path) for path in partial.glob(f"__{rank}_*")}
    files: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(files, own, group=group)
    if rank == 0:
        every = {name: facts for part in files for name, facts in part.items()}
        values = {
            "files": {**every, METADATA: _described(partial / METADATA)},
            "state": structure,
        }
        values[OWN] = own_checksum(values, OWN)
        write_json(partial / DESCRIPTION, values, error=CheckpointError)
        sync_tree(partial, DISK)
        DISK.rename(partial, target)
        DISK.sync_folder(target.parent)
    dist.barrier(group)


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_checksum(path)}


def _apart(state: Mapping[str, Any], layout: Layout) -> tuple[Any, dict[str, Any]]:
    """Return the plain values of a state as JSON holds them, and its tensors by their places."""
    rest, tensors = {key: value for key, value in state.items() if key not in MODELS}, State()

    def place(where: str, values: Mapping[str, Any]) -> None:
        tensors.update({f"{where}/{name}": value for name, value in values.items()})

    for key in MODELS:
        if key in state:
            place(key, layout.joined(state[key]))
    if "optimizer" in state:
        held = {layout.numbered[n]: values for n, values in state["optimizer"]["state"].items()}
        for key in sorted({key for values in held.values() for key in values}):
            own = {name: values[key] for name, values in held.items() if key in values}
            place(f"optimizer/{key}", layout.joined(own))
        rest["optimizer"] = state["optimizer"]["param_groups"]
        del rest["stateless"]
    if state.get("ema") is not None:
        for key in EMA_PARTS:
            place(f"ema/{key}", layout.joined(state["ema"][key]))
        rest["ema"] = state["ema"]["num_steps"]
    encoder = StateEncoder()
    structure = encoder.encode(rest)
    if dist.get_rank() == 0:
        place(REST, encoder.tensors)
    return structure, tensors


class _Stored(NamedTuple):
    """A folder of pieces."""

    folder: Path
    structure: Any
    tensors: dict[str, Tensor]
    """What is stored, by its place: shapes and types on the meta device."""

    def below(self, place: str) -> dict[str, Tensor]:
        """Return what is stored below a place, by the rest of its name."""
        return {
            name.removeprefix(f"{place}/"): like
            for name, like in self.tensors.items()
            if name.startswith(f"{place}/")
        }

    def read(self, wanted: dict[str, Any]) -> None:
        """Fill tensors."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _quietly():
            reader = FileSystemReader(self.folder)
            load(wanted, storage_reader=reader, no_dist=True)


def _open(folder: Path, rank: int = 0, world: int = 1) -> _Stored:
    """Open a folder of pieces; every process checks other files of it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        description = read_json(folder / DESCRIPTION)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(folder)!r} holds no complete set of pieces: {DESCRIPTION} is missing; give the folder of a checkpoint "
            "of several processes"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{str(folder / DESCRIPTION)!r} is damaged: {error}") from None
    if not is_own_checksum(description, OWN):
        raise CheckpointError(f"{str(folder / DESCRIPTION)!r} is damaged: wrong checksum")
    for name, facts in sorted(description["files"].items())[rank::world]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{str(path)!r} is missing; copy all files of the folder")
        if _described(path) != facts:
            raise CheckpointError(f"{str(path)!r} is damaged: wrong checksum")
    with _quietly():
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    return _Stored(folder, description["state"], shapes)


def read_pieces(folder: Path, layout: Layout, optimizer: Optimizer | None = None) -> State:
    """Return the state as this process holds it; each process reads by itself."""
    stored = _open(folder, dist.get_rank(), dist.get_world_size())
    wanted: dict[str, Any] = {}

    def parted(place: str) -> dict[str, Tensor]:
        return layout.parted(
            stored.below(place), lambda name, t: wanted.update({f"{place}/{name}": t})
        )

    rest = {name: torch.empty_like(t, device="cpu") for name, t in stored.below(REST).items()}
    wanted.update({f"{REST}/{name}": tensor for name, tensor in rest.items()})
    models = {key: parted(key) for key in MODELS if stored.below(key)}
    ema = {key: parted(f"ema/{key}") for key in EMA_PARTS}
    keys = dict.fromkeys(name.partition("/")[0] for name in stored.below("optimizer"))
    held = {key: parted(f"optimizer/{key}") for key in keys}
    stored.read(wanted)
    state = StateDecoder(rest).decode_all(stored.structure) | models
    if optimizer is not None and "optimizer" in state:
        numbered = {
            number: {key: own[name].clone() for key, own in held.items() if name in own}
            for number, name in enumerate(layout.numbered)
        }
        state["stateless"] = [number for number, own in numbered.items() if not own]
        numbered = {number: own for number, own in numbered.items() if own}
        options = {group.get("name"): group for group in state["optimizer"]}
        groups = [
            {**group, **options.get(group.get("name"), {}), "params": group["params"]}
            for group in optimizer.state_dict()["param_groups"]
        ]
        state["optimizer"] = {"state": numbered, "param_groups": groups}
    if state.get("ema") is not None:
        state["ema"] = {"num_steps": state["ema"], **ema}
    return state


def unshard(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state of the plain model from pieces that any number of processes wrote.

    It needs one process, neither TorchRec nor `torchrun`, and memory for the model:
    `model.load_state_dict(unshard(folder))`. The folder is that of one checkpoint, or of `save_shards`.

    >>> unshard("runs/clicks/pieces")
    Traceback (most recent call last):
    rarebit.errors.CheckpointError: 'runs/clicks/pieces' holds no complete set of pieces: pieces.json is missing; ...
    """
    stored = _open(Path(folder))
    place = next((key for key in MODELS if stored.below(key)), MODELS[-1])
    found = {name: torch.empty_like(t, device="cpu") for name, t in stored.below(place).items()}
    if not found:
        raise CheckpointError(f"{str(folder)!r} holds no model")
    stored.read({f"{place}/{name}": tensor for name, tensor in found.items()})
    return found


def save_shards(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the weights of a model that `shard` spread over processes; every process calls it.

    No process needs memory for more than its own pieces. The folder must be the same for all of them, and be new.

    >>> save_shards(nn.Sequential(nn.Embedding(9, 4)), "pieces")
    Traceback (most recent call last):
    rarebit.errors.CheckpointError: the model is not spread over processes; save it as any other, with save_model
    """
    if not is_spread(model):
        raise CheckpointError(
            "the model is not spread over processes; save it as any other, with save_model"
        )
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise CheckpointError(f"{str(target)!r} is taken; use another name")
    dist.barrier()  # nobody makes it before all have looked
    write_pieces(target, {"model": dict(model.state_dict())}, Layout(model))


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch's own, about names of its own that it has deprecated
        yield
