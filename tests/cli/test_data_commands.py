"""`rarebit data`, and training and scoring on what it leaves, as a user meets them."""

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from capabilities import needs

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import rarebit as rb  # noqa: E402  # after the check that Polars is there
from rarebit.data.log_schema import LogSchema  # noqa: E402  # the same
from rarebit.data.schema import UNKNOWN  # noqa: E402  # the same

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(rb.__file__).parents[1]), "COLUMNS": "100"}
NAMES = ("user", "item", "tags", "price", "ts", "click")
COLUMNS = "100"


def rows_of(n=300):
    """Return rows of a small log: 12 users, 7 items, tags with a separator, a price, a time."""
    return [
        (
            f"u{i % 12}",
            f"i{i % 7}",
            "|".join("abcdefgh"[i // 3 % 6 :][: 1 + i % 3]),
            f"{i % 50}.5",
            f"2024-01-{1 + i * 28 // n:02d} 10:00:00",
            str(i % 5 % 2),
        )
        for i in range(n)
    ]


def as_text(rows, separator=",", names=NAMES):
    return "".join(separator.join(row) + "\n" for row in (names, *rows))


@pytest.fixture
def log(tmp_path):
    """A small log in the folder that commands are run in."""
    (tmp_path / "clicks.csv").write_text(as_text(rows_of()), "utf-8")
    return "clicks.csv"


def prepare(call, *words):
    """Prepare the log; return what was printed."""
    code, out, err = call("data", "prepare", *words)
    assert code == 0, err
    return out


def train(call, *words):
    code, out, err = call("train", "--model", "fm", "--epochs", "1", *words)
    assert code == 0, err
    return out


def test_a_log_is_prepared_by_naming_its_label(call, log):
    out = prepare(call, log, "--label", "click", "--out", "data/clicks")
    for column, kind in (("user", "categorical"), ("tags", "multi"), ("price", "numeric")):
        assert any(line.split()[:2] == [column, kind] for line in out.splitlines()), column
    assert "300 rows read = 300 encoded + 0 skipped." in out
    assert "train --data data/clicks\n" in out
    data = rb.Dataset.open("data/clicks", verify=True)
    assert [len(data), *map(len, data.splits)] == [300, 240, 30, 30]
    assert data.label.sum() == sum(int(row[-1]) for row in rows_of())
    schema = LogSchema.read(Path("data/clicks/schema.toml"))
    assert schema["tags"].separator == "|"
    assert {path.name for path in Path("data").iterdir()} == {"clicks"}


@pytest.mark.parametrize("name", ["clicks.parquet", "clicks.tsv.gz"])
def test_a_log_of_another_format_gives_the_same_data(call, log, name):
    if name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(as_text(rows_of(), "\t").encode()))
    else:
        pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
        frame = pl.DataFrame(rows_of(), schema=NAMES, orient="row")
        frame.with_columns(pl.col("price").cast(float), pl.col("click").cast(int)).write_parquet(
            name
        )
    prepare(call, log, "--label", "click", "--out", "text")
    prepare(call, name, "--label", "click", "--out", "other")
    text, other = rb.Dataset.open("text"), rb.Dataset.open("other")
    assert text.schema == other.schema
    assert (text.ids == other.ids).all()
    assert (text.numeric == other.numeric).all()
    assert (text.label == other.label).all()


def test_a_schema_is_written_edited_and_used(call, log):
    code, out, _ = call("data", "schema", log, "--label", "click", "--out", "my clicks.toml")
    assert code == 0
    assert "data prepare clicks.csv --schema 'my clicks.toml' --out data/clicks\n" in out
    file = Path("my clicks.toml")
    text = file.read_text().replace(
        'name = "user"\nkind = "categorical"', 'name = "user"\nkind = "ignored"'
    )
    file.write_text(text)
    prepare(call, log, "--schema", file, "--out", "here")
    assert rb.Dataset.open("here").schema.names == ("item", "tags", "price")
    assert LogSchema.read(Path("here/schema.toml")) == LogSchema.read(file)


def test_an_edited_schema_is_not_replaced_by_chance(call, log):
    Path("mine.toml").write_text("# edited\n")
    code, _, err = call("data", "schema", log, "--label", "click", "--out", "mine.toml")
    assert (code, "'mine.toml' exists already" in err) == (2, True)
    assert Path("mine.toml").read_text() == "# edited\n"
    assert (
        call("data", "schema", log, "--label", "click", "--out", "mine.toml", "--overwrite")[0] == 0
    )
    assert LogSchema.read(Path("mine.toml")).label == "click"


def test_a_schema_is_only_shown_without_a_file(call, log):
    code, out, _ = call("data", "schema", log, "--label", "click")
    assert (code, "categorical" in out, "--out" in out) == (0, True, True)
    assert [path.name for path in Path.cwd().iterdir()] == [log]


def test_a_split_by_time_puts_the_latest_rows_last(call):
    rows = rows_of()[::-1]
    Path("back.csv").write_text(as_text(rows))
    prepare(call, "back.csv", "--label", "click", "--split", "time", "--by", "ts", "--out", "here")
    latest = sorted(rows, key=lambda row: row[4])[270:]  # of equal times, the last rows
    frame = pl.DataFrame(latest, schema=NAMES, orient="row")
    data = rb.Dataset.open("here")
    expected = rb.Dataset.from_frame(frame, like=data)
    assert sorted(map(tuple, data.splits.test.ids.tolist())) == sorted(
        map(tuple, expected.ids.tolist())
    )


def test_a_split_by_user_keeps_each_user_in_one_part(call, log):
    prepare(
        call, log, "--label", "click", "--split", "user", "--by", "user", "--seed", "3",
        "--shares", "0.5,0.25,0.25", "--out", "here",
    )  # fmt: skip
    schema = LogSchema.read(Path("here/schema.toml"))
    assert (schema.split.seed, schema.split.shares) == (3, (0.5, 0.25, 0.25))
    parts = rb.Dataset.open("here").splits
    assert "user" not in parts.train.schema.names
    schema = schema.to_toml().replace('"user"\nkind = "ignored"', '"user"\nkind = "categorical"')
    Path("schema.toml").write_text(schema)
    shown = prepare(call, log, "--schema", "schema.toml", "--out", "there")
    assert "every 'user' of a test row is unknown" in " ".join(shown.split())
    parts = rb.Dataset.open("there").splits
    assert len(set(parts.train.ids[:, 0].tolist())) == 6  # half of the users
    for part in parts[1:]:
        assert len(part) == 75  # a quarter of the users, who have equally many rows
        assert set(part.ids[:, 0].tolist()) == {UNKNOWN}


def test_what_is_likely_a_mistake_is_reported(call, tmp_path):
    rows = [
        (*row[:3], row[3].replace(".", ","), str(n % 2), row[5]) for n, row in enumerate(rows_of())
    ]
    names = ("user", "item", "tags", "price", "converted", "click")
    (tmp_path / "clicks.csv").write_text(as_text(rows, ";", names), "utf-8")
    out = " ".join(prepare(call, "clicks.csv", "--label", "click", "--out", "here").split())
    assert "Check: 'price' is not numeric, because 300 of 300 values are not written as" in out
    assert "Check: 'converted' is a feature, and its name is like a label's; if it is one," in out


@pytest.mark.parametrize("bad_rows", ["stop", "aside"])
def test_labels_to_recode_are_listed(call, tmp_path, bad_rows):
    rows = [(*row[:5], "1" if row[5] == "1" else "-1") for row in rows_of()]
    (tmp_path / "clicks.csv").write_text(as_text(rows), "utf-8")
    words = ("clicks.csv", "--label", "click", "--out", "here", "--bad-rows", bad_rows)
    code, _, err = call("data", "prepare", *words)
    assert code == 2
    assert "'-1' (180), '1' (120)" in " ".join(err.split())
    assert not Path("here").exists()


def test_a_log_without_a_header_is_told_of_names(call, tmp_path):
    (tmp_path / "clicks.csv").write_text(as_text(rows_of()[1:], names=rows_of()[0]), "utf-8")
    code, _, err = call("data", "prepare", "clicks.csv", "--label", "0", "--out", "here")
    assert code == 2
    assert "looks like data ('u0', 'i0', 'a', '0.5', ...)" in " ".join(err.split())
    assert "--names" in err


def test_shares_and_seed_draw_other_rows(call, log):
    ids = []
    for number, words in enumerate([(), ("--seed", "0"), ("--seed", "1")]):
        prepare(call, log, "--label", "click", *words, "--shares", "0.5,0.3,0.2", "--out", number)
        data = rb.Dataset.open(str(number))
        assert list(map(len, data.splits)) == [150, 90, 60]
        ids.append(data.numeric.tolist())
    assert ids[0] == ids[1] != ids[2]


def test_options_of_the_split_change_only_what_they_name(call, log):
    call(
        "data",
        "schema",
        log,
        "--label",
        "click",
        "--split",
        "time",
        "--by",
        "ts",
        "--out",
        "s.toml",
    )
    prepare(call, log, "--schema", "s.toml", "--shares", "0.6,0.2,0.2", "--out", "a")
    split = LogSchema.read(Path("a/schema.toml")).split
    assert (split.kind, split.column, split.shares) == ("time", "ts", (0.6, 0.2, 0.2))
    prepare(call, log, "--schema", "s.toml", "--split", "order", "--out", "b")
    split = LogSchema.read(Path("b/schema.toml")).split
    assert (split.kind, split.column) == ("order", "")


def test_files_may_be_split_already(call, log):
    rows = rows_of()
    for name, part in {"t": rows[:200], "v": rows[200:250], "e": rows[250:]}.items():
        Path(f"{name}.csv").write_text(as_text(part))
    out = prepare(
        call, "t.csv", "--valid", "v.csv", "--test", "e.csv", "--label", "click", "--out", "here"
    )
    assert "given by the files" in out
    parts = rb.Dataset.open("here").splits
    assert list(map(len, parts)) == [200, 50, 50]
    assert parts.test.label.int().tolist() == [int(row[-1]) for row in rows[250:]]


def test_a_column_may_say_the_split(call):
    rows = [(*row, "train" if i < 250 else "test") for i, row in enumerate(rows_of())]
    Path("given.csv").write_text(as_text(rows, names=(*NAMES, "part")))
    prepare(call, "given.csv", "--label", "click", "--split", "given", "--by", "part", "--out", "x")
    assert list(map(len, rb.Dataset.open("x").splits)) == [250, 0, 50]
    assert "part" not in rb.Dataset.open("x").schema.names


def with_bad_rows():
    """Return the text of a log whose lines 5, 6 and 9 are bad: few values, a label, a number."""
    lines = as_text(rows_of()).splitlines()
    lines[4] = "u1,i1"
    lines[5] = lines[5][:-1] + "7"
    lines[8] = lines[8].replace(".5,", ".5x,")
    return "\n".join(lines) + "\n"


def test_a_bad_row_stops_by_default_and_says_where(call, log):
    call("data", "schema", log, "--label", "click", "--out", "s.toml")
    Path(log).write_text(with_bad_rows())
    code, _, err = call("data", "prepare", log, "--schema", "s.toml", "--out", "here")
    assert code == 2
    assert err.startswith("rarebit: clicks.csv, line 5: wrong number of columns (2, expected 6): ")
    assert err.count("\n") == 1
    assert "3 malformed rows in total" in err
    assert "--bad-rows aside" in err
    assert {path.name for path in Path.cwd().iterdir()} == {log, "s.toml"}


def test_bad_rows_are_set_aside_and_add_up(call, log):
    call("data", "schema", log, "--label", "click", "--out", "s.toml")
    Path(log).write_text(with_bad_rows())
    out = prepare(call, log, "--schema", "s.toml", "--bad-rows", "aside", "--out", "here")
    assert "300 rows read = 297 encoded + 3 skipped." in out
    assert "here/bad_rows.jsonl" in out
    lines = [json.loads(line) for line in Path("here/bad_rows.jsonl").read_text().splitlines()]
    assert sorted(line["line"] for line in lines) == [5, 6, 9]
    assert len(rb.Dataset.open("here")) == 297


def test_a_prepared_folder_is_replaced_only_when_asked(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    before = Path("here/manifest.json").read_bytes()
    Path("short.csv").write_text(as_text(rows_of(100)))
    code, _, err = call("data", "prepare", "short.csv", "--label", "click", "--out", "here")
    assert code == 2
    assert "here' exists already" in err
    assert Path("here/manifest.json").read_bytes() == before
    prepare(call, "short.csv", "--label", "click", "--out", "here", "--overwrite")
    assert len(rb.Dataset.open("here", verify=True)) == 100
    Path("mine").mkdir()
    code, _, err = call("data", "prepare", log, "--label", "click", "--out", "mine", "--overwrite")
    assert (code, "was not prepared by Rarebit" in err) == (2, True)


def test_well_known_sets_are_prepared_from_their_files(call):
    Path("raw").mkdir()
    row = ["1", "3", *[""] * 12, *["68fd1e64"] * 26]
    text = "".join("\t".join([str(i % 2), *row[1:]]) + "\n" for i in range(40)) + "broken\n"
    Path("raw/train.txt").write_text(text)
    out = prepare(call, "--source", "criteo", "--from", "raw", "--out", "criteo")
    assert "41 rows read = 40 encoded + 1 skipped." in out
    assert "Prepared from criteo." in out
    assert "Numbers become categories" in " ".join(out.split())
    assert len(rb.Dataset.open("criteo").schema.fields) == 39
    out = prepare(call, "--source", "criteo", "--from", "raw", "--protocol", "pep", "--out", "pep")
    assert "training knows the values of the test rows" in " ".join(out.split())
    header = "user item cnt daytime weekday isweekend homework cost weather country city"
    uses = [
        f"{i % 5}\ta{i % 7}\t1\tnoon\tmonday\tworkday\thome\tfree\tsunny\tSpain\t1"
        for i in range(20)
    ]
    Path("raw/frappe.csv").write_text("\n".join([header.replace(" ", "\t"), *uses]) + "\n")
    prepare(call, "--source", "frappe", "--from", "raw", "--out", "frappe")
    data = rb.Dataset.open("frappe")
    assert (len(data), int(data.label.sum())) == (60, 20)


def test_show_prints_what_was_prepared_and_verifies_it(call, log):
    printed = prepare(call, log, "--label", "click", "--out", "here")
    code, out, _ = call("data", "show", "here", "--verify")
    assert code == 0
    assert "All checksums match." in out
    for line in out.splitlines()[:-1]:
        assert line in printed
    path = Path("here/ids.npy")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert call("data", "show", "here")[0] == 0
    code, out, err = call("data", "show", "here", "--verify")
    assert (code, out, "'here/ids.npy' is damaged" in err) == (2, "", True)


def test_names_that_look_like_markup_are_printed_as_they_are(call, log):
    shutil.copy(log, "[bold]x.csv")
    out = prepare(call, "[bold]x.csv", "--label", "click", "--out", "[red]a b")
    assert "[red]a b/schema.toml" in out
    assert "train --data '[red]a b'\n" in out
    out = train(call, "--data", "[red]a b", "--out", "[run] 1")
    assert "Saved in [run] 1." in out
    assert "predict --model '[run] 1'\n" in out


LOG = ["data", "prepare", "clicks.csv", "--out", "x"]
LABELLED = [*LOG, "--label", "click"]
SCHEMA = ["data", "prepare", "clicks.csv", "--out", "x", "--schema", "given.toml"]
SOURCE = ["data", "prepare", "--source", "criteo", "--from", ".", "--out", "x"]
MISTAKES = {
    "no log": (["data", "prepare", "--label", "click", "--out", "x"], "no log; give a file"),
    "missing": (["data", "prepare", "no.csv", "--label", "y", "--out", "x"], "'no.csv' does not exist"),
    "no name": (["data", "prepare", "a.docx", "--label", "y", "--out", "x"], "cannot tell what 'a.docx' is"),
    "folder": (["data", "prepare", "folder", "--label", "y", "--out", "x"], "'folder' has no file of a log"),
    "empty": (["data", "prepare", "empty.csv", "--label", "y", "--out", "x"], "'empty.csv' is empty"),
    "header": (["data", "prepare", "head.csv", "--label", "click", "--out", "x"], "'head.csv' has no rows"),
    "no label": (LOG, "which column is the label?"),
    "label": ([*LOG, "--label", "clik"], "no column 'clik' for the label; did you mean 'click'?"),
    "no out": (["data", "prepare", "clicks.csv", "--label", "click"], "give the folder to create: --out"),
    "split": ([*LABELLED, "--split", "tme"], "unknown split 'tme'; did you mean 'time'?"),
    "time by": ([*LABELLED, "--split", "time"], "--split time needs a column: --by"),
    "given by": ([*LABELLED, "--split", "given"], "--split given needs a column: --by"),
    "only by": ([*LABELLED, "--by", "ts"], "--by ts needs a split by a column"),
    "by": ([*LABELLED, "--split", "user", "--by", "usr"], "did you mean 'user'?"),
    "shares": ([*LABELLED, "--shares", "0.8,x"], "--shares takes three numbers, such as 0.8,0.1,0.1; got '0.8,x'"),
    "sum": ([*LABELLED, "--shares", "0.8,0.1,0.2"], "three parts that add up to 1"),
    "bad rows": ([*LABELLED, "--bad-rows", "keep"], "--bad-rows must be stop or aside, got 'keep'"),
    "from": ([*LABELLED, "--from", "."], "--from cannot be combined with your own log"),
    "protocol": ([*LABELLED, "--protocol", "pep"], "--protocol cannot be combined with your own log"),
    "valid": ([*LABELLED, "--valid", "clicks.csv", "--split", "order"], "--split cannot be combined with --valid"),
    "no valid": ([*LABELLED, "--valid", "no.csv"], "'no.csv' does not exist"),
    "both": ([*SCHEMA, "--label", "click"], "--label cannot be combined with --schema"),
    "no schema": ([*LOG, "--schema", "no.toml"], "'no.toml' does not exist"),
    "no TOML": ([*LOG, "--schema", "clicks.csv"], "'clicks.csv' is not valid TOML"),
    "source": (["data", "prepare", "--source", "frape", "--from", ".", "--out", "x"], "did you mean 'frappe'?"),
    "no from": (["data", "prepare", "--source", "criteo", "--out", "x"], "--source needs the folder of its files: --from"),
    "files": (["data", "prepare", "--source", "frappe", "--from", ".", "--out", "x"], "needs frappe.csv"),
    "log and source": ([*SOURCE, "clicks.csv"], "a log cannot be combined with --source"),
    "split and source": ([*SOURCE, "--split", "order"], "--split cannot be combined with --source"),
    "seed and source": ([*SOURCE, "--seed", "1"], "--seed cannot be combined with --source"),
    "test and source": ([*SOURCE, "--test", "a.csv"], "--test cannot be combined with --source"),
    "show": (["data", "show", "folder"], "'folder' holds no prepared log"),
    "schema of nothing": (["data", "schema", "no.csv", "--label", "y"], "'no.csv' does not exist"),
    "schema to nowhere": (
        ["data", "schema", "clicks.csv", "--label", "click", "--out", "no/s.toml"],
        "cannot write 'no/s.toml': 'no' is missing; choose another folder",
    ),
    "train": (["train", "--data", "folder", "--out", "x"], "'folder' holds no prepared log"),
    "train rows": (["train", "--data", "folder", "--rows", "9", "--out", "x"], "unknown setting 'rows'"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(call, log, words, message):
    Path("folder").mkdir()
    Path("empty.csv").touch()
    Path("head.csv").write_text("user,click\n")
    before = sorted(path.name for path in Path.cwd().iterdir())
    code, _, err = call(*words)
    assert code == 2
    assert message in err
    assert err.startswith("rarebit: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == before


def test_an_unknown_protocol_is_told(call):
    Path("train.txt").write_text("\t".join(["0", *["1"] * 39]) + "\n")
    code, _, err = call(*SOURCE, "--protocol", "pepp")
    assert (code, "unknown protocol 'pepp'; did you mean 'pep'?" in err) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("separator", "seperator", "unknown setting 'seperator' for TextFormat; did you mean 'separator'?"),
        ("format = 1", "format = 9", "the schema is of format 9; this version reads up to 1: upgrade it"),
        ('kind = "multi"', 'kind = "many"', "kind must be one of"),
        ('name = "user"', 'name = "usr"', "has no column 'usr'; did you mean 'user'?"),
        ('name = "user"', 'name = "item"', "column names must be distinct"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_schema_is_told(call, log, old, new, message):
    call("data", "schema", log, "--label", "click", "--out", "given.toml")
    text = Path("given.toml").read_text()
    assert old in text
    Path("given.toml").write_text(text.replace(old, new))
    code, _, err = call(*SCHEMA)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not Path("x").exists()


@needs("file permissions", os.geteuid() != 0, "root may write anywhere")
def test_without_permission_nothing_is_written(call, log):
    Path("shut").mkdir(mode=0o500)
    code, _, err = call("data", "prepare", log, "--label", "click", "--out", "shut/x")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot write to the folder" in err
    assert "Permission denied" in err
    Path(log).chmod(0)
    code, _, err = call(*LABELLED)
    assert code == 2
    assert err == f"rarebit: cannot read {log!r}: Permission denied\n"


def test_a_run_on_a_prepared_log_can_be_scored_and_resumed(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    trained = train(call, "--data", "here", "--out", "run")
    assert "fm on the test split of here" in trained
    code, out, _ = call("predict", "--model", "run", "--out", "scores.csv")
    assert code == 0
    auc = next(line for line in trained.splitlines() if "AUC " in line).split()[3]
    assert auc in out
    with Path("scores.csv").open() as file:
        scores = [float(row["score"]) for row in csv.DictReader(file)]
    test = rb.Dataset.open("here").splits.test
    expected = rb.predict(rb.load_model("run"), test).sigmoid().tolist()
    assert scores == pytest.approx(expected, abs=1e-6)
    code, out, err = call("train", "--resume", "run", "--epochs", "2")
    assert code == 0, err
    assert "resumed from" in err
    assert "Weights of epoch" in out
    assert len(json.loads(Path("run/run.json").read_text())["history"]["epochs"]) == 2


def test_a_settings_file_names_the_prepared_log(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    Path("run.toml").write_text(
        '[model]\nname = "fm"\n[data]\nfolder = "here"\n[training]\nepochs = 1\n'
    )
    code, out, err = call("train", "--config", "run.toml", "--out", "run")
    assert code == 0, err
    assert "test split of here" in out
    settings = json.loads(Path("run/run.json").read_text())["settings"]
    assert settings["data"] == {
        "source": "prepared",
        "folder": str(Path("here").absolute()),
        "checksum": json.loads(Path("here/manifest.json").read_text())["manifest_sha256"],
    }


def test_a_run_is_not_resumed_on_other_rows(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    prepare(call, log, "--label", "click", "--seed", "5", "--out", "here", "--overwrite")
    code, _, err = call("train", "--resume", "run", "--epochs", "2")
    assert (code, "prepared again since the run" in err) == (2, True)
    code, _, err = call("train", "--resume", "run", "--data", "here", "--epochs", "2")
    assert (code, "another run" in err.splitlines()[-1]) == (2, True)


def test_a_run_is_not_measured_on_a_log_that_was_prepared_anew(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    assert call("predict", "--model", "run")[0] == 0
    prepare(call, log, "--label", "click", "--seed", "5", "--out", "here", "--overwrite")
    code, _, err = call("predict", "--model", "run", "--out", "scores.csv")
    assert (code, err.count("\n"), "prepared again since the run" in err) == (2, 1, True)
    assert not Path("scores.csv").exists()
    prepare(call, log, "--label", "click", "--out", "here", "--overwrite")
    assert call("predict", "--model", "run")[0] == 0, "the same log again"
    stored = json.loads(Path("run/run.json").read_text())
    del stored["settings"]["data"]["checksum"]  # as runs were written before there was one
    Path("run/run.json").write_text(json.dumps(stored))
    assert call("predict", "--model", "run")[0] == 0


def test_a_split_without_rows_has_no_scores(call, log):
    prepare(call, log, "--label", "click", "--shares", "0.9,0,0.1", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    words = ["predict", "--model", "run", "--split", "valid", "--out", "scores.csv"]
    code, _, err = call(*words)
    assert (code, err) == (
        2,
        "rarebit: the valid split has no rows to score; choose --split train or test\n",
    )
    assert not Path("scores.csv").exists()


@pytest.mark.parametrize("file", ["ids.npy", "label.npy", "manifest.json", "encoder/encoder.json"])
def test_a_damaged_log_is_refused_before_training(call, log, file):
    prepare(call, log, "--label", "click", "--out", "here")
    path = Path("here", file)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    code, _, err = call("train", "--data", "here", "--out", "run")
    assert (code, err.count("\n"), "damaged" in err) == (2, 1, True)
    assert not Path("run").exists()


def test_a_log_without_rows_to_test_on_is_refused_before_training(call, log):
    prepare(call, log, "--label", "click", "--shares", "0.9,0.1,0", "--out", "here")
    code, _, err = call("train", "--data", "here", "--out", "run")
    assert (code, "'here' has no rows to test on" in err) == (2, True)
    assert not Path("run").exists()


def test_raw_rows_are_scored(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    Path("new.csv").write_text("item,user,tags,price\ni1,u1,a|z,3\ni9,eve,z|y,\n")
    code, out, _ = call("predict", "--model", "run", "--input", "new.csv", "--out", "scores.csv")
    assert code == 0
    cells = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert {"rows scored 2", "unknown values of user 1", "unknown values of item 1"} < set(cells)
    assert "unknown values of tags 3" in cells
    assert "AUC" not in out
    with Path("scores.csv").open() as file:
        assert [row["line"] for row in csv.DictReader(file)] == ["2", "3"]
    Path("one.csv").write_text("item,user,tags,price\ni1,u1,a|z,3\n")
    code, out, _ = call("predict", "--model", "run", "--input", "one.csv", "--out", "scores.csv")
    assert (code, "1 row read = 1 scored + 0 skipped.\n1 score in scores.csv" in out) == (0, True)
    code, out, _ = call("predict", "--model", "run", "--input", log)
    assert (code, "AUC" in out, "unknown values" in out) == (0, True, True)
    assert "To keep the scores: --out scores.csv" in out
    code, _, err = call("predict", "--model", "run", "--input", log, "--bad-rows", "no")
    assert (code, "--bad-rows must be stop or aside" in err) == (2, True)


def test_rows_that_cannot_be_scored_are_told(call, log):
    prepare(call, log, "--label", "click", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    Path("new.csv").write_text(with_bad_rows())
    words = ["predict", "--model", "run", "--input", "new.csv", "--out", "scores.csv"]
    code, _, err = call(*words)
    assert (code, err.count("\n"), "new.csv, line 5" in err) == (2, 1, True)
    assert not list(Path.cwd().glob("scores*"))
    code, out, _ = call(*words, "--bad-rows", "aside")
    assert code == 0
    assert "300 rows read = 297 scored + 3 skipped." in out
    assert "Skipped rows, written to scores.csv.bad_rows.jsonl." in out
    lines = Path("scores.csv.bad_rows.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["line"] for line in lines) == [5, 6, 9]


def test_a_model_of_generated_data_scores_no_raw_rows(call, log):
    train(call, "--rows", "2000", "--out", "run")
    code, _, err = call("predict", "--model", "run", "--input", log, "--out", "scores.csv")
    assert (code, err.count("\n"), "the model has no vocabulary" in err) == (2, 1, True)
    assert not Path("scores.csv").exists()


@pytest.fixture
def long_log(tmp_path):
    """A log that takes a while to read."""
    rows = as_text(rows_of(1000)).partition("\n")[2]
    with (tmp_path / "long.csv").open("w") as file:
        file.write(",".join(NAMES) + "\n")
        file.writelines(rows for _ in range(1500))
    return "long.csv"


def interrupt(folder, pattern, *words):
    """Start a command, press Ctrl-C when it has begun to write; return exit code and its words."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rarebit", *words],
        cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not any(folder.glob(pattern)):
        assert process.poll() is None, "it was done before it could be interrupted"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    return process.returncode, err


@pytest.mark.slow
def test_an_interrupted_preparation_leaves_nothing(tmp_path, long_log):
    words = ["data", "prepare", long_log, "--label", "click", "--out", "here"]
    code, err = interrupt(tmp_path, ".here.*", *words)
    assert (code, err) == (130, "rarebit: stopped; no unfinished output is left behind\n")
    assert [path.name for path in tmp_path.iterdir()] == [long_log]


@pytest.mark.slow
def test_interrupted_scoring_leaves_nothing(call, log, long_log, tmp_path):
    prepare(call, log, "--label", "click", "--out", "here")
    train(call, "--data", "here", "--out", "run")
    words = ["predict", "--model", "run", "--input", long_log, "--out", "scores.csv"]
    code, err = interrupt(tmp_path, ".scores.csv.*", *words)
    assert (code, err.splitlines()[-1]) == (
        130,
        "rarebit: stopped; no unfinished output is left behind",
    )
    assert not list(tmp_path.glob("*scores*"))


@pytest.mark.slow
def test_parts_of_a_log_are_prepared_by_separate_processes(tmp_path, monkeypatch):
    """Every command is a process of its own; encoding runs in two at once."""
    monkeypatch.chdir(tmp_path)
    for part, rows in (("1", rows_of()[:200]), ("2", rows_of()[200:])):
        (tmp_path / f"part-{part}.csv").write_text(as_text(rows), "utf-8")

    def start(*words):
        command = [sys.executable, "-m", "rarebit", "data", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes)

    def run(*processes):
        ended = [process.communicate() for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), ended
        return [out for out, _ in ended]

    files, schema = ("part-1.csv", "part-2.csv"), ("--schema", "s.toml")
    run(
        start(
            "schema",
            files[0],
            "--label",
            "click",
            "--split",
            "user",
            "--by",
            "user",
            "--out",
            "s.toml",
        )
    )
    one = start("prepare", *files, *schema, "--out", "one")
    counted = [start("count", f"part-{n}.csv", *schema, "--out", f"counts/{n}") for n in "12"]
    run(one, *counted)
    [out] = run(start("merge", "counts/1", "counts/2", "--out", "two"))
    assert "data encode counts/2 --out two" in out
    said = run(*(start("encode", f"counts/{n}", "--out", "two") for n in "21"))
    assert any("300 rows read = 300 encoded + 0 skipped." in out for out in said)
    wanted = {path.relative_to("one"): path for path in Path("one").rglob("*") if path.is_file()}
    found = {path.relative_to("two"): path for path in Path("two").rglob("*") if path.is_file()}
    assert found.keys() == wanted.keys()
    for name, path in found.items():
        assert path.read_bytes() == wanted[name].read_bytes(), name


def test_parts_need_a_schema_a_log_and_a_folder(call, log):
    parts = ("data", "count", log, "--out", "counts/1")
    assert call("data", "schema", log, "--label", "click", "--out", "s.toml")[0] == 0
    for words, message in (
        (parts, "no schema, which all parts share"),
        (("data", "count", "--schema", "s.toml", "--out", "counts/1"), "no log"),
        (("data", "count", log, "--schema", "s.toml"), "no output folder"),
        ((*parts, log, "--schema", "s.toml", "--for", "train"), "--for takes one file"),
        ((*parts, "--schema", "s.toml", "--for", "later"), "unknown part 'later'"),
        (("data", "merge", "counts/1", "--out", "out"), "holds no counted part"),
        (("data", "encode", "counts/1", "--out", "out"), "holds no counted part"),
        (
            ("data", "prepare", log, log, "--valid", log, "--schema", "s.toml", "--out", "out"),
            "a second log cannot be combined with --valid and --test",
        ),
    ):
        code, _, err = call(*words)
        assert code != 0
        assert message in " ".join(err.split()), err
    assert not Path("out").exists()
    assert call(*parts, "--schema", "s.toml")[0] == 0
    assert "counts/1 is encoded" not in call("data", "merge", "counts/1", "--out", "out")[1]
    assert "300 encoded" in call("data", "encode", "counts/1", "--out", "out")[1]


def test_what_is_still_to_encode_is_named(call, log):
    assert call("data", "schema", log, "--label", "click", "--out", "s.toml")[0] == 0
    for name in "ab":
        shutil.copy(log, f"{name}.csv")
        call("data", "count", f"{name}.csv", "--schema", "s.toml", "--out", f"counts/{name}")
    assert call("data", "merge", "counts/a", "counts/b", "--out", "out")[0] == 0
    _, out, _ = call("data", "encode", "counts/b", "--out", "out")
    assert "counts/b is encoded. Still to encode: a.csv." in out
