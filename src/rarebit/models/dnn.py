"""DNN: embeddings and a fully connected network (Covington et al., 2016).

The score of a row:

    score = MLP([v_1, ..., v_F])

With M embedding sets, the first layer is one a set and the rest is shared (Guo et al., 2024):

    score = MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.streams import Concatenation
from rarebit.models._base import (
    MLP,
    Backbone,
    RankingModel,
    TableOptions,
    settings_of,
    with_layer_a_set,
)

__all__ = ["DNN"]


class DNN(RankingModel):
    """A fully connected network over all fields side by side."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "me": {"dim": 10, "dropout": 0.2, "batch_norm": True, "init": "xavier"},
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = settings_of(locals())
        interaction, width, hidden = with_layer_a_set(
            Concatenation(),
            len(schema.fields) * dim,
            hidden,
            num_sets=num_sets,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=MLP(width, hidden, dropout=dropout, batch_norm=batch_norm),
            settings=settings,
        )
