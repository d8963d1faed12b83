"""`find_tables`: every table of a model, once, by name."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.models.deepfm import DeepFM
from rarebit.tables.apply import table_bytes
from rarebit.tables.collection import TableCollection

HASHING = rb.Hashing(buckets=5)


def mixed_model() -> nn.Module:
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))
    )
    return nn.ModuleDict(
        {
            "plain": nn.Embedding(20, 4),
            "bag": nn.EmbeddingBag(10, 3, dtype=torch.float64),
            "layer": nn.Linear(4, 4),
            "zoo": DeepFM(schema, dim=2, hidden=(3,)),
        }
    )


def shapes(model: nn.Module) -> list[tuple[str, int, int, str]]:
    return [(t.name, t.rows, t.width, t.kind) for t in rb.find_tables(model)]


def test_names_shapes_and_kinds():
    assert shapes(mixed_model()) == [
        ("plain", 20, 4, "embedding"),
        ("bag", 10, 3, "bag"),
        ("zoo.backbone.tables.user", 9, 2, "field"),
        ("zoo.backbone.tables.item", 8, 2, "field"),
        ("zoo.wide.tables.user", 9, 1, "field"),
        ("zoo.wide.tables.item", 8, 1, "field"),
    ]


def test_the_last_part_of_the_name_is_the_field():
    fields = [info.field for info in rb.find_tables(mixed_model())]
    assert fields == ["plain", "bag", "user", "item", "user", "item"]


def test_a_model_without_tables_has_none():
    assert rb.find_tables(nn.Linear(3, 3)) == []


def test_the_model_itself_may_be_a_table():
    assert shapes(nn.Embedding(9, 4)) == [("", 9, 4, "embedding")]


def test_a_table_in_two_places_is_listed_once():
    table = nn.Embedding(9, 4)
    assert shapes(nn.ModuleDict({"a": table, "b": table})) == [("a", 9, 4, "embedding")]


def test_what_lies_inside_a_wrapped_table_is_not_listed():
    model = mixed_model()
    before = shapes(model)
    rb.apply_(model, HASHING, verbose=False)
    rb.apply_(model, rb.LowRank(rank=2), verbose=False)
    assert shapes(model) == before


def test_a_name_that_starts_like_another_is_listed():
    model = nn.ModuleDict({"item": nn.Embedding(9, 4), "item_2": nn.Embedding(8, 4)})
    rb.apply_(model, HASHING, verbose=False)
    assert [info.name for info in rb.find_tables(model)] == ["item", "item_2"]


def test_methods_and_sizes_before_and_after():
    model = mixed_model()
    infos = {t.name: t for t in rb.find_tables(model)}
    assert (infos["plain"].num_parameters, infos["plain"].num_bytes) == (80, 320)
    assert (infos["bag"].num_parameters, infos["bag"].num_bytes) == (30, 240)
    assert infos["zoo.backbone.tables.item"].num_bytes == 8 * 2 * 4
    rb.apply_(model, HASHING, verbose=False)
    infos = {t.name: t for t in rb.find_tables(model)}
    assert {t.methods for t in infos.values() if t.width > 1} == {("Hashing(buckets=5)",)}
    assert (infos["plain"].num_parameters, infos["plain"].num_bytes) == (20, 80)
    assert (infos["bag"].num_parameters, infos["bag"].num_bytes) == (15, 120)
    assert infos["zoo.backbone.tables.item"].num_bytes == 5 * 2 * 4
    assert infos["zoo.wide.tables.item"].methods == ()


@dataclass(frozen=True, kw_only=True)
class Noting(rb.Method):
    """A method of a user's own, whose table keeps more than weights."""

    def wrap(self, base):
        table = NotingTable(
            self,
            base,
            num_embeddings=base.num_embeddings,
            embedding_dim=base.embedding_dim,
            padding_idx=base.padding_idx,
        )
        table.register_buffer("seen", torch.zeros(9, dtype=torch.int16))
        table.register_buffer("made_anew", torch.zeros(1000), persistent=False)
        return table


class NotingTable(rb.Table):
    def rows(self, ids):
        return self.inner(ids)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_buffers_that_are_saved_count_and_others_do_not(make):
    model = nn.Sequential(make(9, 4))
    rb.apply_(model, Noting(), verbose=False)
    (info,) = rb.find_tables(model)
    assert (info.num_parameters, info.num_bytes) == (9 * 4 + 9, 9 * 4 * 4 + 9 * 2)
    assert table_bytes(model) == info.num_bytes


def test_bytes_of_a_weight_in_two_tables_are_counted_once():
    model = nn.ModuleList(
        [nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Embedding(5, 2), nn.Linear(3, 3)]
    )
    model[1].weight = model[0].weight
    assert table_bytes(model) == 4 * (9 * 4 + 5 * 2)


def test_bytes_of_a_model_are_those_of_its_tables_and_their_projections():
    fields = (rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=8))
    tables = TableCollection(fields, 3, widths={"item": 2})
    assert table_bytes(tables) == 4 * (9 * 3 + 8 * 2 + 2 * 3)


def test_frozen_tables_are_not_trainable():
    model = nn.ModuleList([nn.Embedding(9, 4), nn.Embedding(9, 4)])
    model[0].requires_grad_(requires_grad=False)
    assert [info.trainable for info in rb.find_tables(model)] == [False, True]


def test_looking_changes_nothing():
    model = mixed_model()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    rb.find_tables(model)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert bool((parameter == before[name][1]).all())
