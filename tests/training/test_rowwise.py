"""Row-wise optimizers against loops over rows, against torch's dense ones, and in people's loops."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training.rowwise_models import SCHEMA, backward, batch_of, twins

from rarebit import Dataset, Hashing, LowRank, apply_, check_optimizer, fit, merge_, optimizer
from rarebit.errors import OptimizerError, SettingsError
from rarebit.models.deepfm import DeepFM
from rarebit.training.optimizers import RowwiseAdagrad, RowwiseAdam, RowwiseSGD, row_kernel

KINDS = ["adam", "adagrad", "sgd"]
ROWWISE = {"adam": RowwiseAdam, "adagrad": RowwiseAdagrad, "sgd": RowwiseSGD}


class Naive:
    """The three optimizers as a loop over rows, one row and one step at a time, in float64."""

    def __init__(self, kind, weight, *, lr, weight_decay=0.0, decoupled=False, momentum=0.0):
        self.kind, self.lr, self.momentum = kind, lr, momentum
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.weight = weight.detach().double().clone()
        self.first = torch.zeros_like(self.weight)
        self.second = torch.zeros_like(self.weight)
        self.total = torch.zeros(len(weight), dtype=torch.float64)
        self.steps = 0

    def step(self, ids, values):
        self.steps += 1
        for row in sorted(set(ids.tolist())):
            gradient = sum(
                v.double() for i, v in zip(ids.tolist(), values, strict=True) if i == row
            )
            if self.decoupled:
                self.weight[row] *= 1 - self.lr * self.weight_decay
            else:
                gradient = gradient + self.weight_decay * self.weight[row]
            getattr(self, self.kind)(row, gradient)

    def adam(self, row, gradient):
        self.first[row] = 0.9 * self.first[row] + 0.1 * gradient
        self.second[row] = 0.999 * self.second[row] + 0.001 * gradient**2
        first = self.first[row] / (1 - 0.9**self.steps)
        second = self.second[row] / (1 - 0.999**self.steps)
        self.weight[row] -= self.lr * first / (second.sqrt() + 1e-8)

    def adagrad(self, row, gradient):
        self.total[row] += (gradient**2).mean()
        self.weight[row] -= self.lr * gradient / (self.total[row].sqrt() + 1e-10)

    def sgd(self, row, gradient):
        self.first[row] = self.momentum * self.first[row] + gradient
        self.weight[row] -= self.lr * self.first[row]


def train(table, adam, ids, target):
    """Take one step towards a target for each lookup, and return the gradient of each lookup."""
    rows = table(ids)
    rows.retain_grad()
    (0.5 * (rows - target).square()).sum().backward()
    adam.step()
    adam.zero_grad()
    return rows.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
@given(steps=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), min_size=1, max_size=5))
def test_each_kind_is_the_loop_over_rows(kind, decoupled, steps):
    table = nn.Embedding(7, 3, sparse=True)
    options = {"lr": 0.1, "weight_decay": 0.3, "decoupled": decoupled}
    if kind == "sgd":
        options["momentum"] = 0.8
    ours, naive = (
        ROWWISE[kind](table.parameters(), **options),
        Naive(kind, table.weight, **options),
    )
    for ids in map(torch.tensor, steps):
        naive.step(ids, train(table, ours, ids, torch.randn(len(ids), 3)))
    torch.testing.assert_close(table.weight.double(), naive.weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_give_the_same(kind, monkeypatch):
    results = []
    for compiled in ("0", "1"):
        monkeypatch.setenv("RAREBIT_COMPILE", compiled)
        row_kernel.cache_clear()
        torch.manual_seed(0)
        table = nn.Embedding(50, 5, sparse=True)
        ours = ROWWISE[kind](table.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(10):
            train(table, ours, torch.randint(50, (30,)), torch.randn(30, 5))
        results.append(table.weight.detach().clone())
    row_kernel.cache_clear()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_torchs_dense_one_when_every_row_is_touched_in_every_step(form, kind, weight_decay):
    tables = [nn.Embedding(9, 4, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    options = {"lr": 0.05, "weight_decay": weight_decay}
    if kind == "sgd":
        options["momentum"] = 0.9
    torchs = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    both = [
        ROWWISE[kind](tables[0].parameters(), **options),
        torchs(tables[1].parameters(), **options),
    ]
    for _ in range(20):
        ids = torch.cat([torch.randperm(9), torch.randint(9, (5,))])
        target = torch.randn(14, 4)
        for table, each in zip(tables, both, strict=True):
            train(table, each, ids, target)
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_not_looked_up_keep_every_bit(form, kind):
    table = nn.Embedding(1000, 6, sparse=True)
    ours = ROWWISE[kind](table.parameters(), lr=0.1, weight_decay=0.1)
    before = table.weight.detach().clone()
    touched = torch.zeros(1000, dtype=torch.bool)
    for _ in range(5):
        ids = torch.randint(0, 300, (40,))
        touched[ids] = True
        train(table, ours, ids, torch.randn(40, 6))
    assert torch.equal(table.weight[~touched], before[~touched])
    assert not torch.equal(table.weight[touched], before[touched])


@pytest.mark.threads(2)
@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_two_identical_fits_give_identical_bits_on_two_threads(form, tables):
    n = 3000
    data = Dataset.from_columns(
        {"user": torch.randint(2000, (n,)), "item": torch.randint(500, (n,))},
        label=torch.randint(2, (n,)).float(),
    )
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = DeepFM(data.schema, dim=8, hidden=(32,))
        fit(model, data, epochs=2, batch_size=512, tables=tables, progress=False)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def assert_close_weights(model, other, **tolerance):
    for (name, weight), expected in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(weight, expected, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def test_the_network_is_trained_exactly_as_torch_trains_it():
    """SGD without momentum has no state, so touching fewer rows makes no difference at all."""
    (ours, by_rows), (theirs, dense) = twins("sgd", lr=0.1)
    for _ in range(5):
        batch = batch_of()
        for model, each in ((ours, by_rows), (theirs, dense)):
            backward(model, batch)
            each.step()
            each.zero_grad()
    assert_close_weights(ours, theirs, rtol=1e-6, atol=1e-7)


def test_adam_of_the_network_has_the_bits_of_torchs():
    (ours, by_rows), (theirs, dense) = twins("adam", lr=0.1)
    batch = batch_of()
    for model, each in ((ours, by_rows), (theirs, dense)):
        backward(model, batch)
        each.step()
    for name, weight in ours.named_parameters():
        if ".tables." not in name:
            assert torch.equal(weight, theirs.state_dict()[name]), name


@pytest.mark.parametrize("method", [Hashing(buckets=4), LowRank(rank=2)], ids=str)
def test_tables_made_by_methods_are_trained_by_rows_and_their_factors_densely(method):
    model = DeepFM(SCHEMA, dim=4, hidden=(5,))
    apply_(model, method, verbose=False)
    ours = optimizer(model, tables="rowwise", lr=0.1)
    check_optimizer(model, ours)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model, batch_of())
    by_rows = {name for name, p in model.named_parameters() if p.grad.is_sparse}
    assert by_rows == {name for name, _ in model.named_parameters() if "embedding.weight" in name}
    ours.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


class TwoTower(nn.Module):
    def __init__(self, mode="mean"):
        super().__init__()
        self.item = nn.Embedding(30, 4, padding_idx=0)
        self.history = nn.EmbeddingBag(30, 4, mode=mode, padding_idx=0)
        self.score = nn.Linear(8, 1)

    def forward(self, item, history):
        return self.score(torch.cat([self.item(item), self.history(history)], dim=1)).squeeze(1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_padding_train_as_with_a_dense_optimizer(form, mode):
    ours = TwoTower(mode)
    theirs = copy.deepcopy(ours)
    both = [
        optimizer(ours, kind="sgd", lr=0.1, tables="rowwise"),
        optimizer(theirs, kind="sgd", lr=0.1),
    ]
    for _ in range(4):
        item, history = torch.randint(30, (12,)), torch.randint(30, (12, 5))
        item[0], history[0] = 0, 0
        for model, each in zip((ours, theirs), both, strict=True):
            model(item, history).square().sum().backward()
            each.step()
            each.zero_grad()
    assert ours.item.weight.grad is None
    assert not ours.item.weight[0].any()
    assert ours.item.sparse
    assert ours.history.sparse == (mode != "max")  # torch has no row gradients of a maximum
    assert_close_weights(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_weight_shared_with_another_layer_is_trained_densely():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    model["out"].weight = model["embed"].weight
    ours = optimizer(model, tables="rowwise", lr=0.1)
    assert not model["embed"].sparse
    model["out"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    before = model["embed"].weight.detach().clone()
    ours.step()
    assert (model["embed"].weight != before).any(dim=1).all()


def test_dense_switches_the_tables_back():
    model = TwoTower()
    optimizer(model, tables="rowwise")
    assert model.item.sparse
    optimizer(model, tables="dense")
    assert not model.item.sparse


def test_accumulated_gradients_are_one_step_on_their_sum(form):
    models = [nn.Embedding(9, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = [optimizer(model, tables="rowwise", lr=0.1) for model in models]
    parts = torch.tensor([1, 1, 2]), torch.tensor([2, 5])
    for part in parts:
        models[0](part).square().sum().backward()
    models[1](torch.cat(parts)).square().sum().backward()
    for each in ours:
        each.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-6, atol=1e-7)


def test_a_schedule_changes_both_parts(form):
    (ours, by_rows), (theirs, dense) = twins("sgd", lr=0.5)
    schedules = [
        torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.1) for each in (by_rows, dense)
    ]
    for _ in range(3):
        batch = batch_of()
        for model, each, schedule in zip((ours, theirs), (by_rows, dense), schedules, strict=True):
            backward(model, batch)
            each.step()
            each.zero_grad()
            schedule.step()
    assert [group["lr"] for group in by_rows.param_groups] == pytest.approx([5e-4, 5e-4])
    assert_close_weights(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_its_saved_state_with_the_same_bits(form, kind, tmp_path: Path):
    batches = [batch_of() for _ in range(6)]
    options = {"kind": kind, "lr": 0.1, "tables": "rowwise", "momentum": 0.9}

    def train_on(model, each, part):
        for batch in part:
            backward(model, batch)
            each.step()
            each.zero_grad()

    model = DeepFM(SCHEMA, dim=4, hidden=(5,))
    ours = optimizer(model, **options)
    train_on(model, ours, batches[:3])
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, tmp_path / "state")
    train_on(model, ours, batches[3:])

    again = DeepFM(SCHEMA, dim=4, hidden=(5,))
    resumed = optimizer(again, **options)
    saved = torch.load(tmp_path / "state", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train_on(again, resumed, batches[3:])
    assert_close_weights(again, model, rtol=0.0, atol=0.0)


def test_a_copied_optimizer_trains_the_copied_model():
    model = DeepFM(SCHEMA, dim=4, hidden=(5,))
    ours = optimizer(model, tables="rowwise", lr=0.1)
    batch = batch_of()
    backward(model, batch)
    ours.step()
    ours.zero_grad()
    other, theirs = copy.deepcopy((model, ours))
    for each, step in ((model, ours), (other, theirs)):
        backward(each, batch)
        step.step()
    assert_close_weights(other, model, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_applied_in_the_middle_takes_the_optimizer_along(kind):
    model = DeepFM(SCHEMA, dim=4, hidden=(5,))
    ours = optimizer(model, kind=kind, tables="rowwise", lr=0.1, momentum=0.9)
    for change in (
        lambda: None,
        lambda: apply_(
            model,
            LowRank(rank=2),
            where=lambda table: table.field == "user",
            optimizer=ours,
            verbose=False,
        ),
        lambda: merge_(model, optimizer=ours, verbose=False),
    ):
        change()
        check_optimizer(model, ours)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        backward(model, batch_of(64))
        ours.step()
        ours.zero_grad()
        assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_grad_scaler_scales_and_skips(form):
    (ours, by_rows), (theirs, dense) = twins("sgd", lr=0.1)
    scaler, batch = torch.amp.GradScaler("cpu", init_scale=1024.0), batch_of()
    loss = nn.functional.binary_cross_entropy_with_logits(ours(batch), batch.label)
    scaler.scale(loss).backward()
    scaler.step(by_rows)
    scaler.update()
    backward(theirs, batch)
    dense.step()
    assert_close_weights(ours, theirs, rtol=1e-6, atol=1e-7)
    before = copy.deepcopy(ours.state_dict())
    by_rows.zero_grad()
    scaler.scale(ours(batch).sum() * float("inf")).backward()
    scaler.step(by_rows)
    scaler.update()
    assert all(torch.equal(ours.state_dict()[name], before[name]) for name in before)


def test_a_closure_is_called_and_its_loss_returned():
    table = nn.Embedding(9, 2)
    ours = optimizer(table, tables="rowwise", lr=0.1)

    def closure():
        ours.zero_grad()
        loss = table(torch.tensor([3])).square().sum()
        loss.backward()
        return loss

    first = ours.step(closure).item()
    assert ours.step(closure).item() < first


def test_a_table_in_half_precision_is_rounded_once(form):
    table = nn.Embedding(5, 4, dtype=torch.bfloat16)
    ours = optimizer(table, tables="rowwise", kind="sgd", lr=0.01)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1, 1])).sum().backward()
    ours.step()
    expected = (before[1].float() - 0.01 * 3.0).bfloat16()
    assert torch.equal(table.weight[1], expected)


def test_a_penalty_on_the_whole_table_trains_all_rows_where_the_state_allows():
    table = nn.Embedding(9, 2)
    ours = optimizer(table, tables="rowwise", lr=0.1)
    before = table.weight.detach().clone()
    (table(torch.tensor([3])).sum() + table.weight.square().sum()).backward()
    ours.step()
    assert (table.weight != before).any(dim=1).all()


def test_a_penalty_on_the_whole_table_is_refused_with_one_number_of_state_a_row():
    table = nn.Embedding(9, 2)
    ours = optimizer(table, tables="rowwise", kind="adagrad", lr=0.1)
    table(torch.tensor([3])).sum().backward()
    ours.step()
    ours.zero_grad()
    table.weight.square().sum().backward()
    with pytest.raises(OptimizerError, match="a table of 9 rows was trained by rows and now got"):
        ours.step()


@pytest.mark.parametrize("kind", KINDS)
def test_decoupled_weight_decay_shrinks_network_and_touched_rows_directly(form, kind):
    model = nn.ModuleDict({"table": nn.Embedding(4, 2), "layer": nn.Linear(2, 1, bias=False)})
    ours = optimizer(model, kind=kind, tables="rowwise", lr=0.5, weight_decay=0.2, decoupled=True)
    before = copy.deepcopy(model.state_dict())
    (0.0 * model["layer"](model["table"](torch.tensor([1]))).sum()).backward()
    ours.step()
    torch.testing.assert_close(model["layer"].weight, 0.9 * before["layer.weight"])
    torch.testing.assert_close(model["table"].weight[1], 0.9 * before["table.weight"][1])
    assert torch.equal(model["table"].weight[2], before["table.weight"][2])


def test_decoupled_weight_decay_of_dense_tables_is_adamw_or_refused():
    table = nn.Embedding(4, 2)
    assert type(optimizer(table, decoupled=True)) is torch.optim.AdamW
    with pytest.raises(SettingsError, match="torch has no sgd with decoupled weight decay"):
        optimizer(table, kind="sgd", decoupled=True)


def test_an_unknown_mode_is_refused():
    with pytest.raises(
        SettingsError, match="tables must be 'dense' or 'rowwise', got tables='row'"
    ):
        optimizer(nn.Embedding(4, 2), tables="row")


GRADIENTS = [torch.tensor([[3e-9], [-2e-8], [1e-7]]), torch.tensor([[-1e-8], [4e-9], [2e-8]])]
"""As small as the eps of an optimizer, which then decides the step."""


@pytest.mark.parametrize("eps", [None, 1e-3], ids=["default", "large"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(RowwiseAdam, torch.optim.Adam), (RowwiseAdagrad, torch.optim.Adagrad)],
    ids=["adam", "adagrad"],
)
def test_eps_is_torchs_and_where_torch_has_it(ours, torchs, as_tensor, eps):
    start = torch.tensor([[1e-3], [0.0], [-1e-3]])
    options = {} if eps is None else {"eps": eps}
    tables = [nn.Embedding.from_pretrained(start.clone(), freeze=False) for _ in range(2)]
    lr = torch.tensor(0.01) if as_tensor else 0.01  # a tensor is for plain torch
    both = [ours(tables[0].parameters(), lr=lr, **options)]
    both.append(torchs(tables[1].parameters(), lr=0.01, **options))
    for gradient in GRADIENTS * 2:
        scale = 1.0 if eps is None else eps / 1e-8
        tables[1].weight.grad = gradient * scale
        tables[0].weight.grad = (gradient * scale).to_sparse(1)
        for each in both:
            each.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-4, atol=1e-7)
    assert (tables[0].weight - start).abs().min() > 1e-4
