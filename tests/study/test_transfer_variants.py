"""Controls of harmless transfer, and a small study of it with pruning that is shared."""

import dataclasses
import json

import pytest
import torch

import rarebit as rb
from rarebit.data.schema import Field, Schema
from rarebit.errors import SettingsError
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.pruning.pruned import SharedPruning
from rarebit.study.plan import StudyPlan
from rarebit.study.pool import StudyProgress
from rarebit.study.runs import ensemble_record, run_key, stage_key
from rarebit.study.study import _stage_makers_first
from rarebit.study.tuning import SWEEP, search
from rarebit.study.variants import variants_of
from rarebit.study.worker import shortened
from rarebit.technique import technique_text
from rarebit.training.metrics import Evaluation, measure
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, load_splits

SCHEMA = Schema((Field(name="user", rows=190), Field(name="item", rows=150)))


def variants(methods, **values):
    values = {"model": {"name": "fm", "dim": 8}, **values}
    plan = StudyPlan.from_mapping({"methods": methods, **values})
    return {variant.name: variant for variant in variants_of(plan, plan.runs[0], SCHEMA)}


def controls(methods, **values):
    return {name: variant.control for name, variant in variants(methods, **values).items()}


def text(variant):
    return "+".join(map(technique_text, variant.start.methods))


def test_the_control_is_the_plain_sum_at_its_best_scale():
    found = variants("harmless-transfer:loss=mmd:alpha=3.0")
    assert list(found) == ["baseline", "plain-sum:loss=mmd", "harmless-transfer:loss=mmd:alpha=3.0"]
    assert found["harmless-transfer:loss=mmd:alpha=3.0"].control == "plain-sum:loss=mmd"
    control = found["plain-sum:loss=mmd"]
    assert text(control) == "harmless-transfer:loss=mmd:rule=sum:scale=0.01"
    best = search(control.start, control.axes, control.trials, lambda run: run.methods[0].scale)
    scales = [run.methods[0].scale for run in best.trials]
    assert [scale for scale in scales if scale > 0.01][:4] == [0.1, 1.0, 10.0, 100.0]


def test_without_sweeps_controls_have_their_first_settings():
    found = variants("harmless-transfer,mlet:inner_dim=8", sweeps=False)
    swept = variants("harmless-transfer,mlet:inner_dim=8")
    for name in ("plain-sum", "matched-rate"):
        assert (found[name].trials, swept[name].trials) == (1, SWEEP)
        assert found[name].start == swept[name].start


def test_transfers_that_differ_in_their_barrier_alone_share_the_plain_sum():
    found = controls("harmless-transfer,harmless-transfer:rule=global,harmless-transfer:alpha=1.0")
    assert [name for name, control in found.items() if control is None] == ["baseline", "plain-sum"]


def test_the_plain_sum_has_the_other_methods_of_the_variant():
    found = variants("pruned:keep=100+harmless-transfer")
    assert found["pruned:keep=100+harmless-transfer"].control == "pruned:keep=100+plain-sum"
    assert text(found["pruned:keep=100+plain-sum"]) == (
        "pruned:keep=100+harmless-transfer:rule=sum:scale=0.01"
    )


@pytest.mark.parametrize("transfer", ["rule=sum:scale=0.01", "scale=0.0"])
def test_a_variant_without_transfer_or_without_barrier_has_what_it_was_added_to_as_its_control(
    transfer,
):
    found = controls(f"harmless-transfer:{transfer},pruned:keep=100+harmless-transfer:{transfer}")
    assert found == {
        "baseline": None,
        "pruned:keep=100": None,
        f"harmless-transfer:{transfer}": "baseline",
        f"pruned:keep=100+harmless-transfer:{transfer}": "pruned:keep=100",
    }


def test_doubled_rows_are_a_control_that_can_be_asked_for():
    found = variants("harmless-transfer:fields=user", control="doubled-rows")
    assert found["harmless-transfer:fields=user"].control == "doubled-rows:fields=user"
    assert text(found["doubled-rows:fields=user"]) == "harmless-transfer:scale=0.0:fields=user"


@pytest.mark.parametrize("control", ["plain-sum", "doubled-rows"])
def test_controls_of_transfers_are_for_transfers(control):
    with pytest.raises(
        SettingsError, match=f"low-rank.* has no method that makes the control {control}"
    ):
        variants("low-rank:rank=2", control=control)


def test_a_matched_rate_keeps_the_transfer():
    found = variants("mlet:inner_dim=16,harmless-transfer+mlet:inner_dim=16")
    control = found[found["harmless-transfer+mlet:inner_dim=16"].control]
    assert HarmlessTransfer() in control.start.methods
    plain = found[found["mlet:inner_dim=16"].control]
    assert HarmlessTransfer() not in plain.start.methods


def test_the_scale_is_tuned():
    found = variants("harmless-transfer", trials=4)["harmless-transfer"]
    assert [axis.name for axis in found.axes][:2] == ["learning rate", "scale"]


def test_thresholds_that_are_still_learned_are_told_before_anything_is_run():
    with pytest.raises(SettingsError, match="thresholds of pep that are still being learned"):
        variants("pep+harmless-transfer")


def settings_of(*methods, seed=0):
    return RunSettings(methods=methods, training=rb.Training(seed=seed))


PRUNED = rb.pruning.Pruned(keep=9)


def test_a_first_stage_is_that_of_the_run_without_what_takes_part_in_training():
    key = stage_key(settings_of(PRUNED))
    assert key == run_key(settings_of(PRUNED))
    assert key == stage_key(settings_of(PRUNED, HarmlessTransfer()))
    assert key == stage_key(settings_of(HarmlessTransfer(rule="sum"), PRUNED))
    assert key == stage_key(settings_of(rb.pruning.Pruned(keep=9, start="random")))
    others = [
        settings_of(rb.pruning.Pruned(keep=8)),
        settings_of(rb.pruning.Pruned(keep=9, tables="dense")),
        settings_of(PRUNED, seed=1),
        settings_of(rb.MLET(inner_dim=9), PRUNED),
    ]
    assert key not in map(stage_key, others)
    alone = [
        settings_of(),
        settings_of(HarmlessTransfer()),
        settings_of(rb.pruning.Pruned(keep=9, start="trained")),
    ]
    assert [stage_key(settings) for settings in alone] == [None, None, None]


class Planned:
    """A run of a plan, by its settings."""

    def __init__(self, *methods, seed=0):
        self.settings = settings_of(*methods, seed=seed)


def test_runs_that_wait_for_the_first_stage_of_another_come_last_in_their_seed():
    with_transfer = (PRUNED, HarmlessTransfer())
    runs = [
        Planned(),
        Planned(PRUNED),
        Planned(*with_transfer),
        Planned(HarmlessTransfer()),
        Planned(*with_transfer, seed=1),
        Planned(PRUNED, seed=1),
        Planned(HarmlessTransfer(), seed=1),
    ]
    order = [runs.index(run) for run in _stage_makers_first(runs)]
    assert order == [0, 1, 3, 2, 4, 6, 5]


def test_reports_are_short():
    told = {"a": {"b": 0.123456789, "c": 1234567, "d": None}, "e": "word"}
    assert shortened(told) == {"a": {"b": 0.12346, "c": 1234567, "d": None}, "e": "word"}


def test_an_ensemble_has_no_report_of_one_of_its_models(record):
    members = [record(seed=seed, reports={"harmless-transfer": {"steps": seed}}) for seed in (1, 2)]
    scores, labels = torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0.0, 1.0, 0.0])
    found = ensemble_record(members, 1, Evaluation(overall=measure(scores, labels)))
    assert (found.auc, found.reports) == (1.0, {})


SMALL = {
    "model": {"name": "fm", "dim": 4},
    "data": {"rows": 1200},
    "training": {"epochs": 2, "batch_size": 128, "lr": 0.02},
    "seeds": 2,
    "device": "cpu",
    "progress": False,
}
METHODS = "pruned:keep=3000,pruned:keep=3000+harmless-transfer"


@pytest.fixture(scope="module")
def shared_study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "together"
    return folder, rb.study(folder, methods=METHODS, control="baseline", workers=2, **SMALL)


def aucs(result, name):
    return result.cells[0].variant(name).figures("auc")


@pytest.mark.slow
def test_a_shared_first_stage_gives_what_runs_by_themselves_give(shared_study, tmp_path):
    _, result = shared_study
    for name in METHODS.split(","):
        alone = rb.study(tmp_path / name, methods=name, control="baseline", workers=1, **SMALL)
        assert aucs(alone, name) == aucs(result, name)
    # the same number of entries, and another training of them
    both = [aucs(result, name) for name in METHODS.split(",")]
    assert both[0] != both[1]


class Starts(StudyProgress):
    """Notes which runs begin."""

    def __init__(self):
        self.names = []

    def start(self, name):
        self.names.append(name)


@pytest.mark.slow
def test_a_first_stage_that_is_there_serves_all_runs_that_have_it(tmp_path):
    several = f"{METHODS},harmless-transfer"
    options = SMALL | {"seeds": 1, "workers": 1, "methods": several, "control": "baseline"}
    plan = StudyPlan.from_mapping(
        {name: options[name] for name in ("methods", "model", "data", "training")}
    )
    pruned = dataclasses.replace(plan.runs[0], methods=(rb.pruning.Pruned(keep=3000),))
    # which entries survive is known already: seven of one table
    shared = SharedPruning(tmp_path / "pruning" / stage_key(pruned), (3000,), as_ticket=True)
    splits = load_splits(pruned.data)
    train_model(
        pruned, splits.train, splits.valid, progress=False, say=lambda line: None, shared=shared
    )
    ticket = rb.pruning.load_ticket(shared.folder / "ticket")
    kept = {name: torch.zeros_like(mask) for name, mask in ticket.kept.items()}
    kept["backbone.tables.item"].view(-1)[:7] = True
    rb.pruning.save_ticket(rb.pruning.Ticket(kept, start=ticket.start), shared.folder / "ticket")
    starts = Starts()
    found = rb.study(tmp_path, **options | {"progress": starts})
    names = several.split(",")
    sizes = {name: found.cells[0].variant(name).runs[0].parameters for name in ("baseline", *names)}
    entries = sum(mask.numel() for mask in kept.values())
    assert sizes[names[0]] == sizes[names[1]] == sizes["baseline"] - entries + 7
    # the second of two that have it comes last: by then it is there
    order = ["baseline", names[0], names[2], names[1]]
    assert starts.names == [f"{name}, seed 0" for name in order]


@pytest.mark.slow
def test_nothing_of_the_first_stages_is_left_of_a_complete_study(shared_study):
    folder, result = shared_study
    assert result.is_complete
    assert not (folder / "pruning").exists()


@pytest.mark.slow
def test_the_ledger_is_in_the_record_of_each_run_with_a_transfer(shared_study):
    folder, result = shared_study
    cell = result.cells[0]
    for run in cell.variant("pruned:keep=3000+harmless-transfer").runs:
        ledger = run.reports["harmless-transfer"]
        assert ledger["steps"] == 2 * 8
        assert ledger["tables"]["backbone.tables.item"]["rows"] > 0
        assert len(json.dumps(ledger)) < 5000
    others = cell.variant("pruned:keep=3000").runs
    assert all("harmless-transfer" not in run.reports for run in others)
    assert rb.study(folder, methods=METHODS, control="baseline", **SMALL) == result


@pytest.mark.slow
def test_a_study_of_transfers_with_their_own_control(tmp_path):
    options = SMALL | {"seeds": 1, "training": {"epochs": 1, "batch_size": 128}}
    found = rb.study(tmp_path, methods="harmless-transfer,harmless-transfer:rule=sum", **options)
    [cell] = found.cells
    assert found.is_complete
    assert {variant.name: variant.control for variant in cell.variants} == {
        "baseline": None,
        "plain-sum": None,
        "harmless-transfer": "plain-sum",
        "harmless-transfer:rule=sum": "baseline",
    }
    tried = cell.variant("plain-sum").trials
    best = max(tried, key=lambda trial: trial.valid_auc)
    assert 6 <= len(tried) <= SWEEP
    assert cell.variant("plain-sum").runs[0].valid_auc == pytest.approx(best.valid_auc)
