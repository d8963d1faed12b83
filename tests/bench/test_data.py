"""The bench of preparing data: the log is as described, the two sides do the same, figures are theirs."""

import csv
import importlib.util
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import needs_package

from rarebit.bench import _raw_log, data
from rarebit.bench._raw_log import NAMES, NUM_VALUES, write_raw_log
from rarebit.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_raw_log(path, ROWS)
    return path


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def log_square(text):
    """The bin of an integer as the papers have it."""
    value = int(text)
    return math.floor(math.log(value) ** 2) if value > 2 else value - 2


def test_a_row_is_a_label_13_integers_and_26_texts(log):
    rows = read(log)
    assert len(rows) == ROWS
    assert {len(row) for row in rows} == {len(NAMES)} == {40}
    for row in rows:
        assert row[0] in ("0", "1")
        assert all(not text or text.isdecimal() for text in row[1:14])
        assert all(not text or set(text) <= set("0123456789abcdef") for text in row[14:])
        assert {len(text) for text in row[14:]} <= {0, 8}
    assert log.read_bytes().endswith(b"\n")
    assert b"\0" not in log.read_bytes()


def test_one_field_of_ten_is_empty_and_one_label_of_four_is_1(log):
    rows = np.array(read(log))
    assert (rows[:, 1:] == "").mean(axis=0) == pytest.approx(0.1, abs=0.03)
    assert (rows[:, 0] == "1").mean() == pytest.approx(0.25, abs=0.03)


@pytest.mark.slow
def test_columns_have_their_number_of_values(tmp_path):
    write_raw_log(tmp_path / "log.tsv", 40_000)
    columns = np.array(read(tmp_path / "log.tsv")).T[1:]
    for number, (column, num_values) in enumerate(zip(columns, NUM_VALUES, strict=True)):
        texts = set(column.tolist()) - {""}
        found = {log_square(text) for text in texts} if number < 13 else texts
        assert len(found) <= num_values
        if num_values < 1000:
            assert len(found) == num_values
        if number < 13 and num_values > 20:
            assert len(texts) > 2 * num_values  # many integers share a bin


@pytest.mark.slow
def test_values_are_drawn_by_the_third_power(tmp_path):
    write_raw_log(tmp_path / "log.tsv", 40_000)
    column = np.array(read(tmp_path / "log.tsv"))[:, NAMES.index("C2")]
    counts = sorted(Counter(column[column != ""].tolist()).values(), reverse=True)
    # P(v < x D) = x ** (1 / 3)
    top_fifth = sum(counts[: 553 // 5]) / sum(counts)
    assert top_fifth == pytest.approx(0.2 ** (1 / 3), abs=0.02)


def test_distinct_texts_are_counted(log, tmp_path):
    columns = np.array(read(log)).T[14:]
    distinct = sum(len(set(column.tolist()) - {""}) for column in columns)
    assert write_raw_log(tmp_path / "again.tsv", ROWS) == distinct


def test_the_seed_decides_and_a_shorter_log_is_the_beginning(log, tmp_path, monkeypatch):
    monkeypatch.setattr(_raw_log, "CHUNK", 1000)
    for name, rows, seed in [("long", 2500, 0), ("short", 1700, 0), ("other", 1700, 1)]:
        write_raw_log(tmp_path / name, rows, seed=seed)
    long, short, other = (read(tmp_path / name) for name in ("long", "short", "other"))
    assert long[:1700] == short
    assert other[0] != short[0]
    assert long[1000:2000] != long[:1000]
    write_raw_log(tmp_path / "empty", 0)
    assert (tmp_path / "empty").read_bytes() == b""


def grouped(ids):
    """A column's ids numbered by their first row: the same for any two that group rows alike."""
    numbers = {}
    return [numbers.setdefault(one, len(numbers)) for one in ids.tolist()]


def naive_ids(path):
    """The ids of a log by loops: values seen 10 times by themselves, all others together."""
    columns = list(zip(*read(path), strict=True))[1:]
    ids = []
    for number, texts in enumerate(columns):
        is_integer = number < 13
        values = [log_square(text) if text and is_integer else text for text in texts]
        counts = Counter(values)
        ids.append(["unknown" if v != "" and counts[v] < 10 else v for v in values])
    return np.array(ids, dtype=object).T


@needs_package("pandas")
def test_the_pandas_program_gives_the_ids_of_naive_loops(log, tmp_path):
    from rarebit.bench import _pandas_program

    _pandas_program.prepare(log, tmp_path / "out")
    ids = np.load(tmp_path / "out/ids.npy")
    assert (ids.dtype, ids.shape) == (np.int32, (ROWS, 39))
    expected = naive_ids(log)
    for column in range(39):
        assert grouped(ids[:, column]) == grouped(expected[:, column])
        is_missing, is_unknown = expected[:, column] == "", expected[:, column] == "unknown"
        assert ((ids[:, column] == 2) == is_missing).all()
        assert ((ids[:, column] == 1) == is_unknown).all()
    label = np.load(tmp_path / "out/label.npy")
    assert label.tolist() == [int(row[0]) for row in read(log)]


@needs_package("pandas")
@needs_package("polars")
def test_both_sides_give_the_same_ids(log, tmp_path):
    from rarebit.bench import _pandas_program
    from rarebit.data.raw.encode import split_rows
    from rarebit.data.sources.criteo import Criteo

    _pandas_program.prepare(log, tmp_path / "pandas")
    data.prepare(log, tmp_path / "ours")
    theirs, ours = (np.load(tmp_path / side / "ids.npy") for side in ("pandas", "ours"))
    # ours has the rows of each part side by side
    parts = split_rows(Criteo().schema("pep").split, ROWS, np.zeros(ROWS))
    order = np.argsort(parts, kind="stable")
    assert ours.shape == theirs.shape
    for column in range(39):
        assert grouped(ours[:, column]) == grouped(theirs[order, column])
    theirs, ours = (np.load(tmp_path / side / "label.npy") for side in ("pandas", "ours"))
    assert ours.tolist() == theirs[order].tolist()


@needs_package("pandas")
def test_the_process_of_pandas_has_no_torch_in_its_memory(log):
    code = f"import sys\n{data.SIDES['pandas']}\nprint('torch' in sys.modules, prepare.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "_pandas_program"]


STAND_IN = """
def prepare(log, folder):
    assert log.stat().st_size and not folder.exists()
    folder.mkdir()
    (folder / "rows").write_bytes(log.read_bytes())
    folder.with_name("large").write_bytes(b'x' * ({megabytes} << 20))
"""


@pytest.mark.slow
def test_a_process_tells_its_own_peak_and_not_that_of_its_parent(log, tmp_path):
    ballast = torch.ones(400 << 20, dtype=torch.uint8)
    small = data.measured(STAND_IN.format(megabytes=1), log, tmp_path / "out")
    large = data.measured(STAND_IN.format(megabytes=200), log, tmp_path / "out")
    assert (tmp_path / "out/rows").read_bytes() == log.read_bytes()
    assert small.seconds > 0
    if Path("/proc/self/status").exists():
        assert small.peak_bytes < ballast.nbytes // 2
        assert large.peak_bytes - small.peak_bytes == pytest.approx(199 << 20, rel=0.1)


CLOCK = """
now = [0.0]
time.perf_counter = lambda: now[0]
now[0] += 100.0

def prepare(log, folder):
    now[0] += 7.0
"""


def test_the_time_of_a_side_does_not_hold_its_imports(log, tmp_path):
    assert data.measured(CLOCK, log, tmp_path / "out").seconds == 7.0


def test_a_process_that_fails_is_an_error(log, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        data.measured("def prepare(log, folder): raise SystemExit(3)", log, tmp_path / "out")


def test_figures_are_medians():
    told = {
        "ours": [
            data.Work(2.0, 300_000_000),
            data.Work(9.0, 100_000_000),
            data.Work(1.0, 200_000_000),
        ],
        "pandas": [data.Work(6.0, 400_000_000), data.Work(8.0, 900_000_000), data.Work(10.0, 1)],
    }
    figures = data._figures(1000, told)
    assert (figures["ours_seconds"], figures["pandas_seconds"], figures["ratio"]) == (2, 8, 4)
    assert (figures["ours_peak_mb"], figures["pandas_peak_mb"]) == (200, 400)
    assert figures["memory_ratio"] == 0.5
    assert (figures["rows"], figures["rows_per_second"]) == (1000, 500)


@pytest.mark.slow
@needs_package("polars")
@needs_package("pandas")
def test_both_sides_are_measured_and_the_folder_is_read(tmp_path):
    said, threads = [], torch.get_num_threads()
    figures = data.compare(2000, tmp_path, said.append)
    assert figures["rows"] == 2000
    assert min(figures[f"{side}_seconds"] for side in data.SIDES) > 0
    assert min(figures["open_ms"], figures["batches_rows_per_second"]) > 0
    assert len(said) == 1
    assert said[0].startswith("data: 2,000 rows, ")
    assert torch.get_num_threads() == threads
    for side in data.SIDES:
        assert np.load(tmp_path / side / "ids.npy").shape == (2000, 39)


def test_a_system_that_does_not_tell_the_peak_gives_no_memory_ratio():
    told = {"ours": [data.Work(2.0, None)] * 3, "pandas": [data.Work(8.0, None)] * 3}
    figures = data._figures(100, told)
    assert (figures["ratio"], figures["memory_ratio"]) == (4.0, None)
    assert (figures["ours_peak_mb"], figures["pandas_peak_mb"]) == (None, None)


@pytest.mark.parametrize(("package", "extra"), [("polars", "data"), ("pandas", "test")])
def test_a_missing_package_is_named(package, extra, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(
        MissingExtraError, match=rf"needs the package '{package}'.*rarebit\[{extra}\]"
    ):
        data.compare(100, tmp_path, print)


@needs_package("polars")
def test_the_long_version_compares_peaks_with_and_without_the_vocabulary(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location(
        "benchmark_prepare", ROOT / "benchmarks/prepare.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setitem(script.SIDES, "ours", STAND_IN.format(megabytes=50))
    result = script.scale((500, 1000), tmp_path)
    small, large = result["sizes"]
    assert (small["rows"], large["rows"]) == (500, 1000)
    assert large["distinct_values"] > small["distinct_values"]
    assert small["vocabulary_bytes"] >= 8 * small["distinct_values"]
    assert result["peak_ratio"] == large["peak_bytes"] / small["peak_bytes"]
    apart = [one["peak_bytes"] - one["vocabulary_bytes"] for one in (small, large)]
    assert result["peak_ratio_apart_from_vocabulary"] == apart[1] / apart[0]
    assert list(tmp_path.iterdir()) == []
