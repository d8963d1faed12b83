"""Training in one pass: each row is scored by a model that has not seen its label, and counts grow with the rows."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.methods._counts import GROWING_C, Evidence
from rarebit.models import build_model, model_names
from rarebit.models.deepfm import DeepFM
from rarebit.study.runs import RunFolder, run_key
from rarebit.study.worker import make_run, open_log
from rarebit.testing import _StopAt, _StoppedError
from rarebit.training.metrics import measure
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, load_splits

SCHEMA = rb.data.Schema(
    (
        rb.data.Field(name="user", rows=20),
        rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    )
)
BATCH, LR = 8, 0.05
SETTINGS = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=rb.data.SyntheticLog(rows=1500),
    training=rb.Training(one_pass=True, batch_size=64, lr=0.02, checkpoint_minutes=1e-9),
)


def stream(rows: int = 60) -> rb.Dataset:
    ids = torch.cat([torch.randint(20, (rows, 1)), torch.randint(9, (rows, 3))], dim=1)
    return rb.Dataset(SCHEMA, ids, label=torch.randint(2, (rows,)))


def model_of(*methods: rb.Method) -> DeepFM:
    model = DeepFM(SCHEMA, dim=4, hidden=(8,), dropout=0.5, batch_norm=False)
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def naive_scores(model: nn.Module, data: rb.Dataset, tables: str) -> Tensor:
    """Score each batch, then train on it, with a plain loop."""
    optimizer = rb.optimizer(model, lr=LR, tables=tables)
    scores = []
    for batch in data.batches(BATCH):
        model.eval()
        with torch.no_grad():
            scores.append(model(batch))
        model.train()
        F.binary_cross_entropy_with_logits(model(batch), batch.label.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(scores)


def fitted(model: nn.Module, data: rb.Dataset, **options: object) -> rb.training.fit.History:
    usual = {"one_pass": True, "batch_size": BATCH, "lr": LR, "progress": False}
    return rb.fit(model, data, **usual | options)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_each_batch_is_scored_before_the_model_trains_on_it(tables):
    data, model = stream(), model_of()
    own = copy.deepcopy(model)
    torch.manual_seed(1)  # of dropout
    expected = naive_scores(own, data, tables)
    torch.manual_seed(1)
    history = fitted(model, data, tables=tables)
    torch.testing.assert_close(history.scores, expected, rtol=0, atol=0)
    assert all(map(torch.equal, model.state_dict().values(), own.state_dict().values()))
    assert history.epochs[0].valid == measure(expected, data.label)


class Around(nn.Module):
    """A model inside another class, whose scores in training nobody vouches for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: rb.data.Batch) -> Tensor:
        return self.model(batch)


@pytest.mark.parametrize("name", model_names())
def test_scores_of_the_training_step_are_those_at_inference_time(name):
    data = stream()
    model = build_model(name, data.schema, {})
    own = Around(copy.deepcopy(model))
    found = []
    for one in (model, own):
        torch.manual_seed(1)  # of dropout
        found.append(fitted(one, data).scores)
    assert torch.equal(*found)


class Noisy(DeepFM):
    """A model of someone else on top of ours, which is another one in training."""

    def forward(self, batch: rb.data.Batch) -> Tensor:
        noise = 1.0 if self.training else 0.0
        return super().forward(batch) + noise


def test_a_model_that_is_another_one_in_training_is_scored_as_at_inference_time():
    data = stream()
    model = Noisy(data.schema, dim=4, hidden=(4,))
    first = rb.predict(model, data)[:BATCH]
    assert torch.equal(fitted(model, data).scores[:BATCH], first)


def test_the_report_has_every_tenth_of_the_rows():
    data = stream(105)
    history = fitted(model_of(), data)
    parts = zip(history.scores.tensor_split(10), data.label.tensor_split(10), strict=True)
    found = [measure(*part) for part in parts]
    report = history.reports["one-pass"]
    assert report["auc"] == [one.auc for one in found]
    assert report["logloss"] == [one.logloss for one in found]


def test_labels_that_come_later_do_not_change_a_score():
    data, model = stream(), model_of()
    other = copy.deepcopy(model)
    changed = rb.Dataset(SCHEMA, data.ids, label=torch.cat([data.label[:24], 1 - data.label[24:]]))
    torch.manual_seed(1)
    before = fitted(model, data).scores
    torch.manual_seed(1)
    after = fitted(other, changed).scores
    # the fourth batch has other labels, and is scored before they are used
    assert torch.equal(before[:32], after[:32])
    assert not torch.equal(before[32:], after[32:])


def counts_of(model: nn.Module) -> list[Tensor]:
    return [m.counts.clone() for m in model.modules() if isinstance(m, Evidence)]


def test_counts_grow_with_the_rows_and_start_at_zero():
    data = stream()
    model = model_of(rb.Shrinkage(counts=data.counts()))
    seen: list[list[Tensor]] = []

    class Watch(rb.Callback):
        def after_step(self, num_steps: int) -> None:
            seen.append(counts_of(model))

    fitted(model, data, callbacks=[Watch()], tables="rowwise")
    for step, found in enumerate(seen, start=1):
        expected = torch.zeros(29, dtype=torch.int64)
        for row in data.ids[: step * BATCH].tolist():
            for place, value in zip((0, 20, 20, 20), row, strict=True):
                expected[place + value] += 1
        assert len(found) == 2  # rows, and first-order weights
        assert all(torch.equal(counts, expected) for counts in found)
    strengths = [m.strength for m in model.modules() if isinstance(m, Evidence)]
    assert all(bool((strength == GROWING_C).all()) for strength in strengths)


def test_evaluation_counts_nothing():
    data = stream()
    model = model_of(rb.Shrinkage(counts=data.counts(), c=3.0))
    fitted(model, data)
    before = counts_of(model)
    rb.evaluate(model, data)
    assert all(map(torch.equal, counts_of(model), before))


def test_a_row_is_weighed_by_the_lookups_so_far():
    table = rb.Shrinkage(counts=0, c=3.0).wrap(nn.Embedding(2, 2))
    table.evidence.grow_(None)
    ids = torch.tensor([1, 1])
    assert table.weights(ids).flatten().tolist() == pytest.approx([2 / 5, 2 / 5])
    assert table.weights(torch.tensor([0, 1])).flatten().tolist() == pytest.approx([1 / 4, 3 / 6])
    table.eval()
    assert table.weights(torch.tensor([0, 1])).flatten().tolist() == pytest.approx([1 / 4, 3 / 6])


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_averages_score_the_rows_of_the_batch(tables):
    data, model = stream(), model_of()
    own = copy.deepcopy(model)
    torch.manual_seed(1)
    found = fitted(model, data, tables=tables, ema_decay=0.8).scores
    torch.manual_seed(1)
    optimizer = rb.optimizer(own, lr=LR, tables=tables)
    steps: list[dict[str, Tensor]] = []
    for number, batch in enumerate(data.batches(BATCH)):
        weights = {name: p.detach().clone() for name, p in own.named_parameters()}
        if steps:
            shares = [0.8 ** (len(steps) - 1 - place) for place in range(len(steps))]
            average = {
                name: sum(share * step[name] for share, step in zip(shares, steps, strict=True))
                / sum(shares)
                for name in weights
            }
            own.load_state_dict({**own.state_dict(), **average})
        own.eval()
        with torch.no_grad():
            expected = own(batch)
        own.train()
        own.load_state_dict({**own.state_dict(), **weights})
        rows = slice(number * BATCH, number * BATCH + len(batch))
        torch.testing.assert_close(found[rows], expected, rtol=1e-4, atol=1e-5)
        F.binary_cross_entropy_with_logits(own(batch), batch.label.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({name: p.detach().clone() for name, p in own.named_parameters()})


@pytest.mark.parametrize("methods", [(), (rb.Tail(),)])
def test_a_stopped_pass_resumes_to_the_same_bits(tmp_path, methods):
    settings = replace(SETTINGS, methods=methods)
    whole = load_splits(SETTINGS.data).in_one_pass().train
    options = {"say": lambda _: None}
    model, history = train_model(settings, whole, None, progress=False, **options)
    options |= {"folder": tmp_path / "run", "resume": True}
    with pytest.raises(_StoppedError):
        train_model(settings, whole, None, progress=_StopAt(2), **options)
    again, resumed = train_model(settings, whole, None, progress=False, **options)
    assert torch.equal(resumed.scores, history.scores)
    assert resumed.reports == history.reports
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


def test_a_run_measures_all_rows_and_its_file_has_no_scores(tmp_path):
    result = rb.run(SETTINGS, folder=tmp_path / "run", progress=False, say=lambda _: None)
    assert result.test.overall.rows == 1500
    assert result.test.overall == result.history.epochs[0].valid
    assert len((tmp_path / "run" / "run.json").read_text()) < 20_000


def test_a_study_picks_on_the_first_half_and_compares_on_the_second(tmp_path):
    log = open_log(SETTINGS, torch.device("cpu"))
    folder = RunFolder(tmp_path, run_key(SETTINGS))
    record = make_run(SETTINGS, log, folder, device=torch.device("cpu"))
    result = rb.run(SETTINGS, progress=False, say=lambda _: None)
    scores, label = result.history.scores, log.splits.train.label
    assert record.valid_auc == measure(scores[:750], label[:750]).auc
    assert record.auc == measure(scores[750:], label[750:]).auc
    assert len(folder.scores()) == 750


def test_validation_rows_are_refused():
    data = stream()
    with pytest.raises(SettingsError, match="scores the rows it trains on; give no validation"):
        rb.fit(model_of(), data, data, one_pass=True, progress=False)
