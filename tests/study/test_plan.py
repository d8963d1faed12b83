"""Plans of studies: both forms, words for tables, grids, mistakes, and back to plain values."""

import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import SettingsError
from rarebit.settings import read_toml
from rarebit.study.plan import StudyPlan, StudySettings
from rarebit.training.settings import PreparedLog, RunSettings, Training

TOML = """
methods = ["baseline", "low-rank", "hashing:buckets=1_000+low-rank"]
seeds = 3
trials = 2
share = 0.25

[[model]]
name = "fm"
dim = 8

[[model]]
name = "deepfm"
hidden = [16]

[[data]]
folder = "data/clicks"

[[data]]
rows = 2000

[training]
epochs = 4
"""


def plan_of(**values):
    return StudyPlan.from_mapping({"methods": "baseline", **values})


@pytest.mark.parametrize(
    ("methods", "given", "patience"),
    [("baseline,low-rank", {}, 2), ("baseline,tail", {}, 6), ("tail", {"patience": 3}, 3)],
)
def test_all_variants_have_the_patience_of_the_method_that_asks_for_most(methods, given, patience):
    plan = plan_of(methods=methods, model=["fm", "deepfm"], training=given)
    assert [run.training.patience for run in plan.runs] == [patience, patience]


def test_a_file_is_every_model_on_every_log(tmp_path):
    (tmp_path / "study.toml").write_text(TOML)
    plan = StudyPlan.from_mapping(read_toml(tmp_path / "study.toml"))
    texts = [method.text for method in plan.methods]
    assert texts == ["baseline", "low-rank", "hashing:buckets=1000+low-rank"]
    assert plan.settings == StudySettings(seeds=3, trials=2, share=0.25)
    clicks, generated = PreparedLog(folder="data/clicks"), SyntheticLog(rows=2000)
    assert [(run.model, dict(run.model_settings), run.data) for run in plan.runs] == [
        ("fm", {"dim": 8}, clicks),
        ("deepfm", {"hidden": [16]}, clicks),
        ("fm", {"dim": 8}, generated),
        ("deepfm", {"hidden": [16]}, generated),
    ]
    assert {run.training.epochs for run in plan.runs} == {4}


def test_a_study_has_defaults():
    plan = plan_of()
    assert plan.settings == StudySettings()
    assert plan.runs == (RunSettings(training=Training(patience=2)),)


@pytest.mark.parametrize("methods", ["baseline,low-rank", ["baseline", "low-rank"]])
def test_methods_are_one_text_or_a_list(methods):
    assert [method.text for method in plan_of(methods=methods).methods] == ["baseline", "low-rank"]


@pytest.mark.parametrize(
    ("word", "table"),
    [
        ({"model": "fm"}, {"model": {"name": "fm"}}),
        ({"model": ["fm", "dnn"]}, {"model": [{"name": "fm"}, {"name": "dnn"}]}),
        ({"data": "clicks"}, {"data": {"folder": "clicks"}}),
        ({"data": Path("clicks")}, {"data": {"folder": "clicks"}}),
        ({"data": "synthetic"}, {"data": {"source": "synthetic"}}),
        ({"data": SyntheticLog(rows=500)}, {"data": {"rows": 500}}),
    ],
    ids=["model", "models", "folder", "path", "synthetic", "log"],
)
def test_a_word_stands_for_a_table(word, table):
    assert plan_of(**word) == plan_of(**table)


MISTAKES = {
    "no methods": ({"methods": []}, "a study needs methods"),
    "methods": ({"methods": ["baseline", 3]}, "methods must be a list of names, got"),
    "a number": ({"methods": 3}, "methods must be a list of names, got 3"),
    "method": ({"methods": "lowrank"}, "unknown method 'lowrank'; did you mean 'low-rank'?"),
    "twice": ({"methods": "low-rank,hashing,low_rank"}, "low-rank given twice"),
    "key": ({"seed": 3}, "study: unknown setting 'seed'; did you mean 'seeds'?"),
    "section": ({"trainin": {}}, "study: unknown setting 'trainin'; did you mean 'training'?"),
    "model": ({"model": "deepfn"}, "unknown model 'deepfn'; did you mean 'deepfm'?"),
    "model setting": ({"model": {"dimm": 3}}, "did you mean 'dim'?"),
    "model table": ({"model": 3}, r"\[model\] must be a table, got 3"),
    "data table": ({"data": [None]}, r"\[data\] must be a table, got None"),
    "data key": ({"data": {"row": 3}}, "did you mean 'rows'?"),
    "no model": ({"model": []}, "study: model must not be empty"),
    "training": ({"training": 3}, r"\[training\] must be a table, got 3"),
    "training key": ({"training": {"epoch": 3}}, "did you mean 'epochs'?"),
    "training seed": ({"training": {"seed": 3}}, "given by seeds and first_seed, got .*seed=3"),
    "same model": ({"model": ["fm", {"name": "fm"}]}, "fm is given twice on the same log"),
    "type": ({"seeds": "many"}, "study: seeds must be int, got 'many'"),
    "seeds": ({"seeds": 0}, "seeds must be at least 1, got seeds=0"),
    "trials": ({"trials": 0}, "trials must be at least 1, got trials=0"),
    "tuning seeds": ({"seeds": 2, "tuning_seeds": 3}, "among the seeds, got 3 of 2"),
    "first seed": ({"first_seed": -1}, "first_seed must be 0 or more, got -1"),
    "share": ({"share": 1.0}, r"share must lie in \(0, 1\), got share=1.0"),
    "effect": ({"minimum_effect": 0}, "minimum_effect must be above 0, got"),
}


@pytest.mark.parametrize(("values", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told(values, message):
    with pytest.raises(SettingsError, match=message) as told:
        plan_of(**values)
    assert "\n" not in str(told.value)


METHODS = ("baseline", "low-rank", "low-rank:rank=2", "hashing", "hashing:buckets=9+low-rank")
MODELS = ("fm", {"name": "fm", "dim": 4}, {"name": "deepfm", "hidden": [8, 4]}, "dlrm")
LOGS = ("some/folder", {"rows": 90}, {"rows": 90, "noise": 0.5}, "synthetic")


def some_of(choices):
    return st.lists(st.sampled_from(choices), min_size=1, unique_by=str)


PLANS = st.fixed_dictionaries(
    {"methods": some_of(METHODS)},
    optional={
        "model": some_of(MODELS),
        "data": some_of(LOGS),
        "training": st.fixed_dictionaries({"lr": st.floats(1e-6, 1.0)}),
        "seeds": st.integers(2, 50),
        "tuning_seeds": st.integers(1, 2),
        "first_seed": st.integers(0, 1000),
        "trials": st.integers(1, 9),
        "share": st.floats(0.01, 0.99),
        "control": st.sampled_from(["own", "baseline", "low-rank:rank=2"]),
        "minimum_effect": st.floats(1e-6, 0.1),
    },
)


@hypothesis.given(PLANS)
def test_plain_values_are_read_back_as_the_same_plan(values):
    plan = StudyPlan.from_mapping(values)
    assert len(plan.runs) == len(values.get("model", [""])) * len(values.get("data", [""]))
    assert StudyPlan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan
