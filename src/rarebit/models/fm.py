"""FM: factorization machine (Rendle, 2010).

The score of a row:

    score = w_0 + sum_i w_i + sum over i < j of <v_i, v_j>

    w_0, w_i   `wide`
    v_i        the rows of `backbone.tables`
"""

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.fm import FactorizationMachine
from rarebit.models._base import Backbone, FirstOrder, RankingModel

__all__ = ["FM"]


class FM(RankingModel):
    """Factorization machine: first-order weights and all pairwise inner products."""

    def __init__(self, schema: Schema, *, dim: int = 16) -> None:
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, FactorizationMachine()),
            head=SumOfFeatures(),
            wide=FirstOrder(schema),
            settings={"dim": dim},
        )


class SumOfFeatures(nn.Module):
    """The sum over a row's features, `(B, D)` to `(B,)`."""

    def forward(self, features: Tensor) -> Tensor:
        """Return one number a row."""
        return features.sum(dim=-1)
