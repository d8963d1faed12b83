"""Fields of their own widths: each row is projected to the model's width, and all else stays as it is."""

import inspect

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models import build_model, model_class, model_names
from rarebit.tables.collection import TableCollection

FIELDS = (
    rb.data.Field(name="user", rows=8),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3, pooling="mean"),
    rb.data.Field(name="item", rows=7),
    rb.data.Field(name="words", kind="multi", rows=10, max_length=2, pooling="sum"),
    rb.data.Field(name="shop", rows=6),
)
STARTS = (0, 1, 4, 5, 7)
D = 4
WIDTHS = {"user": 6, "words": 6, "shop": 2, "tags": 4}  # tags: the model's own, said aloud
IDS = torch.tensor(
    [
        [7, 1, 2, 2, 6, 9, 9, 5],
        [0, 0, 0, 0, 0, 0, 0, 0],  # both lists are empty
        [3, 8, 0, 5, 1, 0, 4, 2],  # padding in the middle, and at the start
        [3, 4, 0, 0, 1, 7, 0, 2],
    ]
)
WITH_WIDTHS = [
    name for name in model_names() if "dim" in inspect.signature(model_class(name)).parameters
]


def named(*names):
    return lambda t: t.field in names


def collection(widths=WIDTHS, **options):
    return TableCollection(FIELDS, D, std=1.0, widths=widths, **options).double()


def all_rows(tables):
    """The rows of each field, whatever method its table has."""
    return [table(torch.arange(table.num_embeddings)) for table in tables.tables()]


def projected(weights, projections):
    """P_i times the pooled row of field i, field by field and value by value."""
    columns = []
    for index, (field, weight) in enumerate(zip(FIELDS, weights, strict=True)):
        rows = []
        for line in IDS.tolist():
            values = line[STARTS[index] : STARTS[index] + field.max_length]
            kept = [i for i in values if field.kind != "multi" or i != 0]
            total = torch.zeros(weight.shape[1], dtype=torch.float64)
            for i in kept:
                total = total + weight[i]
            row = total / max(len(kept), 1) if field.pooling == "mean" else total
            key = str(index)
            rows.append(row @ projections[key] if key in projections else row)
        columns.append(torch.stack(rows))
    return torch.stack(columns, dim=1)


def naive(tables):
    return projected(all_rows(tables), tables.projections)


def by_field(tables):
    return {f.name: t for f, t in zip(FIELDS, tables.tables(), strict=True)}


def test_rows_worked_by_hand():
    fields = (
        rb.data.Field(name="x", rows=2),
        rb.data.Field(name="y", kind="multi", rows=3, max_length=2, pooling="sum"),
    )
    tables = TableCollection(fields, 1, widths={"y": 2})
    x, y = tables.tables()
    with torch.no_grad():
        x.weight.copy_(torch.tensor([[1.0], [2.0]]))
        y.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
        tables.projections["1"].copy_(torch.tensor([[10.0], [1.0]]))
    # (1, 2) . (10, 1) + (3, 4) . (10, 1) = 12 + 34
    assert tables(torch.tensor([[1, 1, 2], [0, 0, 0]])).tolist() == [
        [[2.0], [46.0]],
        [[1.0], [0.0]],
    ]


def test_each_field_has_rows_of_its_own_width():
    tables = collection()
    assert {name: table.embedding_dim for name, table in by_field(tables).items()} == {
        "item": D,
        **WIDTHS,
    }
    assert {key: tuple(p.shape) for key, p in tables.projections.items()} == {
        "0": (6, D),
        "3": (6, D),
        "4": (2, D),
    }
    assert len(tables.stacks) == 3  # one a width: fields of equal width share a lookup


def test_rows_and_gradients_equal_a_projection_field_by_field():
    tables, pull = collection(), torch.randn(4, 5, D, dtype=torch.float64)
    weights = [table.weight.detach().clone().requires_grad_() for table in tables.tables()]
    projections = {k: p.detach().clone().requires_grad_() for k, p in tables.projections.items()}
    rows, want = tables(IDS), projected(weights, projections)
    assert rows.shape == (4, 5, D)
    assert_close(rows, want, rtol=0, atol=1e-12)
    (rows * pull).sum().backward()
    (want * pull).sum().backward()
    for key, projection in projections.items():
        assert_close(tables.projections[key].grad, projection.grad)
    for stack, members in zip(tables.stacks, tables.members, strict=True):
        expected = torch.cat([weights[index].grad for index in members])
        assert_close(stack.embedding.weight.grad, expected)


def test_an_empty_list_is_a_row_of_zeros():
    rows = collection()(IDS[1:2])
    assert not bool(rows[0, [1, 3]].any())
    assert bool(rows[0, [0, 2, 4]].all())


def test_rows_keep_their_size_on_average_when_projected():
    fields = (rb.data.Field(name="wide", rows=3000), rb.data.Field(name="plain", rows=3000))
    tables = TableCollection(fields, 40, std=0.1, widths={"wide": 200})
    rows = tables(torch.arange(3000).unsqueeze(1).expand(-1, 2)).detach()
    assert float(rows[:, 0].std()) == pytest.approx(0.1, rel=0.1)
    assert float(rows[:, 1].std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("init", ["xavier", "xavier_per_table"])
def test_xavier_bounds_follow_the_width_of_each_field(init):
    tables = TableCollection(FIELDS, D, init=init, widths={"user": 100})
    total = sum(field.rows for field in FIELDS)
    for field, table in zip(FIELDS, tables.tables(), strict=True):
        rows = total if init == "xavier" else field.rows
        bound = (6 / (rows + (100 if field.name == "user" else D))) ** 0.5
        assert 0.5 * bound < float(table.weight.detach().abs().max()) <= bound


def test_any_table_can_be_made_smaller_and_merged_again():
    tables = collection()
    rb.apply_(tables, rb.Hashing(buckets=5), where=named("tags", "shop"), verbose=False)
    rb.apply_(tables, rb.LowRank(rank=2), where=named("words", "user", "tags"), verbose=False)
    want = naive(tables)
    assert_close(tables(IDS), want, rtol=0, atol=1e-12)
    changes = rb.merge_(tables, verbose=False)
    assert {info.field for info in changes.before} == {"tags", "shop", "words", "user"}
    assert_close(tables(IDS), want, rtol=0, atol=1e-12)
    assert_close(naive(tables), want, rtol=0, atol=1e-12)
    assert len(tables.stacks) == 3


def test_full_rank_is_exact_in_a_fields_own_width():
    tables = collection()
    want = tables(IDS)
    rb.apply_(tables, rb.LowRank(rank=6), where=named("user", "words"), verbose=False)
    assert_close(tables(IDS), want)
    assert [info.width for info in rb.find_tables(tables)] == [6, 4, 4, 6, 2]


def test_a_method_too_wide_for_a_field_leaves_it_alone():
    tables = collection()
    changes = rb.apply_(tables, rb.LowRank(rank=3), verbose=False)
    assert [name for name, _ in changes.skipped] == ["shop"]
    assert_close(tables(IDS), naive(tables), rtol=0, atol=1e-12)


def test_projections_are_kept_when_tables_change():
    tables = collection()
    before = dict(tables.projections.items())
    rb.apply_(tables, rb.Hashing(buckets=5), where=named("user"), verbose=False)
    rb.merge_(tables, verbose=False)
    assert {key: id(p) for key, p in tables.projections.items()} == {
        key: id(p) for key, p in before.items()
    }


def test_the_state_dict_holds_the_projections():
    tables, other = collection(), collection()
    assert {"projections.0", "projections.3", "projections.4"} <= set(tables.state_dict())
    other.load_state_dict(tables.state_dict())
    assert_close(other(IDS), tables(IDS), rtol=0, atol=0)


def test_the_models_own_width_needs_no_projection():
    tables = collection({field.name: D for field in FIELDS})
    assert not tables.projections
    assert len(tables.stacks) == 1


def test_bad_widths_are_refused():
    with pytest.raises(SettingsError, match=r"widths: no field 'uesr' .*did you mean 'user'\?"):
        collection({"uesr": 3})
    with pytest.raises(SettingsError, match="the width of 'user' must be at least 1, got 0"):
        collection({"user": 0})


SCHEMA = rb.data.Schema((*FIELDS, rb.data.Field(name="age", kind="numeric")))


def small(name, **wanted):
    known = inspect.signature(model_class(name)).parameters
    settings = {"dim": D, "hidden": (8, 6), "batch_norm": False}
    given = {key: value for key, value in settings.items() if key in known}
    return build_model(name, SCHEMA, given | wanted)


def batch():
    torch.manual_seed(1)
    ids = torch.cat([torch.randint(f.rows, (32, f.max_length)) for f in FIELDS], dim=1)
    return rb.Dataset(SCHEMA, ids, torch.randn(32, 1), torch.randint(2, (32,)))[:]


def test_every_model_with_a_width_takes_fields_of_other_widths():
    assert set(model_names()) - set(WITH_WIDTHS) == {"lr"}


@pytest.mark.parametrize("name", WITH_WIDTHS)
def test_a_step_of_every_model_moves_tables_and_projections(name):
    model, rows = small(name, widths={"user": 3, "tags": 7}, std=0.3), batch()
    tables = model.backbone.tables
    assert [table.embedding_dim for table in tables.tables()][:2] == [3, 7]
    assert set(tables.projections) == {"0", "1"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in tables.parameters()]
    losses = []
    for _ in range(2):
        loss = F.binary_cross_entropy_with_logits(model(rows), rows.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    for old, new in zip(before, tables.parameters(), strict=True):
        assert not torch.equal(old, new.detach())


@pytest.mark.parametrize("name", WITH_WIDTHS)
def test_every_model_with_widths_is_saved_and_loaded(name, tmp_path):
    model, rows = small(name, widths={"user": 3, "tags": 7}).eval(), batch()
    loaded = rb.load_model(rb.save_model(model, tmp_path)).eval()
    assert loaded.settings == model.settings
    assert torch.equal(loaded(rows), model(rows))


@pytest.mark.parametrize("name", WITH_WIDTHS)
def test_every_model_with_widths_equals_the_plain_model_of_the_projected_rows(name):
    model, rows = small(name, widths={"user": 3, "tags": 7}, std=0.3).double(), batch()
    plain = small(name).double()
    weights = {k: v for k, v in model.state_dict().items() if "backbone.tables" not in k}
    plain.load_state_dict(weights, strict=False)
    ours, theirs = model.backbone.tables, plain.backbone.tables
    with torch.no_grad():
        for index, (own, table) in enumerate(zip(ours.tables(), theirs.tables(), strict=True)):
            key, rows_of_field = str(index), own.weight
            if key in ours.projections:
                rows_of_field = rows_of_field @ ours.projections[key]
            table.weight.copy_(rows_of_field)
    assert_close(model(rows), plain(rows), rtol=1e-10, atol=1e-10)
