"""MGQE: rows as codes of shared pieces, learned in training, with fewer pieces for rare ids (Kang et al., 2020).

    Learning Multi-granular Quantized Embeddings, https://arxiv.org/abs/2002.08530

    e(i)_p = C[p, k]                            k = argmin over k < K_i of |w_i,p - C[p, k]|²
    e(i)_p = C[p, k] + w_i,p - sg(w_i,p)        in training: w gets the gradient of e (straight-through)

    p      one of `MGQE.pieces` equal pieces of a row
    C      `CodebookTable.centroids`, K per piece, one after the other
    K_i    `MGQE.centroids` for the first `MGQE.head` of the ids, `MGQE.tail_centroids` for all others
    w      `CodebookTable.inner`, N x D; only training has it
    k      `CodedTable.head` and `CodedTable.tail`, one byte and half a byte per piece
    sg     its gradient is zero

With K_i the same for all ids this is DPQ-VQ (`dpq` is DPQ-SX). The first ids are the frequent ones in
encoded logs. Centroids start as the pieces of the first rows.

Not to save memory in training: it has the whole table and the centroids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.methods._sizing import plain_weights, too_small
from rarebit.methods.quantize import ZERO_CODE, pack, unpack
from rarebit.research._compressors import Compressor, StandaloneTable
from rarebit.settings import check_types, require
from rarebit.tables.collection import take_rows
from rarebit.tables.table import (
    CHUNK,
    AnyTable,
    Table,
    full_table,
    is_trainable,
    plain_like,
    row_chunks,
)

__all__ = ["MGQE", "CodebookTable", "CodedTable"]

MOST, MOST_IN_TAIL = 256, 16
"""Centroids that the code of a frequent id and that of a rare one can tell apart."""


@dataclass(frozen=True, kw_only=True)
class MGQE(Compressor):
    """Learn the pieces that rows are made of, and store which pieces a row has.

    >>> MGQE(pieces=4)
    MGQE(pieces=4, centroids=256, tail_centroids=16, head=0.1, frozen=False)
    """

    title: ClassVar[str] = "rows as codes of learned pieces, fewer for rare ids"
    paper: ClassVar[str] = (
        "Kang et al., Learning Multi-granular Quantized Embeddings for Large-Vocab Categorical Features in Recommender "
        "Systems, WWW 2020"
    )
    cost: ClassVar[str] = (
        "a step compares each looked-up row with all centroids; training has the whole table, inference a byte or less per "
        "piece"
    )
    applies: ClassVar[str] = (
        "as a control for small tables at inference; not for memory in training"
    )
    training_only: ClassVar[bool] = True

    pieces: int
    """Pieces of a row; a wider table has wider pieces."""
    centroids: int = MOST
    """Centroids per piece, at most 256."""
    tail_centroids: int = MOST_IN_TAIL
    """Centroids that rare ids can have: the first ones, at most 16."""
    head: float = 0.1
    """Share of the ids that are frequent: the first ones, at least one."""
    frozen: bool = False
    """Whether a table has its codes for good, as a run leaves it. Applied to a table, pieces of its first rows are the centroids."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.pieces >= 1, f"pieces must be at least 1, got pieces={self.pieces}")
        require(
            1 <= self.centroids <= MOST,
            f"centroids must be from 1 to {MOST}, got centroids={self.centroids}",
        )
        most = min(self.centroids, MOST_IN_TAIL)
        require(
            1 <= self.tail_centroids <= most,
            f"tail_centroids must be from 1 to {most}, got tail_centroids={self.tail_centroids}",
        )
        require(0 <= self.head < 1, f"head must be from 0 to less than 1, got head={self.head}")

    @property
    def after_training(self) -> bool:
        """Codes have no gradient."""
        return self.frozen

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the centroids and pieces that keep the most, at most this share of the bytes at inference.

        >>> MGQE.for_share([(100_000, 16), (50, 16)], share=0.1).pieces
        10
        """
        plain_weights(shapes, share)
        pieces = range(1, max(width for _, width in shapes) + 1)
        tried = [
            cls(pieces=number, centroids=many, tail_centroids=min(many, MOST_IN_TAIL))
            for number, many in product(pieces, (2, 4, 8, 16, 32, 64, 128, 256))
        ]
        kept = {method: method.kept(shapes) for method in tried}
        fitting = [method for method in tried if kept[method] <= share]
        if not fitting:
            raise too_small("mgqe", share, least=min(*kept.values(), 1.0))
        return max(fitting, key=kept.__getitem__)

    def stored(self, rows: int, width: int) -> int:
        """Return the bytes of codes and centroids, in weights of four bytes."""
        head = self.num_head(rows)
        codes = head * self.pieces + (rows - head) * -(-self.pieces // 2)
        return -(-codes // 4) + self.centroids * self.pieces * -(-width // self.pieces)

    def num_head(self, rows: int) -> int:
        """Return how many ids are frequent."""
        return max(int(self.head * rows), 1)

    def wrap(self, base: AnyTable) -> Table:
        """Return the table with centroids to learn, or with its codes for good."""
        if self.frozen:
            whole = base if isinstance(base, nn.Embedding) else base.merge()
            return replace(self, frozen=False).learned(whole).coded()
        return self.learned(base)

    def learned(self, base: AnyTable) -> "CodebookTable":
        """Return the table with centroids to learn."""
        weight = full_table(base)
        inner = plain_like(base, weight.clone(), padding_idx=base.padding_idx)
        first = weight[torch.arange(self.centroids, device=weight.device) % len(weight)]
        centroids = (
            self.cut(first).transpose(0, 1).flatten(0, 1).clone()
        )  # (pieces x K, D / pieces)
        return CodebookTable(self, inner, nn.Parameter(centroids, requires_grad=is_trainable(base)))

    def serve(self, table: Table) -> AnyTable:
        """Return the table with its codes, without the rows that they were found from."""
        return table.coded() if isinstance(table, CodebookTable) else table

    def cut(self, rows: Tensor) -> Tensor:
        """Return the pieces of rows, `(..., D)` to `(..., pieces, ceil(D / pieces))`."""
        padded = F.pad(rows, (0, -rows.shape[-1] % self.pieces))
        return padded.reshape(*rows.shape[:-1], self.pieces, -1)

    def nearest(self, pieces: Tensor, centroids: Tensor, is_tail: Tensor) -> Tensor:
        """Return the nearest centroid of each piece, `(..., pieces)`."""
        each = centroids.view(self.pieces, self.centroids, -1)
        rows = pieces.reshape(-1, *pieces.shape[-2:]).transpose(0, 1)  # (pieces, T, D / pieces)
        # least |w - C|² is most w C - |C|² / 2
        size = each.square().sum(-1).unsqueeze(1) / 2
        nearness = torch.baddbmm(size, rows, each.transpose(1, 2), beta=-1)  # (pieces, T, K)
        head, tail = (
            nearness[..., :many].max(-1).indices for many in (self.centroids, self.tail_centroids)
        )
        return torch.where(is_tail.reshape(-1), tail, head).T.reshape(pieces.shape[:-1])

    def pick(self, codes: Tensor, centroids: Tensor) -> Tensor:
        """Return the centroids of codes, `(..., pieces)` to `(..., pieces, D / pieces)`."""
        first = torch.arange(self.pieces, device=codes.device) * self.centroids
        return F.embedding(codes + first, centroids)


class CodebookTable(Table):
    """A table whose rows are the nearest centroids of stored ones."""

    def __init__(self, method: MGQE, inner: AnyTable, centroids: nn.Parameter) -> None:
        super().__init__(method, inner)
        self.mgqe, self.num_head = method, method.num_head(inner.num_embeddings)
        self.centroids = centroids  # C

    # NOTE[DIFF]: the papers add |C - sg(w)|² to the loss; a table has no loss to add to, so a centroid gets the gradient of the
    # rows that it stands for instead
    def rows(self, ids: Tensor) -> Tensor:
        """Return C[p, k] + w - sg(w), piece by piece."""
        pieces = self.mgqe.cut(self.inner(ids))
        picked = self.mgqe.pick(self._codes(ids, pieces), self.centroids)
        rows = picked + (pieces - pieces.detach())
        return rows.flatten(-2)[..., : self.embedding_dim]

    def coded(self) -> "CodedTable":
        """Return the table with its codes for good."""
        ids = torch.arange(self.num_embeddings, device=self.centroids.device)
        chunks = zip(ids.split(CHUNK), row_chunks(self.inner), strict=True)
        codes = torch.cat([self._codes(part, self.mgqe.cut(rows)) for part, rows in chunks])
        tail = pack((codes[self.num_head :] - ZERO_CODE).to(torch.int8))
        kept = codes[: self.num_head].to(torch.uint8), tail, self.centroids.detach().clone()
        return CodedTable(self, kept)

    @torch.no_grad()
    def _codes(self, ids: Tensor, pieces: Tensor) -> Tensor:
        return self.mgqe.nearest(pieces, self.centroids, ids >= self.num_head)


class CodedTable(StandaloneTable):
    """A frozen table of codes: which centroid each piece of a row is."""

    head: Tensor
    tail: Tensor
    centroids: Tensor

    def __init__(self, source: CodebookTable, kept: tuple[Tensor, Tensor, Tensor]) -> None:
        method = replace(source.mgqe, frozen=True)
        super().__init__(method, source)
        self.mgqe = method
        for name, tensor in zip(("head", "tail", "centroids"), kept, strict=True):
            self.register_buffer(name, tensor)

    def rows(self, ids: Tensor) -> Tensor:
        """Return C[p, k], piece by piece."""
        ids, num_head = ids.long(), len(self.head)
        head = take_rows(self.head, ids.clamp(max=num_head - 1)).long()
        packed = take_rows(self.tail, (ids - num_head).clamp(min=0))
        tail = unpack(packed, self.mgqe.pieces).long() + ZERO_CODE
        codes = torch.where((ids < num_head).unsqueeze(-1), head, tail)
        rows = self.mgqe.pick(codes, self.centroids)
        return rows.flatten(-2)[..., : self.embedding_dim]

    @property
    def num_weights(self) -> int:
        """The codes, of which two may share a byte, and the centroids."""
        return self.num_embeddings * self.mgqe.pieces + self.centroids.numel()
