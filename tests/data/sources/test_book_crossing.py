"""Book-Crossing: hand-made files of its format, and the facts of the real ones."""

import pytest

pytest.importorskip("polars", reason="capability: package polars: it is not installed")

import polars as pl
from capabilities import needs_real_data, real_data

from rarebit.data.raw.chunks import BadRows
from rarebit.data.sources import find_source
from rarebit.data.sources.book_crossing import all_ratings

URLS = ';"http://s.jpg";"http://m.jpg";"http://l.jpg"'
BOOKS = [
    '"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication";"Publisher";"Image-URL-S";"Image-URL-M";"Image-URL-L"',
    '"034545104X";"The \\"O\\"; or not";"M. J. Rose";"2002";"Ballantine; Books &amp; Co"' + URLS,
    '"0155061224";"Rites (Level 4)\\"";"Jos\xe9 \\"Pepe\\" Rae";"0";"Heinle"' + URLS,
]
USERS = [
    '"User-ID";"Location";"Age"',
    '"1";"nyc, new york, usa";NULL',
    '"2";"cernusco s',
    ', milan, italy";"18"',
    '"3";"\xe5rhus, \\"n/a\\", denmark";"244"',
]
RATINGS = [
    '"User-ID";"ISBN";"Book-Rating"',
    '"1";"034545104X";"8"',
    '"2";"0155061224";"0"',
    '"2";"0155061224";"7"',
    '"3";"\\"0210000010";"10"',
    '"4";"034545104x";"1"',
]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    return tmp_path


def write(folder, ratings=RATINGS, books=BOOKS, users=USERS):
    for name, lines in (("Book-Ratings", ratings), ("Books", books), ("Users", users)):
        text = "".join(f"{line}\r\n" for line in lines)
        (folder / f"BX-{name}.csv").write_bytes(text.encode("latin-1"))


def test_rows_are_what_the_files_say(folder, read):
    reading = read("book-crossing", folder)
    assert reading.frame.columns == list(find_source("book-crossing").schema().columns_read)
    first, second, third, fourth = reading.rows
    rose = ("M. J. Rose", "Ballantine; Books &amp; Co", "2002")
    assert first == (1, "1", "034545104X", *rose, "nyc, new york, usa", None)
    assert second[:6] == (0, "2", "0155061224", 'Jos\xe9 "Pepe" Rae', "Heinle", "0")
    assert second[6].split() == ["cernusco", "s", ",", "milan,", "italy"]
    assert second[7] == "18"
    place = '\xe5rhus, "n/a", denmark'
    assert third == (1, "3", '"0210000010', None, None, None, place, "244")
    assert fourth == (0, "4", "034545104x", None, None, None, None, None)
    assert reading.lines() == [2, 4, 5, 6]
    assert reading.bad.count == 0


def test_broken_lines_of_all_files_are_set_aside(tmp_path, read):
    ratings = [*RATINGS, '"1";"0155061224";"11"', '"1";"0155061224"', '"2";"034545104X";"9"']
    books = [*BOOKS, '"0002005018";"Clara Callan";"Richard Wright"', BOOKS[1]]
    write(tmp_path, ratings, books)
    reading = read("book-crossing", tmp_path, "aside")
    assert reading.column("label") == [1, 0, 1, 0, 1]
    assert reading.lines() == [2, 4, 5, 6, 9]
    assert reading.bad.count == 4
    assert reading.bad.reasons["not a rating from 0 to 10"] == 1
    assert reading.bad.reasons["a second row for the same isbn"] == 1


@needs_real_data("BX-Books.csv")
def test_the_real_set(read):
    reading = read("book-crossing", real_data("BX-Books.csv").parent)
    assert reading.frame.height == 433_671
    assert sum(reading.column("label")) == 249_887
    fields = ("user", "isbn", "author", "publisher", "year", "location", "age")
    assert reading.distinct(*fields) == [77_805, 185_973, 62_115, 11_575, 105, 21_335, 136]
    assert reading.frame["author"].null_count() == 49_819
    assert reading.bad.count == 0


@needs_real_data("BX-Books.csv")
def test_the_published_counts_are_over_all_ratings():
    source, bad = find_source("book-crossing"), BadRows()
    paths = source.paths(real_data("BX-Books.csv").parent)
    frame = pl.concat([chunk.frame for chunk in all_ratings(paths, bad)])
    fields = ("user", "isbn", "author", "publisher", "location")
    distinct = [frame[name].drop_nulls().n_unique() for name in fields]
    assert (frame.height, bad.count) == (1_149_780, 0)
    assert distinct == [105_283, 340_556, 101_593, 16_729, 26_111]
