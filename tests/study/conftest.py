"""What tests of studies share: records made by hand, and a study without what differs from run to run."""

import json

import pytest

from rarebit.study.runs import RunRecord

TIMES = ("microseconds_a_row", "commit")
"""What is measured, or told of the code: all else of a study is computed, and the same every time."""


@pytest.fixture
def record():
    """Return a function that makes the record of a run; figures that do not matter have some value."""

    def make(seed=0, **figures):
        values = {
            "key": f"run-{seed}",
            "auc": 0.75,
            "logloss": 0.5,
            "rarest_auc": 0.625,
            "valid_auc": 0.7,
            "parameters": 1234,
            "table_bytes": 4000,
            "best_epoch": 2,
            "epochs": 3,
            "microseconds_a_row": 2.0,
            "device": "cpu",
            "torch": "2.6.0",
            "commit": None,
        }
        return RunRecord(seed=seed, **(values | figures))

    return make


def _without_times(values):
    if isinstance(values, dict):
        return {key: _without_times(value) for key, value in values.items() if key not in TIMES}
    return [_without_times(value) for value in values] if isinstance(values, list) else values


@pytest.fixture(scope="session")
def computed():
    """Return a function that reads what a study in a folder computed: its results without times."""

    def read(folder):
        return _without_times(json.loads((folder / "results.json").read_text())["study"])

    return read


@pytest.fixture(scope="session")
def runs_made():
    """Return a function that reads how many runs the last call of a study made."""

    def read(folder):
        return json.loads((folder / "results.json").read_text())["machine"]["runs_made"]

    return read
