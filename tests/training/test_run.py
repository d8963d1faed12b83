"""A run from settings to what is served: the order of methods, what is counted, what is saved."""

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import CheckpointError, DataError, ModelFileError, TrainingInterrupted
from rarebit.tables.apply import table_bytes
from rarebit.tables.table import full_table
from rarebit.technique import technique_to_mapping
from rarebit.training.fit import Silence
from rarebit.training.run import (
    finish_model,
    num_parameters,
    read_run,
    start_model,
    train_model,
)
from rarebit.training.settings import RunSettings

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=30), rb.data.Field(name="item", rows=20)))
D, ROWS = 4, 30 + 20
FIRST_ORDER = ROWS + 1  # a weight a value, and the bias
HASHING, MLET = rb.Hashing(buckets=9), rb.MLET(inner_dim=8)
CUT = rb.LowRank(rank=2, after_training=True)


def settings_of(*methods: rb.Method, **training) -> RunSettings:
    return RunSettings.from_mapping(
        {
            "model": {"name": "fm", "dim": D},
            "data": {"rows": 2000},
            "training": {"epochs": 2, "batch_size": 64, **training},
            "methods": [technique_to_mapping(method) for method in methods],
        }
    )


def silence(line: str) -> None:
    del line


def started(*methods: rb.Method) -> tuple[RunSettings, nn.Module]:
    settings = settings_of(*methods)
    return settings, start_model(settings, SCHEMA, say=silence)


def finished(*methods: rb.Method) -> nn.Module:
    settings, model = started(*methods)
    finish_model(settings, model, say=silence)
    return model


def methods_on(model: nn.Module) -> set[tuple[str, ...]]:
    return {info.methods for info in rb.find_tables(model) if info.width > 1}


def test_training_starts_without_what_comes_after_it():
    for methods, trained in (
        ((HASHING, CUT), (str(HASHING),)),
        ((MLET, rb.Quantize()), (str(MLET),)),
        ((CUT, rb.Quantize()), ()),
        ((rb.LowRank(rank=2),), ("LowRank(rank=2)",)),
    ):
        _, model = started(*methods)
        assert methods_on(model) == {trained}


def test_all_methods_of_a_seed_start_from_the_same_tables():
    _, plain = started()
    _, late = started(CUT)
    _, kept = started(rb.MLET(inner_dim=8, init="keep"))
    for name, value in plain.state_dict().items():
        assert torch.equal(late.state_dict()[name], value)
    for one, other in zip(
        plain.backbone.tables.tables(), kept.backbone.tables.tables(), strict=True
    ):
        assert_close(other.weight, one.weight, atol=1e-6, rtol=1e-5)


def test_what_training_draws_does_not_depend_on_what_methods_drew():
    drawn = []
    for methods in ((), (MLET,)):
        started(*methods)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("methods", "changed", "left"),
    [
        ((), False, ()),
        ((MLET,), False, ()),
        ((HASHING,), False, (str(HASHING),)),
        ((HASHING, MLET), False, (str(HASHING),)),
        ((rb.Quantize(),), True, ("Quantize(bits=8)",)),
        ((MLET, rb.Quantize()), True, ("Quantize(bits=8)",)),
        ((HASHING, CUT), True, (str(HASHING), str(CUT))),
        ((CUT, rb.Quantize()), True, (str(CUT), "Quantize(bits=8)")),
    ],
    ids=str,
)
def test_finishing_tells_whether_scores_are_others(methods, changed, left):
    settings, model = started(*methods)
    ids = torch.stack([torch.randint(30, (16,)), torch.randint(20, (16,))], dim=1)
    data = rb.Dataset(SCHEMA, ids, label=torch.zeros(16))
    before = rb.predict(model, data)
    assert finish_model(settings, model, say=silence) is changed
    assert methods_on(model) == {left}
    after = rb.predict(model, data)
    assert bool((abs(before - after) > 1e-6).any()) is changed


def test_a_product_is_folded_before_it_is_cut():
    settings, model = started(MLET, CUT)
    trained = [table.merge().weight.detach().double() for table in model.backbone.tables.tables()]
    finish_model(settings, model, say=silence)
    assert methods_on(model) == {(str(CUT),)}
    for weight, table in zip(trained, model.backbone.tables.tables(), strict=True):
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        closest = u[:, :2] @ torch.diag(s[:2]) @ v[:2]
        assert_close(table.weight.detach().double(), closest, atol=1e-6, rtol=1e-5)


def test_what_is_applied_at_the_end_is_said():
    said: list[str] = []
    settings, model = started(MLET, rb.Quantize())
    finish_model(settings, model, say=said.append)
    [line] = said
    assert line.startswith("Quantize(bits=8): 2 of 4 tables, 800 -> 208 bytes stored")


@pytest.mark.parametrize(
    ("methods", "in_training", "served", "served_bytes"),
    [
        ((), ROWS * D, ROWS * D, 4 * ROWS * D),
        ((MLET,), (ROWS + 2 * D) * 8, ROWS * D, 4 * ROWS * D),
        ((HASHING,), 2 * 9 * D, 2 * 9 * D, 4 * 2 * 9 * D),
        ((HASHING, MLET), 2 * (9 + D) * 8, 2 * 9 * D, 4 * 2 * 9 * D),
        # a byte a weight, and a scale of four bytes for each of two tables
        ((rb.Quantize(),), ROWS * D, ROWS * D + 2, ROWS * D + 2 * 4),
        ((rb.Quantize(bits=4),), ROWS * D, ROWS * D + 2, ROWS * D // 2 + 2 * 4),
        ((CUT,), ROWS * D, (ROWS + 2 * D) * 2, 4 * (ROWS + 2 * D) * 2),
    ],
    ids=str,
)
def test_weights_and_bytes_counted_by_hand(methods, in_training, served, served_bytes):
    settings, model = started(*methods)
    assert num_parameters(model) == in_training + FIRST_ORDER
    assert table_bytes(model) == 4 * in_training + 4 * ROWS
    finish_model(settings, model, say=silence)
    assert num_parameters(model) == served + FIRST_ORDER
    assert table_bytes(model) == served_bytes + 4 * ROWS


RUNS = {
    "mlet": (MLET,),
    "mlet+quantize": (MLET, rb.Quantize(bits=4)),
    "hashing+mlet+quantize": (rb.Hashing(buckets=500), MLET, rb.Quantize()),
    "low-rank after training": (CUT,),
    "mlet+low-rank after training": (MLET, CUT),
}


@pytest.mark.parametrize("methods", RUNS.values(), ids=RUNS)
def test_a_run_is_saved_as_it_was_measured(methods, tmp_path):
    settings = settings_of(*methods)
    result = rb.run(settings, folder=tmp_path, progress=False, say=silence)
    loaded = rb.load_model(tmp_path)
    test = rb.data.generate(rb.data.SyntheticLog(rows=2000)).test
    assert (rb.predict(loaded, test) == rb.predict(result.model, test)).all()
    assert rb.evaluate(loaded, test).overall == rb.evaluate(result.model, test).overall
    assert result.test.overall.auc == rb.evaluate(loaded, test).overall.auc
    stored = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert stored["num_parameters"] == num_parameters(loaded) == result.num_parameters
    assert stored["table_bytes"] == table_bytes(loaded) == result.table_bytes
    assert RunSettings.from_mapping(stored["settings"]).methods == methods
    assert not any("MLET" in "".join(names) for names in methods_on(loaded))


class StopAfter(Silence):
    """Sends a signal to this process when it was told so many times that rows are done."""

    def __init__(self, told: int) -> None:
        self.left = told

    def advance(self, rows: int) -> None:
        del rows
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("methods", [(MLET,), (MLET, rb.Quantize())], ids=str)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(methods, tables, tmp_path):
    settings = settings_of(*methods, tables=tables, ema_decay=0.9)
    whole = rb.run(settings, folder=tmp_path / "whole", progress=False, say=silence)
    with pytest.raises(TrainingInterrupted):
        rb.run(settings, folder=tmp_path / "stopped", progress=StopAfter(2), say=silence)
    assert not (tmp_path / "stopped" / "model.json").exists()
    resumed = rb.run(
        settings, folder=tmp_path / "stopped", resume=True, progress=False, say=silence
    )
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert resumed.test == whole.test


def test_a_run_counts_its_training_rows_for_tables_that_ask():
    settings = settings_of(rb.Shrinkage(c=5.0))
    result = rb.run(settings, progress=False, say=silence)
    assert methods_on(result.model) == {()}  # folded: it is served as plain tables
    splits = rb.data.generate(rb.data.SyntheticLog(rows=2000))
    counts = splits.train.counts()["user"]
    never = full_table(result.model.backbone.tables.tables()[0])[counts == 0]
    assert len(never) > 1
    assert_close(never, never[:1].expand_as(never))  # the prior, and nothing of their own


@pytest.mark.slow
def test_pruning_a_shrunk_model_counts_its_rows_in_both_stages():
    settings = settings_of(rb.Shrinkage(c=5.0), rb.pruning.Pruned(keep=500))
    result = rb.run(settings, progress=False, say=silence)
    left = sum(int((full_table(t) != 0).sum()) for t in result.model.backbone.tables.tables())
    assert 0 < left <= 500


def test_a_folder_with_a_first_stage_is_refused_before_anything_of_it_is_changed(tmp_path):
    settings = settings_of(rb.pruning.Pruned(keep=500, start="trained"))
    rb.run(settings, folder=tmp_path / "run", progress=False, say=silence)
    before = (tmp_path / "run" / "run.json").read_bytes()
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ModelFileError, match="holds a run already"):
        rb.run(settings, folder=tmp_path / "run", progress=False, say=silence)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_folder_with_a_model_is_refused(tmp_path):
    folder = rb.save_model(nn.Sequential(nn.Embedding(3, 2)), tmp_path / "mine")
    with pytest.raises(ModelFileError, match="holds a model already; choose another folder"):
        rb.run(settings_of(), folder=folder, progress=False, say=silence)
    assert not (folder / "run.json").exists()


def test_a_folder_that_another_run_uses_is_refused_before_anything_of_it_is_changed(tmp_path):
    settings, folder = settings_of(), tmp_path / "run"
    refused = []

    def second(done: int, total: int) -> None:
        """Train in the folder again while the first run makes its data: it has no checkpoint yet."""
        if not refused:
            before = (folder / "run.json").read_bytes()
            with pytest.raises(CheckpointError, match="in use by process") as error:
                rb.run(settings_of(seed=7), folder=folder, progress=False, say=silence)
            refused.append(error)
            assert (folder / "run.json").read_bytes() == before

    rb.run(settings, folder=folder, progress=False, say=silence, data_progress=second)
    assert refused
    assert read_run(folder).training.seed == settings.training.seed


def test_a_run_refuses_labels_of_one_class():
    rows = {"user": [0, 1, 2, 1] * 5}
    train = rb.Dataset.from_columns(rows, label=[0, 1, 0, 1] * 5)
    valid = rb.Dataset.from_columns(rows, label=[0] * 20)
    settings = RunSettings.from_mapping({"model": {"name": "fm", "dim": 2}})
    with pytest.raises(DataError, match="labels of the validation data are of one class"):
        train_model(settings, train, valid, progress=False, say=len)
