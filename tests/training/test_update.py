"""Another day: what a model keeps, what it learns, and what happens when it is killed."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data import Column, Growth, LogSchema, Split  # noqa: E402  # the same
from rarebit.data.prepare import changes_of, prepare_day  # noqa: E402  # the same
from rarebit.data.raw.encoder import encoder_of  # noqa: E402  # the same
from rarebit.errors import CheckpointError, DataError, ModelFileError, SettingsError  # noqa: E402  # the same
from rarebit.tables.apply import _place, find_sites  # noqa: E402  # the same
from rarebit.technique import parse_techniques, technique_names  # noqa: E402  # the same
from rarebit.training.metrics import auc  # noqa: E402  # the same
from rarebit.training.score import score_log  # noqa: E402  # the same
from rarebit.training.update import Learner, counts_before, like_group, update  # noqa: E402  # the same

ROOT = Path(__file__).resolve().parents[2]
ITEMS, GROUPS = 30, 4
SCHEMA = LogSchema(
    label="click",
    columns=(
        Column(name="user"),
        Column(name="item"),
        Column(name="group"),
        Column(name="tags", kind="multi", separator="|", max_length=2),
        Column(name="price", kind="numeric"),
    ),
    split=Split(kind="order"),
    unknown_share=0.3,
)


def write_day(path, *, seed, items, rows=120):
    """Write a log whose items are these; the group of an item is its number modulo 4."""
    draw = np.random.default_rng(seed)
    item = draw.choice(items, rows)
    frame = {
        "user": [f"u{number}" for number in draw.integers(0, 12, rows)],
        "item": [f"i{number}" for number in item],
        "group": [f"g{number % GROUPS}" for number in item],
        "tags": [f"t{a}|t{b}" for a, b in draw.integers(0, 5, (rows, 2))],
        "price": draw.normal(size=rows),
        "click": (item + draw.integers(0, 3, rows)) % 2,
    }
    pl.DataFrame(frame).write_parquet(path)
    return path


def train(folder, methods="", **training):
    """Return the folder of a run on the first day."""
    log = write_day(folder / "monday.parquet", seed=0, items=range(ITEMS), rows=400)
    rb.prepare(log, folder / "data", schema=SCHEMA)
    settings = rb.RunSettings.from_mapping(
        {
            "model": {"name": "deepfm", "dim": 4, "hidden": [8]},
            "data": {"folder": str(folder / "data")},
            "training": {"epochs": 2, "batch_size": 32, "lr": 0.02, **training},
        }
    )
    if methods:
        [expression] = parse_techniques(methods)
        settings = rb.RunSettings(
            **{**vars(settings), "methods": expression.build([(ITEMS, 4)], 0.5)}
        )
    rb.run(settings, folder=folder / "monday", progress=False, say=lambda _: None)
    return folder / "monday"


@pytest.fixture(scope="module")
def monday(tmp_path_factory):
    return train(tmp_path_factory.mktemp("log"))


def checksums(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_old_ids_score_as_before_and_a_new_id_as_an_unknown_one(monday, tmp_path):
    encoder = encoder_of(rb.load_model(monday))
    log = write_day(tmp_path / "tuesday.parquet", seed=1, items=range(10, ITEMS + 8))
    data = prepare_day(log, tmp_path / "day", like=encoder, growth=Growth())
    changes = changes_of(tmp_path / "day")
    new = torch.from_numpy(changes.columns["item"].new)
    assert len(new) >= 8  # those that came, and values of the first day that were left unknown
    slot = data.schema.slots["item"].start
    is_new = torch.isin(data.ids[:, slot], new.int())
    learner = Learner.open(monday, encoder.fields)
    unknown = data.ids.clone()
    unknown[is_new, slot] = 1
    before = rb.predict(
        learner.model, rb.Dataset(encoder.fields, unknown, data.numeric, data.label)
    )
    finished = rb.predict(
        rb.load_model(monday), rb.Dataset(encoder.fields, unknown, data.numeric, data.label)
    )
    assert torch.equal(before, finished)
    learner.grow(data.schema, changes)
    assert torch.equal(rb.predict(learner.model, data), before)


def test_the_report_is_what_the_models_say(monday, tmp_path):
    log = write_day(tmp_path / "tuesday.parquet", seed=2, items=range(ITEMS))
    result = update(monday, log, tmp_path / "tuesday", progress=False)
    frame = pl.read_parquet(log)
    label = torch.tensor(frame["click"].to_list())
    scored = score_log(rb.load_model(tmp_path / "tuesday"), log)
    assert result.all.after.auc == pytest.approx(scored.metrics.auc)
    before = score_log(rb.load_model(monday), log)
    assert result.all.before.auc == pytest.approx(before.metrics.auc)
    assert result.all.before.positives == int(label.sum())
    new = [field.new for field in result.fields]
    assert (result.new_rows == 0) == (sum(new) == 0)
    assert {field.name for field in result.fields} == {"user", "item", "group", "tags"}
    assert all(field.moved > 0 for field in result.fields)


def test_learning_begins_with_the_model_of_the_day_before(monday, tmp_path):
    """The first batch is scored by the grown model, and all of it when nothing is learned."""
    log = write_day(tmp_path / "tuesday.parquet", seed=3, items=range(ITEMS + 5))
    result = update(monday, log, tmp_path / "tuesday", progress=False)
    encoder = encoder_of(rb.load_model(monday))
    learner = Learner.open(monday, encoder.fields)
    data, changes = (
        rb.Dataset.open(tmp_path / "tuesday" / "data"),
        changes_of(tmp_path / "tuesday" / "data"),
    )
    learner.grow(data.schema, changes)
    start = rb.predict(learner.model, data)
    history = learner.learn(data, progress=False)
    assert torch.allclose(history.scores[:32], start[:32], atol=1e-6)
    assert result.all.learning.auc == auc(history.scores, data.label)
    assert torch.equal(
        rb.predict(learner.model, data), rb.predict(rb.load_model(tmp_path / "tuesday"), data)
    )


def test_the_run_of_the_day_before_is_never_touched(monday, tmp_path):
    before = checksums(monday)
    update(
        monday,
        write_day(tmp_path / "day.parquet", seed=4, items=range(40)),
        tmp_path / "tuesday",
        progress=False,
    )
    assert checksums(monday) == before


@pytest.mark.parametrize(
    "methods",
    [
        *("shrinkage", "tail", "mlet", "pep", "hashing", "low-rank", "multi-embedding"),
        *("quantize", "evidence-coding:size=1/2", "forgetting", "adam-ar"),
        "tail+evidence-coding:size=1/2",
    ],
)
def test_a_run_with_methods_learns_two_more_days(methods, tmp_path):
    run = train(tmp_path, methods)
    for number, name in enumerate(("tuesday", "wednesday")):
        log = write_day(
            tmp_path / f"{name}.parquet", seed=number, items=range(number, ITEMS + 4 * number + 4)
        )
        result = update(run, log, tmp_path / name, progress=False)
        assert result.fields[1].new >= 4
        run = tmp_path / name
        scored = score_log(rb.load_model(run), log)
        assert scored.unknown["item"] == 0
        assert scored.metrics.auc is not None


def test_methods_that_train_in_stages_are_refused(tmp_path):
    run = train(tmp_path, "pruned")
    log = write_day(tmp_path / "day.parquet", seed=1, items=range(40))
    with pytest.raises(SettingsError, match="trains in stages of its own"):
        update(run, log, tmp_path / "tuesday", progress=False)
    assert "pruned" in technique_names()


def rows_by_value(folder):
    """Return the embedding row of each item, by its value."""
    model = rb.load_model(folder)
    encoder = encoder_of(model)
    [table] = [s.table for s in find_sites(model) if s.info.field == "item" and s.info.width == 4]
    values = encoder.values["item"].to_list()
    weight = table(torch.arange(3 + len(values))).detach()
    return {value: weight[3 + place] for place, value in enumerate(values)}, weight[1]


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    st.lists(
        st.lists(st.integers(0, 45), min_size=2, max_size=10, unique=True), min_size=2, max_size=4
    )
)
def test_no_value_ever_has_the_row_of_another(days):
    """Plain SGD moves only the rows of a day: all others stay to the last bit, whatever came, went and was reused."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = train(folder, tables="rowwise", optimizer="sgd")
        rows, _ = rows_by_value(run)
        growth = Growth(drop_after=1, drop_below=30.0, half_life=1.0)
        for number, items in enumerate(days):
            log = write_day(folder / f"{number}.parquet", seed=number, items=items, rows=40)
            result = update(run, log, folder / f"day-{number}", growth=growth, progress=False)
            run = folder / f"day-{number}"
            seen = {f"i{item}" for item in items} & {*pl.read_parquet(log)["item"].to_list()}
            now, _ = rows_by_value(run)
            assert seen <= now.keys()
            for value in now.keys() - seen:
                if not value.startswith("\uffff"):
                    assert torch.equal(now[value], rows[value]), value
            dropped = rows.keys() - now.keys()
            assert (
                len([v for v in dropped if not v.startswith("\uffff")]) == result.fields[1].dropped
            )
            rows = now


def test_a_reused_row_starts_as_an_unknown_value_does(monday, tmp_path):
    growth = Growth(drop_after=1, drop_below=1000.0)
    tuesday = write_day(tmp_path / "tuesday.parquet", seed=5, items=range(10))
    result = update(monday, tuesday, tmp_path / "tuesday", growth=growth, progress=False)
    assert result.fields[1].dropped > 10
    encoder = encoder_of(rb.load_model(tmp_path / "tuesday"))
    log = write_day(tmp_path / "wednesday.parquet", seed=6, items=[*range(10), *range(50, 60)])
    data = prepare_day(log, tmp_path / "day", like=encoder, growth=growth)
    changes = changes_of(tmp_path / "day")
    reset = changes.reset["item"].tolist()
    assert len(reset) == 10
    learner = Learner.open(tmp_path / "tuesday", encoder.fields)
    learner.grow(data.schema, changes)
    for site in find_sites(learner.model):
        if site.info.field == "item":
            rows = site.table(torch.tensor([1, *reset]))
            assert torch.equal(rows[1:], rows[:1].expand(10, -1))
            for parameter in site.table.parameters():
                owner, place = _place(parameter, learner.optimizer.state)
                moments = learner.optimizer.state[owner]["exp_avg_sq"][place]
                assert not moments[reset].any()
                assert moments[3:13].any()  # those that stayed


def test_a_new_id_starts_like_its_group(monday, tmp_path):
    encoder = encoder_of(rb.load_model(monday))
    log = write_day(tmp_path / "tuesday.parquet", seed=7, items=range(20, ITEMS + 10))
    data = prepare_day(log, tmp_path / "day", like=encoder, growth=Growth())
    changes = changes_of(tmp_path / "day")
    rows = torch.randn(encoder.fields["item"].rows, 3)
    found = like_group(data, changes, "item", "group")(rows)
    items, groups = (data.ids[:, data.schema.slots[n].start].tolist() for n in ("item", "group"))
    new = changes.columns["item"].new
    for place, one in enumerate(new):
        [group] = {g for i, g in zip(items, groups, strict=True) if i == one}
        known = [i for i, g in zip(items, groups, strict=True) if g == group and i not in new]
        wanted = torch.stack([rows[i] for i in known]).mean(0) if known else rows[1]
        assert torch.allclose(found[place], wanted, atol=1e-5)


def test_counts_before_a_day_are_those_of_the_log(monday, tmp_path):
    encoder = encoder_of(rb.load_model(monday))
    schema = encoder.fields
    counts = counts_before(encoder, schema)
    train = rb.Dataset.open(monday.parent / "data").splits.train.counts()
    assert counts["item"][3:].tolist() == train["item"][3:].tolist()
    assert counts["item"][:3].tolist() == [0, 0, 0]


@pytest.mark.slow
def test_deltas_of_the_days_make_the_exported_files_and_their_scores(monday, tmp_path):
    """Values come, go, and get the ids of others: the file that is made of deltas scores as the run does."""
    pytest.importorskip(
        "onnxruntime", reason="capability: package onnxruntime: it is not installed"
    )
    from rarebit.export.delta import apply_delta
    from rarebit.export.raw import FileScorer

    rb.export(rb.load_model(monday), tmp_path / "0.onnx")
    run, growth = monday, Growth(drop_after=1, drop_below=1000.0)
    for day, items in enumerate((range(20), [*range(10), *range(50, 65)], range(40, 70)), 1):
        log = write_day(tmp_path / f"{day}.parquet", seed=day, items=items)
        result = update(run, log, tmp_path / f"day-{day}", growth=growth, progress=False)
        assert result.fields[1].dropped > 0
        assert (result.fields[1].reset > 0) == (day > 1)
        run, new = tmp_path / f"day-{day}", tmp_path / f"{day}.onnx"
        rb.export(rb.load_model(run), tmp_path / f"{day}.delta", since=tmp_path / f"{day - 1}.onnx")
        apply_delta(tmp_path / f"{day - 1}.onnx", tmp_path / f"{day}.delta", new)
        everything = write_day(tmp_path / "all.parquet", seed=9, items=range(80), rows=500)
        of_file, of_run = (
            score_log(model, everything, out=tmp_path / "scores.csv")
            and pl.read_csv(tmp_path / "scores.csv").to_numpy()
            for model in (FileScorer(new), rb.load_model(run))
        )
        assert np.abs(of_file - of_run).max() < 1e-6


KILLED = """
import os, signal, sys
from rarebit.training.fit import Silence
from rarebit.training.update import update

class Killer(Silence):
    steps = 0
    def advance(self, rows):
        Killer.steps += rows > 0
        if Killer.steps == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)

update(sys.argv[1], sys.argv[2], sys.argv[3], resume=sys.argv[5] == "resume", progress=Killer(), passes=2)
"""


@pytest.mark.slow
def test_a_killed_update_goes_on_to_the_same_bits(tmp_path):
    run = train(tmp_path, "tail", checkpoint_minutes=1e-6)
    log = write_day(tmp_path / "day.parquet", seed=8, items=range(50), rows=2000)
    update(run, log, tmp_path / "whole", progress=False, passes=2)

    def start(steps, how):
        words = [run, log, tmp_path / "killed", steps, how]
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *map(str, words)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            check=False,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    assert start(3, "new")[0] == -9
    assert start(4, "resume")[0] == -9
    code, errors = start(10_000, "resume")
    assert code == 0, errors
    one, other = (rb.load_model(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_wrong_arguments_are_named_and_leave_nothing(monday, tmp_path):
    log = write_day(tmp_path / "day.parquet", seed=9, items=range(40))
    out = tmp_path / "tuesday"
    for options, error, message in [
        ({"start": "mean"}, SettingsError, "start must be unknown, prior or noise, got 'mean'"),
        ({"passes": 0}, SettingsError, "passes must be at least 1"),
        ({"like": {"item": "grup"}}, DataError, "'grup' is no field .* did you mean 'group'"),
        ({"like": {"tags": "group"}}, DataError, "'tags' is no field with one id per row"),
    ]:
        with pytest.raises(error, match=message):
            update(monday, log, out, progress=False, **options)
        assert not out.exists()
    with pytest.raises(DataError, match="does not exist"):
        update(monday, tmp_path / "nope.parquet", out, progress=False)
    with pytest.raises(ModelFileError, match="holds no model"):
        update(tmp_path, log, out, progress=False)
    update(monday, log, out, progress=False)
    with pytest.raises(ModelFileError, match="holds a run already; resume it"):
        update(monday, log, out, progress=False)


def test_an_average_without_validation_rows_cannot_go_on(tmp_path):
    log = write_day(tmp_path / "monday.parquet", seed=0, items=range(ITEMS), rows=400)
    split = Split(kind="order", shares=(0.9, 0.0, 0.1))
    rb.prepare(log, tmp_path / "data", schema=SCHEMA, split=split)
    values = {"model": {"name": "fm", "dim": 4}, "data": {"folder": str(tmp_path / "data")}}
    values["training"] = {"epochs": 1, "ema_decay": 0.9}
    settings = rb.RunSettings.from_mapping(values)
    rb.run(settings, folder=tmp_path / "run", progress=False, say=lambda _: None)
    with pytest.raises(CheckpointError, match="had no validation rows, so it does not hold"):
        update(tmp_path / "run", log, tmp_path / "tuesday", progress=False)


def test_counts_of_tables_go_on_from_those_of_the_training_rows(tmp_path):
    run = train(tmp_path, "shrinkage")
    log = write_day(tmp_path / "day.parquet", seed=1, items=range(ITEMS))
    encoder = encoder_of(rb.load_model(run))
    data = prepare_day(log, tmp_path / "day", like=encoder, growth=Growth())
    before = Learner.open(run, encoder.fields)
    counts = [m.counts.sum() for m in before.model.modules() if hasattr(m, "keep_counting_")]
    before.grow(data.schema, changes_of(tmp_path / "day"))
    before.learn(data, progress=False)
    after = [m.counts.sum() for m in before.model.modules() if hasattr(m, "keep_counting_")]
    lookups = data.ids.numel()  # every slot, padding included
    assert counts
    assert [int(new - old) for new, old in zip(after, counts, strict=True)] == [lookups] * len(
        counts
    )


def test_codes_of_a_day_know_the_counts_of_all_days(tmp_path):
    """Items that the day does not have were seen before, so their rows keep most of their bits."""
    found = []
    for methods in ("", "evidence-coding:size=1/3"):
        folder = tmp_path / (methods[:8] or "plain")
        folder.mkdir()
        run = train(folder, methods)
        log = write_day(folder / "day.parquet", seed=1, items=range(3))
        update(run, log, folder / "tuesday", progress=False)
        rows, _ = rows_by_value(folder / "tuesday")
        absent = sorted(rows.keys() - {"i0", "i1", "i2"})
        found.append(torch.stack([rows[value] for value in absent]))
    plain, coded = found
    assert float((coded - plain).norm() / plain.norm()) < 0.5


def test_a_run_without_checkpoints_cannot_go_on(tmp_path):
    run = train(tmp_path)
    (run / "checkpoints").rename(run / "gone")
    log = write_day(tmp_path / "day.parquet", seed=9, items=range(40))
    with pytest.raises(ModelFileError, match="has no checkpoint to go on from"):
        update(run, log, tmp_path / "tuesday", progress=False)
