"""A check that never fails is worth nothing: each is shown a method that breaks its promise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import rarebit as rb
from rarebit import testing as checks
from rarebit.errors import UnsupportedTableError
from rarebit.tables.collection import LoopStack, Stack
from rarebit.tables.table import AnyTable, full_table, grow_table, plain_like
from rarebit.technique import Technique


@dataclass(frozen=True, kw_only=True)
class Halved(rb.Method):
    """Stores half of each row and hands out twice of it; with a fault, it does something wrong."""

    fault: str = ""

    def wrap(self, base: AnyTable) -> rb.Table:
        return HalvedTable(self, base)

    def stack(self, tables: Sequence[rb.Table], lengths: Sequence[int]) -> Stack:
        wrong = self.fault in ("stack", "stack: gradient")
        return HalvedStack(self.fault, tables, lengths) if wrong else super().stack(tables, lengths)


class HalvedTable(rb.Table):
    def __init__(self, method: Halved, base: AnyTable) -> None:
        half = full_table(base) / 2
        inner = plain_like(base, half.float() if method.fault == "dtype" else half)
        if method.fault == "frozen":
            inner.weight.requires_grad_(True)
        if method.fault == "sparse":
            inner.sparse = False
        rows, width = base.num_embeddings, base.embedding_dim
        if method.fault == "attributes":
            rows -= 1
        padding = None if method.fault == "padding" else base.padding_idx
        super().__init__(
            method, inner, num_embeddings=rows, embedding_dim=width, padding_idx=padding
        )
        self.hidden = torch.rand(1) if method.fault == "state_dict" else 1.0
        if method.fault == "count":
            self.more = nn.Parameter(torch.zeros(3), requires_grad=inner.weight.requires_grad)

    @property
    def fault(self) -> str:
        assert isinstance(self.method, Halved)
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

    def grown(self, start: Tensor) -> "HalvedTable":
        if self.fault == "grows: refusal":
            raise UnsupportedTableError("it cannot grow")
        assert isinstance(self.method, Halved)
        larger = grow_table(super().merge(), start)
        if self.fault == "grows":
            larger.weight.data[5] += 0.001
        return HalvedTable(self.method, larger)

    def train(self, mode: bool = True) -> "HalvedTable":
        return self if self.fault == "mode" else super().train(mode)


class HalvedStack(LoopStack):
    def __init__(self, fault: str, tables: Sequence[rb.Table], lengths: Sequence[int]) -> None:
        super().__init__(tables, lengths)
        self.fault = fault

    def rows(self, ids: Tensor) -> Tensor:
        rows = super().rows(ids)
        if self.fault == "stack":
            return 1.001 * rows
        return rows + 0.001 * (rows - rows.detach())


class Nudging(rb.Callback):
    """Moves a weight a little after each step, by how many steps it has seen."""

    def __init__(self, fault: str) -> None:
        self.fault, self.steps = fault, 0

    def start(self, model: nn.Module, data: rb.callbacks.TrainingData) -> None:
        del data
        self.model, self.weight = model, next(model.parameters())
        self.hook = model.register_forward_hook(lambda *_: None)

    def after_step(self, num_steps: int) -> None:
        del num_steps
        self.steps += 1
        self.weight.data += 1e-4 * self.steps

    def report(self) -> dict[str, object]:
        return {"weight": self.weight.detach() if self.fault == "report" else self.steps}

    def state_dict(self) -> dict[str, object]:
        return {} if self.fault == "state" else {"steps": self.steps}

    def load_state_dict(self, state) -> None:
        self.steps = state.get("steps", 0)

    def close(self) -> None:
        if self.fault == "module":
            self.model.more = nn.Identity()
        if self.fault == "buffer":
            self.model.register_buffer("more", torch.zeros(1))
        if self.fault == "weights":
            self.weight.data += 1.0
        if self.fault != "hook":
            self.hook.remove()


@dataclass(frozen=True, kw_only=True)
class ToyTraining(rb.TrainingMethod):
    title = "a nudge"
    paper = "none"
    cost = "nothing"
    applies = "never"

    fault: str = ""

    def callback(self) -> rb.Callback:
        return Nudging(self.fault)


# check, fault of the toy: part of the message
FAULTS = {
    ("lookups", "attributes"): "num_embeddings changed",
    ("autocast", "autocast"): "rows are torch.bfloat16",
    ("lookups", "bags"): "bag, sum, pooled by torch: Tensor-likes are not close",
    ("cost", "cost"): r"mul.Tensor \(10000, 6\)",
    ("count", "count"): "not the number that the formula says",
    ("dtype", "dtype"): "not in the precision of the table",
    ("frozen", "frozen"): "a weight is trained",
    ("grows", "grows"): "bag, sum: old ids changed",
    ("grows", "grows: refusal"): "refuses to grow without advice",
    ("learns", "learns"): "the loss goes from",
    ("lookups", "merge"): "bag, sum, merged: Tensor-likes are not close",
    ("model", "merge_in_a_model"): "Tensor-likes are not close",
    ("mode_and_dtype", "mode"): "applying changed the mode",
    ("mode_and_dtype", "dtype"): "not in the precision of the model",
    ("padding", "padding"): "the padding row is not zero",
    ("padding", "padding: gradient"): "padding gets a gradient",
    ("resumes", "state"): "resumed, it has other weights",
    ("model", "state_dict"): "the loaded model scores otherwise",
    ("gradients", "sparse"): "the gradient is dense",
    ("stack", "stack"): "rows: Tensor-likes are not close",
    ("stack", "stack: gradient"): "gradients of user: Tensor-likes are not close",
    ("lookups", "state_dict"): "the state dict does not hold all of it",
    ("gradients", "touched_rows"): "13 rows get a gradient for two ids",
    ("trains", "buffer"): "it leaves weights behind",
    ("trains", "hook"): "it leaves hooks behind",
    ("trains", "module"): "it leaves modules behind",
    ("trains", "report"): "its report has more than plain values",
    ("trains", "weights"): "the best epoch was measured otherwise",
    ("weight", "weight"): ".weight has no gradient",
}
DECLARED = {"settings", "texts", "knobs", "rank", "share", "shape_after"}
"""Shown wrong toys in `test_declarations.py`, as compositions are."""


def checks_of(method: Technique) -> dict[str, Callable[[], None]]:
    found = dict(checks.method_checks(method))
    names = [name for name in found if name not in DECLARED and "composition" not in name]
    return {name: found[name] for name in names}


RIGHT = checks_of(Halved()) | checks_of(ToyTraining())


def test_every_check_is_shown_a_fault():
    assert {name for name, _ in FAULTS} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_toy_passes(name):
    RIGHT[name]()


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=str)
def test_a_toy_with_a_fault_is_rejected(name, fault):
    of_training = name in ("trains", "resumes")
    toy = ToyTraining(fault=fault) if of_training else Halved(fault=fault)
    check = checks_of(toy)[name]
    if name == "count":
        check = partial(check, stored=lambda rows, width: rows * width)
    with pytest.raises(AssertionError, match=FAULTS[name, fault]):
        check()


def test_the_first_broken_guarantee_is_named():
    with pytest.raises(AssertionError, match="texts: title is empty"):
        checks.check_method(Halved())
    with pytest.raises(AssertionError, match="resumes: resumed, it has other weights"):
        checks.check_method(ToyTraining(fault="state"))


def test_a_class_is_checked_with_default_settings():
    names = [name for name, _ in checks.method_checks(rb.Hashing)]
    assert names[:4] == ["settings", "texts", "knobs", "rank"]
    assert "composition with low-rank" in names
    assert "composition with hashing" not in names
