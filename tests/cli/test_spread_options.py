"""`rarebit train --engine` refuses in a sentence what several processes cannot do, before it needs TorchRec."""

import platform
import sys

import pytest
from typer.testing import CliRunner

from rarebit.cli.app import app
from rarebit.errors import RarebitError, TrainingError
from rarebit.sharding.sharded import require_torchrec


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "horovod", "--out", "run"], "--engine must be torchrec, got 'horovod'"),
        (["--engine", "torchrec"], "--engine needs --out: all processes use one folder"),
        (["--engine", "torchrec", "--out", "run", "--plan", "rows"], "--plan must be one of auto"),
    ],
)
def test_an_engine_that_cannot_run_is_refused(words, message):
    done = CliRunner().invoke(app, ["train", "--device", "cpu", *words])
    assert isinstance(done.exception, RarebitError | SystemExit)
    assert message in (str(done.exception) + done.output)


def test_an_engine_needs_torchrun():
    words = ["train", "--device", "cpu", "--engine", "torchrec", "--out", "run"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "several processes need torchrun, which starts them" in done.output


@pytest.mark.parametrize(
    ("machine", "message"),
    [("x86_64", "pip install --no-deps torchrec"), ("arm64", "its wheels are for Linux on x86-64")],
)
def test_a_missing_torchrec_is_named_with_what_to_do(monkeypatch, machine, message):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(TrainingError, match=f"needs the package 'fbgemm_gpu'.*{message}"):
        require_torchrec()
