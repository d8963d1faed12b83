"""The equation of shrinkage for rows that are looked up: w v + (1 - w) p, and its gradients, in few passes.

As a product and a sum it would make two more tensors of the batch's size forwards and five backwards. Each is
fresh memory that the system has to clear, which takes longer than the arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["mixed"]


def mixed(own: Tensor, weights: Tensor, prior: Tensor | None) -> Tensor:
    """Return w v + (1 - w) p of rows `(..., D)`; with w = 1 exactly v, with w = 0 exactly p.

    Weights are `(..., 1)`; the prior has the shape of the rows, or their last axes; None is zero.

    >>> mixed(torch.tensor([[4.0]]), torch.tensor([[0.75]]), torch.tensor([2.0]))
    tensor([[3.5000]])
    """
    if prior is None:
        return weights * own
    rows: Tensor = _Mixed.apply(own, weights, prior)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


class _Mixed(torch.autograd.Function):
    """p + w (v - p), with the gradients written out."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weights: Tensor, prior: Tensor) -> Tensor:
        ctx.save_for_backward(own, weights, prior)
        # lerp goes from the nearer end, so both ends are exact
        return torch.lerp(prior, own, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        own, weights, prior = ctx.saved_tensors
        _, needs_weights, needs_prior = ctx.needs_input_grad
        of_weights = of_prior = spare = None
        # one tensor of the batch's size for all three, one after the other
        if needs_prior:
            spare = (1 - weights) * gradient
            of_prior = spare.sum_to_size(prior.shape)
            # a prior for each lookup is handed this one, and the others need another
            spare = None if of_prior is spare else spare
        if needs_weights:
            spare = torch.sub(own, prior, out=spare)
            of_weights = spare.mul_(gradient).sum(dim=-1, keepdim=True)
        return torch.mul(gradient, weights, out=spare), of_weights, of_prior
