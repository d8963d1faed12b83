"""A check that never fails is worth nothing: each is shown a model that breaks its promise."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from contract import model_checks as checks
from torch import Tensor, nn

import rarebit as rb
from rarebit.models._base import MLP, Backbone, FirstOrder, RankingModel


class Flat(nn.Module):
    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings.flatten(-2)


class Toy(RankingModel):
    """A small network; with a fault, it does something wrong."""

    def __init__(self, schema: rb.data.Schema, *, dim: int = 4, fault: str = "") -> None:
        super().__init__(
            schema,
            backbone=Backbone(schema, dim, Flat()),
            head=MLP(len(schema.fields) * dim, (16,)),
            wide=FirstOrder(schema),
            settings={"fault": fault} if fault == "rebuild" else {"dim": dim, "fault": fault},
        )
        self.fault = fault
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, batch: rb.data.Batch) -> Tensor:
        if self.fault == "every_field_counts" and "user" in batch.schema.slots:
            batch = without_first_number(batch)
        score = super().forward(batch) + self.extra.sum()
        faulty = getattr(self, "_" + self.fault.replace(": ", "_"), None)
        return score if faulty is None else faulty(score, batch)

    def _shape(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score.unsqueeze(1)

    def _single_row(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score.squeeze()

    def _gradients_parameter(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score - self.extra.sum()

    def _gradients_field(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score - self.wide.tables(batch.ids)[:, 0, 0]  # the first field's weights cancel

    def _batch_size(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score - score.mean()

    def _row_order(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score + 0.01 * torch.arange(len(score))

    def _padding(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        rows = self.backbone.tables._look_up(batch.ids)
        return score + rows.sum(dim=(1, 2))

    def _autocast(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score * (1.1 if torch.is_autocast_enabled("cpu") else 1.0)

    def _precision(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score.float()

    def _methods(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score + 0.01 * len(self.backbone.tables.stacks)

    def _cost(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        (weights,) = self.wide.tables.parameters()
        return score + (1e-9 * weights).sum()

    def _compile_breaks(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score if bool(score.sum() > 0) else -score  # looks at the data

    def _compile_differs(self, score: Tensor, batch: rb.data.Batch) -> Tensor:
        return score + (0.01 if torch.compiler.is_compiling() else 0.0)


def without_first_number(batch: rb.data.Batch) -> rb.data.Batch:
    numbers = batch.numeric.clone()
    numbers[:, :1] = 0.0
    return rb.data.Batch(batch.ids, numbers, batch.label, batch.schema)


# fault: part of the message of the check of that name
FAULTS: Mapping[str, str] = {
    "shape": r"the shape is \(24, 1\)",
    "single_row": r"the shape is \(\)",
    "gradients: parameter": "the gradient of extra is zero",
    "gradients: field": r"user: rows set\(\) get a gradient",
    "every_field_counts": "age does not count",
    "batch_size": "Tensor-likes are not close",
    "row_order": "Tensor-likes are not close",
    "padding": "Tensor-likes are not equal",
    "rebuild": "the settings do not say all",
    "autocast": "Tensor-likes are not close",
    "precision": "scores are torch.float32",
    "methods": "Tensor-likes are not close",
    "cost": r"mul.Tensor \(20000, 1\)",
    "compile: breaks": "it does not compile",
    "compile: differs": "Tensor-likes are not close",
}


def maker(**settings: Any) -> checks.Make:
    return partial(Toy, **{"dim": 6} | settings)


def run(check: str, make: checks.Make) -> None:
    checks.all_checks()[f"check_{check}"](make)


def test_every_check_is_shown_a_fault():
    names = {f"check_{fault.partition(':')[0]}" for fault in FAULTS}
    assert names == set(checks.all_checks())


@pytest.mark.parametrize("check", checks.all_checks())
def test_a_right_toy_passes(check):
    checks.all_checks()[check](maker())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_toy_with_a_fault_is_rejected(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        run(fault.partition(":")[0], maker(fault=fault))


def test_a_model_that_mixes_the_rows_of_a_batch_is_rejected_twice():
    with pytest.raises(AssertionError, match="user: other rows change too"):
        run("every_field_counts", maker(fault="batch_size"))
