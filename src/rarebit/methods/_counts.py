"""Counts: how often training saw each id, and the tables that keep them.

    w_i = n_i / (n_i + c)

    n_i    `Evidence.counts`
    c      `Evidence.strength`, one per table: an id seen c times has w_i = 1/2

Counts come by the name of a table or of its field, as `train.counts()` returns them. `shrinkage` and `row-rate` store them
in their tables; `forgetting` and the methods of `research/` only read them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.data.dataset import Dataset
from rarebit.errors import DataError, NoTableError, warn
from rarebit.methods.hashing import HashedTable
from rarebit.sets.sets import SplitSetsTable
from rarebit.settings import check_types, require
from rarebit.tables.apply import FieldSite, Site, find_sites
from rarebit.tables.collection import Stack, stack_tables
from rarebit.tables.counts import Counts, counts_of_table
from rarebit.tables.table import AnyTable, Method, Table, home_of, num_weights, wrap

Batch = TypeVar("Batch")

GROWING_C = 1.0
"""The c of a rule in training in one pass: the counts that it needs are not known yet."""
UNKNOWN = -1
"""The count of every row until counts are set."""


def counts_of_rows(table: AnyTable, counts: Tensor) -> Tensor:
    """Return the counts of the rows that the next method gets: a bucket has those of all its ids."""
    if isinstance(table, SplitSetsTable):
        return counts_of_rows(table.tables[0], counts)
    if not isinstance(table, HashedTable):
        return counts
    if table.padding_idx is not None:  # lookups of padding return zeros, not the bucket
        counts = counts.index_fill(0, torch.tensor([table.padding_idx]), 0)
    buckets = torch.arange(len(counts)) % table.buckets
    folded = counts.new_zeros(table.inner.num_embeddings)
    return folded.index_add_(0, buckets, counts)


def counts_by_table(tables: Mapping[str, AnyTable], counts: Counts) -> dict[str, Tensor]:
    """Return the counts of the rows of each table, by name, on the CPU."""
    return {
        name: counts_of_rows(table, counts_of_table(name, table.num_embeddings, counts))
        for name, table in tables.items()
    }


@torch.no_grad()
def count_lookups(
    model: nn.Module,
    batches: Iterable[Batch],
    call: Callable[[nn.Module, Batch], object] | None = None,
) -> dict[str, Tensor]:
    """Return how often each row of each table is looked up when a model scores these batches, by name.

    `call(model, batch)` runs the model on a batch; by default it is `model(batch)`. Where all batches of the training data
    are given once, these are the counts that `Shrinkage`, `Tail` and `compress_` take. Padding is not counted.

    >>> model = nn.ModuleDict({"user": nn.Embedding(3, 8)})
    >>> count_lookups(model, [torch.tensor([0, 2, 2])], lambda model, ids: model["user"](ids))
    {'user': tensor([1, 0, 2])}
    """
    found: dict[str, Tensor] = {}
    watched: dict[nn.Module, list[Site]] = {}
    for site in find_sites(model):
        found[site.info.name] = torch.zeros(site.info.rows, dtype=torch.int64)
        module = site.collection if isinstance(site, FieldSite) else site.module
        watched.setdefault(module, []).append(site)

    def count(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # torch's tables call it input, ours ids; a bag has offsets and weights as well
        ids = given[0] if given else named.get("input", named.get("ids"))
        assert isinstance(ids, Tensor)
        for site in watched[module]:
            own = ids
            if isinstance(site, FieldSite):
                lengths = [field.max_length for field in site.collection.fields]
                own = ids.split(lengths, dim=1)[site.index]
            seen = torch.bincount(own.reshape(-1).long(), minlength=site.info.rows).cpu()
            if site.table.padding_idx is not None:
                seen[site.table.padding_idx] = 0
            found[site.info.name] += seen

    hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in watched]
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for batch in batches:
            if call is None:
                model(batch)
            else:
                call(model, batch)
    finally:
        for part in was_training:  # one by one: a frozen part stays in evaluation mode
            part.training = True
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def set_counts_(model: nn.Module, counts: Counts) -> None:
    """Set how often training saw each row, in all tables of a model that keep counts, in place.

    Counts come by the names of tables or of their fields, as in `Shrinkage`. After more data, set the counts of all data.

    >>> from rarebit import Shrinkage, apply_
    >>> model = nn.ModuleDict({"user": nn.Embedding(3, 8)})
    >>> changes = apply_(model, Shrinkage(c=10), verbose=False)
    >>> set_counts_(model, {"user": torch.tensor([90, 0, 10])})
    >>> model["user"].evidence.counts
    tensor([90,  0, 10])
    """
    tables = {site.info.name: site.table for site in find_sites(model) if counted_in(site.table)}
    if not tables:
        raise NoTableError("no table of the model keeps counts; apply_ Shrinkage first")
    given = counts_by_table(tables, counts)
    if never := [repr(name) for name, numbers in given.items() if not bool(numbers.any())]:
        warn(
            f"all counts of {', '.join(never)} are 0, so its rows get no weight of their own; give the counts of the "
            "training data, or leave such a table out with where="
        )
    for name, table in tables.items():
        for counted in counted_in(table):
            counted.set_counts_(given[name])
    # sites of a stack are views of it: its own evidence has the counts now, but not the flag
    for module in model.modules():
        if isinstance(module, Evidence):
            module.is_known = True


class Evidence(nn.Module):
    """The counts of F tables, one table after the other, and the strength of each."""

    counts: Tensor
    strength: Tensor

    def __init__(self, counts: Tensor, strength: Tensor, *, is_known: bool) -> None:
        super().__init__()
        self.is_known = is_known
        self.is_growing = False
        """Whether each lookup in training is counted, from zero on: training in one pass knows no other counts."""
        self.register_buffer("counts", counts)  # n, (N,) of int64: half precision ends at 65,504
        self.register_buffer("strength", strength)  # c, (F,)

    @classmethod
    def unknown(cls, base: AnyTable, c: float) -> Self:
        """Return the evidence of a table until its counts are set."""
        counts = torch.full((base.num_embeddings,), UNKNOWN, device=home_of(base))
        strength = next(base.parameters()).detach().new_full((1,), c)
        return cls(counts, strength, is_known=False)

    def grow_(self, c: float | None) -> None:
        """Count lookups in training from now on, with this c where a rule would take it from all rows.

        From zero, unless they are counted already: then this is another day of the same log.
        """
        if self.is_growing:
            return
        self.counts.zero_()
        self.is_known = self.is_growing = True
        if c is not None:
            self.strength.fill_(c)

    def keep_counting_(self) -> None:
        """Go on from the counts that are there, and count each lookup in training."""
        self.is_known = self.is_growing = True

    def split(self, sizes: Sequence[int]) -> list["Evidence"]:
        """Return the evidence of each table; memory is shared, not copied."""
        parts = zip(self.counts.split(list(sizes)), self.strength.split(1), strict=True)
        return [self._with(*part) for part in parts]

    def grown(self, rows: int) -> "Evidence":
        """Return the evidence of a table with more rows, which training did not see."""
        new = self.counts.new_full((rows,), 0 if self.is_known else UNKNOWN)
        return self._with(torch.cat([self.counts, new]), self.strength)

    def _with(self, counts: Tensor, strength: Tensor) -> "Evidence":
        made = Evidence(counts, strength, is_known=self.is_known)
        made.is_growing = self.is_growing
        return made

    def weights(self, rows: Tensor, fields: Tensor) -> Tensor:
        """Return n / (n + c) of these rows `(..., 1)`; `fields` is the table of each of them.

        Until counts are set the weights are 1, and training raises an error.
        """
        exact = torch.promote_types(self.strength.dtype, torch.float32)
        c = F.embedding(fields, self.strength.to(exact).unsqueeze(-1))  # (..., 1)
        if self.is_growing and self.training and torch.is_grad_enabled():
            # before the row is weighed: else the first lookup of an id would teach it nothing
            places = rows.reshape(-1)
            self.counts.index_add_(0, places, torch.ones_like(places, dtype=self.counts.dtype))
        n = self.counts.index_select(0, rows.reshape(-1)).view(*rows.shape, 1)
        if not self.is_known:
            # no error without gradients: load_model applies all methods before it reads the counts
            if torch.is_grad_enabled():
                raise DataError(
                    "a table does not know its counts; apply its method with counts=train.counts(), or use "
                    "set_counts_(model, train.counts()) before training"
                )
            return torch.ones_like(n, dtype=self.strength.dtype)
        n = torch.where(c > 0, n, 1).to(exact)  # with c = 0 all weights are 1, also where n = 0
        return (n / (n + c)).to(self.strength.dtype)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.is_known = bool((self.counts != UNKNOWN).all())


class CountedTable(Table):
    """A table with the training counts of its rows."""

    def __init__(self, method: Method, inner: AnyTable, evidence: Evidence) -> None:
        super().__init__(method, inner)
        self.evidence = evidence  # n and c

    def weights(self, ids: Tensor) -> Tensor:
        """Return n / (n + c) of these ids `(..., 1)`."""
        return self.evidence.weights(ids, torch.zeros_like(ids))

    def set_counts_(self, counts: Tensor) -> None:
        """Replace the counts `(N,)`, in place."""
        self.evidence.counts.copy_(counts)
        self.evidence.is_known = True

    def start_pass_(self) -> None:
        """Count lookups in training from zero on: training in one pass knows no counts."""
        self.evidence.grow_(_growing_c(self.method))

    @property
    def num_weights(self) -> int:
        """Stored numbers, without counts and strengths."""
        inner = {id(parameter) for parameter in self.inner.parameters()}
        own = [p.numel() for p in self.parameters() if id(p) not in inner]
        return num_weights(self.inner) + sum(own)


class CountedStack(Stack):
    """Counted tables behind one lookup of rows and one of counts."""

    offsets: Tensor

    def __init__(
        self, method: Method, tables: Sequence[CountedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        self.sizes = [table.num_embeddings for table in tables]
        self.inner = stack_tables([table.inner for table in tables], lengths)
        every = [table.evidence for table in tables]
        counts, strength = (
            torch.cat([getattr(e, k) for e in every]) for k in ("counts", "strength")
        )
        self.evidence = Evidence(counts, strength, is_known=all(e.is_known for e in every))
        self.evidence.is_growing = all(e.is_growing for e in every)
        first_rows = torch.tensor([0, *accumulate(self.sizes)][:-1])
        self.register_buffer("offsets", first_rows[self.field_of_slot], persistent=False)

    def start_pass_(self) -> None:
        """Count lookups in training from zero on: training in one pass knows no counts."""
        self.evidence.grow_(_growing_c(self.method))

    def weights(self, ids: Tensor) -> Tensor:
        """Return n / (n + c) of the rows of each field."""
        return self.evidence.weights(ids + self.offsets, self.field_of_slot)


def _growing_c(method: Method) -> float | None:
    return GROWING_C if isinstance(getattr(method, "c", None), str) else None


def counted_in(table: AnyTable) -> list[CountedTable]:
    """Return the counted tables inside a table: none, one, or one per embedding set."""
    return [part for part in table.modules() if isinstance(part, CountedTable)]


@dataclass(frozen=True, kw_only=True)
class CountedMethod(Method):
    """A method whose tables keep counts."""

    training_only: ClassVar[bool] = True
    min_width: ClassVar[int] = 1
    """First-order weights take part as well."""

    counts: Counts | None = field(default=None, repr=False, compare=False)
    """How often training saw each id: by the name of the table or of its field, `(N,)` each; one tensor for a single
    table; or one number for all rows. None: `set_counts_` sets them before training."""

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.counts, int):
            require(self.counts >= 0, f"counts must be 0 or more, got counts={self.counts}")

    def with_counts(self, counts: Counts) -> Self:
        """Return the method with counts, for example those of the training data: `train.counts()`."""
        return replace(self, counts=counts)

    def prepare_(self, model: nn.Module, train: Dataset) -> None:
        """Count how often training will see each row."""
        set_counts_(model, train.counts())

    @abstractmethod
    def strength_of(self, name: str) -> float:
        """Return the c that a table of this name starts with."""

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return each table with this method, its counts and its c chosen by its name."""
        counts = {} if self.counts is None else counts_by_table(tables, self.counts)
        strengths = {name: self.strength_of(name) for name in tables}
        made = {name: wrap(table, replace(self, counts=None)) for name, table in tables.items()}
        for name, table in made.items():
            for counted in counted_in(table):
                counted.evidence.strength.fill_(strengths[name])
                if name in counts:
                    counted.set_counts_(counts[name])
        return list(made.values())

    def _set_own_counts_(self, table: CountedTable) -> None:
        """Set the counts of a table that is wrapped by itself, without a name."""
        require(
            not isinstance(self.counts, Mapping),
            "counts by name are for several tables; use apply_ on the model",
        )
        if self.counts is not None:
            table.set_counts_(counts_of_table("table", table.num_embeddings, self.counts))
