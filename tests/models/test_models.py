import math

import pytest
import torch

import rarebit.models
from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.errors import SettingsError
from rarebit.models import build_model, model_class, model_names
from rarebit.models.autoint import AutoInt
from rarebit.models.dcn import DCN
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.models.dlrm import DLRM
from rarebit.models.dnn import DNN
from rarebit.models.ffm import FFM
from rarebit.models.final_mlp import FinalMLP
from rarebit.models.fm import FM
from rarebit.models.fwfm import FwFM
from rarebit.models.ipnn import IPNN
from rarebit.models.lr import LR
from rarebit.models.nfm import NFM
from rarebit.models.nfwfm import NFwFM
from rarebit.models.wide_deep import WideDeep
from rarebit.models.xdeepfm import XDeepFM

CLASSES = {
    "autoint": AutoInt,
    "dcn": DCN,
    "dcn_v2": DCNv2,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "dnn": DNN,
    "ffm": FFM,
    "final_mlp": FinalMLP,
    "fm": FM,
    "fwfm": FwFM,
    "ipnn": IPNN,
    "lr": LR,
    "nfm": NFM,
    "nfwfm": NFwFM,
    "wide_deep": WideDeep,
    "xdeepfm": XDeepFM,
}
LINEAR = ["ffm", "fm", "fwfm", "lr"]
DEEP = [name for name in CLASSES if name not in LINEAR]
WITH_WIDTH = [name for name in CLASSES if name != "lr"]
PAIRS_ALONE = ["ffm", "fm", "fwfm", "nfm"]
"""Models in which a field alone teaches its embedding nothing."""
SMALL = Schema((Field(name="user", rows=6), Field(name="age", kind="numeric")))


def test_every_file_is_a_model():
    assert set(model_names()) == set(CLASSES)
    assert {name: model_class(name) for name in CLASSES} == CLASSES


def small(name):
    """Return settings that make a model small."""
    width = {"dim": 3} if name in WITH_WIDTH else {}
    return width | ({"hidden": [4], "batch_norm": True} if name in DEEP else {"wide_std": 0.5})


@pytest.mark.parametrize("name", [*CLASSES, "dcn-v2"])
def test_a_model_is_built_by_name(name):
    model = build_model(name, SMALL)
    assert type(model) is CLASSES[name.replace("-", "_")]
    assert model.schema is SMALL


@pytest.mark.parametrize("name", WITH_WIDTH)
@pytest.mark.parametrize(
    ("init", "bounds"),
    # rows + width; the field "shop" has its own width
    [
        ("xavier", {3: (663, 710), 6: (666, 710)}),
        ("xavier_per_table", {3: (603, 110), 6: (606, 110)}),
    ],
)
def test_tables_start_within_xaviers_bound_of_all_rows_or_of_their_own(name, init, bounds):
    schema = Schema((Field(name="user", rows=600), Field(name="shop", rows=60)))
    model = build_model(name, schema, {"dim": 3, "init": init, "widths": {"shop": 50}})
    for table, fans in zip(
        model.backbone.tables.tables(), bounds[6 if name == "ffm" else 3], strict=True
    ):
        bound = (6 / fans) ** 0.5
        assert 0.98 * bound < float(table.weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("name", WITH_WIDTH)
def test_a_model_is_as_wide_as_asked_for(name):
    assert build_model(name, SMALL, {"dim": 3}).settings["dim"] == 3
    # FFM's rows are as many times as wide as there are fields
    assert build_model(name, SMALL).settings["dim"] == (4 if name == "ffm" else 16)


@pytest.mark.parametrize("name", CLASSES)
def test_its_settings_build_it_again(name):
    given = small(name)
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


@pytest.mark.parametrize("name", WITH_WIDTH)
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
        ({"hidden": [4, 0]}, r"hidden layers need at least 1 unit, got (.4, 0.|0)$"),
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
    model = build_model(name, batch.schema, {"dim": 2} if name in WITH_WIDTH else {}).to(dtype)
    scores = model(batch)
    assert (scores.dtype, scores.shape) == (dtype, (7,))
    scores.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", CLASSES)
def test_padding_rows_get_no_gradient(name):
    schema = Schema((Field(name="tags", kind="multi", rows=5, max_length=3),))
    model = build_model(name, schema, small(name))
    batch = Dataset(schema, [[1, 0, 0], [0, 0, 0], [2, 3, 0]])[:]
    model(batch).sum().backward()
    gradient = model.backbone.tables.stacks[0].embedding.weight.grad
    assert not gradient[0].any()
    assert (name in PAIRS_ALONE) != bool(gradient[1].any())


SIZES = {
    "autoint": {"num_layers": 2, "num_heads": 2, "head_dim": 3},
    "dcn": {"num_layers": 2},
    "dcn_v2": {"num_layers": 2},
    "dlrm": {"bottom": [9]},
    "xdeepfm": {"cin": [5, 2]},
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_number_of_weights_is_what_the_formula_says(name):
    schema = Schema(
        (
            Field(name="user", rows=6),
            Field(name="tags", kind="multi", rows=5, max_length=3),
            Field(name="age", kind="numeric"),
        )
    )
    settings = ({"dim": 4} if name in WITH_WIDTH else {}) | SIZES.get(name, {})
    settings |= {"hidden": [7], "batch_norm": False} if name in DEEP else {}
    model = build_model(name, schema, settings)
    vectors, first, network = (6 + 5 + 1) * 4, 6 + 5 + 1 + 1, (12 * 7 + 7) + (7 + 1)
    pooled_network = (4 * 7 + 7) + (7 + 1)
    want = {
        "autoint": vectors + (4 * 6 * 4) + (4 * 6 * 6) + (3 * 6 + 1) + network,
        "dcn": vectors + network + 2 * (12 + 12) + 12,
        "dcn_v2": vectors + network + 2 * (12 * 12 + 12),
        "deepfm": vectors + first + network,
        "dlrm": (6 + 5) * 4 + (1 * 9 + 9) + (9 * 4 + 4) + ((4 + 3) * 7 + 7) + (7 + 1),
        "dnn": vectors + network,
        "ffm": 3 * vectors + first,
        "final_mlp": vectors + 2 * (12 * 7 + 7) + (7 + 7 + 1) + 7 * 7,
        "fm": vectors + first,
        "fwfm": vectors + first + 3,
        "ipnn": vectors + ((12 + 3) * 7 + 7) + (7 + 1),
        "lr": first,
        "nfm": vectors + first + pooled_network,
        "nfwfm": vectors + 3 * 3 + pooled_network,
        "wide_deep": vectors + first + network,
        "xdeepfm": vectors + first + network + (5 * 3 * 3) + (2 * 5 * 3) + (5 + 2),
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
