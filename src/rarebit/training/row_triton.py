"""Row-wise optimizers on a GPU: one kernel reads, changes and writes the rows of a step.

The same equations as `PlainRows`, which takes a dozen kernels and their memory traffic for them.
Slots without a row, which keep all sizes known in advance, are skipped. Triton comes with torch's CUDA
builds; without it, `suits` is false and plain torch does the work.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rarebit.tables.collection import find_distinct

try:
    import triton
    from triton import language as tl
except ImportError:
    triton = tl = None

TINY = 1e-300
"""In place of a beta of 0, which has no logarithm."""
ROWS_A_PROGRAM = 32
"""Rows that one program of a kernel takes."""
SHORT_IDS = torch.iinfo(torch.int32).max
"""Ids of tables with fewer rows are sorted as 32-bit numbers, in half the time."""


def suits(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these: contiguous float32 on a GPU that Triton knows."""
    return triton is not None and all(
        tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()
        for tensor in tensors
    )


def adam(
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
    step: float | Tensor,
) -> None:
    """Take Adam's step on the rows that were looked up."""
    steps = torch.as_tensor(step, dtype=torch.float32, device=weight.device)
    _launch(
        _adam,
        *(ids, values, weight, exp_avg, exp_avg_sq, steps),
        *(
            lr,
            *betas,
            *(1.0 - beta for beta in betas),
            *(math.log2(max(beta, TINY)) for beta in betas),
            eps,
        ),
        decay=_decay(lr, weight_decay, decoupled=decoupled),
    )


def adagrad(
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
    """Take row-wise Adagrad's step on the rows that were looked up."""
    decay = _decay(lr, weight_decay, decoupled=decoupled)
    _launch(_adagrad, ids, values, weight, sums, lr, eps, decay=decay)


def sgd(
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
    """Take SGD's step on the rows that were looked up."""
    has_buffer = momentum_buffer is not None
    buffer = momentum_buffer if has_buffer else weight  # a place that is never read
    decay = _decay(lr, weight_decay, decoupled=decoupled)
    _launch(_sgd, ids, values, weight, buffer, lr, momentum, decay=decay, MOMENTUM=has_buffer)


def _decay(lr: float, weight_decay: float, *, decoupled: bool) -> tuple[float, float]:
    """Return the weight's factor, and its share in the gradient."""
    return (1.0 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)


def _launch(
    kernel: Any,
    ids: Tensor,
    values: Tensor,
    weight: Tensor,
    *arguments: Any,
    decay: tuple[float, float],
    **constants: bool,
) -> None:
    """Sum the lookups of each row and run a kernel over the rows."""
    if len(ids) == 0:
        return
    found = find_distinct(ids.int() if len(weight) < SHORT_IDS else ids, static=True)
    sums, width = found.sum(values), weight.shape[1]
    kernel[(triton.cdiv(len(ids), ROWS_A_PROGRAM),)](
        *(found.ids, sums, len(ids), weight, *decay, *arguments),
        ROWS=ROWS_A_PROGRAM,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **constants,
    )
    # torch cannot see what was written: a backward through rows from before would be wrong silently
    increment_version([weight, *(a for a in arguments if isinstance(a, Tensor))])


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


# Triton's own language from here on. A kernel's first arguments are those of `_launch`; `keep` is the
# factor of the weight under decoupled weight decay, `pull` its share in the gradient under coupled.


@_jit
def _places(slots, count, ROWS: "tl.constexpr", WIDTH: "tl.constexpr", BLOCK: "tl.constexpr"):  # type: ignore[no-untyped-def]  # types of its own
    """Return a program's rows, where their numbers lie in a table and in the sums, and which exist."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(slots + slot, mask=slot < count, other=-1).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    there = (row >= 0)[:, None] & (column < WIDTH)
    return row, row[:, None] * WIDTH + column, slot.to(tl.int64)[:, None] * WIDTH + column, there


@_jit
def _adam(  # type: ignore[no-untyped-def]  # types of its own
    slots,
    sums,
    count,
    weight,
    keep,
    pull,
    first,
    second,
    steps,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    ROWS: "tl.constexpr",
    WIDTH: "tl.constexpr",
    BLOCK: "tl.constexpr",
):
    _, place, summed, there = _places(slots, count, ROWS, WIDTH, BLOCK)
    w = tl.load(weight + place, mask=there)
    g = tl.load(sums + summed, mask=there) + pull * w
    m = beta1 * tl.load(first + place, mask=there) + rest1 * g
    v = beta2 * tl.load(second + place, mask=there) + rest2 * g * g
    step = tl.load(steps).to(tl.float64)  # 1 - 0.999 has four digits in single precision
    correction1 = (1.0 - tl.exp2(step * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt(1.0 - tl.exp2(step * log_beta2)).to(tl.float32)
    w = w * keep - lr / correction1 * (m / (tl.sqrt(v) / correction2 + eps))
    tl.store(weight + place, w, mask=there)
    tl.store(first + place, m, mask=there)
    tl.store(second + place, v, mask=there)


@_jit
def _adagrad(  # type: ignore[no-untyped-def]  # types of its own
    slots,
    sums,
    count,
    weight,
    keep,
    pull,
    totals,
    lr,
    eps,
    ROWS: "tl.constexpr",
    WIDTH: "tl.constexpr",
    BLOCK: "tl.constexpr",
):
    row, place, summed, there = _places(slots, count, ROWS, WIDTH, BLOCK)
    w = tl.load(weight + place, mask=there, other=0.0)
    g = tl.load(sums + summed, mask=there, other=0.0)
    g = g + pull * w
    total = tl.load(totals + row, mask=row >= 0, other=0.0) + tl.sum(g * g, axis=1) / WIDTH
    w = w * keep - lr * g / (tl.sqrt(total)[:, None] + eps)
    tl.store(weight + place, w, mask=there)
    tl.store(totals + row, total, mask=row >= 0)


@_jit
def _sgd(  # type: ignore[no-untyped-def]  # types of its own
    slots,
    sums,
    count,
    weight,
    keep,
    pull,
    buffer,
    lr,
    momentum,
    ROWS: "tl.constexpr",
    WIDTH: "tl.constexpr",
    BLOCK: "tl.constexpr",
    MOMENTUM: "tl.constexpr",
):
    _, place, summed, there = _places(slots, count, ROWS, WIDTH, BLOCK)
    w = tl.load(weight + place, mask=there)
    g = tl.load(sums + summed, mask=there) + pull * w
    if MOMENTUM:
        g = momentum * tl.load(buffer + place, mask=there) + g
        tl.store(buffer + place, g, mask=there)
    tl.store(weight + place, w * keep - lr * g, mask=there)
