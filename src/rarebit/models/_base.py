"""What all ranking models share: `score = head(backbone(batch)) + wide(batch)`.

    backbone    embeddings plus interaction: a batch to features, one tensor or several
    head        features to one score a row
    wide        first-order terms, optional

Shapes: B batch, F fields, D width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch
from rarebit.data.schema import Schema
from rarebit.settings import require
from rarebit.tables.collection import TableCollection

__all__ = ["Backbone", "FirstOrder", "RankingModel"]


class RankingModel(nn.Module):
    """A model that scores the rows of a batch: logits `(B,)`."""

    def __init__(
        self,
        schema: Schema,
        *,
        backbone: nn.Module,
        head: nn.Module,
        wide: nn.Module | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.schema = schema
        self.settings = dict(settings)
        """What the model was built with, so that it can be built again."""
        self.backbone = backbone
        self.head = head
        self.wide = wide

    def forward(self, batch: Batch) -> Tensor:
        """Return one logit a row, `(B,)`."""
        score: Tensor = self.head(self.backbone(batch))
        return score if self.wide is None else score + self.wide(batch)


class Backbone(nn.Module):
    """Embeddings plus interaction. A numeric field's embedding is its vector times its value."""

    numeric: nn.Parameter | None

    def __init__(self, schema: Schema, dim: int, interaction: nn.Module) -> None:
        super().__init__()
        _check(schema, dim)
        num_numeric = len(schema.numeric_fields)
        self.tables = TableCollection(schema.table_fields, dim)
        self.register_parameter(
            "numeric", nn.Parameter(0.01 * torch.randn(num_numeric, dim)) if num_numeric else None
        )
        self.interaction = interaction

    def embed(self, batch: Batch) -> Tensor:
        """Return the embedding of every field, `(B, F, D)`: tables first, then numbers."""
        rows: Tensor = self.tables(batch.ids)
        if self.numeric is None:
            return rows
        numbers = batch.numeric.to(self.numeric.dtype)
        return torch.cat([rows, numbers.unsqueeze(-1) * self.numeric], dim=1)

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """Return the features of the interaction."""
        features: Tensor | tuple[Tensor, ...] = self.interaction(self.embed(batch))
        return features


class FirstOrder(nn.Module):
    """A weight for every id and every number, and a bias: the linear part of a score, `(B,)`."""

    numeric: nn.Parameter | None

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.tables = TableCollection(schema.table_fields, 1)
        num_numeric = len(schema.numeric_fields)
        self.register_parameter(
            "numeric", nn.Parameter(torch.zeros(num_numeric)) if num_numeric else None
        )
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the weights of a row."""
        score: Tensor = self.tables(batch.ids).sum(dim=(1, 2)) + self.bias
        if self.numeric is None:
            return score
        return score + batch.numeric.to(self.numeric.dtype) @ self.numeric


def _check(schema: Schema, dim: int) -> None:
    require(dim >= 1, f"dim must be at least 1, got dim={dim}")
    require(
        len(schema.table_fields) > 0,
        "a ranking model needs at least one categorical or multi-valued field, got "
        f"{[field.name for field in schema.fields]}, all numeric",
    )
