"""What an optimizer does to the rows of a table that a step looked up, in plain torch.

The gradient of a table comes as one row a lookup: ids `(T,)`, values `(T, D)`. Lookups of the same
row are summed, then weight and state of that row are read, changed and written back. No other row
is touched, so the cost is that of the batch, whatever the size of the table.

`RowKernel` does the same with a compiled loop; this is its reference and its stand-in.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rarebit.tables.collection import take_rows
from rarebit.tables.rows import find_distinct

__all__ = ["adagrad", "adam", "merge", "sgd"]

Number = float | Tensor
"""A learning rate or a count of steps: a tensor where it lives on a GPU."""


def merge(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each looked-up row once with the sum of its values.

    On a GPU a row may still come several times, each time with its whole sum: that leaves every size
    known in advance, and writing the same result several times does no harm.
    """
    found = find_distinct(ids)
    sums = found.sum(values)
    if ids.is_cuda:
        return ids, take_rows(sums, found.slot_of)
    return found.ids, sums


def adam(
    ids: Tensor,
    values: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: Number,
) -> None:
    """Lazy Adam: Adam's step on the rows that were looked up; `step` counts the optimizer's steps."""
    beta1, beta2 = betas

    def update(row: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        mean = beta1 * mean + (1.0 - beta1) * gradient
        square = beta2 * square + (1.0 - beta2) * gradient.square()
        scale = square.sqrt() / (1.0 - beta2**step) ** 0.5 + eps
        return row - lr / (1.0 - beta1**step) * (mean / scale), mean, square

    decay = _decay(lr, weight_decay, decoupled=decoupled)
    _update(ids, values, [weight, exp_avg, exp_avg_sq], decay, update)


def adagrad(
    ids: Tensor,
    values: Tensor,
    weight: Tensor,
    sums: Tensor,
    *,
    lr: Number,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Row-wise Adagrad: one sum of mean squares a row, `sums` `(N,)`, in place of one a number."""

    def update(row: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        total = total + gradient.square().mean(dim=1)
        return row - lr * gradient / (total.sqrt() + eps).unsqueeze(1), total

    decay = _decay(lr, weight_decay, decoupled=decoupled)
    _update(ids, values, [weight, sums], decay, update)


def sgd(
    ids: Tensor,
    values: Tensor,
    weight: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: Number,
    momentum: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """SGD on the rows that were looked up; a row's momentum waits until the row comes again."""

    def update(row: Tensor, gradient: Tensor, *buffer: Tensor) -> tuple[Tensor, ...]:
        moving = [momentum * speed + gradient for speed in buffer]
        return (row - lr * (moving[0] if moving else gradient), *moving)

    decay = _decay(lr, weight_decay, decoupled=decoupled)
    state = [] if momentum_buffer is None else [momentum_buffer]
    _update(ids, values, [weight, *state], decay, update)


Decay = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows and their gradients before and after weight decay."""


def _decay(lr: Number, weight_decay: float, *, decoupled: bool) -> Decay:
    """Return what weight decay does: shrink the row, or add to its gradient."""
    if not weight_decay:
        return lambda row, gradient: (row, gradient)
    if decoupled:
        return lambda row, gradient: (row * (1.0 - lr * weight_decay), gradient)
    return lambda row, gradient: (row, gradient + weight_decay * row)


def _update(
    ids: Tensor,
    values: Tensor,
    stored: list[Tensor],
    decay: Decay,
    update: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Read the touched rows of weight and state, change them and write them back."""
    ids, gradient = merge(ids, values)
    # a table in half precision is changed in single precision and rounded once, at the end
    exact = torch.promote_types(stored[0].dtype, torch.float32)
    rows = [take_rows(tensor, ids).to(exact) for tensor in stored]
    row, gradient = decay(rows[0], gradient.to(exact))
    for tensor, new in zip(stored, update(row, gradient, *rows[1:]), strict=True):
        tensor.index_copy_(0, ids, new.to(tensor.dtype))
