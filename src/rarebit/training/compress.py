"""A trained run in fewer bytes (`rarebit compress`), and what each size costs.

    TrainedRun       the model and the data of a run, measured before and after its tables are coded
    compress_run     a run as a new folder, at a given size or at a given loss of validation AUC
    smallest_size    the search behind a given loss
    frontier         several compressors at several sizes: bytes against AUC

All compressors take a trained model as it is, without further training. They are compared at the same bytes, counted as
the file of the model holds them.
"""

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rarebit.codes.coded import CodedTable
from rarebit.errors import DataError, ModelFileError, SettingsError
from rarebit.settings import require, updated
from rarebit.settings import size as size_text
from rarebit.storage.files import file_lock, read_json, write_json
from rarebit.tables.apply import apply_, find_sites, find_tables, table_bytes
from rarebit.tables.table import Method
from rarebit.technique import (
    Technique,
    parse_techniques,
    technique_from_mapping,
    technique_name,
    technique_to_mapping,
)
from rarebit.training.metrics import Evaluation, evaluate
from rarebit.training.model_file import FOLDER, load_model, save_model
from rarebit.training.run import (
    CHECKPOINTS,
    LOCK,
    RUN_FILE,
    Say,
    make_folder,
    num_parameters,
    read_run,
)
from rarebit.training.settings import load_splits

CODING = "evidence-coding"
HALVINGS, ROUNDS = 9, 4
"""Of a search: sizes down to 1/512, and steps between two of them, in which the size is found within 5 %."""
SIZES = (4, 8, 16, 32, 64, 128)
"""Of a frontier: 1/4 and so on."""
MATCHING_ROUNDS = 14
CLOSE, MARGIN = 0.99, 1.05
"""Compressors whose bytes are searched may take between so many of the bytes: rank 2 of 16 is a little above 1/8."""


def smallest_size(
    loss_at: Callable[[float], float],
    most: float,
    *,
    halvings: int = HALVINGS,
    rounds: int = ROUNDS,
) -> float | None:
    """Return the smallest size whose loss is at most so much; None where that of one half is larger.

    Sizes are halved while the loss allows it; then come bisections between the last two, in the logarithm of the size.

    >>> round(smallest_size(lambda size: 0.0001 / size, 0.002), 3)
    0.05
    """
    best, next_ = 1.0, 0.5
    for _ in range(halvings):
        if loss_at(next_) > most:
            break
        best, next_ = next_, next_ / 2
    else:
        return best
    if best == 1.0:
        return None
    for _ in range(rounds):
        middle = math.sqrt(best * next_)
        if loss_at(middle) <= most:
            best = middle
        else:
            next_ = middle
    return best


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The size of a model's tables, and how well it ranks."""

    table_bytes: int
    valid_auc: float | None
    """None without validation rows."""
    test_auc: float | None
    rarest_auc: float | None
    """On the rarest fifth of the test rows."""


@dataclass(frozen=True)
class Compressor:
    """A way to make trained tables smaller."""

    name: str
    methods: str
    """Techniques as people type them; the first has the size."""
    sizing: Literal["bytes", "share", "none"] = "share"
    """Whether its first technique takes bytes, takes a share of the weights, so that the bytes are searched, or has no size."""
    counted: bool = True
    """Whether it gets the training counts."""

    def build(self, shapes: Sequence[tuple[int, int]], share: float) -> tuple[Technique, ...]:
        """Return its techniques for tables of these shapes (rows, width)."""
        [expression] = parse_techniques(self.methods)
        first, *rest = expression.parts
        sized = first.technique.for_share(shapes, share)
        return (updated(sized, dict(first.settings)), *(part.build() for part in rest))


OURS = "evidence coding"
COMPRESSORS = (
    Compressor(OURS, CODING, "bytes"),
    Compressor("coding without counts", CODING, "bytes", counted=False),
    Compressor("int8", "quantize:bits=8", "none"),
    Compressor("int4", "quantize:bits=4", "none"),
    Compressor("low rank", "low-rank:after_training=true"),
    Compressor("pruning + int8", "pruned:by=magnitude:start=trained+pack:bits=8"),
)
"""Those that a frontier compares. Packed entries of 8 bits are smaller than those of 32, and lose nothing that shows."""


class TrainedRun:
    """A trained run with plain tables: its model and data, and what methods learn from them."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.folder, self.settings = Path(folder), read_run(folder)
        self.model = load_model(folder, device=device)
        small = [
            site for site in find_sites(self.model) if not isinstance(site.table, nn.Embedding)
        ]
        if small:
            raise ModelFileError(
                f"the tables of {str(folder)!r} are compressed already, or have embedding sets "
                f"({', '.join(small[0].info.methods)}); compress a run with plain tables"
            )
        try:
            splits = load_splits(self.settings.data, progress=progress)
        except DataError as error:
            raise DataError(
                f"compressing needs the training data of the run, for its counts: {error}"
            ) from None
        self.splits = splits.in_one_pass() if self.settings.training.one_pass else splits
        self.counts = self.splits.train.counts()
        self.shapes = [(info.rows, info.width) for info in find_tables(self.model)]
        self._learned: dict[type[Technique], dict[str, Any]] = {}

    @cached_property
    def plain(self) -> Figures:
        """The figures of the trained model."""
        return self.figures(self.model)

    def coded(self, methods: Sequence[Technique], *, counted: bool = True) -> nn.Module:
        """Return a copy of the model with these methods applied to all tables, also to first-order weights."""
        model = copy.deepcopy(self.model)
        for method in methods:
            require(
                isinstance(method, Method),
                f"{technique_name(method)} does not change trained tables",
            )
            assert isinstance(method, Method)
            known = self._learned_by(method)
            if not counted:
                known = {name: value for name, value in known.items() if name != "counts"}
            with warnings.catch_warnings(action="ignore"):  # of tables with little left
                apply_(model, replace(method, **known), min_width=1, verbose=False)  # type: ignore[type-var]  # settings are dataclasses
        return model

    def _learned_by(self, method: Method) -> Mapping[str, Any]:
        """Return the settings that a method takes from the training data; they do not depend on its size."""
        if type(method) not in self._learned:
            fitted = method.fitted(self.model, self.splits.train)
            self._learned[type(method)] = {
                field.name: value
                for field in fields(fitted)  # type: ignore[arg-type]  # settings are dataclasses
                if (value := getattr(fitted, field.name)) is not getattr(method, field.name)
            }
        return self._learned[type(method)]

    def matched(self, compressor: Compressor, share: float) -> nn.Module | None:
        """Return the model at about this share of the bytes, or below; None where the compressor cannot be so small."""
        if compressor.sizing != "share":
            try:
                return self.coded(compressor.build(self.shapes, share), counted=compressor.counted)
            except SettingsError:  # too small
                return None
        target = share * self.plain.table_bytes
        best, most = None, 0
        low, high = math.log(share) - 3.0, 0.0
        tried: dict[tuple[Technique, ...], nn.Module] = {}
        for _ in range(MATCHING_ROUNDS):
            middle = (low + high) / 2
            try:
                methods = compressor.build(self.shapes, math.exp(middle))
            except SettingsError:
                low = middle
                continue
            if methods not in tried:
                tried = {methods: self.coded(methods)}
            size = table_bytes(tried[methods])
            if size > MARGIN * target:
                high = middle
                continue
            low = middle
            if size > most:
                best, most = tried[methods], size
            if size > CLOSE * target:
                break
        return best

    def valid_auc(self, model: nn.Module) -> float | None:
        """Return the AUC on the validation split, if it has rows."""
        return evaluate(model, self.splits.valid).auc if len(self.splits.valid) else None

    def figures(self, model: nn.Module, test: Evaluation | None = None) -> Figures:
        """Measure a model on validation and test split."""
        test = test or self.test(model)
        return Figures(
            table_bytes=table_bytes(model),
            valid_auc=self.valid_auc(model),
            test_auc=test.auc,
            rarest_auc=test.rarest.auc if test.rarest else None,
        )

    def test(self, model: nn.Module) -> Evaluation:
        """Measure a model on the test split, with its rare rows."""
        return evaluate(model, self.splits.test, counts=self.counts)


@dataclass(frozen=True, kw_only=True)
class CompressedRun:
    """A compressed run, and what it lost."""

    model: nn.Module
    method: Technique
    before: Figures
    after: Figures
    one_row: tuple[str, ...]
    """Tables with one row for all ids: the loss feels too little of the differences between their rows."""
    folder: Path


def compress_run(
    run: TrainedRun,
    out: str | os.PathLike[str],
    *,
    size: str | float | None = None,
    loss: float | None = None,
    say: Say = print,
) -> CompressedRun:
    """Code the tables of a run and write the model as a run of its own.

    `size` is that of `compress_`; with `loss`, it is the smallest that loses at most so much validation AUC.
    """
    check_size(size, loss)
    out = Path(out)
    refuse_run(out)
    method = _coding(size) if loss is None else _coding_at_loss(run, loss, say)
    model = run.coded([method])
    test = run.test(model)
    after = run.figures(model, test)
    one_row = [
        site.info.name
        for site in find_sites(model)
        if isinstance(site.table, CodedTable)
        and len(site.table.layout.bits) == 1
        and not site.table.layout.bits.any()
    ]
    values = read_json(run.folder / RUN_FILE)
    values["settings"]["methods"].append(technique_to_mapping(method))
    values |= {
        "test": asdict(test),
        "num_parameters": num_parameters(model),
        "table_bytes": after.table_bytes,
        "compressed": {"before": asdict(run.plain), "after": asdict(after), "one_row": one_row},
    }
    with file_lock(make_folder(out) / LOCK):
        refuse_run(out)
        save_model(model, out)
        write_json(out / RUN_FILE, values, error=ModelFileError)
    return CompressedRun(
        model=model,
        method=method,
        before=run.plain,
        after=after,
        one_row=tuple(one_row),
        folder=out,
    )


def check_size(size: str | float | None, loss: float | None) -> None:
    """Raise for a size and a loss of which not one is given, or which make no sense."""
    require((size is None) != (loss is None), "give a size or a loss, one of them")
    if loss is None:
        _coding(size)
    else:
        require(0 <= loss < 1, f"loss must be 0 or more and below 1, got loss={loss}")


def refuse_run(folder: Path) -> None:
    """Raise where a folder holds a run or a model."""
    if any((folder / name).exists() for name in (RUN_FILE, FOLDER.description, CHECKPOINTS)):
        raise ModelFileError(f"{str(folder)!r} holds a run already; choose another folder")


def _coding(size: str | float | None) -> Technique:
    return technique_from_mapping({"method": CODING, "size": size})


def _coding_at_loss(run: TrainedRun, loss: float, say: Say) -> Technique:
    before = run.plain.valid_auc
    if before is None:
        raise DataError("validation rows have no AUC, so a loss cannot be met; give a size")

    def loss_at(share: float) -> float:
        try:
            model = run.coded([_coding(share)])
        except SettingsError:  # smaller than the directions and means of the tables
            say(f"1/{1 / share:.4g} of the bytes: too small for the tables")
            return math.inf
        lost = before - (run.valid_auc(model) or 0.0)
        bytes_ = size_text(table_bytes(model))
        say(f"at most 1/{1 / share:.4g} of the bytes: {bytes_}, validation AUC {-lost:+.5f}")
        return lost

    found = smallest_size(loss_at, loss)
    if found is None:
        raise SettingsError(
            f"half of the bytes loses more than {loss:g} of validation AUC; allow a larger loss"
        )
    return _coding(found)


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Figures):
    """A compressor at one size."""

    compressor: str
    size: int | None
    """Its tables take at most one part in so many of the bytes; None for a compressor without a size."""


def frontier(
    run: TrainedRun,
    *,
    sizes: Sequence[int] = SIZES,
    compressors: Sequence[Compressor] = COMPRESSORS,
) -> Iterator[FrontierPoint]:
    """Yield the figures of every compressor at every size that it can have."""
    for compressor in compressors:
        for size in sizes if compressor.sizing != "none" else (None,):
            model = run.matched(compressor, 1 / (size or 1))
            if model is not None:
                found = asdict(run.figures(model))
                yield FrontierPoint(compressor=compressor.name, size=size, **found)
