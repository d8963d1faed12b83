"""Clip gradients of a whole model, those that come by rows included."""

import functools

import torch
from torch import Tensor, nn

from rarebit.settings import require
from rarebit.tables.distinct import find_distinct
from rarebit.tables.sparse import lookups_of, row_gradient

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients of a model so that their norm is at most `max_norm`; return what it was.

    As `torch.nn.utils.clip_grad_norm_`, and right for tables whose gradient comes by rows: lookups
    of one row are summed first, as their norm is not the sum of their norms.

    >>> model = nn.Embedding(9, 2, sparse=True)
    >>> model(torch.tensor([4, 4])).sum().backward()
    >>> clip_grad_norm_(model, 1.0)
    tensor(2.8284)
    >>> model.weight.grad.to_dense().norm()
    tensor(1.0000)
    """
    require(max_norm > 0, f"max_norm must be above 0, got max_norm={max_norm}")
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return torch.zeros(())
    norms = [_norm(parameter) for parameter in parameters]
    exact = functools.reduce(torch.promote_types, [norm.dtype for norm in norms], torch.float32)
    total = _length(torch.stack([norm.to(norms[0].device, exact) for norm in norms]))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # no look at the norm: it may be on a GPU
    for parameter in parameters:
        _scale(parameter, factor.to(parameter.device))
    return total


def _norm(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return _length(gradient)
    ids, values = lookups_of(gradient)
    found = find_distinct(ids)
    sums = found.sum(values)
    if len(sums) < len(ids):  # the optimizer then has nothing left to sum
        parameter.grad = row_gradient(gradient.shape, found.ids, sums)
    return _length(sums)


def _scale(parameter: nn.Parameter, factor: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        # not in place: what autograd handed over may be one number seen as many
        ids, values = lookups_of(gradient)
        parameter.grad = row_gradient(gradient.shape, ids, values * factor)
    else:
        gradient.mul_(factor)


def _length(values: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(values)
    return length
