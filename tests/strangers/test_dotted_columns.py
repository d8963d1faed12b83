"""Columns of other people's logs have dots in their names; modules of torch cannot."""

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.data.dataset import Dataset
from rarebit.methods._counts import counted_in
from rarebit.models import build_model
from rarebit.tables.apply import find_sites
from rarebit.tables.table import field_of, table_name

NAMES = ("id", "user.id", "a.b", "a_b", "b", 'c"d', '"e"', 'f."g\\', "tables.id", "")
FIELDS = tuple(rb.data.Field(name=name, rows=9) for name in NAMES if name)


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Return rows with the same number of values, but other counts, in every column."""
    ids = torch.randint(9, (60, len(FIELDS)), generator=torch.Generator().manual_seed(0))
    label = torch.arange(60) % 2
    return Dataset(rb.data.Schema(FIELDS), ids.int(), torch.empty(60, 0), label.to(torch.uint8))


@pytest.mark.parametrize("place", ["", "backbone.tables"])
@pytest.mark.parametrize("name", NAMES)
def test_the_field_is_read_back_from_the_name_of_its_table(name: str, place: str):
    assert field_of(table_name(place, name)) == name


def test_names_of_tables_differ(data):
    tables = rb.find_tables(build_model("deepfm", data.schema, {"dim": 2}))
    assert len({table.name for table in tables}) == len(tables) == 2 * len(FIELDS)


@pytest.mark.parametrize("when", ["with the method", "later"])
def test_shrinkage_takes_the_counts_of_the_column(data, when):
    counts, model = data.counts(), build_model("fm", data.schema, {"dim": 2})
    rb.apply_(
        model, rb.Shrinkage(counts=counts if when == "with the method" else None), verbose=False
    )
    if when == "later":
        rb.set_counts_(model, counts)
    for site in find_sites(model):
        (table,) = counted_in(site.table)
        assert table.evidence.counts.tolist() == counts[site.info.field].tolist(), site.info.name


def test_strengths_are_given_by_the_column(data):
    model = build_model("fm", data.schema, {"dim": 2})
    c = {field.name: float(number) for number, field in enumerate(FIELDS)}
    rb.apply_(model, rb.Shrinkage(c=c, counts=data.counts()), verbose=False)
    for site in find_sites(model):
        (table,) = counted_in(site.table)
        assert table.evidence.strength.item() == c[site.info.field]


def test_diagnose_takes_the_counts_of_the_column(data):
    found = rb.diagnose(build_model("ffm", data.schema, {"dim": 2}), data)
    for table in found.tables:
        never = int((data.counts()[table.field] == 0).sum())
        assert table.never_trained_rows == never
    assert all(any(value is not None for value in row) for row in found.sub_embeddings[0].abundance)


@pytest.mark.parametrize("method", [rb.Forgetting(), rb.Shrinkage()])
def test_a_model_is_trained_saved_and_loaded(data, method, tmp_path):
    model = build_model("fm", data.schema, {"dim": 2})
    callbacks = []
    if isinstance(method, rb.Shrinkage):
        rb.apply_(model, method.with_counts(data.counts()), verbose=False)
    else:
        callbacks = [method.callback()]
    rb.fit(model, data, epochs=2, progress=False, callbacks=callbacks)
    rb.save_model(model, tmp_path / "model")
    loaded = rb.load_model(tmp_path / "model")
    batch = data[torch.arange(9)]
    torch.testing.assert_close(loaded(batch), model(batch))


def test_the_path_of_a_table_counts_before_its_last_part():
    """In other models `user.id` is a module `id` of a module `user`."""
    model = nn.ModuleDict({"user": nn.ModuleDict({"id": nn.Embedding(3, 2)})})
    counts = {"id": torch.tensor([1, 2, 3]), "user.id": torch.tensor([4, 5, 6])}
    rb.apply_(model, rb.Shrinkage(counts=counts), verbose=False)
    assert model["user"]["id"].evidence.counts.tolist() == [4, 5, 6]
