"""Scores of raw rows: equal to those of the same rows encoded by hand, and never half-written."""

import gzip
import json
import math
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.errors import DataError, ModelFileError, SettingsError  # noqa: E402  # the same
from rarebit.models.fm import FM  # noqa: E402  # the same
from rarebit.training.score import score_log  # noqa: E402  # the same


def frame(n, first=0):
    rows = range(first, first + n)
    return pl.DataFrame(
        {
            "user": [f"u{i * i % 23}" for i in rows],
            "tags": ["|".join("abcdefgh"[i // 3 % 6 :][: 1 + i % 3]) for i in rows],
            "price": [i % 31 + 0.25 for i in rows],
            "click": [i * i % 23 % 2 for i in rows],
        }
    )


@pytest.fixture
def data():
    return rb.Dataset.from_frame(frame(400), label="click")


@pytest.fixture
def model(data):
    model = FM(data.schema, dim=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def new_rows():
    """Return rows with users, tags and prices that the model does not know, and missing ones."""
    new = frame(60, first=1000).with_columns(
        user=pl.when(pl.int_range(60) % 5 == 0).then(pl.lit("eve")).otherwise("user"),
        tags=pl.when(pl.int_range(60) % 7 == 0).then(pl.lit("a|zz|yy")).otherwise("tags"),
        price=pl.when(pl.int_range(60) % 9 == 0).then(None).otherwise("price"),
    )
    return new.with_columns(user=pl.when(pl.int_range(60) % 11 != 0).then("user"))


def expected_scores(model, data, rows):
    return rb.predict(model, rb.Dataset.from_frame(rows, like=data)).sigmoid().tolist()


def write(rows, path):
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
        rows.write_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(rows.write_csv(separator="\t").encode()))
    else:
        rows.write_csv(path)
    return path


@pytest.mark.parametrize("name", ["new.csv", "new.tsv.gz", "new.parquet"])
def test_scores_are_those_of_the_rows_encoded_like_the_data(tmp_path, data, model, name):
    rows = new_rows()
    unit, first = ("row", 1) if name.endswith(".parquet") else ("line", 2)
    scored = score_log(model, write(rows, tmp_path / name), out=tmp_path / "scores.csv")
    found = pl.read_csv(tmp_path / "scores.csv")
    assert found.columns == [unit, "score"]
    assert found[unit].to_list() == list(range(first, first + 60))
    expected = expected_scores(model, data, rows)
    assert found["score"].to_list() == pytest.approx(expected, rel=1e-6)
    assert scored.rows == 60
    assert {path.name for path in tmp_path.iterdir()} == {name, "scores.csv"}


def test_unknown_values_are_counted_by_field(tmp_path, data, model):
    rows = new_rows()
    known = set(data.schema.encoder.values["user"]), set(data.schema.encoder.values["tags"])
    users = sum(user not in known[0] for user in rows["user"] if user is not None)
    tags = sum(tag not in known[1] for tags in rows["tags"] for tag in tags.split("|"))
    assert users > 0
    assert tags >= 2 * 9
    assert score_log(model, write(rows, tmp_path / "new.csv")).unknown == {
        "user": users,
        "tags": tags,
    }


def test_a_log_with_the_label_is_measured_and_one_without_is_not(tmp_path, data, model):
    rows = new_rows()
    scored = score_log(model, write(rows, tmp_path / "new.csv"))
    whole = rb.evaluate(model, rb.Dataset.from_frame(rows, like=data)).overall
    assert scored.metrics.auc == pytest.approx(whole.auc)
    assert scored.metrics.logloss == pytest.approx(whole.logloss, rel=1e-5)
    bare = score_log(model, write(rows.drop("click"), tmp_path / "bare.csv"))
    assert (bare.metrics, bare.rows, bare.unknown) == (None, 60, scored.unknown)


def test_sure_scores_are_measured_by_what_the_model_said(tmp_path, data, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(40)  # chances that a float32 takes for exactly 0 or 1
    rows = new_rows()
    scored = score_log(model, write(rows, tmp_path / "new.csv"))
    whole = rb.evaluate(model, rb.Dataset.from_frame(rows, like=data)).overall
    assert math.isfinite(scored.metrics.logloss)
    assert scored.metrics.logloss == pytest.approx(whole.logloss, rel=1e-4)
    assert scored.metrics.auc == pytest.approx(whole.auc)


def test_columns_may_be_in_any_order_and_more_than_needed(tmp_path, data, model):
    rows = new_rows()
    mixed = rows.select("price", pl.lit("x").alias("more"), "tags", "user")
    score_log(model, write(mixed, tmp_path / "new.csv"), out=tmp_path / "scores.csv")
    found = pl.read_csv(tmp_path / "scores.csv")["score"].to_list()
    assert found == pytest.approx(expected_scores(model, data, rows), rel=1e-6)


def damaged(path, rows):
    """Write a log whose lines 4, 9 and 10 are bad: few values, no label, no number."""
    lines = write(rows, path).read_text().splitlines()
    lines[3] = "broken"
    lines[8] = lines[8].rpartition(",")[0] + ",5"
    user, tags, _, click = lines[9].split(",")
    lines[9] = f"{user},{tags},dear,{click}"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_with_bad_rows_aside_every_score_keeps_its_line(tmp_path, data, model):
    rows = new_rows()
    log = damaged(tmp_path / "new.csv", rows)
    scored = score_log(model, log, out=tmp_path / "scores.csv", bad_rows="aside")
    assert (scored.rows, scored.bad_rows) == (57, 3)
    found = pl.read_csv(tmp_path / "scores.csv")
    kept = [line for line in range(2, 62) if line not in (4, 9, 10)]
    assert found["line"].to_list() == kept
    expected = expected_scores(model, data, rows)
    assert found["score"].to_list() == pytest.approx(
        [expected[line - 2] for line in kept], rel=1e-6
    )
    aside = (tmp_path / "scores.csv.bad_rows.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["line"] for line in aside) == [4, 9, 10]


def test_bad_rows_of_an_earlier_log_do_not_stay(tmp_path, model):
    log, out = damaged(tmp_path / "new.csv", new_rows()), tmp_path / "scores.csv"
    aside = tmp_path / "scores.csv.bad_rows.jsonl"
    for _ in range(2):
        score_log(model, log, out=out, bad_rows="aside")
        assert len(aside.read_text().splitlines()) == 3
    write(new_rows(), log)
    score_log(model, log, out=out, bad_rows="aside")
    assert not aside.exists()


def test_bad_rows_stop_by_default_and_leave_nothing_new(tmp_path, model):
    log, out = damaged(tmp_path / "new.csv", new_rows()), tmp_path / "scores.csv"
    out.write_text("scores of before\n")
    with pytest.raises(DataError, match=r"new\.csv, line 4: .*3 malformed rows in total"):
        score_log(model, log, out=out)
    assert out.read_text() == "scores of before\n"
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "scores.csv"}


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, model):
    path = tmp_path / "new.tsv.gz"
    write(new_rows(), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cut off or damaged"):
        score_log(model, path, out=tmp_path / "scores.csv", bad_rows="aside")
    assert [file.name for file in tmp_path.iterdir()] == ["new.tsv.gz"]


def test_a_full_disk_is_told_and_leaves_the_scores_of_before(tmp_path, model):
    log, out = write(new_rows(), tmp_path / "new.csv"), tmp_path / "scores.csv"
    out.write_text("scores of before\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file may grow beyond 100 bytes
    try:
        with pytest.raises(DataError, match=r"cannot write .*scores\.csv.*too large"):
            score_log(model, log, out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_text() == "scores of before\n"
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "scores.csv"}


def test_what_a_killed_run_left_is_not_taken_up(tmp_path, model):
    for name, text in [
        ("scores.csv", "line,score\n2,0.1\n"),
        ("scores.csv.bad_rows.jsonl", "{}\n"),
    ]:
        (tmp_path / f".{name}.999999999.writing").write_text(text)
    log = write(new_rows(), tmp_path / "new.csv")
    score_log(model, log, out=tmp_path / "scores.csv")
    assert pl.read_csv(tmp_path / "scores.csv").height == 60
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "scores.csv"}


def test_a_folder_of_logs_is_scored_with_the_name_of_each_file(tmp_path, data, model):
    rows = new_rows()
    (tmp_path / "logs").mkdir()
    write(rows[:40], tmp_path / "logs" / "a.csv")
    write(rows[40:], tmp_path / "logs" / "b.csv")
    score_log(model, tmp_path / "logs", out=tmp_path / "scores.csv")
    found = pl.read_csv(tmp_path / "scores.csv")
    assert found["file"].to_list() == ["a.csv"] * 40 + ["b.csv"] * 20
    assert found["line"].to_list() == [*range(2, 42), *range(2, 22)]
    expected = expected_scores(model, data, rows)
    assert found["score"].to_list() == pytest.approx(expected, rel=1e-6)


def test_a_long_log_is_scored_chunk_by_chunk(tmp_path, data, model):
    rows = pl.concat([new_rows()] * 4000)
    pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
    seen = []
    scored = score_log(
        model,
        write(rows, tmp_path / "new.parquet"),
        out=tmp_path / "scores.csv",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) >= 3
    assert seen[-1][0] == seen[-1][1]
    found = pl.read_csv(tmp_path / "scores.csv")
    assert found["row"].to_list() == list(range(1, 240_001))
    expected = expected_scores(model, data, new_rows()) * 4000
    assert torch.allclose(torch.tensor(found["score"].to_list()), torch.tensor(expected), rtol=1e-5)
    once = score_log(model, write(new_rows(), tmp_path / "once.parquet"))
    assert scored.unknown == {name: 4000 * count for name, count in once.unknown.items()}
    assert scored.metrics.auc == pytest.approx(once.metrics.auc)


def test_a_missing_column_is_named(tmp_path, model):
    log = write(new_rows().rename({"price": "prices"}), tmp_path / "new.csv")
    with pytest.raises(DataError, match="has no column 'price'; did you mean 'prices'"):
        score_log(model, log, out=tmp_path / "scores.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_a_log_of_bad_rows_only_gives_no_scores(tmp_path, model):
    log = tmp_path / "new.csv"
    log.write_text("user,tags,price,click\na,b\nc,d\n")
    with pytest.raises(DataError, match=r"no row of .* could be read: 2 x wrong number of columns"):
        score_log(model, log, out=tmp_path / "scores.csv", bad_rows="aside")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_where_scores_cannot_go_is_told(tmp_path, model):
    log = write(new_rows(), tmp_path / "new.csv")
    before = log.read_bytes()
    with pytest.raises(DataError, match=r"cannot write .*no' is missing; choose another folder"):
        score_log(model, log, out=tmp_path / "no" / "scores.csv")
    with pytest.raises(DataError, match="it is a folder; name a file"):
        score_log(model, log, out=tmp_path)
    (tmp_path / "link.csv").symlink_to(log)
    for out in (log, tmp_path / "link.csv"):
        with pytest.raises(DataError, match="the scores would replace the log"):
            score_log(model, log, out=out)
    with pytest.raises(SettingsError, match="written to a file next to the scores"):
        score_log(model, log, bad_rows="aside")
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        FM(rb.Dataset.from_columns({"user": [0, 1]}, label=[0, 1]).schema, dim=2),
        nn.Linear(1, 1),
    ],
    ids=["ids", "foreign"],
)
def test_a_model_without_a_vocabulary_scores_no_raw_rows(other):
    with pytest.raises(ModelFileError, match="the model has no vocabulary"):
        score_log(other, Path("new.csv"))


def test_a_label_column_without_a_label_is_as_good_as_none(tmp_path, model, data):
    rows = new_rows()
    path = write(rows.with_columns(click=pl.lit(None, dtype=pl.Int64)), tmp_path / "new.csv")
    scored = score_log(model, path, out=tmp_path / "scores.csv")
    assert (scored.rows, scored.bad_rows, scored.metrics) == (60, 0, None)
    scores = pl.read_csv(tmp_path / "scores.csv")["score"].to_list()
    assert scores == pytest.approx(expected_scores(model, data, rows.drop("click")), abs=1e-6)
