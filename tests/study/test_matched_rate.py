"""The control of a method that moves rows faster: its rate, measured naively, and its trials."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

import rarebit as rb
from rarebit.data.order import shuffled_order
from rarebit.errors import StudyError
from rarebit.models import build_model
from rarebit.study.plan import StudyPlan
from rarebit.study.tuning import search
from rarebit.study.variants import SWEEP, MeasuredRates, rate_multiplier, variants_of
from rarebit.training.settings import RunSettings

MLET = rb.MLET(inner_dim=8, std=0.5)


@pytest.fixture(scope="module")
def train():
    return rb.data.generate(rb.data.SyntheticLog(rows=3000)).train


def settings(**training):
    training = rb.Training(batch_size=100, optimizer="adagrad", lr=0.05, **training)
    return RunSettings(model="fm", model_settings={"dim": 4}, training=training, methods=(MLET,))


def naive_distances(run, train, steps):
    """Train by hand, and return how far each looked-up row of each field's table has moved."""
    torch.manual_seed(run.training.seed)
    model = build_model("fm", train.schema, {"dim": 4})
    for method in run.methods:
        rb.apply_(model, method, verbose=False)
    tables = dict(
        zip(
            [f.name for f in train.schema.table_fields], model.backbone.tables.tables(), strict=True
        )
    )
    before = {name: table.weight.detach().clone() for name, table in tables.items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    rows = shuffled_order(len(train), seed=run.training.seed, epoch=1)[: 100 * steps]
    # the rows of the first steps, in the order that an epoch over them alone has
    own = shuffled_order(len(rows), seed=run.training.seed, epoch=1)
    seen = {name: set() for name in tables}
    for places in own.split(100):
        batch = train[rows[places]]
        for name in tables:
            seen[name].update(batch.ids[:, train.schema.slots[name]].flatten().tolist())
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(zip(tables, model.backbone.tables.tables(), strict=True))
    return [
        float((after[name].weight.detach()[i] - before[name][i]).norm())
        for name in tables
        for i in sorted(seen[name])
    ]


def test_the_rate_is_that_of_rows_trained_by_hand(train):
    run = settings()
    ours = naive_distances(run, train, steps=4)
    theirs = naive_distances(dataclasses.replace(run, methods=()), train, steps=4)
    median = lambda values: float(torch.tensor(values).median())  # noqa: E731  # in one line
    measured = rate_multiplier(run, train, steps=4)
    assert measured == pytest.approx(median(ours) / median(theirs), rel=1e-3)
    assert measured > 1.2


def test_the_caller_draws_as_before(train):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rate_multiplier(settings(), train, steps=1)
    assert torch.equal(torch.rand(2), expected)


def test_a_rate_is_measured_once(train, tmp_path):
    rates = MeasuredRates(tmp_path / "study" / "rates.json", train)
    rate = rates(settings())
    assert rate == float(f"{rate_multiplier(settings(), train):.2g}")
    written = json.loads(rates.path.read_text())
    assert list(written.values()) == [rate]
    rates.path.write_text(json.dumps(dict.fromkeys(written, 7.5)))
    assert MeasuredRates(rates.path, train)(settings()) == 7.5
    rates.path.write_text("[")
    with pytest.raises(StudyError, match=r"rates.json' cannot be read: .*; remove it"):
        rates(settings())


def test_under_sgd_the_rate_is_computed(tmp_path):
    run = dataclasses.replace(settings(), training=rb.Training(optimizer="sgd"))
    nowhere = MeasuredRates(tmp_path / "none", None)
    assert nowhere(run) == 8 * 0.5**2
    both = dataclasses.replace(run, methods=(rb.Hashing(buckets=9), MLET))
    assert nowhere(both) == 8 * 0.5**2


def control_of(methods, train, **values):
    plan = StudyPlan.from_mapping({"methods": methods, "model": {"name": "fm", "dim": 4}, **values})
    variants = {
        variant.name: variant
        for variant in variants_of(plan, plan.runs[0], train.schema, lambda _: 3.0)
    }
    return variants["matched-rate:x=3"], [
        variant for variant in variants.values() if variant.control is not None
    ]


def rates(control):
    found = search(control.start, control.axes, control.trials, lambda run: 0.0)
    return [(run.methods, run.training.table_lr) for run in found.trials]


def test_the_control_is_tuned_from_the_measured_rate_and_from_both_starts(train):
    control, [method] = control_of("mlet:std=0.5", train, trials=2)
    assert (method.control, control.control) == (control.name, None)
    assert (method.trials, control.trials) == (2, SWEEP)
    start = rb.research.ProductStart(inner_dim=64, std=0.5)
    # where nothing is better than the first setting: its neighbours
    assert rates(control)[:4] == [((), 3e-3), ((), 6e-3), ((), 1.5e-3), ((start,), 3e-3)]
    assert [axis.name for axis in control.axes] == [
        "learning rate of the tables",
        "start",
        "learning rate",
        "weight decay",
        "averaging",
    ]


def test_a_better_rate_is_followed(train):
    control, _ = control_of("mlet:std=0.5", train)
    found = search(control.start, control.axes, 99, lambda run: -abs(run.training.table_lr - 0.1))
    assert found.trials[found.best].training.table_lr == pytest.approx(3e-3 * 2**5)
    assert found.trials[found.best].training.lr == 1e-3


def test_other_methods_stay_in_the_control(train):
    hashing = rb.Hashing(buckets=500)
    control, _ = control_of("hashing:buckets=500+mlet", train)
    assert {methods for methods, _ in rates(control)} == {
        (hashing,),
        (hashing, rb.research.ProductStart()),
    }


def test_tables_that_are_kept_start_as_they_are(train):
    control, _ = control_of("mlet:init=keep", train)
    assert {methods for methods, _ in rates(control)} == {()}
    assert "start" not in [axis.name for axis in control.axes]
