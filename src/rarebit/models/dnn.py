"""DNN: embeddings and a fully connected network (Covington et al., 2016).

The score of a row:

    score = MLP([v_1, ..., v_F])

With M embedding sets, the first layer is per set and the rest is shared (Guo et al., 2024):

    score = MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation
from rarebit.models._base import Backbone, Network, Presets, RankingModel, TableOptions

__all__ = ["DNN"]


class DNN(RankingModel):
    """A fully connected network over all fields side by side."""

    presets: ClassVar[Presets] = {
        "me": {"dim": 10, "dropout": 0.2, "batch_norm": True, "init": "xavier"}
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
        settings = self.settings_of(locals())
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = len(schema.fields) * dim
        interaction = network.begin(Concatenation(), width)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(width),
            settings=settings,
        )
