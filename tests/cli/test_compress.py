"""`rarebit compress`: a smaller run with which every other command works, and what each size costs."""

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from capabilities import needs_package

import rarebit as rb
from rarebit.tables.apply import find_sites, table_bytes
from rarebit.training.compress import COMPRESSORS, TrainedRun, compress_run, smallest_size
from rarebit.training.run import read_run

SETTINGS = {
    "model": {"name": "deepfm", "dim": 8, "hidden": [16]},
    "data": {"rows": 4000},
    "training": {"epochs": 1, "lr": 0.01},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a trained run."""
    folder = tmp_path_factory.mktemp("runs") / "clicks"
    settings = rb.RunSettings.from_mapping(SETTINGS)
    rb.run(settings, folder=folder, progress=False, say=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def loaded(trained):
    """Return the same run with its data."""
    return TrainedRun(trained)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_compressed_run_is_scored_like_the_model_in_memory(call, trained):
    before = contents(trained)
    code, out, err = call("compress", trained, "--size", "1/8", "--out", "small")
    assert code == 0, err
    assert contents(trained) == before
    words = ("bytes of tables", "AUC, validation", "AUC, test", "rarest fifth", "difference")
    assert all(word in out for word in words)
    plain = TrainedRun(trained)
    expected = plain.coded([rb.EvidenceCoding(size="1/8")])
    assert table_bytes(expected) <= plain.plain.table_bytes / 8
    code, out, err = call("predict", "--model", "small", "--out", "scores.csv")
    assert code == 0, err
    scores = rb.predict(expected, plain.splits.test).sigmoid().tolist()
    with Path("scores.csv").open() as file:
        found = [float(row["score"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(scores, abs=1e-7)
    values = json.loads(Path("small/run.json").read_text())
    assert values["compressed"]["before"] == asdict(plain.plain)
    assert values["compressed"]["after"]["test_auc"] == values["test"]["overall"]["auc"]
    assert values["table_bytes"] == table_bytes(expected)
    assert read_run("small").methods == (rb.EvidenceCoding(size="1/8"),)
    assert call("diagnose", "small")[0] == 0


def test_tables_with_one_row_for_all_ids_are_named(call, trained):
    code, out, err = call("compress", trained, "--size", "1/250", "--out", "small")
    assert code == 0, err
    named = json.loads(Path("small/run.json").read_text())["compressed"]["one_row"]
    assert named
    shown = ", ".join(name.removeprefix("backbone.tables.") for name in named)
    assert f"Tables left with one row for all ids: {shown}." in out
    for site in find_sites(rb.load_model("small")):
        weight = site.table.weight
        rows = weight if site.table.padding_idx is None else weight[site.table.padding_idx + 1 :]
        assert bool((rows == rows[0]).all()) == (site.info.name in named)


def test_a_loss_is_met_by_the_smallest_size_that_was_tried(call, trained):
    code, _, err = call("compress", trained, "--loss", "0.002", "--out", "small")
    assert code == 0, err
    found = json.loads(Path("small/run.json").read_text())["compressed"]
    assert found["before"]["valid_auc"] - found["after"]["valid_auc"] <= 0.002
    tried = [line for line in err.splitlines() if "of the bytes" in line]
    assert tried[0].startswith("at most 1/2 of the bytes: ")
    assert len(tried) > 4


def test_the_smallest_size_is_found_by_halving_and_bisecting():
    tried = []

    def loss_at(size):
        tried.append(size)
        return 0.0001 / size

    found = smallest_size(loss_at, 0.001)
    assert tried[:4] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert len(tried) == 8
    assert (
        0.1 <= found == min(size for size in tried if 0.0001 / size <= 0.001) < 0.1 * 2 ** (1 / 8)
    )
    assert smallest_size(lambda size: 0.0, 0.001) == 1 / 512
    assert smallest_size(lambda size: 1.0, 0.001) is None


def test_mistakes_are_one_line(call, trained):
    Path("other").mkdir()
    Path("other/run.json").write_text("{}")
    for words, message in (
        ([trained], "how small? Give --size 1/16"),
        ([trained, "--size", "1/8", "--loss", 0.1], "--size and --loss cannot be combined"),
        (
            [trained, "--size", "tiny"],
            'size must be like "1/16", "2 MB" or 0.05, got size=\'tiny\'',
        ),
        ([trained, "--size", "2"], "size must be a share above 0 and at most 1, got size=2.0"),
        ([trained, "--loss", "-1"], "loss must be 0 or more and below 1, got loss=-1.0"),
        (["nowhere", "--size", "1/8"], "'nowhere' holds no run"),
        ([trained, "--size", "1/8", "--out", "other"], "'other' holds a run already"),
        ([trained, "--size", "1/8", "--out", trained], "holds a run already"),
    ):
        code, out, err = call("compress", *words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
    code, _, err = call("compress", trained, "--size", "100B", "--out", "small")
    assert (code, "size must be at least" in err) == (2, True)
    assert not Path("small").exists()
    assert not Path("runs").exists()


def test_a_model_that_is_compressed_already_is_refused(call, trained):
    assert call("compress", trained, "--size", "1/4", "--out", "small")[0] == 0
    code, _, err = call("compress", "small", "--size", "1/8")
    assert code == 2
    assert "the tables of 'small' are compressed already" in err
    assert "(EvidenceCoding(size='1/4')); compress a run with plain tables" in err


def test_a_run_without_its_data_is_refused(call):
    rows = "".join(f"u{n % 9},i{n % 7},{n % 5 % 2}\n" for n in range(300))
    Path("log.csv").write_text(f"user,item,click\n{rows}")
    rb.prepare("log.csv", "log", label="click")
    values = {"model": {"name": "fm"}, "data": {"folder": "log"}, "training": {"epochs": 1}}
    settings = rb.RunSettings.from_mapping(values)
    rb.run(settings, folder="run", progress=False, say=lambda line: None)
    shutil.rmtree("log")
    code, _, err = call("compress", "run", "--size", "1/2")
    assert code == 2
    assert "compressing needs the training data of the run, for its counts: " in err


def test_compressors_are_compared_at_the_same_bytes(loaded):
    plain = loaded.plain.table_bytes
    for compressor in COMPRESSORS:
        model = loaded.matched(compressor, 1 / 4)
        most = plain / 4 * (1 if compressor.sizing == "bytes" else 1.05)
        assert table_bytes(model) <= most, compressor
        if compressor.name != "low rank":  # ranks are whole numbers
            assert table_bytes(model) > 0.9 * plain / (8 if compressor.name == "int4" else 4)
    [low_rank] = [one for one in COMPRESSORS if one.name == "low rank"]
    assert loaded.matched(low_rank, 1 / 64) is None


def test_without_counts_all_rows_of_a_table_have_the_same_precision(loaded):
    counted, uncounted = (loaded.matched(one, 1 / 8) for one in COMPRESSORS[:2])
    classes = [
        [len(site.table.layout.bits) for site in find_sites(model)]
        for model in (counted, uncounted)
    ]
    assert max(classes[0]) > 1 == max(classes[1])


@needs_package("matplotlib")
@pytest.mark.slow
def test_a_frontier_is_printed_and_written_alone_or_with_a_model(call, trained):
    code, out, err = call("compress", trained, "--frontier", "--out", "sizes")
    assert code == 0, err
    assert {path.name for path in Path("sizes").iterdir()} == {
        "frontier.json",
        "frontier.png",
        "frontier.svg",
        "report.html",
    }
    report = json.loads(Path("sizes/frontier.json").read_text())
    for name in {compressor.name for compressor in COMPRESSORS}:
        assert name in out
        assert any(point["compressor"] == name for point in report["points"])
    assert "evidence coding at 1/128" in err
    assert Path("sizes/frontier.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in Path("sizes/frontier.svg").read_bytes()[:1000]
    code, out, err = call("compress", trained, "--frontier", "--size", "1/4", "--out", "sizes")
    assert code == 0, err
    assert "Saved in sizes" in out
    assert call("predict", "--model", "sizes")[0] == 0


@pytest.mark.parametrize("name", ["tail", "multi_embedding"])
def test_runs_with_methods(name, tmp_path):
    values = SETTINGS | {"methods": [{"method": name}]}
    settings = rb.RunSettings.from_mapping(values)
    rb.run(settings, folder=tmp_path / "run", progress=False, say=lambda line: None)
    if name == "multi_embedding":
        with pytest.raises(rb.errors.ModelFileError, match="have embedding sets"):
            TrainedRun(tmp_path / "run")
        return
    run = TrainedRun(tmp_path / "run")
    found = compress_run(run, tmp_path / "small", size=0.25, say=len)
    assert all(table.methods for table in rb.find_tables(found.model))  # first-order weights too
    assert read_run(tmp_path / "small").methods == (rb.Tail(), rb.EvidenceCoding(size=0.25))
    again = rb.load_model(tmp_path / "small")
    assert torch.equal(rb.predict(again, run.splits.test), rb.predict(found.model, run.splits.test))
