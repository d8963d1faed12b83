"""Score a case with an exported file, in a process that has neither Rarebit nor the model: `python -I check.py FILE CASE OUT`.

CASE is JSON: the inputs by name, each with its type, shape and flat values. OUT gets the first output as JSON.
It is run as a program and imports nothing from Rarebit, so what it scores is what the file alone gives.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def score(file: Path, inputs: dict[str, Any]) -> Any:
    """Return the first output of an ONNX file or of a program of torch.export; of tables, the numbers of the rows."""
    if file.suffix == ".safetensors":
        import torch
        from safetensors.torch import load_file

        tables = load_file(file)
        rows = [
            torch.nn.Embedding.from_pretrained(tables[name])(torch.from_numpy(ids)).reshape(-1)
            for name, ids in inputs.items()
        ]
        return torch.cat(rows)
    if file.suffix == ".pt2":
        import torch

        program = torch.export.load(file).module()
        with torch.no_grad():
            return program(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    import onnxruntime  # type: ignore[import-untyped]  # it comes without types

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def main(file: str, case: str, out: str) -> None:
    """Read the case, score it, and write the scores."""
    described = json.loads(Path(case).read_text("utf-8"))
    inputs = {
        name: np.array(found["values"], dtype=found["dtype"]).reshape(found["shape"])
        for name, found in described.items()
    }
    scores = np.asarray(score(Path(file), inputs), dtype=np.float64)
    imported = [name for name in sys.modules if name.partition(".")[0] == "rarebit"]
    assert not imported, imported
    values = {"shape": scores.shape, "values": scores.reshape(-1).tolist()}
    Path(out).write_text(json.dumps(values), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
