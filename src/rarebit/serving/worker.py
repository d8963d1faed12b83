"""A process that scores the requests for one version of a model.

    python -m rarebit.serving.worker SOCKET

It reads its settings and then requests from a socket that it inherits, and answers on it. What is pending is scored as one batch. When
the socket ends, the front has stopped or was killed, and the process ends as well.
"""

import select
import signal
import socket
import sys
import time
import traceback
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from rarebit.errors import MissingExtraError, RarebitError, RequestError
from rarebit.serving import forms, open_inference
from rarebit.serving.columns import Arrays
from rarebit.serving.frames import Frame, Inbox, pack
from rarebit.serving.process import log, return_memory
from rarebit.serving.scorer import Scorer, Scores, load_scorer

BATCH_ROWS = 1024
"""A batch takes further requests until it has so many rows."""
READ = 1 << 20
WINDOW_BITS = {"gzip": 31, "deflate": 47}
"""For zlib: deflate is zlib's format, and some clients send gzip under that name."""


@dataclass
class Request:
    """A request that can be scored."""

    id: int
    rows: forms.Rows
    form: forms.Form | open_inference.Asked


class Worker:
    """Reads requests, scores what is pending, and answers."""

    def __init__(self, stream: socket.socket, settings: dict[str, Any], scorer: Scorer) -> None:
        self.stream, self.scorer = stream, scorer
        self.name, self.version = settings["name"], settings["version"]
        self.max_rows, self.max_bytes = settings["max_rows"], settings["max_bytes"]
        self.wait = settings["wait_ms"] / 1000
        deciles = scorer.facts.get("score_deciles")
        self.deciles = None if deciles is None else np.asarray(deciles, np.float32)
        self.inbox, self.pending = Inbox(), deque[Frame]()
        self.last_batch = 1
        """Requests in the last batch: more than one means that clients send in parallel."""

    def work(self) -> None:
        """Answer requests until the stream ends."""
        while self._receive(None):
            if self.wait and len(self.pending) < self.last_batch:
                end = time.monotonic() + self.wait
                while len(self.pending) < self.last_batch:
                    left = end - time.monotonic()
                    if left <= 0 or not self._receive(left):
                        break
            while self.pending:
                self._score_batch()
                self._receive(0.0)

    def _receive(self, seconds: float | None) -> bool:
        """Read what has arrived; wait for something so long. Return False at the end of the stream, or of the time."""
        if self.pending and seconds is None:
            return True
        while True:
            if seconds is not None and not select.select([self.stream], [], [], seconds)[0]:
                return False
            data = self.stream.recv(READ)
            if not data:
                return False
            frames = self.inbox.feed(data)
            self.pending.extend(frames)
            if frames or seconds is not None:
                return True

    def _score_batch(self) -> None:
        """Score as many pending requests as fit into a batch."""
        batch, rows = list[Request](), 0
        while self.pending and rows < BATCH_ROWS:
            request = self._parse(self.pending.popleft())
            if request is not None:
                batch.append(request)
                rows += request.rows.num_rows
        self.last_batch = max(len(batch), 1)
        if not batch:
            return
        start = time.perf_counter()
        scores = self._run([request.rows.arrays for request in batch])
        if scores is None and len(batch) > 1:  # one of them is at fault
            for request in batch:
                self._answer([request], self._run([request.rows.arrays]), start)
        else:
            self._answer(batch, scores, start)

    def _parse(self, frame: Frame) -> Request | None:
        """Return a request; None where it is refused, or too late."""
        header = frame.header
        if header["deadline"] < time.monotonic():
            self._send(header["id"], 504, b"", {})
            return None
        try:
            return self._read(header, inflate(frame.body, header["encoding"], self.max_bytes))
        except RequestError as error:
            self._refuse(header["id"], error.status, str(error))
        except MissingExtraError:
            message = "this server cannot read Arrow: pyarrow is not installed there"
            self._refuse(header["id"], 415, message)
        except Exception as error:  # noqa: BLE001  # whatever a request does, the worker continues
            self._failed(header["id"], error)
        return None

    def _read(self, header: dict[str, Any], body: bytes) -> Request:
        inputs = self.scorer.inputs
        if header["kind"] == "infer":
            rows, asked = open_inference.parse(
                body, header["json_length"], inputs, self.scorer.outputs, self.max_rows
            )
            return Request(header["id"], rows, asked)
        if isinstance(inputs, open_inference.IdSlots):
            raise RequestError(
                f"the model {self.name!r} takes ids, not rows; send tensors to "
                f"/v2/models/{self.name}/infer"
            )
        rows, form = forms.parse(body, header["type"], header["accept"], inputs, self.max_rows)
        return Request(header["id"], rows, form)

    def _run(self, arrays: list[Arrays]) -> Scores | None:
        """Return the scores of several requests at once; None where the model fails."""
        one = arrays[0]
        if len(arrays) > 1:
            one = {name: np.concatenate([array[name] for array in arrays]) for name in one}
        try:
            scores = self.scorer.run(one)
        except Exception:  # noqa: BLE001  # its errors have no common base
            log("model_failed", model=self.name, error=traceback.format_exc(limit=-3))
            return None
        return scores if np.isfinite(scores.score).all() else None

    def _answer(self, batch: list[Request], scores: Scores | None, start: float) -> None:
        if scores is None:
            for request in batch:
                self._refuse(request.id, 500, "the model gave no valid score for this request")
            return
        parts = [self._stats(batch, scores, start)]
        end = 0
        for request in batch:
            begin, end = end, end + request.rows.num_rows
            score = scores.score[begin:end]
            unknown = None if scores.unknown is None else scores.unknown[begin:end]
            parts.append(self._packed(request, score, unknown))
        self.stream.sendall(b"".join(parts))

    def _stats(self, batch: list[Request], scores: Scores, start: float) -> bytes:
        """Return a frame for the front's metrics."""
        stats: dict[str, Any] = {
            "requests": len(batch),
            "rows": len(scores.score),
            "seconds": time.perf_counter() - start,
        }
        if scores.unknown is not None:
            stats["unknown"] = scores.unknown.sum(axis=0).tolist()
        if self.deciles is not None:
            places = np.searchsorted(self.deciles, scores.score, side="right")
            stats["tenths"] = np.bincount(places, minlength=10).tolist()
        return pack({"stats": stats})

    def _packed(
        self, request: Request, score: NDArray[np.float32], unknown: NDArray[np.bool_] | None
    ) -> bytes:
        """Return the frame of an answer."""
        header: dict[str, Any] = {"id": request.id, "status": 200, "rows": request.rows.num_rows}
        if isinstance(request.form, forms.Form):
            header["type"] = request.form.answer
            names = {"rarebit-model": self.name, "rarebit-version": self.version}
            header["headers"] = {key: quote(name) for key, name in names.items()}
            return pack(header, forms.answer(request.form, score, self.name, self.version))
        found: dict[str, NDArray[Any]] = {"score": score}
        if unknown is not None:
            found["unknown"] = unknown
        body, length = open_inference.answer(request.form, found, self.name, self.version)
        header["type"] = forms.JSON
        if length is not None:
            header["type"] = "application/octet-stream"
            header["headers"] = {"inference-header-content-length": str(length)}
        return pack(header, body)

    def _failed(self, request: int, error: Exception) -> None:
        """Answer what nobody expected, without a stack trace; the log has it, without values."""
        places = traceback.extract_tb(error.__traceback__)[-3:]
        where = [f"{Path(place.filename).name}:{place.lineno}" for place in places]
        log("request_failed", model=self.name, error=type(error).__name__, where=where)
        self._refuse(request, 500, "the server could not read this request")

    def _refuse(self, request: int, status: int, message: str) -> None:
        self._send(request, status, orjson.dumps({"error": message}), {"type": forms.JSON})

    def _send(self, request: int, status: int, body: bytes, more: dict[str, Any]) -> None:
        self.stream.sendall(pack({"id": request, "status": status, **more}, body))


def inflate(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body as it was before it was compressed, bounded."""
    if encoding in ("", "identity"):
        return body
    if encoding not in WINDOW_BITS:
        raise RequestError(
            f"unknown content encoding {encoding!r}; expected gzip or deflate", status=415
        )
    decoder = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        found = decoder.decompress(body, most + 1)
        if len(found) > most:
            raise RequestError(
                f"the body has more than {most:,} bytes when decompressed (--max-bytes)", status=413
            )
        if not decoder.eof:
            raise RequestError("the compressed body is cut off")
    except zlib.error as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from None
    return found


def main(descriptor: str) -> None:
    """Load the model, say so, and work until the stream ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the front stops its workers
    return_memory()
    stream, inbox, frames = socket.socket(fileno=int(descriptor)), Inbox(), list[Frame]()
    with suppress(BrokenPipeError, ConnectionResetError), stream:
        while not frames:
            data = stream.recv(READ)
            if not data:
                return
            frames = inbox.feed(data)
        settings = frames[0].header
        try:
            scorer = load_scorer(Path(settings["path"]), settings["threads"])
        except RarebitError as error:
            stream.sendall(pack({"failed": str(error)}))
            return
        except Exception as error:  # noqa: BLE001  # the front reports it, and keeps what it serves
            stream.sendall(pack({"failed": f"{type(error).__name__}: {error}"}))
            return
        inputs, outputs = scorer.tensors()
        ready = {
            "inputs": inputs,
            "outputs": outputs,
            "platform": scorer.platform,
            "fields": scorer.fields,
            "takes_ids": isinstance(scorer.inputs, open_inference.IdSlots),
            "facts": scorer.facts,
        }
        stream.sendall(pack({"ready": ready}))
        Worker(stream, settings, scorer).work()


if __name__ == "__main__":
    main(*sys.argv[1:])
