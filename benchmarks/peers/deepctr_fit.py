"""DeepFM through DeepCTR-Torch's `fit`. No options."""

from typing import Any

import numpy as np
import torch
from _shared import Recorder, read_job
from deepctr_torch.callbacks import Callback
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM


class Clock(Callback):
    """Tells the recorder when an epoch begins and ends."""

    def __init__(self, recorder: Recorder, held_out: dict[str, Any], rows: int) -> None:
        super().__init__()
        self.recorder, self.held_out, self.rows = recorder, held_out, rows

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  # of fit
        """Start the clock."""
        self.recorder.start()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:  # noqa: ARG002  # of fit
        """Stop it, and score the held-out rows."""
        self.recorder.finish(logs["loss"], self.scores)
        self.model.train()

    def scores(self) -> np.ndarray:
        """Return the scores of the held-out rows."""
        scores: np.ndarray = self.model.predict(self.held_out, batch_size=self.rows)
        return scores


def main() -> None:
    """Train and write the result."""
    job = read_job()
    recorder = Recorder(job.folder)
    columns, label = job.columns("train")
    features = [SparseFeat(name, rows, embedding_dim=job.dim) for name, rows in job.fields.items()]
    options = {
        "dnn_hidden_units": tuple(job.hidden),
        "dnn_dropout": 0,
        "dnn_use_bn": False,
        "l2_reg_linear": 0,
        "l2_reg_embedding": 0,
        "l2_reg_dnn": 0,
    }
    model = DeepFM(features, features, **options)
    adam = torch.optim.Adam(model.parameters(), lr=job.lr)
    model.compile(adam, "binary_crossentropy", metrics=[])
    fit = {"batch_size": job.batch_size, "epochs": job.epochs, "verbose": 0}
    clock = Clock(recorder, job.columns("held_out")[0], job.batch_size)
    model.fit(columns, label, callbacks=[clock], **fit)
    settings = {"model": options, "optimizer": f"torch.optim.Adam, lr={job.lr}", "fit": fit}
    recorder.write(settings, "deepctr-torch", "torch", "numpy")


if __name__ == "__main__":
    main()
