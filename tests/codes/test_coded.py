"""Coded tables against their equation in plain numbers; the compiled lookup against plain torch; bytes from elsewhere."""

import copy
import logging
import math
import os
import pickle
import shlex
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from capabilities import TRITON_DEVICE, needs, needs_cuda, needs_interpreter, needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import rarebit as rb
from rarebit.codes import coded, rows_triton
from rarebit.codes.coded import (
    CodedKernel,
    CodedStack,
    CodedTable,
    Layout,
    Origin,
    code_of_step,
    coded_kernel,
    pack_codes,
    step_of,
)
from rarebit.tables import compiler
from rarebit.tables.bag import Bag
from rarebit.tables.compiler import COMPILERS, load_compiled

WANTED = [*shlex.split(os.environ.get("CXX", ""))[:1], *COMPILERS]
needs_compiler = needs("C++ compiler", any(map(shutil.which, WANTED)), "none is on the path")
METHOD = rb.EvidenceCoding()
HEADER = 16
WIDTHS = (1, 3, 8, 10, 16, 33)


def drawn(
    rows: int,
    width: int,
    directions: int,
    classes: int,
    seed: int = 0,
    *,
    by_row: bool = False,
    most_bits: int = 8,
) -> tuple[Layout, np.ndarray]:
    """Return a random layout in one of both forms, and the integers of its rows `(N, r)`."""
    draw = np.random.default_rng(seed)
    directions = min(directions, width)
    basis = draw.normal(size=(directions, width))
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    bits = draw.integers(0, most_bits, (classes, directions), endpoint=True).astype(np.uint8)
    kinds = draw.integers(0, classes, rows).astype(np.uint8)
    starts = None
    if not by_row:
        starts = np.unique([0, *draw.integers(0, rows, 2 * classes)]).astype(np.uint32)
    layout = Layout(
        rows=rows,
        basis=basis.astype(np.float16),
        means=draw.normal(size=(classes, width)).astype(np.float16),
        bits=bits,
        steps=draw.integers(176, 200, (classes, directions)).astype(np.uint8),  # 1/4 to 2
        classes=kinds if starts is None else kinds[starts],
        starts=starts,
    )
    numbers = draw.integers(0, 2 ** bits.astype(np.int64)[layout.class_of_rows.astype(np.int64)])
    return layout, numbers.astype(np.uint8)


def table_of(layout: Layout, numbers: np.ndarray, **origin: object) -> CodedTable:
    blob = layout.write(pack_codes(layout, numbers))
    like = torch.empty(0, dtype=torch.float32)
    return CodedTable(METHOD, blob, like, Origin(layout.rows, layout.width, **origin))


def naive_rows(blob: Tensor) -> Tensor:
    """Return all rows of a list of bytes by the equation, with loops over Python's own numbers."""
    data = bytes(blob.tolist())
    rows, width, directions, classes, runs = struct.unpack("<IHHII", data[:HEADER])
    place = HEADER

    def take(size: int) -> bytes:
        nonlocal place
        place += size
        return data[place - size : place]

    def matrix(height: int) -> list[list[float]]:
        return [list(struct.unpack(f"<{width}e", take(2 * width))) for _ in range(height)]

    directions_of, means = matrix(directions), matrix(classes)
    bits = [list(take(directions)) for _ in range(classes)]
    steps = [[2.0 ** (byte / 8 - 24) for byte in take(directions)] for _ in range(classes)]
    if runs:
        starts = struct.unpack(f"<{runs}I", take(4 * runs))
        own = list(take(runs))
        kinds = [own[max(k for k in range(runs) if starts[k] <= i)] for i in range(rows)]
    else:
        pairs = take(math.ceil(rows / 2))
        kinds = [pairs[i // 2] >> 4 * (i % 2) & 15 for i in range(rows)]
    found, bit = [], 8 * place
    for kind in kinds:
        row = list(means[kind])
        for j in range(directions):
            number = 0
            for k in range(bits[kind][j]):
                number += (data[bit // 8] >> bit % 8 & 1) << k
                bit += 1
            if bits[kind][j]:
                factor = (number - 2 ** (bits[kind][j] - 1) + 0.5) * steps[kind][j]
                row = [value + factor * u for value, u in zip(row, directions_of[j], strict=True)]
        found.append(row)
    assert math.ceil(bit / 8) == len(data)
    return torch.tensor(found, dtype=torch.float64).view(rows, width)


def by_torch(table: CodedTable, ids: Tensor) -> Tensor:
    """Return rows as they are looked up where nothing is compiled."""
    return table.decoder(table.blob, ids, torch.zeros_like(ids)).to(table.like.dtype)


def look_up(kernel: CodedKernel, table: CodedTable, ids: Tensor) -> Tensor | None:
    rows = kernel.rows(ids.unsqueeze(-1), table.blob, table.decoder, table.tables)
    return None if rows is None else rows.squeeze(-2)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether all numbers are the same; both zeros are one number."""
    return found.dtype == expected.dtype and torch.equal(found, expected)


layouts = st.builds(
    drawn,
    rows=st.sampled_from([1, 2, 9, 64, 65, 70]),
    width=st.sampled_from(WIDTHS),
    directions=st.sampled_from([0, 1, 3, 8, 33]),
    classes=st.sampled_from([1, 2, 5, 16]),
    seed=st.integers(0, 99),
    by_row=st.booleans(),
    most_bits=st.sampled_from([0, 1, 3, 8]),
)


def environment(cache: object, **changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "RAREBIT_COMPILE"}
    return kept | {"XDG_CACHE_HOME": str(cache), **changes}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(cache):
    kernel = load_compiled(coded.SOURCE, coded._tried, environment(cache))
    assert kernel is not None, "there is a compiler, so there must be a kernel"
    return kernel


@pytest.fixture(params=[pytest.param("kernel", marks=needs_compiler), "torch"])
def path(request, cache, monkeypatch):
    """Let tables be looked up by the kernel, or without one."""
    for name, value in environment(cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAREBIT_COMPILE", "1" if request.param == "kernel" else "0")
    coded_kernel.cache_clear()
    assert (coded_kernel() is None) == (request.param == "torch")
    yield request.param
    coded_kernel.cache_clear()


# ---- the equation


@settings(max_examples=60)
@given(drawn=layouts)
def test_rows_are_those_of_the_equation(drawn):
    layout, numbers = drawn
    table = table_of(layout, numbers)
    found = by_torch(table, torch.arange(layout.rows))
    largest = 4.0 + float((2.0**layout.bits * step_of(layout.steps)).sum(axis=1).max(initial=0))
    assert_close(found.double(), naive_rows(table.blob), rtol=0, atol=1e-6 * largest)


@needs_compiler
@given(drawn=layouts, count=st.sampled_from([0, 1, 63, 64, 65, 200]), seed=st.integers(0, 9))
def test_the_kernel_gives_the_bits_of_torch(kernel, drawn, count, seed):
    layout, numbers = drawn
    table = table_of(layout, numbers)
    ids = torch.randint(layout.rows, (count,), generator=torch.Generator().manual_seed(seed))
    ids[:2] = torch.tensor([layout.rows - 1, 0])[:count]
    rows = look_up(kernel, table, ids)
    assert rows.shape == (count, layout.width)
    assert same_bits(rows, by_torch(table, ids))


def test_a_row_worked_by_hand():
    layout = Layout.of(
        np.array([0] * 11 + [1], np.uint8),
        basis=np.array([[1.0, 0.0], [0.0, -1.0]]),
        means=np.array([[10.0, 20.0], [1.0, 2.0]]),
        bits=np.array([[2, 3], [0, 1]], np.uint8),
        steps=code_of_step(np.array([[1.0, 2.0], [1.0, 4.0]])),
    )
    numbers = np.zeros((12, 2), np.uint8)
    numbers[0], numbers[10], numbers[11] = (3, 4), (0, 7), (0, 1)
    table = table_of(layout, numbers)
    # (3 - 2 + 1/2) 1 and (4 - 4 + 1/2) 2 along (0, -1)
    assert table(torch.tensor(0)).tolist() == [11.5, 19.0]
    assert table(torch.tensor(10)).tolist() == [8.5, 13.0]
    assert table(torch.tensor(11)).tolist() == [1.0, 0.0]
    # 16 bytes; two directions and two means of 4; 2 x 2 bits and steps; 12 half bytes; 56 bits
    assert len(table.blob) == 16 + 8 + 8 + 4 + 4 + 6 + 7
    assert table.blob[-7:].tolist()[0] == 0b10011


def test_rows_without_bits_are_the_means_of_their_classes():
    layout, numbers = drawn(100, 3, 0, 4)
    found = table_of(layout, numbers)(torch.arange(100))
    assert same_bits(
        found,
        torch.from_numpy(layout.means.astype(np.float32))[layout.class_of_rows.astype(np.int64)],
    )


@given(codes=st.lists(st.integers(0, 255), min_size=1))
def test_steps_are_eighths_of_octaves_and_come_back(codes):
    steps = step_of(np.array(codes))
    assert steps.tolist() == pytest.approx([2 ** (code / 8 - 24) for code in codes])
    assert code_of_step(steps * 1.04).tolist() == codes
    assert code_of_step(steps * 0.96).tolist() == codes
    assert code_of_step(np.array([0.0, 1e-30, 1e30])).tolist() == [0, 0, 255]


# ---- the list of bytes


@given(drawn=layouts)
def test_a_layout_comes_back_from_its_bytes(drawn):
    layout, numbers = drawn
    codes = pack_codes(layout, numbers)
    blob = layout.write(codes)
    again, size = Layout.read(blob, layout.rows, layout.width)
    assert size == len(blob) == layout.num_bytes == again.num_bytes
    assert layout.num_bytes_before_codes == len(blob) - math.ceil(layout.num_bits / 8)
    for name in ("basis", "means", "bits", "steps", "classes"):
        assert np.array_equal(getattr(again, name), getattr(layout, name))
    assert np.array_equal(again.class_of_rows, layout.class_of_rows)
    assert (again.starts is None) == (layout.starts is None)
    assert torch.equal(again.write(codes), blob)


@given(
    kinds=st.lists(st.integers(0, 19), min_size=1, max_size=60),
    repeat=st.sampled_from([1, 9, 40]),
)
def test_the_smaller_form_is_taken(kinds, repeat):
    classes = np.repeat(np.array(kinds, np.uint8), repeat)
    nothing = np.zeros((20, 0), np.uint8)
    many = Layout.of(classes, np.zeros((0, 2)), np.zeros((20, 2)), nothing, nothing)
    assert many.starts is not None  # half a byte does not name 20 classes
    few = Layout.of(classes // 2, np.zeros((0, 2)), np.zeros((10, 2)), nothing[:10], nothing[:10])
    num_runs = 1 + sum(a != b for a, b in pairwise((classes // 2).tolist()))
    small = HEADER + 10 * 2 * 2
    assert few.num_bytes == small + min(5 * num_runs, math.ceil(len(classes) / 2))
    assert np.array_equal(few.class_of_rows, classes // 2)
    assert np.array_equal(many.class_of_rows, classes)


@pytest.mark.parametrize("by_row", [False, True])
def test_bits_are_packed_in_chunks_without_a_gap(by_row, monkeypatch):
    layout, numbers = drawn(130, 5, 3, 4, by_row=by_row)
    whole = pack_codes(layout, numbers)
    monkeypatch.setattr(coded, "CHUNK", 7)
    assert np.array_equal(pack_codes(layout, numbers), whole)


# ---- ids


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("wrong", [-1, 70, 127, 2**40, -(2**63), 2**63 - 1])
def test_ids_without_a_row_are_refused(path, by_row, wrong):
    table = table_of(*drawn(70, 8, 5, 6, by_row=by_row))
    with pytest.raises(IndexError, match=f"id {wrong} has no row"):
        table(torch.tensor([[3, 69], [wrong, 0]]))
    assert table(torch.tensor([69])).shape == (1, 8)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_ids_may_have_any_shape_and_kind(path, by_row, width):
    table = table_of(*drawn(70, width, 5, 6, by_row=by_row))
    every = by_torch(table, torch.arange(70))
    for shape in ((), (0,), (3, 0), (1,), (13,), (4, 3, 5)):
        ids = torch.randint(70, shape)
        assert same_bits(table(ids), every[ids].view(*shape, width))
    ids = torch.randint(70, (6, 8))
    for other in (ids.int(), ids.short(), ids.to(torch.uint8)):
        assert same_bits(table(other), every[ids])
    assert same_bits(table(ids.T), every[ids.T])
    assert same_bits(table(ids[:, ::3]), every[ids[:, ::3]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
def test_rows_have_the_precision_of_the_table(path, dtype, by_row):
    table = table_of(*drawn(70, 8, 5, 6, by_row=by_row))
    before = table(torch.arange(70))
    table.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(table(torch.arange(70)), before.to(dtype))
    assert table.merge().weight.dtype == dtype
    assert same_bits(table.float()(torch.arange(70)), before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_pool_the_same_rows(path, mode):
    table = table_of(*drawn(70, 8, 5, 6), padding=3)
    plain = nn.EmbeddingBag.from_pretrained(table.weight.clone(), mode=mode, padding_idx=3)
    bag = Bag(table, mode=mode, include_last_offset=False)
    ids, offsets = torch.tensor([3, 4, 4, 69, 0, 3]), torch.tensor([0, 2, 5])
    assert same_bits(bag(ids, offsets), plain(ids, offsets))


def test_the_padding_row_is_zero_whatever_its_bits(path):
    table = table_of(*drawn(70, 8, 5, 6), padding=3)
    rows = table(torch.tensor([3, 4]))
    assert not rows[0].any()
    assert rows[1].all()
    assert not table.merge().weight[3].any()
    assert table.merge().padding_idx == 3


def test_copies_have_the_same_rows(path):
    table = table_of(*drawn(70, 8, 5, 6))
    rows = table(torch.arange(70))
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):  # noqa: S301  # our own
        assert other.blob.data_ptr() != table.blob.data_ptr()
        assert same_bits(other(torch.arange(70)), rows)


# ---- stacks


def some_tables(forms: str) -> list[CodedTable]:
    sizes = (70, 9, 130)
    return [
        table_of(*drawn(rows, 8, 3 + k, 2 + 3 * k, seed=k, by_row=form == "b"), padding=k or None)
        for k, (rows, form) in enumerate(zip(sizes, forms, strict=True))
    ]


@pytest.mark.parametrize("forms", ["rrr", "bbb", "brb"])
def test_a_stack_looks_up_what_each_table_does(path, forms):
    tables = some_tables(forms)
    stack = CodedStack(METHOD, tables, (1, 3, 2))
    ids = torch.cat([torch.randint(t.num_embeddings, (20, n)) for t, n in zip(tables, (1, 3, 2), strict=True)], 1)  # fmt: skip
    columns = ids.split((1, 3, 2), dim=1)
    expected = torch.cat([t.rows(c) for t, c in zip(tables, columns, strict=True)], dim=1)
    assert same_bits(stack(ids), expected)
    assert same_bits(stack(ids.view(2, 10, 6)), expected.view(2, 10, 6, 8))
    assert same_bits(stack(ids.int()), expected)
    assert stack(ids[:0]).shape == (0, 6, 8)
    for slot, size in ((0, 70), (3, 9), (5, 130)):
        for wrong in (size, -1):
            bad = ids.clone()
            bad[7, slot] = wrong
            with pytest.raises(IndexError, match=f"id {wrong} has no row"):
                stack(bad)


@pytest.mark.parametrize("forms", ["rrr", "brb"])
def test_a_stack_splits_into_its_tables_without_a_copy(forms):
    tables = some_tables(forms)
    stack = CodedStack(METHOD, tables, (1, 1, 1))
    starts = [0, len(tables[0].blob), len(tables[0].blob) + len(tables[1].blob)]
    for part, table, start in zip(stack.split(), tables, starts, strict=True):
        assert part.blob.data_ptr() == stack.blob.data_ptr() + start
        assert same_bits(part.weight.clone(), table.weight.clone())
        assert (part.padding_idx, part.origin) == (table.padding_idx, table.origin)


def test_a_stack_stores_its_bytes_and_nothing_else():
    tables = some_tables("rbr")
    stack = CodedStack(METHOD, tables, (1, 1, 1))
    assert set(stack.state_dict()) == set(tables[0].state_dict()) == {"blob", "like"}
    assert len(stack.blob) == sum(len(table.blob) for table in tables)
    assert stack.like.numel() == 0


# ---- bytes that come from elsewhere

GOOD = {by_row: drawn(40, 3, 2, 3, by_row=by_row) for by_row in (False, True)}


def read_and_look_up(kernel: CodedKernel | None, blob: Tensor, rows: int, width: int) -> bool:
    """Return whether bytes are refused; where they are not, look all rows up."""
    origin = Origin(rows, width)
    try:
        table = CodedTable(METHOD, blob, torch.empty(0), origin)
    except ValueError:
        return True
    found = by_torch(table, torch.arange(rows))
    assert found.isfinite().all()
    if kernel is not None:
        assert same_bits(look_up(kernel, table, torch.arange(rows)), found)
    return False


@pytest.mark.parametrize("by_row", [False, True])
def test_every_truncation_and_every_extension_is_refused(by_row):
    layout, numbers = GOOD[by_row]
    blob = layout.write(pack_codes(layout, numbers))
    assert not read_and_look_up(None, blob, 40, 3)
    for size in range(len(blob)):
        assert read_and_look_up(None, blob[:size], 40, 3)
    for more in (1, 2, 100):
        assert read_and_look_up(None, torch.cat([blob, blob.new_zeros(more)]), 40, 3)


@needs_compiler
@pytest.mark.parametrize("by_row", [False, True])
@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1)
)
def test_changed_bytes_are_refused_or_rows_within_the_list(kernel, by_row, changes):
    layout, numbers = GOOD[by_row]
    blob = layout.write(pack_codes(layout, numbers))
    for place, change in changes:
        blob[int(place * layout.num_bytes_before_codes)] ^= change
    read_and_look_up(kernel, blob, 40, 3)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("by_row", [False, True])
@settings(max_examples=3000)
@given(data=st.data())
def test_random_bytes_behind_a_header_are_refused_or_rows_within_the_list(kernel, by_row, data):
    numbers = [data.draw(st.integers(0, most)) for most in (4, 5, 0 if by_row else 9)]
    header = struct.pack("<IHHII", 9, 3, *numbers)
    body = data.draw(st.binary(max_size=120))
    blob = torch.tensor(list(header + body), dtype=torch.uint8)
    for size in range(HEADER, len(blob) + 1):
        read_and_look_up(kernel, blob[:size].clone(), 9, 3)


@needs_compiler
@pytest.mark.parametrize("by_row", [False, True])
def test_each_byte_of_the_head_may_have_any_value(kernel, by_row):
    layout, numbers = GOOD[by_row]
    good = layout.write(pack_codes(layout, numbers))
    refused = 0
    for place in range(layout.num_bytes_before_codes):
        for value in (0, 1, 9, 127, 128, 255):
            blob = good.clone()
            blob[place] = value
            refused += read_and_look_up(kernel, blob, 40, 3)
    assert refused > HEADER  # most bytes of the header, if none of the others


def changed(layout: Layout, **parts: object) -> Tensor:
    """Return the bytes of a layout with other parts, long enough for any of them."""
    made = Layout(**vars(layout) | parts)
    return made.write(np.zeros(1000, np.uint8))


RUNS, ROWS = GOOD[False][0], GOOD[True][0]
HALF = np.float16


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (changed(RUNS)[:15], r"it is a list of torch.uint8 of shape \(15,\)"),
        (changed(RUNS).float(), "it is a list of torch.float32"),
        (changed(RUNS).bfloat16(), "it is a list of torch.bfloat16"),
        (changed(RUNS).view(torch.int8), "it is a list of torch.int8"),
        (changed(RUNS)[:100].view(2, 50), r"of shape \(2, 50\)"),
        (torch.tensor(7, dtype=torch.uint8), r"of shape \(1?,?\)"),
        (changed(RUNS, rows=41), "a table of 41 x 3, not 40 x 3"),
        (changed(RUNS, means=np.zeros((3, 4), HALF)), "a table of 40 x 4, not 40 x 3"),
        (changed(RUNS, basis=np.zeros((4, 3), HALF)), "it has 4 directions, 3 classes"),
        (changed(RUNS, means=np.zeros((0, 3), HALF)), "it has 2 directions, 0 classes"),
        (changed(RUNS, means=np.zeros((257, 3), HALF)), "257 classes"),
        (changed(RUNS, starts=np.arange(41, dtype=np.uint32)), "and 41 runs"),
        (changed(RUNS)[:60], "it is shorter than it says"),
        (changed(RUNS, basis=np.full((2, 3), np.nan, HALF)), "its rows are not finite"),
        (changed(ROWS, means=np.full((3, 3), -np.inf, HALF)), "its rows are not finite"),
        (changed(RUNS, bits=RUNS.bits * 0 + 9), "it has integers of 9 bits"),
        (changed(RUNS, classes=RUNS.classes * 0 + 3), "it names a class beyond its 3"),
        (changed(ROWS, classes=ROWS.classes * 0 + 3), "it names a class beyond its 3"),
        (changed(RUNS, starts=RUNS.starts + np.uint32(1)), "its runs are not in order"),
        (changed(RUNS, starts=RUNS.starts // 2), "its runs are not in order"),
        (changed(RUNS, starts=RUNS.starts * np.uint32(2)), "its runs are not in order"),
        (
            changed(
                ROWS,
                means=np.zeros((17, 3), HALF),
                bits=np.zeros((17, 2), np.uint8),
                steps=np.zeros((17, 2), np.uint8),
            ),
            "half a byte cannot name one of 17 classes",
        ),
        (changed(RUNS), r"bytes, and its tables? takes?"),
        (changed(RUNS)[: RUNS.num_bytes - 1], f"{RUNS.num_bytes - 1} of {RUNS.num_bytes} bytes"),
    ],
)
def test_what_is_wrong_is_said_and_the_table_keeps_its_rows(blob, message):
    table = table_of(*GOOD[False])
    stack = CodedStack(METHOD, [table], (1,))
    before = table.weight.clone()
    for one in (table, stack):
        with pytest.raises(ValueError, match=message):
            one.put(blob)
        assert one.take({"blob": blob}) is not None
    assert same_bits(table.weight.clone(), before)
    assert same_bits(stack(torch.arange(40).view(-1, 1)).squeeze(1), before)
    assert table.take({}) == "it lacks its bytes"


def test_a_stack_needs_the_bytes_of_all_its_tables():
    tables = some_tables("rbr")
    stack = CodedStack(METHOD, tables, (1, 1, 1))
    whole, ids = stack.blob.clone(), torch.tensor([[5, 5, 5]])
    before = stack(ids)
    for size in range(0, len(whole), 7):
        assert stack.take({"blob": whole[:size]}) is not None
    assert "of 130 x 8, not 70 x 8" in stack.take({"blob": torch.cat([tables[2].blob, whole])})
    assert f"and its tables take {len(whole)}" in stack.take({"blob": torch.cat([whole, whole])})
    assert same_bits(stack(ids), before)


@pytest.mark.parametrize("by_row", [False, True])
def test_a_table_takes_the_state_of_one_with_another_number_of_bytes(path, by_row):
    table = table_of(*drawn(70, 8, 5, 6, by_row=by_row))
    other = table_of(*drawn(70, 8, 2, 3, seed=1))
    assert len(table.blob) != len(other.blob)
    other.load_state_dict(table.state_dict())
    assert same_bits(other.weight.clone(), table.weight.clone())
    assert other.blob.data_ptr() != table.blob.data_ptr()
    other.load_state_dict({"blob": table.blob}, strict=False)
    with pytest.raises(RuntimeError, match=r"Missing key.*blob"):
        other.load_state_dict({"like": table.like})
    with pytest.raises(RuntimeError, match=r"the coded table '' is damaged: it has .* bytes"):
        other.load_state_dict(table.state_dict() | {"blob": table.blob[:-1]})
    assert same_bits(other.weight.clone(), table.weight.clone())


# ---- the kernel


@needs_compiler
@pytest.mark.threads(3)
@pytest.mark.parametrize("width", [16, 33])
@pytest.mark.parametrize("by_row", [False, True])
def test_threads_share_a_long_batch(kernel, width, by_row):
    table = table_of(*drawn(5_000, width, 7, 9, by_row=by_row))
    ids = torch.randint(5_000, (20_001,))
    expected = by_torch(table, ids)
    for _ in range(10):  # on a busy machine other threads may come too late to have a part
        assert same_bits(look_up(kernel, table, ids), expected)
    ids[19_999] = 5_000
    assert look_up(kernel, table, ids) is None


@needs_compiler
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("beyond", [8, 10**6, 2**62, -(10**6), -(2**62)])
def test_bits_beyond_the_list_are_not_read(kernel, by_row, beyond):
    table = table_of(*drawn(70, 8, 5, 1, by_row=by_row, most_bits=3))
    assert int(table.decoder.bits_of_row) > 0
    assert look_up(kernel, table, torch.arange(70)) is not None
    for name in ("run_bit", "block_bit"):
        getattr(table.decoder, name).add_(beyond)
    assert look_up(kernel, table, torch.arange(70)) is None


@needs_compiler
def test_tensors_of_another_form_are_left_to_torch(kernel):
    table, ids = table_of(*drawn(70, 8, 5, 6)), torch.arange(70)
    assert look_up(kernel, table, ids) is not None
    for wrong in (ids.int(), ids.to("meta"), ids.float()):
        assert look_up(kernel, table, wrong) is None
    blob = table.blob
    for other in (blob.long(), blob.repeat_interleave(2)[::2], blob.to("meta")):
        assert kernel.rows(ids.view(-1, 1), other, table.decoder, table.tables) is None
    assert kernel.rows(ids.view(-1, 1), blob, table.decoder, table.tables.int()) is None
    table.decoder.terms = table.decoder.terms.double()
    assert look_up(kernel, table, ids) is None


@needs_compiler
@pytest.mark.slow
def test_nothing_is_written_where_torch_makes_no_numbers(kernel):
    table, ids = table_of(*drawn(70, 8, 5, 6)), torch.arange(70)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert look_up(kernel, table, ids) is None
    with torch.device("meta"):
        rows = look_up(kernel, table, ids)
    assert same_bits(rows, by_torch(table, ids))


class Largest(TorchDispatchMode):
    """Notes the operations of torch that are run, and the most numbers that one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        found = function(*arguments, **options or {})
        if isinstance(found, Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_a_lookup_does_not_grow_with_the_number_of_runs(path):
    # frequent ids among rare ones
    classes = np.zeros(40_000, np.uint8)
    classes[::20] = 1
    bits, steps = np.array([[1], [6]], np.uint8), np.full((2, 1), 192, np.uint8)
    layout = Layout.of(classes, np.eye(1, 4), np.zeros((2, 4)), bits, steps)
    assert len(layout.starts) == 4_000
    numbers = np.random.default_rng(0).integers(0, 2 ** bits.astype(np.int64)[classes])
    table, ids = table_of(layout, numbers.astype(np.uint8)), torch.arange(0, 40_000, 19)
    with Largest() as seen:
        rows = table(ids)
    assert seen.numbers <= 4 * len(ids)
    expected = numbers[:, 0] - np.where(classes == 1, 31.5, 0.5)
    assert rows[:, 0].tolist() == expected[ids.numpy()].tolist()
    assert not rows[:, 1:].any()


def test_the_path_is_the_one_that_was_chosen(path):
    table, ids = table_of(*drawn(70, 8, 5, 6)), torch.arange(70)
    with Largest() as seen:
        table(ids)
    assert ("index" in seen.names) == (path == "torch")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, on tracing
@pytest.mark.parametrize("path", [pytest.param("kernel", marks=needs_compiler)], indirect=True)
@pytest.mark.parametrize("by_row", [False, True])
def test_what_is_recorded_consists_of_operations_of_torch(path, by_row):
    table = table_of(*drawn(70, 8, 5, 6, by_row=by_row))
    ids, others = torch.tensor([3, 8, 69]), torch.tensor([0, 64, 5])
    graphs = []

    def record(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    recorded = torch.compile(table, backend=record)
    batch = torch.export.Dim("batch", min=2, max=100)
    exported = torch.export.export(table, (ids,), dynamic_shapes=[{0: batch}]).module()
    for some in (ids, others):
        expected = by_torch(table, some)
        assert same_bits(torch.jit.trace(table, (ids,), check_trace=False)(some), expected)
        close = 1e-6 * float(expected.abs().max())  # they add up by a product, in another order
        assert_close(recorded(some), expected, rtol=0, atol=close)
        assert_close(exported(some), expected, rtol=0, atol=close)
    assert graphs


@pytest.fixture
def fresh():
    """Ask for the kernel anew in this test, and again afterwards."""
    coded_kernel.cache_clear()
    yield
    coded_kernel.cache_clear()


def test_without_a_compiler_that_is_said_once_and_torch_does_it(
    fresh, tmp_path, monkeypatch, caplog
):
    for name, value in environment(tmp_path, PATH="", CXX="", RAREBIT_COMPILE="1").items():
        monkeypatch.setenv(name, value)
    table = table_of(*drawn(70, 8, 5, 6))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert same_bits(table(torch.arange(70)), by_torch(table, torch.arange(70)))
    (said,) = caplog.messages
    assert said.startswith("no C++ compiler made a kernel for coded tables")
    assert "\n" not in said


def test_switched_off_nothing_is_said(fresh, monkeypatch, caplog):
    monkeypatch.setenv("RAREBIT_COMPILE", "0")
    table = table_of(*drawn(70, 8, 5, 6))
    assert same_bits(table(torch.arange(70)), by_torch(table, torch.arange(70)))
    assert coded_kernel() is None
    assert caplog.messages == []


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("word >> lanes.half", "word >> (lanes.half + 1)"),
        ("return wrong ? OUT_OF_RANGE : num_ids;", "return num_ids;"),
        ("t.block_bit[row / ROWS_A_BLOCK] +", "t.block_bit[0] +"),
        ("(id - rows[run])", "id"),
    ],
)
def test_a_library_that_is_wrong_gives_no_kernel(tmp_path, monkeypatch, right, wrong):
    monkeypatch.setattr(compiler, "FLAGS", ("-std=c++17", "-shared", "-fPIC"))
    monkeypatch.setattr(compiler, "CHOICES", ((),))
    text = coded.SOURCE.read_text("utf-8")
    assert text.count(right) == 1
    source = tmp_path / "wrong.cpp"
    source.write_text(text.replace(right, wrong), "utf-8")
    assert load_compiled(source, coded._tried, environment(tmp_path / "cache")) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []


# ---- the kernel of GPUs


def by_triton(table: CodedTable | CodedStack, ids: Tensor) -> Tensor:
    """Return rows by the kernel. On the CPU Triton interprets it, and a table does not take it by itself."""
    module, ids = copy.deepcopy(table).to(TRITON_DEVICE), ids.to(TRITON_DEVICE)
    slots = ids if isinstance(module, CodedStack) else ids.unsqueeze(-1)
    rows = rows_triton.coded_rows(slots, module.blob, module.decoder, module.tables)
    return (rows if isinstance(module, CodedStack) else rows.squeeze(-2)).cpu()


@needs_triton
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_of_gpus_gives_the_bits_of_torch(width, by_row):
    for directions, classes, most_bits in ((0, 1, 8), (3, 5, 1), (8, 16, 8), (33, 2, 3)):
        layout, numbers = drawn(70, width, directions, classes, by_row=by_row, most_bits=most_bits)
        table = table_of(layout, numbers)
        for ids in (torch.randint(70, (23, 6)), torch.arange(70), torch.zeros(0, 3).long()):
            assert same_bits(by_triton(table, ids), by_torch(table, ids))


@needs_triton
@pytest.mark.parametrize("forms", ["rrr", "bbb", "brb"])
def test_the_kernel_of_gpus_looks_up_a_stack(forms):
    stack = CodedStack(METHOD, some_tables(forms), (1, 2, 1))
    ids = (torch.rand(77, 4) * stack.decoder.num_rows[stack.tables]).long()
    assert same_bits(by_triton(stack, ids), stack.decoder(stack.blob, ids, stack.tables))


@needs_triton
def test_the_kernel_of_gpus_knows_more_classes_than_a_byte():
    layout, numbers = drawn(300, 4, 3, 16, by_row=True)
    stack = CodedStack(METHOD, [table_of(layout, numbers) for _ in range(17)], (1,) * 17)
    assert stack.decoder.row_class.dtype == torch.int16
    ids = torch.randint(300, (9, 17))
    assert same_bits(by_triton(stack, ids), stack.decoder(stack.blob, ids, stack.tables))


@needs_interpreter
@pytest.mark.parametrize("wrong", [-1, 70, 2**40])
def test_the_kernel_of_gpus_does_not_read_beyond(wrong):
    table = table_of(*drawn(70, 8, 3, 2))
    with pytest.raises(RuntimeError, match="an id has no row in its coded or packed table"):
        by_triton(table, torch.tensor([3, wrong]))


@needs_cuda
@pytest.mark.parametrize("forms", ["rrr", "brb"])
def test_rows_and_bags_on_a_gpu_are_those_of_the_cpu_and_can_be_recorded(forms, monkeypatch):
    tables = some_tables(forms)
    stack, bag = (
        CodedStack(METHOD, tables, (1, 1, 1)),
        Bag(copy.deepcopy(tables[0]), mode="sum", include_last_offset=False),
    )
    calls, kernel = [], rows_triton.coded_rows

    def counted(*given):
        calls.append(1)
        return kernel(*given)

    monkeypatch.setattr(rows_triton, "coded_rows", counted)
    ids, other = (
        torch.stack([torch.randint(t.num_embeddings, (77,)) for t in tables], 1) for _ in range(2)
    )
    expected, later = stack(ids), stack(other)
    pooled = bag(ids[:, 0], torch.tensor([0, 7, 7]))
    place = ids.cuda()
    assert same_bits(stack.cuda()(place).cpu(), expected)
    assert stack.decoder.terms.is_cuda
    found = bag.cuda()(place[:, 0], torch.tensor([0, 7, 7], device="cuda"))
    assert_close(found.cpu(), pooled)  # sums of many rows
    assert len(calls) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing waits for the device
        rows = stack(place)
    place.copy_(other)
    graph.replay()
    assert same_bits(rows.cpu(), later)
