"""Several embedding sets of a field as one table: the rows of a value lie side by side.

    rows(ids) = [ e^1(ids), ..., e^M(ids) ]        e^m: the embedding of set m, K wide

    SetsTable            plain sets, M K columns of one table: one lookup, whatever M is
    └── nn.Embedding
    SplitSetsTable       a table per set, for methods that mix the columns of a row
    └── M tables

Each set is a table (Guo et al., 2024), so factors and scales belong to one set. Methods that treat each entry by itself take
all sets at once.

Shapes: M sets, K the width of one, N rows of a table.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, UnsupportedTableError
from rarebit.machine import CPU, require_memory
from rarebit.settings import check_types, require
from rarebit.tables.apply import (
    FieldSite,
    Site,
    TableChanges,
    TableInfo,
    find_sites,
    find_tables,
    put_tables,
    refuse_composition,
)
from rarebit.tables.collection import PlainStack, Stack, TableCollection, stack_tables
from rarebit.tables.table import (
    AnyTable,
    Method,
    Table,
    full_table,
    grow_table,
    methods_of,
    num_weights,
    plain_like,
    unsuited,
    wrap,
)
from rarebit.technique import Rank

PLACE = "backbone"
"""The part of a model that has several sets."""


@dataclass(frozen=True, kw_only=True)
class SetsMethod(Method):
    """A technique that gives a model several embedding sets: it changes the backbone as a whole."""

    paper: ClassVar[str] = (
        "Guo et al., On the Embedding Collapse when Scaling up Recommendation Models, ICML 2024"
    )
    composition_rank: ClassVar[Rank] = Rank.SETS

    num_sets: int = 4
    """Embedding sets."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.num_sets >= 1, f"num_sets must be at least 1, got num_sets={self.num_sets}")

    @abstractmethod
    def change_(self, model: nn.Module) -> TableCollection | None:
        """Give a model its sets, in place; return the tables in which they lie side by side, if any."""

    def wrap(self, base: AnyTable) -> "SetsTable":
        """Return the same table, which knows that its columns are sets."""
        if not isinstance(base, nn.Embedding) or base.embedding_dim % self.num_sets:
            raise UnsupportedTableError(
                f"{self} takes a plain table with {self.num_sets} sets side by side, got {base}"
            )
        inner = plain_like(base, base.weight.detach(), padding_idx=base.padding_idx)
        return SetsTable(self, inner)

    def after_merge(self, table: AnyTable) -> AnyTable:
        """Let a merged table still know of its sets."""
        return self.wrap(table) if isinstance(table, nn.Embedding) else table

    def change_model(
        self, model: nn.Module, *, where: object, optimizer: Optimizer | None
    ) -> TableChanges:
        """Give a model several embedding sets, in place; tables outside the backbone are skipped."""
        require(where is None, f"{self} changes the backbone as a whole; leave out where=")
        if optimizer is not None:
            raise OptimizerError(
                f"{self} redraws the network of a model, so an optimizer has no state to keep; leave out "
                "optimizer= and build it after this call"
            )
        sites = find_sites(model)
        inside = [site for site in sites if f"{site.info.name}.".startswith(f"{PLACE}.")]
        for site in inside:
            refuse_composition(site, self)
            _refuse_to_copy(site, self)
        sets = [p for name, p in model.named_parameters() if name.startswith(f"{PLACE}.")]
        require_memory(
            self.num_sets * sum(parameter.nbytes for parameter in sets),
            f"a model with {self.num_sets:,} embedding sets",
            "use a smaller num_sets",
            sets[0].device if sets else CPU,
        )
        collection = self.change_(model)
        changed = [
            site
            for site in find_sites(model)
            if isinstance(site, FieldSite) and site.collection is collection
        ]
        put_tables(model, str(self), changed, [self.wrap(site.table) for site in changed])
        before = tuple(site.info for site in inside)
        now = {info.name: info for info in find_tables(model)}
        after = tuple(_all_sets_of(info, now, self) for info in before)
        skipped = [(site.info.name, "outside the backbone") for site in sites if site not in inside]
        return TableChanges(str(self), before, after, tuple(skipped))

    @property
    def stored(self) -> "SetsMethod":
        """The method as a file holds it."""
        return self

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return plain sets of all fields behind one lookup, others behind one per set."""
        plain = [table for table in tables if isinstance(table, SetsTable)]
        split = [table for table in tables if isinstance(table, SplitSetsTable)]
        if plain:
            return SetsStack(self, plain, lengths)
        return SplitSetsStack(self, split, lengths)


class SetsTable(Table):
    """A plain table whose columns are those of several sets, one set after the other."""

    def __init__(self, method: SetsMethod, inner: nn.Embedding) -> None:
        super().__init__(method, inner)
        self.num_sets = method.num_sets

    @property
    def unmergeable(self) -> str:
        """Plain sets are all that is left."""
        return "its sets stay side by side"

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of all sets side by side."""
        rows: Tensor = self.inner(ids)
        return rows

    def grown(self, start: Tensor) -> "SetsTable":
        """Return the table with more ids in all sets."""
        inner = grow_table(self.inner, start)
        assert isinstance(self.method, SetsMethod)
        assert isinstance(inner, nn.Embedding)
        return SetsTable(self.method, inner)

    def receive(self, method: Method) -> Table:
        """Return the table with a method on each set, or on all entries at once where that is the same."""
        if method.masks_entries:
            return method.wrap(self)
        assert isinstance(self.method, SetsMethod)
        parts = full_table(self).chunk(self.num_sets, dim=1)
        plain = [plain_like(self, part.clone(), padding_idx=self.padding_idx) for part in parts]
        return SplitSetsTable(self.method, [wrap(part, method) for part in plain])

    def unsuited(self, method: Method) -> str | None:
        """What is applied to each set must suit a table as wide as one set."""
        if method.masks_entries:
            return super().unsuited(method)
        return method.unsuited(self.num_embeddings, self.embedding_dim // self.num_sets)


class SplitSetsTable(Table):
    """Sets that are tables of their own, with methods of their own, looked up side by side."""

    def __init__(self, method: SetsMethod, parts: Sequence[AnyTable]) -> None:
        super().__init__(
            method,
            None,
            num_embeddings=parts[0].num_embeddings,
            embedding_dim=sum(part.embedding_dim for part in parts),
            padding_idx=parts[0].padding_idx,
        )
        self.parts = nn.ModuleList(parts)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of all sets side by side."""
        return torch.cat([part(ids) for part in self.parts], dim=-1)

    def grown(self, start: Tensor) -> "SplitSetsTable":
        """Return the table with more ids in each set."""
        assert isinstance(self.method, SetsMethod)
        starts = start.split([table.embedding_dim for table in self.tables], dim=1)
        return SplitSetsTable(self.method, [*map(grow_table, self.tables, starts)])

    @property
    def tables(self) -> list[AnyTable]:
        """The table of each set."""
        return [part for part in self.parts if isinstance(part, nn.Embedding | Table)]

    @property
    def sparse(self) -> bool:
        """Whether the stored weights get sparse gradients."""
        return self.tables[0].sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """The sets come first: what is applied later works on each of them."""
        return (self.method, *methods_of(self.tables[0]))

    @property
    def num_weights(self) -> int:
        """Numbers that are stored for all sets."""
        return sum(num_weights(table) for table in self.tables)

    def receive(self, method: Method) -> Table:
        """Return the table with a further method on each set, or on all entries at once."""
        if method.masks_entries:
            return method.wrap(self)
        assert isinstance(self.method, SetsMethod)
        return SplitSetsTable(self.method, [wrap(table, method) for table in self.tables])

    def unsuited(self, method: Method) -> str | None:
        """What is applied later works on each set, so it must suit one."""
        if method.masks_entries:
            return super().unsuited(method)
        return unsuited(self.tables[0], method)

    def served(self) -> AnyTable:
        """Return the sets for inference: plain ones lie in one table again."""
        assert isinstance(self.method, SetsMethod)
        served = [table.served() if isinstance(table, Table) else table for table in self.tables]
        if all(isinstance(table, nn.Embedding) for table in served):
            return self.method.wrap(self._joined(served))
        return SplitSetsTable(self.method, served)

    def merge(self) -> nn.Embedding:
        """Return one plain table of all sets, each folded as it would be by itself."""
        merged = [table.merge() if isinstance(table, Table) else table for table in self.tables]
        return self._joined(merged)

    def _joined(self, tables: Sequence[AnyTable]) -> nn.Embedding:
        weight = torch.cat([full_table(table) for table in tables], dim=1)
        return plain_like(self, weight, padding_idx=self.padding_idx)


class SetsStack(PlainStack):
    """Plain sets of several fields as one `nn.Embedding`: a plain stack that knows of its sets."""

    def __init__(
        self, method: SetsMethod, tables: Sequence[SetsTable], lengths: Sequence[int]
    ) -> None:
        plain = [table.inner for table in tables if isinstance(table.inner, nn.Embedding)]
        super().__init__(plain, lengths)
        self.method = method

    def split(self) -> list[AnyTable]:
        """Return the tables one by one; weights are shared with the stack, not copied."""
        return [self.method.wrap(table) for table in super().split()]


class SplitSetsStack(Stack):
    """Sets that are tables of their own, of several fields: a stack per set."""

    def __init__(
        self, method: SetsMethod, tables: Sequence[SplitSetsTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method = method
        by_set = zip(*(table.tables for table in tables), strict=True)
        self.sets = nn.ModuleList(stack_tables(list(parts), lengths) for parts in by_set)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of all sets side by side, for the ids of each field."""
        return torch.cat([stack(ids) for stack in self.sets], dim=-1)

    def split(self) -> list[AnyTable]:
        """Return the tables one by one."""
        by_set = [stack.split() for stack in self.sets if isinstance(stack, Stack)]
        return [SplitSetsTable(self.method, parts) for parts in zip(*by_set, strict=True)]


def sets_of(model: nn.Module) -> SetsMethod | None:
    """Return the method that gave a model its embedding sets, None where none did."""
    made_by = getattr(getattr(model, "backbone", None), "made_by", None)
    return made_by if isinstance(made_by, SetsMethod) else None


def _refuse_to_copy(site: Site, method: SetsMethod) -> None:
    # a module is copied with all that it does, but a field's table is made anew
    reason = site.info.refusal if isinstance(site, FieldSite) else site.tie
    if any(parameter.is_meta for parameter in site.table.parameters()):
        reason = "it is on the meta device, which holds no numbers to copy"
    elif not site.info.trainable:
        reason = "it is not trained, and new sets start at random"
    if reason:
        raise UnsupportedTableError(f"{method} cannot be applied to {site.info.name!r}: {reason}")


def _all_sets_of(info: TableInfo, now: Mapping[str, TableInfo], method: SetsMethod) -> TableInfo:
    """Return a table of the backbone as it is now, all its sets together."""
    if info.name in now:
        return now[info.name]
    place = info.name.removeprefix(PLACE)
    sets = [now[f"{PLACE}.sets.{number}{place}"] for number in range(method.num_sets)]
    return replace(
        info,
        methods=(str(method),),
        num_parameters=sum(table.num_parameters for table in sets),
        num_bytes=sum(table.num_bytes for table in sets),
    )
