"""DeepFM: a factorization machine and a network over the same embeddings (Guo et al., 2017).

The score of a row:

    score = FM(v) + MLP([v_1, ..., v_F])

    FM's first order   `wide`
    FM's second order  the first feature of `backbone`, summed in `head`
    MLP                `head.mlp` over the second feature: all fields side by side
"""

from collections.abc import Sequence

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.concat import Concatenation
from rarebit.interactions.fm import FactorizationMachine
from rarebit.interactions.parallel import Parallel
from rarebit.models._base import Backbone, FirstOrder, RankingModel
from rarebit.models._mlp import MLP

__all__ = ["DeepFM"]


class DeepFM(RankingModel):
    """A factorization machine and a deep network that share their embeddings."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Parallel(FactorizationMachine(), Concatenation())),
            head=DeepFMHead(
                MLP(len(schema.fields) * dim, hidden, dropout=dropout, batch_norm=batch_norm)
            ),
            wide=FirstOrder(schema),
            settings={
                "dim": dim,
                "hidden": list(hidden),
                "dropout": dropout,
                "batch_norm": batch_norm,
            },
        )


class DeepFMHead(nn.Module):
    """The sum of the pairwise products plus the network's score."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        """Return one number a row."""
        pairs, fields = features  # (B, D), (B, F * D)
        score: Tensor = pairs.sum(dim=-1) + self.mlp(fields)
        return score
