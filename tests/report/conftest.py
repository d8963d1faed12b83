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


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folders as commands leave them: a run with its diagnosis, the same compressed, a pruning, a study."""
    folder = tmp_path_factory.mktemp("results")
    settings = rb.RunSettings.from_mapping(
        {
            "model": {"name": "fm", "dim": 4},
            "data": {"rows": 3000},
            "training": {"epochs": 3, "batch_size": 256},
        }
    )
    quiet = {"progress": False, "say": lambda line: None}
    found = rb.run(settings, folder=folder / "run", **quiet)
    splits = rb.data.generate(settings.data)
    rb.diagnose(found.model, splits).save(folder / "run", plots=False)
    trained = TrainedRun(folder / "run")
    compress_run(trained, folder / "compressed", size="1/8", say=lambda line: None)
    points = [vars(point) for point in frontier(trained, sizes=(4, 16))]
    values = {"run": "run", "plain": vars(trained.plain), "points": points, "machine": machine()}
    write_json(folder / "compressed" / "frontier.json", values, error=ValueError)
    one = replace(settings, training=rb.Training(epochs=1, batch_size=256))
    prune_run(one, PruneSettings(sparsity=(0.5, 0.9)), folder=folder / "pruned", **quiet)
    rb.study(
        folder / "fresh study", methods="baseline,low-rank", model={"name": "fm", "dim": 4}, data={"rows": 3000},
        training={"epochs": 3, "batch_size": 256}, seeds=2, trials=3, workers=1, device="cpu", progress=False,
    )  # fmt: skip
    rb.improve(
        lambda: FM(splits.train.schema, dim=4), *splits, folder=folder / "improvement", size="1/4",
        training={"epochs": 4, "batch_size": 256}, trials=1, seeds=2, device="cpu", progress=False, say=lambda line: None,
    )  # fmt: skip
    return folder


@pytest.fixture
def kind(request, made):
    """Where the result of a kind is stored."""
    name = request.param
    return STORED.get(name) or made / name


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()
