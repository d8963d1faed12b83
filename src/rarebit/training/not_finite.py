"""Numbers that are not finite: noticed cheaply while training, found exactly by training once more.

A step keeps on the device which one had the first loss that was not finite; weights are looked at before
they are written. Where the bad number came from is found afterwards: the loop goes back to its last
checkpoint and makes the same steps again, now looking at everything.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

from rarebit.errors import NotFiniteError
from rarebit.tables.collection import PlainStack, TableCollection
from rarebit.tables.rows import lookups_of
from rarebit.training.loop import NoKeeper, Silence, TrainingLoop
from rarebit.training.step import Steps

__all__ = ["find_source", "raise_if_weights_are_not_finite"]


def raise_if_weights_are_not_finite(model: nn.Module) -> None:
    """Raise with the name of a weight that is not finite, and its field; one look for all of them.

    >>> raise_if_weights_are_not_finite(nn.Linear(2, 2))
    """
    named = dict(model.named_parameters())
    if not named:
        return
    # a sum over everything is finite unless one number is not, or they are past all use
    sums = torch.stack([p.detach().sum(dtype=torch.float64).cpu() for p in named.values()])
    if bool(torch.isfinite(sums).all()):
        return
    for name, parameter in named.items():
        place = _where(model, parameter, parameter.detach())
        if place is not None:
            raise NotFiniteError(f"the weights of {name} are not finite{place}")


def find_source(loop: TrainingLoop) -> str:
    """Train on from where a loop stands, looking at everything; return what was first not finite.

    Slow, and the loop is of no use afterwards.
    """
    loop.tell = Silence()
    loop.steps = Steps(loop.step, loop.steps.train)  # a recorded step could not be looked into
    loop.step.inspect = lambda loss: _look(loop.step.model, loss)
    try:
        loop.run(NoKeeper())
    except NotFiniteError as error:
        return f"{error} (batch {loop.batch + 1} of epoch {loop.epoch})"
    return "made again from the last checkpoint, all steps were finite: the machine may be at fault"


def _look(model: nn.Module, loss: Tensor) -> None:
    for name, parameter in model.named_parameters():
        place = _where(model, parameter, parameter.detach())
        if place is not None:
            raise NotFiniteError(f"the weights of {name} were not finite{place}")
    if not bool(torch.isfinite(loss).all()):
        raise NotFiniteError(
            "the loss was not finite, though all weights were: look at the numbers of the batch"
        )
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        place = _where(model, parameter, gradient)
        if place is not None:
            raise NotFiniteError(f"the gradient of {name} was not finite{place}")


def _where(model: nn.Module, parameter: nn.Parameter, values: Tensor) -> str | None:
    """Return the field and row of the first number that is not finite, in words; None if all are."""
    ids = None
    if values.is_sparse:
        ids, values = lookups_of(values)
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    if values.dim() == 0:
        return ""
    row = int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0])
    row = row if ids is None else int(ids[row])
    for fields, weight in _stacked(model):
        if weight is parameter:
            name, first = max(((n, f) for n, f in fields if f <= row), key=lambda field: field[1])
            return f", in the row of id {row - first} of field {name!r}"
    return f", in row {row}"


def _stacked(model: nn.Module) -> Iterator[tuple[list[tuple[str, int]], Tensor]]:
    """Yield the stacked tables: their fields with the first row of each, and the weight."""
    for module in model.modules():
        if not isinstance(module, TableCollection):
            continue
        for members, stack in zip(module.members, module.stacks, strict=True):
            if isinstance(stack, PlainStack):
                names = [module.fields[index].name for index in members]
                firsts = [0, *accumulate(stack.sizes)][:-1]
                yield list(zip(names, firsts, strict=True)), stack.embedding.weight
