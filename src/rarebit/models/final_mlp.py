"""FinalMLP: two networks, and every product of their features (Mao et al., 2023).

The score of a row:

    score = b + w_x . x + w_y . y + sum over h of  x_h' W_h y_h

    x, y         two networks over all fields side by side: `backbone.interaction.first`, `.second`
    x_h, y_h     the h-th of `num_heads` equal parts of x and of y
    b, w_x, w_y  `head.linear`, x before y
    W_h          `head.products[h]`, zero at first (Guo et al., 2024)

The paper's gates, which give each stream other fields, are not included: those who used the model for
multi-embedding left them out.

With M embedding sets, the streams are per set and their features are averaged before the products:

    x = mean over m of x^m        y = mean over m of y^m
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import TwoStreams
from rarebit.models._base import Backbone, Presets, RankingModel, TableOptions
from rarebit.settings import require

__all__ = ["FinalMLP"]


class FinalMLP(RankingModel):
    """Two fully connected networks whose features meet in a bilinear form."""

    presets: ClassVar[Presets] = {
        "me": {"dim": 10, "dropout": 0.2, "batch_norm": True, "init": "xavier"}
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        second_hidden: Sequence[int] | None = None,
        num_heads: int = 1,
        dropout: float = 0.0,
        batch_norm: bool = False,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        require(dim >= 1, f"dim must be at least 1, got dim={dim}")
        require(
            num_sets is None or bool(hidden),
            "several embedding sets need a hidden layer each, got hidden=()",
        )
        streams = TwoStreams(
            len(schema.fields) * dim,
            hidden,
            hidden if second_hidden is None else second_hidden,
            dropout=dropout,
            batch_norm=batch_norm,
            num_sets=num_sets,
        )
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, streams, num_sets=num_sets, **tables),
            head=BilinearFusion(streams.first.out_width, streams.second.out_width, num_heads),
            settings=settings,
        )


class BilinearFusion(nn.Module):
    """First-order terms of both streams and the products between them, head by head."""

    def __init__(self, first: int, second: int, num_heads: int) -> None:
        super().__init__()
        require(
            num_heads >= 1 and first % num_heads == 0 and second % num_heads == 0,
            "num_heads must divide the width of both streams, "
            f"got num_heads={num_heads} for widths {first} and {second}",
        )
        self.linear = nn.Linear(first + second, 1)
        self.products = nn.Parameter(
            torch.zeros(num_heads, first // num_heads, second // num_heads)
        )

    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        linear: Tensor = self.linear(torch.cat(streams, dim=-1)).squeeze(-1)
        x, y = (stream.unflatten(-1, (len(self.products), -1)) for stream in streams)  # (B, H, X)
        pulled = torch.einsum("bhx,hxy->bhy", x, self.products)
        products: Tensor = (pulled * y).sum(dim=(-2, -1))
        return linear + products
