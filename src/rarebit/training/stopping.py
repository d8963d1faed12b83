"""Ctrl-C and SIGTERM as a wish: the step is finished first, and what was learned can be saved.

The first signal is noted, and the loop looks at it between two steps. A second one stops at once:
`KeyboardInterrupt` for SIGINT, `SystemExit(143)` for SIGTERM.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequests", "stop_requests"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Whether a signal asked to stop, and which one was the first."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = int(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Take note of SIGINT and SIGTERM for the time of a `with` block, then handle them as before.

    Only the main thread can do so; in another one nothing is ever requested. A signal that is
    ignored stays ignored, as in a background job of a shell.
    """
    stop = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {number: signal.getsignal(number) for number in SIGNALS}
    # None is a handler that was not set from Python, which Python could not put back
    taken = [number for number in SIGNALS if old[number] not in (signal.SIG_IGN, None)]
    try:
        for number in taken:
            signal.signal(number, stop._note)  # noqa: SLF001  # of this module
        yield stop
    finally:
        for number in taken:
            signal.signal(number, old[number])
