"""Ten minutes of good, bad, slow and cut-off clients, while versions change and workers are killed.

    python benchmarks/serving_soak.py --minutes 10

64 connections send requests to a server with two models. One of them gets a new version 20 times, and its worker is
killed 20 times; the other is left alone, so that its memory can be compared. Every score is compared with that of
ONNX Runtime on the file of the version that answered. Every request is accounted for:

    sent = right + refused + cut off by the client + wrong + lost

`wrong` is a score or a status that should be another one; `lost` is a request that was sent in full and got no answer.
Both must be 0, and memory must be flat. The result is written to `benchmarks/results/serving-soak.json`.
"""

import argparse
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import rarebit as rb
from rarebit.machine import machine
from rarebit.models.dcn_v2 import DCNv2

OUT = Path(__file__).parent / "results" / "serving-soak.json"
CONNECTIONS = {"good": 44, "bad": 10, "slow": 4, "cut_off": 6}
VERSIONS, POOL, MOST_ROWS = 4, 400, 50
EVENTS = 20
TOLERANCE, FLAT = 1e-5, 1.05
JSON = {"content-type": "application/json"}
SECONDS = 20
"""The time that the server gives a client to send its request."""


# the models and what their scores should be


def make_versions(folder: Path) -> dict[str, list[float]]:
    """Export some versions, which differ in their weights; return the scores of each by its checksum."""
    draw = random.Random(0)  # noqa: S311  # nothing secret
    log = [row | {"click": draw.randrange(2)} for row in (raw_row(draw) for _ in range(3000))]
    frame = {name: [row[name] for row in log] for name in log[0]}
    data = rb.Dataset.from_frame(frame, label="click")
    scores = {}
    for number in range(VERSIONS):
        torch.manual_seed(number)
        model = DCNv2(data.schema, dim=8)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.3)
        path = folder / f"{number}.onnx"
        rb.export(model, path)
        scores[hashlib.sha256(path.read_bytes()).hexdigest()[:12]] = score(path)
    return scores


def raw_row(draw: random.Random) -> dict[str, Any]:
    """Return a row of a raw log, with missing values and values that the training rows do not have."""
    return {
        "user": draw.choice([f"user {draw.randrange(300)}", None]),
        "item": str(draw.randrange(500)),
        "shop": draw.choice(["Berlin", "Łódź", "東京", "a,b", ""]) or None,
        "price": draw.choice([round(draw.lognormvariate(1, 1), 2), None]),
    }


RANDOM = random.Random(1)  # noqa: S311  # nothing secret
ROWS = [raw_row(RANDOM) for _ in range(POOL)]


def score(path: Path) -> list[float]:
    """Return the scores of the pool of rows, by ONNX Runtime alone."""
    session = onnxruntime.InferenceSession(path)
    feed: dict[str, Any] = {}
    for one in session.get_inputs():
        values = [row[one.name] for row in ROWS]
        if one.type == "tensor(string)":
            feed[one.name] = np.array([value or "" for value in values], object)
        else:
            feed[one.name] = np.array([np.nan if value is None else value for value in values])
    found: list[float] = session.run(["score"], feed)[0].tolist()
    return found


# the clients


class Tally:
    """What became of the requests, counted by all threads."""

    def __init__(self, expected: dict[str, list[float]]) -> None:
        self.expected, self.counts, self.lock = expected, Counter[str](), threading.Lock()
        self.examples: list[str] = []
        self.stop = threading.Event()

    def add(self, outcome: str, note: str = "") -> None:
        """Count the outcome of a request."""
        with self.lock:
            self.counts["sent"] += 1
            self.counts[outcome] += 1
            if note and len(self.examples) < 20:
                self.examples.append(f"{outcome}: {note}"[:300])
                print(self.examples[-1], file=sys.stderr)


def requests_of(
    rows: list[dict[str, Any]], draw: random.Random
) -> tuple[str, bytes, dict[str, str]]:
    """Return a request for rows in one of the forms: path below the model, body and headers."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    form = draw.choice(["rows", "columns", "items", "ndjson", "gzip", "infer"])
    if form == "rows":
        return "score", json.dumps({"rows": rows}).encode(), JSON
    if form == "columns":
        return "score", json.dumps({"columns": columns}).encode(), JSON
    if form == "items":
        return "score", json.dumps({"user": {}, "items": rows}).encode(), JSON
    if form == "gzip":
        body = gzip.compress(json.dumps({"rows": rows}).encode())
        return "score", body, JSON | {"content-encoding": "gzip"}
    if form == "ndjson":
        lines = "\n".join(map(json.dumps, rows)).encode()
        return "score", lines, {"content-type": "application/x-ndjson"}
    inputs = [
        {
            "name": name,
            "shape": [len(rows)],
            "datatype": "FP64" if name == "price" else "BYTES",
            "data": values,
        }
        for name, values in columns.items()
    ]
    return "infer", json.dumps({"inputs": inputs, "outputs": [{"name": "score"}]}).encode(), JSON


def scores_of(path: str, body: bytes, headers: Any) -> tuple[list[float], str]:
    """Return the scores of an answer and the version that gave them."""
    if headers["content-type"] == "application/x-ndjson":
        lines = body.splitlines()
        return [json.loads(line)["score"] for line in lines], headers["rarebit-version"]
    found = json.loads(body)
    if path == "infer":
        return found["outputs"][0]["data"], found["model_version"]
    return found["scores"], found["version"]


def path_of(model: str, kind: str) -> str:
    """Return the path of a request."""
    return f"/v2/models/{model}/infer" if kind == "infer" else f"/models/{model}/score"


def good(port: int, tally: Tally, draw: random.Random) -> None:
    """Send good requests on one connection, and compare every score."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not tally.stop.is_set():
        places = [draw.randrange(POOL) for _ in range(draw.randint(1, MOST_ROWS))]
        kind, body, headers = requests_of([ROWS[place] for place in places], draw)
        model = draw.choice(["clicks", "steady"])
        try:
            connection.request("POST", path_of(model, kind), body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            tally.add("lost", repr(error))
            connection.close()
            continue
        if response.status == 503:
            tally.add("refused")
        elif response.status != 200:
            tally.add("wrong", f"{response.status} {answer[:200]!r}")
        else:
            scores, version = scores_of(kind, answer, response.headers)
            wanted = [tally.expected[version][place] for place in places]
            same = len(scores) == len(wanted) and np.allclose(
                scores, wanted, atol=TOLERANCE, rtol=0
            )
            tally.add("right" if same else "wrong", "" if same else f"{version}: {scores} {wanted}")
    connection.close()


BAD: list[tuple[bytes, dict[str, str], int]] = [
    (b"{", JSON, 400),
    (b"[" * 100_000, JSON, 400),
    (json.dumps({"rows": []}).encode(), JSON, 400),
    (json.dumps({"rows": [{"user": "ann"}]}).encode(), JSON, 400),
    (json.dumps({"rows": [ROWS[0] | {"more": 1}]}).encode(), JSON, 400),
    (json.dumps({"rows": [ROWS[0] | {"price": "cheap"}]}).encode(), JSON, 400),
    (json.dumps({"rows": [ROWS[0] | {"price": 1e39}]}).encode(), JSON, 400),
    (json.dumps({"rows": [ROWS[0] | {"user": {"id": [1]}}]}).encode(), JSON, 400),
    (json.dumps({"rows": [ROWS[0]] * 2000}).encode(), JSON, 413),
    (json.dumps({"columns": {str(name): [1] for name in range(10_000)}}).encode(), JSON, 400),
    (b" " * 600_000, JSON, 413),
    (b"user\nann", {"content-type": "text/csv"}, 415),
    (b"nonsense", {"content-type": "application/vnd.apache.arrow.stream"}, 400),
    (gzip.compress(b" " * 10_000_000), JSON | {"content-encoding": "gzip"}, 413),
]


def bad(port: int, tally: Tally, draw: random.Random) -> None:
    """Send bad requests; each must be refused with its status and a message."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not tally.stop.is_set():
        body, headers, status = draw.choice(BAD)
        try:
            connection.request(
                "POST", f"/models/{draw.choice(['clicks', 'steady'])}/score", body, headers
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            tally.add("lost", repr(error))
            connection.close()
            continue
        fine = response.status in (status, 503) and json.loads(answer)["error"]
        tally.add("refused" if fine else "wrong", "" if fine else f"{status}: {answer[:200]!r}")
        tally.stop.wait(0.02)
    connection.close()


def slow(port: int, tally: Tally, draw: random.Random) -> None:
    """Send a request in pieces: in time, or too slowly, which must end with status 408."""
    while not tally.stop.is_set():
        place = draw.randrange(POOL)
        body = json.dumps({"rows": [ROWS[place]]}).encode()
        in_time = draw.random() < 0.7
        head = f"POST /models/clicks/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(head.encode())
                quarter = len(body) // 4
                for piece in range(3):
                    client.sendall(body[piece * quarter : (piece + 1) * quarter])
                    tally.stop.wait(0.3)
                if in_time:
                    client.sendall(body[3 * quarter :])
                answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        except OSError as error:
            tally.add("lost", repr(error))
            continue
        status = int(answer.split(b" ", 2)[1]) if answer else 0
        if in_time and status == 200:
            found = json.loads(answer.partition(b"\r\n\r\n")[2])
            wanted = tally.expected[found["version"]][place]
            same = abs(found["scores"][0] - wanted) < TOLERANCE
            tally.add("right" if same else "wrong", "" if same else str(found))
        else:
            fine = status == (503 if in_time else 408)
            tally.add("refused" if fine else "wrong", "" if fine else f"slow: {answer[:200]!r}")


def cut_off(port: int, tally: Tally, draw: random.Random) -> None:
    """Go away in the middle of a request, or before its answer."""
    while not tally.stop.is_set():
        body = json.dumps({"rows": ROWS[: draw.randint(1, MOST_ROWS)]}).encode()
        head = f"POST /models/clicks/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sent = head.encode() + body
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as client,
        ):
            client.sendall(sent[: draw.randint(0, len(sent))] if draw.random() < 0.5 else sent)
        tally.add("cut_off")
        tally.stop.wait(0.05)


CLIENTS: dict[str, Callable[[int, Tally, random.Random], None]] = {
    "good": good,
    "bad": bad,
    "slow": slow,
    "cut_off": cut_off,
}


# the server


class Server:
    """A server process, its models and its memory."""

    def __init__(self, folder: Path) -> None:
        words = ["serve", str(folder), "--port", "0", "--timeout", str(SECONDS)]
        limits = ["--max-rows", "1000", "--max-bytes", "500000"]
        self.process = subprocess.Popen(  # noqa: S603  # our own command line
            [sys.executable, "-m", "rarebit", *words, *limits],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r":(\d+);", line):
                self.port = int(found[1])
                return
        raise RuntimeError("the server did not start")

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def models(self) -> dict[str, Any]:
        """Return the status of each model."""
        return {one["name"]: one for one in self.ask("GET", "/status.json")[1]["models"]}

    def memory(self) -> dict[str, float]:
        """Return megabytes of the front, and of the worker that is never killed."""
        [steady] = self.models()["steady"]["workers"]
        return {"front": megabytes(self.process.pid), "worker": megabytes(steady["pid"])}


def megabytes(process: int) -> float:
    """Return the memory that a process has to itself."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text("utf-8")
    parts = re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)
    return sum(map(int, parts)) / 1000


def swap(server: Server, versions: list[Path], target: Path, number: int) -> bool:
    """Copy a version over the file that is served, and load it."""
    shutil.copyfile(versions[number % len(versions)], target)
    status, answer = server.ask("POST", "/v2/repository/models/clicks/load")
    if status != 200:
        print(answer, file=sys.stderr)
    return status == 200


def kill(server: Server) -> bool:
    """Kill a worker of the model that changes."""
    workers = [one for one in server.models()["clicks"]["workers"] if one["ready"]]
    if workers:
        os.kill(workers[0]["pid"], signal.SIGKILL)
    return bool(workers)


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Run the clients and the events; return what became of the requests."""
    parts, served = folder / "versions", folder / "served"
    parts.mkdir()
    served.mkdir()
    tally = Tally(make_versions(parts))
    versions = sorted(parts.glob("*.onnx"))
    for name in ("clicks", "steady"):
        shutil.copyfile(versions[0], served / f"{name}.onnx")
    server, chance = Server(served), random.Random(seed)  # noqa: S311  # nothing secret
    threads = [
        threading.Thread(
            target=CLIENTS[kind],
            args=(server.port, tally, random.Random(chance.random())),  # noqa: S311  # nothing secret
        )
        for kind, count in CONNECTIONS.items()
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    start, done, samples = time.monotonic(), Counter[str](), list[dict[str, float]]()
    moments = sorted((number + 0.5) / EVENTS for number in range(EVENTS))
    events = sorted(
        [(m, "swaps") for m in moments] + [(m + 0.5 / EVENTS, "kills") for m in moments]
    )
    seconds = minutes * 60
    while (now := time.monotonic() - start) < seconds or events:
        if now >= 0.2 * seconds:  # until there, caches fill
            samples.append(server.memory())
        while events and events[0][0] * seconds * 0.95 <= now:
            _, kind = events.pop(0)
            if kind == "swaps":
                done[kind] += swap(server, versions, served / "clicks.onnx", done[kind] + 1)
            else:
                done[kind] += kill(server)
        memory = {part: round(found) for part, found in server.memory().items()}
        print(f"{now:6.0f} s {dict(tally.counts)} {dict(done)} MB {memory}", file=sys.stderr)
        tally.stop.wait(min(5.0, seconds / 50))
    tally.stop.set()
    for thread in threads:
        thread.join(120)
    status = server.models()
    server.process.terminate()
    code = server.process.wait(60)
    assert server.process.stdout is not None
    server.process.stdout.close()
    tenth = max(len(samples) // 10, 1)
    memory = {
        part: {
            "start_mb": round(statistics.median(one[part] for one in samples[:tenth]), 1),
            "end_mb": round(statistics.median(one[part] for one in samples[-tenth:]), 1),
        }
        for part in ("front", "worker")
    }
    counts = {
        name: tally.counts[name]
        for name in ("sent", "right", "refused", "cut_off", "wrong", "lost")
    }
    return {
        **counts,
        "accounted": counts["sent"] == sum(counts[name] for name in list(counts)[1:]),
        "swaps": done["swaps"],
        "kills": done["kills"],
        "restarts": status["clicks"]["restarts"],
        "restarts_of_the_other": status["steady"]["restarts"],
        "codes": {name: one["codes"] for name, one in status.items()},
        "rows": sum(one["rows"] for one in status.values()),
        "memory": memory,
        "exit_code": code,
        "examples": tally.examples,
    }


def main() -> None:
    """Soak a server, print and store what came of it, and exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="where to write the result as JSON")
    options = parser.parse_args()
    facts = machine()  # before the run: the commit is that of the code that runs
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.minutes, options.seed)
    flat = all(one["end_mb"] <= FLAT * one["start_mb"] for one in result["memory"].values())
    result |= {
        "connections": sum(CONNECTIONS.values()),
        "minutes": options.minutes,
        "seed": options.seed,
    }
    result["flat"] = flat
    print(json.dumps(result))
    options.out.write_text(json.dumps(result | {"machine": facts}, indent=1) + "\n", "utf-8")
    fine = result["accounted"] and not result["wrong"] and not result["lost"] and flat
    fine = fine and result["swaps"] == result["kills"] == EVENTS and not result["exit_code"]
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
