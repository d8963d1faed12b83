"""Lexico: a transfer gradient that never opposes the main one (Gong et al., algorithm 1).

    phi_i    = alpha * min(||g_i||^2, l_main)
    lambda_i = max((phi_i - <t_i, g_i>) / ||g_i||^2, 0)
    mu_i     = t_i + lambda_i * g_i

    g_i    gradient of the main loss for row i          t_i    gradient of the transfer loss for it
    l_main the main loss of the step                    mu_i   `Barrier.gradient`: what the optimizer gets

mu_i is the vector nearest to t_i among all nu with <g_i, nu> >= phi_i. Where lambda_i > 0 it meets
the barrier exactly; where t_i lowers the main loss enough by itself, it is t_i. Network parameters keep
their plain gradient. The global form (equation 7) has one lambda for all rows of a group of tables.

A row without a main gradient has mu_i = t_i. There is no epsilon under the fraction: ||g_i||^2 of a row
seen once in a large batch is 1e-10 or less, and any epsilon would switch the barrier off for rare rows
alone. A lambda that is not finite is replaced by 0, and counted.

Not harmless for every optimizer: momentum and Adam turn mu_i into another direction. The ledger measures how
far (`transfer/ledger.py`).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

TransferRule = Literal["lexico", "global", "sum"]
BarrierRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], "Barrier"]
"""Main and transfer gradients `(U, M, D)`, the main loss and alpha to one gradient per row."""


class Barrier(NamedTuple):
    """The rule's gradients for rows `(...)`, and all that it weighed."""

    gradient: Tensor  # the gradient of each row for the optimizer, (..., D): mu
    coefficient: Tensor  # how much of the main gradient it contains: lambda
    barrier: Tensor  # its least inner product with the main gradient: phi
    agreement: Tensor  # the inner product of both gradients; below zero they are opposed
    square: Tensor  # the squared length of the main gradient
    not_finite: Tensor  # rows whose coefficient was not finite and was replaced by 0


def row_barrier(main: Tensor, transfer: Tensor, loss: Tensor, alpha: float = 2.0) -> Barrier:
    """Return algorithm 1 for rows `(..., D)`, each with its own barrier."""
    return _barrier(main, transfer, _dot(main, main), _dot(transfer, main), alpha, loss=loss)


def global_barrier(main: Tensor, transfer: Tensor, loss: Tensor, alpha: float = 2.0) -> Barrier:
    """Return equation 7: the rows `(..., D)` are one long vector with one barrier."""
    # NOTE[DIFF]: the paper's vector also holds the network's parameters; a rule sees rows, and
    # algorithm 1 leaves the network its plain gradient.
    square, agreement = _dot(main, main).sum(), _dot(transfer, main).sum()
    found = _barrier(main, transfer, square, agreement, alpha, loss=loss)
    rows = main.shape[:-1]
    return Barrier(found.gradient, *(part.expand(rows) for part in found[1:]))


def _plain_sum(main: Tensor, transfer: Tensor, loss: Tensor, alpha: float) -> Barrier:
    """Return the plain sum of both gradients, and what the barrier would have been."""
    found = row_barrier(main, transfer, loss, alpha)
    return found._replace(
        gradient=main + transfer,
        coefficient=torch.ones_like(found.coefficient),
        not_finite=torch.zeros_like(found.not_finite),
    )


RULES: dict[TransferRule, BarrierRule] = {
    "lexico": row_barrier,
    "global": global_barrier,
    "sum": _plain_sum,
}


def _barrier(
    main: Tensor, transfer: Tensor, square: Tensor, agreement: Tensor, alpha: float, *, loss: Tensor
) -> Barrier:
    # a barrier below zero would let the main loss rise, so a loss below zero counts as zero
    barrier = alpha * torch.minimum(square, loss.to(square.dtype).clamp(min=0.0))
    wanted = ((barrier - agreement) / square).clamp(min=0.0)
    # without a gradient it is 0 / 0, which becomes 0
    coefficient = wanted.nan_to_num(0.0, 0.0, 0.0)
    gradient = torch.addcmul(transfer, coefficient.unsqueeze(-1), main)
    not_finite = (square > 0) & (wanted != coefficient)
    return Barrier(gradient, coefficient, barrier, agreement, square, not_finite)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=-1)
