"""How the norms of a table's rows go with how often their values were seen in training.

What is said of them:

dead           a row whose norm is at most a thousandth of the root mean square of all norms:
               weight decay erases what no batch looks up, to 1e-9 of its size in 300 steps of Adam
correlation    Spearman's: 1 where a more frequent value always has a longer row, -1 where never;
               of the values that training saw
bins           mean norm of the rows seen 0, 1, 2-3, 4-7, 8-15, ... times

What one table is like: its spectrum, its rows, and how they go with training.

Sub-embeddings: what a field shows to each other field (Guo et al., 2024, evidence I and II).

    FFM        E_i = [E_i->1, ..., E_i->F]        side by side; E_i->i meets nothing
    DCN-V2     E_i->j = E_i W_ij^T                W_ij, the block of the first cross layer that takes
                                                  field i to the place of field j

    IA(E_i->j)             low where field i collapses when it meets field j
    sum over j, over i     what field i keeps, and what field j lets others keep

Whatever is done to the columns of E_i can be done to the R of its QR, so a table is read once for all
of its sub-embeddings. Fields are in the order the model reads them: tables, then numbers. A number has
one vector and no table, so it is met but has no sub-embeddings of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.diagnosis.reweighting import Reweighting
from rarebit.diagnosis.rows import Scan
from rarebit.interactions.cross import CrossNetwork
from rarebit.interactions.field_pairs import FieldAwareMachine
from rarebit.models._base import Backbone, RankingModel
from rarebit.settings import to_mapping
from rarebit.tables.collection import TableCollection
from rarebit.tables.spectrum import abundance_of, random_abundance, stable_rank_of

__all__ = [
    "DEAD",
    "NormBin",
    "SubEmbeddings",
    "TableDiagnosis",
    "count_dead",
    "describe_table",
    "find_sub_embeddings",
    "norm_bins",
    "spearman",
]

DEAD = 1e-3


@dataclass(frozen=True, kw_only=True)
class NormBin:
    """The rows whose values were seen about equally often."""

    least: int
    """The values were seen at least so often."""
    most: int
    """And at most so often."""
    rows: int
    """Rows of such values."""
    mean_norm: float
    """Mean length of these rows."""


def count_dead(norms: Tensor) -> int:
    """Return how many norms are next to nothing beside the others; all, where all are zero.

    >>> count_dead(torch.tensor([1.0, 0.9, 1e-9, 0.0]))
    2
    """
    norms = norms.double()
    return int((norms <= DEAD * norms.square().mean().sqrt()).sum())


def norm_bins(norms: Tensor, counts: Tensor) -> tuple[NormBin, ...]:
    """Return the mean norm by how often a value was seen, in powers of two; empty bins are left out.

    >>> [(b.least, b.most, b.mean_norm) for b in norm_bins(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))]
    [(0, 0, 1.0), (2, 3, 3.0)]
    """
    # the exponent of a count: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7; exact, unlike a logarithm
    place = torch.frexp(counts.double()).exponent.long()
    rows = torch.bincount(place)
    totals = torch.bincount(place, weights=norms.double())
    return tuple(
        NormBin(
            least=1 << (power - 1) if power else 0,
            most=(1 << power) - 1,
            rows=int(rows[power]),
            mean_norm=float(totals[power] / rows[power]),
        )
        for power in rows.nonzero().flatten().tolist()
    )


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Return the rank correlation of two lists; None where one of them has but one value.

    >>> spearman(torch.tensor([1, 2, 3]), torch.tensor([10, 30, 1000]))
    1.0
    """
    x, y = _centred_ranks(x), _centred_ranks(y)
    scale = float(x.square().sum() * y.square().sum()) ** 0.5
    return float((x * y).sum()) / scale if scale else None


def _centred_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value less the mean rank; equal values share the mean of their ranks."""
    _, place, times = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = times.cumsum(0).double() - (times - 1) / 2
    return ranks[place] - (len(values) + 1) / 2


@dataclass(frozen=True, kw_only=True)
class TableDiagnosis:
    """One table, or one field's slice of a stacked table. Padding rows are left out of all figures."""

    name: str
    """Where the table is in the model, such as `backbone.tables.user`; its name in a file."""
    rows: int
    """Rows without padding."""
    width: int
    """How long a row is."""
    num_bytes: int
    """Bytes that are really stored for it."""
    methods: tuple[str, ...] = ()
    """The methods applied to it, in order."""
    spectrum: tuple[float, ...] | None
    """Singular values, the largest first; None for rows of one number, or where one is not finite."""
    information_abundance: float | None
    """Sum of the singular values over the largest one."""
    random_abundance: float | None
    """The same of a table of random numbers of this size."""
    stable_rank: float | None
    """Sum of the squared singular values over the largest one."""
    dead_rows: int
    """Rows whose norm is at most a thousandth of the root mean square of all norms."""
    not_finite_rows: int
    """Rows that hold NaN or an infinite number."""
    never_trained_rows: int | None
    """Rows whose value training never saw; None where the training counts are not known."""
    seen_once_rows: int | None
    """Rows whose value training saw once."""
    norm_correlation: float | None
    """Spearman's correlation of a row's norm and its count, of the values that training saw."""
    norm_by_count: tuple[NormBin, ...]
    """Mean norm of the rows by how often they were seen; empty where that is not known."""
    set_abundances: tuple[float, ...] = ()
    """Information abundance of each embedding set by itself, where several lie side by side."""
    reweighting: Reweighting | None = None
    """How fast each direction is learned, of a table that `MLET` trains as a product."""

    @property
    def field(self) -> str:
        """The last part of the name: the field or attribute it is called by."""
        return self.name.rpartition(".")[2]

    @property
    def abundance_ratio(self) -> float | None:
        """Information abundance over that of a random table: near 1 where nothing has collapsed."""
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

    def directions(self, share: float = 0.99) -> int | None:
        """Return how many directions hold this share of the squared length of all rows together."""
        if self.spectrum is None:
            return None
        squares = torch.tensor(self.spectrum, dtype=torch.float64).square()
        if not squares.sum():
            return 0
        held = squares.cumsum(0) / squares.sum()
        return int((held < share).sum()) + 1

    def to_mapping(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            **to_mapping(self),
            "abundance_ratio": self.abundance_ratio,
            "seen_once_share": self.seen_once_share,
            "directions": self.directions(),
            "reweighting": None if self.reweighting is None else self.reweighting.to_mapping(),
        }


def describe_table(
    scan: Scan,
    counts: Tensor | None,
    *,
    name: str,
    width: int,
    num_bytes: int,
    methods: tuple[str, ...] = (),
) -> TableDiagnosis:
    """Return what a pass over the rows of a table says, with training counts `(N,)` where known."""
    rows, finite = len(scan.norms), scan.finite
    # the direction of a single number says nothing, so first-order weights have no spectrum
    known = None if width == 1 else scan.triangle
    values = None if known is None else torch.linalg.svdvals(known)
    return TableDiagnosis(
        name=name,
        rows=rows,
        width=width,
        num_bytes=num_bytes,
        methods=methods,
        spectrum=None if values is None else tuple(values.tolist()),
        information_abundance=None if values is None else abundance_of(values),
        random_abundance=None if values is None else random_abundance(rows, width),
        stable_rank=None if values is None else stable_rank_of(values),
        dead_rows=count_dead(scan.norms[finite]),
        not_finite_rows=int((~finite).sum()),
        **_frequency(scan, counts),
    )


def _frequency(scan: Scan, counts: Tensor | None) -> Mapping[str, Any]:
    if counts is None:
        return {
            "never_trained_rows": None,
            "seen_once_rows": None,
            "norm_correlation": None,
            "norm_by_count": (),
        }
    norms, known = scan.norms[scan.finite], counts[scan.finite]
    seen = known > 0
    return {
        "never_trained_rows": int((counts == 0).sum()),
        "seen_once_rows": int((counts == 1).sum()),
        "norm_correlation": spearman(norms[seen], known[seen]),
        "norm_by_count": norm_bins(norms, known),
    }


Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SubEmbeddings:
    """The matrix IA(E_i->j) of a model, or of one of its embedding sets."""

    name: str
    """Where the interaction is in the model."""
    kind: str
    """What makes the sub-embeddings: "FFM" or "DCN-V2"."""
    embedding_set: int | None = None
    """Which embedding set it is of, from 0; None where there is one."""
    fields: tuple[str, ...]
    """The fields i, which have a table: a row of the matrix each."""
    others: tuple[str, ...]
    """The fields j that they meet: a column each."""
    abundance: Matrix
    """IA(E_i->j); None for what the model does not have, and for tables that are not finite."""

    @property
    def field_sums(self) -> tuple[float, ...]:
        """For each field i, the sum over j."""
        return tuple(_sum(row) for row in self.abundance)

    @property
    def other_sums(self) -> tuple[float, ...]:
        """For each field j, the sum over i."""
        return tuple(_sum(column) for column in zip(*self.abundance, strict=True))

    def __str__(self) -> str:
        number = "" if self.embedding_set is None else f", embedding set {self.embedding_set}"
        kept = _means(self.fields, self.abundance)
        left = _means(self.others, list(zip(*self.abundance, strict=True)))
        if not kept:
            return f"Sub-embeddings of {self.kind}{number}: not known."
        return (
            f"Sub-embeddings of {self.kind}{number}: the field that keeps least when it meets others "
            f"is {_least(kept)}, the field that leaves others least is {_least(left)}."
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the matrix and its sums as plain values."""
        sums = {"field_sums": list(self.field_sums), "other_sums": list(self.other_sums)}
        return {**to_mapping(self), **sums}


def find_sub_embeddings(
    model: nn.Module, triangles: Mapping[str, Tensor | None]
) -> tuple[SubEmbeddings, ...]:
    """Return the sub-embeddings of every FFM and cross network in a model.

    `triangles` are the R of the tables, by the tables' names.
    """
    found: list[SubEmbeddings] = []
    for name, ranking in model.named_modules():
        if isinstance(ranking, RankingModel) and isinstance(ranking.backbone, Backbone):
            found += _of_model(f"{name}." if name else "", ranking, ranking.backbone, triangles)
    return tuple(found)


def _of_model(
    prefix: str,
    model: RankingModel,
    backbone: Backbone,
    triangles: Mapping[str, Tensor | None],
) -> Iterator[SubEmbeddings]:
    tables = backbone.tables
    names = [f"{prefix}backbone.tables.{field.name}" for field in tables.fields]
    own = [
        _projected(tables, index, triangles.get(name))  # (k, M * D), M embedding sets
        for index, name in enumerate(names)
    ]
    fields = tuple(field.name for field in tables.fields)
    others = (*fields, *(field.name for field in model.schema.numeric_fields))
    for name, part in backbone.interaction.named_modules(prefix=f"{prefix}backbone.interaction"):
        if isinstance(part, FieldAwareMachine):
            abundance = _field_aware(own, len(others), part.dim)
            yield SubEmbeddings(
                name=name, kind="FFM", fields=fields, others=others, abundance=abundance
            )
        if isinstance(part, CrossNetwork):
            for number, abundance in enumerate(_crossed(own, part.weight, len(others))):
                yield SubEmbeddings(
                    name=name,
                    kind="DCN-V2",
                    embedding_set=None if part.num_sets is None else number,
                    fields=fields,
                    others=others,
                    abundance=abundance,
                )


def _projected(tables: TableCollection, index: int, triangle: Tensor | None) -> Tensor | None:
    """Return the R of a field as the interaction meets it: in the model's width."""
    if triangle is None or str(index) not in tables.projections:
        return triangle
    projection: Tensor = tables.projections[str(index)].detach().double()
    return triangle @ projection


def _field_aware(own: Sequence[Tensor | None], num_fields: int, dim: int) -> Matrix:
    matrix: list[tuple[float | None, ...]] = []
    for i, triangle in enumerate(own):
        if triangle is None:
            matrix.append((None,) * num_fields)
            continue
        row = _abundances(triangle.unflatten(1, (num_fields, dim)).transpose(0, 1))  # (F, k, D)
        matrix.append(tuple(None if i == j else value for j, value in enumerate(row)))
    return tuple(matrix)


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


def _means(
    names: Sequence[str], lines: Sequence[Sequence[float | None]]
) -> list[tuple[float, str]]:
    """Return the mean of each line of a matrix with its name, where anything of it is known."""
    known = [[value for value in line if value is not None] for line in lines]
    return [(_sum(line) / len(line), name) for name, line in zip(names, known, strict=True) if line]


def _least(means: Sequence[tuple[float, str]]) -> str:
    mean, name = min(means)
    return f"{name} (mean IA {mean:.1f})"


def _sum(values: Sequence[float | None]) -> float:
    return sum((value for value in values if value is not None), 0.0)
