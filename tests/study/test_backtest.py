"""Backtests: policies on logs small enough that the truth is known, leaks, limit cases, resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import rarebit as rb
from rarebit.data.prepare import prepare_periods
from rarebit.data.raw.periods import SortedLog
from rarebit.data.raw.vocabulary import Growth
from rarebit.data.schema import UNKNOWN
from rarebit.errors import DataError, SettingsError
from rarebit.study.backtest import (
    BacktestResult,
    PeriodFacts,
    PeriodLog,
    Policy,
    PolicyResult,
    PolicyRun,
    as_known_to,
    backtest,
    hashed,
    progressive,
    variants_of,
)
from rarebit.tables.apply import table_bytes
from rarebit.training.metrics import auc, measure
from rarebit.training.run import run as train_run
from rarebit.training.settings import PreparedLog, RunSettings
from rarebit.training.update import update

SRC = Path(rb.__file__).parents[1]
DAY = 86_400
POLICIES = [
    *("grow", "grow:start=prior", "grow:start=noise", "grow:like=item/kind"),
    *("restart", "fixed", "hashing", "retrain", "retrain:every=2", "frozen"),
]
SETTINGS = RunSettings.from_mapping(
    {
        "model": {"name": "fm", "dim": 4},
        "training": {"batch_size": 32, "tables": "rowwise", "lr": 0.05, "epochs": 1},
    }
)


def click_log(days=5, rows=120, new=True, seed=0):
    """Return a log over some days; items arrive day by day, and some are liked."""
    draw = np.random.default_rng(seed)
    number = np.arange(days * rows)
    day = number // rows
    items = draw.integers(0, 10 + 8 * day * new)
    items[number < 40] = number[number < 40] % 10  # all first items on the first day
    return pl.DataFrame(
        {
            "time": 1_700_006_400 + day * DAY + number % rows,
            "user": [f"u{user}" for user in draw.integers(0, 6, len(number))],
            "item": [f"i{item}" for item in items],
            "kind": [f"k{item % 3}" for item in items],
            "click": (draw.random(len(number)) < 0.2 + 0.6 * (items % 2)).astype(np.uint8),
        }
    )


def prepared(folder, frame, **options):
    folder.mkdir(exist_ok=True)
    frame.write_parquet(folder / "log.parquet")
    options = {"label": "click", "time": "time", "growth": Growth(min_count=1)} | options
    prepare_periods(folder / "log.parquet", folder / "data", **options)
    return PeriodLog(folder / "data")


def scores_of(policy, log, settings=SETTINGS):
    return [found.scores for found in progressive(Policy.parse(policy), settings, log)]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("log"), click_log())


# The log


def test_a_log_is_sorted_and_cut_into_days(log, tmp_path):
    frame = click_log()
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=3).sort("user")
    other = prepared(tmp_path, shuffled)
    assert [len(data) for data in log.data] == [120] * 5
    assert log.starts[0].startswith("2023-11-15")
    for one, two in zip(log.data, other.data, strict=True):
        assert torch.equal(one.label.sum(), two.label.sum())
    assert log.growing == ["item"]


@pytest.mark.parametrize(
    ("by", "periods"), [("day", 60), ("week", 9), ("month", 3), (20, 20), (7, 7)]
)
def test_periods_have_the_rows_that_the_calendar_gives_them(by, periods):
    times = np.arange(60.0) * DAY + 1_699_920_000  # from 2023-11-14 on, a row a day
    frame = pl.DataFrame({"time": np.repeat(times, 2), "click": [0, 1] * 60})
    parts = SortedLog(frame, frame["time"].to_numpy()).cut(by, "click")
    assert len(parts) == periods
    assert sum(part.rows.height for part in parts) == 120
    assert pl.concat([part.rows for part in parts]).equals(frame)
    if by == "month":
        assert [part.start[:7] for part in parts] == ["2023-11", "2023-12", "2024-01"]


def test_the_warm_up_has_the_rows_of_several_periods(tmp_path):
    log = prepared(tmp_path, click_log(), warm_up=3)
    assert [len(data) for data in log.data] == [360, 120, 120]


def test_a_period_with_one_label_is_joined_with_the_next():
    labels = [0, 1, 0, 0, 1, 0, 1, 1]
    frame = pl.DataFrame({"time": np.repeat(np.arange(4.0) * DAY, 2), "click": labels})
    parts = SortedLog(frame, frame["time"].to_numpy()).cut("day", "click")
    assert [part.rows["click"].to_list() for part in parts] == [[0, 1], [0, 0, 1, 0, 1, 1]]


def test_times_in_milliseconds_are_seconds(tmp_path):
    frame = click_log().with_columns(pl.col("time") * 1000)
    assert len(prepared(tmp_path, frame)) == 5


def test_an_id_is_young_for_a_week(tmp_path):
    """Items are admitted on the days 2, 3, ...; a row is young where its item was at most seven days ago."""
    days = 12
    frame = pl.DataFrame(
        {
            "time": np.repeat(1_700_006_400 + np.arange(days) * DAY, 2 * days),
            "item": [f"i{item}" for day in range(days) for item in range(days) for _ in (0, 1)],
            "click": [0, 1] * days * days,
        }
    ).filter(pl.col("item").str.slice(1).cast(pl.Int64) <= (pl.col("time") - 1_700_006_400) // DAY)
    schema = rb.data.LogSchema(label="click", columns=(rb.data.Column(name="item"),))
    log = prepared(tmp_path, frame, label=None, schema=schema)
    for number in range(1, days):
        young = [max(number - 6, 1) <= item for item in range(number + 1) for _ in (0, 1)]
        assert log.young(number).tolist() == young


# Policies


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_do_not_depend_on_later_labels(policy, log):
    """Labels from the fourth day on are turned: nothing before changes, and something after it does."""
    before = scores_of(policy, log)
    for number in (3, 4):
        log.data[number].label = 1 - log.data[number].label
    try:
        after = scores_of(policy, log)
    finally:
        for number in (3, 4):
            log.data[number].label = 1 - log.data[number].label
    for number, (one, two) in enumerate(zip(before, after, strict=True), 1):
        if number < 3:
            assert torch.equal(one, two)
    # the first batch of the period is scored by a model that has seen none of its labels
    assert torch.equal(before[2][:32], after[2][:32])
    if policy in ("retrain", "frozen", "retrain:every=2"):
        assert torch.equal(before[2], after[2])
    if policy not in ("frozen", "retrain:every=2"):
        assert not torch.equal(before[3], after[3])


@pytest.mark.parametrize("policy", ["fixed", "hashing", "restart", "grow:start=noise"])
def test_policies_are_one_where_no_id_is_new(policy, tmp_path):
    log = prepared(tmp_path, click_log(new=False))
    assert log.growing == []
    settings = SETTINGS
    if policy == "restart":  # an optimizer without state
        settings = replace(SETTINGS, training=replace(SETTINGS.training, optimizer="sgd"))
    ours, theirs = scores_of(policy, log, settings), scores_of("grow", log, settings)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", ["grow", "grow:like=item/kind"])
def test_grow_is_a_chain_of_updates(policy, log, tmp_path):
    """The first day is trained in one pass, each other one by `update`: the figures are equal to the last digit."""
    policy = Policy.parse(policy)
    frame = click_log()
    training = replace(SETTINGS.training, one_pass=True)
    data = PreparedLog(folder=str(tmp_path / "first"))
    first = frame.filter(pl.col("time") < 1_700_006_400 + DAY)
    first.write_parquet(tmp_path / "day.parquet")
    schema = rb.data.LogSchema.read(log.folder / "0000" / "schema.toml")
    # a run needs rows to test on: in one pass they are trained on as all others
    split = rb.data.Split(kind="order", shares=(0.8, 0.1, 0.1))
    rb.prepare(
        tmp_path / "day.parquet",
        tmp_path / "first",
        schema=replace(schema, counts="all"),
        split=split,
    )
    train_run(
        replace(SETTINGS, data=data, training=training),
        folder=tmp_path / "0",
        progress=False,
        say=lambda _: None,
    )
    ours = list(progressive(policy, SETTINGS, log))
    for number in range(1, 5):
        begin = 1_700_006_400 + number * DAY
        rows = frame.filter(pl.col("time").is_between(begin, begin + DAY - 1))
        rows.write_parquet(tmp_path / "day.parquet")
        found = update(
            tmp_path / str(number - 1),
            tmp_path / "day.parquet",
            tmp_path / str(number),
            growth=Growth(min_count=1),
            like=policy.groups,
            progress=False,
        )
        assert found.all.learning == measure(ours[number - 1].scores, log.data[number].label)
    assert found.table_bytes == table_bytes(ours[-1].model)


def test_fixed_looks_up_no_row_after_the_warm_up(log):
    schema = log.data[0].schema
    for data in log.data:
        seen = as_known_to(schema, data)
        rows = [field.rows for field in schema.table_fields]
        assert bool((seen.ids < torch.tensor(rows)).all())
        is_new = data.ids >= torch.tensor(rows)
        assert bool((seen.ids[is_new] == UNKNOWN).all())
        assert torch.equal(seen.ids[~is_new], data.ids[~is_new])
    [*_, last] = progressive(Policy(name="fixed"), SETTINGS, log)
    assert {field.name: field.rows for field in last.model.schema.table_fields} == {
        field.name: field.rows for field in schema.table_fields
    }


def test_hashing_has_the_bytes_of_grow_and_shares_rows(log):
    models = [
        list(progressive(Policy.parse(one), SETTINGS, log))[-1].model for one in ("grow", "hashing")
    ]
    assert table_bytes(models[0]) == table_bytes(models[1])
    shared, plain = hashed(log, log.data[-1]), log.data[-1]
    slot = plain.schema.slots["item"].start
    pairs = set(zip(plain.ids[:, slot].tolist(), shared.ids[:, slot].tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs})  # a value has one row
    assert len({two for _, two in pairs}) < len(pairs)  # and some values share it
    assert torch.equal(plain.ids[:, :slot], shared.ids[:, :slot])


def test_retrain_learns_all_rows_before_its_period(log):
    found = list(progressive(Policy(name="retrain", every=2, epochs=3), SETTINGS, log))
    assert [one.trained for one in found] == [3 * 120, 0, 3 * 360, 0]
    assert found[0].model is found[1].model
    before = log.until(3)
    assert len(before) == 360
    assert before.schema == log.data[2].schema


def test_frozen_never_trains_again(log):
    found = list(progressive(Policy(name="frozen"), SETTINGS, log))
    assert [one.trained for one in found] == [120, 0, 0, 0]
    assert torch.equal(
        found[-1].scores, rb.predict(found[0].model, as_known_to(log.data[0].schema, log.data[4]))
    )


def test_policies_with_counting_methods_learn(log):
    settings = replace(SETTINGS, methods=(rb.Shrinkage(),))
    grown = scores_of("grow", log, settings)
    assert not torch.equal(grown[-1], scores_of("grow", log)[-1])


def test_retrain_leaves_some_ids_unknown_that_it_saw_once(tmp_path):
    """So that the row of unknown values, which stands for all ids of the period, is trained."""
    rows = 2000
    frame = pl.DataFrame(
        {
            "time": 1_700_006_400 + np.repeat([0, DAY, 2 * DAY], rows),
            "item": [f"i{number}" for number in range(3 * rows)],
            "click": [0, 1] * (3 * rows // 2),
        }
    )
    schema = rb.data.LogSchema(label="click", columns=(rb.data.Column(name="item"),))
    log = prepared(tmp_path, frame, label=None, schema=schema)
    unknown = (log.until(2).ids[rows:] == UNKNOWN).float().mean()
    assert 0.03 < float(unknown) < 0.07


# Text


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_is_what_its_text_says(text):
    assert str(Policy.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grwo", "unknown policy 'grwo'.*grow"),
        ("fixed:start=noise", "the policy fixed has no setting 'start'; it has none"),
        ("grow:strat=noise", "the policy grow has no setting 'strat'.*start"),
        ("grow:start", "expected setting=value"),
        ("grow:start=random", "start.*'random'"),
        ("grow:like=item", "like takes a field and its group"),
        ("retrain:every=0", "every must be at least 1"),
    ],
)
def test_a_wrong_policy_is_an_error(text, message):
    with pytest.raises(SettingsError, match=message):
        Policy.parse(text)


def test_policies_are_multiplied_with_methods():
    names = [
        one.name
        for one in variants_of("grow,retrain:every=2:seeds=1", "baseline,shrinkage", SETTINGS)
    ]
    assert names == ["grow", "grow+shrinkage", "retrain:every=2", "retrain:every=2+shrinkage"]
    with pytest.raises(SettingsError, match="grow is given twice"):
        variants_of("grow,grow", "baseline", SETTINGS)
    with pytest.raises(SettingsError, match="changes trained tables"):
        variants_of("grow", "quantize", SETTINGS)


# The whole


def options(folder, **more):
    return {
        "label": "click",
        "time": "time",
        "model": {"name": "fm", "dim": 4},
        "training": {"batch_size": 32, "tables": "rowwise", "lr": 0.05, "epochs": 1},
        "growth": Growth(min_count=1),
        "workers": 1,
        "device": "cpu",
        "progress": False,
    } | more


def test_a_backtest_measures_what_policies_score(log, tmp_path):
    click_log().write_parquet(tmp_path / "log.parquet")
    asked = options(tmp_path, policies="grow,grow:start=noise,retrain:seeds=1", seeds=2)
    result = backtest(tmp_path / "log.parquet", tmp_path / "out", **asked)
    assert result.control == "grow:start=noise"
    assert [len(policy.runs) for policy in result.policies] == [2, 2, 1]
    ours = torch.cat(scores_of("grow", log))
    labels = torch.cat([data.label for data in log.data[1:]])
    young = torch.cat([log.young(number) for number in range(1, 5)])
    first = result.policy("grow").runs[0]
    assert first.auc == auc(ours, labels)
    assert first.young_auc == auc(ours[young], labels[young])
    assert first.other_auc == auc(ours[~young], labels[~young])
    assert first.trained_rows == 600
    assert [period.rows for period in result.periods] == [120] * 4
    assert sum(period.young_rows for period in result.periods) == int(young.sum())
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["machine"]["runs_made"] == 5
    assert stored["backtest"]["policies"][0]["auc"] == pytest.approx(
        result.policy("grow").mean("auc")
    )
    # all is there already
    again = backtest(tmp_path / "log.parquet", tmp_path / "out", **asked)
    assert again == result
    assert json.loads((tmp_path / "out" / "results.json").read_text())["machine"]["runs_made"] == 0
    with pytest.raises(DataError, match="periods with another by; choose another output folder"):
        backtest(tmp_path / "log.parquet", tmp_path / "out", **asked, by="week")
    click_log(seed=1).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="periods with another log"):
        backtest(tmp_path / "log.parquet", tmp_path / "out", **asked)


def made_run(seed, auc, young):
    return PolicyRun(
        key=f"run-{seed}", seed=seed, auc=auc, logloss=0.5, young_auc=young, young_logloss=0.6,
        other_auc=auc, period_aucs=(auc, None), period_young_aucs=(young, None), trained_rows=100,
        seconds=1.0, table_bytes=4000, device="cpu", torch="2", commit=None,
    )  # fmt: skip


def test_differences_are_paired_by_seed():
    """Seeds differ by far more than policies do: 0.01 in all rows, with a spread of 0.001."""
    first = tuple(made_run(seed, 0.7 + 0.05 * seed, None) for seed in range(5))
    second = tuple(
        made_run(seed, 0.71 + 0.05 * seed + 0.001 * (seed % 2), 0.6) for seed in range(4)
    )
    result = BacktestResult(
        plan={"minimum_effect": 0.0005},
        periods=(PeriodFacts(start="2024-01-01 00:00", rows=50, young_rows=5, new_ids=3),) * 2,
        policies=(PolicyResult(name="a", runs=first), PolicyResult(name="b", runs=second)),
        control="a",
    )
    found = result.compare()["b"]
    assert (found.n, found.verdict) == (4, "helps")
    assert found.mean == pytest.approx(0.0105)
    assert result.compare("auc", "b")["a"].verdict == "hurts"
    assert result.compare("young_auc")["b"].n == 0
    text = str(result)
    assert "helps" in text
    assert "+0.0105" in text
    json.dumps(result.to_mapping(), allow_nan=False)


def test_a_picture_has_every_policy():
    pytest.importorskip("matplotlib", reason="capability: package matplotlib: it is not installed")
    from rarebit.diagnosis.plots import draw_backtest

    runs = tuple(made_run(seed, 0.7, 0.6) for seed in range(2))
    result = BacktestResult(
        plan={"minimum_effect": 0.0005},
        periods=(PeriodFacts(start="2024-01-01 00:00", rows=50, young_rows=5, new_ids=3),) * 2,
        policies=tuple(PolicyResult(name=name, runs=runs) for name in ("policy-a", "policy-b")),
        control="policy-a",
    )
    images = draw_backtest(result)
    assert images["backtest.png"].startswith(b"\x89PNG")
    assert images["backtest.svg"].lstrip().startswith(b"<?xml")


@pytest.mark.slow
def test_a_killed_backtest_resumes(tmp_path):
    """The process is killed for good after its first run; the same command makes only the others."""
    click_log(days=6, rows=400).write_parquet(tmp_path / "log.parquet")
    command = [
        sys.executable, "-m", "rarebit", "backtest", "log.parquet", "--label", "click", "--time", "time",
        "--policies", "grow,fixed,frozen", "--seeds", "2", "--model", "fm", "--batch-size", "32",
        "--workers", "1", "--device", "cpu", "--out", "out", "--no-plots",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(SRC), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    runs = tmp_path / "out" / "runs"
    limit = time.monotonic() + 120
    while not list(runs.glob("*.json")) and time.monotonic() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path.name: path.read_bytes() for path in runs.glob("*.json")}
    assert 1 <= len(kept) < 6
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "6 runs" in ended.stderr
    assert {name: (runs / name).read_bytes() for name in kept} == kept
    assert len(list(runs.glob("*.json"))) == 6
    assert "Progressive AUC" in ended.stdout
    assert "Difference to grow" in ended.stdout
