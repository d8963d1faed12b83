"""Small models and their counts, for tests of methods that count rows."""

import torch
from torch import Tensor

import rarebit as rb
from rarebit.models.deepfm import DeepFM

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
SCHEMA = rb.data.Schema(FIELDS)
WIDTH = 4
C = {"user": 2.0, "tags": 0.0, "item": 30.0}


def counts_by_field() -> dict[str, Tensor]:
    return {field.name: torch.randint(0, 50, (field.rows,)) for field in FIELDS}


def deepfm(*methods: rb.Method) -> DeepFM:
    model = DeepFM(SCHEMA, dim=WIDTH, hidden=(8,), batch_norm=False)
    for method in methods:
        rb.apply_(model, method, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def ids_of(rows: int = 16) -> Tensor:
    return torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS], dim=1)
