"""Nested states as JSON values and numbered tensors, unambiguously, and back to the bit.

Plain values and lists stand for themselves. Every JSON object has exactly one key, which names its kind,
so no dictionary of a user is mistaken for one of them:

    {"dict": [[key, value], ...]}   {"tuple": [...]}       {"tensor": "12"}
    {"int": "0x..."}                beyond 64 bits         {"float": "7ff8000000000000"}   not finite
    {"text": "6162..."}             not valid Unicode, in hexadecimal
"""

import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.errors import CheckpointError

__all__ = ["Decoder", "Encoder", "place_of"]

MAX_DEPTH = 64
"""Levels of a state: far more than any has, far fewer than Python can follow."""
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
SURROGATE = re.compile("[\ud800-\udfff]")  # two in a row would come back from JSON as one character


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells the memory of a tensor from that of others."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Encoder:
    """Turns a state into JSON values, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return a value as JSON holds it; `path` is where in the state it stands."""
        if len(path) > MAX_DEPTH:
            raise CheckpointError(
                f"{_dotted(path[:8])} has more than {MAX_DEPTH} levels or holds itself; make it flatter"
            )
        if isinstance(value, Tensor):
            return {"tensor": self._number(value, path)}
        if isinstance(value, dict):
            return {"dict": [self._pair(key, inner, path) for key, inner in value.items()]}
        if type(value) in {list, tuple}:
            items = [self.encode(inner, (*path, place)) for place, inner in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        return _encode_plain(value, path)

    def _pair(self, key: Any, value: Any, path: tuple[Any, ...]) -> list[Any]:
        if type(key) not in {str, int}:
            raise CheckpointError(
                f"{_dotted(path)} has the key {key!r}, which is {_kind(key)}; use str or int keys"
            )
        return [_encode_plain(key, path), self.encode(value, (*path, key))]

    def _number(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Return the number that a tensor is stored under; the same for the same memory."""
        _check_tensor(tensor, path)
        place = place_of(tensor)
        if tensor.numel() and place in self._numbers:
            return self._numbers[place]
        number = self._numbers[place] = str(len(self.tensors))
        self.tensors[number] = tensor
        return number


def _check_tensor(tensor: Tensor, path: tuple[Any, ...]) -> None:
    has_data = type(tensor) in {Tensor, nn.Parameter} and not tensor.is_meta
    is_dense = tensor.layout is torch.strided and not tensor.is_neg()
    if not has_data or not is_dense or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{_dotted(path)} is {_kind(tensor)} of {tensor.dtype}, {tensor.layout}, on "
            f"{tensor.device}, which a checkpoint cannot hold; make it an ordinary tensor first"
        )


def _encode_plain(value: Any, path: tuple[Any, ...]) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if type(value) is str:
        is_text = SURROGATE.search(value) is None
        return value if is_text else {"text": value.encode("utf-8", "surrogatepass").hex()}
    raise CheckpointError(
        f"{_dotted(path)} is {_kind(value)}, which a checkpoint cannot hold; "
        "use tensors, plain numbers, str, None, and dict, list and tuple of them"
    )


class Decoder:
    """Turns JSON values back into a state. Whatever is not as the encoder made it is an error."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self._unused = tensors, set(tensors)

    def decode_all(self, content: Any) -> dict[str, Any]:
        """Return a whole state, all of whose tensors are used."""
        state = self.decode(content, 0)
        if isinstance(state, dict) and not self._unused:
            return state
        raise ValueError("the state does not describe its tensors")

    def decode(self, content: Any, depth: int) -> Any:
        """Return a value from what JSON held."""
        if depth > MAX_DEPTH:
            raise ValueError(f"the state is nested deeper than {MAX_DEPTH} levels")
        if isinstance(content, list):
            return [self.decode(inner, depth + 1) for inner in content]
        return self._decode_object(content, depth) if isinstance(content, dict) else content

    def _decode_object(self, content: dict[str, Any], depth: int) -> Any:
        match content if len(content) == 1 else None:
            case {"dict": list(pairs)}:
                return self._decode_dict(pairs, depth + 1)
            case {"tuple": list(items)}:
                return tuple(self.decode(items, depth))
            case {"tensor": str(number)} if number in self.tensors:
                self._unused.discard(number)
                return self.tensors[number]
            case {"int": str(digits)}:
                return int(digits, 16)
            case {"float": str(bits)}:
                return struct.unpack(">d", bytes.fromhex(bits))[0]
            case {"text": str(coded)}:
                return bytes.fromhex(coded).decode("utf-8", "surrogatepass")
        raise ValueError(
            "the state has a value of an unknown kind or names a tensor that is missing"
        )

    def _decode_dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        decoded = {self.decode(key, depth): self.decode(inner, depth) for key, inner in pairs}
        if len(decoded) != len(pairs) or not {type(key) for key in decoded} <= {str, int}:
            raise ValueError("the state has a dictionary with wrong keys")
        return decoded


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the state"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
