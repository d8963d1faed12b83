"""Wide & Deep: a linear model and a fully connected network side by side (Cheng et al., 2016).

The score of a row:

    score = w_0 + sum_i w_i + MLP([v_1, ..., v_F])

    w_0, w_i   `wide`; crossed columns, where wanted, are fields of the data
    MLP        `head` over all fields side by side

With M embedding sets, the network's first layer is per set and the rest is shared, as in DNN:

    score = w_0 + sum_i w_i + MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation
from rarebit.models._base import Backbone, FirstOrder, Network, Presets, RankingModel, TableOptions

__all__ = ["WideDeep"]


class WideDeep(RankingModel):
    """First-order weights plus a fully connected network over all fields."""

    presets: ClassVar[Presets] = {
        "mlet": {"hidden": (256, 128), "init": "xavier_per_table", "wide_std": 1e-4}
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
        wide_std: float = 0.01,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = len(schema.fields) * dim
        interaction = network.begin(Concatenation(), width)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(width),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )
