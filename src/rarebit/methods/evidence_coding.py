"""Evidence coding: store each row as precisely as it is known.

A row that training saw n times is known up to a noise of variance proportional to 1/n. Storing it more finely is a waste. With H, how the
loss bends in the directions of a table, the codes of all tables together minimise what the loss feels over all lookups

    Σ_i w_i (x_i - e_i)' H (x_i - e_i)        w_i = n_i + 1/2

for a given number of bytes. Where rows are independent and normal in directions u_j that are uncorrelated in the metric H,
with variance v_j, the solution is reverse water-filling (Shannon, 1959; Cover and Thomas, chapter 10), one line without a
dial but the water level θ, which follows from the bytes:

    bits of row i in direction j = max(0, 1/2 log2(w_i v_j / θ))

    n_i      `EvidenceCoding.counts`: how often training saw the id
    H        `EvidenceCoding.sensitivity`: the gradients g of the loss by row, Σ g g'; without it the identity
    x_i      the trained row
    e_i      the coded row (`codes/coded.py`)

What is coded has whole bits, and classes of rows have means, steps and directions that take bytes as well. So each choice
is made by its price: one more bit, direction or class must lower the error by θ' for each bit it takes. Rows whose counts are
within a factor of two begin as one class; neighbouring classes are joined where that is cheaper (the best segmentation, by
dynamic programming). The integers are those of a uniform quantizer for normal numbers.

Not for tables that need more training: integers have no gradient. Counts that are all equal leave only the directions.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.codes.coded import (
    HEADER,
    MOST_BITS,
    CodedStack,
    CodedTable,
    Layout,
    Origin,
    code_of_step,
    pack_codes,
    step_of,
)
from rarebit.data.dataset import Dataset
from rarebit.errors import DataError, SettingsError, UnsupportedTableError
from rarebit.methods._counts import counts_by_table
from rarebit.settings import check_types, require
from rarebit.tables.apply import (
    FieldSite,
    TableChanges,
    Where,
    apply_,
    find_sites,
    find_tables,
)
from rarebit.tables.collection import Stack, row_gradients_kept, set_row_gradients
from rarebit.tables.counts import Counts, by_table_name, counts_of_table
from rarebit.tables.table import CHUNK, AnyTable, Method, Table, full_table, methods_of, wrap
from rarebit.technique import Rank

__all__ = ["EvidenceCoding", "compress_", "measure_sensitivity"]

Numbers = NDArray[np.float64]
Batch = TypeVar("Batch")

STEP = (0.0, 1.5958, 0.99569, 0.58602, 0.33520, 0.18814, 0.10406, 0.056868, 0.030762)
"""The step of the uniform quantizer of 0 to 8 bits that is best for standard normal numbers (Max, 1960)."""
ERROR = (1.0, 0.36338, 0.11885, 0.03744, 0.011543, 0.0034952, 0.0010400, 0.00030433, 0.000087686)
"""Its mean squared error."""
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b|b)", re.IGNORECASE)
FRACTION = re.compile(r"1\s*/\s*(\d+(?:\.\d+)?)")
LARGEST_STEP = float(step_of(np.array(255)))
LARGEST_MEAN = float(np.finfo(np.float16).max)
FLAT = 1e-6
"""Directions that the loss feels less than this share of the strongest count as so much."""
ROUNDS = 60
"""Halvings of the interval in which the price is searched."""


@dataclass(frozen=True, kw_only=True)
class EvidenceCoding(Method):
    """Store trained tables in a given number of bytes, each row as precisely as training knows it.

    >>> EvidenceCoding(size="1/16")
    EvidenceCoding(size='1/16')
    """

    title: ClassVar[str] = "rows stored as precisely as training knows them, by their counts"
    paper: ClassVar[str] = (
        "none: reverse water-filling (Shannon, 1959) over rows and directions, weighted by counts and curvature"
    )
    control: ClassVar[str] = "narrow"
    cost: ClassVar[str] = (
        "nothing in training; a lookup decodes its rows, in 1.5 to 2.5 times the time of a plain one"
    )
    applies: ClassVar[str] = (
        "trained tables with frequent and rare ids that only serve lookups from now on; not tables that need more training"
    )
    composition_rank: ClassVar[Rank] = Rank.QUANTISATION
    min_width: ClassVar[int] = 1
    """First-order weights are coded as well."""
    may_join_rows: ClassVar[bool] = True

    size: str | float = "1/16"
    """Bytes of all tables together: a share of the plain ones such as "1/16" or 0.05, or a number such as "2 MB"."""
    counts: Counts | None = field(default=None, repr=False, compare=False)
    """How often training saw each id, as in `Shrinkage`. A run counts by itself; without counts, all rows count the same."""
    sensitivity: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    """What `measure_sensitivity` returns: how the loss bends in the directions of each table, by name. A run measures it."""

    def __post_init__(self) -> None:
        check_types(self)
        budget(self.size, 1)

    @property
    def after_training(self) -> bool:
        """Integers have no gradient."""
        return True

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the method with a size: this share of the bytes.

        >>> EvidenceCoding.for_share([(1000, 8)], share=0.1)
        EvidenceCoding(size=0.1)
        """
        del shapes
        return cls(size=share)

    def fitted(self, model: nn.Module, train: Dataset) -> Self:
        """Return the method with the counts of training data, and with what the loss feels on some of its batches.

        Where some tables are not plain, nothing is measured: bytes have one price in tables with the same measure only.
        """
        counted = replace(self, counts=train.counts())
        if not {info.name for info in find_tables(model)} <= _plain_places(model).keys():
            return counted
        measured = measure_sensitivity(model, sample_batches(train), logistic_loss)
        return replace(counted, sensitivity=measured)

    def wrap(self, base: AnyTable) -> CodedTable:
        """Return the rows of `base`, coded; without counts, all of them are their mean."""
        weight = full_table(base if isinstance(base, nn.Embedding) else base.merge())
        rows, width = weight.shape
        origin = Origin(rows, width, base.padding_idx, base.sparse, methods_of(base))
        # tables keep neither counts nor curvature
        kept = replace(self, counts=None, sensitivity=None)
        if isinstance(self.counts, Mapping):
            require(
                not self.counts, "counts by name are for several tables; use apply_ on the model"
            )
            table = CodedTable(kept, _same_rows(weight), weight, origin)
            table.source = (
                weight  # `wrap_all` codes it, once the tables are known that share the bytes
            )
            return table
        if self.counts is None or weight.is_meta:
            return CodedTable(kept, _same_rows(weight), weight, origin)
        draft = Draft(weight, counts_of_table("table", len(weight), self.counts), base.padding_idx)
        return CodedTable(
            kept, _priced([draft], budget(self.size, weight.nbytes))[0], weight, origin
        )

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table coded; the price of a byte is the same in all of them."""
        # without counts, all rows count the same
        counts = counts_by_table(tables, 1 if self.counts is None else self.counts)
        pending = replace(self, counts={})
        made = {name: wrap(table, pending) for name, table in tables.items()}
        parts, drafts = [], []
        for name, table in made.items():
            bent = None if self.sensitivity is None else _bent(name, self.sensitivity)
            for part in table.modules():
                if isinstance(part, CodedTable) and part.source is not None:
                    drafts.append(Draft(part.source, counts[name], part.padding_idx, bent, name))
                    parts.append(part)
        total = sum(draft.weight.nbytes for draft in drafts)
        for part, blob in zip(parts, _priced(drafts, budget(self.size, total)), strict=True):
            part.put(blob)
        return list(made.values())

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return coded tables in one list of bytes, behind one lookup."""
        return CodedStack(self, [t for t in tables if isinstance(t, CodedTable)], lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table without entries has nothing to code."""
        return None if rows and width else "it has no weights"


def compress_(
    model: nn.Module,
    *,
    counts: Counts,
    size: str | float = "1/16",
    sensitivity: Mapping[str, Tensor] | None = None,
    where: Where | None = None,
    optimizer: Optimizer | None = None,
    verbose: bool = True,
) -> TableChanges:
    """Store the tables of a trained model in a given number of bytes, in place, and return what changed.

    `counts` says how often training saw each id: by the name of a table or of its field, or one tensor for a single
    table; `count_lookups` finds them by use. `measure_sensitivity` lets the codes follow what the loss
    feels, which loses less AUC at the same size. `merge_` turns the tables back into plain ones with the coded rows.

    >>> model = nn.Sequential(nn.Embedding(10_000, 16))
    >>> counts = 100_000 // (1 + torch.arange(10_000))
    >>> changes = compress_(model, counts=counts, size="1/20", verbose=False)
    >>> changes.after[0].num_bytes <= 10_000 * 16 * 4 / 20
    True
    """
    method = EvidenceCoding(size=size, counts=counts, sensitivity=sensitivity)
    return apply_(model, method, where=where, optimizer=optimizer, verbose=verbose)


def budget(size: str | float, plain: int) -> float:
    """Return the bytes that a size means for tables of so many bytes; raise `SettingsError` for a size that is none.

    >>> budget("1/16", 1600), budget("2 kB", 1600), budget(0.5, 1600)
    (100.0, 2000.0, 800.0)
    """
    if isinstance(size, str):
        if match := FRACTION.fullmatch(size.strip()):
            share = 1 / float(match[1]) if float(match[1]) else math.inf
        elif match := SIZE.fullmatch(size.strip()):
            bytes_ = float(match[1]) * UNITS[match[2].lower()]
            require(bytes_ > 0, f"size must be above 0, got size={size!r}")
            return bytes_
        else:
            raise SettingsError(f'size must be like "1/16", "2 MB" or 0.05, got size={size!r}')
    else:
        share = size
    require(0 < share <= 1, f"size must be a share above 0 and at most 1, got size={size!r}")
    return share * plain


def measure_sensitivity(
    model: nn.Module, batches: Iterable[Batch], loss: Callable[[nn.Module, Batch], Tensor]
) -> dict[str, Tensor]:
    """Return how the loss bends in the directions of each plain table, Σ g g' over the gradients g of rows, `(D, D)` by name.

    `loss(model, batch)` returns the loss of a batch, as in training; twenty batches are enough. No weight changes.

    >>> model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 1, bias=False))
    >>> batches = [torch.randint(100, (32,)) for _ in range(3)]
    >>> measured = measure_sensitivity(model, batches, lambda model, ids: model(ids).square().mean())
    >>> int(torch.linalg.matrix_rank(measured["0"]))  # the loss feels the direction of the one output
    1
    """
    places = _plain_places(model)
    if not places:
        raise DataError(
            "measure_sensitivity needs plain tables that are trained; merge_ the model first"
        )
    weights = list({id(weight): weight for weight, _ in places.values()}.values())
    found = {
        name: torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
        for name, (weight, _) in places.items()
    }
    number = 0
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with row_gradients_kept(model), torch.enable_grad():
            set_row_gradients(model, by_rows=True)
            for batch in batches:
                gradients = torch.autograd.grad(loss(model, batch), weights, allow_unused=True)
                by_weight = dict(zip(map(id, weights), map(_rows_of, gradients), strict=True))
                for name, (weight, rows) in places.items():
                    ids, values = by_weight[id(weight)]
                    own = values[(ids >= rows.start) & (ids < rows.stop)]
                    found[name] += (own.T @ own).cpu()
                number += 1
    finally:
        for module in was_training:  # one by one: a frozen part stays in evaluation mode
            module.training = True
    if not number:
        raise DataError("measure_sensitivity needs at least one batch")
    return found


def _plain_places(model: nn.Module) -> dict[str, tuple[nn.Parameter, slice]]:
    """Return the parameter and the rows in it of each plain table that is trained, by name."""
    found = {}
    for site in find_sites(model):
        if not isinstance(site.table, nn.Embedding):
            continue
        if isinstance(site, FieldSite):
            weight, rows = site.collection.plain_rows()[site.index]
        else:
            weight, rows = site.module.weight, slice(0, site.table.num_embeddings)
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            found[site.info.name] = (weight, rows)
    return found


def _rows_of(gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids and float64 values of the rows that a gradient has, each row once."""
    if gradient is None:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.float64)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values().double()
    ids = gradient.any(dim=1).nonzero().squeeze(1)
    return ids, gradient[ids].double()


def sample_batches(train: Dataset, batches: int = 20, rows: int = 1024) -> Iterable[Any]:
    """Yield a few batches of training rows, the same in every call."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(batches):
        yield train[torch.randint(len(train), (min(rows, len(train)),), generator=draw)]


def logistic_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a ranking model is trained with."""
    batch = batch.to(next(model.parameters()).device)
    return F.binary_cross_entropy_with_logits(model(batch), batch.label.float())


class Draft:
    """A table to be coded: its sums by class, from which the error of any code follows."""

    def __init__(
        self,
        weight: Tensor,
        counts: Tensor,
        padding: int | None = None,
        bent: Tensor | None = None,
        name: str = "table",
    ) -> None:
        self.weight, self.name = weight, name
        width = weight.shape[1]
        evidence = counts.double().numpy() + 0.5
        if padding is not None:
            evidence[padding] = 0.0  # no lookup returns that row
        # rows of about the same count, most frequent first; padding goes with the rarest
        octaves = np.floor(np.log2(np.maximum(evidence, 0.5))).astype(np.int64)
        present = np.unique(octaves)[::-1]
        self.group = np.searchsorted(-present, -octaves).astype(np.uint8)  # (N,)
        groups = len(present)
        self.num_rows = np.bincount(self.group, minlength=groups)
        self.evidence = np.bincount(self.group, weights=evidence, minlength=groups)
        sums, squares = np.zeros((groups, width)), np.zeros((groups, width, width))
        for start in range(0, len(weight), CHUNK):
            some = slice(start, start + CHUNK)
            rows = weight[some].detach().double().cpu().numpy()
            for group in np.unique(self.group[some]):
                mine = self.group[some] == group
                scaled = rows[mine] * evidence[some][mine][:, None]
                sums[group] += scaled.sum(axis=0)
                squares[group] += scaled.T @ rows[mine]
        self.sums = sums
        # how often a row of one group follows a row of another: as many runs begin
        pairs = self.group[:-1].astype(np.int64) * groups + self.group[1:]
        self.follows = np.bincount(pairs, minlength=groups * groups).reshape(groups, groups)
        self._turn(squares, _metric(bent, width, float(self.evidence.sum()), name))
        self._segments(squares)

    def _turn(self, squares: Numbers, metric: Numbers) -> None:
        """Find directions that are uncorrelated in the metric, the strongest first."""
        total = max(float(self.evidence.sum()), 1e-12)
        mean = self.sums.sum(axis=0) / total
        spread = squares.sum(axis=0) / total - np.outer(mean, mean)
        bends, axes = np.linalg.eigh(metric)
        bends = np.maximum(bends, max(bends[-1] * FLAT, 1e-30))
        into, back = axes * np.sqrt(bends), (axes / np.sqrt(bends)).T
        _, turned = np.linalg.eigh(into.T @ spread @ into)
        turned = turned[:, ::-1]
        self.into: Numbers = into @ turned  # z = x into
        self.back: Numbers = turned.T @ back  # x = z back
        self.length: Numbers = np.linalg.norm(self.back, axis=1)

    def _segments(self, squares: Numbers) -> None:
        """Sum up every segment of neighbouring groups: rows, evidence, and variance in each direction."""
        groups = len(self.num_rows)
        self.spans = [(a, b) for a in range(groups) for b in range(a, groups)]
        first = np.array([a for a, _ in self.spans])
        last = np.array([b for _, b in self.spans]) + 1

        def over(values: NDArray[Any]) -> Numbers:
            summed = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
            return np.asarray(summed[last] - summed[first])

        turned = np.einsum("dj,kde,ej->kj", self.into, squares, self.into)
        self.rows_in = over(self.num_rows.astype(np.float64))
        self.evidence_in = np.maximum(over(self.evidence), 1e-12)
        means = over(self.sums @ self.into) / self.evidence_in[:, None]
        variance = over(turned) / self.evidence_in[:, None] - means**2
        self.variance = np.maximum(variance, 0.0)  # (P, D)
        self.largest = float((self.evidence_in[:, None] * self.variance).max())

    def plan(self, price: float) -> "Plan":
        """Return the classes and bits at which a bit more would lower the error by less than the price."""
        width, groups = self.weight.shape[1], len(self.num_rows)
        felt = self.evidence_in[:, None] * self.variance  # (P, D)
        number = np.arange(MOST_BITS + 1)
        costs = felt[:, :, None] * np.array(ERROR) + price * self.rows_in[:, None, None] * number
        bits = costs.argmin(axis=2)  # (P, D)
        least = costs.min(axis=2)
        least = least + price * 8 * 2 * (
            bits > 0
        )  # a byte for the number of bits, and one for the step
        total = least.sum(axis=1) + price * 8 * (2 * width + 5)
        place = {span: index for index, span in enumerate(self.spans)}
        best, come = [0.0], []
        for end in range(groups):
            ways = [best[start] + total[place[start, end]] for start in range(end + 1)]
            come.append(int(np.argmin(ways)))
            best.append(min(ways))
        chosen, end = [], groups - 1
        while end >= 0:
            chosen.append(place[come[end], end])
            end = come[end] - 1
        plans = [
            Plan.of(self, np.array(some), bits, least, price)
            for some in (chosen[::-1], [place[0, groups - 1]])
        ]
        return min(plans, key=lambda plan: plan.error + price * 8 * plan.num_bytes)

    def code(self, plan: "Plan") -> Tensor:
        """Return the list of bytes of the table."""
        class_of_group = np.zeros(len(self.num_rows), np.uint8)
        means = []
        for kind, span in enumerate(plan.spans):
            first, last = self.spans[span]
            class_of_group[first : last + 1] = kind
            means.append(self.sums[first : last + 1].sum(axis=0) / self.evidence_in[span])
        used = plan.directions
        spread = np.sqrt(self.variance[plan.spans][:, used]) * self.length[used]
        wanted = np.array(STEP)[plan.bits] * spread
        if max(np.max(wanted, initial=0.0) / LARGEST_STEP, np.abs(means).max() / LARGEST_MEAN) > 1:
            raise UnsupportedTableError(
                f"EvidenceCoding cannot store {self.name!r}: its rows have numbers up to {float(self.weight.abs().max()):.3g}, "
                "beyond what its steps and means hold; leave the table out with where="
            )
        steps = code_of_step(wanted)
        basis = self.back[used] / self.length[used][:, None]
        layout = Layout.of(class_of_group[self.group], basis, np.array(means), plan.bits, steps)
        into = self.into[:, used] * self.length[used]
        step = np.where(layout.bits > 0, step_of(layout.steps), 1.0)
        middle = np.where(layout.bits > 0, 2.0 ** (layout.bits.astype(np.int64) - 1), 0.0)
        most = 2.0**layout.bits - 1
        numbers = np.zeros((len(self.weight), len(used)), np.uint8)
        classes = layout.class_of_rows
        for start in range(0, len(self.weight), CHUNK):
            some = slice(start, start + CHUNK)
            kinds = classes[some]
            rows = self.weight[some].detach().double().cpu().numpy() - layout.means[kinds]
            scaled = np.floor((rows @ into) / step[kinds]) + middle[kinds]
            numbers[some] = np.clip(scaled, 0, most[kinds])
        return layout.write(pack_codes(layout, numbers))


@dataclass(frozen=True)
class Plan:
    """Classes, directions and bits of a table, with the bytes that they take."""

    spans: NDArray[np.int64]
    """The segment of groups of each class."""
    directions: NDArray[np.int64]
    """Those that have bits in any class."""
    bits: NDArray[np.uint8]
    """`(C, r)`."""
    error: float
    num_bytes: int

    @staticmethod
    def of(
        draft: Draft,
        spans: NDArray[np.int64],
        bits: NDArray[np.int64],
        least: Numbers,
        price: float,
    ) -> "Plan":
        """Return the plan of these segments; a direction that does not earn its bytes gets no bits."""
        width = draft.weight.shape[1]
        felt = (
            draft.evidence_in[spans][:, None] * draft.variance[spans]
        )  # (C, D), the error without bits
        earned = (felt - least[spans]).sum(axis=0)
        directions = np.flatnonzero(
            (bits[spans] > 0).any(axis=0) & (earned > price * 8 * 2 * width)
        )
        chosen = bits[spans][:, directions]
        error = felt.sum() - (felt[:, directions] * (1 - np.array(ERROR)[chosen])).sum()
        kind = np.zeros(len(draft.num_rows), np.int64)
        for index, span in enumerate(spans):
            first, last = draft.spans[span]
            kind[first : last + 1] = index
        runs = 1 + int(draft.follows[kind[:, None] != kind].sum())
        small = 2 * width * (len(directions) + len(spans)) + 2 * chosen.size
        index_bytes = min(5 * runs, math.inf if len(spans) > 16 else -(-len(draft.weight) // 2))
        codes = int(draft.rows_in[spans] @ chosen.sum(axis=1))
        return Plan(
            spans=spans,
            directions=directions,
            bits=chosen.astype(np.uint8),
            error=float(error),
            num_bytes=int(HEADER.size + small + index_bytes + -(-codes // 8)),
        )


def _listed(drafts: Sequence["Draft"]) -> str:
    """Return a few names of tables for a message."""
    names = ", ".join(repr(draft.name) for draft in drafts[:3])
    return names if len(drafts) <= 3 else f"{names} and {len(drafts) - 3} more tables"


def _priced(drafts: Sequence[Draft], most: float) -> list[Tensor]:
    """Return the tables as bytes, coded at the lowest price at which they take no more than so many."""
    largest = max(*(draft.largest for draft in drafts), 1e-300)

    def plans(price: float) -> list[Plan]:
        return [draft.plan(price) for draft in drafts]

    def size(found: Sequence[Plan]) -> int:
        return sum(plan.num_bytes for plan in found)

    high, low = math.log(largest) + 2.0, math.log(largest) - 60.0
    found = plans(math.exp(high))
    require(
        size(found) <= most,
        f"size must be at least {size(found):,} bytes for {_listed(drafts)}, got {most:,.0f} bytes",
    )
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        tried = plans(math.exp(middle))
        if size(tried) <= most:
            high, found = middle, tried
        else:
            low = middle
    return [draft.code(plan) for draft, plan in zip(drafts, found, strict=True)]


def _bent(name: str, sensitivity: Mapping[str, Tensor]) -> Tensor:
    """Return what was measured of a table, or raise `DataError`."""
    found = by_table_name(name, sensitivity)
    if found is None:
        raise DataError(
            f"no sensitivity for {name!r}, only for {', '.join(sensitivity) or 'nothing'}; measure it while all tables are "
            "plain, or leave the table out with where="
        )
    return found


def _metric(bent: Tensor | None, width: int, evidence: float, name: str) -> Numbers:
    """Return H of a table for one lookup."""
    if bent is None:
        return np.eye(width)
    if bent.shape != (width, width):
        raise DataError(
            f"the sensitivity of {name!r} has the shape {tuple(bent.shape)}, and its rows have {width} numbers"
        )
    if not bool(bent.isfinite().all()):
        raise DataError(f"the sensitivity of {name!r} is not finite")
    return bent.double().cpu().numpy() / max(evidence, 1e-12)


def _same_rows(weight: Tensor) -> Tensor:
    """Return the bytes of a table whose rows are all their mean."""
    rows, width = weight.shape
    mean = (
        np.zeros((1, width))
        if weight.is_meta
        else weight.detach().double().mean(dim=0, keepdim=True).cpu().numpy()
    )
    nothing = np.zeros((1, 0), np.uint8)
    mean = np.clip(mean, -LARGEST_MEAN, LARGEST_MEAN)
    layout = Layout.of(np.zeros(rows, np.uint8), np.zeros((0, width)), mean, nothing, nothing)
    return layout.write(np.zeros(0, np.uint8))
