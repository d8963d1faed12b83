"""A really killed process: a few of what `benchmarks/kills.py` does by the hundred."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "4", "--seed", "3"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["different"]) == (4, 0)
    assert "seed 3" in done.stderr
