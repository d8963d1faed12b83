"""Row-wise optimizers in one pass over the rows of a step: a small C++ kernel, compiled on first use.

A step gives a table T lookups: ids `(T,)` with duplicates, and values `(T, D)`, the gradient of each.
For each distinct row, w its weight and g the sum of its values in the order of the lookups:

    decoupled   w *= 1 - lr * weight_decay, before all else
    coupled     g += weight_decay * w
    adam        m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g * g
                w -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)
    adagrad     s += mean(g * g)                       one number a row
                w -= lr * g / (sqrt(s) + eps)
    sgd         b = momentum * b + g
                w -= lr * b                            without momentum: w -= lr * g

Other rows are not touched, and the bits do not depend on the number of threads. How it is compiled is
told in `tables/compiler.py`; where it cannot be, there is no kernel, and plain torch does the same.
"""

import ctypes
import functools
import math
import os
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rarebit.errors import DataError
from rarebit.tables.compiler import is_plain, load_compiled

__all__ = ["RowKernel", "load_row_kernel", "row_kernel", "suits"]

SOURCE = Path(__file__).with_suffix(".cpp")
OUT_OF_MEMORY = -2

LOOKUPS = (c_void_p, c_int64, c_void_p, c_int64, c_int)
"""ids, their number, values, width, threads"""
TABLE = (c_int64, c_void_p, c_float, c_float)
"""rows, weight, decoupled decay, coupled decay"""
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "rarebit_merge": (*LOOKUPS, c_void_p, c_void_p),
    "rarebit_adam": (*LOOKUPS, *TABLE, c_void_p, c_void_p, *[c_float] * 7),
    "rarebit_adagrad": (*LOOKUPS, *TABLE, c_void_p, c_float, c_float),
    "rarebit_sgd": (*LOOKUPS, *TABLE, c_void_p, c_float, c_float),
}


@functools.cache
def row_kernel() -> "RowKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible."""
    return load_row_kernel(os.environ)


def suits(*tensors: Tensor) -> bool:
    """Return whether the kernel can take these: plain float32 tensors on the CPU, contiguous."""
    return all(is_plain(tensor, torch.float32) for tensor in tensors)


class RowKernel:
    """The compiled functions. Ids are int64; all other tensors must be such as `suits` accepts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        for name, function in self._functions.items():
            function.argtypes = FUNCTIONS[name]
            function.restype = c_int64

    def merge(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids `(U,)`, ascending, and the sum of each one's values `(U, D)`."""
        _check_lookups(ids, values)
        rows, sums = torch.empty_like(ids), torch.empty_like(values, requires_grad=False)
        found = self._call("rarebit_merge", ids, values, rows.data_ptr(), sums.data_ptr())
        return rows[:found], sums[:found]

    def adam(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: int,
    ) -> None:
        """Take one step of lazy Adam on the looked-up rows; `step` counts from 1."""
        _check_table(values, weight, exp_avg, exp_avg_sq)
        beta1, beta2 = betas
        self._update(
            "rarebit_adam",
            (ids, values),
            weight,
            _decay(lr, weight_decay, decoupled=decoupled),
            (exp_avg, exp_avg_sq),
            lr / (1.0 - beta1**step),
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            math.sqrt(1.0 - beta2**step),
            eps,
        )

    def adagrad(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        sums: Tensor,
        *,
        lr: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """Take one step of row-wise Adagrad on the looked-up rows; sums `(N,)`."""
        _check_table(values, weight)
        if not suits(sums) or sums.shape != weight.shape[:1]:
            raise DataError(
                f"row-wise Adagrad keeps one number a row, {weight.shape[0]} contiguous float32 in "
                f"all; got a tensor of shape {tuple(sums.shape)} and {sums.dtype}"
            )
        decay = _decay(lr, weight_decay, decoupled=decoupled)
        self._update("rarebit_adagrad", (ids, values), weight, decay, (sums,), lr, eps)

    def sgd(
        self,
        ids: Tensor,
        values: Tensor,
        weight: Tensor,
        momentum_buffer: Tensor | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """Take one step of SGD on the looked-up rows; without a buffer there is no momentum."""
        _check_table(values, weight, weight if momentum_buffer is None else momentum_buffer)
        decay = _decay(lr, weight_decay, decoupled=decoupled)
        states = (momentum_buffer,)
        self._update("rarebit_sgd", (ids, values), weight, decay, states, lr, momentum)

    def _update(
        self,
        name: str,
        lookups: tuple[Tensor, Tensor],
        weight: Tensor,
        decay: tuple[float, float],
        states: tuple[Tensor | None, ...],
        *numbers: float,
    ) -> None:
        _check_lookups(*lookups)
        pointers = [None if state is None else state.data_ptr() for state in states]
        table = (weight.shape[0], weight.data_ptr(), *decay)
        self._call(name, *lookups, *table, *pointers, *numbers)
        # torch cannot see what was written: without this, a backward through rows from before the
        # step would be wrong silently.
        for written in (weight, *states):
            if written is not None:
                increment_version(written)

    def _call(self, name: str, ids: Tensor, values: Tensor, *arguments: float | None) -> int:
        lookups = (ids.data_ptr(), ids.shape[0], values.data_ptr(), values.shape[1])
        found = int(self._functions[name](*lookups, torch.get_num_threads(), *arguments))
        if found == OUT_OF_MEMORY:
            raise MemoryError(f"no memory to sort {ids.shape[0]} lookups; take smaller batches")
        if found < 0:
            limit = (
                "" if name == "rarebit_merge" else f" and below {arguments[0]}, the table's rows"
            )
            raise DataError(
                f"ids must be 0 or more{limit}; got ids from {int(ids.min())} to {int(ids.max())}"
            )
        return found


def _decay(lr: float, weight_decay: float, *, decoupled: bool) -> tuple[float, float]:
    """Return the weight's factor, and its share in the gradient."""
    return (1.0 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


def _check_lookups(ids: Tensor, values: Tensor) -> None:
    fits = ids.dtype == torch.int64 and ids.device.type == "cpu" and ids.is_contiguous()
    if not (fits and ids.dim() == 1 and suits(values) and values.dim() == 2):
        raise DataError(
            "the row kernel takes ids (T,) in int64 and values (T, D) in float32, contiguous and on "
            f"the CPU; got {tuple(ids.shape)} in {ids.dtype} and {tuple(values.shape)} in "
            f"{values.dtype}"
        )
    if ids.shape[0] != values.shape[0] or values.shape[1] == 0:
        raise DataError(
            f"each of the {ids.shape[0]} ids needs a row of values, at least one number wide; "
            f"got values of shape {tuple(values.shape)}"
        )


def _check_table(values: Tensor, weight: Tensor, *states: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in (weight, *states)}
    if not suits(weight, *states) or len(shapes) > 1 or weight.shape[1:] != values.shape[1:]:
        raise DataError(
            "the row kernel takes a weight (N, D) and states of its shape, contiguous float32 on the "
            f"CPU, as wide as the values; got {sorted(shapes)} and values {tuple(values.shape)}"
        )


def load_row_kernel(environment: Mapping[str, str]) -> RowKernel | None:
    """Return a kernel from the cache or the compiler that an environment names; None without one."""
    return load_compiled(SOURCE, _tried, environment)


def _tried(library: ctypes.CDLL) -> RowKernel | None:
    kernel = RowKernel(library)
    return kernel if _is_right(kernel) else None


def _is_right(kernel: RowKernel) -> bool:
    """Return whether a step on three rows gives what it gives by hand: -1 where a row was seen."""
    cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # whatever the defaults are
    ids, values = torch.tensor([2, 0, 2], device="cpu"), torch.tensor([[1.0], [2.0], [3.0]], **cpu)
    rows, sums = kernel.merge(ids, values)
    by_adam, by_adagrad, by_sgd, first, second = (torch.zeros(3, 1, **cpu) for _ in range(5))
    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "decoupled": False}
    kernel.adam(ids, values, by_adam, first, second, betas=(0.9, 0.999), eps=0.0, step=1, **plain)
    kernel.adagrad(ids, values, by_adagrad, torch.zeros(3, **cpu), eps=0.0, **plain)
    kernel.sgd(ids, values, by_sgd, None, momentum=0.0, **plain)
    expected = torch.tensor([[-1.0], [0.0], [-1.0]], **cpu)
    return (
        rows.tolist() == [0, 2]
        and sums.tolist() == [[2.0], [4.0]]
        and torch.allclose(by_adam, expected)
        and torch.allclose(by_adagrad, expected)
        and by_sgd.tolist() == [[-2.0], [0.0], [-4.0]]
    )
