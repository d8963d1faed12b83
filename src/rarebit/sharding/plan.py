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
        total = 0.0
        for table, kind, pieces, _ in self.placements:
            lookups = share * table.lookups
            ids, rows = ID_BYTES * lookups, NUMBER_BYTES * lookups * table.width
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
    # cut tables first: they weigh on all processes alike
    order = sorted(tables, key=lambda table: -table.numbers)
    for table in sorted(order, key=lambda table: wanted.get(table.name) not in ("row", "column")):
        kind, reason = wanted.get(table.name, "table"), "as asked"
        least = min(range(world), key=lambda rank: held[rank])
        room = [rank for rank in range(world) if held[rank] + table.numbers <= UNEVEN * fair]
        if room:
            least = min(room, key=lambda rank: (looked_up[rank], held[rank]))
        if table.name not in wanted:
            reason = "no process has room, and this one holds least"
            if room:
                reason = "of the processes with room, it looks up least so far"
            elif world > 1 and _fills(table, world):
                kind, whole = "row", held[least] + table.numbers
                reason = f"whole, one process would hold {whole / fair:.1f} times its fair share"
        elif kind == "row" and not _fills(table, world):
            kind, reason = "table", "too few rows for a block in every process"
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
        made[table.name] = Placement(table, kind, pieces, reason)
    return Plan(world, tuple(made[name] for name in names))


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
