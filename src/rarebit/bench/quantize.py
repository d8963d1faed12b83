"""Lookups out of a quantised table, against the same lookups out of a plain one.

    int8     a table of 1,000,000 x 16 after `Quantize(bits=8)`
    int4     the same table after `Quantize(bits=4)`
    plain    the same table in float32, by `F.embedding`

A measured unit is a lookup of 4096 x 26 rows, drawn at random from the whole table and others in the next
unit. The quantised tables return float32, too. Bytes are those of all that a table stores.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.methods.quantize import Quantize
from rarebit.tables.find import table_bytes

__all__ = ["run"]

ROWS, WIDTH = 1_000_000, 16
BATCH, FIELDS = 4096, 26
DRAWS = 8
"""Batches that take turns: rows of the last lookup must not be all that is in the caches."""
BUDGET = 20.0


@torch.no_grad()
def run(say: Say) -> BenchResult:
    """Measure the three lookups of the same ids."""
    say(f"quantize: {BUDGET:.0f} s")
    draw = torch.Generator().manual_seed(0)
    plain = nn.Embedding.from_pretrained(torch.randn(ROWS, WIDTH, generator=draw))
    batches = [torch.randint(ROWS, (BATCH, FIELDS), generator=draw) for _ in range(DRAWS)]
    tables = {"int8": Quantize(bits=8).wrap(plain), "int4": Quantize(bits=4).wrap(plain)}
    sides = {name: _lookups(table, batches) for name, table in tables.items()}
    sides["plain"] = _lookups(lambda ids: F.embedding(ids, plain.weight), batches)
    times = measure(sides, budget=BUDGET)
    return {
        "ratio": times["int8"].median / times["plain"].median,
        "ratio_of": "time of a lookup out of int8 / time of F.embedding in float32",
        "ratio_int4": times["int4"].median / times["plain"].median,
        "plain_bytes": table_bytes(plain),
        **{f"{name}_bytes": table_bytes(table) for name, table in tables.items()},
        **timing_figures(times),
    }


def _lookups(table: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(batches)
    return lambda: table(next(turns))
