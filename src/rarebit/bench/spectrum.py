"""The singular values of a table of 1,000,000 x 64, against torch's own.

    ours     `singular_values`: QR of a few rows after the others, float64
    torch    `torch.linalg.svdvals` of a float64 copy of the whole table

A measured unit is one table. `relative_difference` is the largest between two singular values, of the
larger one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.tables.spectrum import singular_values

__all__ = ["run"]

ROWS, WIDTH = 1_000_000, 64
BUDGET = 20.0


def run(say: Say) -> BenchResult:
    """Measure both ways on the same table."""
    say(f"spectrum: {BUDGET:.0f} s")
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    sides: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: singular_values(weight),
        "torch": lambda: torch.linalg.svdvals(weight.double()),
    }
    times = measure(sides, budget=BUDGET)
    ours, torchs = (side() for side in sides.values())
    return {
        "ratio": times["torch"].median / times["ours"].median,
        "ratio_of": "time of torch.linalg.svdvals of a float64 copy / time of ours",
        "relative_difference": float(((ours - torchs).abs() / torchs).max()),
        **timing_figures(times),
    }
