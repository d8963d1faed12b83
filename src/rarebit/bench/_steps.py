"""Ready training steps for benches of what is added to a step."""

from collections.abc import Iterator

import torch

from rarebit.bench.train import DIM, HIDDEN, LR, ROWS, sliced
from rarebit.data.dataset import Batch, Dataset
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.models.deepfm import DeepFM
from rarebit.training.optimizers import optimizer
from rarebit.training.step import TrainingStep

__all__ = ["NextStep", "lazy_deepfm"]

BATCH_SIZE = 1024


class NextStep:
    """A training step that gets its own batch: one call, one step."""

    def __init__(self, step: TrainingStep, data: Dataset, batches: Iterator[Batch]) -> None:
        self.step, self.data, self.batches = step, data, batches

    def __call__(self) -> None:
        """Train on the next batch."""
        self.step(next(self.batches))


def lazy_deepfm(copies: int, rows: int = ROWS) -> list[NextStep]:
    """Return steps of DeepFM with lazy Adam at the shape of Criteo, all from the same weights."""
    data = generate(SyntheticLog(preset="criteo", rows=rows)).train
    steps = []
    for _ in range(copies):
        torch.manual_seed(0)
        model = DeepFM(data.schema, dim=DIM, hidden=HIDDEN)
        step = TrainingStep(model, optimizer(model, lr=LR, tables="rowwise"))
        steps.append(NextStep(step, data, sliced(data, BATCH_SIZE)))
    return steps
