"""MLET: train a table as a wide factor times a small one (Deng et al., ACML 2023).

    W = W1 W2        e(i) = W1 (W2 q_i)        k > D

    k      `MLET.inner_dim`
    W2ᵀ    `FactorizedTable.inner`, N x k: Xavier, per table
    W1ᵀ    `FactorizedTable.projection`, k x D: N(0, std²)
    q_i    1 at id i, else 0: a lookup

With G the gradient of W and η the learning rate, a step of SGD on both factors moves the table by

    W(t+1) - W(t) = (W1 - η G W2ᵀ)(W2 - η W1ᵀ G) - W1 W2                                        (3)
                  ≈ -η (W1 W1ᵀ G + G W2ᵀ W2)                                                    (2)
                  = -η Σ_ij (sigma1_i² + sigma2_j²) g_ij u_i v_jᵀ                               (7)

    sigma1_i, u_i    singular values and left vectors of W1, i up to D
    sigma2_j, v_j    singular values and right vectors of W2, j up to N
    g_ij             u_iᵀ G v_j: what plain training would do in this direction

so training is faster in directions where the factors are long, and W1 carries what one id learns to all others. (7) holds
for small steps of SGD; Adam and Adagrad follow the factors' gradients. A step touches only the looked-up rows of the wide
factor, and only `merge` forms the product.

Under SGD the step of a table is multiplied by about k std², so compare MLET with plain tables at such a learning rate before
you call it better. Not for tables that must be small during training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import warn
from rarebit.machine import require_memory
from rarebit.settings import check_types, require
from rarebit.tables.collection import (
    PlainStack,
    Stack,
    find_distinct,
    gather,
    has_fixed_sizes,
    stack_tables,
)
from rarebit.tables.table import (
    CHUNK,
    AnyTable,
    Method,
    Table,
    full_table,
    grow_table,
    is_trainable,
    plain_like,
)
from rarebit.technique import Rank, Technique, technique_from_mapping

__all__ = ["MLET"]


@dataclass(frozen=True, kw_only=True)
class MLET(Method):
    """Train a table as a product of inner width `inner_dim`, and merge it to a table of the same size.

    The paper's settings: inner_dim=64 with std=0.25 for DLRM and std=0.5 for all other models.

    >>> MLET(std=0.5)
    MLET(inner_dim=64, std=0.5, init='fresh')
    """

    title: ClassVar[str] = "a table trained as a product of two factors, inner width above its own"
    paper: ClassVar[str] = (
        "Deng et al., Enhancing Cross-Category Learning in Recommendation Systems with Multi-Layer "
        "Embedding Training, ACML 2023"
    )
    control: ClassVar[str] = "matched-rate"
    cost: ClassVar[str] = (
        "a step looks up rows of inner_dim numbers and computes one small product per row; until it is "
        "merged, a table and its optimizer state are inner_dim / D times as large"
    )
    applies: ClassVar[str] = (
        "tables with rare ids, which also learn from other ids; not where tables fill the memory in training"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {"std": (0.5, 0.25, 0.125)}
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.FACTORS

    inner_dim: int = 64
    """Width of the trained rows; above the table's width."""
    std: float = 0.25
    """Standard deviation of the projection: if too small, training learns nothing; if too large, it diverges."""
    init: Literal["fresh", "keep"] = "fresh"
    """"fresh": new factors, as in the paper. "keep": factors whose product is the given table."""

    def __post_init__(self) -> None:
        check_types(self)
        dim, std = self.inner_dim, self.std
        require(dim >= 1, f"inner_dim must be at least 1, got inner_dim={dim}")
        require(0 < std < math.inf, f"std must be more than 0 and finite, got std={std}")

    @property
    def rate_under_sgd(self) -> float:
        """E[W1 W1ᵀ] = k std² I: the first part of (2) is a step that many times as long."""
        return self.inner_dim * self.std**2

    @property
    def same_start(self) -> Technique | None:
        """A plain table that starts at the product of the fresh factors."""
        if self.init != "fresh":
            return None
        values = {"method": "product-start", "inner_dim": self.inner_dim, "std": self.std}
        return technique_from_mapping(values)

    def wrap(self, base: AnyTable) -> "FactorizedTable":
        """Return a product of two factors; with init="keep" it is the table `base`."""
        width = base.embedding_dim
        if self.inner_dim < width:
            warn(
                f"MLET with inner_dim={self.inner_dim} on a table of width {width}: an inner width below the "
                "table's gives some directions of the update the factor zero, so training never learns them; "
                f"use an inner_dim above {width}"
            )
        factors = fresh_factors if self.init == "fresh" else _keeping_factors
        wide, projection = factors(base, self.inner_dim, self.std)
        right = nn.Parameter(projection, requires_grad=is_trainable(base))
        return FactorizedTable(self, plain_like(base, wide, padding_idx=base.padding_idx), right)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return factorized tables behind one lookup and one batched product."""
        return FactorizedStack(self, tables, lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """Factors that are narrower than a table cannot reproduce it."""
        del rows
        lost = self.init == "keep" and self.inner_dim < width
        return f"wider than inner_dim {self.inner_dim}, which could not keep it" if lost else None


class FactorizedTable(Table):
    """A table as the product of a long factor, wider than it, and a small one."""

    def __init__(self, method: MLET, inner: AnyTable, projection: nn.Parameter) -> None:
        super().__init__(method, inner, embedding_dim=projection.shape[1])
        self.projection = projection  # W1ᵀ

    def rows(self, ids: Tensor) -> Tensor:
        """Return W1 (W2 q_i)."""
        rows: Tensor = self.inner(ids) @ self.projection
        return rows

    def grown(self, start: Tensor) -> "FactorizedTable":
        """Return the table with more ids, whose wide rows are the shortest with this product."""
        assert isinstance(self.method, MLET)
        wide = start.double() @ torch.linalg.pinv(self.projection.detach().double())
        return FactorizedTable(self.method, grow_table(self.inner, wide), self.projection)

    def factors(self) -> tuple[AnyTable, Tensor]:
        """Return the wide table, W2ᵀ, and the projection, W1ᵀ: what `diagnose` measures."""
        return self.inner, self.projection

    def merge(self) -> nn.Embedding:
        """Return the product as a plain table, rounded once."""
        weight = fold(full_table(self.inner), self.projection)
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0.0
        return plain_like(self, weight, padding_idx=self.padding_idx)


class FactorizedStack(Stack):
    """Factorized tables behind one lookup and one batched product."""

    def __init__(self, method: MLET, tables: Sequence[Table], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.method = method
        self.inner = stack_tables([table.inner for table in tables], lengths)
        factors = [table.projection for table in tables if isinstance(table, FactorizedTable)]
        stacked = torch.stack([factor.detach() for factor in factors])  # (F, k, D)
        self.projection = nn.Parameter(stacked, requires_grad=factors[0].requires_grad)

    def rows(self, ids: Tensor) -> Tensor:
        """Return W1_f (W2_f q_i) for each field f."""
        inner = self.inner
        if has_fixed_sizes(ids) or not isinstance(inner, PlainStack):
            wide = inner(ids)  # (..., S, k)
            return torch.einsum("...sk,skd->...sd", wide, self.projection[self.field_of_slot])
        # Read and multiply each distinct row once: on the CPU wide rows dominate the time of a step, and a batch of
        # 4096 rows of a click log looks each one up eight times.
        found = find_distinct((ids + inner.offsets).reshape(-1))
        # distinct ids are sorted, so they come field by field
        ends = torch.searchsorted(found.ids, found.ids.new_tensor([*accumulate(inner.sizes)]))
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        wide = gather(inner.embedding, found.ids, inner.gradient_memory)  # (U, k)
        parts = zip(wide.split(counts), self.projection, strict=True)
        rows = torch.cat([part @ factor for part, factor in parts])  # (U, D)
        return F.embedding(found.slot_of, rows).view(*ids.shape, rows.shape[1])

    def split(self) -> list[AnyTable]:
        """Return the factorized tables one by one."""
        trained = self.projection.requires_grad
        factors = [nn.Parameter(f, requires_grad=trained) for f in self.projection.detach()]
        parts = zip(self.inner.split(), factors, strict=True)
        return [FactorizedTable(self.method, *part) for part in parts]


def fresh_factors(base: AnyTable, inner_dim: int, std: float) -> tuple[Tensor, Tensor]:
    """Return new factors for a table, `(N, k)` and `(k, D)`; only its shape and padding matter."""
    rows, width = base.num_embeddings, base.embedding_dim
    like = next(base.parameters())
    require_memory(
        (rows + width) * inner_dim * like.itemsize,
        f"a table of {rows:,} rows as a product of inner_dim={inner_dim:,}",
        "use a smaller inner_dim, or leave the table out with where=",
        like.device,
    )
    bound = math.sqrt(6.0 / (rows + inner_dim))
    wide = torch.empty(rows, inner_dim, dtype=like.dtype, device=like.device)
    wide.uniform_(-bound, bound)
    projection = torch.empty(inner_dim, width, dtype=like.dtype, device=like.device)
    projection.normal_(0.0, std)
    if base.padding_idx is not None:
        wide[base.padding_idx] = 0.0
    return wide, projection


def fold(wide: Tensor, projection: Tensor) -> Tensor:
    """Return the product of two factors, computed in float64 and rounded once, `(N, D)`."""
    small = projection.detach().double()
    chunks = wide.detach().split(CHUNK)
    return torch.cat([(rows.double() @ small).to(wide.dtype) for rows in chunks])


def _keeping_factors(base: AnyTable, inner_dim: int, std: float) -> tuple[Tensor, Tensor]:
    """Return factors whose product is the table, `(N, k)` and `(k, D)`.

        W1ᵀ = s Q        W2ᵀ = W Qᵀ / s + F (I - Q Qᵀ)        s = std sqrt(k),  Qᵀ Q = I

    Q is a random Gaussian matrix made orthogonal, so W1 is as long as a fresh one for any table: with the table's singular
    values on both sides, tables of small weights would not learn and others would diverge. F is a fresh wide factor: its
    part outside of Q does not change the product, and gives every direction of the inner width a gradient from the
    first step on.
    """
    wide, projection = fresh_factors(base, inner_dim, std)
    basis = torch.linalg.qr(projection.double()).Q  # (k, D)
    length = std * math.sqrt(inner_dim)
    weight = full_table(base)
    # a part much longer than the table would add its rounding error to the table
    longest = _root_mean_square(weight) / length
    shrink = min(1.0, float(longest / _root_mean_square(wide).clamp(min=1e-300)))
    for rows, given in zip(wide.split(CHUNK), weight.split(CHUNK), strict=True):
        fresh = shrink * rows.double()
        kept = given.double() / length - fresh @ basis  # (n, D)
        rows.copy_(fresh + kept @ basis.T)
    return wide, (length * basis).to(projection.dtype)


def _root_mean_square(matrix: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return length / math.sqrt(max(matrix.numel(), 1))
