"""Multi-embedding on models of ours: M sets in place of one, in place."""

import re

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import OptimizerError, SettingsError, UnsupportedTableError
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.models import build_model, model_class, model_names
from rarebit.sets.copies import ModelWithSets
from rarebit.sets.sets import sets_of
from rarebit.training.run import start_model

M = 3
USER = rb.data.Field(name="user", rows=6)
AGE = rb.data.Field(name="age", kind="numeric")
TAGS = rb.data.Field(name="tags", kind="multi", rows=7, max_length=3)
SCHEMA = rb.data.Schema((USER, AGE, TAGS))
ROWS = 9

WITH_SETS = [name for name in model_names() if not model_class(name).why_no_sets]
WITHOUT = [name for name in model_names() if model_class(name).why_no_sets]
with_sets = pytest.mark.parametrize("name", WITH_SETS)


def make(name="dcn_v2", **settings):
    defaults = {"dim": 4, "hidden": (8, 6)} if name in WITH_SETS else {}
    defaults |= {"bottom": (8,)} if name == "dlrm" else {}
    return build_model(name, SCHEMA, defaults | settings)


def with_sets_of(model, num_sets=M):
    rb.apply_(model, MultiEmbedding(num_sets=num_sets), verbose=False)
    return model


def batch_of(rows=ROWS):
    ids = torch.cat([torch.randint(6, (rows, 1)), torch.randint(7, (rows, 3))], dim=1)
    ids[0, 1:] = 0
    return rb.Dataset(SCHEMA, ids, torch.randn(rows, 1), torch.arange(rows) % 2)[:]


def spread_(model, std):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)


def chunk_of(stacked, single, index, num_sets):
    """Return what one set has of a weight of all sets: they lie along the axis that is M times as long."""
    axes = [k for k in range(single.ndim) if stacked.shape[k] != single.shape[k]]
    assert len(axes) <= 1
    return stacked.chunk(num_sets, dim=axes[0])[index] if axes else stacked


def score_by_loop(model, weights, batch, num_sets):
    """Return the score by a loop over single-set models, with weights that have gradients."""
    one = model.with_sets(1).to(next(iter(weights.values())).dtype)
    singles, features = one.backbone.state_dict(), []
    for index in range(num_sets):
        own = {
            key: chunk_of(weights[f"backbone.{key}"], single, index, num_sets)
            for key, single in singles.items()
            if f"backbone.{key}" in weights
        }
        features.append(functional_call(one.backbone, own, (batch,)))
    if isinstance(features[0], tuple):
        mean = tuple(sum(parts) / num_sets for parts in zip(*features, strict=True))
    else:
        mean = sum(features) / num_sets
    head = {k.removeprefix("head."): w for k, w in weights.items() if k.startswith("head.")}
    score = functional_call(model.head, head, (mean,))
    if model.wide is None:
        return score
    wide = {k.removeprefix("wide."): w for k, w in weights.items() if k.startswith("wide.")}
    return score + functional_call(model.wide, wide, (batch,))


def assert_as_close(found, expected, tolerance):
    """Compare two tensors to a part of their largest number, or of 1."""
    scale = max(float(expected.detach().abs().max()), 1.0)
    assert_close(found, expected, rtol=0, atol=tolerance * scale)


@with_sets
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("num_sets", [1, M])
def test_scores_and_gradients_are_those_of_a_loop_over_single_sets(
    name, dtype, tolerance, num_sets
):
    model, batch = with_sets_of(make(name), num_sets).to(dtype), batch_of()
    spread_(model, std=0.5)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    got, want = model(batch), score_by_loop(model, weights, batch, num_sets)
    assert_as_close(got, want, tolerance)
    assert float(want.detach().std()) > 0.01  # the rows differ: the comparison means something
    pull = torch.randn(ROWS, dtype=dtype)
    found = torch.autograd.grad((got * pull).sum(), list(model.parameters()))
    expected = torch.autograd.grad((want * pull).sum(), list(weights.values()))
    for ours, theirs in zip(found, expected, strict=True):
        assert_as_close(ours, theirs, tolerance)


@with_sets
def test_the_first_set_has_the_rows_of_the_model_and_others_their_own(name):
    model = make(name)
    rows = [table.weight.detach().clone() for table in model.backbone.tables.tables()]
    with_sets_of(model)
    for table, own in zip(model.backbone.tables.tables(), rows, strict=True):
        first, *others = table.weight.detach().chunk(M, dim=1)
        assert_close(first, own, rtol=0, atol=0)
        assert not any(torch.equal(first, other) for other in others)
        assert all(other.std() > 0.005 for other in others)
    if model.backbone.numeric is not None:
        assert model.backbone.numeric.shape == (1, M * 4)


def test_the_vector_of_a_number_is_kept_in_the_first_set():
    model = make()
    own = model.backbone.numeric.detach().clone()
    with_sets_of(model)
    first, second, _ = model.backbone.numeric.detach().chunk(M, dim=1)
    assert_close(first, own, rtol=0, atol=0)
    assert not torch.equal(second, own)


def test_the_wide_part_stays_and_all_else_is_the_set_form():
    model = make("xdeepfm")
    wide, settings, plain = model.wide, dict(model.settings), model.with_sets(M)
    weights = [p.detach().clone() for p in wide.parameters()]
    with_sets_of(model)
    assert model.wide is wide
    assert all(torch.equal(p, w) for p, w in zip(wide.parameters(), weights, strict=True))
    assert model.settings == settings
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    assert sets_of(model) == MultiEmbedding(num_sets=M)


def test_weights_are_drawn_from_torchs_random_numbers():
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(seed)
        models.append(with_sets_of(model).state_dict())
    same, again, other = models
    assert all(torch.equal(same[key], again[key]) for key in same)
    assert not torch.equal(same["head.layers.0.weight"], other["head.layers.0.weight"])


def test_what_changed_is_told(capsys):
    changes = rb.apply_(make("xdeepfm"), MultiEmbedding(num_sets=M))
    assert capsys.readouterr().out.splitlines() == [
        "MultiEmbedding(num_sets=3): 2 of 4 tables, 52 -> 156 weights stored",
        "  backbone.tables.user  6 x 4, 24 -> 72",
        "  backbone.tables.tags  7 x 4, 28 -> 84",
        "  left alone, outside the backbone: wide.tables.user, wide.tables.tags",
    ]
    assert [info.methods for info in changes.after] == [("MultiEmbedding(num_sets=3)",)] * 2


def test_merging_leaves_the_sets_and_says_so():
    model, batch = with_sets_of(make()), batch_of()
    before = model(batch)
    changes = rb.merge_(model, verbose=False)
    assert not changes
    assert "left alone, its sets stay side by side: backbone.tables.user" in str(changes)
    assert_close(model(batch), before, rtol=0, atol=0)
    assert rb.find_tables(model)[0].methods == ("MultiEmbedding(num_sets=3)",)


@pytest.mark.parametrize("name", WITHOUT)
def test_models_that_are_linear_in_their_embeddings_are_refused_with_the_reason(name):
    model = make(name)
    before = dict(model.named_parameters())
    reason = f"{type(model).__name__} takes one embedding set: {model.why_no_sets}"
    with pytest.raises(SettingsError, match=re.escape(reason)):
        rb.apply_(model, MultiEmbedding())
    after = dict(model.named_parameters())
    assert all(after[key] is before[key] for key in before)


def test_a_model_with_sets_gets_no_others():
    with pytest.raises(SettingsError, match="DCNv2 has 2 embedding sets already; build it without"):
        rb.apply_(make(num_sets=2), MultiEmbedding())
    with pytest.raises(UnsupportedTableError, match="multi-embedding is there twice; use one"):
        with_sets_of(with_sets_of(make()))


def test_fields_with_a_width_of_their_own_are_refused():
    with pytest.raises(SettingsError, match="their own widths, whose rows all embedding sets"):
        with_sets_of(make(widths={"user": 2}))


def test_sets_that_start_equal_are_refused_by_name():
    model = make(std=0.0)
    with pytest.raises(UnsupportedTableError, match="sets 1 and 2 of 'user' start with equal rows"):
        with_sets_of(model)
    assert model.backbone.num_sets is None


def test_a_table_of_nothing_but_padding_is_no_equal_set():
    lonely = rb.data.Field(name="tags", kind="multi", rows=1, max_length=2)
    model = build_model("dnn", rb.data.Schema((USER, lonely)), {"dim": 2, "hidden": (4,)})
    assert with_sets_of(model).backbone.num_sets == M


def test_a_choice_of_tables_an_optimizer_and_a_projection_are_refused():
    model = make()
    with pytest.raises(SettingsError, match="changes the backbone as a whole; leave out where="):
        rb.apply_(model, MultiEmbedding(), where=lambda t: t.rows > 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="leave out optimizer= and build it after this call"):
        rb.apply_(model, MultiEmbedding(), optimizer=optimizer)
    with pytest.raises(SettingsError, match="project is for your own models: DCNv2 already has a"):
        rb.apply_(model, MultiEmbedding(project=nn.ReLU))
    assert model.backbone.num_sets is None


def test_frozen_tables_and_tables_with_hooks_are_refused():
    frozen = make()
    frozen.backbone.tables.requires_grad_(requires_grad=False)
    with pytest.raises(UnsupportedTableError, match=r"'backbone\.tables\.user': it is not trained"):
        with_sets_of(frozen)
    hooked = make()
    hooked.backbone.tables.stacks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedTableError, match=r"'backbone\.tables\.user': it has hooks"):
        with_sets_of(hooked)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_it_is_trained_by_fit(tables):
    log = rb.data.generate(rb.data.SyntheticLog(rows=3000))
    model = build_model("dcn_v2", log.train.schema, {"dim": 4, "hidden": (16, 8)})
    with_sets_of(model)
    start = [p.detach().clone() for p in model.parameters()]
    settings = rb.Training(epochs=2, lr=0.01, batch_size=256, tables=tables, ema_decay=0.9)
    history = rb.fit(model, log.train, settings=settings, progress=False)
    losses = [epoch.train_loss for epoch in history.epochs]
    assert losses[-1] < losses[0]
    moved = [not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True)]
    assert all(moved)


def test_a_run_takes_it_and_its_model_comes_back(tmp_path):
    settings = rb.RunSettings.from_mapping(
        {
            "model": {"name": "dnn", "dim": 4, "hidden": [8, 8]},
            "data": {"rows": 2000},
            "training": {"epochs": 1},
            "methods": [{"method": "multi-embedding", "num_sets": 2}],
        }
    )
    told = []
    result = rb.run(settings, folder=tmp_path, progress=False, say=told.append)
    assert any(line.startswith("MultiEmbedding(num_sets=2): ") for line in told)
    loaded = rb.load_model(tmp_path)
    assert loaded.backbone.num_sets == 2
    data = rb.data.generate(settings.data).test
    assert bool((rb.predict(loaded, data) == rb.predict(result.model, data)).all())


def test_one_seed_gives_the_first_set_the_rows_of_the_baseline():
    with_method = rb.RunSettings(model="dnn", methods=(MultiEmbedding(num_sets=2),))
    baseline = start_model(rb.RunSettings(model="dnn"), SCHEMA)
    model = start_model(with_method, SCHEMA, say=lambda line: None)
    for table, own in zip(
        model.backbone.tables.tables(), baseline.backbone.tables.tables(), strict=True
    ):
        assert_close(table.weight.chunk(2, dim=1)[0], own.weight, rtol=0, atol=0)


def test_a_model_is_known_by_its_methods_alone():
    # newer Pythons look at a class and not at the parts of a module, which are no attributes of it
    asked = {name for name in vars(ModelWithSets) if not name.startswith("_")}
    assert asked == {"with_sets", "take_sets_"}
    assert not ModelWithSets.__annotations__
