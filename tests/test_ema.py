"""Lazy averages against the definition: every parameter averaged after every step."""

import copy
from collections import Counter

import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rarebit as rb
from rarebit.ema import EMA
from rarebit.errors import OptimizerError, SettingsError, TrainingError
from rarebit.training.optimizers import RowwiseAdam
from rarebit.training.step import recording

TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
}
ROWS = 30


@pytest.fixture(autouse=True)
def checked_sparse_tensors():
    """Say that sparse tensors are checked: torch's Adagrad warns where nothing is said."""
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        yield


class Net(nn.Module):
    """A table, a table that is not always looked up, and a network with all kinds of shapes."""

    def __init__(self, *, sparse, rows=ROWS, dtype=torch.float64):
        super().__init__()
        self.often = nn.Embedding(rows, 3, sparse=sparse, dtype=dtype)
        self.seldom = nn.EmbeddingBag(rows, 3, mode="sum", sparse=sparse, dtype=dtype)
        self.layer = nn.Linear(3, 1, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, ids, *, seldom):
        rows = self.often(ids).tanh().sum(dim=1)
        if seldom:
            rows = rows + self.seldom(ids)
        return (self.scale * self.layer(rows) - 1).abs().mean()


class NaiveEMA:
    """The definition, in float64: the weights after each step, their shares, and the sum."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.start = {n: p.detach().clone().double() for n, p in model.named_parameters()}
        self.steps = []

    def step(self):
        weights = self.model.named_parameters()
        self.steps.append({name: p.detach().clone().double() for name, p in weights})

    @property
    def averages(self):
        """The initial weights before the first step, and without any share after it."""
        if not self.steps:
            return self.start
        powers = [self.decay**age for age in range(len(self.steps))][::-1]
        return {
            name: sum(power * step[name] for power, step in zip(powers, self.steps, strict=True))
            / sum(powers)
            for name in self.start
        }


def draw(rows=ROWS):
    """Return ids with duplicates, few of all rows."""
    return torch.randint(rows, (4, 2)) if torch.rand(()) < 0.5 else torch.randint(4, (4, 2))


def train(model, optimizer, naive=None, steps=12, **options):
    for step in range(steps):
        optimizer.zero_grad()
        model(draw(len(model.often.weight)), seldom=step % 3 == 1, **options).backward()
        optimizer.step()
        if naive is not None:
            naive.step()


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_averages(ema, naive, skipped=()):
    with ema.applied():
        found = weights_of(ema.model)
    for name, wanted in naive.averages.items():
        if name not in skipped:
            tolerance = TOLERANCE[found[name].dtype]
            torch.testing.assert_close(found[name].double(), wanted, **tolerance)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.3)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3)


def sgd_with_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rowwise_adam(model):
    return rb.optimizer(model, tables="rowwise", lr=0.1, weight_decay=0.01)


def rowwise_sgd_with_momentum(model):
    return rb.optimizer(model, tables="rowwise", kind="sgd", lr=0.1, momentum=0.9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize(
    ("build", "sparse"),
    [
        (adam, False),
        (adagrad, False),
        (adagrad, True),
        (sgd, True),
        (sgd_with_momentum, False),
        (sgd_with_momentum, True),  # moves rows that are not in the step's gradient
        (rowwise_adam, True),
        (rowwise_sgd_with_momentum, True),
    ],
)
def test_averages_are_those_of_the_definition(build, sparse, decay, dtype):
    model = Net(sparse=sparse, dtype=dtype)
    optimizer = build(model)
    ema, naive = EMA(model, optimizer, decay=decay), NaiveEMA(model, decay)
    for _ in range(3):
        train(model, optimizer, naive)
        assert_averages(ema, naive)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sparse_adam_beside_dense_adam_each_with_an_average_of_its_own(dtype):
    model = Net(sparse=True, dtype=dtype)
    tables, network = [model.often.weight, model.seldom.weight], [*model.layer.parameters()]
    by_rows, dense = torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(network, lr=0.1)
    first, second = EMA(model, by_rows, decay=0.9), EMA(model, dense, decay=0.9)
    naive = NaiveEMA(model, decay=0.9)
    for step in range(20):
        model.zero_grad()
        model(draw(), seldom=step % 3 == 1).backward()
        by_rows.step()
        dense.step()
        naive.step()
    assert_averages(first, naive, skipped=("layer.weight", "layer.bias", "scale"))
    assert_averages(second, naive, skipped=("often.weight", "seldom.weight", "scale"))
    assert set(first.state_dict()) == {"often.weight", "seldom.weight"}


def test_a_row_by_hand():
    table = nn.Embedding(2, 3, sparse=True)
    nn.init.constant_(table.weight, 8.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=4.0)
    ema = EMA(table, optimizer, decay=0.5)
    for row in (0, 1, 1):
        optimizer.zero_grad()
        table(torch.tensor([row])).sum().backward()
        optimizer.step()
    # row 0: 4, 4, 4; row 1: 8, 4, 0 with the shares 1, 2, 4 of 7
    found = ema.state_dict()["weight"]
    torch.testing.assert_close(found, torch.tensor([[4.0] * 3, [16 / 7] * 3]), rtol=1e-6, atol=0)


def test_a_row_that_never_moved_is_its_weight_to_the_last_bit():
    table = nn.Embedding(50, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    ema = EMA(table, optimizer, decay=0.9)
    assert torch.equal(ema.state_dict()["weight"], table.weight)
    for _ in range(5):
        optimizer.zero_grad()
        table(torch.tensor([7, 7])).sum().backward()
        optimizer.step()
    still = torch.arange(50) != 7
    assert torch.equal(ema.state_dict()["weight"][still], table.weight[still])
    assert not torch.equal(ema.state_dict()["weight"][7], table.weight[7])


@pytest.mark.parametrize("decay", [1 - 1e-6, 1 - 1e-12])
@pytest.mark.parametrize("kind", ["rows", "dense", "paused"])
def test_a_decay_close_to_one_is_as_exact_as_the_sum(kind, decay):
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    model, optimizer = nn.ParameterDict({"weight": weight}), torch.optim.SGD([weight], lr=1.0)
    ema, steps = EMA(model, optimizer, decay=decay), []
    for step in range(200):
        gradient = torch.randn(1, 2, dtype=torch.float64)
        by_rows = torch.sparse_coo_tensor(torch.tensor([[step % 3]]), gradient, (3, 2))
        weight.grad = by_rows if kind == "rows" else by_rows.to_dense()
        if kind == "paused" and step % 5:
            weight.grad = None
        optimizer.step()
        steps.append(weight.detach().clone())
    shares = decay ** torch.arange(200, dtype=torch.float64).flip(0)
    wanted = torch.tensordot(shares, torch.stack(steps), dims=1) / shares.sum()
    torch.testing.assert_close(ema.state_dict()["weight"], wanted, rtol=1e-12, atol=1e-13)


def test_constant_weights_average_to_themselves_in_any_number_of_steps():
    weight = nn.Parameter(torch.tensor([0.1, 3.0, -7e5]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ema = EMA(nn.ParameterDict({"weight": weight}), optimizer, decay=0.999)
    for step in range(500):
        weight.grad = torch.zeros(3) if step else torch.ones(3)
        optimizer.step()
    assert torch.equal(ema.state_dict()["weight"], weight)


@given(
    kinds=st.lists(st.sampled_from(["rows", "dense", "none", "look"]), max_size=25),
    decay=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
)
def test_any_order_of_sparse_dense_and_missing_gradients(kinds, decay):
    weight = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=0.5)
    ema, naive = EMA(model, optimizer, decay=decay), NaiveEMA(model, decay)
    for kind in kinds:
        if kind == "look":
            assert_averages(ema, naive)
            continue
        weight.grad = None
        if kind == "rows":
            rows, values = torch.randint(6, (1, 3)), torch.randn(3, 2, dtype=torch.float64)
            weight.grad = torch.sparse_coo_tensor(rows, values, (6, 2))
        elif kind == "dense":
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        naive.step()
    assert_averages(ema, naive)


def test_a_gradient_that_is_sparse_in_both_axes():
    weight = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
    model, optimizer = nn.ParameterDict({"weight": weight}), torch.optim.SGD([weight], lr=0.5)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    for _ in range(3):
        weight.grad = torch.randn_like(weight).relu().to_sparse()
        optimizer.step()
        naive.step()
    assert_averages(ema, naive)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("build", [adagrad, sgd])
def test_a_closure_may_compute_the_gradients_inside_the_step(build, by_name):
    model = Net(sparse=True)
    optimizer = build(model)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    for step in range(12):
        ids, seldom = draw(), step % 3 == 1

        def closure(ids=ids, seldom=seldom):
            optimizer.zero_grad()
            loss = model(ids, seldom=seldom)
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss > 0
        naive.step()
    assert_averages(ema, naive)


def test_an_optimizer_that_calls_its_closure_often():
    layer = nn.Linear(3, 1, dtype=torch.float64)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=4)
    ema, naive = EMA(layer, optimizer, decay=0.9), NaiveEMA(layer, 0.9)

    def closure():
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        naive.step()
    assert_averages(ema, naive)


def test_weights_come_back_to_the_last_bit_also_after_an_error():
    model = Net(sparse=True, dtype=torch.float32)
    optimizer = adagrad(model)
    ema = EMA(model, optimizer, decay=0.9)
    train(model, optimizer)
    before, addresses = weights_of(model), [p.data_ptr() for p in model.parameters()]

    def evaluation_that_fails():
        with ema.applied():
            assert not torch.equal(model.layer.weight, before["layer.weight"])
            assert [p.data_ptr() for p in model.parameters()] == addresses
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        evaluation_that_fails()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with ema.applied():
        first = weights_of(model)
    with ema.applied():
        assert all(torch.equal(first[name], p) for name, p in model.named_parameters())


def test_looking_does_not_change_the_training():
    model = Net(sparse=True)
    twin = copy.deepcopy(model)
    for net, looks in ((model, True), (twin, False)):
        torch.manual_seed(3)
        optimizer = adagrad(net)
        ema = EMA(net, optimizer, decay=0.9) if looks else None
        for _ in range(3):
            train(net, optimizer, steps=4)
            if ema is not None:
                with ema.applied():
                    pass
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_averages_go_on_from_a_saved_state(sparse):
    model = Net(sparse=sparse)
    optimizer = adagrad(model)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    train(model, optimizer, naive, steps=7)
    saved = {name: value.clone() for name, value in ema.state_dict().items()}
    ema.close()
    assert ema.num_steps == 7
    again = EMA(model, optimizer, decay=0.9)
    again.load_state_dict(saved, num_steps=7)
    assert_averages(again, naive)
    train(model, optimizer, naive, steps=7)
    assert_averages(again, naive)


def mixed_net():
    """A table with sparse gradients, one with dense ones, and a network."""
    model = Net(sparse=True, dtype=torch.float32)
    model.seldom.sparse = False
    return model


def three_tables(*, sparse):
    return lambda: Net(sparse=sparse, dtype=torch.float32)


def rowwise_or_dense_adam(model):
    """Adam by rows where the gradients are; unlike `rb.optimizer`, it leaves the tables as they are."""
    return RowwiseAdam(model.parameters(), lr=0.1)


def train_from(model, optimizer, first, last):
    """Train on batches that their number decides, so that any part of the steps can be repeated."""
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(draw(), seldom=step % 3 == 1).backward()
        optimizer.step()


def copied(state):
    return copy.deepcopy(state)


@pytest.mark.parametrize("optimizer_of", [rowwise_or_dense_adam, adagrad])
@pytest.mark.parametrize(
    "build",
    [three_tables(sparse=True), three_tables(sparse=False), mixed_net],
    ids=["sparse", "dense", "mixed"],
)
def test_training_resumed_at_any_step_ends_with_the_same_bits(build, optimizer_of):
    steps, model = 9, build()
    optimizer = optimizer_of(model)
    ema, states = EMA(model, optimizer, decay=0.9), []
    for step in range(steps):
        states.append(copied((model.state_dict(), optimizer.state_dict(), ema.training_state())))
        train_from(model, optimizer, step, step + 1)
    wanted = copied(ema.training_state())
    averages = copied(ema.state_dict())
    for step, (weights, optimizer_state, ema_state) in enumerate(states):
        torch.manual_seed(99)  # a new model is started from other weights
        again = build()
        again.load_state_dict(weights)
        optimizer = optimizer_of(again)
        optimizer.load_state_dict(optimizer_state)
        ema = EMA(again, optimizer, decay=0.9)
        ema.load_training_state(ema_state)
        train_from(again, optimizer, step, steps)
        torch.testing.assert_close(ema.training_state(), wanted, rtol=0, atol=0)
        torch.testing.assert_close(ema.state_dict(), averages, rtol=0, atol=0)


def test_a_raw_state_has_every_way_of_being_behind():
    model = mixed_net()
    optimizer = rowwise_or_dense_adam(model)
    ema = EMA(model, optimizer)
    train_from(model, optimizer, 0, 3)
    state = ema.training_state()
    shapes = {name: tuple(behind.shape) for name, behind in state["behind"].items()}
    assert shapes == {"often.weight": (ROWS,), "seldom.weight": ()}
    assert set(state["values"]) == dict(model.named_parameters()).keys()
    assert int(state["num_steps"]) == 3


def test_taking_a_raw_state_changes_nothing():
    def averages(look):
        torch.manual_seed(1)
        model = three_tables(sparse=True)()
        optimizer = rowwise_or_dense_adam(model)
        ema = EMA(model, optimizer, decay=0.9)
        for step in range(9):
            look(ema)
            train_from(model, optimizer, step, step + 1)
        return ema.state_dict()

    plain = averages(lambda _: None)
    torch.testing.assert_close(averages(EMA.training_state), plain, rtol=0, atol=0)
    # what is brought up to date in between is rounded in other places: the reason for a raw state
    rounded = averages(EMA.state_dict)
    assert any(not torch.equal(rounded[name], plain[name]) for name in plain)


def test_a_loaded_raw_state_is_a_copy():
    model = mixed_net()
    optimizer = rowwise_or_dense_adam(model)
    ema = EMA(model, optimizer)
    train_from(model, optimizer, 0, 5)
    state = copied(ema.training_state())
    before = copied(state)
    ema.load_training_state(state)
    train_from(model, optimizer, 5, 9)
    torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: Net(sparse=True, rows=9),
            r"'often\.weight' has the shape \(30, 3\), the one given",
        ),
        (lambda: Net(sparse=True), r"is float64 .* in the state and float32 .* here"),
        (lambda: nn.Linear(3, 1), "the one given is missing; use the same model"),
        (
            lambda: nn.ModuleDict({**mixed_net()._modules, "more": nn.Linear(2, 2)}),
            "the one given is missing; use the same model",
        ),
    ],
)
def test_a_raw_state_of_another_model_is_refused_and_nothing_is_loaded(other, message):
    model, another = mixed_net(), other()
    ema = EMA(model, sgd(model))
    before = copied(ema.training_state())
    with pytest.raises(TrainingError, match=message):
        ema.load_training_state(EMA(another, sgd(another)).training_state())
    torch.testing.assert_close(ema.training_state(), before, rtol=0, atol=0)


def test_a_raw_state_of_averages_that_start_at_the_initial_weights_is_refused():
    model = mixed_net()
    ema = EMA(model, sgd(model))
    state = ema.training_state()
    state["count"] = state.pop("num_steps")  # as older versions wrote it
    with pytest.raises(TrainingError, match="give weight to the initial weights, as an older ver"):
        ema.load_training_state(state)


def test_a_raw_state_with_more_parameters_or_other_rows_is_refused():
    model = mixed_net()
    ema = EMA(model, sgd(model))
    state = ema.training_state()
    more = state | {"values": state["values"] | {"more": torch.ones(2)}}
    with pytest.raises(TrainingError, match="an average of 'more', which is not trained here"):
        ema.load_training_state(more)
    fewer = {"often.weight": torch.zeros(ROWS - 1, dtype=torch.int32)}
    with pytest.raises(TrainingError, match="averages do not say how far they are behind"):
        ema.load_training_state(state | {"behind": fewer})
    rows = state | {"behind": state["behind"] | fewer}
    with pytest.raises(
        TrainingError, match=r"'often\.weight' has 30 rows .* the steps int32 \(29,\)"
    ):
        ema.load_training_state(rows)


def test_a_raw_state_that_lost_the_steps_of_its_rows_is_refused():
    model = Net(sparse=True)
    optimizer = adagrad(model)
    ema = EMA(model, optimizer)
    train(model, optimizer)
    state = ema.training_state()
    name = next(name for name, step in state["behind"].items() if step.dim())
    one = state | {"behind": state["behind"] | {name: state["behind"][name][0]}}
    with pytest.raises(TrainingError, match="averages say by row how far they are behind"):
        ema.load_training_state(one)


def test_copies_go_to_another_model_and_to_the_same():
    model = Net(sparse=True)
    optimizer = adagrad(model)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    train(model, optimizer, naive)
    other, trained = Net(sparse=False), weights_of(model)
    for target in (other, model):
        ema.copy_to(target)
        for name, parameter in target.named_parameters():
            torch.testing.assert_close(parameter.detach(), naive.averages[name], rtol=1e-12, atol=0)
        if target is other:
            assert all(torch.equal(trained[n], p) for n, p in model.named_parameters())


def test_after_close_the_averages_stay_whatever_the_weights_do():
    model = Net(sparse=True)
    model.seldom.requires_grad_(requires_grad=False)
    unmoved = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.register_parameter("unmoved", unmoved)  # without a gradient until after close
    optimizer = adagrad(model)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    train(model, optimizer, naive)
    ema.close()
    ema.close()
    unmoved.grad = torch.ones_like(unmoved)
    optimizer.step()
    train(model, optimizer)
    nn.init.constant_(model.often.weight, torch.nan)
    assert_averages(ema, naive)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_buffers_and_frozen_parameters_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model, optimizer)
    model(torch.randn(5, 2)).square().sum().backward()
    optimizer.step()
    mean = model[1].running_mean.clone()
    assert set(ema.state_dict()) == {"0.weight", "1.weight", "1.bias"}
    with ema.applied():
        assert torch.equal(model[1].running_mean, mean)


def test_memory_is_one_copy_and_four_bytes_a_row_of_what_is_trained_by_rows():
    model = Net(sparse=True, dtype=torch.float32)
    optimizer = adagrad(model)
    ema = EMA(model, optimizer)
    train(model, optimizer)
    held = [t for a in ema._averages.values() for t in (a.value, a.behind) if t is not None]
    by_rows = 2 * 4 * ROWS
    assert sum(t.nbytes for t in held) == sum(p.nbytes for p in model.parameters()) + by_rows


class CountLargeOperations(TorchDispatchMode):
    """Counts the operations on tensors of at least so many numbers, but for those on some rows."""

    by_rows = ("aten.index_select.", "aten.index_copy_.", "aten.detach.")

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.found = numbers, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        large = any(t.numel() >= self.numbers for t in tensors if t.layout == torch.strided)
        if large and not str(func).startswith(self.by_rows):
            self.found[str(func)] += 1
        return result


@pytest.mark.parametrize(("sparse", "finds"), [(True, False), (False, True)])
def test_no_operation_of_a_step_by_rows_is_as_large_as_the_table(sparse, finds):
    rows = 10_000
    table = nn.Embedding(rows, 4, sparse=sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    ema = EMA(table, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        table(draw(rows)).square().sum().backward()
        with CountLargeOperations(rows * 4) as count:
            ema._before_step(optimizer, (optimizer,), {})
            ema._after_step(optimizer, (optimizer,), {})
        assert bool(count.found) is finds, count.found


def test_a_dense_table_without_a_gradient_costs_nothing():
    table = nn.Embedding(10_000, 4)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    ema = EMA(table, optimizer)
    table(draw()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with CountLargeOperations(40_000) as count:
        optimizer.step()
    assert not count.found
    assert ema.state_dict()["weight"].shape == (10_000, 4)


def test_training_inside_applied_is_refused():
    model = Net(sparse=True)
    optimizer = adagrad(model)
    ema = EMA(model, optimizer)
    with ema.applied():
        with pytest.raises(TrainingError, match="the model holds its averages now; train, save"):
            optimizer.step()
        with pytest.raises(TrainingError, match="the model holds its averages now"):
            ema.state_dict()
        with pytest.raises(TrainingError, match="the model holds its averages now"):
            ema.load_state_dict({}, num_steps=1)
        with pytest.raises(TrainingError, match="the model holds its averages now"):
            ema.training_state()
        with pytest.raises(TrainingError, match="the model holds its averages now"):
            ema.load_training_state({})
    optimizer.step()


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    model = nn.Linear(2, 2)
    with pytest.raises(SettingsError, match=r"decay must lie in \[0, 1\], got decay="):
        EMA(model, sgd(model), decay=decay)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(OptimizerError, match="the optimizer holds no trainable parameter"):
        EMA(nn.Linear(2, 2), sgd(nn.Linear(2, 2)))


def test_half_precision_weights_are_refused():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(TrainingError, match=r"'weight' is stored in torch\.bfloat16, too coarse"):
        EMA(model, sgd(model))


def test_exchanged_parameters_are_noticed():
    model = Net(sparse=True)
    ema = EMA(model, sgd(model))
    model.layer = nn.Linear(3, 1)
    with pytest.raises(TrainingError, match=r"'layer\.weight' is no longer the parameter that was"):
        ema.state_dict()


def test_averages_of_another_model_are_refused():
    model = Net(sparse=True)
    ema = EMA(model, sgd(model))
    with pytest.raises(
        TrainingError, match=r"'scale' has the shape \(\), the one given is missing;"
    ):
        ema.load_state_dict({}, num_steps=1)
    with pytest.raises(TrainingError, match=r"given is of the shape \(9, 3\); use the same model"):
        ema.copy_to(Net(sparse=True, rows=9))


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sparse", [False, True])
def test_steps_on_the_gpu_do_not_wait_for_it(sparse):
    model = nn.Embedding(ROWS, 3, sparse=sparse, device="cuda", dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(draw().cuda()).tanh().sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ema._before_step(optimizer, (optimizer,), {})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()  # brings up to date once more, which changes nothing
        naive.step()
    assert_averages(ema, naive)


class RowSGD(torch.optim.Optimizer):
    """SGD that never waits for the device, on dense and on row gradients."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            grad = parameter.grad
            if grad.is_sparse:
                parameter.index_add_(0, grad._indices()[0], grad._values(), alpha=-0.1)
            else:
                parameter.add_(grad, alpha=-0.1)


def some_parameters(device):
    weight = nn.Parameter(torch.randn(6, 2, dtype=torch.float64, device=device))
    bias = nn.Parameter(torch.randn(2, dtype=torch.float64, device=device))
    rows, values = torch.tensor([[0, 3, 3]]), torch.randn(3, 2, dtype=torch.float64)
    weight.grad = torch.sparse_coo_tensor(rows, values, (6, 2)).to(device)
    bias.grad = torch.randn_like(bias)
    return nn.ParameterDict({"weight": weight, "bias": bias})


@needs_cuda
def test_a_recorded_step_averages_at_every_replay():
    model = some_parameters("cuda")
    optimizer = RowSGD(model.parameters())
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            optimizer.step()
        stream.synchronize()
        naive.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    for step in range(6):
        graph.replay()
        naive.step()
        if step % 2:
            assert_averages(ema, naive)


@needs_cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_averages_cannot_start_in_a_recording():
    model = some_parameters("cuda")
    optimizer = RowSGD(model.parameters())
    EMA(model, optimizer)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(TrainingError, match="the averages cannot be started inside a CUDA graph"),
        recording(graph, torch.cuda.Stream()),
    ):
        optimizer.step()


class RestartedEMA(NaiveEMA):
    """The same, with parameters whose earlier weights have no share."""

    def __init__(self, model, decay):
        super().__init__(model, decay)
        self.begun = dict.fromkeys(self.start, 0)

    def restart(self, *names):
        self.begun |= dict.fromkeys(names, len(self.steps))
        now = {name: p.detach().clone().double() for name, p in self.model.named_parameters()}
        self.start |= {name: now[name] for name in names}

    @property
    def averages(self):
        found = {}
        for name, first in self.begun.items():
            steps = [step[name] for step in self.steps[first:]]
            powers = [self.decay**age for age in range(len(steps))][::-1]
            total = sum(power * step for power, step in zip(powers, steps, strict=True))
            found[name] = total / sum(powers) if steps else self.start[name]
        return found


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize(
    ("build", "sparse"), [(adam, False), (sgd_with_momentum, True), (rowwise_adam, True)]
)
def test_a_restarted_average_has_only_later_weights_and_the_others_continue(build, sparse, decay):
    model = Net(sparse=sparse)
    optimizer = build(model)
    ema, naive = EMA(model, optimizer, decay=decay), RestartedEMA(model, decay)
    for names in (["often.weight"], ["often.weight", "seldom.weight"], [], ["scale"]):
        train(model, optimizer, naive)
        ema.bring_up_to_date()
        with torch.no_grad():
            model.often.weight.mul_(0.5)  # as rows that are forgotten
        ema.restart(model.get_parameter(name) for name in names)
        naive.restart(*names)
        assert_averages(ema, naive)
    train(model, optimizer, naive)
    assert_averages(ema, naive)
    ema.restart()
    naive.restart(*naive.begun)
    assert_averages(ema, naive)
    train(model, optimizer, naive)
    assert_averages(ema, naive)


def test_a_restart_by_hand():
    table = nn.Embedding(2, 3, sparse=True)
    nn.init.constant_(table.weight, 8.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=4.0)
    ema = EMA(table, optimizer, decay=0.5)
    for row in (0, 1, 1):
        optimizer.zero_grad()
        table(torch.tensor([row])).sum().backward()
        optimizer.step()
        if row == 0:
            ema.restart()
    # row 0 stays at 4; row 1: 4, 0 with the shares 1, 2 of 3
    found = ema.state_dict()["weight"]
    torch.testing.assert_close(found, torch.tensor([[4.0] * 3, [4 / 3] * 3]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("build", "sparse"), [(adam, False), (rowwise_adam, True)])
def test_a_restarted_average_resumes_to_the_same_bits(build, sparse):
    torch.manual_seed(0)
    model = Net(sparse=sparse, dtype=torch.float32)
    optimizer = build(model)
    ema = EMA(model, optimizer, decay=0.9)
    train(model, optimizer, steps=5)
    ema.restart([model.often.weight])
    train(model, optimizer, steps=3)
    twin, state = copy.deepcopy(model), copy.deepcopy(ema.training_state())
    other = build(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = EMA(twin, other, decay=0.9)
    resumed.load_training_state(state)
    for one, its in ((model, optimizer), (twin, other)):
        torch.manual_seed(1)
        train(one, its, steps=5)
    ours, theirs = resumed.state_dict(), ema.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    wrong = {**state, "starts": {**state["starts"], "scale": torch.tensor(99, dtype=torch.int32)}}
    with pytest.raises(TrainingError, match="'scale' cannot begin at step 99 of 8"):
        resumed.load_training_state(wrong)


def test_a_state_from_before_averages_could_restart_is_read():
    model = Net(sparse=False)
    optimizer = adam(model)
    ema, naive = EMA(model, optimizer, decay=0.9), NaiveEMA(model, 0.9)
    train(model, optimizer, naive)
    older = {key: value for key, value in ema.training_state().items() if key != "starts"}
    older = copy.deepcopy(older)
    ema.restart()
    ema.load_training_state(older)
    assert_averages(ema, naive)


class Normalised(nn.Module):
    """Two layers that normalise, with dropout between them, and a constant in the weights before each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4).double(), nn.BatchNorm1d(1).double()])
        self.dropout = nn.Dropout(0.5)

    def forward(self, features):
        hidden = self.dropout(self.norms[0](self.first(features)).relu())
        return self.norms[1](self.second(hidden))


def normalised_after_training(batches):
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    ema, naive = EMA(model, optimizer, decay=0.8), NaiveEMA(model, 0.8)
    for batch in batches:
        optimizer.zero_grad()
        # a loss that goes on moving the bias before the last norm, as noise and weight decay do
        (model(batch).square().mean() + model.second.bias.sum()).backward()
        optimizer.step()
        naive.step()
    return model, optimizer, ema, naive


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def naive_statistics(model, weights, batches):
    """Return the statistics by hand: mean and variance of each batch before each norm, then their means over the batches."""
    found = {f"norms.{k}.running_{kind}": [] for k in (0, 1) for kind in ("mean", "var")}
    for batch in batches:
        values = batch
        for k, layer in enumerate(("first", "second")):
            values = values @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            mean, count = values.mean(dim=0), len(values)
            squares = (values - mean).square().sum(dim=0)
            found[f"norms.{k}.running_mean"].append(mean)
            found[f"norms.{k}.running_var"].append(squares / (count - 1))
            values = (values - mean) / (squares / count + model.norms[k].eps).sqrt()
            values = (values * weights[f"norms.{k}.weight"] + weights[f"norms.{k}.bias"]).relu()
    return {name: sum(parts) / len(parts) for name, parts in found.items()}


def test_averages_have_statistics_of_their_own_and_the_weights_get_theirs_back():
    torch.manual_seed(0)
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(5)]
    model, _, ema, naive = normalised_after_training(batches)
    before, momenta = statistics(model), [norm.momentum for norm in model.norms]
    model.dropout.eval()  # as someone may have frozen it
    was_training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    with ema.applied(batches):
        inside = statistics(model)
        assert [module.training for module in model.modules()] == was_training
    wanted = naive_statistics(model, naive.averages, batches)
    for name, value in wanted.items():
        torch.testing.assert_close(inside[name], value, rtol=1e-12, atol=1e-13)
    # this is not what they are without batches, nor with the weights of the last step
    assert not torch.allclose(inside["norms.1.running_mean"], before["norms.1.running_mean"], 0.05)
    assert all(torch.equal(before[name], value) for name, value in statistics(model).items())
    assert [norm.momentum for norm in model.norms] == momenta
    assert torch.equal(torch.get_rng_state(), random)

    copied = copy.deepcopy(model)
    ema.copy_to(copied, [(batch, 0) for batch in batches], lambda model, pair: model(pair[0]))
    for name, value in wanted.items():
        torch.testing.assert_close(statistics(copied)[name], value, rtol=1e-12, atol=1e-13)
    with ema.applied():
        assert all(torch.equal(before[name], value) for name, value in statistics(model).items())


def test_statistics_and_weights_come_back_after_an_error():
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(3)]
    model, _, ema, _ = normalised_after_training(batches)
    before, weights = statistics(model), weights_of(model)
    used_up = iter(batches)
    assert len(list(used_up)) == 3

    def broken(model, batch):
        model(batch)
        raise ZeroDivisionError

    for error, some, call in (
        (TrainingError, used_up, None),
        (ZeroDivisionError, batches, broken),
    ):
        with pytest.raises(error), ema.applied(some, call):
            raise AssertionError
        assert all(torch.equal(before[name], value) for name, value in statistics(model).items())
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
        assert all(module.training for module in model.modules())
        assert [norm.momentum for norm in model.norms] == [0.1, 0.1]


def test_a_model_without_statistics_reads_no_batches():
    model = Net(sparse=True)
    optimizer = adagrad(model)
    ema = EMA(model, optimizer, decay=0.9)
    train(model, optimizer, steps=2)

    def never():
        raise AssertionError
        yield

    with ema.applied(never()):
        pass
    ema.copy_to(model, never())


def test_a_compiled_model_is_not_compiled_for_its_statistics():
    torch.manual_seed(0)
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(4)]
    model, _, ema, naive = normalised_after_training(batches)
    graphs = []
    compiled = torch.compile(
        model, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    compiled(batches[0])
    number = len(graphs)
    assert number > 0
    with ema.applied(batches, lambda _, batch: compiled(batch)):
        inside = statistics(model)
    for name, value in naive_statistics(model, naive.averages, batches).items():
        torch.testing.assert_close(inside[name], value, rtol=1e-12, atol=1e-13)
    assert len(graphs) == number
