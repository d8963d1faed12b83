"""The tables of a model's fields behind one lookup per step, yet each field is a table of its own.

    TableCollection      ids (B, S) to rows (B, F, D); multi-valued fields pooled; one stack per kind of table
    └── Stack            ids (..., S), per field, one column per slot, to rows (..., S, D)
        └── gather       rows of a plain table, with a dense gradient in memory that stays, or one row per lookup

Changing some fields splits a stack; merging them joins equal stacks again. Offsets belong to the stack and are never
stored. Stacks nest as tables nest: a method's stack holds the stack of its tables' inner tables, and any stack equals the
loop over its tables (a contract test). A field of another width than the model's has its own projection
`v_i = P_i row_i`, applied to all fields of that width in one batched product.

torch allocates a dense gradient in every step. Beyond 32 MB the C library gets such memory from the system each time and
gives it back each time, so every step pays for mapping and clearing all its pages: at 968k rows of 16 numbers, a third of
a training step on two cores. `GradientMemory` keeps it.

**Gradients by rows.** A batch looks the same row up many times. Optimizers and row rules work on each distinct row once:

    ids      7  3  7  3  9        one per lookup, T of them
    distinct       3  7  9        one per row, U of them, sorted
    values   a  b  c  d  e   ->   b+d  a+c  e

Where counting the distinct rows would make the host wait for the device, all T slots are kept: the first U hold rows, the
rest the id -1 and zeros. On the CPU sums are taken in the order of the lookups, so that two runs give the same bits on any
number of threads.

A plain table's gradient is either a tensor of the table's size, zero nearly everywhere, or a sparse one with a row per
lookup; only the second costs what the batch costs. `set_row_gradients` switches between them.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rarebit.data.schema import PADDING, Field
from rarebit.errors import OptimizerError
from rarebit.machine import require_memory
from rarebit.settings import require, suggest
from rarebit.tables.table import AnyTable, Table, home_of, is_trainable, methods_of, plain_like

NO_ROW = -1
"""The id of a slot that holds no row."""
WATCHED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Tables whose lookups stop the backward, so that a rule can change the gradient of each row (`row_gradients`)."""


@dataclass(frozen=True)
class Distinct:
    """The distinct ids among T lookups, in U slots (or T, of which the last hold no row)."""

    ids: Tensor
    """The id of each slot, in ascending order, then `NO_ROW` in slots without a row."""
    order: Tensor
    """The lookups `(T,)` sorted by id, equal ids in the order they came."""
    starts: Tensor
    """Where the lookups of each slot begin in `order`; T for a slot without a row."""
    slot_of: Tensor
    """The slot of each lookup `(T,)`."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the lookups' values `(T, D)` in each slot; zero where there is no row."""
        if self.order.numel() == 0:
            return values
        if values.is_cuda:
            # A bag is summed by one thread there, which may be half the batch for a frequent row.
            # These additions are atomic: fast, in any order.
            sums = values.new_zeros(len(self.ids), values.shape[1])
            return sums.index_add_(0, self.slot_of, values)
        return F.embedding_bag(self.order, values, self.starts, mode="sum")

    @cached_property
    def first(self) -> Tensor:
        """The first lookup of each slot `(U,)`; any lookup for a slot that has none."""
        return self.order.index_select(0, self.starts.clamp(max=self.order.shape[0] - 1))

    def put_first(self, rows: Tensor, own: Tensor, keep: Tensor, leave: Tensor) -> Tensor:
        """Return rows `(U, D)` at the first lookup of their slot, and zero at all others, `(T, D)`.

        Lookups to `keep` `(T,)` have their `own` values `(T, D)` instead. `leave` `(U,)` are slots whose
        row is put nowhere: those of lookups to keep, and those without a lookup.
        """
        end = self.order.shape[0]
        # one place more takes what goes nowhere
        found = own.new_empty(end + 1, own.shape[1])
        torch.where(keep.unsqueeze(-1), own, own.new_zeros(()), out=found[:end])
        return found.index_copy_(0, torch.where(leave, end, self.first), rows)[:end]


def find_distinct(ids: Tensor, *, static: bool | None = None, most: int | None = None) -> Distinct:
    """Find the distinct ids `(T,)` among lookups; ids below zero stand for no row.

    `static` keeps all T slots, so that no size depends on the values: the default on a GPU. Where there
    cannot be so many distinct ids, no row counting as one, `most` slots are kept.
    """
    static = ids.is_cuda if static is None else static
    ids, order = torch.sort(ids, stable=True)
    is_next = torch.zeros_like(ids, dtype=torch.bool)  # where another slot begins than the first
    torch.ne(ids[1:], ids[:-1], out=is_next[1:])
    slot = is_next.cumsum(0)  # of each lookup, in sorted order
    slot_of = torch.empty_like(slot).scatter_(0, order, slot)
    if not static:
        is_next[:1] = True
        starts = is_next.nonzero().squeeze(1)
        return Distinct(ids.index_select(0, starts), order, starts, slot_of)
    size = ids.shape[0] if most is None else min(most, ids.shape[0])
    starts = torch.searchsorted(slot, torch.arange(size, device=ids.device))
    # equal ids write the same value into the same slot
    found = ids.new_full((size,), NO_ROW).scatter_(0, slot, ids)
    return Distinct(found, order, starts, slot_of)


def is_traced(tensor: Tensor) -> bool:
    """Return whether plain operations are wanted: by the compiler, or for the models of a stack by `vmap`."""
    return torch.compiler.is_compiling() or bool(torch._C._functorch.is_batchedtensor(tensor))  # noqa: SLF001  # it has no other name


def has_fixed_sizes(ids: Tensor) -> bool:
    """Return whether no size may depend on the ids: on a GPU, where the host would wait for it, and where they are traced."""
    return ids.device.type != "cpu" or is_traced(ids)


def is_watched(module: nn.Module) -> bool:
    """Return whether a table waits for the backward of row gradients."""
    return module in WATCHED


Plain = nn.Embedding | nn.EmbeddingBag


def set_row_gradients(model: nn.Module, *, by_rows: bool) -> None:
    """Let every plain table of a model give its gradient by rows, or not.

    A table stays dense where torch has no row gradients for it: one that shares its weight with
    another layer, scales gradients by frequency, or takes the maximum over a bag.
    """
    shared = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, Plain)
        for parameter in module.parameters(recurse=False)
    }

    def can_be_sparse(table: Plain) -> bool:
        takes_maximum = isinstance(table, nn.EmbeddingBag) and table.mode == "max"
        return not (takes_maximum or table.scale_grad_by_freq or id(table.weight) in shared)

    wanted = {table: by_rows and can_be_sparse(table) for table in _plain_tables(model)}
    _refuse_in_ddp(model, [table for table, sparse in wanted.items() if sparse != table.sparse])
    for table, sparse in wanted.items():
        table.sparse = sparse


@contextmanager
def row_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the tables back to the gradients they gave before, after a `with` block."""
    before = {table: table.sparse for table in _plain_tables(model)}
    try:
        yield
    finally:
        for table, sparse in before.items():
            table.sparse = sparse


def row_gradient(shape: torch.Size, ids: Tensor, values: Tensor) -> Tensor:
    """Return a table's gradient with one row per lookup, ids `(T,)` and values `(T, D)`."""
    return _unchecked_gradient(shape, ids.unsqueeze(0), values)


def _unchecked_gradient(shape: torch.Size, places: Tensor, values: Tensor) -> Tensor:
    # as torch's own lookup makes it: a check would wait for the device
    make = torch.ops.aten._sparse_coo_tensor_unsafe  # noqa: SLF001  # it has no other name
    gradient: Tensor = make(places, values, shape)
    return gradient


def lookups_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids `(T,)` and values `(T, D)` of a gradient by rows, rows that came twice and all."""
    # the public names ask for sums over equal rows first, which is a sort
    return gradient._indices()[0], gradient._values()  # noqa: SLF001  # not coalesced


def is_sharded(parameter: Tensor) -> bool:
    """Return whether each process holds only a part of it, as after `fully_shard`."""
    return type(parameter).__name__ == "DTensor"


def _refuse_in_ddp(model: nn.Module, changed: list[Plain]) -> None:
    """Raise when a wrapper has already noted for good which gradients are sparse."""
    weights = {id(table.weight) for table in changed}
    for wrapper in model.modules():
        if type(wrapper).__name__ != "DistributedDataParallel":
            continue
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        named = wrapper.module.named_parameters()  # type: ignore[union-attr]  # the wrapped model
        if any(id(p) in weights and name not in ignored for name, p in named):
            raise OptimizerError(
                "DistributedDataParallel notes when it is made which gradients come by rows; "
                "build the optimizer of the model first, then wrap it"
            )


def _plain_tables(model: nn.Module) -> Iterator[Plain]:
    for module in model.modules():
        if isinstance(module, Plain):
            yield module


class GradientMemory:
    """The memory of one table's gradient, kept from one step to the next."""

    def __init__(self) -> None:
        self._spare: Tensor | None = None
        self._made: int | None = None

    def take(self, weight: Tensor) -> Tensor:
        """Return zeros for the gradient of a table: those that were kept, or new ones."""
        spare, self._spare = self._spare, None  # nobody else may hold it, or torch would copy it
        if spare is None or spare.shape != weight.shape or spare.dtype != weight.dtype:
            spare = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self._made = spare.data_ptr()
        return spare

    def keep(self, weight: Tensor) -> None:
        """Take the gradient off a table after the optimizer's step, if it was made here."""
        if weight.grad is not None and self.take_back(weight.grad):
            weight.grad = None

    def take_back(self, gradient: Tensor) -> bool:
        """Keep the memory of a gradient, of one table or `(K, N, D)` of several, if it was made here."""
        if gradient.is_sparse or gradient.data_ptr() != self._made:
            return False
        self._spare = gradient.zero_().view(-1, gradient.shape[-1])
        return True

    def release(self) -> None:
        """Give the memory back."""
        self._spare = None


def gather(table: nn.Embedding, ids: Tensor, memory: GradientMemory) -> Tensor:
    """Return the rows of these ids, as `F.embedding` does, with the same gradient to the last bit."""
    compiling = torch.compiler.is_compiling()
    # On a GPU torch's own backward is as fast, and scatter_add_ would differ from run to run there.
    if not table.sparse and (ids.device.type != "cpu" or compiling):
        return F.embedding(ids, table.weight)
    if compiling:
        from rarebit.tables.uncompiled import gather_uncompiled

        uncompiled: Tensor = gather_uncompiled(table, ids, memory)
        return uncompiled
    return gather_eagerly(table, ids, memory)


def gather_eagerly(table: nn.Embedding, ids: Tensor, memory: GradientMemory) -> Tensor:
    """Return the rows of these ids, in a way that the compiler cannot follow."""
    if table.sparse:
        by_rows: Tensor = _GatherByRows.apply(table.weight, ids)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return by_rows
    rows: Tensor = _Gather.apply(table.weight, ids, memory)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


def take_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of these ids `(..., D)`, without a gradient."""
    if not weight.is_cuda or weight.dim() == 1 or not weight.is_contiguous():
        return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, *weight.shape[1:])
    # There torch gives every row a block of threads, far too many for a row of 16 numbers: one number
    # at a time takes a fifth of the time.
    width = weight.shape[1]
    columns = torch.arange(width, device=ids.device)
    return torch.take(weight, ids.unsqueeze(-1) * width + columns)


class _GatherByRows(torch.autograd.Function):
    """Rows `(..., D)` of a table `(N, D)`, or of K tables `(K, N, D)` for ids `(K, ...)` each; the gradient comes by rows."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor) -> Tensor:
        if weight.dim() == 2:
            return take_rows(weight, ids.long() if ids.is_cuda else ids)  # there it multiplies ids
        return take_rows(weight.flatten(0, 1), _below_each_other(ids, weight.shape[1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        weight, ids = inputs
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        values, ids = rows.reshape(-1, ctx.shape[-1]), ids.long()
        if len(ctx.shape) == 2:
            return row_gradient(ctx.shape, ids.reshape(-1), values), None
        tables = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
        places = torch.stack([tables.expand_as(ids).reshape(-1), ids.reshape(-1)])
        return _unchecked_gradient(ctx.shape, places, values), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], weight: Tensor, ids: Tensor) -> tuple[Any, int]:
        return _GatherByRows.apply(*_stacked(info, in_dims, weight, ids)), 0  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, ids: Tensor, memory: GradientMemory) -> Tensor:
        del memory
        return F.embedding(ids, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        weight, ids, ctx.memory = inputs
        ctx.save_for_backward(ids)
        ctx.weight = weight.detach()  # its values are not needed any more

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        index = ids.reshape(-1, 1).long().expand(-1, ctx.weight.shape[1])
        gradient = ctx.memory.take(ctx.weight)
        return gradient.scatter_add_(0, index, rows.reshape(index.shape)), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], weight: Tensor, ids: Tensor, memory: GradientMemory
    ) -> tuple[Any, int]:
        weight, ids = _stacked(info, in_dims, weight, ids)
        below = _below_each_other(ids, weight.shape[1])
        return _Gather.apply(weight.flatten(0, 1), below, memory), 0  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _stacked(
    info: Any, in_dims: tuple[Any, ...], weight: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tables and ids of all members of a `vmap`, `(K, N, D)` and `(K, ...)`."""
    return tuple(  # type: ignore[return-value]  # a pair from a pair
        part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip((weight, ids), in_dims, strict=False)
    )


def _below_each_other(ids: Tensor, rows: int) -> Tensor:
    """Return where the ids `(K, ...)` of K tables are, if these lie one below the other."""
    first = rows * torch.arange(len(ids), device=ids.device)
    return ids + first.view(-1, *[1] * (ids.dim() - 1))


class Stack(nn.Module, ABC):
    """Several tables of one width behind one lookup."""

    field_of_slot: Tensor
    """For each slot, which table it reads, `(S,)`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = tuple(lengths)
        slots = sum(self.lengths)
        field_of_slot = torch.repeat_interleave(torch.tensor(self.lengths), output_size=slots)
        self.register_buffer("field_of_slot", field_of_slot, persistent=False)

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, `(..., S)` to `(..., S, D)`."""

    @abstractmethod
    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""

    def traced(self) -> "Stack | None":
        """Return the stack in operations that every exporter knows; None where it, or what it wraps, has no others."""
        tables = [table for table in self.split() if isinstance(table, Table)]
        return tables[0].method.traced(tables, self.lengths) if tables else None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows in the tables' own precision, whatever autocast says."""
        with torch.autocast(ids.device.type, enabled=False):
            return self.rows(ids)


class PlainStack(Stack):
    """Plain tables as one `nn.Embedding` of all their rows."""

    offsets: Tensor

    def __init__(self, tables: Sequence[nn.Embedding], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.gradient_memory = GradientMemory()
        self.sizes = tuple(table.num_embeddings for table in tables)
        self.padding = tuple(table.padding_idx for table in tables)
        self.draws: list[Draw | None] = [getattr(table, "draw", None) for table in tables]
        """How to draw tables on the meta device."""
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        small = sum(self.sizes) < torch.iinfo(torch.int32).max
        offsets = first_rows[self.field_of_slot].to(torch.int32 if small else torch.int64)
        weight = torch.cat([table.weight.detach() for table in tables])
        self.embedding = plain_like(tables[0], weight)
        self.register_buffer("offsets", offsets.to(weight.device), persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows by one gather."""
        return gather(self.embedding, ids + self.offsets, self.gradient_memory)

    def split(self) -> list[AnyTable]:
        """Return one plain table per field; weights are shared with the stack, not copied."""
        weights = self.embedding.weight.detach().split(self.sizes)
        return [
            plain_like(self.embedding, weight, padding_idx=padding)
            for weight, padding in zip(weights, self.padding, strict=True)
        ]


class LoopStack(Stack):
    """Any tables, one lookup each: right for every method, fast for few fields."""

    def __init__(self, tables: Sequence[AnyTable], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.tables = nn.ModuleList(tables)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows table by table."""
        columns = ids.split(self.lengths, dim=-1)
        tables = zip(self.tables, columns, strict=True)
        return torch.cat([table(column) for table, column in tables], dim=-2)

    def split(self) -> list[AnyTable]:
        """Return the tables themselves."""
        return [table for table in self.tables if isinstance(table, nn.Embedding | Table)]


def stack_key(table: AnyTable) -> tuple[object, ...]:
    """Return what tables must share to be kept in one stack."""
    return (table.embedding_dim, methods_of(table), table.sparse, is_trainable(table))


def stack_tables(tables: Sequence[AnyTable], lengths: Sequence[int]) -> Stack:
    """Return equal-kind tables behind one lookup, in the method's own stacked form."""
    plain = [table for table in tables if isinstance(table, nn.Embedding)]
    made = [table for table in tables if isinstance(table, Table)]
    stack = made[0].method.stack(made, lengths) if made else PlainStack(plain, lengths)
    # what a stack knows of its slots is made on the CPU
    return stack if _LATER else stack.to(home_of(tables[0]))


TableInit = Literal["normal", "xavier", "xavier_per_table"]
"""How rows start: N(0, std²), or uniform in ±sqrt(6 / (rows + width)). "xavier" counts the rows of all fields, as the
papers of learned pruning and multi-embedding start one table of all fields; "xavier_per_table" counts the rows of the
field, as the paper of MLET does."""


class RowMove(NamedTuple):
    """Plain rows that went from one parameter to another, as when a stack was split."""

    source: Tensor
    source_rows: slice
    target: Tensor
    target_rows: slice


class TableCollection(nn.Module):
    """The tables of several fields: ids `(B, S)` to rows `(B, F, D)`, multi-valued fields pooled."""

    slot_order: Tensor | None
    """The slots in the order the stacks read them; None when one stack reads them as they lie."""
    slot_place: Tensor | None
    """For each slot, its place in that order."""

    def __init__(
        self,
        fields: Sequence[Field],
        dim: int,
        *,
        init: TableInit = "normal",
        std: float = 0.01,
        widths: Mapping[str, int] | None = None,
        num_sets: int = 1,
    ) -> None:
        super().__init__()
        self.fields = tuple(fields)
        self.dim = dim
        own = dict(widths or {})
        names = [field.name for field in fields]
        for name, width in own.items():
            require(name in names, f"widths: no field {name!r} with a table{suggest(name, names)}")
            require(width >= 1, f"widths: the width of {name!r} must be at least 1, got {width!r}")
        self.projections = nn.ParameterDict(
            {
                # keeps the size of a row's numbers, on average
                str(index): nn.Parameter(
                    torch.randn(own[field.name], dim).div_(own[field.name] ** 0.5)
                )
                for index, field in enumerate(self.fields)
                if own.get(field.name, dim) != dim
            }
        )
        self.members: tuple[tuple[int, ...], ...] = ()
        self.stacks = nn.ModuleList()
        self.register_buffer("slot_order", None, persistent=False)
        self.register_buffer("slot_place", None, persistent=False)
        rows = sum(field.rows for field in self.fields)
        numbers = sum(field.rows * own.get(field.name, dim) for field in self.fields)
        require_memory(
            # by themselves, and joined
            0 if _LATER else 2 * numbers * torch.get_default_dtype().itemsize,
            f"building tables of {rows:,} rows and {numbers:,} weights",
            "use a smaller dim, or data with fewer values per field",
            torch.get_default_device(),
        )
        made = []
        for field in self.fields:
            width = own.get(field.name, dim)
            counted = rows if init == "xavier" else field.rows
            fans = counted + (dim // num_sets if width == dim else width)  # a set is a table too
            scale = std if init == "normal" else (6.0 / fans) ** 0.5
            made.append(_new_table(field, width, scale, is_normal=init == "normal"))
        self._arrange(made)

    def forward(self, ids: Tensor) -> Tensor:
        """Return one row per field, `(B, S)` to `(B, F, D)`."""
        return self._pool(self._look_up(ids), ids)

    def tables(self) -> list[AnyTable]:
        """Return the table of each field, in order. Weights are shared, not copied."""
        tables: dict[int, AnyTable] = {}
        for members, stack in zip(self.members, self._stacks(), strict=True):
            tables |= zip(members, stack.split(), strict=True)
        return [tables[index] for index in range(len(self.fields))]

    def replace(self, tables: Mapping[int, AnyTable]) -> list[RowMove]:
        """Put other tables in place of some fields' and regroup the stacks.

        Returns the rows of unchanged plain tables that moved, so that an optimizer's state can.
        """
        before = self.plain_rows()
        self._arrange(
            [tables.get(index, table) for index, table in enumerate(self.tables())], set(tables)
        )
        self.fields = tuple(
            replace(field, rows=tables[index].num_embeddings) if index in tables else field
            for index, field in enumerate(self.fields)
        )
        after = self.plain_rows()
        kept = [index for index in before if index in after and index not in tables]
        moves = [RowMove(*before[index], *after[index]) for index in kept]
        return [move for move in moves if move.source is not move.target]

    def _look_up(self, ids: Tensor) -> Tensor:
        stacks = self._stacks()
        if self.slot_order is None or self.slot_place is None:
            return self._project(stacks[0](ids), self.members[0])
        lengths = [sum(stack.lengths) for stack in stacks]
        columns = ids.index_select(1, self.slot_order).split(lengths, dim=1)
        looked_up = [
            self._project(stack(ids), members)
            for stack, ids, members in zip(stacks, columns, self.members, strict=True)
        ]
        return torch.cat(looked_up, dim=1).index_select(1, self.slot_place)

    def _project(self, rows: Tensor, members: Sequence[int]) -> Tensor:
        """Return the rows of a stack's slots in the model's width, `(B, S, W)` to `(B, S, D)`."""
        if str(members[0]) not in self.projections:
            return rows
        own = [
            self.projections[str(index)]
            for index in members
            for _ in range(self.fields[index].max_length)
        ]
        return torch.einsum("bsw,swd->bsd", rows, torch.stack(own))

    def _pool(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Pool the slots of multi-valued fields, `(B, S, D)` to `(B, F, D)`."""
        if all(field.kind != "multi" for field in self.fields):
            return rows
        lengths = [field.max_length for field in self.fields]
        pooled = [
            _pool_slots(columns, slots, field) if field.kind == "multi" else columns
            for field, columns, slots in zip(
                self.fields, rows.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True
            )
        ]
        return torch.cat(pooled, dim=1)

    def _arrange(self, tables: Sequence[AnyTable], changed: AbstractSet[int] = frozenset()) -> None:
        """Group the tables into stacks; a stack whose members did not change is kept as it is."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, table in enumerate(tables):
            groups.setdefault(stack_key(table), []).append(index)
        old = dict(zip(self.members, self._stacks(), strict=True))
        self.members = tuple(tuple(group) for group in groups.values())
        self.stacks = nn.ModuleList(
            old[members]
            if members in old and not changed & set(members)
            else stack_tables(
                [tables[i] for i in members], [self.fields[i].max_length for i in members]
            )
            for members in self.members
        )
        self.stacks.train(self.training)
        self.slot_order = self.slot_place = None
        if len(self.members) > 1:
            lengths = [field.max_length for field in self.fields]
            home = torch.device("cpu") if _LATER else home_of(self.stacks)
            slots = torch.arange(sum(lengths), device=home).split(lengths)
            self.slot_order = torch.cat([slots[i] for members in self.members for i in members])
            self.slot_place = torch.argsort(self.slot_order)

    def plain_rows(self) -> dict[int, tuple[Tensor, slice]]:
        """For each field that lies in a plain stack: the parameter and its rows there."""
        found = {}
        for members, stack in zip(self.members, self._stacks(), strict=True):
            if not isinstance(stack, PlainStack):
                continue
            start = 0
            for index, size in zip(members, stack.sizes, strict=True):
                found[index] = (stack.embedding.weight, slice(start, start + size))
                start += size
        return found

    def _stacks(self) -> list[Stack]:
        return [stack for stack in self.stacks if isinstance(stack, Stack)]


def _new_table(field: Field, width: int, scale: float, *, is_normal: bool) -> nn.Embedding:
    padding = PADDING if field.kind == "multi" else None
    draw = Draw(torch.get_rng_state(), field.rows, width, scale, is_normal, padding)
    if _LATER:
        for _ in draw.chunks():  # what is drawn next must not depend on it
            pass
        weight = torch.empty(field.rows, width, device="meta")
    elif is_normal:
        weight = torch.randn(field.rows, width).mul_(scale)
    else:
        weight = torch.empty(field.rows, width).uniform_(-scale, scale)
    if padding is not None:
        weight[padding] = 0.0
    table: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding)
    if _LATER:
        table.__dict__["draw"] = draw  # not a part of the module
    return table


_LATER: list[bool] = []
"""Not empty inside `drawn_later`."""
CHUNK_ROWS = 1 << 16
"""Rows that are drawn at once where a table is drawn in parts: a multiple of torch's block of 16 normal numbers."""


class Draw(NamedTuple):
    """How the rows of a table are drawn."""

    state: Tensor
    """Of the generator, before."""
    rows: int
    width: int
    scale: float
    is_normal: bool
    padding: int | None

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows in parts, with the first row of each; the same numbers as drawn at once."""
        starts = list(range(0, self.rows, CHUNK_ROWS))
        if len(starts) > 1 and (self.rows - starts[-1]) * self.width < 16:
            starts.pop()  # torch draws fewer numbers in another way
        for start, stop in pairwise([*starts, self.rows]):
            part = torch.empty(stop - start, self.width)
            if self.is_normal:
                part.normal_().mul_(self.scale)
            else:
                part.uniform_(-self.scale, self.scale)
            if self.padding is not None and start <= self.padding < stop:
                part[self.padding - start] = 0.0
            yield start, part

    def fill_(self, memory: Tensor, first_row: int, first_column: int) -> None:
        """Write the rows and columns from these on, as many as there is memory for."""
        rows, columns = memory.shape
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            for start, part in self.chunks():
                low, high = max(start, first_row), min(start + len(part), first_row + rows)
                if low < high:
                    own = part[low - start : high - start, first_column : first_column + columns]
                    memory[low - first_row : high - first_row] = own


@contextmanager
def drawn_later() -> Iterator[None]:
    """Build models without their tables, which lie on the meta device: `PlainStack.draws` says how to draw them."""
    _LATER.append(True)
    try:
        yield
    finally:
        _LATER.pop()


def _pool_slots(rows: Tensor, ids: Tensor, field: Field) -> Tensor:
    """Return the sum or mean of the rows that are no padding, `(B, L, D)` to `(B, 1, D)`."""
    weights = (ids != PADDING).to(rows.dtype)
    if field.pooling == "mean":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    return (rows * weights.unsqueeze(-1)).sum(dim=1, keepdim=True)
