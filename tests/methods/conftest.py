"""Toy method files that the package finds like its own."""

import sys

import pytest

import rarebit.methods
from rarebit.technique import technique_class

HEAD = """
from dataclasses import dataclass
from typing import Literal

from rarebit.settings import check_types
from rarebit.tables.table import Method
from rarebit.technique import Rank
"""

FILES = {
    "toy_words": """
__all__ = ["ToyWords"]

@dataclass(frozen=True, kw_only=True)
class ToyWords(Method):
    composition_rank = Rank.EVIDENCE

    word: str = "plain"
    rate: float = 1.0
    count: int = 3
    is_on: bool = False
    sizes: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    both: float | Literal["auto"] = "auto"

    def __post_init__(self):
        check_types(self)

    def wrap(self, base):
        raise NotImplementedError
""",
    "toy_factor": """
__all__ = ["ToyFactor"]

@dataclass(frozen=True, kw_only=True)
class ToyFactor(Method):
    factor: float

    def __post_init__(self):
        check_types(self)

    def wrap(self, base):
        raise NotImplementedError
""",
    "toy_sized": """
__all__ = ["ToySized"]

@dataclass(frozen=True, kw_only=True)
class ToySized(Method):
    size: int
    word: str = "plain"

    @classmethod
    def for_share(cls, shapes, share):
        return cls(size=round(share * 100))

    def wrap(self, base):
        raise NotImplementedError
""",
}


@pytest.fixture(scope="module")
def toy_methods(tmp_path_factory):
    """Put the toy files where the package looks for methods; return their classes by name."""
    folder = tmp_path_factory.mktemp("methods")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    rarebit.methods.__path__.append(str(folder))
    yield {name.replace("_", "-"): technique_class(name) for name in FILES}
    rarebit.methods.__path__.remove(str(folder))
    for name in FILES:
        del sys.modules[f"rarebit.methods.{name}"]
        delattr(rarebit.methods, name)
