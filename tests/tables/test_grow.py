"""Tables that grow: old ids keep their rows and their optimizer state, new ones start as they should.

The contract (`rarebit.testing.check_grows`) grows the tables of every method; here is what it does not know: optimizers, how
new rows start, and what is refused.
"""

import copy
import inspect
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam
from torch.testing import assert_close

import rarebit as rb
from rarebit import testing as checks
from rarebit.codes.packed import Pack
from rarebit.errors import (
    DataError,
    NoTableError,
    NotEnoughMemoryError,
    OptimizerError,
    SettingsError,
    TrainingError,
    UnsupportedTableError,
)
from rarebit.models import build_model, model_class, model_names
from rarebit.sets.sets import SetsMethod
from rarebit.tables.collection import TableCollection
from rarebit.tables.table import Method, Table
from rarebit.technique import technique_class, technique_name, technique_names

REFUSED = {
    "cafe",
    "darts-emb",
    "dhe",
    "dpq",
    "evidence-coding",
    "mgqe",
    "mpe",
    "qr",
    "quantize",
    "robe",
    "tt-rec",
}
METHODS = [name for name in technique_names() if issubclass(technique_class(name), Method)]
MORE = {"item": checks.N + 3, "tags": 12}


def two_tables(rows=9, *, sparse=False):
    return nn.ModuleDict(
        {
            "item": nn.Embedding(rows, 4, sparse=sparse),
            "bag": nn.EmbeddingBag(rows, 4, mode="sum", padding_idx=2, sparse=sparse),
        }
    )


def step(model, optimizer, ids):
    rows = torch.cat([model["item"](ids), model["bag"](ids.unsqueeze(-1))])
    optimizer.zero_grad()
    (rows - torch.linspace(-1.0, 1.0, 4)).square().sum().backward()
    optimizer.step()


def same_rows(model, other):
    for name in model:
        rows = min(len(model[name].weight), len(other[name].weight))
        assert_close(model[name].weight[:rows], other[name].weight[:rows], rtol=0, atol=0)


OPTIMIZERS = {
    "adam": lambda model: Adam(model.parameters(), lr=0.1),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.0),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.1),
    "sparse adam": lambda model: SparseAdam(model.parameters(), lr=0.1),
    "dense": lambda model: rb.optimizer(model, lr=0.1),
    **{
        f"rowwise {kind}": lambda model, kind=kind: rb.optimizer(
            model, lr=0.1, kind=kind, tables="rowwise", momentum=0.9
        )
        for kind in ("adam", "sgd", "adagrad")
    },
}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_the_table_had_always_been_so_large(name, steps_before):
    small, large = (two_tables(rows, sparse=name == "sparse adam") for rows in (9, 14))
    with torch.no_grad():
        for table in small:
            large[table].weight[:9] = small[table].weight
    ours, theirs = OPTIMIZERS[name](small), OPTIMIZERS[name](large)
    for _ in range(steps_before):
        ids = torch.randint(9, (6,))
        step(small, ours, ids)
        step(large, theirs, ids)
    rb.grow_(small, {"item": 14, "bag": 14}, optimizer=ours, verbose=False)
    rb.check_optimizer(small, ours)
    with torch.no_grad():  # rows that were never looked up have no state, wherever they are
        for table in small:
            large[table].weight[9:] = small[table].weight[9:]
    for _ in range(4):
        ids = torch.randint(14, (6,))
        step(small, ours, ids)
        step(large, theirs, ids)
    same_rows(small, large)
    for table in small:
        assert_close(ours.state[small[table].weight], theirs.state[large[table].weight])


def grown_from_the_start(method):
    """Return a trained-to-be model with a method, and a copy of it that is as large as the first will be."""
    model = checks.small_model(method)
    rb.apply_(model, method, verbose=False)
    if any(hasattr(module, "evidence") for module in model.modules()):
        rb.set_counts_(model, {f.name: torch.arange(f.rows) for f in checks.SCHEMA.table_fields})
    larger = copy.deepcopy(model)
    rb.grow_(larger, MORE, verbose=False)
    return model, larger


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("name", sorted({*METHODS} - REFUSED))
def test_old_ids_of_every_method_train_as_if_the_table_had_always_been_so_large(name, tables):
    model, larger = grown_from_the_start(technique_class(name).for_share(checks.SHAPES, 0.5))
    both = [(one, rb.optimizer(one, lr=0.05, tables=tables)) for one in (model, larger)]
    batches = [checks.small_batch() for _ in range(5)]
    for number, batch in enumerate(batches):
        if number == 3:
            rb.grow_(model, MORE, optimizer=both[0][1], verbose=False)
        for one, optimizer in both:
            optimizer.zero_grad()
            (one(batch) - batch.label.float()).square().mean().backward()
            optimizer.step()
    for batch in batches:
        assert_close(model(batch), larger(batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "methods",
    [
        (rb.Hashing(buckets=5), rb.LowRank(rank=2)),
        (rb.LowRank(rank=2), rb.Shrinkage(counts=7)),
        (rb.MLET(inner_dim=8), rb.PEP()),
        (rb.MultiEmbedding(num_sets=2), rb.LowRank(rank=2)),
        (rb.MultiEmbedding(num_sets=2), rb.PEP(granularity="global")),
    ],
    ids=lambda methods: " and ".join(map(technique_name, methods)),
)
def test_tables_with_two_methods_grow_in_both(methods):
    model, batch = checks.small_model(*methods), checks.small_batch()
    for method in methods:
        rb.apply_(model, method, verbose=False)
    checks.move_(model)
    before = model(batch)
    optimizer = Adam(model.parameters())
    rb.grow_(model, MORE, optimizer=optimizer, verbose=False)
    assert torch.equal(model(batch), before)
    batch.ids[:, 4] = MORE["item"] - 1
    model(batch).sum().backward()
    optimizer.step()
    assert bool(model(batch).isfinite().all())


def test_methods_that_refuse_are_known():
    def refuses(name):
        sized = technique_class(name).for_share([(checks.N, checks.D)], 0.8)
        model = checks.applied(sized)
        try:
            rb.grow_(model, {"table": 20}, verbose=False)
        except UnsupportedTableError as error:
            return re.search("merge_ the model, grow it, and apply the method again", str(error))
        return False

    tables = [name for name in METHODS if not issubclass(technique_class(name), SetsMethod)]
    assert {name for name in tables if refuses(name)} == REFUSED
    model = nn.Sequential(nn.Embedding.from_pretrained(torch.eye(9)))
    rb.pack_(model, verbose=False)
    with pytest.raises(UnsupportedTableError, match="tables of Pack cannot grow: merge_ the model"):
        rb.grow_(model, {"0": 10})


@hypothesis.given(
    st.lists(st.integers(1, 4) | st.lists(st.integers(0, 30), min_size=1, max_size=6), max_size=8)
)
def test_growing_and_training_against_a_dictionary_of_rows(actions):
    model = nn.ModuleDict({"item": nn.Embedding(3, 2)})
    optimizer = rb.optimizer(model, lr=0.5, kind="adagrad", tables="rowwise")
    rows = {i: model["item"].weight[i].detach().double() for i in range(3)}
    sums = dict.fromkeys(rows, 0.0)
    for action in actions:
        if isinstance(action, int):
            mean = torch.stack([*rows.values()]).mean(0)
            for i in range(len(rows), len(rows) + action):
                rows[i], sums[i] = mean, 0.0
            rb.grow_(model, {"item": len(rows)}, optimizer=optimizer, verbose=False)
            continue
        ids = [i % len(rows) for i in action]
        factors = torch.arange(1.0, len(ids) + 1)
        optimizer.zero_grad()
        (model["item"](torch.tensor(ids)) * factors.unsqueeze(-1)).sum().backward()
        optimizer.step()
        for i in set(ids):
            gradient = sum(float(f) for f, one in zip(factors, ids, strict=True) if one == i)
            sums[i] += gradient**2
            rows[i] = rows[i] - 0.5 * gradient / sums[i] ** 0.5
    assert_close(model["item"].weight.double(), torch.stack([*rows.values()]), rtol=1e-4, atol=1e-5)


def test_the_prior_is_the_mean_of_the_rows_without_padding():
    model = nn.ModuleDict({"item": nn.Embedding(5, 3, padding_idx=1), "other": nn.Embedding(4, 3)})
    before = {name: table.weight.detach().clone() for name, table in model.items()}
    rb.grow_(model, {"item": 7, "other": 5}, counts={"item": torch.tensor([3, 9, 0, 1, 0])})
    assert_close(
        model["item"].weight[5:], ((3 * before["item"][0] + before["item"][3]) / 4).expand(2, 3)
    )
    assert_close(model["other"].weight[4], before["other"].mean(0))
    assert torch.equal(model["item"].weight[:5], before["item"])
    assert model["item"].padding_idx == 1
    assert not model["item"].weight[1].any()


def test_counts_that_are_all_zero_weigh_all_rows_alike():
    model = nn.ModuleDict({"item": nn.Embedding(5, 3, padding_idx=0)})
    mean = model["item"].weight[1:].mean(0)
    rb.grow_(model, {"item": 6}, counts={"item": torch.zeros(5, dtype=torch.int64)}, verbose=False)
    assert_close(model["item"].weight[5], mean)


def test_noise_is_as_large_as_the_rows():
    model = nn.ModuleDict({"item": nn.Embedding(4000, 8)})
    with torch.no_grad():
        model["item"].weight.mul_(0.03)
    rb.grow_(model, {"item": 8000}, start="noise", verbose=False)
    new = model["item"].weight.detach()[4000:]
    assert float(new.std()) == pytest.approx(0.03, rel=0.05)
    assert float(new.mean(0).abs().max()) < 0.003


def test_given_rows_by_name_and_by_a_function():
    model = nn.ModuleDict({name: nn.Embedding(4, 3) for name in ("item", "user", "shop")})
    given, first = torch.randn(2, 3), model["user"].weight[:1].detach().clone()

    def as_the_first(rows):
        return rows.mul_(1.0)[:1].expand(2, 3)

    start = {"item": given, "user": as_the_first}
    rb.grow_(model, dict.fromkeys(model, 6), start=start, verbose=False)
    assert torch.equal(model["item"].weight[4:], given)
    assert torch.equal(model["user"].weight[4:], first.expand(2, 3))
    assert_close(model["shop"].weight[4:], model["shop"].weight[:4].mean(0).expand(2, 3))


@pytest.mark.parametrize("method", [rb.MLET(inner_dim=8), rb.PEP(granularity="field"), rb.PEP()])
def test_methods_start_new_rows_where_they_are_given(method):
    model, given = checks.applied(method), torch.randn(2, checks.D)
    rb.grow_(model, {"table": checks.N + 2}, start=given, verbose=False)
    assert_close(model.table.weight[checks.N :], given, rtol=1e-4, atol=1e-5)


def test_a_low_rank_table_starts_new_rows_at_the_closest_ones():
    model, given = checks.applied(rb.LowRank(rank=2)), torch.randn(2, checks.D)
    rb.grow_(model, {"table": checks.N + 2}, start=given, verbose=False)
    error = given - model.table.weight[checks.N :]
    assert_close(error @ model.table.right.T, torch.zeros(2, 2), rtol=0, atol=1e-5)


def test_grown_parameters_stay_in_the_group_of_the_old_ones():
    model = checks.small_model(rb.PEP())
    rb.apply_(model, rb.PEP(), verbose=False)
    optimizer = rb.optimizer(model, lr=0.1, threshold_weight_decay=0.3)
    before = [(g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    rb.grow_(model, MORE, optimizer=optimizer, verbose=False)
    assert [(g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == before
    rb.check_optimizer(model, optimizer)


def test_new_rows_behind_thresholds_learn():
    model = checks.applied(rb.PEP(granularity="field_dimension", init=-1.0))  # cuts at 0.27
    rb.grow_(model, {"table": checks.N + 2}, verbose=False)
    rows = model(torch.tensor([checks.N]))
    assert bool((rows != 0).all())
    rows.sum().backward()
    assert bool(model.table.inner.weight.grad[checks.N].any())


@pytest.mark.parametrize("prior", ["mean", "zero"])
def test_a_new_row_of_a_shrunk_table_is_the_prior_until_it_is_seen(prior):
    counts = torch.arange(checks.N)
    model = checks.applied(rb.Shrinkage(counts=counts, c=3.0, prior=prior))
    rb.grow_(model, {"table": checks.N + 2}, verbose=False)
    expected = torch.zeros(checks.D) if prior == "zero" else model.table.prior.mean
    assert torch.equal(model.table.weight[checks.N :], expected.expand(2, -1))
    assert model.table.evidence.counts.tolist() == [*range(checks.N), 0, 0]
    rb.set_counts_(model, torch.full((checks.N + 2,), 6))
    assert not torch.equal(model.table.weight[checks.N], expected)


def test_a_table_that_counts_its_own_lookups_goes_on_counting():
    model = nn.ModuleDict({"one": TableCollection((rb.data.Field(name="item", rows=4),), dim=2)})
    rb.apply_(model, rb.Shrinkage(c=1.0), verbose=False)
    [stack] = model["one"].stacks
    stack.start_pass_()
    model["one"](torch.tensor([[1], [1]]))
    rb.grow_(model, {"item": 6}, verbose=False)
    model["one"](torch.tensor([[1], [5]]))
    [stack] = model["one"].stacks
    assert stack.evidence.counts.tolist() == [0, 3, 0, 0, 0, 1]


def test_hashing_needs_no_new_weights():
    model = checks.applied(rb.Hashing(buckets=5))
    before = model.table.inner.weight
    rb.grow_(model, {"table": 100}, verbose=False)
    assert model.table.inner.weight is before
    assert torch.equal(model(torch.tensor([97])), model(torch.tensor([2])))


def test_a_hashed_table_smaller_than_its_buckets_grows_up_to_them():
    model = checks.Holder(rb.Hashing(buckets=8).wrap(nn.Embedding(6, 4)))
    rb.grow_(model, {"table": 20}, verbose=False)
    assert model.table.inner.num_embeddings == 8
    assert torch.equal(model(torch.tensor([15])), model(torch.tensor([7])))


def test_a_frozen_table_stays_frozen():
    model = nn.ModuleDict({"item": nn.Embedding(4, 3).requires_grad_(False)})
    rb.grow_(model.eval(), {"item": 6}, verbose=False)
    assert not model["item"].weight.requires_grad
    assert not model["item"].training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_table_keeps_its_precision(dtype):
    model = nn.ModuleDict({"item": nn.Embedding(4, 3, dtype=dtype)})
    mean = model["item"].weight.double().mean(0)
    rb.grow_(model, {"item": 6}, counts=9, verbose=False)
    assert model["item"].weight.dtype == dtype
    assert_close(model["item"].weight[5].double(), mean, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", model_names())
def test_a_grown_model_of_ours_is_saved_and_loaded(name, tmp_path):
    known = inspect.signature(model_class(name)).parameters
    model = build_model(name, checks.SCHEMA, {"dim": 4} if "dim" in known else {})
    batch = checks.small_batch()
    before = model.eval()(batch)
    changes = rb.grow_(model, MORE, verbose=False)
    assert {info.field: info.rows for info in changes.after} == MORE
    assert {name: model.schema[name].rows for name in MORE} == MORE
    assert torch.equal(model(batch), before)
    loaded = rb.load_model(rb.save_model(model, tmp_path)).eval()
    assert loaded.schema == model.schema
    assert torch.equal(loaded(batch), before)


def test_a_grown_model_of_ours_scores_data_of_the_new_schema():
    model = build_model("deepfm", checks.SCHEMA, {"dim": 4, "hidden": [4]})
    fields = [
        f if f.name != "item" else rb.data.Field(name="item", rows=20) for f in checks.SCHEMA.fields
    ]
    batch = checks.small_batch()
    batch.ids[:, 4] = 19
    data = rb.Dataset(rb.data.Schema(tuple(fields)), batch.ids, batch.numeric, batch.label)
    with pytest.raises(DataError, match="built for other data"):
        rb.predict(model, data)
    rb.grow_(model, {"item": 20}, verbose=False)
    assert bool(rb.predict(model, data).isfinite().all())


def test_the_schema_forgets_the_vocabulary_and_the_encoder_and_says_so(capsys):
    fields = [rb.data.Field(name=n, rows=9, vocabulary="abc") for n in ("item", "user")]
    model = build_model("fm", rb.data.Schema(tuple(fields), encoder=object()), {"dim": 4})
    rb.grow_(model, {"item": 12})
    assert "also exchanged: schema (without its encoder, which does" in capsys.readouterr().out
    assert [f.vocabulary for f in model.schema.fields] == ["", "abc"]
    assert model.schema.encoder is None


def test_all_tables_of_a_field_grow_together():
    model = build_model("deepfm", checks.SCHEMA, {"dim": 4, "hidden": [4]})
    expected = (
        "'wide.tables.item' are tables of one field; grow them together by its name: {'item': 20}"
    )
    with pytest.raises(SettingsError, match=re.escape(expected)):
        rb.grow_(model, {"backbone.tables.item": 20})
    assert model.backbone.tables.fields[2].rows == checks.N


def test_the_report_names_what_changed_and_what_did_not(capsys):
    model = nn.ModuleDict({name: nn.Embedding(1000, 4) for name in ("item", "user", "shop")})
    changes = rb.grow_(model, {"item": 1200, "user": 1000})
    assert capsys.readouterr().out.splitlines() == [
        "grow: 1 of 3 tables, 4,000 -> 4,800 weights stored",
        "  item  1,000 -> 1,200 x 4, 4,000 -> 4,800",
        "  left alone, has 1,000 rows already: user",
        "  left alone, not named: shop",
    ]
    assert bool(changes)
    assert not rb.grow_(model, {"item": 1200}, verbose=False)
    assert capsys.readouterr().out == ""


def test_what_else_holds_a_table_has_the_new_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = nn.Embedding(4, 3)
            self.tables = [self.item]
            self.optimizer = Adam(self.parameters())

    model = Model()
    model.item(torch.tensor([1])).sum().backward()
    model.optimizer.step()
    rb.grow_(model, {"item": 6}, verbose=False)
    assert model.tables[0] is model.item
    assert model.optimizer.state[model.item.weight]["exp_avg"].shape == (6, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_reset_row_trains_like_a_new_one(name):
    """Row 4 of one model is given to someone else; in the other, someone else gets the new row 9."""
    reset = two_tables(sparse=name == "sparse adam")
    grown = copy.deepcopy(reset)
    both = [(model, OPTIMIZERS[name](model)) for model in (reset, grown)]
    for model, optimizer in both:
        for ids in ([0, 1, 4], [4, 4, 3], [4, 7, 8]):
            step(model, optimizer, torch.tensor(ids))
    rb.grow_(reset, {}, reset={"item": torch.tensor([4])}, optimizer=both[0][1], verbose=False)
    rb.grow_(grown, {"item": 10}, optimizer=both[1][1], verbose=False)
    for model, optimizer in both:
        own = 4 if model is reset else 9
        for ids in ([0, own, own], [own, 3, 8]):
            optimizer.zero_grad()
            model["item"](torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    ours, theirs = reset["item"].weight, grown["item"].weight
    assert torch.equal(ours[4], theirs[9])
    others = [i for i in range(9) if i != 4]
    assert torch.equal(ours[others], theirs[others])


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("name", sorted({*METHODS} - REFUSED - {"hashing"}))
def test_a_reset_row_of_every_method_trains_like_a_new_one(name, tables):
    """From the fourth batch on, id 5 of one model means what id N means in the other."""
    old, other = grown_from_the_start(technique_class(name).for_share(checks.SHAPES, 0.5))
    for model, own in ((old, 5), (other, checks.N)):
        torch.manual_seed(1)
        optimizer = rb.optimizer(model, lr=0.05, tables=tables)
        for number in range(6):
            batch = checks.small_batch()
            items = batch.ids[:, 4]
            if number == 3:
                start, reset = (
                    (lambda rows: rows.new_full((1, rows.shape[1]), 0.1)),
                    {"item": [own]},
                )
                rb.grow_(model, {}, reset=reset, start=start, optimizer=optimizer, verbose=False)
            if number > 2:
                items[items == 5] = own
            optimizer.zero_grad()
            (model(batch) - batch.label.float()).square().mean().backward()
            optimizer.step()
        items[::2] = own
        found = model(batch)
        if model is old:
            before = found
    assert_close(before, found, rtol=1e-5, atol=1e-5)


def test_rows_are_reset_and_added_in_one_call_and_given_in_this_order():
    model = two_tables()
    start = {"item": torch.arange(12.0).reshape(3, 4)}
    rb.grow_(model, {"item": 11}, reset={"item": [7]}, start=start, verbose=False)
    assert torch.equal(model["item"].weight[[7, 9, 10]], start["item"])
    assert model["item"].weight.requires_grad


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([9], DataError, "'item' has the ids 0 to 8, got 9 to 9"),
        ([-1], DataError, "'item' has the ids 0 to 8, got -1 to -1"),
        ([1, 1], DataError, "an id of 'item' is named twice"),
        ([1.5], DataError, "ids of 'item' must be integers, got torch.float32"),
    ],
)
def test_ids_that_cannot_be_reset(ids, error, message):
    model = two_tables()
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        rb.grow_(model, {"item": 12}, reset={"item": ids})
    same_rows(model, before)


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ({"itme": 10}, {}, NoTableError, "sizes: there is no table 'itme'; did you mean 'item'?"),
        ({"item": 8}, {}, SettingsError, "'item' has 9 rows and cannot grow to 8: ids would lose"),
        ({"item": 9.5}, {}, SettingsError, "the rows of 'item' must be an integer, got 9.5"),
        (12, {}, SettingsError, "sizes must be given by the names of tables, .* got 12"),
        ({"item": 11}, {"start": "mean"}, SettingsError, "start must be 'prior', .* got 'mean'"),
        ({"item": 11}, {"start": {"itm": "noise"}}, NoTableError, "start: there is no table 'itm'"),
        ({"item": 11}, {"start": torch.ones(3, 4)}, DataError, r"shape \(2, 4\), got \(3, 4\)"),
        ({"item": 11}, {"start": lambda rows: None}, DataError, r"shape \(2, 4\), got NoneType"),
        ({"item": 11}, {"start": torch.full((2, 4), torch.nan)}, DataError, "are not finite"),
        ({"item": 11}, {"counts": {"item": torch.ones(2).long()}}, DataError, "each of its 9 rows"),
        ({"item": 11}, {"optimizer": 7}, OptimizerError, "takes a torch optimizer, got a int"),
        ({"item": 10**15}, {}, NotEnoughMemoryError, "use fewer rows"),
        ({"item": 10**15}, {"start": "noise"}, NotEnoughMemoryError, "new rows takes"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(sizes, options, error, message):
    model = two_tables()
    before = copy.deepcopy(model)
    sizes = {**sizes, "bag": 12} if isinstance(sizes, dict) else sizes
    with pytest.raises(error, match=message):
        rb.grow_(model, sizes, **options)
    assert rb.find_tables(model) == rb.find_tables(before)
    same_rows(model, before)


def test_either_all_tables_grow_or_none():
    model = two_tables()
    rb.apply_(model, rb.Quantize(bits=8), where=lambda t: t.name == "bag", verbose=False)
    with pytest.raises(UnsupportedTableError, match="tables of Quantize cannot grow"):
        rb.grow_(model, {"item": 12, "bag": 12})
    assert model["item"].num_embeddings == 9


def tied():
    model = nn.ModuleDict({"item": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["item"].weight
    return model


def with_max_norm():
    return nn.ModuleDict({"item": nn.Embedding(9, 4, max_norm=1.0)})


def diverged():
    model = nn.ModuleDict({"item": nn.Embedding(9, 4)})
    nn.init.constant_(model["item"].weight, torch.inf)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tied, "'item' cannot grow: its weight is tied to 'head.weight'"),
        (with_max_norm, "'item' cannot grow: max_norm=1 rewrites rows"),
        (diverged, "'item' cannot grow: it has numbers that are not finite"),
        (lambda: torch.compile(two_tables(), backend="eager"), "is compiled"),
        (
            lambda: nn.DataParallel(two_tables()),
            "DataParallel.*; call grow_ on model.module, and wrap",
        ),
    ],
)
def test_models_and_tables_that_cannot_grow(make, message):
    with pytest.raises(UnsupportedTableError, match=message):
        rb.grow_(make(), {"item": 12})


def test_a_table_of_a_method_without_a_rule_refuses_by_name():
    class Own(Table):
        def rows(self, ids):
            return self.inner(ids)

    model = checks.Holder(Own(Pack(), nn.Embedding(9, 4)))
    with pytest.raises(UnsupportedTableError, match="tables of Pack cannot grow: merge_ the model"):
        rb.grow_(model, {"table": 12})


def test_averages_are_refused_until_they_are_closed():
    model = two_tables()
    optimizer = Adam(model.parameters())
    rb.EMA(model, optimizer).close()
    rb.grow_(model, {"bag": 12}, optimizer=optimizer, verbose=False)
    ema = rb.EMA(model, optimizer)
    step(model, optimizer, torch.tensor([1, 2]))
    with pytest.raises(OptimizerError, match=r"an EMA averages .* close\(\) it before this call"):
        rb.grow_(model, {"item": 12}, optimizer=optimizer)
    rb.grow_(model, {"item": 12}, verbose=False)  # an optimizer that is not told of
    with pytest.raises(TrainingError, match="make a new EMA"), ema.applied():
        pass


def test_averages_in_the_model_are_refused():
    model = two_tables()
    model.ema = rb.EMA(model, Adam(model.parameters()))
    with pytest.raises(
        UnsupportedTableError, match="of the model, which an average follows; remove"
    ):
        rb.grow_(model, {"item": 12})
    del model.ema
    rb.grow_(model, {"item": 12}, verbose=False)


def test_an_optimizer_that_cannot_follow_is_refused():
    model = two_tables()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(OptimizerError, match="LBFGS remembers all parameters as one vector"):
        rb.grow_(model, {"item": 12}, optimizer=optimizer)
