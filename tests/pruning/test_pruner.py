"""The schedule and the budgets it meets, against the formula written out and counting by hand."""

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import NoTableError, SettingsError
from rarebit.models.fm import FM
from rarebit.pruning.pep import (
    LearnedPruner,
    Pruner,
    count_nonzero,
    pruner_of,
    set_threshold_,
    thresholded_tables,
)
from rarebit.tables.table import full_table

GIVEN = rb.PEP(schedule="given")
SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=30), rb.data.Field(name="item", rows=20)))
WIDTH, TOTAL = 4, 200


def fm(method: rb.Method = GIVEN) -> FM:
    model = FM(SCHEMA, dim=WIDTH)
    rb.apply_(model, method, verbose=False)
    return model


def log(rows: int = 160) -> rb.Dataset:
    ids = torch.stack([torch.randint(30, (rows,)), torch.randint(20, (rows,))], dim=1)
    return rb.Dataset(SCHEMA, ids, label=torch.randint(2, (rows,)).float())


def scheduled(step: int, steps: int, total: int, last: int) -> int:
    """k(p), with p from 0 to 1 over the last nine tenths of the steps."""
    if step <= steps / 10:
        return total
    done = (step - steps / 10) / (steps * 0.9)
    return round(math.exp(math.log(last) * done + math.log(total) * (1 - done)))


def looks(steps: int, every: int) -> list[int]:
    return [step for step in range(1, steps + 1) if step % every == 0 or step == steps]


def disturb(model: nn.Module) -> None:
    """Move all entries a little, as a step of training does."""
    for table in thresholded_tables(model).values():
        with torch.no_grad():
            table.inner.weight.add_(torch.randn_like(table.inner.weight) * 1e-3)


@pytest.mark.parametrize(("steps", "last"), [(100, 7), (9, 1), (1, 199), (1000, 150)])
def test_the_schedule_is_its_formula(steps, last):
    pruner = Pruner(fm(), [last], steps=steps)
    found = [pruner.entries_after(step) for step in range(steps + 1)]
    assert found == [scheduled(step, steps, TOTAL, last) for step in range(steps + 1)]
    assert (found[0], found[-1]) == (TOTAL, last)
    assert pruner.entries_after(steps + 50) == last


def test_the_schedule_falls_by_the_same_factor_and_waits_a_tenth():
    pruner = Pruner(fm(), [2], steps=200)
    assert [pruner.entries_after(step) for step in (1, 10, 20)] == [200, 200, 200]
    # 200 to 2 is a factor of 10 in each half of what comes after step 20
    assert (pruner.entries_after(110), pruner.entries_after(200)) == (20, 2)


@settings(max_examples=40)
@given(
    budgets=st.lists(st.integers(1, TOTAL - 1), min_size=1, max_size=6),
    steps=st.integers(1, 60),
    every=st.integers(1, 70),
)
# so slow that the same number is left at several looks: it is to be met at each of them
@pytest.mark.slow
@example(budgets=[190, 180], steps=60, every=1)
def test_each_budget_is_met_at_the_first_look_at_or_below_it(budgets, steps, every):
    torch.manual_seed(1)
    model, seen = fm(), []
    pruner = Pruner(
        model, budgets, steps=steps, every=every, watch=lambda step, left: seen.append((step, left))
    )
    done = []
    for step in range(1, steps + 1):
        disturb(model)
        done.append(pruner.after_step(step))
        if step in looks(steps, every):
            # the tables are cut to what was told, at every look
            assert count_nonzero(model) == seen[-1][1]
    assert done == [False] * (steps - 1) + [True]
    smallest = min(budgets)
    expected = [(step, scheduled(step, steps, TOTAL, smallest)) for step in looks(steps, every)]
    assert seen == expected
    assert sorted(pruner.tickets) == sorted(set(budgets))
    for budget, ticket in pruner.tickets.items():
        assert ticket.num_kept == budget
        assert ticket.facts["budget"] == budget
        assert ticket.facts["step"] == next(step for step, left in expected if left <= budget)
    assert pruner.budgets == sorted(set(budgets), reverse=True)


def test_budgets_between_two_looks_are_nested_and_of_that_moment():
    model = fm()
    weights = {n: full_table(t.inner).clone() for n, t in thresholded_tables(model).items()}
    pruner = Pruner(model, [20, 190, 100], steps=1, every=50)
    assert pruner.after_step(1)
    order = torch.cat([w.abs().flatten() for w in weights.values()]).sort(descending=True).values
    for budget, ticket in pruner.tickets.items():
        threshold = float(order[budget])
        assert ticket.facts == {"budget": budget, "step": 1, "threshold": threshold}
        for name, mask in ticket.kept.items():
            assert torch.equal(mask, weights[name].abs() > threshold)
    assert count_nonzero(model) == 20


def test_a_cut_is_made_at_looks_only_and_stays_until_the_next():
    model = fm()
    pruner = Pruner(model, [50], steps=10, every=4)
    thresholds = []
    for step in range(1, 11):
        pruner.after_step(step)
        thresholds.append(float(next(iter(thresholded_tables(model).values())).levels.value))
    assert thresholds[:3] == [0.0] * 3
    assert len(set(thresholds[3:7])) == 1
    assert len(set(thresholds[7:9])) == 1
    assert 0 < thresholds[3] < thresholds[7] < thresholds[9]


def test_before_anything_is_due_nothing_is_cut():
    model = fm()
    set_threshold_(model, 1.0)  # as if something had been
    pruner = Pruner(model, [50], steps=100, every=10)
    assert not pruner.after_step(10)
    assert count_nonzero(model) == TOTAL


def test_after_the_last_step_it_is_over_and_the_cut_is_kept():
    model = fm()
    pruner = Pruner(model, [50], steps=10, every=4)
    pruner.after_step(10)
    [ticket] = pruner.tickets.values()
    threshold = next(iter(thresholded_tables(model).values())).levels.value.clone()
    for step in (11, 12, 13, 16):
        disturb(model)
        assert pruner.after_step(step)
    assert pruner.tickets[50] is ticket
    assert torch.equal(next(iter(thresholded_tables(model).values())).levels.value, threshold)


def test_entries_that_are_equal_go_together():
    weight = torch.tensor([[4.0, 3.0, 3.0], [-3.0, 2.0, 1.0]])
    model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
    rb.apply_(model, GIVEN, verbose=False)
    pruner = Pruner(model, [5, 4, 3, 2, 1], steps=1)
    pruner.after_step(1)
    assert {b: t.num_kept for b, t in pruner.tickets.items()} == {5: 5, 4: 4, 3: 1, 2: 1, 1: 1}


def test_facts_are_asked_when_the_ticket_is_taken():
    model, asked = fm(), []

    def facts():
        asked.append(count_nonzero(model))
        return {"left": asked[-1]}

    pruner = Pruner(model, [150, 30], steps=20, every=1, facts=facts)
    for step in range(1, 21):
        pruner.after_step(step)
    assert asked == [150, 30]
    assert [pruner.tickets[budget].facts["left"] for budget in (150, 30)] == [150, 30]


def test_the_usual_interval():
    model, learned = fm(), fm(rb.PEP())
    steps = (1, 39, 40, 79, 80, 7999, 8000, 10**6)
    for found in (
        [Pruner(model, [5], steps=n).every for n in steps],
        [LearnedPruner(learned, [5], steps=n).every for n in steps],
    ):
        assert found == [1, 1, 1, 1, 2, 199, 200, 200]
    assert LearnedPruner(learned, [5]).every == 200


def test_a_loop_of_ones_own_does_what_fit_does():
    data, model = log(), fm()
    twin = copy.deepcopy(model)
    options = {"lr": 0.02, "weight_decay": 1e-3}
    theirs = Pruner(twin, [120, 30], steps=30)
    rb.fit(twin, data, epochs=3, batch_size=16, callbacks=[theirs], progress=False, **options)

    mine, step = Pruner(model, [120, 30], steps=30), 0
    optimizer = rb.optimizer(model, **options)
    loss = nn.BCEWithLogitsLoss()
    for epoch in (1, 2, 3):
        order = data.order(seed=0, epoch=epoch)
        for start in range(0, 160, 16):
            batch = data[order[start : start + 16]]
            optimizer.zero_grad()
            loss(model(batch), batch.label).backward()
            optimizer.step()
            step += 1
            mine.after_step(step)
    assert sorted(mine.tickets) == sorted(theirs.tickets) == [30, 120]
    for budget, ticket in mine.tickets.items():
        other = theirs.tickets[budget]
        assert all(torch.equal(mask, other.kept[name]) for name, mask in ticket.kept.items())
        assert ticket.facts == other.facts
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def learned(**options) -> tuple[nn.Module, nn.Embedding]:
    weight = torch.tensor([[0.9, -0.6, 0.3], [0.2, -0.45, 0.7]])
    model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
    rb.apply_(model, rb.PEP(init=-15.0, **options), verbose=False)
    return model, model[0].levels


def level_of(threshold: float) -> float:
    return math.log(threshold / (1 - threshold))


def test_learned_thresholds_meet_a_budget_when_so_few_are_left():
    model, levels = learned()
    seen = []
    pruner = LearnedPruner(
        model, [2, 5, 4], every=10, watch=lambda step, left: seen.append((step, left))
    )
    story = {10: 0.1, 13: 0.99, 20: 0.25, 30: 0.35, 40: 0.5, 50: 0.65}
    done = []
    for step in range(1, 51):
        if step in story:
            levels.weight.data.fill_(level_of(story[step]))
        if step == 14:
            levels.weight.data.fill_(level_of(0.1))
        done.append(pruner.after_step(step))
    # magnitudes above .1, .25, .35, .5 and .65; what happened at step 13 was not looked at
    assert seen == [(10, 6), (20, 5), (30, 4), (40, 3), (50, 2)]
    assert done == [False] * 49 + [True]
    assert {b: t.facts["step"] for b, t in pruner.tickets.items()} == {5: 20, 4: 30, 2: 50}
    assert pruner.tickets[4].kept["0"].tolist() == [[True, True, False], [False, True, True]]
    assert "threshold" not in pruner.tickets[4].facts
    assert_close(pruner.tickets[4].levels["0"], torch.full((2, 3), level_of(0.35)))


def test_a_learned_ticket_that_was_taken_is_kept():
    model, levels = learned()
    pruner = LearnedPruner(model, [5, 2], every=1)
    levels.weight.data.fill_(level_of(0.25))
    pruner.after_step(1)
    first = pruner.tickets[5]
    levels.weight.data.fill_(level_of(0.4))
    assert not pruner.after_step(2)
    assert pruner.tickets[5] is first
    levels.weight.data.fill_(level_of(0.8))  # one entry is left: fewer than the budget
    assert pruner.after_step(3)
    assert (pruner.tickets[2].num_kept, pruner.tickets[2].facts["step"]) == (1, 3)


def test_a_learned_ticket_says_how_far_its_thresholds_differ():
    model, levels = learned()
    pruner = LearnedPruner(model, [5, 4], every=1)
    levels.weight.data.fill_(level_of(0.25))
    pruner.after_step(1)
    one = pruner.tickets[5].facts
    assert_close([one["mean_threshold"], one["mean_s"]], [0.25, -math.log(3)], rtol=0, atol=1e-7)
    assert (one["std_s"], one["std_threshold"]) == (0.0, 0.0)
    # half of them at g(0) = 1/2, half at g(ln 3) = 3/4
    levels.weight.data[:] = torch.tensor([[0.0], [math.log(3)]])
    pruner.after_step(2)
    found = pruner.tickets[4].facts
    half = math.log(3) / 2
    expected = {"mean_s": half, "std_s": half, "mean_threshold": 0.625, "std_threshold": 0.125}
    assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("granularity", ["dimension", "field"])
def test_the_spread_is_that_of_distinct_thresholds(granularity):
    model = fm(rb.PEP(granularity=granularity))
    levels = [table.levels.value for table in thresholded_tables(model).values()]
    # per column for both tables, or one per table: the values are -3, -1, 1 and 3, or -3 and 1
    for value, own in zip(levels, (-3.0, 1.0), strict=True):
        value.data[:] = torch.tensor([-3.0, -1.0, 1.0, 3.0]) if granularity == "dimension" else own
    pruner = LearnedPruner(model, [199], every=1)
    pruner.after_step(1)
    facts = pruner.tickets[199].facts
    mean, std = (0.0, math.sqrt(5)) if granularity == "dimension" else (-1.0, 2.0)
    assert_close([facts["mean_s"], facts["std_s"]], [mean, std], rtol=0, atol=1e-7)


SHAPES = {
    "global": (1,),
    "dimension": (3,),
    "field": (1,),
    "field_dimension": (3,),
    "feature": (2, 1),
    "feature_dimension": (2, 3),
}


@pytest.mark.parametrize(("granularity", "shape"), SHAPES.items())
def test_the_thresholds_are_kept_as_they_were(granularity, shape):
    model, levels = learned(granularity=granularity)
    for parameter in levels.parameters():
        parameter.data.fill_(level_of(0.5))
    pruner = LearnedPruner(model, [4], every=1)
    pruner.after_step(1)
    for parameter in levels.parameters():
        parameter.data.fill_(3.0)  # training goes on
    assert torch.equal(pruner.tickets[4].levels["0"], torch.zeros(shape))  # g(0) is 1/2
    assert pruner.tickets[4].num_kept == 3


def test_the_pruner_of_a_model_is_that_of_its_thresholds():
    assert type(pruner_of(fm(), [5], steps=9)) is Pruner
    made = pruner_of(fm(rb.PEP(granularity="global")), [5], steps=9, every=3)
    assert type(made) is LearnedPruner
    assert made.every == 3
    assert pruner_of(fm(), [5], steps=9).steps == 9


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([], {}, "pruning needs at least one budget"),
        ([5, 0], {}, "a budget must be at least 1 entry, got 0"),
        ([-3], {}, "a budget must be at least 1 entry, got -3"),
        ([TOTAL, 5], {}, "a budget must be below the 200 entries that the tables have, got 200"),
        ([5], {"every": 0}, "every must be at least 1 step, got every=0"),
        ([5], {"steps": 0}, "pruning needs at least one step, got steps=0"),
    ],
)
def test_what_makes_no_sense_is_refused(budgets, options, message):
    with pytest.raises(SettingsError, match=message):
        Pruner(fm(), budgets, **({"steps": 10} | options))
    if "steps" not in options:
        with pytest.raises(SettingsError, match=message):
            LearnedPruner(fm(rb.PEP()), budgets, **options)


def test_a_budget_just_below_everything_and_one_of_a_single_entry_are_met():
    model = fm()
    pruner = Pruner(model, [TOTAL - 1, 1], steps=10)
    for step in range(1, 11):
        pruner.after_step(step)
    assert [pruner.tickets[budget].num_kept for budget in (TOTAL - 1, 1)] == [TOTAL - 1, 1]


def test_a_model_without_thresholds_is_told():
    with pytest.raises(NoTableError, match=r"no table of the model has thresholds; apply_ PEP\(\)"):
        Pruner(FM(SCHEMA, dim=4), [5], steps=10)
    model = fm(rb.PEP())
    with pytest.raises(NoTableError, match="no table of the model has a threshold to set"):
        Pruner(model, [5], steps=1).after_step(1)
