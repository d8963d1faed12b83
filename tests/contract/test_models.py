"""The contract that every file in `rarebit.models` keeps. Nothing to add for a new model."""

import importlib
import inspect
from typing import Any

import pytest
import torch
from contract import model_checks as checks

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models import build_model, model_class, model_names
from rarebit.models._base import RankingModel

EXPECTED = 16
"""Models there are at least: a search that finds none must not pass."""

SMALL = {
    "dim": 6,
    "hidden": (8, 8),
    "batch_norm": False,
    "bottom": (8,),
    "cin": (6, 4),
    "head_dim": 4,
}

every_model = pytest.mark.parametrize("name", model_names())
every_check = pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.slow) if check is checks.check_compile else check
        for check in checks.all_checks().values()
    ],
    ids=checks.all_checks(),
)


def settings_of(name: str, **wanted: Any) -> dict[str, Any]:
    """Return those of the settings that the model has."""
    known = inspect.signature(model_class(name)).parameters
    return {key: value for key, value in (SMALL | wanted).items() if key in known}


def with_setting(setting: str) -> list[str]:
    """Return the models that have this setting."""
    return [n for n in model_names() if setting in inspect.signature(model_class(n)).parameters]


def maker(name: str, **wanted: Any) -> checks.Make:
    def make(schema: rb.data.Schema) -> RankingModel:
        return build_model(name, schema, settings_of(name, **wanted))

    return make


def test_all_models_are_found():
    assert len(model_names()) >= EXPECTED


@every_model
@every_check
def test_contract(name, check):
    check(maker(name))


@pytest.mark.slow
def test_a_model_compiles():
    checks.check_compile(maker("deepfm"))


@pytest.mark.parametrize("name", with_setting("num_sets"))
@every_check
def test_contract_with_several_embedding_sets(name, check):
    check(maker(name, num_sets=2))


@pytest.mark.parametrize("name", with_setting("batch_norm"))
def test_with_batch_norm_and_dropout_a_row_is_scored_alone_in_evaluation(name):
    make = maker(name, batch_norm=True, dropout=0.5)
    checks.check_single_row(make)
    checks.check_batch_size(make)
    checks.check_rebuild(make)


@every_model
def test_a_saved_model_is_the_same(name, tmp_path):
    model, batch = checks.lively(maker(name)).eval(), checks.make_batch()
    loaded = rb.load_model(rb.save_model(model, tmp_path)).eval()
    assert type(loaded) is type(model)
    assert bool((loaded(batch) == model(batch)).all())


@every_model
def test_the_default_settings_build_a_model(name):
    model = build_model(name, checks.SCHEMA)
    assert model(checks.make_batch()).shape == (24,)


@every_model
def test_an_unknown_setting_is_refused_with_a_suggestion(name):
    known = next(key for key in inspect.signature(model_class(name)).parameters if key != "schema")
    message = f"model {name}: unknown setting '{known}s'.*did you mean '{known}'"
    with pytest.raises(SettingsError, match=message):
        build_model(name, checks.SCHEMA, {f"{known}s": 1})


def test_only_a_model_without_embeddings_has_no_width():
    assert set(model_names()) - set(with_setting("dim")) == {"lr"}


@pytest.mark.parametrize("name", with_setting("dim"))
def test_a_width_of_zero_is_refused(name):
    with pytest.raises(SettingsError, match="dim must be at least 1, got dim=0"):
        build_model(name, checks.SCHEMA, {"dim": 0})


@every_model
def test_a_model_without_tables_is_refused(name):
    schema = rb.data.Schema((rb.data.Field(name="age", kind="numeric"),))
    with pytest.raises(SettingsError, match=r"at least one categorical.* got \['age'\]"):
        build_model(name, schema)


@every_model
def test_its_file_gives_the_formula_of_the_score(name):
    file = importlib.import_module(f"rarebit.models.{name}")
    assert "score = " in (file.__doc__ or "")
    assert model_class(name).__doc__


def test_an_unknown_model_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="unknown model 'deepmf'; did you mean 'deepfm'"):
        build_model("deepmf", checks.SCHEMA)


def test_scores_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = build_model("deepfm", checks.SCHEMA)
    torch.manual_seed(1)
    second = build_model("deepfm", checks.SCHEMA)
    batch = checks.make_batch()
    assert bool((first(batch) == second(batch)).all())
