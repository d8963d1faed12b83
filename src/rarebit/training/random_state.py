"""The random numbers to come: the states of all global generators, as plain values and bytes.

    torch     the CPU's generator; CUDA's, one a device, where CUDA is in use
    python    the module `random`
    numpy     `np.random`, the global state of old

Whole words are stored as uint8 tensors, so that a file of tensors can hold them bit by bit.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rarebit.errors import TrainingError

__all__ = ["random_state", "set_random_state"]

WORDS = 624
"""32-bit words of a Mersenne twister, which Python and numpy share."""


def random_state() -> dict[str, Any]:
    """Return the states of the global generators: dictionaries of numbers and uint8 tensors.

    >>> state = random_state()
    >>> first = torch.rand(3)
    >>> set_random_state(state)
    >>> torch.equal(torch.rand(3), first)
    True
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": _python_state(),
        "numpy": _numpy_state(),
    }
    if torch.cuda.is_initialized():
        generators = torch.cuda.get_rng_state_all()
        state["cuda"] = {str(device): generator for device, generator in enumerate(generators)}
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers that would have followed when `random_state` was called.

    States of CUDA devices that are not there are left out. A state that cannot be one is refused.

    >>> set_random_state({})
    Traceback (most recent call last):
    rarebit.errors.TrainingError: the random state is damaged: 'python'; start from another checkpoint
    """
    before = torch.get_rng_state()
    try:
        # all are read before one is set: half a state would be neither run
        python, numpy = _read_python(state["python"]), _read_numpy(state["numpy"])
        cuda = {int(device): _bytes(words) for device, words in state.get("cuda", {}).items()}
        torch.set_rng_state(_bytes(state["torch"]))
        random.setstate(python)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        torch.set_rng_state(before)
        raise TrainingError(
            f"the random state is damaged: {error}; start from another checkpoint"
        ) from None
    np.random.set_state(numpy)  # noqa: NPY002  # the global state is what is restored
    for device, words in cuda.items():
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(words, device)


def _python_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    *words, position = numbers
    return {
        "version": version,
        "words": _to_bytes(np.array(words, dtype=np.uint32)),
        "position": position,
        "gauss": gauss,
    }


def _read_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    numbers = (*_to_words(state["words"]).tolist(), _position(state))
    return (state["version"], numbers, _gauss(state["gauss"]))


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002  # libraries still draw from it
    if state["bit_generator"] != "MT19937":
        raise TrainingError(
            f"numpy's global generator is {state['bit_generator']}, whose state cannot be stored; "
            "leave numpy's own in its place"
        )
    return {
        "words": _to_bytes(np.asarray(state["state"]["key"], dtype=np.uint32)),
        "position": int(state["state"]["pos"]),
        "gauss": float(state["gauss"]) if state["has_gauss"] else None,
    }


def _read_numpy(state: Mapping[str, Any]) -> dict[str, Any]:
    gauss = _gauss(state["gauss"])
    return {
        "bit_generator": "MT19937",
        "state": {"key": _to_words(state["words"]), "pos": _position(state)},
        "has_gauss": int(gauss is not None),
        "gauss": gauss or 0.0,
    }


def _position(state: Mapping[str, Any]) -> int:
    position = state["position"]
    # numpy does not check it, and would read beyond its words
    if type(position) is not int or not 0 <= position <= WORDS:
        raise ValueError(f"a position must lie in [0, {WORDS}], got {position!r}")
    return position


def _gauss(value: object) -> float | None:
    if value is not None and not isinstance(value, float):
        raise ValueError(f"a stored draw must be a number, got {value!r}")
    return value


def _to_bytes(words: "np.ndarray[Any, np.dtype[np.uint32]]") -> Tensor:
    return torch.from_numpy(words.astype("<u4").view(np.uint8))


def _to_words(values: Tensor) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    words = _bytes(values)
    if words.shape != (4 * WORDS,):
        raise ValueError(f"a generator has {4 * WORDS} bytes, got {tuple(words.shape)}")
    return words.numpy().view("<u4").astype(np.uint32)


def _bytes(values: object) -> Tensor:
    if not isinstance(values, Tensor) or values.dtype != torch.uint8:
        raise TypeError("a generator's state must be a tensor of bytes")
    return values.cpu().contiguous()
