"""How an update of a table trained as a product splits over its directions (Deng et al., theorem 1).

`rarebit.diagnosis.measure` states the theorem and measures the factors. Each call reads the wide factor once, in chunks, and
works on matrices of k x k and smaller; padding rows are left out. Training never calls it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rarebit.diagnosis.measure import (
    Product,
    find_product,
    product_of,
    refuse_not_finite,
    singular_rank,
    wide_rows,
)
from rarebit.errors import DataError
from rarebit.tables.apply import find_sites
from rarebit.tables.spectrum import triangle_of
from rarebit.tables.table import AnyTable


@dataclass(frozen=True, kw_only=True)
class UpdateSplit:
    """How a change of the product splits over the directions the factors had before it."""

    parts: Tensor = field(repr=False)
    """u_iᵀ dW v_j, `(D, min(k, N))`, float64; zero where sigma2_j is."""
    rest: Tensor = field(repr=False)
    """For each u_i, the squared length of the change in all further directions, `(D,)`, float64."""

    @property
    def squared_length(self) -> float:
        """The squared length of the whole change."""
        return float(self.parts.square().sum() + self.rest.sum())

    @property
    def shares(self) -> Tensor:
        """Share of each direction in the squared length, `(D, min(k, N))`; zeros without a change."""
        return self.parts.square() / (self.squared_length or 1.0)

    @property
    def informative_share(self) -> float:
        """The share of all directions of the wide factor together."""
        return float(self.shares.sum())


def update_split(before: AnyTable, after: AnyTable) -> UpdateSplit:
    """Return how the change between two states of a table splits over the directions of the first.

    `before` is a copy of the whole table, one step or many before `after`; (7) describes one step of SGD.

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
    old, new = product_of(before), product_of(after)
    first, then = (table.factors()[1].detach().double() for table in (old, new))
    shapes = [
        (table.num_embeddings, *projection.shape, table.padding_idx)
        for table, projection in ((old, first), (new, then))
    ]
    if shapes[0] != shapes[1]:
        raise DataError(
            "before and after are two states of one table, got rows, inner width, width and padding "
            f"{shapes[0]} and {shapes[1]}; copy the table itself before it changes"
        )
    inner_dim, width = first.shape
    moved_with = first.new_zeros(inner_dim, width)  # W2 dWᵀ: wide rows, weighted by the change
    moved = first.new_zeros(width, width)  # dW dWᵀ

    def seen() -> Iterator[Tensor]:
        for chunk, changed in zip(wide_rows(old), wide_rows(new), strict=True):
            # from the factors in float64: rows in float32 would hide a change of a millionth
            change = changed.double() @ then - chunk.double() @ first  # (n, D)
            moved_with.add_(chunk.double().mT @ change)
            moved.add_(change.mT @ change)
            yield chunk

    triangle = triangle_of(seen(), inner_dim)
    refuse_not_finite(triangle, first, then, moved)
    directions = torch.linalg.svd(first).Vh  # (D, D), u_i as rows
    wide = torch.linalg.svd(triangle, full_matrices=False)
    rank = singular_rank(wide.S.tolist(), old.num_embeddings)
    parts = first.new_zeros(width, len(wide.S))
    # v_j = W2ᵀ (left vector j) / sigma2_j, and a left vector of W2 is a right one of its triangle
    parts[:, :rank] = directions @ (wide.Vh[:rank] @ moved_with / wide.S[:rank, None]).mT
    total = (directions @ moved * directions).sum(dim=1)
    rest = (total - parts.square().sum(dim=1)).clamp(min=0.0)
    return UpdateSplit(parts=parts.cpu(), rest=rest.cpu())


def factorized_tables(model: nn.Module) -> dict[str, Product]:
    """Return the tables of a model that have `MLET`, by name; weights are shared, not copied.

    >>> from rarebit.methods.mlet import MLET
    >>> list(factorized_tables(nn.ModuleDict({"item": MLET().wrap(nn.Embedding(9, 4))})))
    ['item']
    """
    found = {site.info.name: find_product(site.table) for site in find_sites(model)}
    return {name: table for name, table in found.items() if table is not None}
