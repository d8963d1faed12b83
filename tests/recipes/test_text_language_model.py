"""The language model of recipes/text: words by number, LSTM layers, dropouts, training, perplexity, and resuming."""

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
from capabilities import needs_cuda, needs_package
from torch import nn
from torch.nn import functional as F

import rarebit as rb
from rarebit.errors import DataError, NotFiniteError, SettingsError
from rarebit.training.checkpoints import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "text"
NAME = "text-language-model"


def load(name):
    sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
    spec = importlib.util.spec_from_file_location(f"text_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shared = sys.modules.pop("_shared")
    sys.path.remove(str(FOLDER))
    return module, shared


recipe, shared = load("language_model")
SIZES, SCHEDULE = recipe.SMALL_SIZES, recipe.SMALL_SCHEDULE
SHORT = dataclasses.replace(SCHEDULE, epochs=1, batch_size=8, length=40)
PAPER = dataclasses.replace(recipe.SMALL_PAPER, epochs=5, batch_size=8, trigger=1, lr=30.0)


@pytest.fixture(scope="module")
def text():
    return recipe.make_text(lines=24, length=60)


def task(text, *, schedule=SHORT, sizes=SIZES, device="cpu", **settings):
    return recipe.WordModel(text, sizes, schedule, torch.device(device), **settings)


def started(
    text, arm, *, schedule=SHORT, sizes=SIZES, device="cpu", tied=True, adaptive=False, **settings
):
    made = task(text, schedule=schedule, sizes=sizes, device=device, tied=tied, adaptive=adaptive)
    return made.training(shared.Run(arm=arm, **settings))


def trained(made, steps=None):
    """Train to the end, or so many steps."""
    while made.step != steps and not made.train_step(lambda line: None):
        pass
    return made


def test_examples_of_the_helpers():
    for module in (recipe, shared):
        found = doctest.testmod(module)
        assert found.attempted >= 1
        assert found.failed == 0


def test_columns_hold_the_text_and_each_word_is_asked_once():
    tokens = recipe.columns(torch.arange(50), 4)  # (12, 4)
    assert torch.equal(tokens[:, 1], torch.arange(12, 24))
    asked = []
    for start in range(0, len(tokens) - 1, 5):
        inputs, targets = recipe.batch_at(tokens, start, 5)
        assert torch.equal(inputs + 1, targets)
        asked += targets[:, 0].tolist()
    assert asked == list(range(1, 12))


def test_the_rate_rises_and_falls():
    schedule = dataclasses.replace(SCHEDULE, rising=0.2)
    rates = [schedule.share(step, 10, 70) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_the_papers_batches_are_of_a_random_length_and_miss_no_word():
    schedule = recipe.PaperSchedule(epochs=3)
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
    assert schedule.share(3, 9, 35) == 0.5


def test_averaging_starts_after_an_epoch_worse_than_the_best_but_the_last_five():
    schedule = recipe.PaperSchedule()
    falling = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert not schedule.starts_averaging([*falling, 8.9])
    assert schedule.starts_averaging([*falling, 9.1])
    assert not schedule.starts_averaging([*falling[1:], 9.1])  # too few
    assert schedule.starts_averaging([2.0, *falling, 2.1])


def test_perplexity_is_that_of_a_loop_over_words(text):
    made = started(text, "baseline")
    model, tokens = made.model.eval(), made.task.columns["valid"]
    losses = {"head": [], "tail": []}
    with torch.no_grad():
        logits = model(tokens, model.start(tokens.shape[1])).logits.double()
    for place in range(len(tokens) - 1):
        for column in range(tokens.shape[1]):
            target = int(tokens[place + 1, column])
            loss = logits[place, column].logsumexp(0) - logits[place, column, target]
            losses["head" if text.is_head[target] else "tail"].append(float(loss))
    found = task(text, schedule=dataclasses.replace(SHORT, length=7)).scores(model, "valid")
    every = losses["head"] + losses["tail"]
    assert found["all"] == pytest.approx(math.exp(sum(every) / len(every)), rel=1e-5)
    for side, values in losses.items():
        assert found[side] == pytest.approx(math.exp(sum(values) / len(values)), rel=1e-5)


@pytest.mark.slow
def test_the_model_learns_more_than_how_frequent_words_are():
    text = recipe.make_text()
    chance = text.counts / text.counts.sum()
    unigram = float(chance[text.test].log().mean().neg().exp())
    result = trained(started(text, "adversarial-lexico", schedule=SCHEDULE)).result()
    assert result["test"]["all"] < 0.6 * unigram
    ledger = result["ledger"]["tables"]["embedding"]
    assert result["ledger"]["steps"] == ledger["steps"] > 100
    assert ledger["rows"] > 0


@pytest.mark.parametrize("arm", ["cosreg-sum", "adversarial-sum"])
def test_a_sum_without_weight_is_the_baseline(text, arm):
    ours = trained(started(text, arm, dial=0.0)).model.state_dict()
    theirs = trained(started(text, "baseline")).model.state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    other = trained(started(text, arm, dial=100.0)).model.state_dict()
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
    again = started(text, "adversarial-lexico", schedule=schedule)
    torch.rand(7)
    again.load(checkpoints.newest().state)
    assert again.step == stop
    result = trained(again).result()
    assert result == whole


def test_training_is_a_plain_loop(text):
    dropouts = [name for name in vars(SIZES) if "drop" in name]
    sizes = dataclasses.replace(SIZES, **dict.fromkeys(dropouts, 0.0))
    schedule = dataclasses.replace(SHORT, epochs=2, length=30)
    made = started(text, "baseline", sizes=sizes, schedule=schedule)
    torch.manual_seed(0)
    model = recipe.LanguageModel(len(text.counts), sizes)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=schedule.weight_decay)
    per_column = len(text.train) // 8
    pieces = text.train[: 8 * per_column].reshape(8, per_column)
    starts = range(0, per_column - 30, 30)
    for step in range(2 * len(starts)):
        start = starts[step % len(starts)]
        if start == 0:
            hidden = model.start(8)
        optimizer.param_groups[0]["lr"] = schedule.lr * schedule.share(step, 2 * len(starts), 30)
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
    made = started(text, "baseline", sizes=sizes, schedule=PAPER)
    torch.manual_seed(0)
    model = recipe.LanguageModel(len(text.counts), sizes)
    pieces = recipe.columns(text.train, 8)
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
        scored = recipe.LanguageModel(len(text.counts), sizes)
        scored.load_state_dict(model.state_dict())
        if since is not None:
            means = {name: sum(step[name] for step in since) / len(since) for name in since[0]}
            scored.load_state_dict(means, strict=False)
        found = made.task.scores(scored, "valid")
        valid.append(found["all"])
        averaged.append(since is not None)
        if since is None and len(valid) > 2 and valid[-1] > min(valid[:-2]):
            since = []
    assert averaged == [False] * 3 + [True] * 2
    result = trained(made).result()
    assert [epoch["valid"]["all"] for epoch in result["history"]] == pytest.approx(valid, rel=1e-3)
    assert [epoch.get("averaged", False) for epoch in result["history"]] == averaged


def test_the_weights_of_the_transfer_losses_are_those_of_their_papers(text):
    losses = [name for name, arm in shared.ARMS.items() if arm.loss is not None]
    assert {name: started(text, name).addition.scale for name in losses} == {
        "cosreg-sum": 1 / 128,
        "adversarial-sum": 0.02,
        "cosreg-lexico": 1 / 128,
        "adversarial-lexico": 1.0,
        "adversarial-select-lexico": 1.0,
    }


def test_validation_picks_the_epoch(text):
    # a rate that only rises, until nothing is learned any more
    schedule = dataclasses.replace(SHORT, epochs=4, lr=3.0, rising=1.0)
    made = trained(started(text, "baseline", schedule=schedule))
    result = made.result()
    valid = [epoch["valid"]["all"] for epoch in result["history"]]
    assert len(valid) == 4
    assert result["best_epoch"] == valid.index(min(valid)) + 1 < 4
    assert result["valid"]["all"] == min(valid)
    assert made.task.scores(made.model, "valid")["all"] == min(valid)


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
    shared.write_json(tmp_path / "a" / "b.json", {"x": [1.5, math.inf], "y": {"z": math.nan}})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {
        "x": [1.5, None],
        "y": {"z": None},
    }
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_a_run_that_fails_leaves_the_others_alone(tmp_path, capsys):
    chosen = ["--arms", "baseline,averaged", "--lr", "1e30", "--seeds", "1", "--together", "2"]
    report = recipe.main([*SMALL, *chosen, "--out", str(tmp_path)])
    assert "baseline, seed 0: the training loss must be finite" in capsys.readouterr().out
    assert report["missing"] == ["baseline, seed 0", "averaged, seed 0"]
    chosen = ["--arms", "baseline", "--lr", "1e8", "--trials", "9", "--seeds", "1"]
    report = recipe.main([*SMALL, *chosen, "--out", str(tmp_path)])
    tried = report["tried"]["baseline"]
    assert min(one["lr"] for one in tried) < 1  # a rate that diverges is lowered


SMALL = ["--small", "--seeds", "2", "--epochs", "1", "--batch-size", "32"]


def results_of(report):
    """Return the results without what differs from process to process."""
    return {
        arm: {
            seed: {k: v for k, v in run.items() if k not in ("seconds", "machine")}
            for seed, run in json.loads(json.dumps(by_seed)).items()
        }
        for arm, by_seed in report["results"].items()
    }


@pytest.mark.slow
def test_all_arms_are_compared_and_stored(tmp_path, capsys):
    report = recipe.main(
        [*SMALL, "--untie", "--arms", ",".join(shared.ARMS), "--out", str(tmp_path)]
    )
    stored = json.loads(
        (tmp_path / f"{NAME}.json").read_text("utf-8"),
        parse_constant=lambda word: pytest.fail(f"{word} is not JSON"),
    )
    assert stored == json.loads(json.dumps(report))
    assert list(stored["results"]) == list(shared.ARMS)
    assert all(list(by_seed) == ["0", "1"] for by_seed in stored["results"].values())
    assert stored["missing"] == []
    assert stored["machine"]["torch"] == torch.__version__
    assert "commit" in stored["machine"]
    assert stored["facts"]["schedule"]["batch_size"] == 32
    output = capsys.readouterr().out
    assert "starts" in output
    line = next(line for line in output.splitlines() if line.startswith("adversarial-lexico  "))
    tests = [one["test"]["all"] for one in stored["results"]["adversarial-lexico"].values()]
    assert f"{sum(tests) / 2:.2f} ±" in line
    assert stored["cut_off"] == dict.fromkeys(
        shared.ARMS, True
    )  # the best of one epoch is the last
    pairs = [(one["arm"], one["control"]) for one in stored["verdicts"]]
    assert ("tail", "averaged") in pairs
    assert ("adversarial-lexico", "adversarial-sum") in pairs
    assert all(one["verdict"].startswith("no verdict: ") for one in stored["verdicts"])
    again = recipe.main(
        [*SMALL, "--untie", "--arms", ",".join(shared.ARMS), "--out", str(tmp_path)]
    )
    assert results_of(again) == results_of(stored)
    assert "starts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("best", "base_best", "edges", "verdict"),
    [
        ((2, 3, 2), (1, 2, 3), (), "helps"),
        ((2, 3, 3), (1, 2, 3), (), "no verdict: cosreg-sum is cut off"),  # in most of its runs
        ((2, 2, 2), (3, 3, 2), (), "no verdict: baseline is cut off"),
        (
            (2, 3, 2),
            (1, 2, 3),
            ("lr",),
            "no verdict: cosreg-sum is best at the edge of what was tried",
        ),
    ],
)
def test_an_arm_that_was_still_learning_is_not_compared(text, best, base_best, edges, verdict):
    def runs(epochs, tests):
        return {
            str(seed): {
                "best_epoch": epoch,
                "history": [{}] * 3,
                "test": {"all": test, "head": 1.0, "tail": 2.0},
            }
            for seed, (epoch, test) in enumerate(zip(epochs, tests, strict=True))
        }

    results = {
        "baseline": runs(base_best, (9.0, 9.1, 9.2)),
        "cosreg-sum": runs(best, (6.9, 7.1, 7.1)),
    }
    cut_off = {arm: shared.is_cut_off(by_seed) for arm, by_seed in results.items()}
    edge = {"baseline": (), "cosreg-sum": edges}
    [found] = shared.verdicts_of(task(text), results, cut_off, edge)
    assert found["mean"] == pytest.approx((2.1 + 2.0 + 2.1) / 3)  # less is better: a gain
    assert found["verdict"] == verdict
    assert found["parts"] == {"head": 0.0, "tail": 0.0}


def test_an_arm_must_beat_the_baseline_and_its_controls(text):
    run = {"best_epoch": 1, "history": [{}] * 3, "test": {"all": 1.0, "head": 1.0, "tail": 1.0}}
    results = {arm: {"0": run, "1": run} for arm in shared.ARMS}
    none = dict.fromkeys(results, False)
    found = shared.verdicts_of(task(text), results, none, none)
    pairs = {(one["arm"], one["control"]) for one in found}
    plain_sums = {"cosreg-lexico": "cosreg-sum", "adversarial-lexico": "adversarial-sum"}
    more = plain_sums | {"adversarial-select-lexico": "adversarial-sum", "tail": "averaged"}
    expected = {(arm, "baseline") for arm in shared.ARMS if arm != "baseline"}
    assert pairs == expected | set(more.items())


def test_a_stop_ends_the_whole_command(text, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shared.Study, "make", lambda study, runs: asked.append(runs))
    study = shared.Study(task=task(text), out=tmp_path)
    report = shared.make_all(study, ["baseline"], seeds=2, trials=1)
    assert len(asked) == 1
    assert report["missing"] == ["baseline, seed 0", "baseline, seed 1"]


def test_a_stopped_command_reports_what_is_done(text, tmp_path, monkeypatch):
    make = shared.Study.make
    monkeypatch.setattr(shared.Study, "make", lambda study, runs: make(study, runs[:1]) and False)
    study = shared.Study(task=task(text), out=tmp_path)
    report = shared.make_all(study, ["baseline", "cosreg-sum"], seeds=2, trials=1)
    assert list(report["results"]["baseline"]) == ["0"]
    assert report["missing"] == ["baseline, seed 1", "cosreg-sum, seed 0", "cosreg-sum, seed 1"]


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
    assert list((tmp_path / "cut").glob("runs/*/checkpoints/step-*"))
    ends = {}
    for folder in ("cut", "whole"):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("resumes at step" in done.stdout) == (folder == "cut")
        ends[folder] = json.loads((tmp_path / folder / f"{NAME}.json").read_text("utf-8"))
    assert results_of(ends["cut"]) == results_of(ends["whole"])


@pytest.mark.slow
def test_what_time_does_not_allow_is_missing_and_made_later(tmp_path, capsys):
    chosen = [*SMALL, "--arms", "baseline,cosreg-sum", "--out", str(tmp_path)]
    none = recipe.main([*chosen, "--minutes", "0"])
    assert none["missing"] == [
        *("baseline, seed 0", "baseline, seed 1", "cosreg-sum, seed 0", "cosreg-sum, seed 1")
    ]
    assert "not there yet: baseline, seed 0;" in capsys.readouterr().out
    assert recipe.main(chosen)["missing"] == []


@pytest.mark.slow
def test_validation_picks_the_settings_with_the_first_seed(tmp_path):
    chosen = ["--arms", "baseline,cosreg-sum", "--trials", "4", "--out", str(tmp_path)]
    report = recipe.main([*SMALL, *chosen])
    for arm in ("baseline", "cosreg-sum"):
        tried = {(one["lr"], one["dial"]): one["valid"] for one in report["tried"][arm]}
        assert len(tried) == 4
        picked = report["picked"][arm]
        assert tried[picked["lr"], picked["dial"]] == min(tried.values())
        assert [one["dial"] for one in report["results"][arm].values()] == [picked["dial"]] * 2
    assert {one["dial"] for one in report["tried"]["baseline"]} == {1.0}
    assert {one["dial"] for one in report["tried"]["cosreg-sum"]} > {1.0}
    assert len(list((tmp_path / "runs").iterdir())) == 2 * (4 + 1)


def test_runs_side_by_side_give_the_same(tmp_path, capsys):
    chosen = [*SMALL, "--arms", "adversarial-select-lexico,baseline"]
    alone = recipe.main([*chosen, "--out", str(tmp_path / "one")])
    capsys.readouterr()
    together = recipe.main([*chosen, "--out", str(tmp_path / "two"), "--together", "2"])
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
    whole = recipe.main([*chosen, "--out", str(tmp_path / "whole")])
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(shared.time, "monotonic", StopAt(30))
        stopped = recipe.main([*chosen, "--out", str(tmp_path / "cut"), "--minutes", "1"])
    assert stopped["missing"] == ["baseline, seed 0", "cosreg-lexico, seed 0"]
    kept = re.findall(r"is kept at step (\d+)", capsys.readouterr().out)
    assert len(kept) == 2
    assert all(int(step) > 1 for step in kept)
    again = recipe.main([*chosen, "--out", str(tmp_path / "cut")])
    assert "resumes at step " + kept[0] in capsys.readouterr().out
    assert results_of(again) == results_of(whole)
    assert list((tmp_path / "cut" / "runs").glob("*/checkpoints/step-*")) == []


def test_a_step_on_the_cpu_is_not_recorded():
    made = []
    step = recipe.RecordedSteps(made.append, torch.Generator())
    for size in (1, 1, 2, 1, 1):
        step(size)
    assert made == [1, 1, 2, 1, 1]
    assert not step.graphs
    assert step.why_not is None


def test_perplexity_by_tenths_is_that_of_a_loop_over_words(text):
    made = task(text)
    model = made.model().eval()
    tokens = made.columns["valid"]
    with torch.no_grad():
        logits = model(tokens, model.start(tokens.shape[1])).logits[:-1].log_softmax(-1)
    losses = -logits.gather(2, tokens[1:, :, None])[..., 0].double()
    words, found = tokens[1:], made.scores(model, "valid")
    # words from the most frequent on, each where the middle of its places is
    before, tenths = 0, [[] for _ in range(10)]
    for word in range(len(text.counts)):
        own = losses[words == word].tolist()
        if own:
            tenths[int((before + len(own) / 2) * 10 / words.numel())] += own
        before += len(own)
    for value, own in zip(found["tenths"], tenths, strict=True):
        assert value == pytest.approx(math.exp(sum(own) / len(own)) if own else None, rel=1e-5)


def test_an_untied_model_has_two_tables(text):
    made = started(text, "tail", tied=False, schedule=dataclasses.replace(SHORT, epochs=2))
    assert made.model.decoder.weight is not made.model.embedding.weight
    result = trained(made).result()
    assert type(made.model.embedding) is nn.Embedding
    assert result["test"]["all"] < len(text.words)
    again = started(text, "tail", tied=False, schedule=dataclasses.replace(SHORT, epochs=2))
    assert trained(again).result() == result


def test_an_adaptive_softmax_is_that_of_its_paper(text):
    torch.manual_seed(0)
    model = recipe.LanguageModel(128, SIZES, tied=False, adaptive=True).eval().double()
    decoder = model.decoder
    assert decoder.cutoffs == [8, 32, 128]  # a sixteenth and a quarter
    tokens = torch.arange(128).reshape(16, 8).flip(0)
    with torch.no_grad():
        state = [tuple(part.double() for part in layer) for layer in model.start(8)]
        found = model(tokens, state, tokens)
        logits = model(tokens, state).logits
        # by hand: the first words and one entry for each group, then the words within a group
        features = torch.randn(SIZES.dim, dtype=torch.float64)
        first = decoder.head(features).log_softmax(0)
        wanted = [first[:8]]
        for group, (reduce, words) in enumerate(decoder.tail):
            wanted.append(first[8 + group] + words(reduce(features)).log_softmax(0))
        by_hand, _ = model._decode(features[None, None], None)
    torch.testing.assert_close(by_hand[0, 0], torch.cat(wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(16, 8).double())
    expected = -logits.gather(2, tokens[:, :, None]).flatten()
    torch.testing.assert_close(found.losses, expected, rtol=1e-12, atol=1e-12)
    assert found.logits is None


@pytest.mark.parametrize("arm", ["averaged", "adversarial-select-lexico", "tail"])
def test_arms_train_with_an_adaptive_softmax(text, arm):
    made = started(text, arm, tied=False, adaptive=True)
    before = made.model.embedding.weight.detach().clone()
    decoder = {name: p.detach().clone() for name, p in made.model.decoder.named_parameters()}
    result = trained(made).result()
    assert result["test"]["all"] < len(text.words)
    assert not torch.equal(made.model.embedding.weight, before)
    moved = made.model.decoder.named_parameters()
    assert not any(torch.equal(p, decoder[name]) for name, p in moved)
    assert made.task.facts()["sizes"]["softmax"] == "adaptive"


def test_tied_weights_are_compressed_at_both_ends(text):
    made = task(text, sizes=dataclasses.replace(SIZES, dim=32))
    model = made.model()
    points = shared.compressed(made, model)
    assert points[0]["bytes"] == 128 * 32 * 4
    by_name = {point["compressor"]: point["all"] for point in points}
    assert model.decoder.weight is model.embedding.weight
    before = model.embedding.weight.detach().clone()
    low_rank, evidence = (nn.Sequential(nn.Embedding.from_pretrained(before)) for _ in range(2))
    rb.apply_(low_rank, rb.LowRank.for_share([(128, 32)], 1 / 8), verbose=False)
    rb.compress_(evidence, counts=text.counts, size="1/4", verbose=False)
    for name, table in (("low rank 1/8", low_rank), ("evidence coding 1/4", evidence)):
        with torch.no_grad():
            model.embedding.weight.copy_(table[0].weight)
        assert made.scores(model, "test")["all"] == by_name[name]


def test_one_file_is_cut_in_ten(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("a b x\n" + "a b a\n" * 15 + "a c\na d\n" * 2)  # x is seen once
    text = recipe.read_text(file)
    assert text.words == ("a", "<eos>", "b", "<unk>")
    assert [len(part) for part in (text.train, text.valid, text.test)] == [16 * 4 + 1, 6, 6]


@needs_package("transformers")
@pytest.mark.slow
def test_a_hugging_face_model_of_a_configuration(text, tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_positions=64, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    for arm, tied in (("adversarial-lexico", True), ("tail", False)):
        made = task(text, model=str(tmp_path), tied=tied).training(shared.Run(arm=arm))
        inner = made.model.inner
        assert (inner.lm_head.weight is inner.get_input_embeddings().weight) == tied
        assert trained(made).result()["test"]["all"] < 2 * len(text.words)


@needs_cuda
@pytest.mark.parametrize("schedule", [SCHEDULE, dataclasses.replace(PAPER, epochs=20, lr=5.0)])
def test_recorded_steps_train_as_ordinary_ones(text, monkeypatch, schedule):
    ours = trained(started(text, "adversarial-lexico", schedule=schedule, device="cuda"))
    assert ours.is_recorded is True
    monkeypatch.setattr(recipe, "WARM_UP", -1)
    theirs = trained(started(text, "adversarial-lexico", schedule=schedule, device="cuda"))
    assert theirs.is_recorded is False
    ours, theirs = ours.result(), theirs.result()
    assert ours["valid"]["all"] == pytest.approx(theirs["valid"]["all"], rel=0.02)
    assert ours["ledger"]["steps"] == theirs["ledger"]["steps"]


@pytest.mark.slow
def test_mistakes_of_the_user_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe.main(["--small", "--arms", "baseline,cosrge"])
    assert "arms are baseline, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe.main(["--seeds", "2"])
    assert "--from --small is required" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe.main(["--small", "--trials", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="one of its own: add --untie"):
        recipe.main(["--small", "--arms", "tail", "--out", str(tmp_path / "out")])
    command = [sys.executable, str(FOLDER / "language_model.py"), "--from", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {str(tmp_path)!r} must hold wiki.train.tokens")


def test_a_device_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="none is visible"):
        recipe.main(["--small", "--device", "cuda"])


def write(folder, pattern, **parts):
    for part, words in parts.items():
        (folder / pattern.format(part)).write_text(words, encoding="utf-8")


@pytest.mark.parametrize("pattern", ["wiki.{}.tokens", "{}.txt"])
def test_words_are_numbered_by_count_and_lines_end(tmp_path, pattern):
    write(
        tmp_path,
        pattern,
        train=" \n b a <unk> b \n b \u2028 c\n",
        valid=" a z \n",
        test="c",
    )
    text = recipe.read_text(tmp_path)
    assert text.words == ("<eos>", "b", "<unk>", "a", "c")
    assert text.counts.tolist() == [3, 3, 1, 1, 1, 0, 0, 0]  # a multiple of 8
    assert text.train.tolist() == [0, 1, 3, 2, 1, 0, 1, 4, 0]
    assert text.valid.tolist() == [3, 2, 0]
    assert text.test.tolist() == [4, 0]
    assert text.is_head.nonzero()[:, 0].tolist() == [0]  # a fifth of five words
    assert text.described()["words"] == 5


def test_a_wrong_folder_is_told(tmp_path):
    with pytest.raises(
        DataError, match=r"wiki\.train\.tokens.*it holds nothing; unpack WikiText-2"
    ):
        recipe.read_text(tmp_path)
    (tmp_path / "wiki.train.tokens").write_text("a")
    with pytest.raises(DataError, match=r"it holds wiki\.train\.tokens; unpack"):
        recipe.read_text(tmp_path)
    with pytest.raises(DataError, match="it is no folder"):
        recipe.read_text(tmp_path / "no")


def test_a_word_that_training_lacks_needs_unk(tmp_path):
    write(tmp_path, "{}.txt", train="a b", valid="a", test="a z")
    with pytest.raises(DataError, match="the test part has the word 'z'"):
        recipe.read_text(tmp_path)


def test_the_model_is_a_stack_of_lstm_layers_with_tied_weights(text):
    model = recipe.LanguageModel(len(text.counts), SIZES).eval()
    assert model.decoder.weight is model.embedding.weight
    tokens = text.train[:60].reshape(20, 3)
    expected = model.embedding(tokens)
    for layer in model.layers:
        expected = layer(expected)[0]
    found = model(tokens, model.start(3))
    torch.testing.assert_close(found.logits, F.linear(expected, model.embedding.weight))
    torch.testing.assert_close(found.size, expected.square().mean())
    torch.testing.assert_close(found.change, expected.diff(dim=0).square().mean())


def test_states_are_carried_from_batch_to_batch(text):
    model = recipe.LanguageModel(len(text.counts), SIZES).eval()
    tokens = text.train[:60].reshape(20, 3)
    first = model(tokens[:8], model.start(3))
    second = model(tokens[8:], first.hidden)
    whole = model(tokens, model.start(3)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), whole)


def test_each_dropout_has_one_mask_for_a_batch(text):
    none = dict.fromkeys(
        ["word_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_drop"], 0.0
    )

    def model(**chances):
        sizes = dataclasses.replace(SIZES, **none | chances)
        return recipe.LanguageModel(len(text.counts), sizes)

    tokens = torch.tensor([[3, 5], [7, 3], [5, 7]])
    rows = model(word_dropout=0.5)._words(tokens)
    dropped = (rows == 0).all(dim=-1)
    assert 0 < int(dropped.sum()) < 6
    for word in (3, 5, 7):
        assert len(dropped[tokens == word].unique()) == 1
    locked = model()._locked(torch.ones(6, 2, 50), 0.5)
    assert torch.equal(locked, locked[:1].expand_as(locked))
    assert sorted(locked.unique().tolist()) == [0.0, 2.0]
    plain, dropping = model(), model(weight_drop=0.5)
    dropping.load_state_dict(plain.state_dict())
    start = plain.start(2)
    torch.testing.assert_close(plain(tokens, start).logits, plain.eval()(tokens, start).logits)
    dropping(tokens, start).logits.square().sum().backward()
    gradients = dropping.layers[0].weight_hh_l0.grad
    assert 0.3 < float((gradients == 0).float().mean()) < 0.7
    assert not (dropping.layers[0].weight_ih_l0.grad == 0).all()
