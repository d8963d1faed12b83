"""Run folders and exported files, served with the scores of `rarebit predict`."""

import csv
import json
import random

import numpy as np
import polars as pl
import pytest
import torch
from served import serving

import rarebit as rb
from rarebit.data.dataset import Dataset
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.prepare import prepare
from rarebit.data.raw.chunks import BadRows
from rarebit.data.raw.encoder import encoder_of
from rarebit.data.raw.readers import read_frame
from rarebit.data.schema import UNKNOWN
from rarebit.models.fm import FM
from rarebit.serving.forms import from_rows
from rarebit.serving.scorer import EagerScorer, load_scorer
from rarebit.training.metrics import predict
from rarebit.training.model_file import load_model
from rarebit.training.run import run
from rarebit.training.score import score_log
from rarebit.training.settings import RunSettings

ROWS = [
    {"user": user, "item": item, "tags": tags, "price": price}
    for user in ("u1", "nobody", None, "NULL")
    for item in ("7", "7.0", "no")
    for tags in ("a|b", "c", None, "a|zzz", "a|b|c|a")
    for price in ("1.5", None, "NULL", "1e9")
]


@pytest.fixture(scope="module", params=[None, 5], ids=["exported", "torch"])
def folder(request, tmp_path_factory):
    """Return a trained run; one with a hashed column cannot be exported."""
    place, draw = tmp_path_factory.mktemp("run"), random.Random(0)  # noqa: S311  # nothing secret
    with (place / "clicks.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["click", "user", "item", "tags", "price"])
        for _ in range(400):
            tags = "|".join(draw.sample("abc", draw.randrange(4)))
            price = draw.choice(["NULL", f"{draw.random():.3f}"])
            out.writerow(
                [draw.randrange(2), f"u{draw.randrange(9)}", draw.randrange(9), tags, price]
            )
    columns = (
        Column(name="user"),
        Column(name="item", buckets=request.param),
        Column(name="tags", kind="multi", separator="|", max_length=3),
        Column(name="price", kind="numeric"),
    )
    schema = LogSchema(label="click", columns=columns, missing=("NULL",))
    prepare(place / "clicks.csv", place / "data", schema=schema)
    settings = {"model": {"name": "fm", "dim": 4}, "data": {"folder": str(place / "data")}}
    settings["training"] = {"epochs": 1, "batch_size": 64}
    run(RunSettings.from_mapping(settings), folder=place / "clicks", say=lambda _: None)
    return place / "clicks"


@pytest.fixture(scope="module")
def predicted(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("predicted")
    with (place / "new.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, list(ROWS[0]))
        out.writeheader()
        out.writerows(ROWS)
    score_log(load_model(folder), place / "new.csv", out=place / "scores.csv")
    with (place / "scores.csv").open() as file:
        return [float(row["score"]) for row in csv.DictReader(file)]


def test_torch_scores_a_run_folder_as_predict_does(folder, predicted):
    scorer = EagerScorer(folder, 1)
    found = scorer.run(from_rows(ROWS, scorer.inputs).arrays)
    assert found.score == pytest.approx(predicted, abs=1e-6)
    assert scorer.fields == ("user", "item", "tags")
    unknown = [row["user"] == "nobody" for row in ROWS]
    assert found.unknown[:, 0].tolist() == unknown
    assert found.unknown[:, 2].tolist() == ["zzz" in (row["tags"] or "") for row in ROWS]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(Exception, match="model"):
        load_scorer(tmp_path, 1)


@pytest.mark.slow
def test_a_run_folder_is_served(folder, predicted, request):
    with serving(folder) as server:
        answer = server.score({"rows": ROWS})
        assert answer.status == 200, answer.body
        assert answer.json["scores"] == pytest.approx(predicted, abs=1e-6)
        note = server.status["models"][0]["note"]
        if "torch" in request.node.callspec.id:
            assert (
                "scored by torch, which is slower, because it cannot be exported: the column 'item'"
                in note
            )
            assert server.events("eager")
        else:
            assert note == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("user", pl.Series(["7", "7.0", "true", "True", "", "NULL", "ß→é", " ", None, "a\0b"])),
        ("user", pl.Series([7, -7, 0, 2**53, None, 10**18])),
        ("user", pl.Series([7.0, 7.5, -0.0, 1e-7, 0.00002, None, 2.0**53])),
        ("user", pl.Series([True, False, None])),
        ("tags", pl.Series([["a", "b"], [], None, ["a", None, "", "b"], ["zzz"], ["a\0b", "a\0"], list("abcab")])),
        ("words", pl.Series(["a|b", "", None, "a\0b|a", "a\0", "a||b", "zzz", "a|b|c|a", "|", "NULL"])),
        ("words", pl.Series([["a", "b"], [], None, ["zzz"], ["NULL"], ["7"]])),
        ("price", pl.Series([1, -1, None, 2**60])),
        ("price", pl.Series([1.5, -1e9, None, 1e9, 5e-324])),
        ("price", pl.Series([" 1.5", "-1e3", "", None, "NULL", ".5", "5."])),
        ("age", pl.Series([1.0, 2.0, 3.0, 1e6, -5.0, None])),
        ("bins", pl.Series([0.0, 0.5, 1e9, -1e9, None])),
    ],
    ids=lambda one: one if isinstance(one, str) else str(one.dtype),
)  # fmt: skip
def test_a_value_of_a_request_means_what_it_means_in_a_log(name, values, exported):
    """The whole way of a value, from JSON through the exported graph, compared with the encoder of the log."""
    model, scorer = exported
    usual = {
        "user": "7",
        "tags": ["a"],
        "words": "a",
        "price": 1.0,
        "age": 2.0,
        "bins": 0.5,
    }
    frame = pl.DataFrame({key: [one] * len(values) for key, one in usual.items()}).with_columns(
        values.alias(name)
    )
    rows = json.loads(json.dumps(frame.to_dicts()))
    encoder = encoder_of(model)
    chunks = read_frame(
        frame, encoder.columns_read(with_label=False), missing=encoder.schema.missing
    )
    encoded = [encoder.encode(chunk, BadRows()) for chunk in chunks]
    data = Dataset(
        encoder.fields,
        *(
            np.concatenate(parts)
            for parts in zip(*((one.ids, one.numeric) for one in encoded), strict=True)
        ),
    )
    wanted = predict(model, data).sigmoid().numpy()
    found = scorer.run(from_rows(rows, scorer.inputs).arrays)
    assert len(wanted) == len(values)
    assert found.score == pytest.approx(wanted, abs=1e-6)
    known = (
        (data.ids[:, data.schema.slots[name]] != UNKNOWN).all(1) if name in scorer.fields else None
    )
    if known is not None:
        assert found.unknown[:, scorer.fields.index(name)].tolist() == (~known).tolist()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a model with every kind of column, and its exported file."""
    draw = random.Random(0)  # noqa: S311  # nothing secret
    rows = 300
    frame = pl.DataFrame(
        {
            "click": [draw.randrange(2) for _ in range(rows)],
            "user": [draw.choice(["7", "-7", "7.5", "true", "1e-7", "0.00002", "0", "ß→é", "a"]) for _ in range(rows)],
            "tags": [draw.sample("abc", draw.randrange(4)) for _ in range(rows)],
            "words": ["|".join(draw.sample("abc7", draw.randrange(4))) for _ in range(rows)],
            "price": [draw.gauss(0, 3) for _ in range(rows)],
            "age": [float(draw.randrange(1, 90)) for _ in range(rows)],
            "bins": [draw.random() for _ in range(rows)],
        }
    )  # fmt: skip
    schema = LogSchema(
        label="click",
        missing=("NULL", "-1"),
        unknown_share=0.0,
        columns=(
            Column(name="user"),
            Column(name="tags", kind="multi", max_length=3),
            Column(name="words", kind="multi", separator="|", max_length=3),
            Column(name="price", kind="numeric"),
            Column(name="age", kind="numeric", treatment="log_square"),
            Column(name="bins", kind="numeric", treatment="quantile", bins=4),
        ),
    )
    model = FM(Dataset.from_frame(frame, schema=schema).schema, dim=4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    path = tmp_path_factory.mktemp("exported") / "clicks.onnx"
    rb.export(model, path)
    return model, load_scorer(path, 1)
