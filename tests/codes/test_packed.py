"""A packed table against the dense one that it was made from."""

import copy
import math

import pytest
import torch
from capabilities import (
    TRITON_DEVICE,
    needs_cuda,
    needs_interpreter,
    needs_package,
    needs_triton,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.codes import packed, rows_triton
from rarebit.codes.packed import (
    Pack,
    PackedTable,
    count_bits,
    pack_bits,
    pack_rows,
    pick,
    rows_before,
    unpack_bits,
)
from rarebit.errors import UnsupportedTableError
from rarebit.tables.bag import Bag

KEPT = (0.0, 0.003, 0.03, 0.1, 0.3, 0.8, 1.0)


def sparse_weight(
    rows: int, width: int, kept: float, seed: int = 0, rows_kept: float = 1.0
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=draw)
    weight[torch.rand(rows, width, generator=draw) >= kept] = 0.0
    weight[torch.rand(rows, generator=draw) >= rows_kept] = 0.0
    return weight


def dense(weight: Tensor, **options) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight.clone(), freeze=False, **options)


def by_torch(table: PackedTable, ids: Tensor) -> Tensor:
    """Return rows without a gradient, as they are looked up where nothing is compiled."""
    return table._served_rows(table._checked(ids)).view(*ids.shape, table.embedding_dim)


weights = st.builds(
    sparse_weight,
    rows=st.integers(1, 200),
    width=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 255, 256, 257, 300])),
    kept=st.sampled_from(KEPT),
    seed=st.integers(0, 99),
    rows_kept=st.sampled_from([0.05, 0.5, 1.0]),
)


# ---- the parts


def naive_parts(weight: Tensor) -> tuple[list, list, list, list]:
    values, columns, offsets, filled = [], [], [0], []
    for row in weight.tolist():
        kept = [(column, value) for column, value in enumerate(row) if value != 0]
        filled.append(bool(kept))
        columns += [column for column, _ in kept]
        values += [value for _, value in kept]
        if kept:
            offsets.append(len(values))
    return values, columns, offsets, filled


@given(weight=weights)
def test_the_parts_are_those_of_a_loop(weight):
    parts = pack_rows(weight)
    values, columns, offsets, filled = naive_parts(weight)
    assert parts.values.tolist() == values
    assert parts.offsets.tolist() == offsets
    marks = [(int(parts.filled[row // 64]) >> (row % 64)) & 1 for row in range(len(weight))]
    assert marks == filled
    if parts.has_bitmaps:
        assert unpack_bits(parts.columns).nonzero()[:, 1].tolist() == columns
    else:
        assert parts.columns.tolist() == columns


@given(weight=weights)
def test_the_smaller_form_of_the_columns_is_taken_and_bytes_are_known_beforehand(weight):
    parts = pack_rows(weight)
    num_values, num_filled = int((weight != 0).sum()), int((weight != 0).any(dim=1).sum())
    numbers = num_values * (1 if weight.shape[1] <= 256 else 2)
    bits = num_filled * math.ceil(weight.shape[1] / 8)
    assert parts.columns.nbytes == min(numbers, bits)
    words = math.ceil(len(weight) / 64)
    expected = 4 * num_values + min(numbers, bits) + 4 * (num_filled + 1) + 8 * words
    assert sum(part.nbytes for part in parts) == expected
    bound = 4 * num_values + min(numbers, num_filled * weight.shape[1] / 8) + 4 * num_filled
    # one offset more than rows, and whole words
    assert weight.shape[1] == 1 or expected <= 1.1 * (bound + len(weight) / 8) + 4 + 8


@pytest.mark.parametrize("sparsity", [0.9, 0.97, 0.99, 0.999])
def test_columns_are_numbers_in_a_sparse_table_and_bits_in_one_of_full_rows(sparsity):
    scattered = sparse_weight(20_000, 64, 1 - sparsity)
    rows = sparse_weight(20_000, 64, 1.0, rows_kept=1 - sparsity)
    assert not pack_rows(scattered).has_bitmaps
    assert pack_rows(rows).has_bitmaps


def test_a_table_of_several_chunks_is_packed_whole():
    weight = sparse_weight((1 << 16) + 70, 3, 0.2)
    assert torch.equal(Pack().wrap(dense(weight)).merge().weight, weight)


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_bits_are_counted_as_python_counts_them(words):
    counts = [(word % 2**64).bit_count() for word in words]
    tensor = torch.tensor(words, dtype=torch.int64)
    assert count_bits(tensor).tolist() == counts
    assert tensor.tolist() == words
    assert rows_before(tensor).tolist() == [sum(counts[:i]) for i in range(len(words))]


@given(rows=st.integers(0, 4), width=st.integers(1, 40), seed=st.integers(0, 9))
def test_bits_come_back(rows, width, seed):
    kept = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.4
    bits = pack_bits(kept)
    assert bits.shape == (rows, math.ceil(width / 8))
    assert torch.equal(unpack_bits(bits)[:, :width], kept)
    assert not unpack_bits(bits)[:, width:].any()


@given(count=st.integers(0, 30))
def test_picking_in_lanes_is_indexing(count):
    source = torch.randn(7)
    positions = torch.randint(7, (count,))
    assert torch.equal(pick(source, positions), source[positions])


# ---- rows


@given(weight=weights, seed=st.integers(0, 9), data=st.data())
def test_rows_are_those_of_the_dense_table(weight, seed, data):
    plain, table = dense(weight), Pack().wrap(dense(weight))
    shape = data.draw(st.sampled_from([(), (0,), (1,), (13,), (4, 3, 5)]))
    ids = torch.randint(len(weight), shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(table(ids), plain(ids))
    assert torch.equal(table(ids.int()), plain(ids))
    with torch.no_grad():
        assert torch.equal(table(ids), plain(ids))
    assert torch.equal(by_torch(table, ids), plain(ids))
    assert torch.equal(table.weight, weight)
    assert torch.equal(table.merge().weight, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rows_keep_their_precision(dtype):
    weight = sparse_weight(90, 9, 0.2).to(dtype)
    table = Pack().wrap(dense(weight))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        rows = table(torch.arange(90))
    assert rows.dtype == dtype
    assert torch.equal(rows, weight)


def test_a_long_batch_is_looked_up_in_parts(monkeypatch):
    weight = sparse_weight(500, 7, 0.2)
    table, ids = Pack().wrap(dense(weight)), torch.randint(500, (23, 5))
    monkeypatch.setattr(packed, "LOOKED_UP", 16)
    assert torch.equal(by_torch(table, ids), F.embedding(ids, weight))


def test_values_that_are_not_finite_are_rows_like_others():
    weight = torch.tensor([[0.0, math.nan, 2.0], [math.inf, 0.0, -0.0]])
    table = Pack().wrap(dense(weight))
    assert len(table.values) == 3
    assert_close(table.weight, weight, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, 70, 127, 128, 10**12])
def test_ids_without_a_row_are_refused_as_by_torch(wrong):
    table = Pack().wrap(dense(sparse_weight(70, 4, 0.5)))
    with pytest.raises(IndexError, match=f"from 0 to 69 in a table of 70 rows, got {wrong}"):
        table(torch.tensor([3, wrong]))
    with pytest.raises(IndexError, match=f"got {wrong}"), torch.no_grad():
        table(torch.tensor([3, wrong]))
    with pytest.raises(IndexError):
        table.padded_rows(torch.tensor([3, wrong]))


@given(weight=weights)
def test_padded_rows_hold_the_same_numbers(weight):
    table = Pack().wrap(dense(weight))
    ids = torch.arange(len(weight)).flip(0).view(-1, 1)
    values, columns = table.padded_rows(ids)
    longest = int((weight != 0).sum(dim=1).max())
    assert values.shape == columns.shape == (len(weight), 1, longest)
    again = torch.zeros(len(weight), 1, weight.shape[1]).scatter_add_(2, columns, values)
    assert torch.equal(again, weight[ids])
    lengths = (weight[ids] != 0).sum(dim=-1, keepdim=True)
    assert not columns[torch.arange(longest) >= lengths].any()


class Padded(nn.Module):
    def __init__(self, table: PackedTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.padded_rows(ids)


@pytest.mark.parametrize("kept", [0.1, 0.9])
def test_padded_rows_can_be_exported(kept):
    module = Padded(Pack().wrap(dense(sparse_weight(70, 9, kept))))
    batch = torch.export.Dim("batch", min=2, max=100)
    with torch.no_grad():
        program = torch.export.export(
            module, (torch.tensor([[3], [69]]),), dynamic_shapes=[{0: batch}]
        )
    ids = torch.tensor([[8], [69], [5], [5]])
    for found, expected in zip(program.module()(ids), module(ids), strict=True):
        assert torch.equal(found, expected)


@needs_package("scipy")
@given(weight=weights)
def test_scipy_gets_the_same_table(weight):
    table = Pack().wrap(dense(weight)).to_csr()
    assert table.shape == tuple(weight.shape)
    assert table.nnz == int((weight != 0).sum())
    assert table.has_canonical_format
    assert torch.equal(torch.from_numpy(table.toarray()), weight)


@needs_package("scipy")
def test_scipy_gets_a_copy_in_a_precision_that_it_knows():
    table = Pack().wrap(dense(sparse_weight(9, 3, 0.5).bfloat16()))
    array = table.to_csr()
    assert array.dtype == "float32"
    assert torch.equal(torch.from_numpy(array.toarray()), table.weight.float())
    single = Pack().wrap(dense(sparse_weight(9, 3, 0.5)))
    before = single.weight.detach().clone()
    single.to_csr().data[:] = 9.0
    assert torch.equal(single.weight, before)


# ---- eight bits


@given(weight=weights)
def test_eight_bits_move_a_value_by_half_a_step_at_most(weight):
    table = Pack(bits=8).wrap(dense(weight))
    assert list(table.parameters()) == []
    assert table.values.dtype == torch.int8
    largest = float(weight.abs().max())
    moved = (table(torch.arange(len(weight))) - weight).abs()
    assert float(moved.max()) <= largest / 127 * 0.5001
    assert not moved[weight == 0].any()
    values, columns = table.padded_rows(torch.arange(len(weight)))
    again = torch.zeros_like(weight).scatter_add_(1, columns, values)
    assert torch.equal(again, table.merge().weight)


def test_eight_bits_by_hand():
    table = Pack(bits=8).wrap(dense(torch.tensor([[0.0, 254.0], [-3.0, 0.0], [0.0, 127.0]])))
    assert (table.scale.item(), table.values.tolist()) == (2.0, [127, -2, 64])
    assert table(torch.tensor([0, 1])).tolist() == [[0.0, 254.0], [-4.0, 0.0]]
    assert rb.find_tables(nn.Sequential(table))[0].num_parameters == 4


def test_eight_bits_need_finite_values():
    with pytest.raises(UnsupportedTableError, match=r"needs finite values, and some of 3"):
        Pack(bits=8).wrap(dense(torch.tensor([[math.nan, 1.0], [0.0, 2.0]])))


# ---- training


@pytest.mark.parametrize("kept", [0.1, 0.6])
def test_gradients_are_the_dense_ones_of_the_entries_that_are_left(kept):
    weight = sparse_weight(40, 6, kept)
    plain, table = dense(weight), Pack().wrap(dense(weight))
    ids, factor = torch.randint(40, (30, 2)), torch.randn(30, 2, 6)
    (plain(ids) * factor).square().sum().backward()
    (table(ids) * factor).square().sum().backward()
    assert_close(table.values.grad, plain.weight.grad[weight != 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_training_in_place_is_training_under_a_mask(make):
    weight = sparse_weight(30, 5, 0.3)
    mask, plain, table = weight != 0, dense(weight), Pack().wrap(dense(weight))
    plain.weight.register_hook(lambda gradient: gradient * mask)
    optimizers = [make(plain.parameters()), make(table.parameters())]
    for step in range(5):
        ids = torch.randint(30, (20,), generator=torch.Generator().manual_seed(step))
        for module, optimizer in zip((plain, table), optimizers, strict=True):
            optimizer.zero_grad()
            (module(ids) - 1).square().sum().backward()
            optimizer.step()
    assert_close(table.weight, plain.weight)
    assert not table.weight[~mask].any()
    assert not torch.equal(table.weight, weight)


def test_a_frozen_table_stays_frozen_and_a_trained_one_is_trained():
    weight = sparse_weight(30, 5, 0.3)
    frozen = nn.Embedding.from_pretrained(weight, freeze=True)
    assert not Pack().wrap(frozen).values.requires_grad
    assert Pack().wrap(dense(weight)).values.requires_grad
    assert not Pack().wrap(frozen).merge().weight.requires_grad
    assert Pack().wrap(dense(weight, sparse=True)).merge().sparse


# ---- padding and bags


def test_the_padding_row_is_zero_and_gets_no_gradient():
    weight = sparse_weight(20, 4, 1.0)
    table = Pack().wrap(dense(weight, padding_idx=3))
    assert table.padding_idx == 3
    rows = table(torch.tensor([3, 4]))
    assert torch.equal(rows, torch.stack([torch.zeros(4), weight[4]]))
    rows.sum().backward()
    assert int((table.values.grad != 0).sum()) == 4
    assert table.merge().padding_idx == 3


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_pool_the_same_rows(mode):
    weight = sparse_weight(50, 6, 0.2)
    weight[0] = 0.0
    plain = nn.EmbeddingBag.from_pretrained(weight, mode=mode, padding_idx=0)
    bag = Bag(Pack().wrap(dense(weight, padding_idx=0)), mode=mode, include_last_offset=False)
    ids, offsets = torch.tensor([0, 3, 3, 7, 49, 0]), torch.tensor([0, 2, 5])
    assert torch.equal(bag(ids, offsets), plain(ids, offsets))


def test_a_packed_table_takes_no_further_method():
    table = Pack().wrap(dense(sparse_weight(90, 9, 0.2)))
    with pytest.raises(
        UnsupportedTableError, match=r"Hashing\(buckets=3\) cannot be applied to a packed"
    ):
        table.receive(rb.Hashing(buckets=3))


def by_triton(table: PackedTable, ids: Tensor) -> Tensor:
    """Return rows by the kernel of GPUs. On the CPU Triton interprets it, and a table does not take it by itself."""
    module, ids = copy.deepcopy(table).to(TRITON_DEVICE), ids.to(TRITON_DEVICE)
    shape, scale = (module.num_embeddings, module.embedding_dim), module._buffers.get("scale")
    with torch.no_grad():
        rows = rows_triton.packed_rows(
            *(ids.reshape(-1), module.parts, module.before, shape, module.longest, scale)
        )
    return rows.view(*ids.shape, module.embedding_dim).cpu()


@needs_triton
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("width", [1, 9, 33, 300])
def test_the_kernel_of_gpus_gives_the_bits_of_torch(width, bits):
    for kept in KEPT:
        table = Pack(bits=bits).wrap(dense(sparse_weight(150, width, kept, rows_kept=0.6)))
        for ids in (torch.randint(150, (11, 3)), torch.arange(150), torch.zeros(0).long()):
            assert torch.equal(by_triton(table, ids), by_torch(table, ids))


@needs_interpreter
@pytest.mark.parametrize("wrong", [-1, 90, 2**40])
def test_the_kernel_of_gpus_does_not_read_beyond(wrong):
    table = Pack().wrap(dense(sparse_weight(90, 9, 0.2)))
    with pytest.raises(RuntimeError, match="an id has no row in its coded or packed table"):
        by_triton(table, torch.tensor([3, wrong]))


@needs_cuda
@pytest.mark.parametrize("kept", [0.1, 0.8])
def test_rows_and_gradients_on_a_gpu_are_those_of_the_cpu(kept):
    weight = sparse_weight(5000, 33, kept)
    table, ids = Pack().wrap(dense(weight)), torch.randint(5000, (77, 3))
    there = Pack().wrap(dense(weight)).cuda()
    with torch.no_grad():
        assert torch.equal(there(ids.cuda()).cpu(), table(ids))
    for module, where in ((table, ids), (there, ids.cuda())):
        module(where).square().sum().backward()
    assert_close(there.values.grad.cpu(), table.values.grad)
    assert torch.equal(there.padded_rows(ids.cuda())[1].cpu(), table.padded_rows(ids)[1])
