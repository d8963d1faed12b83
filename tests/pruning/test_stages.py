"""Runs that prune: how many entries are left, what is served, and what a stop costs."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import slow_after
from torch import Tensor, nn

import rarebit as rb
from rarebit.codes.packed import PackedTable
from rarebit.errors import TrainingInterrupted
from rarebit.pruning.pruned import OTHER_DRAW, SharedPruning, TicketFolder
from rarebit.tables.table import full_table
from rarebit.training.fit import Silence
from rarebit.training.run import start_model, train_model
from rarebit.training.settings import RunSettings, load_splits

ROWS, KEEP = 1200, 3000
LOG = rb.data.SyntheticLog(rows=ROWS)
SPLITS = load_splits(LOG)
MLET = rb.MLET(inner_dim=6)
# thresholds that a few steps of their own decay carry far
LEARNED = rb.PEP(granularity="global", init=-4.3)
TRAINING = rb.Training(
    epochs=2,
    batch_size=128,
    lr=0.02,
    threshold_weight_decay=1.0,
    table_weight_decay=0.05,
    tables="rowwise",
)


def silence(line: str) -> None:
    del line


def settings_of(*methods: rb.Method, **training) -> RunSettings:
    return RunSettings(
        model="fm",
        model_settings={"dim": 4},
        data=LOG,
        training=replace(TRAINING, **training),
        methods=methods,
    )


def run(settings: RunSettings, folder=None, **options):
    return rb.run(settings, folder=folder, **({"progress": False, "say": silence} | options))


def wide(model: nn.Module) -> dict[str, Tensor]:
    """Return the rows of all tables but first-order ones, by field."""
    tables = model.backbone.tables
    names = [field.name for field in SPLITS.train.schema.fields if field.kind != "numeric"]
    found = dict(zip(names, tables.tables(), strict=True))
    return {name: full_table(table).detach() for name, table in found.items()}


def left(model: nn.Module) -> int:
    return sum(int((rows != 0).sum()) for rows in wide(model).values())


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(table, PackedTable) for table in model.backbone.tables.tables())


WAYS = [
    (before, by, start)
    for before in ((), (MLET,), (LEARNED,))
    for by in ("threshold", "magnitude")
    for start in ("ticket", "random", "trained")
    # thresholds that are learned do not wait for the end of training
    if not (before == (LEARNED,) and by == "magnitude")
]


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize(("before", "by", "start"), slow_after(WAYS, quick=4), ids=str)
def test_what_is_left_is_packed_measured_and_saved(tmp_path, before, by, start):
    epochs = 9 if before == (LEARNED,) else 2
    method = rb.pruning.Pruned(keep=KEEP, by=by, start=start, epochs=epochs)
    result = run(settings_of(*before, method), tmp_path)
    if before == (LEARNED,):
        assert 0 < left(result.model) <= KEEP
    else:
        assert left(result.model) == KEEP
    assert is_packed(result.model)
    wide_bytes = sum(info.num_bytes for info in rb.find_tables(result.model) if info.width > 1)
    assert wide_bytes < 4 * sum(rows.numel() for rows in wide(result.model).values()) / 3
    # validation and test are of what is served
    valid = result.history.epochs[result.history.best_epoch - 1].valid
    assert rb.evaluate(result.model, SPLITS.valid).overall == valid
    loaded = rb.load_model(tmp_path)
    assert (rb.predict(loaded, SPLITS.test) == rb.predict(result.model, SPLITS.test)).all()
    assert rb.evaluate(loaded, SPLITS.test).overall == result.test.overall
    stored = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert stored["table_bytes"] == result.table_bytes
    assert stored["test"]["overall"]["auc"] == result.test.overall.auc


@pytest.mark.slow
def test_another_process_scores_as_the_run_did(tmp_path):
    result = run(settings_of(rb.pruning.Pruned(keep=KEEP)), tmp_path)
    program = (
        "import sys, numpy, rarebit as rb\n"
        f"test = rb.data.generate(rb.data.SyntheticLog(rows={ROWS})).test\n"
        "numpy.save(sys.argv[2], rb.predict(rb.load_model(sys.argv[1]), test))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "scores.npy")],
        env=os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1])},
        check=True,
    )
    found = np.load(tmp_path / "scores.npy")
    assert (found == np.asarray(rb.predict(result.model, SPLITS.test))).all()


def first_model(*methods: rb.Method) -> nn.Module:
    return start_model(settings_of(*methods), SPLITS.train.schema, say=silence)


STILL = {"lr": 1e-300, "table_lr": 1e-300, "optimizer": "sgd", "table_weight_decay": 0.0}
"""Training that changes nothing: what a run starts from is what it ends with."""


@pytest.mark.filterwarnings("ignore:the largest")
@pytest.mark.parametrize("by", ["threshold", "magnitude"])
def test_without_learning_the_largest_first_values_are_left(by):
    plain = wide(first_model())
    result = run(settings_of(rb.pruning.Pruned(keep=KEEP, by=by), **STILL))
    every = torch.cat([rows.abs().flatten() for rows in plain.values()])
    border = every.sort(descending=True).values[KEEP - 1]  # one less, for the table below
    assert [name for name, rows in plain.items() if rows.abs().max() <= border] == ["device"]
    for name, rows in wide(result.model).items():
        largest = float(plain[name].abs().max())
        least = border if name != "device" else largest * 0.999
        assert torch.equal(rows, torch.where(plain[name].abs() > least, plain[name], 0.0))


def test_a_random_start_is_another_draw_on_the_same_entries():
    ticket = wide(run(settings_of(rb.pruning.Pruned(keep=KEEP), **STILL)).model)
    other = wide(first_model_of_seed(OTHER_DRAW))
    again = run(settings_of(rb.pruning.Pruned(keep=KEEP, start="random"), **STILL))
    for name, rows in wide(again.model).items():
        assert torch.equal(rows, torch.where(ticket[name] != 0, other[name], 0.0))
        assert not bool((rows[rows != 0] == ticket[name][rows != 0]).any())
    # all other weights are those of the seed itself
    plain = first_model()
    rest = [name for name, _ in plain.named_parameters() if "backbone.tables" not in name]
    found = again.model.state_dict()
    assert rest
    assert all(torch.equal(found[name], plain.state_dict()[name]) for name in rest)


def first_model_of_seed(seed: int) -> nn.Module:
    return start_model(settings_of(seed=seed), SPLITS.train.schema, say=silence)


@pytest.mark.filterwarnings("ignore:.* makes all rows")
def test_a_random_start_is_not_cut_by_thresholds_that_were_learned():
    high = rb.PEP(granularity="global", init=-3.7)  # larger than nearly all first values
    settings = settings_of(high, rb.pruning.Pruned(keep=KEEP, start="random"), **STILL)
    result = run(settings)
    other = wide(first_model_of_seed(OTHER_DRAW))
    for name, rows in wide(result.model).items():
        assert torch.equal(rows[rows != 0], other[name][rows != 0])
    cut = wide(first_model(high))
    kept = sum(int((rows != 0).sum()) for rows in cut.values())
    assert left(result.model) == kept <= KEEP


def test_the_second_stage_starts_where_the_first_did_with_mlet_folded():
    product = wide(first_model(MLET))
    result = run(settings_of(MLET, rb.pruning.Pruned(keep=KEEP), **STILL))
    for name, rows in wide(result.model).items():
        torch.testing.assert_close(rows[rows != 0], product[name][rows != 0], rtol=1e-5, atol=1e-9)


def test_pruning_has_its_own_number_of_epochs():
    retrained = run(settings_of(rb.pruning.Pruned(keep=KEEP, epochs=1)))
    assert len(retrained.history.epochs) == 2
    for by in ("threshold", "magnitude"):
        as_it_is = run(settings_of(rb.pruning.Pruned(keep=KEEP, epochs=3, by=by, start="trained")))
        assert len(as_it_is.history.epochs) == 3
        assert as_it_is.history.best_epoch == 3
    assert len(run(settings_of(rb.pruning.Pruned(keep=KEEP, start="trained"))).history.epochs) == 2


@pytest.mark.filterwarnings("ignore:.* makes all rows")
def test_learned_thresholds_that_end_early_say_so():
    method = rb.pruning.Pruned(keep=KEEP, start="trained", epochs=9)
    result = run(settings_of(LEARNED, method))
    assert len(result.history.epochs) < 9
    assert result.history.stopped_early


@pytest.mark.parametrize("by", ["threshold", "magnitude"])
@pytest.mark.parametrize("start", ["ticket", "trained"])
def test_rounded_to_integers_what_was_cut_stays_cut(by, start):
    method = rb.pruning.Pruned(keep=KEEP, by=by, start=start)
    result = run(settings_of(method, rb.Quantize()))
    assert 0 < left(result.model) <= KEEP
    assert not is_packed(result.model)
    methods = {info.methods for info in rb.find_tables(result.model) if info.width > 1}
    assert methods == {("Quantize(bits=8)",)}


def test_weight_decay_of_a_dense_run_does_not_cut_rows_never_seen():
    decay = {"table_weight_decay": 1.0, "lr": 1e-3, "tables": "dense", "batch_size": 64}
    result = run(settings_of(rb.pruning.Pruned(keep=KEEP, start="trained"), **decay))
    never = SPLITS.train.counts()["user"] == 0
    kept = wide(result.model)["user"] != 0
    assert kept[never].float().mean() > kept[~never].float().mean()


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize("before", [(), (LEARNED,)], ids=str)
@pytest.mark.parametrize("mode", ["dense", "rowwise"])
def test_pruning_has_the_optimizer_that_it_is_given(mode, before):
    other = {"dense": "rowwise", "rowwise": "dense"}[mode]
    epochs = 9 if before else 1
    method = rb.pruning.Pruned(keep=KEEP, start="trained", epochs=epochs, tables=mode)
    said: list[str] = []
    result = run(settings_of(*before, method, tables=other), say=said.append)
    model = first_model(*before)
    training = replace(TRAINING, epochs=epochs, tables=mode)
    rb.pruning.prune(model, SPLITS.train, budgets=[KEEP], settings=training, progress=False)
    assert_same_tables(result.model, model)
    assert result.history.reports["pruned"]["tables"] == mode
    line = f"pruning with tables='{mode}', where the rest of the run has tables='{other}'"
    assert said.count(line) == 1


def assert_same_tables(found: nn.Module, expected: nn.Module) -> None:
    rows = wide(expected)
    assert all(torch.equal(own, rows[name]) for name, own in wide(found).items())


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize(("before", "mode"), [((), "rowwise"), ((LEARNED,), "dense")], ids=str)
def test_the_usual_optimizer_of_pruning_is_reported(before, mode):
    method = rb.pruning.Pruned(keep=KEEP, epochs=9 if before else 1)
    said: list[str] = []
    result = run(settings_of(*before, method, tables="dense"), say=said.append)
    assert result.history.reports["pruned"]["tables"] == mode
    assert any("pruning with tables" in line for line in said) == (mode == "rowwise")


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize("start", ["ticket", "trained"])
def test_the_report_of_a_run_has_the_spread_of_learned_thresholds(tmp_path, start):
    # a threshold for each table; Adam moves each by about lr per step, 0.02 here
    learned = rb.PEP(granularity="field", init=-4.3)
    settings = settings_of(learned, rb.pruning.Pruned(keep=KEEP, start=start, epochs=9))
    said: list[str] = []
    result = run(settings, tmp_path, say=said.append)
    [ticket] = TicketFolder(tmp_path / "pruning" / "tickets").values()
    values = torch.stack([level.double() for level in ticket.levels.values()])
    report = result.history.reports["pruned"]
    assert report["kept"] == left(result.model)
    assert report["step"] == ticket.facts["step"]
    spread = [report["mean_s"], report["std_s"]]
    assert spread == pytest.approx([values.mean().item(), values.std(correction=0).item()])
    thresholds = [report["mean_threshold"], report["std_threshold"]]
    g = 1 / (1 + torch.exp(-values))
    assert thresholds == pytest.approx([g.mean().item(), g.std(correction=0).item()])
    assert 0 < report["std_s"] < 0.02 * report["step"]
    stored = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert stored["reports"]["pruned"] == report
    line = f"learned s {spread[0]:.3f} ± {spread[1]:.3f}"
    assert any(line in text for text in said) == (start == "ticket")


def test_the_report_has_the_training_loss_of_pruning():
    result = run(settings_of(rb.pruning.Pruned(keep=KEEP, start="trained")))
    model = first_model()
    pruning = rb.pruning.prune(
        model, SPLITS.train, budgets=[KEEP], settings=TRAINING, progress=False
    )
    losses = [record.train_loss for record in pruning.history.epochs]
    assert result.history.reports["pruned"]["train_loss"] == pytest.approx(losses, abs=1e-5)
    assert len(losses) == 2


class StopAt(Silence):
    """Sends a signal to this process in an epoch of the first or the second stage."""

    def __init__(self, begun: int) -> None:
        self.left = begun

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        del epoch, epochs, rows
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def assert_same_run(found, expected) -> None:
    one, other = found.model.state_dict(), expected.model.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], value) for name, value in other.items())
    assert found.test == expected.test
    assert [record.valid for record in found.history.epochs] == [
        record.valid for record in expected.history.epochs
    ]
    assert found.history.best_epoch == expected.history.best_epoch
    assert found.history.reports == expected.history.reports


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize("by", ["threshold", "magnitude"])
@pytest.mark.parametrize(
    ("start", "begun"),
    slow_after([("ticket", 2), ("random", 4), ("ticket", 1), ("ticket", 3), ("trained", 2)], 2),
    ids=str,
)
def test_a_run_stopped_in_either_stage_goes_on_to_the_same_bits(tmp_path, by, start, begun):
    settings = settings_of(rb.pruning.Pruned(keep=KEEP, by=by, start=start), ema_decay=0.9)
    whole = run(settings, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(settings, tmp_path / "stopped", progress=StopAt(begun))
    assert not (tmp_path / "stopped" / "model.json").exists()
    assert (tmp_path / "stopped" / "checkpoints").exists() is (begun > 2)
    assert_same_run(run(settings, tmp_path / "stopped", resume=True), whole)


@pytest.mark.filterwarnings("ignore:.* makes all rows")
@pytest.mark.parametrize("begun", slow_after([2, 4]))
def test_a_learned_run_stopped_in_either_stage_goes_on_to_the_same_bits(tmp_path, begun):
    settings = settings_of(LEARNED, rb.pruning.Pruned(keep=KEEP, epochs=9))
    whole = run(settings, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(settings, tmp_path / "stopped", progress=StopAt(begun))
    assert (tmp_path / "stopped" / "checkpoints").exists() is (begun > 3)
    assert_same_run(run(settings, tmp_path / "stopped", resume=True), whole)


def test_runs_share_a_first_stage_and_end_as_each_would_with_it(tmp_path):
    shared = SharedPruning(tmp_path / "pruning", (KEEP, 500))
    models = {}
    for keep in shared.budgets:
        models[keep], _ = train_model(
            settings_of(rb.pruning.Pruned(keep=keep)),
            SPLITS.train,
            SPLITS.valid,
            folder=tmp_path / str(keep) / "checkpoints",
            progress=False,
            say=silence,
            shared=shared,
        )
        written = {p: p.stat().st_mtime_ns for p in shared.folder.rglob("*") if p.is_file()}
        if keep == KEEP:
            first = written
    assert {p for p in written if "tickets" in p.parts} == {
        p for p in first if "tickets" in p.parts
    }
    assert all(written[p] == first[p] for p in first if "tickets" in p.parts or "start" in p.parts)
    assert {keep: left(model) for keep, model in models.items()} == {KEEP: KEEP, 500: 500}
    tickets = TicketFolder(shared.folder / "tickets")
    for keep, model in models.items():
        kept = {name.rpartition(".")[2]: mask for name, mask in tickets[keep].kept.items()}
        assert all(torch.equal(rows != 0, kept[name]) for name, rows in wide(model).items())


@pytest.mark.parametrize("prior", ["mean", "zero"])
def test_a_prior_that_pruning_may_keep_is_told(prior):
    said = []
    run(settings_of(rb.Shrinkage(prior=prior), rb.pruning.Pruned(keep=KEEP)), say=said.append)
    assert any("use shrinkage:prior=zero" in line for line in said) == (prior == "mean")


def test_a_run_says_what_its_second_stage_trains():
    said: list[str] = []
    run(settings_of(rb.pruning.Pruned(keep=KEEP)), say=said.append)
    assert "retraining the 3,000 entries that are left" in said
