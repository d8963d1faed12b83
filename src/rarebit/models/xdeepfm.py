"""xDeepFM: a compressed interaction network and a deep one over the same embeddings (Lian et al., 2018).

The score of a row:

    score = w . x + w_cin . CIN(v) + MLP([v_1, ..., v_F])

    w . x    `wide`, the first order; without `first_order` the score has none
    CIN      the first feature of `backbone`
    w_cin    `head.maps`
    MLP      `head.mlp` over the second feature: all fields side by side

With M embedding sets, CIN and the network's first layer are per set and the rest is shared (Guo et
al., 2024):

    score = w . x + w_cin . (mean over m of CIN_m(v^m))
                  + MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation, Parallel
from rarebit.interactions.cin import CompressedInteraction
from rarebit.models._base import (
    MLP,
    Backbone,
    FirstOrder,
    Network,
    Presets,
    RankingModel,
    TableOptions,
)

__all__ = ["XDeepFM"]


class XDeepFM(RankingModel):
    """Explicit products of fields, found by CIN, and a deep network."""

    presets: ClassVar[Presets] = {
        "me": {
            "dim": 10,
            "cin": (16, 16),
            "cin_relu": True,
            "dropout": 0.2,
            "batch_norm": True,
            "first_order": False,
            "init": "xavier",
        },
        "mlet": {
            "cin": (256, 128),
            "cin_relu": True,
            "split_half": True,
            "hidden": (256, 256),
            "wide_std": 1e-4,
            "init": "xavier_per_table",
        },
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        cin: Sequence[int] = (64, 64),
        cin_relu: bool = False,
        split_half: bool = False,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
        first_order: bool = True,
        wide_std: float = 0.01,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        num_fields = len(schema.fields)
        maps = CompressedInteraction(
            num_fields, cin, relu=cin_relu, split_half=split_half, num_sets=num_sets
        )
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = num_fields * dim
        deep = network.begin(Concatenation(), width)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Parallel(maps, deep), num_sets=num_sets, **tables),
            head=XDeepFMHead(maps.out_width, network.head(width)),
            wide=FirstOrder(schema, std=wide_std) if first_order else None,
            settings=settings,
        )


class XDeepFMHead(nn.Module):
    """A weighted sum of CIN's feature maps plus the network's score."""

    def __init__(self, num_maps: int, mlp: MLP) -> None:
        super().__init__()
        self.maps = nn.Linear(num_maps, 1, bias=False)  # the network's output has a bias already
        self.mlp = mlp

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        maps, fields = features  # (B, sum of H), (B, F * D)
        score: Tensor = self.maps(maps).squeeze(-1) + self.mlp(fields)
        return score
