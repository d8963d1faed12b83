"""The table protocol: `rows(ids) -> (..., D)` is the equation, written once.

The full table, merging and counting are derived from `rows`, so they cannot drift from it.
`nn.Embedding` *is* the plain table; there is no class of ours for it. A technique's table wraps
another table (`inner`), plain or not, so techniques compose:

    HashedTable                 rows(ids) = inner(ids % buckets)
    └── LowRankTable            rows(ids) = inner(ids) @ right
        └── nn.Embedding        the weights that are really stored

Shapes: N rows of the table, D its width.
"""

import copy
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]  # it is, but torch does not say so
from torch.optim import Optimizer

from rarebit.errors import UnsupportedTableError
from rarebit.machine import require_memory
from rarebit.technique import Technique

if TYPE_CHECKING:
    from rarebit.data.dataset import Dataset
    from rarebit.tables.apply import TableChanges
    from rarebit.tables.collection import Stack

# Ids looked up at once when a whole table is built: bounds the memory of what `rows` computes.
CHUNK = 1 << 16
QUOTED_FIELD = re.compile(r'(?:^|\.)"((?:[^"\\]|\\.)*)"$', re.DOTALL)


def table_name(place: str, field: str) -> str:
    """Return the name of a field's table in a model; a field with a dot in its name is quoted.

    >>> table_name("backbone.tables", "user"), table_name("backbone.tables", "user.id")
    ('backbone.tables.user', 'backbone.tables."user.id"')
    """
    if "." in field or '"' in field:
        field = '"' + re.sub(r'(["\\])', r"\\\1", field) + '"'
    return f"{place}.{field}" if place else field


def field_of(name: str) -> str:
    """Return the last part of a table's name: the field or attribute it is called by."""
    quoted = QUOTED_FIELD.search(name)
    return re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else name.rpartition(".")[2]


class _LikeTensor(type(Tensor)):  # type: ignore[misc]  # the class of torch's class
    """Lets `torch.testing.assert_close` compare rows with a parameter: it wants related classes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor)


class ComputedRows(Tensor, metaclass=_LikeTensor):
    """Rows that a table computed: an operation that writes to them, or to a view of them, raises; all others read.

    What is written here would be lost. All results but views are ordinary tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation as on an ordinary tensor, unless it writes to the rows."""
        del types
        options = dict(kwargs or {})
        if torch.compiler.is_compiling():  # it follows no more than this
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own guide does it
                return func(*args, **options)
        name, written = str(func.__name__), [options.get("out")]
        if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            written += [*args[:1], options.get("input"), options.get("tensor")]
        if any(type(one) is cls for one in _flat(written)):
            raise UnsupportedTableError(
                "a table with a method computes its rows, so what is written to its .weight is lost; write before "
                "apply_ or after merge_, or take a copy of the rows with .weight.clone()"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own guide does it
            result = func(*args, **options)
            if name == "as_subclass":
                return result
            rows = [one for one in _flat([*args, *options.values()]) if type(one) is cls]
            return _views_of(rows, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Store an ordinary tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return an ordinary tensor."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        """Show an ordinary tensor."""
        return repr(self.as_subclass(Tensor))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _views_of(rows: Sequence[Tensor], result: Any) -> Any:
    """Return a result with its tensors that share memory with rows as such rows."""
    if isinstance(result, list | tuple):
        views = [_views_of(rows, one) for one in result]
        same = all(map(operator.is_, views, result))
        return result if same else type(result)(views)
    if isinstance(result, Tensor) and any(
        torch._C._is_alias_of(result, one)  # type: ignore[attr-defined]  # noqa: SLF001  # it is, and has no other name
        for one in rows
    ):
        return result.as_subclass(ComputedRows)
    return result


class Table(nn.Module, ABC):
    """A table made by a method: a module that maps ids to rows like `nn.Embedding` does."""

    inner: "AnyTable"
    """The table that holds what is stored; a table that stores its rows itself has none."""

    def __init__(
        self,
        method: "Method",
        inner: "AnyTable | None",
        *,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        padding_idx: int | Literal["inner"] | None = "inner",
    ) -> None:
        super().__init__()
        self.method = method
        if inner is not None:
            self.inner = inner
        # the shape is that of the inner table if not given
        self.num_embeddings: int = num_embeddings or (0 if inner is None else inner.num_embeddings)
        self.embedding_dim: int = embedding_dim or (0 if inner is None else inner.embedding_dim)
        self.padding_idx: int | None
        if padding_idx == "inner":
            self.padding_idx = None if inner is None else inner.padding_idx
        else:
            self.padding_idx = padding_idx

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, `(...)` to `(..., D)`, touching no others."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these ids, called as `nn.Embedding` is; the padding row is zero and gets no gradient."""
        # Row arithmetic stays in the table's own precision: a table is stored in float32 and
        # half-precision products would be folded into it by `merge`.
        with torch.autocast(input.device.type, enabled=False):
            rows = self.rows(input)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0.0)

    @property
    def weight(self) -> Tensor:
        """The full table `(N, D)`, differentiable and only to read. It costs what the table costs: not for a step."""
        rows: Tensor = self(torch.arange(self.num_embeddings, device=home_of(self)))
        is_traced = torch.compiler.is_compiling() or is_tracing()
        return rows if is_traced else rows.as_subclass(ComputedRows)

    @property
    def sparse(self) -> bool:
        """Whether the stored weights get sparse gradients."""
        return self.inner.sparse

    @property
    def methods(self) -> tuple["Method", ...]:
        """The methods that made this table, in the order they were applied."""
        return (*methods_of(self.inner), self.method)

    @property
    def num_weights(self) -> int:
        """Numbers that are stored, however few bits each of them has."""
        return num_weights(self.inner) + _num_numbers(self) - _num_numbers(self.inner)

    def receive(self, method: "Method") -> "Table":
        """Return this table with one more method applied on top of its rows."""
        return method.wrap(self)

    @property
    def unmergeable(self) -> str | None:
        """Why `merge_` leaves this table as it is, or None."""
        return None

    def unsuited(self, method: "Method") -> str | None:
        """Return why a further method should skip this table, or None."""
        return method.unsuited(self.num_embeddings, self.embedding_dim)

    def served(self) -> "AnyTable":
        """Return the table for inference, with the same rows."""
        return self.method.serve(self)

    def grown(self, start: Tensor) -> "Table":
        """Return the table with more ids, whose rows start as these `(new, D)` as far as it can store them.

        Old ids keep their rows to the last bit. Override where that is well defined, mostly by `grow_table(self.inner, start)`.
        """
        del start
        raise UnsupportedTableError(
            f"tables of {type(self.method).__name__} cannot grow: merge_ the model, grow it, and apply the method again"
        )

    def merge(self) -> nn.Embedding:
        """Return a plain table with the same rows; whatever this table wraps is folded in."""
        return plain_like(self, full_table(self), padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        """Show the shape the way `nn.Embedding` does."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


AnyTable: TypeAlias = nn.Embedding | Table


class Shared(nn.Module):
    """A trained value that all tables of a model with the same key have together.

    `apply_` sees to that, also when a model is read from a file. Such a value ties no tables to each
    other: each of them may be changed by itself.
    """

    def __init__(self, key: Hashable, value: nn.Parameter) -> None:
        super().__init__()
        self.key = key
        self.value = value

    def forward(self, ids: Tensor) -> Tensor:
        """Return the value, whatever the ids."""
        del ids
        return self.value


class Method(Technique):
    """A technique for tables: frozen settings that know how to wrap a table. `apply_` takes it."""

    min_width: ClassVar[int] = 2
    """Narrower tables are skipped: first-order weights have width 1."""
    masks_entries: ClassVar[bool] = False
    """Whether it keeps or cuts each entry by itself, so that embedding sets do not matter to it."""
    may_join_rows: ClassVar[bool] = False
    """Whether it may store all rows of a table as one where they do not earn their bytes: no reason to warn."""

    @abstractmethod
    def wrap(self, base: AnyTable) -> Table:
        """Return a table of the same shape as `base`, started from its rows."""

    def serve(self, table: Table) -> "AnyTable":
        """Return one of its tables for inference: what only training needs is merged."""
        return table.merge() if self.training_only else table

    def fitted(self, model: nn.Module, train: "Dataset") -> Self:
        """Return the method with what it needs to know of the training data; a run calls it for trained tables."""
        del model, train
        return self

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return tables of a model, by their names, with this method; override where names matter."""
        return [wrap(table, self) for table in tables.values()]

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> "Stack":
        """Return these tables behind one lookup; override where one batched operation will do."""
        from rarebit.tables.collection import LoopStack

        return LoopStack(tables, lengths)

    def traced(self, tables: Sequence[Table], lengths: Sequence[int]) -> "Stack | None":
        """Return these tables as a stack in operations that every exporter knows; None where a lookup has no others."""
        del tables, lengths
        return None

    def unsuited(self, rows: int, width: int) -> str | None:
        """Return why a table of this shape should be skipped, or None."""
        del rows, width
        return None

    def after_merge(self, table: AnyTable) -> AnyTable:
        """Return the merged table, with what must outlive merging."""
        return table

    def change_model(
        self, model: nn.Module, *, where: object, optimizer: Optimizer | None
    ) -> "TableChanges | None":
        """Change a model as a whole and return what changed; None: `apply_` goes table by table."""
        del model, where, optimizer
        return None


def wrap(base: AnyTable, method: Method) -> Table:
    """Return the table with a method applied to it."""
    return base.receive(method) if isinstance(base, Table) else method.wrap(base)


def unsuited(base: AnyTable, method: Method) -> str | None:
    """Return why a method should skip the table, or None."""
    if isinstance(base, Table):
        return base.unsuited(method)
    return method.unsuited(base.num_embeddings, base.embedding_dim)


def grow_table(table: AnyTable, start: Tensor) -> AnyTable:
    """Return the table with more ids, whose rows start as these `(new, D)`."""
    if isinstance(table, Table):
        return table.grown(start)
    old, rows = table.weight.detach(), table.num_embeddings
    shape = (rows + len(start), table.embedding_dim)
    what = f"a table of {shape[0]:,} x {shape[1]}"
    require_memory(shape[0] * shape[1] * old.itemsize, what, "use fewer rows", old.device)
    weight = old.new_empty(shape)
    weight[:rows], weight[rows:] = old, start  # unlike torch.cat, on all threads
    return plain_like(table, weight, padding_idx=table.padding_idx)


def methods_of(table: AnyTable) -> tuple[Method, ...]:
    """Return the methods applied to a table, none for a plain one."""
    return table.methods if isinstance(table, Table) else ()


def is_trainable(table: nn.Module) -> bool:
    """Return whether any weight of the table is trained."""
    return any(parameter.requires_grad for parameter in table.parameters())


def home_of(module: nn.Module) -> torch.device:
    """Return the device that a module's tensors are on."""
    return next(chain(module.parameters(), module.buffers())).device


def stored_tensors(module: nn.Module) -> list[Tensor]:
    """Return all that a module stores, each once: its weights, and the buffers that are saved too."""
    buffers = (
        buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set  # noqa: SLF001  # a state dict would run hooks
    )
    return list({id(tensor): tensor for tensor in chain(module.parameters(), buffers)}.values())


def num_weights(table: nn.Module) -> int:
    """Return how many numbers a table stores, however few bits each of them has."""
    return table.num_weights if isinstance(table, Table) else _num_numbers(table)


def _num_numbers(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in stored_tensors(module))


def full_table(table: AnyTable) -> Tensor:
    """Return all rows `(N, D)` without a gradient, built in chunks of bounded memory."""
    if isinstance(table, nn.Embedding) and not isinstance(table, TablePiece):
        return table.weight.detach()
    with torch.no_grad():
        ids = torch.arange(table.num_embeddings, device=home_of(table))
        return torch.cat([table(chunk) for chunk in ids.split(CHUNK)])


@torch.no_grad()
def row_chunks(table: AnyTable) -> Iterator[Tensor]:
    """Yield the rows of a table in chunks; the padding row is zero."""
    ids = torch.arange(table.num_embeddings, device=home_of(table))
    for chunk in ids.split(CHUNK):
        rows = table(chunk)
        if table.padding_idx is not None:
            # a plain table returns its padding row as it is stored
            rows = rows.masked_fill((chunk == table.padding_idx).unsqueeze(-1), 0.0)
        yield rows


def tells_ids_apart(table: AnyTable, least: float = 0.0) -> bool:
    """Return whether two rows differ by more than `least` in an entry; a single row must differ from zero."""
    first: Tensor | None = None
    for index, chunk in enumerate(row_chunks(table)):
        at = -1 if table.padding_idx is None else table.padding_idx - index * CHUNK
        rows = torch.cat([chunk[:at], chunk[at + 1 :]]) if 0 <= at < len(chunk) else chunk
        if first is None and len(rows):
            first = rows[0] if len(rows) > 1 else torch.zeros_like(rows[0])
        if first is not None and bool(((rows - first).abs() > least).any()):
            return True
    return False


def row_not_finite(table: AnyTable) -> int | None:
    """Return the first row with an entry that is not finite, None where there is none."""
    for index, rows in enumerate(row_chunks(table)):
        bad = rows.isfinite().all(dim=-1).logical_not_()
        if bool(bad.any()):
            return index * CHUNK + int(bad.int().argmax())
    return None


class TablePiece(nn.Embedding):
    """A table of which this process holds some rows or columns; its lookups need all processes that hold the others."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight: nn.Parameter | None,
        *,
        look_up: Callable[[Tensor], Tensor],
        first_row: int = 0,
        padding_idx: int | None = None,
        sparse: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # torch's own would draw the whole table
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, sparse
        if weight is not None:
            self.weight = weight
        self.look_up = look_up
        self.first_row = first_row
        """The row of the table that is the first one here."""

    def forward(self, input: Tensor) -> Tensor:
        """Return whole rows, where all processes ask for the same."""
        return self.look_up(input.reshape(-1)).view(*input.shape, -1)


def plain_like(base: AnyTable, weight: Tensor, *, padding_idx: int | None = None) -> nn.Embedding:
    """Return a plain table with this weight, trained as `base` is: sparse or not, frozen or not."""
    table: nn.Embedding = nn.Embedding.from_pretrained(
        weight, freeze=not is_trainable(base), padding_idx=padding_idx, sparse=base.sparse
    )
    return table.train(base.training)
