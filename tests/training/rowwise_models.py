"""A small model with every kind of field, trained by rows and densely."""

import copy

import torch
from torch import nn

from rarebit import Dataset, optimizer
from rarebit.data import Field, Schema
from rarebit.models.deepfm import DeepFM

SCHEMA = Schema(
    (
        Field(name="user", rows=40),
        Field(name="tags", kind="multi", rows=6, max_length=3),
        Field(name="age", kind="numeric"),
    )
)


def twins(kind="adam", dim=4, **options):
    """Return a model trained by rows and its equal with torch's dense optimizer."""
    ours = DeepFM(SCHEMA, dim=dim, hidden=(5,))
    theirs = copy.deepcopy(ours)
    return (
        (ours, optimizer(ours, kind=kind, tables="rowwise", **options)),
        (theirs, optimizer(theirs, kind=kind, tables="dense", **options)),
    )


def batch_of(n=16):
    data = Dataset.from_columns(
        {
            "user": torch.randint(40, (n,)),
            "tags": torch.randint(6, (n, 3)),
            "age": torch.randn(n),
        },
        label=torch.randint(2, (n,)).float(),
        schema=SCHEMA,
    )
    return data[slice(None)]


def backward(model, batch):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
    loss.backward()
