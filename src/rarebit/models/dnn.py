"""DNN: embeddings and a fully connected network (Covington et al., 2016).

The score of a row:

    score = MLP([v_1, ..., v_F])
"""

from collections.abc import Sequence

from rarebit.data.schema import Schema
from rarebit.interactions.concat import Concatenation
from rarebit.models._base import Backbone, RankingModel
from rarebit.models._mlp import MLP

__all__ = ["DNN"]


class DNN(RankingModel):
    """A fully connected network over all fields side by side."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Concatenation()),
            head=MLP(len(schema.fields) * dim, hidden, dropout=dropout, batch_norm=batch_norm),
            settings={
                "dim": dim,
                "hidden": list(hidden),
                "dropout": dropout,
                "batch_norm": batch_norm,
            },
        )
