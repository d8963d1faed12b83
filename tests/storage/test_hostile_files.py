"""Whatever a stored file or a settings file holds, reading it ends with one of our errors."""

import json
from contextlib import suppress

import pytest

import rarebit as rb
from rarebit.data.prepared import PreparedFolder
from rarebit.errors import DataError, RarebitError, SettingsError
from rarebit.pruning.pruned import read_prune
from rarebit.settings import read_toml
from rarebit.study.results import read_result
from rarebit.study.runs import RunFolder
from rarebit.technique import parse_techniques
from rarebit.training.run import read_reports, read_run
from rarebit.training.settings import RunSettings, Training

READERS = {
    "run.json": [read_run, read_reports],
    "prune.json": [read_prune],
    "results.json": [read_result],
    "runs/key/result.json": [lambda folder: RunFolder(folder, "key").read()],
    "manifest.json": [PreparedFolder, rb.Dataset.open],
    "model.json": [rb.load_model],
    "ticket.json": [rb.pruning.load_ticket],
    "settings.toml": [lambda folder: RunSettings.from_mapping(read_toml(folder / "settings.toml"))],
}
HOSTILE = {
    "deep list": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "deep table": "a = " + "[" * 100_000,
    "long number": '{"settings": ' + "9" * 5000 + "}",
    "long number in toml": "training.seed = " + "9" * 5000,
    "long hexadecimal number": "training.seed = 0x" + "f" * 5000,
    "settings in a list": '{"settings": [1], "pruning": [1], "study": [1], "result": [1], "reports": [1]}',
    "methods that are none": '{"settings": {"methods": 7}}',
    "a method that is none": '{"settings": {"methods": [7]}}',
    "a list": "[1]",
    "a number": "1",
    "nothing": "",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("name", READERS)
def test_hostile_content_is_our_own_error(name, content, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read, *others = READERS[name]
    if (name, content) == ("settings.toml", ""):
        assert read(tmp_path) == RunSettings()
        return
    with pytest.raises(RarebitError):
        read(tmp_path)
    for other in others:
        with suppress(RarebitError):
            other(tmp_path)


@pytest.mark.parametrize("seed", [2**64, -(2**70), 10**5000], ids=range(3))
def test_numbers_beyond_64_bits_are_refused_by_name(seed):
    with pytest.raises(SettingsError, match="seed must fit in 64 bits"):
        Training(seed=seed)
    with pytest.raises(SettingsError, match="seed must fit in 64 bits"):
        RunSettings.from_mapping({"data": {"seed": seed}})


def test_a_long_or_deep_value_of_a_method_is_refused():
    for value in ("9" * 5000, "[" * 100_000):
        with pytest.raises(SettingsError):
            parse_techniques(f"hashing:buckets={value}")


def test_files_of_a_prepared_log_without_a_checksum_are_refused(tmp_path):
    from rarebit.data.prepared import OWN
    from rarebit.storage.files import own_checksum

    log = tmp_path / "log.csv"
    log.write_text("user,click\n" + "ann,0\nbob,1\n" * 20)
    rb.prepare(log, tmp_path / "log", label="click")
    manifest = json.loads((tmp_path / "log" / "manifest.json").read_text())
    del manifest["files"]["ids.npy"]["sha256"]
    manifest[OWN] = own_checksum(manifest, OWN)
    (tmp_path / "log" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is damaged"):
        rb.Dataset.open(tmp_path / "log")
