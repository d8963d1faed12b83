"""Quantised tables with other methods, in training, and in files."""

import json
from pathlib import Path

import pytest
import torch
from stored import tensors_file
from torch import Tensor, nn

import rarebit as rb
from rarebit.errors import OptimizerError, UnsupportedTableError
from rarebit.methods.mlet import MLET
from rarebit.methods.quantize import Quantize, QuantizedTable
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.tables.apply import table_bytes

both = pytest.mark.parametrize("bits", [8, 4])

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)


def quantised(weight: Tensor, bits: int) -> QuantizedTable:
    return Quantize(bits=bits).wrap(nn.Embedding.from_pretrained(weight.clone()))


@both
@pytest.mark.parametrize("first", [rb.LowRank(rank=2), MLET(inner_dim=8)])
def test_after_factors_the_rows_are_folded_and_quantised(first, bits):
    model = nn.Sequential(nn.Embedding(20, 5, padding_idx=2))
    rb.apply_(model, first, verbose=False)
    merged = nn.Sequential(model[0].merge())
    for one in (model, merged):
        rb.apply_(one, Quantize(bits=bits), verbose=False)
    assert torch.equal(model[0].codes, merged[0].codes)
    assert torch.equal(model[0].scale, merged[0].scale)
    assert rb.find_tables(model)[0].methods == (str(first), f"Quantize(bits={bits})")
    assert rb.find_tables(model)[0].num_bytes == rb.find_tables(merged)[0].num_bytes


def test_after_hashing_the_buckets_are_quantised():
    model = nn.Sequential(nn.Embedding(20, 5))
    rb.apply_(model, rb.Hashing(buckets=7), verbose=False)
    buckets = model[0].inner.weight.detach()
    rb.apply_(model, Quantize(bits=4), verbose=False)
    expected = quantised(buckets, bits=4).weight
    assert torch.equal(model[0].weight, torch.stack([expected[i % 7] for i in range(20)]))
    (info,) = rb.find_tables(model)
    assert info.methods == ("Hashing(buckets=7)", "Quantize(bits=4)")
    assert (info.num_parameters, info.num_bytes) == (7 * 5 + 1, 7 * 3 + 4)


def test_nothing_comes_after():
    model = nn.Sequential(nn.Embedding(20, 5))
    rb.apply_(model, rb.Hashing(buckets=7), verbose=False)
    rb.apply_(model, Quantize(), verbose=False)
    for method in (rb.Hashing(buckets=3), rb.LowRank(rank=2), MLET(), Quantize(bits=4)):
        with pytest.raises(UnsupportedTableError, match=r"after (Quantize|Hashing)\("):
            rb.apply_(model, method)


def test_merged_a_sparse_table_is_sparse_again_and_stays_frozen():
    model = nn.Sequential(nn.Embedding(20, 5, sparse=True))
    rb.apply_(model, Quantize(), verbose=False)
    rb.merge_(model, verbose=False)
    assert model[0].sparse
    assert not model[0].weight.requires_grad


# ---- training


def test_the_report_counts_bytes_and_says_that_training_ends():
    model = nn.ModuleDict({"a": nn.Embedding(100, 5), "b": nn.Embedding(10, 5)})
    assert str(rb.apply_(model, Quantize(bits=4), verbose=False)).splitlines() == [
        "Quantize(bits=4): 2 of 2 tables, 2,200 -> 338 bytes stored, no longer trained",
        "  a  100 x 5, 2,000 -> 304",
        "  b  10 x 5, 200 -> 34",
    ]
    assert [info.trainable for info in rb.find_tables(model)] == [False, False]
    assert str(rb.merge_(model, verbose=False)).splitlines()[0] == (
        "merge: 2 of 2 tables, 338 -> 2,200 bytes stored"
    )


def test_a_table_that_was_frozen_is_not_said_to_be_frozen_now():
    model = nn.Sequential(nn.Embedding(100, 5).requires_grad_(requires_grad=False))
    assert "trained" not in str(rb.apply_(model, Quantize(), verbose=False))


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_training_goes_on_with_the_network_and_leaves_the_integers_alone(tables):
    data = rb.data.generate(rb.data.SyntheticLog(rows=2000))
    model = DeepFM(data.train.schema, dim=4, hidden=(8,))
    rb.apply_(model, Quantize(), verbose=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rb.fit(model, data.train, settings=rb.Training(epochs=1, tables=tables), progress=False)
    moved = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    kept = {name for name in before if name.endswith(("codes", "scales"))}
    assert len(kept) == 2
    assert moved
    assert not moved & kept


def test_a_model_of_nothing_else_cannot_be_trained():
    model = nn.Sequential(nn.Embedding(9, 4))
    rb.apply_(model, Quantize(), verbose=False)
    with pytest.raises(OptimizerError, match="the model has no trainable parameter"):
        rb.optimizer(model)


def test_an_optimizer_lets_go_of_the_table():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    rb.apply_(model, Quantize(), optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model[1].parameters()
    }
    model(torch.arange(9)).sum().backward()
    optimizer.step()


# ---- what is stored


def stored_bytes(file: Path) -> int:
    """Return the bytes of the numbers in a safetensors file: all but its header."""
    size = int.from_bytes(file.read_bytes()[:8], "little")
    return file.stat().st_size - 8 - size


@pytest.mark.parametrize(("bits", "num_bytes"), [(8, 9 * 5 + 4), (4, 9 * 3 + 4)])
def test_bytes_are_those_of_the_saved_file(bits, num_bytes, tmp_path):
    model = nn.Sequential(nn.Embedding(9, 5))
    rb.apply_(model, Quantize(bits=bits), verbose=False)
    (info,) = rb.find_tables(model)
    assert (info.num_parameters, info.num_bytes) == (9 * 5 + 1, num_bytes)
    assert table_bytes(model) == num_bytes
    assert stored_bytes(tensors_file(rb.save_model(model, tmp_path))) == num_bytes


@both
def test_bytes_of_a_model_are_those_of_the_saved_file(bits, tmp_path):
    model = FM(rb.data.Schema(FIELDS), dim=6)
    rb.apply_(model, Quantize(bits=bits), where=lambda t: t.field != "tags", verbose=False)
    rows, entries = 20 + 11, 6 * bits // 8
    tables = rows * entries + 2 * 4 + 9 * 6 * 4
    wide = (20 + 9 + 11) * 4
    assert table_bytes(model) == tables + wide
    network = sum(p.nbytes for p in model.parameters()) - 9 * 6 * 4 - wide
    saved = tensors_file(rb.save_model(model, tmp_path))
    assert stored_bytes(saved) == tables + wide + network


@both
@pytest.mark.parametrize("first", [None, rb.Hashing(buckets=7), rb.LowRank(rank=2)])
def test_a_saved_model_comes_back_with_its_integers(bits, first, tmp_path):
    model = FM(rb.data.Schema(FIELDS), dim=5)
    for method in [first, Quantize(bits=bits)] if first else [Quantize(bits=bits)]:
        rb.apply_(model, method, where=lambda t: t.field != "item", verbose=False)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor)
    header = tensors_file(tmp_path).read_bytes()
    size = int.from_bytes(header[:8], "little")
    kinds = {
        value["dtype"]
        for name, value in json.loads(header[8 : 8 + size]).items()
        if "codes" in name
    }
    assert kinds == {{8: "I8", 4: "U8"}[bits]}
    said = json.loads((tmp_path / "model.json").read_text())["methods"]
    assert said["backbone.tables.user"][-1] == {"method": "quantize", "bits": bits}


def test_tables_of_ones_own_model_come_back(tmp_path):
    def build() -> nn.ModuleList:
        return nn.ModuleList([nn.Embedding(9, 5), nn.EmbeddingBag(8, 3, padding_idx=0)])

    model = build()
    rb.apply_(model, Quantize(bits=4), verbose=False)
    loaded = rb.load_model(rb.save_model(model, tmp_path), into=build())
    ids = torch.tensor([[1, 0], [7, 7]])
    for one, other in zip(model, loaded, strict=True):
        assert torch.equal(one(ids), other(ids))
