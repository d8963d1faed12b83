"""Weights of rows in the loss, and groups of rows for the grouped AUC: from a raw log to a trained model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import rarebit as rb
from rarebit.data import Field, Schema, collate
from rarebit.errors import DataError, RarebitError
from rarebit.models.fm import FM
from rarebit.training.metrics import auc, evaluate_scores, grouped_auc


def data_of(rows=64, **options):
    draws = np.random.default_rng(0)
    schema = Schema((Field(name="user", rows=9), Field(name="age", kind="numeric")))
    return rb.Dataset(
        schema, draws.integers(0, 9, (rows, 1)), draws.random((rows, 1)), draws.integers(0, 2, rows), **options
    )  # fmt: skip


def trained(data, **options):
    torch.manual_seed(0)
    model = FM(data.schema, dim=4)
    rb.fit(model, data, epochs=2, batch_size=16, lr=0.1, progress=False, **options)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_step_has_the_weighted_loss():
    data = data_of(weight=np.arange(64) / 10)
    losses = []

    def loss(logits, labels, weight):
        found = F.binary_cross_entropy_with_logits(logits, labels, weight)
        terms = F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weight
        assert torch.equal(found, terms.mean())
        losses.append(found.item())
        return found

    assert torch.equal(trained(data, loss=loss), trained(data)), (
        "torch's loss takes weights as third"
    )
    assert losses


def test_weights_of_one_change_nothing_and_others_do():
    plain = trained(data_of())
    assert torch.equal(trained(data_of(weight=np.ones(64))), plain)
    assert not torch.equal(trained(data_of(weight=np.arange(64))), plain)


def test_a_row_of_weight_two_is_a_row_twice():
    once = data_of(8, weight=[2.0, 1, 1, 1, 1, 1, 1, 1])
    model = FM(once.schema, dim=4)
    batch = once[torch.arange(8)]
    twice = once[torch.tensor([0, *range(8)])]
    single = F.binary_cross_entropy_with_logits(model(batch), batch.label, batch.weight) * 8
    double = F.binary_cross_entropy_with_logits(model(twice), twice.label) * 9
    torch.testing.assert_close(single, double)


def test_weights_go_where_the_rows_go():
    data = data_of(weight=np.arange(64), group=np.arange(64))
    data.divide([40, 12, 12], None)
    parts = data.splits
    assert parts.valid.weight.tolist() == parts.valid.group.tolist() == list(range(40, 52))
    assert data[torch.tensor([5, 3])].weight.tolist() == [5, 3]
    assert collate([data[5], data[3]]).weight.tolist() == [5, 3]
    assert data[3].to("cpu").weight.tolist() == [3]
    kept = data.in_memory()
    assert kept.splits.test.weight.tolist() == list(range(52, 64))
    assert parts.in_one_pass().train.weight.tolist() == list(range(64))
    assert data.row_bytes == 4 * 3 + 4 + 8


def test_an_interrupted_run_does_not_resume_with_other_weights(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        trained(data_of(weight=np.ones(64)), folder=tmp_path, callbacks=[Stop()])
    with pytest.raises(RarebitError, match="other"):
        trained(data_of(weight=np.full(64, 2.0)), folder=tmp_path, resume=True)


class Stop(rb.Callback):
    def after_epoch(self, *args, **options):
        raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": np.arange(64) - 1}, "weights must be at least 0, got -1 in row 0"),
        ({"weight": [np.nan] * 64}, "weight must be finite"),
        ({"weight": [1.0]}, "weight must have the shape"),
        ({"group": np.zeros(64)}, "group must be one integer per row"),
        ({"group": [1]}, "group must be one integer per row"),
    ],
)
def test_wrong_weights_and_groups_are_refused(options, said):
    with pytest.raises(DataError, match=said):
        data_of(**options)


def naive_grouped_auc(scores, labels, groups):
    found, rows = [], []
    for group in set(groups) - {0}:
        at = [n for n, one in enumerate(groups) if one == group]
        pairs = [(scores[a], scores[b]) for a in at for b in at if labels[a] > labels[b]]
        if pairs:
            found.append(sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs))
            rows.append(len(at))
    return None if not rows else sum(f * n for f, n in zip(found, rows, strict=True)) / sum(rows)


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.booleans(), st.sampled_from([0, 1, 2, -5, 2**62])),
        max_size=30,
    )
)
def test_grouped_auc_is_the_mean_over_groups(rows):
    scores, labels, groups = (
        (list(part) for part in zip(*rows, strict=True)) if rows else ([], [], [])
    )
    expected = naive_grouped_auc(scores, labels, groups)
    found = grouped_auc(
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(labels, dtype=torch.float32),
        torch.tensor(groups, dtype=torch.int64),
    )
    assert found == (None if expected is None else pytest.approx(expected))


def test_one_group_has_the_auc_of_all_rows():
    data = data_of(group=np.full(64, 3))
    scores = torch.randn(64)
    found = evaluate_scores(scores, data)
    assert found.grouped_auc == pytest.approx(auc(scores, data.label))
    assert f"grouped AUC {found.grouped_auc:.5f}" in str(found)
    assert evaluate_scores(scores, data_of()).grouped_auc is None
