"""Run the notebooks in examples/ and store their outputs, or check them.

    python tools/notebooks.py            run every notebook, and write its outputs anew
    python tools/notebooks.py --check    change nothing; fail if an output differs in more than its numbers

No Jupyter is needed: the code cells of a notebook run in one process and one empty folder, and print text.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"-?\d[\d.,]*(?:e-?\d+)?")


def main() -> None:
    """Write the outputs, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only fail if an output differs")
    check = parser.parse_args().check
    torch.set_num_threads(1)  # small models: more threads take more time
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        stored = path.read_text("utf-8")
        new = as_text(executed(json.loads(stored)))
        if not check:
            path.write_text(new, encoding="utf-8")
        elif NUMBER.sub("0", new) != NUMBER.sub("0", stored):
            sys.exit(f"{path.name} has other outputs: run python tools/notebooks.py")


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its code, which prints all that it shows."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                code = compile("".join(cell["source"]), f"cell {number}", "exec")
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(code, namespace)  # noqa: S102  # our own pages
                lines = printed.getvalue().splitlines(keepends=True)
                output = {"name": "stdout", "output_type": "stream", "text": lines}
                cell |= {"execution_count": number, "outputs": [output] if lines else []}
    return notebook


def as_text(notebook: dict[str, Any]) -> str:
    """Return the file of a notebook, as Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    main()
