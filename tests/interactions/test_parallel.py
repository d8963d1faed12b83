import torch
from torch import nn

from rarebit.interactions.basic import Concatenation, FactorizationMachine, Parallel
from rarebit.interactions.cross import CrossNetwork


def test_every_branch_sees_the_same_embeddings():
    branches = [FactorizationMachine(), Concatenation(), CrossNetwork(3, 2, 1)]
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    parallel = Parallel(*branches).double()
    got = parallel(x)
    assert isinstance(got, tuple)
    assert [tuple(part.shape) for part in got] == [(4, 2), (4, 6), (4, 6)]
    for part, branch in zip(got, branches, strict=True):
        assert torch.equal(part, branch(x))


def test_gradients_add_up_over_the_branches():
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    first, second = Parallel(FactorizationMachine(), Concatenation())(x)
    (got,) = torch.autograd.grad(first.sum() + second.sum(), x)
    (from_pairs,) = torch.autograd.grad(FactorizationMachine()(x).sum(), x)
    torch.testing.assert_close(got, from_pairs + 1, rtol=0, atol=1e-14)


def test_the_parameters_of_every_branch_are_found():
    parallel = Parallel(nn.Linear(2, 2), nn.Linear(2, 3, bias=False))
    assert [tuple(p.shape) for p in parallel.parameters()] == [(2, 2), (2,), (3, 2)]


def test_a_set_axis_equals_a_loop_over_sets():
    x = torch.randn(5, 4, 3, 2)
    parallel = Parallel(FactorizationMachine(), Concatenation())
    for index, part in enumerate(parallel(x)):
        assert torch.equal(part, torch.stack([parallel(one)[index] for one in x]))
