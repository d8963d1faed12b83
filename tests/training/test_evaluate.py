import math

import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rarebit import Dataset, evaluate, predict
from rarebit.data import Field, Schema
from rarebit.errors import DataError, SettingsError, TrainingError
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.training.metrics import measure, rarity

SCHEMA = Schema(
    (
        Field(name="user", rows=5),
        Field(name="tags", kind="multi", rows=6, max_length=3),
        Field(name="score", kind="numeric"),
    )
)


class Column(nn.Module):
    """A model that scores a row by one of its columns."""

    def __init__(self, name="score"):
        super().__init__()
        self.name = name

    def forward(self, batch):
        return batch[self.name]


def some_data(n=37, *, probability=False):
    ids = torch.cat([torch.randint(5, (n, 1)), torch.randint(6, (n, 3))], dim=1)
    numbers, label = torch.randn(n, 1), (torch.rand(n) < 0.4).float()
    return Dataset(SCHEMA, ids, numbers, label, probability=torch.rand(n) if probability else None)


def same(got, want):
    """Metrics of the same rows, added up in another order."""
    assert (got.rows, got.positives, got.auc, got.pr_auc) == (
        want.rows,
        want.positives,
        want.auc,
        want.pr_auc,
    )
    assert got.logloss == pytest.approx(want.logloss, rel=1e-12)


def naive_rarity(data, counts):
    """For each row, the sum over fields of log(1 + count), a list's mean in place of a value."""
    found = []
    for row in range(len(data)):
        user, *tags = data.ids[row].tolist()
        tags = [math.log1p(int(counts["tags"][tag])) for tag in tags if tag != 0]
        of_tags = sum(tags) / len(tags) if tags else 0.0
        found.append(math.log1p(int(counts["user"][user])) + of_tags)
    return found


def naive_order(data, counts):
    rounded = [round(value, 9) for value in naive_rarity(data, counts)]
    return sorted(range(len(data)), key=lambda row: (rounded[row], row))


def test_rarity_is_the_sum_of_logs():
    data, counts = some_data(), some_data(200).counts()
    torch.testing.assert_close(
        rarity(data, counts),
        torch.tensor(naive_rarity(data, counts), dtype=torch.float64),
        rtol=0,
        atol=1e-9,
    )


@pytest.mark.parametrize("n", [1, 4, 9, 37])
def test_the_rarest_fifth_and_the_deciles_are_the_naive_ones(n):
    data, counts = some_data(n), some_data(12).counts()
    result = evaluate(Column(), data, counts=counts)
    order = naive_order(data, counts)
    scores, label = data.numeric[:, 0], data.label
    fifth = order[: max(n // 5, 1)]
    same(result.rarest, measure(scores[fifth], label[fifth]))
    most = order[n - max(n // 5, 1) :]
    same(result.frequent, measure(scores[most], label[most]))
    # Ten groups of equal size; the first ones have one row more where ten does not divide n.
    sizes = [n // 10 + (group < n % 10) for group in range(10)]
    starts = [sum(sizes[:group]) for group in range(10)]
    groups = [order[s : s + size] for s, size in zip(starts, sizes, strict=True) if size]
    assert len(result.deciles) == len(groups)
    for got, group in zip(result.deciles, groups, strict=True):
        same(got, measure(scores[group], label[group]))
    assert sum(decile.rows for decile in result.deciles) == n
    assert sum(decile.positives for decile in result.deciles) == result.overall.positives


@given(st.lists(st.permutations([0, 1, 2, 3]), min_size=5, max_size=30))
def test_rows_that_tie_are_taken_in_their_order(rows):
    """Each row has the counts 1, 3, 7, 99 in another order: all are tied, whatever the rounding."""
    schema = Schema(tuple(Field(name=name, rows=4) for name in "abcd"))
    counts = dict.fromkeys("abcd", torch.tensor([1, 3, 7, 99]))
    data = Dataset(schema, [list(row) for row in rows], label=[i % 2 for i in range(len(rows))])
    fifth = len(rows) // 5
    first = Dataset(schema, data.ids[:fifth], label=data.label[:fifth])
    forward = lambda _, batch: batch["a"].float()  # noqa: E731  # a model in one line
    got = evaluate(nn.Identity(), data, counts=counts, forward=forward)
    same(got.rarest, evaluate(nn.Identity(), first, forward=forward).overall)


@needs_cuda
def test_a_model_on_the_gpu_is_evaluated_as_on_the_cpu():
    data, counts = some_data(probability=True), some_data(200).counts()
    model = DeepFM(SCHEMA, dim=2, hidden=(3,)).double()
    on_cpu = evaluate(model, data, counts=counts)
    on_gpu = evaluate(model.cuda(), data, counts=counts)
    for name in ("overall", "rarest", "ceiling", "rarest_ceiling"):
        got, want = getattr(on_gpu, name), getattr(on_cpu, name)
        assert (got.rows, got.positives, got.auc) == (want.rows, want.positives, want.auc)
        assert got.logloss == pytest.approx(want.logloss, rel=1e-9)


def test_overall_is_measured_over_all_rows():
    data = some_data()
    result = evaluate(Column(), data)
    assert result.overall == measure(data.numeric[:, 0], data.label)
    assert (result.auc, result.logloss, result.pr_auc) == (
        result.overall.auc,
        result.overall.logloss,
        result.overall.pr_auc,
    )
    assert (result.rarest, result.deciles, result.ceiling, result.rarest_ceiling) == (
        None,
        (),
        None,
        None,
    )
    assert str(result) == f"overall: {result.overall}"


def test_the_ceiling_is_what_the_true_chances_reach():
    data, counts = some_data(probability=True), some_data(200).counts()
    result = evaluate(Column(), data, counts=counts)
    truth = torch.logit(data.probability.double())
    fifth = naive_order(data, counts)[:7]
    same(result.ceiling, measure(truth, data.label))
    same(result.rarest_ceiling, measure(truth[fifth], data.label[fifth]))
    assert [line.split(":")[0] for line in str(result).splitlines()] == [
        "overall",
        "rarest fifth",
        "ceiling",
        "ceiling, rarest fifth",
    ]
    assert evaluate(Column(), data).rarest_ceiling is None


def test_certain_chances_have_a_finite_ceiling():
    data = Dataset(SCHEMA, [[0, 1, 0, 0]] * 2, label=[0, 1], probability=[0.0, 1.0])
    ceiling = evaluate(Column(), data).ceiling
    assert (ceiling.auc, ceiling.logloss) == (1.0, pytest.approx(0.0, abs=1e-9))


def test_one_class_is_measured_and_said():
    data = Dataset(SCHEMA, [[0, 1, 0, 0]] * 3, [[0.0], [1.0], [2.0]], label=[0, 0, 0])
    result = evaluate(Column(), data)
    assert (result.auc, result.pr_auc) == (None, None)
    assert "AUC undefined (one class)" in str(result)


@given(st.integers(1, 50))
def test_predictions_lie_in_the_order_of_the_rows(batch_size):
    data = some_data(23)
    got = predict(Column(), data, batch_size=batch_size)
    assert torch.equal(got, data.numeric[:, 0])


@given(st.integers(1, 50))
def test_the_batch_size_does_not_change_an_evaluation(batch_size):
    data = some_data(23)
    model = DeepFM(SCHEMA, dim=2, hidden=(3,)).double()
    torch.testing.assert_close(
        predict(model, data, batch_size=batch_size), model(data[:]).detach(), rtol=0, atol=1e-14
    )


def test_no_rows_give_no_scores_but_a_sentence():
    data = some_data()
    data.divide((30, 0, 7), None)
    model = FM(data.schema, dim=2)
    for call in (predict, evaluate):
        with pytest.raises(DataError, match="there are no rows to score"):
            call(model, data.splits.valid)


def test_predictions_have_no_gradient():
    assert not predict(FM(SCHEMA, dim=2), some_data()).requires_grad


def test_every_module_gets_its_mode_back():
    model = DeepFM(SCHEMA, dim=2, hidden=(3,), dropout=0.5, batch_norm=True)
    frozen = model.head.mlp.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert sum(not mode for mode in modes.values()) == 1
    first, second = predict(model, some_data(9)), predict(model, some_data(9))
    assert first.shape == second.shape
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not frozen.training
    model.eval()
    predict(model, some_data(9))
    assert not any(module.training for module in model.modules())


def test_dropout_is_off_and_statistics_stay_while_predicting():
    model = DeepFM(SCHEMA, dim=2, hidden=(30,), dropout=0.5, batch_norm=True)
    data, before = some_data(9), {k: v.clone() for k, v in model.state_dict().items()}
    assert torch.equal(predict(model, data), predict(model, data))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_mode_comes_back_after_an_error():
    model = FM(SCHEMA, dim=2)
    with pytest.raises(ZeroDivisionError):
        predict(model, some_data(), forward=lambda model, batch: 1 / 0)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_names_its_row(bad):
    def forward(model, batch):
        scores = batch["score"].clone()
        scores[batch["score"] > 5.0] = bad
        return scores

    data = some_data(20)
    data.numeric[13], data.numeric[17] = 9.0, 9.0
    with pytest.raises(TrainingError, match=f"the model's score for row 13 is {bad}, so nothing"):
        evaluate(nn.Identity(), data, forward=forward, batch_size=4)


def test_float64_scores_are_not_rounded():
    data = Dataset(SCHEMA, [[0, 1, 0, 0]] * 2, [[0.0], [1.0]], label=[0, 1])
    result = evaluate(nn.Identity(), data, forward=lambda _, b: 1.0 + 1e-12 * b["score"].double())
    assert result.auc == 1.0


def test_half_precision_scores_are_measured():
    data = some_data()
    result = evaluate(nn.Identity(), data, forward=lambda _, b: b["score"].bfloat16())
    assert result.overall == measure(data.numeric[:, 0].bfloat16().float(), data.label)


def test_a_foreign_model_is_called_by_forward():
    data, table = some_data(), nn.Embedding(5, 1)
    got = predict(table, data, forward=lambda table, batch: table(batch["user"])[:, 0])
    assert torch.equal(got, table.weight.detach()[data[:]["user"].long(), 0])


def test_a_last_axis_of_one_is_taken_off():
    data = some_data()
    got = predict(nn.Identity(), data, forward=lambda _, batch: batch["score"][:, None])
    assert torch.equal(got, data.numeric[:, 0])


def test_anything_but_one_score_a_row_is_refused():
    data = some_data(6)
    message = r"one score per row, \(6,\), got \(6, 3\); pass forward=lambda model, batch"
    with pytest.raises(TrainingError, match=message):
        predict(Column("tags"), data)
    with pytest.raises(TrainingError, match=r"one score per row, \(6,\), got \(\)"):
        predict(nn.Identity(), data, forward=lambda _, batch: batch["score"].sum())
    with pytest.raises(TrainingError, match="one score per row, got a tuple; pass forward="):
        predict(nn.Identity(), data, forward=lambda _, batch: (batch["score"],))


def test_data_of_other_fields_is_refused_by_name():
    data = some_data()
    more_users = Schema((Field(name="user", rows=9), *SCHEMA.fields[1:]))
    with pytest.raises(DataError, match=r"built for other data: .*'user'.*rows=9.*'user'.*rows=5"):
        predict(FM(more_users, dim=2), data)
    with pytest.raises(DataError, match=r"built for other data: .*'score'"):
        predict(FM(Schema(SCHEMA.fields[:2]), dim=2), data)
    with pytest.raises(
        DataError, match=r"fields \['score', 'tags', 'user'\], the data has \['user'"
    ):
        evaluate(FM(Schema(SCHEMA.fields[::-1]), dim=2), data)
    wider = Schema((*SCHEMA.fields, Field(name="age", kind="numeric")))
    with pytest.raises(DataError, match=r"the fields \['user', 'tags', 'score', 'age'\], the data"):
        evaluate(FM(wider, dim=2), data)


def test_counts_of_other_data_are_refused():
    data = Dataset.from_columns({"user": [0, 1, 2]}, label=[0, 1, 0])
    model = FM(data.schema, dim=2)
    with pytest.raises(DataError, match="each of the 3 ids of 'user', got none"):
        evaluate(model, data, counts={})
    with pytest.raises(DataError, match="each of the 3 ids of 'user', got 2"):
        evaluate(model, data, counts={"user": torch.ones(2)})


def test_a_batch_has_at_least_one_row():
    data = Dataset.from_columns({"user": [0, 1, 2]}, label=[0, 1, 0])
    with pytest.raises(SettingsError, match="batch_size must be at least 1, got"):
        predict(FM(data.schema, dim=2), data, batch_size=0)
