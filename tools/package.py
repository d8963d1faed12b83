"""Build the wheel and the sdist, and use each from an empty folder, in an environment of its own.

    make package

There the README's Python, the help and a short run must work. The environment has the built package and nothing else;
torch and the other requirements are those of the Python that runs this.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MOST_BYTES = 2_000_000
"""Code and pages; a larger file would hold something that does not belong there."""


def main() -> None:
    """Build both, and try them."""
    for old in DIST.glob("rarebit-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        python = make_environment(Path(name))
        run(python, "-m", "pip", "install", "--quiet", "build")
        run(python, "-m", "build", "--outdir", str(DIST), str(ROOT))
    for pattern in ("rarebit-*.whl", "rarebit-*.tar.gz"):
        [built] = DIST.glob(pattern)
        if (size := built.stat().st_size) > MOST_BYTES and built.suffix == ".whl":
            sys.exit(f"{built.name} has {size:,} bytes; expected at most {MOST_BYTES:,}")
        with tempfile.TemporaryDirectory() as name:
            try_out(built, Path(name))
        print(f"{built.name}: {size:,} bytes; installed, and used from an empty folder")


def try_out(built: Path, folder: Path) -> None:
    """Install a file without its requirements, and use it where nothing of this checkout is."""
    page = (ROOT / "README.md").read_text("utf-8")
    [quickstart] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    python = make_environment(folder / "environment")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(built))
    empty = folder / "empty"
    empty.mkdir()
    inside = f"import rarebit, pathlib; assert pathlib.Path(rarebit.__file__).is_relative_to({str(folder)!r})"
    for words in (
        ("-c", inside),
        ("-c", quickstart),
        ("-m", "rarebit", "--help"),
        (
            "-m",
            "rarebit",
            "train",
            "--model",
            "fm",
            "--rows",
            "3000",
            "--epochs",
            "1",
            "--out",
            "run",
        ),
        ("-m", "rarebit", "compress", "run", "--size", "1/4", "--out", "smaller"),
    ):
        run(python, *words, cwd=empty)


def make_environment(folder: Path) -> str:
    """Return the Python of a new environment."""
    venv.create(folder, with_pip=True, symlinks=True)
    return str(folder / "bin/python")


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command, quietly where it succeeds."""
    others = sysconfig.get_path("purelib")  # of the Python that runs this
    environment = {**os.environ, "PYTHONPATH": others if cwd != ROOT else ""}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
