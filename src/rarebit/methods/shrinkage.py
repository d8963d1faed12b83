"""Shrinkage: shrink the rows of rare ids toward a prior.

    e(i) = w_i v_i + (1 - w_i) p        w_i = n_i / (n_i + c)

    n_i    `ShrunkTable.evidence.counts`: how often training saw the id
    c      `ShrunkTable.evidence.strength`, one per table: for an id seen c times, w is 1/2
    v_i    `ShrunkTable.inner`, N x D
    p      `ShrunkTable.prior`: a learned row of the table that starts at zero; or none, which is zero

A row that training saw once is mostly noise, and a table that fits it overfits. If v_i were the mean of n_i observations
with variance σ² around a true row, and the true rows had variance τ² around p, the best estimate of the true row would be
e(i) with c = σ² / τ² (James and Stein). By default c is the median count of the table's ids. With c = 0 the table is the plain
one; an id never seen is p.

Merged, it is a plain table. Not for tables whose ids are all frequent: there w is close to one, and nothing changes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rarebit.errors import SettingsError
from rarebit.methods._counts import CountedMethod, CountedStack, CountedTable, Evidence
from rarebit.settings import check_number, require
from rarebit.tables.collection import Stack, is_traced
from rarebit.tables.counts import by_table_name
from rarebit.tables.table import AnyTable, Table, grow_table, is_trainable, plain_like
from rarebit.technique import Rank, Technique, technique_name

__all__ = ["Shrinkage", "ShrunkTable"]

Strength: TypeAlias = float | Mapping[str, float] | str
"""One c for all tables, one per table by name, or the name of a rule that finds one per table."""

RULES = ("typical", "rare", "auto")
PRIORS = ("mean", "zero")
REMOVED = {
    **dict.fromkeys(
        ("learned", "held-out", "first-pass", "hashed", "relatives"), "it lost its study"
    ),
    **dict.fromkeys(("estimated", "parent"), "no study used it"),
}
"""Forms of c and of the prior that earlier versions had, and why they are gone."""

MOST = 100.0
"""The largest c of the rule "rare"."""
START = 10.0
"""The c of a rule until counts are set."""


@dataclass(frozen=True, kw_only=True)
class Shrinkage(CountedMethod):
    """Shrink the rows of rare ids toward a prior: the fewer lookups in training, the more.

    >>> Shrinkage(counts={"user": torch.tensor([7, 0, 1])}, c=10)
    Shrinkage(c=10.0, prior='mean')
    """

    title: ClassVar[str] = "rows of rare ids shrunk toward a prior, by their counts"
    paper: ClassVar[str] = (
        "none: the James-Stein estimator of Efron and Morris, JASA 1973, for the rows of a table"
    )
    control: ClassVar[str] = "tuned"
    cost: ClassVar[str] = (
        "one more lookup per row and step, and a multiple of the prior; one more stored number per row until merged"
    )
    applies: ClassVar[str] = (
        "tables with many rare ids, which overfit them; not tables whose ids are all frequent"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "c": ("typical", 30.0, 3.0, 100.0),
        "prior": ("mean", "zero"),
    }
    composition_rank: ClassVar[Rank] = Rank.EVIDENCE

    c: Strength = "auto"
    """How often training must see an id to give its row half of the weight: a number; one per table, by name; or
    "typical", the median count of the table's ids, without those never seen; or "rare", the same but at most 100, so
    that the rows of a table whose ids are all frequent stay as they are. "auto" is "typical"."""
    prior: str = "mean"
    """What rows are shrunk toward: "mean", a learned row of the table that starts at zero; or "zero"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.c, str):
            _check_choice("c", self.c, RULES, also="a number, a number per table, ")
        else:
            given: list[object] = [*self.c.values()] if isinstance(self.c, Mapping) else [self.c]
            for c in given:
                check_number("c", c)
                if not isinstance(c, float | int) or isinstance(c, bool):
                    raise SettingsError(f"c must be a number for each table, got {c!r}")
                require(0 <= c < math.inf, f"c must be 0 or more and finite, got c={c}")
        _check_choice("prior", self.prior, PRIORS)

    def __hash__(self) -> int:
        c = frozenset(self.c.items()) if isinstance(self.c, Mapping) else self.c
        return hash((c, self.prior))

    def hint(self, techniques: Sequence[Technique]) -> str:
        """Warn that pruning may keep the prior and little else."""
        if self.prior == "zero" or not any(technique_name(t) == "pruned" for t in techniques):
            return ""
        return (
            "rows of rare ids are mostly the prior of shrinkage, and pruning may keep little else; use "
            "shrinkage:prior=zero"
        )

    def wrap(self, base: AnyTable) -> "ShrunkTable":
        """Return the table with its rows shrunk; counts by name need `apply_` on a model."""
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        c = self.c if isinstance(self.c, float) else START
        prior = None
        if self.prior == "mean":
            mean = next(base.parameters()).detach().new_zeros(base.embedding_dim)
            prior = FieldMean(nn.Parameter(mean, requires_grad=is_trainable(base)))
        # tables store the counts themselves, and what "auto" means today
        kept = replace(self, counts=None, c="typical" if self.c == "auto" else self.c)
        shrunk = ShrunkTable(kept, inner, Evidence.unknown(base, c), prior)
        self._set_own_counts_(shrunk)
        return shrunk

    def strength_of(self, name: str) -> float:
        """Return the c of a table."""
        if not isinstance(self.c, Mapping):
            return START if isinstance(self.c, str) else self.c
        found = by_table_name(name, self.c)
        if found is None:
            raise SettingsError(
                f"no c for {name!r}, only for {', '.join(self.c) or 'nothing'}; give one by the name of the "
                "table or of its field, or leave the table out with where="
            )
        return float(found)

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return shrunk tables behind one lookup of their rows and one of their counts."""
        return ShrunkStack(self, [t for t in tables if isinstance(t, ShrunkTable)], lengths)


class FieldMean(nn.Module):
    """The learned prior of a table, `(D,)`."""

    def __init__(self, mean: nn.Parameter) -> None:
        super().__init__()
        self.mean = mean


class FieldMeans(nn.Module):
    """The learned priors of F tables, `(F, D)`."""

    def __init__(self, priors: Sequence[FieldMean]) -> None:
        super().__init__()
        means = torch.stack([prior.mean.detach() for prior in priors])
        self.means = nn.Parameter(means, requires_grad=priors[0].mean.requires_grad)

    def split(self) -> list[FieldMean]:
        """Return the prior of each table; memory is shared, not copied."""
        trained = self.means.requires_grad
        return [FieldMean(nn.Parameter(row, requires_grad=trained)) for row in self.means.detach()]


class ShrunkTable(CountedTable):
    """A table whose rows are shrunk toward a prior."""

    def __init__(
        self, method: Shrinkage, inner: AnyTable, evidence: Evidence, prior: FieldMean | None
    ) -> None:
        super().__init__(method, inner, evidence)
        self.prior = prior  # p

    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place, and the c that comes from them."""
        super().set_counts_(counts)
        rule = self.method.c if isinstance(self.method, Shrinkage) else None
        if isinstance(rule, str):
            seen = counts[counts > 0]
            c = float(seen.median()) if seen.numel() else 1.0
            self.evidence.strength.fill_(min(c, MOST) if rule == "rare" else c)

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p."""
        ids = ids.long()
        prior = None if self.prior is None else self.prior.mean
        return mix(self.inner(ids), self.weights(ids), prior)

    def grown(self, start: Tensor) -> "ShrunkTable":
        """Return the table with more ids; their count is 0, so each of them *is* the prior until it is seen."""
        assert isinstance(self.method, Shrinkage)
        inner, evidence = grow_table(self.inner, start), self.evidence.grown(len(start))
        return ShrunkTable(self.method, inner, evidence, self.prior)


class ShrunkStack(CountedStack):
    """Shrunk tables behind one lookup of their rows and one of their counts."""

    method: Shrinkage

    def __init__(
        self, method: Shrinkage, tables: Sequence[ShrunkTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(method, tables, lengths)
        priors = [table.prior for table in tables if table.prior is not None]
        self.prior = FieldMeans(priors) if priors else None

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p_f of the rows of each field f."""
        # this is cheaper than finding the distinct rows first, unlike a product of factors
        prior = None if self.prior is None else F.embedding(self.field_of_slot, self.prior.means)
        return mix(self.inner(ids), self.weights(ids), prior)

    def split(self) -> list[AnyTable]:
        """Return the shrunk tables one by one."""
        inner = self.inner.split()
        priors = [None] * len(inner) if self.prior is None else self.prior.split()
        parts = zip(inner, self.evidence.split(self.sizes), priors, strict=True)
        return [ShrunkTable(self.method, *part) for part in parts]


def mix(own: Tensor, weights: Tensor, prior: Tensor | None) -> Tensor:
    """Return w v + (1 - w) p of rows `(..., D)`; with w = 1 exactly v, with w = 0 exactly p.

    Weights `(..., 1)` get no gradient; the prior has the last axes of the rows; None is zero.
    """
    if prior is None:
        return weights * own
    if is_traced(own):
        return torch.lerp(prior, own, weights)
    rows: Tensor = _Mix.apply(own, weights, prior)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


class _Mix(torch.autograd.Function):
    """p + w (v - p) with fewer temporary tensors of the batch's size: allocating them takes longer than the arithmetic."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weights: Tensor, prior: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.prior_shape = prior.shape
        return torch.lerp(prior, own, weights)  # starts from the nearer end, so both ends are exact

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (weights,) = ctx.saved_tensors
        of_prior = spare = None
        if ctx.needs_input_grad[2]:
            spare = (1 - weights) * gradient
            of_prior = spare.sum_to_size(ctx.prior_shape)
            spare = None if of_prior is spare else spare  # its memory serves both gradients
        return torch.mul(gradient, weights, out=spare), None, of_prior


def _check_choice(name: str, value: str, choices: Sequence[str], also: str = "") -> None:
    why = f"; {value!r} was removed: {REMOVED[value]}, see docs/tail.md" if value in REMOVED else ""
    require(
        value in choices,
        f"{name} must be {also}{' or '.join(map(repr, choices))}, got {value!r}{why}",
    )
