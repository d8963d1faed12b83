"""Lookups out of a packed table, against the same lookups out of a dense one; bytes, and memory.

    packed   a table of 1,000,000 x 64 with few entries left, packed, written, and mapped from its file
    dense    the same table in float32 with its zeros, by `F.embedding`

Entries are left at random, 10 %, 3 %, 1 % and 0.1 % of them; and, as `rows`, 10 % of the rows with all
their entries, where columns are bits and not numbers. A measured unit is a lookup of 4096 x 39 rows, drawn
at random from the whole table and others in the next unit.

Rows are returned in memory that the C library has at hand, or must get from the system in every lookup:
`dense_faults` tells which. New memory takes longer to map than to fill, on both sides, so the ratio is
smaller then. `path` tells whether packed rows came from the compiled kernel or from plain torch.

Bytes are those of the file, over 4 a value, the cheaper of a bit an entry of a row that is not empty and
a byte a value, 4 a row that is not empty, and a bit a row. Memory is that of a process of its own:
how much more of it is resident once it has mapped the file and looked one batch up.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.bench._frame import FOLDER, BenchResult, Say, measure, timing_figures
from rarebit.codes.packed import Pack, load_packed, save_packed
from rarebit.codes.packed_lookup import packed_kernel

__all__ = ["bound", "resident_bytes", "run"]

ROWS, WIDTH = 1_000_000, 64
BATCH, FIELDS = 4096, 39
SPARSITIES = {"90": 0.9, "97": 0.97, "99": 0.99, "99_9": 0.999}
DRAWS = 8
"""Batches that take turns: rows of the last lookup must not be all that is in the caches."""
BUDGET = 12.0
"""Seconds for each table."""
CHUNK = 1 << 16
# The first batch is of one id: what torch allocates once is no memory of the table.
PROCESS = """
import json, sys
from pathlib import Path
import torch
from rarebit.codes.packed import load_packed
def resident():
    status = Path("/proc/self/status")
    if status.exists():
        return next(1024 * int(line.split()[1]) for line in status.open() if line.startswith("VmRSS:"))
load_packed(sys.argv[1])(torch.tensor([0]))
before = resident()
table = load_packed(sys.argv[2])
rows = table(torch.randint(table.num_embeddings, (int(sys.argv[3]),)))
after = resident()
print(json.dumps(None if after is None else after - before - rows.nbytes))
"""


@torch.no_grad()
def run(say: Say) -> BenchResult:
    """Measure a table of each sparsity, one after the other."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(ROWS, (BATCH, FIELDS), generator=draw) for _ in range(DRAWS)]
    figures: BenchResult = {}
    for name, sparsity in (*SPARSITIES.items(), ("rows", 0.9)):
        say(f"packed: {sparsity:.1%} zeros{' by rows' if name == 'rows' else ''}, {BUDGET:.0f} s")
        weight = _sparse_weight(sparsity, draw, by_rows=name == "rows")
        figures |= {f"{key}_{name}": value for key, value in _figures(weight, batches).items()}
    names = list(SPARSITIES)
    return {
        "ratio": _largest(figures, "ratio", names),
        "ratio_of": "time of a packed lookup / time of F.embedding, the largest of four sparsities",
        "path": "plain torch" if packed_kernel() is None else "compiled kernel",
        "bytes_over_bound": _largest(figures, "bytes_over_bound", names),
        "dense_bytes": 4 * ROWS * WIDTH,
        **figures,
    }


def bound(weight: Tensor) -> float:
    """Return the bytes that a packed table of these entries is held against.

    >>> bound(torch.tensor([[0.0] * 16, [0.0] * 15 + [5.0]]))
    9.25
    """
    kept = [chunk != 0 for chunk in weight.split(CHUNK)]
    values = sum(int(chunk.sum()) for chunk in kept)
    filled = sum(int(chunk.any(dim=1).sum()) for chunk in kept)
    columns = min(filled * weight.shape[1] / 8, values)
    return 4 * values + columns + 4 * filled + len(weight) / 8


def resident_bytes(file: Path, small: Path, num_ids: int) -> float | None:
    """Return what a fresh process keeps in memory of a table, once it has looked so many rows up.

    None where the system does not say. The rows themselves are not counted. A small table comes first.
    """
    places = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603  # code of this file
        [sys.executable, "-c", PROCESS, str(small), str(file), str(num_ids)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: float | None = json.loads(done.stdout.splitlines()[-1])
    return told


def _figures(weight: Tensor, batches: list[Tensor]) -> BenchResult:
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "table", Path(folder) / "small"
        save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight)), file)
        save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight[:1])), small)
        sides = {
            "packed": _lookups(load_packed(file), batches),
            "dense": _lookups(lambda ids: F.embedding(ids, weight), batches),
        }
        times, size = measure(sides, budget=BUDGET), file.stat().st_size
        faults = _page_faults(sides["dense"])
        resident = resident_bytes(file, small, batches[0].numel())
    return {
        "ratio": times["packed"].median / times["dense"].median,
        "bytes": size,
        "bytes_over_bound": size / bound(weight),
        "resident_mb": None if resident is None else resident / 1e6,
        "dense_faults": faults,
        **timing_figures(times),
    }


def _page_faults(lookup: Callable[[], Tensor]) -> int:
    """Return how many pages of memory a lookup had to get from the system."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    lookup()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _sparse_weight(sparsity: float, draw: torch.Generator, *, by_rows: bool) -> Tensor:
    weight = torch.randn(ROWS, WIDTH, generator=draw)
    for chunk in weight.split(CHUNK):  # a mask of all would take as much memory as the table
        left = torch.rand(len(chunk), 1 if by_rows else WIDTH, generator=draw) >= sparsity
        chunk.mul_(left)
    return weight


def _lookups(table: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(batches)
    return lambda: table(next(turns))


def _largest(figures: BenchResult, key: str, names: list[str]) -> float:
    return max(float(figures[f"{key}_{name}"] or 0.0) for name in names)
