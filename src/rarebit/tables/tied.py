"""Row gradients of a table whose weight is used elsewhere, too, as by the output of a language model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rarebit.tables.lookups import RowGroup, Watch, Watched, wide
from rarebit.tables.ranks import world_size

__all__ = ["TiedTable", "add_gradient"]


class TiedTable(Watched):
    """A plain table whose weight is used elsewhere, too: its gradients are the weight's own, all rows."""

    def __init__(
        self, watch: Watch, group: RowGroup, weight: nn.Parameter, modules: Sequence[nn.Module]
    ) -> None:
        super().__init__(watch, group)
        self.weight = weight
        self.before: Tensor | None = None
        self.sums: list[Tensor | None] = []
        self.handles.append(weight.register_post_accumulate_grad_hook(watch.saw_backward))
        for module in modules:
            self.attach(module, self._check_lookup)

    def begin(self, num_losses: int) -> None:
        """Set the gradient that is already there aside."""
        self.before, self.weight.grad = self.weight.grad, None
        self.sums = self.sums or [None] * num_losses

    def take(self, loss: int) -> None:
        """Add the weight's gradient to those of the loss's micro-batches before."""
        gradient, self.weight.grad = self.weight.grad, None
        if gradient is None:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient.to(wide(gradient.dtype))
        earlier = self.sums[loss]
        self.sums[loss] = gradient if earlier is None else earlier + gradient

    def end(self) -> None:
        """Put the gradient back that was there before."""
        self.weight.grad, self.before = self.before, None

    def drop_step(self) -> bool:
        """Forget the gradients of the step."""
        had, self.sums = any(sums is not None for sums in self.sums), []
        return had

    def gradients(self) -> Tensor:
        """Return the gradient of each loss `(K, N, D)`, averaged over the processes."""
        dtype = wide(self.weight.dtype)
        zero = torch.zeros_like(self.weight, dtype=dtype, requires_grad=False)
        gradients = torch.stack([zero if sums is None else sums for sums in self.sums])
        if world_size() > 1:
            distributed.all_reduce(gradients)
            gradients /= world_size()
        return gradients

    def add(self, gradient: Tensor) -> None:
        """Add the rule's answer to the weight's gradient."""
        add_gradient(self.weight, gradient.to(self.weight.dtype))

    def _check_lookup(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
    ) -> Tensor:
        ours = any(module is part for part in self.modules)
        if not ours or self.watch.passing or not torch.is_grad_enabled():
            return rows
        self.watch.raise_if_forgotten()
        if self.watch.share_start():
            with self.watch.pass_through():
                rows = module(*args, **kwargs)
        return rows


def add_gradient(tensor: Tensor, gradient: Tensor) -> None:
    """Add to what is in `tensor.grad`, as a backward does."""
    if tensor.grad is None:
        tensor.grad = gradient
    else:
        tensor.grad.add_(gradient)
