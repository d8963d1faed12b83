"""Tables without a model: lookups of packed and quantised tables, row updates, growth, singular values.

Lookups draw rows at random from the whole table, and take turns with several batches: the caches must not hold
all rows of the next one.
"""

import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.bench._frame import BenchResult, Say, compare, ratios, run_python
from rarebit.codes.coded import coded_kernel
from rarebit.codes.packed import Pack, load_packed, packed_kernel, save_packed
from rarebit.methods.evidence_coding import EvidenceCoding
from rarebit.methods.quantize import Quantize
from rarebit.tables.apply import table_bytes
from rarebit.tables.collection import lookups_of
from rarebit.tables.grow import grow_
from rarebit.tables.spectrum import singular_values
from rarebit.training.optimizers import PlainRows, row_kernel

MILLION = 1_000_000
BATCH, DRAWS = 4096, 8
SPARSITIES = {"90": 0.9, "97": 0.97, "99": 0.99, "99_9": 0.999}
CHUNK = 1 << 16
UPDATED_DIM, LOOKUPS, DISTINCT = 16, 160_000, 45_000
# The first batch has one id: what torch allocates once is no memory of the table.
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


def _batches(num_rows: int, shape: tuple[int, int], draw: torch.Generator) -> list[Tensor]:
    return [torch.randint(num_rows, shape, generator=draw) for _ in range(DRAWS)]


def _lookups(table: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(batches)
    return lambda: table(next(turns))


@torch.no_grad()
def packed(
    say: Say, *, num_rows: int = MILLION, batch: int = BATCH, budget: float = 12.0
) -> BenchResult:
    """Lookups of 4096 x 39 rows out of a packed table of 1,000,000 x 64, read from its file.

    `dense` is the same table in float32 with its zeros, by `F.embedding`. 10 %, 3 %, 1 % and 0.1 % of the entries
    are left, at random; and, as `rows`, 10 % of the rows with all their entries, where columns are bits and not
    numbers.

    The C library has memory for the rows at hand, or must get it from the system in every lookup: `dense_faults`
    tells which. New memory takes longer to map than to fill, in both variants, so the ratio is then smaller.
    `path` tells whether packed rows came from the compiled kernel or from plain torch. `resident_mb` is measured
    in a fresh process: how much its memory grows when it reads the file and looks up one batch.
    """
    draw = torch.Generator().manual_seed(0)
    batches = _batches(num_rows, (batch, 39), draw)
    figures: BenchResult = {}
    largest = {"ratio": 0.0, "bytes_over_bound": 0.0}
    for name, sparsity in (*SPARSITIES.items(), ("rows", 0.9)):
        by_rows = name == "rows"
        say(f"packed: {sparsity:.1%} zeros{' by rows' if by_rows else ''}, {budget:.0f} s")
        weight = torch.randn(num_rows, 64, generator=draw)
        for chunk in weight.split(CHUNK):  # a mask of all would take as much memory as the table
            shape = len(chunk), 1 if by_rows else chunk.shape[1]
            chunk.mul_(torch.rand(shape, generator=draw) >= sparsity)
        found = _packed_figures(weight, batches, budget)
        figures |= {f"{key}_{name}": value for key, value in found.items()}
        if not by_rows:
            largest = {key: max(most, float(found[key] or 0.0)) for key, most in largest.items()}
    return {
        "ratio": largest["ratio"],
        "ratio_of": "time of a packed lookup / time of F.embedding, the largest of four sparsities",
        "path": "plain torch" if packed_kernel() is None else "compiled kernel",
        "bytes_over_bound": largest["bytes_over_bound"],
        "dense_bytes": 4 * num_rows * 64,
        **figures,
    }


def _packed_figures(weight: Tensor, batches: Sequence[Tensor], budget: float) -> BenchResult:
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "table", Path(folder) / "small"
        save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight)), file)
        save_packed(Pack().wrap(nn.Embedding.from_pretrained(weight[:1])), small)
        dense = _lookups(lambda ids: F.embedding(ids, weight), batches)
        variants = {"packed": _lookups(load_packed(file), batches), "dense": dense}
        times, figures = compare(variants, budget=budget)
        size, faults = file.stat().st_size, page_faults(dense)
        resident = resident_bytes(file, small, batches[0].numel())
    return {
        "ratio": times["packed"] / times["dense"],
        "bytes": size,
        "bytes_over_bound": size / bound(weight),
        "resident_mb": None if resident is None else resident / 1e6,
        "dense_faults": faults,
        **figures,
    }


def bound(weight: Tensor) -> float:
    """Return the bytes that a packed table of these entries is compared with.

    4 per value, the cheaper of a bit per entry of a row that is not empty and a byte per value, 4 per row that
    is not empty, and a bit per row.
    """
    kept = [chunk != 0 for chunk in weight.split(CHUNK)]
    values = sum(int(chunk.sum()) for chunk in kept)
    filled = sum(int(chunk.any(dim=1).sum()) for chunk in kept)
    columns = min(filled * weight.shape[1] / 8, values)
    return 4 * values + columns + 4 * filled + len(weight) / 8


def resident_bytes(file: Path, small: Path, num_ids: int) -> float | None:
    """Return the memory that a fresh process needs for a table and a lookup of so many rows.

    It leaves the returned rows out, and reads a small table first. None if the system does not report it.
    """
    printed: float | None = json.loads(run_python(PROCESS, small, file, num_ids).splitlines()[-1])
    return printed


def page_faults(lookup: Callable[[], Tensor]) -> int:
    """Return how many pages of memory a lookup had to get from the system."""
    import resource  # not on every system

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    lookup()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@torch.no_grad()
def quantize(
    say: Say, *, num_rows: int = MILLION, batch: int = BATCH, budget: float = 20.0
) -> BenchResult:
    """Lookups of 4096 x 26 rows out of a table of 1,000,000 x 16 with 8 and 4 bits, against `F.embedding`.

    All return float32. Bytes are all that a table stores.
    """
    say(f"quantize: {budget:.0f} s")
    draw = torch.Generator().manual_seed(0)
    plain = nn.Embedding.from_pretrained(torch.randn(num_rows, 16, generator=draw))
    batches = _batches(num_rows, (batch, 26), draw)
    tables = {"int8": Quantize(bits=8).wrap(plain), "int4": Quantize(bits=4).wrap(plain)}
    variants = {name: _lookups(table, batches) for name, table in tables.items()}
    variants["plain"] = _lookups(lambda ids: F.embedding(ids, plain.weight), batches)
    meaning = "time of a lookup out of int8 / time of F.embedding in float32"
    num_bytes = {name: table_bytes(table) for name, table in {"plain": plain, **tables}.items()}
    return {
        **ratios(variants, "int8", "plain", meaning, budget=budget, int4=("int4", "plain")),
        **{f"{name}_bytes": count for name, count in num_bytes.items()},
    }


@torch.no_grad()
def compress(
    say: Say, *, num_rows: int = MILLION, batch: int = BATCH, budget: float = 15.0
) -> BenchResult:
    """Lookups of 4096 x 39 rows out of a coded table of 1,000,000 x 16 at a sixteenth of its bytes, against `F.embedding`.

    Rows are normal, and the k-th id was seen 1/k as often as the first, 40 million lookups in all. Ids are drawn from all rows alike, as
    lookups that miss the caches most, and, as `ratio_by_counts`, as often as they were seen. `encode_seconds` is the
    time to code the table. `path` tells whether rows came from the compiled kernel or from plain torch.
    """
    draw = torch.Generator().manual_seed(0)
    plain = nn.Embedding.from_pretrained(torch.randn(num_rows, 16, generator=draw))
    shares = 1 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    counts = (40 * num_rows * shares / shares.sum()).long()
    begin = perf_counter()
    coded = EvidenceCoding(size="1/16", counts=counts).wrap(plain)
    seconds = perf_counter() - begin
    found: BenchResult = {}
    by_counts = [
        torch.multinomial(shares, batch * 39, replacement=True, generator=draw).view(batch, 39)
        for _ in range(DRAWS)
    ]
    draws = {"": _batches(num_rows, (batch, 39), draw), "_by_counts": by_counts}
    for name, batches in draws.items():
        say(f"compress{name.replace('_', ' ')}: {budget:.0f} s")
        variants = {
            "coded": _lookups(coded, batches),
            "plain": _lookups(lambda ids: F.embedding(ids, plain.weight), batches),
        }
        times, figures = compare(variants, budget=budget, suffix=name)
        found |= {f"ratio{name}": times["coded"] / times["plain"], **figures}
    return {
        "ratio": None,
        "ratio_of": "time of a coded lookup / time of F.embedding in float32, ids drawn from all rows alike",
        "path": "plain torch" if coded_kernel() is None else "compiled kernel",
        "bytes": table_bytes(coded),
        "plain_bytes": table_bytes(plain),
        "encode_seconds": seconds,
        **found,
    }


def grow(
    say: Say, *, num_rows: int = 5 * MILLION, new: int = 100_000, budget: float = 20.0
) -> BenchResult:
    """100,000 new rows for a table of 5,000,000 x 16 with the state of Adam, by `grow_`.

    `copy` allocates the larger weight and states, copies the old rows into them and sets the new ones to zero.
    """
    say(f"grow: {budget:.0f} s")
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(num_rows, UPDATED_DIM, generator=draw)
    state = {"step": torch.tensor(7.0)}
    state |= {name: torch.rand(weight.shape, generator=draw) for name in ("exp_avg", "exp_avg_sq")}

    def by_grow_() -> list[Tensor]:
        model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.state[next(model.parameters())] = dict(state)
        grow_(model, {"0": num_rows + new}, optimizer=optimizer, verbose=False)
        grown = next(model.parameters())
        found = optimizer.state[grown]
        return [grown.detach(), found["exp_avg"], found["exp_avg_sq"]]

    def by_copy() -> list[Tensor]:
        larger = []
        for old in (weight, state["exp_avg"], state["exp_avg_sq"]):
            larger.append(torch.empty(num_rows + new, UPDATED_DIM))
            larger[-1][:num_rows] = old
            larger[-1][num_rows:] = 0.0
        return larger

    variants = {"grow": by_grow_, "copy": by_copy}
    meaning = "time of grow_ / time of a plain copy of the same bytes"
    return {**ratios(variants, "grow", "copy", meaning, budget=budget), "bytes": 3 * weight.nbytes}


def rows(
    say: Say,
    *,
    small: int = 100_000,
    large: int = 5_000_000,
    draws: int = DRAWS,
    budget: float = 20.0,
) -> BenchResult:
    """The table's part of a step at two sizes of table: its cost should depend on the batch only.

    A unit is lookup, backward and update by lazy Adam of a table of width 16: 160,000 lookups of 45,000 distinct
    rows, in the same pattern at both sizes. Only their place in memory differs: a ratio above 1 is due to cache
    misses. `ratio` is that of this machine's default path, `ratio_plain` that of plain torch, `ratio_compiled`
    that of the compiled kernel, if there is one.
    """
    kernel = row_kernel()
    paths: dict[str, Callable[..., None]] = {"plain": PlainRows.adam}
    if kernel is not None:
        paths["compiled"] = kernel.adam
    result: BenchResult = {
        "ratio": None,
        "ratio_of": "time of the table's part at 5,000,000 rows / at 100,000 rows",
        "path": "plain torch" if kernel is None else "compiled kernel",
    }
    for path, adam in paths.items():
        say(f"rows: {path}, {budget:.0f} s")
        sizes = {"small": small, "large": large}
        variants = {name: _table_part(size, draws, adam) for name, size in sizes.items()}
        times, figures = compare(variants, budget=budget, load=path, suffix=f"_{path}")
        ratio = times["large"] / times["small"]
        result |= {"ratio": ratio, f"ratio_{path}": ratio, **figures}
    return result


def draw_lookups(num_rows: int, seed: int) -> Tensor:
    """Return 160,000 lookups of 45,000 distinct rows; the pattern depends on the seed only."""
    pattern = torch.Generator().manual_seed(seed)
    ranks = (DISTINCT * torch.rand(LOOKUPS - DISTINCT, generator=pattern) ** 3).long()
    ranks = torch.cat([torch.arange(DISTINCT), ranks])
    ranks = ranks[torch.randperm(LOOKUPS, generator=pattern)]
    places = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:DISTINCT]
    return places[ranks]


def _table_part(num_rows: int, draws: int, adam: Callable[..., None]) -> Callable[[], None]:
    weight = nn.Parameter(torch.randn(num_rows, UPDATED_DIM))
    moments = torch.zeros(num_rows, UPDATED_DIM), torch.zeros(num_rows, UPDATED_DIM)
    batches = itertools.cycle([draw_lookups(num_rows, seed) for seed in range(draws)])
    upstream = torch.randn(LOOKUPS, UPDATED_DIM)
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


def spectrum(say: Say, *, num_rows: int = MILLION, budget: float = 20.0) -> BenchResult:
    """The singular values of a table of 1,000,000 x 64, in float64.

    `ours` is `singular_values`: QR of a few rows after the others; `torch` is `torch.linalg.svdvals` of a float64
    copy of the whole table. `relative_difference` is the largest of a singular value.
    """
    say(f"spectrum: {budget:.0f} s")
    weight = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0))
    variants: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: singular_values(weight),
        "torch": lambda: torch.linalg.svdvals(weight.double()),
    }
    meaning = "time of torch.linalg.svdvals of a float64 copy / time of ours"
    figures = ratios(variants, "torch", "ours", meaning, budget=budget)
    ours, torchs = (values() for values in variants.values())
    return figures | {"relative_difference": float(((ours - torchs).abs() / torchs).max())}
