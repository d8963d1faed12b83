"""Learning rates fall after each epoch.

lr' = factor lr
"""

from dataclasses import dataclass

import rarebit as rb

__all__ = ["Cooling"]


@dataclass(frozen=True, kw_only=True)
class Cooling(rb.TrainingMethod):
    """Multiply all learning rates by a factor after each epoch."""

    title = "learning rates that fall after each epoch"
    paper = "none: an example"
    cost = "nothing"
    applies = "trainings that overshoot; not those of one epoch"
    knobs = {"factor": (0.5, 0.8)}  # noqa: RUF012  # as users write it

    factor: float = 0.5
    """What the learning rates are multiplied by."""

    def callback(self):
        """Return what lowers the rates of one training."""
        return CoolingCallback(self.factor)


class CoolingCallback(rb.Callback):
    """Counts the epochs it has cooled."""

    def __init__(self, factor):
        self.factor, self.cooled = factor, 0

    def between_epochs(self, epoch, optimizer):
        """Lower the rates."""
        del epoch
        self.cooled += 1
        for group in optimizer.param_groups:
            group["lr"] *= self.factor

    def report(self):
        """Return how often the rates fell."""
        return {"cooled": self.cooled}

    def state_dict(self):
        """Return how often the rates fell; the rates themselves belong to the optimizer."""
        return {"cooled": self.cooled}

    def load_state_dict(self, state):
        """Resume."""
        self.cooled = state["cooled"]
