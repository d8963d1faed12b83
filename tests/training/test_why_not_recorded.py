"""Which optimizers a recorded step can hold: asked anywhere, before there is a GPU."""

import pytest
import torch
from torch import nn

from rarebit import optimizer
from rarebit.training.step import why_not_recorded


def weights():
    return [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    "fine",
    [
        torch.optim.SGD(weights(), momentum=0.9),
        torch.optim.Adagrad(weights()),
        torch.optim.Adam(weights(), capturable=True),
        optimizer(nn.Embedding(3, 2), tables="rowwise", kind="sgd"),
        optimizer(nn.Embedding(3, 2), tables="rowwise", kind="adagrad"),
    ],
    ids=lambda made: type(made).__name__,
)
def test_optimizers_whose_steps_are_all_alike_or_counted_on_the_device(fine):
    assert why_not_recorded(fine) is None


@pytest.mark.parametrize(
    "made",
    [
        torch.optim.Adam(weights()),
        torch.optim.Adagrad(weights(), lr_decay=0.1),
        optimizer(nn.Embedding(3, 2), tables="rowwise", kind="adam"),
    ],
    ids=lambda made: type(made).__name__,
)
def test_optimizers_that_count_on_the_host(made):
    reason = why_not_recorded(made)
    assert reason.startswith(f"{type(made).__name__} counts its steps on the host")
