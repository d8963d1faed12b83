"""`rarebit diagnose` as a user meets it: a run, a file, and what is neither."""

import io
import json
import shutil

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from stored import tensors_file
from torch import nn

import rarebit as rb
from rarebit.cli.diagnose import diagnose_command, show_diagnosis
from rarebit.diagnosis.diagnose import diagnose
from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.models.fm import FM

APP = typer.Typer()
APP.command(name="diagnose")(diagnose_command)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    settings = {
        "model": {"name": "dcn_v2", "dim": 4, "hidden": [8]},
        "data": {"rows": 2000},
        "training": {"epochs": 1},
    }
    rb.run(
        rb.RunSettings.from_mapping(settings),
        folder=folder,
        progress=False,
        say=lambda line: None,
    )
    return folder


@pytest.fixture
def call(capsys):
    """Run the command; return standard output and error."""

    def run(*words):
        APP([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr()

    return run


def test_a_run_is_shown_field_by_field_with_what_to_try(call, trained):
    out, _ = call(trained)
    for word in ("user", "item", "tags", "IA", "random", "dead", "never", "once", "stable rank"):
        assert word in out
    assert "What is wasted, and what to try\n1. backbone.tables.user" in out
    assert "Sub-embeddings of DCN-V2" in out
    assert "To keep the numbers and plots: --out FOLDER" in out


def test_json_is_all_there_is_on_standard_output(call, trained):
    out, _ = call(trained, "--json")
    found = json.loads(out)
    splits = rb.data.generate(rb.data.SyntheticLog(rows=2000))
    assert found == json.loads(json.dumps(diagnose(rb.load_model(trained), splits).to_mapping()))


def test_numbers_and_plots_are_written_where_they_should_be(call, trained, tmp_path):
    pytest.importorskip("matplotlib", reason="capability: package matplotlib: it is not installed")
    out, _ = call(trained, "--out", tmp_path / "here")
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {
        "diagnosis.json",
        "report.html",
        "spectra.png",
        "abundance.png",
        "norms.png",
        "sub_embeddings.png",
    }
    assert f"Written to {tmp_path / 'here'}: diagnosis.json, spectra.png" in out


def test_plots_can_be_left_out(call, trained, tmp_path):
    out, _ = call(trained, "--json", "--out", tmp_path, "--no-plots")
    assert [path.name for path in tmp_path.iterdir()] == ["diagnosis.json"]
    assert json.loads(out) == json.loads((tmp_path / "diagnosis.json").read_text("utf-8"))


def test_a_file_of_weights_is_enough(call, trained, tmp_path):
    out, _ = call(tensors_file(trained))
    assert "stacks.0" in out
    assert "Training counts are not known" in out
    assert f"diagnose {trained}" in out
    alone = shutil.copy(tensors_file(trained), tmp_path)
    out, _ = call(alone)
    assert "To see each field" not in out


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "copy")


def test_a_run_whose_log_is_gone_is_shown_without_counts(call, copied):
    run = json.loads((copied / "run.json").read_text("utf-8"))
    run["settings"]["data"] = {"source": "prepared", "folder": str(copied / "nowhere")}
    (copied / "run.json").write_text(json.dumps(run))
    out, err = call(copied)
    assert "Training counts are not known" in out
    assert err.startswith("without training counts: ")
    assert "nowhere" in err


def test_a_saved_model_that_is_no_run_is_shown_without_counts(call, copied):
    (copied / "run.json").unlink()
    out, err = call(copied)
    assert "Training counts are not known" in out
    assert "run.json is missing" in err


def test_the_counts_of_another_log_are_taken_from_its_folder(call, trained, tmp_path):
    pytest.importorskip("polars", reason="capability: package polars: it is not installed")
    rows = "".join(f"u{i % 9},{i % 2}\n" for i in range(100))
    (tmp_path / "clicks.csv").write_text(f"user,click\n{rows}")
    rb.prepare(tmp_path / "clicks.csv", tmp_path / "log", label="click")
    data = rb.Dataset.open(tmp_path / "log")
    model = rb.save_model(FM(data.schema, dim=2), tmp_path / "model")
    out, err = call(model, "--data", tmp_path / "log", "--json")
    [user, _] = json.loads(out)["tables"]
    assert user["never_trained_rows"] == int((data.splits.train.counts()["user"] == 0).sum())
    assert err == ""
    with pytest.raises(DataError, match="is it the data that the model was trained on"):
        call(trained, "--data", tmp_path / "log")


def test_what_is_neither_run_nor_file_is_told(call, copied, tmp_path):
    with pytest.raises(ModelFileError, match="nowhere' does not exist"):
        call(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"holds no model: model\.json is missing"):
        call(tmp_path / "empty")
    with pytest.raises(ModelFileError, match="is no safetensors file, or a damaged one"):
        call(copied / "model.json")
    with pytest.raises(SettingsError, match="--data needs the folder of a run"):
        call(tensors_file(copied), "--data", tmp_path)
    with pytest.raises(DataError, match="holds no prepared log"):
        call(copied, "--data", tmp_path / "empty")


def test_damaged_runs_and_files_are_told(call, copied):
    weights = tensors_file(copied)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="is damaged or belongs to another save"):
        call(copied)
    with pytest.raises(ModelFileError, match="is no safetensors file, or a damaged one"):
        call(weights)
    weights.unlink()
    with pytest.raises(ModelFileError):
        call(copied)


def test_a_model_without_tables_is_told(call, tmp_path):
    save_file({"layer": torch.zeros(3, 3)}, tmp_path / "x.safetensors")
    with pytest.raises(NoTableError, match="holds no table"):
        call(tmp_path / "x.safetensors")


def lines_at(width, found):
    file = io.StringIO()
    show_diagnosis(found, title="Tables", to=Console(width=width, file=file))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_or_too_wide(width):
    names = ["user", "a_field_with_quite_a_long_name", "item"]
    model = nn.ModuleDict({name: nn.Embedding(1_234_567, 2) for name in names})
    counts = {name: torch.arange(1_234_567) // 600_000 for name in names}  # mostly rare
    lines = lines_at(width, diagnose(model, counts=counts))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.count("1,234,567") >= 3
    assert "…" not in text
    assert ("norm" in text) == (width == 120)


def test_many_findings_are_cut_short_and_counted():
    model = nn.ModuleDict({f"field{i}": nn.Embedding(90, 2) for i in range(12)})
    counts = {f"field{i}": torch.zeros(90, dtype=torch.int64) for i in range(12)}
    text = "\n".join(lines_at(100, diagnose(model, counts=counts)))
    assert "8. field" in text
    assert "9. field" not in text
    assert "And 4 more, in diagnosis.json" in text


def test_products_that_are_not_merged_show_how_they_learn(call, tmp_path):
    schema = rb.data.Schema(
        (rb.data.Field(name="user", rows=90), rb.data.Field(name="item", rows=40))
    )
    model = FM(schema, dim=4)
    rb.apply_(model, rb.MLET(inner_dim=8), where=lambda t: t.field == "user", verbose=False)
    rb.save_model(model, tmp_path)
    out, _ = call(tmp_path)
    assert "Tables that MLET trains as products" in out
    assert "360 of 360" in out
    found = json.loads(call(tmp_path, "--json").out)["tables"]
    assert found[0]["reweighting"]["num_informative"] == 4 * 8
    assert found[1]["reweighting"] is None
