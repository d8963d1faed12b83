"""Prepare long raw logs in Criteo's format: beside pandas at one size, and alone at two.

    python benchmarks/prepare.py --rows 1000000 --scale --out benchmarks/results/prepare.json

With `--scale`, ours prepares 1,000,000 and 10,000,000 rows, each in a process of its own, and the most
memory that the process had is stored. A longer log has more distinct values, and whoever gives each an id
must hold them. So the bytes of these values are stored, too, as Polars counts a column of them, and the
two peaks are compared with and without. What finds a value's id takes more than the value itself; that
is not taken off, so it makes the second comparison look worse than it is, not better.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import polars as pl

from rarebit.bench._raw_log import write_raw_log
from rarebit.bench.data import SIDES, compare, measured
from rarebit.machine import OtherLoad, machine

SCALE = (1_000_000, 10_000_000)
GIB = 1 << 30


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows beside pandas")
    parser.add_argument("--scale", action="store_true", help="also prepare 10,000,000 rows")
    parser.add_argument("--folder", type=Path, help="a folder with room for 10 GB of files")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    facts = machine()  # before the measurement: the commit is that of the code that runs
    load = OtherLoad()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = {"beside_pandas": compare(options.rows, Path(folder), say)}
    if options.scale:
        result["scale"] = scale(SCALE, options.folder)
    result["machine"] = facts | {"other_load": load.share()}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def scale(sizes: tuple[int, int], place: Path | None) -> dict[str, object]:
    """Return the peaks of preparing logs of two sizes, and how they compare."""
    small, large = (prepare_alone(rows, place) for rows in sizes)
    apart = [one["peak_bytes"] - one["vocabulary_bytes"] for one in (small, large)]
    return {
        "sizes": [small, large],
        "peak_gib": large["peak_bytes"] / GIB,
        "peak_ratio": large["peak_bytes"] / small["peak_bytes"],
        "peak_ratio_apart_from_vocabulary": apart[1] / apart[0],
    }


def prepare_alone(rows: int, place: Path | None) -> dict[str, float]:
    """Return how long preparing so many rows took, its peak, and what their values take."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        log = Path(folder) / "log.tsv"
        distinct = write_raw_log(log, rows)
        say(
            f"scale: {rows:,} rows, {log.stat().st_size / 1e6:.0f} MB, {distinct:,} distinct values"
        )
        told = measured(SIDES["ours"], log, Path(folder) / "ours")
    assert told.peak_bytes is not None, "the peak of a process is told by Linux only"
    say(f"scale: {told.seconds:.1f} s, peak {told.peak_bytes / GIB:.2f} GiB")
    return {
        "rows": rows,
        "seconds": told.seconds,
        "rows_per_second": round(rows / told.seconds),
        "peak_bytes": told.peak_bytes,
        "distinct_values": distinct,
        "vocabulary_bytes": vocabulary_bytes(distinct),
    }


def vocabulary_bytes(distinct: int) -> int:
    """Return what so many texts of 8 characters take as a column in memory."""
    texts = pl.int_range(distinct, eager=True).cast(pl.String).str.zfill(8)
    return texts.estimated_size()


def say(line: str) -> None:
    """Print how it goes."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
