"""Small exported files, made by hand, and a real server process for tests of serving."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SRC = Path(__file__).resolve().parent.parent / "src"
USERS = {"ann": 1.0, "bob": -1.0, "15": 0.5, "true": 0.25, "1e-7": 0.125, "a\0b": -0.75, "é": 2.0}
TAGS = {"a": 0.5, "b": -0.25, "c": 1.5}
USER = {"name": "user", "kind": "categorical", "has_ids": True, "rows": 10}
TAGS_COLUMN = {"name": "tags", "kind": "multi", "separator": "|", "max_length": 3, "has_ids": True}
PRICE = {"name": "price", "kind": "numeric", "missing": ["-1"], "has_ids": False}
COLUMNS = [USER, TAGS_COLUMN, PRICE]
EXAMPLES = {"user": ["ann", "eve", None], "tags": [["a", "b"], [], ["a"]], "price": [1.5, None, -2]}


def expected(user: object, tags: object, price: float | None, bias: float = 0.0) -> float:
    """Return the score of the file below, computed in Python. Only the text "a|b" etc. of tags counts."""
    text = "|".join(tags) if isinstance(tags, list) else tags or ""
    number = 0.0 if price is None else price
    total = USERS.get(user or "", 0.0) + TAGS.get(text, 0.0) + 0.1 * number + bias
    return 1 / (1 + np.exp(-np.float64(total)))


def write_file(
    path: Path,
    *,
    bias: float = 0.0,
    slow: bool = False,
    facts: dict[str, Any] | None = None,
    columns: list[dict[str, Any]] | None = None,
    stored_bias: float | None = None,
    overflow: bool = False,
    names: dict[str, str] | None = None,
    with_facts: bool = True,
) -> Path:
    """Write an exported file: user + tags + price / 10 + bias, through a sigmoid.

    With `slow`, a price of thousands takes tenths of a second; with `overflow`, a huge one has no score.
    """
    from onnx import TensorProto as T
    from onnx import helper as h

    def encoder(name: str, values: dict[str, float], suffix: str, unknown: float) -> Any:
        return h.make_node(
            "LabelEncoder",
            [name],
            [f"{name}_{suffix}"],
            domain="ai.onnx.ml",
            keys_strings=["", *values],
            values_floats=[0.0, *values.values()],
            default_float=unknown,
        )

    known = {name: dict.fromkeys(values, 0.0) for name, values in (("user", USERS), ("tags", TAGS))}
    nodes = [
        encoder("user", USERS, "value", 0.0),
        encoder("tags", TAGS, "value", 0.0),
        encoder("user", known["user"], "unknown", 1.0),
        encoder("tags", known["tags"], "unknown", 1.0),
        h.make_node("IsNaN", ["price"], ["is_missing"]),
        h.make_node("Where", ["is_missing", "zero", "price"], ["there"]),
        h.make_node("Cast", ["there"], ["number"], to=T.FLOAT),
        h.make_node("Mul", ["number", "tenth"], ["scaled"]),
        h.make_node("Sum", ["user_value", "tags_value", "scaled", "bias"], ["logit"]),
        h.make_node("Sigmoid", ["logit"], ["score"]),
        h.make_node("Unsqueeze", ["user_unknown", "one"], ["user_column"]),
        h.make_node("Unsqueeze", ["tags_unknown", "one"], ["tags_column"]),
        h.make_node("Concat", ["user_column", "tags_column"], ["both"], axis=1),
        h.make_node("Cast", ["both"], ["unknown"], to=T.BOOL),
    ]
    constants = [
        h.make_tensor("zero", T.DOUBLE, [], [0.0]),
        h.make_tensor("tenth", T.FLOAT, [], [0.1]),
        h.make_tensor("bias", T.FLOAT, [1], [bias]),
        h.make_tensor("one", T.INT64, [1], [1]),
    ]
    if overflow:
        total = next(node for node in nodes if node.op_type == "Sum")
        total.input.append("nothing")
        nodes[8:8] = [
            h.make_node("Mul", ["number", "number"], ["square"]),
            h.make_node("Sub", ["square", "square"], ["nothing"]),
        ]
    if slow:
        _add_delay(nodes, constants, h, T)
    graph = h.make_graph(
        nodes,
        "clicks",
        [
            h.make_tensor_value_info("user", T.STRING, ["batch"]),
            h.make_tensor_value_info("tags", T.STRING, ["batch"]),
            h.make_tensor_value_info("price", T.DOUBLE, ["batch"]),
        ],
        [
            h.make_tensor_value_info("score", T.FLOAT, ["batch"]),
            h.make_tensor_value_info("unknown", T.BOOL, ["batch", 2]),
        ],
        constants,
    )
    opsets = [h.make_opsetid("", 18), h.make_opsetid("ai.onnx.ml", 4)]
    names = names or {}
    for one in graph.input:
        one.name = names.get(one.name, one.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    model = h.make_model(graph, opset_imports=opsets, ir_version=10)
    stored = bias if stored_bias is None else stored_bias
    scores = [expected(*row, stored) for row in zip(*EXAMPLES.values(), strict=True)]
    metadata = {
        "format": 1,
        "model": "lr",
        "columns": columns or COLUMNS,
        "vocabulary": "0123456789abcdef",
        "versions": {"rarebit": "0.1.0", "torch": "2.13.0", "onnx": "1.23.2"},
        "training": {"seed": 0},
        "tables": {"kind": "plain", "bytes": 1234},
        "check": {"rows": 3, "largest_difference": 6e-8},
        "examples": {
            "columns": {names.get(name, name): EXAMPLES[name] for name in EXAMPLES},
            "scores": scores,
        },
        "score_deciles": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        **(facts or {}),
    }
    h.set_model_props(model, {"rarebit": json.dumps(metadata)} if with_facts else {})
    partial = path.with_suffix(".partial")
    partial.write_bytes(model.SerializeToString())
    partial.replace(path)
    return path


def _add_delay(nodes: list[Any], constants: list[Any], h: Any, T: Any) -> None:
    """Add a loop of so many million steps as the largest price has thousands, whose result is 0."""
    steps = [
        h.make_node("ReduceMax", ["there"], ["largest"], keepdims=0),
        h.make_node("Div", ["largest", "thousand"], ["thousands"]),
        h.make_node("Floor", ["thousands"], ["whole"]),
        h.make_node("Mul", ["whole", "many"], ["wanted"]),
        h.make_node("Cast", ["wanted"], ["trips"], to=T.INT64),
        h.make_node("Max", ["trips", "no_trips"], ["count"]),
        h.make_node("Loop", ["count", "", "nothing"], ["delay"], body=_loop_body(h, T)),
    ]
    place = next(i for i, node in enumerate(nodes) if node.op_type == "Cast")
    nodes[place:place] = steps
    total = next(node for node in nodes if node.op_type == "Sum")
    total.input.append("delay")
    constants += [
        h.make_tensor("thousand", T.DOUBLE, [], [1000.0]),
        h.make_tensor("many", T.DOUBLE, [], [150_000.0]),
        h.make_tensor("no_trips", T.INT64, [], [0]),
        h.make_tensor("nothing", T.FLOAT, [1], [0.0]),
    ]


def _loop_body(h: Any, T: Any) -> Any:
    return h.make_graph(
        [
            h.make_node("Identity", ["go"], ["go_on"]),
            h.make_node("Mul", ["before", "before"], ["after"]),
        ],
        "wait",
        [
            h.make_tensor_value_info("trip", T.INT64, []),
            h.make_tensor_value_info("go", T.BOOL, []),
            h.make_tensor_value_info("before", T.FLOAT, [1]),
        ],
        [
            h.make_tensor_value_info("go_on", T.BOOL, []),
            h.make_tensor_value_info("after", T.FLOAT, [1]),
        ],
    )


class Answer:
    """An answer of a server."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json", self.body
        return self.json["error"]


class Server:
    """A real server process on a free port."""

    def __init__(
        self, path: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.command = [
            sys.executable,
            "-m",
            "rarebit",
            "serve",
            str(path),
            "--port",
            "0",
            *options,
        ]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SRC), **(environment or {})},
        )
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if found := re.search(r"http://([\d.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            self.close()
            raise AssertionError(f"no server: {lines} {self.log}")
        self.output = lines

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    @property
    def url(self) -> str:
        return f"{self.host}:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        types = {"content-type": "application/json"} if raw is not None else {}
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, raw, {**types, **(headers or {})})
            return Answer(connection.getresponse())

    def score(self, body: Any, **headers: str) -> Answer:
        return self.ask("POST", "/score", body, headers)

    @property
    def status(self) -> Any:
        return self.ask("GET", "/status.json").json

    @property
    def workers(self) -> list[int]:
        return [one["pid"] for one in self.status["models"][0]["workers"] if one["ready"]]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [found for found in map(json.loads, tuple(self.log)) if found["event"] == name]

    def stop(self) -> int:
        """Stop it as a supervisor does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """End the process, however it takes it."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(20)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def serving(path: Path, *options: str, **more: Any) -> Iterator[Server]:
    """Give a server that is stopped in the end."""
    server = Server(path, *options, **more)
    try:
        yield server
    finally:
        server.close()


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("the condition did not come true")


def write_ids_file(path: Path) -> Path:
    """Write an exported file that takes ids: the sum of two ids and a number, through a sigmoid."""
    from onnx import TensorProto as T
    from onnx import helper as h

    nodes = [
        h.make_node("Cast", ["ids"], ["floats"], to=T.FLOAT),
        h.make_node("ReduceSum", ["floats", "axis"], ["sums"], keepdims=0),
        h.make_node("Squeeze", ["numeric", "axis"], ["number"]),
        h.make_node("Add", ["sums", "number"], ["logit"]),
        h.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    graph = h.make_graph(
        nodes,
        "plain",
        [
            h.make_tensor_value_info("ids", T.INT64, ["batch", 2]),
            h.make_tensor_value_info("numeric", T.FLOAT, ["batch", 1]),
        ],
        [h.make_tensor_value_info("score", T.FLOAT, ["batch"])],
        [h.make_tensor("axis", T.INT64, [1], [1])],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=10)
    fields = [
        {"name": "user", "kind": "categorical", "rows": 3, "max_length": 1},
        {"name": "item", "kind": "categorical", "rows": 2, "max_length": 1},
        {"name": "price", "kind": "numeric", "rows": 0, "max_length": 1},
    ]
    facts = {"format": 1, "model": "lr", "fields": fields, "vocabulary": "00"}
    h.set_model_props(model, {"rarebit": json.dumps(facts)})
    path.write_bytes(model.SerializeToString())
    return path
