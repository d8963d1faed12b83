"""The bench of all models: the same data and width for each, and the figures are named."""

import pytest

from rarebit.bench import models
from rarebit.bench._frame import measure
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models import build_model, model_names

OTHERS = [name for name in model_names() if name != "dnn"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(models, "generate", lambda log: generate(SyntheticLog(rows=1000)))
    monkeypatch.setattr(models, "BATCH_SIZE", 32)
    monkeypatch.setattr(
        models,
        "measure",
        lambda sides, budget, warm_up: measure(sides, budget=0, warm_up=0, min_rounds=2),
    )


def test_every_model_has_a_ratio_to_dnn(small):
    said = []
    figures = models.run(said.append)
    assert len(said) == len(OTHERS)
    for name in OTHERS:
        ratio = figures[f"{name}_ms"] / figures[f"dnn_ms_beside_{name}"]
        assert figures[f"ratio_{name}"] == pytest.approx(ratio)
    assert figures["ratio"] == max(figures[f"ratio_{name}"] for name in OTHERS)
    assert figures["ratio"] == figures[f"ratio_{figures['slowest']}"]


def test_all_models_have_the_width_of_dnn_but_ffm(small, monkeypatch):
    built = {}

    def build(name, schema, settings):
        built[name] = build_model(name, schema, settings)
        return built[name]

    monkeypatch.setattr(models, "build_model", build)
    models.run(lambda line: None)
    assert set(built) == set(model_names())
    for name, model in built.items():
        if name not in ("lr", "ffm"):
            assert model.settings["dim"] == models.DIM
    assert built["ffm"].settings["dim"] < models.DIM


def test_the_log_has_the_shape_of_criteo(monkeypatch):
    asked = []

    def stop(log):
        asked.append(log)
        raise InterruptedError

    monkeypatch.setattr(models, "generate", stop)
    with pytest.raises(InterruptedError):
        models.run(print)
    assert (asked[0].preset, models.BATCH_SIZE) == ("criteo", 4096)
