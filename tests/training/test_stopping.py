"""Stopping by real signals, sent to this process and to one of its own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from capabilities import slow_after

from rarebit.errors import RarebitError, TrainingInterrupted
from rarebit.training.checkpoints import stop_requests

BOTH = (signal.SIGINT, signal.SIGTERM)
SOURCES = Path(__file__).resolve().parents[2] / "src"


def send(number):
    os.kill(os.getpid(), number)


def handlers():
    return [signal.getsignal(number) for number in BOTH]


@pytest.fixture(autouse=True)
def own_handlers():
    """Handlers that fail, so that a signal which is not caught is seen."""

    def fail(number, frame):
        raise AssertionError(f"signal {number} reached the handler of before")

    old = handlers()
    for number in BOTH:
        signal.signal(number, fail)
    yield
    for number, handler in zip(BOTH, old, strict=True):
        signal.signal(number, handler)


def test_without_a_signal_nothing_is_requested():
    with stop_requests() as stop:
        assert (stop.requested, stop.signal) == (False, None)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_noted_and_the_loop_goes_on(number):
    steps = 0
    with stop_requests() as stop:
        while not stop.requested:
            steps += 1
            if steps == 3:
                send(number)
                steps += 10
        assert stop.signal == number
    assert steps == 13


@pytest.mark.parametrize("first", BOTH)
def test_a_second_ctrl_c_stops_at_once(first):
    with stop_requests() as stop:
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.signal == first


@pytest.mark.parametrize("first", BOTH)
def test_a_second_sigterm_exits_at_once(first):
    with stop_requests() as stop:
        send(first)
        with pytest.raises(SystemExit) as caught:
            send(signal.SIGTERM)
        assert caught.value.code == 143
        assert stop.signal == first


def test_the_handlers_of_before_come_back():
    before = handlers()
    with stop_requests():
        assert all(new != old for new, old in zip(handlers(), before, strict=True))
    assert handlers() == before


def test_the_handlers_of_before_come_back_after_an_error_and_a_second_signal():
    before = handlers()

    def interrupted(error):
        with stop_requests():
            send(signal.SIGINT)
            raise error

    for error in (ValueError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            interrupted(error)
        assert handlers() == before


def test_blocks_may_be_nested():
    with stop_requests() as outer:
        with stop_requests() as inner:
            send(signal.SIGINT)
        assert (inner.requested, outer.requested) == (True, False)
        send(signal.SIGTERM)
        assert outer.signal == signal.SIGTERM
        assert inner.signal == signal.SIGINT


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_requests() as stop:
        send(signal.SIGINT)
        assert not stop.requested
        send(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_another_thread_leaves_the_handlers_alone():
    before, seen = handlers(), []

    def work():
        with stop_requests() as stop:
            seen.append((handlers() == before, stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


LOOP = """
import sys
from rarebit.errors import TrainingInterrupted
from rarebit.training.checkpoints import stop_requests

try:
    with stop_requests() as stop:
        print("running", flush=True)
        while not stop.requested:
            pass
        print("finished the step", flush=True)
        if "twice" in sys.argv:
            while True:
                pass
        raise TrainingInterrupted("stopped", stop.signal)
except TrainingInterrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""


def start(*arguments):
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", LOOP, *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), slow_after([(signal.SIGINT, 130), (signal.SIGTERM, 143)])
)
def test_a_process_finishes_its_step_and_exits_with_the_code_of_the_signal(number, code):
    with start() as process:
        process.send_signal(number)
        output, errors = process.communicate()
    assert (output, errors) == ("finished the step\n", "")
    assert process.returncode == code


@pytest.mark.slow
def test_a_process_that_is_asked_twice_does_not_wait():
    with start("twice") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "finished the step\n"
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143


def test_the_error_knows_its_exit_code():
    error = TrainingInterrupted("stopped by Ctrl-C", signal.SIGINT)
    assert isinstance(error, RarebitError)
    assert (str(error), error.signal, error.exit_code) == ("stopped by Ctrl-C", 2, 130)
    assert TrainingInterrupted("", signal.SIGTERM).exit_code == 143
