"""The compiled lookup of packed tables, against the dense table and against plain torch."""

import os
import shlex
import shutil

import pytest
import torch
from capabilities import needs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rarebit.codes.packed import (
    Pack,
    PackedKernel,
    PackedTable,
    Parts,
    load_packed_kernel,
    pack_bits,
    pack_rows,
    packed_kernel,
    rows_before,
)
from rarebit.tables.compiler import COMPILERS

WANTED = [*shlex.split(os.environ.get("CXX", ""))[:1], *COMPILERS]
needs_compiler = needs("C++ compiler", any(map(shutil.which, WANTED)), "none is on the path")


def environment(cache, **changes):
    kept = {k: v for k, v in os.environ.items() if k != "RAREBIT_COMPILE"}
    return kept | {"XDG_CACHE_HOME": str(cache), **changes}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = load_packed_kernel(environment(tmp_path_factory.mktemp("cache")))
    assert kernel is not None, "there is a compiler, so there must be a kernel"
    return kernel


def by_torch(table: PackedTable, ids: Tensor) -> Tensor:
    return table._served_rows(table._checked(ids)).view(*ids.shape, table.embedding_dim)


class Operations(TorchDispatchMode):
    """Lists the operations of torch that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **options or {})


def sparse_weight(
    rows: int, width: int, kept: float, seed: int = 0, rows_kept: float = 1.0
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=draw)
    weight[torch.rand(rows, width, generator=draw) >= kept] = 0.0
    weight[torch.rand(rows, generator=draw) >= rows_kept] = 0.0
    return weight


def frozen(weight: Tensor, **options) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight.clone(), **options)


def look_up(kernel: PackedKernel, table: PackedTable, ids: Tensor) -> Tensor | None:
    shape = (table.num_embeddings, table.embedding_dim)
    return kernel.rows(ids, table.parts, table.before, shape, table._buffers.get("scale"))


def in_form(weight: Tensor, parts: Parts, *, bits: bool) -> Parts:
    """Return the parts with their columns in this form, whichever is the smaller one."""
    kept = weight != 0
    if bits:
        return parts._replace(columns=pack_bits(kept[kept.any(dim=1)]))
    kind = torch.uint8 if weight.shape[1] <= 256 else torch.int16
    return parts._replace(columns=kept.nonzero()[:, 1].to(kind))


weights = st.builds(
    sparse_weight,
    rows=st.one_of(st.integers(1, 200), st.sampled_from([64, 65, 128])),
    width=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 255, 256, 257, 300])),
    kept=st.sampled_from([0.0, 0.003, 0.03, 0.1, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 99),
    rows_kept=st.sampled_from([0.05, 0.5, 1.0]),
)
batches = st.tuples(st.sampled_from([0, 1, 5, 63, 64, 65, 200]), st.integers(0, 9))


def draw_ids(rows: int, batch: tuple[int, int]) -> Tensor:
    """Return ids with duplicates, of the first and the last row, too."""
    count, seed = batch
    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(seed))
    ids[:2] = torch.tensor([rows - 1, 0])[:count]
    return ids


# ------------------------------------------------------------------------------------------ the rows


@needs_compiler
@pytest.mark.parametrize("bits", [False, True], ids=["numbers", "bits"])
@given(weight=weights, batch=batches)
def test_rows_are_those_of_the_dense_table(kernel, bits, weight, batch):
    parts, ids = in_form(weight, pack_rows(weight), bits=bits), draw_ids(len(weight), batch)
    rows = kernel.rows(ids, parts, rows_before(parts.filled), tuple(weight.shape))
    assert rows.shape == (len(ids), weight.shape[1])
    assert torch.equal(rows, F.embedding(ids, weight))


@needs_compiler
@given(weight=weights, batch=batches, padding=st.booleans())
def test_codes_are_those_of_plain_torch(kernel, weight, batch, padding):
    table = Pack(bits=8).wrap(frozen(weight, padding_idx=len(weight) - 1 if padding else None))
    ids = draw_ids(len(weight), batch)
    rows, expected = look_up(kernel, table, ids), by_torch(table, ids)
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))
    assert not padding or not rows[ids == len(weight) - 1].any()


@needs_compiler
def test_rows_wider_than_two_bytes_can_number(kernel):
    weight = torch.zeros(3, 40_000)
    weight[1, 39_999], weight[1, 0], weight[2, 32_768] = 5.0, 6.0, 7.0
    table = Pack().wrap(frozen(weight))
    assert table.columns.dtype == torch.int32
    assert torch.equal(look_up(kernel, table, torch.tensor([2, 1, 0])), weight[[2, 1, 0]])


@needs_compiler
def test_values_that_are_not_finite_and_signs_of_zero_are_kept(kernel):
    weight = torch.tensor([[0.0, float("nan"), 2.0], [float("inf"), 0.0, 1e-45]])
    rows = look_up(kernel, Pack().wrap(frozen(weight)), torch.tensor([1, 0]))
    assert torch.equal(rows.view(torch.int32), weight[[1, 0]].view(torch.int32))


@needs_compiler
@pytest.mark.threads(2)
@pytest.mark.parametrize("kept", [0.05, 0.5])
def test_threads_share_a_long_batch(kernel, kept):
    weight = sparse_weight(5_000, 33, kept, rows_kept=0.7)
    table, ids = Pack().wrap(frozen(weight)), torch.randint(5_000, (20_001,))
    for _ in range(20):  # on a busy machine the second thread may come too late to have a part
        assert torch.equal(look_up(kernel, table, ids), F.embedding(ids, weight))
    ids[19_999] = 5_000
    assert look_up(kernel, table, ids) is None


# ------------------------------------------------------------------------- what must not be read


@needs_compiler
@pytest.mark.parametrize("kept", [0.1, 0.9])
@pytest.mark.parametrize("wrong", [-1, 70, 127, 128, 2**40, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("place", [0, 64, 99])
def test_an_id_without_a_row_is_refused(kernel, kept, wrong, place):
    table, ids = Pack().wrap(frozen(sparse_weight(70, 9, kept))), torch.randint(70, (100,))
    assert look_up(kernel, table, ids) is not None
    ids[place] = wrong
    assert look_up(kernel, table, ids) is None


@needs_compiler
def test_a_table_without_rows_has_none_for_any_id(kernel):
    parts = Parts(
        torch.empty(0),
        torch.empty(0, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    )
    before, none = rows_before(parts.filled), torch.empty(0, dtype=torch.int64)
    assert kernel.rows(torch.tensor([0]), parts, before, (0, 4)) is None
    assert kernel.rows(none, parts, before, (0, 4)).shape == (0, 4)


WEIGHT = sparse_weight(90, 9, 0.5, rows_kept=0.8)
BOTH = {
    name: in_form(WEIGHT, pack_rows(WEIGHT), bits=name == "bits") for name in ("numbers", "bits")
}
LARGEST = {torch.uint8: 255, torch.int32: 2**31 - 1, torch.int64: -1}
BEYOND = 777.0
AROUND = {"values": BEYOND, "columns": 0, "offsets": 1, "filled": -1, "before": 0}


def guarded(name: str, part: Tensor) -> Tensor:
    """Return a copy of a part in the midst of numbers that would do, so that reading them shows."""
    guard = part.new_full((64, *part.shape[1:]), AROUND[name])
    return torch.cat([guard, part, guard])[64:-64]


def changed_rows(
    kernel: PackedKernel, form: str, name: str, at: int = 0, value: int | None = None
) -> Tensor | None:
    """Return all rows out of guarded parts, one number of which was changed after the check."""
    given = BOTH[form]._asdict() | {"before": rows_before(BOTH[form].filled)}
    given = {key: guarded(key, part) for key, part in given.items()}
    if value is not None:
        given[name].view(-1)[at] = value
    before = given.pop("before")
    return kernel.rows(torch.arange(90), Parts(**given), before, (90, 9))


@needs_compiler
@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("name", ["columns", "offsets", "filled", "before"])
def test_a_part_that_changed_after_its_check_leads_nowhere_else(kernel, form, name):
    assert torch.equal(changed_rows(kernel, form, name), WEIGHT)
    part = rows_before(BOTH[form].filled) if name == "before" else getattr(BOTH[form], name)
    refused = 0
    for at in range(part.numel()):
        for value in (LARGEST[part.dtype], 9):
            rows = changed_rows(kernel, form, name, at, value)
            refused += rows is None
            # Entries must come out of the values, which are no zeros, or nothing must come at all.
            assert rows is None or torch.isin(rows[rows != 0], WEIGHT[WEIGHT != 0]).all()
    assert refused > 0


@needs_compiler
@pytest.mark.parametrize(
    ("form", "name", "at", "value"),
    [
        ("numbers", "columns", 3, 9),  # the first beyond the width
        ("bits", "columns", 1, 2),  # the same, in the second byte of a row
        ("bits", "columns", 0, 0),  # fewer bits than values
        ("bits", "columns", 0, 255),  # more
        ("numbers", "offsets", -1, len(BOTH["numbers"].values) + 9),
        ("numbers", "offsets", -1, 10**6),
        ("numbers", "offsets", 0, -1),
        ("numbers", "offsets", 4, 0),  # a run that ends before it starts
        ("bits", "offsets", -1, 10**6),
        ("numbers", "before", 0, -9),
        ("numbers", "before", 0, -(2**31)),
        ("numbers", "before", 1, len(BOTH["numbers"].offsets) + 9),
        ("numbers", "before", 1, 10**6),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(kernel, form, name, at, value):
    assert changed_rows(kernel, form, name, at, value) is None


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        {"values": BOTH["numbers"].values.double()},
        {"values": BOTH["numbers"].values[:-1]},
        {"values": BOTH["numbers"].values.to(torch.int8)},
        {"columns": BOTH["numbers"].columns.int()},
        {"columns": BOTH["bits"].columns[:-1]},
        {"columns": BOTH["bits"].columns[:, :1]},
        {"offsets": BOTH["numbers"].offsets.long()},
        {"offsets": BOTH["numbers"].offsets[:0]},
        {"filled": BOTH["numbers"].filled[:1]},
        {"filled": BOTH["numbers"].filled.int()},
        {"ids": torch.arange(3, dtype=torch.int32)},
        {"ids": torch.arange(6)[::2]},
        {"ids": torch.arange(3, device="meta")},
        {"before": torch.zeros(2, dtype=torch.int64)},
        {"before": torch.zeros(1, dtype=torch.int32)},
        {"shape": (129, 9)},
        {"scale": torch.tensor(1.0)},
    ],
    ids="-".join,
)
def test_tensors_of_another_form_are_left_to_torch(kernel, change):
    parts = BOTH["numbers"]
    given = {"ids": torch.arange(3), "before": rows_before(parts.filled), "shape": (90, 9)}
    assert kernel.rows(parts=parts, **given) is not None
    kinds = {key: tensor for key, tensor in change.items() if key in parts._fields}
    rest = {key: value for key, value in change.items() if key not in kinds}
    assert kernel.rows(parts=parts._replace(**kinds), **given | rest) is None


@needs_compiler
def test_nothing_is_written_where_torch_makes_no_numbers(kernel):
    table = Pack().wrap(frozen(WEIGHT))
    ids = torch.tensor([3, 5])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert look_up(kernel, table, ids) is None
    with torch.device("meta"):
        rows = look_up(kernel, table, ids)
    assert torch.equal(rows, WEIGHT[ids])


@needs_compiler
def test_codes_need_a_scale_of_single_precision(kernel):
    table, ids = Pack(bits=8).wrap(frozen(WEIGHT)), torch.arange(90)
    assert look_up(kernel, table, ids) is not None
    table.double()
    assert look_up(kernel, table, ids) is None
    with torch.no_grad():
        assert table(ids).dtype == torch.float64


# -------------------------------------------------------------------------------- which path is taken


@pytest.fixture
def switched_on(monkeypatch):
    """Let tables ask for the kernel anew, whatever the environment says."""
    monkeypatch.delenv("RAREBIT_COMPILE", raising=False)
    packed_kernel.cache_clear()
    assert packed_kernel() is not None
    yield
    packed_kernel.cache_clear()


@needs_compiler
def test_a_lookup_without_gradient_takes_the_kernel(switched_on):
    trained, ids = Pack().wrap(frozen(WEIGHT, freeze=False)), torch.arange(90)
    for table in (Pack().wrap(frozen(WEIGHT)), Pack(bits=8).wrap(frozen(WEIGHT))):
        with Operations() as seen:
            table(ids)
            table(ids.int().view(9, 10).T)
        assert not {"scatter_", "aminmax"} & seen.names
    with Operations() as seen, torch.no_grad():
        trained(ids)
    assert "scatter_" not in seen.names
    with Operations() as seen:
        assert trained(ids).requires_grad
    assert "scatter" in seen.names


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_looked_up_by_torch(switched_on, dtype):
    with Operations() as seen:
        rows = Pack().wrap(frozen(WEIGHT.to(dtype)))(torch.arange(90))
    assert "scatter_" in seen.names
    assert torch.equal(rows, WEIGHT.to(dtype))


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # torch's own, on tracing
def test_what_is_recorded_consists_of_operations_of_torch(switched_on):
    weight, ids = sparse_weight(90, 30, 0.1), torch.tensor([3, 8, 80])
    table = Pack().wrap(frozen(weight))
    traced = torch.jit.trace(table, (ids,), check_trace=False)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    recorded = torch.compile(table, backend=record)
    for other in (ids, ids.flip(0)):  # as many entries: a trace has their number in it
        assert torch.equal(traced(other), weight[other])
        assert torch.equal(recorded(other), weight[other])
    assert "cumsum" in "".join(graphs)


@needs_compiler
@pytest.mark.parametrize("kept", [0.1, 0.9])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_table_gives_the_same_rows_on_both_paths(switched_on, kept, bits):
    weight = sparse_weight(500, 20, kept)
    table, ids = Pack(bits=bits).wrap(frozen(weight, padding_idx=7)), torch.randint(500, (30, 3))
    rows = table(ids)
    assert torch.equal(by_torch(table, ids), rows)
    with pytest.raises(IndexError, match="from 0 to 499 in a table of 500 rows, got 500"):
        table(torch.tensor([0, 500]))


@needs_compiler
def test_a_part_that_leads_nowhere_is_an_error_of_torch(switched_on):
    table = Pack().wrap(frozen(sparse_weight(500, 20, 0.1)))
    table.offsets[1:] = 10**6
    with pytest.raises((IndexError, RuntimeError)):
        table(torch.arange(500))
