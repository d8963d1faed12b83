"""The Open Inference Protocol v2: named tensors as JSON, or in binary after the JSON.

https://github.com/kserve/open-inference-protocol, with Triton's extension for binary tensors. A column of texts
is BYTES [rows], a number FP64 [rows], and lists of values BYTES [rows, values]. NaN is a missing number here.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from rarebit.errors import RequestError
from rarebit.serving.columns import Arrays, Input, shown, to_array
from rarebit.serving.forms import Rows, load_json
from rarebit.settings import suggest

TYPES: dict[str, Any] = {
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BOOL": np.dtype("?"),
}
OUTPUTS = {"score": "FP32", "unknown": "BOOL"}


class Asked(NamedTuple):
    """What a request wants back."""

    id: str | None
    outputs: dict[str, bool]
    """The outputs by name, and whether each is sent in binary."""


class IdSlots(NamedTuple):
    """What a model reads that takes ids in place of raw values."""

    rows: NDArray[np.int64]
    """`(slots,)`: the number of rows of each slot's table; empty where the file does not say."""
    slots: int
    numbers: int


def parse(
    body: bytes,
    json_length: int | None,
    inputs: Mapping[str, Input] | IdSlots,
    outputs: Sequence[str],
    max_rows: int,
) -> tuple[Rows, Asked]:
    """Return the rows of a request and what it wants back."""
    end = len(body) if json_length is None else json_length
    if not 0 <= end <= len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {end}, but the body has {len(body)} bytes"
        )
    values = load_json(memoryview(body)[:end])
    if type(values) is not dict or type(values.get("inputs")) is not list:
        raise RequestError('expected a JSON object with a list "inputs"')
    tensors = _tensors(values["inputs"], memoryview(body)[end:])
    asked = _asked(values, outputs)
    for name, (shape, _) in tensors.items():
        if shape[0] > max_rows:
            raise RequestError(
                f"input {name!r} has {shape[0]:,} rows; this server takes at most {max_rows:,} "
                "(--max-rows)",
                status=413,
            )
    if isinstance(inputs, IdSlots):
        return _ids(tensors, inputs), asked
    return _columns(tensors, inputs), asked


def answer(
    asked: Asked, found: Mapping[str, NDArray[Any]], model: str, version: str
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON where binary tensors follow."""
    outputs, binary = [], []
    for name, is_binary in asked.outputs.items():
        array = np.ascontiguousarray(found[name])
        entry: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": array.shape}
        if is_binary:
            raw = array.tobytes()
            binary.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            entry["data"] = array.ravel()
        outputs.append(entry)
    values: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if asked.id is not None:
        values["id"] = asked.id
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return (text + b"".join(binary), len(text)) if binary else (text, None)


def _asked(values: dict[str, Any], offered: Sequence[str]) -> Asked:
    parameters = values.get("parameters") or {}
    every = type(parameters) is dict and parameters.get("binary_data_output") is True
    wanted = values.get("outputs") or [{"name": name} for name in offered]
    if type(wanted) is not list or any(type(one) is not dict for one in wanted):
        raise RequestError("outputs must be a list of objects with a name")
    found = {}
    for one in wanted:
        name = one.get("name")
        if type(name) is not str or name not in offered:
            raise RequestError(f"unknown output {shown(name)}{suggest(str(name)[:100], offered)}")
        own = one.get("parameters")
        found[name] = bool(own.get("binary_data", every)) if type(own) is dict else every
    identity = values.get("id")
    if identity is not None and type(identity) is not str:
        raise RequestError(f"id must be a string, got {shown(identity)}")
    return Asked(identity, found)


def _tensors(entries: list[Any], binary: memoryview) -> dict[str, tuple[list[int], Any]]:
    """Return shape and values of each input; values are a flat list or an array."""
    tensors: dict[str, tuple[list[int], Any]] = {}
    start = 0
    for number, entry in enumerate(entries):
        if type(entry) is not dict or type(entry.get("name")) is not str:
            raise RequestError(f"input {number} must be an object with a name")
        name, shape, datatype = entry["name"], entry.get("shape"), entry.get("datatype")
        where = f"input {shown(name)}"
        if name in tensors:
            raise RequestError(f"{where} is there twice")
        if (
            type(shape) is not list
            or not 1 <= len(shape) <= 2
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise RequestError(f"{where}: shape must be one or two sizes, got {shown(shape)}")
        if datatype != "BYTES" and datatype not in TYPES:
            raise RequestError(
                f"{where}: unknown datatype {shown(datatype)}"
                f"{suggest(str(datatype)[:100], ['BYTES', *TYPES])}"
            )
        count = math.prod(shape)
        parameters = entry.get("parameters")
        size = parameters.get("binary_data_size") if type(parameters) is dict else None
        found: Any
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - start:
                raise RequestError(
                    f"{where}: binary_data_size is {shown(size)}, but {len(binary) - start} bytes "
                    "are left"
                )
            found = _from_binary(where, datatype, binary[start : start + size])
            start += size
        else:
            found = _flat(where, entry.get("data"), shape)
        if len(found) != count:
            raise RequestError(f"{where}: shape {shape} needs {count} values, got {len(found)}")
        tensors[name] = (shape, found)
    if start != len(binary):
        raise RequestError(f"{len(binary) - start} bytes follow the last binary input")
    return tensors


def _from_binary(where: str, datatype: str, raw: memoryview) -> Any:
    if datatype != "BYTES":
        dtype = TYPES[datatype]
        if len(raw) % dtype.itemsize:
            raise RequestError(f"{where}: {len(raw)} bytes are no whole number of {datatype}")
        if datatype == "BOOL":
            return np.frombuffer(raw, np.uint8) != 0
        return np.frombuffer(raw, dtype)
    texts: list[str] = []
    place = 0
    try:
        while place < len(raw):
            (length,) = struct.unpack_from("<I", raw, place)
            place += 4 + length
            if place > len(raw):
                raise RequestError(f"{where}: value {len(texts)} ends after the tensor")
            texts.append(str(raw[place - length : place], "utf-8"))
    except struct.error:
        raise RequestError(f"{where}: value {len(texts)} ends after the tensor") from None
    except UnicodeDecodeError:
        raise RequestError(f"{where}: value {len(texts)} is not UTF-8") from None
    return texts


def _flat(where: str, data: Any, shape: list[int]) -> list[Any]:
    """Return JSON data as a flat list; it may be nested as its shape is."""
    if type(data) is not list:
        raise RequestError(f"{where} needs a list of data, or binary data")
    for _ in shape[1:]:
        if not data or type(data[0]) is not list:
            break
        if any(type(part) is not list for part in data):
            raise RequestError(f"{where}: data must be flat, or nested as the shape is")
        data = [value for part in data for value in part]
    return list(data)


def _check_names(tensors: Mapping[str, Any], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise RequestError(f"input {missing[0]!r} is missing{more}")
    unknown = [name for name in tensors if name not in wanted]
    if unknown:
        known = suggest(unknown[0][:100], wanted)
        raise RequestError(f"the model reads no input {shown(unknown[0])}{known}")


def _count_rows(tensors: Mapping[str, tuple[list[int], Any]]) -> int:
    rows = {name: shape[0] for name, (shape, _) in tensors.items()}
    first = next(iter(rows))
    for name, count in rows.items():
        if count != rows[first]:
            raise RequestError(
                f"inputs must have the same number of rows; {first!r} has {rows[first]}, {name!r} "
                f"has {count}"
            )
    if not rows[first]:
        raise RequestError(f"input {first!r} must have at least one row, got none")
    return rows[first]


def _columns(tensors: Mapping[str, tuple[list[int], Any]], inputs: Mapping[str, Input]) -> Rows:
    _check_names(tensors, list(inputs))
    count = _count_rows(tensors)
    arrays: Arrays = {}
    for name, column in inputs.items():
        shape, values = tensors[name]
        flat = values if type(values) is list else values.tolist()
        if column.is_list and len(shape) == 2:
            width = shape[1]
            flat = [flat[row * width : (row + 1) * width] for row in range(count)]
        elif column.is_list or shape not in ([count], [count, 1]):
            expected = "[rows, values]" if column.is_list else "[rows]"
            raise RequestError(f"input {name!r} must be of shape {expected}, got {shape}")
        arrays[name] = to_array(column, flat, nan_is_missing=True)
    return Rows(arrays, count)


def _ids(tensors: Mapping[str, tuple[list[int], Any]], slots: IdSlots) -> Rows:
    _check_names(tensors, ["ids", "numeric"] if slots.numbers else ["ids"])
    count = _count_rows(tensors)
    arrays = {
        "ids": _matrix("ids", *tensors["ids"], slots.slots, np.int64),
    }
    if slots.numbers:
        arrays["numeric"] = _matrix("numeric", *tensors["numeric"], slots.numbers, np.float32)
    ids = arrays["ids"]
    wrong = (ids < 0) | (ids >= slots.rows) if slots.rows.size else ids < 0
    if wrong.any():
        row, slot = (int(one[0]) for one in np.nonzero(wrong))
        most = f" below {slots.rows[slot]:,}" if slots.rows.size else " of 0 or more"
        raise RequestError(f"row {row}: slot {slot} of ids must be{most}, got {ids[row, slot]}")
    return Rows(arrays, count)


def _matrix(name: str, shape: list[int], values: Any, width: int, dtype: Any) -> NDArray[Any]:
    if len(shape) != 2 or shape[1] != width:
        raise RequestError(f"input {name!r} must be of shape [rows, {width}], got {shape}")
    whole = dtype is np.int64
    if type(values) is list:
        allowed = {int} if whole else {int, float}
        wrong = next((value for value in values if type(value) not in allowed), None)
        if wrong is not None or None in values:
            raise RequestError(f"input {name!r} must hold numbers only, got {shown(wrong)}")
    elif whole and values.dtype.kind not in "iu":
        raise RequestError(f"input {name!r} must be of a whole number type, got {values.dtype}")
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(values).astype(dtype).reshape(shape)
    except (OverflowError, ValueError):
        raise RequestError(f"input {name!r} has a number out of range") from None
    if not np.isfinite(found).all():
        raise RequestError(f"input {name!r} must hold finite numbers only")
    return found
