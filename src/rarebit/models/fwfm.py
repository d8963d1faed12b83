"""FwFM: field-weighted factorization machine (Pan et al., 2018).

The score of a row:

    score = w_0 + sum_i w_i + sum over i < j of r_ij <v_i, v_j>

    w_0, w_i   `wide`
    v_i        the rows of `backbone.tables`
    r_ij       `backbone.interaction.strength`: how much fields i and j matter together

Of the paper's three linear terms this is the first, a weight for every id ("FwFMs_LW"), as in FM.
"""

from typing import ClassVar, Unpack

from rarebit.data.schema import Schema
from rarebit.interactions.field_pairs import FieldWeightedMachine
from rarebit.models._base import Backbone, FirstOrder, RankingModel, TableOptions
from rarebit.models.fm import SumOfFeatures

__all__ = ["FwFM"]


class FwFM(RankingModel):
    """Factorization machine with a weight for each pair of fields."""

    why_no_sets: ClassVar[str] = (
        "it is linear in each field's embedding, so several sets are one set as wide as all, whose "
        "parts have their own pair weights"
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
        machine = FieldWeightedMachine(len(schema.fields))
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, machine, **tables),
            head=SumOfFeatures(),
            wide=FirstOrder(schema, std=wide_std),
            settings=settings,
        )
