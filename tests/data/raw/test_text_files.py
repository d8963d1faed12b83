"""Text files: what a record is, against Python's csv module and a reader that goes byte by byte."""

import bz2
import csv
import gzip
import io
import lzma

import pytest
from capabilities import slow_after
from hypothesis import example, given, settings
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import TextFormat  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.readers import column_names, read_raw  # noqa: E402  # the same
from rarebit.data.raw.text_files import MAX_RECORD_BYTES, sniff_format, sniff_like  # noqa: E402  # the same
from rarebit.errors import DataError, SettingsError  # noqa: E402  # the same

VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    [
        "",
        '"',
        '""',
        "\n",
        "\r",
        "\r\n",
        ",",
        ",,",
        "\\",
        '\\"',
        "a\r",
        "\ufeff",
        "\x1f\x1e",
        " ",
        "é\0",
    ]
)
NAMES = ("a", "b", "c")


def read(path, **options):
    bad = BadRows()
    frames = [chunk.frame for chunk in read_raw(path, None, bad, **options)]
    return [row for frame in frames for row in frame.rows()], bad


def bad_lines(path, **options):
    """Return the rows and the (line, text) of the bad rows, which the file for them holds."""
    bad = Collected()
    rows = [row for chunk in read_raw(path, None, bad, **options) for row in chunk.frame.rows()]
    return rows, [(place.number, place.text) for place in bad.places]


class Collected(BadRows):
    def __init__(self):
        super().__init__()
        self.places = []

    def add(self, place, reason, detail=""):
        super().add(place, reason, detail)
        self.places.append(place)


def tables(columns):
    row = st.lists(VALUES, min_size=columns, max_size=columns)
    return st.lists(row, min_size=1, max_size=12)


def missing_as_none(table):
    return [tuple(value or None for value in row) for row in table]


@pytest.mark.parametrize("columns", slow_after([2, 1, 3]))
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@settings(max_examples=60)
@given(data=st.data())
def test_what_the_csv_module_writes_is_read_back(tmp_path_factory, columns, line_end, data):
    table = data.draw(tables(columns))
    quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    if line_end == "\n" and any("\r" in value for row in table for value in row):
        quoting = (
            csv.QUOTE_ALL
        )  # before Python 3.13 it leaves a \r unquoted, even at the end of a line
    block_bytes = data.draw(st.sampled_from([1, 7, 64, 1 << 20]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=line_end, quoting=quoting)
    writer.writerows([NAMES[:columns], *table])
    path = tmp_path_factory.mktemp("text") / "log.csv"
    path.write_bytes(text.getvalue().encode())
    rows, bad = read(path, format=TextFormat(), block_bytes=block_bytes)
    assert rows == missing_as_none(table)
    assert bad.count == 0
    assert column_names(path, TextFormat()) == list(NAMES[:columns])


@settings(max_examples=150)
@given(table=tables(2))
def test_escaped_quotes_are_read_back(tmp_path_factory, table):
    def quoted(value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = "a;b\n" + "".join(";".join(map(quoted, row)) + "\n" for row in table)
    path = tmp_path_factory.mktemp("text") / "log.csv"
    path.write_bytes(text.encode())
    rows, bad = read(path, format=TextFormat(separator=";", escape="\\"))
    assert rows == missing_as_none(table)
    assert bad.count == 0


def test_an_escape_stands_for_itself_outside_of_quotes_and_before_other_characters(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'a,b\n\\\\,\\n\n"\\x\\\\",c:\\d\n')
    rows, bad = read(path, format=TextFormat(escape="\\"))
    assert rows == [("\\\\", "\\n"), ("\\x\\", "c:\\d")]
    assert bad.count == 0


def naive_value(text, position):
    """Return a value and where it ends; no value if a quote is where it may not be."""
    if text[position : position + 1] != b'"':
        end = position
        while text[end : end + 1] not in (b",", b"\n"):
            end += 1
        value = text[position:end]
        if text[end : end + 1] == b"\n":
            value = value.removesuffix(b"\r")
        return (None if b'"' in value else value), end
    value = b""
    while True:
        end = text.find(b'"', position + 1)
        if end < 0:
            return None, None
        value += text[position + 1 : end]
        if text[end + 1 : end + 2] != b'"':
            break
        value, position = value + b'"', end + 1
    position = end + 1
    return value, position + (text[position : position + 2] == b"\r\n")


def naive_record(text, position):
    """Return the values of a record and where it ends; no values if it is a mistake."""
    values = []
    while True:
        value, position = naive_value(text, position)
        if value is None or text[position : position + 1] not in (b",", b"\n"):
            return None, None
        values.append(value.decode() or None)
        position += 1
        if text[position - 1 : position] == b"\n":
            return tuple(values), position


def naive_read(text, columns):
    """Return rows and bad (line, text), one byte after the other."""
    if text and not text.endswith(b"\n"):
        text += b"\n"
    while columns > 1 and (text in (b"\n", b"\r\n") or text.endswith((b"\n\n", b"\n\r\n"))):
        text = text[:-1].removesuffix(b"\r")
    rows, bad, position = [], [], 0
    while position < len(text):
        line = 1 + text.count(b"\n", 0, position)
        values, end = naive_record(text, position)
        next_line = text.index(b"\n", position) + 1
        if values is None or (len(values) != columns and end != next_line):
            values, end = None, next_line
        if values is not None and len(values) == columns:
            rows.append(values)
        else:
            bad.append((line, text[position:end].removesuffix(b"\n").removesuffix(b"\r").decode()))
        position = end
    return rows, bad


@pytest.mark.parametrize("columns", slow_after([2, 1]))
@settings(max_examples=150)
@given(
    text=st.text(st.sampled_from('""",,\n\n\rxé'), min_size=1, max_size=60),
    block_bytes=st.sampled_from([1, 5, 16, 1 << 20]),
)
@example(text='a,b\n"x\n5" y,1\nc,d\n', block_bytes=1)
@example(text="x,x\nx\nx,x,x\n", block_bytes=1 << 20)
@example(text='x,"\n\n\n', block_bytes=4)
def test_any_text_is_read_as_one_byte_after_the_other_would_be(
    tmp_path_factory, columns, text, block_bytes
):
    path = tmp_path_factory.mktemp("text") / "log.csv"
    path.write_bytes(text.encode())
    expected_rows, expected_bad = naive_read(text.encode(), columns)
    names = TextFormat(header=False, names=NAMES[:columns])
    if not expected_rows and not expected_bad:
        with pytest.raises(DataError, match="has no rows"):
            read(path, format=names)
        return
    rows, bad = bad_lines(path, format=names, block_bytes=block_bytes)
    assert bad == expected_bad
    assert rows == expected_rows


@settings(max_examples=200)
@given(
    lines=st.lists(st.lists(st.sampled_from(["x", "", "é"]), min_size=1, max_size=4), min_size=1),
    wanted=st.sampled_from([["a"], ["c", "a"], ["b", "c", "a"], ["a", "b", "c"]]),
)
@example(lines=[["x"] * 3] * 500 + [["x"], ["x"] * 4, ["x"] * 4], wanted=["a"])
@example(lines=[["x"] * 3] * 500 + [["x"] * 2, ["x"] * 4], wanted=["a", "b", "c"])
@example(lines=[["x"] * 3] * 500 + [["x"] * 4, ["x"] * 2], wanted=["c", "b", "a"])
def test_ragged_lines_are_bad_whichever_columns_are_wanted(tmp_path_factory, lines, wanted):
    path = tmp_path_factory.mktemp("text") / "log.tsv"
    text = "a\tb\tc\n" + "".join("\t".join(line) + "\n" for line in lines) + "end\tend\tend\n"
    path.write_text(text, encoding="utf-8")
    bad = Collected()
    tabs = TextFormat(separator="\t", quote="")
    frames = [chunk.frame for chunk in read_raw(path, wanted, bad, format=tabs)]
    good = [line for line in [*lines, ["end"] * 3] if len(line) == 3]
    places = ["abc".index(name) for name in wanted]
    expected = [tuple(line[place] or None for place in places) for line in good]
    assert [row for frame in frames for row in frame.rows()] == expected
    assert frames[0].columns == wanted
    assert [place.number for place in bad.places] == [
        number for number, line in enumerate(lines, 2) if len(line) != 3
    ]


def test_reasons_are_told_apart_and_grouped(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'a,b\n1\n1,2,3\n\n5" x,2\n1,2\n"1\n2",3,4\n\xff,1\n"x,1\n')
    rows, bad = read(path, format=TextFormat())
    assert rows == [("1", "2")]
    assert bad.reasons == {
        "wrong number of columns": 3,
        "a blank line": 1,
        "a quote in the middle of a value": 2,
        "not valid utf-8": 1,
        "a quote that is never closed": 1,
    }
    place, reason = bad.first
    assert (place.number, place.text, reason) == (2, "1", "wrong number of columns (1, expected 2)")


def test_a_stray_quote_costs_a_line_and_not_the_file(tmp_path):
    lines = [b"%d,x" % i for i in range(300_000)]
    lines[5] = b'5,"x'
    lines[200_000] = b'"200000,x'
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\n" + b"\n".join(lines))
    rows, bad = bad_lines(path, format=TextFormat(), block_bytes=1 << 19)
    assert bad == [(7, '5,"x'), (200_002, '"200000,x')]
    assert [int(row[0]) for row in rows] == [i for i in range(300_000) if i not in (5, 200_000)]


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("extra", [0, 1, 10 << 20])
@pytest.mark.parametrize("block_bytes", [1 << 16, 8 << 20])
def test_a_line_may_be_a_mebibyte_and_no_longer(tmp_path, quoted, extra, block_bytes):
    mark = b'"' if quoted else b""
    value = b"x" * (MAX_RECORD_BYTES + extra - 2 - 2 * len(mark))
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\n1,y\n2," + mark + value + mark + b"\n3,z\n")
    rows, bad = bad_lines(path, format=TextFormat(), block_bytes=block_bytes)
    if extra:
        assert rows == [("1", "y"), ("3", "z")]
        [(line, text)] = bad
        assert line == 3
        assert len(text) == MAX_RECORD_BYTES
        assert text.startswith('2,"x' if quoted else "2,x")
    else:
        assert rows == [("1", "y"), ("2", value.decode()), ("3", "z")]
        assert bad == []


def test_a_long_line_inside_open_quotes_is_skipped_too(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'a,b\n1,"y\n' + b"x" * (3 << 20) + b"\n3,z\n")
    rows, bad = bad_lines(path, format=TextFormat(), block_bytes=1 << 16)
    assert rows == [("3", "z")]
    assert [(line, text[:4]) for line, text in bad] == [(2, '1,"y'), (3, "xxxx")]


def test_lines_that_are_not_utf8_are_bad_and_latin_1_is_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes('a,b\né,1\nß,"2\n3"\nx,4\n'.encode("latin-1"))
    rows, bad = bad_lines(path, format=TextFormat())
    assert rows == [("x", "4")]
    assert bad == [(2, "\\xe9,1"), (3, '\\xdf,"2\n3"')]
    rows, bad = bad_lines(path, format=TextFormat(encoding="latin-1"))
    assert rows == [("é", "1"), ("ß", "2\n3"), ("x", "4")]
    assert bad == []
    assert sniff_format(path).encoding == "latin-1"


def test_blank_lines_are_nothing_at_the_end_and_bad_rows_before_it(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\r\n1,2\r\n\r\n3,4\r\n\r\n\r\n\r\n")
    for block_bytes in (1, 4, 1 << 20):
        rows, bad = bad_lines(path, format=TextFormat(), block_bytes=block_bytes)
        assert rows == [("1", "2"), ("3", "4")]
        assert bad == [(3, "")]


def test_a_blank_line_of_a_single_column_is_a_missing_value(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"a\n1\n\n2\n\n")
    rows, bad = read(path, format=TextFormat())
    assert rows == [("1",), (None,), ("2",), (None,)]
    assert bad.count == 0


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n1,2\n")
    assert column_names(path) == ["a", "b"]
    assert read(path)[0] == [("1", "2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a,b\n1,2\n", TextFormat()),
        (b'a;b\n"1,5";2\n"2,5";3\n', TextFormat(separator=";")),
        (b"a\tb\tc\n1,2,3,4\t\t\n", TextFormat(separator="\t")),
        (b"a|b\n1|2\n", TextFormat(separator="|")),
        (b'"a";"b"\n"x \\"y\\"; z";"1"\n', TextFormat(separator=";", escape="\\")),
        (b'a\tb\n5" tv\t1\n6" tv\t2\n7"\t3\n', TextFormat(separator="\t", quote="")),
        (b"a\n1\n2\n", TextFormat()),
        (b'a,b\n"x\ny",1\n"x, z",2\n', TextFormat()),
        ("a,b\né,1".encode(), TextFormat()),
        ("a,b\né,1".encode("latin-1"), TextFormat(encoding="latin-1")),
        (b'"a";"b"\n"x, y";1\n"x, z";2\n', TextFormat(separator=";")),
        (b"1::A, B (1995)::X|Y\n2::C::Y\n3::D::X\n4::E::X\n", TextFormat()),
        (b"a,b;c\n" + b"1,2;3\n" * 3 + b"1,2,3;3\n", TextFormat(separator=";")),
        (b'a,b\n"C:\\d\\","x"\n"C:\\e\\","y"\n"z","w"\n', TextFormat()),
        (("a,b\n" + "日,1\n" * 9).encode() + b"\xff,1\n", TextFormat()),
        (("a,b\n" + "é,1\n" * 9).encode("latin-1"), TextFormat(encoding="latin-1")),
    ],
)
def test_the_format_is_guessed(tmp_path, text, expected):
    path = tmp_path / "log.csv"
    path.write_bytes(text)
    assert sniff_format(path) == expected


def test_a_character_cut_off_where_guessing_ends_is_still_utf8(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\n" + "é,1\n".encode() * 20_000 + "éééé".encode() * 20_000 + b",1\n")
    assert sniff_format(path).encoding == "utf-8"
    path.write_bytes(b"a," + "é".encode() * 40_000 + b"\n1,2\n")
    assert sniff_format(path).encoding == "utf-8"


TEXT = "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16"), "is written in UTF-16 or UTF-32; write it as UTF-8 first"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is written in UTF-16; write it as UTF-8 first"),
        (TEXT.encode("utf-16-le"), "is no text, or UTF-16: its first line has bytes of 0"),
        (b"a,b\0\n1,2\n", "is no text, or UTF-16: its first line has bytes of 0"),
        (bytes(99), "is no text, or UTF-16: its first line has bytes of 0"),
        (TEXT.replace("\n", "\r").encode(), "lone carriage return after each line; write it with"),
        (
            gzip.compress(TEXT.encode(), mtime=0),
            r"is compressed with gzip; let its name end in \.csv\.gz",
        ),
        (bz2.compress(TEXT.encode()), r"is compressed with bzip2; let its name end in \.csv\.bz2"),
        (lzma.compress(TEXT.encode()), r"is compressed with xz; let its name end in \.csv\.xz"),
        (b"PAR1\x15\x04", r"is a Parquet file; let its name end in \.parquet"),
        (b"PK\x03\x04\x14", "is an archive or a spreadsheet; write it as CSV or Parquet first"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, message):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        sniff_format(path)
    with pytest.raises(DataError, match=message):
        column_names(path, TextFormat())


def test_messages_list_some_of_very_many_columns(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(",".join(f"c{number % 600}" for number in range(1200)) + "\n")
    with pytest.raises(
        DataError, match=r"of the same name: 'c0', .*'c39' and 560 more; rename them"
    ):
        column_names(path)
    path.write_text(",".join(["x" * 9999, *map(str, range(1200))]) + "\n1\n")
    with pytest.raises(
        DataError, match=r"\(9,999 characters\)', '0', .* and 1,161 more$"
    ) as caught:
        list(read_raw(path, ["y"], BadRows()))
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"separator": "::"}, "separator must be one ASCII character, got '::'"),
        ({"separator": ""}, "separator must be one ASCII character, got ''"),
        ({"quote": "«"}, "quote must be one ASCII character, got '«'"),
        ({"separator": "\n"}, "separator must be one ASCII character"),
        ({"separator": '"'}, "separator, quote and escape must differ"),
        ({"quote": "", "escape": "\\"}, "an escape stands before a quote"),
        ({"encoding": "utf-16"}, "encoding must be one of 'utf-8', 'latin-1'"),
        ({"names": ("a",)}, "names are for a file without a header"),
    ],
)
def test_formats_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(SettingsError) as caught:
        TextFormat(**settings)
    assert message in str(caught.value)


def test_a_file_of_all_control_characters_is_no_text(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b\n" + bytes(range(128)).replace(b"\n", b"").replace(b'"', b"") + b"\n")
    with pytest.raises(DataError, match="no text file"):
        read(path, format=TextFormat())


def test_a_later_file_is_read_with_the_quotes_of_the_first(tmp_path):
    path = tmp_path / "later.tsv"
    path.write_bytes(b"a\tb\n1\t2\n")
    known = TextFormat(separator=",", quote='"', escape="\\")
    assert sniff_like(path, known) == TextFormat(separator="\t", escape="\\")
    headless = TextFormat(header=False, names=("a", "b"))
    assert sniff_like(path, headless) == headless
