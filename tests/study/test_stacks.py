"""Studies whose runs train as stacked models, against studies of single runs."""

from dataclasses import dataclass, replace

import pytest

import rarebit as rb
from rarebit.callbacks import Callback, TrainingMethod
from rarebit.errors import StudyInterrupted
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import Pool, StudyProgress
from rarebit.study.study import PlannedRun, Runner

PLAN = {
    "methods": "shrinkage",
    "control": "tuned",
    "model": {"name": "deepfm", "dim": 4, "hidden": [16]},
    "data": {"rows": 3000},
    "training": {"epochs": 3, "batch_size": 256, "patience": 2},
    "seeds": 3,
    "trials": 2,
}


class Heard(StudyProgress):
    """What a study reported, in order."""

    def __init__(self, stop_after=None):
        self.lines, self.stop_after = [], stop_after

    def start(self, name):
        self.lines.append(("start", name))

    def finish(self, name, record):
        self.lines.append(("finish", name))
        if self.stop_after is not None and self.finished == self.stop_after:
            raise KeyboardInterrupt

    def fail(self, name, why):
        self.lines.append(("fail", name))

    @property
    def most_at_once(self):
        active = [0]
        for kind, _ in self.lines:
            active.append(active[-1] + (1 if kind == "start" else -1))
        return max(active)

    @property
    def finished(self):
        return sum(kind == "finish" for kind, _ in self.lines)


def study(folder, together, progress=False, **values):
    return rb.study(
        folder, workers=1, device="cpu", together=together, progress=progress, **PLAN | values
    )


def figures(result):
    """Return what a study found, without times and commits."""
    [cell] = result.cells
    return {
        variant.name: [
            (run.seed, run.key, run.auc, run.valid_auc, run.best_epoch) for run in variant.runs
        ]
        for variant in cell.variants
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return study(tmp_path_factory.mktemp("single"), 1)


def assert_same(result, wanted):
    ours, theirs = figures(result), figures(wanted)
    assert ours.keys() == theirs.keys()
    for name, runs in theirs.items():
        for one, other in zip(ours[name], runs, strict=True):
            assert one[:2] == other[:2]
            assert one[2:4] == pytest.approx(other[2:4], abs=1e-4)
    [cell], [known] = result.cells, wanted.cells
    found = {name: one.verdict for name, one in cell.compare(1e-4).items()}
    assert found == {name: one.verdict for name, one in known.compare(1e-4).items()}


def test_a_study_of_stacks_has_the_results_of_single_runs(tmp_path, single):
    heard = Heard()
    result = study(tmp_path, 8, heard)
    assert heard.most_at_once >= 3  # the seeds of a variant
    assert_same(result, single)


def test_a_stopped_study_of_stacks_resumes(tmp_path, single):
    with pytest.raises(StudyInterrupted):
        study(tmp_path, 8, Heard(stop_after=1))
    heard = Heard()
    assert_same(study(tmp_path, 8, heard), single)
    assert heard.finished > 0


def test_runs_that_diverge_fail_one_by_one(tmp_path):
    heard = Heard()
    training = PLAN["training"] | {"optimizer": "sgd", "lr": 1e30}
    values = {"training": training, "methods": "baseline", "control": "baseline", "trials": 1}
    result = study(tmp_path, 8, heard, **values)
    assert not result.is_complete
    assert {kind for kind, _ in heard.lines} == {"start", "fail"}
    assert sum(kind == "fail" for kind, _ in heard.lines) == 3


@dataclass(frozen=True, kw_only=True)
class Nothing(TrainingMethod):
    """A method that has no entry point."""

    registered_name = "nothing"

    def callback(self):
        return Callback()


def test_a_task_of_several_runs_names_the_modules_of_their_methods(tmp_path):
    settings = replace(StudyPlan.from_mapping(PLAN).runs[0], methods=(Nothing(),))
    runs = [
        PlannedRun(tmp_path, replace(settings, training=rb.Training(seed=seed)), "")
        for seed in range(2)
    ]
    pool = Pool(1, "cpu", 1)
    runner = Runner(pool, tmp_path, StudyProgress(), None, {}, keep_models=False, together=8)
    [group] = runner._groups(runs).values()
    task = runner._task(group, {})
    assert task["modules"] == [__name__]
    assert [len(task["together"]), {"together"} & task["together"][0].keys()] == [2, set()]


@pytest.mark.parametrize(
    ("workers", "together", "sizes"),
    [(1, 8, [3, 7]), (2, 8, [2, 1, 4, 3]), (1, 3, [3, 3, 2, 2]), (1, 1, [1] * 10)],
)
def test_runs_of_one_shape_are_shared_out_over_workers(tmp_path, workers, together, sizes):
    settings = StudyPlan.from_mapping(PLAN).runs[0]
    other = replace(settings, model_settings={**settings.model_settings, "dim": 5})
    seeds = [(settings, seed) for seed in range(7)] + [(other, seed) for seed in range(3)]
    runs = [
        PlannedRun(tmp_path, replace(one, training=replace(one.training, seed=seed)), "")
        for one, seed in seeds
    ]
    pool = Pool(workers, "cpu", 1)  # its processes start with their first task
    runner = Runner(pool, tmp_path, StudyProgress(), None, {}, keep_models=False, together=together)
    groups = runner._groups(runs[::-1])
    if together == 1:  # as they came
        assert list(groups) == [run.key for run in runs[::-1]]
    assert [len(group) for group in groups.values()] == sizes
    assert sorted(run.key for group in groups.values() for run in group) == sorted(
        run.key for run in runs
    )
    assert all(key == group[0].key for key, group in groups.items())
