"""The kernel of packed tables, compiled, refused and done without."""

import logging
import os
import shlex
import shutil

import pytest
import torch
from capabilities import needs
from torch import nn

from rarebit.codes import packed as module
from rarebit.codes.packed import Pack, PackedTable, load_packed_kernel, packed_kernel
from rarebit.tables import compiler as compiled
from rarebit.tables.compiler import COMPILERS
from rarebit.training.optimizers import load_row_kernel

WANTED = [*shlex.split(os.environ.get("CXX", ""))[:1], *COMPILERS]
needs_compiler = needs("C++ compiler", any(map(shutil.which, WANTED)), "none is on the path")
WEIGHT = torch.eye(70, 9)


def environment(cache, **changes):
    kept = {k: v for k, v in os.environ.items() if k != "RAREBIT_COMPILE"}
    return kept | {"XDG_CACHE_HOME": str(cache), **changes}


def small_table() -> PackedTable:
    return Pack().wrap(nn.Embedding.from_pretrained(WEIGHT))


@pytest.fixture
def fresh():
    """Ask for the kernel anew in this test, and again afterwards."""
    packed_kernel.cache_clear()
    yield
    packed_kernel.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """Compile without optimisation, for tests that only ask whether a library comes out."""
    monkeypatch.setattr(compiled, "FLAGS", ("-std=c++17", "-shared", "-fPIC"))
    monkeypatch.setattr(compiled, "CHOICES", ((),))


def test_without_a_compiler_that_is_said_once_and_torch_does_it(
    fresh, tmp_path, monkeypatch, caplog
):
    for name, value in environment(tmp_path, PATH="", CXX="", RAREBIT_COMPILE="1").items():
        monkeypatch.setenv(name, value)
    table = small_table()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(table(torch.arange(70)), WEIGHT)
    (said,) = caplog.messages
    assert said.startswith("no C++ compiler made a kernel for packed tables")
    assert "\n" not in said


def test_switched_off_nothing_is_said(fresh, monkeypatch, caplog):
    monkeypatch.setenv("RAREBIT_COMPILE", "0")
    assert packed_kernel() is None
    assert torch.equal(small_table()(torch.arange(70)), WEIGHT)
    assert caplog.messages == []


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row[column] =", "row[0] ="),
        ("put(column, position++)", "put(column, position)"),
        ("if (static_cast<uint64_t>(id) >=", "if (id < 0 && static_cast<uint64_t>(id) >="),
    ],
)
def test_a_library_that_is_wrong_gives_no_kernel(tmp_path, monkeypatch, quick, right, wrong):
    text = module.SOURCE.read_text("utf-8")
    source = tmp_path / "wrong.cpp"
    source.write_text(text.replace(right, wrong))
    assert source.read_text() != text
    monkeypatch.setattr(module, "SOURCE", source)
    assert load_packed_kernel(environment(tmp_path / "cache")) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []


@needs_compiler
def test_both_kernels_lie_in_one_cache_under_their_own_names(tmp_path, quick):
    chosen = environment(tmp_path)
    assert load_packed_kernel(chosen) is not None
    assert load_row_kernel(chosen) is not None
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "rarebit").iterdir())
    assert names == ["packed_kernel", "row_kernel"]
