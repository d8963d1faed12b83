"""What moves thresholds and weights that no batch touches: numbers of steps, with torch's own Adam."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models.fm import FM
from rarebit.pruning.pep import PEP, count_nonzero, threshold_parameters


def decayed(start: float, decay: float, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a threshold after each step of Adam in which the loss says nothing, `(steps,)`."""
    model = nn.Sequential(nn.Embedding(1, 2)).to(dtype)
    rb.apply_(model, PEP(granularity="global", init=start), verbose=False)
    adam = rb.optimizer(model, lr=1e-3, threshold_weight_decay=decay)
    assert type(adam) is torch.optim.Adam
    [level] = threshold_parameters(model)
    level.grad, path = torch.zeros_like(level), torch.empty(steps, dtype=dtype)
    for step in range(steps):
        adam.step()
        path[step] = level.detach()
    return path


def first_step_above(path: Tensor, level: float) -> int:
    return int((path < level).sum()) + 1


def test_weight_decay_alone_drives_a_threshold_up_from_minus_15():
    path = decayed(-15.0, 1e-5, 11_000)
    assert [first_step_above(path, level) for level in (-10, -8, -7, -5)] == [
        5279,
        7487,
        8612,
        10924,
    ]


@pytest.mark.slow
def test_weight_decay_alone_takes_far_longer_from_minus_150():
    path = decayed(-150.0, 1e-5, 145_000)
    assert [first_step_above(path, level) for level in (-103, -88, -20, -8)] == [
        47361,
        62516,
        131966,
        144842,
    ]


def test_without_decay_a_threshold_at_minus_150_never_moves():
    model = nn.Sequential(nn.Embedding(5, 4))
    rb.apply_(model, PEP(init=-150.0), verbose=False)
    adam = rb.optimizer(model, lr=1e-3, threshold_weight_decay=0.0)
    for _ in range(20):
        adam.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        adam.step()
    assert bool((model[0].levels.weight == -150.0).all())


SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=5), rb.data.Field(name="item", rows=4)))


@pytest.mark.parametrize("granularity", ["global", "field", "feature_dimension"])
@pytest.mark.parametrize("stacked", [True, False])
def test_thresholds_may_have_a_decay_of_their_own(granularity, stacked):
    model = FM(SCHEMA, dim=3) if stacked else nn.Sequential(nn.Embedding(5, 3))
    rb.apply_(model, PEP(granularity=granularity, init=-8.0, decay=0.5), verbose=False)
    sgd = rb.optimizer(model, kind="sgd", lr=0.1, threshold_weight_decay=7.0)
    found = threshold_parameters(model)
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter)
    sgd.step()
    assert found
    for value in found:  # s - lr * decay * s
        assert_close(value.detach(), torch.full_like(value, -8.0 + 0.1 * 0.5 * 8.0))


def test_decays_that_differ_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Embedding(4, 3))
    rb.apply_(model, PEP(decay=0.5), where=lambda table: table.rows == 5, verbose=False)
    rb.apply_(model, PEP(decay=0.25), where=lambda table: table.rows == 4, verbose=False)
    with pytest.raises(SettingsError, match=r"one weight decay, got 0\.25, 0\.5; give every PEP"):
        rb.optimizer(model)


def untouched(start: float, decay: float, steps: int) -> list[float]:
    """Return a weight that no batch looks up, after each step of dense Adam with weight decay."""
    model = nn.Sequential(nn.Embedding(2, 1))
    nn.init.constant_(model[0].weight, start)
    rb.apply_(model, PEP(schedule="given"), min_width=1, verbose=False)
    adam = rb.optimizer(model, lr=1e-3, weight_decay=decay)
    path = []
    for _ in range(steps):
        adam.zero_grad()
        model(torch.tensor([1])).sum().backward()
        adam.step()
        path.append(float(model[0].inner.weight.detach()[0, 0]))
    return path


def test_dense_adam_with_decay_erases_rows_that_are_not_looked_up():
    path = untouched(0.03, 1e-5, 300)
    assert path[9] == pytest.approx(0.0205, abs=1e-4)
    assert path[29] == pytest.approx(0.0050, abs=1e-4)
    assert abs(path[99]) < 2e-4
    assert abs(path[299]) < 3e-9
    path = untouched(0.002, 1e-6, 100)
    assert path[9] == pytest.approx(6.3e-4, rel=0.01)
    assert abs(path[99]) == pytest.approx(4.5e-6, rel=0.05)


def test_by_rows_a_row_that_is_not_looked_up_stays():
    model = nn.Sequential(nn.Embedding(2, 2))
    rb.apply_(model, PEP(), verbose=False)
    adam = rb.optimizer(model, lr=1e-3, weight_decay=1e-5, tables="rowwise")
    before = model[0].inner.weight.detach()[0].clone()
    for _ in range(50):
        adam.zero_grad()
        model(torch.tensor([1])).sum().backward()
        adam.step()
    assert torch.equal(model[0].inner.weight.detach()[0], before)
    assert bool((model[0].levels.weight[0] == -15.0).all())


@pytest.mark.parametrize("granularity", ["feature", "feature_dimension", "dimension"])
def test_where_all_rows_are_looked_up_in_every_step_lazy_adam_is_dense_adam(granularity):
    start, ends = nn.Embedding(6, 3).double(), []
    for tables in ("dense", "rowwise"):
        model = nn.Sequential(copy.deepcopy(start))
        rb.apply_(model, PEP(granularity=granularity, init=-1.0), verbose=False)
        decay = {"weight_decay": 0.1, "threshold_weight_decay": 0.2}
        adam = rb.optimizer(model, lr=0.02, tables=tables, **decay)
        for _ in range(20):
            adam.zero_grad()
            (model(torch.arange(6)) - 0.3).square().sum().backward()
            adam.step()
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*ends)
    assert not torch.equal(ends[0][0], start.weight)


SIZES, WIDTH, ROWS = (30, 12, 25), 6, 64
"""Values of each field, the model's width, and rows of a batch."""


class DenseFM:
    """A factorization machine with thresholds over whole tables, as the paper writes it."""

    def __init__(self, model: FM, init: float) -> None:
        tables = [t.weight.detach() for t in model.backbone.tables.tables()]
        self.table = torch.cat(tables).clone().requires_grad_()
        self.level = torch.full_like(self.table, init).requires_grad_()
        wide = [t.weight.detach() for t in model.wide.tables.tables()]
        self.wide = torch.cat(wide).clone().requires_grad_()
        self.bias = model.wide.bias.detach().clone().requires_grad_()

    def parameters(self) -> list[Tensor]:
        return [self.table, self.level, self.wide, self.bias]

    def cut(self) -> Tensor:
        size = torch.relu(torch.abs(self.table) - 1 / (1 + torch.exp(-self.level)))
        return torch.sign(self.table) * size

    def __call__(self, ids: Tensor) -> Tensor:
        offsets = torch.tensor([0, SIZES[0], SIZES[0] + SIZES[1]])
        rows = self.cut()[ids + offsets]  # (B, F, D)
        score = self.wide[ids + offsets].sum(dim=(1, 2)) + self.bias
        for first in range(len(SIZES)):
            for second in range(first + 1, len(SIZES)):
                score = score + (rows[:, first] * rows[:, second]).sum(dim=1)
        return score


@pytest.mark.slow
def test_hundreds_of_steps_equal_an_independent_dense_implementation():
    """The published setting: Adam and a coupled decay on all parameters, s among them."""
    init, steps, lr = -4.0, 500, 3e-3
    schema = rb.data.Schema(
        tuple(rb.data.Field(name=f"f{i}", rows=rows) for i, rows in enumerate(SIZES))
    )
    model = FM(schema, dim=WIDTH, init="xavier").double()
    dense = DenseFM(model, init)
    rb.apply_(model, PEP(init=init), verbose=False)
    adam = rb.optimizer(model, lr=lr, weight_decay=1e-3, threshold_weight_decay=1e-3)
    other = torch.optim.Adam(dense.parameters(), lr=lr, weight_decay=1e-3)
    counts = []
    for _ in range(steps):
        ids = torch.stack([torch.randint(rows, (ROWS,)) for rows in SIZES], dim=1)
        label = ((ids.sum(dim=1) % 3) == 0).double()
        batch = rb.Dataset(schema, ids, torch.zeros(ROWS, 0), label.long())[slice(None)]
        for optimizer, score in ((adam, model(batch)), (other, dense(ids))):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(score, label).backward()
            optimizer.step()
        counts.append(count_nonzero(model))
        assert counts[-1] == int(torch.count_nonzero(dense.cut()))
    tables = model.backbone.tables.tables()
    found = torch.cat([table.weight for table in tables])
    levels = torch.cat([table.levels.weight for table in tables])
    assert torch.equal(found != 0, dense.cut() != 0)
    assert (found - dense.cut()).abs().max().item() < 1e-9
    assert (levels - dense.level).abs().max().item() < 1e-9
    assert sum(SIZES) * WIDTH > counts[0] > 2 * counts[-1] > 0, "nothing worth comparing is cut"


def test_how_strongly_the_loss_must_pull_before_it_moves_a_threshold():
    """The loss and a decay of 1e-5 are as strong as each other at these sums of |dL/dV̂|."""
    for level, expected in ((-15, 490), (-10, 2.2), (-8, 0.24), (-7, 0.077), (-6, 0.024)):
        s = torch.tensor(float(level), dtype=torch.float64, requires_grad=True)
        PEP().cut_at(s).backward()
        assert 1e-5 * abs(level) / float(s.grad) == pytest.approx(expected, rel=0.05)
    assert math.isclose(float(PEP().cut_at(torch.tensor(-3.24))), 0.038, rel_tol=0.02)
