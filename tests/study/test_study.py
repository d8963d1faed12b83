"""A small study end to end: its numbers against single runs, again in other ways, and what goes wrong."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import needs, needs_package

import rarebit as rb
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import CheckpointError, DataError, RarebitError, SettingsError, StudyError
from rarebit.methods.hashing import Hashing
from rarebit.methods.low_rank import LowRank
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import StudyProgress
from rarebit.study.runs import RunFolder, run_key
from rarebit.study.statistics import delong
from rarebit.study.study import Cell
from rarebit.study.worker import Worker
from rarebit.training.run import run
from rarebit.training.settings import RunSettings, Training

MODEL = {"dim": 4, "hidden": [8], "dropout": 0.2}
PLAN = {
    "methods": "low-rank:rank=1,hashing:buckets=3000",
    "model": {"name": "deepfm", **MODEL},
    "data": {"rows": 1500},
    "training": {"epochs": 2, "batch_size": 256},
    "seeds": 2,
}
VARIANTS = {
    "baseline": (MODEL, ()),
    "narrow:dim=2": (MODEL | {"dim": 2}, ()),
    "low-rank:rank=1": (MODEL, (LowRank(rank=1),)),
    "hashing:buckets=3000": (MODEL, (Hashing(buckets=3000),)),
}
"""What the plan means, written out."""


def compare(folder, progress=False, **values):
    options = {"workers": 1, "device": "cpu", **PLAN, **values}
    return rb.study(folder, progress=progress, **options)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a finished study and its result, made by two workers."""
    folder = tmp_path_factory.mktemp("first") / "study"
    return folder, compare(folder, workers=2)


@pytest.fixture
def copy(first, tmp_path):
    """A copy of its folder, to be changed."""
    return shutil.copytree(first[0], tmp_path / "copy")


@pytest.fixture(scope="module")
def truth():
    """Each run of the study, made alone by what `rarebit train` calls."""
    found = {}
    for name, (model, methods) in VARIANTS.items():
        for seed in range(2):
            settings = RunSettings(
                model="deepfm",
                model_settings=model,
                data=SyntheticLog(rows=1500),
                training=Training(epochs=2, batch_size=256, seed=seed),
                methods=methods,
            )
            torch.set_num_threads(1)
            found[name, seed] = run(settings, progress=False, say=lambda _: None)
    return found


def runs_of(result):
    return {
        (variant.name, each.seed): each
        for variant in result.cells[0].variants
        for each in variant.runs
    }


def take_away(folder, result, *wanted):
    """Remove finished runs, each a variant and a seed; return their folders."""
    paths = [RunFolder(folder, runs_of(result)[one].key).path for one in wanted]
    for path in paths:
        shutil.rmtree(path)
    return paths


def test_every_run_is_what_it_is_alone(first, truth):
    folder, result = first
    found = runs_of(result)
    assert list(found) == list(truth)
    test = generate(SyntheticLog(rows=1500)).test
    for name, expected in truth.items():
        made = found[name]
        assert made.auc == expected.test.auc
        assert made.logloss == expected.test.logloss
        assert made.rarest_auc == expected.test.rarest.auc
        assert made.parameters == expected.num_parameters
        assert made.table_bytes == expected.table_bytes
        best = expected.history.best_epoch
        assert (made.best_epoch, made.epochs) == (best, len(expected.history.epochs))
        assert made.valid_auc == expected.history.epochs[best - 1].valid.auc
        scores = rb.predict(expected.model, test)
        assert np.array_equal(RunFolder(folder, made.key).scores(), scores.numpy())


def test_the_ceiling_is_that_of_the_log(first, truth):
    ceiling, expected = first[1].cells[0].ceiling, truth["baseline", 0].test
    assert ceiling.auc == expected.ceiling.auc
    assert ceiling.rarest_auc == expected.rarest_ceiling.auc


def test_scores_are_averaged_over_seeds_for_other_rows(first, truth):
    test = generate(SyntheticLog(rows=1500)).test
    means = [
        sum(rb.predict(truth[name, seed].model, test).double() for seed in range(2)) / 2
        for name in ("low-rank:rank=1", "narrow:dim=2")
    ]
    assert first[1].cells[0].rows["low-rank:rank=1"] == delong(*means, test.label)


def test_methods_have_their_controls(first, truth):
    [cell] = first[1].cells
    assert {variant.name: variant.control for variant in cell.variants} == {
        "baseline": None,
        "narrow:dim=2": None,
        "low-rank:rank=1": "narrow:dim=2",
        "hashing:buckets=3000": "narrow:dim=2",
    }
    expected = [
        truth["low-rank:rank=1", seed].test.auc - truth["narrow:dim=2", seed].test.auc
        for seed in range(2)
    ]
    assert cell.differences(cell.variant("low-rank:rank=1"), "auc") == expected
    assert first[1].is_complete


def test_a_finished_run_leaves_its_result_and_scores(first, runs_made):
    folder, _ = first
    assert sorted(path.name for path in folder.iterdir()) == [
        "lock", "results.json", "runs", "study.json",
    ]  # fmt: skip
    for path in (folder / "runs").iterdir():
        assert sorted(file.name for file in path.iterdir()) == ["result.json", "scores.npy"]
    assert runs_made(folder) == 8
    assert StudyPlan.from_mapping(PLAN) == rb.StudyPlan.from_mapping(first[1].plan)


@pytest.mark.slow
def test_a_time_that_is_over_loses_nothing_and_one_worker_gives_the_same(
    first, tmp_path, computed, runs_made
):
    result = compare(tmp_path, minutes=1e-9)
    assert not result.is_complete
    assert len(result.cells[0].missing) == 8
    assert result.cells[0].missing[0] == "baseline, seed 0: not run yet"
    assert runs_made(tmp_path) == 0
    assert compare(tmp_path).is_complete
    assert runs_made(tmp_path) == 8
    assert computed(tmp_path) == computed(first[0])


@pytest.mark.slow
def test_a_run_under_way_is_stopped_when_the_time_is_over(tmp_path, runs_made):
    endless = {"epochs": 1_000_000, "patience": None, "batch_size": 256}
    values = {"methods": "baseline", "training": endless, "seeds": 1}
    result = compare(tmp_path, told := Told(), minutes=0.05, **values)
    assert result.cells[0].missing == ("baseline, seed 0: not run yet",)
    assert told.started == ["baseline, seed 0"]
    assert (told.failed, runs_made(tmp_path), children()) == ({}, 0, [])


class Told(StudyProgress):
    """Remembers what a study tells."""

    def __init__(self):
        self.plans, self.started, self.finished, self.failed = [], [], [], {}

    def plan(self, runs, there):
        self.plans.append((runs, there))

    def start(self, name):
        self.started.append(name)

    def finish(self, name, record):
        self.finished.append((name, record.seed))

    def fail(self, name, why):
        self.failed[name] = why


@pytest.mark.slow
def test_more_seeds_and_another_method_make_the_new_runs_only(first, copy, runs_made):
    old = {path: path.read_bytes() for path in copy.glob("runs/*/result.json")}
    told = Told()
    methods = f"{PLAN['methods']},hashing:buckets=2999"
    result = compare(copy, told, methods=methods, seeds=3)
    assert result.is_complete
    assert told.plans == [(15, 8)]
    assert runs_made(copy) == 7
    new = [f"{name}, seed 2" for name in VARIANTS]
    new += [f"hashing:buckets=2999, seed {seed}" for seed in range(3)]
    assert sorted(name for name, _ in told.finished) == sorted(new)
    assert {path: path.read_bytes() for path in old} == old
    assert runs_of(first[1]).items() <= runs_of(result).items()
    compare(copy, told := Told(), methods=methods, seeds=3)
    assert (told.plans, told.started, runs_made(copy)) == ([(15, 15)], [], 0)


def test_training_that_goes_wrong_is_a_run_that_fails_and_the_next_is_made(tmp_path):
    told, settings = [], StudyPlan.from_mapping(PLAN).runs[0]
    worker = Worker(torch.device("cpu"), told.append)
    for lr in (1e30, 1e-2, 1e-3):
        training = dataclasses.replace(settings.training, lr=lr, epochs=1)
        planned = dataclasses.replace(settings, training=training)
        if lr == 1e-2:
            path = RunFolder(tmp_path, run_key(planned)).path
            path.mkdir(parents=True)
            (path / "checkpoints").touch()  # where a folder should be
        values = planned.to_mapping()
        worker.work({"folder": str(tmp_path), "settings": values, "keep_model": False})
    diverged, failed, epoch, done = told
    assert "not finite" in diverged["diverged"]
    assert "it is a file or lies below one" in failed["failed"]
    assert (epoch["epoch"], epoch["epochs"]) == (1, 1)
    assert done == {"done": True}
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1


def children():
    """Return the process numbers of the workers of this process: its children with a session of their own.

    A child has its session before `Popen` returns; its command line, a moment later.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended in the meantime
            continue
        _state, parent, _group, session, *_ = fields
        if int(parent) == os.getpid() and session == path.name:
            found.append(int(session))
    return found


class Killer(Told):
    """Kills the worker of a run whenever it is started, up to some times."""

    def __init__(self, name, times=100):
        super().__init__()
        self.name, self.times = name, times

    def start(self, name):
        super().start(name)
        if name == self.name and self.times:
            self.times -= 1
            [worker] = children()
            os.kill(worker, signal.SIGKILL)


KILLED, FAILING, FINE = ("narrow:dim=2", 0), ("low-rank:rank=1", 1), ("hashing:buckets=3000", 1)


@pytest.mark.slow
def test_runs_that_fail_are_told_the_others_made_and_the_next_call_tries_again(
    first, copy, computed, runs_made
):
    _, path, _ = take_away(copy, first[1], KILLED, FAILING, FINE)
    path.mkdir()
    (path / "checkpoints").touch()  # where a folder should be
    result = compare(copy, told := Killer("narrow:dim=2, seed 0"))
    assert told.started.count("narrow:dim=2, seed 0") == 3  # and no more
    killed, failed = told.failed["narrow:dim=2, seed 0"], told.failed["low-rank:rank=1, seed 1"]
    assert "was ended by SIGKILL" in killed
    assert "it is a file or lies below one" in failed
    assert told.finished == [("hashing:buckets=3000, seed 1", 1)]
    assert children() == []
    missing = (f"narrow:dim=2, seed 0: {killed}", f"low-rank:rank=1, seed 1: {failed}")
    assert result.cells[0].missing == missing
    assert all(f"missing: {line}" in str(result) for line in missing)
    assert result.cells[0].compare(0.0005)["low-rank:rank=1"].n == 0
    assert result.cells[0].compare(0.0005)["hashing:buckets=3000"].n == 1
    (path / "checkpoints").unlink()
    assert compare(copy).is_complete
    assert runs_made(copy) == 2
    assert computed(copy) == computed(first[0])
    assert compare(copy, keep_models=True).is_complete  # no run has its model: all are made again
    assert runs_made(copy) == 8
    assert computed(copy) == computed(first[0])
    kept = RunFolder(copy, runs_of(first[1])[KILLED].key)
    scores = rb.predict(rb.load_model(kept.model), generate(SyntheticLog(rows=1500)).test)
    assert np.array_equal(scores.numpy(), kept.scores())


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_is_made_again_in_the_same_call(first, copy, computed):
    take_away(copy, first[1], KILLED, FINE)
    told = Killer("narrow:dim=2, seed 0", times=2)
    assert compare(copy, told).is_complete
    assert told.plans == [(8, 6), (8, 7), (8, 7)]
    assert "was ended by SIGKILL" in told.failed["narrow:dim=2, seed 0"]
    assert computed(copy) == computed(first[0])


@pytest.mark.slow
def test_a_killed_trial_leaves_its_variant_incomplete_and_never_weakens_it(tmp_path):
    """The settings of a control are picked when all its trials have a result or diverged, not before."""
    values = {"methods": "low-rank:rank=1", "control": "baseline", "trials": 2, "seeds": 1}
    values["training"] = {"epochs": 1, "batch_size": 256, "lr": 0.001}
    result = compare(tmp_path, Killer("baseline, seed 0, trial 2"), **values)
    [cell] = result.cells
    first, second = cell.missing
    assert first.startswith("baseline, seed 0, trial 2: its process was ended by SIGKILL")
    assert second == "baseline: its settings are not picked yet"
    assert cell.variant("baseline").runs == ()
    assert cell.compare(0.0005)["low-rank:rank=1"].n == 0
    [cell] = compare(tmp_path, **values).cells
    assert cell.missing == ()
    assert cell.variant("baseline").settings["training"]["lr"] == 0.002  # the trial that was killed


class Second(StudyProgress):
    """Starts the same study once more while it runs."""

    def __init__(self, folder):
        self.folder, self.refused = folder, ""

    def plan(self, runs, there):
        assert (runs, there) == (8, 8)
        with pytest.raises(CheckpointError) as refused:
            compare(self.folder)
        self.refused = str(refused.value)


def test_a_second_study_in_the_folder_is_refused(copy):
    second = Second(copy)
    assert compare(copy, second).is_complete
    assert f"it is in use by process {os.getpid()}; wait until it has ended" in second.refused


def test_a_damaged_run_is_told_by_its_file(first, copy):
    key = runs_of(first[1])["baseline", 0].key
    (copy / "runs" / key / "result.json").write_text("{")
    with pytest.raises(StudyError, match=f"{key}/result.json' cannot be read"):
        compare(copy)


def test_lines_tell_what_is_done(copy, capsys):
    compare(copy, True)
    assert capsys.readouterr().err == "8 runs, 8 already finished\n"


def test_a_grid_names_what_differs(tmp_path):
    values = {
        "methods": "baseline",
        "model": ["fm", {"name": "dnn", "dim": 4}, {"name": "dnn", "dim": 8}],
        "data": [{"rows": 500}, {"rows": 500, "noise": 0.5}, {"rows": 500, "seed": 3}],
        "seeds": 1,
    }
    plan = StudyPlan.from_mapping(values)
    cells = [Cell(plan, settings, tmp_path, {}) for settings in plan.runs]
    logs = ("synthetic-0:rows=500", "synthetic-0:noise=0.5:rows=500", "synthetic-3")
    models = ("fm", "dnn:dim=4", "dnn:dim=8")
    assert [cell.name for cell in cells] == [f"{one} on {log}" for log in logs for one in models]
    [planned] = cells[1].compared_runs(0)
    assert planned.name == "dnn:dim=4 on synthetic-0:rows=500: baseline, seed 0"


@needs_package("polars")
def test_a_log_without_validation_rows_is_told_before_anything_is_written(tmp_path):
    lines = [f"u{number % 7},{number % 2}" for number in range(60)]
    (tmp_path / "log.csv").write_text("\n".join(["user,click", *lines]))
    split = rb.data.Split(shares=(0.9, 0.0, 0.1))
    rb.prepare(tmp_path / "log.csv", tmp_path / "log", label="click", split=split)
    with pytest.raises(DataError, match="picks on validation rows, and log has none"):
        compare(tmp_path / "study", data=str(tmp_path / "log"))
    assert not (tmp_path / "study").exists()


MISTAKES = {
    "data": ({"data": "nowhere"}, "holds no prepared log"),
    "minutes": ({"minutes": 0}, "minutes must be above 0, got minutes=0"),
    "workers": ({"workers": 0}, "workers must be at least 1, got workers=0"),
    "threads": ({"threads": 0}, "threads must be at least 1, got threads=0"),
    "method": ({"methods": "low-rank:rank=99"}, "matched no table"),
    "both": ({"plan": StudyPlan.from_mapping(PLAN)}, "a plan is given, and also methods"),
}


@pytest.mark.parametrize(("values", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_is_written(tmp_path, values, message):
    with pytest.raises(RarebitError, match=message):
        compare(tmp_path / "study", **values)
    assert not (tmp_path / "study").exists()


@needs("no CUDA", not torch.cuda.is_available(), "there is a GPU")
def test_a_device_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SettingsError, match="device cuda was asked for, but torch sees no GPU"):
        compare(tmp_path / "study", device="cuda")


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write to the folder"):
        compare(tmp_path / "file" / "study")


@pytest.mark.slow
def test_nothing_of_how_a_run_was_pruned_is_left(tmp_path):
    result = compare(tmp_path, methods="pruned:keep=500", seeds=1)
    assert {len(variant.runs) for variant in result.cells[0].variants} == {1}
    left = {path.name for path in tmp_path.glob("runs/*/*")}
    assert left == {"result.json", "scores.npy"}


PLANTED = {
    "cut off": {"training": {"epochs": 2, "lr": 1e-4}},
    "edge of the grid": {"training": {"epochs": 1, "lr": 1e-4}, "trials": 2},
    "unequal start": {
        "training": {"epochs": 1, "lr": 1e-2},
        "methods": "mlet:inner_dim=16:std=0.5",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTED)
def test_a_comparison_that_is_not_fair_has_no_verdict(tmp_path, kind):
    values = {"methods": "low-rank:rank=2", **PLANTED[kind]}
    result = rb.study(
        tmp_path,
        model={"name": "fm", "dim": 4},
        data={"rows": 1500},
        control="baseline",
        seeds=2,
        workers=1,
        device="cpu",
        progress=False,
        **values,
    )
    [comparison] = result.cells[0].compare(0.0005).values()
    assert comparison.verdict == kind
    assert f"no verdict, {kind}: " in str(result)
