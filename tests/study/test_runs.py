"""Runs on disk: keys that tell runs apart and nothing else, and files that are whole or told."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from capabilities import needs_package

from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import StudyError
from rarebit.methods.forgetting import Forgetting
from rarebit.methods.hashing import Hashing
from rarebit.methods.low_rank import LowRank
from rarebit.storage.files import write_json
from rarebit.study.runs import RunFolder, identify, run_key
from rarebit.training.settings import PreparedLog, RunSettings, Training

BASE = RunSettings(model="fm", model_settings={"dim": 4}, methods=(LowRank(rank=2),))
OTHER_TRAINING = {
    "epochs": 3,
    "batch_size": 99,
    "optimizer": "sgd",
    "tables": "rowwise",
    "lr": 0.5,
    "table_lr": 0.5,
    "weight_decay": 0.5,
    "table_weight_decay": 0.5,
    "threshold_weight_decay": 0.5,
    "decoupled": True,
    "momentum": 0.5,
    "clip_norm": 0.5,
    "ema_decay": 0.5,
    "ema_epochs": 0.5,
    "precision": "bfloat16",
    "compile": True,
    "cuda_graph": False,
    "monitor": "logloss",
    "patience": 9,
    "plateau_factor": 0.5,
    "plateau_patience": 9,
    "one_pass": True,
    "checkpoint_minutes": 0.5,
    "seed": 9,
}
OTHER_LOG = {
    "preset": "criteo",
    "rows": 99,
    "seed": 9,
    "tail_similarity": 0.5,
    "redundancy": 0.5,
    "num_patterns": 9,
    "noise": 0.5,
    "drift": 0.5,
}


def test_every_setting_has_another_value_here():
    assert OTHER_TRAINING.keys() == {field.name for field in dataclasses.fields(Training)}
    assert OTHER_LOG.keys() == {field.name for field in dataclasses.fields(SyntheticLog)}


KEYS = {
    "e579b12133b80f1923c7": {
        "model": {"name": "fm", "dim": 4},
        "data": {"rows": 500, "seed": 3},
        "training": {"epochs": 3, "seed": 7},
    },
    "3f6e2c75fc4f80a01094": {
        "model": {"name": "deepfm", "hidden": [32]},
        "data": {"folder": "anywhere", "checksum": "ab12"},
        "training": {"lr": 0.01, "tables": "rowwise"},
        "methods": [{"method": "mlet", "inner_dim": 64}, {"method": "pruned", "keep": 1000}],
    },
    "aae383a42cea90495497": {
        "model": {"name": "dcn_v2", "dim": 8},
        "training": {"weight_decay": 1e-6, "checkpoint_minutes": 9.0},
        "methods": [
            {"method": "multi_embedding", "num_sets": 2},
            {"method": "harmless_transfer", "loss": "mmd"},
        ],
    },
    "d2208b98edf73e686089": {
        "training": {"patience": 2},
        "methods": [{"method": "shrinkage"}, {"method": "forgetting"}],
    },
}


@pytest.mark.parametrize(("key", "values"), KEYS.items(), ids=["model", "log", "sets", "tail"])
def test_keys_stay_the_same_so_that_existing_studies_resume(key, values):
    assert run_key(RunSettings.from_mapping(values)) == key


def test_the_patience_that_methods_ask_for_is_part_of_the_key():
    def key(patience, *methods):
        training = dataclasses.replace(BASE.training, patience=patience)
        return run_key(dataclasses.replace(BASE, training=training, methods=methods))

    assert key("auto") == key(2) != key(6)
    assert key("auto", Forgetting()) == key(6, Forgetting()) != key(2, Forgetting())


def test_an_average_that_began_at_the_initial_weights_is_another_run():
    averaged = {**KEYS["e579b12133b80f1923c7"], "training": {"ema_decay": 0.9}}
    assert run_key(RunSettings.from_mapping(averaged)) != "fb2e6fd7bb82546e333b"


def others():
    """Return settings that differ from the first in one thing each."""
    for name, value in OTHER_TRAINING.items():
        if name != "checkpoint_minutes":
            training = dataclasses.replace(BASE.training, **{name: value})
            yield dataclasses.replace(BASE, training=training)
    for name, value in OTHER_LOG.items():
        yield dataclasses.replace(BASE, data=dataclasses.replace(BASE.data, **{name: value}))
    for methods in (
        (),
        (LowRank(rank=3),),
        (Hashing(buckets=2),),
        (Hashing(buckets=2), LowRank(rank=2)),
    ):
        yield dataclasses.replace(BASE, methods=methods)
    for checksum in ("a", "b"):
        yield dataclasses.replace(BASE, data=PreparedLog(folder="x", checksum=checksum))
    yield dataclasses.replace(BASE, model="fwfm")
    yield dataclasses.replace(BASE, model_settings={"dim": 5})
    yield dataclasses.replace(BASE, model_settings={"dim": 4, "std": 0.5})


def test_each_setting_changes_the_key():
    keys = [run_key(BASE), *map(run_key, others())]
    assert len(set(keys)) == len(keys) == 1 + 23 + 8 + 4 + 2 + 3


def test_what_changes_nothing_is_not_in_the_key():
    often = dataclasses.replace(BASE.training, checkpoint_minutes=0.5)
    assert run_key(dataclasses.replace(BASE, training=often)) == run_key(BASE)
    here, there = (
        dataclasses.replace(BASE, data=PreparedLog(folder=folder, checksum="a"))
        for folder in ("here", "there")
    )
    assert run_key(here) == run_key(there)


def test_a_key_is_the_same_after_a_round_through_json():
    for settings in (BASE, *others()):
        again = RunSettings.from_mapping(json.loads(json.dumps(settings.to_mapping())))
        assert run_key(again) == run_key(settings)


@needs_package("polars")
def test_a_log_is_known_by_its_checksum_wherever_it_lies(tmp_path, monkeypatch):
    from rarebit.data.prepare import prepare

    lines = [f"u{number % 7},i{number % 5},{number % 2}" for number in range(60)]
    for name, rows in {"one": lines, "two": [*lines, "u1,i1,1"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item,click", *rows]))
        prepare(tmp_path / f"{name}.csv", tmp_path / name, label="click")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)

    def key(folder):
        return run_key(identify(dataclasses.replace(BASE, data=PreparedLog(folder=str(folder)))))

    assert key("one") == key(tmp_path / "one") == key("copy") != key("two")
    found = identify(dataclasses.replace(BASE, data=PreparedLog(folder="one"))).data
    assert found.folder == str(tmp_path / "one")
    assert identify(BASE) == BASE


@pytest.fixture
def finished(tmp_path, record):
    """A finished run in its folder, with its record and scores."""
    folder, scores = RunFolder(tmp_path, run_key(BASE)), torch.tensor([0.5, -1.25, 3.0])
    result = record(3, key=folder.key, rarest_auc=None)
    folder.write(BASE, result, scores)
    return folder, result, scores


def test_what_is_written_is_read(finished):
    folder, result, scores = finished
    assert folder.read() == result
    assert np.array_equal(folder.scores(), scores.numpy())
    assert folder.scores().dtype == np.float32
    stored = json.loads((folder.path / "result.json").read_text())["settings"]
    assert RunSettings.from_mapping(stored) == BASE
    assert sorted(path.name for path in folder.path.iterdir()) == ["result.json", "scores.npy"]


def test_a_run_is_finished_by_its_result(finished, tmp_path):
    folder, _, _ = finished
    (folder.path / "result.json").unlink()
    assert folder.read() is None
    assert RunFolder(tmp_path, "another").read() is None


def test_a_run_whose_scores_cannot_be_written_has_no_result(record, tmp_path):
    folder = RunFolder(tmp_path, run_key(BASE))
    (folder.path / "scores.npy").mkdir(parents=True)  # where a file should be
    with pytest.raises(StudyError, match=r"scores\.npy"):
        folder.write(BASE, record(3, key=folder.key), torch.zeros(3))
    assert folder.read() is None


def damage(values):
    """Return texts that are no result of this run, each with what is told of it."""
    result = values["result"]
    yield "", "Expecting value"
    yield json.dumps(values)[:50], ""
    yield "[]", "it is not a JSON object"
    yield '{"settings": {}}', "'result'"
    yield '{"result": 3}', ""
    yield json.dumps({"result": result | {"key": "x"}}), "it is the result of run 'x'"
    yield json.dumps({"result": result | {"auc": "high"}}), "auc must be float, got 'high'"
    yield json.dumps({"result": result | {"auc": float("nan")}}), "auc must be finite, got nan"
    yield json.dumps({"result": {"auc": 0.5}}), "RunRecord needs key"
    yield json.dumps({"result": result | {"more": 1}}), "unknown setting 'more'"


@pytest.mark.parametrize("number", range(10))
def test_a_damaged_or_foreign_result_is_told(finished, number):
    folder, _, _ = finished
    path = folder.path / "result.json"
    text, message = list(damage(json.loads(path.read_text())))[number]
    path.write_text(text)
    with pytest.raises(StudyError, match=f"cannot be read: .*{message}.*remove the folder") as told:
        folder.read()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("content", [None, b"", b"no array"])
def test_damaged_scores_are_told(finished, content):
    path = finished[0].path / "scores.npy"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        StudyError, match=r"scores of a run in .* cannot be read.*remove the folder"
    ):
        finished[0].scores()


@pytest.mark.parametrize("name", ["auc", "logloss", "valid_auc", "microseconds_a_row"])
def test_a_figure_is_a_finite_number(record, name):
    with pytest.raises(StudyError, match=f"{name} of run run-0 is inf"):
        record(0, **{name: float("inf")})


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write"):
        write_json(tmp_path / "file" / "result.json", {}, error=StudyError)


def test_a_setting_that_is_given_its_default_is_the_same_run():
    plain = {"model": {"name": "fm"}, "data": {"rows": 500}, "training": {"epochs": 3}}
    said = {**plain, "training": {"epochs": 3, "momentum": 0.0}, "data": {"rows": 500, "seed": 0}}
    said["methods"] = [{"method": "low_rank", "rank": 2, "after_training": False}]
    plain["methods"] = [{"method": "low_rank", "rank": 2}]
    one, other = (run_key(RunSettings.from_mapping(values)) for values in (plain, said))
    # what is no default, and nothing else: a setting that is added later leaves the key as it is
    told = {"format": 1, **plain, "methods": ["low-rank:rank=2"]}
    written = json.dumps(told, sort_keys=True).encode()
    assert one == other == hashlib.sha256(written).hexdigest()[:20]
