"""A call after each step that ends training: what the history says, with validation, and resumed."""

import dataclasses
import os
import signal

import pytest
import torch
from torch.nn import functional as F
from watching import Watch

import rarebit as rb
from rarebit.errors import TrainingInterrupted
from rarebit.models.fm import FM

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=20), rb.data.Field(name="item", rows=9)))
ROWS, BATCH = 40, 16
BATCHES = 3
"""Of 16, 16 and 8 rows."""


def log(rows: int = ROWS, seed: int = 1) -> rb.Dataset:
    chance = torch.Generator().manual_seed(seed)
    ids = [torch.randint(field.rows, (rows,), generator=chance) for field in SCHEMA.fields]
    label = torch.rand(rows, generator=chance) < 0.5
    return rb.Dataset(SCHEMA, torch.stack(ids, dim=1), label=label)


TRAIN, VALID = log(), log(30, seed=2)


class EndAt:
    """Ends training after a step, and remembers which steps it was told of."""

    def __init__(self, last: int | None, *, signal_too: bool = False) -> None:
        self.last, self.told, self.signal_too = last, [], signal_too

    def __call__(self, step: int) -> bool:
        self.told.append(step)
        if step == self.last and self.signal_too:
            os.kill(os.getpid(), signal.SIGTERM)
        return step == self.last


def fitted(end, valid=None, *, epochs: int = 3, **options):
    torch.manual_seed(4)
    model = FM(SCHEMA, dim=3)
    options = {"epochs": epochs, "batch_size": BATCH, "lr": 0.05, "patience": None} | options
    history = rb.fit(
        model,
        TRAIN,
        valid,
        callbacks=[] if end is None else [Watch(end)],
        progress=False,
        **options,
    )
    return model, history


def same_weights(one, other) -> bool:
    found = other.state_dict()
    return all(torch.equal(value, found[name]) for name, value in one.state_dict().items())


def without_times(history):
    records = [
        dataclasses.replace(record, seconds=0.0, samples_per_second=0.0)
        for record in history.epochs
    ]
    return records, history.best_epoch, history.stopped_early


def test_it_is_told_of_every_step_from_one():
    end = EndAt(None)
    _, history = fitted(end)
    assert end.told == list(range(1, 3 * BATCHES + 1))
    assert [record.steps for record in history.epochs] == [BATCHES] * 3
    assert not history.stopped_early


def test_what_returns_nothing_ends_nothing():
    told = []
    model, history = fitted(told.append)
    twin, _ = fitted(None)
    assert len(history.epochs) == 3
    assert same_weights(model, twin)


@pytest.mark.parametrize("valid", [None, VALID], ids=["alone", "validated"])
@pytest.mark.parametrize(
    ("last", "steps"),
    [(1, [1]), (2, [2]), (3, [3]), (4, [3, 1]), (5, [3, 2]), (6, [3, 3]), (9, [3, 3, 3])],
)
def test_training_ends_after_that_step(last, steps, valid):
    end = EndAt(last)
    model, history = fitted(end, valid)
    assert end.told == list(range(1, last + 1))
    assert [record.epoch for record in history.epochs] == list(range(1, len(steps) + 1))
    assert [record.steps for record in history.epochs] == steps
    # the last step of all ends nothing early
    assert history.stopped_early is (last < 9)
    if valid is None:
        assert history.best_epoch is None
        assert [record.valid for record in history.epochs] == [None] * len(steps)
    else:
        best = history.epochs[history.best_epoch - 1]
        assert best.valid.auc == max(record.valid.auc for record in history.epochs)
        assert rb.evaluate(model, VALID).overall == best.valid


def test_the_weights_are_those_after_that_step():
    model, history = fitted(EndAt(5))
    torch.manual_seed(4)
    twin = FM(SCHEMA, dim=3)
    optimizer, losses = rb.optimizer(twin, lr=0.05), []
    bounds = [(0, 16), (16, 32), (32, 40)]
    for epoch, start, stop in [*((1, *b) for b in bounds), *((2, *b) for b in bounds[:2])]:
        batch = TRAIN[TRAIN.order(seed=0, epoch=epoch)[start:stop]]
        loss = F.binary_cross_entropy_with_logits(twin(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), stop - start))
    assert same_weights(model, twin)
    # a mean over the rows that were trained on, and no others
    whole, part = losses[:3], losses[3:]
    for record, made, rows in zip(history.epochs, (whole, part), (40, 32), strict=True):
        expected = sum(loss * n for loss, n in made) / rows
        assert record.train_loss == pytest.approx(expected, rel=1e-6)


def test_the_speed_of_a_part_of_an_epoch_counts_its_rows():
    _, history = fitted(EndAt(5))
    last = history.epochs[-1]
    assert last.samples_per_second == pytest.approx(32 / last.seconds)


def test_an_average_of_weights_is_taken_up_to_that_step():
    model, _ = fitted(EndAt(5), ema_decay=0.5)
    plain, _ = fitted(EndAt(5))
    assert not same_weights(model, plain)


@pytest.mark.parametrize("valid", [None, VALID], ids=["alone", "validated"])
@pytest.mark.parametrize("last", [2, 3, 5, 6, 9])
def test_a_signal_in_the_step_that_ends_training_loses_nothing(tmp_path, last, valid):
    expected, history = fitted(EndAt(last), valid, ema_decay=0.5)
    options = {"folder": tmp_path, "ema_decay": 0.5}
    with pytest.raises(TrainingInterrupted):
        fitted(EndAt(last, signal_too=True), valid, **options)
    end = EndAt(last)
    model, resumed = fitted(end, valid, resume=True, **options)
    assert end.told == []
    assert without_times(resumed) == without_times(history)
    assert same_weights(model, expected)


@pytest.mark.parametrize("stopped", [1, 3, 4])
def test_resumed_it_is_told_of_the_steps_that_are_left(tmp_path, stopped):
    expected, history = fitted(EndAt(5), VALID)

    class StopAt(EndAt):
        def __call__(self, step):
            super().__call__(step)
            if step == stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            return False

    with pytest.raises(TrainingInterrupted):
        fitted(StopAt(None), VALID, folder=tmp_path)
    end = EndAt(5)
    model, resumed = fitted(end, VALID, folder=tmp_path, resume=True)
    assert end.told == list(range(stopped + 1, 6))
    assert without_times(resumed) == without_times(history)
    assert same_weights(model, expected)


def test_a_training_that_was_ended_stays_ended_when_resumed(tmp_path):
    model, history = fitted(EndAt(4), VALID, folder=tmp_path)
    end = EndAt(None)
    again, resumed = fitted(end, VALID, folder=tmp_path, resume=True, epochs=7)
    assert end.told == []
    assert without_times(resumed) == without_times(history)
    assert same_weights(again, model)


def test_early_stopping_counts_a_part_of_an_epoch_as_one():
    _, history = fitted(EndAt(5), VALID, patience=1, lr=1e-300, optimizer="sgd")
    # nothing is learned, so the first epoch is the best and the second stalls
    assert (history.best_epoch, len(history.epochs), history.stopped_early) == (1, 2, True)
