"""Methods on the tables of a model with several embedding sets: each set is a table of its own."""

import json

import pytest
import torch
from stored import sign
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import ModelFileError, NoTableError, UnsupportedTableError
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.models.dcn_v2 import DCNv2
from rarebit.pruning.pep import count_nonzero, set_threshold_
from rarebit.research.aligned_sets import AlignedSets
from rarebit.research.shared_sets import SharedSets
from rarebit.sets.sets import SetsStack, SetsTable, SplitSetsTable
from rarebit.tables.apply import end_training_

M, K = 3, 4
FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
SCHEMA = rb.data.Schema(FIELDS)
SETS = (MultiEmbedding(num_sets=M), SharedSets(num_sets=M), AlignedSets(num_sets=M))
BY_SET = (
    rb.Hashing(buckets=7),
    rb.LowRank(rank=2),
    rb.MLET(inner_dim=6),
    rb.research.ProductStart(inner_dim=6),
)
BY_ENTRY = (
    rb.PEP(),
    rb.PEP(granularity="dimension"),
    rb.PEP(schedule="given"),
    rb.pruning.Masked(),
)
LATE = (rb.Quantize(), rb.LowRank(rank=2, after_training=True))


def make(*methods, sets=SETS[0]):
    model = DCNv2(SCHEMA, dim=K, hidden=(8, 6))
    for method in (sets, *methods):
        rb.apply_(model, method, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch_of(rows=16):
    ids = torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS], dim=1)
    return rb.Dataset(SCHEMA, ids, None, torch.arange(rows) % 2)[:]


def table_of(model, number=0):
    return model.backbone.tables.tables()[number]


def test_plain_sets_stay_one_stack_of_plain_weights():
    model = make()
    [stack] = model.backbone.tables.stacks
    assert type(stack) is SetsStack
    assert type(table_of(model)) is SetsTable
    assert [n for n, _ in model.backbone.tables.named_parameters()] == ["stacks.0.embedding.weight"]


def test_mlet_is_a_product_for_each_set():
    model, ids = make(rb.MLET(inner_dim=6)), torch.tensor([3, 19, 3])
    table = table_of(model)
    assert [type(part).__name__ for part in table.tables] == ["FactorizedTable"] * M
    expected = [
        torch.cat([part.inner.weight[i] @ part.projection for part in table.tables]) for i in ids
    ]
    assert_close(table(ids), torch.stack(expected))
    assert rb.find_tables(model)[0].num_parameters == M * (20 + K) * 6
    with torch.no_grad():
        before = table(ids)
        table.tables[1].projection.zero_()
    changed = (table(ids) != before).any(dim=0).view(M, K).any(dim=1)
    assert changed.tolist() == [False, True, False]


def test_low_rank_is_of_each_set_and_not_of_all_of_them():
    table = table_of(make(rb.LowRank(rank=2)))
    weight = table.weight.detach()
    ranks = [int(torch.linalg.matrix_rank(part)) for part in weight.chunk(M, dim=1)]
    assert ranks == [2] * M
    assert int(torch.linalg.matrix_rank(weight)) == 2 * M


def test_hashing_shares_rows_in_every_set_and_goes_on_by_set():
    table = table_of(make(rb.Hashing(buckets=7), rb.LowRank(rank=2)))
    weight = table.weight.detach()
    assert_close(weight[7:14], weight[:7])
    assert [str(method) for method in table.methods] == [
        "MultiEmbedding(num_sets=3)",
        "Hashing(buckets=7)",
        "LowRank(rank=2)",
    ]
    assert [part.inner.inner.weight.shape for part in table.tables] == [(7, 2)] * M


def test_quantised_sets_have_a_scale_each():
    model = make()
    with torch.no_grad():
        model.backbone.tables.stacks[0].embedding.weight[:, :K] *= 100
    rb.apply_(model, rb.Quantize(), verbose=False)
    scales = [float(part.scale) for part in table_of(model).tables]
    assert scales[0] > 10 * max(scales[1:])


def test_thresholds_cut_the_entries_of_all_sets_within_one_budget():
    model = make(rb.PEP(schedule="given"))
    weight = torch.cat([t.inner.weight.detach() for t in model.backbone.tables.tables()])
    assert weight.shape == (40, M * K)
    set_threshold_(model, 0.2)
    assert count_nonzero(model) == int((weight.abs() > 0.2).sum())
    kept = [(t.weight != 0).sum(dim=0) for t in model.backbone.tables.tables()]
    assert bool((sum(kept) > 0).all())  # of every set


def test_thresholds_of_columns_are_of_each_sets_own():
    levels = table_of(make(rb.PEP(granularity="dimension"))).levels.value
    assert levels.shape == (M * K,)


def test_a_method_that_suits_no_single_set_leaves_it_alone():
    model = make()
    assert bool(rb.apply_(model, rb.LowRank(rank=4), verbose=False))
    with pytest.raises(NoTableError, match="smaller than rank 5"):
        rb.apply_(make(), rb.LowRank(rank=5))  # a row of all sets has 12 columns, a set has 4
    with pytest.raises(NoTableError, match="smaller than rank 5"):
        rb.apply_(make(rb.Hashing(buckets=7)), rb.LowRank(rank=5))


@pytest.mark.parametrize("sets", SETS, ids=str)
@pytest.mark.parametrize("method", [*BY_SET, *BY_ENTRY, *LATE], ids=str)
def test_a_stack_is_the_loop_over_its_tables(sets, method):
    model, batch = make(sets=sets).double(), batch_of()
    rb.apply_(model, method, verbose=False)
    user, tags, item = model.backbone.tables.tables()
    ids = batch.ids
    present = (ids[:, 1:4] != 0).unsqueeze(-1)
    mean = (tags(ids[:, 1:4]) * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    expected = torch.stack([user(ids[:, 0]), mean, item(ids[:, 4])], dim=1)
    assert_close(model.backbone.tables(ids), expected)


@pytest.mark.parametrize("method", [*BY_SET, *BY_ENTRY], ids=str)
def test_merged_the_sets_are_plain_and_know_it(method):
    model, batch = make(method), batch_of()
    before = model(batch)
    assert bool(rb.merge_(model, verbose=False))
    assert_close(model(batch), before, atol=1e-5, rtol=1e-5)
    assert type(table_of(model)) is SetsTable
    assert not rb.merge_(model, verbose=False)
    rb.apply_(model, rb.MLET(inner_dim=6), verbose=False)
    assert type(table_of(model)) is SplitSetsTable


@pytest.mark.parametrize("methods", [(rb.MLET(inner_dim=6),), (rb.MLET(inner_dim=6), rb.PEP())])
def test_after_training_the_sets_are_one_plain_table_again(methods):
    model, batch = make(*methods), batch_of()
    before = model(batch)
    end_training_(model)
    assert type(table_of(model)) is SetsTable
    assert_close(model(batch), before, atol=1e-5, rtol=1e-5)


def test_after_training_hashed_sets_stay_hashed():
    model = make(rb.Hashing(buckets=7), rb.MLET(inner_dim=6))
    before = table_of(model).weight.detach()
    end_training_(model)
    table = table_of(model)
    assert [str(method) for method in table.methods[1:]] == ["Hashing(buckets=7)"]
    assert_close(table.weight.detach(), before)


def test_some_fields_may_have_a_method_and_others_none():
    model, batch = make(), batch_of()
    rb.apply_(model, rb.MLET(inner_dim=6), where=lambda t: t.field == "item", verbose=False)
    before = model(batch)
    assert len(model.backbone.tables.stacks) == 2
    rb.merge_(model, verbose=False)
    assert_close(model(batch), before, atol=1e-5, rtol=1e-5)
    assert len(model.backbone.tables.stacks) == 1


def test_the_padding_row_of_split_sets_is_zero_and_stays_so():
    model = make(rb.MLET(inner_dim=6))
    tags = table_of(model, 1)
    assert not bool(tags(torch.tensor([0])).any())
    assert tags.padding_idx == 0
    rb.merge_(model, verbose=False)
    assert not bool(table_of(model, 1).weight[0].any())


def test_an_optimizer_follows_a_method_on_the_sets():
    model, batch = make(), batch_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rb.apply_(model, rb.MLET(inner_dim=6), optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.backbone.tables.parameters()]
    model(batch).square().sum().backward()
    optimizer.step()
    moved = zip(model.backbone.tables.parameters(), before, strict=True)
    assert all(not torch.equal(parameter, old) for parameter, old in moved)


def test_sets_after_a_method_are_refused():
    model = DCNv2(SCHEMA, dim=K, hidden=(8,))
    rb.apply_(model, rb.Hashing(buckets=7), verbose=False)
    with pytest.raises(UnsupportedTableError, match="multi-embedding goes before hashing"):
        rb.apply_(model, SETS[0])
    assert model.backbone.num_sets is None


@pytest.mark.parametrize("sets", SETS, ids=str)
@pytest.mark.parametrize("method", [None, *BY_SET, *BY_ENTRY, *LATE], ids=str)
def test_a_saved_model_comes_back(sets, method, tmp_path):
    model = make(*([] if method is None else [method]), sets=sets)
    data = rb.Dataset(SCHEMA, batch_of().ids)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    assert bool((rb.predict(loaded, data) == rb.predict(model, data)).all())
    again = rb.load_model(tmp_path, into=DCNv2(SCHEMA, dim=K, hidden=(8, 6)))
    assert bool((rb.predict(again, data) == rb.predict(model, data)).all())


def test_a_saved_model_is_read_into_one_that_has_its_sets(tmp_path):
    model = make(rb.MLET(inner_dim=6))
    rb.save_model(model, tmp_path)
    loaded = rb.load_model(tmp_path, into=make())
    assert rb.find_tables(loaded) == rb.find_tables(model)


def test_a_packed_model_with_sets_comes_back(tmp_path):
    model = make(rb.PEP(schedule="given"))
    set_threshold_(model, 0.6)
    data = rb.Dataset(SCHEMA, batch_of().ids)
    before = rb.predict(model, data)
    assert bool(rb.pack_(model, verbose=False))
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert_close(rb.predict(loaded, data), before)


def test_a_model_of_other_sets_is_refused(tmp_path):
    plain = DCNv2(SCHEMA, dim=K, hidden=(8, 6))
    rb.save_model(make(), tmp_path / "sets")
    rb.save_model(plain, tmp_path / "plain")
    with pytest.raises(ModelFileError, match=r"its sets are those of MultiEmbedding\(num_sets=3\)"):
        rb.load_model(tmp_path / "sets", into=make(sets=MultiEmbedding(num_sets=2)))
    with pytest.raises(ModelFileError, match="it has one embedding set, and this model has those"):
        rb.load_model(tmp_path / "plain", into=make())


def change_description(folder, change):
    path = folder / "model.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    sign(folder)


@pytest.mark.parametrize(
    "described", [{"method": "hashing", "buckets": 3}, {"method": "nothing"}, [], "x", {"x": 1}]
)
def test_a_file_that_names_no_sets_method_is_refused(described, tmp_path):
    rb.save_model(make(), tmp_path)
    change_description(tmp_path, lambda values: values.update(sets=described))
    with pytest.raises(ModelFileError, match="is a model of another kind"):
        rb.load_model(tmp_path)


@pytest.mark.parametrize("num_sets", [0, 10**9, 2**62, 10**30, "4"])
def test_an_absurd_number_of_sets_is_refused_without_its_memory(num_sets, tmp_path):
    rb.save_model(make(), tmp_path)
    change_description(tmp_path, lambda values: values["sets"].update(num_sets=num_sets))
    with pytest.raises(ModelFileError, match="is a model of another kind"):
        rb.load_model(tmp_path)


def test_a_file_of_sets_gets_no_more_rows_than_its_weights_are_worth(tmp_path):
    rb.save_model(make(), tmp_path)
    change_description(
        tmp_path, lambda values: values["schema"]["fields"][0].update(rows=1_000_000)
    )
    with pytest.raises(ModelFileError, match="it asks for larger weights than the folder holds"):
        rb.load_model(tmp_path)


def test_the_weights_of_split_sets_are_counted_once():
    model = make(rb.MLET(inner_dim=6))
    infos = rb.find_tables(model)
    assert [info.field for info in infos] == ["user", "tags", "item"]
    trained = sum(p.numel() for p in model.backbone.tables.parameters())
    assert sum(info.num_parameters for info in infos) == trained
