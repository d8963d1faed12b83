"""Exported files score without Rarebit, as the model does."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import polars as pl
import pytest
import torch
from capabilities import slow_after
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import rarebit as rb
from rarebit.cli.app import app
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.raw.encode import encode_like
from rarebit.data.raw.encoder import encoder_of
from rarebit.errors import ExportError, ModelFileError, SettingsError
from rarebit.export import export as exporting
from rarebit.export.raw import text_inputs
from rarebit.models import build_model, model_names

ROWS = 400


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    tags = ["|".join(draw.choice(list("abcdefg"), draw.integers(0, 5))) for _ in range(ROWS)]
    frame = {
        "user": [f"u{n}" for n in draw.integers(0, 90, ROWS)],
        "price": draw.lognormal(3, 2, ROWS),
        "tags": tags,
        "item": [str(n) for n in draw.integers(0, 60, ROWS)],
        "score of the day": draw.normal(size=ROWS),
        "age": draw.normal(40, 9, ROWS),
        "click": draw.integers(0, 2, ROWS),
    }
    columns = (
        Column(name="user"),
        Column(name="price", kind="numeric", treatment="log_square"),
        Column(name="tags", kind="multi", separator="|", max_length=3),
        Column(name="item", min_count=2),
        Column(name="score of the day", kind="numeric", treatment="quantile", bins=5),
        Column(name="age", kind="numeric"),
    )
    schema = LogSchema(label="click", columns=columns, missing=("NULL", "-1"))
    return rb.Dataset.from_frame(frame, schema=schema)


def later_rows():
    return pl.DataFrame(
        {
            "user": ["u1", "nobody", None, "", "NULL", "U1", "u2 ", "u3"],
            "price": [0.0, 1.0, 2.5, None, 1e9, -3.0, -1.0, 19.99],
            "tags": ["a|b", "", None, "NULL", "g|nothing|a|b", "||c", "zzz", "a"],
            "item": ["1", "1.0", "2.00", "true", "NULL", "-1", "59", "x"],
            "score of the day": [0.0, -9.0, 9.0, None, 0.1, 1e30, -1.0, 0.5],
            "age": [40.0, None, -1.0, 1e3, 41.5, 0.0, 3.0, 90.0],
        }
    )


def model_of(data, name="deepfm", **settings):
    """Return a model whose scores differ clearly from row to row."""
    torch.manual_seed(0)
    model = build_model(name, data.schema, settings or ({} if name == "lr" else {"dim": 8}))
    for key, parameter in model.named_parameters():
        if "tables" in key:
            parameter.data = 0.2 * torch.randn_like(parameter)
    return model.eval()


def thinned(model):
    for key, parameter in model.named_parameters():
        if "tables" in key:
            parameter.data *= torch.rand_like(parameter) < 0.1
    return model


def applied(*methods):
    def change(model):
        for method in methods:
            rb.apply_(model, method, verbose=False)

    return change


def growing_counts(model):
    """Counts that give the rows of each table several classes, in no order."""
    return {table.name: 3 ** (torch.arange(table.rows) * 7 % 9) for table in rb.find_tables(model)}


KINDS = {
    "plain": applied(),
    "hashed": applied(rb.Hashing(buckets=20)),
    "int8": applied(rb.Quantize(bits=8)),
    "int4": applied(rb.Quantize(bits=4)),
    "packed": lambda model: rb.pack_(thinned(model), verbose=False),
    "packed, 8 bits": lambda model: rb.pack_(thinned(model), bits=8, verbose=False),
    "coded": applied(rb.EvidenceCoding(size=0.25, counts=7)),
    "coded by counts": lambda model: rb.compress_(
        model, counts=growing_counts(model), size=0.3, verbose=False
    ),
    "MLET": applied(rb.MLET(inner_dim=64)),
    "sets": applied(rb.MultiEmbedding(num_sets=2)),
    "hashed, low rank": applied(rb.Hashing(buckets=20), rb.LowRank(rank=2)),
    "hashed, int8": applied(rb.Hashing(buckets=20), rb.Quantize()),
    "shrunk": applied(rb.Shrinkage(counts=None)),
}
QUICK = [
    ("dcn_v2", "plain"),
    ("deepfm", "packed"),
    ("xdeepfm", "hashed"),
    ("dlrm", "int4"),
    ("fm", "coded"),
]
STORED = ("plain", "hashed", "int8", "packed", "coded")
"""What tables of a trained model are stored as; the other kinds are merged, or made of these."""
EVERY = [(name, kind) for name in model_names() for kind in STORED]
EVERY += [
    (name, kind)
    for name in ("dcn_v2", "deepfm", "final_mlp")
    for kind in KINDS
    if kind not in STORED
]
EVERY = [case for case in EVERY if case not in QUICK]


def scores_of_model(model, frame):
    encoder = encoder_of(model)
    return rb.predict(model, encode_like(frame, encoder)).sigmoid().numpy()


def scores_of_file(path, model, frame):
    session = onnxruntime.InferenceSession(path)
    return session.run(["score"], text_inputs(encoder_of(model), frame))[0]


@pytest.mark.parametrize(("name", "kind"), slow_after([*QUICK, *EVERY], len(QUICK)))
def test_round_trip_of_models_and_kinds_of_tables(tmp_path, data, name, kind):
    model = model_of(data, name)
    try:
        KINDS[kind](model)
    except rb_refusal() as refusal:
        pytest.skip(f"{kind} is not for {name}: {refusal}")
    if kind == "shrunk":
        rb.set_counts_(model, data.counts())
    exported = rb.export(model, tmp_path / "clicks.onnx")
    assert exported.largest_difference <= 1e-6
    assert exported.rows == 1000
    found = scores_of_file(tmp_path / "clicks.onnx", model, later_rows())
    np.testing.assert_allclose(found, scores_of_model(model, later_rows()), rtol=0, atol=1e-6)
    assert len(set(np.round(found, 5))) > 2  # else any encoding would do


def rb_refusal():
    return (rb.errors.TableError, SettingsError)


def test_the_file_describes_itself(tmp_path, data):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx", rows=data, facts={"test_auc": 0.75})
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    described = json.loads(session.get_modelmeta().custom_metadata_map["rarebit"])
    assert described["model"] == "deepfm"
    assert described["training"] == {"test_auc": 0.75}
    assert described["tables"] == {"kind": "plain", "bytes": exporting.table_bytes(model)}
    assert [column["name"] for column in described["columns"]] == list(data.schema.names)
    assert described["check"]["rows"] == 1000 + len(data)
    assert len(described["score_deciles"]) == 9
    assert described["vocabulary"] == exporting.vocabulary_signature(model.schema)
    examples = pl.DataFrame(described["examples"]["columns"], strict=False)
    again = scores_of_model(model, examples)
    np.testing.assert_allclose(again, described["examples"]["scores"], atol=1e-6)
    graph = onnx.load(tmp_path / "a.onnx").graph
    assert [value.name for value in graph.output] == ["score", "unknown"]


def test_unknown_values_are_counted_by_field(tmp_path, data):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    [unknown] = session.run(["unknown"], text_inputs(encoder_of(model), later_rows()))
    fields = [field.name for field in model.schema.table_fields]
    assert unknown[:, fields.index("user")].tolist() == [0, 1, 0, 0, 0, 1, 1, 0]
    assert unknown[:, fields.index("tags")].tolist() == [0, 0, 0, 0, 1, 0, 1, 0]


def test_a_number_that_data_prepare_refuses_has_no_score(tmp_path, data):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx")
    inputs = text_inputs(encoder_of(model), later_rows())
    inputs["price"][1], inputs["age"][2] = np.inf, 1e300
    [scores] = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(["score"], inputs)
    assert np.isnan(scores).tolist() == [False, True, True, *[False] * 5]


def test_the_file_scores_in_a_process_without_rarebit_and_torch(tmp_path, data):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx")
    program = """
import json, sys
import numpy as np, onnxruntime
row = {"user": "u1", "price": 2.5, "tags": "a|b", "item": "1", "score of the day": 0.5, "age": 40.0}
inputs = {name: np.array([value], object if isinstance(value, str) else float) for name, value in row.items()}
print(json.dumps(onnxruntime.InferenceSession(sys.argv[1]).run(["score"], inputs)[0].tolist()))
assert not {"rarebit", "torch", "polars"} & set(sys.modules)
"""
    command = [sys.executable, "-I", "-c", program, tmp_path / "a.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = {"user": "u1", "price": 2.5, "tags": "a|b", "item": "1", "score of the day": 0.5}
    wanted = scores_of_model(
        model, pl.DataFrame({name: [v] for name, v in (row | {"age": 40.0}).items()})
    )
    assert json.loads(done.stdout) == pytest.approx(wanted.tolist(), abs=1e-6)


def test_a_file_that_scores_differently_is_not_kept(tmp_path, data, monkeypatch):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx")
    before = (tmp_path / "a.onnx").read_bytes()
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="scores differently from the model, by up to"):
        rb.export(model, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_a_wrong_graph_is_noticed(tmp_path, data, monkeypatch):
    from rarebit.export import encoding

    monkeypatch.setattr(encoding, "FIRST_VALUE", 4)  # every value has the row of its neighbour
    with pytest.raises(ExportError, match=r"scores differently|cannot score"):
        rb.export(model_of(data), tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_large_weights_lie_in_a_second_file(tmp_path, data, monkeypatch):
    monkeypatch.setattr(exporting, "ONE_FILE_BYTES", 100_000)
    model = model_of(data)
    exported = rb.export(model, tmp_path / "clicks.onnx")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert re.fullmatch(r"clicks\.onnx\.[0-9a-f]{8}\.data", names[1])
    assert exported.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    found = scores_of_file(tmp_path / "clicks.onnx", model, later_rows())
    np.testing.assert_allclose(found, scores_of_model(model, later_rows()), atol=1e-6)


def test_a_vocabulary_too_large_for_a_file_is_refused(tmp_path, data, monkeypatch):
    monkeypatch.setattr(exporting, "ONE_FILE_BYTES", 1000)
    with pytest.raises(ExportError, match="the vocabulary alone takes"):
        rb.export(model_of(data), tmp_path / "clicks.onnx")


def test_ids_in(tmp_path, data):
    model = model_of(data)
    rb.export(model, tmp_path / "a.onnx", ids=True)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    ids, numeric = data[:50].ids.long().numpy(), data[:50].numeric.numpy()
    [scores] = session.run(None, {"ids": ids, "numeric": numeric})
    np.testing.assert_allclose(scores, rb.predict(model, data).sigmoid()[:50], atol=1e-6)


def test_pt2_loads_with_torch_alone(tmp_path, data):
    model = model_of(data)
    exported = rb.export(model, tmp_path / "a.pt2", to="pt2")
    assert exported.largest_difference <= 1e-6
    extra = {"rarebit.json": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=extra).module()
    scores = program(ids=data[:7].ids.long(), numeric=data[:7].numeric)
    torch.testing.assert_close(scores, rb.predict(model, data).sigmoid()[:7])
    assert json.loads(extra["rarebit.json"])["model"] == "deepfm"


def test_a_triton_folder_gets_a_version_with_each_export(tmp_path, data):
    model = model_of(data)
    for _ in range(2):
        rb.export(model, tmp_path / "clicks", to="triton")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == ["clicks/1/model.onnx", "clicks/2/model.onnx", "clicks/config.pbtxt"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "TOLERANCE", -1.0)
        with pytest.raises(ExportError, match="scores differently"):
            rb.export(model, tmp_path / "clicks", to="triton")
    assert sorted(path.name for path in (tmp_path / "clicks").iterdir()) == [
        "1",
        "2",
        "config.pbtxt",
    ]
    config = (tmp_path / "clicks" / "config.pbtxt").read_text()
    assert 'name: "clicks"' in config
    inputs = re.findall(r'input \{ name: "([^"]*)" data_type: (\w+) dims: \[ 1 \] reshape', config)
    assert dict(inputs)["score of the day"] == "TYPE_FP64"
    assert dict(inputs)["user"] == "TYPE_STRING"
    assert [name for name, _ in inputs] == list(model.schema.names)


def test_plain_tables_and_the_vocabulary(tmp_path, data):
    model = model_of(data)
    rb.apply_(model, rb.LowRank(rank=2), verbose=False)
    rb.export(model, tmp_path / "plain", to="torch")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    vocabulary = pl.read_parquet(tmp_path / "plain" / "vocabulary.parquet")
    [number] = vocabulary.filter((pl.col("vocabulary") == "user") & (pl.col("value") == "u1"))["id"]
    embedding = nn.Embedding.from_pretrained(tensors["backbone.tables.user.weight"])
    rb.merge_(model, verbose=False)
    [user] = [
        t for t in model.backbone.tables.tables() if t.num_embeddings == data.schema["user"].rows
    ]
    torch.testing.assert_close(embedding(torch.tensor(number)), user.weight[number])
    assert "head.mlp.layers.0.weight" in tensors
    assert not [name for name in tensors if "stacks" in name]
    with pytest.raises(ExportError, match="exists; choose another folder"):
        rb.export(model, tmp_path / "plain", to="torch")


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(500, 16)
        self.history = nn.EmbeddingBag(500, 16, mode="mean")
        self.score = nn.Linear(32, 1)

    def forward(self, item, history):
        return self.score(torch.cat([self.item(item), self.history(history)], dim=1)).squeeze(1)


@pytest.mark.parametrize(
    "kind",
    slow_after(["packed", *(kind for kind in KINDS if kind not in ("sets", "shrunk", "packed"))]),
)
def test_a_model_of_another_class_takes_its_ids(tmp_path, kind):
    torch.manual_seed(0)
    model = TwoTower()
    KINDS[kind](model)
    example = {"item": torch.randint(500, (8,)), "history": torch.randint(500, (8, 10))}
    rb.export(model, tmp_path / "own.onnx", example=example)
    item, history = torch.randint(500, (33,)), torch.randint(500, (33, 10))
    session = onnxruntime.InferenceSession(tmp_path / "own.onnx")
    [output] = session.run(None, {"item": item.numpy(), "history": history.numpy()})
    np.testing.assert_allclose(output, model(item, history).detach().numpy(), atol=1e-6)
    rb.export(model, tmp_path / "own.pt2", to="pt2", example=tuple(example.values()))


def test_the_model_is_left_as_it_is(tmp_path, data):
    model = model_of(data).train()
    rb.apply_(model, rb.MLET(inner_dim=16), verbose=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rb.export(model, tmp_path / "a.onnx")
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Words(nn.Module):
    def forward(self, x):
        return {"x": x}


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (TwoTower, {}, SettingsError, "TwoTower is your own class: give an example"),
        (
            TwoTower,
            {"example": ()},
            SettingsError,
            "example must have tensors for inputs of TwoTower",
        ),
        (TwoTower, {"example": {"itm": torch.ones(4)}}, SettingsError, r"\(item, history\)"),
        (
            TwoTower,
            {"example": (torch.ones(4).long(), torch.ones(3, 2).long())},
            SettingsError,
            "item: 4, history: 3",
        ),
        (TwoTower, {"to": "onx"}, SettingsError, "unknown format 'onx'; did you mean 'onnx'"),
        (Words, {"example": (torch.ones(4),)}, ExportError, "Words returns dict"),
        (Branching, {"example": (torch.ones(4),)}, ExportError, "torch cannot trace Branching"),
    ],
)
def test_mistakes_are_explained(tmp_path, make, options, error, message):
    with pytest.raises(error, match=message):
        rb.export(make(), tmp_path / "a.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_with_models_of_rarebit_are_explained(tmp_path, data):
    model = model_of(data)
    with pytest.raises(SettingsError, match="leave out example="):
        rb.export(model, tmp_path / "a.onnx", example=(torch.ones(3),))
    with pytest.raises(SettingsError, match="it takes ids"):
        rb.export(model, tmp_path / "a.pt2", to="pt2", ids=False)
    with pytest.raises(ExportError, match="it is a folder"):
        rb.export(model, tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ExportError, match="no model of a Triton repository"):
        rb.export(model, tmp_path / "full", to="triton")
    without = rb.data.generate(rb.data.SyntheticLog(rows=1000))[0]
    with pytest.raises(SettingsError, match=r"the model has no vocabulary.*--ids"):
        rb.export(build_model("fm", without.schema, {"dim": 2}), tmp_path / "a.onnx")
    named = rb.Dataset.from_frame({"score": ["a", "b"] * 20, "click": [0, 1] * 20}, label="click")
    with pytest.raises(ExportError, match="'score' has the name of an output"):
        rb.export(build_model("fm", named.schema, {"dim": 2}), tmp_path / "a.onnx")


def test_columns_may_have_the_names_of_values_inside(tmp_path):
    names = ["ids", "numeric", "backbone", "x", "model/ids", "encode/0/0", "val_0"]
    frame = {name: [f"{n % 7}" for n in range(40)] for name in names} | {"click": [0, 1] * 20}
    data = rb.Dataset.from_frame(
        frame, schema=LogSchema(label="click", columns=tuple(Column(name=n) for n in names))
    )
    model = model_of(data, "dcn_v2")
    rb.export(model, tmp_path / "a.onnx")
    later = pl.DataFrame({name: ["1", "9"] for name in names})
    found = scores_of_file(tmp_path / "a.onnx", model, later)
    np.testing.assert_allclose(found, scores_of_model(model, later), atol=1e-6)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run on a prepared log, by the command line."""
    folder = tmp_path_factory.mktemp("run")
    draw = np.random.default_rng(0)
    user, item = draw.integers(0, 60, 1500), draw.integers(0, 40, 1500)
    frame = pl.DataFrame(
        {
            "user": [f"u{n}" for n in user],
            "item": item,
            "price": draw.normal(10, 3, 1500).round(2),
            "click": ((user + item + draw.integers(0, 30, 1500)) % 3 == 0).astype(int),
        }
    )
    frame.write_csv(folder / "log.csv")
    for words in (
        f"data prepare {folder}/log.csv --label click --out {folder}/data",
        f"train --data {folder}/data --model fm --epochs 2 --device cpu --out {folder}/clicks",
    ):
        done = CliRunner().invoke(app, words.split())
        assert done.exit_code == 0, done.output
    frame.drop("click").head(50).with_columns(user=pl.lit("new")).write_parquet(
        folder / "new.parquet"
    )
    return folder


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)


def test_predict_gives_the_same_scores_with_the_file_as_with_the_run(run_folder, tmp_path):
    done = command("export", run_folder / "clicks", "--out", tmp_path / "clicks.onnx")
    assert done.exit_code == 0, done.output
    assert re.search(
        r"clicks.onnx: [\d.]+ MB; checked in a fresh process: 1,150 rows",
        " ".join(done.output.split()),
    )
    for log in ("new.parquet", "log.csv"):
        outputs = []
        for number, model in enumerate((run_folder / "clicks", tmp_path / "clicks.onnx")):
            out = tmp_path / f"{number}.csv"
            done = command("predict", "--model", model, "--input", run_folder / log, "--out", out)
            assert done.exit_code == 0, done.output
            outputs.append((pl.read_csv(out), done.output.partition("rows scored")[2]))
        (run, told), (file, told_by_file) = outputs
        assert told.replace(str(tmp_path / "0.csv"), "") == told_by_file.replace(
            str(tmp_path / "1.csv"), ""
        )
        np.testing.assert_allclose(run["score"], file["score"], atol=1e-6)
        assert run.drop("score").equals(file.drop("score"))


def test_the_export_knows_the_run(run_folder, tmp_path):
    assert command("export", run_folder / "clicks", "--out", tmp_path / "a.onnx").exit_code == 0
    described = json.loads(
        onnxruntime.InferenceSession(tmp_path / "a.onnx")
        .get_modelmeta()
        .custom_metadata_map["rarebit"]
    )
    assert described["training"]["model"] == "fm"
    assert 0.4 < described["training"]["test_auc"] < 1.0
    assert str(run_folder) not in json.dumps(described)
    moved = shutil.copytree(run_folder / "clicks", tmp_path / "moved")
    run = json.loads((moved / "run.json").read_text())
    run["settings"]["data"]["folder"] = str(tmp_path / "gone")
    (moved / "run.json").write_text(json.dumps(run))
    done = command("export", moved, "--out", tmp_path / "b.onnx")
    assert done.exit_code == 0, done.output
    assert "generated rows, since the log is not at hand" in " ".join(done.output.split())


def test_mistakes_on_the_command_line(run_folder, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match="no file that rarebit export made for raw values"):
        app(
            [
                "predict",
                "--model",
                str(tmp_path / "bad.onnx"),
                "--input",
                str(run_folder / "log.csv"),
            ]
        )
    with pytest.raises(SettingsError, match="name a log with --input"):
        app(["predict", "--model", str(tmp_path / "bad.onnx")])
    with pytest.raises(ModelFileError, match="holds no"):
        app(["export", str(tmp_path)])
    pl.DataFrame({"user": ["a"]}).write_csv(tmp_path / "short.csv")
    assert command("export", run_folder / "clicks", "--out", tmp_path / "a.onnx").exit_code == 0
    with pytest.raises(rb.errors.DataError, match="has no column 'item'"):
        app(
            ["predict", "--model", str(tmp_path / "a.onnx"), "--input", str(tmp_path / "short.csv")]
        )
