"""The fully connected part of a model.

What all ranking models share: `score = head(backbone(batch)) + wide(batch)`.

    backbone    embeddings plus interaction: a batch to features, one tensor or several
    head        features to one score a row
    wide        first-order terms, optional

Shapes: B batch, F fields, D width, M embedding sets.

With `num_sets`, a backbone has M embeddings a field, each with an interaction of its own, and returns
the mean of their features, tensor by tensor (multi-embedding: Guo et al., 2024). The M rows of a value
lie side by side in one table: one lookup, whatever M is.

The set form of a model: what each embedding set has of its own, before the mean over sets.

    one set      features = interaction(v)                         head: all hidden layers
    M sets       features = mean over m of block_m(interaction_m(v^m))      head: without the first

An interaction without a nonlinearity would make of M sets no more than one wide set, so a layer is put
behind each, and the head has one less (Guo et al., 2024).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch
from rarebit.data.schema import Schema
from rarebit.errors import SettingsError, UnsupportedTableError
from rarebit.interactions.block import Block, Linear
from rarebit.sets.sets import SetsMethod
from rarebit.settings import require
from rarebit.tables.collection import TableCollection, TableInit
from rarebit.tables.table import full_table

__all__ = [
    "MLP",
    "Backbone",
    "FirstOrder",
    "RankingModel",
    "TableOptions",
    "settings_of",
    "with_layer_a_set",
]


class MLP(nn.Module):
    """Hidden layers of `Linear, [BatchNorm,] ReLU, [Dropout]` and one output, `(B, W)` to `(B,)`."""

    def __init__(
        self, width: int, hidden: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()
        require(
            all(units >= 1 for units in hidden), f"hidden layers need at least 1 unit, got {hidden}"
        )
        require(0.0 <= dropout < 1.0, f"dropout must lie in [0, 1), got dropout={dropout}")
        layers: list[nn.Module] = []
        for units in hidden:
            layers.append(Linear(width, units))
            if batch_norm:
                layers.append(nn.BatchNorm1d(units))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        self.layers = nn.Sequential(*layers, Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return one number a row."""
        score: Tensor = self.layers(features).squeeze(-1)
        return score


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

    def take_sets_(self, num_sets: int, made_by: SetsMethod) -> TableCollection:
        """Become the model with several embedding sets, in place, and return its tables.

        The first set starts at the rows the model has. All else of backbone and head is drawn anew;
        the wide part stays.
        """
        grown, name = self.with_sets(num_sets), type(self).__name__
        own, new = self.backbone, grown.backbone
        assert isinstance(own, Backbone)
        assert isinstance(new, Backbone)
        require(
            own.num_sets is None,
            f"{name} has {own.num_sets} embedding sets already; build it without num_sets first",
        )
        require(
            not own.tables.projections,
            f"{name} has fields with widths of their own, whose rows all embedding sets would share; "
            "build it without widths",
        )
        new.start_first_set_(own)
        new.refuse_equal_sets()
        new.made_by = made_by
        like = next(own.tables.parameters())
        grown.to(like.device, like.dtype).train(own.training)
        self.backbone, self.head = new, grown.head
        return new.tables


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
        if num_sets is not None and tables.get("init") == "xavier":
            self._widen_bound_(dim)
        self.register_parameter(
            "numeric", nn.Parameter(0.01 * torch.randn(num_numeric, width)) if num_numeric else None
        )
        self.interaction = interaction
        self.made_by: SetsMethod | None = None
        """The method that gave a model its sets; None where it was built with them."""

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

    def _widen_bound_(self, dim: int) -> None:
        """Start each set within Xavier's bound of a table of its own, not of one as wide as all sets."""
        rows = sum(field.rows for field in self.tables.fields)
        with torch.no_grad():
            for table in self.tables.tables():
                if table.embedding_dim == self.tables.dim:
                    table.weight.mul_(((rows + self.tables.dim) / (rows + dim)) ** 0.5)

    def start_first_set_(self, other: "Backbone") -> None:
        """Give the first set the rows of a backbone with one set."""
        with torch.no_grad():
            for new, old in zip(self.tables.tables(), other.tables.tables(), strict=True):
                new.weight[:, : old.embedding_dim] = full_table(old)
            if self.numeric is not None and other.numeric is not None:
                self.numeric[:, : other.numeric.shape[1]] = other.numeric

    def refuse_equal_sets(self) -> None:
        """Raise when two sets start with the same rows: nothing tells them apart."""
        for field, table in zip(self.tables.fields, self.tables.tables(), strict=True):
            rows = full_table(table)
            if table.padding_idx is not None:
                rows = torch.cat([rows[: table.padding_idx], rows[table.padding_idx + 1 :]])
            sets = enumerate(rows.chunk(self.num_sets or 1, dim=1), start=1)
            for (i, first), (j, second) in itertools.combinations(sets, 2):
                if first.numel() and torch.equal(first, second):
                    raise UnsupportedTableError(
                        f"embedding sets {i} and {j} of {field.name!r} start with equal rows, and sets "
                        "that are equal never differ; let rows start at random, as with std=0.01"
                    )


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


def with_layer_a_set(
    interaction: nn.Module,
    width: int,
    hidden: Sequence[int],
    *,
    num_sets: int | None,
    dropout: float,
    batch_norm: bool,
) -> tuple[nn.Module, int, Sequence[int]]:
    """Return an interaction, the width of its features, and the hidden layers left for the head.

    >>> with_layer_a_set(nn.Identity(), 6, (8, 4), num_sets=None, dropout=0.0, batch_norm=False)
    (Identity(), 6, (8, 4))
    """
    if num_sets is None:
        return interaction, width, hidden
    require(len(hidden) >= 1, "several embedding sets need a hidden layer each, got hidden=()")
    block = Block(width, hidden[0], dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
    return nn.Sequential(interaction, block), hidden[0], tuple(hidden[1:])
