"""What every file in `rarebit.methods` declares for studies, and toys that declare it wrongly."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
from contract.test_methods import TRAINING_METHODS, method_of
from torch import Tensor, nn

import rarebit as rb
from rarebit import testing as checks
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table, plain_like
from rarebit.technique import Rank, compositions, technique_class, technique_name, technique_names

NAMES = [technique_name(technique_class(name)) for name in technique_names()]
APPLIED = [name for name in technique_names() if name not in TRAINING_METHODS]
PAIRS = list(itertools.product(APPLIED, repeat=2))


def test_every_ordered_pair_is_allowed_or_has_a_reason():
    assert set(compositions()) == set(itertools.product(NAMES, repeat=2))
    for (first, then), reason in compositions().items():
        assert reason is None or reason.strip(), (first, then)


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_a_pair_works_or_is_refused_as_declared(first, then):
    checks.check_pair(method_of(first), method_of(then))


class ToyTable(rb.Table):
    """A table with a gain; with a fault, it is wrong."""

    def __init__(self, method: "Toy", base: AnyTable) -> None:
        super().__init__(
            method,
            base,
            num_embeddings=base.num_embeddings,
            embedding_dim=base.embedding_dim,
            padding_idx=base.padding_idx,
        )
        self.fault = method.fault

    def rows(self, ids: Tensor) -> Tensor:
        rows = 2 * self.inner(ids)
        return 2 * rows.detach() - rows if self.fault == "gradient" else rows

    @property
    def methods(self) -> tuple[rb.Method, ...]:
        return () if self.fault == "hides" else super().methods

    def merge(self) -> nn.Embedding:
        merged = super().merge()
        merged.weight.data += 0.001 * (self.fault == "merge")
        return merged


@dataclass(frozen=True, kw_only=True)
class Toy(rb.Method):
    fault: str = ""

    def wrap(self, base: AnyTable) -> rb.Table:
        folded = plain_like(base, full_table(base)) if self.fault == "folds" else base
        return ToyTable(self, folded)


@dataclass(frozen=True, kw_only=True)
class Declared(Toy):
    """A toy that declares everything rightly; its tables may still have a fault."""

    title = "nothing"
    paper = "none"
    cost = "nothing"
    applies = "never"
    knobs = {"level": (1, 3)}  # noqa: RUF012  # read, never changed
    composition_rank = Rank.FACTORS

    level: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        require(self.level < 9, "level must be less than 9")


def changed(**declared: Any) -> rb.Method:
    """Return the toy with other declarations, under the same name."""
    return type("Declared", (Declared,), declared)()


def test_a_right_toy_passes():
    checks.check_settings(Declared())
    checks.check_texts(Declared())
    checks.check_knobs(Declared())
    checks.check_share(Declared())
    checks.check_shape_after(Declared())
    checks.check_rank(Declared())
    checks.check_pair(Declared(), Declared(level=2))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        *(({word: ""}, f"{word} is empty") for word in checks.TEXTS),
        ({"paper": None}, "paper is no text"),
        ({"cost": "a\nb"}, "cost has several lines"),
        ({"title": "t" * 73}, "the title has 73 characters"),
        ({"control": "narow"}, "control 'narow' is unknown"),
        ({"control": "Declared"}, "the control is the method itself"),
    ],
)
def test_wrong_texts_are_rejected(declared, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_texts(changed(**declared))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lvel": (1,)}, "the knob 'lvel' is no setting"),
        ({"level": [1, 2]}, "the values of 'level' are no tuple"),
        ({"level": ()}, "'level' has no values, or one twice"),
        ({"level": (2, 2)}, "'level' has no values, or one twice"),
        ({"level": (2, 9)}, "level=9 is refused: level must be less than 9"),
        ({"level": (2, "3")}, "level='3' is refused: level must be int"),
    ],
)
def test_wrong_knobs_are_rejected(knobs, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_knobs(changed(knobs=knobs))


@dataclass(frozen=True, kw_only=True)
class Oversized(Toy):
    """Says that it can be sized, and keeps everything."""

    size: int

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        return cls(size=round(share * len(shapes)))


def test_a_method_that_keeps_too_much_is_rejected():
    with pytest.raises(AssertionError, match=r"keeps 1\.0, not 0\.4"):
        checks.check_share(Oversized(size=3))


def test_a_method_that_is_sized_as_another_is_rejected():
    def for_share(shapes: object, share: object) -> rb.Method:
        return rb.Hashing(buckets=2)

    with pytest.raises(AssertionError, match="sized, it is a Hashing"):
        checks.check_share(changed(for_share=staticmethod(for_share)))


def test_a_wrong_shape_is_rejected():
    with pytest.raises(AssertionError, match=r"the next method gets \[\(13, 6\)\]"):
        checks.check_shape_after(changed(shape_after=lambda self, rows, width: (1, width)))


class Second(Declared):
    """Another method, for pairs."""

    composition_rank = Rank.EVIDENCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"composition_rank": None}, "it has no composition_rank"),
        ({"excludes": {"third": "no"}}, "it declares 'third', which is no method"),
        ({"follows": frozenset({"third"})}, "it declares 'third', which is no method"),
        ({"follows": frozenset({"hashing"})}, "it follows 'hashing' by its rank already"),
        ({"excludes": {"hashing": ""}}, "it excludes a method without a reason"),
        ({"excludes": {"hashing": "A."}}, "a message continues after the reason"),
    ],
)
def test_wrong_ranks_are_rejected(changes, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_rank(changed(**changes))


def test_settings_that_can_change_or_do_not_come_back_are_rejected():
    class Undecorated(Toy):
        pass

    with pytest.raises(AssertionError, match="the settings are no dataclass"):
        checks.check_settings(Undecorated())

    @dataclass(frozen=True, kw_only=True)
    class Counting(Toy):
        """Comes back with one more."""

        level: int = 1

        def __post_init__(self) -> None:
            object.__setattr__(self, "level", self.level + 1)

    with pytest.raises(AssertionError, match=r"from a settings file comes .*level=3"):
        checks.check_settings(Counting())


def test_the_order_follows_from_the_rank():
    checks.check_rank(Second())
    checks.check_pair(Declared(), Second(level=2))
    checks.check_pair(Second(), Declared())
    checks.check_pair(Second(), Second())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("merge", "Tensor-likes are not close"),
        ("gradient", "a step does not lower the loss"),
        ("folds", "no table has both, but"),
    ],
)
def test_an_allowed_pair_that_does_not_work_is_rejected(fault, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_pair(Declared(), Second(level=2, fault=fault))


def test_a_refusal_that_is_not_kept_is_rejected(monkeypatch):
    monkeypatch.setattr(Second, "excludes", {"Declared": "not both"})
    with pytest.raises(AssertionError, match="declared as refused, and was applied"):
        checks.check_pair(Declared(fault="hides"), Second())
