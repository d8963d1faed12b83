"""From a data frame to scores over HTTP: train, export, serve, ask.

pip install 'rarebit[cli,data,export,serve]'
python examples/serve_and_query.py
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TextIO

import torch
from _shared import frequent_first

import rarebit as rb
from rarebit.models import build_model


def main() -> None:
    """Train a small model, serve it, and score one user with two items."""
    random = torch.Generator().manual_seed(0)
    user, item = (frequent_first(500, (4_000,), random) for _ in range(2))
    click = torch.bernoulli(torch.where(user % 2 == item % 2, 0.9, 0.1), generator=random)
    frame = {
        "user": [f"u{u}" for u in user.tolist()],
        "item": item.numpy(),
        "click": click.int().numpy(),
    }
    data = rb.Dataset.from_frame(frame, label="click")
    model = build_model("fm", data.schema, {"dim": 8})
    rb.fit(model, data, epochs=8, lr=1e-2, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clicks.onnx"
        rb.export(model, file)
        command = [sys.executable, "-m", "rarebit", "serve", str(file), "--port", "0"]
        with subprocess.Popen(  # noqa: S603  # our own command
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            try:
                print("scores", ask(server.stdout))
            finally:
                server.terminate()
                server.stdout.read()


def ask(log: TextIO) -> list[float]:
    """Return the scores of one user with two items, from the server that writes this log."""
    address = next(found[0] for line in log if (found := re.search(r"http://[\d.]+:\d+", line)))
    body = json.dumps({"user": {"user": "u1"}, "items": [{"item": 1}, {"item": 2}]})
    request = urllib.request.Request(  # noqa: S310  # our own server
        f"{address}/score", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310  # our own server
        return json.load(answer)["scores"]


if __name__ == "__main__":
    main()
