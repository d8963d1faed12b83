"""LR: logistic regression (Richardson et al., 2007, for clicks).

The score of a row:

    score = w_0 + sum_i w_i

    w_0, w_i   `backbone`: a weight for every id, and for a numeric field one times its value
"""

from typing import ClassVar

from torch import nn

from rarebit.data.schema import Schema
from rarebit.models._base import FirstOrder, Presets, RankingModel

__all__ = ["LR"]


class LR(RankingModel):
    """Logistic regression: one weight for every id, no interaction."""

    presets: ClassVar[Presets] = {"pep": {"wide_std": 1.0}}
    why_no_sets: ClassVar[str] = (
        "a sum of weights over several sets is one weight, the sum over the sets"
    )

    def __init__(self, schema: Schema, *, wide_std: float = 0.01) -> None:
        settings = self.settings_of(locals())
        super().__init__(
            schema, backbone=FirstOrder(schema, std=wide_std), head=nn.Identity(), settings=settings
        )
