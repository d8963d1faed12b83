"""DCN: a cross network and a deep one (Wang et al., 2017).

The score of a row:

    score = w . [x_L, h_L] + b        x_{l+1} = x_0 (w_l . x_l) + b_l + x_l
                                      h_{l+1} = relu(W_l h_l + c_l),   h_0 = x_0

    x_0        all fields side by side
    x_L        the first feature of `backbone`
    h_L        `head.mlp` over the second feature, x_0
    w, b       `head.cross` for x_L, the last layer of `head.mlp` for h_L

With M embedding sets, cross network and first layer are per set and the rest is shared:

    score = w . [mean over m of x_L^m, h_L] + b        h_1 = mean over m of block_m(x_0^m)
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation, Parallel
from rarebit.interactions.cross import VectorCrossNetwork
from rarebit.models._base import MLP, Backbone, Network, Presets, RankingModel, TableOptions

__all__ = ["DCN"]


class DCN(RankingModel):
    """A cross network of one vector per layer and a deep network, side by side."""

    # NOTE[DIFF]: newer versions of DeepCTR-Torch add first-order terms; the paper of DCN has none
    presets: ClassVar[Presets] = {
        "mlet": {"num_layers": 2, "hidden": (128, 128), "init": "xavier_per_table"}
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
        cross = VectorCrossNetwork(num_fields, dim, num_layers, num_sets=num_sets)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = num_fields * dim
        deep = network.begin(Concatenation(), width)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Parallel(cross, deep), num_sets=num_sets, **tables),
            head=DCNHead(num_fields * dim, network.head(width)),
            settings=settings,
        )


class DCNHead(nn.Module):
    """A weighted sum of the crossed features and the deep network's last layer."""

    def __init__(self, width: int, mlp: MLP) -> None:
        super().__init__()
        self.cross = nn.Linear(width, 1, bias=False)  # the network's output has a bias already
        self.mlp = mlp

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        crossed, fields = features  # (B, F * D) each; with sets, the second is a hidden layer
        score: Tensor = self.cross(crossed).squeeze(-1) + self.mlp(fields)
        return score
