"""DPQ: rows as codes of shared pieces, which a softmax learns (Chen et al., 2020).

    Differentiable Product Quantization for End-to-End Embedding Compression, https://arxiv.org/abs/1908.09756

    e(i)_p = V[p, k]                    k = argmax_k s <w_i,p, C[p, k]>              (DPQ-SX, equations 3 to 5)
    e(i)_p = Σ_k a_k V[p, k]            a = onehot(k) + y - sg(y),  y = softmax_k(s <w_i,p, C[p, k]>), in training

    p    one of `DPQ.pieces` equal pieces of a row
    w    `SoftmaxTable.inner`, N x D, the queries; only training has it
    C    `SoftmaxTable.keys`, P x K x D / P, with K = 2^`DPQ.bits`; only training has it
    V    `SoftmaxTable.values`, of the same shape
    k    `SoftmaxCodes.codes`, `bits` bits per piece
    s    makes the products as large as those of standard normal numbers when training starts
    sg   its gradient is zero

All ids have the same number of bits. `mgqe` is its relative with the nearest centroid in place of a softmax (DPQ-VQ) and fewer centroids
for rare ids.

Not to save memory in training: it has the whole table, keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.codes.packed import pack_bits, unpack_bits
from rarebit.methods._sizing import plain_weights, too_small
from rarebit.research._compressors import Compressor, StandaloneTable
from rarebit.settings import check_types, require
from rarebit.tables.collection import take_rows
from rarebit.tables.table import (
    AnyTable,
    Table,
    full_table,
    is_trainable,
    plain_like,
    row_chunks,
)

__all__ = ["DPQ", "SoftmaxCodes", "SoftmaxTable"]


@dataclass(frozen=True, kw_only=True)
class DPQ(Compressor):
    """Learn the pieces that rows are made of by a softmax, and store which pieces a row has.

    >>> DPQ(pieces=4)
    DPQ(pieces=4, bits=4, frozen=False)
    """

    title: ClassVar[str] = "rows as codes of pieces that a softmax learns"
    paper: ClassVar[str] = (
        "Chen et al., Differentiable Product Quantization for End-to-End Embedding Compression, ICML 2020"
    )
    cost: ClassVar[str] = (
        "a step compares each looked-up row with all keys; training has the whole table, inference a few bits per piece"
    )
    applies: ClassVar[str] = (
        "as a control for small tables at inference; not for memory in training"
    )
    training_only: ClassVar[bool] = True

    pieces: int
    """Pieces of a row; a wider table has wider pieces."""
    bits: int = 4
    """Bits of the code of a piece, 1 to 8."""
    frozen: bool = False
    """Whether a table has its codes for good, as a run leaves it."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.pieces >= 1, f"pieces must be at least 1, got pieces={self.pieces}")
        require(1 <= self.bits <= 8, f"bits must be from 1 to 8, got bits={self.bits}")

    @property
    def after_training(self) -> bool:
        """Codes have no gradient."""
        return self.frozen

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the bits and pieces that keep the most, at most this share of the bytes at inference.

        >>> DPQ.for_share([(100_000, 16), (50, 16)], share=1 / 16)
        DPQ(pieces=3, bits=8, frozen=False)
        """
        plain_weights(shapes, share)
        pieces = range(1, max(width for _, width in shapes) + 1)
        kept = {
            method: method.kept(shapes)
            for method in (cls(pieces=p, bits=b) for p, b in product(pieces, range(1, 9)))
        }
        fitting = [method for method, part in kept.items() if part <= share]
        if not fitting:
            raise too_small("dpq", share, least=min(*kept.values(), 1.0))
        return max(fitting, key=kept.__getitem__)

    def stored(self, rows: int, width: int) -> int:
        """Return the bytes of codes and values, in weights of four bytes."""
        codes = rows * -(-self.pieces * self.bits // 8)
        return -(-codes // 4) + (self.pieces << self.bits) * -(-width // self.pieces)

    def wrap(self, base: AnyTable) -> Table:
        """Return the table with keys and values to learn, or with its codes for good."""
        if self.frozen:
            whole = base if isinstance(base, nn.Embedding) else base.merge()
            return replace(self, frozen=False).learned(whole).coded()
        return self.learned(base)

    def learned(self, base: AnyTable) -> "SoftmaxTable":
        """Return the table with keys and values that start as the pieces of the first rows."""
        weight = full_table(base)
        first = weight[torch.arange(2**self.bits, device=weight.device) % len(weight)]
        pieces = self.cut(first).transpose(0, 1).contiguous()  # (P, K, D / P)
        inner = plain_like(base, weight.clone(), padding_idx=base.padding_idx)
        return SoftmaxTable(self, inner, pieces, trained=is_trainable(base))

    def serve(self, table: Table) -> AnyTable:
        """Return the table with its codes, without queries and keys."""
        return table.coded() if isinstance(table, SoftmaxTable) else table

    def cut(self, rows: Tensor) -> Tensor:
        """Return the pieces of rows, `(..., D)` to `(..., P, ceil(D / P))`."""
        padded = F.pad(rows, (0, -rows.shape[-1] % self.pieces))
        return padded.reshape(*rows.shape[:-1], self.pieces, -1)


class SoftmaxTable(Table):
    """A table whose rows are the values of the keys that are most like stored ones."""

    scale: Tensor

    def __init__(self, method: DPQ, inner: AnyTable, pieces: Tensor, *, trained: bool) -> None:
        super().__init__(method, inner)
        self.dpq = method
        self.keys = nn.Parameter(pieces.clone(), requires_grad=trained)  # C
        self.values = nn.Parameter(pieces.clone(), requires_grad=trained)  # V
        # NOTE[DIFF]: the paper normalises products over the batch; here a row depends on its id only, so that it merges
        power = pieces.square().mean().clamp(min=1e-12) * pieces.shape[-1] ** 0.5
        self.register_buffer("scale", 1 / power)  # s

    @property
    def num_weights(self) -> int:
        """What is trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    def likeness(self, ids: Tensor) -> Tensor:
        """Return s <w, C>, `(..., P, K)`."""
        queries = self.dpq.cut(self.inner(ids))
        return torch.einsum("...pd,pkd->...pk", queries, self.keys) * self.scale

    def rows(self, ids: Tensor) -> Tensor:
        """Return Σ_k (onehot(k) + y - sg(y)) V[p, k], piece by piece."""
        likeness = self.likeness(ids)
        soft = likeness.softmax(-1)
        best = likeness.detach().argmax(-1, keepdim=True)
        hard = torch.zeros_like(soft).scatter_(-1, best, 1.0)
        rows = torch.einsum("...pk,pkd->...pd", hard + (soft - soft.detach()), self.values)
        return rows.flatten(-2)[..., : self.embedding_dim]

    @torch.no_grad()
    def coded(self) -> "SoftmaxCodes":
        """Return the table with its codes for good."""
        first, parts = 0, []
        for chunk in row_chunks(self.inner):
            ids = torch.arange(first, first + len(chunk), device=self.keys.device)
            codes = self.likeness(ids).argmax(-1)  # (n, P)
            shifts = torch.arange(self.dpq.bits, device=codes.device)
            parts.append(pack_bits(((codes.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)))
            first += len(chunk)
        return SoftmaxCodes(self, torch.cat(parts))


class SoftmaxCodes(StandaloneTable):
    """A frozen table of codes: which value each piece of a row has."""

    codes: Tensor
    values: Tensor

    def __init__(self, source: SoftmaxTable, codes: Tensor) -> None:
        method = replace(source.dpq, frozen=True)
        super().__init__(method, source)
        self.dpq = method
        self.register_buffer("codes", codes)
        self.register_buffer("values", source.values.detach().clone())

    def rows(self, ids: Tensor) -> Tensor:
        """Return V[p, k], piece by piece."""
        pieces, bits = self.dpq.pieces, self.dpq.bits
        packed = take_rows(self.codes, ids.long())
        found = unpack_bits(packed.reshape(-1, packed.shape[-1]))[:, : pieces * bits]
        powers = 2 ** torch.arange(bits, device=ids.device)
        codes = (found.view(*ids.shape, pieces, bits) * powers).sum(-1)  # (..., P)
        first = torch.arange(pieces, device=ids.device) << bits
        rows = F.embedding(codes + first, self.values.flatten(0, 1))
        return rows.flatten(-2)[..., : self.embedding_dim]

    @property
    def num_weights(self) -> int:
        """The codes, of which several may share a byte, and the values."""
        return self.num_embeddings * self.dpq.pieces + self.values.numel()
