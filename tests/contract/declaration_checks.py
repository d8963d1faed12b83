"""What every method says of itself, one function a promise: each raises AssertionError when broken.

A study tunes, sizes, pairs and controls methods by what their classes declare.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from contract.method_checks import IDS, OFFSETS, D, Holder, N, move_, zoo_batch, zoo_model
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import SettingsError, UnsupportedTableError
from rarebit.sets.sets import SetsMethod
from rarebit.tables.apply import end_training_
from rarebit.tables.table import AnyTable
from rarebit.technique import Rank, Technique, refusal, technique_name

WORDS = ("title", "paper", "control", "cost", "applies")
CONTROLS = ("baseline", "narrow", "wide", "matched-rate", "tuned", "magnitude", "plain-sum")
MAX_TITLE = 72
"""A title stands beside the name in 80 columns."""
SHAPES = [(N, D), (40, D)]


def check_words(method: rb.Method, names: Iterable[str]) -> None:
    """Everything that is shown of a method is there; its control is one that a study can run."""
    for word in WORDS:
        text = getattr(method, word)
        assert isinstance(text, str), f"{word} is no text"
        assert text.strip() == text != "", f"{word} is empty or has space around it"
        assert "\n" not in text, f"{word} has several lines"
    assert len(method.title) <= MAX_TITLE, f"the title has {len(method.title)} characters"
    assert method.control in {*CONTROLS, *names}, f"control {method.control!r} is unknown"
    assert method.control != technique_name(method), "the control is the method itself"


def check_knobs(method: rb.Method) -> None:
    """Every knob is a setting, and the method can be built with each of its values."""
    settings = [field.name for field in fields(method)]
    for name, values in method.knobs.items():
        assert name in settings, f"the knob {name!r} is no setting"
        assert isinstance(values, tuple), f"the values of {name!r} are no tuple"
        assert len(set(values)) == len(values) > 0, f"{name!r} has no values, or one twice"
        for value in values:
            try:
                built = replace(method, **{name: value})
            except SettingsError as error:
                raise AssertionError(f"{name}={value!r} is refused: {error}") from error
            assert getattr(built, name) == value, f"{name}={value!r} does not stay"


def check_share(method: rb.Method) -> None:
    """Sized for a share, a method keeps no more, of tables that are really built."""
    for share in (0.4, 0.7, 1.0):
        sized = type(method).for_share(SHAPES, share)
        assert type(sized) is type(method), f"sized, it is a {type(sized).__name__}"
        model = nn.ModuleList([nn.Embedding(*shape) for shape in SHAPES])
        plain = sum(parameter.numel() for parameter in model.parameters())
        rb.apply_(model, sized, verbose=False)
        if isinstance(sized, rb.Pruned):  # it is small once it is packed
            end_training_(model)
        kept = sum(parameter.numel() for parameter in model.parameters()) / plain
        assert not _needs_a_size(method) or kept <= share, f"{sized} keeps {kept}, not {share}"


def _needs_a_size(method: rb.Method) -> bool:
    try:
        type(method)()
    except TypeError:
        return True
    return False


@dataclass(frozen=True)
class Probe(rb.Method):
    """A method that notes the shapes it is given."""

    seen: list[tuple[int, int]]

    def wrap(self, base: AnyTable) -> rb.Table:
        self.seen.append((base.num_embeddings, base.embedding_dim))
        return ProbeTable(
            self,
            base,
            num_embeddings=base.num_embeddings,
            embedding_dim=base.embedding_dim,
            padding_idx=base.padding_idx,
        )


class ProbeTable(rb.Table):
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def check_shape_after(method: rb.Method) -> None:
    """The next method gets tables of the shape that this one says."""
    for shape in ((N, D), (40, D), (2, D)):
        model, probe = Holder(nn.Embedding(*shape)), Probe([])
        if method.unsuited(*shape) is None:
            rb.apply_(model, method, verbose=False)
        rb.apply_(model, probe, verbose=False)
        assert probe.seen == [method.shape_after(*shape)], f"the next method gets {probe.seen}"


def check_composition_declared(methods: Iterable[type[Technique]]) -> None:
    """Every method has a rank, and the exceptions it declares name methods that exist."""
    by_name = {technique_name(method): method for method in methods}
    for name, method in by_name.items():
        assert isinstance(method.composition_rank, Rank), f"{name} has no rank"
        for other in (*method.excludes, *method.follows):
            assert other in by_name, f"{name} declares {other!r}, which is no method"
        for other in method.follows:
            same = by_name[other].composition_rank == method.composition_rank
            assert same, f"{name} follows {other!r} by its rank already, or never"
        for words in method.excludes.values():
            assert words.strip() == words != "", f"{name} excludes without a reason"
            assert not words.endswith("."), f"{name}: a message goes on after the reason"


def check_pair(first: rb.Method, then: rb.Method) -> None:
    """A pair that is allowed works, and one that is refused is refused with its reason."""
    reason = refusal(type(first), type(then))
    for model, arguments in _models(first, then):
        rb.apply_(model, first, verbose=False)
        if reason is None:
            _check_allowed(model, arguments, first, then)
        else:
            _check_refused(model, then, reason)


def _models(*methods: rb.Method) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    tables = [
        (Holder(nn.Embedding(N, D, padding_idx=3)), (IDS,)),
        (Holder(nn.EmbeddingBag(N, D, padding_idx=3)), (IDS, OFFSETS)),
    ]
    sets = any(isinstance(method, SetsMethod) for method in methods)
    return [*([] if sets else tables), (zoo_model(*methods), (zoo_batch(),))]


def _check_allowed(
    model: nn.Module, arguments: tuple[Any, ...], first: rb.Method, then: rb.Method
) -> None:
    changes = rb.apply_(model, then, verbose=False)
    changed = [info for info in changes.after if info.methods[-2:] == (str(first), str(then))]
    assert changed, f"no table has both, but {[info.methods for info in changes.after]}"
    move_(model)
    if not then.after_training:
        _check_a_step(model, arguments)
    before = model(*arguments)
    rb.merge_(model, verbose=False)
    assert not rb.merge_(model, verbose=False), "merged, something is left to merge"
    assert_close(model(*arguments), before, atol=1e-5, rtol=1e-5)


def _check_a_step(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = _loss(model, arguments)
    start.backward()
    optimizer.step()
    assert _loss(model, arguments).item() < start.item(), "a step does not lower the loss"


def _loss(model: nn.Module, arguments: tuple[Any, ...]) -> torch.Tensor:
    return F.softplus(-model(*arguments)).mean()


def _check_refused(model: nn.Module, then: rb.Method, reason: str) -> None:
    before, told = rb.find_tables(model), ""
    try:
        rb.apply_(model, then, verbose=False)
    except UnsupportedTableError as error:
        told = str(error)
    assert told, "the pair is declared as refused, and was applied"
    assert reason in told, f"the reason is not told: {told}"
    assert rb.find_tables(model) == before, "a refused method changed a table"
