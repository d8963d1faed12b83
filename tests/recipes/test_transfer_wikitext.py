"""The study of recipes/text: training, perplexity, arms, and going on after a stop."""

import dataclasses
import doctest
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_cuda
from torch import nn
from torch.nn import functional as F

from rarebit.errors import DataError, NotFiniteError, SettingsError
from rarebit.training.checkpoints import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "text"
HELPERS = ("_arms", "_language_model", "_recorded", "_runs", "_text", "_training")


def load():
    spec = importlib.util.spec_from_file_location(
        "recipe_language_model", FOLDER / "language_model.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
wikitext = load()
arms, language_model, recorded, runs, text_of, training = (
    sys.modules.pop(name) for name in HELPERS
)
sys.path.remove(str(FOLDER))

SIZES, SCHEDULE = wikitext.SMALL_SIZES, wikitext.SMALL_SCHEDULE
SHORT = dataclasses.replace(SCHEDULE, epochs=1, batch_size=8, length=40)
PAPER = dataclasses.replace(wikitext.SMALL_PAPER, epochs=5, batch_size=8, trigger=1, lr=30.0)


@pytest.fixture(scope="module")
def text():
    return text_of.make_text(lines=24, length=60)


def started(text, arm, *, schedule=SHORT, **settings):
    return training.LanguageTraining(
        text, arms.ARMS[arm], sizes=SIZES, schedule=schedule, **settings
    )


def trained(made, steps=None):
    """Train to the end, or so many steps."""
    while made.step != steps and not made.train_step(lambda line: None):
        pass
    return made


def test_examples_of_the_helpers():
    for module in (text_of, training, wikitext):
        found = doctest.testmod(module)
        assert found.attempted >= 1
        assert found.failed == 0


def test_columns_hold_the_text_and_each_word_is_asked_once():
    tokens = training.columns(torch.arange(50), 4)  # (12, 4)
    assert torch.equal(tokens[:, 1], torch.arange(12, 24))
    asked = []
    for start in range(0, len(tokens) - 1, 5):
        inputs, targets = training.batch_at(tokens, start, 5)
        assert torch.equal(inputs + 1, targets)
        asked += targets[:, 0].tolist()
    assert asked == list(range(1, 12))


def test_the_rate_rises_and_falls():
    schedule = dataclasses.replace(SCHEDULE, lr=8.0, warm_up=0.2)
    rates = [schedule.rate(step, 10, 70) for step in range(10)]
    assert rates[:3] == [4.0, 8.0, 8.0]
    assert rates[6] == pytest.approx(4.0)
    assert rates[9] == pytest.approx(4.0 * (1 + math.cos(math.pi * 7 / 8)))


def test_the_papers_batches_are_of_a_random_length_and_miss_no_word():
    schedule = training.PaperSchedule(epochs=3)
    epochs = schedule.cuts(26_000, seed=4)
    assert epochs == schedule.cuts(26_000, seed=4) != schedule.cuts(26_000, seed=5)
    assert epochs[0] != epochs[1]
    for cuts in epochs:
        starts, lengths = zip(*cuts, strict=True)
        assert list(starts) == [sum(lengths[:i]) for i in range(len(starts))]
        assert 26_000 - 2 <= sum(lengths) <= 26_000 - 1  # the last word is only asked for
        assert min(lengths) >= 2
    lengths = torch.tensor([length for cuts in epochs for _, length in cuts[:-1]]).double()
    long = lengths[lengths > 52]
    assert 0.9 < len(long) / len(lengths) < 0.99
    assert 69 < float(long.mean()) < 70  # cut off after the point
    assert 4.5 < float(long.std()) < 5.5
    assert schedule.rate(3, 9, 35) == 15.0


def test_averaging_starts_after_an_epoch_worse_than_the_best_but_the_last_five():
    schedule = training.PaperSchedule()
    falling = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert not schedule.starts_averaging([*falling, 8.9])
    assert schedule.starts_averaging([*falling, 9.1])
    assert not schedule.starts_averaging([*falling[1:], 9.1])  # too few
    assert schedule.starts_averaging([2.0, *falling, 2.1])


def test_perplexity_is_that_of_a_loop_over_words(text):
    made = started(text, "baseline")
    model, tokens = made.model.eval(), made.valid
    losses = {"head": [], "tail": []}
    with torch.no_grad():
        logits = model(tokens, model.start(tokens.shape[1])).logits.double()
    for place in range(len(tokens) - 1):
        for column in range(tokens.shape[1]):
            target = int(tokens[place + 1, column])
            loss = logits[place, column].logsumexp(0) - logits[place, column, target]
            losses["head" if made.is_head[target] else "tail"].append(float(loss))
    found = training.perplexities(model, tokens, made.is_head, 7)
    every = losses["head"] + losses["tail"]
    assert found["all"] == pytest.approx(math.exp(sum(every) / len(every)), rel=1e-5)
    for side, values in losses.items():
        assert found[side] == pytest.approx(math.exp(sum(values) / len(values)), rel=1e-5)


@pytest.mark.slow
def test_the_model_learns_more_than_how_frequent_words_are():
    text = text_of.make_text()
    chance = text.counts / text.counts.sum()
    unigram = float(chance[text.test].log().mean().neg().exp())
    result = trained(started(text, "adversarial-lexico", schedule=SCHEDULE)).result()
    assert result["test"]["all"] < 0.6 * unigram
    ledger = result["ledger"]["tables"]["embedding"]
    assert result["ledger"]["steps"] == ledger["steps"] > 100
    assert ledger["rows"] > 0


@pytest.mark.parametrize("arm", ["cosreg-sum", "adversarial-sum"])
def test_a_sum_without_weight_is_the_baseline(text, arm):
    ours = trained(started(text, arm, scale=0.0)).model.state_dict()
    theirs = trained(started(text, "baseline")).model.state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    other = trained(started(text, arm, scale=100.0)).model.state_dict()
    assert not torch.allclose(other["embedding.weight"], theirs["embedding.weight"])


def test_only_seeds_decide_what_a_run_starts_from(text):
    first, second = (started(text, arm, seed=3) for arm in ("baseline", "cosreg-lexico"))
    other = started(text, "baseline", seed=4)
    assert torch.equal(first.model.embedding.weight, second.model.embedding.weight)
    assert not torch.equal(first.model.embedding.weight, other.model.embedding.weight)


ADAM = dataclasses.replace(SHORT, epochs=3, length=20)


# the average starts after the third epoch, 22 steps
@pytest.mark.parametrize(("schedule", "stop"), [(ADAM, 1), (ADAM, 12), (PAPER, 20), (PAPER, 33)])
def test_a_run_that_was_stopped_goes_on_to_the_bit(text, tmp_path, schedule, stop):
    whole = trained(started(text, "adversarial-lexico", schedule=schedule)).result()
    made = trained(started(text, "adversarial-lexico", schedule=schedule), stop)
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.write("1", made.state())
    torch.manual_seed(99)
    again = started(text, "adversarial-lexico", schedule=schedule, seed=0)
    torch.rand(7)
    again.load(checkpoints.newest().state)
    assert again.step == stop
    result = trained(again).result()
    for part in ("best_epoch", "valid", "test", "history", "ledger"):
        assert result[part] == whole[part], part


def test_training_is_a_plain_loop(text):
    dropouts = [name for name in vars(SIZES) if "drop" in name]
    sizes = dataclasses.replace(SIZES, **dict.fromkeys(dropouts, 0.0))
    schedule = dataclasses.replace(SHORT, epochs=2, length=30)
    made = training.LanguageTraining(text, arms.ARMS["baseline"], sizes=sizes, schedule=schedule)
    torch.manual_seed(0)
    model = language_model.LanguageModel(len(text.counts), sizes)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=schedule.weight_decay)
    per_column = len(text.train) // 8
    pieces = text.train[: 8 * per_column].reshape(8, per_column)
    starts = range(0, per_column - 30, 30)
    for step in range(2 * len(starts)):
        start = starts[step % len(starts)]
        if start == 0:
            hidden = model.start(8)
        optimizer.param_groups[0]["lr"] = schedule.rate(step, 2 * len(starts), 30)
        found = model(pieces[:, start : start + 30].T, hidden)
        loss = F.cross_entropy(found.logits.permute(1, 2, 0), pieces[:, start + 1 : start + 31])
        optimizer.zero_grad()
        (loss + 2.0 * found.size + found.change).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        hidden = [(one.detach(), other.detach()) for one, other in found.hidden]
    for name, value in trained(made).model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_papers_training_is_sgd_and_the_mean_of_the_weights_since_validation_stalled(text):
    dropouts = [name for name in vars(SIZES) if "drop" in name]
    sizes = dataclasses.replace(SIZES, **dict.fromkeys(dropouts, 0.0))
    made = training.LanguageTraining(text, arms.ARMS["baseline"], sizes=sizes, schedule=PAPER)
    torch.manual_seed(0)
    model = language_model.LanguageModel(len(text.counts), sizes)
    pieces = training.columns(text.train, 8)
    valid, averaged, since = [], [], None
    for cuts in PAPER.cuts(len(pieces), seed=0):
        hidden = model.start(8)
        for start, length in cuts:
            found = model(pieces[start : start + length], hidden)
            targets = pieces[start + 1 : start + length + 1]
            loss = F.cross_entropy(found.logits.permute(0, 2, 1), targets)
            model.zero_grad()
            (loss + 2.0 * found.size + found.change).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(30.0 * length / 20 * (weight.grad + 1.2e-6 * weight))
            hidden = [(one.detach(), other.detach()) for one, other in found.hidden]
            if since is not None:
                since.append({name: p.detach().clone() for name, p in model.named_parameters()})
        scored = language_model.LanguageModel(len(text.counts), sizes)
        scored.load_state_dict(model.state_dict())
        if since is not None:
            means = {name: sum(step[name] for step in since) / len(since) for name in since[0]}
            scored.load_state_dict(means, strict=False)
        found = training.perplexities(scored, made.valid, made.is_head, PAPER.length)
        valid.append(found["all"])
        averaged.append(since is not None)
        if since is None and len(valid) > 2 and valid[-1] > min(valid[:-2]):
            since = []
    assert averaged == [False] * 3 + [True] * 2
    result = trained(made).result()
    assert [epoch["valid"]["all"] for epoch in result["history"]] == pytest.approx(valid, rel=1e-3)
    assert [epoch.get("averaged", False) for epoch in result["history"]] == averaged


def test_the_weights_of_the_transfer_losses_are_those_of_their_papers():
    found = {name: arm.scale_for(200) for name, arm in arms.ARMS.items() if arm.loss is not None}
    assert found == {
        "cosreg-sum": 1 / 200,
        "adversarial-sum": 0.02,
        "cosreg-lexico": 1 / 200,
        "adversarial-lexico": 1.0,
        "adversarial-select-lexico": 1.0,
    }


def test_validation_picks_the_epoch(text):
    # a rate that only rises, until nothing is learned any more
    schedule = dataclasses.replace(SHORT, epochs=4, lr=3.0, warm_up=1.0)
    made = trained(started(text, "baseline", schedule=schedule))
    result = made.result()
    valid = [epoch["valid"]["all"] for epoch in result["history"]]
    assert len(valid) == 4
    assert result["best_epoch"] == valid.index(min(valid)) + 1 < 4
    assert result["valid"]["all"] == min(valid)
    again = training.perplexities(made.model, made.valid, made.is_head, schedule.length)
    assert again["all"] == min(valid)


def test_a_text_too_short_for_a_batch_is_told(text):
    long = dataclasses.replace(SHORT, batch_size=300)
    with pytest.raises(
        DataError, match="a batch is 300 x 40 words, the training text has 1096; lower"
    ):
        started(text, "baseline", schedule=long)


def test_a_loss_that_is_not_finite_ends_the_run(text):
    made = started(text, "baseline")
    nn.init.constant_(made.model.decoder.bias, math.nan)
    with pytest.raises(NotFiniteError, match="got nan in epoch 1; lower --lr"):
        trained(made)


def test_what_is_not_finite_is_null(tmp_path):
    runs.write_json(tmp_path / "a" / "b.json", {"x": [1.5, math.inf], "y": {"z": math.nan}})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {
        "x": [1.5, None],
        "y": {"z": None},
    }
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_a_run_that_fails_leaves_the_others_alone(tmp_path, capsys):
    chosen = ["--arms", "baseline,cosreg-sum", "--scales", "1,1e45", "--seeds", "1"]
    report = wikitext.main([*SMALL, *chosen, "--together", "3", "--out", str(tmp_path)])
    assert "cosreg-sum x1e+45, seed 0: the training loss must be finite" in capsys.readouterr().out
    assert report["missing"] == ["cosreg-sum, seed 0"]
    assert list(report["tried"]["cosreg-sum"]) == ["1"]
    assert list(report["results"]["baseline"]) == ["0"]


SMALL = ["--small", "--seeds", "2", "--epochs", "1", "--batch-size", "32"]


def results_of(report):
    return json.loads(json.dumps(report["results"]))


@pytest.mark.slow
def test_all_arms_are_compared_and_stored(tmp_path, capsys):
    report = wikitext.main([*SMALL, "--out", str(tmp_path)])
    stored = json.loads(
        (tmp_path / "wikitext.json").read_text("utf-8"),
        parse_constant=lambda word: pytest.fail(f"{word} is not JSON"),
    )
    assert stored == json.loads(json.dumps(report))
    assert list(stored["results"]) == list(arms.ARMS)
    assert all(list(by_seed) == ["0", "1"] for by_seed in stored["results"].values())
    assert stored["missing"] == []
    assert stored["machine"]["torch"] == torch.__version__
    assert "commit" in stored["machine"]
    assert stored["schedule"]["batch_size"] == 32
    weights = 0
    for shape in ((128, 16), (128,), (96, 16), (96, 24), (192,), (64, 24), (64, 16), (128,)):
        weights += math.prod(shape)
    assert stored["flops_per_epoch"] == 6 * stored["text"]["train tokens"] * weights
    output = capsys.readouterr().out
    assert "starts" in output
    line = next(line for line in output.splitlines() if line.startswith("adversarial-lexico  "))
    tests = [one["test"]["all"] for one in stored["results"]["adversarial-lexico"].values()]
    assert f"{sum(tests) / 2:.2f} ±" in line
    assert stored["cut_off"] == dict.fromkeys(arms.ARMS, True)  # the best of one epoch is the last
    assert line.endswith("cut off")

    again = wikitext.main([*SMALL, "--out", str(tmp_path)])
    assert results_of(again) == results_of(stored)
    assert "starts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("best", "base_best", "over"),
    [
        ((2, 3, 2), (1, 2, 3), "-2.00 ± 1.00"),
        ((2, 3, 3), (1, 2, 3), "cut off"),  # most of its runs end with their best epoch
        ((2, 2, 2), (3, 3, 2), "cut off"),  # most of the baseline's
    ],
)
def test_an_arm_that_was_still_learning_is_not_compared(capsys, best, base_best, over):
    def runs(epochs, tests):
        return {
            str(seed): {
                "best_epoch": epoch,
                "history": [{}] * 3,
                "valid": {"all": 9.0},
                "test": {"all": test, "head": 1.0, "tail": 2.0},
            }
            for seed, (epoch, test) in enumerate(zip(epochs, tests, strict=True))
        }

    results = {"baseline": runs(base_best, (9.0, 9.0, 9.0)), "cosreg-sum": runs(best, (6, 7, 8))}
    cut_off = {arm: wikitext.is_cut_off(by_seed) for arm, by_seed in results.items()}
    wikitext.print_report({"results": results, "cut_off": cut_off, "missing": []})
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("cosreg-sum")).endswith(over)


@pytest.mark.slow
def test_a_run_of_the_papers_schedule_that_is_killed_ends_as_one_that_was_not(tmp_path):
    chosen = ["--small", "--paper", "--arms", "adversarial-select-lexico", "--seeds", "1"]
    command = [sys.executable, "-u", str(FOLDER / "language_model.py"), *chosen, "--epochs", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for signal_, line in ((signal.SIGTERM, "epoch 1"), (signal.SIGKILL, "epoch 2")):
        run = subprocess.Popen(
            [*command, "--out", str(tmp_path / "cut")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        with run:
            assert any(line in said for said in run.stdout)
            run.send_signal(signal_)
    assert list((tmp_path / "cut").glob("runs/*/checkpoints/0*"))
    ends = {}
    for folder in ("cut", "whole"):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("goes on at step" in done.stdout) == (folder == "cut")
        ends[folder] = json.loads((tmp_path / folder / "wikitext.json").read_text("utf-8"))
    assert ends["cut"]["results"] == ends["whole"]["results"]


@pytest.mark.slow
def test_what_time_does_not_allow_is_missing_and_made_later(tmp_path, capsys):
    chosen = [*SMALL, "--arms", "baseline,cosreg-sum", "--out", str(tmp_path)]
    none = wikitext.main([*chosen, "--minutes", "0"])
    assert none["missing"] == [
        *("baseline, seed 0", "baseline, seed 1", "cosreg-sum, seed 0", "cosreg-sum, seed 1")
    ]
    assert "not there yet: baseline, seed 0;" in capsys.readouterr().out
    assert wikitext.main(chosen)["missing"] == []


def test_validation_picks_the_weight_with_the_first_seed(tmp_path):
    chosen = ["--arms", "baseline,cosreg-sum", "--scales", "1,1000", "--out", str(tmp_path)]
    report = wikitext.main([*SMALL, *chosen])
    tried = report["tried"]["cosreg-sum"]
    assert set(tried) == {"1", "1000"}
    assert tried["1"] != tried["1000"]
    picked = report["picked"]["cosreg-sum"]
    assert tried[f"{picked:g}"] == min(tried.values())
    assert report["picked"]["baseline"] == 1.0
    assert [one["scale"] for one in report["results"]["cosreg-sum"].values()] == [picked] * 2
    assert len(list((tmp_path / "runs").iterdir())) == 2 + 3


def test_runs_side_by_side_give_the_same(tmp_path, capsys):
    chosen = [*SMALL, "--arms", "adversarial-select-lexico,baseline"]
    alone = wikitext.main([*chosen, "--out", str(tmp_path / "one")])
    capsys.readouterr()
    together = wikitext.main([*chosen, "--out", str(tmp_path / "two"), "--together", "2"])
    assert results_of(together) == results_of(alone)
    output = capsys.readouterr().out
    assert output.index("baseline, seed 0: starts") < output.index("epoch 1")


class StopAt:
    """A clock that stands still, and a minute later after so many looks."""

    def __init__(self, looks):
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        return 0.0 if self.looks > 0 else 60.0


def test_runs_that_the_deadline_stops_lose_nothing(tmp_path, monkeypatch, capsys):
    chosen = [*SMALL, "--arms", "baseline,cosreg-lexico", "--seeds", "1", "--together", "2"]
    whole = wikitext.main([*chosen, "--out", str(tmp_path / "whole")])
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(runs.time, "monotonic", StopAt(30))
        stopped = wikitext.main([*chosen, "--out", str(tmp_path / "cut"), "--minutes", "1"])
    assert stopped["missing"] == ["baseline, seed 0", "cosreg-lexico, seed 0"]
    kept = re.findall(r"is kept at step (\d+) of \d+", capsys.readouterr().out)
    assert len(kept) == 2
    assert all(int(step) > 1 for step in kept)
    again = wikitext.main([*chosen, "--out", str(tmp_path / "cut")])
    assert "goes on at step " + kept[0] in capsys.readouterr().out
    assert results_of(again) == results_of(whole)
    assert list((tmp_path / "cut" / "runs").glob("*/checkpoints/0*")) == []


def test_a_step_on_the_cpu_is_not_recorded():
    made = []
    step = recorded.RecordedSteps(made.append, torch.Generator())
    for size in (1, 1, 2, 1, 1):
        step(size)
    assert made == [1, 1, 2, 1, 1]
    assert not step.graphs
    assert step.why_not is None


@needs_cuda
@pytest.mark.parametrize("schedule", [SCHEDULE, dataclasses.replace(PAPER, epochs=20, lr=5.0)])
def test_recorded_steps_train_as_ordinary_ones(text, monkeypatch, schedule):
    ours = trained(started(text, "adversarial-lexico", schedule=schedule, device="cuda"))
    assert ours.is_recorded is True
    monkeypatch.setattr(recorded, "WARM_UP", -1)
    theirs = trained(started(text, "adversarial-lexico", schedule=schedule, device="cuda"))
    assert theirs.is_recorded is False
    ours, theirs = ours.result(), theirs.result()
    assert ours["valid"]["all"] == pytest.approx(theirs["valid"]["all"], rel=0.02)
    assert ours["ledger"]["steps"] == theirs["ledger"]["steps"]


@pytest.mark.slow
def test_mistakes_of_the_user_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        wikitext.main(["--small", "--arms", "baseline,cosrge"])
    assert "arms are baseline, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wikitext.main(["--seeds", "2"])
    assert "--from --small is required" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wikitext.main(["--small", "--scales", "0"])
    assert "must be numbers above 0, got 0" in capsys.readouterr().err
    command = [sys.executable, str(FOLDER / "language_model.py"), "--from", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {str(tmp_path)!r} must hold wiki.train.tokens")


def test_a_device_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="none is visible"):
        wikitext.main(["--small", "--device", "cuda"])
