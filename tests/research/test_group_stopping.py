"""Each group of rows is kept from its own best epoch: against loops over epochs, groups and validation rows."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, deepfm
from methods.training_data import rows_of, training_data
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb
from rarebit.callbacks import Callback
from rarebit.errors import DataError, UnsupportedTableError
from rarebit.research.group_stopping import GroupStopping, frequency_groups

STEPS = 8
EPOCHS = 4


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), groups=st.integers(1, 6))
def test_groups_are_shares_of_the_values_by_count(counts, groups):
    found = frequency_groups(torch.tensor(counts), groups).tolist()
    total = sum(counts)
    for n, group in zip(counts, found, strict=True):
        rarer = sum(other for other in counts if other < n)
        assert group == (groups * rarer // total if total else 0)
        assert 0 <= group < groups


def naive_losses(
    model: nn.Module, valid: rb.Dataset, groups: dict[str, Tensor]
) -> dict[tuple[str, int], float]:
    """Return the mean loss over the values of each group, with loops."""
    batch = valid[:]
    losses = F.binary_cross_entropy_with_logits(
        model(batch).double(), batch.label.double(), reduction="none"
    ).tolist()
    seen: dict[tuple[str, int], list[float]] = {}
    for field in FIELDS:
        for row, ids in enumerate(batch[field.name].reshape(len(batch), -1).tolist()):
            for i in ids:
                if field.kind != "multi" or i != 0:
                    group = (field.name, groups[field.name][i].item())
                    seen.setdefault(group, []).append(losses[row])
    return {group: sum(values) / len(values) for group, values in seen.items()}


def rows_by_field(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{place}.{field.name}": table.weight.detach().clone()
        for place, tables in (("rows", model.backbone.tables), ("first", model.wide.tables))
        for field, table in zip(FIELDS, tables.tables(), strict=True)
    }


def trained(model: nn.Module, valid: rb.Dataset, break_after: int | None = None) -> dict:
    """Return the rows at the end, and those that loops over the epochs say."""
    train = rows_of(64)
    data = training_data(train, valid)
    groups = {name: frequency_groups(count, 5) for name, count in train.counts().items()}
    stopping = GroupStopping().start(model, data)
    best: dict[tuple[str, int], tuple[float, int]] = {}
    epochs = [rows_by_field(model)]
    for epoch in range(1, EPOCHS + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
        for group, loss in naive_losses(copy.deepcopy(model).eval(), valid, groups).items():
            if group not in best or loss < best[group][0]:
                best[group] = (loss, epoch)
        epochs.append(rows_by_field(model))
        for step in range((epoch - 1) * STEPS + 1, epoch * STEPS + 1):
            stopping.after_step(step)
        if epoch == break_after:
            state = copy.deepcopy(stopping.state_dict())
            stopping.close()
            stopping = GroupStopping().start(model, data)
            stopping.load_state_dict(state)
    last = rows_by_field(model)
    stopping.end()
    expected = {}
    for name, rows in last.items():
        expected[name] = rows.clone()
        field = name.rpartition(".")[2]
        for i, group in enumerate(groups[field].tolist()):
            if (field, group) in best:
                expected[name][i] = epochs[best[field, group][1]][name][i]
    return {
        "found": rows_by_field(model),
        "expected": expected,
        "told": stopping.report()["best_epoch"],
        "losses": dict(zip(groups, stopping.best_loss.view(-1, 5).tolist(), strict=True)),
        "best_losses": {group: loss for group, (loss, _) in best.items()},
        "best": {group: epoch for group, (_, epoch) in best.items()},
    }


@pytest.mark.parametrize("break_after", [None, 2])
def test_rows_are_those_of_the_best_epoch_of_their_group(break_after):
    result = trained(deepfm(), rows_of(40), break_after)
    for name, rows in result["expected"].items():
        assert torch.equal(result["found"][name], rows), name
    assert len(set(result["best"].values())) > 1  # or it would not tell one epoch from the other
    for field in FIELDS:
        for group, epoch in enumerate(result["told"][field.name]):
            assert epoch == result["best"].get((field.name, group), 0)
            loss = result["best_losses"].get((field.name, group), float("inf"))
            assert result["losses"][field.name][group] == pytest.approx(loss)


def test_a_group_without_validation_rows_has_the_rows_that_the_model_has():
    model = deepfm()
    valid = rb.Dataset(
        model.schema, torch.tensor([[3, 2, 0, 0, 4], [3, 2, 0, 0, 4]]), label=torch.tensor([0, 1])
    )
    result = trained(model, valid)
    assert all(0 in epochs for epochs in result["told"].values())
    for name, rows in result["expected"].items():
        assert torch.equal(result["found"][name], rows), name


def test_training_is_not_disturbed():
    models, train, valid = [], rows_of(64), rows_of(40)
    for watched in (True, False):
        torch.manual_seed(0)
        model = deepfm()
        steps = Callback()
        if watched:
            steps.after_step = GroupStopping().start(model, training_data(train, valid)).after_step
        rb.fit(
            model,
            train,
            batch_size=8,
            epochs=2,
            lr=0.01,
            callbacks=[steps],
            progress=False,
        )
        models.append(model)
    for value, plain in zip(*(m.state_dict().values() for m in models), strict=True):
        assert torch.equal(value, plain)


def test_what_cannot_be_done_is_refused():
    with pytest.raises(DataError, match="needs validation rows, and there are none"):
        GroupStopping().start(deepfm(), training_data(rows_of(64)))
    hashed = deepfm(rb.Hashing(buckets=4))
    with pytest.raises(UnsupportedTableError, match=r"takes plain tables .* got 'backbone\.tables"):
        GroupStopping().start(hashed, training_data(rows_of(64), rows_of(8)))
