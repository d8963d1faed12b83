"""What evidence coding chooses: against reverse water-filling, against its own controls, and by what it measures."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, deepfm
from methods.training_data import rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.codes.coded import CodedStack, CodedTable, Origin
from rarebit.errors import DataError, SettingsError, UnsupportedTableError
from rarebit.methods.evidence_coding import (
    ERROR,
    STEP,
    Draft,
    EvidenceCoding,
    budget,
    compress_,
    logistic_loss,
    measure_sensitivity,
)
from rarebit.methods.hashing import HashedTable
from rarebit.models.dcn_v2 import DCNv2
from rarebit.tables.apply import table_bytes

# ---- the quantizer


def mean_squared_error(bits: int, step: float) -> float:
    """Return the error of a uniform quantizer of standard normal numbers, by numerical integration."""
    x = np.linspace(0.0, 9.0, 60_001)  # both sides are the same
    levels = 2 ** (bits - 1)
    nearest = (np.minimum(np.floor(x / step), levels - 1) + 0.5) * step
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * float(np.trapezoid((x - nearest) ** 2 * density, x))


@pytest.mark.parametrize("bits", range(1, 9))
def test_steps_and_errors_are_those_of_the_best_quantizer(bits):
    low, high = 0.5 * STEP[bits], 2.0 * STEP[bits]
    for _ in range(40):  # the error falls, then grows
        third = (high - low) / 3
        if mean_squared_error(bits, low + third) < mean_squared_error(bits, high - third):
            high -= third
        else:
            low += third
    assert pytest.approx(low, rel=1e-3) == STEP[bits]
    assert pytest.approx(mean_squared_error(bits, low), rel=1e-3) == ERROR[bits]


def test_without_bits_the_error_is_the_variance():
    assert (STEP[0], ERROR[0]) == (0.0, 1.0)


# ---- sizes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1/16", 1_000.0),
        (" 1 / 16 ", 1_000.0),
        ("1/2.5", 6_400.0),
        (0.05, 800.0),
        (1, 16_000.0),
        ("2 MB", 2e6),
        ("2mb", 2e6),
        ("1.5 kB", 1_500.0),
        ("3 KiB", 3_072.0),
        ("2 MiB", 2.0**21),
        ("1 GB", 1e9),
        ("700 B", 700.0),
    ],
)
def test_sizes_are_shares_or_bytes(size, expected):
    assert budget(size, 16_000) == pytest.approx(expected)
    EvidenceCoding(size=size)


@pytest.mark.parametrize(
    "size",
    ["", "1/", "2/3", "16", "2 TB", "MB", "-2 MB", "1/0", "0 B", "1/0.5", 0.0, -0.1, 1.01, math.nan, math.inf, None, True],
)  # fmt: skip
def test_other_sizes_are_refused(size):
    with pytest.raises(SettingsError, match=r"^size must be ") as caught:
        EvidenceCoding(size=size)
    assert "\n" not in str(caught.value)


# ---- what is chosen


def normal_rows(rows: int, variances: tuple[float, ...], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    scale = torch.tensor(variances, dtype=torch.float64).sqrt()
    return (torch.randn(rows, len(variances), generator=draw, dtype=torch.float64) * scale).float()


def coded(weight: Tensor, counts: Tensor | int | None, size: str | float, bent: Tensor | None = None, **options: object) -> CodedTable:  # fmt: skip
    model = nn.ModuleDict({"t": nn.Embedding.from_pretrained(weight.clone(), freeze=False, **options)})  # fmt: skip
    method = EvidenceCoding(size=size, counts=counts, sensitivity=None if bent is None else {"t": bent})  # fmt: skip
    rb.apply_(model, method, verbose=False)
    return model["t"]


def felt(table: CodedTable, weight: Tensor, counts: Tensor, bent: Tensor | None = None) -> float:
    """Return Σ_i w_i (x_i - e_i)' H (x_i - e_i), row by row."""
    metric = torch.eye(weight.shape[1]) if bent is None else bent
    off = weight.double() - table.weight.double()
    return float(((off @ metric.double()) * off).sum(dim=1) @ (counts.double() + 0.5))


def zipf(rows: int, most: int = 10_000) -> Tensor:
    return most // (1 + torch.arange(rows))


VARIANCES = (1.0, 0.25, 0.04, 1e-10)
OCTAVES = range(0, 13, 2)


@pytest.fixture(scope="module")
def filled():
    """A table of 400 rows for every fourth power of two as the count, and 200 that were never seen; its code."""
    counts = torch.cat([torch.full((400,), 2**k) for k in reversed(OCTAVES)])
    counts = torch.cat([counts, torch.zeros(200, dtype=torch.int64)])
    weight = normal_rows(len(counts), VARIANCES)
    return weight, counts, coded(weight, counts, "1/12")


def water_level(table: CodedTable, counts: Tensor) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the bits of each class and direction, w v of each, and the θ between those of all of them."""
    layout = table.layout
    kinds = layout.class_of_rows
    evidence = np.array([(counts.double() + 0.5).numpy()[kinds == c].mean() for c in range(len(layout.means))])  # fmt: skip
    # directions are those of the columns: the variances are far apart
    variance = np.array([VARIANCES[int(np.abs(u).argmax())] for u in layout.basis.astype(float)])
    product = evidence[:, None] * variance
    bits = layout.bits.astype(np.int64)
    inner = (bits > 0) & (bits < 8)
    levels = np.log(product / 4.0**bits)[inner]
    return bits, product, math.exp((levels.min() + levels.max()) / 2)


def test_bits_are_those_of_reverse_water_filling(filled):
    _, counts, table = filled
    bits, product, level = water_level(table, counts)
    assert len(bits) >= 5
    wanted = np.clip(0.5 * np.log2(product / level), 0, 8)
    assert np.abs(bits - wanted).max() <= 1.0
    # rows of the count 4096 and of the count 4
    often, rarely = (bits[table.layout.class_of_rows[row], 0] for row in (0, 400 * 5))
    assert often - rarely == pytest.approx(0.5 * math.log2(4096.5 / 4.5), abs=1)
    assert (np.diff(bits, axis=0) <= 0).all(), "rarer rows never have more bits"


def test_a_direction_without_spread_gets_no_bits(filled):
    _, _, table = filled
    assert len(table.layout.basis) == 3
    assert (table.layout.bits.max(axis=0) > 0).all()


def test_the_error_is_the_one_that_was_planned(filled):
    weight, counts, table = filled
    bits, product, _ = water_level(table, counts)
    sizes = np.bincount(table.layout.class_of_rows)
    planned = (sizes[:, None] * product * np.array(ERROR)[bits]).sum()
    assert felt(table, weight, counts) == pytest.approx(planned, rel=0.1)


def test_rows_never_seen_get_no_bits_where_bytes_are_few():
    counts = torch.cat([torch.full((500,), 100), torch.zeros(1_500, dtype=torch.int64)])
    weight = normal_rows(2_000, (1.0, 1.0, 1.0, 1.0))
    table = coded(weight, counts, "1/32")
    by_class = table.layout.bits_of_row[table.layout.class_of_rows]
    assert (by_class[:500] > 0).all()
    assert not by_class[500:].any()
    rows = table(torch.arange(500, 2_000))
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert_close(rows[0], weight[500:].mean(dim=0), atol=2e-3, rtol=0)


@pytest.mark.parametrize("counts", [None, 7, 0])
def test_equal_counts_give_one_class(counts):
    table = coded(normal_rows(1_000, VARIANCES), counts, "1/8")
    assert len(table.layout.means) == 1
    assert table.layout.bits.max() > 1


def test_the_error_falls_with_the_size():
    counts = zipf(2_000)
    weight = normal_rows(2_000, (1.0, 0.5, 0.25, 0.125))
    errors = [
        felt(coded(weight, counts, f"1/{part}"), weight, counts)
        for part in (256, 128, 64, 32, 16, 12, 8, 6, 5, 4)
    ]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)
    assert errors[-1] < 1e-3 * errors[0]


@pytest.mark.parametrize("size", ["1/8", "1/16", "1/32"])
def test_counts_lower_the_error_that_lookups_feel(size):
    counts = zipf(4_000)
    weight = normal_rows(4_000, (1.0, 0.5, 0.25, 0.125))
    own, same = coded(weight, counts, size), coded(weight, None, size)
    assert len(own.blob) <= 4_000 * 16 / int(size[2:])
    assert felt(own, weight, counts) < 0.5 * felt(same, weight, counts)


@pytest.mark.parametrize("size", ["1/8", "1/16", "1/32"])
def test_curvature_lowers_the_error_that_the_loss_feels(size):
    counts, weight = zipf(4_000), normal_rows(4_000, (1.0,) * 6)
    turn = torch.linalg.qr(normal_rows(6, (1.0,) * 6, seed=1)).Q
    bent = turn @ torch.diag(torch.tensor([10.0, 5.0, 1.0, 0.1, 0.01, 0.001])) @ turn.T
    own, plain = coded(weight, counts, size, bent), coded(weight, counts, size)
    assert felt(own, weight, counts, bent) < 0.5 * felt(plain, weight, counts, bent)
    assert felt(own, weight, counts) > felt(plain, weight, counts)  # not without a price


def test_the_scale_of_the_curvature_does_not_matter():
    counts, weight = zipf(1_000), normal_rows(1_000, (1.0, 0.5, 0.25))
    bent = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    first, second = (coded(weight, counts, "1/8", scale * bent) for scale in (1.0, 2.0**-30))
    assert torch.equal(first.blob, second.blob)


def test_a_loss_that_feels_nothing_leaves_what_the_bytes_allow():
    table = coded(normal_rows(500, (1.0, 1.0)), 5, "1/8", torch.zeros(2, 2))
    assert len(table.blob) <= 500 * 8 / 8
    assert table.weight.isfinite().all()


def steep(rows: int) -> Tensor:
    """Return counts from 1 to 4096, as many rows of each, the largest first."""
    return 4 ** (6 - 7 * torch.arange(rows) // rows)


def test_the_order_of_ids_costs_their_classes_only():
    counts, weight = steep(4_000), normal_rows(4_000, (1.0, 0.5, 0.25, 0.125))
    order = torch.randperm(4_000)
    in_order = coded(weight, counts, "8000 B")
    mixed = coded(weight[order], counts[order], "10000 B")  # half a byte per row more
    assert mixed.layout.starts is None
    assert in_order.layout.starts is not None
    first = felt(in_order, weight, counts)
    assert felt(mixed, weight[order], counts[order]) == pytest.approx(first, rel=0.1)


def test_rows_of_an_id_do_not_depend_on_the_order_of_ids():
    counts, weight = steep(4_000), normal_rows(4_000, (1.0, 0.5, 0.25, 0.125))
    order = torch.randperm(4_000)
    drafts = [Draft(weight, counts), Draft(weight[order], counts[order])]
    first, second = (draft.plan(1e-6 * drafts[0].largest) for draft in drafts)
    assert np.array_equal(first.bits, second.bits)
    assert len(first.bits) > 3
    in_order, mixed = (
        CodedTable(EvidenceCoding(), draft.code(plan), weight, Origin(4_000, 4))
        for draft, plan in zip(drafts, (first, second), strict=True)
    )
    assert_close(mixed.weight.clone(), in_order.weight[order].clone(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("count", [1, 10**6])
def test_the_padding_row_is_zero_and_its_count_does_not_matter(count):
    counts, weight = zipf(300), normal_rows(300, (1.0, 0.5, 0.25))
    weight[5] = 0.0
    counts[5] = count
    table = coded(weight, counts, "1/6", padding_idx=5)
    assert not table(torch.tensor([5, 5])).any()
    counts[5] = 0
    assert torch.equal(table.blob, coded(weight, counts, "1/6", padding_idx=5).blob)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e4])
def test_what_the_padding_row_of_a_bag_holds_changes_no_other_row(value):
    counts, weight = zipf(300), normal_rows(300, (1.0, 0.5, 0.25))
    found = []
    for filled_with in (0.0, value):
        weight[5] = filled_with
        bag = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, padding_idx=5)
        model = nn.ModuleDict({"t": bag})
        compress_(model, counts={"t": counts}, size="1/6", verbose=False)
        found.append(model["t"].weight.clone())
    assert torch.equal(found[0], found[1])
    assert not found[0][5].any()


@pytest.mark.parametrize("width", [1, 2])
def test_narrow_tables_are_coded(width):
    counts, weight = zipf(2_000), normal_rows(2_000, (1.0,) * width)
    table = coded(weight, counts, "1/8")
    assert len(table.blob) <= 2_000 * width * 4 / 8
    whole = float((weight.double().square().sum(dim=1)) @ (counts.double() + 0.5))
    assert felt(table, weight, counts) < 0.05 * whole


def test_one_row_and_equal_rows_are_stored_to_half_precision():
    for weight in (torch.tensor([[0.25, -3.0, 7.0]]), torch.tensor([[0.25, -3.0]]).expand(50, 2)):
        table = coded(weight.clone(), 3, "1 kB")
        assert torch.equal(table.weight.clone(), weight)
        assert len(table.layout.basis) == 0


def test_frequent_tables_get_more_bits_than_rare_ones():
    model = nn.ModuleDict({name: nn.Embedding(500, 4) for name in ("seen", "rare")})
    counts = {"seen": torch.full((500,), 1_000), "rare": torch.full((500,), 2)}
    compress_(model, counts=counts, size="1/6", verbose=False)
    seen, rare = (int(model[name].layout.bits.sum()) for name in ("seen", "rare"))
    # a count 500 times as large: 1/2 log2(500) bits in each of four directions, up to one more
    assert 4 * 3.5 <= seen - rare <= 4 * 5.5
    assert table_bytes(model) <= 2 * 500 * 16 / 6


@settings(max_examples=40)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 30, 200]), st.sampled_from([1, 3, 8])),
    seed=st.integers(0, 99),
    price=st.floats(-25.0, 3.0),
    in_order=st.booleans(),
    padding=st.sampled_from([None, 0]),
)
def test_the_bytes_of_a_plan_are_those_of_the_list(shape, seed, price, in_order, padding):
    draw = torch.Generator().manual_seed(seed)
    counts = (torch.rand(shape[0], generator=draw) ** -3).long().clamp(max=10**9)
    counts = counts.sort(descending=True).values if in_order else counts
    draft = Draft(torch.randn(shape, generator=draw), counts, padding)
    plan = draft.plan(math.exp(price) * draft.largest)
    assert plan.num_bytes == len(draft.code(plan))


@given(size=st.floats(0.02, 1.0), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_tables_take_no_more_bytes_than_they_may(size, seed):
    draw = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Embedding(300, 8), "b": nn.Embedding(90, 3)})
    counts = {name: (torch.rand(t.num_embeddings, generator=draw) ** -2).long() for name, t in model.items()}  # fmt: skip
    plain = table_bytes(model)
    compress_(model, counts=counts, size=size, verbose=False)
    assert table_bytes(model) <= size * plain


def test_a_size_below_the_least_is_refused_with_the_least():
    def model() -> nn.ModuleDict:
        return nn.ModuleDict({"a": nn.Embedding(300, 8), "b": nn.Embedding(90, 3)})

    # 16 bytes, a mean of half precision, one run: for each table
    least = (16 + 2 * 8 + 5) + (16 + 2 * 3 + 5)
    message = f"size must be at least {least} bytes for 'a', 'b', got {least - 1} bytes"
    with pytest.raises(SettingsError, match=message):
        compress_(model(), counts=7, size=f"{least - 1} B", verbose=False)
    made = model()
    compress_(made, counts=7, size=f"{least} B", verbose=False)
    assert table_bytes(made) == least


@pytest.mark.parametrize("scale", [1e5, 1e9])
def test_rows_that_are_too_large_are_refused(scale):
    with pytest.raises(UnsupportedTableError, match=r"cannot store 't': its rows have numbers up"):
        coded(scale * normal_rows(300, (1.0, 1.0)), 5, "1/4")


@pytest.mark.parametrize(("scale", "shift"), [(1e-3, 0.0), (100.0, 0.0), (1.0, 50.0), (0.01, 1.0)])
def test_rows_of_any_usual_scale_are_stored_as_well(scale, shift):
    weight = scale * normal_rows(500, (1.0, 1.0)) + shift
    table = coded(weight, 5, "1/4")
    assert float((table.weight - weight).square().mean()) < 1e-3 * scale**2


# ---- other methods, and a table by itself


def test_the_buckets_of_a_hashed_table_are_coded_by_their_counts():
    model = nn.ModuleDict({"t": nn.Embedding(1_000, 8)})
    rb.apply_(model, rb.Hashing(buckets=200), verbose=False)
    buckets = model["t"].inner.weight.detach().clone()
    counts = torch.where(torch.arange(1_000) % 200 < 20, 1_000, 0)
    compress_(model, counts={"t": counts}, size="1/8", verbose=False)
    table = model["t"]
    assert isinstance(table, HashedTable)
    assert len(table.inner.blob) <= 200 * 32 / 8
    off = (table.inner.weight - buckets).square().mean(dim=1)
    assert float(off[:20].mean()) < 0.1 * float(off[20:].mean())


def test_each_embedding_set_is_coded():
    model = DCNv2(rb.data.Schema(FIELDS), dim=4, hidden=(8,))
    rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
    counts = {field.name: torch.arange(field.rows) for field in FIELDS}
    plain = table_bytes(model)
    compress_(model, counts=counts, size=0.9, verbose=False)
    parts = [part for part in model.backbone.tables.modules() if isinstance(part, CodedStack)]
    assert sum(len(part.origins) for part in parts) == 2 * len(FIELDS)
    assert table_bytes(model) <= 0.9 * plain


def test_a_table_by_itself_takes_its_counts_and_keeps_none():
    base = nn.Embedding.from_pretrained(normal_rows(500, (1.0, 0.5)), freeze=False)
    table = EvidenceCoding(size="1/4", counts=zipf(500)).wrap(base)
    assert (table.method, table.method.counts) == (EvidenceCoding(size="1/4"), None)
    assert torch.equal(table.blob, coded(base.weight.detach(), zipf(500), "1/4").blob)
    mean = EvidenceCoding(size="1/4").wrap(base)
    assert torch.equal(mean.weight[0], mean.weight[1])
    assert_close(mean.weight[0].clone(), base.weight.detach().mean(dim=0), atol=1e-4, rtol=1e-3)
    with pytest.raises(SettingsError, match="counts by name are for several tables"):
        EvidenceCoding(counts={"t": zipf(500)}).wrap(base)


def test_a_share_becomes_a_size():
    assert EvidenceCoding.for_share([(100, 4), (50, 8)], 0.07) == EvidenceCoding(size=0.07)
    assert str(EvidenceCoding(counts=5, sensitivity={})) == "EvidenceCoding(size='1/16')"


# ---- sensitivity


def outer_products(gradient: Tensor) -> Tensor:
    """Return Σ g g' over the rows of a dense gradient, row by row."""
    total = torch.zeros(gradient.shape[1], gradient.shape[1], dtype=torch.float64)
    for row in gradient.double():
        for i in range(len(row)):
            for j in range(len(row)):
                total[i, j] += row[i] * row[j]
    return total


class Own(nn.Module):
    def __init__(self, *, sparse: bool = False, mode: str = "mean") -> None:
        super().__init__()
        self.user = nn.Embedding(9, 3, sparse=sparse, padding_idx=0)
        self.tags = nn.EmbeddingBag(7, 2, mode=mode, sparse=sparse)
        self.unused = nn.Embedding(5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat([self.user(batch[0]), self.tags(batch[1])], dim=1)
        return self.head(torch.tanh(self.norm(both))).squeeze(1)


def own_batches(number: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(9, (12,)), torch.randint(7, (12, 4))) for _ in range(number)]


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(model(batch)).mean()


@pytest.mark.parametrize(("sparse", "mode"), [(False, "mean"), (True, "sum"), (False, "max")])
def test_sensitivity_is_the_sum_of_outer_products(sparse, mode):
    model, batches = Own(sparse=sparse, mode=mode), own_batches()
    found = measure_sensitivity(model, iter(batches), own_loss)
    assert {name: tuple(h.shape) for name, h in found.items()} == {
        "user": (3, 3),
        "tags": (2, 2),
        "unused": (2, 2),
    }
    model.user.sparse = model.tags.sparse = False
    model.eval()
    for name in ("user", "tags"):
        expected = torch.zeros_like(found[name])
        for batch in batches:
            [gradient] = torch.autograd.grad(own_loss(model, batch), getattr(model, name).weight)
            expected += outer_products(gradient)
        assert float(expected.abs().max()) > 0
        assert_close(found[name], expected)
    assert not found["unused"].any()


def test_sensitivity_of_the_fields_of_a_zoo_model():
    model, data = deepfm(), rows_of(60)
    batches = list(data.batches(20))
    found = measure_sensitivity(model, batches, logistic_loss)
    assert list(found) == [info.name for info in rb.find_tables(model)]
    model.eval()
    for place, tables in (("backbone.tables", model.backbone.tables), ("wide.tables", model.wide.tables)):  # fmt: skip
        weight = tables.stacks[0].embedding.weight
        gradients = [torch.autograd.grad(logistic_loss(model, batch), weight)[0] for batch in batches]  # fmt: skip
        start = 0
        for field in FIELDS:
            rows = slice(start, start + field.rows)
            expected = sum(outer_products(gradient[rows]) for gradient in gradients)
            assert_close(found[f"{place}.{field.name}"], expected)
            start += field.rows


def test_measuring_changes_nothing():
    model = Own(sparse=True)
    model.norm.eval()
    own_loss(model, own_batches(1)[0]).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: g.to_dense().clone() for name, g in gradients.items() if g is not None}
    modes = {name: part.training for name, part in model.named_modules()}
    with torch.no_grad():
        assert measure_sensitivity(model, own_batches(), own_loss)["user"].any()
    with pytest.raises(ZeroDivisionError):
        measure_sensitivity(model, own_batches(), lambda model, batch: 1 / 0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert name not in kept or torch.equal(parameter.grad.to_dense(), kept[name])
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert modes[""]
    assert not modes["norm"]
    assert (model.user.sparse, model.tags.sparse, model.unused.sparse) == (True, True, False)


def test_without_batches_or_plain_tables_there_is_nothing_to_measure():
    with pytest.raises(DataError, match="measure_sensitivity needs at least one batch"):
        measure_sensitivity(Own(), [], own_loss)
    model = Own()
    rb.apply_(model, rb.Hashing(buckets=3), verbose=False)
    frozen = Own()
    for one in (model, frozen):
        one.requires_grad_(requires_grad=False)
        with pytest.raises(
            DataError, match="needs plain tables that are trained; merge_ the model"
        ):
            measure_sensitivity(one, own_batches(), own_loss)


@pytest.mark.parametrize(
    ("bent", "message"),
    [
        (
            {"t": torch.eye(2)},
            r"the sensitivity of 't' has the shape \(2, 2\), and its rows have 3",
        ),
        ({"t": torch.full((3, 3), math.nan)}, "the sensitivity of 't' is not finite"),
        (
            {"u": torch.eye(3)},
            "no sensitivity for 't', only for u; measure it while all tables are",
        ),
        ({}, "no sensitivity for 't', only for nothing"),
    ],
)
def test_what_was_measured_of_other_tables_is_refused(bent, message):
    model = nn.ModuleDict({"t": nn.Embedding(50, 3)})
    with pytest.raises(DataError, match=message):
        compress_(model, counts=5, size=0.5, sensitivity=bent, verbose=False)
    assert type(model["t"]) is nn.Embedding


def test_counts_that_do_not_fit_are_refused():
    model = nn.ModuleDict({"t": nn.Embedding(50, 3)})
    for counts, message in (({}, "no counts for 't'"), (torch.arange(9), "each of its 50 rows")):
        with pytest.raises(DataError, match=re.escape(message)):
            compress_(model, counts=counts, verbose=False)


def test_a_fitted_method_has_the_counts_of_the_data_and_what_the_loss_feels():
    model, data = deepfm(), rows_of(200)
    fitted = EvidenceCoding(size=0.5).fitted(model, data)
    for name, counts in data.counts().items():
        assert torch.equal(fitted.counts[name], counts)
    assert fitted.sensitivity.keys() == {info.name for info in rb.find_tables(model)}
    again = EvidenceCoding(size=0.5).fitted(model, data)
    for name, bent in fitted.sensitivity.items():
        assert torch.equal(bent, again.sensitivity[name])


def test_where_a_table_is_not_plain_all_tables_count_the_same():
    model, data = deepfm(rb.Hashing(buckets=5)), rows_of(200)
    fitted = EvidenceCoding(size=0.5).fitted(model, data)
    assert fitted.sensitivity is None
    assert set(fitted.counts) == {field.name for field in FIELDS}


# ---- runs and studies

SMALL = {
    "model": {"name": "deepfm", "dim": 4, "hidden": [8]},
    "data": {"rows": 1_500},
    "training": {"epochs": 1, "batch_size": 256},
}


def test_a_run_stores_tables_of_the_size_that_was_asked_for():
    plain = rb.RunSettings.from_mapping(SMALL)
    wanted = rb.RunSettings.from_mapping(
        SMALL | {"methods": [{"method": "evidence-coding", "size": "1/8"}]}
    )
    assert wanted.methods == (EvidenceCoding(size="1/8"),)
    before, after = (rb.run(one, progress=False) for one in (plain, wanted))
    assert 0.8 / 8 < after.table_bytes / before.table_bytes <= 1 / 8
    assert after.num_parameters == before.num_parameters
    assert {info.methods for info in rb.find_tables(after.model)} == {("EvidenceCoding(size='1/8')",)}  # fmt: skip
    assert after.test.overall.auc > before.test.overall.auc - 0.02


def test_a_run_codes_what_other_methods_made():
    methods = [{"method": "hashing", "buckets": 20}, {"method": "evidence-coding", "size": "1/2"}]
    found = rb.run(rb.RunSettings.from_mapping(SMALL | {"methods": methods}), progress=False)
    for info in rb.find_tables(found.model):
        assert info.methods[-1] == "EvidenceCoding(size='1/2')"


@pytest.mark.slow
def test_a_study_compares_it_with_narrow_tables(tmp_path):
    result = rb.study(
        tmp_path / "study",
        methods="evidence-coding:size=1/4",
        **SMALL,
        seeds=2,
        workers=1,
        device="cpu",
        progress=False,
    )
    [cell] = result.cells
    coded_runs = cell.variant('evidence-coding:size="1/4"').runs
    baseline = cell.variant("baseline").runs
    assert len(coded_runs) == len(baseline) == 2
    for one, plain in zip(coded_runs, baseline, strict=True):
        assert one.table_bytes <= plain.table_bytes / 4
