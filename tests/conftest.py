"""Setup for every test: seeds, threads, the slow tier, and a summary of what was not exercised."""

import random
import signal
from collections import Counter

import hypothesis
import numpy as np
import pytest
import torch
from capabilities import PREFIX, reason

# No deadline: a limit on wall-clock time fails at random on a busy machine.
hypothesis.settings.register_profile("rarebit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rarebit")


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason=reason("slow tests", "run them with --run-slow"))
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed():
    """Start every test from the same random state, so that the order of tests does not matter."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # libraries that still use the global state
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True, scope="session")
def foreground():
    """Receive Ctrl-C: a shell's background jobs ignore it, and so would every process they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def threads(request):
    """Use one torch thread: two workers share two cores, and sums keep a fixed order."""
    marker = request.node.get_closest_marker("threads")
    torch.set_num_threads(marker.args[0] if marker else 1)


def pytest_terminal_summary(terminalreporter):
    if not any(terminalreporter.stats.get(kind) for kind in ("passed", "failed", "skipped")):
        return
    terminalreporter.section("Capabilities not exercised in this run")
    skips = Counter(_why(report) for report in terminalreporter.stats.get("skipped", []))
    for why, count in sorted(skips.items()):
        terminalreporter.write_line(f"{why} ({count} test{'s' if count > 1 else ''})")
    if not skips:
        terminalreporter.write_line("none: of the tests selected, all capabilities exercised")


def _why(report):
    """Return the reason for a skip, as a worker or this process reported it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else str(report.longrepr)
    text = text.removeprefix("Skipped: ")
    if text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    return f"unnamed: {report.nodeid}: {text}"
