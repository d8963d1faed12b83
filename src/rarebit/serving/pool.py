"""Worker processes and the requests they have not answered yet.

    Model ── current ──► Version ── workers ──► WorkerProcess ── waiting for an answer ──► Pending
                 └ load: a new Version is started and checked, then it is current; the old one finishes its requests

A request that was accepted is kept until it is answered. When a worker dies, its requests become suspects: they are
sent again, one at a time, to a worker that has nothing else to do. The request that is alone with the second death
caused it, and fails. So one request that kills workers takes no other with it.
"""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rarebit.errors import RarebitError, ServingError
from rarebit.serving.frames import Frame, Inbox, pack
from rarebit.serving.metrics import ModelMetrics, VersionMetrics
from rarebit.serving.process import log
from rarebit.serving.repository import (
    PrivateFolder,
    Snapshot,
    Source,
    environment,
    find_source,
    find_sources,
    take_snapshot,
)
from rarebit.serving.settings import ServeSettings
from rarebit.settings import suggest

READ = 1 << 18
MOST_DEATHS = 2
"""A request fails when so many workers died with it."""
LONGEST_PAUSE = 10.0
"""Seconds before another worker is started, after several that died while they loaded."""
GRACE = 5.0
"""Seconds that a worker has to end."""


@dataclass(eq=False)
class Pending:
    """An accepted request."""

    id: int
    header: dict[str, Any]
    body: bytes
    answer: asyncio.Future[Frame]
    deaths: int = 0


@dataclass(eq=False)
class WorkerProcess:
    """A worker process as the front sees it."""

    process: subprocess.Popen[bytes]
    writer: asyncio.StreamWriter
    unanswered: dict[int, Pending] = field(default_factory=dict)
    is_ready: bool = False
    is_alone: bool = False
    """Whether it has a suspect, and gets nothing else meanwhile."""
    heard: float = field(default_factory=time.monotonic)
    """When it last sent something."""

    def send(self, pending: Pending) -> None:
        """Send a request."""
        if not self.unanswered:
            self.heard = time.monotonic()
        self.unanswered[pending.id] = pending
        self.writer.write(pack(pending.header, pending.body))

    def kill(self) -> None:
        """End the process at once; the end of its stream does the rest."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)


class Version:
    """A version of a model: its workers and the requests that wait for one of them."""

    snapshot: Snapshot

    def __init__(self, name: str, settings: ServeSettings, metrics: ModelMetrics) -> None:
        self.name, self.settings, self.metrics = name, settings, metrics
        self.ready: dict[str, Any] = {}
        """What the first worker said about the model."""
        self.counts = VersionMetrics([], has_deciles=False)
        self.loaded = time.time()
        self.workers: list[WorkerProcess] = []
        self.waiting: deque[Pending] = deque()
        self.suspects: deque[Pending] = deque()
        self.is_retired = False
        self._readers: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def unanswered(self) -> int:
        """The requests that have no answer yet."""
        sent = sum(len(worker.unanswered) for worker in self.workers)
        return sent + len(self.waiting) + len(self.suspects)

    @property
    def is_ready(self) -> bool:
        """Whether a worker is there to answer."""
        return not self.is_retired and any(worker.is_ready for worker in self.workers)

    async def start(self, take: Callable[[], Snapshot]) -> None:
        """Start the workers, and wait until all have loaded and checked the model.

        The processes start, and import what they need, while the snapshot is taken.
        """
        processes: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        try:
            processes.extend(self._start_process() for _ in range(self.settings.workers))
            self.snapshot = await asyncio.to_thread(take)
        except BaseException:
            for process, stream in processes:
                stream.close()
                process.kill()
                process.wait()
            raise
        try:
            await asyncio.gather(*(self._start_worker(*one) for one in processes))
        except BaseException:
            await self.stop(at_once=True)
            raise

    def _start_process(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        """Start a worker process, which waits for its settings."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603  # our own module
                    [sys.executable, "-m", "rarebit.serving.worker", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the front
                )
            except OSError as error:
                ours.close()
                raise ServingError(f"cannot start a worker process: {error.strerror}") from None
        return process, ours

    async def _start_worker(self, process: "subprocess.Popen[bytes]", ours: socket.socket) -> None:
        """Let a worker process load the model, and wait until it is ready."""
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = WorkerProcess(process, writer)
        self.workers.append(worker)
        settings = {
            "path": str(self.snapshot.path),
            "name": self.name,
            "version": self.snapshot.version,
            "threads": self.settings.threads,
            "max_rows": self.settings.max_rows,
            "max_bytes": self.settings.max_bytes,
            "wait_ms": self.settings.wait_ms,
        }
        writer.write(pack(settings))
        inbox = Inbox()
        first: list[Frame] = []
        with suppress(ConnectionError):
            while not first and (data := await reader.read(READ)):
                first = inbox.feed(data)
        if not first or "failed" in first[0].header:
            await self._end(worker)
            code = process.returncode
            why = first[0].header["failed"] if first else f"a worker ended with code {code}"
            raise ServingError(f"{self.name!r} cannot be served: {why}")
        if not self.ready:
            self.ready = first[0].header["ready"]
            deciles = self.ready["facts"].get("score_deciles")
            self.counts = VersionMetrics(self.ready["fields"], has_deciles=deciles is not None)
        worker.is_ready = True
        log("worker_ready", model=self.name, version=self.snapshot.version, pid=process.pid)
        task = asyncio.create_task(self._read(worker, reader, inbox))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        self._send_waiting()

    async def _read(
        self, worker: WorkerProcess, reader: asyncio.StreamReader, inbox: Inbox
    ) -> None:
        """Hand out answers until the worker ends; then start another one, if it should not have ended."""
        with suppress(ConnectionError):
            while data := await reader.read(READ):
                worker.heard = time.monotonic()
                for frame in inbox.feed(data):
                    self._take(worker, frame)
                self._send_waiting()
        if self.is_retired and not self.unanswered:
            return  # it should end
        worker.is_ready = False
        unanswered = [one for one in worker.unanswered.values() if not one.answer.done()]
        worker.unanswered.clear()
        for (
            pending
        ) in unanswered:  # before anything else happens, so that nobody takes them for answered
            self._suspect(pending)
        await self._end(worker)
        log(
            "worker_died",
            model=self.name,
            pid=worker.process.pid,
            code=worker.process.returncode,
            unanswered=len(unanswered),
        )
        self.metrics.restarts += 1
        await self._replace()

    def _suspect(self, pending: Pending) -> None:
        """Send a request again, alone, or give it up."""
        pending.deaths += 1
        if pending.deaths >= MOST_DEATHS:
            body = orjson.dumps(
                {"error": "the worker process ended twice while it scored this request"}
            )
            header = {"id": pending.id, "status": 500, "type": "application/json"}
            pending.answer.set_result(Frame(header, body))
        else:
            self.suspects.append(pending)

    async def _replace(self) -> None:
        """Start a worker in place of one that died; pause longer each time that it does not start."""
        for attempt in itertools.count():
            if self.is_retired and not self.unanswered:
                self._check_end()
                return
            try:
                await self._start_worker(*self._start_process())
            except ServingError as error:
                log("worker_not_started", model=self.name, error=str(error))
                await asyncio.sleep(min(0.1 * 2**attempt, LONGEST_PAUSE))
            else:
                self._check_end()
                return

    def _take(self, worker: WorkerProcess, frame: Frame) -> None:
        """Hand out an answer, or count a batch."""
        if "stats" in frame.header:
            stats = frame.header["stats"]
            self.metrics.count_batch(stats["rows"])
            self.counts.add(stats)
            return
        pending = worker.unanswered.pop(frame.header["id"])
        worker.is_alone = False
        if not pending.answer.done():
            pending.answer.set_result(frame)

    def ask(self, pending: Pending) -> None:
        """Send a request to the worker that has the fewest, or let it wait for one."""
        self.waiting.append(pending)
        self._send_waiting()

    def _send_waiting(self) -> None:
        ready = [worker for worker in self.workers if worker.is_ready]
        for worker in ready:
            while self.suspects and not worker.unanswered:
                suspect = self.suspects.popleft()
                if not suspect.answer.done():
                    worker.is_alone = True
                    worker.send(suspect)
        free = [worker for worker in ready if not worker.is_alone]
        while free and self.waiting:
            pending = self.waiting.popleft()
            if not pending.answer.done():
                min(free, key=lambda worker: len(worker.unanswered)).send(pending)
        self._check_end()

    def forget(self, pending: Pending) -> None:
        """Handle a request whose time is over; a worker that answers nothing any more is replaced."""
        for waiting in (self.waiting, self.suspects):
            with suppress(ValueError):
                waiting.remove(pending)
        limit = time.monotonic() - self.settings.timeout
        for worker in self.workers:
            if pending.id in worker.unanswered and worker.heard < limit:
                log("worker_hangs", model=self.name, pid=worker.process.pid)
                worker.kill()
        self._check_end()

    async def _end(self, worker: WorkerProcess) -> None:
        """Close the stream of a worker and wait for its process."""
        worker.writer.close()
        if worker in self.workers:
            self.workers.remove(worker)
        try:
            await asyncio.wait_for(asyncio.to_thread(worker.process.wait, GRACE), GRACE + 1)
        except (subprocess.TimeoutExpired, TimeoutError):
            worker.kill()
            await asyncio.to_thread(worker.process.wait)

    def retire(self) -> None:
        """Stop when all requests are answered."""
        self.is_retired = True
        self._check_end()

    def _check_end(self) -> None:
        if self.is_retired and not self.unanswered:
            for worker in self.workers:
                worker.writer.close()
            self._ended.set()

    async def finish(self) -> None:
        """Wait until all requests are answered, and stop the workers."""
        self.retire()
        await self._ended.wait()
        await self.stop()

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop the workers, and delete the copy of the model."""
        self.is_retired = True
        if at_once:
            for worker in self.workers:
                worker.kill()
        for task in tuple(self._readers):
            task.cancel()
        await asyncio.gather(*(self._end(worker) for worker in tuple(self.workers)))
        self.snapshot.folder.remove()


class Model:
    """A model by its name: the version that is served."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.current: Version | None = None
        self.metrics = ModelMetrics()
        self.problem = ""
        """Why the last version could not be loaded."""


class Models:
    """All models of a server."""

    def __init__(self, path: Path, settings: ServeSettings) -> None:
        self.path, self.settings = path, settings
        self.by_name: dict[str, Model] = {}
        self._ids = itertools.count()
        self._loading = asyncio.Lock()
        self._finishing: dict[Version, asyncio.Task[None]] = {}
        """Old versions that still answer requests."""

    def __getitem__(self, name: str) -> Model:
        found = self.by_name.get(name)
        if found is None or found.current is None:
            names = [name for name, model in self.by_name.items() if model.current is not None]
            raise KeyError(f"no model {name[:100]!r}{suggest(name[:100], names)}")
        return found

    @property
    def is_ready(self) -> bool:
        """Whether every model has a worker that is ready."""
        versions = [model.current for model in self.by_name.values() if model.current is not None]
        return bool(versions) and all(version.is_ready for version in versions)

    async def start(self) -> None:
        """Load every model."""
        PrivateFolder.remove_leftovers()
        for source in find_sources(self.path).values():
            await self._load(source)

    async def load(self, name: str) -> Version:
        """Load a model anew: check the new version, switch to it, and let the old one finish."""
        return await self._load(await asyncio.to_thread(find_source, self.path, name))

    async def _load(self, source: Source) -> Version:
        async with self._loading:
            model = self.by_name.get(source.name) or Model(source.name)
            version = Version(source.name, self.settings, model.metrics)
            try:
                await version.start(lambda: take_snapshot(source))
            except RarebitError as error:
                model.problem = str(error)
                log("load_failed", model=source.name, error=str(error))
                raise
            self.by_name[source.name] = model
            snapshot = version.snapshot
            old, model.current, model.problem = model.current, version, ""
            if snapshot.note:
                log("eager", model=source.name, note=snapshot.note)
            log("loaded", model=source.name, version=snapshot.version, deltas=snapshot.deltas)
            if old is not None:
                model.metrics.swaps += 1
                self._finish(old)
            return version

    async def unload(self, name: str) -> None:
        """Stop serving a model."""
        async with self._loading:
            model = self[name]
            old, model.current = model.current, None
            if old is not None:
                self._finish(old)

    async def reload(self) -> None:
        """Load all models anew; those that fail keep their version."""
        try:
            sources = await asyncio.to_thread(find_sources, self.path)
        except RarebitError as error:
            log("reload_failed", error=str(error))
            return
        for source in sources.values():
            try:
                await self._load(source)
            except RarebitError:
                continue  # logged

    def _finish(self, version: Version) -> None:
        task = self._finishing[version] = asyncio.create_task(version.finish())
        task.add_done_callback(lambda _: self._finishing.pop(version, None))

    async def ask(self, version: Version, header: dict[str, Any], body: bytes) -> Frame | None:
        """Return the answer to a request, or None where it took too long."""
        loop = asyncio.get_running_loop()
        number, timeout = next(self._ids), self.settings.timeout
        header = {"id": number, "deadline": time.monotonic() + timeout, **header}
        pending = Pending(number, header, body, loop.create_future())
        version.ask(pending)
        timer = loop.call_later(timeout, pending.answer.cancel)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            pending.answer.cancel()
            version.forget(pending)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        finally:
            timer.cancel()

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop all workers."""
        versions = [model.current for model in self.by_name.values() if model.current is not None]
        for version, task in tuple(self._finishing.items()):
            task.cancel()
            versions.append(version)
        await asyncio.gather(*(version.stop(at_once=at_once) for version in versions))
