"""What every process of a server does: log events as lines of JSON, and return memory that it has freed."""

import ctypes
import sys
import time
from contextlib import suppress
from typing import Any

import orjson

MMAP_THRESHOLD, ARENA_MAX = -3, -8
"""Parameters of glibc's `mallopt`."""
LARGE = 1 << 17


def log(event: str, **fields: Any) -> None:
    """Write an event to standard error, as one line of JSON."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = orjson.dumps({"time": now, "event": event, **fields}, default=str)
    sys.stderr.write(line.decode() + "\n")
    sys.stderr.flush()


def return_memory() -> None:
    """Give large blocks back to the system when they are freed; glibc would keep more and more of them."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGE)
        libc.mallopt(ARENA_MAX, 2)
