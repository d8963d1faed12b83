"""MPE: bits by groups of frequency, which training searches (Li et al., 2024).

    Mixed-Precision Embeddings for Large-Scale Recommendation Models, https://arxiv.org/abs/2409.20305

    e(i) = Q_b(w_i)                       b = b_g, g the group of id i
    e(i) = Σ_b y_b Q_b(w_i)               y = softmax_b(gamma_g / τ), while bits are searched
    Q_b(w) = β + a_b (floor(clamp((w - β) / a_b)) + 1/2)        between -2^(b-1) and 2^(b-1), straight-through; Q_0(w) = β

    g      ids in order of frequency, `MPE.group` per group
    b_g    `PrecisionTable.precision`, 0 to 6 bits
    gamma      `SearchTable.logits`, G x 7; τ is `TAU`
    a, β   exp(`steps`) times the start, one per number of bits, and `bias`, one per column; both are learned
    w      `PrecisionTable.inner`, N x D; only training has it

A run trains for `MPE.search` epochs to find gamma, picks the bits of each group, and trains again from the start with these. Applied to a
table without a run, groups of frequent ids have one bit more than the others, and `bits` in the mean.

It is the nearest relative of evidence coding, which has the same idea. What differs: evidence coding takes a trained model and trains nothing;
its bits follow from counts and variances by a formula, not by a search; they differ by direction of a row as well, by how much the loss
feels it; and steps and means belong to a class of rows, not to the table.

Not to save memory in training, nor for ids that are in another order than that of their counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.codes.packed import TakesParts, pack_bits
from rarebit.methods.evidence_coding import STEP
from rarebit.research._compressors import Compressor, StandaloneTable, within
from rarebit.settings import check_types, require
from rarebit.tables.table import (
    AnyTable,
    Table,
    full_table,
    is_trainable,
    plain_like,
    row_chunks,
)

if TYPE_CHECKING:
    from rarebit.training.run import Trained, TrainingJob

__all__ = ["MPE", "PrecisionCodes", "PrecisionTable", "SearchTable"]

MOST = 6
"""The most bits of a number."""
TAU = 0.01
"""τ: how far apart logits are."""
FRACTIONS = 16
"""A size is found in steps of so many parts of a bit."""


@dataclass(frozen=True, kw_only=True)
class MPE(Compressor):
    """Give each group of ids as many bits per number as a search finds worth their bytes.

    >>> MPE(bits=2.0)
    MPE(bits=2.0, group=128, search=1, stage='settled')
    """

    title: ClassVar[str] = "bits by groups of frequency, which training searches"
    paper: ClassVar[str] = (
        "Li et al., Mixed-Precision Embeddings for Large-Scale Recommendation Models, arXiv 2409.20305"
    )
    cost: ClassVar[str] = (
        "a run trains twice; training has the whole table, inference a few bits per number"
    )
    applies: ClassVar[str] = (
        "as a control for small tables at inference; ids must be numbered from the most frequent one on"
    )
    training_only: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        **Compressor.excludes,
        "hashing": "it groups ids by their frequency, and buckets are in no such order; use one of them",
        "masked": "it stores integers of its own for all entries; use one of them",
    }

    bits: float
    """Bits of a number, the mean over all."""
    group: int = 128
    """Ids of a group."""
    search: int = 1
    """Epochs in which a run searches."""
    stage: Literal["search", "settled", "frozen"] = "settled"
    """"search": all numbers of bits at once, mixed. "settled": each group has its bits. "frozen": only integers are left."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.bits <= MOST, f"bits must be above 0 and at most {MOST}, got {self.bits}")
        for name in ("group", "search"):
            number = getattr(self, name)
            require(number >= 1, f"{name} must be at least 1, got {name}={number}")

    @property
    def after_training(self) -> bool:
        """Integers have no gradient."""
        return self.stage == "frozen"

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the most bits that keep at most this share of the bytes at inference.

        >>> MPE.for_share([(100_000, 16), (50, 16)], share=1 / 16).bits
        1.9375
        """
        sizes = range(1, MOST * FRACTIONS + 1)
        return cls.largest(lambda size: cls(bits=size / FRACTIONS), sizes, shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the bytes of a table, in weights of four bytes."""
        precision = self.even(rows)
        codes = int(self.sizes(rows) @ bytes_of_row(width)[precision])
        return -(-(codes + len(precision)) // 4) + MOST + width

    def sizes(self, rows: int) -> Tensor:
        """Return the number of ids of each group, `(G,)`."""
        starts = torch.arange(0, rows, self.group)
        return (rows - starts).clamp(max=self.group)

    def even(self, rows: int) -> Tensor:
        """Return the bits of each group that are as even as they can be, the first groups with the most, `(G,)`."""
        groups, whole = -(-rows // self.group), int(self.bits)
        more = int((self.bits - whole) * groups)
        return whole + (torch.arange(groups) < more).long()

    def wrap(self, base: AnyTable) -> Table:
        """Return a table with the rows of `base`, in the stage of the method."""
        weight = full_table(
            base if self.stage != "frozen" or isinstance(base, nn.Embedding) else base.merge()
        )
        inner = plain_like(base, weight.clone(), padding_idx=base.padding_idx)
        kind = SearchTable if self.stage == "search" else PrecisionTable
        table = kind(replace(self, stage="settled") if self.stage == "frozen" else self, inner)
        table.requires_grad_(requires_grad=is_trainable(base))
        return (
            table.coded() if isinstance(table, PrecisionTable) and self.stage == "frozen" else table
        )

    def serve(self, table: Table) -> AnyTable:
        """Return the table with its integers."""
        return table.coded() if isinstance(table, PrecisionTable) else table.merge()

    def drive(self, job: "TrainingJob") -> "Trained | None":
        """Search, pick the bits of all groups, and train from the start with these."""
        if self.stage != "settled":
            return None
        first = [
            replace(self, stage="search") if one is self else one for one in job.settings.methods
        ]
        model = job.start(first)
        training = replace(job.settings.training, epochs=self.search, patience=None)
        job.fit(model, first, training=training, resume=False)
        searched = [table for table in model.modules() if isinstance(table, SearchTable)]
        found = self.pick(searched)
        model = job.start(job.settings.methods)
        settled = [table for table in model.modules() if isinstance(table, PrecisionTable)]
        for table, precision in zip(settled, found, strict=True):
            table.precision.copy_(precision)
        return job.fit(model, job.settings.methods, folder=job.folder)

    def pick(self, tables: Sequence["SearchTable"]) -> list[Tensor]:
        """Return the bits of the groups of each table: the likeliest ones at the lowest price of a byte that meets the size."""
        # NOTE[DIFF]: the paper has the expected bits in the loss, with a weight that is tried for each size; here the size is
        # given, and its price comes afterwards
        likely, costs, most = [], [], 0
        for table in tables:
            rows, width = table.num_embeddings, table.embedding_dim
            likely.append((table.logits.detach().cpu().double() / TAU).log_softmax(-1))
            costs.append(self.sizes(rows).unsqueeze(1) * bytes_of_row(width).double())
            most += int(self.sizes(rows) @ bytes_of_row(width)[self.even(rows)])
        best = within(torch.cat(likely), torch.cat(costs), most)
        return list(best.split([len(part) for part in likely]))


def bytes_of_row(width: int) -> Tensor:
    """Return the bytes of a row of 0 to 6 bits per number, `(7,)`."""
    return (torch.arange(MOST + 1) * width + 7) // 8


class _Quantized(Table):
    """A table with steps and a bias, a and β."""

    start: Tensor

    def __init__(self, method: MPE, inner: AnyTable) -> None:
        super().__init__(method, inner)
        weight = full_table(inner)
        self.mpe, width = method, weight.shape[1]
        self.steps = nn.Parameter(weight.new_zeros(MOST))
        self.bias = nn.Parameter(weight.new_zeros(width))  # β
        spread = weight.detach().double().square().mean().sqrt().clamp(min=1e-8)
        start = spread * torch.tensor(STEP[1 : MOST + 1], dtype=spread.dtype, device=spread.device)
        self.register_buffer("start", start.to(weight.dtype))

    @property
    def num_weights(self) -> int:
        """What is trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def alpha(self) -> Tensor:
        """a of 1 to 6 bits."""
        return self.start * self.steps.exp()

    def alpha_of(self, bits: Tensor) -> Tensor:
        """Return a of so many bits; anything for none."""
        # not by indexing: its backward adds in any order
        return F.embedding((bits - 1).clamp(min=0), self.alpha.unsqueeze(1)).squeeze(-1)

    def integers(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Return floor(clamp((w - β) / a)) of rows `(..., D)` with so many bits `(...)`, as floats with a gradient."""
        bits = bits.unsqueeze(-1)
        half = 2.0 ** (bits.to(rows.dtype) - 1)
        scaled = (rows - self.bias) / self.alpha_of(bits)
        scaled = torch.maximum(torch.minimum(scaled, half), -half)
        return scaled + (torch.minimum(scaled.floor(), half - 1) - scaled).detach()

    def values(self, integers: Tensor, bits: Tensor) -> Tensor:
        """Return β + a (integer + 1/2)."""
        bits = bits.unsqueeze(-1)
        return self.bias + (bits > 0) * self.alpha_of(bits) * (integers + 0.5)


class SearchTable(_Quantized):
    """A table whose rows are mixtures over all numbers of bits."""

    def __init__(self, method: MPE, inner: AnyTable) -> None:
        super().__init__(method, inner)
        groups = len(method.sizes(inner.num_embeddings))
        self.logits = nn.Parameter(self.bias.new_zeros(groups, MOST + 1))  # gamma

    def rows(self, ids: Tensor) -> Tensor:
        """Return Σ_b y_b Q_b(w_i)."""
        shares = (F.embedding(ids // self.mpe.group, self.logits) / TAU).softmax(-1)  # (..., 7)
        stored = self.inner(ids).unsqueeze(-2)
        bits = torch.arange(MOST + 1, device=ids.device)
        mixed = self.values(self.integers(stored, bits), bits)  # (..., 7, D)
        return (shares.unsqueeze(-1) * mixed).sum(-2)


class PrecisionTable(_Quantized):
    """A table whose rows have the bits of their group."""

    precision: Tensor

    def __init__(self, method: MPE, inner: AnyTable) -> None:
        super().__init__(method, inner)
        even = method.even(inner.num_embeddings).to(self.bias.device)
        self.register_buffer("precision", even)  # b_g

    def rows(self, ids: Tensor) -> Tensor:
        """Return Q_b(w_i)."""
        bits = self.precision[ids // self.mpe.group]
        return self.values(self.integers(self.inner(ids), bits), bits)

    @torch.no_grad()
    def coded(self) -> "PrecisionCodes":
        """Return the table with its integers for good."""
        bits = self.precision.repeat_interleave(self.mpe.group)[: self.num_embeddings]
        parts, first = [], 0
        for chunk in row_chunks(self.inner):
            own = bits[first : first + len(chunk)]
            half = 2.0 ** (own.unsqueeze(-1).to(chunk.dtype) - 1)
            numbers = (self.integers(chunk, own) + half).to(torch.uint8)
            packed = numbers.new_zeros(len(chunk), int(bytes_of_row(self.embedding_dim)[-1]))
            for number in range(1, MOST + 1):
                mine = own == number
                shifts = torch.arange(number, dtype=torch.uint8, device=own.device)
                each = ((numbers[mine].unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
                found = pack_bits(each)
                packed[mine, : found.shape[1]] = found
            lengths = bytes_of_row(self.embedding_dim).to(own.device)[own]
            used = torch.arange(packed.shape[1], device=own.device) < lengths.unsqueeze(1)
            parts.append(packed[used])
            first += len(chunk)
        return PrecisionCodes(self, torch.cat(parts))


class PrecisionCodes(TakesParts, StandaloneTable):
    """A frozen table of integers, as many bits each as their group has."""

    codes: Tensor
    precision: Tensor
    alpha: Tensor
    bias: Tensor
    first: Tensor
    """Where the integers of each group begin; counted, never stored."""

    def __init__(self, source: PrecisionTable, codes: Tensor) -> None:
        method = replace(source.mpe, stage="frozen")
        super().__init__(method, source)
        self.mpe = method
        self.register_buffer("codes", codes)
        self.register_buffer("precision", source.precision.to(torch.uint8))
        self.register_buffer("alpha", source.alpha.detach().clone())
        self.register_buffer("bias", source.bias.detach().clone())
        self.register_buffer("first", torch.zeros(0, dtype=torch.int64), persistent=False)
        self._count()

    def _count(self) -> None:
        sizes = self.mpe.sizes(self.num_embeddings)
        lengths = sizes * bytes_of_row(self.embedding_dim)[self.precision.long().cpu()]
        if int(self.precision.max()) > MOST or int(lengths.sum()) != len(self.codes):
            raise ValueError(f"{len(self.codes)} bytes are not those of its groups")
        self.first = (lengths.cumsum(0) - lengths).to(self.codes.device)

    def take(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take over the tensors of a file; or return what is wrong with them."""
        for name in ("codes", "precision", "alpha", "bias"):
            own = getattr(self, name)
            found = tensors.get(name)
            if (
                found is None
                or (name != "codes" and found.shape != own.shape)
                or found.dim() != own.dim()
            ):
                return f"{name} is missing or has another shape"
            setattr(self, name, found.detach().to(own.device, own.dtype, copy=True))
        try:
            self._count()
        except (IndexError, ValueError) as error:
            return str(error)
        return None

    def rows(self, ids: Tensor) -> Tensor:
        """Return β + a (q - 2^(b - 1) + 1/2)."""
        group = ids.long() // self.mpe.group
        bits = self.precision[group].long().unsqueeze(-1)  # (..., 1)
        inside = (ids - group * self.mpe.group).unsqueeze(-1)
        row = self.first[group].unsqueeze(-1) + inside * ((bits * self.embedding_dim + 7) // 8)
        place = 8 * row + bits * torch.arange(self.embedding_dim, device=ids.device)  # (..., D)
        if not len(self.codes):  # no group has bits
            return self.bias.expand(*ids.shape, -1)
        last = len(self.codes) - 1
        byte, shift = (place // 8).clamp(max=last), place % 8
        pair = self.codes[byte].long() + 256 * self.codes[(byte + 1).clamp(max=last)].long()
        number = ((pair >> shift) & ((1 << bits) - 1)).to(self.bias.dtype)
        half = 2.0 ** (bits.to(self.bias.dtype) - 1)
        return self.bias + (bits > 0) * self.alpha[(bits - 1).clamp(min=0)] * (number - half + 0.5)

    @property
    def num_weights(self) -> int:
        """The integers, however few bits they have, steps and bias."""
        return self.num_embeddings * self.embedding_dim + MOST + self.embedding_dim
