"""Harmless transfer in two processes: the same bits in both, and the answer of one process on all data."""

from pathlib import Path

import pytest
import torch
from capabilities import needs, slow_after
from safetensors.torch import load_file
from torch import distributed
from torch.testing import assert_close
from two_processes import load_worker, run_ranks

WORKER = Path(__file__).with_name("transfer_worker.py")

pytestmark = needs(
    "gloo",
    distributed.is_available() and distributed.is_gloo_available(),
    "this torch cannot train in several processes",
)


worker = load_worker(WORKER)
RANKS = range(worker.NUM_RANKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder where two processes wrote the weights of each story."""
    return run_ranks(WORKER, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.STORIES)
def test_both_processes_have_the_same_bits(folder, name):
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in RANKS)
    for key, value in first.items():
        assert torch.equal(second[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(worker.STORIES))
def test_two_processes_train_what_one_does_on_all_data(folder, name):
    start, expected = worker.make_model(seed=0), worker.train_alone(worker.STORIES[name])
    found = load_file(folder / f"{name}-0.safetensors")
    for key, value in expected.items():
        assert_close(found[key], value, rtol=1e-10, atol=1e-10)
        assert key not in start.state_dict() or not torch.equal(start.state_dict()[key], value), key
