"""What rows are drawn to besides a mean: against loops, in a model, merged, saved, and from training rows."""

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.training_data import training_data
from rarebit.methods._shrinkage_parts import counted_in
from rarebit.methods._shrinkage_priors import (
    Prior,
    Relatives,
    SharedRows,
    most_frequent_parents,
)
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import DataError, SettingsError
from rarebit.methods.shrinkage import Shrinkage, ShrunkStack, ShrunkTable
from rarebit.models.deepfm import DeepFM

FIELDS = (
    rb.Field(name="book", rows=30),
    rb.Field(name="tags", kind="multi", rows=12, max_length=3),
    rb.Field(name="author", rows=7),
)
SCHEMA = rb.Schema(FIELDS)
WIDTH = 3
PRIORS = ["hashed", "parent", "relatives"]
of_each_prior = pytest.mark.parametrize("prior", PRIORS)


def log(rows: int = 200) -> rb.Dataset:
    """Return rows in which some books are frequent, and a book has its author in most of them."""
    book = (27 * torch.rand(rows).pow(2)).long()  # the last three are never seen
    author = torch.where(torch.rand(rows) < 0.8, book % 7, torch.randint(7, (rows,)))
    tags = torch.randint(12, (rows, 3))
    ids = torch.cat([book.unsqueeze(1), tags, author.unsqueeze(1)], dim=1)
    return rb.Dataset(SCHEMA, ids, label=torch.randint(2, (rows,)))


def shrinkage(prior: str, **settings: object) -> Shrinkage:
    parent = {"parent": "author"} if prior == "parent" else {}
    return Shrinkage(**{"c": 4.0, "prior": prior, **parent, **settings})


def shrunk(prior: str, train: rb.Dataset, *before: rb.Method, **settings: object) -> DeepFM:
    """Return a model with random weights whose priors know the training rows."""
    model = DeepFM(SCHEMA, dim=WIDTH, hidden=(8,), batch_norm=False)
    for method in before:
        rb.apply_(model, method, verbose=False)
    method = shrinkage(prior, counts=train.counts(), **settings)
    rb.apply_(model, method, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    assert method.start(model, training_data(train)) is None
    return model


def prior_row(table: ShrunkTable, prior: Prior, i: int) -> Tensor:
    """Return p(i) as the equations say, one id at a time."""
    if isinstance(prior, SharedRows):
        return prior.table.weight[prior.index[i]]
    assert isinstance(prior, Relatives)
    row, left = torch.zeros(table.embedding_dim, dtype=torch.float64), 1.0
    for relative, weight in zip(
        prior.relatives[i].tolist(), prior.weights[i].tolist(), strict=True
    ):
        row = row + weight * table.inner.weight[relative]
        left -= weight
    return row + left * prior.mean.mean


@of_each_prior
def test_rows_and_gradients_are_those_of_the_equation(prior):
    model = shrunk(prior, log()).double()
    for table in model.backbone.tables.tables():
        naive = copy.deepcopy(table)
        ids = torch.randint(1, table.num_embeddings, (40,))
        upstream = torch.randn(40, WIDTH, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for place, i in enumerate(ids.tolist()):
            n = table.evidence.counts[i].item()
            own, p = naive.inner.weight[i], prior_row(naive, naive.prior, i)
            row = n / (n + 4) * own + 4 / (n + 4) * p
            assert_close(table(ids[place]), row)
            total = total + (row * upstream[place]).sum()
        total.backward()
        (table(ids) * upstream).sum().backward()
        for (name, parameter), expected in zip(
            table.named_parameters(), naive.parameters(), strict=True
        ):
            assert_close(parameter.grad, expected.grad, msg=lambda text, n=name: f"{n}: {text}")
            assert bool(parameter.grad.any()), name


@of_each_prior
def test_one_lookup_of_all_fields_equals_the_loop_over_tables(prior):
    train = log()
    model = shrunk(prior, train).double()
    [stack] = model.backbone.tables.stacks
    assert isinstance(stack, ShrunkStack)
    tables, ids = copy.deepcopy(stack).split(), train.ids[:50].clamp(min=1).long()
    looped = torch.cat(
        [t.rows(i) for t, i in zip(tables, ids.split([1, 3, 1], dim=1), strict=True)], dim=1
    )
    assert_close(stack(ids), looped)
    upstream = torch.randn_like(looped)
    (stack(ids) * upstream).sum().backward()
    (looped * upstream).sum().backward()
    shadow = copy.deepcopy(stack)
    with torch.no_grad():
        for value, source in zip(shadow.parameters(), stack.parameters(), strict=True):
            value.copy_(source.grad)
    for found, table in zip(shadow.split(), tables, strict=True):
        for gradient, parameter in zip(found.parameters(), table.parameters(), strict=True):
            assert_close(gradient, parameter.grad)


@of_each_prior
def test_its_limits_are_the_plain_table_and_the_prior(prior):
    train = log()
    plain = shrunk(prior, train, c=0.0)
    for table in plain.backbone.tables.tables():
        rows = table.rows(torch.arange(table.num_embeddings))
        assert torch.equal(rows, table.inner.weight)
    model = shrunk(prior, train)
    table = model.backbone.tables.tables()[0]
    never = (table.evidence.counts == 0).nonzero().flatten()
    assert len(never)
    with torch.no_grad():
        for i in never.tolist():
            assert_close(
                table(torch.tensor(i)), prior_row(table, table.prior, i), check_dtype=False
            )


@of_each_prior
def test_merged_and_saved_it_scores_the_same(prior, tmp_path):
    train = log()
    model = shrunk(prior, train)
    batch = train[:40]
    expected = model(batch)
    loaded = rb.load_model(rb.save_model(model, tmp_path))
    assert torch.equal(loaded(batch), expected)
    assert rb.find_tables(loaded) == rb.find_tables(model)
    rb.merge_(model, verbose=False)
    assert_close(model(batch), expected)
    assert {type(table) for table in model.backbone.tables.tables()} == {nn.Embedding}


@of_each_prior
def test_it_is_trained_by_rows_as_it_is_densely(prior):
    train = log()
    models = []
    for tables in ("dense", "rowwise"):
        torch.manual_seed(0)
        model = shrunk(prior, train)
        optimizer = rb.optimizer(model, lr=0.01, kind="sgd", tables=tables)
        for _ in range(3):
            model(train[:40]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for value, other in zip(*(m.parameters() for m in models), strict=True):
        assert_close(value, other)


def test_hashed_ids_share_about_as_many_rows_as_the_root_of_all():
    for rows in (1, 2, 99, 10_000):
        table = Shrinkage(counts=1, prior="hashed").wrap(nn.Embedding(rows, WIDTH))
        shared = table.prior.table.num_embeddings
        assert shared**2 >= rows > (shared - 1) ** 2
        used = torch.bincount(table.prior.index, minlength=shared)
        assert len(used) == shared
        assert int(used.max()) <= 4 * rows / shared
    neighbours = table.prior.index[1:] == table.prior.index[:-1]
    assert neighbours.double().mean().item() < 0.05


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30),
)
def test_the_parent_is_the_one_that_is_seen_most_often(pairs):
    ids = torch.tensor([i for i, _ in pairs], dtype=torch.int32)
    parents = torch.tensor([p for _, p in pairs], dtype=torch.int32)
    found = most_frequent_parents(ids, parents, rows=5, parent_rows=4).tolist()
    for i in range(5):
        times = Counter(parent for own, parent in pairs if own == i)
        expected = min(times, key=lambda parent: (-times[parent], parent)) if times else 4
        assert found[i] == expected


def test_parents_are_those_of_the_training_rows():
    train = log()
    model = shrunk("parent", train)
    book, tags, author = model.backbone.tables.tables()
    assert book.prior.table.num_embeddings == tags.prior.table.num_embeddings == 7 + 1
    assert author.prior.table.num_embeddings == 1  # a mean: it is the parent itself
    wrote = [Counter() for _ in range(30)]
    tagged = [Counter() for _ in range(12)]
    for row in train.ids.tolist():
        wrote[row[0]][row[4]] += 1
        for tag in row[1:4]:
            if tag:
                tagged[tag][row[4]] += 1
    for table, seen in ((book, wrote), (tags, tagged)):
        for i, times in enumerate(seen):
            expected = min(times, key=lambda a, t=times: (-t[a], a)) if times else 7
            assert table.prior.index[i].item() == expected
    first = model.wide.tables.tables()[0]
    assert torch.equal(first.prior.index, book.prior.index)


def test_a_bucket_has_the_parent_of_all_its_ids():
    train = log()
    model = shrunk("parent", train, rb.Hashing(buckets=9))
    book = counted_in(model.backbone.tables.tables()[0])[0]
    expected = most_frequent_parents(train.ids[:, 0] % 9, train.ids[:, 4], 9, 7)
    assert torch.equal(book.prior.index, expected)


def test_relatives_are_those_that_are_selected():
    train = log()
    model = shrunk("relatives", train)
    selected = rb.select(train, train.counts(), rb.CoOccurrence(), fields=["book"])["book"]
    prior = model.backbone.tables.tables()[0].prior
    num_near = 0
    for i in range(30):
        near = {
            r: w
            for r, w in zip(
                selected.relatives[i].tolist(), selected.weights[i].tolist(), strict=True
            )
            if w > 0 and selected.target[i]
        }
        found = {
            r: w
            for r, w in zip(prior.relatives[i].tolist(), prior.weights[i].tolist(), strict=True)
            if w > 0
        }
        assert found == pytest.approx({r: w / sum(near.values()) for r, w in near.items()})
        num_near += bool(near)
    assert 5 < num_near < 30


def test_until_training_rows_are_known_all_ids_have_the_mean():
    model = DeepFM(SCHEMA, dim=WIDTH, hidden=(8,))
    rb.apply_(model, shrinkage("relatives", counts=log().counts()), verbose=False)
    table = model.backbone.tables.tables()[0]
    with torch.no_grad():
        table.prior.mean.mean.fill_(3.0)
    assert_close(table.prior.rows(torch.arange(9), table.inner), torch.full((9, WIDTH), 3.0))


def test_a_table_goes_on_with_what_it_knows_on_another_device_and_in_another_precision():
    train = log()
    for prior in PRIORS:
        model = shrunk(prior, train)
        expected = model(train[:9])
        assert_close(model.double()(train[:9]), expected.double(), atol=1e-5, rtol=1e-5)


def test_held_out_strengths_go_with_every_prior():
    train = log()
    for prior in PRIORS:
        method = shrinkage(prior, counts=train.counts(), c="held-out")
        model = DeepFM(SCHEMA, dim=WIDTH, hidden=(8,))
        rb.apply_(model, method, verbose=False)
        steps = method.start(model, training_data(train, log(40)))
        steps.after_step(8)
        assert all(c != 10.0 for c in steps.report()["c"].values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": "parent"}, "prior='parent' goes with the name of the parent field, got prior="),
        ({"parent": "author"}, "got prior='mean' and parent='author'"),
        ({"parent_rows": 3}, "parent_rows goes with a parent and is at least 1, got parent_rows=3"),
        ({"prior": "parent", "parent": "a", "parent_rows": 0}, "is at least 1, got parent_rows=0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        Shrinkage(**settings)


def test_a_parent_is_told():
    assert str(shrinkage("parent")) == "Shrinkage(c=4.0, prior='parent', parent='author')"
    assert str(shrinkage("hashed")) == "Shrinkage(c=4.0, prior='hashed')"


def test_what_cannot_be_done_is_refused():
    train = log()
    with pytest.raises(SettingsError, match="parent: there is no table for 'autor'; did you mean"):
        shrunk("parent", train, parent="autor")
    with pytest.raises(SettingsError, match="needs to know how many there are; use apply_ on the"):
        shrinkage("parent").wrap(nn.Embedding(9, WIDTH))
    with pytest.raises(DataError, match="a parent is one value a row, and 'tags' has several"):
        shrunk("parent", train, parent="tags")
    with pytest.raises(
        DataError, match=r"relatives are of ids, and 'backbone\.tables\.book' has 9"
    ):
        shrunk("relatives", train, rb.Hashing(buckets=9))
