"""MovieLens-1M: hand-made files of its format, and the facts of the real ones."""

import math

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from capabilities import needs_real_data, real_data

from rarebit.data.raw.chunks import BadRows
from rarebit.data.sources import find_source
from rarebit.errors import DataError

USERS = ["1::F::1::10::48067", "2::M::56::16::70072-1234"]
MOVIES = [
    "7::Alien: Part 2 (1986)::Action|Horror",
    "8::Caf\xe9 (1999) (Le Caf\xe9) (2000)::Drama",
    "9::Untitled::Comedy",
]
FIRST = 956703932
RATINGS = [
    f"1::7::5::{FIRST + 10}",
    f"1::8::3::{FIRST}",
    f"2::7::1::{FIRST + 2}",
    f"2::9::4::{FIRST + 3}",
    f"3::8::2::{FIRST + 100_000_000}",
    f"1::99::4::{FIRST + 1}",
]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    return tmp_path


def write(folder, ratings=RATINGS, users=USERS, movies=MOVIES):
    for name, lines in (("ratings", ratings), ("users", users), ("movies", movies)):
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{name}.dat").write_bytes(text.encode("latin-1"))


def test_rows_are_what_the_files_say(folder, read):
    reading = read("ml-1m", folder)
    far = str(math.floor(math.log(100_000_000) ** 2))
    assert reading.frame.columns == list(find_source("ml-1m").schema().columns_read)
    assert reading.rows == [
        (1, "5", "F", "1", "10", "48067", "1986", "Action|Horror"),  # floor(2.302^2)
        (0, "0", "M", "56", "16", "70072-1234", "1986", "Action|Horror"),
        (1, "1", "M", "56", "16", "70072-1234", None, "Comedy"),  # floor(1.098^2)
        (0, far, None, None, None, None, "2000", "Drama"),
        (1, "-1", "F", "1", "10", "48067", None, None),
    ]
    assert reading.lines() == [1, 3, 4, 5, 6]
    assert reading.bad.count == 0


def test_ids_are_added(folder, read):
    reading, plain = read("ml-1m-ids", folder), read("ml-1m", folder)
    assert reading.frame.columns == list(find_source("ml-1m-ids").schema().columns_read)
    assert reading.column("user") == ["1", "2", "2", "3", "1"]
    assert reading.column("movie") == ["7", "7", "9", "8", "99"]
    assert reading.frame.drop("user", "movie").equals(plain.frame)


def test_bad_lines_of_all_files_are_set_aside(tmp_path, read):
    ratings = [
        *RATINGS,
        "1::7::6::10",
        "1::7::x::10",
        "1::7::5::",
        "1::7::5",
        "",
        "2::8::1::970000000",
    ]
    write(tmp_path, ratings, [*USERS, "2::F::1::1::1"], [*MOVIES, "10::no genres"])
    reading = read("ml-1m", tmp_path, "aside")
    assert len(reading.rows) == 6
    assert reading.lines()[-1] == 12
    assert reading.bad.count == 7
    assert reading.bad.reasons["a second row for the same user"] == 1
    assert reading.bad.reasons["not a rating from 1 to 5 with a time in seconds"] == 3
    assert reading.column("gender")[1] == "M"


def test_the_first_bad_line_is_named(tmp_path):
    write(tmp_path, [*RATINGS, "1::7::6::956703999"])
    bad = BadRows()
    list(find_source("ml-1m").rows(tmp_path, bad))
    with pytest.raises(DataError, match=r"ratings.dat, line 7: not a rating from 1 to 5"):
        bad.raise_if_any()


def test_a_missing_file_is_named(folder):
    (folder / "users.dat").unlink()
    with pytest.raises(DataError, match=r"has no users.dat; this set needs ratings.dat, users.dat"):
        list(find_source("ml-1m").rows(folder, BadRows()))


@needs_real_data("ratings.dat")
def test_the_real_set(read):
    reading = read("ml-1m-ids", real_data("ratings.dat").parent)
    assert reading.frame.height == 739_012
    assert sum(reading.column("label")) == 575_281
    seven = ("time", "gender", "age", "occupation", "zip", "year", "genres")
    assert reading.distinct(*seven) == [278, 2, 7, 21, 3439, 81, 301]
    assert reading.distinct("user", "movie") == [6040, 3668]  # 38 films have ratings of 3 only
    assert reading.frame.null_count().sum_horizontal().item() == 0
    assert reading.bad.count == 0
