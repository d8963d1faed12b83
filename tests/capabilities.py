"""What a test may need beyond the package: a GPU, a data set, an optional package, time.

A test marked here is skipped where the capability is missing, and the reason names it; the summary
at the end of a run lists every capability that was not exercised.

    @needs_cuda
    def test_on_the_gpu(): ...

    @needs_real_data("ml-1m")
    def test_movielens():
        ratings = real_data("ml-1m") / "ratings.dat"
"""

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

PREFIX = "capability: "
"""What the reason of every such skip starts with."""


def reason(name: str, why: str) -> str:
    """Return the reason of a skip, in the form that the summary reads."""
    return f"{PREFIX}{name}: {why}"


def needs(name: str, available: bool, why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, by the name of what it needs, where that is missing."""
    return pytest.mark.skipif(not available, reason=reason(name, why))


def needs_package(name: str) -> pytest.MarkDecorator:
    """Return a mark for tests of an optional package."""
    found = importlib.util.find_spec(name) is not None
    return needs(f"package {name}", found, "it is not installed")


def needs_real_data(name: str) -> pytest.MarkDecorator:
    """Return a mark for tests of a real data set: a file or folder of that name in RAREBIT_DATA."""
    if "RAREBIT_DATA" not in os.environ:
        return needs(f"real data {name}", False, "RAREBIT_DATA is not set")
    return needs(f"real data {name}", real_data(name).exists(), "RAREBIT_DATA does not hold it")


def real_data(name: str) -> Path:
    """Return where a real data set is; only for tests that need it."""
    return Path(os.environ["RAREBIT_DATA"]) / name


BROWSER = shutil.which("chromium") or ""
needs_browser = needs(
    "browser",
    bool(BROWSER) and importlib.util.find_spec("playwright") is not None,
    "it needs chromium and the package playwright",
)
"""For tests of pages in a real browser."""
TRITON_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""Where Triton runs. It interprets its kernels on the CPU if it is installed and TRITON_INTERPRET=1."""
needs_triton = needs(
    "Triton",
    TRITON_DEVICE == "cpu" or torch.cuda.is_available(),
    "no CUDA device is visible, and TRITON_INTERPRET is not 1",
)
needs_interpreter = needs(
    "Triton's interpreter",
    TRITON_DEVICE == "cpu",
    "TRITON_INTERPRET is not 1, and an assertion on a GPU would end the work of the process",
)
needs_cuda = needs("CUDA", torch.cuda.is_available(), "no CUDA device is visible")


def slow_after(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return the cases of a parametrised test: the first ones always run, the others are slow tests.

    @pytest.mark.parametrize("name", slow_after(["dcn_v2", "deepfm", "fm"]))
    """
    cases = list(cases)
    slow = [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case in cases[quick:]
    ]
    return [*cases[:quick], *slow]
