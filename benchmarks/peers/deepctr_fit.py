"""A model through DeepCTR-Torch's `fit`.

Options: `model`, DeepFM with the network of the job if not given; `model_settings`, by its names, in
place of its defaults; `l2`, whether its L2 penalties of whole tables stay on.

DNN and FM are parts of its models: Wide & Deep without the wide part, DeepFM without the network. DCN and
PNN have no linear part here, as in their papers.
"""

import inspect
from typing import Any

import numpy as np
import torch
from _shared import Job, Recorder, read_job
from deepctr_torch.callbacks import Callback
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DCN, NFM, PNN, WDL, AutoInt, DeepFM, xDeepFM

CLASSES = {
    "autoint": AutoInt,
    "dcn": DCN,
    "dcn_v2": DCN,
    "deepfm": DeepFM,
    "dnn": WDL,
    "fm": DeepFM,
    "ipnn": PNN,
    "nfm": NFM,
    "wide_deep": WDL,
    "xdeepfm": xDeepFM,
}
WITHOUT_LINEAR_PART = ("dcn", "dcn_v2", "dnn")


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


def build(job: Job) -> tuple[Any, dict[str, Any]]:
    """Return the model that the job asks for, and what it was built with."""
    name = job.options.get("model", "deepfm")
    made = CLASSES[name]
    options = dict(job.options.get("model_settings", {"dnn_hidden_units": tuple(job.hidden)}))
    if not job.options.get("l2", False):
        names = inspect.signature(made).parameters
        options |= {penalty: 0 for penalty in names if penalty.startswith("l2_reg")}
    features = [SparseFeat(name, rows, embedding_dim=job.dim) for name, rows in job.fields.items()]
    if made is PNN:
        return made(features, **options), options
    return made([] if name in WITHOUT_LINEAR_PART else features, features, **options), options


def main() -> None:
    """Train and write the result."""
    job = read_job()
    recorder = Recorder(job.folder)
    columns, label = job.columns("train")
    model, options = build(job)
    adam = torch.optim.Adam(model.parameters(), lr=job.lr)
    model.compile(adam, "binary_crossentropy", metrics=[])
    fit = {"batch_size": job.batch_size, "epochs": job.epochs, "verbose": 0}
    clock = Clock(recorder, job.columns("held_out")[0], job.batch_size)
    model.fit(columns, label, callbacks=[clock], **fit)
    settings = {"model": options, "optimizer": f"torch.optim.Adam, lr={job.lr}", "fit": fit}
    recorder.write(settings, "deepctr-torch", "torch", "numpy")


if __name__ == "__main__":
    main()
