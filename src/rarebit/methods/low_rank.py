"""Low rank: the best approximation of a table by two thin factors (Eckart and Young, 1936).

    W ≈ (W V_r) V_rᵀ        e(i) = (W V_r)[i] · V_rᵀ

    r        `LowRank.rank`
    W V_r    `LowRankTable.inner`, N x r
    V_rᵀ     `LowRankTable.right`, r x D: the first r right singular vectors of W

Made for trained tables: no other pair of factors of this size is closer to the table in the sum of
squares. A table with N rows stores (N + D) r weights instead of N D.

Not for tables whose spectrum is flat: then the part that is cut off is as large as what stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rarebit.settings import check_types, require
from rarebit.tables.stack import Stack, stack_tables
from rarebit.tables.table import AnyTable, Method, Table, full_table, is_trainable, plain_like

__all__ = ["LowRank", "LowRankStack", "LowRankTable"]


@dataclass(frozen=True, kw_only=True)
class LowRank(Method):
    """Store a table as two factors of inner width `rank`, its truncated singular value decomposition.

    >>> LowRank(rank=4)
    LowRank(rank=4)
    """

    rank: int
    """Inner width: weights kept for each row."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rank >= 1, f"rank must be at least 1, got rank={self.rank}")

    def wrap(self, base: AnyTable) -> "LowRankTable":
        """Return the closest table of this rank."""
        weight = full_table(base)
        vectors = _right_singular_vectors(weight)[:, : self.rank].to(weight.dtype)  # (D, r)
        right = nn.Parameter(vectors.T.contiguous(), requires_grad=is_trainable(base))
        return LowRankTable(self, plain_like(base, weight @ vectors), right, base.padding_idx)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return low-rank tables behind one lookup and one batched product."""
        return LowRankStack(self, tables, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table has no more singular vectors than its smaller side."""
        return None if self.rank <= min(rows, width) else f"smaller than rank {self.rank}"


class LowRankTable(Table):
    """A table as the product of a long thin factor and a small wide one."""

    def __init__(
        self, method: LowRank, inner: AnyTable, right: nn.Parameter, padding_idx: int | None
    ) -> None:
        super().__init__(
            method,
            inner,
            num_embeddings=inner.num_embeddings,
            embedding_dim=right.shape[1],
            padding_idx=padding_idx,
        )
        self.right = right  # V_rᵀ

    def rows(self, ids: Tensor) -> Tensor:
        """Return (W V_r)[i] · V_rᵀ."""
        rows: Tensor = self.inner(ids) @ self.right
        return rows


class LowRankStack(Stack):
    """Low-rank tables behind one lookup and one batched product."""

    def __init__(self, method: LowRank, tables: Sequence[Table], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.method = method
        self.padding = [table.padding_idx for table in tables]
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
        rights = [
            nn.Parameter(right, requires_grad=self.right.requires_grad)
            for right in self.right.detach()
        ]
        parts = zip(self.inner.split(), rights, self.padding, strict=True)
        return [LowRankTable(self.method, *part) for part in parts]


def _right_singular_vectors(weight: Tensor) -> Tensor:
    """Return the right singular vectors as columns `(D, min(N, D))`, largest value first.

    By way of the small triangular factor: nothing larger than the table is formed, and unlike the
    D x D Gram matrix it does not square the error.
    """
    triangle = torch.linalg.qr(weight.double(), mode="r").R
    vectors: Tensor = torch.linalg.svd(triangle, full_matrices=False).Vh.T
    return vectors
