"""DCN-V2: a cross network, then a fully connected one (Wang et al., 2021, "stacked").

The score of a row:

    score = MLP(x_L)        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l

    x_0        all fields side by side
    W_l, b_l   `backbone.interaction`
"""

from collections.abc import Sequence

from rarebit.data.schema import Schema
from rarebit.interactions.cross import CrossNetwork
from rarebit.models._base import Backbone, RankingModel
from rarebit.models._mlp import MLP

__all__ = ["DCNv2"]


class DCNv2(RankingModel):
    """A cross network that feeds a fully connected one."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        num_layers: int = 3,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        num_fields = len(schema.fields)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, CrossNetwork(num_fields, dim, num_layers)),
            head=MLP(num_fields * dim, hidden, dropout=dropout, batch_norm=batch_norm),
            settings={
                "dim": dim,
                "num_layers": num_layers,
                "hidden": list(hidden),
                "dropout": dropout,
                "batch_norm": batch_norm,
            },
        )
