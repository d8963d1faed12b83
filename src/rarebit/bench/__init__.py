"""Benches: each measures one capability against its reference, in one interleaved run.

A bench is a function `name(say)` in one of the files here that returns its figures. A name that Python reserves
has an underscore at the end of its function: `import_` is "import".
"""

import importlib

from rarebit.bench._frame import BenchResult, Say, print_to_stderr, result_of
from rarebit.errors import SettingsError
from rarebit.settings import suggest

__all__ = ["BENCHES", "BenchResult", "bench_names", "run_bench"]

BENCHES = {
    "checkpoint": "processes",
    "compress": "tables",
    "data": "data",
    "delta": "serving",
    "ema": "steps",
    "export": "serving",
    "forgetting": "steps",
    "grow": "tables",
    "import": "processes",
    "mlet": "steps",
    "models": "steps",
    "multi_embedding": "steps",
    "packed": "tables",
    "pep": "steps",
    "quantize": "tables",
    "row_gradients": "steps",
    "rows": "tables",
    "scale": "scale",
    "serve": "serving",
    "shrinkage": "steps",
    "spectrum": "tables",
    "stack": "steps",
    "study": "processes",
    "tail": "steps",
    "train": "train",
    "transfer": "steps",
    "update": "data",
}
"""The file of each bench."""


def bench_names() -> list[str]:
    """Return the names of all benches."""
    return sorted(BENCHES)


def run_bench(name: str, *, say: Say = print_to_stderr) -> BenchResult:
    """Run a bench and return its figures, flat and ready for JSON; `say` gets progress lines."""
    known = name.replace("-", "_")
    if known not in BENCHES:
        raise SettingsError(f"unknown bench {name!r}{suggest(name, bench_names())}")
    module = importlib.import_module(f"{__name__}.{BENCHES[known]}")
    bench = getattr(module, "import_" if known == "import" else known)
    return result_of(name, bench, say)
