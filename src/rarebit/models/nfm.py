"""NFM: a fully connected network over the pooled pairs of fields (He and Chua, 2017).

The score of a row:

    score = w_0 + sum_i w_i + MLP(f)        f = dropout(norm(sum over i < j of v_i * v_j))

    w_0, w_i   `wide`
    f          `backbone`: the paper's bi-interaction pooling, with its batch norm and dropout
    MLP        `head`

With M embedding sets, pooling, norm, dropout and first layer are per set and the rest is shared:

    score = w_0 + sum_i w_i + MLP( mean over m of block_m(f^m) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import FactorizationMachine, SetBatchNorm
from rarebit.models._base import Backbone, FirstOrder, Network, Presets, RankingModel, TableOptions
from rarebit.settings import require

__all__ = ["NFM"]


class NFM(RankingModel):
    """A network over the sum of the products of all pairs of fields."""

    presets: ClassVar[Presets] = {
        "mlet": {"hidden": (128, 128), "init": "xavier_per_table", "wide_std": 1e-4}
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
        evened = Evened(dim, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        interaction = network.begin(nn.Sequential(FactorizationMachine(), evened), dim)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=network.head(dim),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )


class Evened(nn.Module):
    """Batch norm and dropout of pooled features, `(..., D)` to `(..., D)`; one norm per set."""

    def __init__(
        self, dim: int, *, dropout: float, batch_norm: bool, num_sets: int | None = None
    ) -> None:
        super().__init__()
        require(dim >= 1, f"dim must be at least 1, got dim={dim}")
        require(0.0 <= dropout < 1.0, f"dropout must lie in [0, 1), got dropout={dropout}")
        self.norm = SetBatchNorm(dim, num_sets) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, pooled: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.norm(pooled))
        return dropped
