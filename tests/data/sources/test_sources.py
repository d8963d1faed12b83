"""What holds for every set, and the machinery they share."""

from dataclasses import replace

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from rarebit.data.log_schema import LogSchema
from rarebit.data.raw.chunks import BadRows, Place, RawChunk
from rarebit.data.sources import find_source, source_names
from rarebit.data.sources._base import FileFacts, keep, read_table, skip_wrong, split_lines
from rarebit.errors import DataError, SettingsError


def chunk_of(values, *, first=1):
    frame = pl.DataFrame({"x": values})
    return RawChunk(frame, lambda row: Place("log.csv", first + row, str(values[row])))


@pytest.mark.parametrize("name", source_names())
def test_every_set_says_what_it_is_and_what_it_needs(name, tmp_path):
    source = find_source(name)
    assert source.title
    assert source.notes()
    with pytest.raises(DataError) as caught:
        list(source.rows(tmp_path, BadRows()))
    for file in source.files:
        assert file in str(caught.value)
    assert f"published by {source.publisher}" in str(caught.value)


@pytest.mark.parametrize("name", source_names())
def test_every_protocol_comes_back_from_toml_and_names_the_same_columns(name, tmp_path):
    source = find_source(name)
    for protocol in source.protocols:
        schema = source.schema(protocol)
        (tmp_path / "schema.toml").write_text(schema.to_toml(), "utf-8")
        assert LogSchema.read(tmp_path / "schema.toml") == schema
        assert set(schema.columns_read) == set(source.schema().columns_read)


@pytest.mark.parametrize("name", source_names())
def test_a_protocol_that_counts_test_rows_says_so(name):
    source = find_source(name)
    for protocol, schema in source.protocols.items():
        leaks = any("all rows" in note for note in source.notes(protocol))
        assert leaks == (schema.counts == "all")


def test_the_first_protocol_is_the_default():
    source = find_source("ml-1m")
    assert source.schema() is source.schema("pep")
    assert source.schema("clean").counts == "train"
    assert find_source("ml-1m-ids").schema().counts == "train"


@pytest.mark.parametrize("name", ["ml-1m-ids", "book-crossing"])
def test_mlets_protocol_is_the_clean_one_with_age_as_a_number(name):
    clean, mlet = (find_source(name).schema(protocol) for protocol in ("clean", "mlet"))
    kinds = {column.name: column.kind for column in mlet.columns}
    assert kinds.pop("age") == "numeric"
    assert set(kinds.values()) == {"categorical"}
    assert replace(mlet, columns=clean.columns) == clean
    assert [column for column in mlet.columns if column.name != "age"] == [
        column for column in clean.columns if column.name != "age"
    ]


def test_unknown_names_are_refused():
    with pytest.raises(SettingsError, match=r"unknown source 'ml-1n'; did you mean"):
        find_source("ml-1n")
    with pytest.raises(SettingsError, match=r"unknown protocol 'pepp'; did you mean 'pep'"):
        find_source("criteo").schema("pepp")


def test_a_folder_that_is_not_there_is_said_to_lack_the_files(tmp_path):
    with pytest.raises(DataError, match=r"has no ratings.dat, users.dat, movies.dat; this set"):
        list(find_source("ml-1m").rows(tmp_path / "nowhere", BadRows()))


def test_two_files_that_fit_are_not_chosen_between(tmp_path):
    for name in ("train_a.txt", "train_b.txt"):
        (tmp_path / name).write_text("", "utf-8")
    with pytest.raises(DataError, match=r"has train_a.txt, train_b.txt; name the one to read"):
        find_source("criteo").rows(tmp_path, BadRows())


@given(st.lists(st.booleans(), max_size=20))
def test_kept_rows_know_their_place(wanted):
    kept = keep(chunk_of(list(range(len(wanted)))), pl.Series(wanted, dtype=pl.Boolean))
    expected = [row for row, w in enumerate(wanted) if w]
    assert kept.frame["x"].to_list() == expected
    assert [kept.locate(i).number for i in range(len(expected))] == [r + 1 for r in expected]


def test_rows_set_aside_are_reported_with_their_place():
    bad = BadRows("aside")
    kept = skip_wrong(chunk_of([5, 6, 7, 8]), pl.Series([True, False, None, True]), bad, "odd")
    assert kept.frame["x"].to_list() == [5, 8]
    assert bad.count == 2
    assert bad.first == (Place("log.csv", 2, "6"), "odd")


def test_a_table_has_one_row_for_each_key():
    bad = BadRows("aside")
    chunks = iter([chunk_of(["a", "b", "a"]), chunk_of(["c", "b", "d"], first=4)])
    assert read_table(chunks, "x", bad)["x"].to_list() == ["a", "b", "c", "d"]
    assert bad.reasons == {"a second row for the same x": 2}
    assert bad.first[0].number == 3


def test_lines_are_split_at_double_colons(tmp_path):
    path, bad = tmp_path / "movies.dat", BadRows("aside")
    lines = ["1::Star Wars: A::B", "2::two", "3::\xe9t\xe9::", "4::a::b::c", "5::x::y"]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    chunks = list(split_lines(path, ("id", "title", "genres"), bad))
    rows = [row for chunk in chunks for row in chunk.frame.rows()]
    assert rows == [("1", "Star Wars: A", "B"), ("3", "\xe9t\xe9", None), ("5", "x", "y")]
    assert bad.reasons == {"wrong number of values (expected 3)": 2}
    assert (bad.first[0].number, bad.first[0].text) == (2, "2::two")


def test_what_the_files_hold_is_counted_over_all_chunks():
    facts = FileFacts("ratings", ("user", "film"))
    facts.add(pl.DataFrame({"user": ["a", "b"], "film": ["x", None]}))
    facts.add(pl.DataFrame({"user": ["a", "c", "a"], "film": ["y", "x", "x"]}))
    assert facts.line() == (
        "The files hold 5 ratings: user 3 values, the top 20 % of them in 0.600 of the rows; "
        "film 2, 0.750."
    )
