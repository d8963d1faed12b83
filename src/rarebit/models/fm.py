"""FM: factorization machine (Rendle, 2010).

The score of a row:

    score = w_0 + sum_i w_i + sum over i < j of <v_i, v_j>

    w_0, w_i   `wide`
    v_i        the rows of `backbone.tables`
"""

from typing import ClassVar, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import FactorizationMachine
from rarebit.models._base import Backbone, FirstOrder, Presets, RankingModel, TableOptions

__all__ = ["FM"]


class FM(RankingModel):
    """Factorization machine: first-order weights and all pairwise inner products."""

    presets: ClassVar[Presets] = {"pep": {"dim": 64, "init": "xavier", "wide_std": 1.0}}
    why_no_sets: ClassVar[str] = (
        "a sum of inner products over several sets is the inner product of one set as wide as all"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        wide_std: float = 0.01,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, FactorizationMachine(), **tables),
            head=SumOfFeatures(),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )


class SumOfFeatures(nn.Module):
    """The sum over a row's features, `(B, D)` to `(B,)`."""

    def forward(self, features: Tensor) -> Tensor:
        return features.sum(dim=-1)
