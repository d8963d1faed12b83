"""What every file in `rarebit.methods` declares for studies, and toys that declare it wrongly."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
from contract import declaration_checks as checks
from contract.test_methods import TRAINING_METHODS, every_table_method, method_of
from torch import Tensor, nn

import rarebit as rb
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, full_table, plain_like
from rarebit.technique import Rank, compositions, technique_class, technique_name, technique_names

NAMES = [technique_name(technique_class(name)) for name in technique_names()]
APPLIED = [name for name in technique_names() if name not in TRAINING_METHODS]
PAIRS = list(itertools.product(APPLIED, repeat=2))
every_method = pytest.mark.parametrize("name", technique_names())


@every_method
def test_a_method_says_what_it_is(name):
    checks.check_words(method_of(name), NAMES)


@every_method
def test_knobs_are_settings_with_values_that_work(name):
    checks.check_knobs(method_of(name))


@every_table_method
def test_a_sized_method_keeps_at_most_the_share(name):
    checks.check_share(method_of(name))


@every_table_method
def test_the_next_method_gets_the_shape_that_is_said(name):
    checks.check_shape_after(method_of(name))


def test_every_method_has_a_rank_and_exceptions_that_exist():
    checks.check_composition_declared([technique_class(name) for name in technique_names()])
    assert set(compositions()) == set(itertools.product(NAMES, repeat=2))


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
    checks.check_words(Declared(), [])
    checks.check_knobs(Declared())
    checks.check_share(Declared())
    checks.check_shape_after(Declared())
    checks.check_composition_declared([Declared])
    checks.check_pair(Declared(), Declared(level=2))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        *(({word: ""}, f"{word} is empty") for word in checks.WORDS),
        ({"paper": None}, "paper is no text"),
        ({"cost": "a\nb"}, "cost has several lines"),
        ({"title": "t" * 73}, "the title has 73 characters"),
        ({"control": "narow"}, "control 'narow' is unknown"),
        ({"control": "Declared"}, "the control is the method itself"),
    ],
)
def test_wrong_words_are_rejected(declared, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_words(changed(**declared), ["Declared"])


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
        ({"composition_rank": None}, "Second has no rank"),
        ({"excludes": {"Third": "no"}}, "Second declares 'Third', which is no method"),
        ({"follows": frozenset({"Third"})}, "Second declares 'Third', which is no method"),
        ({"follows": frozenset({"Declared"})}, "follows 'Declared' by its rank already"),
        ({"excludes": {"Declared": ""}}, "Second excludes without a reason"),
        ({"excludes": {"Declared": "A."}}, "a message goes on after the reason"),
    ],
)
def test_wrong_declarations_are_rejected(monkeypatch, changes, message):
    for name, value in changes.items():
        monkeypatch.setattr(Second, name, value)
    with pytest.raises(AssertionError, match=message):
        checks.check_composition_declared([Declared, Second])


def test_the_order_follows_from_the_rank():
    checks.check_composition_declared([Declared, Second])
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
