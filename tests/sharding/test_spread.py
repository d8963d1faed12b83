"""Models spread over processes of torchrun against the same training in one process."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from capabilities import needs_package
from safetensors.torch import load_file

import rarebit as rb
from rarebit.models import model_names

pytestmark = [pytest.mark.slow, needs_package("fbgemm_gpu"), needs_package("torchrec")]

drawn = random.Random()  # noqa: S311  # which process is killed, and when
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
METHODS = (
    *("hashing:buckets=50", "mlet:inner_dim=12", "low-rank:rank=3", "shrinkage", "forgetting"),
    *("multi-embedding:num_sets=2", "pep", "tail", "harmless-transfer"),
    "hashing:buckets=60+mlet:inner_dim=12",
    "mlet:inner_dim=12+harmless-transfer",
)


def torchrun(processes, *words, options=(), check=True, **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", *options, *map(str, words)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def work(tmp_path, processes, *cases):
    torchrun(processes, HERE / "spread_worker.py", tmp_path / "found.json", *cases)
    return json.loads((tmp_path / "found.json").read_text())


def compared(tmp_path, processes, cases):
    found = work(tmp_path, processes, "norms", *cases)
    assert max(found.pop("norms")) <= 1e-12  # batch normalisation sees the rows of all processes
    assert found.keys() == set(cases)
    assert all(figures["steps"] == 20 for figures in found.values())
    # the scores of this model hardly differ after so few steps, so rounding swaps some
    flat = {"nfwfm/sgd/rowwise/auto/none": 1e-4}
    assert all(figures["auc"] <= flat.get(case, 1e-6) for case, figures in found.items()), found
    return {case: figures["error"] for case, figures in found.items()}


def test_every_model_trains_as_in_one_process(tmp_path):
    cases = [f"{name}/sgd/rowwise/auto/none" for name in model_names()]
    errors = compared(tmp_path, 3, cases)
    assert max(errors.values()) <= 1e-6, errors


def test_every_method_trains_as_in_one_process(tmp_path):
    errors = compared(tmp_path, 2, [f"deepfm/sgd/rowwise/auto/{method}" for method in METHODS])
    assert max(errors.values()) <= 1e-6, errors


def test_every_plan_and_optimizer_trains_as_in_one_process(tmp_path):
    exact = [f"dcn_v2/sgd/{tables}/{plan}/none" for plan, tables in PLANS]
    # these divide by the size of a gradient, so they magnify rounding where it is nearly zero
    near = {
        "dcn_v2/adam/rowwise/column/none": 1e-4,
        "dcn_v2/adam/dense/row/none": 1e-4,
        "dcn_v2/adagrad/rowwise/row/none": 1e-3,
        "dcn_v2/adagrad/dense/column/none": 1e-3,
    }
    errors = compared(tmp_path, 3, [*exact, *near])
    assert all(error <= near.get(case, 1e-6) for case, error in errors.items()), errors


def test_ids_travel_once_for_tables_of_two_widths(tmp_path):
    # what a model looks up, step by step, is in spread_worker.py
    sent, looked_up, differences = zip(*work(tmp_path, 2, "lookups")["lookups"], strict=True)
    assert sent == (1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1)
    assert looked_up == (2, 2, 2, 1, 2, 1, 1, 2, 2, 1, 2, 2, 2)
    assert max(differences) <= 1e-6


def test_averages_get_statistics_from_the_rows_of_all_processes(tmp_path):
    number, difference = work(tmp_path, 2, "statistics")["statistics"]
    assert number == 2
    assert difference <= 1e-6


def test_means_of_gradients_set_out_during_the_backward(tmp_path):
    ahead, differences = zip(*work(tmp_path, 2, "gradients")["gradients"], strict=True)
    assert ahead == (False, True, True, False, True, False, True, False)
    assert max(differences) <= 1e-6


PLANS = (("table", "rowwise"), ("row", "rowwise"), ("column", "rowwise"), ("row", "dense"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "weights.safetensors"
    command = [sys.executable, HERE / "fault_worker.py", "", out]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)
    return load_file(out)


def worst_error(weights, wanted):
    assert weights.keys() == wanted.keys()
    return max(
        float((weights[key] - value).abs().max() / value.abs().max().clamp(min=1e-4))
        for key, value in wanted.items()
    )


def test_a_killed_run_resumes_on_another_number_of_processes(tmp_path, uninterrupted):
    fault, out = HERE / "fault_worker.py", tmp_path / "weights.safetensors"
    rank, step = drawn.randrange(3), drawn.randrange(12, 45)
    killed = torchrun(3, fault, tmp_path / "run", out, "kill", rank, step, check=False)
    assert killed.returncode
    assert not out.exists()
    torchrun(2, fault, tmp_path / "run", out)
    assert worst_error(load_file(out), uninterrupted) <= 1e-6, (rank, step)
    best = sorted((tmp_path / "run").glob("best-*"))
    newest = max((tmp_path / "run").glob("at-*"))
    assert len(best) in (1, 2)
    # one plain process reads both, without TorchRec
    read = rb.unshard(best[-1])
    assert worst_error(read, uninterrupted) <= 1e-6
    assert rb.unshard(newest).keys() == read.keys()


def test_torchrun_restarts_a_run_from_its_last_checkpoint(tmp_path, uninterrupted):
    fault, out = HERE / "fault_worker.py", tmp_path / "weights.safetensors"
    words = (fault, tmp_path / "run", out, "kill", drawn.randrange(2), 33)
    torchrun(2, *words, options=["--max-restarts=1"])
    assert worst_error(load_file(out), uninterrupted) <= 1e-6


@pytest.mark.parametrize(("kind", "said"), [("fail", "on fire"), ("hang", "Timed out")])
def test_a_process_that_fails_ends_all_of_them(tmp_path, kind, said):
    words = (HERE / "fault_worker.py", tmp_path / "run", tmp_path / "out", kind, 1, 5)
    done = torchrun(2, *words, check=False)
    assert done.returncode
    assert said in done.stderr


def test_tables_that_do_not_fit_one_process_train_on_three(tmp_path):
    limit, bytes_of_tables = 1900, 20_001_000 * 17 * 4
    alone = subprocess.run(
        [sys.executable, HERE / "memory_worker.py", str(limit)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode
    assert "NotEnoughMemoryError: building the model fm for 20,001,000 rows" in alone.stderr
    done = torchrun(3, HERE / "memory_worker.py", limit)
    [estimate] = re.findall(r"memory on cpu: .* plus activations.*\(tables (\S+) MB", done.stderr)
    assert float(estimate) * 1e6 == pytest.approx(bytes_of_tables / 3, rel=0.05)


def test_the_command_line_gives_the_run_of_one_process(tmp_path):
    words = ["train", "--data", "synthetic", "--rows", "6000", "--epochs", "2", "--model", "dcn_v2"]
    words += ["--tables", "rowwise", "--set", "training.optimizer=sgd", "--lr", "0.1"]
    words += ["--methods", "low-rank:rank=3", "--set", "model.dropout=0.0"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    one, two = tmp_path / "one", tmp_path / "two"
    command = [sys.executable, "-m", "rarebit"]
    subprocess.run([*command, *words, "--out", one], env=environment, check=True)
    words = ["-m", "rarebit", *words, "--engine", "torchrec"]
    said = torchrun(2, *words, "--out", two)
    assert said.stdout.count("Saved in") == 1
    assert said.stderr.count("epoch 1:") == 1
    models = [rb.load_model(folder).state_dict() for folder in (one, two)]
    assert worst_error(models[1], models[0]) <= 1e-6
    runs = [json.loads((folder / "run.json").read_text()) for folder in (one, two)]
    assert runs[0]["test"]["overall"]["auc"] == pytest.approx(
        runs[1]["test"]["overall"]["auc"], abs=1e-5
    )
    assert runs[0]["settings"] == runs[1]["settings"]
    # again from the pieces of its best epoch
    (two / "model.json").unlink()
    subprocess.run([*command, "reshard", two], env=environment, check=True)
    assert worst_error(rb.load_model(two).state_dict(), models[1]) == 0.0
    assert json.loads((two / "run.json").read_text())["history"] == runs[1]["history"]
    refused = torchrun(2, *words, "--out", tmp_path / "three", "--one-pass", check=False)
    assert refused.returncode
    assert "leave the engine out" in refused.stderr
