"""Requests in each form, good and bad, against a real server."""

import gzip
import io
import json
import re
import socket
import zlib

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
from served import expected, serving, wait_for

ROWS = [
    {"user": "ann", "tags": ["a"], "price": 1.5},
    {"user": None, "tags": [], "price": None},
    {"user": 15, "tags": "b", "price": "2"},
    {"user": 15.0, "tags": None, "price": -3},
    {"user": True, "tags": ["a", "b"], "price": True},
    {"user": 1e-7, "tags": ["c", None, ""], "price": " 1e1 "},
    {"user": "a\0b", "tags": ["c"], "price": 0},
    {"user": "no such \U0001f98a", "tags": ["no such"], "price": -1},
    {"user": "é", "tags": ["c"], "price": 0.25},
]
READ = [
    *(("ann", "a", 1.5), ("", "", None), ("15", "b", 2), ("15", "", -3), ("true", "a|b", 1)),
    *(
        ("1e-7", "c", 10),
        ("a\0b", "c", 0),
        ("no such \U0001f98a", "no such", None),
        ("é", "c", 0.25),
    ),
]
"""What the rows mean."""
SCORES = [expected(*row) for row in READ]
GOOD = {"user": "ann", "tags": ["a"], "price": 1}


def columns_of(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def arrow_of(rows):
    table = pa.table(
        {
            "user": pa.array([user for user, _, _ in rows]).dictionary_encode(),
            "tags": pa.array([tags.split("|") for _, tags, _ in rows]),
            "price": pa.array([price for _, _, price in rows], pa.float64()),
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_the_expected_scores_are_those_of_the_file(clicks):
    session = onnxruntime.InferenceSession(clicks)
    users, tags, prices = zip(*READ, strict=True)
    feed = {
        "user": np.array(users, object),
        "tags": np.array(tags, object),
        "price": np.array([np.nan if price is None else price for price in prices]),
    }
    assert session.run(["score"], feed)[0] == pytest.approx(SCORES, abs=1e-7)


@pytest.mark.parametrize("path", ["/score", "/models/clicks/score"])
@pytest.mark.parametrize(
    "body",
    [
        {"rows": ROWS},
        {"columns": columns_of(ROWS)},
        {"user": {}, "items": ROWS},
    ],
    ids=["rows", "columns", "items"],
)
def test_each_form_gives_the_scores_of_the_file(server, path, body):
    answer = server.ask("POST", path, body)
    assert answer.status == 200, answer.body
    assert answer.json["scores"] == pytest.approx(SCORES, abs=1e-7)
    assert answer.json["model"] == "clicks"
    assert answer.json["version"] == answer.headers["rarebit-version"]


def test_one_user_with_many_items(server):
    items = [{"tags": ["a"], "price": 1}, {"tags": ["b"], "price": 2}]
    answer = server.score({"user": {"user": "bob"}, "items": items})
    assert answer.json["scores"] == pytest.approx(
        [expected("bob", "a", 1), expected("bob", "b", 2)], abs=1e-7
    )


def test_ndjson(server):
    body = "\n".join(map(json.dumps, ROWS)).encode() + b"\n"
    answer = server.score(body, **{"content-type": "application/x-ndjson"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.body.splitlines()
    assert [json.loads(line)["score"] for line in lines] == pytest.approx(SCORES, abs=1e-7)


@pytest.mark.parametrize("accept", ["application/json", "application/vnd.apache.arrow.stream"])
def test_arrow(server, accept):
    kind = {"content-type": "application/vnd.apache.arrow.stream", "accept": accept}
    answer = server.score(arrow_of(READ), **kind)
    assert answer.status == 200, answer.body
    if accept.endswith("json"):
        scores = answer.json["scores"]
    else:
        table = pa.ipc.open_stream(answer.body).read_all()
        scores = table["score"].to_pylist()
        assert table.schema.metadata[b"model"] == b"clicks"
    assert scores == pytest.approx(SCORES, abs=1e-7)


def test_arrow_spells_32_bit_floats_as_they_are_written(server):
    table = pa.table(
        {"user": pa.array([15.0, 1e-7], pa.float32()), "tags": [[], []], "price": [0, 0]}
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    answer = server.score(
        sink.getvalue(), **{"content-type": "application/vnd.apache.arrow.stream"}
    )
    wanted = [expected("15", "", 0), expected("1e-7", "", 0)]
    assert answer.json["scores"] == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_bodies(server, encoding, pack):
    body = pack(json.dumps({"rows": ROWS}).encode())
    answer = server.score(body, **{"content-encoding": encoding})
    assert answer.json["scores"] == pytest.approx(SCORES, abs=1e-7)
    cut = server.score(body[:-9], **{"content-encoding": encoding})
    assert cut.status == 400


BAD = {
    "nothing": (b"", 400, "not valid JSON"),
    "no JSON": (b"{", 400, "not valid JSON"),
    "no UTF-8": (b'{"rows": ["\xff"]}', 400, "not valid JSON"),
    "a lone surrogate": (b'{"rows": [{"user": "\\ud800"}]}', 400, "not valid JSON"),
    "NaN": (b'{"rows": [{"user": "ann", "tags": [], "price": NaN}]}', 400, "not valid JSON"),
    "a huge number": (b'{"rows": [{"user": 1e999}]}', 400, "not valid JSON"),
    "deep JSON": (b"[" * 100_000 + b"]" * 100_000, 400, "not valid JSON"),
    "a list": ([], 400, "expected a JSON object: "),
    "no form": ({"rows": [GOOD], "more": 1}, 400, 'expected {"rows": ...}'),
    "rows that are no list": ({"rows": {}}, 400, "rows must be a list, got dict"),
    "no rows": ({"rows": []}, 400, "rows must have at least one row, got none"),
    "no items": ({"user": {}, "items": []}, 400, "items must have at least one row, got none"),
    "no columns": ({"columns": {}}, 400, "column 'user' is missing, and 2 more"),
    "empty columns": ({"columns": {"user": [], "tags": [], "price": []}}, 400, "at least one row"),
    "a row that is no object": ({"rows": [GOOD, 1]}, 400, "row 1 must be an object"),
    "a row that is a list": ({"rows": [GOOD, ["user"]]}, 400, "row 1 must be an object"),
    "a missing column": ({"rows": [GOOD, {"user": 1, "price": 1}]}, 400, "row 1: column 'tags' is missing; send null"),
    "an unknown column": ({"rows": [{**GOOD, "clicks": 1}]}, 400, "row 0: the model reads no column 'clicks'; known: price, tags, user"),
    "a misspelt column": ({"rows": [{**GOOD, "usr": 1}]}, 400, "did you mean 'user'?"),
    "10,000 columns": ({"rows": [{**GOOD, **{f"c{n}": n for n in range(10_000)}}]}, 400, "the model reads no column 'c0'"),
    "a nested value": ({"rows": [{**GOOD, "user": {"id": 1}}]}, 400, "row 0: column 'user' must be text"),
    "a nested list": ({"rows": [{**GOOD, "tags": [["a"]]}]}, 400, "row 0: column 'tags' must be text"),
    "a separator": ({"rows": [{**GOOD, "tags": ["a|b"]}]}, 400, "has a value with '|' in it"),
    "a wrong number": ({"rows": [GOOD, {**GOOD, "price": "x"}]}, 400, "row 1: column 'price' must be a number or null, got 'x'"),
    "beyond 32 bits": ({"rows": [{**GOOD, "price": 1e39}]}, 400, "row 0: column 'price' must be a number that fits 32 bits"),
    "a float id": ({"rows": [{**GOOD, "user": 1e17}]}, 400, "floats cannot tell such ids apart"),
    "a huge integer": ({"rows": [{**GOOD, "user": 10**30}]}, 400, "floats cannot tell such ids apart"),
    "different lengths": ({"columns": {"user": [1, 2], "tags": [[]], "price": [1]}}, 400, "'user' has 2, 'tags' has 1"),
    "a column that is no list": ({"columns": {"user": 1, "tags": [], "price": []}}, 400, "column 'user' must be a list"),
    "user is no object": ({"user": 1, "items": [GOOD]}, 400, "user must be an object"),
    "user has an unknown column": ({"user": {"usr": 1}, "items": [GOOD]}, 400, "user: the model reads no column 'usr'; did you mean 'user'?"),
    "user and item have it": ({"user": {"user": 1}, "items": [GOOD]}, 400, "item 0: column 'user' is also in user"),
    "an item lacks it": ({"user": {"user": 1}, "items": [{"price": 1}]}, 400, "item 0: column 'tags' is missing"),
    "a wrong user": ({"user": {"user": []}, "items": [{"price": 1, "tags": []}]}, 400, "user: column 'user' must be text"),
    "too many rows": ({"rows": [GOOD] * 1001}, 413, "rows has 1,001 rows; this server takes at most 1,000 (--max-rows)"),
    "too many bytes": (b" " * 1_000_001, 413, "more than 1,000,000 bytes (--max-bytes)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_what_is_wrong(server, name):
    body, status, message = BAD[name]
    answer = server.score(body)
    assert answer.status == status, answer.body
    for part in message.split("..."):
        assert part in answer.error
    assert len(answer.body) < 1000
    assert "Traceback" not in answer.error


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"content-type": "text/csv"}, b"user\nann", 415, "unknown content type 'text/csv'; expected application/json"),
        ({"content-encoding": "br"}, b"{}", 415, "unknown content encoding 'br'; expected gzip or deflate"),
        ({"content-encoding": "gzip"}, b"{}", 400, "not valid gzip"),
        ({"content-encoding": "gzip"}, gzip.compress(b" " * 1_000_001), 413, "when decompressed"),
        ({"content-type": "application/x-ndjson"}, b"", 400, "at least one row"),
        ({"content-type": "application/x-ndjson"}, json.dumps(GOOD).encode() + b"\n{", 400, "line 2 is not valid JSON"),
        ({"content-type": "application/x-ndjson"}, json.dumps(GOOD).encode() + b'\n{"user": 1}', 400, "line 2: column 'tags'"),
        ({"content-type": "application/vnd.apache.arrow.stream"}, b"x" * 100, 400, "not a valid Arrow stream"),
        ({"content-type": "application/vnd.apache.arrow.stream"}, arrow_of(READ)[:-40], 400, "Arrow"),
    ],
)  # fmt: skip
def test_a_wrong_content_is_refused(server, headers, body, status, message):
    answer = server.score(body, **headers)
    assert answer.status == status, answer.body
    assert message in answer.error


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/score", 405, "Method Not Allowed"),
        ("DELETE", "/", 405, "Method Not Allowed"),
        ("GET", "/nowhere", 404, "Not Found"),
        ("POST", "/models/clics/score", 404, "no model 'clics'; did you mean 'clicks'?"),
        ("POST", "/v2/models/" + "x" * 3000 + "/infer", 404, "no model 'xxx"),
        ("GET", "/v2/models/clicks/versions/9", 404, "has no version '9'; it is served as"),
    ],
)
def test_a_wrong_address_is_refused(server, method, path, status, message):
    answer = server.ask(method, path, {} if method == "POST" else None)
    assert answer.status == status
    assert message in answer.error
    assert len(answer.error) < 400


@pytest.fixture(scope="module")
def impatient(clicks):
    with serving(clicks, "--timeout", "0.4", "--access-log") as server:
        yield server


def raw_connection(server, head, body=b""):
    connection = socket.create_connection((server.host, server.port), timeout=30)
    connection.sendall(head.encode() + body)
    return connection


HEAD = "POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"


def test_a_body_that_is_cut_off_is_counted_and_harms_nobody(server):
    def cut_off():
        return server.status["models"][0]["codes"].get("499", 0)

    before = cut_off()
    raw_connection(server, HEAD, b'{"rows"').close()
    wait_for(lambda: cut_off() == before + 1)
    assert server.score({"rows": [GOOD]}).status == 200


@pytest.mark.parametrize(
    "head",
    [HEAD, HEAD.replace("content-length: 100", "transfer-encoding: chunked")],
    ids=["length", "chunked"],
)
def test_a_slow_body_is_given_up(impatient, head):
    with raw_connection(impatient, head, b"") as connection:
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body did not arrive within 0.4 s (--timeout)" in answer
        assert b"connection: close" in answer


def test_slow_headers_are_given_up(impatient):
    with raw_connection(impatient, "POST /score HTTP/1.1\r\nhost:") as connection:
        assert connection.recv(1 << 16) == b""
    # also those of a second request on a connection
    with raw_connection(impatient, "GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n") as connection:
        answer = b""
        while not answer.endswith(b'{"live":true}'):
            answer += connection.recv(1 << 16)
        connection.sendall(b"GET /")
        assert connection.recv(1 << 16) == b""


def test_an_access_log_has_no_values(impatient, server):
    row = {**GOOD, "user": "a value of a row"}
    assert impatient.score({"rows": [row]}).status == 200
    [*_, found] = wait_for(
        lambda: [one for one in impatient.events("request") if one["code"] == 200]
    )
    assert set(found) == {"time", "event", "path", "code", "ms"}
    assert found["path"] == "/score"
    assert server.events("request") == []


def test_what_is_no_http_is_refused(server):
    with raw_connection(server, "\x16\x03\x01nonsense\r\n\r\n") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")
    with raw_connection(server, "GET / HTTP/1.1\r\nx: " + "y" * 200_000) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_metrics_and_logs_show_no_values(server):
    private = "a value of a row"
    server.score({"rows": [{**GOOD, "user": private, "price": private}]})
    server.score({"rows": [{**GOOD, "user": private}]})
    metrics = server.ask("GET", "/metrics").body.decode()
    assert 'rarebit_requests_total{model="clicks",code="200"}' in metrics
    assert 'rarebit_requests_total{model="clicks",code="400"}' in metrics
    assert 'rarebit_unknown_rows_total{model="clicks",version=' in metrics
    for text in (metrics, "".join(server.log), json.dumps(server.status)):
        assert private not in text


def test_every_line_of_the_metrics_is_one_that_prometheus_reads(server):
    text = server.ask("GET", "/metrics").body.decode()
    sample = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)*\})? [-+.\deInfa]+')
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert len(lines) > 40
    assert [line for line in lines if not sample.fullmatch(line)] == []
