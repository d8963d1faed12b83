import math

import pytest
import torch

import rarebit.models
from rarebit import Dataset, Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model, model_class, model_names
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.models.dnn import DNN
from rarebit.models.fm import FM

CLASSES = {"fm": FM, "deepfm": DeepFM, "dnn": DNN, "dcn_v2": DCNv2}
DEEP = [name for name in CLASSES if name != "fm"]
SMALL = Schema((Field(name="user", rows=6), Field(name="age", kind="numeric")))


def test_every_file_is_a_model():
    assert set(model_names()) == set(CLASSES)
    assert {name: model_class(name) for name in CLASSES} == CLASSES


@pytest.mark.parametrize("name", [*CLASSES, "dcn-v2"])
def test_a_model_is_built_by_name(name):
    model = build_model(name, SMALL, {"dim": 3})
    assert type(model) is CLASSES[name.replace("-", "_")]
    assert (model.schema, model.settings["dim"]) == (SMALL, 3)
    assert build_model(name, SMALL).settings["dim"] == 16


@pytest.mark.parametrize("name", CLASSES)
def test_its_settings_build_it_again(name):
    given = {"dim": 3} if name == "fm" else {"dim": 3, "hidden": [4], "batch_norm": True}
    model = build_model(name, SMALL, given)
    again = build_model(name, SMALL, model.settings)
    assert again.settings == model.settings
    assert given.items() <= model.settings.items()
    shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (model, again)]
    assert shapes[0] == shapes[1]


def test_an_unknown_name_or_setting_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match=r"unknown model 'deepfn'; did you mean 'deepfm'\?"):
        build_model("deepfn", SMALL)
    with pytest.raises(SettingsError, match="unknown model '_base'"):
        build_model("_base", SMALL)
    with pytest.raises(SettingsError, match=r"model dcn-v2: .*'num_layer'.* mean 'num_layers'\?"):
        build_model("dcn-v2", SMALL, {"num_layer": 2})
    with pytest.raises(SettingsError, match="unknown setting 'schema'"):
        build_model("fm", SMALL, {"schema": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": "16"}, "model dnn: dim must be int, got '16'"),
        ({"dim": 16.0}, "model dnn: dim must be int, got 16.0"),
        ({"hidden": 400}, "model dnn: hidden must be a list, got 400"),
        ({"hidden": [4, "5"]}, "model dnn: hidden must be int, got '5'"),
        ({"dropout": "0.1"}, "model dnn: dropout must be float, got '0.1'"),
        ({"batch_norm": 1}, "model dnn: batch_norm must be bool, got 1"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(settings, message):
    with pytest.raises(SettingsError) as caught:
        build_model("dnn", SMALL, settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_width_below_one_is_refused(name, dim):
    with pytest.raises(SettingsError, match=f"dim must be at least 1, got dim={dim}"):
        build_model(name, SMALL, {"dim": dim})


@pytest.mark.parametrize("name", CLASSES)
def test_numbers_alone_are_refused(name):
    schema = Schema((Field(name="age", kind="numeric"), Field(name="price", kind="numeric")))
    message = r"needs at least one categorical or multi-valued field, got \['age', 'price'\], all"
    with pytest.raises(SettingsError, match=message):
        build_model(name, schema)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": [4, 0]}, r"hidden layers need at least 1 unit, got .4, 0."),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got dropout=1.0"),
        ({"dropout": -0.5}, r"dropout must lie in \[0, 1\), got dropout=-0.5"),
    ],
)
def test_bad_settings_of_the_network_are_refused(name, settings, message):
    with pytest.raises(SettingsError, match=message):
        build_model(name, SMALL, settings)


def test_a_cross_network_needs_a_layer():
    with pytest.raises(SettingsError, match="num_layers must be at least 1, got num_layers=0"):
        build_model("dcn_v2", SMALL, {"num_layers": 0})


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_works_in_any_precision(name, dtype, batch):
    model = build_model(name, batch.schema, {"dim": 2}).to(dtype)
    scores = model(batch)
    assert (scores.dtype, scores.shape) == (dtype, (7,))
    scores.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", CLASSES)
def test_padding_rows_get_no_gradient(name):
    schema = Schema((Field(name="tags", kind="multi", rows=5, max_length=3),))
    model = build_model(name, schema, {"dim": 2})
    batch = Dataset(schema, [[1, 0, 0], [0, 0, 0], [2, 3, 0]])[:]
    model(batch).sum().backward()
    gradient = model.backbone.tables.stacks[0].embedding.weight.grad
    assert not gradient[0].any()
    assert (name == "fm") != bool(gradient[1].any())  # FM of one field has no pair


@pytest.mark.parametrize("name", CLASSES)
def test_the_number_of_weights_is_what_the_formula_says(name):
    schema = Schema(
        (
            Field(name="user", rows=6),
            Field(name="tags", kind="multi", rows=5, max_length=3),
            Field(name="age", kind="numeric"),
        )
    )
    settings = {"dim": 4} | ({} if name == "fm" else {"hidden": [7]})
    settings |= {"num_layers": 2} if name == "dcn_v2" else {}
    model = build_model(name, schema, settings)
    vectors, first, network = (6 + 5 + 1) * 4, 6 + 5 + 1 + 1, (12 * 7 + 7) + (7 + 1)
    cross = 2 * (12 * 12 + 12)
    want = {
        "fm": vectors + first,
        "deepfm": vectors + first + network,
        "dnn": vectors + network,
        "dcn_v2": vectors + network + cross,
    }
    assert sum(p.numel() for p in model.parameters()) == want[name]


def test_rows_start_near_zero_and_padding_at_zero():
    schema = Schema(
        (Field(name="user", rows=2000), Field(name="tags", kind="multi", rows=9, max_length=2))
    )
    weight = FM(schema, dim=8).backbone.tables.stacks[0].embedding.weight.detach()
    assert float(weight[:2000].std()) == pytest.approx(0.01, rel=0.05)
    assert not weight[2000].any()
    assert bool(weight[2001:].all())
    assert math.isclose(float(weight.mean()), 0.0, abs_tol=1e-3)


def test_a_file_without_a_model_is_our_own_mistake(monkeypatch):
    monkeypatch.setattr("rarebit.models.fm.__all__", [])
    with pytest.raises(AssertionError, match=r"models/fm\.py lists no RankingModel in __all__"):
        rarebit.models.model_class("fm")
