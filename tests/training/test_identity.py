"""What is told apart: every value of the data, the model's shape, settings, and the environment."""

import copy
import dataclasses
import json

import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rarebit import Dataset, Hashing, LowRank, Training, apply_
from rarebit.data import Field, Schema
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.training.checkpoints import (
    BLOCK,
    CONSEQUENCES,
    MAY_CHANGE,
    _checksum,
    _keys,
    describe_environment,
    describe_run,
    differences,
    environment_warnings,
)
from rarebit.training.optimizers import row_kernel

SCHEMA = Schema(
    (
        Field(name="user", rows=9),
        Field(name="tags", kind="multi", rows=7, max_length=2),
        Field(name="age", kind="numeric"),
    )
)


def some_data(n=24, seed=0, schema=SCHEMA):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (n, 3), generator=generator)
    numbers = torch.randn(n, 1, generator=generator)
    return Dataset(schema, ids, numbers, torch.arange(n) % 2)


def run(model=None, train=None, valid=None, **settings):
    model = FM(SCHEMA, dim=3) if model is None else model
    return describe_run(model, train or some_data(), valid, Training(**settings))


def through_json(value):
    return json.loads(json.dumps(value))


def test_the_same_run_has_no_differences_also_after_json():
    model = DeepFM(SCHEMA, dim=3, hidden=(4,), batch_norm=True)
    apply_(model, Hashing(buckets=4), verbose=False)
    described = run(model, valid=some_data(8), lr=0.1)
    twin = run(copy.deepcopy(model), some_data(), some_data(8), lr=0.1)
    assert differences(through_json(described), twin) == []
    assert through_json(described) == described


def test_weights_do_not_matter_but_shapes_do():
    assert differences(run(FM(SCHEMA, dim=3)), run(FM(SCHEMA, dim=3))) == []
    lines = differences(run(FM(SCHEMA, dim=3)), run(FM(SCHEMA, dim=4)))
    assert any(line.endswith("was float32 (16, 3), now float32 (16, 4)") for line in lines)
    assert all(line.startswith("model.parameters.backbone.") for line in lines)


def test_another_precision_class_and_buffer_are_told():
    lines = differences(run(nn.Linear(2, 1)), run(nn.Linear(2, 1).double()))
    assert lines == [
        "model.parameters.weight was float32 (1, 2), now float64 (1, 2)",
        "model.parameters.bias was float32 (1,), now float64 (1,)",
    ]
    wide, flat = nn.Conv1d(1, 1, 2), nn.ConvTranspose1d(1, 1, 2)
    assert differences(run(wide), run(flat)) == ["model.class was Conv1d, now ConvTranspose1d"]
    with_buffer = nn.Linear(2, 1)
    with_buffer.register_buffer("mean", torch.zeros(3))
    assert differences(run(with_buffer), run(nn.Linear(2, 1))) == [
        "model.buffers.mean was float32 (3,), now not there"
    ]


def test_methods_and_frozen_tables_are_told():
    plain, hashed, frozen = (FM(SCHEMA, dim=3) for _ in range(3))
    apply_(hashed, LowRank(rank=3), where=lambda t: t.field == "user", verbose=False)
    lines = differences(run(hashed), run(plain))
    assert "{'method': 'LowRank', 'rank': 3}" in " ".join(lines)
    other = FM(SCHEMA, dim=3)
    apply_(other, LowRank(rank=2), where=lambda t: t.field == "user", verbose=False)
    assert any(
        "methods.backbone.tables.user" in line for line in differences(run(hashed), run(other))
    )
    for parameter in frozen.backbone.parameters():
        parameter.requires_grad_(requires_grad=False)
    (line, *_) = differences(run(plain), run(frozen))
    assert line == "model.frozen was [], now ['backbone.tables.user', 'backbone.tables.tags']"


def test_a_wholly_other_model_gives_few_lines():
    lines = differences(run(FM(SCHEMA, dim=3)), run(DeepFM(SCHEMA, dim=3, hidden=[4] * 9)))
    assert lines[0] == "model.class was FM, now DeepFM"
    assert lines[-1] == "and 15 more of the model"
    assert len(lines) == 7


def test_settings_are_told_but_for_those_that_may_change():
    saved, now = run(lr=0.001, epochs=2, patience=1), run(lr=0.01, epochs=9, patience=None)
    assert differences(saved, now) == ["settings.lr was 0.001, now 0.01"]
    for name in MAY_CHANGE:
        assert name in {field.name for field in dataclasses.fields(Training)}


def test_a_setting_of_a_newer_version_was_at_its_default():
    saved = run()
    del saved["settings"]["momentum"]
    assert differences(saved, run()) == []
    assert differences(saved, run(momentum=0.5)) == ["settings.momentum was 0.0, now 0.5"]
    saved["settings"]["magic"] = 3
    assert differences(saved, run()) == ["settings.magic was 3, now not there"]


def test_other_data_is_told_in_words():
    saved = run(train=some_data(1000), valid=some_data(8))
    assert differences(saved, run(train=some_data(900), valid=some_data(8))) == [
        "the training data has 900 rows, it had 1000"
    ]
    assert differences(saved, run(train=some_data(1000), valid=some_data(8, seed=1))) == [
        "the validation data has as many rows as before, but its values differ or lie in another order"
    ]
    fields = (*SCHEMA.fields[:2], Field(name="height", kind="numeric"))
    renamed = some_data(1000, schema=Schema(fields))
    assert differences(saved, run(train=renamed, valid=some_data(8))) == [
        "the training data has other fields"
    ]
    assert differences(saved, run(train=some_data(1000))) == [
        "there is no validation data, there was"
    ]
    assert differences(run(), run(valid=some_data(8))) == ["there was no validation data"]


@pytest.mark.parametrize("saved", [{}, {"model": 3, "settings": []}, {"train": "x", "valid": 1}])
def test_a_description_that_is_nonsense_is_another_run(saved):
    assert differences(saved, run()) != []


def naive_checksum(arrays):
    """The sum in Python's whole numbers, value by value."""
    total = 0
    for name, array in arrays.items():
        columns = array[0].numel() if len(array) else 0
        if columns == 0:
            continue
        values = array.contiguous().view(torch.int32).flatten().tolist()
        size = max(BLOCK // columns, 1) * columns
        inner, outer = _keys("value", size).tolist(), _keys(name, len(values)).tolist()
        for place, value in enumerate(values):
            total += outer[place // size] * inner[place % size] * value
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("n", [1, 2, 30_000])
def test_the_checksum_is_its_formula(n):
    data = some_data(n)
    arrays = {"ids": data.ids, "numeric": data.numeric, "label": data.label}
    assert _checksum(arrays) == naive_checksum(arrays)
    assert run(train=data)["train"]["checksum"] == naive_checksum(arrays)


def test_a_checksum_does_not_change_between_versions():
    values = torch.arange(12, dtype=torch.int32).view(4, 3)
    assert _checksum({"ids": values}) == "c4ee49e7bee689f4"


@given(st.data())
def test_one_other_value_anywhere_is_noticed(data):
    one = some_data(50)
    arrays = {"ids": one.ids.clone(), "numeric": one.numeric.clone(), "label": one.label.clone()}
    before = _checksum(arrays)
    array = arrays[data.draw(st.sampled_from(list(arrays)))].view(torch.int32).view(-1)
    place = data.draw(st.integers(0, len(array) - 1))
    array[place] ^= 1 << data.draw(st.integers(0, 30))
    assert _checksum(arrays) != before


@given(st.permutations(range(6)))
def test_another_order_of_the_rows_is_noticed(order):
    data = Dataset.from_columns({"user": [0, 1, 2, 3, 4, 5]}, label=[0, 1, 0, 1, 0, 1])
    rows = torch.tensor(order)
    other = Dataset(data.schema, data.ids[rows], None, data.label[rows])
    same = run(train=data)["train"] == run(train=other)["train"]
    assert same is (order == sorted(order))


def test_the_order_of_blocks_and_arrays_matters():
    values = torch.randint(1 << 30, (3 * BLOCK, 1), dtype=torch.int32)
    rolled = values.roll(BLOCK, dims=0)
    assert _checksum({"ids": values}) != _checksum({"ids": rolled})
    assert _checksum({"ids": values}) != _checksum({"label": values})


def test_a_view_and_its_copy_have_the_same_checksum():
    columns = torch.randint(9, (5, 40), dtype=torch.int32).T
    assert _checksum({"ids": columns}) == _checksum({"ids": columns.contiguous()})
    wide = torch.randint(9, (3, BLOCK + 1), dtype=torch.int32)
    assert _checksum({"ids": wide}) == naive_checksum({"ids": wide})


@pytest.mark.threads(2)
def test_threads_do_not_matter():
    values = torch.randint(1 << 30, (100_000, 3), dtype=torch.int32)
    assert _checksum({"ids": values}) == naive_checksum({"ids": values})


@needs_cuda
def test_the_device_of_the_data_does_not_matter():
    data = some_data(30_000)
    assert run(train=data)["train"] == run(train=data.to("cuda"))["train"]


def test_the_same_environment_gives_no_warning():
    here = describe_environment()
    assert environment_warnings(through_json(here), describe_environment()) == []
    assert set(here) == set(CONSEQUENCES)
    assert here["device"] == describe_environment("cpu")["device"] or torch.cuda.is_available()
    assert describe_environment("cpu")["device"] == "cpu"


@pytest.mark.threads(2)
def test_the_number_of_threads_is_the_one_in_use():
    assert describe_environment()["threads"] == 2


def test_determinism_is_told():
    before = describe_environment("cpu")
    torch.use_deterministic_algorithms(mode=True)
    try:
        now = describe_environment("cpu")
    finally:
        torch.use_deterministic_algorithms(mode=False)
    (warning,) = environment_warnings(before, now)
    assert warning.startswith("deterministic was False, now True: the weights may differ")


def test_the_form_of_the_row_kernel_is_told(form):
    told = describe_environment()["compiled row kernel"]
    assert told is (row_kernel() is not None)
    assert form == "compiled" or not told


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_each_change_names_its_consequence(name):
    now = describe_environment("cpu")
    (warning,) = environment_warnings(now | {name: "2.12"}, now | {name: "2.13"})
    assert warning == f"{name} was 2.12, now 2.13: {CONSEQUENCES[name]}"


def test_what_an_older_version_did_not_write_is_told():
    now = describe_environment("cpu")
    old = {key: value for key, value in now.items() if key != "cpu"}
    (warning,) = environment_warnings(old, now)
    assert warning.startswith("cpu was None, now ")


def test_rows_mixed_in_other_chunks_are_another_run():
    data = Dataset.from_columns({"user": [0, 1, 2, 1]}, label=[0, 1, 0, 1])
    model = nn.Embedding(3, 2)
    before = describe_run(model, data, None, Training())
    data.chunks = (2, 1)
    now = describe_run(model, data, None, Training())
    assert differences(json.loads(json.dumps(now)), now) == []
    [line] = differences(before, now)
    assert line.startswith("the training data is mixed in other chunks")
