"""Rows of the small models, and the training data for callbacks on them."""

import torch
from methods.shrunk_models import SCHEMA, ids_of
from torch import nn
from torch.optim import Optimizer

import rarebit as rb
from rarebit.callbacks import Callback, TrainingData
from rarebit.data.order import batch_bounds


def rows_of(number: int) -> rb.Dataset:
    return rb.Dataset(SCHEMA, ids_of(number), label=torch.randint(2, (number,)))


def training_data(
    train: rb.Dataset, valid: rb.Dataset | None = None, batch_size: int = 8
) -> TrainingData:
    steps = len(batch_bounds(len(train), batch_size))
    return TrainingData(
        train=train, valid=valid, batch_size=batch_size, steps_per_epoch=steps, seed=3
    )


class _Watch(Callback):
    """Notes after which steps the weights change between two epochs."""

    def __init__(self) -> None:
        self.changed: list[int] = []

    def start(self, model: nn.Module, data: TrainingData) -> None:
        del data
        self.model = model

    def after_step(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def between_epochs(self, epoch: int, optimizer: Optimizer) -> None:
        del epoch, optimizer
        pairs = zip(self.model.parameters(), self.before, strict=True)
        if not all(torch.equal(now, before) for now, before in pairs):
            self.changed.append(self.num_steps)


def steps_before_changes(model: nn.Module, callback: Callback, epochs: int = 3) -> list[int]:
    """Train with a callback, and return after how many steps it changed weights between epochs."""
    watch = _Watch()
    callbacks = [callback, watch]
    rb.fit(model, rows_of(64), batch_size=8, epochs=epochs, callbacks=callbacks, progress=False)
    return watch.changed
