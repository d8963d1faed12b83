"""A process that is killed while it saves over an older model leaves the old model or the new one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored import sign
from torch import nn

import rarebit as rb
from rarebit.data.prepared import StoredEncoder
from rarebit.models.fm import FM

SCHEMA = rb.data.Schema((rb.data.Field(name="user", rows=9), rb.data.Field(name="item", rows=7)))
# Changes of the disk that Python reports: a kill before each of them, and before each operation of Disk.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def model_of(seed, encoder=None):
    torch.manual_seed(seed)
    schema = SCHEMA if encoder is None else replace(SCHEMA, encoder=StoredEncoder(Path(encoder)))
    return FM(schema, dim=3)


def vocabulary(folder, text):
    folder.mkdir()
    for name in ("encoder.json", "values.parquet"):
        (folder / name).write_text(f"{name}: {text}\n")
    return folder


def as_format_1(folder):
    """Turn a saved model into what an older version wrote."""
    description = json.loads((folder / "model.json").read_text())
    files, parts = description.pop("files"), description.pop("parts")
    (folder / description["tensors"]).rename(folder / "weights.safetensors")
    description |= {"format": 1, "sha256": files[description.pop("tensors")]}
    description["encoder"] = {name.rpartition("/")[2]: files[name] for name in files if "/" in name}
    if parts:
        (folder / parts["encoder"]).rename(folder / "encoder")
    (folder / "model.json").write_text(json.dumps(description))
    sign(folder)


def killed_at(step):
    """Kill this process before a given change of the disk."""
    from rarebit.storage.files import Disk

    left = [step]

    def count():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(change):
        def operation(*arguments):
            count()
            change(*arguments)

        return operation

    for name in [name for name in vars(Disk) if not name.startswith("_")]:
        setattr(Disk, name, counted(getattr(Disk, name)))

    def on_event(event, arguments):
        is_change = event in EVENTS and (
            event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if is_change and "/saves/" in str(arguments[0]):
            count()

    sys.addaudithook(on_event)


def save_and_die(saves, new, encoder):
    """Save over each of the models in turn, in a process that is killed one step later than the last."""
    # what a save imports, it imports here: else every process would, for half a second
    rb.save_model(model_of(int(new), encoder or None), Path(saves).with_name("imports"))
    for step in range(1, 1000):
        folder = Path(saves) / f"{step:03}"
        shutil.copytree(Path(saves).with_name("old"), folder)
        child = os.fork()
        if child == 0:
            killed_at(step)
            rb.save_model(model_of(int(new), encoder or None), folder)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return


def same(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def text_of(model):
    encoder = model.schema.encoder
    return None if encoder is None else (encoder.folder / "encoder.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "old_words", "new_words"),
    [
        (2, "a", "b"),
        *(
            pytest.param(version, *words, marks=pytest.mark.slow)
            for version, *words in [
                *((1, "a", "b"), (1, "a", "a"), (2, "a", "a"), (1, "a", None), (2, "a", None)),
                *((1, None, "b"), (2, None, "b"), (1, None, None), (2, None, None)),
            ]
        ),
    ],
)
def test_a_killed_save_leaves_the_old_model_or_the_new(version, old_words, new_words, tmp_path):
    old_encoder, new_encoder = (
        None if words is None else vocabulary(tmp_path / name, words)
        for name, words in [("old_words", old_words), ("new_words", new_words)]
    )
    old, new = model_of(1, old_encoder), model_of(2, new_encoder)
    rb.save_model(old, tmp_path / "old")
    if version == 1:
        as_format_1(tmp_path / "old")
    (tmp_path / "saves").mkdir()
    subprocess.run(
        [sys.executable, __file__, tmp_path / "saves", "2", new_encoder or ""],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    *killed, finished = sorted((tmp_path / "saves").iterdir())
    are_new = []
    for folder in killed:
        found = rb.load_model(folder)
        are_new.append(same(found, new))
        wanted = new if are_new[-1] else old
        assert same(found, wanted)
        assert text_of(found) == text_of(wanted)
        rb.save_model(new, folder)  # what was left half done is in nobody's way
        assert_is_clean(folder, new)
    assert_is_clean(finished, new)
    assert are_new == sorted(are_new)
    assert set(are_new) == {False, True}
    assert len(killed) > 12


def assert_is_clean(folder, model):
    assert same(rb.load_model(folder), model)
    assert len(list(folder.iterdir())) == (2 if model.schema.encoder is None else 3)


def test_what_is_not_of_the_model_stays(tmp_path):
    """A run keeps its settings and checkpoints in the same folder."""
    for name in ("run.json", "tensors-0123456789abcdef.safetensors", "encoder.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    for _ in range(2):
        rb.save_model(nn.Sequential(nn.Embedding(9, 4)), tmp_path)
    assert before < {path.name for path in tmp_path.iterdir()}


if __name__ == "__main__":
    save_and_die(*sys.argv[1:])
