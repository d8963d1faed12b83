"""Pruned: tables of which only the largest entries are left (magnitude pruning, and the stages of PEP).

    e(i) = m_i ⊙ V_i        m the `keep` entries of all tables that are largest in magnitude

Applied to a model, it cuts at once: train it first, and go on training what is left. In a run it is both
stages of Liu et al. (ICLR 2021). The run is trained while a threshold rises until the budget is met, or
learned thresholds have met it (`pep+pruned`); then what has survived is trained again from where it
started, and packed. With by="magnitude" the run is trained to its best epoch and cut then: the control.

Not for rows that are looked up once: there is nothing to learn from which entries they need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from rarebit.codes.packed import Pack
from rarebit.methods._sizing import check_share
from rarebit.pruning.masked import Masked, MaskedStack, MaskedTable, keep_largest
from rarebit.settings import check_types, require
from rarebit.tables.collection import Stack
from rarebit.tables.table import AnyTable, Method, Table, stored_tensors
from rarebit.technique import Control, Rank, SharedStage, Technique, technique_name, technique_text

if TYPE_CHECKING:
    from rarebit.training.run import Trained, TrainingJob

__all__ = ["Pruned", "PrunedBy", "PrunedStart", "SharedPruning"]

PrunedBy = Literal["threshold", "magnitude"]
PrunedStart = Literal["ticket", "random", "trained"]

BYTES_AN_ENTRY, BYTES_A_ROW, BYTES_A_TABLE = 5, 4.125, 12
"""Of a packed table: a value and its column; an offset and a bit; one more offset, and the bits of a last word."""


@dataclass(frozen=True)
class SharedPruning(SharedStage):
    """A first stage of pruning that several runs share."""

    budgets: tuple[int, ...]
    """How many entries the runs keep."""
    as_ticket: bool = False
    """Whether only the ticket is kept, for runs that differ in their second stage alone. Those may run side by side:
    one makes it, and the others wait."""


@dataclass(frozen=True, kw_only=True)
class Pruned(Method):
    """Keep the entries that count most, and nothing else.

    >>> Pruned(keep=30_000)
    Pruned(keep=30000, by='threshold', start='ticket', epochs=None)
    """

    title: ClassVar[str] = "single entries cut until a budget is met, the rest trained again"
    paper: ClassVar[str] = (
        "Liu et al., Learnable Embedding Sizes for Recommender Systems, ICLR 2021"
    )
    control: ClassVar[str] = "magnitude"
    controls: ClassVar[tuple[str, ...]] = ("magnitude",)
    cost: ClassVar[str] = (
        "a run is trained twice; what it leaves is packed, about 5 bytes an entry and 4 a row"
    )
    applies: ClassVar[str] = (
        "tables that must become much smaller, above all where rows differ in how much they need; not "
        "where zeros save nothing, as on hardware that wants whole rows"
    )
    training_only: ClassVar[bool] = True
    composition_rank: ClassVar[Rank] = Rank.MASKS
    follows: ClassVar[frozenset[str]] = frozenset({"pep"})
    excludes: ClassVar[Mapping[str, str]] = {
        "hashing": "buckets of many values have no entries to spare; use one of them",
        "low-rank": "a product of factors is small already; use one of them, or mlet+pruned",
    }
    masks_entries: ClassVar[bool] = True

    keep: int
    """Entries left over all tables."""
    by: PrunedBy = "threshold"
    """"threshold": cut while the model is trained. "magnitude": cut once, after it is trained."""
    start: PrunedStart = "ticket"
    """Where a run trains what is left from: "ticket", the values it had at first; "random", new ones;
    "trained", not at all: the model stays as pruning left it."""
    epochs: int | None = None
    """Epochs of pruning; as many as the run has if not given."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.keep >= 1, f"at least one entry must be kept, got keep={self.keep}")
        require(
            self.epochs is None or self.epochs >= 1,
            f"epochs must be at least 1, got epochs={self.epochs}",
        )

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the budget whose packed tables have at most this share of the bytes, if no row is empty.

        >>> Pruned.for_share([(1000, 64)], share=0.1).keep
        4292
        """
        check_share(share)
        whole = 4 * sum(rows * width for rows, width in shapes)
        empty = BYTES_A_ROW * sum(rows for rows, _ in shapes) + BYTES_A_TABLE * len(shapes)
        return cls(keep=max(int((share * whole - empty) / BYTES_AN_ENTRY), 1))

    def drive(self, job: "TrainingJob") -> "Trained":
        """Train in two stages."""
        from rarebit.pruning._prune import PruningDriver

        return PruningDriver(self, job).run()

    def shared_stage(self, techniques: Sequence[Technique]) -> tuple[Technique, ...] | None:
        """Return what the first stage depends on; a run without a second one shares nothing."""
        if self.start == "trained":
            return None
        return tuple(one for one in techniques if isinstance(one, Method))

    def share(self, folder: Path) -> "SharedPruning":
        """Return a first stage of which only the ticket is kept."""
        return SharedPruning(folder, (self.keep,), as_ticket=True)

    def make_control(self, name: str, techniques: Sequence[Technique]) -> Control | None:
        """Return the same budget, met by cutting the smallest trained entries at once."""
        if name != "magnitude":
            return None
        others = [t for t in techniques if t is not self and technique_name(t) != "pep"]
        methods = (*others, replace(self, by="magnitude", epochs=None))
        return Control("+".join(map(technique_text, methods)), (methods,))

    def wrap(self, base: AnyTable) -> Table:
        """Return the table with all but its largest entries held at zero."""
        return self.wrap_all({"table": base})[0]

    def wrap_all(self, tables: Mapping[str, AnyTable]) -> list[Table]:
        """Return the tables with all but the largest entries of all of them held at zero."""
        masked = Masked(keep_largest(tables, self.keep)).wrap_all(tables)
        return [
            MaskedTable(self, table.inner, table.kept)
            for table in masked
            if isinstance(table, MaskedTable)
        ]

    def stack(self, tables: Sequence[Table], lengths: Sequence[int]) -> Stack:
        """Return pruned tables behind one lookup of their rows and one of their masks."""
        masked = [table for table in tables if isinstance(table, MaskedTable)]
        return MaskedStack(self, masked, lengths)

    def serve(self, table: Table) -> AnyTable:
        """Return what is left of a table, packed; a plain table with zeros where that is no smaller."""
        packed, plain = Pack().wrap(table), table.merge()
        sizes = [sum(t.nbytes for t in stored_tensors(found)) for found in (packed, plain)]
        return packed if sizes[0] < sizes[1] else plain
