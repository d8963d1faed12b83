"""Row gradients in two processes: the same bits in both, and the answer of one process on all data."""

from pathlib import Path

import pytest
import torch
from capabilities import needs
from safetensors.torch import load_file
from torch import distributed, nn
from torch.testing import assert_close
from two_processes import load_worker, run_ranks

import rarebit as rb
from rarebit.errors import OptimizerError, TrainingError, UnsupportedTableError
from rarebit.row_gradients.seam import RowGradients, sum_losses

WORKER = Path(__file__).with_name("row_gradients_worker.py")

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
@pytest.mark.parametrize("name", worker.STORIES)
def test_two_processes_train_what_one_does_on_all_data(folder, name):
    start, expected = worker.make_model(seed=0), worker.train_alone(worker.STORIES[name])
    found = load_file(folder / f"{name}-0.safetensors")
    for key, value in expected.items():
        assert_close(found[key], value, rtol=1e-10, atol=1e-10)
        assert not torch.equal(start.state_dict()[key], value), key


@pytest.mark.slow
def test_one_process_of_several_trains_by_itself_without_ddp(folder):
    found = load_file(folder / "alone.safetensors")
    for key, value in worker.train_alone(worker.ALONE, ranks=[0]).items():
        assert torch.equal(found[key], value), key


@pytest.fixture
def processes(tmp_path):
    """Join a process group of one."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def plain_model():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("processes")
def test_sharded_tables_are_refused_by_name_with_what_to_do():
    model = sharded(plain_model())
    with pytest.raises(UnsupportedTableError, match=r"'0' .* \(FSDP2\); keep its module out of"):
        RowGradients(model, sum_losses)
    with pytest.raises(UnsupportedTableError, match=r"'0' .* \(FSDP2\); keep its module out of"):
        rb.HarmlessTransfer().start(model, counts=torch.arange(9), where=lambda table: True)
    with pytest.raises(OptimizerError, match=r"'0.weight' \(FSDP2\); use tables='dense'"):
        rb.optimizer(model, tables="rowwise")
    assert not model[0].sparse
    rb.optimizer(model, tables="dense")


@pytest.mark.usefixtures("processes")
def test_tables_that_are_sharded_later_are_noticed():
    model = plain_model()
    rows = RowGradients(model, sum_losses)
    loss = sharded(model)(torch.tensor([1, 2])).sum()
    with pytest.raises(TrainingError, match="'0' has other parameters than when"):
        rows.backward(loss)


@pytest.mark.usefixtures("processes")
def test_a_model_that_ddp_knew_before_its_row_gradients_is_refused():
    model = plain_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with RowGradients(model, sum_losses) as rows:
        with pytest.raises(TrainingError, match="and wrap that afterwards"):
            wrapped(torch.tensor([1, 2]))
        rows.backward(model(torch.tensor([1, 2])).sum())
