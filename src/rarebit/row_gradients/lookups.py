"""The rows of a plain `nn.EmbeddingBag`, one by one, with gradients rounded as torch's own bag does.

    pooled(b) = sum over t in b of weight(t) * row(t)

What a rule sees of a row is weight(t) * gradient(b), rounded. torch's bag adds that product to the
table without rounding it first; where a rule leaves a row alone, so does `PooledRows`.

The lookups of a step as a rule needs them: which row of its group each went to, and with what gradient.

Tables whose lookups are watched: where a backward stops, and from where it goes on.

    forward     ids ─► table ─► rows ┊ leaf ─► network ─► loss
    backward                         ┊ leaf ◄─ network ◄─ loss      the caller's, ends at the leaf
                       table ◄─ rows ┊                              goes on when all is known

A lookup hands out a copy of its rows that remembers nothing of the table. Its gradient is what the
loss wants of each row; the lookup remembers the rows themselves, from which the way into the table's
parameters is still open. A lookup whose rows were dropped without a backward is forgotten with them.

With several processes all lookups of a step are gathered, and each process looks all of them up.

Row gradients of a table whose weight is used elsewhere, too, as by the output of a language model.

Which tables of a model have their lookups watched, and how their rows are numbered.
"""

import types
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, count
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from rarebit.errors import NoTableError, TrainingError, UnsupportedTableError
from rarebit.row_gradients.processes import gather_ranks, world_size
from rarebit.tables.bag import Bag, pool_rows
from rarebit.tables.distinct import NO_ROW
from rarebit.tables.find import FieldSite, ModuleSite, Site, TableInfo, find_sites, lookup_refusal
from rarebit.tables.stack import Stack
from rarebit.tables.table import Table

__all__ = [
    "Lookable",
    "LookedUpRows",
    "Lookup",
    "Numbering",
    "PooledRows",
    "RowGroup",
    "TiedTable",
    "Watch",
    "Watched",
    "WatchedTable",
    "add_gradient",
    "choose_sites",
    "is_watched",
    "rounds_once",
    "single_rows",
    "watch_pooling",
    "watch_tables",
    "watch_tied",
    "wide",
]


@dataclass(eq=False)
class PooledRows:
    """T rows that were pooled, and the gradient that came back for their bags."""

    bag: nn.EmbeddingBag
    ids: Tensor
    """The row of each lookup, `(T,)`."""
    bag_of: Tensor
    """The bag each lookup went to, `(T,)`."""
    weights: Tensor
    """What each lookup counted in its bag, `(T,)`."""
    gradient: Tensor | None = None
    """The gradient of the bags, summed over the losses."""

    def saw_gradient(self, gradient: Tensor) -> None:
        """Add the gradient of one loss."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def rows_and_gradients(self, gradients: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows to go on from: the bags' gradient for lookups to keep, else the one given."""
        assert self.gradient is not None
        weights = torch.where(keep, self.weights, 1.0)
        own = self.gradient.index_select(0, self.bag_of)
        with torch.enable_grad():
            rows = single_rows(self.bag, self.ids, weights)
        return rows, torch.where(keep.unsqueeze(-1), own, gradients.to(own.dtype))


def single_rows(bag: nn.EmbeddingBag, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the rows of these ids `(T,)`, with a gradient added up in the order of torch's own bag."""
    if bag.mode == "max":
        return F.embedding(ids, bag.weight, padding_idx=bag.padding_idx, sparse=bag.sparse)
    each = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)
    return F.embedding_bag(
        ids,
        bag.weight,
        each,
        mode="sum",
        sparse=bag.sparse,
        per_sample_weights=weights,
        padding_idx=bag.padding_idx,
    )


def rounds_once(bag: nn.EmbeddingBag, per_sample_weights: Tensor | None) -> bool:
    """Return whether torch's bag adds products to the table that it does not round first."""
    is_weighted = bag.mode == "mean" or per_sample_weights is not None
    return is_weighted and not bag.sparse and bag.weight.device.type == "cpu"


def watch_pooling(
    bag: nn.EmbeddingBag,
    pooled: Tensor,
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
) -> PooledRows:
    """Return what will be known of these pooled rows after a backward."""
    ids = input.reshape(-1)
    places = torch.arange(ids.shape[0])
    if offsets is None:
        bag_of = places // max(input.shape[-1], 1)
    else:
        bag_of = torch.searchsorted(offsets.long(), places, right=True) - 1
    if per_sample_weights is None:
        weights = _mean_weights(bag, ids, bag_of, pooled)
    else:
        weights = per_sample_weights.detach().reshape(-1)
    rows = PooledRows(bag, ids, bag_of, weights)
    pooled.register_hook(rows.saw_gradient)
    return rows


def _mean_weights(bag: nn.EmbeddingBag, ids: Tensor, bag_of: Tensor, pooled: Tensor) -> Tensor:
    counted = torch.ones_like(ids) if bag.padding_idx is None else ids != bag.padding_idx
    sizes = torch.zeros(pooled.shape[0], dtype=torch.float64)
    sizes = sizes.index_add_(0, bag_of, counted.double()).clamp_(min=1.0)
    return sizes.reciprocal().to(pooled.dtype).index_select(0, bag_of)


SHORT_KEYS = torch.iinfo(torch.int32).max
"""Keys of groups with fewer rows are sorted as 32-bit numbers, on a GPU in half the time."""


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


class Numbering:
    """The key of a lookup: the number of its row in the group, `NO_ROW` for rows without a rule."""

    def __init__(self, first_row: Sequence[int] | int, padding: Sequence[int] | int) -> None:
        self.first_row = torch.tensor(first_row)  # of each slot's table; below zero: not chosen
        self.padding = torch.tensor(padding)  # of each slot's table; below zero: it has none
        self._is_left_out = self.first_row < 0
        self._all_chosen = not bool(self._is_left_out.any())
        self._has_padding = bool((self.padding >= 0).any())
        self._first_rows = self.first_row.reshape(-1).tolist()

    def keys(self, ids: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the key of each id; for a stack the last axis is its slots."""
        if self.first_row.device != ids.device:
            self.first_row = self.first_row.to(ids.device)
            self.padding = self.padding.to(ids.device)
            self._is_left_out = self._is_left_out.to(ids.device)
        # in place from here on: each would be a kernel more
        keys = torch.add(ids, self.first_row, out=ids.new_empty(ids.shape, dtype=dtype))
        if not self._all_chosen:
            keys.masked_fill_(self._is_left_out, NO_ROW)
        return keys.masked_fill_(ids == self.padding, NO_ROW) if self._has_padding else keys

    def most(self, num_lookups: int, group: RowGroup) -> int:
        """Return how many keys, no row being one, so many lookups in each slot can have at most."""
        sizes = dict(zip(group.first_rows, _sizes(group), strict=True))
        return 1 + sum(min(num_lookups, sizes.get(first, 0)) for first in self._first_rows)


@dataclass(frozen=True)
class LookedUpRows:
    """All lookups of a step, T in number, and the rows from which the backward goes on."""

    ids: Tensor
    """What was looked up, `(T,)`, or for a stack `(T / S, S)`."""
    parts: Sequence[Tensor | PooledRows]
    """The rows, in the order of the lookups."""
    numbering: Numbering
    group: RowGroup

    @cached_property
    def keys(self) -> Tensor:
        """The key of each lookup, `(T,)`."""
        dtype = torch.int32 if self.group.num_rows < SHORT_KEYS else torch.int64
        return self.numbering.keys(self.ids, dtype).reshape(-1)

    @property
    def most_keys(self) -> int:
        """How many different keys there can be, no row being one."""
        return self.numbering.most(len(self.ids), self.group)

    def rows(self) -> list[Tensor]:
        """Return what the tables hold, part by part."""
        return [
            single_rows(part.bag, part.ids) if isinstance(part, PooledRows) else part.detach()
            for part in self.parts
        ]

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


def _sizes(group: RowGroup) -> list[int]:
    """Return the number of rows of each table of a group."""
    ends = [*group.first_rows[1:], group.num_rows]
    return [end - first for first, end in zip(group.first_rows, ends, strict=True)]


def _num_rows(part: Tensor | PooledRows) -> int:
    return len(part.ids) if isinstance(part, PooledRows) else part.shape[:-1].numel()


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


MAX_NAMES = 8


def choose_sites(
    model: nn.Module, where: Callable[[TableInfo], bool] | None, min_width: int
) -> list[Site]:
    """Return the tables to watch; raise when there are none, or one cannot be watched."""
    chosen, skipped = [], []
    for site in find_sites(model):
        info = site.info
        if info.width < min_width:
            skipped.append(f"{info.name} (narrower than min_width={min_width})")
        elif where is not None and not where(info):
            skipped.append(f"{info.name} (not chosen)")
        elif not info.trainable:
            skipped.append(f"{info.name} (frozen)")
        else:
            chosen.append(site)
    if not chosen:
        seen = ", ".join(skipped[:MAX_NAMES]) or "no nn.Embedding and no nn.EmbeddingBag"
        more = f" and {len(skipped) - MAX_NAMES} more" if len(skipped) > MAX_NAMES else ""
        raise NoTableError(f"RowGradients matched no table; the model has {seen}{more}")
    for site in chosen:
        reason = _refusal(site)
        if reason:
            raise UnsupportedTableError(
                f"{site.info.name!r} cannot have row gradients: {reason}. "
                f"Leave it out with where=lambda t: t.name != {site.info.name!r}"
            )
    return chosen


def _refusal(site: Site) -> str | None:
    module = _stack_of(site)[0] if isinstance(site, FieldSite) else _module_of(site)
    if is_watched(module):
        return "it has row gradients already: close those first"
    if isinstance(site, FieldSite):
        return site.tie
    if site.tie and not isinstance(site.module, nn.Embedding | nn.EmbeddingBag):
        return site.tie
    return lookup_refusal(site.module)


def watch_tables(watch: Watch, sites: Iterable[Site]) -> list[WatchedTable]:
    """Watch each module, and each stack with the fields that were chosen of it."""
    tables = []
    by_stack: dict[Stack, list[FieldSite]] = defaultdict(list)
    for site in sites:
        if isinstance(site, FieldSite):
            by_stack[_stack_of(site)[0]].append(site)
        elif not site.tie:
            padding = site.table.padding_idx
            numbering = Numbering(0, -1 if padding is None else padding)
            tables.append(WatchedTable(watch, _group([site]), _module_of(site), numbering))
    for stack, fields in by_stack.items():
        tables.append(WatchedTable(watch, _group(fields), stack, _numbering(stack, fields)))
    return tables


def watch_tied(watch: Watch, sites: Iterable[Site]) -> list[TiedTable]:
    """Watch each weight that a chosen table shares with another part of the model."""
    by_weight: dict[nn.Parameter, list[ModuleSite]] = defaultdict(list)
    for site in sites:
        if isinstance(site, ModuleSite) and site.tie:
            by_weight[next(site.module.parameters())].append(site)
    tied = []
    for weight, tables in by_weight.items():
        names = tuple(site.info.name for site in tables)
        group = RowGroup(names, (0,) * len(names), *weight.shape)
        tied.append(TiedTable(watch, group, weight, [site.module for site in tables]))
    return tied


def _group(sites: Sequence[Site]) -> RowGroup:
    first_rows = [0, *accumulate(site.info.rows for site in sites)]
    names = tuple(site.info.name for site in sites)
    return RowGroup(names, tuple(first_rows[:-1]), first_rows[-1], sites[0].info.width)


def _module_of(site: ModuleSite) -> Lookable:
    return site.module.table if isinstance(site.module, Bag) else site.module


def _stack_of(site: FieldSite) -> tuple[Stack, int]:
    """Return the stack a field lies in, and its place there."""
    collection = site.collection
    for members, stack in zip(collection.members, collection.stacks, strict=True):
        if site.index in members:
            assert isinstance(stack, Stack)
            return stack, members.index(site.index)
    raise AssertionError(site.info.name)


def _numbering(stack: Stack, sites: Sequence[FieldSite]) -> Numbering:
    places = [_stack_of(site)[1] for site in sites]
    first_rows = dict(zip(places, _group(sites).first_rows, strict=True))
    padding = {
        place: site.table.padding_idx
        for place, site in zip(places, sites, strict=True)
        if site.table.padding_idx is not None
    }
    fields = stack.field_of_slot.tolist()
    return Numbering(
        [first_rows.get(place, -1) for place in fields],
        [padding.get(place, -1) for place in fields],
    )
