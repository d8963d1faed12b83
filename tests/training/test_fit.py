from contextlib import nullcontext

import pytest
import torch
from capabilities import needs_cuda
from torch import nn
from torch.nn import functional as F

import rarebit as rb
from rarebit import Dataset, Hashing, Training, apply_, evaluate, fit
from rarebit.data import Field, Schema
from rarebit.data.order import shuffled_order
from rarebit.errors import (
    DataError,
    OptimizerError,
    SettingsError,
    TrainingError,
)
from rarebit.models.deepfm import DeepFM
from rarebit.models.dnn import DNN
from rarebit.models.fm import FM
from rarebit.training.fit import Silence

SCHEMA = Schema(
    (
        Field(name="user", rows=8),
        Field(name="tags", kind="multi", rows=6, max_length=2),
        Field(name="age", kind="numeric"),
    )
)
ONE = Schema((Field(name="user", rows=8),))


def some_data(n=48):
    """Rows whose label follows the user, with some noise."""
    users = torch.randint(8, (n, 1))
    ids = torch.cat([users, torch.randint(6, (n, 2))], dim=1)
    label = ((users[:, 0] % 2 == 0) ^ (torch.rand(n) < 0.2)).float()
    label[:2] = torch.tensor([0.0, 1.0])
    return Dataset(SCHEMA, ids, torch.randn(n, 1), label)


def users(ids, label):
    return Dataset(ONE, torch.tensor(ids)[:, None], label=label)


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(model, other, atol=0.0):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=atol)


def pair(build):
    """Two models with the same weights."""
    first, second = build(), build()
    second.load_state_dict(first.state_dict())
    return first, second


def naive_fit(model, data, optimizer, *, epochs, batch_size, seed=0, loss=None):
    """The loop that anyone would write."""
    loss = loss or F.binary_cross_entropy_with_logits
    means = []
    for epoch in range(1, epochs + 1):
        order, total = shuffled_order(len(data), seed=seed, epoch=epoch), 0.0
        for start in range(0, len(data), batch_size):
            batch = data[order[start : start + batch_size]]
            scores = model(batch)
            value = loss(scores, batch.label.to(scores.dtype))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += float(value.detach()) * len(batch)
        means.append(total / len(data))
    return means


NAIVE = {
    "adam": lambda groups: torch.optim.Adam(groups, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, foreach=False),
}


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_training_equals_a_naive_loop(kind, dtype, atol):
    data = some_data()
    model, reference = pair(lambda: DeepFM(SCHEMA, dim=3, hidden=(4,)).to(dtype))
    before = weights_of(model)
    tables = [p for name, p in reference.named_parameters() if ".tables." in name]
    network = [p for name, p in reference.named_parameters() if ".tables." not in name]
    groups = [
        {"params": network, "lr": 0.01, "weight_decay": 0.02},
        {"params": tables, "lr": 0.05, "weight_decay": 0.03},
    ]
    history = fit(
        model,
        data,
        optimizer=kind,
        epochs=2,
        batch_size=13,  # the last batch has nine rows
        lr=0.01,
        weight_decay=0.02,
        table_lr=0.05,
        table_weight_decay=0.03,
        momentum=0.9 if kind == "sgd" else 0.0,
        seed=3,
        progress=False,
    )
    means = naive_fit(
        model=reference, data=data, optimizer=NAIVE[kind](groups), epochs=2, batch_size=13, seed=3
    )
    assert_same(model, reference, atol)
    assert [r.train_loss for r in history.epochs] == pytest.approx(means, abs=max(atol, 1e-9))
    assert [(r.epoch, r.steps, r.lr, r.valid) for r in history.epochs] == [
        (1, 4, 0.01, None),
        (2, 4, 0.01, None),
    ]
    assert all(not torch.equal(before[name], value) for name, value in weights_of(model).items())


def test_any_loss_trains_on_any_target():
    data = some_data()
    data.label[:] = torch.randn(len(data)) * 3 + 10
    model, reference = pair(lambda: FM(SCHEMA, dim=2).double())
    history = fit(model, data, loss=F.mse_loss, epochs=2, batch_size=12, lr=0.1, progress=False)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1, foreach=False)
    naive_fit(reference, data, optimizer, epochs=2, batch_size=12, loss=F.mse_loss)
    assert_same(model, reference, 1e-10)
    assert history.epochs[1].train_loss < history.epochs[0].train_loss


def test_a_foreign_model_is_trained_by_forward():
    data = users([0, 1, 2, 3] * 4, [0, 1, 0, 1] * 4)
    table, reference = pair(lambda: nn.Embedding(8, 1))
    fit(
        table,
        data,
        epochs=3,
        batch_size=4,
        lr=0.1,
        progress=False,
        forward=lambda table, batch: table(batch["user"]),
    )
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    for epoch in (1, 2, 3):
        order = shuffled_order(16, seed=0, epoch=epoch)
        for rows in order.split(4):
            optimizer.zero_grad()
            scores = reference(data.ids[rows, 0])[:, 0]
            F.binary_cross_entropy_with_logits(scores, data.label[rows]).backward()
            optimizer.step()
    assert_same(table, reference, 1e-6)


def turning_data():
    """Valid agrees with train on seven rows of ten: good for a while, worse when train is overfit."""
    ids = [0, 1] * 20
    return users(ids, [0, 1] * 20), users([0] * 10 + [1] * 10, [0] * 7 + [1] * 10 + [0] * 3)


def test_the_best_epoch_is_kept_and_training_stops_after_patience():
    train, valid = turning_data()
    start = FM(ONE, dim=2)
    model, shorter = (FM(ONE, dim=2) for _ in range(2))
    for other in (model, shorter):
        other.load_state_dict(start.state_dict())
    options = {"batch_size": 8, "lr": 0.05, "monitor": "logloss", "progress": False}
    history = fit(model, train, valid, epochs=60, patience=3, **options)
    losses = [record.valid.logloss for record in history.epochs]
    best = history.best_epoch
    assert 1 < best == losses.index(min(losses)) + 1
    assert len(losses) == best + 3
    assert history.stopped_early
    assert evaluate(model, valid).overall == history.epochs[best - 1].valid
    fit(shorter, train, epochs=best, **options)
    assert_same(model, shorter)


def test_without_patience_all_epochs_run_and_the_best_is_kept():
    train, valid = turning_data()
    model = FM(ONE, dim=2)
    options = {"batch_size": 8, "lr": 0.2, "monitor": "logloss", "patience": None}
    history = fit(model, train, valid, epochs=12, progress=False, **options)
    assert (len(history.epochs), history.stopped_early) == (12, False)
    assert history.best_epoch < 12
    assert evaluate(model, valid).overall == history.epochs[history.best_epoch - 1].valid


class Path(rb.Callback):
    """Gives the model one score per epoch, whatever training does; the closer to 1, the lower the loss."""

    def __init__(self, scores):
        self.scores = scores

    def start(self, model, data):
        self.model, self.steps = model, data.steps_per_epoch

    def after_step(self, num_steps):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
            score = self.scores[(num_steps - 1) // self.steps]
            self.model.wide.tables.stacks[0].embedding.weight[1] = score


class Said(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.mark.parametrize(
    ("scores", "patience", "is_rising"),
    [
        ((1, 5, 3, 4), 2, True),  # one lucky epoch, and the others rise
        ((1, 5, 4, 3), 2, False),  # past its best
        ((5, 5.1, 4.9, 4.8, 4.7, 4.8), 4, False),  # past its best, with noise
        ((1, 5, 4, 4.5, 4.2, 4.9), 4, True),
        ((5, 1), 1, False),  # too short to see
    ],
)
def test_a_run_that_patience_ends_says_if_validation_was_still_rising(scores, patience, is_rising):
    rows, said = users([1] * 8 + [0] * 2, [1] * 8 + [0, 1]), Said()
    options = {"monitor": "logloss", "patience": patience, "epochs": 9, "progress": said}
    callbacks = [Path([score / 10 for score in scores])]
    history = fit(FM(ONE, dim=2), rows, rows, callbacks=callbacks, **options)
    assert len(history.epochs) == len(scores)
    assert history.still_rising is is_rising
    found = [line for line in said.lines if "still rising" in line]
    assert len(found) == is_rising
    assert all(line.endswith(f"a patience above {patience} may be better") for line in found)


def test_auc_picks_the_highest_and_the_first_of_equals():
    train = users([0, 1] * 8, [0, 1] * 8)
    backwards = users([0, 1] * 8, [1, 0] * 8)
    model = FM(ONE, dim=2)
    with torch.no_grad():  # ranks the validation rows rightly until the first steps are done
        model.wide.tables.stacks[0].embedding.weight[0] = 0.3
    history = fit(model, train, backwards, epochs=9, batch_size=4, lr=0.02, progress=False)
    assert [record.valid.auc for record in history.epochs] == [1.0, 1.0, 0.0]
    assert (history.best_epoch, history.stopped_early) == (1, True)


def test_statistics_of_the_best_epoch_come_back_too():
    train, valid = turning_data()
    model = DNN(ONE, dim=2, hidden=(4,), batch_norm=True)
    options = {"batch_size": 8, "lr": 0.1, "monitor": "logloss", "progress": False}
    history = fit(model, train, valid, epochs=30, patience=2, **options)
    assert history.best_epoch < len(history.epochs)
    assert int(model.head.layers[1].num_batches_tracked) == 5 * history.best_epoch
    assert evaluate(model, valid).overall == history.epochs[history.best_epoch - 1].valid


def test_without_validation_the_last_weights_stay():
    history = fit(FM(SCHEMA, dim=2), some_data(), epochs=2, progress=False)
    assert (history.best_epoch, history.stopped_early) == (None, False)


def test_speed_is_the_median_over_epochs():
    history = fit(FM(SCHEMA, dim=2), some_data(), epochs=3, progress=False)
    speeds = [record.samples_per_second for record in history.epochs]
    assert history.samples_per_second == sorted(speeds)[1]
    for record in history.epochs:
        assert record.samples_per_second == pytest.approx(48 / record.seconds)


@pytest.mark.parametrize(
    ("patience", "rates"), [(1, [8, 8, 4, 2, 1]), (2, [8, 8, 8, 4, 4]), (3, [8, 8, 8, 8, 4])]
)
def test_the_learning_rate_is_cut_on_a_plateau(patience, rates):
    train = users([0, 1] * 8, [0, 1] * 8)
    backwards = users([0, 1] * 8, [1, 0] * 8)
    model = FM(ONE, dim=2)
    optimizer = rb.optimizer(model, lr=8e-3, table_lr=4e-3)
    history = fit(
        model,
        train,
        backwards,  # the first epoch is the best one
        optimizer=optimizer,
        epochs=5,
        monitor="logloss",
        patience=None,
        plateau_factor=0.5,
        plateau_patience=patience,
        progress=False,
    )
    assert [record.lr for record in history.epochs] == [rate * 1e-3 for rate in rates]
    network, tables = optimizer.param_groups
    assert tables["lr"] == network["lr"] / 2


@pytest.mark.parametrize("factor", [1.0, 0.9999])
def test_a_factor_near_one_is_taken_as_it_is(factor):
    train = users([0, 1] * 8, [0, 1] * 8)
    backwards = users([0, 1] * 8, [1, 0] * 8)
    options = {"plateau_factor": factor, "monitor": "logloss", "progress": False}
    history = fit(FM(ONE, dim=2), train, backwards, epochs=3, lr=1.0, **options)
    assert [record.lr for record in history.epochs] == [1.0, 1.0, factor]


def test_bfloat16_comes_close_and_keeps_float32_weights():
    data = some_data(64)
    model, reference = pair(lambda: DNN(SCHEMA, dim=4, hidden=(8,)))
    options = {"epochs": 3, "batch_size": 16, "lr": 0.01, "progress": False}
    fit(model, data, precision="bfloat16", **options)
    fit(reference, data, **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same(model, reference, 0.02)
    assert not torch.equal(model.head.layers[0].weight, reference.head.layers[0].weight)


def trained(seed, data):
    torch.manual_seed(5)
    model = DeepFM(SCHEMA, dim=8, hidden=(16,), dropout=0.2)
    fit(model, data, epochs=2, batch_size=2048, lr=0.01, seed=seed, progress=False)
    return model


def test_training_depends_on_its_seed_only():
    data = some_data(4096)
    first, again, other = trained(1, data), trained(1, data), trained(2, data)
    assert_same(first, again)
    assert not torch.equal(first.backbone.numeric, other.backbone.numeric)


@pytest.mark.threads(2)
def test_two_threads_give_the_same_weights_every_time():
    assert torch.get_num_threads() == 2
    data = some_data(4096)
    first = trained(1, data)
    for _ in range(2):
        assert_same(first, trained(1, data))


@pytest.mark.parametrize("n", [9, 13, 5])
def test_no_batch_is_a_single_row(n):
    data = some_data(n)
    model = DNN(SCHEMA, dim=2, hidden=(3,), batch_norm=True)
    history = fit(model, data, epochs=2, batch_size=4, progress=False)
    assert [record.steps for record in history.epochs] == [n // 4, n // 4]


@needs_cuda
@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
def test_training_on_the_gpu_equals_training_on_the_cpu(kind):
    train, valid = some_data(200), some_data(100)
    model, reference = pair(lambda: DeepFM(SCHEMA, dim=3, hidden=(4,)).double())
    # one batch an epoch: the devices draw different orders
    options = {"optimizer": kind, "epochs": 9, "batch_size": 200, "lr": 0.01, "progress": False}
    on_gpu, on_cpu = (
        fit(model.cuda(), train, valid, **options),
        fit(reference, train, valid, **options),
    )
    torch.testing.assert_close(model.cpu().state_dict(), reference.state_dict(), rtol=0, atol=1e-9)
    for one, other in zip(on_gpu.epochs, on_cpu.epochs, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, abs=1e-9)
        assert one.valid.auc == other.valid.auc


class Recorder(Silence):
    def __init__(self):
        self.calls = []

    def say(self, line):
        self.calls.append(("say", line))

    def start_epoch(self, epoch, epochs, rows):
        self.calls.append(("start", epoch, epochs, rows))

    def advance(self, rows):
        self.calls.append(("advance", rows))

    def finish_epoch(self, record):
        self.calls.append(("finish", record))


@pytest.mark.parametrize(("n", "batch_size"), [(48, 100), (48, 1), (90, 3), (50, 7)])
def test_progress_is_told_of_every_row(n, batch_size):
    recorder = Recorder()
    history = fit(
        FM(SCHEMA, dim=2), some_data(n), epochs=2, batch_size=batch_size, progress=recorder
    )
    starts = [call[1:] for call in recorder.calls if call[0] == "start"]
    assert starts == [(1, 2, n), (2, 2, n)]
    second = recorder.calls.index(("start", 2, 2, n))
    for part in (recorder.calls[:second], recorder.calls[second:]):
        assert sum(call[1] for call in part if call[0] == "advance") == n
    said = [call[1] for call in recorder.calls[:2] if call[0] == "say"]
    assert said[0].startswith("memory on cpu: ")
    finishes = [call[1] for call in recorder.calls if call[0] == "finish"]
    assert finishes == history.epochs


def test_a_line_an_epoch_goes_to_standard_error(capsys):
    data = some_data()
    history = fit(FM(SCHEMA, dim=2), data, data, epochs=2, patience=None)
    out, err = capsys.readouterr()
    assert out == ""
    memory, first, second = err.splitlines()
    assert memory.startswith("memory on cpu: ")
    record = history.epochs[0]
    assert first.startswith(f"epoch 1: train loss {record.train_loss:.5f}, valid {record.valid}, ")
    assert first.endswith(" samples/s")
    assert second.startswith("epoch 2: ")


def test_without_validation_the_line_says_nothing_of_it(capsys):
    fit(FM(SCHEMA, dim=2), some_data(), epochs=1)
    assert "valid" not in capsys.readouterr().err


def test_silence(capsys):
    fit(FM(SCHEMA, dim=2), some_data(), epochs=1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_loss_that_is_not_finite_names_the_step():
    data = some_data(40)
    row = int(shuffled_order(40, seed=0, epoch=1)[25])
    data.numeric[row] = 1e30  # its square is not finite in float32
    with pytest.raises(
        TrainingError, match="the loss was not finite at step 7; lower the learning"
    ):
        fit(FM(SCHEMA, dim=2), data, batch_size=4, epochs=1, progress=False)


def test_the_step_is_counted_over_epochs_and_the_first_is_named():
    calls = []

    def loss(scores, labels):
        calls.append(1)
        return scores.sum() * (float("nan") if len(calls) in (7, 8) else 0.0)

    with pytest.raises(TrainingError, match="not finite at step 7;"):
        fit(FM(SCHEMA, dim=2), some_data(40), batch_size=10, epochs=5, loss=loss, progress=False)
    assert len(calls) == 8  # two epochs of four steps


def test_a_long_epoch_stops_soon_after_the_loss_was_not_finite():
    calls = []

    def loss(scores, labels):
        calls.append(1)
        return scores.sum() * (float("inf") if len(calls) == 5 else 0.0)

    with pytest.raises(TrainingError, match="not finite at step 5;"):
        fit(FM(SCHEMA, dim=2), some_data(500), batch_size=2, epochs=1, loss=loss, progress=False)
    assert len(calls) == 100


def test_a_huge_learning_rate_is_told():
    with pytest.raises(TrainingError, match=r"not finite at step \d+; lower the learning rate"):
        fit(FM(SCHEMA, dim=2), some_data(), optimizer="sgd", lr=1e30, batch_size=8, progress=False)


def test_training_data_of_one_class_is_refused():
    for value, word in ((0.0, "not clicked"), (1.0, "clicked")):
        data = users([0, 1, 2], [value] * 3)
        message = rf"all 3 labels of the training data are of one class \({word}\)"
        with pytest.raises(DataError, match=message):
            fit(FM(ONE, dim=2), data, progress=False)


def test_a_chance_of_one_half_is_no_click():
    with pytest.raises(DataError, match=r"of one class \(not clicked\)"):
        fit(FM(ONE, dim=2), users([0, 1], [0.1, 0.5]), progress=False)


def test_one_class_can_be_regressed():
    data = users([0, 1, 2], [7.0, 8.0, 9.0])
    fit(FM(ONE, dim=2), data, loss=F.mse_loss, epochs=1, progress=False)


def test_validation_data_of_one_class_cannot_be_picked_by_auc():
    train, valid = users([0, 1], [0, 1]), users([0, 1], [0, 0])
    with pytest.raises(DataError, match="all 2 labels of the validation data are of one class"):
        fit(FM(ONE, dim=2), train, valid, progress=False)
    history = fit(FM(ONE, dim=2), train, valid, monitor="logloss", epochs=1, progress=False)
    assert history.epochs[0].valid.auc is None


@pytest.mark.parametrize("labels", [[0.0, 2.0], [-1.0, 1.0]])
def test_labels_that_are_no_chances_are_refused(labels):
    good, bad = users([0, 1], [0, 1]), users([0, 1], labels)
    spelled = f"{labels[0]:g} to {labels[1]:g}"
    message = (
        rf"labels must lie in \[0, 1\] for this loss, the training data has {spelled}; pass loss="
    )
    with pytest.raises(DataError, match=message):
        fit(FM(ONE, dim=2), bad, progress=False)
    with pytest.raises(DataError, match=f"the validation data has {spelled}"):
        fit(FM(ONE, dim=2), good, bad, progress=False)


def test_one_row_is_refused():
    with pytest.raises(DataError, match="training needs at least two rows, got 1"):
        fit(FM(ONE, dim=2), users([0], [1]), progress=False)


def test_data_of_other_fields_is_refused():
    good, bad = users([0, 1], [0, 1]), some_data()
    with pytest.raises(DataError, match=r"the model was built for other data: .*'tags'"):
        fit(FM(ONE, dim=2), bad, progress=False)
    with pytest.raises(DataError, match=r"the model was built for other data: .*'tags'"):
        fit(FM(ONE, dim=2), good, bad, progress=False)


def test_an_optimizer_built_too_early_is_refused():
    model = FM(SCHEMA, dim=2)
    optimizer = torch.optim.Adam(model.parameters())
    apply_(model, Hashing(buckets=3), verbose=False)
    with pytest.raises(OptimizerError, match=r"the optimizer does not hold backbone.tables"):
        fit(model, some_data(), optimizer=optimizer, progress=False)


def test_the_optimizer_may_be_an_object_a_kind_or_a_setting():
    data = some_data()
    models = [FM(SCHEMA, dim=2) for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    options = {"epochs": 2, "batch_size": 8, "progress": False}
    fit(models[0], data, optimizer=rb.optimizer(models[0], kind="sgd", lr=0.3), **options)
    fit(models[1], data, optimizer="sgd", lr=0.3, **options)
    fit(models[2], data, settings=Training(optimizer="sgd", lr=0.3, epochs=9), **options)
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])


def test_settings_that_a_given_optimizer_would_not_use_are_refused():
    model = FM(SCHEMA, dim=2)
    optimizer = rb.optimizer(model)
    with pytest.raises(SettingsError, match="lr, momentum would not be used: the optimizer given"):
        fit(model, some_data(), optimizer=optimizer, lr=0.1, momentum=0.5, progress=False)


def test_an_unknown_setting_or_kind_is_refused():
    with pytest.raises(SettingsError, match=r"unknown setting 'epoch'.*did you mean 'epochs'\?"):
        fit(FM(SCHEMA, dim=2), some_data(), epoch=3)
    with pytest.raises(
        SettingsError, match="optimizer must be one of 'adam', 'sgd', 'adagrad', got"
    ):
        fit(FM(SCHEMA, dim=2), some_data(), optimizer="adamax")
    with pytest.raises(SettingsError, match=r"batch_size must be int, got 8.0"):
        fit(FM(SCHEMA, dim=2), some_data(), batch_size=8.0)


def test_a_sparse_table_trains_and_stays_sparse():
    data = users([0, 1, 2, 3], [0, 1, 0, 1])
    table, options = nn.Embedding(8, 1, sparse=True), {"epochs": 1, "progress": False}
    forward = lambda table, batch: table(batch["user"])  # noqa: E731  # a model in one line
    for given in ({}, {"tables": "rowwise"}, {"optimizer": torch.optim.SparseAdam([table.weight])}):
        before = table.weight.detach().clone()
        fit(table, data, forward=forward, **options, **given)
        changed = (table.weight.detach() != before)[:, 0]
        assert changed.tolist() == [True] * 4 + [False] * 4
        assert table.sparse


@pytest.mark.parametrize("fails", [False, True])
def test_tables_give_the_gradients_they_gave_before(fails):
    model = FM(SCHEMA, dim=2)
    options = {"epochs": 1, "tables": "rowwise", "progress": False}
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fit(model, some_data(), loss=(lambda x, y: 1 / 0) if fails else F.mse_loss, **options)
    assert not any(module.sparse for module in model.modules() if isinstance(module, nn.Embedding))


def test_a_model_without_weights_to_train_is_refused():
    model = FM(SCHEMA, dim=2).requires_grad_(requires_grad=False)
    with pytest.raises(OptimizerError, match="the model has no trainable parameter"):
        fit(model, some_data(), progress=False)


def test_frozen_weights_stay():
    model = FM(SCHEMA, dim=2)
    model.backbone.tables.requires_grad_(requires_grad=False)
    before = weights_of(model)
    fit(model, some_data(), epochs=1, progress=False)
    changed = [
        name for name, value in weights_of(model).items() if not torch.equal(value, before[name])
    ]
    assert [name for name in before if name not in changed] == [
        "backbone.tables.stacks.0.embedding.weight"
    ]


def test_gradients_left_by_the_caller_are_not_used():
    data = some_data()
    model, reference = pair(lambda: FM(SCHEMA, dim=2))
    (1000 * model(data[:]).sum()).backward()
    for one in (model, reference):
        fit(one, data, optimizer="sgd", epochs=1, lr=0.1, progress=False)
    assert_same(model, reference)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_uses_dropout_again_after_each_validation():
    data = some_data()
    model = DNN(SCHEMA, dim=2, hidden=(8,), dropout=0.5)
    modes = []
    model.head.register_forward_hook(lambda module, *_: modes.append(module.training))
    model.eval()
    fit(model, data, data, epochs=2, patience=None, progress=False)
    assert modes == [True, False, True, False]


def normalised(data):
    return DNN(data.schema, dim=4, hidden=[6], batch_norm=True, dropout=0.5)


def assert_statistics(model, data, batches):
    """The statistics of a model are the means over these batches, by hand, as nothing is dropped."""
    means, variances = [], []
    layers = list(model.head.layers)
    assert isinstance(layers[1], nn.BatchNorm1d)
    for rows in batches:
        features = layers[0](model.backbone(data[rows])).detach()
        means.append(features.mean(dim=0))
        variances.append(features.var(dim=0))
    torch.testing.assert_close(layers[1].running_mean, torch.stack(means).mean(dim=0))
    torch.testing.assert_close(layers[1].running_var, torch.stack(variances).mean(dim=0))


@pytest.mark.parametrize("has_valid", [True, False])
def test_averaged_weights_are_measured_and_kept_with_statistics_of_their_own(has_valid):
    torch.manual_seed(0)
    train, valid = some_data(50), some_data() if has_valid else None
    model, plain = pair(lambda: normalised(train))
    options = {"epochs": 3, "batch_size": 16, "patience": None, "lr": 0.05, "progress": False}
    torch.manual_seed(1)
    expected = fit(plain, train, valid, **options)
    torch.manual_seed(1)
    history = fit(model, train, valid, **options, ema_decay=0.9)
    # by hand: three batches of sixteen rows, each from all of the log
    every = [[50 * (3 * place + first) // 48 for place in range(16)] for first in range(3)]
    assert_statistics(model, train, [torch.tensor(rows) for rows in every])
    # looking changes nothing: the weights go their way with the statistics they had
    losses = [[epoch.train_loss for epoch in one.epochs] for one in (history, expected)]
    assert losses[0] == losses[1]
    if has_valid:
        best = history.epochs[history.best_epoch - 1].valid
        assert evaluate(model, valid).overall.auc == best.auc


def test_in_one_pass_the_last_rows_give_the_statistics_of_averages():
    torch.manual_seed(0)
    rows = some_data(30_000)
    drift = torch.linspace(-9, 9, len(rows))[:, None]
    data = Dataset(SCHEMA, rows.ids, drift, rows.label)
    model = normalised(data)
    fit(model, data, one_pass=True, batch_size=4096, ema_decay=0.9, progress=False)
    last = torch.arange(30_000 - 4 * 4096, 30_000)
    assert_statistics(model, data, [last[first::4] for first in range(4)])
