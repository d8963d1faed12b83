"""DLRM: numbers through their own network, then inner products of all vectors (Naumov et al., 2019).

The score of a row:

    score = top([v_0, <v_0, v_1>, <v_0, v_2>, ..., <v_{F-1}, v_F>])        v_0 = bottom(numbers)

    v_0             `backbone.bottom`: all numeric fields to one vector, as wide as a table's row
    v_1, ..., v_F   the rows of `backbone.tables`
    top             `head`

Without numeric fields there is no v_0: the top sees the products of the tables' rows alone.

With M embedding sets, the products and the top's first layer are per set. The bottom's last layer is
M times as wide and holds a vector for each set, as a row of a table does; its other layers are shared:

    score = top( mean over m of block_m([v_0^m, <v_0^m, v_1^m>, ...]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Batch
from rarebit.data.schema import Schema
from rarebit.interactions.basic import Blocks, InnerProducts
from rarebit.models._base import Backbone, Network, Presets, RankingModel, TableOptions

__all__ = ["DLRM"]


class DLRM(RankingModel):
    """A bottom network for numbers, inner products of all vectors, and a top network."""

    # NOTE[DIFF]: DLRM's own code starts rows uniform in ±1 / sqrt(rows of the table); here they start as
    # in every model, or with Xavier of each table in the presets, as the paper of those says
    presets: ClassVar[Presets] = {
        "mlet": {  # Criteo
            "bottom": (512, 256, 128),
            "hidden": (512, 256),
            "init": "xavier_per_table",
        },
        "mlet_avazu": {"bottom": (256, 128), "hidden": (512, 256), "init": "xavier_per_table"},
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        bottom: Sequence[int] = (512, 256, 64),
        hidden: Sequence[int] = (512, 256),
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        num_bottom = 1 if schema.numeric_fields else 0
        products = InnerProducts(len(schema.table_fields) + num_bottom, dim, num_kept=num_bottom)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        interaction = network.begin(products, products.out_width)
        super().__init__(
            schema,
            backbone=DLRMBackbone(schema, dim, bottom, interaction, num_sets, **tables),
            head=network.head(products.out_width),
            settings=settings,
        )


class DLRMBackbone(Backbone):
    """Embeddings plus interaction, where all numbers together make one vector, the first."""

    def __init__(
        self,
        schema: Schema,
        dim: int,
        bottom: Sequence[int],
        interaction: nn.Module,
        num_sets: int | None,
        **tables: Unpack[TableOptions],
    ) -> None:
        super().__init__(schema, dim, interaction, num_sets=num_sets, **tables)
        self.numeric = None  # the bottom replaces the vector per number
        num_numeric = len(schema.numeric_fields)
        widths = (*bottom, dim * (num_sets or 1))
        self.bottom = Blocks(num_numeric, widths) if num_numeric else None

    def embed(self, batch: Batch) -> Tensor:
        """Return the bottom's vector and the tables' rows, `(B, 1 + F, D)` or `(M, B, 1 + F, D)`."""
        rows = super().embed(batch)
        if self.bottom is None:
            return rows
        vector: Tensor = self.bottom(batch.numeric.to(rows.dtype))  # (B, D) or (B, M * D)
        if self.num_sets is not None:
            vector = vector.unflatten(-1, (self.num_sets, -1)).transpose(0, 1)  # (M, B, D)
        return torch.cat([vector.unsqueeze(-2), rows], dim=-2)
