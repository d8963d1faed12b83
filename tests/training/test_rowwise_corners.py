"""Row-wise optimizers where people mix things: states of other optimizers, late momentum, wrong options."""

import copy
import math

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from rarebit import RowGradients, clip_grad_norm_, optimizer
from rarebit.errors import OptimizerError, SettingsError
from rarebit.row_gradients import sum_losses
from rarebit.training.optimizers import RowwiseAdam, RowwiseSGD

KINDS = ["adam", "adagrad", "sgd"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def step(model, made, ids=None):
    made.zero_grad()
    model(torch.arange(8) if ids is None else ids).square().mean().backward()
    made.step()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("first", ["dense", "rowwise"])
def test_a_run_may_go_on_in_the_other_mode(kind, first):
    """With all rows looked up in every step both modes are one, so the switch must not show."""
    other = {"dense": "rowwise", "rowwise": "dense"}[first]
    model = Net()
    plain = copy.deepcopy(model)
    made = optimizer(model, kind=kind, tables=first, lr=0.1, momentum=0.9)
    every = torch.arange(20)
    step(model, made, every)
    went_on = optimizer(model, kind=kind, tables=other, lr=0.1, momentum=0.9)
    went_on.load_state_dict(made.state_dict())
    step(model, went_on, every)
    reference = optimizer(plain, kind=kind, lr=0.1, momentum=0.9)
    for _ in range(2):
        step(plain, reference, every)
    torch.testing.assert_close(model.table.weight, plain.table.weight, rtol=1e-5, atol=1e-6)


def test_the_state_of_dense_adagrad_is_refused_by_what_it_is():
    model = Net()
    dense = optimizer(model, kind="adagrad", lr=0.1)
    step(model, dense)
    by_rows = optimizer(model, kind="adagrad", tables="rowwise", lr=0.1)
    by_rows.load_state_dict(dense.state_dict())
    with pytest.raises(OptimizerError, match="the state of a table of 20 rows is that of dense"):
        step(model, by_rows)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_gradient_for_all_rows_may_come_first(kind):
    model = Net()
    made = optimizer(model, kind=kind, tables="rowwise", lr=0.1, momentum=0.9)
    (model(torch.arange(8)).square().mean() + model.table.weight.square().sum()).backward()
    made.step()
    before = model.table.weight.detach().clone()
    step(model, made)
    assert (model.table.weight != before)[:8].any(dim=1).all()
    assert torch.equal(model.table.weight[8:], before[8:])


def test_momentum_that_comes_later_reaches_tables_too():
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    both = [
        optimizer(m, kind="sgd", tables=t, lr=0.1)
        for m, t in ((model, "rowwise"), (plain, "dense"))
    ]
    for momentum in (0.0, 0.9, 0.9):
        for each, made in zip((model, plain), both, strict=True):
            for group in made.param_groups:
                group["momentum"] = momentum
            step(each, made)
    torch.testing.assert_close(model.table.weight[:8], plain.table.weight[:8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: RowwiseSGD(p, lr=0.1, maximize=True), "RowwiseSGD has no option maximize"),
        (lambda p: RowwiseAdam(p, weight_decy=0.1), "RowwiseAdam has no option weight_decy"),
        (lambda p: RowwiseAdam(p, betas=(1.5, 2.0)), r"betas must lie in \[0, 1\)"),
        (lambda p: RowwiseAdam(p, lr=-1.0), "lr must be 0 or more, got lr=-1.0"),
        (lambda p: RowwiseAdam(p, lr="x"), "lr must be a finite number, got lr='x'"),
        (lambda p: RowwiseAdam(p, eps=None), "eps must be a finite number, got eps=None"),
        (lambda p: RowwiseAdam(p, betas=0.9), "betas must be two numbers, got betas=0.9"),
        (
            lambda p: RowwiseAdam(p, betas=(0.9, "x")),
            "betas must be a finite number, got betas='x'",
        ),
        (lambda p: RowwiseSGD(p, momentum=math.nan), "momentum must be a finite number, got"),
    ],
)
def test_options_that_would_hold_for_half_of_the_model_are_refused(make, words):
    with pytest.raises(SettingsError, match=words):
        make(nn.Embedding(3, 2).parameters())


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize(
    "name",
    ["lr", "table_lr", "weight_decay", "table_weight_decay", "threshold_weight_decay", "momentum"],
)
def test_rates_that_are_negative_or_no_numbers_are_refused(tables, name):
    with pytest.raises(SettingsError, match=f"^{name} must be 0 or more, got {name}=-1.0"):
        optimizer(Net(), tables=tables, **{name: -1.0})
    for value in ("x", "0.1", [0.1], torch.ones(2), math.inf, math.nan, True):
        with pytest.raises(SettingsError, match=f"^{name} must be a finite number, got {name}="):
            optimizer(Net(), tables=tables, **{name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'"),
        ({"kind": ["adam"]}, r"unknown optimizer \['adam'\]"),
        ({"tables": ["dense"]}, "tables must be 'dense' or 'rowwise', got"),
        ({"lr": None}, "lr must be a finite number, got lr=None"),
        ({"decoupled": "no"}, "decoupled must be true or false, got decoupled='no'"),
        ({"change_groups": "tables"}, "change_groups must be a function of the groups, got"),
    ],
    ids=str,
)
def test_every_argument_of_an_optimizer_is_checked(options, words):
    with pytest.raises(SettingsError, match=words):
        optimizer(Net(), **options)


def test_an_optimizer_takes_the_model_itself():
    with pytest.raises(OptimizerError, match=r"takes the model, as in .* got a generator"):
        optimizer(Net().parameters(), lr=0.1)
    assert optimizer(Net(), lr=torch.tensor(0.1)).param_groups[0]["lr"] == 0.1


def test_a_norm_to_clip_to_is_a_number():
    with pytest.raises(SettingsError, match="max_norm must be a finite number, got max_norm='x'"):
        clip_grad_norm_(Net(), "x")


def test_clipping_is_exact_beside_layers_of_half_precision():
    model = nn.ModuleList([nn.Linear(2, 2).bfloat16(), nn.Embedding(50, 3, sparse=True)])
    model[0](torch.randn(4, 2).bfloat16()).sum().backward()
    model[1](torch.randint(50, (200,))).square().sum().backward()
    clip_grad_norm_(model, 1.0)
    squares = [
        (p.grad.to_dense() if p.grad.is_sparse else p.grad).double().square().sum()
        for p in model.parameters()
    ]
    assert float(sum(squares)) ** 0.5 == pytest.approx(1.0, abs=2e-3)


def test_two_tables_that_share_a_weight_have_row_gradients_by_rows_as_well():
    model = nn.ModuleDict({"one": nn.Embedding(9, 2), "two": nn.Embedding(9, 2)})
    model["two"].weight = model["one"].weight
    plain = copy.deepcopy(model)
    for by_rows in (False, True):
        made = optimizer(model, kind="sgd", lr=0.1, tables="rowwise" if by_rows else "dense")
        reference = optimizer(plain, kind="sgd", lr=0.1)
        with RowGradients(model, sum_losses) as rows:
            rows.backward(
                (model["one"](torch.tensor([1, 4])) * model["two"](torch.tensor([4, 7]))).sum()
            )
        (plain["one"](torch.tensor([1, 4])) * plain["two"](torch.tensor([4, 7]))).sum().backward()
        for each in (made, reference):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(model["one"].weight, plain["one"].weight)


def test_a_wrapped_model_is_told_to_come_first(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        wrapped = DistributedDataParallel(Net())
        with pytest.raises(OptimizerError, match="build the optimizer of the model first"):
            optimizer(wrapped, tables="rowwise")
        model = Net()
        made = optimizer(model, tables="rowwise", lr=0.1)
        before = model.table.weight.detach().clone()
        step(DistributedDataParallel(model), made)
        assert (model.table.weight != before).any()
        del wrapped
    finally:
        distributed.destroy_process_group()
