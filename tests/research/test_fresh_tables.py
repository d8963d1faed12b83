"""Rows are drawn anew when an epoch begins, in whole or in part; the network and its optimizer state stay."""

import copy

import pytest
import torch
from methods.shrunk_models import deepfm
from methods.training_data import rows_of, steps_before_changes, training_data
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.models.deepfm import DeepFM
from rarebit.research.fresh_tables import FreshTables
from rarebit.tables.apply import table_parameters

STEPS = 8
"""Steps of an epoch of 64 rows."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def padded() -> nn.Module:
    """Return a model whose padding row, the first of the second field, is zero as it should be."""
    model = deepfm()
    with torch.no_grad():
        for tables in (model.backbone.tables, model.wide.tables):
            tables.stacks[0].embedding.weight[20] = 0.0
    return model


def drawn(model: nn.Module, keep: float, epoch: int = 2) -> dict[str, Tensor]:
    """Return the weights of a copy whose rows are drawn before an epoch."""
    model = copy.deepcopy(model)
    fresh = FreshTables(keep=keep).start(model, training_data(rows_of(64)))
    fresh.between_epochs(epoch, torch.optim.SGD(model.parameters()))
    fresh.close()
    return weights(model)


def test_rows_are_drawn_before_each_epoch_but_the_first():
    assert steps_before_changes(deepfm(), FreshTables().callback()) == [STEPS, 2 * STEPS]


def test_fresh_rows_are_like_the_first_ones_and_the_network_stays():
    schema = rb.data.Schema(
        (rb.data.Field(name="a", rows=3000), rb.data.Field(name="b", rows=2000))
    )
    train = rb.Dataset(schema, torch.randint(2000, (64, 2)), label=torch.arange(64) % 2)
    model = DeepFM(schema, dim=4, hidden=(8,), std=0.07)
    fresh = FreshTables().start(model, training_data(train))
    start = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3.0)
    fresh.between_epochs(2, torch.optim.SGD(model.parameters()))
    fresh.close()
    tables = set(table_parameters(model))
    for name, value in weights(model).items():
        if name not in tables:
            assert_close(value, start[name] + 3.0)
            continue
        assert value.std().item() == pytest.approx(start[name].std().item(), rel=0.05)
        assert abs(value.mean().item()) < 0.1 * value.std().item()
        correlation = torch.corrcoef(torch.stack([value.flatten(), start[name].flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.1


def test_a_part_of_a_row_may_be_kept():
    model = padded()
    start, fresh = weights(model), drawn(model, 0.0)
    for name, value in drawn(model, 0.25).items():
        assert_close(value, 0.25 * start[name] + 0.75 * fresh[name])
    for name, value in drawn(model, 1.0).items():
        assert torch.equal(value, start[name])


def test_draws_depend_on_seed_and_epoch_alone():
    model = deepfm()
    first = drawn(model, 0.0)
    torch.rand(7)
    assert all(torch.equal(value, first[name]) for name, value in drawn(model, 0.0).items())
    second = drawn(model, 0.0, epoch=3)
    tables = set(table_parameters(model))
    assert not any(torch.equal(second[name], first[name]) for name in tables)


def test_padding_stays_zero_and_tables_can_be_changed_afterwards():
    model = padded()
    fresh = FreshTables().start(model, training_data(rows_of(64)))
    fresh.between_epochs(2, torch.optim.SGD(model.parameters()))
    fresh.close()
    padding = model.backbone.tables.tables()[1].weight[0]
    assert not bool(padding.any())
    assert rb.apply_(model, rb.Hashing(buckets=4), verbose=False)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_the_optimizer_forgets_rows_and_nothing_else(tables, kind):
    model, train = deepfm(), rows_of(64)
    optimizer = rb.optimizer(model, lr=0.1, kind=kind, tables=tables, momentum=0.9)
    fresh = FreshTables().start(model, training_data(train))
    for _ in range(3):
        model(train[:8]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: before_of(optimizer, p) for name, p in model.named_parameters()}
    fresh.between_epochs(2, optimizer)
    fresh.close()
    held = {id(parameter) for parameter in table_parameters(model).values()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if id(parameter) in held:
                assert not bool(value.any()), f"{key} of {name}"
            else:
                assert torch.equal(value, before[name][key])
                assert bool(value.any()) or kind == "sgd"


def before_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in optimizer.state[parameter].items()}


def trained(model: nn.Module, keep: float) -> torch.optim.Optimizer:
    """Return the optimizer of a model that was trained a little, and whose rows were then drawn."""
    train = rows_of(64)
    optimizer = rb.optimizer(model, lr=0.1)
    fresh = FreshTables(keep=keep).start(model, training_data(train))
    model(train[:8]).sum().backward()
    optimizer.step()
    fresh.between_epochs(2, optimizer)
    fresh.close()
    return optimizer


def test_what_a_prior_has_learned_goes_on():
    model = deepfm(rb.Shrinkage(counts=7, c=3.0))
    stack = model.backbone.tables.stacks[0]
    mean = stack.prior.means.detach().clone()
    own = stack.inner.embedding.weight.detach().clone()
    optimizer = trained(model, keep=0.0)
    moved = (stack.prior.means - mean).abs()
    assert 0.05 < moved.max().item() < 0.15  # the step, and no draw
    assert not bool((stack.inner.embedding.weight == own).all(dim=1).any())
    assert bool(optimizer.state[stack.prior.means]["exp_avg"].any())
    assert not bool(optimizer.state[stack.inner.embedding.weight]["exp_avg"].any())


def test_a_prior_continues():
    model = deepfm(rb.Shrinkage(counts=7, c=3.0))
    shared = model.backbone.tables.stacks[0].prior.means
    before = shared.detach().clone()
    trained(model, keep=0.0)
    assert (shared - before).abs().max().item() < 0.15


def test_where_all_is_kept_the_optimizer_goes_on():
    model = deepfm()
    optimizer = trained(model, keep=1.0)
    [stack] = model.backbone.tables.stacks
    assert bool(optimizer.state[stack.embedding.weight]["exp_avg"].any())


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UnsupportedTableError, match="no table of this model stores rows"):
        FreshTables().start(nn.Linear(2, 2), training_data(rows_of(64)))


def test_tables_take_turns_and_come_back_as_they_were_left():
    model = padded()
    fresh = FreshTables(sets=3).start(model, training_data(rows_of(64)))
    optimizer = torch.optim.SGD(model.parameters())
    left: list[dict[str, Tensor]] = []
    for epoch in range(1, 8):
        now = {name: weights(model)[name] for name in table_parameters(model)}
        if epoch > 3:
            assert all(torch.equal(now[name], left[epoch - 4][name]) for name in now)
        elif epoch > 1:
            assert not any(torch.equal(now[name], left[epoch - 2][name]) for name in now)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))  # as training would
        left.append({name: weights(model)[name] for name in table_parameters(model)})
        fresh.between_epochs(epoch + 1, optimizer)
    fresh.close()


def test_one_table_that_takes_all_turns_is_plain_training():
    assert steps_before_changes(deepfm(), FreshTables(sets=1).callback()) == []
