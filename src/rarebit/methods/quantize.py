"""Quantisation: a trained table as small integers and one scale (Krishnamoorthi, 2018).

    e(i) = s q_i        q_i = clamp(round(w_i / s), -L, L)        L = 2^(b-1) - 1

    b    `Quantize.bits`
    s    `QuantizedTable.scale`, one number a table
    q    `QuantizedTable.codes`, N x D: a byte each, or two to a byte for 4 bits
    w    the rows of the table as it was trained; they are not kept

The scale is the one with the least error Σ (w - s q)² of all s = T / L whose clipping threshold T is in

    T_j = max|w| · 2^(-j/32)        j = 0 .. 255

that is, from no clipping down to a 256th of the largest weight in steps of 2 %. A smaller threshold cuts
off the largest weights and rounds all others more finely.

A lookup reads the integers of its ids and multiplies; the whole table is never made of floats again, save
by `merge`. Integers have no gradient: the table is frozen, and what comes before it in the list of methods
is folded first. Not for tables that are still to be trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import UnsupportedTableError
from rarebit.settings import check_types
from rarebit.tables.stack import Stack, take_rows
from rarebit.tables.table import CHUNK, AnyTable, Method, Table, full_table, methods_of
from rarebit.technique import Rank

__all__ = [
    "Bits",
    "Origin",
    "Quantize",
    "QuantizedStack",
    "QuantizedTable",
    "best_scale",
    "grid_of_scales",
    "pack",
    "round_to_codes",
    "squared_errors",
    "unpack",
]

Bits = Literal[8, 4]

OCTAVES, STEPS = 8, 32
"""The grid of thresholds: how often the largest is halved, and steps to each halving."""
NUMBERS = 1 << 18
"""Weights that the search sorts at once."""
HALF_BYTE, ZERO_CODE = 4, 8
"""Two codes of 4 bits are kept as numbers from 1 to 15 in one byte; 8 stands for zero."""

FOLDED = "the table is folded first, and its rows are quantised"
LAST = "small integers are not changed any more; merge first, or quantise last: "


@dataclass(frozen=True, kw_only=True)
class Quantize(Method):
    """Keep a trained table as integers of so many bits and one scale.

    >>> Quantize(bits=4)
    Quantize(bits=4)
    """

    title: ClassVar[str] = "a trained table as small integers and one scale"
    paper: ClassVar[str] = (
        "Krishnamoorthi, Quantizing deep convolutional networks for efficient inference: A whitepaper, "
        "arXiv 1806.08342"
    )
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a lookup takes one product more for each row; a table of N rows and width D takes N x D bytes, "
        "or half of that with 4 bits, instead of 4 x N x D; finding the scale sorts the table once"
    )
    applies: ClassVar[str] = (
        "trained tables that are only looked up from now on; not tables that training goes on with, for "
        "it leaves integers as they are"
    )
    composition_rank: ClassVar[Rank] = Rank.QUANTISATION

    bits: Bits = 8
    """Bits of an integer, 8 or 4."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def after_training(self) -> bool:
        """Integers are not trained."""
        return True

    @property
    def largest_code(self) -> int:
        """The largest integer; the smallest is its negative."""
        return _largest_code(self.bits)

    def wrap(self, base: AnyTable) -> "QuantizedTable":
        """Return the rows of `base` as integers; whatever it wraps is folded in."""
        weight = _folded(base)
        if not bool(torch.stack(torch.aminmax(weight)).isfinite().all()):
            raise UnsupportedTableError(
                f"{self} needs weights that are finite, and a table of {base.num_embeddings:,} x "
                f"{base.embedding_dim} has others; go back to weights from before training diverged"
            )
        scale = best_scale(weight, self.bits)
        chunks = [round_to_codes(chunk, scale, self.bits) for chunk in weight.split(CHUNK)]
        codes = torch.cat([pack(chunk) if self.bits == HALF_BYTE else chunk for chunk in chunks])
        origin = Origin(base.embedding_dim, base.padding_idx, base.sparse, methods_of(base))
        return QuantizedTable(self, codes, scale, origin)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return quantised tables behind one lookup of integers."""
        quantised = [table for table in tables if isinstance(table, QuantizedTable)]
        return QuantizedStack(self, quantised, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table without rows has no largest weight to take a scale from."""
        return None if rows and width else "it has no weights"

    def look_up(self, codes: Tensor, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the integers of these ids as floats, `(...)` to `(..., D)`."""
        found = take_rows(codes, ids.long())
        return (unpack(found, width) if self.bits == HALF_BYTE else found).to(dtype)


@dataclass(frozen=True)
class Origin:
    """What a quantised table keeps of the table it was made from, besides its rows."""

    width: int
    padding: int | None
    sparse: bool
    """Whether it had sparse gradients: merged, it has them again."""
    methods: tuple[Method, ...]
    """The methods that were folded."""


class QuantizedTable(Table):
    """A table of small integers with one scale; it is not trained."""

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
        """Whether a plain table made of this one gets sparse gradients."""
        return self.origin.sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that were applied, those among them that were folded."""
        return (*self.origin.methods, self.method)

    @property
    def num_weights(self) -> int:
        """The integers, two of which may share a byte, and the scale."""
        return self.num_embeddings * self.embedding_dim + 1


class QuantizedStack(Stack):
    """Quantised tables behind one lookup of integers, with a scale a field."""

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
        """Return the quantised tables one by one; integers are shared with the stack, not copied."""
        parts = zip(self.codes.split(self.sizes), self.scales, self.origins, strict=True)
        return [QuantizedTable(self.method, *part) for part in parts]


def best_scale(weight: Tensor, bits: Bits) -> Tensor:
    """Return the scale of the grid with the least squared error; of equal ones, the largest.

    >>> best_scale(torch.tensor([[-127.0, 0.0, 64.0]]), 8)
    tensor(1.)
    """
    scales = grid_of_scales(weight, bits)
    return scales[squared_errors(weight, scales, bits).argmin()].clone()


def grid_of_scales(weight: Tensor, bits: Bits) -> Tensor:
    """Return the scales that are tried, `(256,)`, in the precision of the table, largest first.

    >>> grid_of_scales(torch.tensor([[-7.0, 3.5]]), 4)[:2]
    tensor([1.0000, 0.9786])
    """
    low, high = torch.aminmax(weight.detach())
    halvings = torch.arange(OCTAVES * STEPS, dtype=torch.float64, device=weight.device) / STEPS
    thresholds = torch.maximum(-low, high).double() * torch.exp2(-halvings)
    scales = (thresholds / _largest_code(bits)).to(weight.dtype)
    return scales.clamp(min=torch.finfo(weight.dtype).tiny)  # of a table of zeros, too


def squared_errors(weight: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """Return Σ (w - s q)² for each scale `(G,)`, in float64.

    The integer of |w| is the number of edges s (k - 1/2), k = 1 .. L, below it. Once the weights are
    sorted, the sums over all of them are sums over edges, whatever the number of weights:

        Σ |w| q = Σ_k Σ_{|w| > edge k} |w|        Σ q² = Σ_k (2k - 1) · (how many |w| > edge k)

    >>> squared_errors(torch.tensor([[1.0, 0.4]]), torch.tensor([1.0, 0.5]), 8)
    tensor([0.1600, 0.0100], dtype=torch.float64)
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
    """Return clamp(round(w / s), -L, L) as int8.

    >>> round_to_codes(torch.tensor([[0.9, -3.2, 20.0]]), torch.tensor(1.0), 4)
    tensor([[ 1, -3,  7]], dtype=torch.int8)
    """
    most = _largest_code(bits)
    return (weight.double() / scale.double()).round_().clamp_(-most, most).to(torch.int8)


def pack(codes: Tensor) -> Tensor:
    """Return codes of 4 bits two to a byte, `(N, D)` to `(N, ceil(D / 2))`: one of each half of a row.

    >>> pack(torch.tensor([[1, -2, 3]], dtype=torch.int8))
    tensor([[185, 134]], dtype=torch.uint8)
    """
    kept = F.pad(codes, (0, codes.shape[1] % 2)) + ZERO_CODE
    low, high = kept.to(torch.uint8).chunk(2, dim=1)
    return low | (high << HALF_BYTE)


def unpack(packed: Tensor, width: int) -> Tensor:
    """Return the codes of 4 bits, `(..., ceil(D / 2))` to `(..., D)`.

    >>> unpack(torch.tensor([[185, 134]], dtype=torch.uint8), width=3)
    tensor([[ 1, -2,  3]], dtype=torch.int8)
    """
    both = torch.cat([packed & 0xF, packed >> HALF_BYTE], dim=-1)
    return both[..., :width].to(torch.int8) - ZERO_CODE


def _largest_code(bits: Bits) -> int:
    largest: int = 2 ** (bits - 1) - 1
    return largest


def _folded(base: AnyTable) -> Tensor:
    """Return the rows of a table as merging would leave them, the padding row zero."""
    weight = full_table(base if isinstance(base, nn.Embedding) else base.merge())
    if base.padding_idx is None or not bool(weight[base.padding_idx].any()):
        return weight
    return weight.index_fill(0, torch.tensor([base.padding_idx], device=weight.device), 0.0)
