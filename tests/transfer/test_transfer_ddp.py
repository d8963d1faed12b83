"""Harmless transfer in two processes: the same bits in both, and the answer of one process on all data."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs
from safetensors.torch import load_file
from torch import distributed
from torch.testing import assert_close

WORKER = Path(__file__).with_name("transfer_worker.py")

pytestmark = needs(
    "gloo",
    distributed.is_available() and distributed.is_gloo_available(),
    "this torch cannot train in several processes",
)


def load_worker():
    spec = importlib.util.spec_from_file_location(WORKER.stem, WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = load_worker()
RANKS = range(worker.NUM_RANKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder where two processes wrote the weights of each story."""
    folder = tmp_path_factory.mktemp("ranks")
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.parametrize("name", worker.STORIES)
def test_both_processes_have_the_same_bits(folder, name):
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in RANKS)
    for key, value in first.items():
        assert torch.equal(second[key], value), key


@pytest.mark.parametrize("name", worker.STORIES)
def test_two_processes_train_what_one_does_on_all_data(folder, name):
    start, expected = worker.make_model(seed=0), worker.train_alone(worker.STORIES[name])
    found = load_file(folder / f"{name}-0.safetensors")
    for key, value in expected.items():
        assert_close(found[key], value, rtol=1e-10, atol=1e-10)
        assert key not in start.state_dict() or not torch.equal(start.state_dict()[key], value), key
