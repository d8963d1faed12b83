"""A selection on disk: what was written comes back, a kill leaves the old or the new, damage is told."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import sign, tensors_file

from rarebit.data.dataset import Dataset
from rarebit.data.selection import (
    DESCRIPTION,
    CoOccurrence,
    FrequencySplit,
    load_selection,
    save_selection,
    select,
)
from rarebit.errors import DataError
from rarebit.storage.files import Disk, file_checksum


def some_selection(settings=CoOccurrence(drop=0.5, split=FrequencySplit(top=0.4)), mark="abc"):
    data = Dataset.from_columns(
        {"user": [0, 1, 2, 0, 3, 1, 0], "item": [0, 0, 1, 2, 1, 3, 4]}, label=[0.0] * 7
    )
    return select(data, data.counts(), settings, data_checksum=mark)


def tensors_of(selection):
    return {
        (name, part.name): getattr(field, part.name).tolist()
        for name, field in selection.fields.items()
        for part in dataclasses.fields(field)
    }


@pytest.mark.parametrize(
    "settings",
    [
        CoOccurrence(),
        CoOccurrence(threshold=0.5, split=FrequencySplit(threshold=2)),
        FrequencySplit(top=0.5),
    ],
)
def test_what_was_written_comes_back(tmp_path, settings):
    selection = some_selection(settings)
    again = load_selection(save_selection(selection, tmp_path / "new" / "folder"))
    assert (again.settings, again.data_checksum) == (settings, "abc")
    assert list(again.fields) == list(selection.fields)
    assert tensors_of(again) == tensors_of(selection)


def test_a_selection_from_given_ids_comes_back(tmp_path):
    settings = FrequencySplit(ids=(2, 0))
    selection = select(None, torch.tensor([3, 1, 2]), settings)
    again = load_selection(save_selection(selection, tmp_path))
    assert again.settings == settings
    assert tensors_of(again) == tensors_of(selection)


def test_a_new_selection_takes_the_place_of_the_old_one_and_leaves_nothing_of_it(tmp_path):
    save_selection(some_selection(), tmp_path)
    save_selection(some_selection(FrequencySplit()), tmp_path)
    assert load_selection(tmp_path).settings == FrequencySplit()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_selection_of_other_data_is_refused(tmp_path):
    save_selection(some_selection(mark="abc"), tmp_path)
    assert load_selection(tmp_path, data_checksum="abc").data_checksum == "abc"
    with pytest.raises(DataError, match="was made of other data than this; select again"):
        load_selection(tmp_path, data_checksum="abd")


class Killed(BaseException):
    """What no code of ours catches: the process ends here."""


def dies_at(patch, step):
    """Let the process end before its given change of the disk."""
    left = [step]

    def counted(change):
        def run(*arguments, **options):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return change(*arguments, **options)

        return run

    for name in [name for name in vars(Disk) if not name.startswith("_")]:
        patch.setattr(Disk, name, counted(getattr(Disk, name)))


def test_a_process_killed_at_any_moment_leaves_the_old_selection_or_the_new(tmp_path):
    old, new = some_selection(), some_selection(FrequencySplit())
    seen, step = [], 0
    while True:
        folder = save_selection(old, tmp_path / str(step))
        try:
            with pytest.MonkeyPatch.context() as patch:
                dies_at(patch, step)
                save_selection(new, folder)
        except Killed:
            found = load_selection(folder)
            assert found.settings in (old.settings, new.settings)
            seen.append(found.settings == new.settings)
            assert tensors_of(found) == tensors_of(new if seen[-1] else old)
            # what was left half done is in nobody's way
            assert tensors_of(load_selection(save_selection(new, folder))) == tensors_of(new)
            step += 1
        else:
            break
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot write the selection to .*file"):
        save_selection(some_selection(), tmp_path / "file")


def test_damage_is_told(tmp_path):
    save_selection(some_selection(), tmp_path)
    description = (tmp_path / DESCRIPTION).read_text("utf-8")
    for text, message in [
        (description.replace("0.5", "0.6"), "does not match its checksum"),
        (description.replace('"format": 2', '"format": 9'), "in format 9 by Rarebit .*upgrade it"),
        (description[:-20], "is damaged: "),
        ("[]", "does not describe a selection of Rarebit"),
    ]:
        (tmp_path / DESCRIPTION).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_selection(tmp_path)
    (tmp_path / DESCRIPTION).write_text(description, encoding="utf-8")
    tensors_file(tmp_path).write_bytes(tensors_file(tmp_path).read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="safetensors' is damaged or belongs to another save"):
        load_selection(tmp_path)
    tensors_file(tmp_path).unlink()
    with pytest.raises(DataError, match=r"is incomplete: tensors-.* is missing"):
        load_selection(tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    with pytest.raises(DataError, match=r"holds no selection: selection\.json is missing"):
        load_selection(tmp_path)


def rewritten(folder, change):
    """Change the tensors and the description of a selection, with checksums that fit again."""
    description = json.loads((folder / DESCRIPTION).read_text("utf-8"))
    path = tensors_file(folder)
    tensors = load_file(path)
    change(tensors, description)
    save_file(
        {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        },
        path,
    )
    sign(folder, DESCRIPTION, **description | {"files": {path.name: file_checksum(path)}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, _: tensors.update({"0.relatives": tensors["0.relatives"] + 9}),
            "not rows",
        ),
        (lambda tensors, _: tensors.update({"0.weights": tensors["0.weights"][:, :1]}), "not rows"),
        (
            lambda tensors, _: tensors.update({"1.target": tensors["1.target"][1:]}),
            "its target are",
        ),
        (lambda tensors, _: tensors.update({"1.source": tensors["1.counts"]}), "its source are"),
        (lambda tensors, _: tensors.pop("1.counts"), "1.counts"),
        (lambda _, said: said.update(kind="other"), "other"),
        (lambda _, said: said["settings"].update(tip=1), "unknown setting 'tip'"),
        (lambda _, said: said.update(tensors="../../etc/passwd"), "does not describe a selection"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(tmp_path, change, message):
    save_selection(some_selection(), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(DataError, match=message):
        load_selection(tmp_path)
