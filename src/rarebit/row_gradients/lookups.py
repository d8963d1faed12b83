"""Watched tables: their lookups hand out leaves, so that a backward stops before the table.

    forward     ids ─► table ─► rows ┊ leaf ─► network ─► loss
    backward                         ┊ leaf ◄─ network ◄─ loss      the caller's; it ends at the leaf
                       table ◄─ rows ┊                              continued once the rule has answered

A leaf is the rows without their history. Its gradient is what the loss wants of each row. The caller gets an
alias of it, which may be changed in place. The `Lookup` keeps the rows themselves, from which the way into the
table's parameters is still open. A lookup whose leaf is dropped without a backward is forgotten with it. With
several processes, all lookups of a step are gathered, and each process looks all of them up; DDP ignores the
tables.

A plain `nn.EmbeddingBag` pools its rows itself:

    pooled(b) = sum over t in b of weight(t) * row(t)

A rule sees weight(t) * gradient(b), rounded. torch's bag adds that product to the table without rounding it
first; where a rule leaves a row alone, so does `PooledRows`.

A weight that the model uses without a lookup, as in `x @ table.weight.T` or for the output of a language
model, has its own gradient for all rows (`OwnGradient`); the lookups of the step are added to it.

Shapes: T lookups, S slots of a stack, D width, K losses, N rows.
"""

import types
import weakref
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rarebit.errors import NoTableError, TrainingError, UnsupportedTableError
from rarebit.tables.apply import FieldSite, ModuleSite, Site, TableInfo, find_sites, lookup_refusal
from rarebit.tables.bag import Bag, pool_rows
from rarebit.tables.collection import NO_ROW, WATCHED, PlainStack, Stack, is_sharded, is_watched
from rarebit.tables.holders import memory_of
from rarebit.tables.table import Table


def keep_from_ddp(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    """Make DDP ignore these parameters too; return the names it ignored before."""
    before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    ours = set(parameters)
    named = model.named_parameters(remove_duplicate=False)
    ignore_in_ddp(model, [*before, *(name for name, parameter in named if parameter in ours)])
    return before


def ignore_in_ddp(model: nn.Module, names: list[str]) -> None:
    """Make DDP ignore these parameters and no others."""
    for parameter in model.parameters():
        parameter.__dict__.pop("_ddp_ignored", None)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # noqa: SLF001  # the only way DDP has


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place."""
    return int(tensor._version)  # noqa: SLF001  # it has no other name


class Alias(torch.autograd.Function):
    """A leaf that may be changed in place: the same memory and version, and no view to torch."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        del ctx
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient


Lookable: TypeAlias = nn.Embedding | nn.EmbeddingBag | Table | Stack

SHORT_KEYS = torch.iinfo(torch.int32).max
"""Keys of groups with fewer rows are sorted as 32-bit numbers, on a GPU in half the time."""
MAX_NAMES = 8
"""Tables that an error lists."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which row gradients are summed and given to a rule."""
    return torch.promote_types(dtype, torch.float32)


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one tensor; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def add_gradient(tensor: Tensor, gradient: Tensor) -> None:
    """Add to `tensor.grad`, as a backward does."""
    if tensor.grad is None:
        tensor.grad = gradient
    else:
        tensor.grad.add_(gradient)


@dataclass(frozen=True)
class RowGroup:
    """Tables whose rows a rule sees together, numbered one table after the other."""

    names: tuple[str, ...]
    """The tables, such as `backbone.tables.user`."""
    first_rows: tuple[int, ...]
    """The number of each table's row 0."""
    num_rows: int
    width: int


class Numbering:
    """The key of a lookup: the number of its row in the group, `NO_ROW` for rows without a rule."""

    def __init__(self, first_row: Sequence[int] | int, padding: Sequence[int] | int) -> None:
        self.first_row = torch.tensor(first_row)  # of each slot's table; below zero: not chosen
        self.padding = torch.tensor(padding)  # of each slot's table; below zero: it has none
        self._is_left_out = self.first_row < 0
        self._all_chosen = not bool(self._is_left_out.any())
        self._has_padding = bool((self.padding >= 0).any())
        self.first_rows = self.first_row.reshape(-1).tolist()

    def keys(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the key of each id; the last axis of a stack is its slots."""
        if self.first_row.device != ids.device:
            self.first_row = self.first_row.to(ids.device)
            self.padding = self.padding.to(ids.device)
            self._is_left_out = self._is_left_out.to(ids.device)
        # in place from here on: each operation would be one more kernel
        keys = torch.add(ids, self.first_row, out=ids.new_empty(ids.shape, dtype=dtype))
        if not self._all_chosen:
            keys.masked_fill_(self._is_left_out, NO_ROW)
        return keys.masked_fill_(ids == self.padding, NO_ROW) if self._has_padding else keys

    def slots_of(self, group: RowGroup) -> Tensor:
        """Return the first slot of each table of a stack; nothing for a single table."""
        is_stack = self.first_row.dim() > 0
        slots = [self.first_rows.index(row) for row in group.first_rows] if is_stack else []
        return torch.tensor(slots, dtype=torch.int64)


@dataclass(eq=False)
class PooledRows:
    """T rows that a bag pooled, and the gradient of their bags."""

    bag: nn.EmbeddingBag
    ids: Tensor  # of each lookup, (T,), as are its bag, and its weight in the bag
    bag_of: Tensor
    weights: Tensor
    gradient: Tensor | None = None
    """The gradient of the bags, summed over the losses."""

    @classmethod
    def watch(
        cls, bag: nn.EmbeddingBag, pooled: Tensor, input: Tensor, *how: Tensor | None
    ) -> "PooledRows":
        offsets, per_sample_weights = how
        ids = input.reshape(-1)
        places = torch.arange(ids.shape[0])
        if offsets is None:
            bag_of = places // max(input.shape[-1], 1)
        else:
            bag_of = torch.searchsorted(offsets.long(), places, right=True) - 1
        if per_sample_weights is None:  # a mean
            counted = torch.ones_like(ids) if bag.padding_idx is None else ids != bag.padding_idx
            sizes = torch.zeros(pooled.shape[0], dtype=torch.float64)
            sizes = sizes.index_add_(0, bag_of, counted.double()).clamp_(min=1.0)
            weights = sizes.reciprocal().to(pooled.dtype).index_select(0, bag_of)
        else:
            weights = per_sample_weights.detach().reshape(-1)
        rows = cls(bag, ids, bag_of, weights)
        pooled.register_hook(rows.add)
        return rows

    def add(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def continue_from(self, gradients: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and gradients to continue from: the bags' own for lookups to keep."""
        assert self.gradient is not None
        weights = torch.where(keep, self.weights, 1.0)
        own = self.gradient.index_select(0, self.bag_of)
        with torch.enable_grad():
            rows = _single_rows(self.bag, self.ids, weights)
        return rows, torch.where(keep.unsqueeze(-1), own, gradients.to(own.dtype))


def _single_rows(bag: nn.EmbeddingBag, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the rows of ids `(T,)`; their gradient is summed in the order of torch's own bag."""
    if bag.mode == "max":
        return F.embedding(ids, bag.weight, padding_idx=bag.padding_idx, sparse=bag.sparse)
    return F.embedding_bag(
        ids,
        bag.weight,
        torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype),
        mode="sum",
        sparse=bag.sparse,
        per_sample_weights=weights,
        padding_idx=bag.padding_idx,
    )


@dataclass(frozen=True)
class LookedUpRows:
    """All lookups of a step, T in number, and the rows from which the backward continues."""

    ids: Tensor  # the ids looked up, (T,), or for a stack (T / S, S)
    parts: Sequence[Tensor | PooledRows]  # the rows, in the order of the lookups
    numbering: Numbering
    group: RowGroup

    @cached_property
    def keys(self) -> Tensor:
        """The key of each lookup, `(T,)`."""
        dtype = torch.int32 if self.group.num_rows < SHORT_KEYS else torch.int64
        return self.numbering.keys(self.ids, dtype).reshape(-1)

    @property
    def most_keys(self) -> int:
        """The largest possible number of distinct keys, `NO_ROW` included."""
        group, num_lookups = self.group, len(self.ids)
        ends = [*group.first_rows[1:], group.num_rows]
        sizes = {first: end - first for first, end in zip(group.first_rows, ends, strict=True)}
        return 1 + sum(min(num_lookups, sizes.get(first, 0)) for first in self.numbering.first_rows)

    def rows(self) -> list[Tensor]:
        return [
            _single_rows(part.bag, part.ids) if isinstance(part, PooledRows) else part.detach()
            for part in self.parts
        ]

    def split(self, gradients: Tensor, keep: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each part's rows with its gradients of `(T, D)`; `keep` marks unchanged lookups."""
        sizes = [
            len(part.ids) if isinstance(part, PooledRows) else part.shape[:-1].numel()
            for part in self.parts
        ]
        pieces = zip(self.parts, gradients.split(sizes), keep.split(sizes), strict=True)
        return [
            part.continue_from(own, kept)
            if isinstance(part, PooledRows)
            else (part, own.reshape(part.shape).to(part.dtype))
            for part, own, kept in pieces
        ]


@dataclass(eq=False)
class Lookup:
    """Rows that were handed out once."""

    ids: Tensor
    rows: Tensor
    leaf: "weakref.ref[Tensor]"
    gradients: list[Tensor | None] = field(default_factory=list)
    pooled: PooledRows | None = None

    def __post_init__(self) -> None:
        self.version = version_of(self.rows)

    def begin(self, num_losses: int) -> None:
        self.gradients = [None] * num_losses
        if self.pooled is not None:
            self.pooled.gradient = None

    def gradient(self, loss: int) -> Tensor:
        """Return the gradient of one loss; zero where the loss does not depend on these rows."""
        gradient = self.gradients[loss]
        gradient = torch.zeros_like(self.rows) if gradient is None else gradient
        return gradient.to(wide(gradient.dtype))


class Watch:
    """State that the watched tables of a model share."""

    def __init__(self) -> None:
        self.passing = False  # lookups are left alone: inside a backward, and after closing
        self.forgotten = False  # a backward came that nobody continued
        self.shared: list[nn.Parameter] = []  # what all processes train together
        # of tables that are spread over them; else known in the first forward of DDP
        self.processes: distributed.ProcessGroup | None = None

    @contextmanager
    def pass_through(self) -> Iterator[None]:
        """Leave lookups and backwards alone in the `with` block."""
        before, self.passing = self.passing, True
        try:
            yield
        finally:
            self.passing = before

    def saw_backward(self, _: Tensor) -> None:
        """Note a backward; one that is not ours leaves the tables without a gradient."""
        self.forgotten = self.forgotten or not self.passing

    def raise_if_forgotten(self) -> None:
        """Raise once after a plain backward."""
        if self.forgotten:
            self.forgotten = False
            raise TrainingError(
                "loss.backward() left tables with row gradients untrained; "
                "call rows.backward(loss) instead, or rows.close() first"
            )

    @property
    def num_processes(self) -> int:
        """The number of processes that train together."""
        return 1 if self.processes is None else self.processes.size()

    def meet(self) -> bool:
        """In the first forward of DDP, take the parameters of the first process; return whether it was that one.

        An initialised process group alone does not mean that the others train this model, too.
        """
        wrapper = DistributedDataParallel._get_active_ddp_module()  # noqa: SLF001  # DDP has no other way to tell
        if self.processes is not None or wrapper is None or not torch.is_grad_enabled():
            return False
        ours = set(self.shared)
        names = {name for name, p in wrapper.module.named_parameters() if p in ours}
        if not names <= wrapper.parameters_to_ignore:
            raise TrainingError(
                "DistributedDataParallel averages tables with row gradients, too; make RowGradients, or start "
                "the transfer, of the module that it wraps, and wrap that afterwards"
            )
        self.processes = wrapper.process_group
        first = distributed.get_global_rank(self.processes, 0)
        for parameter in self.shared:
            distributed.broadcast(parameter.detach(), src=first, group=self.processes)
        return True

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean over the processes."""
        if self.num_processes == 1:
            return tensor
        total = tensor.clone()
        distributed.all_reduce(total, group=self.processes)
        return total / self.num_processes

    def gather_ranks(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the tensors of all processes, joined along their first axis in the order of the ranks."""
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded, group=self.processes)
        return torch.cat([part[:size] for part, size in zip(parts, counts, strict=True)])

    def gather_counts(self, counts: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the counts of all processes: for each count, one number per rank."""
        own = torch.tensor(counts, device=device)
        parts = [torch.empty_like(own) for _ in range(self.num_processes)]
        distributed.all_gather(parts, own, group=self.processes)
        return [list(ranks) for ranks in torch.stack(parts, dim=1).tolist()]


class OwnGradient:
    """The gradient that reaches a parameter of tables past their lookups, for each loss of a step."""

    def __init__(self, watch: Watch, parameter: nn.Parameter) -> None:
        self.watch = watch
        self.parameter = parameter
        self.before: Tensor | None = None
        self.sums: list[Tensor | None] = []
        self.handle = parameter.register_post_accumulate_grad_hook(watch.saw_backward)

    def begin(self, num_losses: int) -> None:
        self.before, self.parameter.grad = self.parameter.grad, None
        self.sums = self.sums or [None] * num_losses

    def take(self, loss: int) -> None:
        """Add the gradient to that of the loss's earlier micro-batches."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient.to(wide(gradient.dtype))
        earlier = self.sums[loss]
        self.sums[loss] = gradient if earlier is None else earlier + gradient

    def end(self) -> None:
        self.parameter.grad, self.before = self.before, None

    @property
    def came(self) -> bool:
        """Whether there is any in this step."""
        return any(sums is not None for sums in self.sums)

    def mean(self) -> Tensor:
        """Return the gradient of each loss `(K, N, D)`, averaged over the processes."""
        dtype = wide(self.parameter.dtype)
        zero = torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False)
        return self.watch.average(
            torch.stack([zero if sums is None else sums for sums in self.sums])
        )


class Watched:
    """A source of row gradients, hooked into modules; both kinds below have the same methods.

    A backward of K losses is `begin`, `take` of each loss, `end`; `drop_step` forgets the gradients kept for
    a step and returns whether there were any.
    """

    weight: Tensor | None
    """The parameter whose rows they are; None for tables that methods compute."""

    def __init__(self, watch: Watch, group: RowGroup) -> None:
        self.watch = watch
        self.group = group
        self.handles: list[RemovableHandle] = []
        self.modules: list[nn.Module] = []
        self.own: list[OwnGradient] = []
        self.chosen: Tensor | None = None
        """Where the group's rows are in the weight, `(N,)`; None: they are all its rows."""

    def watch_own(self, parameter: nn.Parameter) -> None:
        """Watch what reaches a parameter past the lookups."""
        self.own.append(OwnGradient(self.watch, parameter))
        self.handles.append(self.own[-1].handle)

    def refuse_other_parameters(self) -> None:
        """Raise when the modules have other parameters than those that are watched."""
        here = {parameter for module in self.modules for parameter in module.parameters()}
        if not here.issuperset(own.parameter for own in self.own):
            raise TrainingError(
                f"{self.group.names[0]!r} has other parameters than when its row gradients were made, as "
                "after fully_shard or load_state_dict(assign=True); do that first, then make RowGradients"
            )

    def begin(self, num_losses: int) -> None:
        for own in self.own:
            own.begin(num_losses)

    def take(self, loss: int) -> None:
        for own in self.own:
            own.take(loss)

    def end(self) -> None:
        for own in self.own:
            own.end()

    def drop_step(self) -> bool:
        had = any(own.came for own in self.own)
        for own in self.own:
            own.sums = []
        return had

    def attach(self, module: nn.Module, hook: Callable[..., Tensor]) -> None:
        """Call the hook after each lookup of the module, outside of compiled code."""
        outside = torch.compiler.disable(hook)
        self.handles.append(module.register_forward_hook(outside, with_kwargs=True))
        WATCHED.add(module)
        self.modules.append(module)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        WATCHED.difference_update(self.modules)


class WatchedTable(Watched):
    """A table, a stack or a bag whose lookups hand out leaves."""

    def __init__(
        self, watch: Watch, group: RowGroup, module: Lookable, numbering: Numbering
    ) -> None:
        super().__init__(watch, group)
        self.module = module
        self.numbering = numbering
        self.weight = None
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self.weight = module.weight
        elif isinstance(module, PlainStack):
            self.weight = module.embedding.weight
            firsts = dict(zip(numbering.first_rows, module.offsets.tolist(), strict=True))
            ends = [*group.first_rows[1:], group.num_rows]
            self.chosen = torch.cat(
                [
                    torch.arange(firsts[first], firsts[first] + end - first)
                    for first, end in zip(group.first_rows, ends, strict=True)
                ]
            )
        self.is_used_directly = False
        self.pending: dict[int, Lookup] = {}
        self.leaves: list[tuple[int, Lookup, Tensor]] = []
        self.step: list[Lookup] = []
        self._numbers = count()
        # A bag pools its rows itself. Its hook only keeps others from replacing it.
        self.attach(module, self._hand_out)
        if isinstance(module, nn.EmbeddingBag):
            # a bound method: a deep copy of the bag has one bound to itself
            forward = types.MethodType(torch.compiler.disable(self._bag_forward()), module)
            module.__dict__["forward"] = forward

    def detach(self) -> None:
        super().detach()
        if isinstance(self.module, nn.EmbeddingBag):
            self.module.__dict__.pop("forward", None)
        self.pending.clear()

    def look_up(self, ids: Tensor) -> Tensor:
        if isinstance(self.module, nn.EmbeddingBag):
            return _single_rows(self.module, ids)
        with self.watch.pass_through():
            rows: Tensor = self.module(ids)
            return rows

    def begin(self, num_losses: int) -> None:
        super().begin(num_losses)
        for number, lookup in list(self.pending.items()):
            leaf = lookup.leaf()
            if leaf is not None:
                lookup.begin(num_losses)
                self.leaves.append((number, lookup, leaf))

    def take(self, loss: int) -> None:
        super().take(loss)
        for _, lookup, leaf in self.leaves:
            lookup.gradients[loss], leaf.grad = leaf.grad, None
        self.is_used_directly = self.is_used_directly or self.came
        if self.came and self.weight is None:
            reached = {id(own.parameter) for own in self.own if own.came}
            name = next(name for name, p in self.module.named_parameters() if id(p) in reached)
            raise TrainingError(
                f"a loss depends on {name!r} of {', '.join(self.group.names[:MAX_NAMES])} past the lookups, as "
                "a penalty on all parameters does, where no rule for rows applies; use the optimizer's "
                "weight_decay, or compute the penalty from looked-up rows or from the table's .weight"
            )

    def end(self) -> None:
        super().end()
        # lookups that the backward did not reach wait for theirs
        for number, lookup, _ in self.leaves:
            if any(gradient is not None for gradient in lookup.gradients):
                self.pending.pop(number, None)
                self.step.append(lookup)
        self.leaves = []

    def drop_step(self) -> bool:
        had, self.step = bool(self.step), []
        return super().drop_step() or had

    @property
    def came(self) -> bool:
        """Whether the losses of this step also use the weight without a lookup."""
        return any(own.came for own in self.own)

    def all_gradients(self, num_losses: int) -> Tensor:
        """Return the gradients of all rows of the weight, `(K, N, D)`: its own and those of the lookups."""
        super().begin(num_losses)
        for loss in range(num_losses):
            found = [(self._rows(lookup), lookup.gradients[loss]) for lookup in self.step]
            torch.autograd.backward(
                [rows for rows, gradient in found if gradient is not None],
                [gradient for _, gradient in found if gradient is not None],
                retain_graph=loss + 1 < num_losses,
            )
            super().take(loss)
        super().end()
        return self.own[0].mean()

    def count(self) -> int:
        return sum(len(self._flat(lookup.ids)) for lookup in self.step)

    def waiting(self) -> list[Lookup]:
        return [lookup for lookup in self.pending.values() if lookup.leaf() is not None]

    def look_up_more(self, ids: Tensor, num_losses: int) -> Lookup:
        """Look up ids that no loss depends on: their gradient is zero."""
        with torch.enable_grad():
            rows = self.look_up(ids)
        more = Lookup(ids, rows, weakref.ref(rows))
        more.begin(num_losses)
        return more

    def rows_of(self, lookups: Sequence[Lookup]) -> LookedUpRows:
        # a process may hold nothing of a table that is spread over several
        device = next(self.module.parameters(), self.numbering.first_row).device
        flat = [self._flat(lookup.ids) for lookup in lookups]
        ids = join_parts(flat or [self._flat(torch.empty(0, dtype=torch.int64, device=device))])
        parts = [lookup.pooled or self._rows(lookup) for lookup in lookups]
        return LookedUpRows(ids, parts, self.numbering, self.group)

    def _rows(self, lookup: Lookup) -> Tensor:
        """Return the rows of a lookup; those that were changed in place are looked up again."""
        if version_of(lookup.rows) == lookup.version:
            return lookup.rows
        with torch.enable_grad():
            return self.look_up(lookup.ids)

    def looked_up(
        self, num_losses: int, counts: Sequence[int] | None
    ) -> tuple[LookedUpRows, Tensor] | None:
        """Return the lookups of the step, given counts those of all processes, and gradients `(K, T, D)`."""
        if not (self.step if counts is None else sum(counts)):
            return None
        found, gradients = self.rows_of(self.step), self._gradients(num_losses)
        if counts is not None:
            ids = self.watch.gather_ranks(found.ids, counts)
            # (K, T, ..., D) is gathered with the lookups in front
            gradients = self.watch.gather_ranks(gradients.transpose(0, 1), counts).transpose(0, 1)
            gradients = gradients / len(counts)
            with torch.enable_grad():
                found = replace(found, ids=ids, parts=[self.look_up(ids)])
        return found, gradients.reshape(num_losses, -1, self.group.width)

    def _gradients(self, num_losses: int) -> Tensor:
        """Return the gradients of the step's lookups, `(K, T, D)`, or for a stack `(K, T, S, D)`."""
        shape = (-1, *self.numbering.first_row.shape, self.group.width)
        if not self.step:
            weight = next(self.module.parameters(), torch.empty(0))
            empty = torch.empty(num_losses, 0, *shape[1:], device=weight.device)
            return empty.to(wide(weight.dtype))
        losses = [
            join_parts([lookup.gradient(loss).reshape(shape) for lookup in self.step])
            for loss in range(num_losses)
        ]
        return losses[0].unsqueeze(0) if num_losses == 1 else torch.stack(losses)

    def _flat(self, ids: Tensor) -> Tensor:
        return ids.reshape(-1, *self.numbering.first_row.shape)

    def _hand_out(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
    ) -> Tensor:
        # A deep copy of the model carries the same hook.
        if module is not self.module or isinstance(module, nn.EmbeddingBag) or self.watch.passing:
            return rows
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        leaf, lookup = self._lend(ids, rows)
        return leaf if lookup is None else Alias.apply(leaf)  # type: ignore[no-untyped-call]  # torch leaves it untyped

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
            # here torch's own bag adds products to the table that it does not round first
            is_weighted = bag.mode == "mean" or per_sample_weights is not None
            rounds_once = is_weighted and not bag.sparse and bag.weight.device.type == "cpu"
            if lookup is not None and rounds_once:
                lookup.pooled = PooledRows.watch(bag, pooled, *how)
            return pooled

        return forward

    def _lend(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Lookup | None]:
        """Return a leaf in place of the rows, and the record of it."""
        if not torch.is_grad_enabled() or not rows.requires_grad:
            return rows, None
        self.watch.raise_if_forgotten()
        if self.watch.meet():
            rows = self.look_up(ids)
        leaf = rows.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self.watch.saw_backward)
        number, pending = next(self._numbers), self.pending
        forget = weakref.ref(leaf, lambda _: pending.pop(number, None))
        pending[number] = Lookup(ids, rows, forget)
        return leaf, pending[number]


class TiedTable(Watched):
    """A plain table whose weight other modules also use: its gradients are the weight's own, all rows."""

    weight: Tensor

    def __init__(
        self, watch: Watch, group: RowGroup, weight: nn.Parameter, modules: Sequence[nn.Module]
    ) -> None:
        super().__init__(watch, group)
        self.weight = weight
        self.watch_own(weight)
        for module in modules:
            self.attach(module, self._check_lookup)

    def all_gradients(self, num_losses: int) -> Tensor:
        del num_losses
        return self.own[0].mean()

    def _check_lookup(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
    ) -> Tensor:
        ours = any(module is part for part in self.modules)
        if not ours or self.watch.passing or not torch.is_grad_enabled():
            return rows
        self.watch.raise_if_forgotten()
        if self.watch.meet():
            with self.watch.pass_through():
                rows = module(*args, **kwargs)
        return rows


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
        reason = _refusal(site, model)
        if reason:
            raise UnsupportedTableError(
                f"{site.info.name!r} cannot have row gradients: {reason}. "
                f"Leave it out with where=lambda t: t.name != {site.info.name!r}"
            )
    return chosen


def _refusal(site: Site, model: nn.Module) -> str | None:
    module = _stack_of(site)[0] if isinstance(site, FieldSite) else _module_of(site)
    if is_watched(module):
        return "it has row gradients already: close those first"
    if any(is_sharded(parameter) for parameter in module.parameters()):
        return (
            "each process holds only a part of it (FSDP2); keep its module out of fully_shard, or use "
            "DistributedDataParallel"
        )
    others = [(name, *memory_of(p), p) for name, p in model.named_parameters() if p.requires_grad]
    for parameter in module.parameters():
        first, last = memory_of(parameter)
        for name, begin, end, other in others:
            if begin < last and first < end and other is not parameter:
                return f"{name!r} is another parameter in its memory: make both one nn.Parameter"
    if isinstance(site, FieldSite):
        return site.tie
    if site.tie and not isinstance(site.module, nn.Embedding | nn.EmbeddingBag):
        return site.tie
    return lookup_refusal(site.module)


def watch_tables(watch: Watch, sites: Iterable[Site]) -> list[WatchedTable]:
    """Watch each module, and each stack with its chosen fields."""
    tables = []
    by_stack: dict[Stack, list[tuple[FieldSite, int]]] = defaultdict(list)
    for site in sites:
        if isinstance(site, FieldSite):
            stack, place = _stack_of(site)
            by_stack[stack].append((site, place))
        elif not site.tie:
            numbering = Numbering(0, _padding(site))
            tables.append(WatchedTable(watch, _group([site]), _module_of(site), numbering))
    for stack, fields in by_stack.items():
        group = _group([site for site, _ in fields])
        first_rows = {place: row for (_, place), row in zip(fields, group.first_rows, strict=True)}
        padding = {place: _padding(site) for site, place in fields}
        slots = stack.field_of_slot.tolist()
        numbering = Numbering(
            [first_rows.get(place, -1) for place in slots],
            [padding.get(place, -1) for place in slots],
        )
        tables.append(WatchedTable(watch, group, stack, numbering))
    return tables


def watch_own(model: nn.Module, tables: Iterable[WatchedTable]) -> None:
    """Watch the parameters of tables, each once; what other parts of the model also use has other gradients."""
    tables = list(tables)
    inside = {part for table in tables for part in table.module.modules()}
    others = [part for part in model.modules() if part not in inside]
    seen = {p for part in others for p in part.parameters(recurse=False)}
    for table in tables:
        for parameter in set(table.module.parameters()) - seen:
            if parameter.requires_grad:
                table.watch_own(parameter)
        seen |= set(table.module.parameters())


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


def _padding(site: Site) -> int:
    return -1 if site.table.padding_idx is None else site.table.padding_idx


def _module_of(site: ModuleSite) -> Lookable:
    return site.module.table if isinstance(site.module, Bag) else site.module


def _stack_of(site: FieldSite) -> tuple[Stack, int]:
    collection = site.collection
    for members, stack in zip(collection.members, collection.stacks, strict=True):
        if site.index in members:
            assert isinstance(stack, Stack)
            return stack, members.index(site.index)
    raise AssertionError(site.info.name)
