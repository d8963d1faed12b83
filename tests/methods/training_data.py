"""Rows of the small models, and what a method that takes part in training is told of them."""

import torch
from methods.shrunk_models import SCHEMA, ids_of

import rarebit as rb
from rarebit.callbacks import TrainingData
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
