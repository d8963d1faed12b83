"""Models spread over processes of torchrun against the same training in one process."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rarebit as rb
from rarebit.models import model_names

pytest.importorskip("fbgemm_gpu")
pytest.importorskip("torchrec")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
METHODS = (
    *("hashing:buckets=50", "mlet:inner_dim=12", "low-rank:rank=3", "shrinkage", "forgetting"),
    *("multi-embedding:num_sets=2", "pep", "tail", "harmless-transfer"),
    "hashing:buckets=50+mlet:inner_dim=12", "mlet:inner_dim=12+harmless-transfer",
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


def compared(tmp_path, processes, cases):
    torchrun(processes, HERE / "spread_worker.py", tmp_path / "found.json", *cases)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == set(cases)
    assert all(figures["steps"] == 20 for figures in found.values())
    assert max(figures["auc"] for figures in found.values()) <= 1e-6
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


def test_batch_normalisation_sees_the_rows_of_all_processes(tmp_path):
    torchrun(3, HERE / "spread_worker.py", tmp_path / "found.json", "norms")
    [worst] = json.loads((tmp_path / "found.json").read_text()).values()
    assert max(worst) <= 1e-12, worst


PLANS = (("table", "rowwise"), ("row", "rowwise"), ("column", "rowwise"), ("row", "dense"))
