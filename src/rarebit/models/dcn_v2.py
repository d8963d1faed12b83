"""DCN-V2: a cross network, then a fully connected one (Wang et al., 2021, "stacked").

The score of a row:

    score = MLP(x_L)        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l

    x_0        all fields side by side
    W_l, b_l   `backbone.interaction`

With M embedding sets, cross network and first layer are per set and the rest is shared (Guo et al.,
2024):

    score = MLP( mean over m of block_m(x_L^m) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.cross import CrossNetwork
from rarebit.models._base import Backbone, Network, Presets, RankingModel, TableOptions

__all__ = ["DCNv2"]


class DCNv2(RankingModel):
    """A cross network that feeds a fully connected one."""

    presets: ClassVar[Presets] = {
        "me": {"dim": 10, "num_layers": 4, "dropout": 0.2, "batch_norm": True, "init": "xavier"}
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        num_layers: int = 3,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        num_fields = len(schema.fields)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = num_fields * dim
        interaction = network.begin(
            CrossNetwork(num_fields, dim, num_layers, num_sets=num_sets), width
        )
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(width),
            settings=settings,
        )
