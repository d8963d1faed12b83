"""Controls of embedding sets: wide tables, ensembles, as many sets; and the abundance beside the AUC."""

import numpy as np
import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import SettingsError, StudyError
from rarebit.study.plan import StudyPlan
from rarebit.study.results import variant_table
from rarebit.study.runs import RunFolder, run_key
from rarebit.study.study import MEMBER_SEEDS
from rarebit.study.variants import variants_of
from rarebit.study.worker import abundances
from rarebit.training.metrics import auc

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=90), rb.data.Field(name="item", rows=50)))
MODEL = {"name": "dcn_v2", "dim": 4, "hidden": [8, 8]}


def variants(methods, **values):
    plan = StudyPlan.from_mapping({"methods": methods, "model": MODEL, **values})
    return {variant.name: variant for variant in variants_of(plan, plan.runs[0], SCHEMA)}


def test_the_control_of_sets_is_one_as_wide_as_all():
    found = variants("multi-embedding:num_sets=3")
    assert found["multi-embedding:num_sets=3"].control == "wide:dim=12"
    wide = found["wide:dim=12"].start
    assert (wide.model_settings["dim"], wide.methods) == (12, ())


def test_what_else_is_applied_is_applied_to_the_wide_tables_too():
    found = variants("multi-embedding:num_sets=3+low-rank:rank=2", control="wide")
    wide = found["wide:dim=12+low-rank:rank=2"].start
    assert wide.methods == (rb.LowRank(rank=2),)


def test_a_control_with_sets_has_as_many_as_the_method():
    found = variants("aligned-sets:num_sets=3")
    assert found["aligned-sets:num_sets=3"].control == "multi-embedding:num_sets=3"
    found = variants("multi-embedding:num_sets=2", control="shared-sets")
    assert found["multi-embedding:num_sets=2"].control == "shared-sets:num_sets=2"


def test_an_ensemble_has_as_many_models_as_there_are_sets():
    found = variants("multi-embedding:num_sets=3", control="ensemble")
    assert found["multi-embedding:num_sets=3"].control == "ensemble:x=3"
    assert found["ensemble:x=3"].members == 3
    assert found["ensemble:x=3"].start == found["baseline"].start
    assert found["multi-embedding:num_sets=3"].members == 1


def test_an_ensemble_has_as_many_trials_as_the_method():
    found = variants("multi-embedding:num_sets=2", control="ensemble", trials=3)
    assert [variant.trials for variant in found.values()] == [1, 3, 3]
    assert found["ensemble:x=2"].start == found["baseline"].start


@pytest.mark.parametrize("control", ["wide", "ensemble"])
def test_a_method_without_sets_has_no_such_control(control):
    with pytest.raises(
        SettingsError,
        match=f"low-rank:rank=2 has no embedding sets, which the control {control} needs",
    ):
        variants("low-rank:rank=2", control=control)


def test_a_model_without_a_width_has_no_wider_tables():
    plan = StudyPlan.from_mapping({"methods": "multi-embedding", "model": "lr"})
    with pytest.raises((SettingsError, rb.errors.RarebitError)):
        variants_of(plan, plan.runs[0], SCHEMA)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensemble") / "study"
    result = rb.study(
        folder,
        methods="multi-embedding:num_sets=2",
        control="ensemble",
        model=MODEL,
        data={"rows": 1500},
        training={"epochs": 1, "batch_size": 256},
        seeds=2,
        workers=1,
        device="cpu",
        progress=False,
    )
    return folder, result.cells[0]


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_runs_with_seeds_of_their_own(ensemble):
    folder, cell = ensemble
    labels = generate(SyntheticLog(rows=1500)).test.label
    base = {run.seed: run for run in cell.variant("baseline").runs}
    plan = StudyPlan.from_mapping(
        {
            "methods": "baseline",
            "model": MODEL,
            "data": {"rows": 1500},
            "training": {"epochs": 1, "batch_size": 256},
        }
    )
    for found in cell.variant("ensemble:x=2").runs:
        settings = plan.runs[0].to_mapping()
        settings["training"]["seed"] = found.seed + MEMBER_SEEDS
        second = RunFolder(folder, run_key(rb.RunSettings.from_mapping(settings)))
        members = [RunFolder(folder, base[found.seed].key), second]
        mean = sum(member.scores().astype(np.float64) for member in members) / 2
        assert found.auc == pytest.approx(auc(torch.from_numpy(mean), labels), abs=1e-6)
        assert not np.array_equal(*(member.scores() for member in members))
        records = [member.read() for member in members]
        assert found.parameters == sum(record.parameters for record in records)
        assert found.table_bytes == sum(record.table_bytes for record in records)
        assert found.valid_auc == pytest.approx(np.mean([record.valid_auc for record in records]))
        assert found.whole_abundance is None  # its tables do not lie side by side
    assert not cell.missing


@pytest.mark.slow
def test_the_scores_that_are_averaged_are_those_of_all_models(ensemble):
    _, cell = ensemble
    [rows] = cell.rows.values()
    assert rows.low < rows.high


@pytest.mark.slow
def test_the_table_of_variants_has_the_abundance(ensemble):
    _, cell = ensemble
    table = variant_table(cell)
    assert table.header[-1] == "IA"
    shown = {row[0]: row[-1] for row in table.rows}
    for variant in cell.variants:
        values = [run.abundance for run in variant.runs]
        assert shown[variant.name].startswith(f"{np.mean(values):.2f} ± ")
    assert shown["best possible"] == ""


def test_the_abundance_is_the_mean_over_tables():
    model = nn.Sequential(
        nn.Embedding.from_pretrained(torch.eye(5)),
        nn.Embedding.from_pretrained(torch.ones(7, 3)),
        nn.Embedding.from_pretrained(torch.ones(7, 1)),
    )
    mean = pytest.approx((5 + 1) / 2)
    assert abundances(model) == {"abundance": mean, "whole_abundance": mean}
    assert abundances(nn.Linear(2, 1)) == {}


def test_embedding_sets_have_an_abundance_each_and_one_together():
    from rarebit.models.dcn_v2 import DCNv2

    model = DCNv2(SCHEMA, dim=2, hidden=[8, 8])
    rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
    first, second = (table.inner.weight.data.zero_() for table in model.backbone.tables.tables())
    # two equal sets of two directions: the second set adds none
    first[:2] = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    # two sets of one direction each, of lengths 4 and 1 and orthogonal rows: 1 + 1/4 together
    second[:2] = torch.tensor([[4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    found = abundances(model)
    assert found["abundance"] == pytest.approx((2 + 2 + 1 + 1) / 4)
    assert found["whole_abundance"] == pytest.approx((2 + 1.25) / 2)


@pytest.mark.slow
def test_any_variant_can_be_the_control_of_stored_runs(ensemble):
    _, cell = ensemble
    other = cell.against("baseline")
    ours, theirs = (
        cell.variant(name).figures("auc") for name in ("multi-embedding:num_sets=2", "baseline")
    )
    expected = [ours[seed] - theirs[seed] for seed in sorted(ours)]
    assert other.differences(other.variant("multi-embedding:num_sets=2"), "auc") == expected
    assert [variant.name for variant in other.methods] == ["multi-embedding:num_sets=2"]
    itself = cell.against("multi-embedding:num_sets=2")
    assert itself.methods == []
    with pytest.raises(StudyError, match=r"there is no variant 'basline' on dcn_v2 and .*baseline"):
        cell.against("basline")
