"""What a row of a shrunk table is without evidence: p(i) in e(i) = w_i v_i + (1 - w_i) p(i).

    FieldMean, FieldMeans   p(i) = m, a learned row of the table; of several tables
    SharedRows              p(i) = u_h(i), a row of a small table that ids share: by a hash of the id, or by
                            the id of a parent field that training rows have with it most often
    Relatives               p(i) = sum over k of a_ik v_r(i,k): frequent ids that are met in like company, with
                            a_ik their cosines, which sum to one; m where there are none

`rows(ids, inner)` is all that is asked of a prior; `inner` looks up v. One class serves a table and, by `joined`,
a stack of tables: their rows lie one table after the other, and offsets say where those of a slot begin.

Shapes: N rows of a table, P rows that are shared, K relatives, S slots, F tables.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.tables.table import AnyTable, home_of, is_trainable, plain_like

__all__ = [
    "FieldMean",
    "FieldMeans",
    "Prior",
    "Relatives",
    "SharedRows",
    "hashed_prior",
    "join_priors",
    "mean_prior",
    "most_frequent_parents",
    "parent_prior",
    "relatives_prior",
]

NUM_RELATIVES = 5
"""Relatives of an id: as many as `data/selection.py` finds."""
SPREAD = 2_654_435_761
"""Knuth's multiplier: neighbouring ids get buckets that are far apart."""

LookUp = Callable[[Tensor], Tensor]


class Prior(nn.Module, ABC):
    """What rows are without evidence."""

    @abstractmethod
    def rows(self, ids: Tensor, inner: LookUp) -> Tensor:
        """Return the rows of these ids, in a shape that goes with `(..., D)`."""

    @abstractmethod
    def split(self, sizes: Sequence[int]) -> "Sequence[Prior]":
        """Return the priors of tables of so many rows one by one; weights are shared, not copied."""


class FieldMean(Prior):
    """One learned row `(D,)` for all ids of a table."""

    def __init__(self, mean: nn.Parameter) -> None:
        super().__init__()
        self.mean = mean

    def rows(self, ids: Tensor, inner: LookUp) -> Tensor:
        """Return the mean, whatever the ids."""
        del ids, inner
        return self.mean

    def split(self, sizes: Sequence[int]) -> list["FieldMean"]:
        """Return the prior of the one table it is of."""
        del sizes
        return [self]


class FieldMeans(Prior):
    """The learned rows `(F, D)` of several tables."""

    field_of_slot: Tensor

    def __init__(self, priors: Sequence[FieldMean], field_of_slot: Tensor) -> None:
        super().__init__()
        means = torch.stack([prior.mean.detach() for prior in priors])
        self.means = nn.Parameter(means, requires_grad=priors[0].mean.requires_grad)
        self.register_buffer("field_of_slot", field_of_slot, persistent=False)

    def rows(self, ids: Tensor, inner: LookUp) -> Tensor:
        """Return the mean of each slot, `(S, D)`."""
        del ids, inner
        return F.embedding(self.field_of_slot, self.means)

    def split(self, sizes: Sequence[int]) -> list[FieldMean]:
        """Return the means table by table."""
        del sizes
        trained = self.means.requires_grad
        return [
            FieldMean(nn.Parameter(mean, requires_grad=trained)) for mean in self.means.detach()
        ]


class SharedRows(Prior):
    """Rows of a small table, each for several ids."""

    index: Tensor
    offsets: Tensor
    starts: Tensor

    def __init__(self, table: nn.Embedding, index: Tensor, *, sizes: Sequence[int]) -> None:
        super().__init__()
        self.table = table
        self.sizes = list(sizes)  # P of each table
        self.register_buffer("index", index)  # h, (N,), from 0 in each table
        nothing = index.new_zeros(())
        self.register_buffer("offsets", nothing, persistent=False)  # of N, for each slot
        self.register_buffer("starts", nothing, persistent=False)  # of P, for each slot

    def rows(self, ids: Tensor, inner: LookUp) -> Tensor:
        """Return the shared row of each id."""
        del inner
        rows = ids + self.offsets
        index = self.index.index_select(0, rows.reshape(-1)).view(rows.shape)
        shared: Tensor = self.table(index + self.starts)
        return shared

    def split(self, sizes: Sequence[int]) -> list["SharedRows"]:
        """Return the prior of each table."""
        weights = self.table.weight.detach().split(self.sizes)
        return [
            SharedRows(plain_like(self.table, weight), index, sizes=[len(weight)])
            for weight, index in zip(weights, self.index.split(list(sizes)), strict=True)
        ]

    @classmethod
    def joined(cls, parts: Sequence["SharedRows"], field_of_slot: Tensor, offsets: Tensor) -> Self:
        """Return the priors of several tables as one."""
        weight = torch.cat([part.table.weight.detach() for part in parts])
        sizes = [len(part.table.weight) for part in parts]
        index = torch.cat([part.index for part in parts])
        made = cls(plain_like(parts[0].table, weight), index, sizes=sizes)
        made.offsets = offsets
        made.starts = torch.tensor([0, *accumulate(sizes)][:-1])[field_of_slot.cpu()]
        return made


class Relatives(Prior):
    """A mean of the rows of frequent relatives, or else of the table."""

    relatives: Tensor
    weights: Tensor
    offsets: Tensor

    def __init__(
        self, mean: FieldMean | FieldMeans, relatives: Tensor, weights: Tensor, offsets: Tensor
    ) -> None:
        super().__init__()
        self.mean = mean
        self.register_buffer("relatives", relatives)  # r, (N, K), ids of the same table
        self.register_buffer("weights", weights)  # a, (N, K)
        self.register_buffer("offsets", offsets, persistent=False)

    def rows(self, ids: Tensor, inner: LookUp) -> Tensor:
        """Return the weighted mean of the relatives' rows, and the table's mean for what is left."""
        rows = ids + self.offsets
        # the relatives in front, so that the last axis is that of the slots
        relatives = _picked(self.relatives, rows).movedim(-1, 0)  # (K, ...)
        weights = _picked(self.weights, rows).movedim(-1, 0).unsqueeze(-1)  # (K, ..., 1)
        near = (weights * inner(relatives)).sum(dim=0)
        return near + (1 - weights.sum(dim=0)) * self.mean.rows(ids, inner)

    def split(self, sizes: Sequence[int]) -> list["Relatives"]:
        """Return the prior of each table."""
        here = self.offsets.new_zeros(())
        parts = zip(
            self.mean.split(sizes),
            self.relatives.split(list(sizes)),
            self.weights.split(list(sizes)),
            strict=True,
        )
        return [Relatives(*part, here) for part in parts]

    @classmethod
    def joined(cls, parts: Sequence["Relatives"], field_of_slot: Tensor, offsets: Tensor) -> Self:
        """Return the priors of several tables as one."""
        means = [part.mean for part in parts if isinstance(part.mean, FieldMean)]
        relatives = torch.cat([part.relatives for part in parts])
        weights = torch.cat([part.weights for part in parts])
        return cls(FieldMeans(means, field_of_slot), relatives, weights, offsets)


def join_priors(priors: Sequence[Prior], field_of_slot: Tensor, offsets: Tensor) -> Prior | None:
    """Return the priors of a stack's tables as one; None where they have none."""
    if not priors:
        return None
    shared = [prior for prior in priors if isinstance(prior, SharedRows)]
    if shared:
        return SharedRows.joined(shared, field_of_slot, offsets)
    relatives = [prior for prior in priors if isinstance(prior, Relatives)]
    if relatives:
        return Relatives.joined(relatives, field_of_slot, offsets)
    return FieldMeans([prior for prior in priors if isinstance(prior, FieldMean)], field_of_slot)


def mean_prior(base: AnyTable) -> FieldMean:
    """Return a learned row for a table, which starts at zero."""
    mean = next(base.parameters()).detach().new_zeros(base.embedding_dim)
    return FieldMean(nn.Parameter(mean, requires_grad=is_trainable(base)))


def hashed_prior(base: AnyTable) -> SharedRows:
    """Return learned rows for a table, about as many as the root of its own, which ids share by hash."""
    rows = base.num_embeddings
    buckets = max(math.isqrt(max(rows - 1, 0)) + 1, 1)
    index = torch.arange(rows) * SPREAD % (1 << 32) % buckets
    return _shared(base, buckets, index)


def parent_prior(base: AnyTable, parent_rows: int) -> SharedRows:
    """Return a learned row for each value of the parent field, and one for ids without a parent.

    A table that is no larger than the parent's has the latter for all its ids.
    """
    rows = parent_rows if base.num_embeddings > parent_rows else 0
    return _shared(base, rows + 1, torch.full((base.num_embeddings,), rows))


def relatives_prior(base: AnyTable) -> Relatives:
    """Return the prior of a table whose relatives are not yet known: the mean, for all ids."""
    home, like = home_of(base), next(base.parameters()).detach()
    nobody = torch.zeros(base.num_embeddings, NUM_RELATIVES, dtype=torch.int64, device=home)
    none = like.new_zeros(base.num_embeddings, NUM_RELATIVES)
    here = torch.zeros((), dtype=torch.int64, device=home)
    return Relatives(mean_prior(base), nobody, none, here)


def most_frequent_parents(ids: Tensor, parents: Tensor, rows: int, parent_rows: int) -> Tensor:
    """Return the parent that each id is seen with most often `(N,)`, the lowest of several; P for none.

    >>> ids, parents = torch.tensor([2, 2, 2, 0]), torch.tensor([1, 4, 4, 3])
    >>> most_frequent_parents(ids, parents, rows=3, parent_rows=5)
    tensor([3, 5, 4])
    """
    pairs, times = torch.unique(ids.long() * parent_rows + parents.long(), return_counts=True)
    # pairs come by id, then by parent; each id's most frequent one is moved to its end
    order = torch.argsort(times, descending=True, stable=True).flip(0)
    pairs = pairs[order]
    pairs = pairs[torch.argsort(pairs // parent_rows, stable=True)]
    ids = pairs // parent_rows
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    found = torch.full((rows,), parent_rows, device=ids.device)
    found[ids[is_last]] = pairs[is_last] % parent_rows
    return found


def _shared(base: AnyTable, rows: int, index: Tensor) -> SharedRows:
    home, like = home_of(base), next(base.parameters()).detach()
    table = plain_like(base, like.new_zeros(rows, base.embedding_dim))
    return SharedRows(table, index.to(home), sizes=[rows])


def _picked(values: Tensor, rows: Tensor) -> Tensor:
    """Return `(N, K)` values of these rows, `(...)` to `(..., K)`."""
    return values.index_select(0, rows.reshape(-1)).view(*rows.shape, values.shape[1])
