"""Models with coded tables: stored, loaded, damaged, merged and copied."""

import copy
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stored import sign, tensors_file
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.codes.coded import CodedStack, CodedTable
from rarebit.codes.packed import take_parts_
from rarebit.errors import ModelFileError
from rarebit.models.deepfm import DeepFM
from rarebit.tables.apply import table_bytes

FIELDS = (
    rb.data.Field(name="user", rows=300),
    rb.data.Field(name="tags", kind="multi", rows=90, max_length=3),
    rb.data.Field(name="item", rows=200),
)
SCHEMA = rb.data.Schema(FIELDS)


def counts_of(rows: int, *, in_order: bool) -> Tensor:
    """Return counts of a few frequent ids and many rare ones."""
    counts = 2000 // (1 + torch.arange(rows))
    return counts if in_order else counts[torch.randperm(rows)]


def coded_zoo_model(*, in_order: bool = True, size: str = "1/3") -> DeepFM:
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".tables." in name:
                parameter.normal_()
        for tables in (model.backbone.tables, model.wide.tables):
            tables.tables()[1].weight[0] = 0.0  # padding
    counts = {field.name: counts_of(field.rows, in_order=in_order) for field in FIELDS}
    rb.compress_(model, counts=counts, size=size, verbose=False)
    return model


class Own(nn.Module):
    """A model of a user's own, with a method of a name that our tables have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(300, 8, padding_idx=0)
        self.tags = nn.EmbeddingBag(100, 4, mode="mean", sparse=True)
        self.bias = nn.Embedding(300, 1)
        self.head = nn.Linear(8, 1)

    def take(self) -> None:
        raise AssertionError("nobody calls it")


def coded_own_model(size: str = "1/2") -> Own:
    model = Own()
    counts = {"user": counts_of(300, in_order=True), "tags": counts_of(100, in_order=False)}
    rb.compress_(model, counts=counts | {"bias": counts["user"]}, size=size, verbose=False)
    return model


def batch() -> rb.data.Batch:
    ids = torch.cat([torch.randint(f.rows, (50, f.max_length)) for f in FIELDS], dim=1)
    return rb.Dataset(SCHEMA, ids)[:]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_zoo_model_comes_back_bit_by_bit(in_order, tmp_path):
    model, rows = coded_zoo_model(in_order=in_order), batch()
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert [type(stack) for stack in loaded.backbone.tables.stacks] == [CodedStack]
    assert torch.equal(loaded(rows), model(rows))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    for old, new in zip(model.backbone.tables.tables(), loaded.backbone.tables.tables(), strict=True):  # fmt: skip
        assert torch.equal(old.blob, new.blob)
        assert (old.layout.starts is None) == (not in_order)


def test_a_zoo_model_of_large_tables_comes_back(tmp_path):
    fields = tuple(rb.data.Field(name=name, rows=6_000) for name in ("user", "item"))
    model = DeepFM(rb.data.Schema(fields), dim=4, hidden=(8,))
    rb.compress_(model, counts=counts_of(6_000, in_order=True), size="1/8", verbose=False)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    ids = torch.randint(6_000, (50, 2))
    assert torch.equal(loaded.backbone.tables(ids), model.backbone.tables(ids))


def test_an_own_model_comes_back_bit_by_bit(tmp_path):
    model, fresh = coded_own_model(), Own()
    rb.load_model(rb.save_model(model, tmp_path), into=fresh)
    ids = torch.randint(100, (7, 3))
    for name in ("user", "tags", "bias"):
        assert torch.equal(getattr(fresh, name)(ids), getattr(model, name)(ids))
    assert rb.find_tables(fresh) == rb.find_tables(model)


def test_a_fresh_model_takes_lists_of_other_lengths():
    model, other = coded_own_model(), coded_own_model(size="1/5")
    assert model.user.blob.shape != other.user.blob.shape
    other.load_state_dict(model.state_dict())
    third = coded_own_model(size="1/6")
    take_parts_(third, model.state_dict())
    for one in (other, third):
        assert torch.equal(one.user.blob, model.user.blob)
        assert torch.equal(one.tags(torch.tensor([[3, 5]])), model.tags(torch.tensor([[3, 5]])))


@pytest.mark.parametrize("size", ["1/8", "1/32"])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_file_is_as_large_as_it_says(size, in_order, tmp_path):
    rows, share = 100_000, 1 / int(size[2:])
    model = nn.Sequential(nn.Embedding(rows, 16), nn.Linear(16, 4))
    counts = counts_of(rows, in_order=in_order)
    [info] = rb.compress_(model, counts=counts, size=size, verbose=False).after
    assert info.num_bytes == len(model[0].blob) == table_bytes(model)
    # one more bit for most rows would be too much
    assert 0.9 * share * rows * 64 < info.num_bytes <= share * rows * 64
    on_disk = sum(file.stat().st_size for file in rb.save_model(model, tmp_path).iterdir())
    assert on_disk <= 1.02 * (info.num_bytes + 4 * (16 * 4 + 4)) + 1024


# ---- damage


def rewritten(folder: Path, change) -> None:
    """Change the tensors of a stored model, with checksums that fit again."""
    file = tensors_file(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)
    sign(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blob: blob[:-1], "is damaged: it has"),
        (lambda blob: blob[:5], r"is damaged: it is a list of torch.uint8 of shape \(5,\)"),
        (lambda blob: blob[:0], "is damaged"),
        (lambda blob: torch.cat([blob, blob]), "is damaged: it has .* bytes, and its table"),
        (lambda blob: blob.bfloat16(), "is damaged: it is a list of torch.bfloat16"),
        (lambda blob: blob.view(1, -1).contiguous(), "is damaged: it is a list of"),
        (lambda blob: blob[0].clone(), "is damaged: it is a list of"),
        (torch.zeros_like, "is damaged: it holds a table of 0 x 0"),
        (lambda blob: None, "is damaged: it lacks its bytes"),
    ],
)
@pytest.mark.parametrize("kind", ["zoo", "own"])
def test_a_damaged_list_is_refused(kind, change, message, tmp_path):
    model = coded_zoo_model() if kind == "zoo" else coded_own_model()
    rb.save_model(model, tmp_path)
    name = "backbone.tables.stacks.0" if kind == "zoo" else "user"

    def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wrong = change(tensors.pop(f"{name}.blob"))
        return tensors if wrong is None else tensors | {f"{name}.blob": wrong}

    rewritten(tmp_path, damaged)
    with pytest.raises(ModelFileError, match=f"the coded table '{name}' {message}"):
        rb.load_model(tmp_path, into=None if kind == "zoo" else Own())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    return rb.save_model(coded_zoo_model(), tmp_path_factory.mktemp("saved"))


@settings(max_examples=15)
@given(
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=3)
)
def test_changed_bytes_of_a_stored_list_are_refused_or_rows(saved, changes):
    def flip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for place, change in changes:
            tensors["backbone.tables.stacks.0.blob"][place] ^= change
        return tensors

    with TemporaryDirectory() as folder:
        copied = Path(shutil.copytree(saved, Path(folder) / "model"))
        rewritten(copied, flip)
        try:
            model = rb.load_model(copied)
        except ModelFileError:
            return
    for table in model.backbone.tables.tables():
        assert table.weight.isfinite().all()


def test_a_changed_byte_without_its_checksum_is_noticed(saved, tmp_path):
    copied = Path(shutil.copytree(saved, tmp_path / "model"))
    content = bytearray(tensors_file(copied).read_bytes())
    content[-3] ^= 1
    tensors_file(copied).write_bytes(content)
    with pytest.raises(ModelFileError, match="damaged or belongs to another save"):
        rb.load_model(copied)


# ---- merged, copied and in other precisions


@pytest.mark.parametrize("in_order", [True, False])
def test_merged_tables_are_plain_with_the_coded_rows(in_order):
    model, rows = coded_zoo_model(in_order=in_order), batch()
    scores = model(rows)
    coded = [table.weight.clone() for table in model.backbone.tables.tables()]
    rb.merge_(model, verbose=False)
    assert torch.equal(model(rows), scores)
    for table, before in zip(model.backbone.tables.tables(), coded, strict=True):
        assert type(table) is nn.Embedding
        assert torch.equal(table.weight, before)
    assert not model.backbone.tables.tables()[1].weight[0].any()


def test_merged_tables_are_as_sparse_as_before():
    model = coded_own_model()
    assert not any(p.requires_grad for p in (*model.user.parameters(), *model.tags.parameters()))
    rb.merge_(model, verbose=False)
    assert (type(model.user), type(model.tags)) == (nn.Embedding, nn.EmbeddingBag)
    assert (model.user.sparse, model.tags.sparse) == (False, True)
    assert model.user.padding_idx == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("in_order", [True, False])
def test_other_precisions_have_the_same_rows(dtype, in_order, tmp_path):
    model, ids = coded_zoo_model(in_order=in_order), batch().ids
    rows = model.backbone.tables(ids)
    other = copy.deepcopy(model).to(dtype)
    assert other.backbone.tables(ids).dtype == dtype
    assert_close(other.backbone.tables(ids).float(), rows, rtol=1e-3, atol=1e-3)
    assert torch.equal(model.backbone.tables(ids), rows)
    loaded = rb.load_model(rb.save_model(other, tmp_path))
    assert torch.equal(loaded.backbone.tables(ids), other.backbone.tables(ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_table_in_another_precision_is_coded_in_it(dtype):
    weight = torch.randn(300, 8).to(dtype)
    model = nn.Sequential(nn.Embedding.from_pretrained(weight.clone(), freeze=False))
    rb.compress_(model, counts=5, size="1/4", verbose=False)
    rows = model(torch.arange(300))
    assert rows.dtype == dtype
    assert float((rows - weight).square().mean()) < 0.05


def test_some_fields_may_be_coded_and_others_not():
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    plain, ids = copy.deepcopy(model), batch().ids
    counts = {field.name: counts_of(field.rows, in_order=True) for field in FIELDS}
    rb.compress_(model, counts=counts, where=lambda t: t.field == "item" and t.width > 1, verbose=False)  # fmt: skip
    rows, before = model.backbone.tables(ids), plain.backbone.tables(ids)
    assert torch.equal(rows[:, :2], before[:, :2])
    assert not torch.equal(rows[:, 2], before[:, 2])
    kinds = [isinstance(table, CodedTable) for table in model.backbone.tables.tables()]
    assert kinds == [False, False, True]


def test_the_optimizer_lets_go_of_what_is_coded():
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rb.compress_(model, counts={"user": counts_of(300, in_order=True)}, where=lambda t: t.name == "user", size="1/4", optimizer=optimizer, verbose=False)  # fmt: skip
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held == 100 * 4 + 300 + 9


def test_the_report_counts_bytes(capsys):
    model = nn.Sequential(nn.Embedding(1_000, 8))
    rb.compress_(model, counts=np.int64(5).item(), size="1/10")
    said = capsys.readouterr().out
    assert said.startswith("EvidenceCoding(size='1/10'): 1 of 1 tables, 32,000 -> ")
    assert "bytes stored, no longer trained" in said
