"""Sub-embeddings: what a field shows to each other field (Guo et al., 2024, evidence I and II).

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

from rarebit.interactions.cross import CrossNetwork
from rarebit.interactions.field_aware import FieldAwareMachine
from rarebit.models._base import Backbone, RankingModel
from rarebit.settings import to_mapping
from rarebit.tables.collection import TableCollection

__all__ = ["SubEmbeddings", "find_sub_embeddings"]

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
