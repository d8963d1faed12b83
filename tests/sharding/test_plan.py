import pytest
from hypothesis import given
from hypothesis import strategies as st

from rarebit.bench.scale import Cluster, expected
from rarebit.errors import SettingsError
from rarebit.sharding.plan import TableSize, make_plan

SIZES = [TableSize("user", 1000, 8), TableSize("item", 300, 8), TableSize("day", 7, 8)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["auto", "table", "row", "column"])
def test_every_number_lies_in_exactly_one_process(kind, world):
    plan = make_plan(SIZES, world, kind)
    for placement in plan.placements:
        cells = [
            (row, column)
            for piece in placement.pieces
            for row in range(piece.first_row, piece.first_row + piece.rows)
            for column in range(piece.first_column, piece.first_column + piece.columns)
        ]
        assert len(cells) == len(set(cells)) == placement.table.numbers
        assert len({piece.rank for piece in placement.pieces}) == len(placement.pieces)
    assert sum(map(plan.numbers, range(world))) == sum(table.numbers for table in SIZES)


def test_auto_cuts_what_one_process_should_not_hold_and_says_why():
    plan = make_plan(SIZES, 2)
    assert [placement.kind for placement in plan.placements] == ["row", "row", "table"]
    assert max(map(plan.numbers, range(2))) <= 1.3 * min(map(plan.numbers, range(2)))
    text = plan.explain()
    assert "whole, one process would hold 1.5 times its fair share" in text
    assert "of the processes with room, it looks up least so far" in text


def test_a_large_table_leaves_its_process_a_share_of_the_lookups():
    # by memory alone one process would have all 20 small tables, and the other would wait for it in every step
    sizes = [TableSize("user", 10_000, 8), TableSize("item", 9_000, 8)]
    sizes += [TableSize(f"small{n}", 50, 8) for n in range(20)]
    for kind in ("auto", "table"):
        plan = make_plan(sizes, 2, kind)
        lookups = [sum(p.piece_of(rank).rows > 0 for p in plan.placements) for rank in range(2)]
        assert lookups == [11, 11]
        assert max(map(plan.numbers, range(2))) <= 1.1 * 20_000 * 8 / 2


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 9), st.integers(1, 4)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 6),
)
def test_auto_fills_no_process_beyond_its_share_where_tables_can_be_cut(shapes, world):
    sizes = [TableSize(str(n), *shape) for n, shape in enumerate(shapes)]
    plan = make_plan(sizes, world)
    fair = sum(size.numbers for size in sizes) / world
    # rounding up to whole rows, and what is too small to be cut
    uncut = (p.table.numbers for p in plan.placements if p.reason.startswith("no process has room"))
    slack = sum(size.width for size in sizes) + sum(uncut)
    assert max(map(plan.numbers, range(world))) <= 1.1 * fair + slack


@pytest.mark.parametrize(("rows", "kind"), [(3, "table"), (4, "row"), (5, "table"), (7, "row")])
def test_a_table_is_cut_by_rows_only_where_every_process_gets_some(rows, kind):
    [placement] = make_plan([TableSize("day", rows, 8)], 4, "row").placements
    assert placement.kind == kind
    assert all(piece.rows for piece in placement.pieces)


def test_a_plan_may_name_the_kind_of_some_tables():
    plan = make_plan(SIZES, 2, {"item": "column"})
    kinds = {placement.table.name: placement.kind for placement in plan.placements}
    assert kinds["item"] == "column"
    with pytest.raises(SettingsError, match="'itme', which is no table; did you mean 'item'"):
        make_plan(SIZES, 2, {"itme": "row"})
    with pytest.raises(SettingsError, match="keeps one number for a whole row"):
        make_plan(SIZES, 2, "column", whole_rows=True)


def test_what_is_sent_is_the_sum_over_messages():
    size, batch, world = TableSize("user", 1000, 16), 4096, 4
    share = batch // world
    # by table: an id and its length to the owner, a row back, its gradient there; what is at home is not sent
    messages = share * (4 + 4 + 64 + 64) * (world - 1) / world
    assert make_plan([size], world, "table").sent(batch) == messages
    # by rows: an id to one process, lengths to all, sums of all rows and their gradients with all
    messages = share * 4 * (world - 1) / world + (world - 1) * share * (4 + 64 + 64)
    assert make_plan([size], world, "row").sent(batch) == messages
    assert make_plan([size], 1, "row").sent(batch) == 0


def test_a_billion_rows_shrink_with_the_workers_and_then_the_network_is_the_limit():
    size = TableSize("id", rows=10**9, width=64)
    cluster = Cluster(seconds_per_row=2e-5, bytes_per_second=12.5e9)
    found = {
        world: expected(
            make_plan([size], world, "row"), cluster, share=4096, dense=0, state_bytes=4
        )
        for world in (8, 64, 512)
    }
    for world, figures in found.items():
        assert figures["gigabytes"] == pytest.approx(260 / world, rel=1e-6)
    assert [figures["limit"] for figures in found.values()] == ["compute", "compute", "network"]
    times = [figures["network_ms"] for figures in found.values()]
    assert times[2] > 7 * times[1] > 49 * times[0]


@pytest.mark.parametrize("plan", ["auto", "table", "row", {"user": "row"}, {"item": "table"}])
def test_tables_with_the_same_ids_lie_together(plan):
    narrow = [TableSize(f"{size.name}:w", size.rows, 1, beside=size.name) for size in SIZES]
    made = make_plan([*SIZES, *narrow], 3, plan)
    placed = {placement.table.name: placement for placement in made.placements}
    for size in SIZES:
        wide, beside = placed[size.name], placed[f"{size.name}:w"]
        assert beside.gets_ids_with(wide)
        assert sum(piece.numbers for piece in beside.pieces) == size.rows
        assert {piece.columns for piece in beside.pieces} == {1}
    # each id of a batch goes to its process once, rows of both widths come back
    apart = make_plan([*SIZES, *(size._replace(beside="") for size in narrow)], 3, plan)
    assert made.sent(300) < apart.sent(300)


@pytest.mark.parametrize("plan", ["column", {"user": "column"}, {"user": "table", "user:w": "row"}])
def test_a_table_in_another_kind_of_pieces_lies_by_itself(plan):
    wide, narrow = TableSize("user", 1000, 8), TableSize("user:w", 1000, 1, beside="user")
    made = make_plan([wide, TableSize("item", 1001, 8), narrow], 3, plan)
    user, _, beside = made.placements
    assert not beside.gets_ids_with(user)
    assert sum(piece.numbers for piece in beside.pieces) == 1000
