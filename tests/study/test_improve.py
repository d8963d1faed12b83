"""Improve: what a log asks for, a plan that is fixed first, a race that stops nothing too early, and an honest answer."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from capabilities import slow_after
from torch import nn

import rarebit as rb
from rarebit.data.synthetic import generate
from rarebit.errors import SettingsError, StudyError
from rarebit.report.report import page_of
from rarebit.study.improve import (
    LADDER,
    Facts,
    lost_by_coding,
    recipes,
    replanned,
    rounds_of,
    runs_of,
)
from rarebit.study.pool import StudyProgress
from rarebit.study.results import CellResult, VariantResult
from rarebit.study.statistics import judge

TINY = {"epochs": 6, "batch_size": 256, "lr": 0.01}


def log_of(rows, fields, seed=0):
    """A log whose fields have so many ids, all equally frequent."""
    generator = torch.Generator().manual_seed(seed)
    ids = {
        f"f{place}": torch.randint(num, (rows,), generator=generator).tolist()
        for place, num in enumerate(fields)
    }
    return rb.Dataset.from_columns(
        ids, label=torch.randint(2, (rows,), generator=generator).tolist()
    )


@pytest.mark.parametrize(
    ("rows", "fields", "training", "expected"),
    [
        (6000, [2000, 5], {"epochs": 60}, ["tail", "mlet:init=keep+tail"]),
        (6000, [20, 5], {"epochs": 60}, []),  # no tail
        (6000, [3], {"epochs": 60}, []),  # few ids
        (6000, [2000, 5], {"epochs": 1}, []),  # one epoch
        (6000, [2000, 5], {"epochs": 4}, ["shrinkage"]),  # too few to forget and relearn
        (6000, [2000, 5], {"epochs": 60, "one_pass": True}, []),
        (6000, [2000, *[5] * 25], {"epochs": 60}, ["tail"]),  # wide: a product per field is dear
        (500, [300, 5], {"epochs": 60}, []),  # tiny
    ],
)  # fmt: skip
def test_a_log_gets_the_recipes_that_fit_it(rows, fields, training, expected):
    facts = Facts.of(log_of(rows, fields), rb.Training(**training))
    lacks = {one.methods: one.lacks(facts) for one in recipes()}
    assert [name for name, why in lacks.items() if not why] == expected
    assert all(re.search(r"is .+, and it needs ", why) for why in lacks.values() if why)


def test_facts_are_counted():
    ids = [0] * 60 + [1] * 30 + [*range(2, 12)]  # 10 of 100 lookups are of ids seen once
    data = rb.Dataset.from_columns({"item": ids, "hour": [0] * 100}, label=[0, 1] * 50)
    facts = Facts.of(data, rb.Training())
    assert (facts.rows, facts.fields, facts.tail, facts.tail_field) == (100, 2, 0.1, "item")
    assert facts.ids == 13
    assert facts.rare_rows == pytest.approx(10 / 13)
    assert facts.largest[0] == ("item", pytest.approx(12 / 13))


@pytest.mark.parametrize("methods", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("trials", [1, 3, 12])
def test_a_race_ends_with_one_method_and_all_settings(methods, trials):
    rounds = rounds_of(methods, trials)
    assert rounds[-1] == (min(methods, 1), trials)
    assert rounds[0].methods == methods
    for one, after in itertools.pairwise(rounds):
        assert after.methods == math.ceil(one.methods / 2)
        assert after.trials >= one.trials
    counts = [runs_of(methods, t, s) for t, s in LADDER]
    assert counts == sorted(counts, reverse=True)


def plan_of(methods, trials, seeds):
    rounds = [one._asdict() for one in rounds_of(methods, trials)]
    return {
        "methods": ["baseline", *"abcdef"[:methods]],
        "trials": trials,
        "seeds": seeds,
        "rounds": rounds,
    }


@pytest.mark.parametrize(
    ("plan", "done", "room", "expected"),
    [
        (plan_of(1, 1, 3), 1, 100, (12, 5)),  # runs are fast: as many as ever
        (plan_of(1, 1, 3), 1, runs_of(1, 2, 5), (2, 5)),
        (plan_of(1, 1, 3), 1, runs_of(1, 1, 4), (1, 4)),
        (plan_of(1, 12, 5), 1, runs_of(1, 4, 5), (4, 5)),  # runs are slow
        (plan_of(1, 12, 5), 1, 0, (1, 3)),
        (plan_of(1, 4, 5), 2, 100, (4, 5)),  # both sides have had their settings
        (plan_of(1, 4, 5), 2, runs_of(1, 4, 3), (4, 3)),
        (plan_of(3, 9, 5), 2, 0, (3, 3)),  # three settings have been tried
        (plan_of(0, 1, 3), 1, 100, (12, 5)),
    ],
)
def test_a_plan_becomes_what_fits_once_it_is_known_how_long_runs_take(plan, done, room, expected):
    found = replanned(plan, done, lambda runs, seeds: runs <= room)
    assert (found["trials"], found["seeds"]) == expected
    assert found["rounds"][:done] == plan["rounds"][:done]
    assert found["rounds"][-1]["trials"] == expected[0]
    assert found["rounds"][-1]["methods"] <= 1
    counts = [one["trials"] for one in found["rounds"]]
    assert counts == sorted(counts)


class Own(nn.Module):
    """A model of one's own: two tables and a layer."""

    def __init__(self, schema):
        super().__init__()
        self.slots = schema.slots
        self.names = [field.name for field in schema.table_fields if field.name in ("user", "item")]
        rows = {field.name: field.rows for field in schema.table_fields}
        self.tables = nn.ModuleDict({name: nn.Embedding(rows[name], 4) for name in self.names})
        self.out = nn.Linear(8, 1)

    def forward(self, batch):
        rows = [
            self.tables[name](batch.ids[:, self.slots[name]].long().flatten())
            for name in self.names
        ]
        return self.out(torch.cat(rows, dim=1)).squeeze(1)


def own(folder, *, shuffled=None, progress=False, rows=2600, **options):
    """Improve a small model of one's own on a generated log, with labels in another order if asked."""
    splits = generate(rb.data.SyntheticLog(rows=rows, seed=shuffled or 0))
    if shuffled is not None:
        generator = torch.Generator().manual_seed(shuffled)
        for part in splits:
            part.label = part.label[torch.randperm(len(part), generator=generator)]
    lines = []
    found = rb.improve(
        lambda: Own(splits.train.schema), *splits, folder=folder, device="cpu", progress=progress,
        say=lines.append, **({"trials": 1, "seeds": 2, "training": TINY} | options),
    )  # fmt: skip
    return found, lines


def stored_in(folder):
    return json.loads((Path(folder) / "improvement.json").read_text("utf-8"))


class Watching(StudyProgress):
    """Keeps what is in the folder when the first run starts."""

    def __init__(self, folder):
        self.folder, self.seen = folder, None

    def start(self, name):
        self.seen = self.seen or json.loads((self.folder / "plan.json").read_text("utf-8"))


def test_a_model_of_ones_own_is_improved_by_a_plan_that_was_fixed_first(tmp_path):
    watching = Watching(tmp_path)
    found, lines = own(tmp_path, progress=watching, training={**TINY, "epochs": 8}, trials=2)
    stored = stored_in(tmp_path)["improvement"]
    assert watching.seen == json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert {name: value for name, value in watching.seen.items() if name != "asked"} == stored[
        "plan"
    ]
    assert any(
        line.startswith("Plan: 2 settings each, then 2 paired seeds from 0") for line in lines
    )
    assert lines.index("tail: worth trying.") < len(lines) - 1
    # what was raced, and what met the test rows
    assert {one["methods"] for one in stored["race"]} == {"baseline", "tail", "mlet:init=keep+tail"}
    assert all(one["trials"] <= 2 for one in stored["race"])
    runs = [
        json.loads(p.read_text("utf-8"))
        for p in (tmp_path / "study" / "runs").glob("*/result.json")
    ]
    assert len(runs) <= watching.seen["runs"]
    for one in runs:  # nothing is stopped before its patience
        training, result = one["settings"]["training"], one["result"]
        waited = result["epochs"] - result["best_epoch"]
        assert training["patience"] == 6
        assert waited == 6 or result["epochs"] == training["epochs"]
    # the answer says what the figures say
    assert found.verdict == stored["verdict"]
    [cell] = found.result.cells
    compared = judge({one.name: cell.differences(one, "auc") for one in cell.methods})
    name = next((name for name in compared if "tail" in name), None)
    if found.outcome == "better":
        assert f"{compared[name].mean:.4f}" in found.verdict
        assert compared[name].verdict == "helps"
        assert cell.rows[name].low > 0
    else:
        assert found.verdict.startswith("Keep what you have")
    assert all(one.control == "tuned" for one in cell.methods)
    assert {run.seed for run in cell.variant("tuned").runs} == {0, 1}
    page = page_of(tmp_path).replace("&#x27;", "'")
    assert found.verdict in page
    assert any(one.edge for one in cell.variants), "both searches were short"
    for doubt in ("cut off", "edge of the grid", "unequal start"):
        assert f">{doubt}<" not in page, "what the page draws contradicts its first line"


@pytest.mark.parametrize(
    ("whole", "coded", "said"), [(0.757, 0.7555, True), (0.757, 0.7565, False), (0.749, 0.7, False)]
)
def test_what_a_method_loses_by_coding_alone_is_reported(record, whole, coded, said):
    sides = [
        VariantResult(name=name, control=None, settings={}, trials=(), runs=tuple(runs))
        for name, runs in {
            "baseline": [record(seed, auc=0.75 + seed / 100) for seed in range(2)],
            "tail": [record(seed, auc=whole + seed / 100) for seed in range(2)],
            "tail+evidence-coding": [record(seed, auc=coded + seed / 100) for seed in range(3)],
        }.items()
    ]
    cell = CellResult(
        model="fm",
        data="clicks",
        checksum="abc",
        variants=tuple(sides),
        ceiling=None,
        rows={},
        missing=(),
    )
    found = lost_by_coding(cell, *sides)
    assert len(found) == said
    assert not said or found[0].startswith(
        "With whole tables tail differs from plain ones by +0.0070,"
    )


def test_coded_models_are_what_is_compared_and_shipped(tmp_path):
    found, _ = own(
        tmp_path, size="1/4", training={**TINY, "epochs": 1}
    )  # one epoch: nothing to try
    [cell] = found.result.cells
    plain, coded = cell.variant("baseline"), cell.variant("evidence-coding:size=1/4")
    for one, other in zip(plain.runs, coded.runs, strict=True):
        assert other.table_bytes <= one.table_bytes / 4
        assert other.parameters < one.parameters or other.table_bytes < one.table_bytes
    if found.outcome == "smaller":
        assert isinstance(found.model, Own)
        bytes_ = sum(table.num_bytes for table in rb.find_tables(found.model))
        assert bytes_ == coded.runs[0].table_bytes
        splits = generate(rb.data.SyntheticLog(rows=2600))
        best = max(coded.runs, key=lambda run: run.valid_auc)
        assert rb.evaluate(found.model, splits.test).auc == pytest.approx(best.auc, abs=1e-6)
        again = rb.load_model(tmp_path, into=Own(splits.train.schema))
        assert rb.evaluate(again, splits.test).auc == pytest.approx(best.auc, abs=1e-6)
    else:
        assert found.outcome == "keep"
        assert found.model is None


@pytest.mark.slow
def test_a_call_whose_time_is_over_proves_nothing_and_goes_on(tmp_path):
    found, _ = own(tmp_path / "one", minutes=1e-6)
    assert (found.outcome, found.model) == ("stopped", None)
    assert "the time was over before anything was proven" in found.verdict
    assert "stopped" in {one["fate"] for one in stored_in(tmp_path / "one")["improvement"]["race"]}
    assert "Keep what you have" in page_of(tmp_path / "one")
    found, _ = own(tmp_path / "one")
    other, _ = own(tmp_path / "two")
    assert found.verdict == other.verdict
    ours, theirs = (stored_in(tmp_path / name)["study"] for name in ("one", "two"))
    for values in (ours, theirs):
        for side in values["cells"][0]["sides"]:
            for run in side["runs"]:
                del run["microseconds_a_row"]
    assert ours == theirs
    assert not [*tmp_path.glob("*/study/runs/*/model")]  # models that nobody needs
    again, lines = own(tmp_path / "two")  # finished: nothing is run
    assert (again.verdict, lines) == (other.verdict, [])


def test_what_cannot_be_improved_is_refused(tmp_path):
    found, _ = own(tmp_path / "one", minutes=1e-6)
    assert (found.outcome, found.model) == ("stopped", None)
    with pytest.raises(StudyError, match="holds an improvement of other settings; choose another"):
        own(tmp_path / "one", size="1/2")
    with pytest.raises(SettingsError, match="size must be like"):
        own(tmp_path / "two", size="small")
    with pytest.raises(SettingsError, match="minutes must be above 0"):
        own(tmp_path / "two", minutes=0)
    with pytest.raises(SettingsError, match="a model of your own needs its data sets"):
        rb.improve(lambda: nn.Linear(2, 1), folder=tmp_path / "two")
    with pytest.raises(SettingsError, match="give data=, or build, train"):
        rb.improve(folder=tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("seed", slow_after(range(1, 21)))
def test_shuffled_labels_are_no_reason_to_change_anything(seed, tmp_path):
    found, _ = own(tmp_path, shuffled=seed, seeds=3, training={**TINY, "epochs": 8})
    assert found.outcome == "keep", found.verdict
    assert found.verdict.startswith(
        "Keep what you have: nothing that was tried is proven to rank better than"
    )
    assert found.model is None


COMMAND = [
    "improve", "--data", "synthetic", "--set", "data.rows=6000", "--model", "fm", "--set", "model.dim=4",
    "--set", "training.batch_size=256", "--set", "training.epochs=12", "--size", "1/4", "--trials", "1", "--seeds", "2",
    "--workers", "1", "--device", "cpu", "--out", "improved",
]  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_leaves_what_is_done_and_the_same_command_goes_on(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1])}
    command = [sys.executable, "-m", "rarebit", *COMMAND]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stderr:
            if line.startswith("1 of "):
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "what is proven so far is in 'improved'" in err
    assert (tmp_path / "improved" / "report.html").exists()
    done = len([*(tmp_path / "improved/study/runs").glob("*/result.json")])
    assert done >= 1
    begin = time.monotonic()
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - begin < 300
    assert re.search(r"\d+ runs, [1-9]\d* already finished", ended.stderr)
    stored = stored_in(tmp_path / "improved")["improvement"]
    assert stored["verdict"] in " ".join(ended.stdout.split())
    assert "Page: improved/report.html" in ended.stdout
    if stored["outcome"] != "keep":
        assert (tmp_path / "improved" / "model.onnx").exists()
        assert "rarebit predict --model improved" in ended.stdout.replace(
            str(Path(sys.executable).with_name("rarebit")), "rarebit"
        )
