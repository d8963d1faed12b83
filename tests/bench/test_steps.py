"""Benches of a step on a small log: all variants train the same model, and the figures are named."""

import pytest
import torch

import rarebit as rb
from rarebit import RowGradients
from rarebit.bench import steps
from rarebit.models import build_model, model_names
from rarebit.pruning.pep import PEP, count_nonzero, threshold_parameters
from rarebit.research import factorized_tables
from rarebit.row_gradients import sum_losses
from rarebit.sets.sets import sets_of

OTHERS = [name for name in model_names() if name != "dnn"]


def quietly(bench):
    return bench(lambda line: None)


def assert_same_network_and_batches(variants):
    heads = [one.model.head.state_dict() for one in variants]
    assert all(torch.equal(head[name], heads[0][name]) for head in heads for name in head)
    first, *others = [next(one.batches).ids for one in variants]
    assert all(torch.equal(first, ids) for ids in others)


def test_the_log_has_the_shape_of_criteo(monkeypatch):
    asked = []

    def stop(log):
        asked.append(log)
        raise InterruptedError

    monkeypatch.setattr(steps, "generate", stop)
    for bench, rows in ((steps.mlet, 204_800), (steps.models, 102_400)):
        with pytest.raises(InterruptedError):
            bench(print)
        assert (asked[-1].preset, asked[-1].rows, steps.BATCH_SIZE) == ("criteo", rows, 4096)


def test_a_step_with_mlet_has_the_network_and_batches_of_a_plain_one(log):
    plain, product = steps.deepfm_step(log), steps.deepfm_step(log, rb.MLET())
    assert not factorized_tables(plain.model)
    tables = factorized_tables(product.model)
    assert len(tables) == len(log.schema.table_fields)
    assert {tuple(table.projection.shape) for table in tables.values()} == {(64, 16)}
    assert_same_network_and_batches([plain, product])


def test_the_figures_of_mlet(log, quick):
    figures = quietly(steps.mlet)
    for end in ("", "_dense"):
        ratio = figures[f"mlet_ms{end}"] / figures[f"plain_ms{end}"]
        assert figures[f"ratio{end}"] == pytest.approx(ratio)
        rows = sum(field.rows for field in log.schema.table_fields)
        fields = len(log.schema.table_fields)
        # a weight and two moments of 4 bytes; the first-order weights are plain in both variants
        assert figures[f"plain_bytes{end}"] == 12 * rows * (16 + 1)
        assert figures[f"mlet_bytes{end}"] == 12 * (rows * (64 + 1) + fields * 64 * 16)
    assert {"other_load_rowwise", "other_load_dense"} <= set(figures)


def test_steps_with_thresholds_have_the_network_and_batches_of_a_plain_one(log):
    methods = (None, PEP(schedule="given"), PEP(init=steps.PEP_INIT))
    plain, given, learned = (steps.deepfm_step(log, method, dim=64) for method in methods)
    rows = sum(field.rows for field in log.schema.table_fields)
    assert threshold_parameters(plain.model) == []
    assert threshold_parameters(given.model) == []
    [levels] = threshold_parameters(learned.model)
    assert levels.shape == (rows, 64)
    left = count_nonzero(learned.model) / levels.numel()
    assert 0.4 < left < 0.6
    assert_same_network_and_batches([plain, given, learned])


def test_the_given_threshold_rises_in_every_step(log):
    variant = steps.deepfm_step(log, PEP(schedule="given"), dim=64)
    step, seen = steps.rising(variant), []
    for _ in range(3):
        step()
        seen.append(variant.model.backbone.tables.stacks[0].levels.value.unique().item())
    assert 0.0066 < seen[0] < seen[1] < seen[2] < 0.0068


def test_the_figures_of_pep(log, quick):
    figures = quietly(steps.pep)
    assert figures["ratio"] == pytest.approx(figures["scheduled_ms"] / figures["plain_ms"])
    assert figures["ratio_learned"] == pytest.approx(figures["learned_ms"] / figures["plain_ms"])
    rows = sum(field.rows for field in log.schema.table_fields)
    # a weight and two moments of 4 bytes; the first-order weights are plain in all variants
    assert figures["plain_bytes"] == figures["scheduled_bytes"] == 12 * rows * (64 + 1)
    assert figures["learned_bytes"] == 12 * rows * (2 * 64 + 1)
    assert "other_load_steps" in figures


def test_shrunk_tables_have_the_network_and_batches_of_plain_ones(log):
    variants = [
        steps.deepfm_step(log, method) for method in (None, rb.Shrinkage(), rb.research.RowRate())
    ]
    assert_same_network_and_batches(variants)
    methods = [{info.methods for info in rb.find_tables(one.model)} for one in variants]
    assert methods == [{()}, {(str(rb.Shrinkage(c="typical")),)}, {(str(rb.research.RowRate()),)}]


def test_the_figures_of_shrinkage(log, quick):
    figures = quietly(steps.shrinkage)
    assert figures["ratio"] == pytest.approx(figures["shrunk_ms"] / figures["plain_ms"])
    assert figures["ratio_row_rate"] == pytest.approx(figures["row_rate_ms"] / figures["plain_ms"])


def test_the_figures_of_the_tail(log, quick):
    figures = quietly(steps.tail)
    assert figures["ratio"] == pytest.approx(figures["tail_ms"] / figures["plain_ms"])
    assert figures["ratio_network"] == pytest.approx(figures["network_ms"] / figures["plain_ms"])


def test_an_epoch_has_so_many_steps_and_one_forgetting(log, quick):
    figures = quietly(steps.forgetting)
    assert figures["steps_of_an_epoch"] == 245  # of 4096 rows, out of a million
    in_steps = figures["forget_ms"] / figures["step_ms"]
    assert figures["ratio"] == pytest.approx(1 + in_steps / 245)


def test_embedding_sets_have_the_tables_and_batches_of_a_single_one(log):
    single, multi = (steps.sets_step(log, num_sets=number) for number in (1, 10))
    assert sets_of(single.model) is None
    assert sets_of(multi.model).num_sets == 10
    widths = [
        {info.width for info in rb.find_tables(one.model.backbone)} for one in (single, multi)
    ]
    assert widths == [{100}, {100}]
    assert torch.equal(next(single.batches).ids, next(multi.batches).ids)


def test_the_figures_of_multi_embedding(log, quick):
    figures = quietly(steps.multi_embedding)
    assert figures["ratio"] == pytest.approx(figures["multi_ms"] / figures["single_ms"])
    assert figures["multi_weights"] < figures["single_weights"]


def test_the_figures_of_a_transfer_which_changes_the_rows(log, quick, monkeypatch):
    made = []
    build = steps.deepfm_step
    monkeypatch.setattr(steps, "deepfm_step", lambda data: made.append(build(data)) or made[-1])
    figures = quietly(steps.transfer)
    assert figures["ratio"] == pytest.approx(figures["transfer_ms"] / figures["plain_ms"])
    plain, other = made
    ledger = other.step.backward.__self__.ledger.read()
    assert ledger["steps"] == 2
    assert sum(table["rows"] for table in ledger["tables"].values()) > 0
    embedding = "backbone.tables.stacks.0.embedding.weight"
    assert not torch.equal(*(one.model.state_dict()[embedding] for one in (plain, other)))


def test_a_step_with_the_sum_rule_trains_the_same_bits(log):
    plain, rule = steps.deepfm_step(log), steps.deepfm_step(log)
    rule.step.backward = RowGradients(rule.model, sum_losses).backward
    for _ in range(2):
        plain()
        rule()
    weights = [one.model.state_dict() for one in (plain, rule)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_figures_of_row_gradients(log, quick):
    figures = quietly(steps.row_gradients)
    assert figures["ratio"] == pytest.approx(figures["rule_ms"] / figures["plain_ms"])


def test_the_figures_of_averages(log, quick):
    figures = quietly(steps.ema)
    assert figures["ratio"] == pytest.approx(figures["torch_ms"] / figures["ema_ms"])
    assert figures["ratio_plain"] == pytest.approx(figures["ema_ms"] / figures["plain_ms"])


def test_every_model_has_a_ratio_to_dnn_and_its_width_but_ffm(log, quick, monkeypatch):
    few = log[slice(32)]
    few = rb.Dataset(log.schema, few.ids, few.numeric, few.label)
    monkeypatch.setattr(steps, "generate", lambda wanted: rb.data.Splits(few, few, few))
    built, said = {}, []

    def build(name, schema, settings):
        built[name] = build_model(name, schema, settings)
        return built[name]

    monkeypatch.setattr(steps, "build_model", build)
    figures = steps.models(said.append)
    assert len(said) == len(OTHERS)
    for name in OTHERS:
        ratio = figures[f"{name}_ms"] / figures[f"dnn_ms_beside_{name}"]
        assert figures[f"ratio_{name}"] == pytest.approx(ratio)
    assert figures["ratio"] == max(figures[f"ratio_{name}"] for name in OTHERS)
    assert figures["ratio"] == figures[f"ratio_{figures['slowest']}"]
    assert set(built) == set(model_names())
    for name, model in built.items():
        if name not in ("lr", "ffm"):
            assert model.settings["dim"] == steps.DIM
    assert built["ffm"].settings["dim"] < steps.DIM
