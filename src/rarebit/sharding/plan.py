"""Which process holds which piece of which table, what that takes, and what a step sends.

    table    the whole table in one process: lookups and rows go to that process and back
    row      a block of rows in every process: each process adds up its part of every row of the batch
    column   some columns of all rows in each process: lookups go to all of them, each returns its columns

`auto` gives whole tables, largest first, to the process that looks up least so far, among those that have room for it, and
cuts by rows what none has room for: more than its fair share. A step waits for the process that looks up most. Nothing here needs TorchRec, or a table: a plan for a billion rows is made from
their number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from rarebit.errors import SettingsError
from rarebit.settings import require, suggest

Kind: TypeAlias = Literal["table", "row", "column"]
KINDS: tuple[Kind, ...] = ("table", "row", "column")
PlanSpec: TypeAlias = Literal["auto", "table", "row", "column"] | Mapping[str, Kind]
"""A plan by its name, or the kind of each table by the table's name; tables not named are planned by `auto`."""

UNEVEN = 1.1
"""How much more than its fair share a process may hold before a table is cut."""
COLUMNS = 4
"""Columns are cut in multiples of so many: the width of a vector in the fused kernels."""
ID_BYTES, NUMBER_BYTES = 4, 4


class TableSize(NamedTuple):
    """What a plan needs to know of a table."""

    name: str
    rows: int
    width: int
    lookups: int = 1
    """Lookups that one row of data makes in it."""
    beside: str = ""
    """A table in which the same ids are looked up: a plan keeps both in the same place, so that ids travel once."""

    @property
    def numbers(self) -> int:
        """Its weights."""
        return self.rows * self.width


class Piece(NamedTuple):
    """A rectangle of a table, and the process that holds it."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def numbers(self) -> int:
        """Its weights."""
        return self.rows * self.columns


class Placement(NamedTuple):
    """Where a table lies, and why."""

    table: TableSize
    kind: Kind
    pieces: tuple[Piece, ...]
    reason: str

    def gets_ids_with(self, other: "Placement") -> bool:
        """Return whether the rows of an id lie in the same processes in both tables."""
        ours, theirs = ([piece[:3] for piece in each.pieces] for each in (self, other))
        return self.kind == other.kind != "column" and ours == theirs

    def piece_of(self, rank: int) -> Piece:
        """Return the piece in a process: an empty one where it holds nothing of the table."""
        return next(
            (p for p in self.pieces if p.rank == rank), Piece(rank, 0, 0, 0, self.table.width)
        )


@dataclass(frozen=True)
class Plan:
    """Where all tables lie."""

    world: int
    placements: tuple[Placement, ...]

    def numbers(self, rank: int) -> int:
        """Return how many weights a process holds."""
        return sum(placement.piece_of(rank).numbers for placement in self.placements)

    def rows(self, rank: int) -> int:
        """Return how many rows, or parts of rows, a process holds."""
        return sum(placement.piece_of(rank).rows for placement in self.placements)

    def sent(self, batch: int) -> int:
        """Return the bytes that one process sends per step for the tables, `batch` rows over all processes.

        Ids there, rows back, their gradients there again; what stays in the process is not sent.

        >>> size = TableSize("user", rows=1000, width=16)
        >>> make_plan([size], 4, "table").sent(4096), make_plan([size], 4, "row").sent(4096)
        (104448, 408576)
        """
        share, others = batch / self.world, self.world - 1
        placed = {placement.table.name: placement for placement in self.placements}
        total = 0.0
        for placement in self.placements:
            table, kind, pieces, _ = placement
            lookups = share * table.lookups
            ids, rows = ID_BYTES * lookups, NUMBER_BYTES * lookups * table.width
            if table.beside and placement.gets_ids_with(placed[table.beside]):
                ids = 0.0  # they are there already
            if kind == "row":
                # an id goes to one process, how many there are to all; every process adds up all rows
                total += others * (ids / self.world + ids + 2 * rows)
            else:
                total += others / self.world * (2 * ids * len(pieces) + 2 * rows)
        return math.ceil(total)

    def explain(self, batch: int | None = None) -> str:
        """Return the plan in words: one line per table, what each process holds, and what a step of `batch` rows sends."""
        width = max((len(p.table.name) for p in self.placements), default=0)
        lines = [
            f"{p.table.name:<{width}}  {p.table.rows:>13,} x {p.table.width:<4} {p.kind:<7}"
            f"{_ranks(p):<14} {p.reason}"
            for p in self.placements
        ]
        held = [self.numbers(rank) * NUMBER_BYTES / 1e6 for rank in range(self.world)]
        sent = "" if batch is None else f", {self.sent(batch) / 1e6:,.2f} MB sent per step"
        lines.append(
            f"tables over {self.world} processes: {min(held):,.1f} to {max(held):,.1f} MB of weights each{sent}"
        )
        return "\n".join(lines)


def _ranks(placement: Placement) -> str:
    ranks = [piece.rank for piece in placement.pieces]
    if len(ranks) == 1:
        return f"on {ranks[0]}"
    return f"on {ranks[0]} to {ranks[-1]}" if ranks == sorted(ranks) else f"on {len(ranks)}"


def make_plan(
    tables: Sequence[TableSize], world: int, plan: PlanSpec = "auto", *, whole_rows: bool = False
) -> Plan:
    """Return where to put each table so that every process holds about as much, and looks up about as much.

    `whole_rows` is for optimizers that keep one number per row, which a cut by columns would change.

    >>> sizes = [TableSize("user", 900, 8), TableSize("item", 90, 8), TableSize("day", 7, 8)]
    >>> [(p.table.name, p.kind) for p in make_plan(sizes, 2).placements]
    [('user', 'row'), ('item', 'table'), ('day', 'table')]
    """
    require(world >= 1, f"a plan needs at least one process, got {world}")
    names = [table.name for table in tables]
    wanted = _wanted(names, plan)
    held, looked_up = [0] * world, [0.0] * world
    fair = sum(table.numbers for table in tables) / world
    made: dict[str, Placement] = {}
    groups = _groups(tables, wanted)
    # tables that follow another are placed with it, as one that is as wide as all of them
    joined = [group[0]._replace(width=sum(t.width for t in group)) for group in groups.values()]
    # cut tables first: they weigh on all processes alike
    order = sorted(joined, key=lambda table: -table.numbers)
    for table in sorted(order, key=lambda table: wanted.get(table.name) not in ("row", "column")):
        room = [rank for rank in range(world) if held[rank] + table.numbers <= UNEVEN * fair]
        least = min(range(world), key=lambda rank: held[rank])
        if room:
            least = min(room, key=lambda rank: (looked_up[rank], held[rank]))
        more = (held[least] + table.numbers) / fair
        kind, reason = _kind(table, world, wanted.get(table.name), more, has_room=bool(room))
        if kind == "column" and whole_rows:
            raise SettingsError(
                f"table {table.name!r} cannot be cut by columns: row-wise Adagrad keeps one number for a whole row; cut it "
                "by rows, or train with SGD or Adam"
            )
        pieces = _pieces(table, kind, held, least)
        for piece in pieces:
            held[piece.rank] += piece.numbers
            share = piece.rows / table.rows if kind == "row" else 1.0
            looked_up[piece.rank] += table.lookups * piece.columns * share
        for size in groups[table.name]:
            own = pieces
            if kind != "column":
                own = tuple(piece._replace(columns=size.width) for piece in pieces)
            why = reason if size.name == table.name else f"with {table.name}"
            made[size.name] = Placement(size, kind, own, why)
    return Plan(world, tuple(made[name] for name in names))


def _groups(tables: Sequence[TableSize], wanted: Mapping[str, Kind]) -> dict[str, list[TableSize]]:
    """Return each table with those that are placed with it, by its name."""
    groups: dict[str, list[TableSize]] = {}
    for table in tables:
        leader = table.beside
        alike = wanted.get(table.name) in (None, wanted.get(leader))
        follows = leader in groups and alike and wanted.get(leader) != "column"
        groups.setdefault(leader if follows else table.name, []).append(table)
    return groups


def _kind(
    table: TableSize, world: int, asked: Kind | None, share: float, *, has_room: bool
) -> tuple[Kind, str]:
    """Return the kind of a table and why; `share` of what is fair one process would hold with all of it."""
    if asked == "row" and not _fills(table, world):
        return "table", "too few rows for a block in every process"
    if asked is not None:
        return asked, "as asked"
    if has_room:
        return "table", "of the processes with room, it looks up least so far"
    if world > 1 and _fills(table, world):
        return "row", f"whole, one process would hold {share:.1f} times its fair share"
    return "table", "no process has room, and this one holds least"


def _fills(table: TableSize, world: int) -> bool:
    """Return whether blocks of its rows give every process some."""
    return -(-table.rows // world) * (world - 1) < table.rows


def _wanted(names: Sequence[str], plan: PlanSpec) -> dict[str, Kind]:
    """Return the kinds that a plan asks for, by table."""
    if plan == "auto":
        return {}
    asked = plan if isinstance(plan, Mapping) else dict.fromkeys(names, plan)
    for name, kind in asked.items():
        require(
            name in names, f"the plan names {name!r}, which is no table{suggest(name, list(names))}"
        )
        if kind not in KINDS:
            choices = suggest(str(kind), ["auto", *KINDS])
            raise SettingsError(f"unknown plan {kind!r} for table {name!r}{choices}")
    return dict(asked)


def _pieces(table: TableSize, kind: Kind, held: Sequence[int], least: int) -> tuple[Piece, ...]:
    world = len(held)
    if kind == "table":
        return (Piece(least, 0, table.rows, 0, table.width),)
    if kind == "row":
        block = -(-table.rows // world)
        starts = [min(rank * block, table.rows) for rank in range(world + 1)]
        return tuple(
            Piece(rank, start, end - start, 0, table.width)
            for rank, (start, end) in enumerate(pairwise(starts))
        )
    # every piece but the last is a whole number of vectors; those that hold least take them
    vectors = -(-table.width // COLUMNS)
    parts = min(world, vectors)
    ends = [min(table.width, COLUMNS * (vectors * (part + 1) // parts)) for part in range(parts)]
    ranks = sorted(sorted(range(world), key=lambda rank: held[rank])[:parts])
    return tuple(
        Piece(rank, 0, table.rows, start, end - start)
        for rank, start, end in zip(ranks, [0, *ends], ends, strict=False)
    )
