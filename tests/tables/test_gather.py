"""The gather gives torch's own rows and gradients, and its memory never leaks into the next step."""

import copy

import pytest
import torch
from torch import nn

from rarebit.tables.collection import GradientMemory, gather


@pytest.fixture
def table():
    return nn.Embedding(50, 4)


@pytest.fixture
def ids():
    return torch.randint(50, (6, 3), dtype=torch.int32)


def gradient(rows, table):
    (rows * torch.arange(rows.numel()).reshape(rows.shape)).sum().backward()
    found, table.weight.grad = table.weight.grad, None
    return found


@pytest.mark.threads(2)
@pytest.mark.parametrize("width", [1, 16])
def test_rows_and_gradients_are_those_of_torch_to_the_last_bit(width):
    table, ids = nn.Embedding(5000, width), (5000 * torch.rand(2000, 9) ** 3).int()
    rows = gather(table, ids, GradientMemory())
    assert torch.equal(rows, table(ids))
    assert torch.equal(gradient(rows, table), gradient(table(ids), table))


def test_memory_is_used_again_and_is_zero(table, ids):
    memory = GradientMemory()
    gather(table, ids, memory).sum().backward()
    first = table.weight.grad.data_ptr()
    memory.keep(table.weight)
    assert table.weight.grad is None
    others = torch.tensor([[7]])
    gather(table, others, memory).sum().backward()
    assert table.weight.grad.data_ptr() == first
    assert table.weight.grad.abs().sum() == 4


def test_gradients_add_up_as_usual(table, ids):
    memory = GradientMemory()
    for _ in range(2):
        gather(table, ids, memory).sum().backward()
    twice, table.weight.grad = table.weight.grad, None
    table(ids).sum().backward()
    assert torch.equal(twice, 2 * table.weight.grad)


def test_two_lookups_of_one_table_in_one_step(table, ids):
    memory = GradientMemory()
    for _ in range(3):
        (gather(table, ids, memory).sum() + gather(table, ids + 0, memory).sum()).backward()
        both = table.weight.grad.clone()
        memory.keep(table.weight)
        table.weight.grad = None
    (table(ids).sum() * 2).backward()
    assert torch.equal(both, table.weight.grad)


def test_a_gradient_that_was_made_elsewhere_is_left_alone(table, ids):
    memory = GradientMemory()
    table.weight.grad = torch.ones_like(table.weight)
    memory.keep(table.weight)
    assert torch.equal(table.weight.grad, torch.ones_like(table.weight))


def test_other_uses_of_the_weight_do_not_stay(table, ids):
    memory = GradientMemory()
    for _ in range(2):
        (gather(table, ids, memory).sum() + table.weight.square().sum()).backward()
        found = table.weight.grad.clone()
        memory.keep(table.weight)
        table.weight.grad = None
    (table(ids).sum() + table.weight.square().sum()).backward()
    torch.testing.assert_close(found, table.weight.grad)


def test_a_copy_has_memory_of_its_own(table, ids):
    memory = GradientMemory()
    gather(table, ids, memory).sum().backward()
    memory.keep(table.weight)
    twin = copy.deepcopy(memory)
    assert twin.take(table.weight).data_ptr() != memory.take(table.weight).data_ptr()


def test_a_frozen_table_has_no_gradient(ids):
    table = nn.Embedding(50, 4)
    table.weight.requires_grad_(False)
    assert not gather(table, ids, GradientMemory()).requires_grad
