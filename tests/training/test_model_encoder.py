"""What a saved model carries of its data: schema and vocabulary, and which data it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stored import sign, tensors_file

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.encoder import encoder_of  # noqa: E402  # the same
from rarebit.errors import DataError, ModelFileError  # noqa: E402  # the same
from rarebit.models.fm import FM  # noqa: E402  # the same
from rarebit.training.score import score_log  # noqa: E402  # the same

STORED = Path(__file__).parent / "stored" / "model-format-1"
QUICK = {"epochs": 1, "batch_size": 64}


def frame(first=0, n=120):
    """Return rows of ten users and items whose names start from a number."""
    return pl.DataFrame(
        {
            "user": [f"u{first + i % 10}" for i in range(n)],
            "item": [f"i{i % 7}" for i in range(n)],
            "price": [i % 13 + 0.5 for i in range(n)],
            "click": [i % 3 % 2 for i in range(n)],
        }
    )


def prepare(folder, rows):
    rows.write_csv(folder.with_suffix(".csv"))
    return rb.prepare(folder.with_suffix(".csv"), folder, label="click")


@pytest.fixture
def data(tmp_path):
    return prepare(tmp_path / "data", frame())


@pytest.fixture
def saved(tmp_path, data):
    """A trained model in a folder."""
    model = FM(data.schema, dim=4)
    rb.fit(model, *data.splits[:2], progress=False, **QUICK)
    return rb.save_model(model, tmp_path / "model")


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def encoder_in(folder):
    """The folder of a model's vocabulary."""
    [path] = folder.glob("encoder*")
    return path


def test_a_saved_model_carries_the_encoder_of_its_data(tmp_path, data, saved):
    assert files_in(encoder_in(saved)) == files_in(tmp_path / "data" / "encoder")
    shutil.rmtree(tmp_path / "data")  # the model needs it no longer
    model = rb.load_model(saved)
    encoder = encoder_of(model)
    assert encoder.schema.label == "click"
    assert set(encoder.values["user"]) == {f"u{i}" for i in range(10)}
    assert model.schema == data.schema


def test_it_goes_on_carrying_it_when_saved_again(tmp_path, saved):
    wanted = files_in(encoder_in(saved))
    rb.save_model(rb.load_model(saved), tmp_path / "second")
    assert files_in(encoder_in(tmp_path / "second")) == wanted
    rb.save_model(rb.load_model(saved), saved)  # over itself
    assert files_in(encoder_in(saved)) == wanted
    assert set(saved.iterdir()) == {encoder_in(saved), saved / "model.json", tensors_file(saved)}
    rb.load_model(saved)


def test_a_model_of_a_frame_carries_it_too(tmp_path):
    data = rb.Dataset.from_frame(frame(), label="click")
    rb.save_model(FM(data.schema, dim=2), tmp_path / "model")
    encoder = encoder_of(rb.load_model(tmp_path / "model"))
    assert encoder.fields == data.schema


WITHOUT_POLARS = """
import sys
import rarebit as rb
model = rb.load_model(sys.argv[1])
test = rb.Dataset.open(sys.argv[2], verify=True).splits.test
print(repr(rb.evaluate(model, test).overall.logloss))
rb.save_model(model, sys.argv[3])
try:
    import polars
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_model_is_loaded_measured_and_saved_without_polars(tmp_path, data, saved):
    stub = tmp_path / "stub"
    stub.mkdir()
    for name in ("polars", "pyarrow"):
        (stub / f"{name}.py").write_text("raise ImportError('it is not installed')\n")
    path = os.pathsep.join([str(stub), str(Path(rb.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POLARS, saved, tmp_path / "data", tmp_path / "copy"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logloss, why = done.stdout.splitlines()
    expected = rb.evaluate(rb.load_model(saved), data.splits.test).overall.logloss
    assert float(logloss) == pytest.approx(expected, rel=1e-6)
    assert why == "it is not installed"
    assert files_in(encoder_in(tmp_path / "copy")) == files_in(encoder_in(saved))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(frame(first=1), id="as many values"),
        pytest.param(frame().filter(pl.col("user") != "u3"), id="fewer values"),
    ],
)
def test_data_of_another_vocabulary_is_refused_by_the_name_of_the_field(tmp_path, saved, other):
    data = prepare(tmp_path / "other", other)
    model = rb.load_model(saved)
    wanted = "another vocabulary of 'user'"
    with pytest.raises(DataError, match=wanted):
        rb.fit(model, *data.splits[:2], progress=False, **QUICK)
    with pytest.raises(DataError, match=wanted):
        rb.evaluate(model, data.splits.test)
    with pytest.raises(DataError, match=wanted):
        rb.predict(model, data)
    with pytest.raises(ModelFileError, match=wanted):
        rb.load_model(saved, into=FM(data.schema, dim=4))


def test_numbers_of_another_scale_are_refused(tmp_path, saved):
    data = prepare(tmp_path / "other", frame().with_columns(pl.col("price") * 2))
    with pytest.raises(DataError, match="another vocabulary of 'price'"):
        rb.predict(rb.load_model(saved), data)


def test_other_rows_of_the_same_vocabulary_are_taken(data, saved):
    model = rb.load_model(saved)
    rows = frame(n=30)
    expected = rb.predict(model, rb.Dataset.from_frame(rows, like=data))
    # prepared from the same rows in memory: the same vocabulary, found by other files
    again = rb.Dataset.from_frame(frame(), label="click")
    found = rb.predict(model, rb.Dataset.from_frame(rows, like=again))
    assert found.tolist() == expected.tolist()


def test_weights_are_loaded_into_a_model_of_the_same_vocabulary(data, saved):
    model = rb.load_model(saved, into=FM(data.schema, dim=4))
    expected = rb.predict(rb.load_model(saved), data)
    assert rb.predict(model, data).tolist() == expected.tolist()
    assert model.schema.encoder.folder == encoder_in(saved)


@pytest.mark.parametrize("name", ["encoder.json", "values.parquet"])
@pytest.mark.parametrize("change", ["missing", "changed", "a link", "a folder"])
def test_an_encoder_that_is_not_as_it_was_saved_is_refused(tmp_path, saved, name, change):
    path = encoder_in(saved) / name
    whole = path.read_bytes()
    path.unlink()
    if change == "changed":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif change == "a link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif change == "a folder":
        path.mkdir()
    with pytest.raises(ModelFileError, match=f"{name}.* (is damaged|is missing|is not a plain)"):
        rb.load_model(saved)


def test_a_missing_or_linked_folder_is_refused(tmp_path, saved):
    encoder = encoder_in(saved)
    encoder.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match=r"is incomplete: encoder-\w+ is missing"):
        rb.load_model(saved)
    encoder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match=r"encoder-\w+' is not a plain file"):
        rb.load_model(saved)


def test_a_link_that_was_not_saved_is_refused_and_a_plain_file_is_not(tmp_path, data, saved):
    (encoder_in(saved) / ".note").write_text("left by some program")
    rb.save_model(FM(data.schema, dim=2), saved)
    assert (
        encoder_in(saved) / ".note"
    ).exists()  # a kill would have left a model without its folder
    rb.load_model(saved)
    (tmp_path / "secret").write_text("secret")
    (encoder_in(saved) / "more").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFileError, match=r"more' is not a plain file"):
        rb.load_model(saved)


@pytest.mark.parametrize("value", [["encoder.json"], "encoder.json", 3])
def test_a_description_of_format_1_that_names_files_in_another_form_is_refused(tmp_path, value):
    copied = shutil.copytree(STORED, tmp_path / "copy")
    sign(copied, encoder=value)
    with pytest.raises(ModelFileError, match="does not describe a model of Rarebit"):
        rb.load_model(copied)


@pytest.mark.parametrize("name", ["../model.json", "/etc/passwd", "", "..", "a\0b"])
def test_a_description_leads_to_no_other_file(tmp_path, saved, name):
    files = {tensors_file(saved).name: "0" * 64, name: "0" * 64}
    sign(saved, files=files)
    with pytest.raises(ModelFileError, match="does not describe a model of Rarebit"):
        rb.load_model(saved)
    copied = shutil.copytree(STORED, tmp_path / "copy")
    sign(copied, encoder={name: "0" * 64})
    with pytest.raises(ModelFileError, match="does not describe a model of Rarebit"):
        rb.load_model(copied)


def as_format_1(folder):
    """Turn a saved model into what an older version wrote."""
    description = json.loads((folder / "model.json").read_text())
    files, encoder = description.pop("files"), description.pop("parts")["encoder"]
    (folder / encoder).rename(folder / "encoder")
    (folder / description["tensors"]).rename(folder / "weights.safetensors")
    description |= {"format": 1, "sha256": files[description.pop("tensors")]}
    description["encoder"] = {name.rpartition("/")[2]: files[name] for name in files if "/" in name}
    (folder / "model.json").write_text(json.dumps(description))
    sign(folder)


def test_a_model_of_format_1_keeps_its_vocabulary_when_saved_over_itself(saved):
    wanted = files_in(encoder_in(saved))
    as_format_1(saved)
    model = rb.load_model(saved)
    for _ in range(2):  # the loaded model refers to the folder of format 1
        rb.save_model(model, saved)
        assert files_in(encoder_in(saved)) == wanted
        assert set(encoder_of(rb.load_model(saved)).values) == {"user", "item"}
    assert len(list(saved.iterdir())) == 3
    (saved / "encoder" / "values.parquet").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is damaged or belongs to another save"):
        rb.load_model(saved)


def test_a_model_saved_over_another_has_its_own_vocabulary_or_none(tmp_path, saved):
    other = prepare(tmp_path / "other", frame(first=5))
    rb.save_model(FM(other.schema, dim=4), saved)
    values = encoder_of(rb.load_model(saved)).values["user"]
    assert set(values) == {f"u{i}" for i in range(5, 15)}
    plain = rb.data.Schema((rb.data.Field(name="user", rows=9),))
    rb.save_model(FM(plain, dim=4), saved)
    assert not list(saved.glob("encoder*"))
    assert rb.load_model(saved).schema.encoder is None


@pytest.mark.parametrize("damage", ["changed", "a link"])
def test_saving_again_mends_a_damaged_vocabulary(tmp_path, data, saved, damage):
    path = encoder_in(saved) / "encoder.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    if damage == "a link":
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    rb.save_model(FM(data.schema, dim=4), saved)
    assert encoder_of(rb.load_model(saved)).schema.label == "click"


def test_a_vocabulary_with_folders_in_it_is_not_saved(tmp_path, saved):
    model = rb.load_model(saved)
    (encoder_in(saved) / "more").mkdir()
    with pytest.raises(ModelFileError, match="encoder must be a folder of plain files"):
        rb.save_model(model, tmp_path / "copy")


def test_a_save_that_fails_leaves_no_half_of_a_vocabulary(tmp_path, saved):
    model = rb.load_model(saved)
    shutil.rmtree(encoder_in(saved))
    with pytest.raises(ModelFileError, match="cannot write the model"):
        rb.save_model(model, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_models_saved_before_there_were_vocabularies_are_read():
    model = rb.load_model(STORED)
    assert model.schema.encoder is None
    assert all(field.vocabulary == "" for field in model.schema.fields)
    with pytest.raises(ModelFileError, match="the model has no vocabulary"):
        score_log(model, "new.csv")
