"""`rarebit serve`: answer scoring requests over HTTP."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.errors import ServingError, import_extra

if TYPE_CHECKING:
    from rarebit.serving.settings import ServeSettings

LARGEST_DIFFERENCE = 1e-5


def serve(  # noqa: PLR0917  # typer calls it by name
    path: Annotated[
        Path,
        Argument(help="A .onnx file, a run folder, or a folder of models.", readable=False),
    ],
    host: Annotated[str, Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="The port; 0 for any free port, which is printed.")] = 8000,
    workers: Annotated[int, Option(help="Worker processes per model.")] = 1,
    threads: Annotated[int, Option(help="Threads of ONNX Runtime per worker.")] = 1,
    max_rows: Annotated[int, Option(help="Maximum rows per request.")] = 10_000,
    max_bytes: Annotated[int, Option(help="Maximum bytes of a request.")] = 16_000_000,
    wait_ms: Annotated[
        float, Option(help="Maximum milliseconds to wait for requests to score together.")
    ] = 1.0,
    timeout: Annotated[
        float, Option(help="Maximum seconds to read a request, and to answer it.")
    ] = 30.0,
    queue: Annotated[
        int, Option(help="Maximum requests that wait; further ones get status 503.")
    ] = 256,
    token: Annotated[
        str,
        Option(
            help="A token that every request needs.", envvar="RAREBIT_TOKEN", show_default=False
        ),
    ] = "",
    access_log: Annotated[bool, Option("--access-log", help="Log every request.")] = False,
    check: Annotated[
        bool, Option("--check", help="Send one request, print it with its answer, and stop.")
    ] = False,
) -> None:
    """Serve models over HTTP: raw values in, scores out."""
    for package in ("onnxruntime", "orjson", "starlette", "uvicorn"):
        import_extra(package, "serve", "serving")
    from rarebit.serving.server import run
    from rarebit.serving.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        workers=workers,
        threads=threads,
        max_rows=max_rows,
        max_bytes=max_bytes,
        wait_ms=wait_ms,
        timeout=timeout,
        queue=queue,
        token=token,
        access_log=access_log,
    )
    if check:
        raise Exit(_check(path, settings))
    run(path, settings)


def _check(path: Path, settings: "ServeSettings") -> int:
    """Print a request and its answer per model; return the exit code."""
    from rarebit.serving.server import check

    try:
        checked = check(path, settings)
    except ServingError as error:
        opt.stop(str(error), code=1)
    code = 0
    for found in checked:
        token = '-H "authorization: Bearer $RAREBIT_TOKEN" ' if settings.token else ""
        address = shlex.quote(f"http://{settings.host}:{settings.port}{found.path}")
        body = shlex.quote(json.dumps(found.request))
        screen.line(f"curl {address} {token}-H 'content-type: application/json' -d {body}")
        screen.line(found.answer)
        is_wrong = found.status != 200 or (found.difference or 0.0) > LARGEST_DIFFERENCE
        code = 1 if is_wrong else code
        if found.difference is None:
            screen.line(f"{found.model}: status {found.status}; no stored scores to compare with")
        else:
            verdict = "more than" if is_wrong else "at most"
            screen.line(
                f"{found.model}: largest difference to the trained model {found.difference:.1g}, "
                f"{verdict} {LARGEST_DIFFERENCE:g}"
            )
    return code
