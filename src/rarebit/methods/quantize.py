"""Quantization: a trained table as small integers and one scale (Krishnamoorthi, 2018).

    e(i) = s q_i        q_i = clamp(round(w_i / s), -L, L)        L = 2^(b-1) - 1

    b    `Quantize.bits`
    s    `QuantizedTable.scale`, one number per table
    q    `QuantizedTable.codes`, N x D: one byte each, or two per byte for 4 bits
    w    the trained rows; the table does not keep them

The scale has the least error Σ (w - s q)² of all s = T / L whose clipping threshold T is in

    T_j = max|w| · 2^(-j/32)        j = 0 .. 255

that is, from no clipping down to a 256th of the largest weight in steps of 2 %. A smaller threshold clips the largest
weights and rounds all others more finely.

A lookup reads the integers of its ids and multiplies; only `merge` turns the whole table back into floats. Integers have no
gradient: the table is frozen, and methods before it are merged first. Not for tables that still need training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.settings import check_types
from rarebit.tables.collection import Stack, take_rows
from rarebit.tables.table import CHUNK, AnyTable, Method, Table, full_table, methods_of
from rarebit.technique import Rank

__all__ = ["Quantize", "QuantizedTable"]

Bits = Literal[8, 4]

OCTAVES, STEPS = 8, 32
"""The grid of thresholds: how often the largest is halved, and the steps per halving."""
NUMBERS = 1 << 18
"""Weights that the search sorts at once."""
HALF_BYTE, ZERO_CODE = 4, 8
"""One byte holds two codes of 4 bits as numbers from 1 to 15; 8 stands for zero."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Method):
    """Store a trained table as integers of 8 or 4 bits and one scale.

    >>> Quantize(bits=4)
    Quantize(bits=4)
    """

    title: ClassVar[str] = "a trained table as small integers and one scale"
    paper: ClassVar[str] = (
        "Krishnamoorthi, Quantizing deep convolutional networks for efficient inference: A whitepaper, "
        "arXiv 1806.08342"
    )
    cost: ClassVar[str] = (
        "a lookup computes one extra product per row; a table of N rows and width D takes N x D bytes, or "
        "half of that with 4 bits, instead of 4 x N x D; finding the scale sorts the table once"
    )
    applies: ClassVar[str] = (
        "trained tables that only serve lookups from now on; not tables that need more training"
    )
    composition_rank: ClassVar[Rank] = Rank.QUANTISATION

    bits: Bits = 8
    """Bits of an integer, 8 or 4."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def after_training(self) -> bool:
        """Integers have no gradient."""
        return True

    def wrap(self, base: AnyTable) -> "QuantizedTable":
        """Return the rows of `base` as integers; what it wraps is merged first."""
        weight = full_table(base if isinstance(base, nn.Embedding) else base.merge())
        has_values = not weight.is_meta  # else only the sizes are asked for
        if base.padding_idx is not None and has_values and bool(weight[base.padding_idx].any()):
            row = torch.tensor([base.padding_idx], device=weight.device)
            weight = weight.index_fill(0, row, 0.0)
        scale = best_scale(weight, self.bits) if has_values else weight.new_empty(())
        chunks = [round_to_codes(chunk, scale, self.bits) for chunk in weight.split(CHUNK)]
        codes = torch.cat([pack(chunk) if self.bits == HALF_BYTE else chunk for chunk in chunks])
        origin = Origin(base.embedding_dim, base.padding_idx, base.sparse, methods_of(base))
        return QuantizedTable(self, codes, scale, origin)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return quantized tables behind one lookup of integers."""
        return QuantizedStack(self, [t for t in tables if isinstance(t, QuantizedTable)], lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table without rows has no largest weight to take a scale from."""
        return None if rows and width else "it has no weights"

    def look_up(self, codes: Tensor, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the integers of these ids as floats, `(...)` to `(..., D)`."""
        found = take_rows(codes, ids.long())
        return (unpack(found, width) if self.bits == HALF_BYTE else found).to(dtype)


@dataclass(frozen=True)
class Origin:
    """The table that a quantized one was made from, without its rows."""

    width: int
    padding: int | None
    sparse: bool
    """Whether it had sparse gradients; the merged table has them again."""
    methods: tuple[Method, ...]
    """The methods that were merged."""


class QuantizedTable(Table):
    """A frozen table of small integers with one scale."""

    codes: Tensor
    scale: Tensor

    def __init__(self, method: Quantize, codes: Tensor, scale: Tensor, origin: Origin) -> None:
        super().__init__(
            method,
            None,
            num_embeddings=len(codes),
            embedding_dim=origin.width,
            padding_idx=origin.padding,
        )
        self.origin = origin
        self.register_buffer("codes", codes)  # q
        self.register_buffer("scale", scale)  # s

    def rows(self, ids: Tensor) -> Tensor:
        """Return s q_i."""
        assert isinstance(self.method, Quantize)
        codes = self.method.look_up(self.codes, ids, self.embedding_dim, self.scale.dtype)
        return codes.mul_(self.scale)

    @property
    def sparse(self) -> bool:
        """Whether the merged table gets sparse gradients."""
        return self.origin.sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """All methods that were applied, the merged ones first."""
        return (*self.origin.methods, self.method)

    @property
    def num_weights(self) -> int:
        """The integers, of which two may share a byte, and the scale."""
        return self.num_embeddings * self.embedding_dim + 1


class QuantizedStack(Stack):
    """Quantized tables behind one lookup of integers, with a scale per field."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    def __init__(
        self, method: Quantize, tables: Sequence[QuantizedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.origins = [table.origin for table in tables]
        self.sizes = [table.num_embeddings for table in tables]
        self.width = tables[0].embedding_dim
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        self.register_buffer("codes", torch.cat([table.codes for table in tables]))
        self.register_buffer("scales", torch.stack([table.scale for table in tables]))
        self.register_buffer("offsets", first_rows[self.field_of_slot], persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Return s_f q_i for each field f."""
        dtype = self.scales.dtype
        codes = self.method.look_up(self.codes, ids + self.offsets, self.width, dtype)
        return codes.mul_(self.scales[self.field_of_slot].unsqueeze(-1))  # (..., S, D)

    def split(self) -> list[AnyTable]:
        """Return the quantized tables one by one; integers are shared with the stack, not copied."""
        parts = zip(self.codes.split(self.sizes), self.scales, self.origins, strict=True)
        return [QuantizedTable(self.method, *part) for part in parts]


def best_scale(weight: Tensor, bits: Bits) -> Tensor:
    """Return the scale of the grid with the least squared error, the largest of equal ones."""
    scales = grid_of_scales(weight, bits)
    return scales[squared_errors(weight, scales, bits).argmin()].clone()


def grid_of_scales(weight: Tensor, bits: Bits) -> Tensor:
    """Return the scales to try, `(256,)`, in the precision of the table, largest first."""
    low, high = torch.aminmax(weight.detach())
    halvings = torch.arange(OCTAVES * STEPS, dtype=torch.float64, device=weight.device) / STEPS
    thresholds = torch.maximum(-low, high).double() * torch.exp2(-halvings)
    scales = (thresholds / _largest_code(bits)).to(weight.dtype)
    return scales.clamp(min=torch.finfo(weight.dtype).tiny)  # above zero for a table of zeros


def squared_errors(weight: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """Return Σ (w - s q)² for each scale `(G,)`, in float64.

    The integer of |w| is the number of edges s (k - 1/2), k = 1 .. L, below it. With sorted weights the sums over all
    of them become sums over edges, for any number of weights:

        Σ |w| q = Σ_k Σ_{|w| > edge k} |w|        Σ q² = Σ_k (2k - 1) · (how many |w| > edge k)
    """
    scales = scales.double()
    steps = torch.arange(1, _largest_code(bits) + 1, device=weight.device)
    edges = scales.unsqueeze(-1) * (steps - 0.5)  # (G, L)
    squares, products, codes = (torch.zeros_like(scales) for _ in range(3))
    for chunk in weight.detach().reshape(-1).split(NUMBERS):
        sizes = chunk.double().abs().sort().values
        sums = F.pad(sizes.cumsum(0), (1, 0))
        below = torch.searchsorted(sizes, edges)  # (G, L)
        squares += sizes.square().sum()
        products += (sums[-1] - sums[below]).sum(dim=-1)
        codes += ((2 * steps - 1) * (len(sizes) - below)).sum(dim=-1)
    return squares - 2 * scales * products + scales.square() * codes


def round_to_codes(weight: Tensor, scale: Tensor, bits: Bits) -> Tensor:
    """Return clamp(round(w / s), -L, L) as int8."""
    most = _largest_code(bits)
    return (weight.double() / scale.double()).round_().clamp_(-most, most).to(torch.int8)


def pack(codes: Tensor) -> Tensor:
    """Return two codes of 4 bits per byte, `(N, D)` to `(N, ceil(D / 2))`: one of each half of a row."""
    kept = F.pad(codes, (0, codes.shape[1] % 2)) + ZERO_CODE
    low, high = kept.to(torch.uint8).chunk(2, dim=1)
    return low | (high << HALF_BYTE)


def unpack(packed: Tensor, width: int) -> Tensor:
    """Return the codes of 4 bits, `(..., ceil(D / 2))` to `(..., D)`."""
    if torch.compiler.is_compiling():  # bits have no form in ONNX
        numbers = packed.int()
        low, high = numbers % 16, numbers // 16
    else:
        low, high = packed & 0xF, packed >> HALF_BYTE
    both = torch.cat([low, high], dim=-1)
    return both[..., :width].to(torch.int8) - ZERO_CODE


def _largest_code(bits: Bits) -> int:
    largest: int = 2 ** (bits - 1) - 1
    return largest
