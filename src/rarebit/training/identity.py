"""What makes two trainings the same run, and what may change the last bits of one.

    run           model, data and settings: a resumed run needs the same ones
    environment   versions, processor, threads: a change is allowed and reported with its consequence

Data is compared by a checksum of every value and its position. With odd 64-bit keys k, over the values x
of each block and the blocks of each array:

    checksum = sum over blocks b of  K_b · (sum over j of  k_j · x_bj)        modulo 2^64

A change of one value always changes it; a swap of values does except with a chance below 2^-30.
"""

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rarebit.data.counter_random import random_bits, stream_key
from rarebit.data.dataset import Dataset
from rarebit.settings import to_mapping
from rarebit.tables.find import find_sites, find_tables
from rarebit.tables.table import methods_of
from rarebit.training.row_kernel import row_kernel
from rarebit.training.settings import Training

__all__ = [
    "MAY_CHANGE",
    "describe_environment",
    "describe_run",
    "differences",
    "environment_warnings",
]

MAY_CHANGE = frozenset({"checkpoint_minutes", "epochs", "patience"})
"""Settings that may change when a run resumes: how long to train, and how often to checkpoint."""
BLOCK = 1 << 16
"""Values per block of a checksum: few enough for the processor's cache."""
MOST_LINES = 5
"""Reported differences between models: another model differs in hundreds of tensors."""

DATA_NAMES = {"train": "training data", "valid": "validation data"}

LAST_BITS = "the weights may differ in their last bits from an uninterrupted run"
CONSEQUENCES = {
    "rarebit": "the weights may differ from an uninterrupted run",
    "torch": LAST_BITS,
    "numpy": "the order of the rows may differ from an uninterrupted run",
    "python": "what your own code draws at random may differ from an uninterrupted run",
    "machine": LAST_BITS,
    "cpu": LAST_BITS,
    "device": "the order of the rows and the weights may differ from an uninterrupted run",
    "threads": LAST_BITS,
    "deterministic": LAST_BITS,
    "compiled row kernel": LAST_BITS,
}
"""What may follow when a part of the environment changes."""


def describe_run(
    model: nn.Module, train: Dataset, valid: Dataset | None, settings: Training
) -> dict[str, Any]:
    """Return what must be equal for a resumed run to be the same run, as plain values."""
    return {
        "model": _describe_model(model),
        "train": _describe_data(train),
        "valid": None if valid is None else _describe_data(valid),
        "settings": to_mapping(settings),
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how a saved run differs from this one, a line per difference; none for the same run."""
    lines = _model_differences(_part(saved, "model"), _part(now, "model"))
    for name in DATA_NAMES:
        lines += _data_differences(name, saved.get(name), now.get(name))
    # a setting that an older version did not have yet had the value that is now its default
    settings = _part(now, "settings")
    usual = {key: value for key, value in to_mapping(Training()).items() if key in settings}
    pair = (usual | dict(_part(saved, "settings")), settings)
    kept = [{k: v for k, v in one.items() if k not in MAY_CHANGE} for one in pair]
    return lines + list(_changed_items("settings", *kept))


def describe_environment(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return what else the last bits of a training depend on, as plain values.

    Without a device, it is the current GPU where CUDA is in use, else the CPU.
    """
    from rarebit import __version__

    return {
        "rarebit": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiled row kernel": row_kernel() is not None,
    }


def environment_warnings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes of the environment, a line each, with what may follow."""
    return [
        f"{name} was {_spell(saved.get(name))}, now {_spell(now.get(name))}: {consequence}"
        for name, consequence in CONSEQUENCES.items()
        if saved.get(name) != now.get(name)
    ]


def _describe_model(model: nn.Module) -> dict[str, Any]:
    parameters = {
        name: _shape(parameter) + ("" if parameter.requires_grad else " frozen")
        for name, parameter in model.named_parameters()
    }
    return {
        "class": type(model).__qualname__,
        "parameters": parameters,
        "buffers": {name: _shape(buffer) for name, buffer in model.named_buffers()},
        "methods": {
            site.info.name: [_describe_method(method) for method in methods_of(site.table)]
            for site in find_sites(model)
            if methods_of(site.table)
        },
        "frozen": [info.name for info in find_tables(model) if not info.trainable],
    }


def _describe_method(method: Any) -> dict[str, Any]:
    """Return a method without its defaults: a new setting with a default does not change the run."""
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    usual = {field.name: field.default for field in fields}
    values = to_mapping(method) if fields else {}
    given = {name: value for name, value in values.items() if value != usual[name]}
    return {"method": type(method).__qualname__, **given}


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _describe_data(data: Dataset) -> dict[str, Any]:
    return {
        "schema": data.schema.to_mapping(),
        "rows": len(data),
        "chunks": None if data.chunks is None else list(data.chunks),
        "checksum": _checksum({"ids": data.ids, "numeric": data.numeric, "label": data.label}),
    }


def _checksum(arrays: Mapping[str, Tensor]) -> str:
    """Return the checksum of all arrays; it waits for the device once, at the end."""
    device = next(iter(arrays.values())).device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, array in arrays.items():
        if array.numel() == 0:
            continue
        block_rows = max(BLOCK // (array.numel() // len(array)), 1)
        rows = array.reshape(len(array), -1).view(torch.int32).split(block_rows)
        inner = _keys("value", rows[0].numel()).to(device)
        outer = _keys(name, len(rows)).tolist()
        for block, key in zip(rows, outer, strict=True):
            # sums of integers wrap around, so their order and the device do not matter
            total += (block.reshape(-1) * inner[: block.numel()]).sum() * key
    return f"{int(total) % (1 << 64):016x}"


def _keys(name: str, n: int) -> Tensor:
    """Return random odd numbers of 64 bits, the same on every machine."""
    bits = random_bits(stream_key(0, "checksum", name), np.arange(n, dtype=np.uint64))
    return torch.from_numpy((bits | np.uint64(1)).view(np.int64))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _device_name(device: torch.device | str | None) -> str:
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _part(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a description, which may be anything if it comes from a file."""
    part = run.get(name)
    return part if isinstance(part, Mapping) else {}


def _model_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = [
        line for key in ("class", "frozen") for line in _changed(f"model.{key}", saved, now, key)
    ]
    tensors = [
        line
        for kind in ("methods", "parameters", "buffers")
        for line in _changed_items(f"model.{kind}", _part(saved, kind), _part(now, kind))
    ]
    more = len(tensors) - MOST_LINES
    return lines + tensors[:MOST_LINES] + ([f"and {more} more of the model"] if more > 0 else [])


def _data_differences(name: str, saved: Any, now: Any) -> list[str]:
    what = DATA_NAMES[name]
    if not isinstance(saved, Mapping):
        return [f"there was no {what}"] if isinstance(now, Mapping) else []
    if not isinstance(now, Mapping):
        return [f"there is no {what}, there was"]
    what = f"the {what}"
    if saved.get("schema") != now.get("schema"):
        return [f"{what} has other fields"]
    if saved.get("rows") != now.get("rows"):
        return [f"{what} has {now.get('rows')} rows, it had {saved.get('rows')}"]
    if saved.get("chunks") != now.get("chunks"):
        return [f"{what} is mixed in other chunks, as the memory of the machine is another"]
    if saved.get("checksum") != now.get("checksum"):
        return [f"{what} has as many rows as before, but its values differ or lie in another order"]
    return []


def _changed_items(place: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*saved, *now)):
        yield from _changed(f"{place}.{key}", saved, now, key)


def _changed(place: str, saved: Mapping[str, Any], now: Mapping[str, Any], key: str) -> list[str]:
    if saved.get(key) == now.get(key) and (key in saved) == (key in now):
        return []
    was, comes = (_spell(side[key]) if key in side else "not there" for side in (saved, now))
    return [f"{place} was {was}, now {comes}"]


def _spell(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
