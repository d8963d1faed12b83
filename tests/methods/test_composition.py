"""Methods on top of methods."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import UnsupportedTableError
from rarebit.models.fm import FM

HASHING, LOW_RANK = rb.Hashing(buckets=7), rb.LowRank(rank=2)

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)


def move_(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def compose(model: nn.Module, *methods: rb.Method) -> nn.Module:
    for method in methods:
        rb.apply_(model, method, verbose=False)
    move_(model)
    return model


def ids_of(rows: int = 8) -> torch.Tensor:
    return torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS], dim=1)


def test_hashing_then_low_rank_keeps_buckets_of_low_rank():
    table = compose(nn.Sequential(nn.Embedding(20, 5)), HASHING, LOW_RANK)[0]
    left, right = table.inner.inner.weight, table.inner.right
    assert left.shape == (7, 2)
    assert right.shape == (2, 5)
    assert_close(table.weight, torch.stack([left[i % 7] @ right for i in range(20)]))


def test_the_buckets_start_as_the_closest_of_low_rank():
    plain = nn.Embedding(20, 5)
    model = nn.Sequential(plain)
    rb.apply_(model, HASHING, verbose=False)
    rb.apply_(model, LOW_RANK, verbose=False)
    tail = torch.linalg.svdvals(plain.weight.detach()[:7])[2:].square().sum()
    assert_close((model[0].weight[:7] - plain.weight[:7]).square().sum().detach(), tail)


def test_methods_are_listed_in_the_order_they_were_applied():
    model = compose(nn.Sequential(nn.Embedding(20, 5)), HASHING, LOW_RANK)
    (info,) = rb.find_tables(model)
    assert info.methods == ("Hashing(buckets=7)", "LowRank(rank=2)")
    assert info.num_parameters == (7 + 5) * 2


REFUSED = {
    "low-rank, hashing": (
        LOW_RANK,
        HASHING,
        r"hashing goes before low-rank: write hashing\+low-rank, or merge first",
    ),
    "hashing, hashing": (HASHING, rb.Hashing(buckets=4), "hashing is there twice; use one"),
    "low-rank, low-rank": (rb.LowRank(rank=4), LOW_RANK, "low-rank is there twice; use one"),
}


@pytest.mark.parametrize(("first", "then", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_ill_defined_pair_is_refused_and_nothing_is_changed(first, then, reason):
    model = nn.ModuleDict({"a": nn.Embedding(20, 5), "b": nn.EmbeddingBag(20, 5)})
    rb.apply_(model, first, where=lambda t: t.name == "b", verbose=False)
    before = rb.find_tables(model)
    message = re.escape(f"{then} cannot be applied to 'b' after {first}: ") + f".*{reason}"
    with pytest.raises(UnsupportedTableError, match=message):
        rb.apply_(model, then)
    assert rb.find_tables(model) == before


@pytest.mark.parametrize(("first", "then", "reason"), REFUSED.values(), ids=REFUSED)
def test_only_tables_that_have_the_earlier_method_are_refused(first, then, reason):
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model, first, where=lambda t: t.field == "user", verbose=False)
    changes = rb.apply_(model, then, where=lambda t: t.field != "user", verbose=False)
    assert [info.field for info in changes.after] == ["tags", "item"]
    with pytest.raises(UnsupportedTableError, match=reason):
        rb.apply_(model, then, where=lambda t: t.field == "user")


def test_a_method_far_down_is_seen_too():
    model = compose(nn.Sequential(nn.Embedding(20, 5)), HASHING, LOW_RANK)
    with pytest.raises(
        UnsupportedTableError, match=r"after LowRank\(rank=2\): low-rank is there twice"
    ):
        rb.apply_(model, rb.LowRank(rank=1))


@pytest.mark.parametrize(("first", "then", "reason"), REFUSED.values(), ids=REFUSED)
def test_after_merging_any_method_may_follow(first, then, reason):
    assert reason
    model = compose(nn.Sequential(nn.Embedding(20, 5)), first)
    rb.merge_(model, verbose=False)
    rb.apply_(model, then, verbose=False)
    assert rb.find_tables(model)[0].methods == (str(then),)


TRAINED_ONLY = (rb.MLET(inner_dim=8), rb.research.ProductStart(inner_dim=8))


@pytest.mark.parametrize("first", TRAINED_ONLY, ids=str)
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_after_training_a_product_is_folded_and_cut(first, table):
    model = compose(nn.ModuleList([table(20, 5)]), first)
    holder = model[0] if isinstance(model[0], rb.Table) else model[0].table
    weight = holder.merge().weight.detach().double()
    rb.apply_(model, rb.LowRank(rank=2, after_training=True), verbose=False)
    (info,) = rb.find_tables(model)
    assert info.methods == ("LowRank(rank=2, after_training=True)",)
    assert info.num_parameters == (20 + 5) * 2
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    closest = left[:, :2] * values[:2] @ right[:2]
    assert_close(model[0].weight.detach().double(), closest, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("first", TRAINED_ONLY, ids=str)
def test_before_training_a_product_is_not_cut(first):
    model = compose(nn.Sequential(nn.Embedding(20, 5)), first)
    with pytest.raises(
        UnsupportedTableError, match="both are factors; use one of them, or merge first"
    ):
        rb.apply_(model, LOW_RANK)


def test_after_training_what_stays_is_refused_as_ever():
    model = compose(nn.Sequential(nn.Embedding(20, 5)), rb.LowRank(rank=4))
    with pytest.raises(UnsupportedTableError, match="low-rank is there twice; use one"):
        rb.apply_(model, rb.LowRank(rank=2, after_training=True))


def test_the_buckets_of_a_product_are_folded_and_cut():
    model = compose(nn.Sequential(nn.Embedding(20, 5)), HASHING, rb.MLET(inner_dim=8))
    late = rb.LowRank(rank=2, after_training=True)
    rb.apply_(model, late, verbose=False)
    (info,) = rb.find_tables(model)
    assert info.methods == (str(HASHING), str(late))
    assert info.num_parameters == (7 + 5) * 2


@dataclass(frozen=True, kw_only=True)
class Doubling(rb.Method):
    """A user's method without a rank."""

    def wrap(self, base):
        return DoubledTable(
            self,
            base,
            num_embeddings=base.num_embeddings,
            embedding_dim=base.embedding_dim,
            padding_idx=base.padding_idx,
        )


class DoubledTable(rb.Table):
    def rows(self, ids):
        return 2 * self.inner(ids)


OWN = [(Doubling(), HASHING), (HASHING, Doubling()), (Doubling(), LOW_RANK), (Doubling(),) * 2]


def test_hashing_keeps_the_rows_of_a_method_of_ones_own():
    model = nn.Sequential(nn.Embedding(20, 5))
    rb.apply_(model, Doubling(), verbose=False)
    rows = model[0].weight.detach()
    rb.apply_(model, HASHING, verbose=False)
    assert_close(model[0].weight.detach(), torch.stack([rows[i % 7] for i in range(20)]))


@dataclass(frozen=True, kw_only=True)
class Careful(Doubling):
    """A user's method that must not follow hashing, nor be followed by low rank."""

    excludes = {"hashing": "no buckets, please", "low-rank": "no factors, please"}  # noqa: RUF012  # as users write it


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [(HASHING, Careful(), "no buckets, please"), (Careful(), LOW_RANK, "no factors, please")],
)
def test_a_method_of_ones_own_may_refuse_pairs(first, then, reason):
    model = compose(nn.Sequential(nn.Embedding(20, 5)), first)
    with pytest.raises(UnsupportedTableError, match=reason):
        rb.apply_(model, then)


@pytest.mark.parametrize("methods", [(HASHING, LOW_RANK), *OWN])
def test_merged_equals_unmerged(methods):
    ids, offsets = torch.tensor([3, 19, 0, 3]), torch.tensor([0, 1])
    for table in (nn.Embedding(20, 5, padding_idx=3), nn.EmbeddingBag(20, 5, padding_idx=3)):
        arguments = (ids, offsets) if isinstance(table, nn.EmbeddingBag) else (ids,)
        model = compose(nn.ModuleList([table]), *methods)
        before = model[0](*arguments)
        rb.merge_(model, verbose=False)
        assert type(model[0]) is type(table)
        assert_close(model[0](*arguments), before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("methods", [(HASHING, LOW_RANK), *OWN])
def test_a_collection_composes_as_its_tables_do(methods):
    model = compose(FM(rb.data.Schema(FIELDS), dim=5), *methods).double()
    tables, ids = model.backbone.tables, ids_of()
    user, tags, item = tables.tables()
    present = (ids[:, 1:4] != 0).unsqueeze(-1)
    mean = (tags(ids[:, 1:4]) * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    expected = torch.stack([user(ids[:, 0]), mean, item(ids[:, 4])], dim=1)
    assert_close(tables(ids), expected)
    assert len(tables.stacks) == 1
    rb.merge_(tables, verbose=False)
    assert_close(tables(ids), expected, atol=1e-9, rtol=1e-9)


def test_a_saved_model_has_the_same_methods_in_the_same_order(tmp_path):
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model, HASHING, where=lambda t: t.field != "item", verbose=False)
    rb.apply_(model, LOW_RANK, where=lambda t: t.field != "tags", verbose=False)
    move_(model)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    data = rb.Dataset(model.schema, ids_of())
    assert bool((rb.predict(loaded, data) == rb.predict(model, data)).all())


def test_a_table_of_ones_own_model_comes_back_composed(tmp_path):
    model = compose(nn.Sequential(nn.Embedding(20, 5)), HASHING, LOW_RANK)
    folder = rb.save_model(model, tmp_path)
    loaded = rb.load_model(folder, into=nn.Sequential(nn.Embedding(20, 5)))
    assert rb.find_tables(loaded) == rb.find_tables(model)
    assert_close(loaded[0].weight, model[0].weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "reason"),
    [(rb.LowRank(rank=5), "smaller than rank 5"), (rb.Hashing(buckets=4), "no more than 4 rows")],
)
def test_a_method_that_does_not_suit_the_buckets_leaves_them_alone(method, reason):
    model = nn.ModuleDict({"hashed": nn.Embedding(20, 8), "plain": nn.Embedding(20, 8)})
    rb.apply_(model, rb.Hashing(buckets=3), where=lambda t: t.name == "hashed", verbose=False)
    changes = rb.apply_(model, method, verbose=False)
    assert changes.skipped == (("hashed", reason),)
    assert [info.name for info in changes.after] == ["plain"]
