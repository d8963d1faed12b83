"""Tables whose lookups are watched: where a backward stops, and from where it goes on.

    forward     ids ─► table ─► rows ┊ leaf ─► network ─► loss
    backward                         ┊ leaf ◄─ network ◄─ loss      the caller's, ends at the leaf
                       table ◄─ rows ┊                              goes on when all is known

A lookup hands out a copy of its rows that remembers nothing of the table. Its gradient is what the
loss wants of each row; the lookup remembers the rows themselves, from which the way into the table's
parameters is still open. A lookup whose rows were dropped without a backward is forgotten with them.

With several processes all lookups of a step are gathered, and each process looks all of them up.
"""

import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from rarebit.errors import TrainingError
from rarebit.tables.bag import pool_rows
from rarebit.tables.looked_up import LookedUpRows, Numbering, RowGroup
from rarebit.tables.pooled import PooledRows, rounds_once, single_rows, watch_pooling
from rarebit.tables.ranks import gather_ranks, world_size
from rarebit.tables.stack import Stack
from rarebit.tables.table import Table

__all__ = [
    "Lookable",
    "Lookup",
    "Numbering",
    "RowGroup",
    "Watch",
    "Watched",
    "WatchedTable",
    "is_watched",
    "wide",
]

Lookable: TypeAlias = nn.Embedding | nn.EmbeddingBag | Table | Stack

_WATCHED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Watch:
    """What the watched tables of a model know together."""

    def __init__(self) -> None:
        self.passing = False
        """Whether lookups are left alone: inside a backward, and after the end."""
        self.forgotten = False
        """Whether a backward came that nobody continued."""
        self.unshared: list[nn.Parameter] = []
        """Parameters that are not yet known to be the same in all processes."""

    @contextmanager
    def pass_through(self) -> Iterator[None]:
        """Leave lookups and backwards alone for a while."""
        before, self.passing = self.passing, True
        try:
            yield
        finally:
            self.passing = before

    def saw_backward(self, _: Tensor) -> None:
        """Note a backward; one that is not ours leaves the tables without a gradient."""
        self.forgotten = self.forgotten or not self.passing

    def raise_if_forgotten(self) -> None:
        """Raise once when a plain backward came before."""
        if self.forgotten:
            self.forgotten = False
            raise TrainingError(
                "loss.backward() left tables with row gradients untrained; "
                "call rows.backward(loss) in its place, or rows.close() first"
            )

    def share_start(self) -> bool:
        """Give all processes the parameters of the first one; return whether that had to be done."""
        if not self.unshared or world_size() == 1:
            return False
        for parameter in self.unshared:
            distributed.broadcast(parameter.detach(), src=0)
        self.unshared = []
        return True


@dataclass(eq=False)
class Lookup:
    """Rows that were handed out once."""

    ids: Tensor
    rows: Tensor
    leaf: "weakref.ref[Tensor]"
    gradients: list[Tensor | None] = field(default_factory=list)
    pooled: PooledRows | None = None

    def begin(self, num_losses: int) -> None:
        """Get ready for the gradients of so many losses."""
        self.gradients = [None] * num_losses
        if self.pooled is not None:
            self.pooled.gradient = None

    def gradient(self, loss: int) -> Tensor:
        """Return the gradient of one loss; zero where the loss does not depend on these rows."""
        gradient = self.gradients[loss]
        gradient = torch.zeros_like(self.rows) if gradient is None else gradient
        return gradient.to(wide(gradient.dtype))


class Watched(ABC):
    """A source of row gradients. A backward of K losses: `begin`, `take` each loss, `end`."""

    def __init__(self, watch: Watch, group: RowGroup) -> None:
        self.watch = watch
        self.group = group
        self.handles: list[RemovableHandle] = []
        self.modules: list[nn.Module] = []

    @abstractmethod
    def begin(self, num_losses: int) -> None:
        """Get ready for the backward of so many losses."""

    @abstractmethod
    def take(self, loss: int) -> None:
        """Keep the gradient that one loss has just left."""

    @abstractmethod
    def end(self) -> None:
        """Leave everything as the caller expects it after a backward."""

    @abstractmethod
    def drop_step(self) -> bool:
        """Forget the gradients kept for the step; return whether there were any."""

    def attach(self, module: nn.Module, hook: Callable[..., Tensor]) -> None:
        """Call the hook after each lookup of the module, outside of what is compiled."""
        outside = torch.compiler.disable(hook)
        self.handles.append(module.register_forward_hook(outside, with_kwargs=True))
        _WATCHED.add(module)
        self.modules.append(module)

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
        _WATCHED.difference_update(self.modules)


class WatchedTable(Watched):
    """A table, a stack or a bag whose lookups hand out leaves."""

    def __init__(
        self, watch: Watch, group: RowGroup, module: Lookable, numbering: Numbering
    ) -> None:
        super().__init__(watch, group)
        self.module = module
        self.numbering = numbering
        self.pending: dict[int, Lookup] = {}
        self.leaves: list[tuple[int, Lookup, Tensor]] = []
        self.step: list[Lookup] = []
        self._numbers = count()
        # A bag pools its rows itself. Its hook does nothing but keep others from replacing it.
        self.attach(module, self._hand_out)
        if isinstance(module, nn.EmbeddingBag):
            # a bound method: a deep copy of the bag has one bound to itself
            forward = types.MethodType(torch.compiler.disable(self._bag_forward()), module)
            module.__dict__["forward"] = forward

    def detach(self) -> None:
        """Take the hooks off, and forget what is not yet done."""
        super().detach()
        if isinstance(self.module, nn.EmbeddingBag):
            self.module.__dict__.pop("forward", None)
        self.pending.clear()

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a lookup may read."""
        return [*self.module.parameters(), *self.module.buffers()]

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids as the table itself does."""
        if isinstance(self.module, nn.EmbeddingBag):
            return single_rows(self.module, ids)
        with self.watch.pass_through():
            rows: Tensor = self.module(ids)
            return rows

    def begin(self, num_losses: int) -> None:
        """Hold the leaves that a backward may reach."""
        for number, lookup in list(self.pending.items()):
            leaf = lookup.leaf()
            if leaf is not None:
                lookup.begin(num_losses)
                self.leaves.append((number, lookup, leaf))

    def take(self, loss: int) -> None:
        """Take the gradient off the leaves."""
        for _, lookup, leaf in self.leaves:
            lookup.gradients[loss], leaf.grad = leaf.grad, None

    def end(self) -> None:
        """Keep the lookups that were reached for the step; the others wait for their backward."""
        for number, lookup, _ in self.leaves:
            if any(gradient is not None for gradient in lookup.gradients):
                self.pending.pop(number, None)
                self.step.append(lookup)
        self.leaves = []

    def drop_step(self) -> bool:
        """Forget the lookups of the step."""
        had, self.step = bool(self.step), []
        return had

    def count(self) -> int:
        """Return how many ids were looked up, or for a stack how many rows of slots."""
        return sum(len(self._flat(lookup.ids)) for lookup in self.step)

    def waiting(self) -> list[Lookup]:
        """Return the lookups that a backward may reach."""
        return [lookup for lookup in self.pending.values() if lookup.leaf() is not None]

    def look_up_more(self, ids: Tensor, num_losses: int) -> Lookup:
        """Look ids up that no loss knows of: their gradient is zero."""
        with torch.enable_grad():
            rows = self.look_up(ids)
        more = Lookup(ids, rows, weakref.ref(rows))
        more.begin(num_losses)
        return more

    def rows_of(self, lookups: Sequence[Lookup]) -> LookedUpRows:
        """Return what these lookups read."""
        parts = [lookup.pooled or lookup.rows for lookup in lookups]
        return LookedUpRows(self._ids_of(lookups), parts, self.numbering, self.group)

    def looked_up(
        self, num_losses: int, counts: Sequence[int] | None
    ) -> tuple[LookedUpRows, Tensor] | None:
        """Return all lookups of the step, those of all processes when their counts are given.

        With them comes the gradient of each loss, `(K, T, D)`.
        """
        if not (self.step if counts is None else sum(counts)):
            return None
        found, gradients = self.rows_of(self.step), self._gradients(num_losses)
        if counts is not None:
            ids = gather_ranks(found.ids, counts)
            # (K, T, ..., D) with the lookups in front for the way, and back
            gradients = gather_ranks(gradients.transpose(0, 1), counts).transpose(0, 1)
            gradients = gradients / len(counts)
            with torch.enable_grad():
                found = replace(found, ids=ids, parts=[self.look_up(ids)])
        return found, gradients.reshape(num_losses, -1, self.group.width)

    def _ids_of(self, lookups: Sequence[Lookup]) -> Tensor:
        """Return what was looked up, `(T,)`, or for a stack `(T, S)`."""
        device = next(self.module.parameters()).device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return _cat([self._flat(lookup.ids) for lookup in lookups] or [self._flat(nothing)])

    def _gradients(self, num_losses: int) -> Tensor:
        """Return the gradients of the step's lookups, `(K, T, D)`, or for a stack `(K, T, S, D)`."""
        shape = (-1, *self.numbering.first_row.shape, self.group.width)
        if not self.step:
            weight = next(self.module.parameters())
            empty = torch.empty(num_losses, 0, *shape[1:], device=weight.device)
            return empty.to(wide(weight.dtype))
        losses = [
            _cat([lookup.gradient(loss).reshape(shape) for lookup in self.step])
            for loss in range(num_losses)
        ]
        return losses[0].unsqueeze(0) if num_losses == 1 else torch.stack(losses)

    def _flat(self, ids: Tensor) -> Tensor:
        slots = self.numbering.first_row.shape
        return ids.reshape(-1, *slots)

    def _hand_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
    ) -> Tensor:
        # A deep copy of the model carries the same hook.
        if module is not self.module or isinstance(module, nn.EmbeddingBag) or self.watch.passing:
            return rows
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        return self._lend(ids, rows)[0]

    def _bag_forward(self) -> Callable[..., Tensor]:
        def forward(
            bag: nn.EmbeddingBag,
            input: Tensor,
            offsets: Tensor | None = None,
            per_sample_weights: Tensor | None = None,
        ) -> Tensor:
            if bag is not self.module or self.watch.passing or not torch.is_grad_enabled():
                return nn.EmbeddingBag.forward(bag, input, offsets, per_sample_weights)
            ids = input.reshape(-1)
            rows, lookup = self._lend(ids, self.look_up(ids))
            how = (input, offsets, per_sample_weights)
            pooled = pool_rows(bag, rows, *how)
            if lookup is not None and rounds_once(bag, per_sample_weights):
                lookup.pooled = watch_pooling(bag, pooled, *how)
            return pooled

        return forward

    def _lend(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Lookup | None]:
        """Return a leaf in place of the rows, and what is remembered of it."""
        if not torch.is_grad_enabled() or not rows.requires_grad:
            return rows, None
        self.watch.raise_if_forgotten()
        if self.watch.share_start():
            rows = self.look_up(ids)
        leaf = rows.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self.watch.saw_backward)
        number, pending = next(self._numbers), self.pending
        forget = weakref.ref(leaf, lambda _: pending.pop(number, None))
        pending[number] = Lookup(ids, rows, forget)
        return leaf, pending[number]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one tensor; of one there is nothing to copy."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def is_watched(module: nn.Module) -> bool:
    """Return whether the lookups of a table are watched already."""
    return module in _WATCHED


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision that row gradients are summed and given to a rule in."""
    return torch.promote_types(dtype, torch.float32)
