"""What would not fit in memory is refused before it is built, in one sentence with figures and what would fit."""

import re
import subprocess
import sys

import pytest
import torch
from capabilities import slow_after
from torch import nn

import rarebit as rb
from rarebit.data import Field, Schema
from rarebit.errors import NotEnoughMemoryError
from rarebit.machine import CPU, available_memory
from rarebit.methods.hashing import HashedTable
from rarebit.models import build_model, model_names
from rarebit.models.deepfm import DeepFM
from rarebit.training.memory import building_bytes, check_building

SCHEMA = Schema(
    (
        Field(name="user", rows=1000),
        Field(name="tags", kind="multi", rows=9, max_length=3),
        Field(name="age", kind="numeric"),
    )
)


@pytest.mark.parametrize("name", slow_after(model_names()))
def test_a_model_is_sized_without_building_it(name):
    model = build_model(name, SCHEMA)
    found = building_bytes(name, SCHEMA, {})
    tables = sum(info.num_bytes for info in rb.find_tables(model))
    assert found == sum(parameter.nbytes for parameter in model.parameters()) + tables


def test_sizing_draws_nothing():
    state = torch.random.get_rng_state()
    building_bytes("dcn_v2", SCHEMA, {"dim": 4})
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("settings", [{"dim": 10**8}, {"dim": 2**62}], ids=str)
def test_a_model_that_does_not_fit_is_refused_with_a_width_that_would(settings):
    message = (
        r"building the model deepfm for 1,009 rows in 2 tables takes .* GB on cpu, where .* are free; "
        r"dim=(\d+) would fit, or prepare the data with fewer values per field"
    )
    with pytest.raises(NotEnoughMemoryError, match=message) as caught:
        check_building("deepfm", SCHEMA, settings)
    fitting = int(re.search(message, str(caught.value))[1])
    check_building("deepfm", SCHEMA, {"dim": fitting})  # as the message says


def test_a_network_that_does_not_fit_is_refused_too():
    with pytest.raises(NotEnoughMemoryError, match="are free; use a smaller network, or prepare"):
        check_building("deepfm", SCHEMA, {"hidden": [10**9, 10**9]})


def test_a_run_refuses_before_it_builds(tmp_path):
    settings = rb.RunSettings.from_mapping(
        {"model": {"name": "fm", "dim": 10**8}, "data": {"rows": 200}}
    )
    with pytest.raises(NotEnoughMemoryError, match=r"building the model fm .* would fit"):
        rb.run(settings, folder=tmp_path / "run", progress=False)


HUGE = Schema((Field(name="user", rows=10**12),))


def with_backbone() -> nn.Module:
    model = nn.Module()
    model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    return model


def hashed() -> nn.Module:
    return nn.Sequential(HashedTable(rb.Hashing(buckets=9), nn.Embedding(9, 4), 10**12, None))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: DeepFM(HUGE, dim=16), "tables of 1,000,000,000,000 rows .* use a smaller dim"),
        (
            lambda: rb.apply_(nn.Sequential(nn.Embedding(9, 4)), rb.MLET(inner_dim=2**62)),
            r"a table of 9 rows as a product of inner_dim=4,.* use a smaller inner_dim",
        ),
        (
            lambda: rb.apply_(with_backbone(), rb.MultiEmbedding(num_sets=2**40)),
            "a model with 1,099,511,627,776 embedding sets takes .* use a smaller num_sets",
        ),
        (lambda: rb.merge_(hashed()), "'0' merged takes 16000.0 GB on cpu, .* leave the table out"),
    ],
    ids=["a model of ours", "factors", "sets", "merged"],
)
def test_what_does_not_fit_is_refused_before_it_is_allocated(build, match):
    with pytest.raises(NotEnoughMemoryError, match=match):
        build()


def test_a_limit_of_addresses_counts(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemAvailable:    8192 kB\n")
    (tmp_path / "self" / "status").write_text("VmPeak:  9 kB\nVmSize:     1024 kB\n")
    limits = tmp_path / "self" / "limits"
    for limit, free in (
        ("unlimited", 8 << 20),
        (3 << 20, 2 << 20),
        (1 << 19, 0),
        (64 << 20, 8 << 20),
    ):
        limits.write_text(
            "Limit                     Soft Limit           Hard Limit           Units\n"
            f"Max address space         {limit}                unlimited            bytes\n"
        )
        assert available_memory(CPU, proc=tmp_path, control_groups=tmp_path) == free


@pytest.mark.slow
def test_under_a_limit_the_command_ends_with_one_sentence(tmp_path):
    program = (
        f"{sys.executable} -m rarebit train --model fm --rows 2000 --epochs 1 --set model.dim=20000"
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 3000000; exec {program} --out {tmp_path / 'run'}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search(r"building the model fm .* are free; dim=\d+ would fit", said)
    assert "Traceback" not in said
