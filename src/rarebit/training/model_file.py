"""A model as a folder: `model.json`, `weights-<hash>.safetensors`, and `encoder-<hash>/` if it has one.

`model.json` says what to build before the weights fit: the name, settings and fields of a zoo model, its embedding sets, and
the methods applied to each table. The encoder is a copy of what turned raw rows into the ids that the model was trained on.
`rarebit.storage.files` keeps a save whole. Checksums are no signature: whatever a description asks for, loading takes no
more memory than its weights are worth.
"""

import heapq
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.codes.packed import take_parts_
from rarebit.data.prepared import ENCODER, StoredEncoder
from rarebit.data.schema import Schema
from rarebit.errors import ModelFileError, SettingsError
from rarebit.models import build_model, model_names
from rarebit.models._base import RankingModel
from rarebit.sets.sets import SetsMethod, sets_of
from rarebit.storage.files import TensorFolder, place_of
from rarebit.tables.apply import find_sites, find_tables, restore_tables
from rarebit.tables.table import Method, methods_of
from rarebit.technique import technique_class, technique_from_mapping, technique_to_mapping
from rarebit.training.memory import OBJECT_BYTES, AllocationLimit

FOLDER = TensorFolder(
    "model",
    "model.json",
    ModelFileError,
    "save the model again",
    stem="weights",
    older=("weights.safetensors", ENCODER),
)
PROJECTED = "projected"
"""The key of a flag: the sets have projections, which a file cannot hold."""
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "",
}
"""Modules around a model, and where each has it; one that splits the weights is not looked into."""
LARGE, MAX_DIGITS = 1 << 25, 18
"""Numbers of a table that is large: 128 MB."""
SLOT_BYTES = 64
"""What the tables keep for each slot of a batch: a few whole numbers."""

# What values of the wrong kind raise, RarebitError among them: no description may do worse.
NONSENSE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model to a folder, over an older model if there is one, and return the folder.

    At any moment, the folder holds the old model or the new one. A compiled model, and one in `DataParallel` or
    `DistributedDataParallel`, is saved as the model inside.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Embedding(9, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_model(model, folder)
    ...     copy = load_model(folder, into=nn.Sequential(nn.Embedding(9, 4)))
    >>> bool((copy[0].weight == model[0].weight).all())
    True
    """
    model = _unwrapped(model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in model.state_dict().items():
        first = names.setdefault(place_of(tensor), name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first  # a tied weight
    encoder = model.schema.encoder if isinstance(model, RankingModel) else None
    parts = {ENCODER: None if encoder is None else encoder.save}
    return FOLDER.write(folder, _describe(model) | {"aliases": aliases}, tensors, parts)


def load_model(
    folder: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Read a model from a folder. A model of your own class is read `into` a fresh one.

    The methods that were applied when it was saved are applied again before the weights are read.
    Weights keep the precision they were saved in.

    >>> import tempfile
    >>> from rarebit.data import Field
    >>> from rarebit.models.fm import FM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_model(FM(Schema((Field(name="user", rows=9),)), dim=4), folder)
    ...     model = load_model(folder)
    >>> model.settings
    {'dim': 4, 'wide_std': 0.01}
    """
    folder = Path(folder)
    description, tensors = FOLDER.read(folder)
    try:
        tensors |= {alias: tensors[name] for alias, name in description["aliases"].items()}
    except NONSENSE as error:
        raise ModelFileError(f"{str(folder)!r} names tied weights it lacks: {error}") from None
    if into is None and _may_be_larger_than_its_file(description):
        sizes = None
        with (
            suppress(ModelFileError),
            torch.device("meta"),
        ):  # a method may need values for its sizes
            sizes = _restored(folder, description, tensors)
        if sizes is not None:
            _check_weights(folder, sizes, tensors)
    model = _restored(folder, description, tensors, into)
    take_parts_(model, tensors)
    _load_weights(folder, model, tensors)
    if ENCODER in description["parts"] and isinstance(model, RankingModel):
        encoder = StoredEncoder(folder / description["parts"][ENCODER])
        model.schema = replace(model.schema, encoder=encoder)
    return model.to(device)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that change nothing but names; raise where others are, or deeper inside."""
    while isinstance(
        inner := getattr(model, WRAPPERS.get(type(model).__name__, ""), None), nn.Module
    ):
        model = inner
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in WRAPPERS:
            raise ModelFileError(
                f"{name or 'the model'!r} is wrapped in {kind}, so its weights have names that a fresh model does "
                "not have; save the model before that part is wrapped, or put the part inside back first"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ModelFileError(
                f"{name!r} is split over processes, as by FSDP2; gather the weights with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
                "StateDictOptions(full_state_dict=True)), load them into a model that is not split, and save that"
            )
    return model


def _describe(model: nn.Module) -> dict[str, Any]:
    ours = model if isinstance(model, RankingModel) else None
    return {
        "class": type(model).__name__,
        "model": ours and _name_of(ours),
        "settings": ours and _plain_settings(ours),
        "schema": ours and ours.schema.to_mapping(),
        "sets": _describe_sets(model),
        "methods": {
            site.info.name: [technique_to_mapping(method) for method in methods_of(site.table)]
            for site in find_sites(model)
            if methods_of(site.table)
        },
        "frozen": [info.name for info in find_tables(model) if not info.trainable],
    }


def _name_of(model: RankingModel) -> str | None:
    """Return the name that `build_model` knows the model by; None for a class from elsewhere."""
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


def _read_method(values: Mapping[str, Any]) -> Method:
    method = technique_from_mapping(values)
    if not isinstance(method, Method):
        raise SettingsError(f"{method} is not a method for tables")
    return method


def _build(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> nn.Module:
    if not description.get("model"):
        raise ModelFileError(
            f"{str(folder)!r} holds a {description.get('class')}, your own class: "
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
    if not _only_sets_in(description["methods"]):
        return None
    # a tied weight is in the file once, however many names a description gives it
    distinct = {id(tensor): tensor.numel() for tensor in tensors.values()}
    numbers = sum(distinct.values())
    # a field without a number in the file is none, however many of them a description names
    objects = 1024 + 4 * (len(distinct) + min(len(schema.fields), numbers))
    return 2 * numbers * torch.get_default_dtype().itemsize + objects * OBJECT_BYTES


def _check_fields(folder: Path, into: RankingModel, description: Mapping[str, Any]) -> None:
    """Raise for a model of other fields: weights of the same shape do not show that."""
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
        lists = [
            ", ".join(f"{field.name} ({field.rows} rows)" for field in schema.fields)
            for schema in (saved, into.schema)
        ]
        raise ModelFileError(
            f"{str(folder)!r} is a model of other fields: {lists[0]} in the file, {lists[1]} here"
        )


def _describe_sets(model: nn.Module) -> dict[str, Any] | None:
    """Return the method that gave a model its sets as plain values, None where it has none."""
    method = getattr(getattr(model, "backbone", None), "made_by", None)
    if not isinstance(method, SetsMethod):
        return None
    return {**technique_to_mapping(method.stored), PROJECTED: method.stored != method}


def _restore_sets_(model: nn.Module, described: Mapping[str, Any] | None) -> None:
    """Give a fresh model the sets that a saved one had, unless it has them; the weights come after."""
    there = sets_of(model)
    if described is None:
        if there is not None:
            raise ModelFileError(f"it has one embedding set, and this model has those of {there}")
        return
    method = technique_from_mapping({k: v for k, v in described.items() if k != PROJECTED})
    if not isinstance(method, SetsMethod):
        raise ModelFileError(f"{method} gives no model its embedding sets")
    if there is not None:
        if (type(there), there.num_sets) != (type(method), method.num_sets):
            raise ModelFileError(f"its sets are those of {method}, and this model's of {there}")
    elif described.get(PROJECTED):
        raise ModelFileError(
            f"the sets of {method} have projections of your own; apply_ it with the same project= to the "
            "model that is given as into="
        )
    else:
        method.change_(model)


def _only_sets_in(methods: Any) -> bool:
    """Return whether saved tables have their sets and no other method that may have made them smaller.

    Values from a file may be anything: what is malformed is refused where the methods are read.
    """
    if not isinstance(methods, Mapping):
        return False
    steps = [step for steps in methods.values() for step in (steps or [None])]
    try:
        return all(
            isinstance(step, Mapping)
            and issubclass(technique_class(str(step.get("method"))), SetsMethod)
            for step in steps
        )
    except SettingsError:  # an unknown method
        return False


def _may_be_larger_than_its_file(description: Mapping[str, Any]) -> bool:
    """Return whether methods may have made the tables small that are built first, and those may be large.

    Their sizes are then compared without memory, on torch's "meta" device, which takes a second to import.
    """
    text = json.dumps([description.get("schema"), description.get("settings")])
    largest = heapq.nlargest(2, (int(number[:MAX_DIGITS]) for number in re.findall("[0-9]+", text)))
    return math.prod(largest) > LARGE and not _only_sets_in(description.get("methods"))


def _restored(
    folder: Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    into: nn.Module | None = None,
) -> nn.Module:
    """Return the model that is described, with its sets and methods; its weights are to come."""
    model = _build(folder, description, tensors) if into is None else into
    if isinstance(into, RankingModel):
        _check_fields(folder, into, description)
    try:
        saved = description["methods"].items()
        methods = {name: [_read_method(values) for values in steps] for name, steps in saved}
    except NONSENSE as error:
        raise ModelFileError(
            f"{str(folder)!r} names methods that cannot be read: {error}"
        ) from None
    try:
        with AllocationLimit(None):
            _restore_sets_(model, description.get("sets"))
        restore_tables(model, methods, description.get("frozen", ()))
    except NONSENSE as error:
        raise ModelFileError(f"{str(folder)!r} is a model of another kind: {error}") from None
    return model


def _check_weights(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise where the tensors of a file are not those of a model."""
    wanted = model.state_dict()
    problems = [f"{name} is not in the file" for name in wanted if name not in tensors]
    problems += [f"the model has no {name}" for name in tensors if name not in wanted]
    both = [(name, tensors[name], here) for name, here in wanted.items() if name in tensors]
    problems += [
        f"{name} is {tuple(stored.shape)} in the file and {tuple(here.shape)} here"
        for name, stored, here in both
        if stored.shape != here.shape
    ]
    problems += [
        f"{name} holds {stored.dtype} in the file and {here.dtype} here"
        for name, stored, here in both
        if stored.dtype != here.dtype
        and not (stored.is_floating_point() and here.is_floating_point())
    ]
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        is_stored = other in tensors and name in tensors
        if is_stored and not torch.equal(tensors[other], tensors[name]):
            problems.append(f"{other} and {name} are two weights in the file and tied here")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ModelFileError(
            f"{str(folder)!r} is a model of another architecture than {type(model).__name__}: "
            f"{'; '.join(problems[:3])}{more}"
        )


def _load_weights(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    _check_weights(folder, model, tensors)
    try:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in tensors:
                tensor.data = tensor.data.to(tensors[name].dtype)
        model.load_state_dict(dict(tensors))
    except NONSENSE as error:  # a type that torch can hold and not compute with
        raise ModelFileError(f"the weights in {str(folder)!r} cannot be used: {error}") from None
