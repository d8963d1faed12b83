"""The front: HTTP, limits, the queue and the status page. Scoring happens in worker processes.

POST /score, /models/NAME/score                 the simple forms (forms.py)
POST /v2/models/NAME/infer, GET /v2, ...        the Open Inference Protocol (open_inference.py)
POST /v2/repository/models/NAME/load, ...       hot swap, as Triton has it
GET  /, /status.json, /metrics                  for people and for Prometheus
"""

import asyncio
import base64
import binascii
import hmac
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rarebit import __version__
from rarebit.errors import RarebitError
from rarebit.serving.metrics import ModelMetrics, drift, histogram_lines, prometheus
from rarebit.serving.pool import Model, Models, Version
from rarebit.serving.process import log
from rarebit.serving.settings import ServeSettings

JSON = "application/json"
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What needs no token."""
PENDING_BODIES = 8
"""Bodies of the maximum size that may be in memory at once."""
MOST_IGNORED = 1 << 26
"""Bytes of a body that are read and dropped after it is refused."""
PAGE = Path(__file__).with_name("status.html")
CUT_OFF = 499
"""Counted for a client that went away; it sees no answer."""


class Refused(HTTPException):
    """A request that is answered without a worker."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(status, message, headers)


def json_response(values: object, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(orjson.dumps(values), status, media_type=JSON)


class Front:
    """The routes of a server."""

    def __init__(self, models: Models, settings: ServeSettings) -> None:
        self.models, self.settings = models, settings
        self.started = time.time()
        self.pending = self.pending_bytes = 0
        self.strays = ModelMetrics()
        """Requests for no model."""
        self.page = PAGE.read_bytes()
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/", self.show_page, methods=get),
            Route("/status.json", self.show_status, methods=get),
            Route("/metrics", self.show_metrics, methods=get),
            Route("/score", self.score, methods=post),
            Route("/models/{name}/score", self.score, methods=post),
            Route("/v2", self.show_server, methods=get),
            Route("/v2/health/live", self.show_live, methods=get),
            Route("/v2/health/ready", self.show_ready, methods=get),
            *(Route(path, self.show_model, methods=get) for path in (model, version)),
            *(
                Route(f"{path}/ready", self.show_model_ready, methods=get)
                for path in (model, version)
            ),
            *(Route(f"{path}/infer", self.infer, methods=post) for path in (model, version)),
            Route("/v2/repository/index", self.show_index, methods=post),
            Route("/v2/repository/models/{name}/load", self.load, methods=post),
            Route("/v2/repository/models/{name}/unload", self.unload, methods=post),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: self._refuse,
            ClientDisconnect: self._cut_off,
            Exception: self._fail,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = guarded(app, settings.token) if settings.token else app

    # scoring

    async def score(self, request: Request) -> Response:
        """Score rows in one of the simple forms."""
        headers = request.headers
        found = {"type": headers.get("content-type", ""), "accept": headers.get("accept", "")}
        return await self._ask(request, {"kind": "score", **found})

    async def infer(self, request: Request) -> Response:
        """Score tensors of the Open Inference Protocol."""
        text = request.headers.get("inference-header-content-length")
        if text is not None and not text.isdecimal():
            raise Refused(
                400, f"Inference-Header-Content-Length must be a number, got {text[:20]!r}"
            )
        length = None if text is None else min(int(text), 1 << 40)
        return await self._ask(request, {"kind": "infer", "json_length": length})

    async def _ask(self, request: Request, header: dict[str, Any]) -> Response:
        """Read a request, let a worker answer it, and count it."""
        start, metrics, code = time.perf_counter(), self.strays, CUT_OFF
        try:
            model = self._model(request)
            metrics = model.metrics
            body = await self._read(request)
            try:
                version = self._version(model, request)
                header["encoding"] = request.headers.get("content-encoding", "").lower()
                response = await self._accept(version, header, body)
            finally:
                self.pending_bytes -= len(body)
        except HTTPException as error:
            code = error.status_code
            raise
        else:
            code = response.status_code
            return response
        finally:
            seconds = time.perf_counter() - start
            metrics.count_request(code, seconds)
            if self.settings.access_log:
                path = request.url.path
                log("request", path=path, code=code, ms=round(seconds * 1000, 2))

    async def _accept(self, version: Version, header: dict[str, Any], body: bytes) -> Response:
        if self.pending >= self.settings.queue:
            raise Refused(
                503, f"{self.pending} requests wait already (--queue); try again", retry_after="1"
            )
        self.pending += 1
        try:
            answer = await self.models.ask(version, header, body)
        finally:
            self.pending -= 1
        if answer is None or answer.header["status"] == 504:
            raise Refused(504, f"no answer within {self.settings.timeout:g} s (--timeout)")
        found = answer.header
        return Response(answer.body, found["status"], found.get("headers"), found["type"])

    async def _read(self, request: Request) -> bytes:
        """Return the body of a request, bounded in size and time; the caller frees its `pending_bytes`."""
        length = request.headers.get("content-length", "")
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self.settings.timeout):
                if length.isdecimal():
                    await self._check_size(int(length), request)
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    self.pending_bytes += len(chunk)
                    await self._check_size(size, request)
        except TimeoutError:
            self.pending_bytes -= size
            message = f"the body did not arrive within {self.settings.timeout:g} s (--timeout)"
            raise Refused(408, message, connection="close") from None
        except BaseException:
            self.pending_bytes -= size
            raise
        return b"".join(chunks)

    async def _check_size(self, size: int, request: Request) -> None:
        most = self.settings.max_bytes
        if self.pending_bytes > PENDING_BODIES * most:
            raise Refused(503, "too many large requests wait already; try again", retry_after="1")
        if size <= most:
            return
        if "expect" not in request.headers:  # a client that still sends would miss the answer
            ignored = 0
            while ignored <= MOST_IGNORED:
                message = await request.receive()
                ignored += len(message.get("body", b""))
                if not message.get("more_body"):
                    break
        text = f"the body has more than {most:,} bytes (--max-bytes)"
        raise Refused(413, text, connection="close")

    def _model(self, request: Request) -> Model:
        name = request.path_params.get("name")
        if name is None:
            names = [name for name, model in self.models.by_name.items() if model.current]
            if len(names) != 1:
                known = ", ".join(sorted(names)[:20]) or "none"
                message = (
                    f"this server has {len(names)} models: {known}; send to /models/NAME/score"
                )
                raise Refused(404, message)
            name = names[0]
        try:
            return self.models[name]
        except KeyError as error:
            raise Refused(404, error.args[0]) from None

    def _version(self, model: Model, request: Request) -> Version:
        """Return the version that is served now; a request may insist on one."""
        version, wanted = model.current, request.path_params.get("version")
        if version is None:
            raise Refused(404, f"the model {model.name!r} was unloaded")
        if wanted is not None and wanted != version.snapshot.version:
            raise Refused(
                404,
                f"the model {model.name!r} has no version {wanted[:100]!r}; "
                f"it is served as {version.snapshot.version!r}",
            )
        return version

    # what is served

    async def show_live(self, _: Request) -> Response:
        """Say that the server runs."""
        return json_response({"live": True})

    async def show_ready(self, _: Request) -> Response:
        """Say whether every model has a worker."""
        ready = self.models.is_ready
        return json_response({"ready": ready}, 200 if ready else 503)

    async def show_server(self, _: Request) -> Response:
        """Describe the server."""
        extensions = ["model_repository", "binary_tensor_data"]
        return json_response({"name": "rarebit", "version": __version__, "extensions": extensions})

    async def show_model(self, request: Request) -> Response:
        """Describe the inputs and outputs of a model."""
        model = self._model(request)
        version = self._version(model, request)
        found = version.ready
        return json_response(
            {
                "name": model.name,
                "versions": [version.snapshot.version],
                "platform": found["platform"],
                "inputs": found["inputs"],
                "outputs": found["outputs"],
            }
        )

    async def show_model_ready(self, request: Request) -> Response:
        """Say whether a model has a worker."""
        model = self._model(request)
        ready = self._version(model, request).is_ready
        return json_response({"name": model.name, "ready": ready}, 200 if ready else 503)

    # hot swap

    async def load(self, request: Request) -> Response:
        """Load a model anew and switch to it."""
        body = await self._read(request)
        self.pending_bytes -= len(body)
        try:
            parameters = orjson.loads(body or b"{}").get("parameters")
        except (ValueError, AttributeError):
            raise Refused(400, "the body must be a JSON object, or empty") from None
        if parameters:
            raise Refused(400, "models are loaded from the server's own path, without parameters")
        name = request.path_params["name"]
        try:
            version = await self.models.load(name)
        except RarebitError as error:
            served = self.models.by_name.get(name)
            kept = ""
            if served is not None and served.current is not None:
                kept = f"; version {served.current.snapshot.version!r} is still served"
            raise Refused(400, f"{error}{kept}") from None
        return json_response({"name": name, "version": version.snapshot.version})

    async def unload(self, request: Request) -> Response:
        """Stop serving a model; its requests are still answered."""
        await self.models.unload(self._model(request).name)
        return json_response({})

    async def show_index(self, _: Request) -> Response:
        """List the models."""
        found = [
            {
                "name": model.name,
                "version": model.current.snapshot.version if model.current else "",
                "state": "READY" if model.current and model.current.is_ready else "UNAVAILABLE",
                "reason": model.problem or ("" if model.current else "unloaded"),
            }
            for model in self.models.by_name.values()
        ]
        return json_response(found)

    # status

    async def show_page(self, _: Request) -> Response:
        """Return the status page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(self.page, headers=headers, media_type="text/html")

    async def show_status(self, _: Request) -> Response:
        """Return what the status page shows."""
        models = [
            self._status(model, model.current)
            for model in self.models.by_name.values()
            if model.current is not None
        ]
        return json_response(
            {
                "rarebit": __version__,
                "pid": os.getpid(),
                "started": self.started,
                "now": time.time(),
                "pending": self.pending,
                "queue": self.settings.queue,
                "strays": self.strays.codes.total(),
                "models": models,
            }
        )

    def _status(self, model: Model, version: Version) -> dict[str, Any]:
        metrics, counts, facts = model.metrics, version.counts, version.ready["facts"]
        requests = sum(metrics.codes.values())
        return {
            "name": model.name,
            "version": version.snapshot.version,
            "loaded": version.loaded,
            "bytes": version.snapshot.num_bytes,
            "deltas": version.snapshot.deltas,
            "note": version.snapshot.note,
            "problem": model.problem,
            "kind": facts.get("model"),
            "tables": facts.get("tables"),
            "vocabulary": facts.get("vocabulary"),
            "training": facts.get("training"),
            "columns": len(version.ready["inputs"]),
            "workers": [
                {
                    "pid": worker.process.pid,
                    "ready": worker.is_ready,
                    "unanswered": len(worker.unanswered),
                }
                for worker in version.workers
            ],
            "restarts": metrics.restarts,
            "swaps": metrics.swaps,
            "requests": requests,
            "errors": sum(count for code, count in metrics.codes.items() if code >= 400),
            "codes": {str(code): count for code, count in sorted(metrics.codes.items())},
            "rows": metrics.rows,
            "version_rows": counts.rows,
            "rows_per_second": round(metrics.rows_per_second(), 1),
            "p50": metrics.percentile(0.5),
            "p99": metrics.percentile(0.99),
            "unknown": [
                {"field": name, "share": found / counts.rows if counts.rows else 0.0}
                for name, found in zip(counts.fields, counts.unknown, strict=True)
            ],
            "drift": drift(counts.tenths),
        }

    async def show_metrics(self, _: Request) -> Response:
        """Return the metrics as Prometheus reads them."""
        text = prometheus(self._metrics())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _metrics(self) -> Iterator[tuple[str, str, str, Any]]:
        models = self.models.by_name
        served = [(name, model.current) for name, model in models.items() if model.current]
        counted = {"": self.strays, **{name: model.metrics for name, model in models.items()}}
        yield (
            "rarebit_requests_total",
            "counter",
            "Scoring requests by model and HTTP status; 499: the client went away.",
            [
                ({"model": name, "code": str(code)}, count)
                for name, one in counted.items()
                for code, count in sorted(one.codes.items())
            ],
        )
        for name, text, value in (
            ("rarebit_request_seconds", "Seconds from the first byte to the answer.", "latency"),
            ("rarebit_batch_rows", "Rows per batch.", "batches"),
        ):
            yield (
                name,
                "histogram",
                text,
                [
                    line
                    for key, model in models.items()
                    for line in histogram_lines({"model": key}, getattr(model.metrics, value))
                ],
            )
        for value, text in (
            ("rows", "Rows scored."),
            ("restarts", "Worker processes that died and were replaced."),
            ("swaps", "Versions that replaced an older one."),
        ):
            found = [
                ({"model": key}, getattr(model.metrics, value)) for key, model in models.items()
            ]
            name = "worker_restarts" if value == "restarts" else value
            yield f"rarebit_{name}_total", "counter", text, found
        yield (
            "rarebit_pending_requests",
            "gauge",
            "Requests without an answer.",
            [({}, self.pending)],
        )
        yield (
            "rarebit_unknown_rows_total",
            "counter",
            "Rows with a value that the vocabulary does not have, by field.",
            [
                ({"model": key, "version": version.snapshot.version, "field": field}, count)
                for key, version in served
                for field, count in zip(version.counts.fields, version.counts.unknown, strict=True)
            ],
        )
        yield (
            "rarebit_score_tenth_total",
            "counter",
            "Scores by the tenth of the scores at training that they fall into.",
            [
                ({"model": key, "version": version.snapshot.version, "tenth": str(tenth)}, count)
                for key, version in served
                for tenth, count in enumerate(version.counts.tenths or (), start=1)
            ],
        )
        yield (
            "rarebit_model_info",
            "gauge",
            "The version that is served.",
            [
                (
                    {
                        "model": key,
                        "version": version.snapshot.version,
                        "vocabulary": str(version.ready["facts"].get("vocabulary", "")),
                        "platform": version.ready["platform"],
                    },
                    1,
                )
                for key, version in served
            ],
        )

    # errors

    async def _refuse(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = {name.replace("_", "-"): value for name, value in (error.headers or {}).items()}
        body = orjson.dumps({"error": str(error.detail)})
        return Response(body, error.status_code, found, JSON)

    async def _fail(self, _: Request, __: Exception) -> Response:
        return json_response({"error": "the server failed; its log says why"}, 500)

    async def _cut_off(self, _: Request, __: Exception) -> Response:
        return Response(status_code=CUT_OFF)  # nobody reads it


def guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return an application that needs a token: as bearer token, or as password for browsers."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            found = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(_token_of(found), token.encode()):
                ask = 'Bearer, Basic realm="rarebit"'
                body = orjson.dumps(
                    {"error": "this server needs a token: Authorization: Bearer ..."}
                )
                response = Response(body, 401, {"www-authenticate": ask}, JSON)
                await response(scope, receive, send)
                return
        await app(scope, receive, send)

    return guard


def _token_of(header: bytes) -> bytes:
    kind, _, value = header.partition(b" ")
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return value.strip() if kind.lower() == b"bearer" else b""
