"""Trials: every variant has as many, validation picks among them, and test rows have no say."""

import json
import statistics
from collections import defaultdict
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import rarebit as rb
from rarebit.methods.low_rank import LowRank
from rarebit.study.plan import StudyPlan
from rarebit.study.results import pick
from rarebit.study.runs import RunFolder, RunRecord, run_key
from rarebit.study.study import Cell, Failure
from rarebit.study.worker import make_run, open_log

TRIALS, TUNING_SEEDS, SEEDS = 3, 2, 3
FIGURES = {
    "key": "",
    "logloss": 0.5,
    "rarest_auc": None,
    "parameters": 1,
    "table_bytes": 4,
    "best_epoch": 1,
    "epochs": 1,
    "microseconds_a_row": 1.0,
    "device": "cpu",
    "torch": "",
    "commit": None,
}


def record(valid_auc, auc=0.5):
    return RunRecord(seed=0, auc=auc, valid_auc=valid_auc, **FIGURES)


def test_validation_picks_whatever_test_rows_say():
    trials = [[record(0.70, auc=0.9), record(0.72, auc=0.9)], [record(0.80, auc=0.1), record(0.64)]]
    assert pick(trials) == 1
    assert pick(trials[::-1]) == 0


def test_the_mean_over_seeds_picks_and_not_the_best_of_them():
    assert pick([[record(0.7), record(0.7)], [record(0.9), record(0.4)]]) == 0


def test_the_first_of_equals_is_picked():
    assert pick([[record(0.6)], [record(0.7)], [record(0.7)]]) == 1


def test_nothing_is_picked_while_a_trial_has_no_run():
    assert pick([[record(0.6)], []]) is None


@hypothesis.given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1))
def test_the_pick_is_the_largest_mean(values):
    picked = pick([[record(value) for value in trial] for trial in values])
    means = [statistics.fmean(trial) for trial in values]
    assert means[picked] == max(means)
    assert all(mean < means[picked] for mean in means[:picked])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A study with trials over a knob and the learning rate: its folder and result."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "knobs", {"rank": (2, 3)})
        result = rb.study(
            folder,
            methods="low-rank:rank=1",
            control="baseline",
            model={"name": "fm", "dim": 4},
            data={"rows": 1500},
            training={"epochs": 1, "batch_size": 128, "lr": 0.02},
            seeds=SEEDS,
            trials=TRIALS,
            tuning_seeds=TUNING_SEEDS,
            workers=1,
            device="cpu",
            progress=False,
        )
    return folder, result


def runs_in(folder):
    """Return the records of all runs by variant, by the settings tried, and by seed."""
    found = defaultdict(lambda: defaultdict(dict))
    for path in folder.glob("runs/*/result.json"):
        values = json.loads(path.read_text())
        settings, result = values["settings"], values["result"]
        name = "low-rank:rank=1" if settings["methods"] else "baseline"
        tried = (settings["training"]["lr"], *(method["rank"] for method in settings["methods"]))
        found[name][tried][result["seed"]] = result
    return found


@pytest.mark.slow
def test_every_variant_has_as_many_tuning_runs(tuned):
    folder, result = tuned
    found = runs_in(folder)
    assert result.is_complete
    assert set(found) == {"baseline", "low-rank:rank=1"}
    assert set(found["baseline"]) == {(0.02,), (0.04,), (0.01,)}
    # the variant's own settings, then one step along each of its two knobs
    assert set(found["low-rank:rank=1"]) == {(0.02, 1), (0.04, 1), (0.02, 2)}
    for trials in found.values():
        for seeds in trials.values():
            assert seeds.keys() >= set(range(TUNING_SEEDS))


@pytest.mark.slow
def test_the_pick_is_the_best_mean_on_validation_rows_of_the_tuning_seeds(tuned):
    folder, result = tuned
    for name, trials in runs_in(folder).items():
        best = max(
            trials,
            key=lambda tried: sum(trials[tried][seed]["valid_auc"] for seed in range(TUNING_SEEDS)),
        )
        variant = result.cells[0].variant(name)
        assert variant.settings["training"]["lr"] == best[0]
        assert [method["rank"] for method in variant.settings["methods"]] == list(best[1:])
        assert [run.key for run in variant.runs] == [trials[best][s]["key"] for s in range(SEEDS)]
        # seeds that tune nothing are run with the pick alone
        assert [tried for tried in trials if len(trials[tried]) > TUNING_SEEDS] == [best]


@pytest.mark.slow
def test_all_trials_are_told_with_what_picked_them(tuned):
    folder, result = tuned
    for name, trials in runs_in(folder).items():
        expected = {
            tried[0] if name == "baseline" else tried: statistics.fmean(
                runs[seed]["valid_auc"] for seed in range(TUNING_SEEDS)
            )
            for tried, runs in trials.items()
        }
        told = {
            trial.settings["lr"]
            if name == "baseline"
            else (
                trial.settings["lr"],
                int(trial.settings["methods"].rpartition("=")[2]),
            ): trial.valid_auc
            for trial in result.cells[0].variant(name).trials
        }
        assert told == pytest.approx(expected)
        assert len(told) == TRIALS


@pytest.mark.slow
def test_a_trial_changes_its_variant_and_not_its_name(tuned):
    [cell] = tuned[1].cells
    assert [(variant.name, variant.control) for variant in cell.variants] == [
        ("baseline", None),
        ("low-rank:rank=1", "baseline"),
    ]


@pytest.mark.slow
def test_a_trial_that_diverged_is_out_and_the_next_best_is_picked(tuned):
    folder, result = tuned
    failures = {}
    cell = Cell(StudyPlan.from_mapping(result.plan), plan_run(result), folder, failures)
    [baseline] = [variant for variant in cell.variants if variant.name == "baseline"]
    trials = {
        trial: [run.read().valid_auc for run in runs]
        for trial, runs in enumerate(cell._tried(baseline))
    }
    by_validation = sorted(trials, key=lambda trial: -statistics.fmean(trials[trial]))
    for number, best in enumerate(by_validation):
        assert cell.picked(baseline) == best, number
        failures[cell._tried(baseline)[best][-1].key] = Failure("diverged", "not finite")
    assert cell.picked(baseline) is None


@pytest.mark.parametrize(
    ("kind", "picked", "missing"),
    [
        ("diverged", 0, []),
        ("failed", None, ["baseline, seed 0, trial 2: why", "baseline: its settings are not"]),
        ("died", None, ["baseline, seed 0, trial 2: why", "baseline: its settings are not"]),
    ],
)
def test_only_a_trial_that_diverged_is_out(tmp_path, kind, picked, missing):
    values = {"methods": "baseline", "model": "fm", "data": {"rows": 500}, "seeds": 1, "trials": 2}
    plan, failures = StudyPlan.from_mapping(values), {}
    cell = Cell(plan, plan.runs[0], tmp_path, failures)
    [variant] = cell.variants
    first, second = cell.tuning_runs(0)
    first.write(first.settings, replace(record(0.7), key=first.key), torch.zeros(3))
    failures[second.key] = Failure(kind, "why")
    assert cell.picked(variant) == picked
    found = list(cell._missing())
    assert len(found) == len(missing)
    assert all(map(str.startswith, found, missing))


def plan_run(result):
    return StudyPlan.from_mapping(result.plan).runs[0]


def test_what_is_made_of_a_trained_model_is_what_validation_judges(tmp_path):
    settings = rb.RunSettings(
        model="fm",
        model_settings={"dim": 4},
        data=rb.data.SyntheticLog(rows=1500),
        training=rb.Training(epochs=1, lr=0.02),
        methods=(rb.Quantize(bits=4),),
    )
    found = make_run(
        settings,
        open_log(settings, torch.device("cpu")),
        RunFolder(tmp_path, run_key(settings)),
        device=torch.device("cpu"),
    )
    alone = rb.run(settings, progress=False, say=lambda line: None)
    valid = rb.data.generate(settings.data).valid
    assert found.valid_auc == rb.evaluate(alone.model, valid).auc
    assert found.valid_auc != alone.history.epochs[0].valid.auc
    assert found.auc == alone.test.auc
    assert found.table_bytes == alone.table_bytes
