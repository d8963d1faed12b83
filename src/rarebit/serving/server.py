"""The process of a server: socket, signals, start and stop; and a server that is only tried.

The first SIGINT or SIGTERM ends the server when all accepted requests are answered, the second one at once. SIGHUP
loads all models anew.
"""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rarebit.errors import ServingError
from rarebit.serving.front import JSON, Front
from rarebit.serving.pool import Models, Version
from rarebit.serving.process import log, return_memory
from rarebit.serving.settings import ServeSettings


class _Bounded(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # uvicorn chooses the class when it is imported
    """Closes a connection whose request line and headers take too long."""

    seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._restart()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_idle and self._timer is None:
            self._restart()
        elif not self._is_idle:
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _restart(self) -> None:
        self._timer = self.loop.call_later(self.seconds, self._give_up)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._is_idle:
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    """A server that leaves the signals to us: it would end with the signal in place of code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LogHandler(logging.Handler):
    """Writes what uvicorn logs in our form."""

    def emit(self, record: logging.LogRecord) -> None:
        error = None
        if record.exc_info and record.exc_info[1] is not None:
            error = repr(record.exc_info[1])[:300]
        log("uvicorn", level=record.levelname.lower(), message=record.getMessage(), error=error)


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens, on the first address of the host where that is possible."""
    why = ""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in sorted(found):  # IPv4 first: most clients try it
            try:
                listener = socket.create_server(address[:2], family=family, backlog=2048)
            except OSError as error:
                why = error.strerror or str(error)
            else:
                # Inherited by every connection. asyncio sets it only on sockets that name their protocol, which this one
                # does not; without it an answer waits 40 ms for the client's acknowledgement.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return listener
    except OSError as error:
        why = error.strerror or str(error)
    raise ServingError(
        f"cannot listen on {settings.host}:{settings.port}: {why}; choose another --host or --port"
    )


def address_of(listener: socket.socket) -> str:
    """Return the address of a server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104  # it is read here
    return f"http://{host}:{port}"


async def run_server(
    path: Path,
    settings: ServeSettings,
    *,
    started: Callable[[Models, str], Awaitable[bool]],
) -> None:
    """Serve until a signal, or until `started` returns False. It gets the models and the address."""
    return_memory()
    listener = listen(settings)
    models = Models(path, settings)
    handler = _LogHandler(logging.WARNING)
    logger = logging.getLogger("uvicorn")
    logger.addHandler(handler)
    logger.propagate = False
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        Front(models, settings).app,
        lifespan="off",
        http=type("Bounded", (_Bounded,), {"seconds": settings.timeout}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(round(settings.timeout), 1),
    )
    server = _Uvicorn(config)

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    tasks: set[asyncio.Task[None]] = set()

    def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    if threading.current_thread() is threading.main_thread():
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: start_task(models.reload()))
    try:
        starting = start_task(models.start())
        while not starting.done():  # a signal may come first
            await asyncio.wait({starting}, timeout=0.1)
            if server.should_exit:
                starting.cancel()
        if starting.cancelled():
            return
        starting.result()
        serving = start_task(server.serve(sockets=[listener]))
        if not await started(models, address_of(listener)):
            server.should_exit = True
        await serving
    finally:
        logger.removeHandler(handler)
        listener.close()
        await models.stop(at_once=server.force_exit)
        log("stopped")


def run(path: Path, settings: ServeSettings) -> None:
    """Serve until a signal stops the server."""

    async def announce(models: Models, address: str) -> bool:
        for name, model in models.by_name.items():
            assert model.current is not None
            snapshot = model.current.snapshot
            sys.stdout.write(
                f"{name} (version {snapshot.version}){': ' if snapshot.note else ''}{snapshot.note}\n"
            )
        sys.stdout.write(f"Serving at {address}; status page: {address}/\n")
        sys.stdout.flush()
        return True

    asyncio.run(run_server(path, settings, started=announce))


class Checked(NamedTuple):
    """A request that a server was tried with, and its answer."""

    model: str
    path: str
    request: dict[str, Any]
    status: int
    answer: str
    difference: float | None
    """Largest difference to the stored scores; None where the file stores none."""


def check(path: Path, settings: ServeSettings) -> list[Checked]:
    """Start a server on a free port, send one request per model, and stop it."""
    found: list[Checked] = []

    async def ask(models: Models, address: str) -> bool:
        for name, model in models.by_name.items():
            assert model.current is not None
            found.append(
                await asyncio.to_thread(_try, name, model.current, address, settings.token)
            )
        return False

    asyncio.run(run_server(path, replace(settings, port=0), started=ask))
    return found


def _try(name: str, version: Version, address: str, token: str) -> Checked:
    """Send the stored examples of a model, or a row of missing values."""
    facts, stored = version.ready["facts"], None
    path, request = f"/models/{quote(name, safe='')}/score", dict[str, Any]()
    if version.ready["takes_ids"]:
        tensors = [
            {**one, "shape": [1, one["shape"][1]], "data": [0] * one["shape"][1]}
            for one in version.ready["inputs"]
        ]
        path, request = f"/v2/models/{quote(name, safe='')}/infer", {"inputs": tensors}
    elif facts.get("examples"):
        request, stored = {"columns": facts["examples"]["columns"]}, facts["examples"]["scores"]
    else:
        request = {"rows": [{one["name"]: None for one in version.ready["inputs"]}]}
    connection = HTTPConnection(address.removeprefix("http://"), timeout=60)
    headers = {"content-type": JSON, "authorization": f"Bearer {token}"}
    connection.request("POST", path, orjson.dumps(request), headers)
    response = connection.getresponse()
    text = response.read().decode()
    difference = None
    if stored is not None and response.status == 200:
        scores = orjson.loads(text)["scores"]
        difference = max(abs(a - b) for a, b in zip(scores, stored, strict=True))
    return Checked(name, path, request, response.status, text, difference)
