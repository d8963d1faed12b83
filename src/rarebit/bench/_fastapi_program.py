"""The reference of `bench serve`: a scoring server as one writes it by hand, with FastAPI and eager torch.

`python _fastapi_program.py MODEL --port N`. The values of each column are a dict. Pydantic does not check the rows: that would take
longer than the rest of the framework.
"""

import argparse
from typing import Any

import torch

import rarebit as rb
from rarebit.data.dataset import Batch
from rarebit.data.raw.encoder import encoder_of
from rarebit.models._base import RankingModel


def main(folder: str, port: int) -> None:
    """Load the model and serve it."""
    import uvicorn
    from fastapi import FastAPI, Request

    torch.set_num_threads(1)
    model = rb.load_model(folder).eval()
    assert isinstance(model, RankingModel)
    schema = model.schema
    vocabulary = {
        name: {text: number for number, text in enumerate(values.to_list(), start=3)}
        for name, values in encoder_of(model).values.items()
    }
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> dict[str, Any]:
        rows = (await request.json())["rows"]
        ids = [[known.get(row[name], 1) for name, known in vocabulary.items()] for row in rows]
        batch = Batch(torch.tensor(ids), torch.zeros(len(rows), 0), torch.zeros(0), schema)
        with torch.no_grad():
            return {"scores": model(batch).sigmoid().tolist()}

    uvicorn.run(app, port=port, log_level="error")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    arguments.add_argument("--port", type=int)
    given = arguments.parse_args()
    main(given.model, given.port)
