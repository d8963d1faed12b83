"""How a study tells what it is doing.

Several worker processes that make the runs of a study side by side on one machine.

Each has a thread here that hands it tasks and reads its answers. Workers are in a session of their own,
so Ctrl-C reaches them only through the end of their input, the same as when this process is killed.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from rarebit.study.runs import RunRecord

__all__ = ["Answer", "Pool", "StudyLines", "StudyProgress", "StudySilence", "Task"]


class StudyProgress(Protocol):
    """What a study calls as it goes."""

    def plan(self, runs: int, there: int) -> None:
        """Tell how many runs a stage of the study has, and how many of them are there already."""

    def start(self, name: str) -> None:
        """Tell that a run begins."""

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        """Tell what an epoch of a run gave: its number, of how many, and the AUC on validation rows."""

    def finish(self, name: str, record: RunRecord) -> None:
        """Tell what a run gave."""

    def fail(self, name: str, why: str) -> None:
        """Tell that a run failed."""

    def say(self, line: str) -> None:
        """Tell something worth knowing."""


class StudySilence:
    """Tells nothing."""

    def plan(self, runs: int, there: int) -> None:
        """Tell nothing."""

    def start(self, name: str) -> None:
        """Tell nothing."""

    def epoch(self, name: str, values: Mapping[str, Any]) -> None:
        """Tell nothing."""

    def finish(self, name: str, record: RunRecord) -> None:
        """Tell nothing."""

    def fail(self, name: str, why: str) -> None:
        """Tell nothing."""

    def say(self, line: str) -> None:
        """Tell nothing."""


class StudyLines(StudySilence):
    """Prints a line a run to standard error."""

    def __init__(self) -> None:
        self.runs, self.done = 0, 0

    def plan(self, runs: int, there: int) -> None:
        """Print how many runs there are to make."""
        self.runs, self.done = runs, there
        self.say(f"{runs} run{'s' if runs != 1 else ''}, {there} of them there already")

    def finish(self, name: str, record: RunRecord) -> None:
        """Print what a run gave."""
        self.done += 1
        self.say(
            f"{self.done} of {self.runs}: {name}: AUC {record.auc:.4f}, on validation rows "
            f"{record.valid_auc:.4f} (epoch {record.best_epoch} of {record.epochs})"
        )

    def fail(self, name: str, why: str) -> None:
        """Print why a run failed."""
        self.done += 1
        self.say(f"{self.done} of {self.runs}: {name} failed: {why}")

    def say(self, line: str) -> None:
        """Print it."""
        sys.stderr.write(f"{line}\n")


PACKAGE = Path(__file__).resolve().parents[2]
"""The folder that `rarebit` is imported from, for workers to import the same."""
ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Task:
    """A run to make."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """Something a worker said of its task."""

    task: Task
    values: Mapping[str, Any]

    @property
    def is_last(self) -> bool:
        """Whether the task is over with it."""
        return any(end in self.values for end in ENDS)


Answers: TypeAlias = "queue.SimpleQueue[Answer | None]"
"""What all workers say, in one line; None: one of them has no more to do."""


class Pool:
    """Worker processes; leaving the `with` block ends them."""

    def __init__(self, workers: int, device: str, threads: int) -> None:
        self.command = [sys.executable, "-m", "rarebit.study.worker", device, str(threads)]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": str(threads),
        }
        self.workers = [_Worker(self) for _ in range(workers)]
        self.stopping = threading.Event()
        self.interrupted = False
        """Whether Ctrl-C asked to stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        for worker in self.workers:
            worker.wait(kill=isinstance(error, KeyboardInterrupt))

    def stop(self) -> None:
        """Ask the runs under way to stop after their step, and begin no others."""
        self.stopping.set()
        for worker in self.workers:
            worker.close()

    def run(
        self,
        tasks: Sequence[Task],
        hear: Callable[[Answer], None],
        *,
        deadline: float | None = None,
    ) -> None:
        """Make the runs; what the workers say is heard here, in this thread.

        From the deadline on, and from Ctrl-C on, runs under way are asked to stop; a second Ctrl-C is
        raised.
        """
        if deadline is not None and time.monotonic() >= deadline:
            self.stop()
        waiting, answers = deque(tasks), queue.SimpleQueue[Answer | None]()
        threads = [
            threading.Thread(target=self._serve, args=(worker, waiting, answers), daemon=True)
            for worker in self.workers[: len(tasks)]
        ]
        for thread in threads:
            thread.start()
        at_work = len(threads)
        while at_work:
            try:
                answer = self._next(answers, deadline)
                if answer is None:
                    at_work -= 1
                else:
                    hear(answer)
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self.stop()

    def _next(self, answers: Answers, deadline: float | None) -> Answer | None:
        if deadline is not None and not self.stopping.is_set():
            with suppress(queue.Empty):
                return answers.get(timeout=max(deadline - time.monotonic(), 0.0))
            self.stop()
        return answers.get()

    def _serve(self, worker: "_Worker", waiting: "deque[Task]", answers: Answers) -> None:
        """Hand tasks to one worker until there are none; a worker that died is started again."""
        try:
            while waiting and not self.stopping.is_set():
                with suppress(IndexError):  # another thread took the last one
                    task = waiting.popleft()
                    for values in worker.make(task):
                        answers.put(Answer(task, values))
        finally:
            answers.put(None)


class _Worker:
    """One process, started when it is first needed."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.process: subprocess.Popen[str] | None = None
        self.changing = threading.Lock()
        """Held while a process starts or its input ends: none starts unseen by who ends them all."""

    def make(self, task: Task) -> Iterator[Mapping[str, Any]]:
        """Yield what the process says of a task, up to its end."""
        process = self._process()
        if process is None:
            yield {"stopped": True}
            return
        yield {"started": True}
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError, ValueError):  # it died, or was closed: its output ends, too
            process.stdin.write(json.dumps(dict(task.values)) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = Answer(task, json.loads(line))
            yield answer.values
            if answer.is_last:
                return
        code = process.wait()
        self.close()
        process.stdout.close()
        self.process = None
        yield {"stopped": True} if self.pool.stopping.is_set() else {"failed": _why_it_died(code)}

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

    def _process(self) -> "subprocess.Popen[str] | None":
        """Return the process; None where no more runs are to begin."""
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


def _why_it_died(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name
    hint = "; the system may have run out of memory: try fewer workers" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
