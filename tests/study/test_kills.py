"""Studies as real processes that are killed, interrupted, and resumed by the same command."""

import io
import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import rarebit as rb
from rarebit.study.plan import StudyPlan
from rarebit.study.runs import run_key
from rarebit.study.worker import _Tasks

SRC = Path(rb.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SRC), "COLUMNS": "200"}
PLAN = {
    "methods": "low-rank:rank=1",
    "control": "baseline",
    "model": [{"name": "fm", "dim": 4}],
    "data": {"rows": 3000},
    "training": {"epochs": 4, "batch_size": 64, "patience": 4, "lr": 0.003},
    "seeds": 3,
}
OPTIONS = [
    "compare", "--methods", "low-rank:rank=1", "--control", "baseline", "--model", "fm",
    "--set", "model.dim=4", "--set", "data.rows=3000", "--set", "training.patience=4",
    "--epochs", "4", "--batch-size", "64", "--lr", "0.003", "--seeds", "3", "--workers", "1",
    "--device", "cpu", "--out", "study",
]  # fmt: skip
PATIENCE = 120_000
"""Milliseconds that a process may take to end."""


def start(folder):
    """Start the study as a command; what it tells can be read from its standard error."""
    return subprocess.Popen(
        [sys.executable, "-m", "rarebit", *OPTIONS],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a shell does: Ctrl-C is for all of it
    )


def workers_of(process):
    """Return an open descriptor of each worker, which tells when it has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"rarebit.study.worker" in (path / "cmdline").read_bytes():
                found.append(os.pidfd_open(int(path.name)))
        except (OSError, ProcessLookupError):  # it has ended in the meantime
            continue
    return found


def assert_they_end(workers):
    for worker in workers:
        ended = select.poll()
        ended.register(worker, select.POLLIN)
        assert ended.poll(PATIENCE), "a worker stayed behind"
        os.close(worker)


def finish(folder):
    with start(folder) as process:
        told = process.stderr.read()
    assert process.returncode == 0, told
    return told


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, computed):
    """What the study computes when nothing stops it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    rb.study(folder, workers=1, device="cpu", progress=False, **PLAN)
    return computed(folder)


def kill(process):
    """Kill a study; return how many workers it had, which must all end by themselves."""
    workers = workers_of(process)
    process.kill()
    process.stderr.read()
    assert_they_end(workers)
    return len(workers)


def kill_at_random(folder, rng):
    """Kill a study some time after it has begun, whatever it is doing then, or after its end."""
    with start(folder) as process:
        assert "runs, " in process.stderr.readline()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(0.0, 4.0))
        return kill(process)


def kill_after_a_run(folder):
    with start(folder) as process:
        assert "runs, " in process.stderr.readline()
        assert ": AUC " in process.stderr.readline()
        return kill(process)


def interrupt_after_a_run(folder):
    """Press Ctrl-C; return the exit code and what was told from then on."""
    with start(folder) as process:
        assert "runs, " in process.stderr.readline()
        assert ": AUC " in process.stderr.readline()
        workers = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)
        told = process.stderr.read()
    assert_they_end(workers)
    return process.returncode, told


@pytest.mark.slow
def test_a_study_that_is_killed_and_interrupted_ends_with_the_same_numbers(
    tmp_path, undisturbed, computed, runs_made
):
    kill_at_random(tmp_path, random.Random(4))  # noqa: S311  # moments, not secrets
    assert kill_after_a_run(tmp_path) == 1
    code, told = interrupt_after_a_run(tmp_path)
    assert code == 130, told
    assert "Traceback" not in told
    [line] = [line for line in told.splitlines() if line.startswith("rarebit: ")]
    start, _, resume = line.partition("; to resume: ")
    assert start.endswith("are saved in 'study'")
    assert shlex.split(resume)[1:] == OPTIONS
    written = json.loads((tmp_path / "study" / "results.json").read_text())["study"]
    assert written["cells"][0]["missing"]
    there = len(list((tmp_path / "study").glob("runs/*/result.json")))
    assert there >= 2
    finish(tmp_path)
    assert runs_made(tmp_path / "study") == 6 - there
    assert computed(tmp_path / "study") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_often_killed_studies_end_with_the_same_numbers(tmp_path, seed, undisturbed, computed):
    rng = random.Random(seed)  # noqa: S311  # moments, not secrets
    assert kill_after_a_run(tmp_path) == 1
    for _ in range(5):
        kill_at_random(tmp_path, rng)
    finish(tmp_path)
    assert computed(tmp_path / "study") == undisturbed


def worker():
    return subprocess.Popen(
        [sys.executable, "-m", "rarebit.study.worker", "cpu", "1"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def task(folder, **training):
    [settings] = StudyPlan.from_mapping(PLAN | {"training": training}).runs
    values = {"folder": str(folder), "settings": settings.to_mapping(), "keep_model": False}
    return json.dumps(values) + "\n", folder / "runs" / run_key(settings)


@pytest.mark.slow
def test_a_worker_begins_nothing_when_its_input_has_ended(tmp_path):
    text, folder = task(tmp_path, epochs=1)
    with worker() as process:
        answers, _ = process.communicate(text)  # long before it has started
    assert "done" not in answers
    assert not (folder / "result.json").exists()


def test_tasks_that_wait_are_not_begun_when_the_input_has_ended():
    tasks = _Tasks(io.StringIO("one\ntwo\n"))
    tasks.reader.join()
    assert list(tasks) == []


@pytest.mark.slow
def test_a_worker_stops_after_its_step_when_its_input_ends(tmp_path):
    text, folder = task(tmp_path, epochs=100_000, patience=None)
    with worker() as process:
        process.stdin.write(text)
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["epoch"] == 1
        process.stdin.close()
        *_, last = process.stdout
    assert json.loads(last) == {"stopped": True}
    assert process.returncode == 1
    assert list((folder / "checkpoints").glob("at-*"))
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_a_run_whose_process_someone_else_stops_is_started_again(tmp_path, undisturbed, computed):
    with start(tmp_path) as process:
        assert "runs, " in process.stderr.readline()
        assert ": AUC " in process.stderr.readline()
        for worker in workers_of(process):
            signal.pidfd_send_signal(worker, signal.SIGTERM)
            os.close(worker)
        told = process.stderr.read()
    assert process.returncode == 0, told
    assert computed(tmp_path / "study") == undisturbed
