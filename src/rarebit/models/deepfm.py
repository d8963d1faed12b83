"""DeepFM: a factorization machine and a network over the same embeddings (Guo et al., 2017).

The score of a row:

    score = FM(v) + MLP([v_1, ..., v_F])

    FM's first order   `wide`
    FM's second order  the first feature of `backbone`, summed in `head`
    MLP                `head.mlp` over the second feature: all fields side by side

With M embedding sets, FM's second order and the network's first layer are per set:

    score = mean over m of FM(v^m) + MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation, FactorizationMachine, Parallel
from rarebit.models._base import (
    MLP,
    Backbone,
    FirstOrder,
    Network,
    Presets,
    RankingModel,
    TableOptions,
)

__all__ = ["DeepFM"]

_PEP = {"dim": 64, "dropout": 0.2, "batch_norm": True, "init": "xavier", "wide_std": 1.0}


class DeepFM(RankingModel):
    """A factorization machine and a deep network that share their embeddings."""

    presets: ClassVar[Presets] = {
        "pep": {**_PEP, "hidden": (100, 100)},
        "pep_criteo": {**_PEP, "hidden": (400, 400, 400)},  # and Avazu
        "mlet": {"hidden": (256, 128), "init": "xavier_per_table", "wide_std": 1e-4},
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
        network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
        width = len(schema.fields) * dim
        deep = network.begin(Concatenation(), width)
        interaction = Parallel(FactorizationMachine(), deep)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, interaction, num_sets=num_sets, **tables),
            head=DeepFMHead(network.head(width)),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )


class DeepFMHead(nn.Module):
    """The sum of the pairwise products plus the network's score."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        pairs, fields = features  # (B, D), (B, F * D)
        score: Tensor = pairs.sum(dim=-1) + self.mlp(fields)
        return score
