"""A model through Rarebit's `fit`.

Options are settings of `Training`, and `model`, DeepFM if not given, with its `model_settings`.
"""

import numpy as np
import torch
from _shared import Job, Recorder, read_job
from numpy.typing import NDArray

import rarebit as rb
from rarebit.models import build_model
from rarebit.models._base import RankingModel
from rarebit.training.fit import EpochRecord, Silence


class Clock(Silence):
    """Tells the recorder when an epoch begins and ends."""

    def __init__(
        self, recorder: Recorder, model: RankingModel, held_out: rb.Dataset, rows: int
    ) -> None:
        self.recorder, self.model, self.held_out, self.rows = recorder, model, held_out, rows

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:  # noqa: ARG002  # of fit
        """Start the clock."""
        self.recorder.start()

    def finish_epoch(self, record: EpochRecord) -> None:
        """Stop it, and score the held-out rows."""
        self.recorder.finish(record.train_loss, self.scores)

    def scores(self) -> NDArray[np.float32]:
        """Return the scores of the held-out rows."""
        scores = rb.predict(self.model, self.held_out, batch_size=self.rows)
        return scores.float().numpy()


def data(job: Job, part: str) -> rb.Dataset:
    """Return some rows as a data set."""
    ids, label = job.rows(part)
    schema = rb.data.Schema(
        tuple(rb.data.Field(name=name, rows=rows) for name, rows in job.fields.items())
    )
    return rb.Dataset(schema, ids, label=label)


def main() -> None:
    """Train and write the result."""
    job = read_job()
    train, recorder = data(job, "train"), Recorder(job.folder)
    options = dict(job.options)
    name = options.pop("model", "deepfm")
    sizes = {"dim": job.dim} | options.pop("model_settings", {"hidden": job.hidden})
    torch.manual_seed(0)
    model = build_model(name, train.schema, sizes)
    settings = {
        "epochs": job.epochs,
        "batch_size": job.batch_size,
        "optimizer": "adam",
        "lr": job.lr,
        "patience": None,
        **options,
    }
    clock = Clock(recorder, model, data(job, "held_out"), job.batch_size)
    rb.fit(model, train, settings=rb.Training(**settings), progress=clock)
    recorder.write({"model": model.settings, "fit": settings}, "torch", "numpy")


if __name__ == "__main__":
    main()
