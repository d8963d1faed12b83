"""How a table trained as a product learns: the factors of its directions (Deng et al., theorem 1).

    dW = -η Σ_ij (sigma1_i² + sigma2_j²) g_ij u_i v_jᵀ                                          (7)

    sigma1_i, u_i    singular values and vectors of the projection, i up to the width D
    sigma2_j, v_j    singular values and vectors of the wide factor, j up to the rows N
    g_ij             what plain training with SGD would do in the direction u_i v_jᵀ

A factor is how many times faster than in a plain table a direction is learned. Beyond the inner width k,
sigma2_j is zero: there a row learns only from its own ids. The other directions, D x k of them, are
informative: they carry what is learned of one id to others.

Each call reads the wide factor once, a few rows at a time, and works on matrices of k x k and smaller.
Padding rows are left out. Nothing of it is in a training step: call it when you want to know.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.diagnosis.rows import rows_of_table
from rarebit.errors import DataError
from rarebit.methods.mlet import FactorizedTable
from rarebit.settings import to_mapping
from rarebit.tables.find import find_sites
from rarebit.tables.spectrum import triangle_of
from rarebit.tables.table import AnyTable, Table

__all__ = [
    "Reweighting",
    "UpdateSplit",
    "factorized_tables",
    "find_product",
    "reweighting",
    "update_split",
]


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
        """Directions that are learned at all: those whose factor is not zero."""
        lost = (self.width - _rank(self.projection_values, self.inner_dim)) * (
            self.rows - _rank(self.wide_values, self.rows)
        )
        return self.num_directions - lost

    @property
    def num_informative(self) -> int:
        """Directions that carry what is learned from one id to others: sigma2_j is not zero."""
        return self.width * _rank(self.wide_values, self.rows)

    @property
    def largest_factor(self) -> float:
        """How many times faster than a plain table the fastest direction learns."""
        wide = max(self.wide_values, default=0.0)
        return max(self.projection_values, default=0.0) ** 2 + wide**2

    @property
    def mean_factor(self) -> float:
        """The mean over all directions: about how many times faster than a plain table it learns."""
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
            f"{self.num_informative:,} of them together with other ids; under SGD these {min(factors):.3g} "
            f"to {max(factors):.3g} times as fast as in a plain table, all {self.mean_factor:.3g} times on "
            "average"
        )


@dataclass(frozen=True, kw_only=True)
class UpdateSplit:
    """How a change of the product splits over the directions the factors had before it."""

    parts: Tensor = field(repr=False)
    """u_iᵀ dW v_j, `(D, min(k, N))`, float64; zero where sigma2_j is."""
    rest: Tensor = field(repr=False)
    """Of each u_i, the squared length of the change in all further directions, `(D,)`, float64."""

    @property
    def squared_length(self) -> float:
        """The squared length of the whole change."""
        return float(self.parts.square().sum() + self.rest.sum())

    @property
    def shares(self) -> Tensor:
        """Of the squared length, the share of each direction, `(D, min(k, N))`; zeros of no change."""
        return self.parts.square() / (self.squared_length or 1.0)

    @property
    def informative_share(self) -> float:
        """The share of all directions of the wide factor together."""
        return float(self.shares.sum())


def reweighting(table: AnyTable) -> Reweighting:
    """Return the factors by which a table with `MLET` learns, as it is now.

    >>> from rarebit.methods.mlet import MLET
    >>> table = MLET(inner_dim=8).wrap(nn.Embedding(100, 4))
    >>> found = reweighting(table)
    >>> found.num_directions, found.num_nonzero, found.num_informative
    (400, 400, 32)
    """
    product = _checked(table)
    triangle = triangle_of(_wide_rows(product), product.inner.embedding_dim)
    projection = product.projection.detach().double()
    _refuse_not_finite(triangle, projection)
    return Reweighting(
        rows=product.num_embeddings - (product.padding_idx is not None),
        width=product.embedding_dim,
        inner_dim=len(projection),
        projection_values=tuple(torch.linalg.svdvals(projection).tolist()),
        wide_values=tuple(torch.linalg.svdvals(triangle).tolist()),
    )


def update_split(before: AnyTable, after: AnyTable) -> UpdateSplit:
    """Return how the change from one state of a table to another splits over the former's directions.

    A copy of the table from before the change is needed, as large as the table itself. One step or many
    may lie between the two; (7) speaks of one step with SGD.

    >>> import copy
    >>> from rarebit.methods.mlet import MLET
    >>> model = nn.ModuleDict({"item": MLET(inner_dim=8).wrap(nn.Embedding(100, 4))})
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     before = copy.deepcopy(factorized_tables(model)["item"])
    ...     optimizer.zero_grad()
    ...     model["item"](torch.tensor([step])).square().sum().backward()
    ...     optimizer.step()
    ...     split = update_split(before, factorized_tables(model)["item"])
    >>> split.parts.shape, 0 < split.informative_share <= 1
    (torch.Size([4, 8]), True)
    """
    old, new = _checked(before), _checked(after)
    _refuse_other_shape(old, new)
    first, then = old.projection.detach().double(), new.projection.detach().double()
    inner_dim, width = first.shape
    moved_with = first.new_zeros(
        inner_dim, width
    )  # W2 dWᵀ: the wide factor's rows, weighted by the change
    moved = first.new_zeros(width, width)  # dW dWᵀ

    def seen() -> Iterator[Tensor]:
        for chunk, changed in zip(_wide_rows(old), _wide_rows(new), strict=True):
            # from the factors in float64: rows in float32 would hide a change of a millionth
            change = changed.double() @ then - chunk.double() @ first  # (n, D)
            moved_with.add_(chunk.double().mT @ change)
            moved.add_(change.mT @ change)
            yield chunk

    triangle = triangle_of(seen(), inner_dim)
    _refuse_not_finite(triangle, first, then, moved)
    directions = torch.linalg.svd(first).Vh  # (D, D), u_i as rows
    wide = torch.linalg.svd(triangle, full_matrices=False)
    rank = _rank(tuple(wide.S.tolist()), old.num_embeddings)
    parts = first.new_zeros(width, len(wide.S))
    # v_j = W2ᵀ (left vector j) / sigma2_j, and a left vector of W2 is a right one of its triangle
    parts[:, :rank] = directions @ (wide.Vh[:rank] @ moved_with / wide.S[:rank, None]).mT
    total = (directions @ moved * directions).sum(dim=1)
    rest = (total - parts.square().sum(dim=1)).clamp(min=0.0)
    return UpdateSplit(parts=parts.cpu(), rest=rest.cpu())


def factorized_tables(model: nn.Module) -> dict[str, FactorizedTable]:
    """Return the tables of a model that have `MLET`, by name; weights are shared, not copied.

    >>> from rarebit.methods.mlet import MLET
    >>> list(factorized_tables(nn.ModuleDict({"item": MLET().wrap(nn.Embedding(9, 4))})))
    ['item']
    """
    found = {site.info.name: find_product(site.table) for site in find_sites(model)}
    return {name: table for name, table in found.items() if table is not None}


def find_product(table: AnyTable) -> FactorizedTable | None:
    """Return the product inside of a table, for hashing may be around it; None where there is none.

    >>> find_product(nn.Embedding(9, 4)) is None
    True
    """
    inside: nn.Module | None = table
    while isinstance(inside, Table) and not isinstance(inside, FactorizedTable):
        inside = getattr(inside, "inner", None)  # a quantised table keeps its rows itself
    return inside if isinstance(inside, FactorizedTable) else None


def _checked(table: AnyTable) -> FactorizedTable:
    product = find_product(table)
    if product is None:
        raise DataError(
            f"a table trained as a product is needed, got a {type(table).__name__} without MLET; "
            "apply_ MLET to it first, and look at it before merge_"
        )
    return product


def _wide_rows(table: FactorizedTable) -> Iterator[Tensor]:
    return replace(rows_of_table(table.inner), padding=table.padding_idx).chunks()


def _rank(values: tuple[float, ...], larger_side: int) -> int:
    """Return how many singular values are not zero but for rounding."""
    if not values:
        return 0
    least = values[0] * max(larger_side, len(values)) * torch.finfo(torch.float64).eps
    return sum(value > least for value in values)


def _refuse_other_shape(old: FactorizedTable, new: FactorizedTable) -> None:
    shapes = [
        (table.num_embeddings, *table.projection.shape, table.padding_idx) for table in (old, new)
    ]
    if shapes[0] != shapes[1]:
        raise DataError(
            "before and after are two states of one table, got rows, inner width, width and padding "
            f"{shapes[0]} and {shapes[1]}; copy the table itself before it changes"
        )


def _refuse_not_finite(*matrices: Tensor) -> None:
    if not all(bool(matrix.isfinite().all()) for matrix in matrices):
        raise DataError("the factors hold NaN or infinite numbers, so they have no singular values")
