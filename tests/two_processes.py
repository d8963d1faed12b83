"""Stories that several processes train together, each written down by its process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def load_worker(path: Path):
    """Return the module of a worker, by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(path: Path, folder: Path, ranks: range) -> Path:
    """Run a worker in as many processes, which write to the folder; return the folder."""
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(path), str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return folder
