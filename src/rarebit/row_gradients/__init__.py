"""Seam 3: a rule rewrites the gradient of each row before the optimizer sees it."""
