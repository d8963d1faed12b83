"""Controls, neighbours and theory: what we measure and do not recommend."""

from rarebit.research._reweighting import (
    UpdateSplit,
    factorized_tables,
    reweighting,
    update_split,
)

__all__ = ["UpdateSplit", "factorized_tables", "reweighting", "update_split"]
