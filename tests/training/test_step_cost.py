"""A step by rows costs what its batch costs: nothing in it is as large as a table."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training.rowwise_models import backward

from rarebit import Dataset, clip_grad_norm_, optimizer
from rarebit.data import Field, Schema
from rarebit.models.deepfm import DeepFM

KINDS = ["adam", "adagrad", "sgd"]


class Sizes(TorchDispatchMode):
    """Notes the operations that make or change something as large as a table."""

    HARMLESS = ("aten::detach", "aten::view", "aten::index_copy_")
    """Another name for the same memory, or some rows written in place."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.large = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        name = func._schema.name
        for output in outputs:
            is_dense = isinstance(output, torch.Tensor) and output.layout == torch.strided
            if is_dense and output.numel() >= self.numel and name not in self.HARMLESS:
                self.large.append(name)
        return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [10_000, 1_000_000])
def test_a_step_has_no_operation_of_the_size_of_a_table(form, kind, rows):
    schema = Schema((Field(name="user", rows=rows), Field(name="item", rows=500)))
    model = DeepFM(schema, dim=4, hidden=(5,))
    ours = optimizer(model, kind=kind, tables="rowwise", lr=0.1, momentum=0.9, weight_decay=0.1)
    ids = torch.stack([torch.randint(rows, (32,)), torch.randint(500, (32,))], dim=1)
    batch = Dataset(schema, ids=ids, label=torch.randint(2, (32,)))[slice(None)]

    def step():
        backward(model, batch)
        clip_grad_norm_(model, 1.0)
        ours.step()
        ours.zero_grad()

    step()  # the first one makes the state
    with Sizes(rows) as sizes:
        step()
    assert sizes.large == []


def test_the_counter_sees_a_dense_step():
    model = nn.Embedding(1000, 4)
    dense = optimizer(model, lr=0.1)
    with Sizes(1000) as sizes:
        model(torch.tensor([3])).sum().backward()
        dense.step()
    assert any("embedding_dense_backward" in name for name in sizes.large)
