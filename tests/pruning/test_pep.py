"""V̂ = sign(V) relu(|V| - g(s)) for every granularity, and what tables share."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models.fm import FM
from rarebit.pruning.pep import (
    PEP,
    count_nonzero,
    set_threshold_,
    soft_threshold,
    threshold_parameters,
    thresholded_tables,
)
from rarebit.tables.collection import Stack
from rarebit.tables.table import full_table

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)
WIDTH = 4

# granularity, and the index of the threshold of an entry of a table: field, row, column
SHARING = {
    "global": lambda field, row, column: (),
    "dimension": lambda field, row, column: (column,),
    "feature": lambda field, row, column: (field, row),
    "feature_dimension": lambda field, row, column: (field, row, column),
    "field": lambda field, row, column: (field,),
    "field_dimension": lambda field, row, column: (field, column),
}
every_granularity = pytest.mark.parametrize("granularity", SHARING)


def model_of(*methods: rb.Method, dtype: torch.dtype = torch.float64) -> FM:
    model = FM(rb.data.Schema(FIELDS), dim=WIDTH, std=0.5).to(dtype)
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def two_tables(*methods: rb.Method) -> nn.ModuleDict:
    """Return a stranger's model, whose tables are modules of their own."""
    model = nn.ModuleDict({"user": nn.Embedding(20, WIDTH), "item": nn.Embedding(11, WIDTH)})
    for method in methods:
        rb.apply_(model, method, verbose=False)
    return model


def move_(model: nn.Module, scale: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def ids_of(rows: int = 8) -> Tensor:
    return torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in FIELDS], dim=1)


def level_of(table: nn.Module, row: int, column: int) -> float:
    """Return s of one entry, whatever shape the thresholds have."""
    levels = table.levels
    value = levels.weight[row] if isinstance(levels, nn.Embedding) else levels.value
    value = value.detach()
    return float(value[column] if len(value) > 1 else value[0])


def cut_by_hand(value: float, threshold: float) -> float:
    return math.copysign(max(abs(value) - threshold, 0.0), value)


def learned(granularity: str) -> PEP:
    return PEP(granularity=granularity, init=-1.0)


def g(level: float) -> float:
    return 1 / (1 + math.exp(-level))


def test_the_equation_on_values_worked_by_hand():
    rows = torch.tensor([3.0, -3.0, 1.0, -1.0, 0.25, 0.0])
    assert soft_threshold(rows, torch.tensor(1.0)).tolist() == [2.0, -2.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradients_of_equation_11_worked_by_hand(compiled):
    cut = torch.compile(soft_threshold, backend="aot_eager") if compiled else soft_threshold
    rows = torch.tensor([3.0, -3.0, 1.0, -1.0, 0.25, 0.0], requires_grad=True)
    threshold = torch.tensor([1.0], requires_grad=True)
    upstream = torch.tensor([10.0, 20.0, 40.0, 80.0, 160.0, 320.0])
    (cut(rows, threshold) * upstream).sum().backward()
    assert rows.grad.tolist() == [10.0, 20.0, 0.0, 0.0, 0.0, 0.0]
    assert threshold.grad.tolist() == [-10.0 + 20.0]


def test_the_gradients_are_those_of_small_differences():
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for shape in [(), (3,), (5, 1), (5, 3)]:
        thresholds = torch.full(shape, 0.4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(soft_threshold, (rows, thresholds))


@every_granularity
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.01, 1.0]))
def test_a_model_equals_loops_over_entries(granularity, seed, scale):
    torch.manual_seed(seed)
    model = model_of(PEP(granularity=granularity, init=-1.0))
    move_(model, scale)
    tables, ids = model.backbone.tables, ids_of(5)
    upstream = torch.randn(5, 5, WIDTH, dtype=torch.float64)
    stack = tables.stacks[0]
    rows = stack(ids)
    (rows * upstream).sum().backward()
    rows, split = rows.detach(), tables.tables()
    field_of_slot = [0, 1, 1, 1, 2]
    of_rows: dict[tuple[int, ...], float] = {}
    of_levels: dict[tuple[int, ...], float] = {}
    for place in range(5):
        for slot, field in enumerate(field_of_slot):
            row = int(ids[place, slot])
            for column in range(WIDTH):
                value = float(full_table(split[field].inner)[row, column])
                level = level_of(split[field], row, column)
                expected = cut_by_hand(value, g(level))
                assert float(rows[place, slot, column]) == pytest.approx(expected, abs=1e-14)
                alive = float(upstream[place, slot, column]) * (expected != 0)
                entry, shared = (field, row, column), SHARING[granularity](field, row, column)
                slope = g(level) * (1 - g(level))
                of_rows[entry] = of_rows.get(entry, 0.0) + alive
                lost = slope * math.copysign(1, value) * alive
                of_levels[shared] = of_levels.get(shared, 0.0) - lost
    found_rows, found_levels = gradients_by_entry(model, granularity)
    for entry, expected in of_rows.items():
        assert found_rows[entry] == pytest.approx(expected, abs=1e-12)
    for shared, expected in of_levels.items():
        assert found_levels[shared] == pytest.approx(expected, abs=1e-12)


def gradients_by_entry(model: FM, granularity: str) -> tuple[dict, dict]:
    """Return the gradients of rows and thresholds by the field, row and column they belong to."""
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for target, source in zip(shadow.parameters(), model.parameters(), strict=True):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    rows, levels = {}, {}
    for field, table in enumerate(shadow.backbone.tables.tables()):
        weight = full_table(table.inner)
        for row in range(len(weight)):
            for column in range(WIDTH):
                rows[field, row, column] = float(weight[row, column])
                shared = SHARING[granularity](field, row, column)
                levels[shared] = level_of(table, row, column)
    return rows, levels


NUMBERS = {
    "global": 1,
    "dimension": WIDTH,
    "feature": 20 + 9 + 11,
    "feature_dimension": (20 + 9 + 11) * WIDTH,
    "field": 3,
    "field_dimension": 3 * WIDTH,
}


@every_granularity
def test_there_are_as_many_thresholds_as_the_granularity_says(granularity):
    found = threshold_parameters(model_of(PEP(granularity=granularity)))
    assert sum(parameter.numel() for parameter in found) == NUMBERS[granularity]
    assert all(bool((parameter == -15.0).all()) for parameter in found)


@every_granularity
def test_tables_that_are_modules_have_the_same_thresholds_as_a_stack(granularity):
    found = threshold_parameters(two_tables(PEP(granularity=granularity)))
    shared = {"global": 1, "dimension": WIDTH, "field": 2, "field_dimension": 2 * WIDTH}
    rows = {"feature": 31, "feature_dimension": 31 * WIDTH}
    assert sum(parameter.numel() for parameter in found) == (shared | rows)[granularity]


@pytest.mark.parametrize("build", [model_of, two_tables])
@pytest.mark.parametrize("granularity", ["global", "dimension"])
def test_a_later_table_joins_what_is_shared_and_has_been_trained(build, granularity):
    method, model = PEP(granularity=granularity), build()
    rb.apply_(model, method, where=lambda t: t.field == "item", verbose=False)
    [trained] = threshold_parameters(model)
    trained.data.fill_(-3.0)
    rb.apply_(model, method, where=lambda t: t.field == "user", verbose=False)
    [found] = threshold_parameters(model)
    assert found is trained
    assert bool((found == -3.0).all())


def test_thresholds_with_other_settings_are_not_shared():
    model = two_tables()
    for field, init in (("user", -3.0), ("item", -4.0)):
        method = PEP(granularity="global", init=init)
        rb.apply_(model, method, where=lambda t, field=field: t.field == field, verbose=False)
    assert sorted(s.item() for s in threshold_parameters(model)) == [-4.0, -3.0]


def test_a_frozen_table_does_not_freeze_what_others_share():
    model = two_tables()
    model["user"].requires_grad_(requires_grad=False)
    rb.apply_(model, PEP(granularity="global"), verbose=False)
    assert [p.requires_grad for p in threshold_parameters(model)] == [False, True]


@every_granularity
@pytest.mark.parametrize("build", [model_of, two_tables])
def test_merging_one_table_leaves_the_others_as_they_were(granularity, build):
    model = build(PEP(granularity=granularity, init=-1.0))
    move_(model)
    before = {n: full_table(t) for n, t in thresholded_tables(model).items()}
    levels = threshold_parameters(model)
    rb.merge_(model, where=lambda t: t.field == "item", verbose=False)
    after = {n: full_table(t) for n, t in thresholded_tables(model).items()}
    assert set(before) - set(after) == {n for n in before if n.endswith("item")}
    for name, rows in after.items():
        assert torch.equal(rows, before[name])
    if granularity in ("global", "dimension"):
        assert [id(p) for p in threshold_parameters(model)] == [id(p) for p in levels]


def test_an_optimizer_keeps_a_shared_threshold_that_another_table_has():
    model = two_tables(PEP(granularity="global"))
    optimizer = rb.optimizer(model)
    rb.merge_(model, where=lambda t: t.field == "item", optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


@every_granularity
@pytest.mark.parametrize("rowwise", [True, False])
def test_a_saved_model_trains_on_as_the_first_would(granularity, rowwise, tmp_path):
    model = model_of(PEP(granularity=granularity, init=-1.0), dtype=torch.float32)
    move_(model)
    twin = rb.load_model(rb.save_model(model, tmp_path))
    ids = ids_of()
    for one in (model, twin):
        optimizer = rb.optimizer(one, lr=0.1, tables="rowwise" if rowwise else "dense")
        for _ in range(3):
            optimizer.zero_grad()
            one.backbone.tables(ids).square().sum().backward()
            optimizer.step()
    assert len(threshold_parameters(twin)) == len(threshold_parameters(model))
    for (name, mine), (_, theirs) in zip(
        model.state_dict().items(), twin.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("granularity", ["global", "dimension"])
def test_tables_of_a_strangers_model_still_share_after_loading(granularity, tmp_path):
    method = PEP(granularity=granularity, init=-1.0)
    model = two_tables(method)
    move_(model)
    twin = rb.load_model(rb.save_model(model, tmp_path), into=two_tables())
    [mine], [theirs] = threshold_parameters(model), threshold_parameters(twin)
    assert torch.equal(mine, theirs)
    assert torch.equal(twin["user"].weight, model["user"].weight)


@every_granularity
def test_a_copy_shares_with_itself_and_not_with_the_first(granularity):
    model = two_tables(PEP(granularity=granularity))
    twin = copy.deepcopy(model)
    mine, theirs = threshold_parameters(model), threshold_parameters(twin)
    assert len(mine) == len(theirs)
    assert not {id(p) for p in mine} & {id(p) for p in theirs}


@every_granularity
def test_thresholds_that_vanish_leave_the_plain_model(granularity):
    plain = model_of(dtype=torch.float32)
    cut = copy.deepcopy(plain)
    rb.apply_(cut, PEP(granularity=granularity, init=-150.0), verbose=False)
    ids = ids_of()
    assert torch.equal(cut.backbone.tables(ids), plain.backbone.tables(ids))
    assert count_nonzero(cut) == (20 + 9 + 11) * WIDTH - WIDTH  # less the padding row of tags


def test_the_sigmoid_in_float32_is_zero_where_nothing_can_move_a_threshold():
    levels = torch.tensor([-150.0, -104.0, -88.0, -15.0], requires_grad=True)
    thresholds = PEP().cut_at(levels)
    assert thresholds[:2].tolist() == [0.0, 0.0]
    assert thresholds[2:].tolist() == pytest.approx([6.05e-39, 3.059e-7], rel=1e-3)
    thresholds.sum().backward()
    assert levels.grad[0] == 0.0
    assert levels.grad[3] > 0.0


def test_cutting_what_was_cut_at_zero_changes_nothing():
    rows = soft_threshold(torch.randn(50), torch.tensor(0.7))
    assert torch.equal(soft_threshold(rows, torch.tensor(0.0)), rows)


def test_over_factors_the_product_is_cut():
    model = model_of(rb.MLET(inner_dim=8), PEP(init=-2.0))
    move_(model)
    for table in model.backbone.tables.tables():
        product = table.inner.inner.weight @ table.inner.projection
        expected = product.sign() * (product.abs() - torch.sigmoid(table.levels.weight)).relu()
        if table.padding_idx is not None:
            expected = expected.index_fill(0, torch.tensor([table.padding_idx]), 0.0)
        assert_close(table.weight, expected)


@pytest.mark.parametrize("method", [*map(learned, SHARING), PEP(schedule="given")], ids=str)
def test_over_factors_a_stack_equals_its_tables(method):
    model = model_of(rb.MLET(inner_dim=8), method)
    move_(model)
    if method.schedule is not None:
        set_threshold_(model, 0.3)
    assert_equals_its_tables(model.backbone.tables.stacks[0])


@pytest.mark.parametrize("method", [*map(learned, SHARING), PEP(schedule="given")], ids=str)
def test_compiled_a_stack_equals_its_tables(method):
    model = model_of(method)
    move_(model)
    stack = model.backbone.tables.stacks[0]
    assert_equals_its_tables(torch.compile(stack, backend="aot_eager", fullgraph=True), stack)


def assert_equals_its_tables(stack: nn.Module, source: Stack | None = None) -> None:
    ids = ids_of().clamp(min=1)  # padding is left to the collection
    tables = (source or stack).split()
    columns = [0, 1, 1, 1, 2]
    looped = torch.stack([tables[f].rows(ids[:, slot]) for slot, f in enumerate(columns)], dim=1)
    rows, parameters = stack(ids), list((source or stack).parameters())
    assert_close(rows, looped)
    if source is not None:  # compiled, it has another backward
        weights = torch.randn_like(looped)
        found, expected = (
            torch.autograd.grad((out * weights).sum(), parameters) for out in (rows, source(ids))
        )
        assert_close(found, expected)
        assert all(bool(gradient.any()) for gradient in found)


def test_thresholds_have_a_group_of_their_own_with_their_own_decay():
    model = model_of(PEP(granularity="field"))
    groups = {g["name"]: g for g in rb.optimizer(model, weight_decay=0.5).param_groups}
    assert list(groups) == ["network", "tables", "thresholds"]
    assert [id(p) for p in groups["thresholds"]["params"]] == [
        id(p) for p in threshold_parameters(model)
    ]
    held = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert groups["thresholds"]["weight_decay"] == 1e-5
    assert groups["tables"]["weight_decay"] == 0.5
    other = rb.optimizer(model, threshold_weight_decay=0.1, table_lr=0.2).param_groups[-1]
    assert (other["weight_decay"], other["lr"]) == (0.1, 0.2)
    assert [g["name"] for g in rb.optimizer(model_of()).param_groups] == ["network", "tables"]
    with pytest.raises(SettingsError, match="threshold_weight_decay must be 0 or more, got"):
        rb.optimizer(model, threshold_weight_decay=-1.0)


def test_an_optimizer_that_is_passed_on_gets_the_thresholds_over_factors_too():
    model = two_tables(rb.MLET(inner_dim=8))
    optimizer = rb.optimizer(model)
    rb.apply_(model, PEP(), optimizer=optimizer, verbose=False)
    rb.check_optimizer(model, optimizer)


def test_by_rows_only_the_thresholds_of_the_step_move():
    model = two_tables(PEP(init=-1.0))
    optimizer = rb.optimizer(model, lr=0.1, tables="rowwise")
    model["user"](torch.tensor([3, 8])).sum().backward()
    optimizer.step()
    moved = (model["user"].levels.weight != -1.0).any(dim=1).nonzero().flatten()
    assert moved.tolist() == [3, 8]
    assert bool((model["item"].levels.weight == -1.0).all())
