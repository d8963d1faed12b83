"""One stored result of each kind, and a browser."""

from dataclasses import replace

import pytest
from capabilities import BROWSER
from report_kinds import STORED

import rarebit as rb
from rarebit.machine import machine
from rarebit.models.fm import FM
from rarebit.pruning import PruneSettings, prune_run
from rarebit.storage.files import write_json
from rarebit.training.compress import TrainedRun, compress_run, frontier

SETTINGS = rb.RunSettings.from_mapping(
    {
        "model": {"name": "fm", "dim": 4},
        "data": {"rows": 3000},
        "training": {"epochs": 3, "batch_size": 256},
    }
)
QUIET = {"progress": False, "say": lambda line: None}


class Made:
    """Folders as commands leave them, by name, each made when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __truediv__(self, name):
        path = self.folder / name
        if not path.exists():
            getattr(self, name.replace(" ", "_"))(path)
        return path

    def run(self, path):
        """A run with its diagnosis."""
        found = rb.run(SETTINGS, folder=path, **QUIET)
        rb.diagnose(found.model, rb.data.generate(SETTINGS.data)).save(path, plots=False)

    def compressed(self, path):
        """The same compressed, with its frontier."""
        trained = TrainedRun(self / "run")
        compress_run(trained, path, size="1/8", say=lambda line: None)
        points = [vars(point) for point in frontier(trained, sizes=(4, 16))]
        values = {"run": "run", "plain": vars(trained.plain), "points": points}
        write_json(path / "frontier.json", values | {"machine": machine()}, error=ValueError)

    def fresh_study(self, path):
        rb.study(
            path, methods="baseline,low-rank", control="baseline", model={"name": "fm", "dim": 4}, data={"rows": 3000},
            training={"epochs": 3, "batch_size": 256}, seeds=2, trials=2, workers=1, device="cpu", progress=False,
        )  # fmt: skip

    def pruned(self, path):
        one = replace(SETTINGS, training=rb.Training(epochs=1, batch_size=256))
        prune_run(one, PruneSettings(sparsity=(0.5, 0.9)), folder=path, **QUIET)

    def improvement(self, path):
        splits = rb.data.generate(SETTINGS.data)
        rb.improve(
            lambda: FM(splits.train.schema, dim=4), *splits, folder=path, size="1/4", device="cpu",
            training={"epochs": 4, "batch_size": 256}, trials=1, seeds=2, **QUIET,
        )  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("results"))


@pytest.fixture
def kind(request, made):
    """Where the result of a kind is stored."""
    return STORED.get(request.param) or made / request.param


@pytest.fixture(scope="module")  # its event loop would be in the way of other tests
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()
