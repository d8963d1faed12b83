"""The kinds of results that pages are made of: stored ones, and those that `tests/report/conftest.py` makes."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
STORED = {
    "study": RESULTS / "study-tail-method.json",
    "large study": RESULTS / "study-tail.json",
    "backtest": RESULTS / "backtest-ml-1m.json",
    "frontiers": RESULTS / "compression.json",
    "text recipe": RESULTS / "text-ner.json",
}
MADE = ("run", "compressed", "fresh study", "pruned", "improvement")
KINDS = [*STORED, *MADE]
QUICK = 8
"""Kinds that are made quickly: the first ones."""
HOSTILE = "a<script>alert(1)</script>&\"'\u202eb\x1b[31m"
