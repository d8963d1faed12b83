"""FFM: field-aware factorization machine (Juan et al., 2016).

The score of a row:

    score = w_0 + sum_i w_i + sum over i < j of <v_i^j, v_j^i>

    w_0, w_i   `wide`
    v_i^j      what value i shows to field j: a row of `backbone.tables` holds v_i^1, ..., v_i^F side
               by side, so that one table and one lookup serve all F of them; v_i^i meets nothing

A field that `widths` names has rows of that width, which are projected to all F D numbers.
"""

from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.field_pairs import FieldAwareMachine
from rarebit.models._base import Backbone, FirstOrder, Presets, RankingModel, TableOptions
from rarebit.models.fm import SumOfFeatures

__all__ = ["FFM"]


class FFM(RankingModel):
    """Field-aware factorization machine: a field has another vector for each other field.

    `dim` is the width of one such vector; a row of a table is as many times as wide as there are
    fields.
    """

    presets: ClassVar[Presets] = {"me": {"dim": 8, "init": "xavier", "wide_std": 1.0}}
    why_no_sets: ClassVar[str] = (
        "a sum of inner products over several sets is the inner product of one set as wide as all"
    )

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 4,
        wide_std: float = 0.01,
        **tables: Unpack[TableOptions],
    ) -> None:
        settings = self.settings_of(locals())
        num_fields = len(schema.fields)
        machine = FieldAwareMachine(num_fields, dim)
        super().__init__(
            schema,
            backbone=Backbone(schema, num_fields * dim, machine, **tables),
            head=SumOfFeatures(),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )
