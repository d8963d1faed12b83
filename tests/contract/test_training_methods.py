"""What every training method promises, whatever it does around training."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from capabilities import slow_after
from contract.test_methods import TRAINING_METHODS, method_of
from torch import nn

import rarebit as rb
from rarebit.errors import TrainingInterrupted, UnsupportedTableError
from rarebit.row_gradients.lookups import is_watched
from rarebit.technique import technique_name
from rarebit.training.loop import Silence
from rarebit.training.run import start_model, train_model
from rarebit.training.settings import RunSettings, load_splits

SETTINGS = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=rb.SyntheticLog(rows=1500),
    training=rb.Training(epochs=3, batch_size=64, lr=0.02, patience=None),
)
TRAIN, VALID, _ = load_splits(SETTINGS.data)
every_training_method = pytest.mark.parametrize("name", TRAINING_METHODS)


class StopAt(Silence):
    """Asks to stop when so many times ten rows were told of."""

    def __init__(self, call):
        self.left = call

    def advance(self, rows):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(*methods, folder=None, resume=False, progress=False):
    settings = replace(SETTINGS, methods=methods)
    return train_model(
        settings,
        TRAIN,
        VALID,
        folder=folder,
        resume=resume,
        progress=progress,
        say=lambda line: None,
    )


def test_there_is_one():
    assert "harmless-transfer" in TRAINING_METHODS


@every_training_method
def test_it_cannot_be_applied_to_a_table(name):
    model = nn.Sequential(nn.Embedding(200, 4))
    with pytest.raises(UnsupportedTableError, match="which acts around training; pass it to fit"):
        rb.apply_(model, method_of(name), verbose=False)


@every_training_method
def test_a_run_starts_as_without_it(name):
    with_it = replace(SETTINGS, methods=(method_of(name),))
    starts = [
        start_model(settings, TRAIN.schema, say=lambda line: None).state_dict()
        for settings in (SETTINGS, with_it)
    ]
    assert all(torch.equal(starts[0][key], starts[1][key]) for key in starts[0])


@every_training_method
def test_a_trained_model_is_left_as_a_plain_one(name):
    model, history = train(method_of(name))
    plain, _ = train()
    assert [type(module) for module in model.modules()] == [type(m) for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not any(is_watched(module) for module in model.modules())
    hooks = [module for module in model.modules() if module._forward_hooks]
    assert not hooks
    # what is told of the best epoch is what the model is worth
    kept = history.epochs[history.best_epoch - 1].valid
    assert rb.evaluate(model, VALID).overall == kept
    assert set(history.reports) <= {technique_name(method_of(name))}


@every_training_method
@pytest.mark.parametrize("call", slow_after([5, 2, 8]))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(name, call, tmp_path):
    whole, history = train(method_of(name))
    with pytest.raises(TrainingInterrupted):
        train(method_of(name), folder=tmp_path / "run", progress=StopAt(call))
    again, its_history = train(method_of(name), folder=tmp_path / "run", resume=True)
    expected = whole.state_dict()
    assert all(torch.equal(again.state_dict()[key], expected[key]) for key in expected)
    assert its_history.reports == history.reports
