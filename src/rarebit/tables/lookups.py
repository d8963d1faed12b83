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
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from rarebit.errors import TrainingError
from rarebit.tables.bag import pool_rows
from rarebit.tables.distinct import NO_ROW
from rarebit.tables.pooled import PooledRows, rounds_once, single_rows, watch_pooling
from rarebit.tables.ranks import gather_ranks, world_size
from rarebit.tables.stack import Stack
from rarebit.tables.table import Table

__all__ = [
    "Lookable",
    "LookedUpRows",
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


@dataclass(frozen=True)
class RowGroup:
    """Tables whose rows a rule sees together, numbered one table after the other."""

    names: tuple[str, ...]
    """The tables, such as `backbone.tables.user`."""
    first_rows: tuple[int, ...]
    """For each table, the number of its row 0."""
    num_rows: int
    """Rows of all its tables."""
    width: int
    """How long a row is."""


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


class Numbering:
    """The key of a lookup: the number of its row in the group, `NO_ROW` for rows without a rule."""

    def __init__(self, first_row: Sequence[int] | int, padding: Sequence[int] | int) -> None:
        self.first_row = torch.tensor(first_row)  # of each slot's table; below zero: not chosen
        self.padding = torch.tensor(padding)  # of each slot's table; below zero: it has none

    def keys(self, ids: Tensor) -> Tensor:
        """Return the key of each id; for a stack the last axis is its slots."""
        if self.first_row.device != ids.device:
            self.first_row = self.first_row.to(ids.device)
            self.padding = self.padding.to(ids.device)
        has_rule = (self.first_row >= 0) & (ids != self.padding)
        return torch.where(has_rule, ids + self.first_row, NO_ROW)


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


@dataclass(frozen=True)
class LookedUpRows:
    """All lookups of a step, T in number, and the rows from which the backward goes on."""

    keys: Tensor
    """The key of each lookup, `(T,)`."""
    gradients: Tensor
    """Its gradient of each loss, `(K, T, D)`."""
    parts: list[Tensor | PooledRows]
    """The rows, in the order of the keys."""

    def cut(self, gradients: Tensor, keep: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut gradients `(T, D)` into one for each of the rows; `keep` says which are as they came."""
        sizes = [_num_rows(part) for part in self.parts]
        cut = zip(self.parts, gradients.split(sizes), keep.split(sizes), strict=True)
        return [
            part.rows_and_gradients(own, kept)
            if isinstance(part, PooledRows)
            else (part, own.reshape(part.shape).to(part.dtype))
            for part, own, kept in cut
        ]


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

    def looked_up(self, num_losses: int, counts: Sequence[int] | None) -> LookedUpRows | None:
        """Return all lookups of the step, those of all processes when their counts are given."""
        if not (self.step if counts is None else sum(counts)):
            return None
        ids, gradients = self._join(num_losses)
        parts = [lookup.pooled or lookup.rows for lookup in self.step]
        if counts is not None:
            ids = gather_ranks(ids, counts)
            # (K, T, ..., D) with the lookups in front for the way, and back
            gradients = gather_ranks(gradients.transpose(0, 1), counts).transpose(0, 1)
            gradients = gradients / len(counts)
            with torch.enable_grad():
                parts = [self.look_up(ids)]
        keys = self.numbering.keys(ids).reshape(-1)
        return LookedUpRows(keys, gradients.reshape(num_losses, -1, self.group.width), parts)

    def _join(self, num_losses: int) -> tuple[Tensor, Tensor]:
        """Return the ids `(T,)`, `(T, S)` for a stack, and their gradients `(K, T, D)`, `(K, T, S, D)`."""
        weight = next(self.module.parameters())
        nothing = torch.empty(0, dtype=torch.int64, device=weight.device)
        ids = [self._flat(lookup.ids).long() for lookup in self.step] or [self._flat(nothing)]
        joined = torch.cat(ids)
        shape = (*joined.shape, self.group.width)
        if not self.step:
            empty = torch.empty(num_losses, *shape, dtype=wide(weight.dtype), device=weight.device)
            return joined, empty
        losses = [
            torch.cat([lookup.gradient(loss).reshape(-1, *shape[1:]) for lookup in self.step])
            for loss in range(num_losses)
        ]
        return joined, torch.stack(losses)

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


def _num_rows(part: Tensor | PooledRows) -> int:
    return len(part.ids) if isinstance(part, PooledRows) else part.shape[:-1].numel()


def is_watched(module: nn.Module) -> bool:
    """Return whether the lookups of a table are watched already."""
    return module in _WATCHED


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision that row gradients are summed and given to a rule in."""
    return torch.promote_types(dtype, torch.float32)
