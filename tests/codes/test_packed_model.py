"""`pack_`: the tables of a model, packed in place."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.codes.packed import Pack, PackedTable, pack_, take_parts_
from rarebit.errors import ModelFileError, SettingsError, UnsupportedTableError
from rarebit.models.fm import FM
from rarebit.tables.apply import table_bytes

FIELDS = (
    rb.data.Field(name="user", rows=300),
    rb.data.Field(name="tags", kind="multi", rows=90, max_length=3),
    rb.data.Field(name="item", rows=200),
)


def prune_(model: nn.Module, kept: float = 0.1) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand_like(parameter) >= kept] = 0.0
    return model


def own_model() -> nn.ModuleDict:
    tables = {
        "user": nn.Embedding(300, 16, padding_idx=0),
        "tags": nn.EmbeddingBag(100, 8, mode="mean"),
        "bias": nn.Embedding(300, 1),
    }
    return prune_(nn.ModuleDict(tables))


def batch_of_ids() -> Tensor:
    return torch.stack(
        [torch.randint(field.rows, (20,)) for field in FIELDS for _ in range(field.max_length)], 1
    )


def test_a_model_of_ones_own_answers_as_before_with_fewer_bytes(capsys):
    model = own_model()
    ids = torch.randint(100, (7, 3))
    before = {name: table(ids) for name, table in model.items()}
    full = table_bytes(model)
    changes = pack_(model)
    for name, rows in before.items():
        assert torch.equal(model[name](ids), rows)
    assert [info.name for info in changes.after] == ["user", "tags"]
    assert changes.skipped == (("bias", "narrower than 2"),)
    said = capsys.readouterr().out.splitlines()
    now = [info.num_bytes for info in changes.after]
    assert said[0] == f"pack: 2 of 3 tables, {4 * (300 * 16 + 800):,} -> {sum(now):,} bytes stored"
    assert table_bytes(model) == full - 4 * (300 * 16 + 800) + sum(now)


def test_bytes_and_weights_are_those_that_are_stored():
    model = nn.Sequential(nn.Embedding(100, 4))
    with torch.no_grad():
        model[0].weight[3:] = 0.0
    pack_(model, verbose=False)
    [info] = rb.find_tables(model)
    # 12 values of 4 bytes, 3 rows of a byte of bits, 4 offsets, two words of 64 rows
    assert (info.num_parameters, info.num_bytes) == (12, 48 + 3 + 16 + 16)
    assert info.methods == ("Pack(bits=None)",)
    assert info.trainable


def test_what_would_not_get_smaller_is_left_alone():
    model = nn.ModuleDict({"full": nn.Embedding(50, 8), "none": nn.Embedding(0, 8)})
    changes = pack_(model, verbose=False)
    assert not changes
    assert changes.skipped == (("full", "it would not get smaller"), ("none", "it has no weights"))
    assert type(model["full"]) is nn.Embedding
    assert pack_(model, bits=8, verbose=False).after[0].num_bytes < 50 * 8 * 4


def test_where_chooses_and_packed_tables_are_not_packed_again():
    model = own_model()
    changes = pack_(model, where=lambda t: t.field == "user", verbose=False)
    assert [info.name for info in changes.after] == ["user"]
    assert ("tags", "not chosen") in changes.skipped
    again = pack_(model, verbose=False)
    assert [info.name for info in again.after] == ["tags"]
    assert ("user", "already packed") in again.skipped


@pytest.mark.parametrize("bits", [4, 0, "8"])
def test_other_bits_are_refused(bits):
    with pytest.raises(SettingsError, match="bits must be"):
        pack_(own_model(), bits=bits)


def test_a_tied_table_is_refused_with_what_to_do():
    model = own_model()
    model["output"] = nn.Linear(16, 300, bias=False)
    model["output"].weight = model["user"].weight
    with pytest.raises(UnsupportedTableError, match=r"cannot pack 'user': its weight is tied to"):
        pack_(model)
    assert pack_(model, where=lambda t: t.name != "user", verbose=False)


def test_fields_of_a_stack_are_packed_each_and_merge_back():
    model = prune_(FM(rb.data.Schema(FIELDS), dim=6))
    tables, ids = model.backbone.tables, batch_of_ids()
    before = tables(ids)
    changes = pack_(model, where=lambda t: t.field != "item", verbose=False)
    assert [info.field for info in changes.after] == ["user", "tags"]
    assert torch.equal(tables(ids), before)
    rb.merge_(model, verbose=False)
    assert len(tables.stacks) == 1
    assert torch.equal(tables(ids), before)


def test_buckets_of_a_hashed_table_are_packed_as_buckets():
    model = nn.Sequential(nn.Embedding(1000, 16))
    rb.apply_(model, rb.Hashing(buckets=200), verbose=False)
    prune_(model)
    ids = torch.randint(1000, (40,))
    before = model(ids)
    [info] = pack_(model, verbose=False).after
    assert info.num_bytes < 200 * 16
    assert torch.equal(model(ids), before)
    assert torch.equal(model[0].merge()(ids), before)


def test_factors_are_folded_first():
    model = nn.Sequential(nn.Embedding(500, 8))
    rb.apply_(model, rb.LowRank(rank=3), verbose=False)
    with torch.no_grad():
        model[0].inner.weight[20:] = 0.0
    before = model[0].merge().weight
    pack_(model, verbose=False)
    assert isinstance(model[0], PackedTable)
    assert torch.equal(model[0].weight, before)


def test_an_optimizer_goes_on_with_the_values():
    model = own_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pack_(model, optimizer=optimizer, verbose=False)
    table, ids = model["user"], torch.arange(300)
    values = table.values.detach().clone()
    table(ids).sum().backward()
    optimizer.step()
    assert_close(table.values, values - 1)


def test_a_packed_model_is_trained():
    model = prune_(FM(rb.data.Schema(FIELDS), dim=6), kept=0.4)
    pack_(model, verbose=False)
    zeros = [table.weight == 0 for table in model.backbone.tables.tables()]
    label = torch.randint(2, (20,)).float()
    batch = rb.data.Batch(batch_of_ids(), torch.zeros(20, 0), label, model.schema)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        logits = model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for table, zero in zip(model.backbone.tables.tables(), zeros, strict=True):
        assert not table.weight[zero].any()


def test_a_fresh_model_takes_the_parts_of_a_stored_one():
    model, fresh = own_model(), nn.ModuleDict(own_model())
    ids = torch.randint(100, (7, 3))
    pack_(model, verbose=False)
    rb.apply_(fresh, Pack(), verbose=False)
    stored = model.state_dict()
    assert stored["user.values"].shape != fresh["user"].values.shape
    take_parts_(fresh, stored)
    assert [t.shape for t in fresh.state_dict().values()] == [t.shape for t in stored.values()]
    fresh.load_state_dict(stored)
    for name, table in model.items():
        assert torch.equal(fresh[name](ids), table(ids))
    wild = stored | {"user.offsets": stored["user.offsets"] + 1}
    with pytest.raises(
        ModelFileError, match="packed table 'user' is damaged: its offsets go from 1"
    ):
        take_parts_(fresh, wild)
