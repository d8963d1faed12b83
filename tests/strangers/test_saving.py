"""Models that are compiled, copied to devices or split over processes are saved as they are inside, or refused."""

import functools

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rarebit as rb
from rarebit.errors import ModelFileError

compiled = functools.partial(torch.compile, backend="eager")


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 4), nn.Embedding(20, 4)
        self.score = nn.Linear(8, 1)

    def forward(self, users, items):
        return self.score(torch.cat([self.user(users), self.item(items)], dim=1)).squeeze(1)


@pytest.fixture(scope="module")
def one_process():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def with_method():
    model = TwoTower()
    rb.apply_(model, rb.Hashing(buckets=7), where=lambda table: table.name == "user", verbose=False)
    return model


def assert_comes_back(wrapped, model, folder):
    users, items = torch.arange(5), torch.arange(5)
    rb.save_model(wrapped, folder)
    loaded = rb.load_model(folder, into=TwoTower())
    assert torch.equal(loaded(users, items), model(users, items))
    assert rb.find_tables(loaded)[0].methods == rb.find_tables(model)[0].methods


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))],
    ids=["DataParallel", "compile", "both"],
)
def test_a_wrapped_model_is_saved_as_the_model_inside(wrap, tmp_path):
    model = with_method()
    assert_comes_back(wrap(model), model, tmp_path)


def test_a_model_compiled_in_place_is_saved(tmp_path):
    model = with_method()
    model.compile(backend="eager")
    rb.save_model(model, tmp_path)
    loaded = rb.load_model(tmp_path, into=TwoTower())
    assert torch.equal(loaded.item.weight, model.item.weight)


def test_a_model_of_ddp_is_saved_as_the_model_inside(one_process, tmp_path):
    model = with_method()
    assert_comes_back(DistributedDataParallel(model), model, tmp_path)


def test_a_zoo_model_needs_no_model_to_be_read_into(tmp_path):
    data = rb.Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    model = rb.models.build_model("fm", data.schema, {"dim": 2})
    rb.save_model(compiled(model), tmp_path)
    loaded = rb.load_model(tmp_path)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_a_part_that_is_wrapped_is_refused_by_name(tmp_path):
    model = TwoTower()
    model.score = compiled(model.score)
    with pytest.raises(ModelFileError, match="'score' is wrapped in OptimizedModule"):
        rb.save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_weights_that_are_split_over_processes_are_refused_with_what_to_do(one_process, tmp_path):
    model, mesh = TwoTower(), init_device_mesh("cpu", (1,))
    weight = distribute_tensor(model.user.weight.detach(), mesh, [Replicate()])
    model.user.weight = nn.Parameter(weight)
    with pytest.raises(
        ModelFileError, match=r"'user\.weight' is split over .*get_model_state_dict"
    ):
        rb.save_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
