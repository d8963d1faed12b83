"""An optimizer that was built before the tables changed: kept in step, or refused."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import OptimizerError
from rarebit.models.fm import FM
from rarebit.tables.collection import TableCollection

HASHING, LOW_RANK = rb.Hashing(buckets=5), rb.LowRank(rank=2)

FIELDS = (
    rb.data.Field(name="a", rows=6),
    rb.data.Field(name="b", rows=9),
    rb.data.Field(name="c", rows=7),
    rb.data.Field(name="d", rows=8),
)
IDS = torch.tensor([[5, 8, 6, 7], [0, 1, 2, 3], [1, 1, 6, 0]])


def named(*names: str):
    return lambda t: t.field in names


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = (model(ids) - 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained_collection(optimizer_class=Adam, **options):
    tables = TableCollection(FIELDS, dim=4)
    optimizer = optimizer_class(tables.parameters(), lr=0.01, **options)
    for _ in range(3):
        step(tables, optimizer, IDS)
    return tables, optimizer


def held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_new_weights_go_to_the_group_of_the_old():
    model = small_model()
    table, layer = list(model[0].parameters()), list(model[1].parameters())
    optimizer = SGD([{"params": layer, "lr": 0.5}, {"params": table, "lr": 0.1}])
    rb.apply_(model, LOW_RANK, optimizer=optimizer, verbose=False)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == (0.5, 0.1)
    assert [id(p) for p in first["params"]] == [id(p) for p in layer]
    assert [id(p) for p in second["params"]] == [id(p) for p in model[0].parameters()]


def test_two_tables_in_two_groups_stay_in_them():
    model = nn.ModuleDict({"slow": nn.Embedding(9, 4), "fast": nn.Embedding(9, 4)})
    optimizer = SGD([{"params": table.parameters()} for table in model.values()], lr=0.1)
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    for group, name in zip(optimizer.param_groups, ("slow", "fast"), strict=True):
        assert group["params"][0] is model[name].inner.weight
        assert len(group["params"]) == 1


def test_two_stacks_in_two_groups_stay_in_them():
    tables = TableCollection(FIELDS, dim=4)
    rb.apply_(tables, HASHING, where=named("c", "d"), verbose=False)
    plain, hashed = (list(stack.parameters()) for stack in tables.stacks)
    optimizer = SGD([{"params": plain, "lr": 1.0}, {"params": hashed, "lr": 2.0}])
    rb.apply_(tables, LOW_RANK, where=named("d"), optimizer=optimizer, verbose=False)
    slow, fast = optimizer.param_groups
    assert [id(p) for p in slow["params"]] == [id(p) for p in tables.stacks[0].parameters()]
    assert [id(p) for p in fast["params"]] == [id(p) for p in tables.stacks[1:].parameters()]


def test_the_order_is_that_of_the_model():
    # A saved state goes by position: in another order it would be read into other parameters.
    model = nn.Sequential(nn.Linear(1, 1), nn.Embedding(9, 4), nn.Linear(4, 1))
    optimizer = Adam(model.parameters())
    for change in (
        lambda: rb.apply_(model, LOW_RANK, optimizer=optimizer, verbose=False),
        lambda: rb.merge_(model, optimizer=optimizer, verbose=False),
    ):
        change()
        assert [id(p) for p in held(optimizer)] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("fields", [("a",), ("b", "d"), ("d",), ("a", "b", "c", "d")])
def test_the_order_is_that_of_a_model_with_stacks(fields):
    model = FM(rb.data.Schema(FIELDS), dim=4)
    optimizer = Adam(model.parameters())
    rb.apply_(model, HASHING, where=named("c"), optimizer=optimizer, verbose=False)
    rb.apply_(model, LOW_RANK, where=named(*fields), optimizer=optimizer, verbose=False)
    assert [id(p) for p in held(optimizer)] == [id(p) for p in model.parameters()]
    rb.merge_(model, optimizer=optimizer, verbose=False)
    assert [id(p) for p in held(optimizer)] == [id(p) for p in model.parameters()]


def test_a_saved_state_fits_an_optimizer_built_later():
    model = small_model()
    optimizer = Adam(model.parameters(), lr=0.1)
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    step(model, optimizer, torch.tensor([1, 2]))
    later = Adam(model.parameters(), lr=0.1)
    later.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        assert later.state[parameter]["exp_avg"].shape == parameter.shape
        assert_close(later.state[parameter], optimizer.state[parameter])


def test_the_old_weights_and_their_state_are_gone():
    model = small_model()
    old = model[0].weight
    optimizer = Adam(model.parameters())
    step(model, optimizer, torch.tensor([1, 2]))
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    assert all(p is not old for p in held(optimizer))
    assert old not in optimizer.state
    assert model[0].inner.weight not in optimizer.state
    assert set(optimizer.state) == set(model[1].parameters())


def test_rows_that_only_moved_keep_their_state():
    tables, optimizer = trained_collection()
    before = {k: v.clone() for k, v in optimizer.state[held(optimizer)[0]].items()}
    rb.apply_(tables, HASHING, where=named("b"), optimizer=optimizer, verbose=False)
    plain, hashed = (next(stack.parameters()) for stack in tables.stacks)
    rows = [*range(6), *range(6 + 9, 6 + 9 + 7 + 8)]  # those of a, c and d
    state = optimizer.state[plain]
    for key in ("exp_avg", "exp_avg_sq"):
        assert bool(before[key].any())
        assert_close(state[key], before[key][rows], rtol=0, atol=0)
    assert int(state["step"]) == 3
    assert hashed not in optimizer.state


def test_moved_rows_train_on_as_if_nothing_had_happened():
    tables, optimizer = trained_collection()
    other, other_optimizer = trained_collection_like(tables, optimizer)
    rb.apply_(tables, rb.Hashing(buckets=9), where=named("b"), optimizer=optimizer, verbose=False)
    for _ in range(3):
        step(tables, optimizer, IDS)
        step(other, other_optimizer, IDS)
    for index in (0, 2, 3):
        assert_close(tables.tables()[index].weight, other.tables()[index].weight)


def trained_collection_like(tables: TableCollection, optimizer: Adam):
    other = TableCollection(FIELDS, dim=4)
    other.load_state_dict(tables.state_dict())
    other_optimizer = Adam(other.parameters(), lr=0.01)
    other_optimizer.load_state_dict(optimizer.state_dict())
    return other, other_optimizer


def test_a_state_that_was_split_is_not_shared():
    tables, optimizer = trained_collection()
    rb.apply_(tables, HASHING, where=named("b"), optimizer=optimizer, verbose=False)
    step(tables, optimizer, IDS)
    steps = {int(optimizer.state[p]["step"]) for p in tables.parameters()}
    assert steps == {1, 4}


def test_joined_rows_start_afresh_unless_all_have_a_state():
    tables, optimizer = trained_collection()
    rb.apply_(tables, HASHING, where=named("b"), optimizer=optimizer, verbose=False)
    rb.merge_(tables, optimizer=optimizer, verbose=False)
    (weight,) = tables.parameters()
    assert weight not in optimizer.state
    assert held(optimizer) == [weight]


def test_a_stack_that_did_not_change_keeps_weights_and_state():
    model = FM(rb.data.Schema(FIELDS), dim=4)
    wide = next(model.wide.tables.parameters())
    optimizer = Adam(model.parameters())
    data = rb.Dataset(model.schema, IDS)[slice(None)]
    step(model, optimizer, data)
    state = optimizer.state[wide]
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    assert next(model.wide.tables.parameters()) is wide
    assert optimizer.state[wide] is state


def test_names_stay_in_step():
    model = FM(rb.data.Schema(FIELDS), dim=4)
    optimizer = Adam(model.named_parameters())
    changes = [
        lambda: rb.apply_(model, HASHING, where=named("b"), optimizer=optimizer, verbose=False),
        lambda: rb.apply_(model, LOW_RANK, where=named("d"), optimizer=optimizer, verbose=False),
        lambda: rb.merge_(model, where=named("b"), optimizer=optimizer, verbose=False),
        lambda: rb.merge_(model, optimizer=optimizer, verbose=False),
    ]
    for change in changes:
        change()
        (group,) = optimizer.param_groups
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert group["param_names"] == [names[id(p)] for p in group["params"]]


OPTIMIZERS = {
    "adam": (Adam, {}),
    "fused adam": (Adam, {"fused": True}),
    "momentum": (SGD, {"momentum": 0.9}),
    "adagrad": (Adagrad, {"initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "adamw, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("method", [HASHING, LOW_RANK])
def test_training_goes_on_and_changes_the_new_tables(kind, method):
    optimizer_class, options = OPTIMIZERS[kind]
    tables, optimizer = trained_collection(optimizer_class, **options)
    rb.apply_(tables, method, where=named("a", "c"), optimizer=optimizer, verbose=False)
    rb.check_optimizer(tables, optimizer)
    before = {name: p.detach().clone() for name, p in tables.named_parameters()}
    losses = [step(tables, optimizer, IDS) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert not any(bool((p == before[n]).all()) for n, p in tables.named_parameters())
    rb.merge_(tables, optimizer=optimizer, verbose=False)
    assert step(tables, optimizer, IDS) > step(tables, optimizer, IDS)


def test_adagrad_knows_new_weights_as_it_knew_the_old_when_it_was_built():
    model = small_model()
    options = [{"initial_accumulator_value": 0.1}, {"initial_accumulator_value": 0.5}]
    groups = [{"params": model[k].parameters()} | options[k] for k in (0, 1)]
    optimizer = Adagrad(groups, lr=0.1)
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    state = optimizer.state[model[0].inner.weight]
    assert int(state["step"]) == 0
    assert_close(state["sum"], torch.full((5, 4), 0.1))


def test_an_optimizer_that_keeps_the_list_sees_the_new_tables():
    model, ids = small_model(), torch.tensor([1, 2])
    optimizer = torch.optim.LBFGS(model.parameters())
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    before = model[0].weight.detach().clone()
    optimizer.step(lambda: loss_with_gradient(model, ids))
    assert bool((model[0].weight != before).any())


def loss_with_gradient(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = (model(ids) - 1.0).square().mean()
    loss.backward()
    return loss


def test_a_scheduler_goes_on():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rb.apply_(model, rb.Hashing(buckets=9), optimizer=optimizer, verbose=False)
    before = model[0].weight.detach().clone()
    step(model, optimizer, torch.tensor([1]))
    scheduler.step()
    first = model[0].weight.detach() - before
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.5
    assert bool(first[1].any())
    assert not bool(first[0].any())


def test_check_refuses_an_optimizer_built_too_early():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    rb.check_optimizer(model, optimizer)
    rb.apply_(model, HASHING, verbose=False)
    message = r"the optimizer does not hold 0\.inner\.weight, so training would not change them\. "
    with pytest.raises(OptimizerError, match=message + "Build the optimizer after apply_ and merg"):
        rb.check_optimizer(model, optimizer)
    rb.check_optimizer(model, SGD(model.parameters(), lr=0.1))


def test_check_refuses_an_optimizer_built_before_merging():
    model = small_model()
    rb.apply_(model, HASHING, verbose=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    rb.merge_(model, verbose=False)
    with pytest.raises(OptimizerError, match=r"does not hold 0\.weight, so"):
        rb.check_optimizer(model, optimizer)


def test_check_names_three_of_many():
    model = nn.ModuleList([nn.Embedding(9, 4) for _ in range(5)])
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    message = r"does not hold 0\.weight, 1\.weight, 2\.weight and 2 more table parameters, so"
    with pytest.raises(OptimizerError, match=message):
        rb.check_optimizer(model, optimizer)


def test_check_passes_when_the_optimizer_went_along():
    model = FM(rb.data.Schema(FIELDS), dim=4)
    optimizer = rb.optimizer(model, lr=0.1, table_lr=0.2)
    rb.apply_(model, HASHING, where=named("b"), optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    rb.merge_(model, optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    tables = {group["name"]: group["params"] for group in optimizer.param_groups}["tables"]
    assert len(tables) == 2


def test_check_asks_for_no_frozen_table():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model[1].parameters(), lr=0.1)
    rb.apply_(model, LOW_RANK, optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    assert len(held(optimizer)) == 2


def test_fit_refuses_an_optimizer_built_too_early():
    data = rb.Dataset(rb.data.Schema(FIELDS), IDS, label=[0, 1, 0])
    model = FM(data.schema, dim=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    rb.apply_(model, HASHING, verbose=False)
    with pytest.raises(
        OptimizerError, match=r"backbone\.tables\.stacks\.0\.inner\.embedding\.weight"
    ):
        rb.fit(model, data, optimizer=optimizer, progress=False)


def test_sparse_adam_is_refused_where_a_gradient_is_dense():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(
        OptimizerError, match=r"SparseAdam takes .*'0\.right' has a dense one; give"
    ):
        rb.apply_(model, LOW_RANK, optimizer=optimizer, verbose=False)
    assert type(model[0]) is nn.Embedding
    assert held(optimizer) == [model[0].weight]
    rb.apply_(model, HASHING, optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_check_optimizer_names_what_sparse_adam_cannot_train_and_takes_two():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    rb.apply_(model, LOW_RANK, verbose=False)
    with pytest.raises(OptimizerError, match=r"'0\.right' has a dense one"):
        rb.check_optimizer(model, torch.optim.SparseAdam(model.parameters()))
    rows, factor = torch.optim.SparseAdam([model[0].inner.weight]), SGD([model[0].right], lr=0.1)
    rb.check_optimizer(model, rows, factor)
    with pytest.raises(OptimizerError, match=r"does not hold 0\.right"):
        rb.check_optimizer(model, rows)
