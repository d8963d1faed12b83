"""A check that never fails is worth nothing: each is shown a method that breaks its promise."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from contract import method_checks as checks
from torch import Tensor, nn

import rarebit as rb
from rarebit.tables.collection import LoopStack, Stack
from rarebit.tables.table import AnyTable, full_table, plain_like


@dataclass(frozen=True, kw_only=True)
class Toy(rb.Method):
    """Stores half of each row and hands out twice of it; with a fault, it does something wrong."""

    fault: str = ""

    def wrap(self, base: AnyTable) -> rb.Table:
        return ToyTable(self, base)

    def stack(self, tables: Sequence[rb.Table], lengths: Sequence[int]) -> Stack:
        wrong = self.fault in ("stack", "stack: gradient")
        return ToyStack(self.fault, tables, lengths) if wrong else super().stack(tables, lengths)


class ToyTable(rb.Table):
    def __init__(self, method: Toy, base: AnyTable) -> None:
        half = full_table(base) / 2
        inner = plain_like(base, half.float() if method.fault == "dtype" else half)
        if method.fault == "frozen":
            inner.weight.requires_grad_(True)
        if method.fault == "sparse":
            inner.sparse = False
        rows, width = base.num_embeddings, base.embedding_dim
        if method.fault == "attributes":
            rows += 1
        padding = None if method.fault == "padding" else base.padding_idx
        super().__init__(
            method, inner, num_embeddings=rows, embedding_dim=width, padding_idx=padding
        )
        self.hidden = torch.rand(1) if method.fault == "state_dict" else 1.0
        if method.fault == "count":
            self.more = nn.Parameter(torch.zeros(3), requires_grad=inner.weight.requires_grad)

    @property
    def fault(self) -> str:
        assert isinstance(self.method, Toy)
        return self.method.fault

    def rows(self, ids: Tensor) -> Tensor:
        rows = 2 * self.inner(ids) * self.hidden
        if self.fault == "learns":
            return rows.detach()
        if self.fault == "touched_rows":
            return rows + 0.01 * self.inner.weight.mean()
        if self.fault == "cost":
            return (2 * self.inner.weight)[ids]
        return rows

    def forward(self, ids: Tensor) -> Tensor:
        if self.fault == "autocast":
            return self.inner(ids) @ (2 * torch.eye(self.embedding_dim, dtype=torch.float32))
        rows = super().forward(ids)
        if self.fault == "padding: gradient":
            leak = self.rows(ids)
            rows = rows + leak - leak.detach()
        if self.fault == "bags" and ids.dim() == 1:
            rows = rows[torch.arange(len(ids)).clamp(max=6)]
        return rows

    @property
    def weight(self) -> Tensor:
        return super().weight.detach() if self.fault == "weight" else super().weight

    def merge(self) -> nn.Embedding:
        merged = super().merge()
        if self.fault == "merge" or (self.fault == "merge_in_a_model" and self.num_embeddings == 9):
            merged.weight.data += 0.001
        return merged

    def train(self, mode: bool = True) -> "ToyTable":
        return self if self.fault == "mode" else super().train(mode)


class ToyStack(LoopStack):
    def __init__(self, fault: str, tables: Sequence[rb.Table], lengths: Sequence[int]) -> None:
        super().__init__(tables, lengths)
        self.fault = fault

    def rows(self, ids: Tensor) -> Tensor:
        rows = super().rows(ids)
        if self.fault == "stack":
            return 1.001 * rows
        return rows + 0.001 * (rows - rows.detach())


# fault: part of the message of the check of that name, or of the check named
FAULTS = {
    "attributes": "num_embeddings",
    "autocast": "rows are torch.bfloat16",
    "bags": "bag, weights: Tensor-likes are not close",
    "cost": r"mul.Tensor \(10000, 6\)",
    "count": "not the number that the formula says",
    "dtype": "not in the precision of the table",
    "frozen": "a weight is trained",
    "learns": "the loss goes from",
    "merge": "embedding: Tensor-likes are not close",
    "merge_in_a_model": "Tensor-likes are not close",
    "mode": "applying changed the mode",
    "padding": "the padding row is not zero",
    "sparse": "the gradient is dense",
    "stack": "rows: Tensor-likes are not close",
    "state_dict": "Tensor-likes are not equal",
    "touched_rows": "13 rows get a gradient for two ids",
    "weight": ".weight has no gradient",
    "padding: gradient": "padding gets a gradient",
    "stack: gradient": "gradients of user: Tensor-likes are not close",
}


def run(check: str, method: rb.Method) -> None:
    if check == "count":
        checks.check_count(method, stored=lambda rows, width: rows * width)
    else:
        checks.all_checks()[f"check_{check}"](method)


def all_names() -> set[str]:
    return {name.removeprefix("check_") for name in checks.all_checks()} | {"count"}


def test_every_check_is_shown_a_fault():
    assert {fault.partition(":")[0] for fault in FAULTS} == all_names()


@pytest.mark.parametrize("check", sorted(all_names()))
def test_a_right_toy_passes(check):
    run(check, Toy())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_toy_with_a_fault_is_rejected(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        run(fault.partition(":")[0], Toy(fault=fault))
