"""AutoInt: self-attention over fields (Song et al., 2019).

The score of a row:

    score = w . [e_1, ..., e_F] + MLP([v_1, ..., v_F])

    e_i     what attention makes of v_1, ..., v_F: the first feature of `backbone`
    w       `head.attention`
    MLP     `head.mlp` over the second feature; only where there are `hidden` layers: AutoInt+

`residual` chooses where a field's own embedding is added to what it attends to: in "each" layer, as in the
paper, or "once" behind the last, as in the code of learned pruning (Liu et al., 2021). `first_order` adds
w_0 + sum_i w_i, as DeepCTR-Torch does: `wide`.

With M embedding sets, attention and the network's first layer are per set:

    score = w . mean over m of [e_1^m, ..., e_F^m] + MLP( mean over m of block_m([v_1^m, ..., v_F^m]) )
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, Unpack

from torch import Tensor, nn

from rarebit.data.schema import Schema
from rarebit.interactions.basic import Concatenation, Parallel
from rarebit.interactions.self_attention import OneResidual, SelfAttention
from rarebit.models._base import (
    MLP,
    Backbone,
    FirstOrder,
    Network,
    Presets,
    RankingModel,
    TableOptions,
)
from rarebit.settings import require

__all__ = ["AutoInt"]

_PEP = {"dim": 64, "residual": "once", "dropout": 0.2, "batch_norm": True, "init": "xavier"}


class AutoInt(RankingModel):
    """Fields that look at each other, and a network over them where there are hidden layers."""

    presets: ClassVar[Presets] = {
        "pep": {**_PEP, "hidden": (100, 100), "attention_dropout": 0.4},
        "pep_criteo": {**_PEP, "hidden": (400, 400, 400)},  # and Avazu
        # DeepCTR-Torch's heads share the width: head_dim is dim / 2, so 8 at dim=16
        "mlet": {
            "head_dim": 8,
            "hidden": (256, 128),
            "first_order": True,
            "init": "xavier_per_table",
            "wide_std": 1e-4,
        },
    }

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        num_layers: int = 3,
        num_heads: int = 2,
        head_dim: int = 32,
        residual: Literal["each", "once"] = "each",
        attention_dropout: float = 0.0,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        batch_norm: bool = False,
        first_order: bool = False,
        wide_std: float = 0.01,
        num_sets: int | None = None,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        require(0.0 <= dropout < 1.0, f"dropout must lie in [0, 1), got dropout={dropout}")
        num_fields = len(schema.fields)
        attention = SelfAttention if residual == "each" else OneResidual
        branches: list[nn.Module] = [
            attention(
                dim,
                num_layers=num_layers,
                num_heads=num_heads,
                head_dim=head_dim,
                dropout=attention_dropout,
                num_sets=num_sets,
            )
        ]
        mlp = None
        if hidden:
            network = Network(hidden, dropout=dropout, batch_norm=batch_norm, num_sets=num_sets)
            branches.append(network.begin(Concatenation(), num_fields * dim))
            mlp = network.head(num_fields * dim)
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Parallel(*branches), num_sets=num_sets, **tables),
            head=AutoIntHead(num_fields * num_heads * head_dim, mlp),
            wide=FirstOrder(schema, std=wide_std) if first_order else None,
            settings=settings,
        )


class AutoIntHead(nn.Module):
    """A weighted sum of the attended fields, plus the network's score."""

    def __init__(self, width: int, mlp: MLP | None) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 1)
        self.mlp = mlp

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        score: Tensor = self.attention(features[0]).squeeze(-1)  # (B, F * H * A)
        return score if self.mlp is None else score + self.mlp(features[1])  # (B, F * D)
