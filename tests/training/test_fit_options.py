"""What `fit` does besides training: averages, clipping, row gradients, compiling, refusing."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import rarebit as rb
from rarebit import Dataset, evaluate, fit
from rarebit.data import Field, Schema
from rarebit.data.order import shuffled_order
from rarebit.errors import NotEnoughMemoryError, TrainingError
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.pruning.pep import threshold_parameters
from rarebit.training.fit import Silence

SCHEMA = Schema(
    (
        Field(name="user", rows=8),
        Field(name="tags", kind="multi", rows=6, max_length=2),
        Field(name="age", kind="numeric"),
    )
)


def some_data(n=48):
    """Rows whose label follows the user, with some noise."""
    users = torch.randint(8, (n, 1))
    ids = torch.cat([users, torch.randint(6, (n, 2))], dim=1)
    label = ((users[:, 0] % 2 == 0) ^ (torch.rand(n) < 0.2)).float()
    label[:2] = torch.tensor([0.0, 1.0])
    return Dataset(SCHEMA, ids, torch.randn(n, 1), label)


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(model, other, atol=0.0):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=atol)


def pair(build):
    """Two models with the same weights."""
    first, second = build(), build()
    second.load_state_dict(first.state_dict())
    return first, second


class Lines(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


# 4 steps an epoch: exp(-1 / (4 * ema_epochs)) = 0.8
@pytest.mark.parametrize("average", [{"ema_decay": 0.8}, {"ema_epochs": -0.25 / math.log(0.8)}])
def test_averaged_weights_are_measured_and_kept(average):
    data, valid = some_data(64), some_data(32)
    model, reference = pair(lambda: FM(SCHEMA, dim=2))
    options = {"epochs": 3, "batch_size": 16, "lr": 0.05}
    history = fit(
        model,
        data,
        valid,
        tables="rowwise",
        patience=None,
        progress=False,
        **average,
        **options,
    )
    optimizer = rb.optimizer(reference, lr=0.05, tables="rowwise")
    total = {name: torch.zeros_like(weight) for name, weight in weights_of(reference).items()}
    found, shares = [], 0.0
    for epoch in range(1, 4):
        order = shuffled_order(len(data), seed=0, epoch=epoch)
        for start in range(0, len(data), 16):
            batch = data[order[start : start + 16]]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(reference(batch), batch.label).backward()
            optimizer.step()
            shares = 0.8 * shares + 1
            for name, weight in reference.state_dict().items():
                total[name] = 0.8 * total[name] + weight
        averaged = FM(SCHEMA, dim=2)
        averaged.load_state_dict({name: one / shares for name, one in total.items()})
        found.append((evaluate(averaged, valid).overall.auc, weights_of(averaged)))
    aucs = [auc for auc, _ in found]
    assert [record.valid.auc for record in history.epochs] == pytest.approx(aucs, abs=1e-6)
    best = found[aucs.index(max(aucs))][1]
    torch.testing.assert_close(weights_of(model), best, rtol=1e-5, atol=1e-6)


def test_without_validation_the_model_has_the_averages_in_the_end():
    model, other = pair(lambda: FM(SCHEMA, dim=2))
    data, options = some_data(), {"epochs": 2, "lr": 0.1, "progress": False}
    fit(model, data, ema_decay=0.5, **options)
    fit(other, data, **options)
    assert not torch.equal(model.state_dict()["wide.bias"], other.state_dict()["wide.bias"])


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_gradients_are_clipped(tables):
    data = some_data(64)
    model, reference = pair(lambda: FM(SCHEMA, dim=2))
    options = {"epochs": 1, "batch_size": 16, "lr": 1.0, "optimizer": "sgd", "progress": False}
    fit(model, data, clip_norm=0.01, tables=tables, **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    order = shuffled_order(len(data), seed=0, epoch=1)
    for start in range(0, len(data), 16):
        batch = data[order[start : start + 16]]
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(reference(batch), batch.label).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
    assert_same(model, reference, atol=1e-6)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_row_gradients_train_through_fit(tables):
    data = some_data(64)
    model, reference = pair(lambda: DeepFM(SCHEMA, dim=3, hidden=(4,)))
    options = {"epochs": 2, "batch_size": 16, "tables": tables, "progress": False}
    with rb.RowGradients(model, rb.row_gradients.sum_losses) as rows:
        fit(model, data, backward=rows.backward, **options)
    fit(reference, data, **options)
    assert_same(model, reference)


def test_training_that_cannot_fit_is_refused_before_it_starts():
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            table = torch.zeros(1, 1).expand(
                1 << 40, 1
            )  # as if a table of four terabytes were there
            self.table = nn.Embedding.from_pretrained(table, freeze=False)

    data = Dataset.from_columns({"user": [0, 1, 2, 3]}, label=[0, 1, 0, 1])
    with pytest.raises(NotEnoughMemoryError, match="the largest part is the optimizer state"):
        fit(Huge(), data, forward=lambda model, batch: model.table(batch["user"]), progress=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it loads parts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # compiler
@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_compiled_training_is_training(tables):
    data = some_data(100)  # batches of 16 are compiled, the last of 4 is not
    model, reference = pair(lambda: DeepFM(SCHEMA, dim=3, hidden=(4,)))
    options = {"epochs": 2, "batch_size": 16, "tables": tables, "progress": False}
    fit(model, data, compile=True, **options)
    fit(reference, data, **options)
    assert_same(model, reference, atol=1e-5)


def test_what_cannot_be_compiled_is_said_in_one_line_and_trained_anyway(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no compiler was found\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    data, told = some_data(64), Lines()
    model, reference = pair(lambda: FM(SCHEMA, dim=2))
    options = {"epochs": 1, "batch_size": 16}
    fit(model, data, compile=True, progress=told, **options)
    fit(reference, data, progress=False, **options)
    assert told.lines[1:] == ["the model is not compiled: no compiler was found"]
    assert_same(model, reference)


def test_row_gradients_without_their_backward_are_refused():
    model = DeepFM(SCHEMA, dim=3, hidden=(4,))
    with (
        rb.RowGradients(model, rb.row_gradients.sum_losses),
        pytest.raises(TrainingError, match=r"rows\.backward"),
    ):
        fit(model, some_data(), epochs=1, progress=False)


def test_an_error_of_ours_is_not_taken_for_a_failed_compilation(monkeypatch):
    def fails(*arguments):
        raise TrainingError("something of ours")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    with pytest.raises(TrainingError, match="something of ours"):
        fit(FM(SCHEMA, dim=2), some_data(), compile=True, batch_size=16, progress=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # compiler
def test_every_model_of_a_long_row_is_compiled(monkeypatch):
    """torch compiles one function for eight models or so, and then no more without a word."""
    original = torch.compile
    by_tracing = lambda function, dynamic: original(function, dynamic=dynamic, backend="eager")  # noqa: E731
    monkeypatch.setattr(torch, "compile", by_tracing)
    data = some_data(32)
    for dim in range(2, 13):
        counters.clear()
        fit(FM(SCHEMA, dim=dim), data, compile=True, batch_size=16, epochs=1, progress=False)
        assert counters["stats"]["unique_graphs"] > 0, dim


def test_learned_thresholds_rise_by_their_own_decay():
    # no other force moves this one so fast: from -15 the loss has a gradient of 3e-7 at most
    levels = []
    for decay in (0.0, 1e-5):
        torch.manual_seed(0)
        model = FM(SCHEMA, dim=4)
        rb.apply_(model, rb.PEP(granularity="global"), verbose=False)
        fit(model, some_data(), epochs=2, threshold_weight_decay=decay, lr=0.01, progress=False)
        [level] = threshold_parameters(model)
        levels.append(float(level.detach()))
    steps = 2
    assert levels[1] == pytest.approx(-15 + 0.01 * steps, abs=1e-3)
    assert levels[0] != pytest.approx(levels[1], abs=1e-3)
