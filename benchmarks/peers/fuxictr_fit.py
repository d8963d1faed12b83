"""DeepFM through FuxiCTR's `fit`. Options: `data_format` and `num_workers` of its loader.

Its package holds layers, loaders and `fit` but not the models: DeepFM is put together here from its
own embedding, factorization machine and network.
"""

import json
from pathlib import Path
from typing import Any

import polars as pl
import torch
from _shared import Job, Recorder, read_job
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from numpy import int32, savez

LABEL = "label"


class DeepFM(BaseModel):
    """DeepFM; in place of an evaluation after each epoch it stops the recorder's clock."""

    def __init__(
        self, described: FeatureMap, job: Job, recorder: Recorder, held_out: Any, **options: Any
    ) -> None:
        super().__init__(described, **options)
        self.recorder, self.held_out, self.losses = recorder, held_out, []
        self.embedding = FeatureEmbedding(described, job.dim)
        self.machine = FactorizationMachine(described)
        self.network = MLP_Block(
            len(job.fields) * job.dim, job.hidden, output_dim=1, dropout_rates=0.0, batch_norm=False
        )
        self.compile("adam", "binary_crossentropy", job.lr)
        self.reset_parameters()

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the chance of a click of each row."""
        ids = self.get_inputs(inputs)
        fields = self.embedding(ids)  # (B, F, D)
        logit = self.machine(ids, fields) + self.network(fields.flatten(start_dim=1))
        return {"y_pred": self.output_activation(logit)}

    def train_step(self, batch_data: dict[str, torch.Tensor]) -> torch.Tensor:
        """Train on one batch and keep its loss, which `fit` only prints."""
        loss = super().train_step(batch_data)
        self.losses.append(loss.detach())
        return loss

    def train_epoch(self, data_generator: Any) -> None:
        """Start the clock and train."""
        self.recorder.start()
        super().train_epoch(data_generator)

    def eval_step(self) -> None:
        """Stop the clock, and score the held-out rows."""
        loss = torch.stack(self.losses).mean()
        self.recorder.finish(float(loss), lambda: self.predict(self.held_out))
        self.losses = []
        self.save_weights(self.checkpoint)  # the weights that fit ends with
        self.train()


def feature_map(job: Job) -> FeatureMap:
    """Describe the fields as FuxiCTR's preprocessing would."""
    spec = {"source": "", "type": "categorical"}
    features = [{name: spec | {"vocab_size": rows}} for name, rows in job.fields.items()]
    path = job.folder / "feature_map.json"
    path.write_text(json.dumps({"dataset_id": "log", "labels": [LABEL], "features": features}))
    described = FeatureMap("log", str(job.folder))
    described.load(str(path), {"embedding_dim": job.dim})
    return described


def write(job: Job, part: str, data_format: str) -> str:
    """Write the rows as the loader reads them: one array a field, all of them integers."""
    columns, label = job.columns(part)
    columns[LABEL] = label.astype(int32)
    path = str(job.folder / f"fuxictr_{part}.{data_format}")
    if data_format == "npz":
        savez(path, **columns)
    else:
        pl.DataFrame(columns).write_parquet(path)
    return path


def main() -> None:
    """Train and write the result."""
    job = read_job()
    recorder, described = Recorder(job.folder), feature_map(job)
    loader = {"batch_size": job.batch_size, "shuffle": True, **job.options}
    path = write(job, "train", job.options["data_format"])
    train, _ = RankDataLoader(described, stage="train", train_data=path, **loader)
    path = write(job, "held_out", "npz")  # its parquet loader may give the rows in another order
    held_out = RankDataLoader(
        described, stage="test", test_data=path, batch_size=job.batch_size, num_workers=0
    )
    torch.manual_seed(0)
    options = {"embedding_regularizer": None, "net_regularizer": None, "verbose": 0}
    needed = {"model_root": str(job.folder), "metrics": ["AUC"]}
    model = DeepFM(described, job, recorder, held_out, **options, **needed)
    Path(model.model_dir).mkdir(exist_ok=True)
    model.fit(train, epochs=job.epochs)
    settings = {
        "model": options | {"batch_norm": False, "dropout_rates": 0.0},
        "optimizer": f"torch.optim.Adam, lr={job.lr}",
        "loader": loader,
        "fit": {"epochs": job.epochs, "max_gradient_norm": 10},  # its default: it always clips
    }
    recorder.write(settings, "fuxictr", "polars", "torch", "numpy")


if __name__ == "__main__":
    main()
