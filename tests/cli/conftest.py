"""A command of `rarebit`, called in this process as a user would call it."""

import sys

import pytest

from rarebit.__main__ import main
from rarebit.cli import screen


@pytest.fixture
def call(monkeypatch, capsys, tmp_path, request):
    """Run a command in a folder of its own; return exit code, standard output and error.

    The terminal is as wide as the module's `COLUMNS` says, 200 where it says nothing.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", getattr(request.module, "COLUMNS", "200"))
    for console in (screen.console, screen.errors):
        monkeypatch.setattr(console, "_width", None)  # rich keeps what COLUMNS was at its import
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a command keeps the threads of this process

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rarebit", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run
