"""c learned on rows that no table was fitted to: against differences, and that nothing else moves."""

import copy
import math

import pytest
import torch
from contract.test_training_methods import StopAt, train
from methods.shrunk_models import SCHEMA, counts_by_field, deepfm
from methods.training_data import rows_of, training_data
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.callbacks import Attached
from rarebit.data.order import batch_bounds
from rarebit.errors import DataError, TrainingInterrupted
from rarebit.methods import _shrinkage_strength as strength
from rarebit.methods._shrinkage_model import set_counts_
from rarebit.methods._shrinkage_parts import Evidence
from rarebit.methods.shrinkage import AUTO, Shrinkage
from rarebit.models.deepfm import DeepFM
from rarebit.models.lr import LR
from rarebit.tables.find import find_sites


def attached(model: nn.Module, c: str = "held-out", **sizes: int) -> Attached:
    sizes = {"train": 64, "valid": 24} | sizes
    data = training_data(rows_of(sizes["train"]), rows_of(sizes["valid"]))
    return Shrinkage(c=c).attach(model, data)


def shrunk(c: str = "held-out") -> DeepFM:
    return deepfm(Shrinkage(counts=counts_by_field(), c=c))


def evidence_of(model: nn.Module) -> list[Evidence]:
    return [module for module in model.modules() if isinstance(module, Evidence)]


def loss_of(model: nn.Module, batch: rb.Batch) -> float:
    logits = model(batch)
    return float(F.binary_cross_entropy_with_logits(logits, batch.label.to(logits.dtype)))


@pytest.mark.parametrize(("c", "at"), [("held-out", 8), ("first-pass", 2)])
def test_a_step_goes_down_the_loss_of_rows_that_were_not_trained_on(c, at):
    model = shrunk(c).double()
    train, valid = rows_of(64), rows_of(24)
    steps = Shrinkage(c=c).attach(model, training_data(train, valid))
    if c == "held-out":
        batch = valid[valid.order(seed=3, epoch=1)[:8]]
    else:
        batch = train[train.order(seed=3, epoch=1)[16:24]]
    naive = copy.deepcopy(model).eval()
    expected = []
    with torch.no_grad():
        for evidence in evidence_of(naive):
            log_c = evidence.strength.log().clone()
            moved = log_c.clone()
            for place in range(len(log_c)):
                losses = []
                for change in (1e-4, -1e-4):
                    evidence.strength.copy_(log_c.exp())
                    evidence.strength[place] = (log_c[place] + change).exp()
                    losses.append(loss_of(naive, batch))
                evidence.strength.copy_(log_c.exp())
                # the first step of Adam is one whole rate against the gradient
                moved[place] -= 0.1 * math.copysign(1.0, losses[0] - losses[1])
            expected.append(moved.exp())
    steps.after_step(at)
    for evidence, wanted in zip(evidence_of(model), expected, strict=True):
        assert_close(evidence.strength, wanted, rtol=1e-4, atol=0.0)


def test_nothing_but_c_is_changed():
    model = DeepFM(SCHEMA, dim=4, hidden=(8,), batch_norm=True, dropout=0.5).train()
    rb.apply_(model, Shrinkage(counts=counts_by_field(), c="held-out"), verbose=False)
    before = copy.deepcopy(model.state_dict())
    steps = attached(model)
    random = torch.get_rng_state()
    for number in range(1, 17):
        steps.after_step(number)
    assert torch.equal(torch.get_rng_state(), random)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert {name.rpartition(".")[2] for name in changed} == {"strength"}
    assert len(changed) == 2  # the rows, and the first-order weights
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_c_is_learned_every_eight_steps_and_is_no_parameter():
    model = shrunk()
    assert not any("strength" in name for name, _ in model.named_parameters())
    steps = attached(model)
    for number in range(1, 8):
        steps.after_step(number)
        assert_close(evidence_of(model)[0].c, torch.full((3,), 10.0))
    steps.after_step(8)
    assert bool((evidence_of(model)[0].c != 10.0).all())


def test_a_first_pass_ends_with_the_first_epoch():
    model = shrunk("first-pass")
    steps = attached(model, "first-pass")  # eight steps an epoch
    for number in range(1, 8):
        steps.after_step(number)
    reached = evidence_of(model)[0].c.clone()
    assert bool((reached != 10.0).all())
    for number in range(8, 30):
        steps.after_step(number)
    assert torch.equal(evidence_of(model)[0].c, reached)


def test_validation_rows_come_in_passes_each_in_an_order_of_its_own():
    valid = rows_of(20)
    batches = strength.held_out_batches(nn.Linear(1, 1), training_data(rows_of(8), valid))
    assert batches(7) is None
    bounds = batch_bounds(20, 8)
    for number in range(2 * len(bounds)):
        order = valid.order(seed=3, epoch=1 + number // len(bounds))
        start, stop = bounds[number % len(bounds)]
        found = batches(8 * (number + 1))
        assert torch.equal(found.ids, valid.ids[order[start:stop]])
        assert torch.equal(found.label, valid.label[order[start:stop]])


def test_it_goes_on_after_a_break_to_the_last_bit():
    model = shrunk()
    data = training_data(rows_of(64), rows_of(24))
    steps = Shrinkage(c="held-out").attach(model, data)
    for number in range(1, 41):
        steps.after_step(number)
    other = copy.deepcopy(model)
    state = copy.deepcopy(steps.state_dict())
    resumed = Shrinkage(c="held-out").attach(other, data)
    resumed.load_state_dict(state)
    for number in range(41, 81):
        steps.after_step(number)
        resumed.after_step(number)
    for evidence, same in zip(evidence_of(model), evidence_of(other), strict=True):
        assert torch.equal(evidence.c, same.c)
    fresh = Shrinkage(c="held-out").attach(copy.deepcopy(model), data)
    assert fresh.state_dict()["optimizer"]["state"] != state["optimizer"]["state"]


def test_rows_that_lie_about_their_labels_count_less():
    torch.manual_seed(0)
    rows, users = 4096, 512
    schema = rb.Schema((rb.Field(name="noise", rows=users), rb.Field(name="truth", rows=users)))
    ids = torch.stack([torch.randint(users, (2 * rows,)) for _ in schema.fields], dim=1)
    label = (ids[:, 1] % 2).float()
    label = torch.where(torch.rand(2 * rows) < 0.2, 1 - label, label)
    train, valid = (
        rb.Dataset(schema, ids[part], label=label[part])
        for part in (slice(0, rows), slice(rows, None))
    )
    found = {}
    for c in ("held-out", "first-pass", "learned"):
        torch.manual_seed(1)
        model = LR(schema)
        shrinkage = Shrinkage(counts=train.counts(), c=c)
        rb.apply_(model, shrinkage, verbose=False)
        steps = shrinkage.attach(model, training_data(train, valid, batch_size=32))
        epochs = 1 if c == "first-pass" else 4
        rb.fit(
            model,
            train,
            batch_size=32,
            epochs=epochs,
            lr=0.02,
            after_step=None if steps is None else steps.after_step,
            progress=False,
            seed=3,
        )
        found[c] = {site.info.field: site.table.evidence.c.item() for site in find_sites(model)}
    assert found["held-out"]["noise"] > 20
    assert found["held-out"]["truth"] < 5
    assert found["first-pass"]["noise"] > found["first-pass"]["truth"]
    assert found["held-out"]["noise"] > 2 * found["learned"]["noise"]


def test_c_stays_where_its_gradient_can_be_told():
    model = shrunk()
    steps = attached(model)
    with torch.no_grad():
        for log_c in steps.log_c:
            log_c.fill_(20.0)
    steps.after_step(8)
    assert_close(evidence_of(model)[0].c, torch.full((3,), strength.MOST))
    with torch.no_grad():
        for log_c in steps.log_c:
            log_c.fill_(-20.0)
    steps.after_step(16)
    assert_close(evidence_of(model)[0].c, torch.full((3,), strength.LEAST))


def test_row_gradients_on_the_same_tables_are_left_alone():
    model, other = shrunk(), None
    other = copy.deepcopy(model)
    rows = rb.RowGradients(model, rb.sum_losses)
    data = training_data(rows_of(64), rows_of(24))
    for one in (model, other):
        Shrinkage(c="held-out").attach(one, data).after_step(8)
    for evidence, same in zip(evidence_of(model), evidence_of(other), strict=True):
        assert torch.equal(evidence.c, same.c)
    rows.backward(model(rows_of(4)[:]).sum())  # raises where a lookup was taken for one of training
    rows.close()


def test_what_was_found_is_told_by_table():
    model = shrunk()
    steps = attached(model)
    steps.after_step(8)
    told = steps.report()["c"]
    assert set(told) == {info.name for info in rb.find_tables(model)}
    assert told["backbone.tables.item"] == evidence_of(model)[0].c[2].item()
    steps.close()
    assert steps.shadow is None
    steps.after_step(16)
    assert steps.report()["c"] == told


def test_a_strength_that_is_given_takes_no_part():
    for c in (3.0, "learned", "estimated"):
        assert Shrinkage(c=c).attach(shrunk(c), training_data(rows_of(8), None)) is None


def test_validation_rows_are_needed():
    data = training_data(rows_of(8), None)
    with pytest.raises(DataError, match='"held-out" is learned on validation rows, and there are'):
        Shrinkage(c="held-out").attach(shrunk(), data)


def test_auto_is_remembered_as_what_it_stands_for():
    model = deepfm(Shrinkage(c="auto"))
    set_counts_(model, counts_by_field())
    assert {t.method for t in model.backbone.tables.tables()} == {Shrinkage(c=AUTO)}
    assert AUTO != "auto"


@pytest.mark.parametrize("c", ["held-out", "first-pass"])
@pytest.mark.parametrize("call", [1, 4])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(c, call, tmp_path):
    whole, history = train(Shrinkage(c=c))
    with pytest.raises(TrainingInterrupted):
        train(Shrinkage(c=c), folder=tmp_path / "run", progress=StopAt(call))
    again, its_history = train(Shrinkage(c=c), folder=tmp_path / "run", resume=True)
    expected = whole.state_dict()
    assert all(torch.equal(again.state_dict()[key], expected[key]) for key in expected)
    assert its_history.reports == history.reports
    assert any(abs(c - 10.0) > 1 for c in history.reports["shrinkage"]["c"].values())
