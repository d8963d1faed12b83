"""The selection that is kept with a prepared log: made once, by one of several processes, or by nobody."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capabilities import needs

import rarebit as rb
from rarebit.data.dataset import Dataset
from rarebit.data.selection import (
    SELECTIONS,
    CoOccurrence,
    FrequencySplit,
    Selection,
    load_selection,
    save_selection,
    select,
    stored_selection,
)

SETTINGS = CoOccurrence(split=FrequencySplit(top=0.4), drop=0.5)


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = {name: torch.randint(9, (60,), generator=generator).tolist() for name in ("user", "item")}
    return Dataset.from_columns(ids, label=[0.0, 1.0] * 30)


def ask(folder, train=None, settings=SETTINGS, *, fields=("user", "item"), mark="abc"):
    return stored_selection(
        rows() if train is None else train,
        settings,
        fields=list(fields),
        folder=folder,
        data_checksum=mark,
    )


def tensors(selection):
    return {
        name: [part.tolist() for part in vars(field).values()]
        for name, field in selection.fields.items()
    }


def kept_in(folder):
    return sorted(path.name for path in (folder / SELECTIONS).iterdir())


def mark_kept(folder):
    """Change what is kept so that it is told from what would be made, and return that."""
    [name] = kept_in(folder)
    found = load_selection(folder / SELECTIONS / name)
    fields = {
        field: replace(part, target=torch.zeros_like(part.target))
        for field, part in found.fields.items()
    }
    changed = Selection(fields, found.settings, found.data_checksum)
    save_selection(changed, folder / SELECTIONS / name)
    return changed


@pytest.mark.parametrize("settings", [SETTINGS, FrequencySplit()])
def test_it_is_what_select_returns_with_or_without_a_folder(tmp_path, settings):
    train = rows()
    expected = tensors(select(train, train.counts(), settings))
    for folder in (None, tmp_path, tmp_path):
        found = ask(folder, settings=settings)
        assert tensors(found) == expected
        assert (found.settings, found.data_checksum) == (settings, "abc")
    assert len(kept_in(tmp_path)) == 1


def test_what_is_kept_is_used(tmp_path):
    ask(tmp_path)
    assert tensors(ask(tmp_path)) != tensors(mark_kept(tmp_path))
    assert not any(part.target.any() for part in ask(tmp_path).fields.values())


def test_other_settings_and_fields_have_places_of_their_own(tmp_path):
    ask(tmp_path)
    ask(tmp_path, settings=replace(SETTINGS, drop=0.0))
    ask(tmp_path, settings=FrequencySplit())
    assert list(ask(tmp_path, fields=("user",)).fields) == ["user"]
    assert len(kept_in(tmp_path)) == 4


def test_of_a_log_that_was_prepared_anew_it_is_made_anew(tmp_path):
    ask(tmp_path)
    mark_kept(tmp_path)
    other = rows(seed=1)
    expected = tensors(select(other, other.counts(), SETTINGS))
    assert tensors(ask(tmp_path, other, mark="new")) == expected
    assert load_selection(tmp_path / SELECTIONS / kept_in(tmp_path)[0]).data_checksum == "new"


def test_values_seen_as_often_in_another_log_are_not_taken_for_it(tmp_path):
    expected = tensors(ask(tmp_path))
    mark_kept(tmp_path)
    assert tensors(ask(tmp_path, mark="new")) == expected


def test_other_rows_under_the_same_mark_are_not_taken_for_it(tmp_path):
    ask(tmp_path)
    part = rows(seed=1)
    assert tensors(ask(tmp_path, part)) == tensors(select(part, part.counts(), SETTINGS))


def test_a_damaged_one_is_made_anew(tmp_path):
    expected = tensors(ask(tmp_path))
    [name] = kept_in(tmp_path)
    [file] = (tmp_path / SELECTIONS / name).glob("*.safetensors")
    file.write_bytes(b"nothing")
    assert tensors(ask(tmp_path)) == expected
    assert tensors(load_selection(tmp_path / SELECTIONS / name)) == expected
    assert kept_in(tmp_path) == [name], "something half written stays"


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_stop(tmp_path):
    (tmp_path / SELECTIONS).write_text("in the way")
    assert tensors(ask(tmp_path)) == tensors(ask(None))
    assert (tmp_path / SELECTIONS).read_text() == "in the way"


@needs("file permissions", os.geteuid() != 0, "root may write anywhere")
def test_neither_is_one_that_is_read_only(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert tensors(ask(tmp_path)) == tensors(ask(None))
    finally:
        tmp_path.chmod(0o700)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
from data.test_stored_selection import Path, ask, tensors
print(tensors(ask(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_several_processes_at_once_leave_one_that_is_whole(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1])}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    told = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert told == {f"{tensors(ask(None))}\n"}
    [name] = kept_in(tmp_path)
    assert tensors(load_selection(tmp_path / SELECTIONS / name)) == tensors(ask(None))
