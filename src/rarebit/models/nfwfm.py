"""NFwFM: a fully connected network over pooled pairs of fields, each with a weight (Guo et al., 2024).

The score of a row:

    score = MLP(f)        f = dropout(norm(sum over all i, j of w_ij (v_i * v_j)))

    w_ij   `backbone.interaction[0].weight`, for all ordered pairs and i = j too, from N(0, 1)
    f      `backbone`: weighted pooling, with batch norm and dropout behind it
    MLP    `head`

It is NFM with the weights of FwFM and without a linear term. With M embedding sets, pooling, norm,
dropout and first layer are per set and the rest is shared:

    score = MLP( mean over m of block_m(f^m) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import nn

from rarebit.data.schema import Schema
from rarebit.interactions.field_pairs import FieldWeightedPooling
from rarebit.models._base import Backbone, Network, Presets, RankingModel, TableOptions
from rarebit.models.nfm import Evened

__all__ = ["NFwFM"]


class NFwFM(RankingModel):
    """A network over the weighted sum of the products of all fields with all fields."""

    presets: ClassVar[Presets] = {
        "me": {"dim": 50, "dropout": 0.2, "batch_norm": True, "init": "xavier"}
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = True,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        pooling = FieldWeightedPooling(len(schema.fields), num_sets=num_sets)
        evened = Evened(dim, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        interaction = network.begin(nn.Sequential(pooling, evened), dim)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(dim),
            settings=settings,
        )
