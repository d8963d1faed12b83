"""The table's part of a step at two sizes of table: it should cost what the batch costs.

    small   lookup, backward and update by lazy Adam of a table of 100,000 rows
    large   the same of a table of 5,000,000 rows

Both look up 45,000 distinct rows 160,000 times, in the same pattern, the rows drawn at random from the
whole table and others in the next step. All that differs is where in memory they lie: what the ratio
is above 1 is cache misses. `ratio` is the path this machine takes by default, `ratio_plain` that of
plain torch, `ratio_compiled` that of the compiled kernel where there is one.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.bench._frame import BenchResult, OtherLoad, Say, measure, timing_figures
from rarebit.tables.rows import lookups_of
from rarebit.training import row_updates
from rarebit.training.row_kernel import row_kernel

__all__ = ["draw_lookups", "run"]

SIZES = {"small": 100_000, "large": 5_000_000}
DIM, LOOKUPS, DISTINCT = 16, 160_000, 45_000
DRAWS = 8
"""Batches that take turns: rows of the last step must not be all that is in the caches."""
BUDGET = 20.0
"""Seconds for each path."""


def run(say: Say) -> BenchResult:
    """Measure the table's part at both sizes, on each path."""
    kernel = row_kernel()
    paths: dict[str, Callable[..., None]] = {"plain": row_updates.adam}
    if kernel is not None:
        paths["compiled"] = kernel.adam
    figures: BenchResult = {
        "ratio": None,
        "ratio_of": "time of the table's part at 5,000,000 rows / at 100,000 rows",
        "path": "plain torch" if kernel is None else "compiled kernel",
    }
    for path, adam in paths.items():
        say(f"rows: {path}, {BUDGET:.0f} s")
        sides = {name: _table_part(rows, adam) for name, rows in SIZES.items()}
        load = OtherLoad()
        times = measure(sides, budget=BUDGET)
        figures[f"other_load_{path}"] = load.share()
        figures["ratio"] = figures[f"ratio_{path}"] = times["large"].median / times["small"].median
        figures |= timing_figures(times, f"_{path}")
    return figures


def draw_lookups(rows: int, seed: int) -> Tensor:
    """Return 160,000 lookups of 45,000 distinct rows; the pattern depends on the seed, not on `rows`."""
    pattern = torch.Generator().manual_seed(seed)
    ranks = (DISTINCT * torch.rand(LOOKUPS - DISTINCT, generator=pattern) ** 3).long()
    ranks = torch.cat([torch.arange(DISTINCT), ranks])
    ranks = ranks[torch.randperm(LOOKUPS, generator=pattern)]
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:DISTINCT]
    return places[ranks]


def _table_part(rows: int, adam: Callable[..., None]) -> Callable[[], None]:
    weight = nn.Parameter(torch.randn(rows, DIM))
    moments = torch.zeros(rows, DIM), torch.zeros(rows, DIM)
    batches = itertools.cycle([draw_lookups(rows, seed) for seed in range(DRAWS)])
    upstream = torch.randn(LOOKUPS, DIM)
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    steps = itertools.count(1)

    def step() -> None:
        looked_up = F.embedding(next(batches), weight, sparse=True)
        looked_up.backward(upstream)
        assert weight.grad is not None
        ids, values = lookups_of(weight.grad)
        with torch.no_grad():
            decay = {"weight_decay": 0.0, "decoupled": False}
            adam(ids, values, weight, *moments, **options, **decay, step=next(steps))
        weight.grad = None

    return step
