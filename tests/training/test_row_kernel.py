"""The compiled kernel for row-wise optimizers, against loops over the rows."""

import math
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rarebit.errors import DataError
from rarebit.tables import compiler as compiled
from rarebit.tables.compiler import COMPILERS
from rarebit.training import optimizers as module
from rarebit.training.optimizers import load_row_kernel, suits

SOURCES = Path(module.__file__).parents[2]
WANTED = [*shlex.split(os.environ.get("CXX", ""))[:1], *COMPILERS]
needs_compiler = needs("C++ compiler", any(map(shutil.which, WANTED)), "none is on the path")

# One rounding is 6e-8; sums of 40 numbers and the few operations of an update make some of them.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
RULES = ("adam", "adagrad", "sgd", "momentum")
ADAM = {"betas": (0.9, 0.99), "eps": 1e-8, "step": 7}


def environment(cache, **changes):
    kept = {k: v for k, v in os.environ.items() if k != "RAREBIT_COMPILE"}
    return kept | {"XDG_CACHE_HOME": str(cache), **changes}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(cache):
    kernel = load_row_kernel(environment(cache))
    assert kernel is not None, "there is a compiler, so there must be a kernel"
    return kernel


def make_table(rows, dim):
    """Return weight and states, positive as sums of squares are."""
    return {
        "weight": torch.randn(rows, dim),
        "exp_avg": torch.randn(rows, dim),
        "exp_avg_sq": torch.rand(rows, dim),
        "sums": torch.rand(rows),
        "buffer": torch.randn(rows, dim),
    }


def step(kernel, rule, ids, values, table, *, lr=0.1, weight_decay=0.0, decoupled=False, **adam):
    weight = table["weight"]
    common = {"lr": lr, "weight_decay": weight_decay, "decoupled": decoupled}
    if rule == "adam":
        states = table["exp_avg"], table["exp_avg_sq"]
        kernel.adam(ids, values, weight, *states, **common, **ADAM | adam)
    elif rule == "adagrad":
        kernel.adagrad(ids, values, weight, table["sums"], eps=1e-8, **common)
    elif rule == "momentum":
        kernel.sgd(ids, values, weight, table["buffer"], momentum=0.9, **common)
    else:
        kernel.sgd(ids, values, weight, None, momentum=0.0, **common)


def step_by_hand(rule, ids, values, table, *, lr=0.1, weight_decay=0.0, decoupled=False):
    """Return the table after one step, row by row in float64, without tricks."""
    after = {name: tensor.double() for name, tensor in table.items()}
    for row in set(ids.tolist()):
        w = after["weight"][row]
        g = torch.zeros_like(w)
        for lookup, value in zip(ids.tolist(), values.double(), strict=True):
            if lookup == row:
                g = g + value
        if decoupled:
            w *= 1 - lr * weight_decay
        else:
            g = g + weight_decay * w
        if rule == "adam":
            (b1, b2), t = ADAM["betas"], ADAM["step"]
            m, v = after["exp_avg"][row], after["exp_avg_sq"][row]
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            w -= lr / (1 - b1**t) * m / (v.sqrt() / math.sqrt(1 - b2**t) + ADAM["eps"])
        elif rule == "adagrad":
            after["sums"][row] += (g * g).mean()
            w -= lr * g / (after["sums"][row].sqrt() + 1e-8)
        elif rule == "momentum":
            b = after["buffer"][row]
            b.copy_(0.9 * b + g)
            w -= lr * b
        else:
            w -= lr * g
    return after


def copy_of(table):
    return {name: tensor.clone() for name, tensor in table.items()}


def assert_same_bits(left, right, rows=slice(None)):
    for name, tensor in left.items():
        assert torch.equal(tensor[rows].view(torch.int32), right[name][rows].view(torch.int32)), (
            name
        )


lookups = st.integers(1, 30).flatmap(
    lambda rows: st.tuples(st.just(rows), st.lists(st.integers(0, rows - 1), max_size=40))
)
decays = st.fixed_dictionaries(
    {"weight_decay": st.sampled_from([0.0, 0.3]), "decoupled": st.booleans()}
)


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
@given(lookups=lookups, dim=st.integers(1, 20), settings=decays)
def test_a_step_equals_the_loop(kernel, rule, lookups, dim, settings):
    rows, ids = lookups
    ids = torch.tensor(ids, dtype=torch.int64)
    values, table = torch.randn(len(ids), dim), make_table(rows, dim)
    before, gradient = copy_of(table), values.clone()
    step(kernel, rule, ids, values, table, **settings)
    expected = step_by_hand(rule, ids, values, before, **settings)
    for name, tensor in table.items():
        torch.testing.assert_close(tensor, expected[name].float(), **TOLERANCE)
    untouched = [row for row in range(rows) if row not in ids]
    assert_same_bits(table, before, untouched)
    assert torch.equal(values, gradient)


@needs_compiler
@pytest.mark.parametrize("dim", [32, 64, 100])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_wide_rows_equals_the_loop(kernel, rule, dim):
    ids, values = torch.tensor([5, 0, 5, 3]), torch.randn(4, dim)
    table = make_table(6, dim)
    expected = step_by_hand(rule, ids, values, table, weight_decay=0.3)
    step(kernel, rule, ids, values, table, weight_decay=0.3)
    for name, tensor in table.items():
        torch.testing.assert_close(tensor, expected[name].float(), **TOLERANCE)


@needs_compiler
@given(lookups=lookups, dim=st.integers(1, 20))
def test_merge_adds_in_the_order_of_the_lookups(kernel, lookups, dim):
    ids = torch.tensor(lookups[1], dtype=torch.int64)
    values = torch.randn(len(ids), dim)
    sums = {}
    for row, value in zip(ids.tolist(), values, strict=True):
        sums[row] = sums[row] + value if row in sums else value
    rows, merged = kernel.merge(ids, values)
    assert rows.dtype == torch.int64
    assert rows.tolist() == sorted(sums)
    assert merged.shape == (len(sums), dim)
    for row, total in zip(rows.tolist(), merged, strict=True):
        assert torch.equal(total, sums[row])  # the same additions: the same bits


@needs_compiler
@pytest.mark.parametrize("largest", [0, 1, 2**11 - 1, 2**11, 2**22, 2**40, 2**62, 2**63 - 2])
def test_merge_sorts_ids_of_any_size(kernel, largest):
    ids = torch.randint(0, largest + 1, (300,))
    ids[7] = ids[250] = largest
    rows, sums = kernel.merge(ids, torch.ones(300, 1))
    expected, counts = ids.unique(return_counts=True)
    assert torch.equal(rows, expected)
    assert torch.equal(sums.flatten(), counts.float())


@needs_compiler
def test_adam_without_history_steps_by_the_learning_rate(kernel):
    table = {name: torch.zeros_like(tensor) for name, tensor in make_table(3, 2).items()}
    values = torch.tensor([[4.0, -5.0], [1.0, 2.0]])
    step(kernel, "adam", torch.tensor([2, 2]), values, table, step=1)
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-0.1, 0.1]])
    torch.testing.assert_close(table["weight"], expected)


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
def test_no_lookups_change_nothing(kernel, rule):
    table = make_table(4, 3)
    before = copy_of(table)
    step(kernel, rule, torch.empty(0, dtype=torch.int64), torch.empty(0, 3), table, weight_decay=1)
    assert_same_bits(table, before)


@needs_compiler
@pytest.mark.threads(2)
@pytest.mark.parametrize("dim", [1, 7, 16])
@pytest.mark.parametrize("rule", RULES)
def test_threads_do_not_change_the_bits(kernel, rule, dim):
    ids = (torch.rand(20_000).square() * 5_000).long()  # popular rows, and more than one turn each
    values, on_two = torch.randn(len(ids), dim), make_table(5_000, dim)
    on_one = copy_of(on_two)
    step(kernel, rule, ids, values, on_two, weight_decay=0.1)
    torch.set_num_threads(1)
    step(kernel, rule, ids, values, on_one, weight_decay=0.1)
    assert_same_bits(on_two, on_one)


@needs_compiler
@pytest.mark.threads(2)
@pytest.mark.parametrize("dim", [16, 100])
def test_threads_do_not_get_in_each_others_way(kernel, dim):
    ids = torch.randint(0, 5_000, (10_000,))
    values = torch.randn(len(ids), dim)
    # many, since on a busy machine the second thread may come too late to have a part
    tries = [kernel.merge(ids, values) for _ in range(40)]
    rows = ids.unique()
    order = ids.argsort(stable=True)
    starts = torch.searchsorted(ids[order], rows)
    expected = nn.functional.embedding_bag(order, values, starts, mode="sum")
    torch.testing.assert_close(tries[0][1], expected)
    for found, sums in tries:
        assert torch.equal(found, rows)
        assert torch.equal(sums, tries[0][1])


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_an_id_out_of_range_is_refused_before_anything_is_written(kernel, rule, bad):
    table = make_table(4, 3)
    before = copy_of(table)
    ids = torch.tensor([0, bad, 1])
    with pytest.raises(DataError, match=f"below 4, the table's rows; got ids from .*{bad}"):
        step(kernel, rule, ids, torch.randn(3, 3), table)
    assert_same_bits(table, before)


@needs_compiler
def test_merge_refuses_ids_below_zero(kernel):
    with pytest.raises(DataError, match="ids must be 0 or more; got ids from -1 to 2"):
        kernel.merge(torch.tensor([2, -1]), torch.randn(2, 3))


@needs_compiler
def test_the_order_that_is_kept_is_used_for_the_same_ids_only(kernel):
    first, other = torch.randint(0, 50, (200,)), torch.randint(0, 50, (200,))
    last_differs = other.clone()
    last_differs[-1] = (last_differs[-1] + 1) % 50
    for ids in (first, first.clone(), other, last_differs, last_differs[:-1], first):
        for dim in (10, 1):
            table, values = make_table(50, dim), torch.randn(len(ids), dim)
            expected = step_by_hand("sgd", ids, values, table)
            step(kernel, "sgd", ids, values, table)
            torch.testing.assert_close(table["weight"], expected["weight"].float(), **TOLERANCE)


@needs_compiler
def test_the_order_that_is_kept_is_checked_against_each_table(kernel):
    ids, values = torch.tensor([1, 5, 1]), torch.randn(3, 2)
    step(kernel, "sgd", ids, values, make_table(6, 2))
    smaller = make_table(5, 2)
    before = copy_of(smaller)
    with pytest.raises(DataError, match="below 5"):
        step(kernel, "sgd", ids, values, smaller)
    assert_same_bits(smaller, before)
    with pytest.raises(DataError, match="below 5"):
        step(kernel, "sgd", torch.tensor([1, 9, 1]), values, smaller)
    step(kernel, "sgd", ids, values, make_table(6, 2))  # what was refused left nothing behind


@needs_compiler
@pytest.mark.parametrize("dim", [3, 16])
@pytest.mark.parametrize("rule", RULES)
def test_nan_reaches_its_own_row_only(kernel, rule, dim):
    ids, values, table = torch.tensor([1, 3, 1]), torch.randn(3, dim), make_table(5, dim)
    values[2, 0] = math.nan
    before = copy_of(table)
    step(kernel, rule, ids, values, table)
    assert table["weight"][1, 0].isnan()
    assert table["weight"][[0, 2, 3, 4]].isfinite().all()
    assert_same_bits(table, before, [0, 2, 4])


@needs_compiler
def test_an_infinite_weight_without_decay_is_not_mixed_into_the_gradient(kernel):
    table = make_table(2, 3)
    table["weight"][0, 0] = math.inf
    step(kernel, "momentum", torch.tensor([0]), torch.ones(1, 3), table)
    assert table["buffer"].isfinite().all()


@needs_compiler
def test_a_backward_through_rows_from_before_the_step_raises(kernel):
    weight = nn.Parameter(torch.randn(4, 2))
    loss = weight.square().sum()
    kernel.sgd(
        torch.tensor([1]),
        torch.ones(1, 2),
        weight,
        None,
        lr=0.1,
        momentum=0.0,
        weight_decay=0.0,
        decoupled=False,
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
@pytest.mark.parametrize(
    ("ids", "values", "match"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3), "ids .T,. in int64"),
        (torch.zeros(4, dtype=torch.int64)[::2], torch.zeros(2, 3), "contiguous"),
        (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 3), r"got \(2, 1\)"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3).double(), "torch.float64"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, 2).T, "contiguous"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, 3), "each of the 2 ids"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0), "at least one number wide"),
    ],
)
def test_lookups_of_another_form_are_refused(kernel, ids, values, match):
    with pytest.raises(DataError, match=match):
        kernel.merge(ids, values)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "name", "wrong", "match"),
    [
        ("sgd", "weight", torch.zeros(4, 2), "as wide as the values"),
        ("sgd", "weight", torch.zeros(3, 4).T, "contiguous"),
        ("adam", "exp_avg", torch.zeros(3, 3), "states of its shape"),
        ("adam", "exp_avg_sq", torch.zeros(4, 3).double(), "float32"),
        ("momentum", "buffer", torch.zeros(4), "states of its shape"),
        ("adagrad", "sums", torch.zeros(4, 3), "one number per row, 4 contiguous float32"),
        ("adagrad", "sums", torch.zeros(4).double(), "torch.float64"),
    ],
)
def test_a_table_of_another_form_is_refused(kernel, rule, name, wrong, match):
    table = make_table(4, 3) | {name: wrong}
    with pytest.raises(DataError, match=match):
        step(kernel, rule, torch.tensor([1]), torch.ones(1, 3), table)


def test_suits_only_what_can_be_read_by_address():
    plain = torch.zeros(4, 3)
    assert suits()
    assert suits(plain, nn.Parameter(plain), plain[1:3])
    assert not suits(plain, plain.half())
    assert not suits(plain[:, 1:])
    assert not suits(plain.to_sparse())
    assert not suits(torch.zeros(4, 3, device="meta"))
    assert not suits(plain.as_subclass(type("Own", (torch.Tensor,), {})))


# ------------------------------------------------------------------------- compiling and the cache


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# Without optimisation, for tests that only ask whether a library comes out.
QUICK_FLAGS = ("-std=c++17", "-shared", "-fPIC")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(compiled, "FLAGS", QUICK_FLAGS)
    monkeypatch.setattr(compiled, "CHOICES", ((),))


def test_switched_off_there_is_no_kernel(tmp_path):
    assert load_row_kernel(environment(tmp_path, RAREBIT_COMPILE="0")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compiler", ["", "none-of-that-name", "'an open quote", "{broken} -v"])
def test_without_a_compiler_that_works_there_is_no_kernel(tmp_path, compiler):
    broken = script(tmp_path / "broken", 'echo version 1; case "$*" in *cpp*) exit 1;; esac')
    chosen = environment(tmp_path / "cache", PATH="", CXX=compiler.format(broken=broken))
    assert load_row_kernel(chosen) is None


def test_a_compiler_whose_output_is_no_library_gives_no_kernel(tmp_path):
    text = 'for last; do :; done\ncase "$last" in *.so) echo nonsense > "$last";; esac'
    liar = script(tmp_path / "liar", text)
    (tmp_path / "cache").mkdir()
    assert load_row_kernel(environment(tmp_path / "cache", PATH="", CXX=liar)) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []


@pytest.mark.slow
@needs_compiler
def test_a_library_that_computes_wrongly_gives_no_kernel(tmp_path, monkeypatch, quick):
    right = module.SOURCE.read_text("utf-8")
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(right.replace("w[i] -= lr * gradient[i];", "w[i] += lr * gradient[i];"))
    assert wrong.read_text() != right
    monkeypatch.setattr(module, "SOURCE", wrong)
    assert load_row_kernel(environment(tmp_path / "cache")) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []


@needs_compiler
def test_the_compiler_runs_once_and_the_cache_serves_from_then_on(kernel, cache):
    (library,) = (cache / "rarebit").iterdir()
    written = library.stat().st_mtime_ns
    assert load_row_kernel(environment(cache)) is not None
    assert [path.name for path in (cache / "rarebit").iterdir()] == [library.name]
    assert library.stat().st_mtime_ns == written


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, quick):
    (tmp_path / "file").write_text("no folder can be made under a file")
    assert load_row_kernel(environment(tmp_path / "file")) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@needs_compiler
def test_flags_that_a_compiler_does_not_know_are_left_out(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(compiled, "CHOICES", (("--no-such-flag",), ()))
    kernel = load_row_kernel(environment(tmp_path))
    assert kernel.merge(torch.tensor([3, 3]), torch.ones(2, 1))[1].tolist() == [[2.0]]


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path):
    code = (
        "import torch\n"
        "from rarebit.tables import compiler\n"
        "from rarebit.training.optimizers import row_kernel\n"
        f"compiler.FLAGS, compiler.CHOICES = {QUICK_FLAGS}, ((),)\n"
        "print(row_kernel().merge(torch.tensor([4, 2, 4]), torch.ones(3, 1)))"
    )
    paths = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(tmp_path, **paths),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [process.communicate()[0] for process in processes]
    assert told[0] == told[1]
    assert "tensor([2, 4])" in told[0]
    assert len(list((tmp_path / "rarebit").iterdir())) == 1


def test_the_cache_lies_where_the_user_keeps_caches():
    assert compiled._cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/rarebit")
    assert compiled._cache_folder({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == Path(
        "/h/.cache/rarebit"
    )
    assert compiled._cache_folder({"HOME": "/h"}) == Path("/h/.cache/rarebit")
    assert compiled._cache_folder({}) is None
