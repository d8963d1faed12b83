"""The side-by-side measurement: the same rows for all, the right clock, the right ratio."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rarebit as rb
from rarebit.models.deepfm import DeepFM

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load(ROOT / "benchmarks/peers.py")
shared = load(ROOT / "benchmarks/peers/_shared.py")

ROWS = 1000
JOB = {"dim": 2, "hidden": [8], "lr": 1e-2, "batch_size": 256, "epochs": 2}


@pytest.fixture(scope="module")
def splits():
    return rb.data.generate(rb.data.SyntheticLog(preset="criteo", rows=ROWS * 10 // 8))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a folder with a small job, and what its held-out scores are compared with."""
    folder = tmp_path_factory.mktemp("job")
    return folder, peers.write_job(folder, ROWS, JOB)


def read(folder, options=None):
    values = json.loads((folder / "job.json").read_text())
    return shared.Job(folder=folder, options=options or {}, **values)


def test_the_rows_written_are_those_of_the_log(job, splits):
    ids, label = read(job[0]).rows("train")
    assert ids.dtype == np.int32
    assert np.array_equal(ids, splits.train.ids.numpy())
    assert np.array_equal(label, splits.train.label.numpy())


def test_held_out_rows_are_those_after_the_training_rows(job, splits):
    ids, label = read(job[0]).rows("held_out")
    assert np.array_equal(ids, torch.cat([splits.valid.ids, splits.test.ids]).numpy())
    assert np.array_equal(label, job[1].label.numpy())
    assert len(label) == 250


def test_columns_are_those_of_the_ids_by_name(job, splits):
    columns, _ = read(job[0]).columns("train")
    assert list(columns) == [field.name for field in splits.train.schema.fields]
    for name, column in columns.items():
        assert np.array_equal(column, splits.train[:][name].numpy())


def test_the_full_job_has_the_sizes_that_are_stated(job):
    rows = read(job[0]).fields.values()
    assert len(rows) == 39
    assert sum(rows) - 3 * 39 == 967_795  # less the reserved ids of each field


def test_the_ceiling_is_that_of_the_true_chances(job):
    label, chance = job[1].label.numpy(), job[1].probability.numpy()
    clicked, passed = chance[label == 1][:, None], chance[label == 0][None, :]
    pairs = (clicked > passed) + 0.5 * (clicked == passed)
    assert job[1].ceiling()["auc"] == pytest.approx(pairs.mean(), abs=1e-12)


@pytest.mark.slow
@pytest.mark.threads(2)
def test_ours_is_what_fit_gives(job, splits, monkeypatch):
    folder, held_out = job
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    result = peers.train(folder, sys.executable, peers.SIDES[peers.DENSE], held_out)

    torch.manual_seed(0)
    model = DeepFM(splits.train.schema, dim=2, hidden=[8])
    history = rb.fit(
        model, splits.train, epochs=2, batch_size=256, lr=1e-2, patience=None, progress=False
    )
    assert result["train_loss"] == pytest.approx([e.train_loss for e in history.epochs], rel=1e-5)
    ids = torch.cat([splits.valid.ids, splits.test.ids])
    expected = rb.evaluate(model, rb.Dataset(splits.train.schema, ids, label=held_out.label)).auc
    assert result["auc"][-1] == pytest.approx(expected, abs=1e-3)
    assert len(result["auc"]) == len(result["epoch_seconds"]) == 2
    assert result["threads"] == 2
    assert result["settings"]["fit"]["batch_size"] == 256


@pytest.mark.slow
def test_a_script_that_fails_is_told(job, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    side = peers.Side("rarebit", {"no_such_setting": 1}, "wrong")
    with pytest.raises(SystemExit, match=r"(?s)rarebit_fit\.py failed:.*no_such_setting"):
        peers.train(job[0], sys.executable, side, job[1])


def test_the_clock_leaves_out_what_lies_between_epochs(tmp_path):
    times = iter([10.0, 14.0, 100.0, 103.0])
    recorder = shared.Recorder(tmp_path, clock=lambda: next(times))
    for loss in (0.7, 0.6):
        recorder.start()
        recorder.finish(loss, lambda: np.array([[0.5], [0.25]]))
    recorder.write({"x": 1}, "numpy")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["epoch_seconds"] == [4.0, 3.0]
    assert result["train_loss"] == [0.7, 0.6]
    assert result["versions"] == {"numpy": np.__version__}
    assert np.load(tmp_path / "scores_2.npy").tolist() == [0.5, 0.25]


def test_the_peak_is_read_from_the_system(tmp_path):
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9999 kB\nVmHWM:\t  306704 kB\nVmRSS:\t 1 kB\n")
    assert shared.peak_memory_mb(status) == 299
    assert shared.peak_memory_mb(tmp_path / "nothing") is None


def test_the_speed_is_the_median_of_the_last_epochs():
    runs = [{"epoch_seconds": [9.0, seconds]} for seconds in (2.0, 5.0, 1.0)]
    assert peers.speed(100, runs) == 50.0


def test_a_ratio_is_to_the_fastest_side_of_a_peer():
    speeds = {"fuxictr": 10.0, "fuxictr, worker": 20.0, "deepctr": 25.0, peers.OURS: 100.0}
    found = peers.ratios(speeds)
    assert (found["ratio_fuxictr"], found["ratio_deepctr"]) == (5.0, 4.0)
    assert "lazy" in found["ratio_of"]


@pytest.mark.parametrize("speeds", [{"fuxictr": 10.0, "deepctr": 10.0}, {peers.OURS: 10.0}])
def test_no_ratio_without_both_sides(speeds):
    found = peers.ratios(speeds)
    assert (found["ratio_fuxictr"], found["ratio_deepctr"]) == (None, None)


def test_the_report_has_ratios_and_every_round(job):
    same = {"peak_memory_mb": 1, "train_loss": [0.6, 0.5], "auc": [0.7, 0.8], "other_load": None}
    same |= {"threads": 2, "versions": {}, "settings": {}}
    seconds = {"fuxictr": 4.0, "deepctr": 2.0, peers.OURS: 1.0}
    runs = {side: 2 * [same | {"epoch_seconds": [9.0, x]}] for side, x in seconds.items()}
    report = peers.report_of(runs, 100, job[1])
    assert (report["ratio_fuxictr"], report["ratio_deepctr"]) == (4.0, 2.0)
    assert report["samples_per_second"] == {"fuxictr": 25, "deepctr": 50, peers.OURS: 100}
    assert report["sides"]["deepctr"]["rounds"][1]["epoch_seconds"] == [9.0, 2.0]
    assert "lazy" in report["sides"][peers.OURS]["description"]
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("ours", "mean", "within"),
    [([0.81, 0.79], 0.0, True), ([0.8005, 0.8005], 0.0005, True), ([0.79, 0.80], -0.005, False)],
)
def test_differences_are_paired_by_seed(ours, mean, within):
    found = peers.differences(ours, [0.80, 0.80])
    assert found["mean"] == pytest.approx(mean, abs=1e-12)
    assert found["each"] == pytest.approx([x - 0.80 for x in ours])
    assert found["within_bar"] is within
