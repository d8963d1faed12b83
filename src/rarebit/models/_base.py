"""What all ranking models share: `score = head(backbone(batch)) + wide(batch)`.

    backbone    embeddings plus interaction: a batch to features, one tensor or several
    head        features to one score per row
    wide        first-order terms, optional

Shapes: B batch, F fields, D width, M embedding sets.

With `num_sets`, a backbone has M embeddings per field, each with its own interaction, and returns the mean
of their features, tensor by tensor (multi-embedding: Guo et al., 2024). The M rows of a value lie side by
side in one table: one lookup, whatever M is.

An interaction without a nonlinearity would make of M sets no more than one wide set. So `Network` puts the
first hidden layer behind the interaction of each set, before the mean, and leaves the others to the head:

    one set      features = interaction(v)                                  head: all hidden layers
    M sets       features = mean over m of block_m(interaction_m(v^m))      head: without the first
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch
from rarebit.data.schema import Schema
from rarebit.errors import SettingsError, UnsupportedTableError
from rarebit.interactions.basic import Block, Linear
from rarebit.sets.sets import SetsMethod
from rarebit.settings import find_class, keyword_arguments, offered, require, suggest
from rarebit.tables.collection import TableCollection, TableInit
from rarebit.tables.holders import refuse_holders
from rarebit.tables.table import full_table

PACKAGE = "rarebit.models"
"""Where models are, one per file."""
Presets: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings of papers, by name: `deepfm@pep` is DeepFM with those of `presets["pep"]`."""
# MLET's paper takes all models but DLRM from DeepCTR-Torch: depths and widths, no dropout, no batch norm. It starts
# each table with Xavier of its own size, where DeepCTR-Torch has N(0, 1e-4²); first-order weights, of which it says
# nothing, start as there.
# NOTE[DIFF]: DeepCTR-Torch adds the squares of all tables, times 1e-5, to the loss; weight decay is no part of a model here.
# It also gives the network its numbers as they are; here they are fields with a vector each.


class TableOptions(TypedDict, total=False):
    """How the tables of a model are made; all keys are optional."""

    widths: Mapping[str, int]
    """Fields whose tables have their own width, which is projected to the model's."""
    init: TableInit
    """How rows start: "normal", "xavier" over all fields as one table, or "xavier_per_table"."""
    std: float
    """The standard deviation of rows that start normal."""


class RankingModel(nn.Module):
    """A model that scores the rows of a batch: logits `(B,)`."""

    presets: ClassVar[Presets] = {}
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
        """The constructor's arguments, so that the model can be built again."""
        self.backbone = backbone
        self.head = head
        self.wide = wide

    @staticmethod
    def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings among the `locals()` of a model's constructor: its first line."""
        given = {**arguments, **arguments.get("tables", {})}
        return {
            name: list(value)
            if isinstance(value, Iterable) and not isinstance(value, Mapping | str)
            else value
            for name, value in given.items()
            if name not in ("self", "schema", "tables", "__class__")
        }

    def forward(self, batch: Batch) -> Tensor:
        """Return one logit per row, `(B,)`."""
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
            f"{name} has fields with their own widths, whose rows all embedding sets would share; "
            "build it without widths",
        )
        refuse_holders(self, [own, self.head], str(made_by))
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
        require(dim >= 1, f"dim must be at least 1, got dim={dim}")
        require(
            num_sets is None or num_sets >= 1,
            f"num_sets must be at least 1, got num_sets={num_sets}",
        )
        _require_tables(schema)
        width = dim * (num_sets or 1)
        num_numeric = len(schema.numeric_fields)
        self.num_sets = num_sets
        self.tables = TableCollection(schema.table_fields, width, num_sets=num_sets or 1, **tables)
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

    def start_first_set_(self, other: "Backbone") -> None:
        """Give the first set the rows of a backbone with one set."""
        with torch.no_grad():
            for new, old in zip(self.tables.tables(), other.tables.tables(), strict=True):
                new.weight[:, : old.embedding_dim] = full_table(old)
            if self.numeric is not None and other.numeric is not None:
                self.numeric[:, : other.numeric.shape[1]] = other.numeric

    def refuse_equal_sets(self) -> None:
        """Raise when two sets start with the same rows: they would never differ."""
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
        _require_tables(schema)
        self.tables = TableCollection(schema.table_fields, 1, std=std)
        num_numeric = len(schema.numeric_fields)
        self.register_parameter(
            "numeric", nn.Parameter(torch.zeros(num_numeric)) if num_numeric else None
        )
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> Tensor:
        score: Tensor = self.tables(batch.ids).sum(dim=(1, 2)) + self.bias
        if self.numeric is None:
            return score
        return score + batch.numeric.to(self.numeric.dtype) @ self.numeric


def _require_tables(schema: Schema) -> None:
    require(
        len(schema.table_fields) > 0,
        "a ranking model needs at least one categorical or multi-valued field, got "
        f"{[field.name for field in schema.fields]}, all numeric",
    )


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
        score: Tensor = self.layers(features).squeeze(-1)
        return score


@dataclass(frozen=True)
class Network:
    """The hidden layers behind an interaction; with embedding sets, the first is per set."""

    hidden: Sequence[int]
    dropout: float
    batch_norm: bool
    num_sets: int | None

    def begin(self, interaction: nn.Module, width: int) -> nn.Module:
        """Return the interaction, which has features of this width, with the first layer of each set."""
        if self.num_sets is None:
            return interaction
        require(
            len(self.hidden) >= 1, "several embedding sets need a hidden layer each, got hidden=()"
        )
        dropout, batch_norm, num_sets = self.dropout, self.batch_norm, self.num_sets
        block = Block(
            width, self.hidden[0], dropout=dropout, batch_norm=batch_norm, num_sets=num_sets
        )
        return nn.Sequential(interaction, block)

    def head(self, width: int) -> MLP:
        """Return the layers that are left."""
        hidden = self.hidden
        if self.num_sets is not None:
            width, hidden = hidden[0], tuple(hidden[1:])
        return MLP(width, hidden, dropout=self.dropout, batch_norm=self.batch_norm)


def model_names() -> list[str]:
    """Return the names of all models: the files of this folder."""
    return offered(PACKAGE)


def preset_names() -> list[str]:
    """Return the names of all models with the settings of a paper."""
    return [f"{name}@{preset}" for name in model_names() for preset in model_class(name).presets]


OWN_MODELS: dict[str, Callable[[], nn.Module]] = {}
"""What builds a model of the user's own, by a name that is known in this process and while it is in use."""


def model_class(name: str) -> type[RankingModel]:
    """Return the class of a model by its name, with or without a preset."""
    return find_class(PACKAGE, name.partition("@")[0], RankingModel, what="model")


def build_model(
    name: str, schema: Schema, settings: Mapping[str, Any] | None = None
) -> RankingModel:
    """Build a model by name for the fields of a data set.

    >>> from rarebit.data.schema import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(build_model("deepfm", schema, {"dim": 4})).__name__
    'DeepFM'
    """
    if name in OWN_MODELS:
        return cast("RankingModel", OWN_MODELS[name]())
    return model_class(name)(schema, **model_settings(name, settings or {}))


def model_settings(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model, checked: names, and types. Those of a preset come first."""
    if name in OWN_MODELS:
        return {}
    _, at, preset = name.partition("@")
    presets = model_class(name).presets
    if at and preset not in presets:
        raise SettingsError(f"unknown preset {name!r}{suggest(preset, presets)}")
    checked = keyword_arguments(model_class(name).__init__, values, where=f"model {name}")
    return {**presets.get(preset, {}), **checked}
