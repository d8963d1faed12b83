"""IPNN: a network over the fields and their inner products (Qu et al., 2016).

The score of a row:

    score = MLP([v_1, ..., v_F, <v_1, v_2>, <v_1, v_3>, ..., <v_{F-1}, v_F>])

    v_i, <v_i, v_j>   `backbone`
    MLP               `head`

With M embedding sets, the products and the first layer are per set and the rest is shared (Guo et
al., 2024); without `flat_in_sets`, as their code was released, a set gives its products alone:

    score = MLP( mean over m of block_m([v_1^m, ..., v_F^m, <v_1^m, v_2^m>, ...]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.basic import InnerProducts
from rarebit.models._base import Backbone, Network, Presets, RankingModel, TableOptions

__all__ = ["IPNN"]

_ME = {"dim": 10, "dropout": 0.2, "batch_norm": True, "init": "xavier"}


class IPNN(RankingModel):
    """A fully connected network over all fields and the inner product of every pair."""

    presets: ClassVar[Presets] = {
        "me": {**_ME, "flat_in_sets": False},
        "me_flat": {**_ME, "flat_in_sets": True},
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
        flat_in_sets: bool = True,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        num_fields = len(schema.fields)
        flat = num_sets is None or flat_in_sets
        products = InnerProducts(num_fields, dim, num_kept=num_fields if flat else 0)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        interaction = network.begin(products, products.out_width)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(products.out_width),
            settings=settings,
        )
