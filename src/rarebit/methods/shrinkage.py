"""Shrinkage: a row counts as much as its evidence, and the rest of it is a prior.

    e(i) = w_i v_i + (1 - w_i) p(i)        w_i = n_i / (n_i + c)

    n_i    `ShrunkTable.evidence.counts`: how often training saw the id
    c      `ShrunkTable.evidence.c`, one a table: an id seen c times is half its own row
    v_i    `ShrunkTable.inner`, N x D
    p(i)   `ShrunkTable.prior`: a learned row of the table, or zero

A row that was seen once is noise, and a table trained to fit it overfits. Were v_i the mean of n_i
observations with variance σ² around a true row, and the true rows spread with variance τ² around p, the
best guess of the true row would be e(i) with c = σ² / τ²: c="auto" estimates it from the rows and their
counts, whenever `estimate_c_` is called. With c = 0 the table is the plain one; an id never seen is p.

Merged, it is a plain table. Not for tables whose ids are all frequent: there w is one, and it does nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rarebit.errors import SettingsError
from rarebit.methods._shrinkage_counts import Counts, counts_of_all, counts_of_table, of_table
from rarebit.methods._shrinkage_parts import (
    CountedStack,
    CountedTable,
    Evidence,
    FieldMean,
    FieldMeans,
    Prior,
    counted_in,
    unknown_counts,
)
from rarebit.settings import check_types, require
from rarebit.tables.stack import Stack
from rarebit.tables.table import (
    AnyTable,
    Method,
    Pair,
    Table,
    is_trainable,
    plain_like,
    wrap,
)

__all__ = ["Shrinkage", "ShrunkStack", "ShrunkTable", "Strength"]

Strength: TypeAlias = float | Mapping[str, float] | Literal["learned", "auto"]
"""One c for all tables, one for each by name, one for each by gradient, or one for each as estimated."""

START = 10.0
"""Where a c that is learned or estimated starts."""

PRODUCT = "the rows of the product are shrunk, and both factors go on being trained"
SETS = "each set is drawn to a mean of its own, all by the same counts"
SETS_FIRST = (
    "the sets are drawn anew with the network behind them, so the evidence would be gone; give the model "
    "its sets first"
)
ZEROS = "the mean that rows are drawn to has no zeros where the table has; shrink first: "


@dataclass(frozen=True, kw_only=True)
class Shrinkage(Method):
    """Draw the rows of rare ids to a prior: a row counts as much as it was seen.

    >>> Shrinkage(counts={"user": torch.tensor([7, 0, 1])}, c=10)
    Shrinkage(c=10.0, prior='mean')
    """

    title: ClassVar[str] = "rows of rare ids drawn to a prior, by how often they were seen"
    paper: ClassVar[str] = (
        "none: the James-Stein estimator of Efron and Morris, JASA 1973, for the rows of a table"
    )
    control: ClassVar[str] = "baseline"
    cost: ClassVar[str] = (
        "a step looks up one number beside each row and adds a multiple of the prior; until it is merged, "
        "a table stores one number more a row"
    )
    applies: ClassVar[str] = (
        "tables with many rare ids, which overfit them; not where all ids are frequent, for there it does "
        "nothing"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "c": (30.0, 3.0, 100.0, "learned"),
        "prior": ("mean", "zero"),
    }
    training_only: ClassVar[bool] = True
    min_width: ClassVar[int] = 1
    """First-order weights are shrunk as well."""
    pairs: ClassVar[Mapping[str, Pair]] = {
        "hashing": Pair(allowed=True, words="buckets are shrunk by the counts of all their ids"),
        "low-rank": Pair(allowed=True, words=PRODUCT),
        "mlet": Pair(allowed=True, words=PRODUCT),
        "product-start": Pair(allowed=True, words="the table starts at the product and is shrunk"),
        "masked": Pair(allowed=False, words=ZEROS + "shrinkage+masked"),
        "pep": Pair(allowed=False, words=ZEROS + "shrinkage+pep"),
        "pruned": Pair(allowed=False, words=ZEROS + "shrinkage+pruned"),
        "quantize": Pair(
            allowed=False, words="small integers are not trained; shrink first: shrinkage+quantize"
        ),
        "shrinkage": Pair(
            allowed=False, words="a row counts once as much as its evidence; use one shrinkage"
        ),
        "aligned-sets": Pair(allowed=True, words=SETS),
        "multi-embedding": Pair(allowed=True, words=SETS),
        "shared-sets": Pair(allowed=True, words=SETS),
    }
    pairs_before: ClassVar[Mapping[str, Pair]] = {
        "hashing": Pair(
            allowed=False,
            words="hashing keeps rows, so the evidence would be folded into them and be gone; hash "
            "first: hashing+shrinkage",
        ),
        "low-rank": Pair(
            allowed=False,
            words="the closest factors take the place of the shrunk rows; merge first, then cut the "
            "trained table",
        ),
        "mlet": Pair(
            allowed=False,
            words="the factors take the place of the shrunk rows; shrink their product: mlet+shrinkage",
        ),
        "product-start": Pair(
            allowed=False,
            words="it draws all rows anew, so the evidence would be gone; start first: "
            "product-start+shrinkage",
        ),
        "masked": Pair(allowed=True, words="a mask of the shrunk rows"),
        "pep": Pair(allowed=True, words="entries of the shrunk rows are cut"),
        "pruned": Pair(
            allowed=True,
            words="entries of the shrunk rows are cut; what survives is folded and trained as a plain "
            "table",
        ),
        "quantize": Pair(
            allowed=True, words="the table is folded first, and its rows are quantised"
        ),
        "aligned-sets": Pair(allowed=False, words=SETS_FIRST),
        "multi-embedding": Pair(allowed=False, words=SETS_FIRST),
        "shared-sets": Pair(allowed=False, words=SETS_FIRST),
    }

    counts: Counts | None = field(default=None, repr=False, compare=False)
    """How often training saw each id: by the name of the table or of its field, `(N,)` each; of one table
    by itself; or one number for all rows. None: `set_counts_` gives them before training."""
    c: Strength = "learned"
    """How often an id must be seen to be half its own row: a number; one for each table, by name;
    "learned", by gradient; "auto", as estimated by `estimate_c_`."""
    prior: Literal["mean", "zero"] = "mean"
    """What a row is drawn to: "mean", a learned row of the table that starts at zero; "zero"."""

    def __post_init__(self) -> None:
        check_types(self)
        if not isinstance(self.c, str):
            for strength in self.c.values() if isinstance(self.c, Mapping) else [self.c]:
                _check_strength(strength)
        if isinstance(self.counts, int):
            require(self.counts >= 0, f"counts must be 0 or more, got counts={self.counts}")

    def __hash__(self) -> int:
        c = frozenset(self.c.items()) if isinstance(self.c, Mapping) else self.c
        return hash((c, self.prior))

    def with_counts(self, counts: Counts) -> "Shrinkage":
        """Return the method with counts, such as those of the data it is used on: `train.counts()`."""
        return replace(self, counts=counts)

    def wrap(self, base: AnyTable) -> "ShrunkTable":
        """Return the table with its rows shrunk; counts by name are for `apply_` on a model."""
        require(
            not isinstance(self.counts, Mapping),
            "counts by name are of several tables; use apply_ on the model",
        )
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        # what is saved with a model are the counts themselves, so the table need not remember them
        shrunk = ShrunkTable(
            replace(self, counts=None), inner, self._first_evidence(base), self._first_prior(base)
        )
        if self.counts is not None:
            shrunk.set_counts_(counts_of_table("table", base.num_embeddings, self.counts))
        return shrunk

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table shrunk, by the counts and the strength that are given under its name."""
        counts = {} if self.counts is None else counts_of_all(tables, self.counts)
        strengths = {name: self._start_of(name) for name in tables}
        made = {name: wrap(table, replace(self, counts=None)) for name, table in tables.items()}
        for name, table in made.items():
            for shrunk in counted_in(table):
                if name in counts:
                    shrunk.set_counts_(counts[name])
                if self.c != "learned":
                    shrunk.evidence.strength.fill_(strengths[name])
        return list(made.values())

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return shrunk tables behind one lookup of their rows and one of their counts."""
        shrunk = [table for table in tables if isinstance(table, ShrunkTable)]
        return ShrunkStack(self, shrunk, lengths)

    def _start_of(self, name: str) -> float:
        if not isinstance(self.c, Mapping):
            return START if isinstance(self.c, str) else self.c
        found = of_table(name, self.c)
        if not isinstance(found, float | int):
            raise SettingsError(
                f"there is no c of {name!r}, only of {', '.join(self.c) or 'nothing'}; give one by the name "
                "of the table or of its field, or leave the table out with where="
            )
        return float(found)

    def _first_evidence(self, base: AnyTable) -> Evidence:
        like = next(base.parameters())
        c = START if isinstance(self.c, str | Mapping) else self.c
        strength = like.detach().new_full((1,), c)
        if self.c == "learned":
            strength = nn.Parameter(strength.log(), requires_grad=is_trainable(base))
        return Evidence(unknown_counts(base), strength, is_known=False)

    def _first_prior(self, base: AnyTable) -> FieldMean | None:
        if self.prior == "zero":
            return None
        mean = next(base.parameters()).detach().new_zeros(base.embedding_dim)
        return FieldMean(nn.Parameter(mean, requires_grad=is_trainable(base)))


class ShrunkTable(CountedTable):
    """A table whose rows are drawn to a prior, the less often they were seen the more."""

    def __init__(
        self, method: Shrinkage, inner: AnyTable, evidence: Evidence, prior: FieldMean | None
    ) -> None:
        super().__init__(method, inner, evidence)
        self.prior = prior  # p

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p(i)."""
        ids = ids.long()
        weights = self.evidence.weights(ids, torch.zeros_like(ids))
        return _mixed(self.inner(ids), weights, _rows_of(self.prior, ids))


class ShrunkStack(CountedStack):
    """Shrunk tables behind one lookup of their rows and one of their counts."""

    method: Shrinkage

    def __init__(
        self, method: Shrinkage, tables: Sequence[ShrunkTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(method, tables, lengths)
        means = [table.prior for table in tables if table.prior is not None]
        self.prior = FieldMeans(means, self.field_of_slot) if means else None

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p_f of the rows of each field f."""
        # unlike a product, this is cheaper than to find out which rows are looked up several times
        return _mixed(self.inner(ids), self.weights(ids), _rows_of(self.prior, ids))

    def split(self) -> list[AnyTable]:
        """Return the shrunk tables one by one."""
        inner = self.inner.split()
        priors = self.prior.split() if self.prior is not None else [None] * len(inner)
        parts = zip(inner, self.evidence.split(self.sizes), priors, strict=True)
        return [ShrunkTable(self.method, *part) for part in parts]


def _rows_of(prior: Prior | None, ids: Tensor) -> Tensor | None:
    return None if prior is None else prior.rows(ids)


def _mixed(own: Tensor, weights: Tensor, prior: Tensor | None) -> Tensor:
    """Return w v + (1 - w) p: with w = 1 exactly v, with w = 0 exactly p."""
    return weights * own if prior is None else weights * own + (1 - weights) * prior


def _check_strength(c: object) -> None:
    if not isinstance(c, float | int) or isinstance(c, bool):
        raise SettingsError(f"c must be a number for each table, got {c!r}")
    require(0 <= c < math.inf, f"c must be 0 or more and finite, got c={c}")
