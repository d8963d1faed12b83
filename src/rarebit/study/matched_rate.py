"""How much faster a method moves the rows of a table than plain training does.

A method that trains a table in another form may be no more than a larger learning rate. Under SGD methods
say by themselves how much larger; under Adam and Adagrad it is measured: both models make the same hundred
steps from the same seed, and the lengths are compared by which the rows they looked up have moved.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Dataset
from rarebit.data.order import shuffled_order
from rarebit.errors import StudyError
from rarebit.storage.files import write_json
from rarebit.study.runs import run_key
from rarebit.tables.find import find_sites
from rarebit.tables.table import full_table
from rarebit.training.fit import fit
from rarebit.training.run import start_model
from rarebit.training.settings import RunSettings

__all__ = ["KnownRates", "rate_multiplier"]

STEPS = 100


class KnownRates:
    """How much faster runs move rows: measured once, and kept in a file.

    The figure is part of the settings of runs, so a study that goes on must have the same.
    """

    def __init__(self, path: Path, train: Dataset) -> None:
        self.path, self.train = path, train

    def __call__(self, settings: RunSettings) -> float:
        """Return the factor of a run's methods, to two digits."""
        if settings.training.optimizer == "sgd":
            return math.prod(method.rate_under_sgd for method in settings.methods)
        key, known = run_key(settings), self._read()
        if key not in known:
            known[key] = float(f"{rate_multiplier(settings, self.train):.2g}")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, known, error=StudyError)
        return known[key]

    def _read(self) -> dict[str, float]:
        try:
            values = json.loads(self.path.read_text("utf-8"))
            return {str(key): float(value) for key, value in values.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise StudyError(f"{str(self.path)!r} cannot be read: {error}; remove it") from None


def rate_multiplier(settings: RunSettings, train: Dataset, *, steps: int = STEPS) -> float:
    """Return how many times as far rows move with a run's methods as without them, in the median.

    >>> from rarebit import SyntheticLog, generate
    >>> train = generate(SyntheticLog(rows=2000)).train
    >>> run = RunSettings.from_mapping({"model": {"name": "fm", "dim": 4}})
    >>> rate_multiplier(run, train, steps=2)
    1.0
    """
    rows = min(steps * settings.training.batch_size, len(train))
    order = shuffled_order(len(train), seed=settings.training.seed, epoch=1)[:rows]
    batch = train[order]
    first = Dataset(train.schema, batch.ids, batch.numeric, batch.label)
    plain = dataclasses.replace(settings, methods=())
    with torch.random.fork_rng(devices=[]):
        theirs, ours = (_distances(run, first) for run in (plain, settings))
    return float(ours.median() / theirs.median())


def _distances(settings: RunSettings, train: Dataset) -> Tensor:
    """Return by how much each row that training looks up moves, over all tables wider than 1."""
    model = start_model(settings, train.schema, say=_say_nothing)
    before = _tables(model)
    fit(model, train, settings=dataclasses.replace(settings.training, epochs=1), progress=False)
    after = _tables(model)
    seen = {field.name: _ids(train, field.name) for field in train.schema.table_fields}
    moved = [
        (after[name] - table)[seen[name.rpartition(".")[2]]].norm(dim=1)
        for name, table in before.items()
    ]
    return torch.cat(moved)


def _tables(model: nn.Module) -> dict[str, Tensor]:
    return {
        site.info.name: full_table(site.table).clone()
        for site in find_sites(model)
        if site.info.width > 1
    }


def _ids(data: Dataset, field: str) -> Tensor:
    ids: Tensor = data.ids[:, data.schema.slots[field]].long().unique()
    return ids


def _say_nothing(line: str) -> None:
    del line
