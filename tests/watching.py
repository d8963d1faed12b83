"""A callback that hands every step to a function."""

import rarebit as rb


class Watch(rb.Callback):
    def __init__(self, function):
        self.function = function

    def after_step(self, num_steps):
        return self.function(num_steps)
