"""Weights and groups of a raw log: read, checked, stored, and the same however the log was prepared."""

import json

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data import Column, LogSchema, Split, count_part, encode_part, merge_parts  # noqa: E402  # the same
from rarebit.data.prepare import prepare  # noqa: E402  # the same
from rarebit.errors import DataError, SettingsError  # noqa: E402  # the same

SCHEMA = LogSchema(
    label="click",
    columns=(Column(name="user"), Column(name="w", kind="ignored")),
    weight="w",
    group="session",
    split=Split(kind="order"),
)


def frame_of(rows=40):
    return pl.DataFrame(
        {
            "click": [n % 2 for n in range(rows)],
            "user": [f"u{n % 3}" for n in range(rows)],
            "w": [n / 8 for n in range(rows)],
            "session": [None if n == 5 else f"s{n // 4}" for n in range(rows)],
        }
    )


def test_weights_and_groups_come_from_the_log(tmp_path):
    frame = frame_of()
    frame.write_csv(tmp_path / "log.csv")
    data = prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA)
    assert data.weight.tolist() == frame["w"].to_list()
    assert data.group[5] == 0, "a row without a value has no group"
    groups = data.group.tolist()
    assert groups[0] == groups[3] != groups[4]
    assert len(set(groups)) == 11
    assert all(group > 0 for n, group in enumerate(groups) if n != 5)
    assert [field.name for field in data.schema.fields] == ["user"]
    assert data.splits.valid.weight.tolist() == frame["w"].to_list()[32:36]
    opened = rb.Dataset.open(tmp_path / "out")
    assert (opened.group == data.group).all()
    in_memory = rb.Dataset.from_frame(frame, schema=SCHEMA)
    assert (in_memory.group == data.group).all()
    assert (in_memory.weight == data.weight).all()


def test_the_group_of_a_value_is_the_same_on_every_machine():
    data = rb.Dataset.from_frame(frame_of(), schema=SCHEMA)
    assert data.group[0] == 5299986109919969717, "stored logs have it"


def test_a_log_without_them_is_what_it_was(tmp_path):
    frame_of().write_csv(tmp_path / "log.csv")
    schema = LogSchema(label="click", columns=(Column(name="user"),))
    data = prepare(tmp_path / "log.csv", tmp_path / "out", schema=schema)
    assert data.weight is data.group is None
    assert "weight" not in (tmp_path / "out" / "schema.toml").read_text()
    encoder = json.loads((tmp_path / "out" / "encoder" / "encoder.json").read_text())
    assert not {"weight", "group"} & encoder["schema"].keys()
    assert not list((tmp_path / "out").glob("[wg]*.npy"))


def test_parts_give_the_folder_of_one_process(tmp_path):
    frame = frame_of()
    frame.write_csv(tmp_path / "all.csv")
    prepare(tmp_path / "all.csv", tmp_path / "whole", schema=SCHEMA)
    for name, part in (("a", frame[:13]), ("b", frame[13:])):
        part.write_csv(tmp_path / f"{name}.csv")
        count_part(tmp_path / f"{name}.csv", tmp_path / "counts" / name, schema=SCHEMA)
    counted = [tmp_path / "counts" / name for name in "ab"]
    merge_parts(counted, tmp_path / "parts")
    for part in counted:
        encode_part(part, tmp_path / "parts")
    for name in ("weight", "group", "label", "ids"):
        one, two = (
            (tmp_path / folder / f"{name}.npy").read_bytes() for folder in ("whole", "parts")
        )
        assert one == two


@pytest.mark.parametrize("wrong", ["-1", "many", "", "inf", "1e39"])
def test_a_wrong_weight_is_a_malformed_row(tmp_path, wrong):
    (tmp_path / "log.csv").write_text(f"click,user,w,session\n0,a,1,x\n1,b,{wrong},x\n")
    with pytest.raises(DataError, match="the weight w is not a number of at least 0"):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA)


def test_a_column_that_is_no_weight_is_named_even_where_labels_are_missing_too(tmp_path):
    rows = "".join(f"{'' if n < 3 else n % 2},a,name{n},x\n" for n in range(20))
    (tmp_path / "log.csv").write_text(f"click,user,w,session\n{rows}")
    with pytest.raises(
        DataError, match=r"no row of log\.csv could be read: 17 x the weight w is not"
    ):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, bad_rows="aside")


def test_rows_to_score_need_neither(tmp_path):
    data = rb.Dataset.from_frame(frame_of(), schema=SCHEMA)
    scored = rb.Dataset.from_frame({"user": ["u1"], "click": [1]}, like=data)
    assert scored.weight is scored.group is None
    assert int(scored.ids[0, 0]) == int(data.ids[1, 0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": "click"}, "the weight 'click' must be a column that the model does not read"),
        ({"weight": "user"}, "the weight 'user' must be a column that the model does not read"),
        ({"group": "click"}, "rows cannot be grouped by their label"),
    ],
)
def test_columns_that_cannot_have_the_role_are_refused(options, said):
    with pytest.raises(SettingsError, match=said):
        LogSchema(label="click", columns=(Column(name="user"),), **options)


def test_a_schema_and_names_exclude_each_other(tmp_path):
    with pytest.raises(SettingsError, match="give one of the two"):
        prepare(tmp_path / "log.csv", tmp_path / "out", schema=SCHEMA, weight="w")


def test_grouped_auc_is_in_the_result_of_a_run(tmp_path):
    frame = frame_of(600)
    frame.write_csv(tmp_path / "log.csv")
    prepare(tmp_path / "log.csv", tmp_path / "out", label="click", weight="w", group="session")
    settings = {
        "model": {"name": "lr"},
        "data": {"folder": str(tmp_path / "out")},
        "training": {"epochs": 1},
    }
    found = rb.run(
        rb.RunSettings.from_mapping(settings),
        folder=tmp_path / "run",
        progress=False,
        say=lambda _: None,
    )
    assert 0 <= found.test.grouped_auc <= 1
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["test"]["grouped_auc"] == pytest.approx(found.test.grouped_auc)
    assert np.isfinite(found.test.auc)
