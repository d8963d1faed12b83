"""Steps recorded as a CUDA graph do what ordinary steps do, and say when they cannot be recorded."""

import copy

import pytest
import torch
from capabilities import needs_cuda

from rarebit import Dataset, RowGradients, fit, optimizer
from rarebit.data import Field, Schema
from rarebit.models.deepfm import DeepFM
from rarebit.row_gradients.seam import sum_losses
from rarebit.training.fit import Silence
from rarebit.training.step import why_not_recorded

pytestmark = needs_cuda

SCHEMA = Schema(
    (
        Field(name="user", rows=500),
        Field(name="tags", kind="multi", rows=20, max_length=3),
        Field(name="age", kind="numeric"),
    )
)
N = 3000


class Lines(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def draw():
    return Dataset.from_columns(
        {
            "user": torch.randint(500, (N,)),
            "tags": torch.randint(20, (N, 3)),
            "age": torch.randn(N),
        },
        label=torch.randint(2, (N,)).float(),
        schema=SCHEMA,
    ).to("cuda")


@pytest.fixture
def data():
    return draw()


def train(model, data, valid=None, **settings):
    lines = Lines()
    model = copy.deepcopy(model).to("cuda")
    settings = {"epochs": 3, "batch_size": 128, "lr": 0.001, "patience": None} | settings
    history = fit(model, data, valid, progress=lines, **settings)
    assert [line for line in lines.lines if not line.startswith("memory")] == []
    return model, history


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recorded_steps_are_ordinary_steps(data, tables, kind, precision):
    model = DeepFM(SCHEMA, dim=4, hidden=(16,))
    settings = {"tables": tables, "optimizer": kind, "precision": precision}
    recorded, history = train(model, data, **settings)
    ordinary, expected = train(model, data, cuda_graph=False, **settings)
    assert [e.steps for e in history.epochs] == [e.steps for e in expected.epochs]
    # sums of a GPU come in any order, and Adam turns the smallest difference into one of its steps
    atol = 1e-3 if precision == "float32" else 5e-3
    for name, weight in recorded.state_dict().items():
        torch.testing.assert_close(weight, ordinary.state_dict()[name], rtol=0, atol=atol)
    assert history.epochs[-1].train_loss == pytest.approx(expected.epochs[-1].train_loss, rel=1e-3)


def test_a_new_learning_rate_is_recorded_again(data):
    model = DeepFM(SCHEMA, dim=4, hidden=(16,))
    settings = {"plateau_factor": 0.1, "plateau_patience": 1, "epochs": 6}
    valid = draw()  # whose labels are chance, too: nothing is better for long
    recorded, history = train(model, data, valid, **settings)
    ordinary, expected = train(model, data, valid, cuda_graph=False, **settings)
    rates = [epoch.lr for epoch in history.epochs]
    assert rates == [epoch.lr for epoch in expected.epochs]
    assert len(set(rates)) > 1
    for name, weight in recorded.state_dict().items():
        torch.testing.assert_close(weight, ordinary.state_dict()[name], rtol=1e-2, atol=1e-2)


def test_clipping_and_averaging_are_recorded_too(data):
    model = DeepFM(SCHEMA, dim=4, hidden=(16,))
    settings = {"tables": "rowwise", "clip_norm": 0.1, "ema_decay": 0.9}
    recorded, _ = train(model, data, **settings)
    ordinary, _ = train(model, data, cuda_graph=False, **settings)
    for name, weight in recorded.state_dict().items():
        torch.testing.assert_close(weight, ordinary.state_dict()[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_row_gradients_are_recorded_too(data, tables):
    model = DeepFM(SCHEMA, dim=4, hidden=(16,)).to("cuda")
    plain, _ = train(model, data, tables=tables)
    with RowGradients(model, sum_losses) as rows:
        lines = Lines()
        fit(
            model,
            data,
            epochs=3,
            batch_size=128,
            lr=0.001,
            tables=tables,
            backward=rows.backward,
            progress=lines,
        )
    assert not any("not recorded" in line for line in lines.lines), lines.lines
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=2e-3, atol=2e-3)


def test_what_cannot_be_recorded_is_said_in_one_line_and_trained_anyway(data):
    class Waits(DeepFM):
        def forward(self, batch):
            logits = super().forward(batch)
            return logits * (1.0 if float(logits.detach().sum()) < 1e9 else 0.0)

    model, lines = Waits(SCHEMA, dim=4, hidden=(16,)).to("cuda"), Lines()
    before = copy.deepcopy(model.state_dict())
    history = fit(model, data, epochs=2, batch_size=128, progress=lines)
    (line,) = [line for line in lines.lines if "not recorded" in line]
    assert "\n" not in line
    assert history.epochs[-1].steps == 24
    assert all(not torch.equal(model.state_dict()[name], before[name]) for name in before)
    torch.randn(2, device="cuda")  # what a recording that failed may leave impossible


def test_an_optimizer_that_counts_on_the_host_is_not_recorded(data):
    model, lines = DeepFM(SCHEMA, dim=4, hidden=(16,)).to("cuda"), Lines()
    adam = torch.optim.Adam(model.parameters())
    assert "counts its steps on the host" in why_not_recorded(adam)
    assert why_not_recorded(optimizer(model)) is None
    fit(model, data, epochs=1, optimizer=adam, progress=lines)
    assert any("Adam counts its steps on the host" in line for line in lines.lines)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it loads parts
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # compiler
@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_compiled_steps_are_recorded(data, tables):
    model = DeepFM(SCHEMA, dim=4, hidden=(16,))
    recorded, _ = train(model, data, compile=True, tables=tables)
    ordinary, _ = train(model, data, cuda_graph=False, tables=tables)
    for name, weight in recorded.state_dict().items():
        torch.testing.assert_close(weight, ordinary.state_dict()[name], rtol=5e-3, atol=5e-3)
