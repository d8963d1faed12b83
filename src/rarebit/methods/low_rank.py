"""Low rank: the best approximation of a table by two thin factors (Eckart and Young, 1936).

    W ≈ (W V_r) V_rᵀ        e(i) = (W V_r)[i] · V_rᵀ

    r        `LowRank.rank`
    W V_r    `LowRankTable.inner`, N x r
    V_rᵀ     `LowRankTable.right`, r x D: the first r right singular vectors of W

No other pair of factors of this size is closer to the table in the sum of squares. A table with N rows stores (N + D) r
weights instead of N D. A run applies it before training, and trains the factors; with `after_training=True` it trains the
table and truncates it at the end.

Not for tables with a flat spectrum: the truncated part is as large as the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rarebit.methods._sizing import plain_weights, too_small
from rarebit.settings import check_types, require
from rarebit.tables.collection import Stack, stack_tables
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    grow_table,
    is_trainable,
    plain_like,
)
from rarebit.technique import Rank

__all__ = ["LowRank", "LowRankTable"]


@dataclass(frozen=True, kw_only=True)
class LowRank(Method):
    """Store a table as two factors of inner width `rank`, its truncated singular value decomposition.

    >>> LowRank(rank=4)
    LowRank(rank=4)
    """

    title: ClassVar[str] = "a table as two thin factors, its truncated SVD"
    paper: ClassVar[str] = (
        "Eckart and Young, The approximation of one matrix by another of lower rank, "
        "Psychometrika 1936"
    )
    control: ClassVar[str] = "narrow"
    cost: ClassVar[str] = "one small product per row and step; (N + D) x rank weights, not N x D"
    applies: ClassVar[str] = (
        "trained tables that use few directions; not tables with a flat spectrum, nor short tables"
    )
    composition_rank: ClassVar[Rank] = Rank.FACTORS

    rank: int
    """Inner width: the number of weights per row."""
    after_training: bool = False
    """Whether a run trains the whole table and truncates it at the end; `apply_` always truncates at once."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rank >= 1, f"rank must be at least 1, got rank={self.rank}")

    def __repr__(self) -> str:
        # reports of tables show it, and the default is not worth the space
        when = ", after_training=True" if self.after_training else ""
        return f"LowRank(rank={self.rank}{when})"

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the rank, one for all tables, that keeps at most this share of the weights.

        A table smaller than the rank stays plain and keeps all its weights.

        >>> LowRank.for_share([(1000, 8), (5, 8)], share=0.5)
        LowRank(rank=3)
        """
        total = plain_weights(shapes, share)
        # try all ranks: a larger one may keep fewer weights where it leaves a small table plain
        kept = {
            rank: sum((n + d) * rank if rank <= min(n, d) else n * d for n, d in shapes) / total
            for rank in range(1, max(map(min, shapes)) + 1)
        }
        fitting = [rank for rank, part in kept.items() if part <= share]
        if not fitting:
            raise too_small("low-rank", share, least=min(kept.values()))
        return cls(rank=max(fitting, key=kept.__getitem__))

    def wrap(self, base: AnyTable) -> "LowRankTable":
        """Return the closest table of this rank."""
        weight = full_table(base if isinstance(base, nn.Embedding) else base.merge())
        # The triangular factor has the same right singular vectors. No matrix is larger than the table, and unlike the
        # D x D Gram matrix it does not square the error.
        triangle = torch.linalg.qr(weight.double(), mode="r").R
        right_vectors = torch.linalg.svd(triangle, full_matrices=False).Vh.T  # (D, min(N, D))
        vectors = right_vectors[:, : self.rank].to(weight.dtype)  # (D, r)
        right = nn.Parameter(vectors.T.contiguous(), requires_grad=is_trainable(base))
        inner = plain_like(base, weight @ vectors, padding_idx=base.padding_idx)
        return LowRankTable(self, inner, right)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return low-rank tables behind one lookup and one batched product."""
        return LowRankStack(self, tables, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table has at most as many singular vectors as its smaller side."""
        return None if self.rank <= min(rows, width) else f"smaller than rank {self.rank}"


class LowRankTable(Table):
    """A table as the product of a long thin factor and a small wide one."""

    def __init__(self, method: Method, inner: AnyTable, right: nn.Parameter) -> None:
        super().__init__(method, inner, embedding_dim=right.shape[1])
        self.right = right  # V_rᵀ

    def rows(self, ids: Tensor) -> Tensor:
        """Return (W V_r)[i] · V_rᵀ."""
        rows: Tensor = self.inner(ids) @ self.right
        return rows

    def grown(self, start: Tensor) -> "LowRankTable":
        """Return the table with more ids; their rows are the closest of this rank."""
        thin = start.double() @ torch.linalg.pinv(self.right.detach().double())
        return LowRankTable(self.method, grow_table(self.inner, thin), self.right)


class LowRankStack(Stack):
    """Low-rank tables behind one lookup and one batched product."""

    def __init__(self, method: LowRank, tables: Sequence[Table], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.method = method
        self.inner = stack_tables([table.inner for table in tables], lengths)
        rights = [table.right for table in tables if isinstance(table, LowRankTable)]
        stacked = torch.stack([right.detach() for right in rights])  # (F, r, D)
        self.right = nn.Parameter(stacked, requires_grad=rights[0].requires_grad)

    def rows(self, ids: Tensor) -> Tensor:
        """Return (W_f V_f)[i] · V_fᵀ for each field f."""
        thin = self.inner(ids)  # (..., S, r)
        return torch.einsum("...sr,srd->...sd", thin, self.right[self.field_of_slot])

    def split(self) -> list[AnyTable]:
        """Return the low-rank tables one by one."""
        trained = self.right.requires_grad
        rights = [nn.Parameter(right, requires_grad=trained) for right in self.right.detach()]
        parts = zip(self.inner.split(), rights, strict=True)
        return [LowRankTable(self.method, *part) for part in parts]
