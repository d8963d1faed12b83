"""Settings of the papers, by name: `deepfm@pep` is DeepFM as that paper has it."""

import pytest
import torch

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models import (
    build_model,
    model_class,
    model_names,
    model_settings,
    preset_names,
)
from rarebit.settings import keyword_arguments

PAPERS = {"pep", "me", "mlet"}

every_preset = pytest.mark.parametrize("name", preset_names())


@pytest.fixture
def schema():
    return rb.data.Schema(
        (
            rb.data.Field(name="user", rows=6),
            rb.data.Field(name="age", kind="numeric"),
            rb.data.Field(name="tags", kind="multi", rows=7, max_length=3),
        )
    )


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_model_lists_its_presets():
    assert preset_names() == [f"{n}@{p}" for n in model_names() for p in model_class(n).presets]
    assert {"deepfm@pep", "dcn_v2@me", "wide_deep@mlet"} <= set(preset_names())


@every_preset
def test_a_preset_is_named_after_its_paper(name):
    assert name.partition("@")[2].partition("_")[0] in PAPERS


@every_preset
def test_a_preset_builds_a_model_with_its_settings(name, batch):
    kind, preset = model_class(name), model_class(name).presets[name.partition("@")[2]]
    model = build_model(name, batch.schema)
    assert type(model) is kind
    assert {key: model.settings[key] for key in preset} == {
        key: plain(value) for key, value in preset.items()
    }
    scores = model(batch)
    assert scores.shape == (7,)
    assert bool(torch.isfinite(scores).all())


def test_learned_pruning_has_larger_networks_on_criteo_and_avazu():
    both = {"dim": 64, "dropout": 0.2, "batch_norm": True, "init": "xavier"}
    for name, own in (("deepfm", {"wide_std": 1.0}), ("autoint", {"residual": "once"})):
        found = model_settings(f"{name}@pep_criteo", {})
        assert found == both | own | {"hidden": (400, 400, 400)}
        assert (both | own | {"hidden": (100, 100)}).items() <= model_settings(
            f"{name}@pep", {}
        ).items()


@every_preset
def test_a_presets_settings_are_of_the_right_names_and_types(name):
    kind = model_class(name)
    preset = kind.presets[name.partition("@")[2]]
    assert preset
    assert keyword_arguments(kind.__init__, preset, where=name) == preset


@every_preset
def test_a_setting_of_a_preset_can_be_overridden(name, batch):
    preset = model_settings(name, {})
    for key, value in preset.items():
        other = changed(value)
        assert model_settings(name, {key: other}) == preset | {key: other}
        settings = build_model(name, batch.schema, {key: other}).settings
        assert settings[key] == plain(other)
        kept = {k: plain(v) for k, v in preset.items() if k != key}
        assert {k: settings[k] for k in kept} == kept


def changed(value):
    """Return another value of the same type that suits the setting."""
    if isinstance(value, str):
        return {"xavier": "normal", "xavier_per_table": "normal", "once": "each"}[value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(2 * units for units in value)
    return value * 2 if isinstance(value, int) else value / 2


@pytest.mark.parametrize("name", [name for name in preset_names() if "@mlet" in name])
def test_mlets_presets_start_each_table_with_xavier_of_its_own_size(name):
    fields = (rb.data.Field(name="user", rows=60), rb.data.Field(name="item", rows=600))
    model = build_model(name, rb.data.Schema(fields))
    for table, rows in zip(model.backbone.tables.tables(), (60, 600), strict=True):
        bound = (6 / (rows + 16)) ** 0.5
        assert 0.98 * bound < float(table.weight.detach().abs().max()) <= bound
    if model.wide is not None:
        assert 0 < float(model.wide.tables.stacks[0].embedding.weight.detach().abs().max()) < 1e-3
    assert not any(isinstance(part, torch.nn.BatchNorm1d) for part in model.modules())
    assert all(part.p == 0.0 for part in model.modules() if isinstance(part, torch.nn.Dropout))


@every_preset
def test_a_model_from_a_preset_is_saved_and_loaded(name, batch, tmp_path):
    model = build_model(name, batch.schema).eval()
    loaded = rb.load_model(rb.save_model(model, tmp_path)).eval()
    assert loaded.settings == model.settings
    assert torch.equal(loaded(batch), model(batch))


def test_an_unknown_preset_is_refused_with_a_suggestion(schema):
    with pytest.raises(SettingsError, match=r"^unknown preset 'deepfm@peb'; did you mean 'pep'\?$"):
        build_model("deepfm@peb", schema)
    with pytest.raises(
        SettingsError, match=r"^unknown preset 'deepfm@'; known: mlet, pep, pep_criteo$"
    ):
        build_model("deepfm@", schema)
    with pytest.raises(SettingsError, match=r"^unknown preset 'fwfm@pep'; known: none$"):
        build_model("fwfm@pep", schema)
    with pytest.raises(SettingsError, match=r"^unknown model 'deepfn'.*did you mean 'deepfm'"):
        build_model("deepfn@pep", schema)


def test_dashes_may_stand_for_underscores(schema):
    settings = [build_model(name, schema).settings for name in ("dcn-v2@me", "dcn_v2@me")]
    assert settings[0] == settings[1]


def test_a_bad_setting_beside_a_preset_names_the_preset(schema):
    with pytest.raises(SettingsError, match="model deepfm@pep: dim must be int, got '16'"):
        build_model("deepfm@pep", schema, {"dim": "16"})
