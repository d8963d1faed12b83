"""From a trained model to scores: an exported file against eager torch, the server against a hand-written one, and the delta
of the next day against what changed.

The model is DCN-V2 on 39 columns of Criteo's shape, whose 967,795 values are texts. Both sides get the same raw rows and give the
same scores, which is checked first.
"""

import copy
import hashlib
import itertools
import json
import os
import re
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from rarebit.bench._frame import BenchResult, Say, compare
from rarebit.data.dataset import Batch
from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.schema import Schema
from rarebit.data.synthetic import PRESETS
from rarebit.errors import import_extra
from rarebit.export.delta import apply_delta, write_delta
from rarebit.export.export import export as export_model
from rarebit.methods.evidence_coding import EvidenceCoding
from rarebit.methods.quantize import Quantize
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.serving.scorer import load_scorer
from rarebit.tables.apply import apply_
from rarebit.tables.grow import grow_
from rarebit.training.model_file import save_model

DIM, HIDDEN = 16, (400, 400)
STD = 0.3
"""Of the rows, so that scores differ from row to row as those of a trained model."""
UNKNOWN_SHARE = 0.01
"""Of the values of a row."""
PROGRAM = Path(__file__).with_name("_fastapi_program.py")
CHANGED_ROWS, NEW_VALUES, REPLACED_VALUES = 0.03, 0.005, 0.001
"""Shares of a day."""
ROWS, CONNECTIONS, REQUESTS = 100, 8, 64
SERVER_CORE, CLIENT_CORE = 0, 1
SOURCE = Path(__file__).resolve().parents[2]

Row = dict[str, str]


def criteo_model() -> RankingModel:
    """Return DCN-V2 with random weights and the vocabulary of a log of Criteo's shape."""
    torch.manual_seed(0)
    settings = {"dim": DIM, "hidden": list(HIDDEN), "std": STD}
    values = {
        column.name: list(map(_text, range(column.num_values))) for column in PRESETS["criteo"]
    }
    return build_model("dcn_v2", _schema(values), settings).eval()


def _text(number: int) -> str:
    return f"{number * 2654435761 % 2**32:08x}"


def _schema(values: Mapping[str, Sequence[str]]) -> Schema:
    """Return the schema of a log with these values."""
    from rarebit.data.raw.encoder import LogEncoder

    pl = import_extra("polars", "data", "a vocabulary of texts")
    columns = tuple(Column(name=name) for name in values)
    found = {name: pl.Series(texts) for name, texts in values.items()}
    return LogEncoder(schema=LogSchema(label="click", columns=columns), values=found).fields


def raw_rows(model: RankingModel, rows: int) -> list[Row]:
    """Return rows with frequent and rare values, and some that are unknown."""
    draw, columns = np.random.default_rng(0), {}
    for name, values in model.schema.encoder.values.items():
        places = (len(values) * draw.random(rows) ** 3).astype(np.int64)
        unknown = draw.random(rows) < UNKNOWN_SHARE
        texts = values.gather(places).to_list()
        columns[name] = [
            f"new {text}" if new else text for text, new in zip(texts, unknown, strict=True)
        ]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def vocabulary_of(model: RankingModel) -> dict[str, dict[str, int]]:
    """Return the ids of all values as a hand-written server has them: a dict for each column."""
    return {
        name: {text: number for number, text in enumerate(values.to_list(), start=3)}
        for name, values in model.schema.encoder.values.items()
    }


class EagerRows:
    """The hand-written way: dicts for the values, and the model in eager torch."""

    def __init__(self, model: RankingModel) -> None:
        self.model, self.vocabulary = model, vocabulary_of(model)

    @torch.no_grad()
    def __call__(self, rows: Sequence[Row]) -> list[float]:
        """Return the scores of rows."""
        ids = torch.tensor(
            [[known.get(row[name], 1) for name, known in self.vocabulary.items()] for row in rows]
        )
        batch = Batch(ids, torch.zeros(len(rows), 0), torch.zeros(0), self.model.schema)
        scores: list[float] = self.model(batch).sigmoid().tolist()
        return scores


def export(say: Say, *, budget: float = 15.0) -> BenchResult:
    """Scores of one raw row, and of 64 and 1,024, by the exported file and by eager torch, in one process.

    `file` is ONNX Runtime with texts in; `eager` is a dict for each column and the model in eager torch: the way a server is
    written by hand. `ids` is a file with ids in, against the model alone, `eager_ids`. All have one
    thread, as a worker of a server has: threads of two libraries in one process would wait for each other.
    """
    runtime = import_extra("onnxruntime", "export", "bench export")
    torch.set_num_threads(1)
    model = criteo_model()
    eager, rows = EagerRows(model), raw_rows(model, 1024)
    figures: BenchResult = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {"file": Path(folder) / "raw.onnx", "ids": Path(folder) / "ids.onnx"}
        for name, path in files.items():
            say(f"export: writing the file with {'texts' if name == 'file' else 'ids'} in")
            start = time.perf_counter()
            exported = export_model(model, path, ids=name == "ids" or None)
            figures |= {
                f"{name}_megabytes": exported.num_bytes / 1e6,
                f"{name}_export_seconds": time.perf_counter() - start,
                f"{name}_largest_difference": exported.largest_difference,
            }
        start, options = time.perf_counter(), runtime.SessionOptions()
        options.intra_op_num_threads = 1
        sessions = {name: runtime.InferenceSession(path, options) for name, path in files.items()}
        figures["load_seconds"] = time.perf_counter() - start
    ratios: dict[str, float] = {}
    for size in (1, 64, 1024):
        say(f"export: batches of {size}, {budget:.0f} s")
        variants = _variants(model, sessions, eager, rows, size)
        times, found = compare(variants, budget=budget, suffix=f"_{size}")
        figures |= found
        ratios |= {
            f"ratio_{size}": times["file"] / times["eager"],
            f"ratio_ids_{size}": times["ids"] / times["eager_ids"],
        }
    return {
        "ratio": ratios["ratio_1"],
        "ratio_of": "time of the file for one raw row / time of dicts and eager torch",
        **ratios,
        **figures,
    }


def _variants(
    model: RankingModel, sessions: Any, eager: EagerRows, rows: Sequence[Row], size: int
) -> dict[str, Callable[[], object]]:
    starts = itertools.cycle(range(0, len(rows) - size + 1, size))
    ids = torch.tensor(
        [[known.get(row[name], 1) for name, known in eager.vocabulary.items()] for row in rows]
    )

    def some() -> list[Row]:
        start = next(starts)
        return list(rows[start : start + size])

    def file() -> list[float]:
        chosen = some()
        inputs = {
            name: np.array([row[name] for row in chosen], object) for name in eager.vocabulary
        }
        found: list[float] = sessions["file"].run(["score"], inputs)[0].tolist()
        return found

    def alone(score: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        def run() -> object:
            start = next(starts)
            return score(ids[start : start + size])

        return run

    @torch.no_grad()
    def by_torch(chosen: torch.Tensor) -> object:
        return model(Batch(chosen, torch.zeros(size, 0), torch.zeros(0), model.schema)).sigmoid()

    first = rows[:size]
    inputs = {name: np.array([row[name] for row in first], object) for name in eager.vocabulary}
    [found] = sessions["file"].run(["score"], inputs)
    assert np.abs(found - eager(first)).max() < 1e-5, "the two must score alike"
    return {
        "file": file,
        "eager": lambda: eager(some()),
        "ids": alone(lambda chosen: sessions["ids"].run(None, {"ids": chosen.numpy()})),
        "eager_ids": alone(by_torch),
    }


def serve(say: Say, *, turns: int = 8, seconds: float = 3.0) -> BenchResult:
    """Requests of 100 raw rows as JSON over 8 connections: our server, and one written by hand with FastAPI and eager torch.

    Each has one core, and the clients have the other; they take turns. `ratio` is of requests per second. Then each is asked at
    half of what the slower one can answer, for its 99th percentile. `megabytes` is the memory of all processes of a server that was
    asked; ours also with tables of 8 bits and with tables coded in a sixteenth of their bytes.
    """
    import_extra("fastapi", "test", "bench serve")
    import_extra("starlette", "serve", "bench serve")
    model = criteo_model()
    rows = raw_rows(model, ROWS * REQUESTS)
    parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    load = Load([json.dumps({"rows": part}).encode() for part in parts])
    load.wanted = [EagerRows(model)(part) for part in parts]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say("serve: exporting the model")
        export_model(model, folder / "clicks.onnx")
        save_model(model, folder / "model")
        ours = ["-m", "rarebit", "serve", str(folder / "clicks.onnx")]
        by_hand = [str(PROGRAM), str(folder / "model")]
        servers = {
            name: stack.enter_context(_server(command))
            for name, command in {"ours": ours, "fastapi": by_hand}.items()
        }
        stack.enter_context(_on_core(CLIENT_CORE))
        for name, server in servers.items():
            load.wait_for(server)
            load.many(server, 1.0)
            say(f"serve: {name} answers, and as the model does")
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for turn in range(turns):
            for name in list(servers) if turn % 2 else list(servers)[::-1]:
                rates[name].append(load.many(servers[name], seconds))
        found = {name: statistics.median(values) for name, values in rates.items()}
        half = min(found.values()) / 2
        waits = {name: load.at(server, half, 4 * seconds) for name, server in servers.items()}
        figures: BenchResult = {f"{name}_megabytes": s.megabytes() for name, s in servers.items()}
    figures |= _memory_of_small_tables(say, load)
    for name, times in waits.items():
        figures[f"{name}_requests_per_second"] = found[name]
        figures[f"{name}_p50_ms"] = 1000 * statistics.median(times)
        figures[f"{name}_p99_ms"] = 1000 * float(np.quantile(times, 0.99))
    return {
        "ratio": found["ours"] / found["fastapi"],
        "ratio_of": "requests per second of rarebit serve / of FastAPI with eager torch, one core each",
        "rows_per_request": ROWS,
        "connections": CONNECTIONS,
        "half_load_requests_per_second": half,
        **figures,
    }


def _memory_of_small_tables(say: Say, load: "Load") -> BenchResult:
    """Return the memory of our server with smaller tables."""
    figures: BenchResult = {}
    methods = {"int8": Quantize(), "coded_16th": EvidenceCoding(size="1/16")}
    for name, method in methods.items():
        say(f"serve: memory with {name} tables")
        model = criteo_model()
        apply_(model, method, verbose=False)
        with tempfile.TemporaryDirectory() as folder:
            export_model(model, Path(folder) / "clicks.onnx")
            with _server(["-m", "rarebit", "serve", str(Path(folder) / "clicks.onnx")]) as server:
                unchecked = Load(load.bodies)  # smaller tables score differently
                unchecked.wait_for(server)
                unchecked.many(server, 1.0)
                figures[f"ours_{name}_megabytes"] = server.megabytes()
    return figures


def delta(say: Say, *, rounds: int = 7) -> BenchResult:
    """The delta of a day on which 3 % of the rows changed, 0.5 % of the values are new, 0.1 % were replaced, and all other weights changed.

    `ratio` is the size of the delta over the bytes that changed: of rows, texts of values, and weights. `apply_seconds` is the
    time from the request to load until the server answers by the new version, while a client sends 100 rows at a time
    without a pause; `whole_seconds` is the same with the whole file in place of the delta. `file_seconds` and
    `session_seconds` are parts of it: making the new file, and ONNX Runtime's start.
    """
    import_extra("starlette", "serve", "bench delta")
    monday = criteo_model()
    tuesday, changed = _next_day(monday)
    rows = raw_rows(tuesday, ROWS * REQUESTS)
    parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    bodies = [json.dumps({"rows": part}).encode() for part in parts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served, made, whole = (folder / f"{one}.onnx" for one in ("clicks", "made", "whole"))
        patch = folder / "tuesday.delta"
        for model, path in ((monday, served), (tuesday, whole)):
            say(f"delta: exporting {path.stem}")
            export_model(model, path)
        start = time.perf_counter()
        write_delta(served, whole, patch)
        figures: BenchResult = {"write_seconds": time.perf_counter() - start}
        old, new = served.read_bytes(), whole.read_bytes()
        versions = [hashlib.sha256(data).hexdigest()[:12] for data in (old, new)]
        with _server(["-m", "rarebit", "serve", str(served)], pinned=False) as server:
            Load(bodies).wait_for(server)
            say(f"delta: {rounds} rounds with a client that never pauses")
            client = Client(server, bodies)
            client.wanted = {
                version: [EagerRows(model)(part) for part in parts]
                for version, model in zip(versions, (monday, tuesday), strict=True)
            }
            seconds: dict[str, list[float]] = {"apply": [], "whole": []}
            beside = served.with_name("clicks.tuesday.delta")
            with client:
                for _ in range(rounds):
                    shutil.copy(patch, beside)
                    seconds["apply"].append(client.load(versions[1]))
                    beside.unlink()
                    client.load(versions[0])
                    served.write_bytes(new)
                    seconds["whole"].append(client.load(versions[1]))
                    served.write_bytes(old)
                    client.load(versions[0])
        files, sessions = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            apply_delta(served, patch, made)
            files.append(time.perf_counter() - start)
            start = time.perf_counter()
            load_scorer(made, 1)
            sessions.append(time.perf_counter() - start)
        size = patch.stat().st_size
    assert client.failed == 0, f"{client.failed} requests failed"
    return {
        "ratio": size / changed,
        "ratio_of": "bytes of the delta / bytes that changed",
        "apply_seconds": statistics.median(seconds["apply"]),
        "apply_most_seconds": max(seconds["apply"]),
        "whole_seconds": statistics.median(seconds["whole"]),
        "file_seconds": statistics.median(files),
        "session_seconds": statistics.median(sessions),
        "delta_megabytes": size / 1e6,
        "changed_megabytes": changed / 1e6,
        "whole_megabytes": len(new) / 1e6,
        "requests": client.answered,
        "failed_requests": client.failed,
        "slowest_request_ms": 1000 * client.slowest,
        **figures,
    }


def _next_day(model: RankingModel) -> tuple[RankingModel, int]:
    """Return the model of the next day, and how many bytes changed."""
    later, draw = copy.deepcopy(model), torch.Generator().manual_seed(1)
    changed, values = 0, {}
    with torch.no_grad():
        for key, weight in later.named_parameters():
            is_table = "tables" in key
            chosen = torch.rand(len(weight), generator=draw) < (CHANGED_ROWS if is_table else 1.0)
            noise = torch.randn(weight.shape, generator=draw)[chosen]
            weight[chosen] += 0.01 * noise
            changed += noise.nbytes
    for name, series in model.schema.encoder.values.items():
        texts, new = series.to_list(), round(len(series) * NEW_VALUES)
        for place in range(0, len(texts), round(1 / REPLACED_VALUES)):
            texts[place] = f"other {place}"
            changed += len(texts[place])
        added = [f"new {number}" for number in range(new)]
        changed += sum(map(len, added)) + 4 * DIM * new
        values[name] = texts + added
    schema = _schema(values)
    grow_(later, {field.name: field.rows for field in schema.fields}, start="noise", verbose=False)
    later.schema = schema
    return later, changed


class Client:
    """A client that sends one request after the other while models are loaded."""

    wanted: dict[str, list[list[float]]]
    """By version, the scores of each body."""

    def __init__(self, server: "Server", bodies: Sequence[bytes]) -> None:
        self.server, self.bodies = server, [Load.request(body) for body in bodies]
        self.answered = self.failed = 0
        self.slowest, self.version = 0.0, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def load(self, version: str) -> float:
        """Load the model; return the seconds until it is answered that this version is served."""
        start, connection = time.perf_counter(), HTTPConnection("127.0.0.1", self.server.port)
        connection.request("POST", "/v2/repository/models/clicks/load")
        answer = json.loads(connection.getresponse().read())
        seconds = time.perf_counter() - start
        connection.close()
        assert answer.get("version") == version, answer
        while self.version != version and self._thread.is_alive():
            time.sleep(0.001)
        return seconds

    def _work(self) -> None:
        with _Connection(self.server.port) as connection:
            for number in itertools.cycle(range(len(self.bodies))):
                if self._stop.is_set():
                    return
                start = time.perf_counter()
                try:
                    connection.send(self.bodies[number])
                    while not connection.receive():
                        pass
                    found = json.loads(connection.body)
                    wanted = self.wanted[found["version"]][number]
                    assert np.abs(np.subtract(found["scores"], wanted)).max() < 1e-5
                except Exception:  # noqa: BLE001  # whatever it was, the request has no right answer
                    self.failed += 1
                    return
                self.version = found["version"]
                self.slowest = max(self.slowest, time.perf_counter() - start)
                self.answered += 1


class Server:
    """A server process and its port."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process, self.port = process, port

    def megabytes(self) -> float:
        """Return the memory of the process and its children; pages that they share count once."""
        pids, found = [self.process.pid], 0
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            pids += map(int, children.read_text().split())
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += next(int(line.split()[1]) for line in rollup.splitlines() if "Pss:" in line)
        return found / 1000


@contextmanager
def _server(command: Sequence[str], *, pinned: bool = True) -> Iterator[Server]:
    """Start a server on a free port, on one core or all, and stop it in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        _on_core(SERVER_CORE) if pinned else nullcontext()
    ):  # children have the cores of their parent
        process = subprocess.Popen(  # noqa: S603  # our own programs
            [sys.executable, *command, "--port", str(port)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        yield Server(process, port)
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def _on_core(place: int) -> Iterator[None]:
    """Run on one of the cores that this process may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[place % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Load:
    """Clients of a server that send prepared bodies to /score and check the answers."""

    wanted: list[list[float]] | None = None
    """The scores of each body, where they are checked."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self.bodies = bodies
        self._requests = list(map(self.request, bodies))

    @staticmethod
    def request(body: bytes) -> bytes:
        """Return a request with this body."""
        head = "POST /score HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
        return head.format(len(body)).encode() + body

    def wait_for(self, server: Server, seconds: float = 120.0) -> None:
        """Wait until a server answers."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.many(server, 0.0)
            except OSError:
                if server.process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
            else:
                return

    def many(self, server: Server, seconds: float) -> float:
        """Keep all connections busy; return requests per second."""
        numbers, start = itertools.count(), time.perf_counter()
        with ExitStack() as stack:
            connections = [
                stack.enter_context(_Connection(server.port)) for _ in range(CONNECTIONS)
            ]
            selector = stack.enter_context(selectors.DefaultSelector())
            for connection in connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                self._send(connection, next(numbers))
            answered, waiting = 0, len(connections)
            while waiting:
                for key, _ in selector.select():
                    if not key.data.receive():
                        continue
                    self._check(key.data)
                    answered += 1
                    if time.perf_counter() - start < seconds:
                        self._send(key.data, next(numbers))
                    else:
                        waiting -= 1
            return answered / (time.perf_counter() - start)

    def at(self, server: Server, rate: float, seconds: float) -> list[float]:
        """Send requests at a rate, whether or not earlier ones are answered; return how long each took."""
        times: list[float] = []
        with ExitStack() as stack:
            free = [stack.enter_context(_Connection(server.port)) for _ in range(8 * CONNECTIONS)]
            selector = stack.enter_context(selectors.DefaultSelector())
            for connection in free:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            start, sent = time.perf_counter(), 0
            total = int(rate * seconds)
            while len(times) < total:
                now = time.perf_counter() - start
                if sent < total and now >= sent / rate and free:
                    connection = free.pop()
                    connection.due = start + sent / rate  # a late request has waited, too
                    self._send(connection, sent)
                    sent += 1
                    continue
                pause = max(sent / rate - now, 0.0) if sent < total and free else None
                for key, _ in selector.select(pause):
                    if key.data.receive():
                        times.append(time.perf_counter() - key.data.due)
                        self._check(key.data)
                        free.append(key.data)
        return times

    def _send(self, connection: "_Connection", number: int) -> None:
        connection.number = number % len(self._requests)
        connection.send(self._requests[connection.number])

    def _check(self, connection: "_Connection") -> None:
        scores = json.loads(connection.body)["scores"]
        if self.wanted is not None:
            found = np.abs(np.subtract(scores, self.wanted[connection.number])).max()
            assert found < 1e-5, f"the server must score as the model does, and differs by {found}"


class _Connection:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number, self.due, self.body, self._read = 0, 0.0, b"", b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._read = b""
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read some of the answer; return whether all of it is there."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return False
        status = head.split(None, 2)[1]
        assert status == b"200", self._read[:500]
        [length] = re.findall(rb"content-length: (\d+)", head, re.IGNORECASE)
        self.body = body
        return len(body) == int(length)
