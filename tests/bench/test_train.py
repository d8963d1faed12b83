"""All variants of the bench are the same model: they reach the same loss."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from rarebit.bench import steps, train
from rarebit.bench.steps import NextStep
from rarebit.data.dataset import Dataset, Splits
from rarebit.data.schema import Field, Schema
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models.deepfm import DeepFM

SIZES = (43, 5, 700, 2000, 3, 19)
DIM, HIDDEN = 4, (16, 8)
BATCH_SIZE = 64


@pytest.fixture
def data():
    fields = tuple(Field(name=f"C{i}", rows=size + 3) for i, size in enumerate(SIZES))
    u = torch.rand(25 * BATCH_SIZE, len(SIZES))
    ids = 3 + (torch.tensor(SIZES) * u**3).int()
    return Dataset(Schema(fields), ids, label=(u.sum(dim=1) > 3).float())


@pytest.fixture
def models(data):
    model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
    torch.nn.init.constant_(model.wide.bias, 0.3)  # zero at first, which a copy may be by accident
    return model, by_hand_like(model)


def by_hand_like(model):
    rows = [field.rows for field in model.schema.table_fields]
    return train.copy_weights(model, train.DeepFMByHand(rows, DIM, HIDDEN))


def loss(scores, data):
    return F.binary_cross_entropy_with_logits(scores, data.label).item()


def test_copied_weights_give_the_same_scores(models, data):
    model, by_hand = models
    everything = data[:]
    torch.testing.assert_close(model(everything), by_hand(everything.ids.long()))


def test_copies_share_no_memory(models, data):
    model, by_hand = models
    before = model(data[:])
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(data[:]), before)


def test_both_have_the_same_number_of_weights(models):
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert counts[0] == counts[1]


def test_all_variants_reach_the_same_loss_after_twenty_steps(models, data, monkeypatch):
    model, by_hand = models
    tuned, lazy = by_hand_like(model), copy.deepcopy(model)
    first_loss = loss(model(data[:]), data)
    # The loader shuffles by itself: here it has to give the same batches.
    monkeypatch.setattr(train, "_loaded", lambda *batches: ids_and_labels(steps.sliced(*batches)))
    variants = [
        NextStep(model, data, BATCH_SIZE, "dense"),
        NextStep(lazy, data, BATCH_SIZE),
        train._by_hand(by_hand, train._loaded(data, BATCH_SIZE)),
        train._by_hand(tuned, ids_and_labels(steps.sliced(data, BATCH_SIZE)), fused=True),
    ]
    for _ in range(20):
        for step in variants:
            step()
    ids = data.ids.long()
    losses = [loss(model(data[:]), data), loss(by_hand(ids), data), loss(tuned(ids), data)]
    assert losses[0] < first_loss
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    # another algorithm on rows that were not looked up, and nearly the same loss
    assert loss(lazy(data[:]), data) == pytest.approx(losses[0], rel=0.01)


def ids_and_labels(batches):
    for batch in batches:
        yield batch.ids.long(), batch.label


def test_loader_and_slices_see_every_row_once_an_epoch(data):
    number = len(data) // BATCH_SIZE
    loaded, sliced = train._loaded(data, BATCH_SIZE), steps.sliced(data, BATCH_SIZE)
    everything, epochs = sorted(data.ids.tolist()), []
    for _ in range(2):
        by_loader = torch.cat([next(loaded)[0] for _ in range(number)])
        by_slices = torch.cat([next(sliced).ids for _ in range(number)])
        assert sorted(by_loader.tolist()) == sorted(by_slices.tolist()) == everything
        epochs += [by_loader, by_slices]
    for one, other in itertools.combinations([data.ids, *epochs], 2):
        assert not torch.equal(one, other)


def test_ids_are_as_people_keep_them(data):
    ids, label = next(train._loaded(data, BATCH_SIZE))
    assert (ids.dtype, label.dtype) == (torch.int64, torch.float32)
    assert (ids.shape, label.shape) == ((BATCH_SIZE, len(SIZES)), (BATCH_SIZE,))


def test_the_data_has_the_shape_of_criteo():
    data = generate(SyntheticLog(preset="criteo", rows=200)).train
    assert len(data.schema.table_fields) == len(data.schema.fields) == 39
    assert sum(field.rows for field in data.schema.table_fields) == 967_795 + 3 * 39


def test_the_figures_are_named(data, quick, monkeypatch):
    monkeypatch.setattr(steps, "generate", lambda log: Splits(data, data, data))
    monkeypatch.setattr(train, "BATCH_SIZES", {"": 32, "_64": 64})
    said = []
    figures = train.train(said.append)
    assert len(said) == 2
    ratio = figures["reference_ms_64"] / figures["ours_ms_64"]
    assert figures["ratio_64"] == pytest.approx(ratio)
    assert figures["ratio"] == pytest.approx(figures["reference_ms"] / figures["ours_ms"])
    assert figures["ratio_tuned"] == pytest.approx(figures["tuned_ms"] / figures["ours_ms"])
    assert figures["ratio_dense"] == pytest.approx(figures["reference_ms"] / figures["dense_ms"])
    tables = (figures[f"{side}_ms"] - figures["mlp_ms"] for side in ("reference", "ours"))
    assert figures["ratio_tables"] == pytest.approx(next(tables) / next(tables))
    assert {"ratio_of", "mlp_ms", "mlp_ms_64", "ours_samples_per_second_64"} <= set(figures)
