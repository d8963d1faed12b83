"""`nn.EmbeddingBag` around any table: several ids in, one pooled row out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.tables.table import AnyTable, Table


class Bag(nn.Module):
    """Pools the rows of a table as `nn.EmbeddingBag` does: same arguments, same answers."""

    def __init__(self, table: Table, *, mode: str, include_last_offset: bool) -> None:
        super().__init__()
        self.table = table
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one pooled row per bag. Arguments as for `nn.EmbeddingBag`."""
        return pool_rows(self, self.table(input.reshape(-1)), input, offsets, per_sample_weights)

    @property
    def weight(self) -> Tensor:
        """The full table, differentiable. It costs what the table costs: not for a step."""
        return self.table.weight

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Width of the table."""
        return self.table.embedding_dim

    @property
    def padding_idx(self) -> int | None:
        """The id that is left out of every bag."""
        return self.table.padding_idx

    def extra_repr(self) -> str:
        """Show the pooling."""
        return f"mode={self.mode!r}"


def pool_rows(
    bag: "nn.EmbeddingBag | Bag",
    rows: Tensor,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Return one pooled row per bag, from rows `(T, D)` that were looked up for the T ids of `input`."""
    # torch's own kernel pools the rows that were looked up as if they were a table of T rows,
    # so every mode, offset and weight means exactly what it means there.
    positions = torch.arange(rows.shape[0], device=input.device).view_as(input)
    options: dict[str, Any] = {}
    if bag.padding_idx is not None:
        options["padding_idx"] = rows.shape[0]
        positions = positions.masked_fill(input == bag.padding_idx, rows.shape[0])
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return F.embedding_bag(
        positions,
        rows,
        None if offsets is None else offsets.to(positions.dtype),
        mode=bag.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=bool(bag.include_last_offset),
        **options,
    )


def table_of_bag(bag: nn.EmbeddingBag | Bag) -> AnyTable:
    """Return the table inside a bag; a plain bag's weight is shared, not copied."""
    if isinstance(bag, Bag):
        return bag.table
    table = nn.Embedding(
        bag.num_embeddings,
        bag.embedding_dim,
        padding_idx=bag.padding_idx,
        sparse=bag.sparse,
        _weight=bag.weight.detach(),
        _freeze=not bag.weight.requires_grad,
    )
    return table.train(bag.training)


def bag_like(bag: nn.EmbeddingBag | Bag, table: AnyTable) -> nn.EmbeddingBag | Bag:
    """Return another table with the pooling of this bag; torch's own bag around a plain table."""
    last = bool(bag.include_last_offset)
    if isinstance(table, Table):
        return Bag(table, mode=bag.mode, include_last_offset=last)
    plain: nn.EmbeddingBag = nn.EmbeddingBag.from_pretrained(
        table.weight.detach(),
        freeze=not table.weight.requires_grad,
        mode=bag.mode,
        sparse=table.sparse,
        include_last_offset=last,
        padding_idx=table.padding_idx,
    )
    return plain
