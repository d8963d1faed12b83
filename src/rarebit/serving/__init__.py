"""A scoring server for exported models: raw values in, scores out.

    client ─HTTP─► front ─────frames────► worker process ─► ONNX Runtime
                   front.py, pool.py      worker.py         scorer.py
                   limits, queue,         parse, batch,
                   restarts, hot swap     score, answer

The front keeps every request until a worker has answered it. A worker that dies is replaced, and its unanswered
requests are sent again. Neither process imports torch, unless a model can only be scored by torch.
"""

from pathlib import Path
from typing import Any

__all__ = ["serve"]


def serve(path: str | Path, **settings: Any) -> None:
    """Serve a file, a run folder or a folder of models until a signal stops the server.

    The settings are those of `rarebit.serving.settings.ServeSettings`.

    >>> serve("nowhere.onnx", port=0, workers=2)
    Traceback (most recent call last):
    rarebit.errors.ServingError: 'nowhere.onnx' does not exist; expected a .onnx file, ...
    """
    from rarebit.errors import import_extra
    from rarebit.serving.settings import ServeSettings

    for package in ("onnxruntime", "orjson", "starlette", "uvicorn"):
        import_extra(package, "serve", "serving")
    from rarebit.serving.server import run

    run(Path(path), ServeSettings(**settings))
