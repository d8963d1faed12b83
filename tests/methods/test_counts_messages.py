"""Counts that cannot be those of a table are refused in one sentence, wherever they are given."""

import numpy as np
import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.errors import DataError, RarebitError
from rarebit.research import RowRate

ITEM = torch.tensor([1, 2, 3])
WRONG = {
    "another length": ({"user": torch.ones(5).long(), "item": ITEM}, r"'user' .* each of its 4 rows"),
    "a column": ({"user": torch.ones(4, 1).long(), "item": ITEM}, r"got the shape \(4, 1\)"),
    "negative": ({"user": torch.tensor([3, -1, 0, 2]), "item": ITEM}, "must be 0 or more, got -1"),
    "floats": ({"user": torch.ones(4), "item": ITEM}, r"must be integers, got torch.float32; use"),
    "NaN": ({"user": torch.full((4,), torch.nan), "item": ITEM}, "'user' must be integers, got"),
    "truth values": ({"user": torch.ones(4).bool(), "item": ITEM}, "must be integers, got torch.bool"),
    "texts": ({"user": ["a"] * 4, "item": ITEM}, "'user' must be a tensor of integers, got a list"),
    "none": ({"user": None, "item": ITEM}, "'user'"),
    "too large": ({"user": 2**70, "item": ITEM}, "'user' must be a tensor of integers, got a int"),
    "an unknown table": ({"usr": torch.ones(4).long(), "item": ITEM}, "'user'.*usr"),
    "a name that is none": ({1: torch.ones(4).long()}, "'user'.* 1"),
}  # fmt: skip


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"user": nn.Embedding(4, 3), "item": nn.Embedding(3, 3)})


def with_method(counts, method):
    rb.apply_(model(), method(counts=counts), verbose=False)


def later(counts):
    made = model()
    rb.apply_(made, rb.Shrinkage(), verbose=False)
    rb.set_counts_(made, counts)


def forget(counts):
    made = model()
    rb.forget_(made, torch.optim.SGD(made.parameters(), lr=0.1), counts)


def transfer(counts):
    rb.HarmlessTransfer(loss="mmd").start(model(), counts=counts, where=lambda t: True)


@pytest.mark.parametrize(("counts", "match"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    "give",
    [lambda c: with_method(c, rb.Shrinkage), lambda c: with_method(c, RowRate), later, forget],
    ids=["shrinkage", "row-rate", "set_counts_", "forget_"],
)
def test_wrong_counts_are_refused_in_one_sentence(give, counts, match):
    with pytest.raises(DataError, match=match) as caught:
        give(counts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("counts", [counts for counts, _ in WRONG.values()], ids=WRONG)
def test_a_transfer_refuses_them_too(counts):
    with pytest.raises(RarebitError) as caught:
        transfer(counts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("counts", [[1, 2, 3], np.ones(4), "x", 1.5, True, -1, list(range(10**5))])
def test_counts_of_no_kind_are_refused_where_the_method_is_made(counts):
    with pytest.raises(RarebitError, match=r"^counts must be ") as caught:
        rb.Shrinkage(counts=counts)
    assert len(str(caught.value)) < 300
