"""Seam 3: a rule rewrites the gradient of each row before the optimizer sees it."""

from rarebit.row_gradients.seam import GroupRule, RowGradients, RowStep, Rule, sum_losses

__all__ = ["GroupRule", "RowGradients", "RowStep", "Rule", "sum_losses"]
