"""Tuning: every variant has as many trials, validation picks among them, and test rows have no say."""

import json
import math
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
from rarebit.study.runs import RunFolder, RunRecord, run_key
from rarebit.study.study import Cell, Failure
from rarebit.study.tuning import SWEEP, Axis, axes_of, search
from rarebit.study.worker import make_run, open_log
from rarebit.training.settings import RunSettings

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


START = RunSettings(training=rb.Training(lr=1.0, weight_decay=1e-5))
LR, DECAY, AVERAGE = axes_of(START)


def octaves(run):
    return round(math.log2(run.training.lr))


def decades(run):
    return round(math.log10(run.training.weight_decay / 1e-5))


def peak_at(lr, decay):
    """Return a score with one peak: so many steps of the learning rate and the weight decay away."""
    return lambda run: -abs(octaves(run) - lr) - abs(decades(run) - decay)


@hypothesis.given(st.integers(-4, 4), st.integers(-3, 3))
def test_a_search_with_trials_to_spare_ends_at_the_peak(lr, decay):
    found = search(START, [LR, DECAY], 100, peak_at(lr, decay))
    best = found.trials[found.best]
    assert (octaves(best), decades(best)) == (lr, decay)
    assert found.edge == ()
    assert len(set(map(repr, found.trials))) == len(found.trials)


@hypothesis.given(st.integers(1, 30), st.integers(-6, 6), st.integers(-6, 6))
def test_the_first_trial_is_the_start_and_there_are_no_more_than_asked_for(trials, lr, decay):
    found = search(START, [LR, DECAY], trials, peak_at(lr, decay))
    assert found.trials[0] == START
    assert len(found.trials) <= (2 * trials if trials >= SWEEP else trials)
    for number in range(trials, len(found.trials)):  # only an edge has more than asked for
        before, new = found.trials[:number], found.trials[number]
        assert any(
            not min(map(place, before)) <= place(new) <= max(map(place, before))
            for place in (octaves, decades)
        )
    scores = [peak_at(lr, decay)(run) for run in found.trials]
    assert found.best == scores.index(max(scores))


@hypothesis.given(st.integers(2, 12), st.integers(-8, 8), st.integers(-8, 8))
def test_the_edge_is_where_the_best_is_the_last_value_tried(trials, lr, decay):
    found = search(START, [LR, DECAY], trials, peak_at(lr, decay))
    best, expected = found.trials[found.best], set()
    for name, place in (("learning rate", octaves), ("weight decay", decades)):
        tried = [place(run) for run in found.trials]
        if place(best) in (min(tried), max(tried)):
            expected.add(name)
    assert set(found.edge) == expected


def test_a_search_that_ends_at_an_edge_goes_on_until_it_leaves_it():
    far = peak_at(14, 0)
    assert octaves(search(START, [LR, DECAY], SWEEP - 1, far).trials[-1]) < 14
    found = search(START, [LR, DECAY], SWEEP, far)
    assert (octaves(found.trials[found.best]), found.edge) == (14, ())
    assert SWEEP < len(found.trials) < 2 * SWEEP
    assert search(START, [LR, DECAY], SWEEP, peak_at(99, 0)).edge == ("learning rate",)


def test_one_trial_has_no_edge():
    assert search(START, [LR, DECAY], 1, peak_at(3, 3)) == ((START,), 0, ())


def test_a_search_goes_on_where_it_was():
    """Runs come in rounds, and a round is complete before the next one is known."""
    score, known, rounds = peak_at(3, 1), {}, 0
    while True:
        found = search(START, [LR, DECAY], 20, lambda run, known=known: known.get(repr(run)))
        if found.best is not None:
            break
        new = [run for run in found.trials if repr(run) not in known]
        assert new
        known |= {repr(run): score(run) for run in new}
        rounds += 1
    assert found == search(START, [LR, DECAY], 20, score)
    assert rounds > 3
    assert search(START, [LR], 9, lambda run: None) == ((START,), None, ())


def test_an_axis_ends_where_it_has_nothing_more_and_that_is_no_edge():
    start = replace(START, training=rb.Training(weight_decay=0.0))
    found = search(start, [DECAY, AVERAGE], 99, lambda run: 0.0)  # nothing is better than the start
    tried = [(run.training.weight_decay, run.training.ema_epochs) for run in found.trials]
    assert tried == [(0.0, None), (1e-5, None), (0.0, 0.1)]
    assert (found.best, found.edge) == (0, ())


def test_the_average_grows_as_long_as_that_helps():
    found = search(START, [AVERAGE], 99, lambda run: run.training.ema_epochs or 0.0)
    assert [run.training.ema_epochs for run in found.trials] == [None, 0.1, 0.3, 1.0, 3.0, 10.0]
    assert found.edge == ()
    given = replace(START, training=rb.Training(ema_decay=0.9))
    assert len(search(given, [AVERAGE], 99, lambda run: 0.0).trials) == 1


def test_the_rates_of_network_and_tables_move_together():
    start = replace(START, training=rb.Training(lr=0.5, table_lr=2.0))
    found = search(start, [LR], 3, lambda run: 0.0)
    assert [(run.training.lr, run.training.table_lr) for run in found.trials] == [
        (0.5, 2.0),
        (1.0, 4.0),
        (0.25, 1.0),
    ]


def test_settings_that_diverge_are_left_behind():
    def score(run):
        return -math.inf if run.training.lr > 0.3 else run.training.lr

    found = search(START, [LR], 9, score)
    assert found.trials[found.best].training.lr == 0.25
    assert search(START, [LR], 3, lambda run: -math.inf).best is None


def test_values_without_an_order_are_all_tried():
    values = ["fm", "dnn", "dcn", "lr"]
    axis = Axis("model", lambda run, place: replace(run, model=values[place]), choices=4)
    found = search(replace(START, model="fm"), [axis], 9, lambda run: float(run.model == "dcn"))
    assert [run.model for run in found.trials] == values
    assert (found.best, found.edge) == (2, ())


def test_a_choice_is_tried_in_the_first_round():
    """However far another axis helps: a start that was never tried would be no fair control."""
    axis = Axis("model", lambda run, _: replace(run, model="dnn"), choices=2)
    found = search(replace(START, model="fm"), [LR, axis], 5, lambda run: run.training.lr)
    assert [(octaves(run), run.model) for run in found.trials] == [
        *((0, "fm"), (1, "fm"), (-1, "fm"), (0, "dnn"), (2, "fm")),
    ]
    assert search(START, [LR, axis], 3, lambda run: run.training.lr).edge == (
        *("learning rate", "model"),
    )


def knob(method, name):
    [axis] = [axis for axis in axes_of(replace(START, methods=(method,))) if axis.name == name]
    return axis


def tried_values(method, name, trials, score):
    start = replace(START, methods=(method,))
    found = search(start, [knob(method, name)], trials, lambda run: score(run.methods[0]))
    return [getattr(run.methods[0], name) for run in found.trials], found


def test_the_values_of_a_knob_go_on_by_their_last_factor():
    transfer = rb.HarmlessTransfer(scale=1.0)
    values, found = tried_values(transfer, "scale", 7, lambda method: method.scale)
    assert values == [1.0, 10.0, 0.1, 100.0, 1000.0, 10_000.0, 100_000.0]
    assert found.edge == ("scale",)
    stopping = rb.research.GroupStopping()
    values, found = tried_values(stopping, "groups", 5, lambda method: method.groups)
    assert values == [5, 10, 2, 20, 40]


def test_a_knob_ends_where_its_method_refuses_more():
    tables = rb.research.FreshTables(keep=0.5)
    values, found = tried_values(tables, "keep", 9, lambda method: method.keep)
    assert values == [0.5, 0.9, 0.0]
    assert found.edge == ()


def test_a_knob_of_zero_is_off_and_stays_so():
    off = replace(START, methods=(rb.HarmlessTransfer(scale=0.0),))
    assert [axis.name for axis in axes_of(off)] == ["learning rate", "weight decay", "averaging"]


def test_in_one_pass_the_tables_have_a_learning_rate_of_their_own_and_averages_are_short():
    start = replace(START, training=rb.Training(lr=1.0, one_pass=True))
    lr, tables, _, average = axes = axes_of(start)
    assert [axis.name for axis in axes[:2]] == ["learning rate", "learning rate of the tables"]

    def rates(run):
        return run.training.lr, run.training.table_lr

    # by hand: the rate of the tables is a multiple of the network's, in whatever order both move
    assert rates(tables.move(start, 2)) == (1.0, 4.0)
    assert rates(tables.move(lr.move(start, -1), 2)) == (0.5, 2.0)
    assert rates(lr.move(tables.move(start, 2), -1)) == (0.5, 2.0)
    found = search(start, axes, 40, lambda run: -abs(math.log2((run.training.table_lr or 1) / 8)))
    assert found.trials[found.best].training.table_lr == 8.0

    tried = [average.move(start, step) for step in range(6)]
    memories = [None if run is None else run.training.ema_epochs for run in tried]
    assert memories == [None, 0.01, 0.03, 0.1, 0.3, None]
    assert tried[0] == start
    assert tried[5] is None


def test_a_knob_of_names_is_a_choice():
    values, _ = tried_values(rb.Shrinkage(), "prior", 9, lambda method: 0.0)
    assert sorted(values) == ["mean", "zero"]


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
    assert set(found["low-rank:rank=1"]) == {(0.02, 1), (0.04, 1), (0.01, 1)}
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
    aucs = {trial.settings["lr"]: trial.valid_auc for trial in result.cells[0].variants[0].trials}
    for number, best in enumerate(sorted(aucs, key=lambda lr: -aucs[lr])):
        picked = cell.picked(baseline)
        assert picked.training.lr == best, number
        last = cell._run(baseline, picked, TUNING_SEEDS - 1)
        failures[last.key] = Failure("diverged", "not finite")
    assert cell.picked(baseline) is None


def test_validation_picks_whatever_test_rows_say(tmp_path):
    values = {"methods": "baseline", "model": "fm", "data": {"rows": 500}, "seeds": 2}
    plan = StudyPlan.from_mapping({**values, "trials": 3, "tuning_seeds": 2})
    cell = Cell(plan, plan.runs[0], tmp_path, {})
    [variant] = cell.variants
    # the mean over seeds picks: the last trial has the best seed, and the first the best test figures
    figures = {1e-3: [(0.70, 0.9), (0.70, 0.9)], 2e-3: [(0.80, 0.1), (0.64, 0.1)]}
    figures[5e-4] = [(0.90, 0.5), (0.40, 0.5)]
    while cell.picked(variant) is None:
        for seed in range(2):
            for run in cell.tuning_runs(seed):
                valid, test = figures[run.settings.training.lr][seed]
                found = replace(record(valid, test), key=run.key)
                run.write(run.settings, found, torch.zeros(3))
    assert cell.picked(variant).training.lr == 2e-3


@pytest.mark.parametrize(
    ("kind", "picked", "missing"),
    [
        ("diverged", True, []),
        ("failed", False, ["baseline, seed 0, trial 2: why", "baseline: its settings are not"]),
        ("died", False, ["baseline, seed 0, trial 2: why", "baseline: its settings are not"]),
    ],
)
def test_only_a_trial_that_diverged_is_out(tmp_path, kind, picked, missing):
    values = {"methods": "baseline", "model": "fm", "data": {"rows": 500}, "seeds": 1, "trials": 2}
    plan, failures = StudyPlan.from_mapping(values), {}
    cell = Cell(plan, plan.runs[0], tmp_path, failures)
    [variant] = cell.variants
    [first] = cell.tuning_runs(0)
    first.write(first.settings, replace(record(0.7), key=first.key), torch.zeros(3))
    first, second = cell.tuning_runs(0)
    failures[second.key] = Failure(kind, "why")
    assert cell.picked(variant) == (variant.start if picked else None)
    assert list(cell.tuning_runs(0)) == [] or not picked
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
