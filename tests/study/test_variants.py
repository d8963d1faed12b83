"""The variants of a study: controls with real bytes, the same trials for all, the same start."""

import copy
import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from rarebit.data.schema import Field, Schema
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import NoTableError, SettingsError
from rarebit.methods.low_rank import LowRank
from rarebit.models import model_names
from rarebit.pruning.pruned import Pruned
from rarebit.study.plan import StudyPlan
from rarebit.study.tuning import SWEEP, search
from rarebit.study.variants import start_size, variants_of
from rarebit.tables.apply import apply_, table_bytes, table_parameters
from rarebit.technique import parse_techniques
from rarebit.training.run import start_model
from rarebit.training.settings import RunSettings

SCHEMA = Schema(
    (
        Field(name="user", rows=90),
        Field(name="item", rows=50),
        Field(name="tags", kind="multi", rows=8, max_length=3),
        Field(name="price", kind="numeric"),
    )
)
WITH_WIDTH = [name for name in model_names() if name != "lr"]


def variants(methods, *, schema=SCHEMA, **values):
    model = values.pop("model", {"name": "fm", "dim": 8})
    plan = StudyPlan.from_mapping({"methods": methods, "model": model, **values})
    return variants_of(plan, plan.runs[0], schema)


def controls(*arguments, **values):
    return {variant.name: variant.control for variant in variants(*arguments, **values)}


def started(settings):
    return start_model(settings, SCHEMA, say=lambda _: None)


def bytes_of(settings):
    return table_bytes(started(settings))


def test_the_baseline_is_there_and_first():
    for methods in ("baseline", "low-rank", "low-rank,baseline", "hashing,low-rank,baseline"):
        first, *others = variants(methods)
        assert (first.name, first.control, first.start.methods) == ("baseline", None, ())
        assert "baseline" not in [variant.name for variant in others]


def test_controls_come_before_methods_in_the_order_of_the_plan():
    found = variants("hashing:buckets=60,low-rank:rank=1")
    names = [variant.name for variant in found]
    assert names[0] == "baseline"
    assert [name.split(":")[0] for name in names[1:]] == ["narrow", "narrow", "hashing", "low-rank"]
    assert [variant.control is not None for variant in found] == [False, False, False, True, True]


def check_narrow(methods, model, share):
    """Return how many narrow controls there are, having measured each against its method."""
    found = {variant.name: variant for variant in variants(methods, model=model, share=share)}
    compared = [variant for variant in found.values() if variant.control is not None]
    for variant in compared:
        control = found[variant.control].start
        kept = bytes_of(variant.start)
        assert not control.methods
        if variant.control == "baseline":  # one column less would be too small
            width = started(control).settings["dim"]
            control = dataclasses.replace(
                control, model_settings={**control.model_settings, "dim": width}
            )
        assert bytes_of(control) >= kept
        width = control.model_settings["dim"]
        if width > 1:
            values = {**control.model_settings, "dim": width - 1}
            assert bytes_of(dataclasses.replace(control, model_settings=values)) < kept
    return sum(variant.control != "baseline" for variant in compared)


@pytest.mark.parametrize("name", WITH_WIDTH)
def test_a_narrow_control_is_the_smallest_that_has_the_bytes(name):
    assert check_narrow("low-rank,hashing,hashing+low-rank", {"name": name}, 0.5) == 3


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.sampled_from(["fm", "deepfm", "ffm"]),
    st.integers(2, 12),
    st.floats(0.3, 0.95),
    st.booleans(),
)
def test_so_it_is_at_any_width_and_share(name, dim, share, widths):
    model = {"name": name, "dim": dim, **({"widths": {"user": 3}} if widths else {})}
    check_narrow(["hashing", f"low-rank:rank={max(dim // 2, 1)}"], model, share)


def test_nothing_is_narrower_than_one_column():
    assert (
        controls("low-rank:rank=1", model={"name": "fm", "dim": 2})["low-rank:rank=1"] == "baseline"
    )


def test_one_control_for_all():
    found = controls("low-rank,hashing", control="baseline")
    assert set(found) == {"baseline", "low-rank:rank=3", "hashing:buckets=33"}
    assert set(found.values()) == {None, "baseline"}


@pytest.mark.parametrize(
    "methods", ["hashing", "hashing,low-rank:rank=2", "low-rank:rank=2,hashing"]
)
def test_a_method_as_the_control_of_all(methods):
    found = controls(methods, control="low-rank:rank=2")
    named = "low-rank" in methods
    assert found == {
        "baseline": None,
        "low-rank:rank=2": "baseline" if named else None,
        "hashing:buckets=33": "low-rank:rank=2",
    }


@pytest.mark.parametrize("control", ["low-rank", "low_rank", " low-rank ", "low-rank:rank=3"])
def test_nothing_is_its_own_control(control):
    assert controls("low-rank", control=control)["low-rank:rank=3"] == "baseline"


def test_a_method_may_name_another_as_its_control(monkeypatch):
    monkeypatch.setattr(LowRank, "control", "hashing")
    found = controls("low-rank")
    assert found == {
        "baseline": None,
        "hashing:buckets=33": None,
        "low-rank:rank=3": "hashing:buckets=33",
    }


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (
            "narow",
            "control must be own, narrow, matched-rate, tuned, wide, ensemble, plain-sum, doubled-rows, magnitude, baseline or a method: unknown method 'narow'",
        ),
        ("low-rank,hashing", "one for all, got 'low-rank,hashing'"),
        ("low-rank:rnk=2", "control must be .*: method low-rank: unknown setting 'rnk'"),
        ("", "control must be own"),
    ],
)
@pytest.mark.parametrize("methods", ["baseline", "low-rank"])
def test_a_wrong_control_is_told(methods, control, message):
    with pytest.raises(SettingsError, match=message):
        variants(methods, control=control)


def test_a_tuned_baseline_tries_rates_weight_decays_and_averages():
    found = variants("low-rank", control="tuned", training={"lr": 0.25, "weight_decay": 0.5})
    [control] = [variant for variant in found if variant.name == "tuned"]
    assert [axis.name for axis in control.axes] == ["learning rate", "weight decay", "averaging"]
    assert (control.trials, control.start.methods) == (SWEEP, ())
    tried = search(control.start, control.axes, SWEEP, lambda run: 0.0).trials
    assert [(t.lr, t.weight_decay, t.ema_epochs) for run in tried for t in [run.training]] == [
        (0.25, 0.5, None),
        (0.5, 0.5, None),
        (0.125, 0.5, None),
        (0.25, 5.0, None),
        (0.25, 0.05, None),
        (0.25, 0.5, 0.1),
    ]
    assert controls("low-rank", control="tuned")["low-rank:rank=3"] == "tuned"


def test_a_tuned_baseline_that_is_not_tuned_is_the_baseline():
    assert controls("low-rank", control="tuned", sweeps=False) == {
        "baseline": None,
        "low-rank:rank=3": "baseline",
    }


def test_a_model_without_a_width_has_no_tables_to_change():
    assert controls("baseline", model="lr") == {"baseline": None}
    with pytest.raises(SettingsError, match="depends on the shapes of tables, got none"):
        variants("low-rank", model="lr")


@pytest.mark.parametrize("control", ["own", "baseline", "hashing"])
def test_a_method_that_fits_no_table_is_told_before_any_run(control):
    with pytest.raises(NoTableError, match="matched no table"):
        variants("low-rank:rank=9", control=control)


def test_a_size_that_is_given_is_kept_and_the_same_variant_is_there_once():
    assert set(controls("low-rank,low-rank:rank=3")) == {
        "baseline",
        "narrow:dim=4",
        "low-rank:rank=3",
    }


@pytest.mark.parametrize("trials", [1, 3, 70])
def test_each_variant_has_as_many_trials_and_starts_at_its_own_settings(trials):
    found = variants("low-rank,hashing", trials=trials, training={"lr": 0.25}, control="baseline")
    for variant in found:
        assert variant.trials == trials
        assert variant.start.training.lr == 0.25
        assert variant.axes[0].name == "learning rate"


def test_a_baseline_that_nothing_is_compared_with_is_not_tuned():
    assert [one.trials for one in variants("mlet:inner_dim=16", trials=20)] == [1, 20, 20]
    assert [one.trials for one in variants("baseline", trials=20)] == [20]


def test_a_control_that_is_tuned_has_as_many_trials_as_the_others_or_more():
    for trials in (2, 70):
        found = variants("low-rank,mlet:inner_dim=16", trials=trials)
        swept = [one for one in found if one.name.startswith("matched-rate")]
        assert [one.trials for one in swept] == [max(trials, SWEEP)]


def test_knobs_are_tuned_after_the_learning_rate(monkeypatch):
    monkeypatch.setattr(LowRank, "knobs", {"rank": (5, 2, 4)})
    *_, low_rank = variants("low-rank:rank=2", trials=9)
    assert low_rank.name == "low-rank:rank=2"
    names = [axis.name for axis in low_rank.axes]
    assert names == ["learning rate", "rank", "weight decay", "averaging"]
    found = search(low_rank.start, low_rank.axes, 9, lambda run: run.methods[0].rank)
    assert [run.methods[0].rank for run in found.trials if run.methods[0].rank > 2] == [4, 5, 6]


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("name", ["fm", "deepfm"])
def test_all_methods_of_a_seed_start_from_the_same_weights(name, seed):
    found = {variant.name: variant.start for variant in variants("low-rank,hashing", model=name)}
    drawn = {}
    for variant, settings in found.items():
        training = dataclasses.replace(settings.training, seed=seed)
        seeded = dataclasses.replace(settings, training=training)
        drawn[variant] = (started(seeded), torch.rand(4))
    plain = drawn["baseline"][0]
    for variant, settings in found.items():
        model, noise = drawn[variant]
        assert torch.equal(noise, drawn["baseline"][1])  # dropout draws the same
        if settings.methods:
            expected = copy.deepcopy(plain)
            apply_(expected, settings.methods[0], verbose=False)
            assert_same_bits(model.state_dict(), expected.state_dict())
            kept = plain.state_dict()
            changed = set(table_parameters(model)) | set(table_parameters(plain))
            same = {key: value for key, value in model.state_dict().items() if key not in changed}
            assert_same_bits(same, {key: kept[key] for key in same})
            assert len(same) >= 1


def test_another_seed_starts_from_other_weights():
    [variant] = variants("baseline")
    other = dataclasses.replace(variant.start.training, seed=1)
    one, two = (
        started(settings).state_dict()
        for settings in (variant.start, dataclasses.replace(variant.start, training=other))
    )
    assert any(not torch.equal(one[key], two[key]) for key in one)


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_finding_the_variants_draws_nothing_from_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    variants("low-rank,hashing")
    assert torch.equal(torch.rand(2), expected)


def test_thresholds_without_a_budget_have_no_control():
    with pytest.raises(
        SettingsError, match=r"pruning by magnitude needs a budget: use pep\+pruned:keep=10000"
    ):
        variants("pep")


@pytest.mark.filterwarnings("ignore:the largest")
def test_the_control_of_pruning_is_the_same_budget_by_magnitude():
    found = {
        variant.name: variant for variant in variants("pruned:keep=30:epochs=2,pep+pruned:keep=40")
    }
    control = {
        name: variant.control for name, variant in found.items() if variant.control is not None
    }
    assert control == {
        "pruned:keep=30:epochs=2": "pruned:keep=30:by=magnitude",
        "pep+pruned:keep=40": "pruned:keep=40:by=magnitude",
    }
    trial = found["pruned:keep=30:by=magnitude"].start
    assert trial.methods == (Pruned(keep=30, by="magnitude"),)


@pytest.mark.filterwarnings("ignore:the largest")
def test_the_control_of_pruning_by_magnitude_is_the_baseline():
    found = {variant.name: variant.control for variant in variants("pruned:keep=30:by=magnitude")}
    assert found == {"baseline": None, "pruned:keep=30:by=magnitude": "baseline"}


@pytest.mark.parametrize(
    ("methods", "std"),
    [
        ("", 0.5),
        ("pruned:keep=100", 0.5),
        ("low-rank:rank=8", 0.5),
        ("product-start:std=3.0", None),
    ],
)
def test_the_start_is_the_size_of_looked_up_numbers(methods, std):
    log = SyntheticLog(rows=3000)
    train = generate(log).train
    run = RunSettings(
        model="fm",
        model_settings={"dim": 8, "std": 0.5},
        methods=parse_techniques(methods)[0].build([(9, 9)], 0.5) if methods else (),
    )
    found = start_size(run, train)
    if std is not None:
        assert found == pytest.approx(std, rel=0.05)
    else:
        torch.manual_seed(0)
        model = start_model(run, train.schema, say=lambda _: None)
        fields = [field.name for field in train.schema.table_fields]
        squares = torch.cat(
            [
                table.weight[train.ids[:1000, train.schema.slots[name]].long()].square().flatten()
                for name, table in zip(fields, model.backbone.tables.tables(), strict=True)
            ]
        )
        squares = squares.detach()[squares != 0]  # without padding
        assert found == pytest.approx(float(squares.mean().sqrt()), rel=5e-3)
        assert found > 1.1


def test_a_model_without_wide_tables_has_no_start():
    train = generate(SyntheticLog(rows=500)).train
    assert start_size(RunSettings(model="lr"), train) is None
