"""Workers that die, versions that change, queues that are full, servers that stop: no accepted request is lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest
from capabilities import slow_after
from served import EXAMPLES, SRC, expected, serving, wait_for, write_file

SLOW, ENDLESS = 3000, 1_000_000
"""Prices that take about half a second, and minutes."""


def row(price=1, user="ann"):
    return {"rows": [{"user": user, "tags": ["a"], "price": price}]}


def is_alive(process):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


@contextlib.contextmanager
def paused(server):
    """Stop the only worker for a while, so that requests pile up."""
    [worker] = server.workers
    os.kill(worker, signal.SIGSTOP)
    try:
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


@pytest.fixture
def path(tmp_path):
    return write_file(tmp_path / "clicks.onnx", slow=True)


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Give a server whose worker is stopped and killed, test after test."""
    path = write_file(tmp_path_factory.mktemp("strong") / "clicks.onnx", slow=True)
    with serving(path, "--queue", "20") as server:
        yield server


def metric(server, name):
    """Return the value of a metric of the model."""
    text = server.ask("GET", "/metrics").body.decode()
    start = name.replace("{", '{model="clicks",').removesuffix(",")
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def test_requests_survive_the_death_of_a_worker(strong):
    server, before = strong, strong.status["models"][0]["restarts"]
    with ThreadPoolExecutor(12) as threads:
        with paused(server) as worker:
            asked = [threads.submit(server.score, row(price)) for price in range(12)]
            wait_for(lambda: server.status["pending"] == 12)
            os.kill(worker, signal.SIGKILL)
        for price, answer in enumerate(asked):
            assert answer.result().status == 200
            assert answer.result().json["scores"] == pytest.approx(
                [expected("ann", "a", price)], abs=1e-7
            )
        assert server.workers != [worker]
        assert server.status["models"][0]["restarts"] == before + 1
        assert server.events("worker_died")[-1]["unanswered"] == 12


def test_a_request_that_kills_workers_takes_no_other_with_it(strong):
    server = strong
    with ThreadPoolExecutor(3) as threads:
        with paused(server) as worker:
            poison = threads.submit(server.score, row(ENDLESS))
            wait_for(lambda: server.status["pending"] == 1)
            others = [threads.submit(server.score, row(price)) for price in (1, 2)]
            wait_for(lambda: server.status["pending"] == 3)
            os.kill(worker, signal.SIGKILL)

        def alone():
            [found, *_] = server.status["models"][0]["workers"] or [{"unanswered": 0}]
            return found["unanswered"] and found["pid"] != worker and found["pid"]

        os.kill(wait_for(alone), signal.SIGKILL)
        assert poison.result().status == 500
        assert (
            poison.result().error == "the worker process ended twice while it scored this request"
        )
        assert [answer.result().status for answer in others] == [200, 200]


def test_a_full_queue_refuses_and_micro_batches_give_the_same_scores(strong):
    server, prices = strong, list(range(20))
    names = (
        "rarebit_batch_rows_count{",
        "rarebit_batch_rows_sum{",
        'rarebit_requests_total{code="503"',
    )
    with ThreadPoolExecutor(20) as threads:
        alone = [server.score(row(price)).json["scores"] for price in prices]
        before = [metric(server, name) for name in names]
        with paused(server):
            asked = [threads.submit(server.score, row(price)) for price in prices]
            wait_for(lambda: server.status["pending"] == 20)
            refused = server.score(row())
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"
            assert "20 requests wait already (--queue); try again" in refused.error
        assert [answer.result().json["scores"] for answer in asked] == alone
    after = [metric(server, name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 20, 1]


@pytest.mark.slow
def test_a_request_of_a_batch_that_fails_takes_no_other_with_it(tmp_path):
    """One request has a price so large that the score is NaN, which is never sent."""
    path = write_file(tmp_path / "clicks.onnx", overflow=True)
    with serving(path) as server, ThreadPoolExecutor(2) as threads:
        with paused(server):
            asked = [threads.submit(server.score, row(price)) for price in (1, 3e38)]
            wait_for(lambda: server.status["pending"] == 2)
        good, bad = (answer.result() for answer in asked)
        assert good.json["scores"] == pytest.approx([expected("ann", "a", 1)], abs=1e-7)
        assert bad.status == 500
        assert bad.error == "the model gave no valid score for this request"


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_given_up_with_its_worker(path):
    with serving(path, "--timeout", "0.5") as server:
        [worker] = server.workers
        answer = server.score(row(ENDLESS))
        assert answer.status == 504
        assert answer.error == "no answer within 0.5 s (--timeout)"
        wait_for(lambda: server.workers not in ([], [worker]))
        assert not is_alive(worker)
        assert server.score(row()).status == 200
        assert server.events("worker_hangs")


def test_a_stop_finishes_accepted_requests(path):
    with serving(path) as server, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.score, row(SLOW))
        wait_for(lambda: server.status["pending"] == 1)
        workers, copies = server.workers, list_copies(server)
        assert copies
        assert server.stop() == 0
        assert asked.result().status == 200
        with pytest.raises(ConnectionRefusedError):
            server.score(row())
        assert not any(map(is_alive, workers))
        assert not any(copy.exists() for copy in copies)


def list_copies(server):
    """Return the private copies of models that a server holds a lock on."""
    opened = [one.readlink() for one in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    return [path.parent for path in opened if path.parent.name.startswith("rarebit-serve-")]


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(path):
    with serving(path) as server, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.score, row(ENDLESS))
        wait_for(lambda: server.status["pending"] == 1)
        workers = server.workers
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: not can_connect(server))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        assert not any(map(is_alive, workers))
        with contextlib.suppress(OSError, HTTPException):
            assert asked.result().status == 500


def can_connect(server):
    with contextlib.suppress(OSError), socket.create_connection((server.host, server.port)):
        return True
    return False


@pytest.mark.slow
def test_what_a_killed_server_leaves_ends_or_is_removed(path):
    with serving(path, "--workers", "2") as server:
        workers, copies = server.workers, list_copies(server)
        assert len(workers) == 2
        server.process.kill()
        wait_for(lambda: not any(map(is_alive, workers)))
    copy = copies[0]
    assert copy.exists()
    with serving(path) as server:
        assert copy.exists()  # its lock may be a moment away
        os.utime(copy, (0, 0))
        [other] = list_copies(server)
        os.utime(other, (0, 0))
        with serving(path):  # the next server removes what is left, and nothing that is in use
            assert not copy.exists()
            assert other.exists()


def test_no_process_imports_torch(server):
    for process in (server.process.pid, *server.workers):
        assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()


def test_versions_change_under_load_and_no_scores_mix(path):
    biases, seen = {}, set()
    stop = threading.Event()

    def ask(server):
        found = []
        with contextlib.closing(server.connect()) as connection:
            while not stop.is_set():
                body = json.dumps(row(price := len(found) % 10)).encode()
                connection.request("POST", "/score", body, {"content-type": "application/json"})
                response = connection.getresponse()
                found.append((price, response.status, json.loads(response.read())))
                seen.add(found[-1][2]["version"])
        return found

    with serving(path) as server, ThreadPoolExecutor(4) as threads:
        biases[server.status["models"][0]["version"]] = 0.0
        asked = [threads.submit(ask, server) for _ in range(4)]
        try:
            for number in range(1, 4):
                write_file(path, bias=number / 2)
                answer = server.ask("POST", "/v2/repository/models/clicks/load", {})
                assert answer.status == 200, answer.body
                biases[answer.json["version"]] = number / 2
                wait_for(lambda: seen == set(biases))
        finally:
            stop.set()
        answers = [one for thread in asked for one in thread.result()]
        wait_for(lambda: len(server.status["models"][0]["workers"]) == 1)
    assert len(biases) == 4
    for price, status, body in answers:
        assert status == 200
        wanted = expected("ann", "a", price, biases[body["version"]])
        assert body["scores"] == pytest.approx([wanted], abs=1e-6)


@pytest.mark.slow
def test_an_old_version_finishes_its_requests(path):
    with serving(path) as server, ThreadPoolExecutor(1) as threads:
        old, workers = server.status["models"][0]["version"], server.workers
        asked = threads.submit(server.score, row(SLOW))
        wait_for(lambda: server.status["pending"] == 1)
        write_file(path, bias=1.0)
        assert server.ask("POST", "/v2/repository/models/clicks/load").status == 200
        assert server.score(row()).json["version"] != old
        assert asked.result().json["version"] == old
        wait_for(lambda: not any(map(is_alive, workers)))


def broken(path, kind):
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-300])
    elif kind == "nonsense":
        path.write_bytes(b"nonsense")
    elif kind == "gone":
        path.unlink()
    elif kind == "other scores":
        write_file(path, bias=0.5, stored_bias=0.0)
    elif kind == "newer format":
        write_file(path, facts={"format": 2})
    elif kind == "other columns":
        write_file(path, columns=[{"name": "usr", "kind": "categorical"}])
    elif kind == "an unknown kind":
        write_file(path, columns=[{"name": "user", "kind": "picture"}])
    elif kind == "no facts":
        write_file(path, with_facts=False)
    elif kind == "damaged facts":
        write_file(path, facts={"columns": 7})


REASONS = {
    "cut off": "ONNX Runtime cannot load it",
    "nonsense": "ONNX Runtime cannot load it",
    "gone": "does not exist; expected a .onnx file",
    "other scores": "its scores differ from those of the trained model by up to 0.12 on its 3 examples",
    "newer format": "it is of format 2; this version reads up to 1: upgrade rarebit",
    "other columns": "its inputs are not its columns; they differ in: price, tags, user, usr",
    "an unknown kind": "a column of unknown kind",
    "no facts": "it has no metadata of Rarebit; make it with rarebit export",
    "damaged facts": "its metadata is damaged",
}


@pytest.mark.parametrize("kinds", slow_after([["cut off", "other scores"], list(REASONS)]))
def test_a_version_that_fails_leaves_the_old_one(kinds, tmp_path):
    path = write_file(tmp_path / "clicks.onnx")
    good = path.read_bytes()
    with serving(path) as server:
        old, worker = server.status["models"][0]["version"], server.workers
        for kind in kinds:
            path.write_bytes(good)
            broken(path, kind)
            answer = server.ask("POST", "/v2/repository/models/clicks/load", {})
            assert answer.status == 400, kind
            assert REASONS[kind] in answer.error
            assert f"version '{old}' is still served" in answer.error
            assert server.score(row()).json["version"] == old
        assert server.workers == worker
        [entry] = server.ask("POST", "/v2/repository/index").json
        assert entry["state"] == "READY"
        # a worker that starts now has the old version, whatever is at the path
        os.kill(worker[0], signal.SIGKILL)
        wait_for(lambda: server.workers not in ([], worker))
        assert server.score(row()).json["version"] == old
        refused = server.ask(
            "POST", "/v2/repository/models/clicks/load", {"parameters": {"config": "x"}}
        )
        assert refused.status == 400
        assert "without parameters" in refused.error


@pytest.mark.slow
def test_a_folder_of_models_and_a_hangup_that_reloads_it(tmp_path):
    write_file(tmp_path / "clicks.onnx")
    for number in (2, 10):
        (tmp_path / "buys" / str(number)).mkdir(parents=True)
        write_file(tmp_path / "buys" / str(number) / "model.onnx", bias=float(number))
    (tmp_path / "README").write_text("no model")
    write_file(tmp_path / "Łódź 1.onnx")
    with serving(tmp_path) as server:
        answer = server.ask("POST", "/models/%C5%81%C3%B3d%C5%BA%201/score", row())
        assert answer.json["model"] == "Łódź 1"
        server.ask("POST", "/v2/repository/models/%C5%81%C3%B3d%C5%BA%201/unload")
        (tmp_path / "Łódź 1.onnx").unlink()
        answer = server.ask("POST", "/models/buys/score", row())
        assert answer.json["version"] == "10"
        assert answer.json["scores"] == pytest.approx([expected("ann", "a", 1, 10.0)], abs=1e-6)
        assert server.ask("POST", "/models/clicks/score", row()).status == 200
        refused = server.score(row())
        assert refused.status == 404
        assert refused.error == "this server has 2 models: buys, clicks; send to /models/NAME/score"
        (tmp_path / "buys" / "11").mkdir()
        write_file(tmp_path / "buys" / "11" / "model.onnx", bias=11.0)
        (tmp_path / "clicks.onnx").write_bytes(b"nonsense")
        write_file(tmp_path / "likes.onnx")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.ask("POST", "/models/likes/score", row()).status == 200)
        assert server.ask("POST", "/models/buys/score", row()).json["version"] == "11"
        assert server.ask("POST", "/models/clicks/score", row()).status == 200
        by_name = {one["name"]: one for one in server.ask("POST", "/v2/repository/index").json}
        assert "ONNX Runtime cannot load it" in by_name["clicks"]["reason"]


def test_a_token(path):
    with serving(path, environment={"RAREBIT_TOKEN": "secret"}) as server:
        assert server.ask("GET", "/v2/health/live").status == 200
        assert server.ask("GET", "/v2/health/ready").status == 200
        for method, where in (
            ("GET", "/"),
            ("GET", "/metrics"),
            ("POST", "/score"),
            ("GET", "/v2"),
        ):
            for header in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "secret"},
                {"authorization": "Basic x"},
            ):
                answer = server.ask(method, where, row() if method == "POST" else None, header)
                assert answer.status == 401
                assert "needs a token" in answer.error
        assert server.score(row(), authorization="Bearer secret").status == 200
        assert (
            server.ask("GET", "/", None, {"authorization": "Basic " + "dXNlcjpzZWNyZXQ="}).status
            == 200
        )
        status = server.ask("GET", "/status.json", None, {"authorization": "Bearer secret"}).json
        [worker] = status["models"][0]["workers"]
        assert b"RAREBIT_TOKEN" not in Path(f"/proc/{worker['pid']}/environ").read_bytes()


def run_serve(*words):
    return subprocess.run(
        [sys.executable, "-m", "rarebit", "serve", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "200"},
    )


def test_check_prints_a_request_and_its_answer(tmp_path):
    path = write_file(tmp_path / "clicks.onnx")
    done = run_serve(path, "--check", "--port", "8123")
    assert done.returncode == 0, done.stderr
    request, answer, verdict = done.stdout.strip().splitlines()
    assert request.startswith("curl http://127.0.0.1:8123/models/clicks/score ")
    assert len(json.loads(answer)["scores"]) == len(EXAMPLES["user"])
    assert "clicks: largest difference to the trained model" in verdict


@pytest.mark.slow
def test_check_fails_where_scores_differ(tmp_path):
    wrong = write_file(tmp_path / "wrong.onnx", bias=1.0, stored_bias=0.0)
    done = run_serve(wrong, "--check")
    assert done.returncode == 1
    assert "its scores differ from those of the trained model" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    slow_after(
        [
        (["nowhere.onnx"], "'nowhere.onnx' does not exist; expected a .onnx file, a run folder or a folder of models"),
        (["."], "'.' has no model; expected .onnx files, run folders or NAME/1/model.onnx"),
        (["x", "--workers", "0"], "workers must be at least 1, got workers=0"),
        (["x", "--port", "70000"], "port must lie in [0, 65535], got 70000"),
        (["x", "--token", "a b"], "the token must consist of visible ASCII characters"),
        ]
    ),
)  # fmt: skip
def test_a_wrong_start_ends_with_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_serve(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(server, clicks):
    done = run_serve(clicks, "--port", server.port)
    assert done.returncode == 2
    assert "choose another --host or --port" in done.stderr


def test_answers_are_sent_without_waiting_for_an_acknowledgement():
    from rarebit.serving.server import listen
    from rarebit.serving.settings import ServeSettings

    with listen(ServeSettings(port=0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
