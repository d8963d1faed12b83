"""Tables made of a few small plain ones: what the compressors of the literature have in common.

    e(i) = f(i, parts)        `Compressor.compute`, written once for a table and for a stack of tables

The tables of a stack have the same settings, so one lookup per part serves all of them.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import inf, prod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rarebit.methods._sizing import plain_weights, too_small
from rarebit.tables.collection import Stack, stack_tables
from rarebit.tables.table import AnyTable, Method, Table, plain_like
from rarebit.technique import Rank, technique_name

SHARED = "it changes the stored rows of ids, and here ids share what is stored; use one of them"


HALVINGS = 60
"""Of the prices among which one is found."""


class Compressor(Method):
    """A published way to a smaller table, as a control for ours."""

    control: ClassVar[str] = "narrow"
    composition_rank: ClassVar[Rank] = Rank.FACTORS
    excludes: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("adam-ar", "forgetting", "frequency-decay", "fresh-tables", "tail"), SHARED
        ),
        "pruned": "a compressed table has no entries to spare; use one of them",
    }

    @abstractmethod
    def stored(self, rows: int, width: int) -> int:
        """Return how many weights a table of this shape stores."""

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table that would store more than before stays plain."""
        return None if self.stored(rows, width) <= rows * width else "it would not become smaller"

    def kept(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Return the share of the weights of these tables that stays; infinite if no table becomes smaller."""
        suits = [self.unsuited(*shape) is None for shape in shapes]
        sizes = [
            self.stored(*shape) if suited else prod(shape)
            for shape, suited in zip(shapes, suits, strict=True)
        ]
        return sum(sizes) / sum(map(prod, shapes)) if any(suits) else inf

    @classmethod
    def largest(
        cls,
        make: Callable[[int], Self],
        sizes: range,
        shapes: Sequence[tuple[int, int]],
        share: float,
    ) -> Self:
        """Return the method of the largest of these sizes that keeps at most this share of the weights."""
        plain_weights(shapes, share)
        found = bisect_right(sizes, share, key=lambda size: make(size).kept(shapes))
        if not found:
            least = make(sizes[0]).kept(shapes) if sizes else 1.0
            raise too_small(technique_name(cls), share, least=min(least, 1.0))
        return make(sizes[found - 1])


def within(scores: Tensor, costs: Tensor, most: float) -> Tensor:
    """Return the best choice of each row, `(G, M)` to `(G,)`, at the lowest price of a unit of cost at which all cost at most so much.

    >>> within(torch.tensor([[0.0, 3.0], [0.0, 1.0]]), torch.tensor([[1.0, 2.0], [1.0, 2.0]]), most=3)
    tensor([1, 0])
    """
    low, high = -1e6, 1e6
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        chosen = (scores - middle * costs).argmax(1, keepdim=True)
        low, high = (low, middle) if costs.gather(1, chosen).sum() <= most else (middle, high)
    return (scores - high * costs).argmax(1)


class StandaloneTable(Table):
    """A table made from another one, of which it keeps nothing but the shape."""

    def __init__(self, method: Method, source: AnyTable) -> None:
        super().__init__(
            method,
            None,
            num_embeddings=source.num_embeddings,
            embedding_dim=source.embedding_dim,
            padding_idx=source.padding_idx,
        )
        self._is_sparse = source.sparse

    @property
    def sparse(self) -> bool:
        """Whether the merged table gets sparse gradients."""
        return self._is_sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """Its own method: others were merged when it was made."""
        return (self.method,)


class PartedCompressor(Compressor):
    """A compressor whose tables are a function of the rows of small plain tables."""

    @abstractmethod
    def compute(
        self, ids: Tensor, parts: Sequence[nn.Module], width: int, sizes: Sequence[int | Tensor]
    ) -> Tensor:
        """Return the rows of these ids, `(...)` to `(..., D)`, from lookups of the parts."""

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return what `compute` must know of the number of rows of a table."""
        del rows
        return ()

    def of_parts(self, base: AnyTable, *weights: Tensor) -> "PartedTable":
        """Return a table like `base` with parts that start at these weights."""
        parts = [plain_like(base, weight.contiguous()) for weight in weights]
        return PartedTable(self, parts, base.num_embeddings, base.embedding_dim, base.padding_idx)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return the tables behind one lookup per part."""
        return PartedStack(self, [t for t in tables if isinstance(t, PartedTable)], lengths)


class PartedTable(Table):
    """A table whose rows are computed from those of its parts."""

    def __init__(
        self,
        method: PartedCompressor,
        parts: Sequence[AnyTable],
        rows: int,
        width: int,
        padding: int | None,
    ) -> None:
        super().__init__(
            method, parts[0], num_embeddings=rows, embedding_dim=width, padding_idx=padding
        )
        self.compressor = method
        self.more = nn.ModuleList(parts[1:])
        self.sizes = method.sizes(rows)

    @property
    def parts(self) -> list[nn.Module]:
        """All parts: `inner` and `more`."""
        return [self.inner, *self.more]

    def rows(self, ids: Tensor) -> Tensor:
        """Return f(i, parts)."""
        return self.compressor.compute(ids, self.parts, self.embedding_dim, self.sizes)


class PartedStack(Stack):
    """Tables of parts behind one lookup per part."""

    sizes: Tensor

    def __init__(
        self, method: PartedCompressor, tables: Sequence[PartedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.width = tables[0].embedding_dim
        self.shapes = [(t.num_embeddings, t.embedding_dim, t.padding_idx) for t in tables]
        columns = zip(*(table.parts for table in tables), strict=True)
        self.parts = nn.ModuleList(
            stack_tables([part for part in column if isinstance(part, nn.Embedding)], lengths)
            for column in columns
        )
        sizes = torch.tensor([table.sizes for table in tables], dtype=torch.int64)
        self.register_buffer("sizes", sizes[self.field_of_slot], persistent=False)  # (S, ...)

    def rows(self, ids: Tensor) -> Tensor:
        """Return f(i, parts) for each field."""
        return self.method.compute(ids, list(self.parts), self.width, self.sizes.unbind(-1))

    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""
        columns = [part.split() for part in self.parts if isinstance(part, Stack)]
        parts = zip(zip(*columns, strict=True), self.shapes, strict=True)
        return [PartedTable(self.method, own, *shape) for own, shape in parts]
