"""A whole log, encoded, against plain Python: dictionaries, loops and a sort."""

import json
import math
import zlib
from collections import Counter

import numpy as np
import pytest
from capabilities import slow_after

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import Column, LogSchema, Split  # noqa: E402  # the same
from rarebit.data.prepared import PreparedFolder  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw import encode as encoding  # noqa: E402  # the same
from rarebit.data.raw.chunks import (  # noqa: E402  # the same
    BadRows,  # the same
    Place,
    RawChunk,
)
from rarebit.data.raw.encode import encode_log  # noqa: E402  # the same
from rarebit.data.raw.encoder import LogEncoder  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

PARTS = ("train", "valid", "test")
GIVEN = Split(kind="given", column="part")


def chunks_of(frame, rows=10**9):
    for start in range(0, frame.height, rows):
        yield RawChunk(
            frame.slice(start, rows),
            lambda row, start=start: Place("log", start + row + 1, str(start + row), "row"),
        )


def encode(frame, schema, folder, *, rows=10**9, **options):
    chunks = chunks_of(frame, rows)
    encode_log(chunks, schema, folder, origin="a test", **options)
    return PreparedFolder(folder)


def schema_of(*columns, split=GIVEN, unknown_share=0.0, **options):
    return LogSchema(
        label="click", columns=columns, split=split, unknown_share=unknown_share, **options
    )


def arrays_of(folder):
    return {name: np.load(folder / f"{name}.npy") for name in ("ids", "numeric", "label", "counts")}


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def in_parts(rows, parts):
    """Rows in the order that a folder has them: train, valid, test, each as in the file."""
    return [
        row for wanted in PARTS for row, part in zip(rows, parts, strict=True) if part == wanted
    ]


def naive_vocabulary(values, parts, min_count=1, counts="train"):
    """Ids by plain counting; `values` has a list of values a row."""
    seen = Counter(
        value
        for row, part in zip(values, parts, strict=True)
        for value in row
        if value is not None and (counts == "all" or part == "train")
    )
    kept = sorted((v for v, n in seen.items() if n >= min_count), key=lambda v: (-seen[v], v))
    return {value: 3 + place for place, value in enumerate(kept)}


def naive_id(value, vocabulary):
    return 2 if value is None else vocabulary.get(value, 1)


def random_log(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    words = np.array(
        ["ünï", "a", "B", "b", "0", " 0", "zz", "日本", 'q"', "x,y", *map(str, range(60))]
    )
    draw = lambda: [  # noqa: E731  # three columns of the same kind
        None if rng.random() < 0.1 else str(words[int(len(words) * rng.random() ** 3)])
        for _ in range(rows)
    ]
    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, rows),
            "user": draw(),
            "ad": draw(),
            "friend": draw(),
            "part": rng.choice(PARTS, rows, p=[0.7, 0.2, 0.1]),
        }
    )


@pytest.mark.parametrize("counts", ["train", "all"])
@pytest.mark.parametrize("min_count", [1, 2, 5])
@pytest.mark.parametrize("rows", [7, 10**9])
def test_ids_counts_and_labels_are_those_of_plain_counting(tmp_path, counts, min_count, rows):
    frame = random_log()
    schema = schema_of(
        Column(name="user", min_count=min_count),
        Column(name="ad"),
        Column(name="friend", kind="ignored"),
        counts=counts,
    )
    prepared = encode(frame, schema, tmp_path / "out", rows=rows)
    parts, found = frame["part"].to_list(), arrays_of(tmp_path / "out")
    expected, all_counts = [], []
    for name, least in (("user", min_count), ("ad", 1)):
        values = frame[name].to_list()
        vocabulary = naive_vocabulary([[v] for v in values], parts, least, counts)
        expected.append(in_parts([naive_id(v, vocabulary) for v in values], parts))
        in_training = Counter(expected[-1][: parts.count("train")])
        all_counts += [in_training[i] for i in range(3 + len(vocabulary))]
        assert prepared.schema[name].rows == 3 + len(vocabulary)
    assert found["ids"].tolist() == [list(row) for row in zip(*expected, strict=True)]
    assert found["ids"].dtype == np.int32
    assert found["label"].tolist() == in_parts(frame["click"].to_list(), parts)
    assert found["counts"].tolist() == all_counts
    assert prepared.rows == tuple(parts.count(part) for part in PARTS)


def test_a_shared_vocabulary_counts_the_values_of_both_columns(tmp_path):
    frame = random_log()
    schema = schema_of(
        Column(name="user", vocabulary="people", min_count=3),
        Column(name="friend", vocabulary="people", min_count=3),
    )
    encode(frame, schema, tmp_path / "out")
    parts = frame["part"].to_list()
    pairs = frame.select("user", "friend").rows()
    vocabulary = naive_vocabulary(pairs, parts, 3)
    ids = [[naive_id(value, vocabulary) for value in row] for row in pairs]
    found = arrays_of(tmp_path / "out")
    assert found["ids"].tolist() == in_parts(ids, parts)
    train = [row for row, part in zip(ids, parts, strict=True) if part == "train"]
    counted = [Counter(row[slot] for row in train) for slot in range(2)]
    rows = 3 + len(vocabulary)
    assert found["counts"].tolist() == [count[i] for count in counted for i in range(rows)]


def test_hashed_values_go_to_the_bucket_of_their_crc(tmp_path):
    # a vocabulary that has the name of the hashed column is another's
    schema = schema_of(Column(name="user", buckets=5), Column(name="ad", vocabulary="user"))
    frame = random_log()
    encode(frame, schema, tmp_path / "out", rows=50)
    parts, users = frame["part"].to_list(), frame["user"].to_list()
    hashed = [2 if v is None else 3 + zlib.crc32(v.encode()) % 5 for v in users]
    found = arrays_of(tmp_path / "out")
    assert found["ids"][:, 0].tolist() == in_parts(hashed, parts)
    train = Counter(in_parts(hashed, parts)[: parts.count("train")])
    assert found["counts"][:8].tolist() == [train[i] for i in range(8)]


def test_a_hashed_column_without_any_value(tmp_path):
    frame = pl.DataFrame(
        {"click": [0, 1], "user": pl.Series([None, None], dtype=pl.String), "part": ["train"] * 2}
    )
    encode(frame, schema_of(Column(name="user", buckets=4)), tmp_path / "out")
    assert arrays_of(tmp_path / "out")["ids"].tolist() == [[2], [2]]


MULTI = [["a", "b"], ["b", "", "c", "d", "a"], [], None, ["b"], ["", None]]


@pytest.mark.parametrize("form", ["text", "lists", "integers"])
@pytest.mark.parametrize("buckets", [None, 7])
def test_multi_valued_rows_hold_values_then_padding(tmp_path, form, buckets):
    rows = MULTI
    if form == "text":
        cells = [None if row is None else "|".join(v or "" for v in row) for row in rows]
        separator = "|"
    else:
        cells, separator = rows, ""
    if form == "integers":
        number = {"a": 1, "b": 2, "c": 3, "d": 4, "": None, None: None}
        cells = [None if row is None else [number[v] for v in row] for row in rows]
        rows = [None if r is None else [str(number[v]) for v in r if number[v]] for r in rows]
    frame = pl.DataFrame({"click": [0, 1] * 3, "tags": cells, "part": ["train"] * 5 + ["test"]})
    column = Column(name="tags", kind="multi", separator=separator, max_length=3, buckets=buckets)
    prepared = encode(frame, schema_of(column), tmp_path / "out")
    kept = [[v for v in row or [] if v][:3] for row in rows]
    vocabulary = naive_vocabulary(kept, frame["part"].to_list())
    if buckets:
        vocabulary = {v: 3 + zlib.crc32(v.encode()) % buckets for row in kept for v in row}
    expected = [([naive_id(v, vocabulary) for v in row] or [2]) + [0, 0, 0] for row in kept]
    found = arrays_of(tmp_path / "out")
    assert found["ids"].tolist() == [row[:3] for row in expected]
    counted = Counter(i for row in expected[:5] for i in row[:3] if i)
    assert found["counts"].tolist() == [counted[i] for i in range(prepared.schema["tags"].rows)]
    assert prepared.manifest["values_cut"] == 1


def test_log_square_bins_by_hand(tmp_path):
    numbers = [-5, 0, 1, 2, 3, 10, 10**9, None, -(10**12), 2.5, 1.5]
    bins = [-7, -2, -1, 0, 1, 5, 429, None, -1000, 0, -1]
    assert math.floor(math.log(10**9) ** 2) == 429
    for kind in (pl.Float64, pl.String):
        frame = pl.DataFrame(
            {"click": [0] * 11, "n": numbers, "part": ["train"] * 11}, strict=False
        )
        frame = frame.with_columns(pl.col("n").cast(kind))
        schema = schema_of(Column(name="n", kind="numeric", treatment="log_square"))
        folder = tmp_path / str(kind)
        encode(frame, schema, folder)
        texts = [None if b is None else str(b) for b in bins]
        vocabulary = naive_vocabulary([[t] for t in texts], ["train"] * 11)
        ids = arrays_of(folder)["ids"]
        assert ids[:, 0].tolist() == [naive_id(t, vocabulary) for t in texts]
        assert LogEncoder.open(folder / "encoder").decode(ids)["n"].to_list() == texts
        again = LogEncoder.open(folder / "encoder").encode(next(chunks_of(frame)), BadRows())
        assert np.array_equal(again.ids, ids)


def test_quantile_bins_are_those_of_numpy(tmp_path):
    rng = np.random.default_rng(1)
    numbers = np.round(rng.normal(size=500), 1)
    numbers[::17] = np.nan
    parts = rng.choice(PARTS, 500, p=[0.6, 0.2, 0.2])
    frame = pl.DataFrame(
        {"click": [0, 1] * 250, "n": pl.Series(numbers, nan_to_null=True), "part": parts}
    )
    schema = schema_of(Column(name="n", kind="numeric", treatment="quantile", bins=8))
    prepared = encode(frame, schema, tmp_path / "out", rows=33)
    train = numbers[(parts == "train") & ~np.isnan(numbers)]
    inner = np.linspace(0, 1, 9)[1:-1]
    edges = np.unique(np.quantile(train, inner, method="inverted_cdf"))
    expected = np.where(np.isnan(numbers), 2, 3 + np.digitize(numbers, edges))
    found = arrays_of(tmp_path / "out")
    assert found["ids"][:, 0].tolist() == in_parts(expected.tolist(), parts.tolist())
    rows = prepared.schema["n"].rows
    assert rows == 3 + len(edges) + 1
    assert (
        found["counts"].tolist() == np.bincount(expected[parts == "train"], minlength=rows).tolist()
    )


@pytest.mark.parametrize("rows", [1, 64, 10**9])
def test_standardised_numbers_are_those_of_numpy(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(encoding, "SUMMED_AT_ONCE", 50)
    rng = np.random.default_rng(2)
    numbers = 1e6 + rng.normal(size=300) + np.arange(300) / 100  # the means of blocks differ
    numbers[::7] = np.nan
    parts = rng.choice(PARTS, 300)
    frame = pl.DataFrame(
        {
            "click": [0, 1] * 150,
            "n": pl.Series(numbers, nan_to_null=True),
            "same": [0.1] * 300,
            "never": pl.Series([None] * 300, dtype=pl.Float64),
            "part": parts,
        }
    )
    columns = [Column(name=name, kind="numeric") for name in ("n", "same", "never")]
    encode(frame, schema_of(*columns), tmp_path / "out", rows=rows)
    train = numbers[parts == "train"]
    scaled = (numbers - np.nanmean(train)) / np.nanstd(train)
    expected = in_parts(np.nan_to_num(scaled, nan=0.0).tolist(), parts.tolist())
    found = arrays_of(tmp_path / "out")["numeric"]
    assert found.dtype == np.float32
    assert found[:, 0] == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)
    assert np.abs(found[:, 1:]).max() < 1e-12
    assert arrays_of(tmp_path / "out")["ids"].shape == (300, 0)


def everything(split=GIVEN):
    return schema_of(
        Column(name="user", vocabulary="people"),
        Column(name="friend", vocabulary="people"),
        Column(name="ad", buckets=11),
        Column(name="tags", kind="multi", separator=" ", max_length=2),
        Column(name="x", kind="numeric"),
        Column(name="y", kind="numeric", treatment="quantile", bins=4),
        Column(name="z", kind="numeric", treatment="log_square"),
        split=split,
        unknown_share=0.3,
    )


def big_log(rows=3000):
    rng = np.random.default_rng(3)
    log = random_log(rows, seed=3)
    tags = [" ".join(rng.choice(list("abcdef"), rng.integers(0, 4))) or None for _ in range(rows)]
    numbers = {name: rng.lognormal(size=rows) * 10 for name in "xyz"}
    return log.with_columns(tags=pl.Series(tags, dtype=pl.String), **numbers)


@pytest.mark.slow
@pytest.mark.parametrize("by", slow_after([GIVEN, Split(), Split(kind="user", column="user")]))
def test_a_folder_does_not_depend_on_chunks(tmp_path, by, monkeypatch):
    monkeypatch.setattr(encoding, "SUMMED_AT_ONCE", 1000)
    folders = []
    for name, rows in (("one", 10**9), ("two", 1600), ("tiny", 13), ("tiny again", 13)):
        encode(big_log(), everything(by), tmp_path / name, rows=rows)
        folders.append(files_of(tmp_path / name))
    assert folders[0] == folders[1] == folders[2] == folders[3]
    assert {"ids.npy", "manifest.json", "schema.toml", "encoder/encoder.json"} <= set(folders[0])


def test_random_keys_do_not_depend_on_blocks(monkeypatch):
    expected = encoding.split_rows(Split(seed=4), 1000, np.empty(0))
    monkeypatch.setattr(encoding, "BLOCK", 17)
    assert np.array_equal(encoding.split_rows(Split(seed=4), 1000, np.empty(0)), expected)


def test_the_row_of_unknown_values_is_trained(tmp_path):
    users = ["often"] * 10 + [f"once{n}" for n in range(41)]
    frame = pl.DataFrame({"click": [0] * 51, "user": users, "part": ["train"] * 51})
    for share, unknown in ((0.0, 0), (0.01, 1), (0.05, 3), (0.5, 21)):
        schema = schema_of(Column(name="user"), unknown_share=share)
        encode(frame, schema, tmp_path / f"{share}")
        found = arrays_of(tmp_path / f"{share}")
        assert (found["ids"] == 1).sum() == found["counts"][1] == unknown
        assert (found["ids"][:10] == 3).all()
        assert len(found["counts"]) == 3 + 42 - unknown
    other = schema_of(
        Column(name="user"), unknown_share=0.5, split=Split(kind="given", column="part", seed=1)
    )
    encode(frame, other, tmp_path / "other seed")
    assert not np.array_equal(arrays_of(tmp_path / "other seed")["ids"], found["ids"])
    rare = schema_of(Column(name="user", min_count=2), unknown_share=0.5)
    encode(frame, rare, tmp_path / "rare")
    assert arrays_of(tmp_path / "rare")["counts"].tolist() == [0, 41, 0, 10]


def test_statistics_count_raw_values_of_all_parts(tmp_path):
    frame = random_log()
    prepared = encode(frame, schema_of(Column(name="user", min_count=3)), tmp_path / "out")
    [found] = prepared.statistics.fields
    users = Counter(v for v in frame["user"].to_list() if v is not None)
    assert found.distinct == len(users)
    top = sorted(users.values(), reverse=True)[: math.ceil(len(users) / 5)]
    assert found.top_share == pytest.approx(sum(top) / users.total())
    assert found.missing_share == pytest.approx(frame["user"].null_count() / 400)
    ids = np.split(arrays_of(tmp_path / "out")["ids"][:, 0], np.cumsum(prepared.rows)[:2])
    assert found.unknown_shares == pytest.approx([(part == 1).mean() for part in ids])
    rates = [frame.filter(part=part)["click"].mean() for part in PARTS]
    assert prepared.statistics.label_rates == pytest.approx(rates)


def test_names_with_colons_and_names_that_look_like_places(tmp_path):
    frame = pl.DataFrame(
        {
            "a": ["x y", "y", "y"],
            "a:0": ["p", "q", "p"],
            "n:m": ["1", "?", "1"],
            "the:label": ["1", "0", "0"],
        }
    )
    schema = LogSchema(
        label="the:label",
        columns=(
            Column(name="a", kind="multi", separator=" ", max_length=2, treatment="quantile"),
            Column(name="a:0"),
            Column(name="n:m", kind="numeric"),
        ),
        split=Split(kind="order", shares=(1.0, 0.0, 0.0)),
        unknown_share=0.0,
    )
    with pytest.raises(DataError, match=r"row 2: n:m is not a number \(got '\?'\)"):
        encode(frame, schema, tmp_path / "out")
    prepared = encode(frame, schema, tmp_path / "out", bad=BadRows("aside"))
    assert arrays_of(tmp_path / "out")["ids"].tolist() == [[4, 3, 3], [3, 0, 3]]
    assert prepared.manifest["bad_rows"] == {"n:m is not a number": 1}


def test_what_the_split_by_files_needs(tmp_path):
    with pytest.raises(DataError, match="a file is not for train, valid or test"):
        encode(
            random_log(), schema_of(Column(name="ad"), split=Split(kind="given")), tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


def test_the_manifest_tells_where_the_rows_came_from(tmp_path):
    encode(random_log(), schema_of(Column(name="ad")), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["origin"] == "a test"
    assert manifest["rows_read"] == sum(manifest["rows"]) == 400
    assert PreparedFolder(tmp_path / "out").manifest == manifest
    assert LogSchema.read(tmp_path / "out" / "schema.toml") == schema_of(Column(name="ad"))
