"""Every command that a command prints is called as it is printed."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rarebit.cli import options as opt
from rarebit.cli.demo import NEXT
from rarebit.diagnosis.diagnose import diagnose_file
from rarebit.errors import ModelFileError
from rarebit.study.plan import StudyPlan
from rarebit.training.settings import RunSettings

TINY = ["--model", "fm", "--set", "model.dim=2", "--epochs", "1"]


def printed(text):
    """Return the words of all `rarebit` commands in a text, without the program's name."""
    lines = re.findall(
        r"(?:^  |[tT]o resume: |first: |\()(?:\S*/)?rarebit ((?:data )?[a-z]+(?: .*)?)",
        text,
        re.MULTILINE,
    )
    return [shlex.split(line.partition("), or")[0]) for line in lines]


@pytest.fixture
def log(call):
    """A raw log of a name that a shell would split, in the folder of the commands."""
    with Path("my log.csv").open("w", newline="") as file:
        rows = ([f"u{n % 9}", f"i{n % 7}", n % 5 % 2] for n in range(400))
        csv.writer(file).writerows([["user", "item", "click"], *rows])
    return "my log.csv"


def test_from_a_raw_log_to_scores(call, log):
    code, _, err = call("train", "--data", log)
    assert code == 2
    [prepare] = printed(err)
    assert prepare == ["data", "prepare", log, "--label", "LABEL", "--out", "data/my log"]
    code, out, err = call(*[word.replace("LABEL", "click") for word in prepare])
    assert code == 0, err
    [train] = printed(out)
    assert train == ["train", "--data", "data/my log"]
    code, out, err = call(*train, *TINY, "--out", "my run")
    assert code == 0, err
    [predict] = printed(out)
    code, out, err = call(*predict)
    assert code == 0, err
    assert "fm from my run, test split" in out
    code, _, err = call(*train, *TINY, "--out", "my run")
    assert code == 2
    [resume] = printed(err)
    assert resume == ["train", "--resume", "my run"]
    assert call(*resume)[0] == 0
    [weights] = Path("my run").glob("*.safetensors")
    code, out, err = call("diagnose", weights)
    assert code == 0, err
    [fields] = printed(out)
    assert fields == ["diagnose", "my run"]
    assert call(*fields)[0] == 0


def test_from_a_schema_to_a_prepared_log(call, log):
    code, out, err = call("data", "schema", log, "--label", "click", "--out", "my schema.toml")
    assert code == 0, err
    [prepare] = printed(out)
    code, _, err = call(*prepare)
    assert code == 0, err
    assert Path("data/my log/manifest.json").exists()


SETTINGS = [
    {},
    {"model": {"name": "dcn_v2", "dim": 4, "hidden": [8, 8]}, "training": {"lr": 1e-20}},
    {"data": {"folder": "my data"}, "training": {"tables": "rowwise", "seed": 7, "clip_norm": 1.0}},
    {"data": {"rows": 1200, "seed": 3, "preset": "criteo"}, "training": {"patience": 9}},
]


@pytest.mark.parametrize("values", SETTINGS)
def test_the_settings_of_a_run_become_options_of_compare(values):
    settings = RunSettings.from_mapping(values)
    words = opt.run_words(settings)
    options = dict(zip(words[::2], words[1::2], strict=True))
    sections = {"methods": "baseline", "model": options["--model"], "data": options["--data"]}
    sections["training"] = {}
    tables = {name: {} for name in ("model", "data", "training")}
    for option, word in zip(words[::2], words[1::2], strict=True):
        if option == "--set":
            section, name, value = opt.parse_assignment(word)
            tables[section][name] = value
    model = {"name": options["--model"], **tables["model"]}
    place = "source" if options["--data"] == "synthetic" else "folder"
    plan = StudyPlan.from_mapping(
        {
            "methods": "baseline",
            "model": model,
            "data": {place: options["--data"], **tables["data"]},
            "training": tables["training"],
        }
    )
    found, expected = plan.runs[0].to_mapping(), settings.to_mapping()
    if expected["training"]["patience"] == "auto":  # a study gives all variants the same
        expected["training"]["patience"] = 2
    expected["training"]["seed"] = 0  # a study has its own
    assert found == expected


@pytest.mark.slow
def test_pruning_is_compared_on_the_same_log_with_the_same_model(call, log):
    assert call("data", "prepare", log, "--label", "click", "--out", "my data")[0] == 0
    words = ["--data", "my data", *TINY, "--batch-size", "64", "--methods", "mlet:inner_dim=4"]
    words += [
        "--prune-epochs",
        "2",
        "--seed",
        "3",
        "--budgets",
        "30,20",
        "--no-plots",
        "--device",
        "cpu",
    ]
    code, out, err = call("prune", *words, "--out", "my pruned")
    assert code == 0, err
    compare, predict = printed(out)
    assert call(*predict)[0] == 0
    code, out, err = call(*compare)
    assert code == 0, err
    assert "fm on my data" in out
    [show] = printed(out)
    plan = json.loads((Path(show[-1]) / "study.json").read_text())
    assert plan["data"][0]["folder"] == "my data"
    assert plan["model"] == [{"name": "fm", "dim": 2}]
    assert (plan["training"]["epochs"], plan["training"]["batch_size"]) == (1, 64)
    assert plan["methods"] == ["baseline", "mlet:inner_dim=4+pruned:keep=20:epochs=2"]
    assert call(*show)[0] == 0


@pytest.mark.slow
def test_the_demo_prints_commands_that_work(call, log):
    code, out, err = call("demo", "--rows", "1500", "--seeds", "2")
    assert code == 0, err
    Path(log).rename("clicks.csv")
    found = printed(out)
    assert [shlex.join(words) for words in found] == [
        c for several in NEXT.values() for c in several
    ]
    for words in found:
        code, _, err = call(*words)
        assert code == 0, err


@pytest.mark.slow
def test_a_state_dict_is_converted_and_diagnosed(call):
    model = nn.ModuleDict({"user": nn.Embedding(400, 8), "tied": nn.Linear(8, 400)})
    model["tied"].weight = model["user"].weight
    torch.save(model.state_dict(), "my model.pt")
    code, _, err = call("diagnose", "my model.pt")
    assert code == 2
    python, *words = shlex.split(err.split("torch.save wrote with: ")[1])
    assert python == "python"
    subprocess.run([sys.executable, *words], check=True)
    code, out, err = call("diagnose", "my model.safetensors")
    assert code == 0, err
    assert "user" in out


def test_a_pickle_is_named_with_its_conversion(tmp_path):
    torch.save({"user": torch.zeros(9, 2)}, tmp_path / "weights")
    with pytest.raises(ModelFileError, match=r"convert a state dict .* python -c 'import torch"):
        diagnose_file(tmp_path / "weights")
