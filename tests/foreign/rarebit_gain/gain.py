"""One gain per table.

e(i) = g W[i]
"""

from dataclasses import dataclass

import torch
from torch import nn

import rarebit as rb

__all__ = ["Gain"]


@dataclass(frozen=True, kw_only=True)
class Gain(rb.Method):
    """Train one gain per table together with its rows."""

    title = "one gain per table"
    paper = "none: an example"
    cost = "one product per looked-up row; one weight per table"
    applies = "tables whose rows should grow and shrink together; not others"
    knobs = {"start": (1.0, 0.5, 2.0)}  # noqa: RUF012  # as users write it
    composition_rank = rb.Rank.EVIDENCE

    start: float = 1.0
    """The initial gain."""

    def wrap(self, base):
        """Return the table with a gain."""
        return GainTable(self, base)


class GainTable(rb.Table):
    """e(i) = g W[i]."""

    def __init__(self, method, base):
        super().__init__(method, base)
        like = next(base.parameters())
        start = torch.tensor(method.start, dtype=like.dtype, device=like.device)
        self.gain = nn.Parameter(start, requires_grad=like.requires_grad)  # g

    def rows(self, ids):
        """Return g W[i]."""
        return self.gain * self.inner(ids)
