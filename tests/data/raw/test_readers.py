"""Whole files: names, columns, places, damage, and memory that does not grow."""

import bz2
import gzip
import importlib.util
import lzma
import os
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from capabilities import slow_after

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import TextFormat  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # after the check that Polars is there
from rarebit.data.raw.readers import column_names, read_frame, read_raw  # noqa: E402  # the same
from rarebit.errors import DataError  # noqa: E402  # the same

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None,
    reason="capability: package pyarrow: it is not installed",
)
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
SRC = Path(__file__).parents[3] / "src"


def chunks_of(path, columns=None, bad=None, **options):
    return list(read_raw(path, columns, bad or BadRows(), **options))


def rows_of(chunks):
    return [row for chunk in chunks for row in chunk.frame.rows()]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def numbers(tmp_path):
    """A file of 1,000 rows: n, its square, and a text that has a newline in every tenth row."""
    lines = [f'{n},{n * n},"t{n}\n"' if n % 10 == 0 else f"{n},{n * n},t{n}" for n in range(1000)]
    return write(tmp_path / "numbers.csv", "n,square,text\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("block_bytes", [100, 8 << 20])
def test_compressed_or_not_the_rows_are_the_same(tmp_path, numbers, suffix, block_bytes):
    path = numbers
    if suffix:
        path = write(tmp_path / f"other.CSV{suffix}", COMPRESS[suffix](numbers.read_bytes()))
    steps = []
    chunks = chunks_of(
        path, block_bytes=block_bytes, progress=lambda done, total: steps.append((done, total))
    )
    rows = rows_of(chunks)
    assert [int(row[1]) for row in rows] == [n * n for n in range(1000)]
    assert rows[20][2] == "t20\n"
    assert len(chunks) > 100 or block_bytes > 100
    assert steps == sorted(steps)
    assert steps[-1] == (path.stat().st_size,) * 2


@pytest.mark.parametrize("block_bytes", [1, 100, 8 << 20])
@pytest.mark.parametrize("quote", ['"', ""])
def test_every_row_knows_its_line_and_its_text(tmp_path, numbers, block_bytes, quote):
    path = (
        numbers
        if quote
        else write(tmp_path / "plain.csv", "a,b\r\n" + "".join(f"{n},x\r\n" for n in range(99)))
    )
    chunks = chunks_of(path, format=TextFormat(quote=quote), block_bytes=block_bytes)
    lines = path.read_bytes().decode().split("\n")
    for chunk in chunks:
        for row, values in enumerate(chunk.frame.rows()):
            place = chunk.locate(row)
            assert (place.file, place.unit) == (path.name, "line")
            found = lines[place.number - 1 : place.number + place.text.count("\n")]
            assert "\n".join(found).removesuffix("\r") == place.text
            assert place.text.split(",")[0] == values[0]


def test_the_records_of_a_file_are_its_rows_and_its_bad_rows(tmp_path):
    chosen = np.random.default_rng(0).integers(0, 7, 20_000)
    kinds = ["1,2,3", "1,2", "1,2,3,4", "", "1,\udcff,3", '5" x,2,3', "1,é,3"]
    lines = [kinds[kind] for kind in chosen] + ["1,2,3"]
    text = "a,b,c\n" + "\n".join(lines)
    path = write(tmp_path / "log.csv", text.encode(errors="surrogateescape"))
    bad = BadRows("aside", tmp_path / "bad.jsonl")
    rows = rows_of(chunks_of(path, bad=bad, format=TextFormat(), block_bytes=10_000))
    bad.close()
    assert len(rows) + bad.count == len(lines)
    assert len(rows) == lines.count("1,2,3") + lines.count("1,é,3")
    assert bad.reasons["a blank line"] == lines.count("")
    assert bad.reasons["not valid utf-8"] == lines.count("1,\udcff,3")
    assert bad.reasons["wrong number of columns"] == lines.count("1,2") + lines.count("1,2,3,4")
    assert len((tmp_path / "bad.jsonl").read_text(encoding="utf-8").splitlines()) == bad.count


def test_missing_values_are_null(tmp_path):
    path = write(tmp_path / "log.tsv", "a\tb\n\tNULL\nNULL?\t\\N\n")
    rows = rows_of(chunks_of(path, missing=["NULL", "\\N"]))
    assert rows == [(None, None), ("NULL?", None)]


def test_integers_are_parsed_where_a_whole_block_is(tmp_path):
    path = write(
        tmp_path / "log.tsv", "a\tb\n" + "1\tx\n" * 50 + "\t-\n" + "-7\ty\n" * 49 + "z\tz\n" * 50
    )
    chunks = chunks_of(path, integers=["a"], missing=["-"], block_bytes=200)
    assert chunks[0].frame.schema == {"a": pl.Int64, "b": pl.String}
    assert chunks[-1].frame.schema == {"a": pl.String, "b": pl.String}
    values = [row[0] for row in rows_of(chunks)]
    expected = [1] * 50 + [None] + [-7] * 49 + ["z"] * 50
    assert [value if value is None else str(value) for value in values] == [
        value if value is None else str(value) for value in expected
    ]


def test_hexadecimal_numbers_are_no_integers(tmp_path):
    path = write(tmp_path / "log.tsv", "a\tb\n1\tx\n0x1F\ty\n0X2\tz\n")
    rows = rows_of(chunks_of(path, integers=["a"]))
    assert rows == [("1", "x"), ("0x1F", "y"), ("0X2", "z")]


def test_columns_come_in_the_order_asked_for(numbers):
    [chunk] = chunks_of(numbers, ["text", "n"])
    assert chunk.frame.columns == ["text", "n"]
    assert chunk.frame.row(3) == ("t3", "3")


def test_names_of_a_file_without_a_header(tmp_path):
    path = write(tmp_path / "log.dat", "1|2\n3|4\n")
    assert column_names(path, TextFormat(separator="|", header=False)) == ["column_1", "column_2"]
    given = TextFormat(separator="|", header=False, names=("x", "y"))
    assert rows_of(chunks_of(path, ["y"], format=given)) == [("2",), ("4",)]
    assert column_names(path) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", "", "'{}' is empty; a log needs at least one row"),
        ("log.csv.gz", gzip.compress(b"", mtime=0), "'{}' is empty"),
        ("log.csv", "a,b\n", "'{}' has no rows, only column names"),
        ("log.csv", "a,b", "'{}' has no rows, only column names"),
        ("log.csv", "a,b,a\n1,2,3\n", "'{}' has columns of the same name: 'a'"),
        ("log.csv.gz", "a,b\n1,2\n", "'{}': the file is cut off or damaged (Not a gzipped file"),
        ("log.csv.xz", "a,b\n1,2\n", "'{}': the file is cut off or damaged (Input format not supp"),
        ("log.xlsx", "a,b\n1,2\n", "cannot tell what 'log.xlsx' is from its name; known are .csv"),
        ("log.parquet", "", "'{}' is empty"),
        ("log.parquet", "a,b\n1,2\n", "'{}' is no Parquet file, or is damaged: "),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        chunks_of(path)
    assert message.format(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header", ['"a,b\n1,2\n', '5" x,b\n1,2\n', b"a,\xff\n1,2\n", "x" * (2 << 20)]
)
def test_a_header_that_is_none_is_refused(tmp_path, header):
    path = write(tmp_path / "log.csv", header)
    with pytest.raises(DataError, match=r"the first line of '.*' is not one of column names"):
        chunks_of(path, format=TextFormat())


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_missing_and_locked_files_are_refused(tmp_path, name):
    path = tmp_path / name
    pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
    with pytest.raises(DataError, match="does not exist; check the name and the folder"):
        chunks_of(path)
    write(path, "a,b\n1,2\n").chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("capability: file permissions: this user may read every file")
    with pytest.raises(DataError, match=r"cannot read '.*': Permission denied"):
        chunks_of(path)


def test_a_missing_column_is_named_with_what_there_is(numbers):
    with pytest.raises(DataError) as caught:
        chunks_of(numbers, ["n", "squar"])
    assert "has no column 'squar'; did you mean 'square'?" in str(caught.value)
    assert "Its columns: 'n', 'square', 'text'" in str(caught.value)


@pytest.mark.parametrize("suffix", slow_after([".gz", ".bz2", ".xz"], quick=2))
def test_a_truncated_file_says_how_many_rows_were_whole(tmp_path, suffix):
    noise = np.random.default_rng(1).integers(0, 1 << 60, 100_000)
    lines = [b"%d,%d\n" % (n, noise[n]) for n in range(100_000)]
    packed = COMPRESS[suffix](b"a,b\n" + b"".join(lines))
    path = write(tmp_path / f"log.csv{suffix}", packed[: len(packed) * 2 // 3])
    rows = []

    def read():
        for chunk in read_raw(path, None, BadRows(), block_bytes=1 << 18):
            rows.extend(chunk.frame.rows())

    with pytest.raises(
        DataError, match=r"cut off or damaged .* whole rows; get the file"
    ) as caught:
        read()
    assert f"after {len(rows):,} whole rows" in str(caught.value)
    assert len(rows) > (0 if suffix == ".xz" else 30_000)
    assert all(
        b"%d,%d\n" % tuple(map(int, row)) == line for row, line in zip(rows, lines, strict=False)
    )


def test_damage_in_the_middle_is_found(tmp_path):
    packed = bytearray(gzip.compress(b"a,b\n" + b"1,2\n" * 1000))
    packed[-6] ^= 1
    path = write(tmp_path / "log.csv.gz", bytes(packed))
    with pytest.raises(DataError, match=r"CRC check failed .* after 1,000 whole rows"):
        chunks_of(path)


@pytest.mark.parametrize("change", ["grows", "shrinks", "is written again"])
def test_a_file_that_changes_while_it_is_read_is_refused(numbers, change):
    chunks = read_raw(numbers, None, BadRows(), block_bytes=1000)
    next(chunks)
    if change == "grows":
        with numbers.open("ab") as file:
            file.write(b"1,1,x\n")
    elif change == "shrinks":
        os.truncate(numbers, 5000)
    else:
        status = numbers.stat()
        os.utime(numbers, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"changed while it was read: .* bytes before"):
        list(chunks)


def test_a_folder_is_its_files_one_after_the_other(tmp_path):
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "part-1.csv", "a,b\n1,2\n3\n")
    write(tmp_path / "log" / "part-0.csv", "b,a\n5,6\n")
    write(tmp_path / "log" / "part-2.csv", "a,b\n")
    write(tmp_path / "log" / "_SUCCESS", "")
    bad, steps = BadRows(), []
    chunks = chunks_of(tmp_path / "log", ["a", "b"], bad, progress=lambda *step: steps.append(step))
    assert rows_of(chunks) == [("6", "5"), ("1", "2")]
    assert bad.first[0].file == "part-1.csv"
    assert bad.count == 1
    assert steps[-1] == (22, 22)
    assert steps == sorted(steps)
    assert column_names(tmp_path / "log") == ["b", "a"]


def test_a_folder_without_files_of_a_log_is_refused(tmp_path):
    write(tmp_path / "readme.md", "hello")
    with pytest.raises(DataError, match="has no file of a log in it"):
        chunks_of(tmp_path)


FRAME = {
    "n": list(range(250_000)),
    "x": [0.5, None] * 125_000,
    "text": ["a", "", "-", None, "é"] * 50_000,
    "day": [date(2024, 1, 1)] * 250_000,
    "tags": [["a", "b"], []] * 125_000,
}


@needs_pyarrow
@pytest.mark.parametrize("row_group", [1 << 20, 60_000])
def test_parquet_keeps_order_and_types(tmp_path, row_group):
    path = tmp_path / "log.parquet"
    frame = pl.DataFrame(FRAME)
    frame.write_parquet(path, row_group_size=row_group)
    steps = []
    chunks = chunks_of(path, missing=["-"], progress=lambda *step: steps.append(step))
    assert max(chunk.frame.height for chunk in chunks) <= 100_000
    whole = pl.concat([chunk.frame for chunk in chunks])
    assert whole.schema == frame.schema
    assert whole.drop("text").equals(frame.drop("text"))
    assert whole["text"].to_list() == ["a", None, None, None, "é"] * 50_000
    assert steps[-1] == (path.stat().st_size,) * 2
    place = chunks[1].locate(4)
    row = chunks[0].frame.height + 5
    assert (place.file, place.number, place.unit) == ("log.parquet", row, "row")
    assert place.text.startswith(f"n={row - 1}, x=0.5, text=é, day=2024-01-01")
    assert column_names(path) == frame.columns


@needs_pyarrow
def test_parquet_reads_the_columns_asked_for_and_names_one_it_has_not(tmp_path):
    path = tmp_path / "log.pq"
    pl.DataFrame(FRAME).head(10).write_parquet(path)
    [chunk] = chunks_of(path, ["text", "n"])
    assert chunk.frame.columns == ["text", "n"]
    assert chunk.frame["n"].to_list() == list(range(10))
    with pytest.raises(DataError, match="has no column 'label'; its columns: 'n', 'x', 'text'"):
        chunks_of(path, ["label"])
    pl.DataFrame(FRAME).head(0).write_parquet(path)
    with pytest.raises(DataError, match="has no rows"):
        chunks_of(path)


@needs_pyarrow
@pytest.mark.parametrize("cut", ["end", "middle"])
def test_a_damaged_parquet_file_is_refused(tmp_path, cut):
    path = tmp_path / "log.parquet"
    pl.DataFrame(FRAME).drop("tags").write_parquet(path)
    content = bytearray(path.read_bytes())
    if cut == "end":
        content = content[:-100]
    else:
        content[1000:50_000] = b"\xff" * 49_000
    write(path, bytes(content))
    with pytest.raises(DataError, match="is no Parquet file, or is damaged"):
        chunks_of(path)


@needs_pyarrow
def test_parquet_columns_of_the_same_name_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "log.parquet"
    columns = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.Table.from_arrays(columns, names=["user", "ad", "user"]), path)
    for read in (chunks_of, column_names):
        with pytest.raises(DataError, match=r"log.parquet' has columns of the same name: 'user';"):
            read(path)


@needs_pyarrow
@pytest.mark.parametrize("nested", [False, True])
def test_parquet_decimals_that_polars_cannot_hold_are_refused_by_name(tmp_path, nested, capfd):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "log.parquet"
    long, short = pa.decimal256(50, 2), pa.decimal128(38, 2)
    price, kind = ([Decimal("1.50")], pa.list_(long)) if nested else (Decimal("1.50"), long)
    columns = {"n": [1], "price": pa.array([price], kind)}
    pq.write_table(pa.table(columns | {"paid": pa.array([Decimal("2.50")], short)}), path)
    with pytest.raises(DataError, match=r"the column 'price' of .* holds .*decimal256\(50, 2\)"):
        chunks_of(path)
    [chunk] = chunks_of(path, ["paid", "n"])
    assert chunk.frame.rows() == [(Decimal("2.50"), 1)]
    assert capfd.readouterr().err == ""


def test_a_frame_is_read_in_slices(tmp_path):
    frame = pl.DataFrame(FRAME)
    chunks = list(read_frame(frame, ["text", "n"], missing=["-"]))
    assert [chunk.frame.height for chunk in chunks] == [100_000, 100_000, 50_000]
    assert [row[1] for row in rows_of(chunks)] == FRAME["n"]
    assert chunks[0].frame["text"].head(5).to_list() == ["a", None, None, None, "é"]
    place = chunks[2].locate(2)
    assert (place.file, place.number, place.text, place.unit) == (
        "",
        200_003,
        "text=-, n=200002",
        "row",
    )
    with pytest.raises(DataError, match="the frame has no column 'm'"):
        list(read_frame(frame, ["m"]))
    with pytest.raises(DataError, match="the frame has no rows"):
        list(read_frame(frame.head(0), None))


MEASURE = """
import sys
from pathlib import Path
from rarebit.data.raw.chunks import BadRows
from rarebit.data.raw.readers import read_raw
from rarebit.data.log_schema import TextFormat
chunks = read_raw(Path(sys.argv[1]), None, BadRows("aside"), format=TextFormat(separator=chr(9)))
rows = sum(chunk.frame.height for chunk in chunks)
status = Path("/proc/self/status").read_text()
print(rows, int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


def peak(path):
    """Return rows and megabytes at the peak of a process that reads a file."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    rows, megabytes = map(int, result.stdout.split())
    return rows, megabytes


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="capability: Linux: no peak memory of a process"
)
@pytest.mark.parametrize("name", ["log.tsv", "line.tsv", "log.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    if name == "log.parquet":
        pytest.importorskip("pyarrow", reason="capability: package pyarrow: it is not installed")
    peaks = []
    for millions in (1, 6):
        path = tmp_path / f"{millions}-{name}"
        frame = pl.DataFrame({"n": range(millions * 1_000_000)}).with_columns(
            text=pl.lit("some longer text of a row") + pl.col("n").cast(pl.String)
        )
        if name == "log.parquet":
            frame.write_parquet(path, row_group_size=1 << 30)
        elif name == "log.tsv":
            frame.write_csv(path, separator="\t")
        else:
            write(path, b'n\ttext\n1\ta\n2\t"b\n' + b"x" * (millions * 40_000_000) + b"\n3\tb\n")
        rows, megabytes = peak(path)
        assert rows == (2 if name == "line.tsv" else frame.height)
        peaks.append(megabytes)
    assert peaks[1] < peaks[0] + 80


@pytest.mark.parametrize("text", ["a,b\n1,2\n3,4\n5,6\n", 'a,b\n1,"x\ny"\n3,4,5\n5,6\n'])
def test_all_rows_are_numbered_as_one_by_one(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    bad = BadRows("aside")
    [chunk] = read_raw(path, None, bad)
    rows = range(chunk.frame.height)
    assert chunk.numbers().tolist() == [chunk.locate(row).number for row in rows]
    frame = chunk.frame
    [chunk] = read_frame(frame, None)
    assert chunk.numbers().tolist() == [1 + row for row in rows]
    frame.write_parquet(tmp_path / "log.parquet")
    [chunk] = read_raw(tmp_path / "log.parquet", None, bad)
    assert chunk.numbers().tolist() == [chunk.locate(row).number for row in rows]
