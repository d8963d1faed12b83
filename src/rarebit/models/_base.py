"""What all ranking models share: `score = head(backbone(batch)) + wide(batch)`.

    backbone    embeddings plus interaction: a batch to features, one tensor or several
    head        features to one score a row
    wide        first-order terms, optional

Shapes: B batch, F fields, D width, M embedding sets.

With `num_sets`, a backbone has M embeddings a field, each with an interaction of its own, and returns
the mean of their features, tensor by tensor (multi-embedding: Guo et al., 2024). The M rows of a value
lie side by side in one table: one lookup, whatever M is.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch
from rarebit.data.schema import Schema
from rarebit.errors import SettingsError
from rarebit.settings import require
from rarebit.tables.collection import TableCollection, TableInit

__all__ = ["Backbone", "FirstOrder", "RankingModel", "TableOptions", "settings_of"]


class TableOptions(TypedDict, total=False):
    """How the tables of a model are made; each may be left out."""

    widths: Mapping[str, int]
    """Fields whose tables have a width of their own, which is projected to the model's."""
    init: TableInit
    """How rows start: "normal", or "xavier" over all fields as one table."""
    std: float
    """The spread of rows that start normal."""


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the `locals()` of a model's constructor, plain: its first line.

    >>> settings_of({"self": None, "schema": None, "dim": 4, "hidden": (8,), "tables": {"std": 0.1}})
    {'dim': 4, 'hidden': [8], 'std': 0.1}
    """
    given = {**arguments, **arguments.get("tables", {})}
    return {
        name: list(value)
        if isinstance(value, Iterable) and not isinstance(value, Mapping | str)
        else value
        for name, value in given.items()
        if name not in ("self", "schema", "tables", "__class__")
    }


class RankingModel(nn.Module):
    """A model that scores the rows of a batch: logits `(B,)`."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of papers, by name: `deepfm@pep` is DeepFM with those of `presets["pep"]`."""
    why_no_sets: ClassVar[str] = ""
    """Why the model has no form with several embedding sets; empty where it has one."""

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

    def with_sets(self, num_sets: int) -> Self:
        """Return a new model with the same settings and several embedding sets."""
        if self.why_no_sets:
            raise SettingsError(
                f"{type(self).__name__} takes one embedding set: {self.why_no_sets}"
            )
        return type(self)(self.schema, **{**self.settings, "num_sets": num_sets})


class Backbone(nn.Module):
    """Embeddings plus interaction. A numeric field's embedding is its vector times its value."""

    numeric: nn.Parameter | None

    def __init__(
        self,
        schema: Schema,
        dim: int,
        interaction: nn.Module,
        *,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        super().__init__()
        _check(schema, dim, num_sets)
        width = dim * (num_sets or 1)
        num_numeric = len(schema.numeric_fields)
        self.num_sets = num_sets
        self.tables = TableCollection(schema.table_fields, width, **tables)
        self.register_parameter(
            "numeric", nn.Parameter(0.01 * torch.randn(num_numeric, width)) if num_numeric else None
        )
        self.interaction = interaction

    def embed(self, batch: Batch) -> Tensor:
        """Return the embedding of every field, `(B, F, D)` or `(M, B, F, D)`: tables, then numbers."""
        rows: Tensor = self.tables(batch.ids)
        if self.numeric is not None:
            numbers = batch.numeric.to(self.numeric.dtype)
            rows = torch.cat([rows, numbers.unsqueeze(-1) * self.numeric], dim=1)
        if self.num_sets is None:
            return rows
        sets: Tensor = rows.unflatten(-1, (self.num_sets, -1))  # (B, F, M, D)
        return sets.permute(2, 0, 1, 3)

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """Return the features of the interaction: of several sets, their mean."""
        features: Tensor | tuple[Tensor, ...] = self.interaction(self.embed(batch))
        if self.num_sets is None:
            return features
        if isinstance(features, tuple):
            return tuple(feature.mean(dim=0) for feature in features)
        return features.mean(dim=0)


class FirstOrder(nn.Module):
    """A weight for every id and every number, and a bias: the linear part of a score, `(B,)`."""

    numeric: nn.Parameter | None

    def __init__(self, schema: Schema, *, std: float = 0.01) -> None:
        super().__init__()
        _check_tables(schema)
        self.tables = TableCollection(schema.table_fields, 1, std=std)
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


def _check(schema: Schema, dim: int, num_sets: int | None) -> None:
    require(dim >= 1, f"dim must be at least 1, got dim={dim}")
    require(
        num_sets is None or num_sets >= 1, f"num_sets must be at least 1, got num_sets={num_sets}"
    )
    _check_tables(schema)


def _check_tables(schema: Schema) -> None:
    require(
        len(schema.table_fields) > 0,
        "a ranking model needs at least one categorical or multi-valued field, got "
        f"{[field.name for field in schema.fields]}, all numeric",
    )
