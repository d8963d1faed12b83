"""The GPU's kernels do what plain torch does."""

import pytest
import torch
from capabilities import needs_cuda
from torch import nn

from rarebit import optimizer
from rarebit.training import row_triton
from rarebit.training.optimizers import PlainRows

pytestmark = needs_cuda

ADAM = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
ADAGRAD = {"lr": 0.1, "eps": 1e-10}
DECAYS = [
    {"weight_decay": 0.0, "decoupled": False},
    {"weight_decay": 0.3, "decoupled": False},
    {"weight_decay": 0.3, "decoupled": True},
]
WIDTHS = pytest.mark.parametrize("width", [1, 10, 16, 100])
DECAY = pytest.mark.parametrize("decay", DECAYS, ids=str)


def lookups(width, rows=50, n=300):
    ids = torch.cat([torch.full((100,), 7), torch.randint(rows, (n - 100,))])
    return ids[torch.randperm(n)], torch.randn(n, width)


def both(name, width, states, steps=3, **options):
    """Return weight and state after some steps by plain torch on the CPU and by the kernel."""
    start = [torch.randn(50, width), *(torch.zeros(shape) for shape in states)]
    plain, fast = [t.clone() for t in start], [t.cuda() for t in start]
    for step in range(1, steps + 1):
        ids, values = lookups(width)
        count = {"step": step} if name == "adam" else {}
        getattr(PlainRows, name)(ids, values, *plain, **options, **count)
        on_device = {"step": torch.tensor(float(step), device="cuda")} if count else {}
        assert row_triton.suits(values.cuda(), *fast)
        getattr(row_triton, name)(ids.cuda(), values.cuda(), *fast, **options, **on_device)
    return plain, [tensor.cpu() for tensor in fast]


@WIDTHS
@DECAY
def test_adam(width, decay):
    plain, fast = both("adam", width, [(50, width)] * 2, **ADAM, **decay)
    torch.testing.assert_close(fast, plain, rtol=2e-4, atol=2e-5)


@WIDTHS
@DECAY
def test_adagrad(width, decay):
    plain, fast = both("adagrad", width, [(50,)], **ADAGRAD, **decay)
    torch.testing.assert_close(fast, plain, rtol=2e-4, atol=2e-5)


@WIDTHS
@DECAY
def test_sgd_with_momentum(width, decay):
    plain, fast = both("sgd", width, [(50, width)], lr=0.01, momentum=0.9, **decay)
    torch.testing.assert_close(fast, plain, rtol=2e-4, atol=2e-5)


def test_sgd_without_momentum():
    ids, values = lookups(4)
    plain, fast = torch.ones(50, 4), torch.ones(50, 4).cuda()
    options = {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "decoupled": False}
    PlainRows.sgd(ids, values, plain, None, **options)
    row_triton.sgd(ids.cuda(), values.cuda(), fast, None, **options)
    torch.testing.assert_close(fast.cpu(), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_rows_that_were_not_looked_up_keep_every_bit(kind):
    table = nn.Embedding(1000, 6).cuda()
    ours = optimizer(table, kind=kind, tables="rowwise", lr=0.1, weight_decay=0.1, momentum=0.9)
    before = table.weight.detach().clone()
    ids = torch.randint(300, (400,), device="cuda")
    table(ids).square().sum().backward()
    ours.step()
    touched = torch.zeros(1000, dtype=torch.bool, device="cuda")
    touched[ids] = True
    assert torch.equal(table.weight[~touched], before[~touched])
    assert (table.weight != before)[touched].any(dim=1).all()


def test_no_lookups_change_nothing():
    weight = torch.ones(5, 2, device="cuda")
    ids, values = torch.zeros(0, dtype=torch.int64, device="cuda"), torch.zeros(0, 2, device="cuda")
    options = {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.5, "decoupled": True}
    row_triton.sgd(ids, values, weight, None, **options)
    assert torch.equal(weight, torch.ones(5, 2, device="cuda"))


def test_what_the_kernels_cannot_take():
    plain = torch.zeros(4, 3, device="cuda")
    assert row_triton.suits(plain)
    assert not row_triton.suits(plain, plain.double())
    assert not row_triton.suits(plain.T)
    assert not row_triton.suits(plain.cpu())
