import errno
import inspect
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from capabilities import needs, needs_cuda
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored import sign, tensors_file
from torch import nn

from rarebit import (
    Dataset,
    Hashing,
    LowRank,
    Method,
    Table,
    apply_,
    find_tables,
    fit,
    load_model,
    predict,
    save_model,
)
from rarebit.data import Field, Schema
from rarebit.errors import ModelFileError
from rarebit.interactions.basic import FactorizationMachine
from rarebit.models import build_model, model_class, model_names
from rarebit.models._base import Backbone, RankingModel
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM, SumOfFeatures
from rarebit.storage.files import Disk, own_checksum

SCHEMA = Schema(
    (
        Field(name="user", rows=9),
        Field(name="tags", kind="multi", rows=7, max_length=2, pooling="sum"),
        Field(name="age", kind="numeric"),
    )
)
METHODS = {
    "plain": [],
    "hashing": [Hashing(buckets=4)],
    "low rank": [LowRank(rank=2)],
    "both": [Hashing(buckets=4), LowRank(rank=2)],
}


class TwoTower(nn.Module):
    """A model of a user's own: a table, a bag, a network, and a buffer."""

    def __init__(self, dim=4):
        super().__init__()
        self.user = nn.Embedding(9, dim)
        self.tags = nn.EmbeddingBag(7, dim, mode="sum", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(dim, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, batch):
        return self.head(self.user(batch["user"]) * self.tags(batch["tags"]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.decoder = nn.Linear(4, 9, bias=False)
        self.decoder.weight = self.table.weight


def some_data(n=24):
    ids = torch.cat([torch.randint(9, (n, 1)), torch.randint(7, (n, 2))], dim=1)
    return Dataset(SCHEMA, ids, torch.randn(n, 1), torch.arange(n) % 2)


def zoo_model(name="deepfm", methods=()):
    known = inspect.signature(model_class(name)).parameters
    wanted = {"dim": 3, "hidden": [4], "batch_norm": True}
    model = build_model(name, SCHEMA, {key: wanted[key] for key in wanted if key in known})
    for method in methods if "dim" in known else ():  # tables of width 1 stay as they are
        apply_(model, method, verbose=False)
    return model


def assert_same(model, other):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("name", model_names())
def test_a_trained_model_comes_back(name, methods, tmp_path):
    data, model = some_data(), zoo_model(name, methods)
    fit(model, data, epochs=2, lr=0.1, batch_size=8, progress=False)
    assert save_model(model, tmp_path / "new" / "model") == tmp_path / "new" / "model"
    loaded = load_model(tmp_path / "new" / "model")
    assert type(loaded) is type(model)
    assert (loaded.schema, loaded.settings) == (model.schema, model.settings)
    assert find_tables(loaded) == find_tables(model)
    assert_same(loaded, model)
    assert torch.equal(predict(loaded, data), predict(model, data))


def test_methods_on_some_tables_come_back(tmp_path):
    model = zoo_model()
    apply_(model, Hashing(buckets=4), where=lambda t: t.field == "user", verbose=False)
    apply_(model, LowRank(rank=1), where=lambda t: t.field == "tags", verbose=False)
    loaded = load_model(save_model(model, tmp_path))
    assert find_tables(loaded) == find_tables(model)
    assert_same(loaded, model)


def test_a_loaded_model_can_be_trained_on(tmp_path):
    data, model = some_data(), zoo_model(methods=METHODS["both"])
    loaded = load_model(save_model(model, tmp_path))
    for one in (model, loaded):
        fit(one, data, epochs=1, lr=0.1, batch_size=8, progress=False)
    assert_same(loaded, model)


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS.keys())
def test_a_foreign_model_is_read_into_a_fresh_one(methods, tmp_path):
    data, model = some_data(), TwoTower()
    for method in methods:
        apply_(model, method, verbose=False)
    fit(model, data, epochs=1, lr=0.1, batch_size=8, progress=False)
    fresh = TwoTower()
    assert load_model(save_model(model, tmp_path), into=fresh) is fresh
    assert find_tables(fresh) == find_tables(model)
    assert_same(fresh, model)
    assert torch.equal(predict(fresh, data), predict(model, data))


def test_a_zoo_model_is_read_into_one_of_its_class(tmp_path):
    model, fresh = zoo_model(), zoo_model()
    assert_same(load_model(save_model(model, tmp_path), into=fresh), model)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    model = Tied()
    save_model(model, tmp_path)
    assert list(load_file(tensors_file(tmp_path))) == ["table.weight"]
    loaded = load_model(tmp_path, into=Tied())
    assert loaded.decoder.weight is loaded.table.weight
    assert_same(loaded, model)


def test_views_of_one_tensor_are_written_whole(tmp_path):
    def build():
        module = nn.Module()
        whole = torch.randn(6, 2)
        module.register_buffer("whole", whole)
        module.register_buffer("part", whole[2:4])
        module.register_buffer("flat", whole.view(-1))
        return module

    model = build()
    assert_same(load_model(save_model(model, tmp_path), into=build()), model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("methods", [[], [Hashing(buckets=4)]], ids=["plain", "hashing"])
def test_precision_is_kept(dtype, methods, tmp_path):
    for number, (model, into) in enumerate(
        [(zoo_model("dnn"), None), (TwoTower(), TwoTower()), (Tied(), Tied())]
    ):
        if methods and not isinstance(model, Tied):
            apply_(model, *methods, verbose=False)
        model.to(dtype)
        loaded = load_model(save_model(model, tmp_path / str(number)), into=into)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert_same(loaded, model)
        assert len(list(loaded.parameters())) == len(list(model.parameters()))


def test_the_device_is_chosen(tmp_path):
    loaded = load_model(save_model(zoo_model(), tmp_path), device="meta")
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"meta"}
    assert {p.device.type for p in load_model(tmp_path).parameters()} == {"cpu"}


@needs_cuda
def test_a_model_goes_from_the_gpu_to_a_file_and_back(tmp_path):
    model, data = zoo_model(methods=METHODS["both"]).cuda(), some_data()
    loaded = load_model(save_model(model, tmp_path), device="cuda")
    assert_same(loaded, model)
    assert torch.equal(predict(loaded, data), predict(model, data))


def test_numpys_numbers_in_settings_are_written(tmp_path):
    model = DeepFM(SCHEMA, dim=np.int64(3), hidden=np.array([4, 5]), dropout=np.float32(0.5))
    loaded = load_model(save_model(model, tmp_path))
    given = {"dim": 3, "hidden": [4, 5], "dropout": 0.5, "batch_norm": False}
    assert given.items() <= loaded.settings.items()
    assert_same(loaded, model)


def test_nothing_but_the_two_files_is_left(tmp_path):
    save_model(zoo_model(), tmp_path)
    save_model(zoo_model(), tmp_path)
    names = ["model.json", tensors_file(tmp_path).name]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert re.fullmatch(r"weights-[0-9a-f]{16}\.safetensors", names[1])


def test_saving_twice_keeps_the_second(tmp_path):
    first, second = zoo_model("fm"), zoo_model("dcn_v2", METHODS["both"])
    save_model(first, tmp_path)
    save_model(second, str(tmp_path))
    assert_same(load_model(str(tmp_path)), second)


def test_a_model_of_ones_own_needs_into(tmp_path):
    save_model(TwoTower(), tmp_path)
    message = r"holds a TwoTower, your own class: load it with load_model\(folder, into=TwoTower"
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path)


class MyFM(FM):
    """A zoo model that a user has changed."""


def bare_model():
    return RankingModel(
        SCHEMA,
        backbone=Backbone(SCHEMA, 3, FactorizationMachine()),
        head=SumOfFeatures(),
        settings={"dim": 3},
    )


@pytest.mark.parametrize("build", [lambda: MyFM(SCHEMA, dim=3), bare_model], ids=["MyFM", "bare"])
def test_a_class_built_on_ours_needs_into_too(build, tmp_path):
    model, fresh = build(), build()
    save_model(model, tmp_path)
    with pytest.raises(ModelFileError, match=f"holds a {type(model).__name__}, your own class"):
        load_model(tmp_path)
    assert_same(load_model(tmp_path, into=fresh), model)


def small_fm():
    return FM(SCHEMA, dim=3)


def deep_fm():
    return DeepFM(SCHEMA, dim=3, hidden=(4,))


@pytest.mark.parametrize(
    ("saved", "into", "message"),
    [
        (
            small_fm,
            lambda: FM(SCHEMA, dim=4),
            r"than FM: .* is \(16, 3\) in the file and \(16, 4\) here",
        ),
        (small_fm, deep_fm, "than DeepFM: head.mlp.layers.0.weight is not in the file"),
        (
            deep_fm,
            small_fm,
            r"than FM: .*the model has no head.mlp.layers.0.weight.*\(and 1 more\)",
        ),
        (
            TwoTower,
            lambda: TwoTower(dim=5),
            r"user.weight is \(9, 4\) in the file and \(9, 5\) here",
        ),
        (Tied, TwoTower, "than TwoTower: user.weight is not in the file"),
        (TwoTower, small_fm, "was not saved from such a model"),
        (small_fm, TwoTower, "of another architecture than TwoTower"),
    ],
)
def test_another_architecture_is_refused(saved, into, message, tmp_path):
    save_model(saved(), tmp_path)
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path, into=into())


def test_a_table_that_is_missing_is_named(tmp_path):
    model = TwoTower()
    apply_(model, Hashing(buckets=4), verbose=False)
    save_model(model, tmp_path)
    smaller = TwoTower()
    smaller.users, smaller.user = smaller.user, None
    with pytest.raises(ModelFileError, match=r"there is no table 'user'; did you mean 'users'\?"):
        load_model(tmp_path, into=smaller)


def test_other_fields_are_refused_even_where_the_shapes_agree(tmp_path):
    rows = {"user": 9, "item": 7}
    schemas = [
        Schema(tuple(Field(name=n, rows=rows[n]) for n in order)) for order in (rows, [*rows][::-1])
    ]
    save_model(FM(schemas[0], dim=3), tmp_path)
    message = r"other fields: user \(9 rows\), item \(7 rows\) in the file, item \(7 rows\), user"
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path, into=FM(schemas[1], dim=3))


def test_a_folder_without_a_model_is_told(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ModelFileError, match=r"holds no model: model.json is missing"):
            load_model(folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelFileError, match=r"file' holds no model: model.json is missing"):
        load_model(tmp_path / "file")
    (tmp_path / "model.json").mkdir()
    with pytest.raises(ModelFileError, match=r"model\.json' is not a plain file"):
        load_model(tmp_path)


def test_missing_weights_are_told(tmp_path):
    save_model(zoo_model(), tmp_path)
    tensors_file(tmp_path).unlink()
    with pytest.raises(ModelFileError, match=r"is incomplete: weights-\w+.safetensors is missing"):
        load_model(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model that has a bit of everything, and the weights in it. To be copied."""
    torch.manual_seed(0)
    model = zoo_model(methods=METHODS["both"])
    return save_model(model, tmp_path_factory.mktemp("saved")), model.state_dict()


@given(st.data())
def test_any_changed_byte_of_the_weights_is_noticed(saved, data):
    content = bytearray(tensors_file(saved[0]).read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    with TemporaryDirectory() as folder:
        shutil.copy(saved[0] / "model.json", folder)
        (Path(folder) / tensors_file(saved[0]).name).write_bytes(content)
        with pytest.raises(
            ModelFileError, match="damaged or belongs to another save: its checksum"
        ):
            load_model(folder)


@given(st.data())
def test_weights_that_were_cut_short_are_noticed(saved, data):
    content = tensors_file(saved[0]).read_bytes()
    with TemporaryDirectory() as folder:
        shutil.copy(saved[0] / "model.json", folder)
        cut = content[: data.draw(st.integers(0, len(content) - 1))]
        (Path(folder) / tensors_file(saved[0]).name).write_bytes(cut)
        with pytest.raises(ModelFileError, match="damaged or belongs to another save"):
            load_model(folder)


def test_the_weights_of_another_save_are_noticed(tmp_path):
    save_model(zoo_model(), tmp_path / "a")
    save_model(zoo_model(), tmp_path / "b")
    shutil.copy(tensors_file(tmp_path / "a"), tensors_file(tmp_path / "b"))
    with pytest.raises(ModelFileError, match="belongs to another save"):
        load_model(tmp_path / "b")


def test_a_pickle_is_not_read_even_with_its_checksum(tmp_path):
    model = zoo_model()
    torch.save(model.state_dict(), tensors_file(save_model(model, tmp_path)))
    sign(tmp_path)
    with pytest.raises(ModelFileError, match=r"cannot read '.*weights-\w+\.safetensors'"):
        load_model(tmp_path)


def load_or_refuse(saved, text):
    """A changed description is refused, or the weights are the saved ones: never anything else."""
    folder, weights = saved
    with TemporaryDirectory() as copy:
        shutil.copy(tensors_file(folder), copy)
        (Path(copy) / "model.json").write_bytes(text)
        try:
            loaded = load_model(copy)
        except ModelFileError as error:
            return str(error)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(weights), rtol=0, atol=0)
    return None


@given(st.data())
def test_a_damaged_description_is_refused_or_harmless(saved, data):
    text = bytearray((saved[0] / "model.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text) - 1))
        stop = min(len(text), start + data.draw(st.integers(0, 4)))
        text[start:stop] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b'"', b"{", b"[", b"9"])
        )
    load_or_refuse(saved, bytes(text))


small_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.floats()
    | st.sampled_from(["", "fm", "dnn", "mean", "user", "hashing", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


def places(value, place=()):
    """Every place in a tree of dictionaries and lists."""
    yield place
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*place, key))


def replaced(value, place, new):
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


@given(st.data())
def test_a_description_of_another_kind_is_refused_or_harmless(saved, data):
    description = json.loads((saved[0] / "model.json").read_text())
    place = data.draw(st.sampled_from(list(places(description))))
    changed = replaced(description, place, data.draw(small_json))
    if isinstance(changed, dict):  # the checksum would notice every change
        changed["description_sha256"] = own_checksum(changed)
    load_or_refuse(saved, json.dumps(changed).encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3, "rarebit": "9.9"}, "written in format 3 by Rarebit 9.9; this version reads up to format 2"),
        ({"format": "1"}, "does not describe a model of Rarebit"),
        ({"format": 0}, "does not describe a model of Rarebit"),
        ({"files": None}, "does not describe a model of Rarebit"),
        ({"files": {}}, "does not describe a model of Rarebit"),
        ({"tensors": "../weights"}, "does not describe a model of Rarebit"),
        ({"tensors": ["a"]}, "does not describe a model of Rarebit"),
        ({"parts": []}, "does not describe a model of Rarebit"),
        ({"parts": {"encoder": 3}}, "does not describe a model of Rarebit"),
        ({"parts": {"encoder": "a/b"}}, "does not describe a model of Rarebit"),
        ({"parts": {"encoder": ".."}}, "does not describe a model of Rarebit"),
        ({"parts": {"encoder": "model.json"}}, "cannot read"),
        ({"model": "transformer"}, "does not describe a model this version knows: unknown model"),
        ({"model": 3}, "does not describe a model this version knows"),
        ({"schema": None}, "does not describe a model this version knows"),
        ({"schema": {"fields": [3]}}, "does not describe a model this version knows"),
        ({"settings": ["abc"]}, "does not describe a model this version knows"),
        ({"settings": {"dim": "3"}}, "dim must be int, got '3'"),
        ({"settings": {"dim": 2**62}}, "does not describe a model this version knows"),
        ({"settings": {"dim": 10**20}}, "does not describe a model this version knows"),
        ({"methods": None}, "names methods that cannot be read"),
        ({"methods": {"backbone.tables.user": ["abc"]}}, "names methods that cannot be read"),
        ({"methods": {"backbone.tables.user": [{"method": "hashing"}]}}, "Hashing needs buckets"),
        ({"methods": {"backbone.tables.users": []}}, "no table 'backbone.tables.users'; did you mean"),
        ({"aliases": []}, "names tied weights it lacks"),
        ({"aliases": {"a": []}}, "names tied weights it lacks"),
        ({"aliases": {"a": "b"}}, "names tied weights it lacks"),
    ],
)  # fmt: skip
def test_nonsense_in_a_description_is_told(changes, message, tmp_path):
    save_model(zoo_model(methods=[Hashing(buckets=4)]), tmp_path)
    sign(tmp_path, **changes)
    with pytest.raises(ModelFileError) as caught:
        load_model(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"model\.json' is damaged: .*; save the model again"),
        (b"\xff", r"model\.json' is damaged: .*utf-8"),
        (b"[" * 100_000, r"model\.json' is damaged: "),
        (b"[]", r"model\.json' does not describe a model of Rarebit"),
    ],
)
def test_a_description_that_is_no_json_is_told(content, message, tmp_path):
    save_model(zoo_model(), tmp_path)
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path)


def test_a_giant_description_is_not_read(tmp_path):
    with (tmp_path / "model.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ModelFileError, match="is too large to be the description of a model"):
        load_model(tmp_path)


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ModelFileError, match=r"cannot write the model to .*; choose another folder"
        ):
            save_model(zoo_model(), folder)


def test_a_save_that_fails_leaves_nothing_and_keeps_the_old_one(tmp_path, monkeypatch):
    old = zoo_model()
    save_model(old, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def fail(self, source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "rename", fail)
    with pytest.raises(ModelFileError, match=r"cannot write the model to .* the disk is full and"):
        save_model(zoo_model(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same(load_model(tmp_path), old)


@needs("file permissions", os.geteuid() != 0, "root may write anywhere")
def test_a_folder_one_may_not_write_to_is_told(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ModelFileError, match=r"cannot write the model to .*not yours"):
            save_model(zoo_model(), tmp_path)
    finally:
        tmp_path.chmod(0o700)


class DoubledTable(Table):
    def rows(self, ids):
        return 2 * self.inner(ids)


@dataclass(frozen=True)
class Doubling(Method):
    """A method of a user's own."""

    def wrap(self, base):
        shape = {"num_embeddings": base.num_embeddings, "embedding_dim": base.embedding_dim}
        return DoubledTable(self, base, padding_idx=base.padding_idx, **shape)


def test_a_method_from_another_package_comes_back_where_it_is_known(tmp_path):
    model = TwoTower()
    apply_(model, Doubling(), verbose=False)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, into=TwoTower())
    assert find_tables(loaded) == find_tables(model)
    assert_same(loaded, model)
    sign(tmp_path, methods={"user": [{"method": "Tripling"}]})
    with pytest.raises(ModelFileError, match=r"cannot be read: unknown method 'Tripling'.* import"):
        load_model(tmp_path, into=TwoTower())


def test_settings_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path):
    model = MyFM(SCHEMA, dim=3)
    model.settings["activation"] = nn.ReLU
    with pytest.raises(ModelFileError, match="the settings of MyFM cannot be written as JSON"):
        save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_was_frozen_stays_frozen_and_loads(tmp_path):
    model = zoo_model("fm", [])
    apply_(model, Hashing(buckets=4), where=lambda table: table.field == "user", verbose=False)
    model.backbone.tables.stacks[0].requires_grad_(requires_grad=False)
    apply_(model, Hashing(buckets=4), where=lambda table: table.field == "tags", verbose=False)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert_same(loaded, model)
    assert find_tables(loaded) == find_tables(model)
    assert [table.field for table in find_tables(loaded) if not table.trainable] == ["user"]


def test_a_frozen_table_of_a_users_own_model_loads(tmp_path):
    model = TwoTower()
    model.tags.requires_grad_(requires_grad=False)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, into=TwoTower())
    assert_same(loaded, model)
    assert not loaded.tags.weight.requires_grad
    assert loaded.user.weight.requires_grad


def test_a_wrapped_model_cannot_be_read_into(tmp_path):
    save_model(TwoTower(), tmp_path)
    with pytest.raises(ModelFileError, match="is wrapped in DataParallel"):
        load_model(tmp_path, into=nn.DataParallel(TwoTower()))
