"""Worker processes that make the runs of a study in parallel, and the progress that is reported.

Each process has a thread here that hands it tasks and reads its answers. Workers are in their own session, so
Ctrl-C reaches them only through the end of their input, the same as when this process is killed.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder that `rarebit` is imported from, so that workers import the same."""
ENDS = ("done", "diverged", "failed", "stopped")
"""Keys of the last answer to a task."""

Values: TypeAlias = Mapping[str, Any]
"""A task or an answer, as JSON holds it."""
Answers: TypeAlias = queue.SimpleQueue[tuple[str, Values] | None]
"""The answers of all workers with the keys of their tasks; None when a worker has no more to do."""


class Summary(Protocol):
    """The result of a run, as far as progress reports it."""

    @property
    def summary(self) -> str:
        """The result in a line."""


class StudyProgress:
    """Reports on a study. Override what you need; this class reports nothing."""

    def plan(self, runs: int, there: int) -> None:
        """Report how many runs a stage of the study has, and how many of them are finished already."""

    def start(self, name: str) -> None:
        """Report that a run starts."""

    def epoch(self, name: str, values: Values) -> None:
        """Report an epoch of a run: `epoch` of `epochs`, and `valid_auc`."""

    def finish(self, name: str, record: Summary) -> None:
        """Report the result of a run."""

    def fail(self, name: str, why: str) -> None:
        """Report that a run failed."""


class StudyLines(StudyProgress):
    """Prints one line per run to standard error."""

    def __init__(self) -> None:
        self.runs, self.done = 0, 0

    def plan(self, runs: int, there: int) -> None:
        self.runs, self.done = runs, there
        self.say(f"{runs} run{'s' if runs != 1 else ''}, {there} already finished")

    def finish(self, name: str, record: Summary) -> None:
        self.done += 1
        self.say(f"{self.done} of {self.runs}: {name}: {record.summary}")

    def fail(self, name: str, why: str) -> None:
        self.done += 1
        self.say(f"{self.done} of {self.runs}: {name} failed: {why}")

    def say(self, line: str) -> None:
        """Print a line."""
        sys.stderr.write(f"{line}\n")


class Pool:
    """Worker processes; leaving the `with` block ends them."""

    def __init__(
        self,
        workers: int,
        device: str,
        threads: int,
        program: Sequence[str] = ("-m", "rarebit.study.worker"),
    ) -> None:
        self.command = [sys.executable, *program, device, str(threads)]
        # workers find the modules that this process finds
        paths = filter(None, dict.fromkeys([str(PACKAGE), *sys.path]))
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
        self.environment = os.environ | variables
        self.workers = [_Worker(self) for _ in range(workers)]
        self.stopping = threading.Event()
        self.interrupted = False
        """Whether Ctrl-C was pressed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        for worker in self.workers:
            worker.wait(kill=kind is KeyboardInterrupt)

    def stop(self) -> None:
        """Ask active runs to stop after their step, and start no others."""
        self.stopping.set()
        for worker in self.workers:
            worker.close()

    def run(
        self,
        tasks: Mapping[str, Values],
        hear: Callable[[str, Values], None],
        deadline: float | None,
    ) -> None:
        """Make the runs; call `hear` in this thread with the key of a task and each answer to it.

        At the deadline, or on Ctrl-C, active runs are asked to stop; a second Ctrl-C is raised.
        """
        if deadline is not None and time.monotonic() >= deadline:
            self.stop()
        waiting, answers = deque(tasks.items()), Answers()
        workers = self.workers[: len(tasks)]
        for worker in workers:
            arguments = (worker, waiting, answers)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()
        num_active = len(workers)
        while num_active:
            try:
                answer = self._next(answers, deadline)
                if answer is None:
                    num_active -= 1
                else:
                    hear(*answer)
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self.stop()

    def _serve(
        self, worker: "_Worker", waiting: "deque[tuple[str, Values]]", answers: Answers
    ) -> None:
        """Hand tasks to one worker until there are none; a worker that died is started again."""
        try:
            while waiting and not self.stopping.is_set():
                with suppress(IndexError):  # another thread took the last one
                    key, task = waiting.popleft()
                    for answer in worker.make(task):
                        answers.put((key, answer))
        finally:
            answers.put(None)

    def _next(self, answers: Answers, deadline: float | None) -> tuple[str, Values] | None:
        if deadline is not None and not self.stopping.is_set():
            with suppress(queue.Empty):
                return answers.get(timeout=max(deadline - time.monotonic(), 0.0))
            self.stop()
        return answers.get()


class _Worker:
    """One process, started when it is first needed."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.process: subprocess.Popen[str] | None = None
        self.changing = threading.Lock()
        """Held while a process starts or its input ends, so that `Pool.stop` misses none."""

    def make(self, task: Values) -> Iterator[Values]:
        """Yield the answers of the process to a task, up to the last one; "died" is that of a dead process."""
        process = self._started()
        if process is None:
            yield {"stopped": True}
            return
        yield {"started": True}
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError, ValueError):  # it died, or was closed: its output ends, too
            process.stdin.write(json.dumps(dict(task)) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            yield answer
            if any(end in answer for end in ENDS):
                return
        code = process.wait()
        self.close()
        process.stdout.close()
        self.process = None
        yield {"stopped": True} if self.pool.stopping.is_set() else {"died": _reason(code)}

    def close(self) -> None:
        """End the input of the process."""
        with self.changing, suppress(BrokenPipeError):
            if self.process is not None and self.process.stdin is not None:
                self.process.stdin.close()

    def wait(self, *, kill: bool) -> None:
        """Wait until the process has ended."""
        if self.process is None:
            return
        if kill:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _started(self) -> "subprocess.Popen[str] | None":
        """Return the process; None where no more runs may start."""
        with self.changing:
            if self.pool.stopping.is_set():
                return None
            if self.process is None:
                self.process = subprocess.Popen(  # noqa: S603  # our own program
                    self.pool.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=self.pool.environment,
                    start_new_session=True,
                )
            return self.process


def _reason(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name
    hint = "; the system may have run out of memory: try fewer workers" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
