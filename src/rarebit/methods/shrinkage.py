"""Shrinkage: a row counts as much as its evidence, and the rest of it is a prior.

    e(i) = w_i v_i + (1 - w_i) p(i)        w_i = n_i / (n_i + c)

    n_i    `ShrunkTable.evidence.counts`: how often training saw the id
    c      `ShrunkTable.evidence.c`, one a table: an id seen c times is half its own row
    v_i    `ShrunkTable.inner`, N x D
    p(i)   `ShrunkTable.prior`: a learned row of the table, or what `_shrinkage_priors.py` has besides

A row that was seen once is noise, and a table trained to fit it overfits. Were v_i the mean of n_i
observations with variance σ² around a true row, and the true rows spread with variance τ² around p, the
best guess of the true row would be e(i) with c = σ² / τ². That is what c="estimated" takes from the rows and
their counts, whenever `estimate_c_` is called; the other forms learn c. With c = 0 the table is the plain one;
an id never seen is p.

Merged, it is a plain table. Not for tables whose ids are all frequent: there w is one, and it does nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rarebit.callbacks import Attached, TrainingData
from rarebit.errors import SettingsError
from rarebit.methods._shrinkage_counts import Counts, counts_of_all, counts_of_table, of_table
from rarebit.methods._shrinkage_mixing import mixed
from rarebit.methods._shrinkage_parts import (
    CountedStack,
    CountedTable,
    Evidence,
    counted_in,
    typical_count,
    unknown_counts,
)
from rarebit.methods._shrinkage_priors import (
    Prior,
    hashed_prior,
    join_priors,
    mean_prior,
    parent_prior,
    relatives_prior,
)
from rarebit.methods._shrinkage_relations import set_relations_
from rarebit.methods._shrinkage_strength import (
    StrengthSteps,
    coming_batches,
    held_out_batches,
)
from rarebit.settings import check_types, require, suggest
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

Found: TypeAlias = Literal["typical", "learned", "estimated", "held-out", "first-pass", "auto"]
"""How one c for each table is found."""
Strength: TypeAlias = float | Mapping[str, float] | Found
"""One c for all tables, one for each by name, or one for each that is found."""

AUTO: Found = "typical"
"""What c="auto" stands for."""

START = 10.0
"""Where a c that is to be found starts."""

PRODUCT = "the rows of the product are shrunk, and both factors go on being trained"
SETS = "each set is drawn to a mean of its own, all by the same counts"
SETS_FIRST = (
    "the sets are drawn anew with the network behind them, so the evidence would be gone; give the model "
    "its sets first"
)
OF_ZERO = (
    "use prior=zero, for any other prior is in all rows of rare ids, and may be all that is kept"
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
    control: ClassVar[str] = "tuned"
    cost: ClassVar[str] = (
        "a step looks up one number beside each row and adds a multiple of the prior; until it is merged, "
        "a table stores one number more a row"
    )
    applies: ClassVar[str] = (
        "tables with many rare ids, which overfit them; not where all ids are frequent, for there it does "
        "nothing"
    )
    knobs: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "c": ("typical", 30.0, 3.0, 100.0, "learned", "held-out", "first-pass"),
        "prior": ("mean", "zero", "hashed", "relatives"),
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
        "pep": Pair(allowed=True, words=f"entries of the shrunk rows are cut; {OF_ZERO}"),
        "pruned": Pair(
            allowed=True,
            words="entries of the shrunk rows are cut; what survives is folded and trained as a plain "
            f"table; {OF_ZERO}",
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
    c: Strength = "auto"
    """How often an id must be seen to be half its own row: a number; one for each table, by name; or one
    for each that is found. "typical" is the median of the counts of its ids, of those that training saw;
    "learned" by the gradient of training; "held-out" by that of validation rows,
    and "first-pass" by that of training rows before they are trained on, in the first epoch, both in runs
    or where `attach` is called; "estimated" by `estimate_c_`. "auto" is "typical"."""
    prior: Literal["mean", "zero", "hashed", "parent", "relatives"] = "mean"
    """What a row is drawn to: "mean", a learned row of the table; "zero"; "hashed", one of a few learned rows,
    by a hash of the id; "parent", a learned row for the value of another field that the id is seen with most
    often; "relatives", the mean of frequent ids that are met in like company. All start at zero, but for the
    last. In runs, parents and relatives come from the training rows, as counts do."""
    parent: str | None = None
    """The field whose values stand for ids with prior="parent", such as the author of a book. A table that
    has no more rows than that field's is drawn to its mean."""
    parent_rows: int | None = None
    """How many values the parent field has: `apply_` finds it out."""

    def __post_init__(self) -> None:
        check_types(self)
        if not isinstance(self.c, str):
            for strength in self.c.values() if isinstance(self.c, Mapping) else [self.c]:
                _check_strength(strength)
        if isinstance(self.counts, int):
            require(self.counts >= 0, f"counts must be 0 or more, got counts={self.counts}")
        require(
            (self.prior == "parent") == (self.parent is not None),
            f"prior='parent' goes with the name of the parent field, got prior={self.prior!r} and "
            f"parent={self.parent!r}",
        )
        require(
            self.parent_rows is None or (self.parent is not None and self.parent_rows >= 1),
            f"parent_rows goes with a parent and is at least 1, got parent_rows={self.parent_rows}",
        )

    def __hash__(self) -> int:
        c = frozenset(self.c.items()) if isinstance(self.c, Mapping) else self.c
        return hash((c, self.prior, self.parent, self.parent_rows))

    def __repr__(self) -> str:
        parent = "" if self.parent is None else f", parent={self.parent!r}"
        return f"Shrinkage(c={self.c!r}, prior={self.prior!r}{parent})"

    def with_counts(self, counts: Counts) -> "Shrinkage":
        """Return the method with counts, such as those of the data it is used on: `train.counts()`."""
        return replace(self, counts=counts)

    def attach(self, model: nn.Module, data: TrainingData) -> Attached | None:
        """Give a prior what it takes from training rows, and learn c where that needs other rows.

        The tables of the model have this method already.
        """
        if self.prior in ("parent", "relatives"):
            set_relations_(model, data, self.parent)
        c = self._of_tables().c
        batches = {"held-out": held_out_batches, "first-pass": coming_batches}
        if not isinstance(c, str) or c not in batches:
            return None

        def is_own(method: Method) -> bool:
            return isinstance(method, Shrinkage) and method.c == c

        return StrengthSteps(model, is_own, batches[c](model, data))

    def wrap(self, base: AnyTable) -> "ShrunkTable":
        """Return the table with its rows shrunk; counts by name are for `apply_` on a model."""
        require(
            not isinstance(self.counts, Mapping),
            "counts by name are of several tables; use apply_ on the model",
        )
        inner = base
        if isinstance(base, nn.Embedding):
            inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        shrunk = ShrunkTable(
            self._of_tables(), inner, self._first_evidence(base), self._first_prior(base)
        )
        if self.counts is not None:
            shrunk.set_counts_(counts_of_table("table", base.num_embeddings, self.counts))
        return shrunk

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table shrunk, by the counts and the strength that are given under its name."""
        counts = {} if self.counts is None else counts_of_all(tables, self.counts)
        strengths = {name: self._start_of(name) for name in tables}
        method = self._knowing_parent(tables)
        made = {name: wrap(table, method) for name, table in tables.items()}
        for name, table in made.items():
            for shrunk in counted_in(table):
                if not isinstance(shrunk.evidence.strength, nn.Parameter):
                    shrunk.evidence.strength.fill_(strengths[name])
                if name in counts:
                    shrunk.set_counts_(counts[name])
        return list(made.values())

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return shrunk tables behind one lookup of their rows and one of their counts."""
        shrunk = [table for table in tables if isinstance(table, ShrunkTable)]
        return ShrunkStack(self, shrunk, lengths)

    def _of_tables(self) -> "Shrinkage":
        """Return the method as tables remember it.

        What is saved with a model are the counts themselves, and a c that reads the same in years to come.
        """
        return replace(self, counts=None, c=AUTO if self.c == "auto" else self.c)

    def _knowing_parent(self, tables: Mapping[str, AnyTable]) -> "Shrinkage":
        """Return the method without counts, and with how many values the parent field has."""
        rows = self.parent_rows
        if self.parent is not None and rows is None:
            found = {
                name.rpartition(".")[2]: table.num_embeddings for name, table in tables.items()
            }
            require(
                self.parent in found,
                f"parent: there is no table for {self.parent!r}{suggest(self.parent, list(found))}",
            )
            rows = found[self.parent]
        return replace(self, counts=None, parent_rows=rows)

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
        if self._of_tables().c == "learned":
            strength = nn.Parameter(strength.log(), requires_grad=is_trainable(base))
        return Evidence(unknown_counts(base), strength, is_known=False)

    def _first_prior(self, base: AnyTable) -> Prior | None:
        if self.prior == "zero":
            return None
        if self.prior == "hashed":
            return hashed_prior(base)
        if self.prior == "relatives":
            return relatives_prior(base)
        if self.prior == "mean":
            return mean_prior(base)
        require(
            self.parent_rows is not None,
            "a prior of parents needs to know how many there are; use apply_ on the model, or give parent_rows",
        )
        assert self.parent_rows is not None
        return parent_prior(base, self.parent_rows)


class ShrunkTable(CountedTable):
    """A table whose rows are drawn to a prior, the less often they were seen the more."""

    def __init__(
        self, method: Shrinkage, inner: AnyTable, evidence: Evidence, prior: Prior | None
    ) -> None:
        super().__init__(method, inner, evidence)
        self.prior = prior  # p

    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place, and a c that comes from them."""
        super().set_counts_(counts)
        if isinstance(self.method, Shrinkage) and self.method.c == "typical":
            self.evidence.strength.fill_(typical_count(counts))

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p(i)."""
        ids = ids.long()
        weights = self.evidence.weights(ids, torch.zeros_like(ids))
        return mixed(self.inner(ids), weights, _rows_of(self.prior, ids, self.inner))


class ShrunkStack(CountedStack):
    """Shrunk tables behind one lookup of their rows and one of their counts."""

    method: Shrinkage

    def __init__(
        self, method: Shrinkage, tables: Sequence[ShrunkTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(method, tables, lengths)
        priors = [table.prior for table in tables if table.prior is not None]
        self.prior = join_priors(priors, self.field_of_slot, self.offsets)

    def rows(self, ids: Tensor) -> Tensor:
        """Return w_i v_i + (1 - w_i) p_f of the rows of each field f."""
        # unlike a product, this is cheaper than to find out which rows are looked up several times
        return mixed(self.inner(ids), self.weights(ids), _rows_of(self.prior, ids, self.inner))

    def split(self) -> list[AnyTable]:
        """Return the shrunk tables one by one."""
        inner = self.inner.split()
        priors = [None] * len(inner) if self.prior is None else self.prior.split(self.sizes)
        parts = zip(inner, self.evidence.split(self.sizes), priors, strict=True)
        return [ShrunkTable(self.method, *part) for part in parts]


def _rows_of(prior: Prior | None, ids: Tensor, inner: nn.Module) -> Tensor | None:
    return None if prior is None else prior.rows(ids, inner)


def _check_strength(c: object) -> None:
    if not isinstance(c, float | int) or isinstance(c, bool):
        raise SettingsError(f"c must be a number for each table, got {c!r}")
    require(0 <= c < math.inf, f"c must be 0 or more and finite, got c={c}")
