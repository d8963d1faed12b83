"""The figures of a table: its spectrum and rows, its factors, and what it shows to other tables.

**Products** (Deng et al., theorem 1): how fast SGD learns the directions of a table trained as a product.

    dW = -η Σ_ij (sigma1_i² + sigma2_j²) g_ij u_i v_jᵀ                                          (7)

    sigma1_i, u_i    singular values and vectors of the projection, i up to the width D
    sigma2_j, v_j    singular values and vectors of the wide factor, j up to the rows N
    g_ij             what plain training with SGD would do in the direction u_i v_jᵀ

A factor is the speedup of a direction over a plain table. Beyond the inner width k, sigma2_j is zero: there
a row learns only from its own ids. The other D x k directions are informative: they carry what is learned of
one id to others. A table is a product if it offers `factors()`: the wide table and the projection `(k, D)`.

**Sub-embeddings** (Guo et al., 2024, evidence I and II): what a field shows to each other field.

    FFM        E_i = [E_i->1, ..., E_i->F]        side by side; E_i->i meets nothing
    DCN-V2     E_i->j = E_i W_ij^T                W_ij, the block of the first cross layer that takes
                                                  field i to the place of field j

    IA(E_i->j)             low where field i collapses when it meets field j
    sum over j, over i     what field i keeps, and what field j lets others keep

Whatever is done to the columns of E_i can be done to the R of its QR, so a table is read once for all
of its sub-embeddings. Fields are in the order the model reads them: tables, then numbers. A number has
one vector and no table, so others meet it but it has no sub-embeddings.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rarebit.diagnosis.rows import NormBin, Scan, count_dead, norm_bins, rows_of_table, spearman
from rarebit.errors import DataError
from rarebit.interactions.cross import CrossNetwork
from rarebit.interactions.field_pairs import FieldAwareMachine
from rarebit.models._base import Backbone, RankingModel
from rarebit.settings import to_mapping
from rarebit.tables.spectrum import abundance_of, random_abundance, stable_rank_of, triangle_of
from rarebit.tables.table import AnyTable, Table, field_of, table_name


@runtime_checkable
class Product(Protocol):
    """A table that is trained as a product of two factors."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def factors(self) -> tuple[AnyTable, Tensor]:
        """Return the wide table `(N, k)` and the projection `(k, D)`."""


@dataclass(frozen=True, kw_only=True)
class Reweighting:
    """The factors by which a table trained as a product learns its directions."""

    rows: int
    """Rows without padding: N."""
    width: int
    """Width of the table: D."""
    inner_dim: int
    """Width of the wide factor: k."""
    projection_values: tuple[float, ...]
    """sigma1_i, the largest first: min(D, k) of them."""
    wide_values: tuple[float, ...]
    """sigma2_j, the largest first: min(k, N) of them."""

    @property
    def factors(self) -> Tensor:
        """sigma1_i² + sigma2_j² of the directions the wide factor has, `(D, min(k, N))`, float64."""
        return self.rest.unsqueeze(1) + torch.tensor(self.wide_values, dtype=torch.float64).square()

    @property
    def rest(self) -> Tensor:
        """sigma1_i², the factors of all further directions, `(D,)`, float64."""
        missing = self.width - len(self.projection_values)
        values = [*self.projection_values, *[0.0] * missing]
        return torch.tensor(values, dtype=torch.float64).square()

    @property
    def num_directions(self) -> int:
        """All directions: D x N."""
        return self.width * self.rows

    @property
    def num_nonzero(self) -> int:
        """Directions that training can learn: those whose factor is not zero."""
        lost = (self.width - singular_rank(self.projection_values, self.inner_dim)) * (
            self.rows - singular_rank(self.wide_values, self.rows)
        )
        return self.num_directions - lost

    @property
    def num_informative(self) -> int:
        """Directions that carry what is learned from one id to others: sigma2_j is not zero."""
        return self.width * singular_rank(self.wide_values, self.rows)

    @property
    def largest_factor(self) -> float:
        """Speedup of the fastest direction over a plain table."""
        wide = max(self.wide_values, default=0.0)
        return max(self.projection_values, default=0.0) ** 2 + wide**2

    @property
    def mean_factor(self) -> float:
        """Mean speedup of all directions: about that of the whole table."""
        wide = sum(value**2 for value in self.wide_values) / max(self.rows, 1)
        return float(self.rest.mean()) + wide

    def to_mapping(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            **to_mapping(self),
            "num_directions": self.num_directions,
            "num_nonzero": self.num_nonzero,
            "num_informative": self.num_informative,
            "largest_factor": self.largest_factor,
            "mean_factor": self.mean_factor,
        }

    def __str__(self) -> str:
        factors = self.factors.flatten().tolist() or [0.0]
        return (
            f"of {self.num_directions:,} directions {self.num_nonzero:,} are learned, "
            f"{self.num_informative:,} of them together with other ids; speedup over a plain table under "
            f"SGD: {min(factors):.3g}x to {max(factors):.3g}x for these, {self.mean_factor:.3g}x for all on "
            "average"
        )


def reweighting(table: AnyTable) -> Reweighting:
    """Return the current factors of a table that is trained as a product.

    It reads the wide factor once, a few rows at a time, and works on matrices of k x k and smaller.

    >>> from rarebit.methods.mlet import MLET
    >>> found = reweighting(MLET(inner_dim=8).wrap(nn.Embedding(100, 4)))
    >>> found.num_directions, found.num_nonzero, found.num_informative
    (400, 400, 32)
    """
    product = product_of(table)
    projection = product.factors()[1].detach().double()
    triangle = triangle_of(wide_rows(product), len(projection))
    refuse_not_finite(triangle, projection)
    return Reweighting(
        rows=product.num_embeddings - (product.padding_idx is not None),
        width=product.embedding_dim,
        inner_dim=len(projection),
        projection_values=tuple(torch.linalg.svdvals(projection).tolist()),
        wide_values=tuple(torch.linalg.svdvals(triangle).tolist()),
    )


def find_product(table: AnyTable) -> Product | None:
    """Return the product inside a table, which hashing may wrap; None if there is none."""
    inside: nn.Module | None = table
    while isinstance(inside, Table):
        if isinstance(inside, Product):
            return inside
        inside = getattr(inside, "inner", None)  # a quantised table has no table inside
    return None


def product_of(table: AnyTable) -> Product:
    """Return the product inside a table, or raise."""
    product = find_product(table)
    if product is None:
        raise DataError(
            f"a table trained as a product is needed, got a {type(table).__name__} without MLET; "
            "apply_ MLET to it first, and look at it before merge_"
        )
    return product


def wide_rows(product: Product) -> Iterator[Tensor]:
    """Yield the rows of a product's wide factor without padding, a few at a time."""
    return replace(rows_of_table(product.factors()[0]), padding=product.padding_idx).chunks()


def singular_rank(values: Sequence[float], larger_side: int) -> int:
    """Return how many singular values are not zero, up to rounding."""
    if not values:
        return 0
    least = values[0] * max(larger_side, len(values)) * torch.finfo(torch.float64).eps
    return sum(value > least for value in values)


def refuse_not_finite(*matrices: Tensor) -> None:
    """Raise when a factor has no singular values."""
    if not all(bool(matrix.isfinite().all()) for matrix in matrices):
        raise DataError("the factors hold NaN or infinite numbers, so they have no singular values")


@dataclass(frozen=True, kw_only=True)
class TableDiagnosis:
    """One table, or one field's slice of a stacked table. No figure includes padding rows."""

    name: str
    """Where the table is in the model, such as `backbone.tables.user`; its name in a file."""
    rows: int
    """Rows without padding."""
    width: int
    """Length of a row."""
    num_bytes: int
    """Bytes stored for it."""
    methods: tuple[str, ...] = ()
    """The methods applied to it, in order."""
    spectrum: tuple[float, ...] | None
    """Singular values, the largest first; None for rows of one number, or if one is not finite."""
    information_abundance: float | None
    """Sum of the singular values divided by the largest one."""
    random_abundance: float | None
    """The same for a table of random numbers of this size."""
    stable_rank: float | None
    """Sum of the squared singular values divided by the largest one."""
    dead_rows: int
    """Rows whose norm is at most a thousandth of the root mean square of all norms."""
    not_finite_rows: int
    """Rows that hold NaN or an infinite number."""
    never_trained_rows: int | None
    """Rows whose value training never saw; None if the training counts are not known."""
    seen_once_rows: int | None
    """Rows whose value training saw once."""
    norm_correlation: float | None
    """Spearman's correlation of a row's norm and its count, over the values that training saw."""
    norm_by_count: tuple[NormBin, ...]
    """Mean norm of the rows by training count; empty if the counts are not known."""
    set_abundances: tuple[float, ...] = ()
    """Information abundance of each embedding set, if there are several."""
    reweighting: Reweighting | None = None
    """How fast each direction is learned, for a table that `MLET` trains as a product."""

    @property
    def field(self) -> str:
        """The last part of the name: the field or attribute."""
        return field_of(self.name)

    @property
    def abundance_ratio(self) -> float | None:
        """Information abundance divided by that of a random table: near 1 without collapse."""
        if self.information_abundance is None or self.random_abundance is None:
            return None
        return self.information_abundance / self.random_abundance

    @property
    def seen_once_share(self) -> float | None:
        """Of the values that training saw, the share that it saw once."""
        if self.never_trained_rows is None or self.seen_once_rows is None:
            return None
        seen = self.rows - self.never_trained_rows
        return self.seen_once_rows / seen if seen else None

    @property
    def directions(self) -> int | None:
        """How many directions hold 99 % of the squared length of all rows together."""
        if self.spectrum is None:
            return None
        squares = torch.tensor(self.spectrum, dtype=torch.float64).square()
        if not squares.sum():
            return 0
        return int((squares.cumsum(0) / squares.sum() < 0.99).sum()) + 1

    def to_mapping(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            **to_mapping(self),
            "abundance_ratio": self.abundance_ratio,
            "seen_once_share": self.seen_once_share,
            "directions": self.directions,
            "reweighting": None if self.reweighting is None else self.reweighting.to_mapping(),
        }


def describe_table(
    scan: Scan, counts: Tensor | None, *, width: int, **values: Any
) -> TableDiagnosis:
    """Return the figures of one pass over a table, with training counts `(N,)` if known."""
    rows, finite = len(scan.norms), scan.finite
    # the direction of a single number means nothing, so first-order weights have no spectrum
    known = None if width == 1 else scan.triangle
    spectrum = None if known is None else torch.linalg.svdvals(known)
    norms, seen = scan.norms[finite], None if counts is None else counts[finite]
    return TableDiagnosis(
        rows=rows,
        width=width,
        spectrum=None if spectrum is None else tuple(spectrum.tolist()),
        information_abundance=None if spectrum is None else abundance_of(spectrum),
        random_abundance=None if spectrum is None else random_abundance(rows, width),
        stable_rank=None if spectrum is None else stable_rank_of(spectrum),
        dead_rows=count_dead(norms),
        not_finite_rows=int((~finite).sum()),
        never_trained_rows=None if counts is None else int((counts == 0).sum()),
        seen_once_rows=None if counts is None else int((counts == 1).sum()),
        norm_correlation=None if seen is None else spearman(norms[seen > 0], seen[seen > 0]),
        norm_by_count=() if seen is None else norm_bins(norms, seen),
        **values,
    )


def short_names(tables: Sequence[TableDiagnosis]) -> list[str]:
    """Return the last part of each table's name, or the whole name if that is not clear enough.

    In a file, the last part of most names is "weight"; and two tables may end alike.
    """
    if any(table.field == "weight" for table in tables):
        return [table.name.removesuffix(".weight") for table in tables]
    times = Counter(table.field for table in tables)
    return [table.field if times[table.field] == 1 else table.name for table in tables]


Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SubEmbeddings:
    """The matrix IA(E_i->j) of a model, or of one of its embedding sets."""

    name: str
    """Where the interaction is in the model."""
    kind: str
    """The interaction that makes the sub-embeddings: "FFM" or "DCN-V2"."""
    embedding_set: int | None = None
    """The number of the embedding set, from 0; None if there is one set."""
    fields: tuple[str, ...]
    """The fields i, which have a table: one row of the matrix each."""
    others: tuple[str, ...]
    """The fields j that they meet: one column each."""
    abundance: Matrix
    """IA(E_i->j); None for what the model does not have, and for tables that are not finite."""

    @property
    def field_sums(self) -> tuple[float, ...]:
        """For each field i, the sum over j."""
        return tuple(sum(_known(row)) for row in self.abundance)

    @property
    def other_sums(self) -> tuple[float, ...]:
        """For each field j, the sum over i."""
        return tuple(sum(_known(column)) for column in zip(*self.abundance, strict=True))

    def __str__(self) -> str:
        number = "" if self.embedding_set is None else f", embedding set {self.embedding_set}"
        kept = _least(self.fields, self.abundance)
        left = _least(self.others, list(zip(*self.abundance, strict=True)))
        if not kept:
            return f"Sub-embeddings of {self.kind}{number}: not known."
        return (
            f"Sub-embeddings of {self.kind}{number}: the field that keeps least when it meets others "
            f"is {kept}, the field that leaves others least is {left}."
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the matrix and its sums as plain values."""
        sums = {"field_sums": list(self.field_sums), "other_sums": list(self.other_sums)}
        return {**to_mapping(self), **sums}


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _least(names: Sequence[str], lines: Sequence[Sequence[float | None]]) -> str:
    """Return the name of the line with the smallest mean; "" if nothing is known."""
    known = zip(names, map(_known, lines), strict=True)
    mean, name = min(
        ((sum(line) / len(line), name) for name, line in known if line), default=(0, "")
    )
    return f"{name} (mean IA {mean:.1f})" if name else ""


def find_sub_embeddings(
    model: nn.Module, triangles: Mapping[str, Tensor | None]
) -> tuple[SubEmbeddings, ...]:
    """Return the sub-embeddings of every FFM and cross network in a model.

    `triangles` are the R of the tables, by the tables' names.
    """
    return tuple(
        found
        for name, ranking in model.named_modules()
        if isinstance(ranking, RankingModel) and isinstance(ranking.backbone, Backbone)
        for found in _of_model(f"{name}." if name else "", ranking, ranking.backbone, triangles)
    )


def _of_model(
    prefix: str, model: RankingModel, backbone: Backbone, triangles: Mapping[str, Tensor | None]
) -> Iterator[SubEmbeddings]:
    tables = backbone.tables
    fields = tuple(field.name for field in tables.fields)
    own = [
        triangles.get(table_name(f"{prefix}backbone.tables", name)) for name in fields
    ]  # (k, M * D) each
    for index, projection in tables.projections.items():  # to the width of the model
        triangle = own[int(index)]
        if triangle is not None:
            own[int(index)] = triangle @ projection.detach().double()
    others = (*fields, *(field.name for field in model.schema.numeric_fields))
    for name, part in backbone.interaction.named_modules(prefix=f"{prefix}backbone.interaction"):
        if isinstance(part, FieldAwareMachine):
            kind, matrices = "FFM", [_field_aware(own, len(others), part.dim)]
        elif isinstance(part, CrossNetwork):
            kind, matrices = "DCN-V2", list(_crossed(own, part.weight, len(others)))
        else:
            continue
        has_sets = isinstance(part, CrossNetwork) and part.num_sets is not None
        for number, abundance in enumerate(matrices):
            yield SubEmbeddings(
                name=name,
                kind=kind,
                embedding_set=number if has_sets else None,
                fields=fields,
                others=others,
                abundance=abundance,
            )


def _field_aware(own: Sequence[Tensor | None], num_fields: int, dim: int) -> Matrix:
    def row(i: int, triangle: Tensor) -> tuple[float | None, ...]:
        found = _abundances(triangle.unflatten(1, (num_fields, dim)).transpose(0, 1))  # (F, k, D)
        return *found[:i], None, *found[i + 1 :]

    unknown = (None,) * num_fields
    return tuple(unknown if one is None else row(i, one) for i, one in enumerate(own))


def _crossed(own: Sequence[Tensor | None], weight: Tensor, num_fields: int) -> Iterator[Matrix]:
    """Yield the matrix of each embedding set, from the weights of all layers `([M,] L, F D, F D)`."""
    first = weight.detach().double().select(-3, 0)
    sets = first if first.ndim == 3 else first.unsqueeze(0)
    dim = sets.shape[-1] // num_fields
    for number, layer in enumerate(sets):
        blocks = layer.unflatten(0, (num_fields, dim)).unflatten(2, (num_fields, dim))
        yield tuple(
            (None,) * num_fields
            if triangle is None
            else _abundances(
                # (j, k, D): R of field i in this set, times the transposed block from i to each j
                triangle[:, number * dim : (number + 1) * dim] @ blocks[:, :, i].mT
            )
            for i, triangle in enumerate(own)
        )


def _abundances(matrices: Tensor) -> tuple[float, ...]:
    """Return the information abundance of each matrix of a batch; 0 for one of zeros."""
    values = torch.linalg.svdvals(matrices)
    largest = values[:, 0].clamp(min=torch.finfo(values.dtype).tiny)
    return tuple((values.sum(dim=1) / largest).tolist())
