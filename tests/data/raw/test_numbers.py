"""Numbers in the corners: half zeros, no value at all, values far outside, rows without a value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

from rarebit.data.log_schema import Column, LogSchema, Split  # noqa: E402  # after the check that Polars is there
from rarebit.data.prepared import PreparedFolder  # noqa: E402  # the same
from rarebit.data.raw.chunks import BadRows  # noqa: E402  # the same
from rarebit.data.raw.encode import encode_log  # noqa: E402  # the same
from rarebit.data.raw.encoder import LogEncoder  # noqa: E402  # the same
from rarebit.data.raw.readers import read_frame  # noqa: E402  # the same

LARGEST = np.finfo(np.float32).max


def encode(folder, columns, *, train=None, **values):
    """Encode a frame whose first rows are for training; return the folder and its ids and numbers."""
    rows = len(next(iter(values.values())))
    parts = ["train" if train is None or row < train else "test" for row in range(rows)]
    frame = pl.DataFrame({"click": [0] * rows, "part": parts, **values}, strict=False)
    schema = LogSchema(
        label="click",
        columns=tuple(columns),
        split=Split(kind="given", column="part"),
        unknown_share=0.0,
    )
    chunks = read_frame(frame, schema.columns_read)
    encode_log(chunks, schema, folder, origin="a test")
    prepared = PreparedFolder(folder)
    return prepared, prepared.array("ids"), prepared.array("numeric")


def quantile(bins):
    return Column(name="n", kind="numeric", treatment="quantile", bins=bins)


def test_half_zeros_are_one_bin_and_every_bin_is_trained(tmp_path):
    numbers = [0.0] * 50 + [float(n) for n in range(1, 51)]
    prepared, ids, _ = encode(tmp_path / "out", [quantile(10)], n=numbers)
    # of 100 sorted values the 60th, 70th, 80th and 90th are 10, 20, 30, 40; those before are 0
    expected = [3] * 59 + [4] * 10 + [5] * 10 + [6] * 10 + [7] * 11
    assert ids[:, 0].tolist() == expected
    assert prepared.schema["n"].rows == 8
    assert prepared.array("counts").tolist() == [0, 0, 0, 59, 10, 10, 10, 11]


@pytest.mark.parametrize("bins", [2, 128, 129, 300])
def test_many_bins_are_those_of_a_search(tmp_path, bins):
    numbers = np.random.default_rng(0).permutation(600).astype(float)
    numbers[:9] = np.nan
    _, ids, _ = encode(tmp_path / "out", [quantile(bins)], n=pl.Series("n", numbers).fill_nan(None))
    present = numbers[9:]
    inner = np.quantile(present, np.arange(1, bins) / bins, method="inverted_cdf")
    expected = 3 + np.searchsorted(inner, present, side="right")
    assert ids[:, 0].tolist() == [2] * 9 + expected.tolist()


@given(
    numbers=st.lists(st.none() | st.integers(-3, 3).map(float), min_size=1, max_size=40),
    bins=st.integers(2, 6),
)
def test_no_bin_is_without_training_rows(tmp_path_factory, numbers, bins):
    folder = tmp_path_factory.mktemp("bins") / "out"
    numbers = pl.Series("n", numbers, dtype=pl.Float64)
    prepared, ids, _ = encode(folder, [quantile(bins)], n=numbers)
    counts = prepared.array("counts")
    assert counts.tolist() == np.bincount(ids[:, 0], minlength=len(counts)).tolist()
    if numbers.count():
        assert counts[3:].min() > 0
        assert len(counts) <= 3 + bins
    else:
        assert len(counts) == 4


def test_quantile_bins_without_a_value_in_training(tmp_path):
    numbers = [None, None, None, 5.0]
    prepared, ids, _ = encode(tmp_path / "out", [quantile(4)], train=3, n=numbers)
    assert ids[:, 0].tolist() == [2, 2, 2, 3]
    assert prepared.schema["n"].rows == 4
    assert LogEncoder.open(tmp_path / "out" / "encoder").edges == {"n": ()}


@pytest.mark.parametrize("spread", [1e-3, 1e-150])
def test_standardised_values_far_outside_stay_finite(tmp_path, spread):
    # the mean is 0 and the spread of the training rows is `spread`
    numbers = [-spread, spread, 3e38, -3e38, None, spread / 2]
    columns = [Column(name="n", kind="numeric")]
    _, _, found = encode(tmp_path / "out", columns, train=2, n=numbers)
    expected = [-1, 1, LARGEST, -LARGEST, 0, 0.5]
    assert found[:, 0].tolist() == pytest.approx(expected, rel=1e-6)
    again = LogEncoder.open(tmp_path / "out" / "encoder").encode(
        next(read_frame(pl.DataFrame({"n": numbers}), None)), BadRows()
    )
    assert np.array_equal(again.numeric, found)


def test_missing_is_the_share_of_rows_without_a_value_for_every_kind(tmp_path):
    columns = [
        Column(name="user"),
        Column(name="ad", buckets=5),
        Column(name="tags", kind="multi", separator=" ", max_length=3),
        Column(name="words", kind="multi", separator=" ", max_length=2, buckets=4),
        Column(name="x", kind="numeric"),
        Column(name="y", kind="numeric", treatment="quantile", bins=3),
        Column(name="z", kind="numeric", treatment="log_square"),
        Column(name="full", kind="numeric"),
    ]
    missing = {"user": 1, "ad": 2, "tags": 4, "words": 5, "x": 3, "y": 6, "z": 8, "full": 0}
    values = {"user": "a", "ad": "b", "tags": "p q", "words": "v w v", "x": 1.5, "y": 2.5, "z": 3.0}
    rows = {
        name: [None if row < gone else values.get(name, float(row)) for row in range(8)]
        for name, gone in missing.items()
        if name != "z"
    }
    rows["z"] = pl.Series([None] * 8, dtype=pl.Float64)
    prepared, _, _ = encode(tmp_path / "out", columns, train=5, **rows)
    found = {field.name: field.missing_share for field in prepared.statistics.fields}
    assert found == {name: gone / 8 for name, gone in missing.items()}
