"""What a shrunk table has besides its rows and its prior: the evidence for each of them.

CountedTable  a table that has evidence for its rows; `CountedStack` several
Evidence      counts n and strengths c, of one table or of a stack: w = n / (n + c)
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import DataError
from rarebit.tables.stack import Stack, stack_tables
from rarebit.tables.table import AnyTable, Method, Table, home_of, num_weights

__all__ = [
    "CountedStack",
    "CountedTable",
    "Evidence",
    "counted_in",
    "typical_count",
    "unknown_counts",
]

UNKNOWN = -1
"""The count of a row as long as nobody has given any."""


class Evidence(nn.Module):
    """Counts of the rows of F tables, one table after the other, and a strength for each table."""

    counts: Tensor
    strength: Tensor

    def __init__(self, counts: Tensor, strength: Tensor, *, is_known: bool) -> None:
        super().__init__()
        self.is_known = is_known
        self.register_buffer("counts", counts)  # n, (N,) of int64: half precision ends at 65,504
        if isinstance(strength, nn.Parameter):
            self.strength = strength  # log c, (F,)
        else:
            self.register_buffer("strength", strength)  # c, (F,)

    @property
    def c(self) -> Tensor:
        """The strength of each table, `(F,)`."""
        return self.strength.exp() if isinstance(self.strength, nn.Parameter) else self.strength

    def weights(self, rows: Tensor, fields: Tensor) -> Tensor:
        """Return n / (n + c) of these rows `(..., 1)`; `fields` says which table each belongs to.

        As long as no counts are known, rows are whole, and cannot be trained.
        """
        exact = torch.promote_types(self.strength.dtype, torch.float32)
        c = F.embedding(fields, self.c.to(exact).unsqueeze(-1))  # (..., 1)
        n = self.counts.index_select(0, rows.reshape(-1)).view(*rows.shape, 1)
        if not self.is_known:
            _refuse_training()
            return torch.ones_like(n, dtype=self.strength.dtype)
        # without strength a row is its own, also where 0 / 0 says nothing
        n = torch.where(c > 0, n, 1).to(exact)
        return (n / (n + c)).to(self.strength.dtype)

    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts, in place."""
        self.counts.copy_(counts)
        self.is_known = True

    @classmethod
    def joined(cls, parts: Sequence["Evidence"]) -> Self:
        """Return the evidence of several tables as one."""
        strength = torch.cat([part.strength.detach() for part in parts])
        first = parts[0].strength
        if isinstance(first, nn.Parameter):
            strength = nn.Parameter(strength, requires_grad=first.requires_grad)
        counts = torch.cat([part.counts for part in parts])
        return cls(counts, strength, is_known=all(part.is_known for part in parts))

    def split(self, sizes: Sequence[int]) -> list["Evidence"]:
        """Return the evidence table by table; counts and strengths are shared, not copied."""
        strengths: Sequence[Tensor] = self.strength.detach().split(1)
        if isinstance(self.strength, nn.Parameter):
            trained = self.strength.requires_grad
            strengths = [nn.Parameter(one, requires_grad=trained) for one in strengths]
        parts = zip(self.counts.split(list(sizes)), strengths, strict=True)
        return [Evidence(*part, is_known=self.is_known) for part in parts]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.is_known = bool((self.counts != UNKNOWN).all())


def _refuse_training() -> None:
    # a table that is read from a file has methods applied to it before it has its counts
    if torch.is_grad_enabled():
        raise DataError(
            "a table does not know how often its rows were seen; apply its method with "
            "counts=train.counts(), or use set_counts_(model, train.counts()) before training"
        )


def unknown_counts(base: AnyTable) -> Tensor:
    """Return the counts of a table's rows as long as nobody has given any, `(N,)`.

    >>> unknown_counts(nn.Embedding(2, 4))
    tensor([-1, -1])
    """
    return torch.full((base.num_embeddings,), UNKNOWN, device=home_of(base))


class CountedTable(Table):
    """A table that knows how often its rows were seen."""

    def __init__(self, method: Method, inner: AnyTable, evidence: Evidence) -> None:
        super().__init__(
            method,
            inner,
            num_embeddings=inner.num_embeddings,
            embedding_dim=inner.embedding_dim,
            padding_idx=inner.padding_idx,
        )
        self.evidence = evidence  # n and c

    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place."""
        self.evidence.set_counts_(counts)

    @property
    def num_weights(self) -> int:
        """Numbers that are stored and make up rows: counts are none of them."""
        inner = {id(parameter) for parameter in self.inner.parameters()}
        own = [p.numel() for p in self.parameters() if id(p) not in inner]
        return num_weights(self.inner) + sum(own)


class CountedStack(Stack):
    """Tables that know how often their rows were seen, behind one lookup of rows and one of counts."""

    offsets: Tensor

    def __init__(
        self, method: Method, tables: Sequence[CountedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.sizes = [table.num_embeddings for table in tables]
        self.inner = stack_tables([table.inner for table in tables], lengths)
        self.evidence = Evidence.joined([table.evidence for table in tables])
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        self.register_buffer("offsets", first_rows[self.field_of_slot], persistent=False)

    def weights(self, ids: Tensor) -> Tensor:
        """Return n / (n + c) of the rows of each field."""
        return self.evidence.weights(ids + self.offsets, self.field_of_slot)


def typical_count(counts: Tensor) -> float:
    """Return how often an id that was seen at all was seen, the median; 1 where none was.

    >>> typical_count(torch.tensor([0, 0, 1, 4, 9]))
    4.0
    """
    seen = counts[counts > 0]
    return float(seen.median()) if seen.numel() else 1.0


def counted_in(table: AnyTable) -> list[CountedTable]:
    """Return the tables with counts that a table is made of: none, one, or one a set.

    >>> counted_in(nn.Embedding(9, 4))
    []
    """
    return [part for part in table.modules() if isinstance(part, CountedTable)]
