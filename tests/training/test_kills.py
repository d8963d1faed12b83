"""Really killed processes, lost power and changed checkpoints: a few of what `benchmarks/faults.py` does by the hundred."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_faults_end_with_the_same_bits_or_a_refusal(tmp_path):
    wanted = {"kills": 6, "power-losses": 4, "checkpoints": 30}
    words = [str(word) for name, number in wanted.items() for word in (f"--{name}", number)]
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *words, "--seed", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "faults.json")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "faults.json").read_text("utf-8"))
    assert {name: result[name.replace("-", "_")] for name in wanted} == wanted
    assert result["wrong"] == 0
    assert "seed 3" in done.stderr
