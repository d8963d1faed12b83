"""The vocabulary beside a model: a copy of what turned raw rows into the ids it was trained on.

A model as a folder: `weights.safetensors`, `model.json`, and `encoder/` where it has one. Never pickle.

`model.json` says what to build before the weights fit: for a model of ours its name, settings and
fields; for every table, the methods applied to it. It also holds the checksum of the weights and one
of its own, so that a damaged or half-written folder is told from a good one. Checksums are no
signature: whatever a description asks for, it gets no more memory than its weights are worth.
"""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rarebit.codes.packed import take_packed_
from rarebit.data.prepared import ENCODER, StoredEncoder, checksum
from rarebit.data.schema import Schema
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.models import build_model, model_names
from rarebit.models._base import RankingModel
from rarebit.sets.file import describe_sets, only_sets_in, restore_sets_
from rarebit.tables.apply import restore_tables
from rarebit.tables.find import find_sites, find_tables
from rarebit.tables.table import Method, methods_of
from rarebit.technique import (
    technique_from_mapping,
    technique_to_mapping,
)
from rarebit.training.memory import OBJECT_BYTES, AllocationLimit

__all__ = ["FORMAT", "find_encoder", "load_model", "save_model", "write_encoder"]


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
    return {path.name: checksum(path) for path in sorted(target.iterdir())}


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
    return wanted is None or checksum(path) == wanted


FORMAT = 1
DESCRIPTION, WEIGHTS = "model.json", "weights.safetensors"
OWN_CHECKSUM = "description_sha256"
"""Missing in folders of older versions, which are read all the same."""
MAX_DESCRIPTION_BYTES = 16 << 20
SLOT_BYTES = 64
"""What the tables keep for each slot of a batch: a few whole numbers."""

# What values of the wrong kind raise, RarebitError among them: no description may do worse.
NONSENSE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model to a folder, which is made if need be, and return it.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Embedding(9, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_model(model, folder)
    ...     copy = load_model(folder, into=nn.Sequential(nn.Embedding(9, 4)))
    >>> bool((copy[0].weight == model[0].weight).all())
    True
    """
    folder = Path(folder)
    tensors, aliases = _distinct_tensors(model)
    description = _describe(model) | {"aliases": aliases}
    weights, text = folder / f"{WEIGHTS}.partial", folder / f"{DESCRIPTION}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, weights)
        description["sha256"] = _checksum(weights)
        schema = model.schema if isinstance(model, RankingModel) else None
        description["encoder"] = write_encoder(schema, folder)
        description[OWN_CHECKSUM] = _own_checksum(description)
        text.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        weights.replace(folder / WEIGHTS)
        text.replace(folder / DESCRIPTION)
    except (OSError, SafetensorError, DataError) as error:
        with suppress(OSError):
            weights.unlink(missing_ok=True)
            text.unlink(missing_ok=True)
        raise ModelFileError(
            f"cannot write the model to {str(folder)!r}: {error}; choose a folder you may write to"
        ) from None
    return folder


def load_model(
    folder: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Read a model from a folder. A model of your own is read `into` a fresh one of its class.

    The methods that were applied when it was saved are applied again before the weights are read.
    Weights keep the precision they were saved in.

    >>> import tempfile
    >>> from rarebit import Field
    >>> from rarebit.models.fm import FM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_model(FM(Schema((Field(name="user", rows=9),)), dim=4), folder)
    ...     model = load_model(folder)
    >>> model.settings
    {'dim': 4, 'wide_std': 0.01}
    """
    folder = Path(folder)
    description = _read_description(folder)
    tensors = _read_weights(folder, description)
    model = _build(folder, description, tensors) if into is None else into
    if isinstance(into, RankingModel):
        _check_fields(folder, into, description)
    methods = _saved_methods(folder, description)
    try:
        with AllocationLimit(None):
            restore_sets_(model, description.get("sets"))
        restore_tables(model, methods, description.get("frozen", ()))
    except NONSENSE as error:
        raise ModelFileError(f"{str(folder)!r} is a model of another kind: {error}") from None
    take_packed_(model, tensors)
    _load_weights(folder, model, tensors)
    _attach_encoder(folder, model, description)
    return model.to(device)


def _describe(model: nn.Module) -> dict[str, Any]:
    from rarebit import __version__

    return {
        "format": FORMAT,
        "rarebit": __version__,
        "class": type(model).__name__,
        "model": _name_of(model) if isinstance(model, RankingModel) else None,
        "settings": _plain_settings(model) if isinstance(model, RankingModel) else None,
        "schema": model.schema.to_mapping() if isinstance(model, RankingModel) else None,
        "sets": describe_sets(model),
        "methods": {
            site.info.name: [technique_to_mapping(method) for method in methods_of(site.table)]
            for site in find_sites(model)
            if methods_of(site.table)
        },
        "frozen": [info.name for info in find_tables(model) if not info.trainable],
    }


def _attach_encoder(folder: Path, model: nn.Module, description: Mapping[str, Any]) -> None:
    """Let a model know what turned raw rows into its ids, where it was saved with that."""
    checksums = description.get("encoder") or {}
    if not isinstance(checksums, dict):
        raise ModelFileError(f"{str(folder)!r} does not say which files its vocabulary has")
    encoder = find_encoder(folder, checksums)
    if encoder is not None and isinstance(model, RankingModel):
        model.schema = model.schema.with_encoder(encoder)


def _name_of(model: RankingModel) -> str | None:
    """Return the name that `build_model` knows the model by; None for a class of the user's own."""
    package, _, name = type(model).__module__.rpartition(".")
    return name if package == "rarebit.models" and name in model_names() else None


def _plain_settings(model: RankingModel) -> Any:
    """Return the settings as JSON holds them; numpy's numbers become plain ones."""
    try:
        return json.loads(json.dumps(model.settings, default=lambda number: number.item()))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"the settings of {type(model).__name__} cannot be written as JSON: {error}"
        ) from None


def _distinct_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, and for each tied one the name it is written under."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            written = tensor.detach().cpu().contiguous()
            storage = written.untyped_storage().data_ptr()
            # a part of another tensor, which safetensors refuses, is written on its own
            tensors[name] = written.clone() if storage in storages else written
            storages.add(storage)
    return tensors, aliases


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        _check_file(folder, path, MAX_DESCRIPTION_BYTES)
        description = json.loads(path.read_text(encoding="utf-8"))
        own = _own_checksum(description)
    except FileNotFoundError:
        raise ModelFileError(
            f"{str(folder)!r} holds no saved model: {DESCRIPTION} is missing"
        ) from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:  # JSON that is wrong, not UTF-8, or too deep
        raise ModelFileError(f"{str(path)!r} is damaged: {error}; save the model again") from None
    if not isinstance(description, dict) or not isinstance(description.get("format"), int):
        raise ModelFileError(f"{str(path)!r} does not describe a model of Rarebit")
    if description["format"] > FORMAT:
        raise ModelFileError(
            f"{str(folder)!r} was saved in format {description['format']} by Rarebit "
            f"{description.get('rarebit')}; this version reads up to format {FORMAT}: upgrade it"
        )
    if description.get(OWN_CHECKSUM, own) != own:
        raise ModelFileError(
            f"{str(path)!r} is damaged: it is not what its checksum says; save the model again or "
            "take an older copy"
        )
    return description


def _check_file(folder: Path, path: Path, most_bytes: float = math.inf) -> None:
    """Raise for what is no plain file, too large, or a link that leads out of the folder."""
    status = path.stat()
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelFileError(
            f"{str(path)!r} is a link to a file outside of the folder, which is not followed; copy "
            "the file itself into the folder"
        )
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"{str(path)!r} is not a plain file; save the model again")
    if status.st_size > most_bytes:
        raise ModelFileError(f"{str(path)!r} is too large to be a description of a model")


def _own_checksum(description: Any) -> str | None:
    """Return the checksum of what a description says, however it is spaced; None for no mapping."""
    if not isinstance(description, dict):
        return None
    said = {key: value for key, value in description.items() if key != OWN_CHECKSUM}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_weights(path: Path, description: Mapping[str, Any]) -> None:
    if _checksum(path) != description.get("sha256"):
        raise ModelFileError(
            f"{str(path)!r} is damaged or belongs to another save: its checksum is not the one "
            f"in {DESCRIPTION}; save the model again or take an older copy"
        )


def _read_weights(folder: Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        _check_file(folder, path)
        _check_weights(path, description)
        tensors = load_file(path)
    except ModelFileError:
        raise
    except FileNotFoundError:
        raise ModelFileError(f"{str(folder)!r} is incomplete: {WEIGHTS} is missing") from None
    except (OSError, SafetensorError, *NONSENSE) as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error}") from None
    try:
        aliases = {alias: tensors[name] for alias, name in description["aliases"].items()}
    except NONSENSE as error:
        raise ModelFileError(f"{str(folder)!r} names tied weights it lacks: {error}") from None
    return tensors | aliases


def _build(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> nn.Module:
    if not description.get("model"):
        raise ModelFileError(
            f"{str(folder)!r} holds a {description.get('class')}, a class of your own: "
            f"load it with load_model(folder, into={description.get('class')}(...))"
        )
    try:
        schema = Schema.from_mapping(description["schema"])
        allocations = AllocationLimit(_bytes_worth(tensors, schema, description))
        allocations.require(SLOT_BYTES * schema.num_slots)
        with allocations:
            return build_model(description["model"], schema, description["settings"])
    except NONSENSE as error:
        raise ModelFileError(
            f"{str(folder)!r} does not describe a model this version knows: {error}"
        ) from None


def _bytes_worth(
    tensors: Mapping[str, Tensor], schema: Schema, description: Mapping[str, Any]
) -> int | None:
    """Return the most bytes that a model of these weights allocates while it is built.

    None where methods make the weights smaller than the tables are built at first.
    """
    if not only_sets_in(description["methods"]):
        return None
    # a tied weight is in the file once, however many names a description gives it
    distinct = {id(tensor): tensor.numel() for tensor in tensors.values()}
    numbers = sum(distinct.values())
    # a field without a number in the file is none, however many of them a description names
    objects = 1024 + 4 * (len(distinct) + min(len(schema.fields), numbers))
    return 2 * numbers * torch.get_default_dtype().itemsize + objects * OBJECT_BYTES


def _check_fields(folder: Path, into: RankingModel, description: Mapping[str, Any]) -> None:
    """Weights of other fields may have the same shape, so they are told apart by name and rows."""
    try:
        saved = Schema.from_mapping(description["schema"])
    except NONSENSE as error:
        raise ModelFileError(f"{str(folder)!r} was not saved from such a model: {error}") from None
    for field in into.schema.fields:
        if field.name in saved.names and field.vocabulary != saved[field.name].vocabulary:
            raise ModelFileError(
                f"{str(folder)!r} was trained with another vocabulary of {field.name!r}: the same id "
                "means another value"
            )
    if saved != into.schema:
        raise ModelFileError(
            f"{str(folder)!r} is a model of other fields: {_list_fields(saved)} in the file, "
            f"{_list_fields(into.schema)} here"
        )


def _list_fields(schema: Schema) -> str:
    return ", ".join(f"{field.name} ({field.rows} rows)" for field in schema.fields)


def _saved_methods(folder: Path, description: Mapping[str, Any]) -> dict[str, list[Any]]:
    try:
        saved = description["methods"].items()
        return {name: [_read_method(values) for values in steps] for name, steps in saved}
    except NONSENSE as error:
        raise ModelFileError(
            f"{str(folder)!r} names methods that cannot be read: {error}"
        ) from None


def _read_method(values: Mapping[str, Any]) -> Method:
    method = technique_from_mapping(values)
    if not isinstance(method, Method):
        raise SettingsError(f"{method} is not a method for tables")
    return method


def _load_weights(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    wanted = model.state_dict()
    problems = [f"{name} is not in the file" for name in wanted if name not in tensors]
    problems += [f"the model has no {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} in the file and {tuple(wanted[name].shape)} here"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} holds {tensors[name].dtype} in the file and {wanted[name].dtype} here"
        for name in wanted
        if name in tensors and _kind(tensors[name]) != _kind(wanted[name])
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ModelFileError(
            f"{str(folder)!r} is a model of another architecture than {type(model).__name__}: "
            f"{'; '.join(problems[:3])}{more}"
        )
    try:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in tensors:
                tensor.data = tensor.data.to(tensors[name].dtype)
        model.load_state_dict(dict(tensors))
    except NONSENSE as error:  # a type that torch can hold and not compute with
        raise ModelFileError(f"the weights in {str(folder)!r} cannot be used: {error}") from None


def _kind(tensor: Tensor) -> torch.dtype | str:
    """Return what must be the same in a file: floats may be of any precision."""
    return "float" if tensor.is_floating_point() else tensor.dtype


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
