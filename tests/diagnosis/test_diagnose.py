"""Diagnoses of models and files against loops over their tables."""

import math

import numpy as np
import pytest
import torch
from capabilities import needs_cuda
from safetensors.torch import save_file
from stored import tensors_file
from torch import nn

import rarebit as rb
from rarebit.diagnosis.diagnose import diagnose, diagnose_file
from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.models.lr import LR
from rarebit.tables.spectrum import information_abundance, random_abundance, stable_rank
from rarebit.tables.table import full_table

FIELDS = (
    rb.data.Field(name="user", rows=60),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
)


@pytest.fixture
def data():
    ids = torch.cat([torch.randint(0, 50, (200, 1)), torch.randint(0, 9, (200, 3))], dim=1)
    return rb.Dataset(rb.data.Schema(FIELDS), ids, None, torch.randint(0, 2, (200,)).float())


@pytest.fixture
def model():
    return DeepFM(rb.data.Schema(FIELDS), dim=4, hidden=(4,), std=1.0)


def test_every_figure_of_a_model_is_that_of_a_loop(model, data):
    counts = data.counts()
    for table in diagnose(model, data).tables:
        part, field = ("backbone" if table.width == 4 else "wide"), table.field
        collection = model.get_submodule(part).tables
        [index] = [i for i, f in enumerate(collection.fields) if f.name == field]
        kept = list(range(1, 9)) if field == "tags" else list(range(60))
        rows = collection.tables()[index].weight.detach().double()[kept]
        seen = counts[field].tolist()
        assert table.name == f"{part}.tables.{field}"
        assert (table.rows, table.num_bytes) == (len(kept), 4 * table.width * len(seen))
        assert table.never_trained_rows == sum(seen[row] == 0 for row in kept)
        assert table.seen_once_rows == sum(seen[row] == 1 for row in kept)
        trained = sum(seen[row] > 0 for row in kept)
        assert table.seen_once_share == table.seen_once_rows / trained
        assert sum(b.rows for b in table.norm_by_count) == len(kept)
        assert -1 <= table.norm_correlation <= 1
        assert (table.dead_rows, table.not_finite_rows, table.methods) == (0, 0, ())
        if table.width == 1:
            assert (table.spectrum, table.information_abundance, table.stable_rank) == (None,) * 3
            continue
        assert table.spectrum == pytest.approx(torch.linalg.svdvals(rows).tolist())
        assert table.information_abundance == pytest.approx(information_abundance(rows))
        assert table.stable_rank == pytest.approx(stable_rank(rows))
        assert table.random_abundance == random_abundance(len(kept), 4)
        assert table.abundance_ratio == pytest.approx(
            information_abundance(rows) / random_abundance(len(kept), 4)
        )


def test_the_correlation_of_norm_and_frequency_is_of_values_that_were_seen():
    weight = torch.arange(1.0, 7.0).unsqueeze(1).expand(6, 2)
    table = nn.ModuleDict({"x": nn.Embedding.from_pretrained(weight)})
    counts = torch.tensor([1, 2, 4, 8, 16, 0])  # the longest row was never seen
    found = diagnose(table, counts={"x": counts}).tables[0]
    assert found.norm_correlation == pytest.approx(1)
    assert found.norm_by_count[0].mean_norm == pytest.approx(6 * math.sqrt(2))


def test_training_rows_are_the_ones_that_count(model, data):
    parts = rb.data.Splits(
        data, *(rb.Dataset(data.schema, data.ids[:5], None, data.label[:5]),) * 2
    )
    assert diagnose(model, parts) == diagnose(model, data)
    data.divide([100, 50, 50], None)
    assert diagnose(model, data) == diagnose(model, data.splits.train)
    assert diagnose(model, data) != diagnose(model, counts=data.counts())


def test_without_data_what_depends_on_it_is_left_open(model):
    found = diagnose(model)
    for table in found.tables:
        assert table.never_trained_rows is table.seen_once_rows is table.seen_once_share is None
        assert table.norm_correlation is None
        assert table.norm_by_count == ()
    assert "Training counts are not known" in str(found)


def test_rows_of_methods_are_looked_at_and_bytes_are_those_stored(model, data):
    where = {"where": lambda t: t.name == "backbone.tables.user", "verbose": False}
    rb.apply_(model, rb.Hashing(buckets=7), **where)
    table = diagnose(model, data).tables[0]
    rows = full_table(model.backbone.tables.tables()[0])
    assert table.methods == ("Hashing(buckets=7)",)
    assert (table.rows, table.num_bytes) == (60, 7 * 4 * 4)
    assert table.information_abundance == pytest.approx(information_abundance(rows))
    assert table.never_trained_rows == int((data.counts()["user"] == 0).sum())


def test_any_model_will_do():
    model = nn.ModuleDict(
        {"user": nn.EmbeddingBag(30, 4, padding_idx=2), "deep": nn.Sequential(nn.Embedding(9, 3))}
    )
    with torch.no_grad():
        model["user"].weight[2] = 1e9  # a bag leaves padding out, whatever is there
    counts = {"user": np.arange(30), "deep.0": torch.zeros(9, dtype=torch.int32)}
    user, deep = diagnose(model, counts=counts).tables
    kept = [row for row in range(30) if row != 2]
    assert user.information_abundance == pytest.approx(
        information_abundance(model["user"].weight[kept])
    )
    assert (user.never_trained_rows, user.seen_once_rows, user.rows) == (1, 1, 29)
    assert (deep.never_trained_rows, deep.seen_once_share) == (9, None)


@needs_cuda
def test_a_model_on_a_gpu_gives_the_same_figures(model, data):
    here, there = diagnose(model, data), diagnose(model.cuda(), data)
    for table, other in zip(here.tables, there.tables, strict=True):
        if table.spectrum is not None:
            assert other.spectrum == pytest.approx(table.spectrum, rel=1e-10)
        assert other.norm_by_count[0].mean_norm == pytest.approx(table.norm_by_count[0].mean_norm)
        assert other.never_trained_rows == table.never_trained_rows


def test_a_model_of_first_order_weights_has_no_spectra(data):
    found = diagnose(LR(data.schema), data)
    assert [table.spectrum for table in found.tables] == [None, None]
    assert "2 more tables have rows of one number" in str(found)


def test_a_table_in_half_precision_is_looked_at(model):
    expected = diagnose(model.half()).tables[0]
    assert expected.num_bytes == 60 * 4 * 2
    assert expected.information_abundance == pytest.approx(
        information_abundance(model.backbone.tables.tables()[0].weight)
    )


def test_rows_that_are_not_finite_are_told_and_the_rest_is_counted():
    weight = torch.randn(20, 3)
    weight[3, 0], weight[5, 1], weight[7] = float("nan"), float("inf"), 0.0
    counts = torch.zeros(20, dtype=torch.int64)
    [table] = diagnose(
        nn.ModuleDict({"x": nn.Embedding.from_pretrained(weight)}), counts={"x": counts}
    ).tables
    assert (table.not_finite_rows, table.dead_rows, table.never_trained_rows) == (2, 1, 20)
    assert table.spectrum is table.information_abundance is table.random_abundance is None
    [b] = table.norm_by_count
    assert b.rows == 18
    assert math.isfinite(b.mean_norm)


def test_a_table_of_zeros_and_a_table_of_padding():
    model = nn.ModuleDict(
        {
            "zeros": nn.Embedding.from_pretrained(torch.zeros(9, 3)),
            "padding": nn.Embedding(1, 3, padding_idx=0),
        }
    )
    zeros, padding = diagnose(model).tables
    assert (zeros.information_abundance, zeros.dead_rows, zeros.directions) == (0, 9, 0)
    assert (padding.rows, padding.spectrum, padding.dead_rows) == (0, None, 0)


def test_directions_are_as_many_as_hold_the_squared_length():
    weight = torch.diag(torch.tensor([10.0, 3.0, 1.0, 0.1]))  # squares 100, 9, 1, 0.01
    [table] = diagnose(nn.Sequential(nn.Embedding.from_pretrained(weight))).tables
    assert table.directions == 2


def test_weights_that_are_not_in_memory_are_left_alone():
    model = nn.Sequential(nn.Embedding(9, 3, device="meta"), nn.Embedding(9, 3))
    found = diagnose(model)
    assert [table.name for table in found.tables] == ["1"]
    assert found.left_alone[0].name == "0"
    assert "device meta" in found.left_alone[0].reason


def test_mistakes_are_told_in_a_sentence(model, data):
    with pytest.raises(NoTableError, match="Linear has no tables to diagnose"):
        diagnose(nn.Linear(2, 2))
    with pytest.raises(SettingsError, match="give either data or counts, not both"):
        diagnose(model, data, counts=data.counts())
    with pytest.raises(
        DataError, match="none of the fields item is a table of the model, which has tags, user"
    ):
        diagnose(model, counts={"item": torch.ones(9)})
    with pytest.raises(
        DataError, match=r"has 60 rows, so its counts are 60 whole numbers, got \(9,\)"
    ):
        diagnose(model, counts={"user": torch.ones(9, dtype=torch.int64)})
    with pytest.raises(DataError, match=r"whole numbers, got \(60,\) of torch\.float32"):
        diagnose(model, counts={"user": torch.ones(60)})
    with pytest.raises(DataError, match="must be 0 or more, got -1"):
        diagnose(model, counts={"user": torch.full((60,), -1)})


def test_a_file_needs_nothing_else(tmp_path):
    tensors = {
        "item.weight": torch.randn(50, 4),
        "wide.weight": torch.randn(50, 1).half(),
        "flat": torch.randn(16, 4),
        "layer.bias": torch.zeros(4),
        "steps": torch.zeros(90, 2, dtype=torch.int64),
        "empty": torch.zeros(9, 0),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    found = diagnose_file(tmp_path / "x.safetensors")
    item, wide = sorted(found.tables, key=lambda table: table.name)
    assert (item.rows, item.width, item.num_bytes) == (50, 4, 800)
    assert item.spectrum == pytest.approx(
        torch.linalg.svdvals(tensors["item.weight"].double()).tolist()
    )
    assert (wide.rows, wide.num_bytes, wide.spectrum) == (50, 100, None)
    assert item.never_trained_rows is None
    reasons = {thing.name: thing.reason for thing in found.left_alone}
    assert set(reasons) == {"flat", "layer.bias", "steps", "empty"}
    assert "16 x 4 is as flat as a layer" in reasons["flat"]
    assert "its shape is (4,), and a table is a matrix" in reasons["layer.bias"]
    assert "it holds I64" in reasons["steps"]


def test_a_file_of_a_model_gives_the_figures_of_its_stack(model, tmp_path):
    found = diagnose_file(tensors_file(rb.save_model(model, tmp_path)))
    [table] = [table for table in found.tables if table.width == 4]
    weight = torch.cat([table.weight for table in model.backbone.tables.tables()])
    assert table.information_abundance == pytest.approx(information_abundance(weight))


def test_files_that_are_none_are_told_in_a_sentence(tmp_path):
    good, text = tmp_path / "good.safetensors", tmp_path / "text.safetensors"
    save_file({"bias": torch.zeros(4)}, good)
    text.write_text("user,item\n1,2\n" * 9)
    torn = tmp_path / "torn.safetensors"
    save_file({"x": torch.zeros(400, 4)}, torn)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(NoTableError, match="holds no table: no matrix of floats"):
        diagnose_file(good)
    for damaged in (text, torn):
        with pytest.raises(ModelFileError, match="is no safetensors file, or a damaged one"):
            diagnose_file(damaged)
    with pytest.raises(ModelFileError, match="does not exist"):
        diagnose_file(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match="is not a file"):
        diagnose_file(tmp_path)


def test_each_embedding_set_is_looked_at_by_itself():
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=90), rb.data.Field(name="item", rows=50))
    )
    model = DCNv2(schema, dim=4, hidden=[8, 8])
    assert diagnose(model).tables[0].set_abundances == ()
    rb.apply_(model, rb.MultiEmbedding(num_sets=3), verbose=False)
    found = diagnose(model)
    for table, module in zip(found.tables, model.backbone.tables.tables(), strict=True):
        each = [information_abundance(one) for one in module.weight.detach().split(4, dim=1)]
        assert table.set_abundances == pytest.approx(each, rel=1e-9)
    header, first, *_ = str(found).splitlines()
    assert "sets" in header.split()
    assert " ".join(f"{one:.1f}" for one in found.tables[0].set_abundances) in first
