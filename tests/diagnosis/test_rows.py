"""Reading a table a few rows at a time gives the table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rarebit import Hashing, LowRank
from rarebit.diagnosis.rows import rows_of_slice, rows_of_table, scan
from rarebit.tables import spectrum
from rarebit.tables.table import full_table, wrap


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(spectrum, "CPU_CHUNK", 16)


@pytest.mark.parametrize("methods", [(), (Hashing(buckets=7),), (LowRank(rank=2),)])
@pytest.mark.parametrize("padding", [None, 0, 16, 49])
def test_chunks_are_the_rows_without_padding(few_rows, methods, padding):
    table = nn.Embedding(50, 3, padding_idx=padding)
    for method in methods:
        table = wrap(table, method)
    rows = rows_of_table(table)
    chunks = list(rows.chunks())
    kept = [row for row in range(50) if row != padding]
    assert max(map(len, chunks)) <= 16
    assert len(chunks) > 2
    assert torch.equal(torch.cat(chunks), full_table(table)[kept])
    assert rows.count == len(kept)


def test_a_padding_row_counted_from_the_end_is_left_out():
    table = nn.Embedding(5, 3, padding_idx=-1)
    assert torch.equal(torch.cat(list(rows_of_table(table).chunks())), table.weight[:4])


def test_a_table_of_padding_has_no_rows():
    found = scan(rows_of_table(nn.Embedding(1, 3, padding_idx=0)))
    assert len(found.norms) == 0
    assert found.triangle is None


@given(rows=st.integers(1, 50), width=st.integers(1, 5), seed=st.integers(0, 100))
def test_one_pass_gives_norms_and_a_triangle(rows, width, seed):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    found = scan(rows_of_table(nn.Embedding.from_pretrained(weight)))
    expected = [sum(number**2 for number in row) ** 0.5 for row in weight.double().tolist()]
    assert found.norms.tolist() == pytest.approx(expected)
    assert bool(found.finite.all())
    gram = weight.double().T @ weight.double()
    assert torch.allclose(found.triangle.T @ found.triangle, gram, atol=1e-10)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_found_and_there_is_no_triangle(few_rows, number):
    weight = torch.randn(50, 3)
    weight[7, 1] = weight[40, 0] = number
    found = scan(rows_of_table(nn.Embedding.from_pretrained(weight)))
    assert (~found.finite).nonzero().flatten().tolist() == [7, 40]
    assert found.triangle is None


def test_rows_of_a_file_are_those_that_were_written(few_rows, tmp_path):
    weight = torch.randn(50, 3).bfloat16()
    save_file({"user": weight}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        chunks = list(rows_of_slice(file.get_slice("user")).chunks())
    assert len(chunks) == 4
    assert torch.equal(torch.cat(chunks), weight)
