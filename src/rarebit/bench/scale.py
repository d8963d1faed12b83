"""Several processes against one, the bytes that plans send, and what both say of larger clusters."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rarebit.bench._frame import BenchResult, Say, measure, timing_figures
from rarebit.bench._scale_program import BATCH, DIM, SIZES
from rarebit.sharding.plan import Plan, TableSize, make_plan
from rarebit.sharding.sharded import require_torchrec

FOLDER = Path(__file__).resolve().parent
STEPS, COUNTED = 4, 10
"""Steps per measured unit, and steps over which bytes are counted."""
LARGE = TableSize("id", rows=10**9, width=64)
WORKERS, BANDWIDTH, DENSE = (8, 64, 512), 12.5e9, 500_000
"""Of larger clusters: processes, bytes per second that each can send (100 Gbit/s), and weights besides the tables."""
TRAFFIC = Path("/proc/net/dev")


def scale(say: Say, *, budget: float = 120.0) -> BenchResult:
    """Steps of DeepFM on 10 million rows: two processes of one thread each, against one process of one thread.

    Row-wise Adagrad, batch size 4096 over all processes, which take turns with the one process. `ratio` is the gain of the
    second core. `sent_*` are the bytes on the wire per step and process that were counted, `planned_*` those that the plan
    expects for tables; the rest of the model's gradients, half a million, are in the first only. `workers_*` is what to expect
    of a table of a billion rows of 64 numbers by rows, where every worker is such a core with a network of its own.
    """
    require_torchrec()
    say(f"scale: one process and two in turn, {budget:.0f} s; then bytes by plan")
    with ExitStack() as stack:
        one = stack.enter_context(_started(1, "auto"))
        two = stack.enter_context(_started(2, "auto"))
        times = measure(
            {"one": lambda: one.run(STEPS), "two": lambda: two.run(STEPS)}, budget=budget
        )
    figures: BenchResult = {}
    sizes = [TableSize(f"f{i}", rows, DIM) for i, rows in enumerate(SIZES)]
    sizes += [TableSize(f"w{i}", rows, 1, beside=f"f{i}") for i, rows in enumerate(SIZES)]
    for kind in ("table", "row", "auto"):  # row-wise Adagrad cannot be cut by columns
        with _started(2, kind) as processes:
            processes.run(2)
            before = _sent()
            processes.run(COUNTED)
            figures[f"sent_{kind}_bytes"] = (_sent() - before) / COUNTED / 2
        plan = make_plan(sizes, 2, kind)
        figures[f"planned_{kind}_bytes"] = float(plan.sent(BATCH))
    per_row = times["two"].median * 2 / (STEPS * BATCH)  # of one core, its sending included
    cluster = Cluster(seconds_per_row=per_row, bytes_per_second=BANDWIDTH)
    for workers in WORKERS:
        plan = make_plan([LARGE], workers, "row")
        found = expected(plan, cluster, share=BATCH, dense=DENSE, state_bytes=4)
        figures |= {f"workers_{workers}_{name}": value for name, value in found.items()}
    return {
        "ratio": times["one"] / times["two"],
        "ratio_of": "time of one process on one core / time of two processes on two cores, the same batches",
        "one_rows_per_second": STEPS * BATCH / times["one"].median,
        "two_rows_per_second": STEPS * BATCH / times["two"].median,
        **figures,
        **timing_figures(times),
    }


class _Processes:
    """Processes that train together, of which the first takes orders."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self.processes = processes

    def run(self, steps: int) -> float:
        """Return the seconds that so many steps took."""
        first = self.processes[0]
        assert first.stdin is not None
        first.stdin.write(f"{steps}\n")
        first.stdin.flush()
        return float(self.read())

    def read(self) -> str:
        """Return the next line of the first process."""
        first = self.processes[0]
        assert first.stdout is not None
        line = first.stdout.readline()
        assert line, "a process of the bench failed; its own error says why"
        return line


@contextmanager
def _started(world: int, plan: str) -> Iterator[_Processes]:
    """Start processes, and end them afterwards."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join(
        filter(None, [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    common = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    found = [
        subprocess.Popen(  # noqa: S603  # a program of the benches
            [sys.executable, "-m", "rarebit.bench._scale_program", plan],
            env={**os.environ, **common, **({**meeting, "RANK": str(rank)} if world > 1 else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    processes = _Processes(found)
    try:
        assert processes.read() == "ready\n"
        yield processes
    finally:
        for process in found:
            assert process.stdin is not None
            process.stdin.close()
        for process in found:
            process.wait(timeout=60)


def _sent() -> int:
    """Return the bytes that this machine has sent to itself so far."""
    [line] = [
        line for line in TRAFFIC.read_text("ascii").splitlines() if line.strip().startswith("lo:")
    ]
    return int(line.split(":")[1].split()[8])


class Cluster:
    """What a cluster is made of, for `expected`."""

    def __init__(self, *, seconds_per_row: float, bytes_per_second: float) -> None:
        self.seconds_per_row, self.bytes_per_second = seconds_per_row, bytes_per_second


def expected(
    plan: Plan, cluster: Cluster, *, share: int, dense: int, state_bytes: int
) -> dict[str, float | str]:
    """Return what a step should take on every worker of a plan: a share of rows each, beside `dense` other weights.

    The tables' weights and state are held once; each worker computes its share, sends its part of rows and gradients, and
    takes part in a ring that averages the other gradients. The slower of computing and sending is the limit, as they overlap
    at best.

    >>> size = TableSize("id", rows=10**9, width=64)
    >>> cluster = Cluster(seconds_per_row=1e-5, bytes_per_second=12.5e9)
    >>> row = expected(make_plan([size], 8, "row"), cluster, share=4096, dense=0, state_bytes=4)
    >>> row["gigabytes"], row["limit"]
    (32.5, 'compute')
    """
    held = max(4 * plan.numbers(rank) + state_bytes * plan.rows(rank) for rank in range(plan.world))
    sent = plan.sent(share * plan.world) + 2 * 4 * dense * (plan.world - 1) / plan.world
    compute, network = share * cluster.seconds_per_row, sent / cluster.bytes_per_second
    return {
        "gigabytes": held / 1e9,
        "megabytes_sent": sent / 1e6,
        "compute_ms": 1000 * compute,
        "network_ms": 1000 * network,
        "limit": "compute" if compute >= network else "network",
        "rows_per_second": share * plan.world / max(compute, network),
    }
