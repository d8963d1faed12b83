"""The table protocol: `rows(ids) -> (..., D)` is the equation, written once.

The full table, merging and counting are derived from `rows`, so they cannot drift from it.
`nn.Embedding` *is* the plain table; there is no class of ours for it. A technique's table wraps
another table (`inner`), plain or not, so techniques compose:

    HashedTable                 rows(ids) = inner(ids % buckets)
    └── LowRankTable            rows(ids) = inner(ids) @ right
        └── nn.Embedding        the weights that are really stored

Shapes: N rows of the table, D its width.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn

from rarebit.settings import from_mapping

if TYPE_CHECKING:
    from rarebit.tables.stack import Stack

__all__ = [
    "AnyTable",
    "Method",
    "Pair",
    "Shared",
    "Table",
    "declared_pair",
    "full_table",
    "home_of",
    "is_trainable",
    "method_name",
    "methods_of",
    "num_weights",
    "plain_like",
    "stored_tensors",
    "unsuited",
    "wrap",
]

# Ids looked up at once when a whole table is built: bounds the memory of what `rows` computes.
CHUNK = 1 << 16


class Table(nn.Module, ABC):
    """A table made by a method: a module that maps ids to rows like `nn.Embedding` does."""

    inner: "AnyTable"
    """The table that holds what is stored; a table that stores its rows itself has none."""

    def __init__(
        self,
        method: "Method",
        inner: "AnyTable | None",
        *,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
    ) -> None:
        super().__init__()
        self.method = method
        if inner is not None:
            self.inner = inner
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, `(...)` to `(..., D)`, touching no others."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids; the padding row is zero and gets no gradient."""
        # Row arithmetic stays in the table's own precision: a table is stored in float32 and
        # half-precision products would be folded into it by `merge`.
        with torch.autocast(ids.device.type, enabled=False):
            rows = self.rows(ids)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)

    @property
    def weight(self) -> Tensor:
        """The full table `(N, D)`, differentiable. It costs what the table costs: not for a step."""
        return torch.as_tensor(self(torch.arange(self.num_embeddings, device=home_of(self))))

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

    def unsuited(self, method: "Method") -> str | None:
        """Say why this table is better left alone by a further method, or None."""
        return method.unsuited(self.num_embeddings, self.embedding_dim)

    def served(self) -> "AnyTable":
        """Return the table as it is served, with the same rows."""
        return self.method.serve(self)

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


@dataclass(frozen=True)
class Pair:
    """Whether a method may be applied after another, and what that means or why not."""

    allowed: bool
    """False: the pair is ill-defined, and `apply_` refuses it."""
    words: str
    """What the pair means; of a refused one, the reason and what to do."""


class Method(ABC):
    """A technique for tables: frozen settings that know how to wrap a table.

    Subclasses are frozen dataclasses, one a file in `methods/`; the file's name is the method's. What
    a study and `rarebit methods` must know of a method is data of its class; a method of one's own
    may leave it out.
    """

    title: ClassVar[str] = ""
    """What it changes, in one line."""
    paper: ClassVar[str] = ""
    """Where it comes from."""
    control: ClassVar[str] = "baseline"
    """What a study holds it against: "baseline" is plain tables, "narrow" plain tables made narrower
    until they have the same bytes; or the name of a method."""
    cost: ClassVar[str] = ""
    """What it costs in time of a step and in memory, in words."""
    applies: ClassVar[str] = ""
    """When to use it and when not."""
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Settings that a study may tune on validation, and the values to try, most promising first. What
    only trades size against quality is no knob."""
    pairs: ClassVar[Mapping[str, Pair]] = {}
    """What it means to apply this method after another one, by the name of that one."""
    pairs_before: ClassVar[Mapping[str, Pair]] = {}
    """The same for methods applied after this one: a new file says both, and no older one is edited."""
    min_width: ClassVar[int] = 2
    """Narrower tables are left alone: first-order weights have width 1."""
    training_only: ClassVar[bool] = False
    """Whether its tables are folded when training is over: they are served as plain ones."""

    @property
    def after_training(self) -> bool:
        """Whether a run applies it to its trained tables and not before training; may be a setting."""
        return False

    @property
    def rate_under_sgd(self) -> float:
        """How many times as fast SGD moves the rows of a table that starts afresh, on average."""
        return 1.0

    @property
    def same_start(self) -> "Method | None":
        """Plain tables that start as this method's do; None where those are the model's own."""
        return None

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the method sized to keep at most a share of the weights of these tables.

        `shapes` are the rows and the width of each table it will be applied to. The size is as close
        below the share as the settings allow. A method that has no size comes with its defaults.

        >>> from rarebit import Hashing
        >>> Hashing.for_share([(1000, 8), (50, 8)], share=0.1)
        Hashing(buckets=55)
        """
        del shapes, share
        return from_mapping(cls, {}, where=f"method {method_name(cls)}")

    @abstractmethod
    def wrap(self, base: AnyTable) -> Table:
        """Return a table of the same shape as `base`, started from its rows."""

    def serve(self, table: Table) -> "AnyTable":
        """Return one of its tables as it is served: what only training needs is folded."""
        return table.merge() if self.training_only else table

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return tables of a model, by their names, with this method; override where names matter."""
        return [wrap(table, self) for table in tables.values()]

    def shape_after(self, rows: int, width: int) -> tuple[int, int]:
        """Return the shape that the next method gets of a table of this shape with this method."""
        return rows, width

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> "Stack":
        """Return these tables behind one lookup; override where one batched operation will do."""
        from rarebit.tables.stack import LoopStack

        return LoopStack(tables, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """Say why a table of this shape is better left alone, or None."""
        del rows, width
        return None


def method_name(method: Method | type[Method]) -> str:
    """Return a method's name as people type it; one from outside the package goes by its class.

    >>> from rarebit import LowRank
    >>> method_name(LowRank(rank=4)), method_name(LowRank)
    ('low-rank', 'low-rank')
    """
    cls = method if isinstance(method, type) else type(method)
    package, _, file = cls.__module__.rpartition(".")
    ours = ("rarebit.methods", "rarebit.pruning", "rarebit.research")
    return file.replace("_", "-") if package in ours else cls.__name__


FOLDED_FIRST = Pair(allowed=True, words="the first is folded when training is over")


def declared_pair(
    first: type[Method], then: type[Method], *, after_training: bool = False
) -> Pair | None:
    """Return what applying one method after another means, or None where neither of them says it.

    What only training needs is folded before a method that comes after training is applied, so that
    pair is one with plain tables, whatever the methods are.

    >>> from rarebit import Hashing, LowRank
    >>> declared_pair(Hashing, LowRank).allowed, declared_pair(LowRank, Hashing).allowed
    (True, False)
    """
    if after_training and first.training_only:
        return FOLDED_FIRST
    said = then.pairs.get(method_name(first))
    return said or first.pairs_before.get(method_name(then))


def wrap(base: AnyTable, method: Method) -> Table:
    """Return the table with a method applied to it."""
    return base.receive(method) if isinstance(base, Table) else method.wrap(base)


def unsuited(base: AnyTable, method: Method) -> str | None:
    """Say why the table is better left alone by a method, or None."""
    if isinstance(base, Table):
        return base.unsuited(method)
    return method.unsuited(base.num_embeddings, base.embedding_dim)


def methods_of(table: AnyTable) -> tuple[Method, ...]:
    """Return the methods applied to a table, none for a plain one."""
    return table.methods if isinstance(table, Table) else ()


def is_trainable(table: nn.Module) -> bool:
    """Return whether any weight of the table is trained."""
    return any(parameter.requires_grad for parameter in table.parameters())


def home_of(module: nn.Module) -> torch.device:
    """Return the device that a module's tensors are on.

    >>> home_of(nn.Embedding(9, 4))
    device(type='cpu')
    """
    return next(chain(module.parameters(), module.buffers())).device


def stored_tensors(module: nn.Module) -> list[Tensor]:
    """Return all that a module stores, each once: its weights, and the buffers that are saved too.

    >>> [tuple(tensor.shape) for tensor in stored_tensors(nn.Embedding(9, 4))]
    [(9, 4)]
    """
    buffers = (
        buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set  # noqa: SLF001  # a state dict would run hooks
    )
    return list({id(tensor): tensor for tensor in chain(module.parameters(), buffers)}.values())


def num_weights(table: nn.Module) -> int:
    """Return how many numbers a table stores, however few bits each of them has.

    >>> num_weights(nn.Embedding(9, 4))
    36
    """
    return table.num_weights if isinstance(table, Table) else _num_numbers(table)


def _num_numbers(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in stored_tensors(module))


def full_table(table: AnyTable) -> Tensor:
    """Return all rows `(N, D)` without a gradient, built in chunks of bounded memory."""
    if isinstance(table, nn.Embedding):
        return table.weight.detach()
    with torch.no_grad():
        ids = torch.arange(table.num_embeddings, device=home_of(table))
        return torch.cat([table(chunk) for chunk in ids.split(CHUNK)])


def plain_like(base: AnyTable, weight: Tensor, *, padding_idx: int | None = None) -> nn.Embedding:
    """Return a plain table with this weight, trained as `base` is: sparse or not, frozen or not."""
    table: nn.Embedding = nn.Embedding.from_pretrained(
        weight, freeze=not is_trainable(base), padding_idx=padding_idx, sparse=base.sparse
    )
    return table.train(base.training)
