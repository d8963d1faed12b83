"""One training step of every model, beside DNN's of the same width.

    dnn       d = 16, two layers of 400: what all deep models have at least
    a model   the same width and its own defaults; FFM keeps its width a pair of fields

`ratio_<model>` is the model's time over DNN's, `ratio` the largest of them. Models are measured one after
the other, each in turn with DNN, so that both meet the same seconds and two are in memory at a time.

All are float32, on the same data of Criteo's shape (39 fields, 967,795 values), in batches of 4096,
with lazy Adam. A measured unit is one step, getting its batch included.
"""

import inspect
from collections.abc import Callable

import torch

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure
from rarebit.bench.train import sliced
from rarebit.data.dataset import Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models import build_model, model_class, model_names
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["run"]

ROWS = 102_400
DIM, BATCH_SIZE, LR = 16, 4096, 1e-3
REFERENCE = "dnn"
BUDGET = 7.0
"""Seconds for each model."""


def run(say: Say) -> BenchResult:
    """Measure a step of each model in turn with DNN's."""
    data = generate(SyntheticLog(preset="criteo", rows=ROWS)).train
    reference = _step(REFERENCE, data)
    figures: BenchResult = {
        "ratio": None,
        "ratio_of": "time of the slowest model's step / time of DNN's step",
    }
    ratios = {}
    for name in [name for name in model_names() if name != REFERENCE]:
        load = OtherLoad()
        times = measure({REFERENCE: reference, name: _step(name, data)}, budget=BUDGET, warm_up=1)
        ratios[name] = times[name].median / times[REFERENCE].median
        figures[f"ratio_{name}"] = ratios[name]
        figures[f"{name}_ms"] = 1000 * times[name].median
        figures[f"{name}_iqr_ms"] = 1000 * times[name].iqr
        figures[f"{REFERENCE}_ms_beside_{name}"] = 1000 * times[REFERENCE].median
        figures[f"other_load_{name}"] = load.share()
        say(f"models: {name} {ratios[name]:.2f} times {REFERENCE}")
    figures["slowest"] = max(ratios, key=ratios.__getitem__)
    figures["ratio"] = max(ratios.values())
    return figures


def _step(name: str, data: Dataset) -> Callable[[], None]:
    torch.manual_seed(0)
    # A row of FFM's table is as many times as wide as there are fields: it keeps its own width.
    has_width = "dim" in inspect.signature(model_class(name)).parameters and name != "ffm"
    model = build_model(name, data.schema, {"dim": DIM} if has_width else {})
    step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
    batches = sliced(data, BATCH_SIZE)
    return lambda: step(next(batches))
