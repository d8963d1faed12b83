"""e(i) = W1 (W2 q_i) with an inner width above the table's, how it starts, and what merging gives."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import NoTableError
from rarebit.methods.mlet import MLET, FactorizedTable, fold
from rarebit.models.fm import FM

FIELDS = (
    rb.data.Field(name="user", rows=20),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=11),
)


def factorized(table: nn.Embedding, method: MLET) -> FactorizedTable:
    model = nn.Sequential(table)
    rb.apply_(model, method, min_width=1, verbose=False)
    return model[0]


def kept(weight: Tensor, inner_dim: int, std: float = 0.25) -> FactorizedTable:
    table = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    return factorized(table, MLET(inner_dim=inner_dim, std=std, init="keep"))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_rows_worked_by_hand():
    table = factorized(nn.Embedding(2, 1), MLET(inner_dim=2))
    with torch.no_grad():
        table.inner.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 0.5]]))
        table.projection.copy_(torch.tensor([[3.0], [4.0]]))
    assert table(torch.tensor([1, 0, 1])).tolist() == [[-1.0], [11.0], [-1.0]]


def test_rows_equal_the_equation():
    table = factorized(nn.Embedding(7, 3), MLET(inner_dim=5))
    rows = table(torch.arange(7).view(7, 1))
    for i in range(7):
        for d in range(3):
            products = [table.inner.weight[i, k] * table.projection[k, d] for k in range(5)]
            assert_close(rows[i, 0, d], torch.stack(products).sum())


def test_gradients_equal_the_equation():
    table = factorized(nn.Embedding(7, 3, dtype=torch.float64), MLET(inner_dim=5))
    ids, upstream = torch.tensor([6, 1, 6]), torch.randn(3, 3, dtype=torch.float64)
    (table(ids) * upstream).sum().backward()
    wide = torch.zeros(7, 5, dtype=torch.float64)
    small = torch.zeros(5, 3, dtype=torch.float64)
    for row, i in enumerate(ids.tolist()):
        wide[i] += table.projection.detach() @ upstream[row]
        small += torch.outer(table.inner.weight.detach()[i], upstream[row])
    assert_close(table.inner.weight.grad, wide)
    assert_close(table.projection.grad, small)


def test_a_fresh_wide_factor_is_xavier_of_its_own_table():
    table = factorized(nn.Embedding(30_000, 4), MLET(inner_dim=16))
    bound = math.sqrt(6 / (30_000 + 16))
    values = table.inner.weight.detach()
    assert float(values.abs().max()) <= bound
    assert float(values.abs().max()) > 0.999 * bound
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)


@pytest.mark.parametrize("std", [0.25, 0.5])
def test_a_fresh_projection_is_gaussian(std):
    values = factorized(nn.Embedding(9, 100), MLET(inner_dim=400, std=std)).projection.detach()
    assert float(values.std()) == pytest.approx(std, rel=0.02)
    within_one = float((values.abs() < std).double().mean())
    assert within_one == pytest.approx(0.6827, abs=0.01)  # a uniform one would have 0.577


def test_fields_of_a_model_start_as_their_own_tables_with_their_own_projections():
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    tables = model.backbone.tables.tables()
    for field, table in zip(FIELDS, tables, strict=True):
        largest = float(table.inner.weight.detach().abs().max())
        bound = math.sqrt(6 / (field.rows + 8))
        assert 0.8 * bound < largest <= bound, field.name
    projections = [table.projection for table in tables]
    assert not torch.equal(projections[0], projections[1])


def test_a_fresh_start_depends_on_the_seed_alone():
    drawn = []
    for seed, base in ((1, torch.zeros(6, 3)), (1, torch.ones(6, 3)), (2, torch.ones(6, 3))):
        torch.manual_seed(seed)
        drawn.append(factorized(nn.Embedding.from_pretrained(base), MLET(inner_dim=4)).weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("init", ["fresh", "keep"])
def test_the_padding_row_of_the_wide_factor_is_zero(init):
    wide = factorized(nn.Embedding(6, 3, padding_idx=2), MLET(inner_dim=4, init=init)).inner.weight
    assert wide.any(dim=1).tolist() == [True, True, False, True, True, True]


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 8)),
    extra=st.integers(0, 12),
    exponent=st.integers(-6, 4),
    std=st.sampled_from([0.01, 0.25, 0.5, 4.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kept_factors_have_the_given_table_as_their_product(shape, extra, exponent, std, seed):
    weight = 10.0**exponent * torch.randn(shape, generator=torch.manual_seed(seed))
    table = kept(weight, shape[1] + extra, std)
    assert relative(table.weight.detach(), weight) < 1e-5
    assert relative(table.merge().weight.detach(), weight) < 1e-5


def test_a_kept_table_may_be_of_low_rank_or_have_one_huge_row():
    line = torch.outer(torch.randn(20), torch.randn(4))
    assert relative(kept(line, 8).weight.detach(), line) < 1e-5
    line[3] *= 1e6
    assert relative(kept(line, 8).weight.detach(), line) < 1e-5


def test_a_kept_table_of_zeros_is_zero_and_learns():
    table = kept(torch.zeros(9, 4), 8)
    assert not bool(table.weight.any())
    table(torch.tensor([5])).sum().backward()
    assert bool(table.inner.weight.grad[5].any())


def test_kept_factors_are_as_long_as_fresh_ones_whatever_the_table():
    for scale in (1e-4, 1.0, 1e3):
        projection = kept(scale * torch.randn(50, 4), 64, std=0.5).projection.detach()
        assert_close(torch.linalg.svdvals(projection), torch.full((4,), 0.5 * math.sqrt(64)))


def test_every_direction_of_a_kept_wide_factor_is_filled_and_trained():
    table = kept(torch.randn(200, 4), 16)
    xavier = math.sqrt(2 / (200 + 16))
    values = torch.linalg.svdvals(table.inner.weight.detach())
    assert float(values[-1]) > 0.5 * xavier * math.sqrt(200)
    table(torch.arange(200)).square().sum().backward()
    basis = torch.linalg.qr(table.projection.detach()).Q
    outside = table.projection.grad - basis @ (basis.T @ table.projection.grad)
    assert float(outside.norm()) > 0.01 * float(table.projection.grad.norm())
    assert int(torch.linalg.matrix_rank(outside)) == 4


def test_the_fill_of_a_kept_factor_is_no_longer_than_the_table():
    for scale in (1e-4, 1.0, 1e3):
        table = kept(scale * torch.randn(300, 4, dtype=torch.float64), 16)
        wide, basis = table.inner.weight.detach(), torch.linalg.qr(table.projection.detach()).Q
        outside = wide - wide @ basis @ basis.T
        fill = float(outside.norm()) / math.sqrt(300 * 12)
        xavier, held = math.sqrt(2 / (300 + 16)), scale / (0.25 * math.sqrt(16))
        assert fill == pytest.approx(min(xavier, held), rel=0.1)


def test_a_large_table_is_kept_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr("rarebit.methods.mlet.CHUNK", 7)
    weight = torch.randn(40, 3)
    table = kept(weight, 5)
    assert relative(table.weight.detach(), weight) < 1e-5
    assert_close(table.merge().weight, table.weight)


def test_a_table_wider_than_the_inner_width_cannot_be_kept():
    model = nn.ModuleDict({"wide": nn.Embedding(9, 8), "good": nn.Embedding(9, 4)})
    method = MLET(inner_dim=4, init="keep")
    changes = rb.apply_(model, method, verbose=False)
    assert changes.skipped == (("wide", "wider than inner_dim 4, which could not keep it"),)
    with pytest.raises(NoTableError, match="which could not keep it"):
        rb.apply_(nn.Sequential(nn.Embedding(9, 8)), method)


def test_an_inner_width_below_the_tables_warns_once_for_all_tables():
    model = nn.ModuleList([nn.Embedding(9, 8), nn.Embedding(5, 8), nn.EmbeddingBag(5, 8)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        rb.apply_(model, MLET(inner_dim=7), verbose=False)
    assert [warning.category for warning in caught] == [UserWarning]
    assert caught[0].filename == __file__
    for words in ("inner_dim=7", "width 8", "directions of the update the factor zero"):
        assert words in str(caught[0].message)


def test_an_inner_width_of_at_least_the_tables_does_not_warn():
    for inner_dim in (8, 9):  # warnings are errors in tests
        rb.apply_(nn.Sequential(nn.Embedding(9, 8)), MLET(inner_dim=inner_dim), verbose=False)


def test_an_infinite_or_missing_std_is_refused():
    for std in (math.inf, math.nan, 0.0, -0.5):
        with pytest.raises(ValueError, match=r"std must be (finite|more than 0 and finite), got"):
            MLET(std=std)


def test_the_fold_is_rounded_once():
    # In float32, 1 + 1e-8 is 1 and the sum would be 0.
    wide, projection = torch.tensor([[1.0, 1e-4, -1.0]]), torch.tensor([[1.0], [1e-4], [1.0]])
    assert float(fold(wide, projection)) == pytest.approx(1e-8, rel=1e-6)


def test_merging_folds_in_float64():
    table = factorized(nn.Embedding(500, 8), MLET(inner_dim=64, std=30.0))
    exact = table.inner.weight.detach().double() @ table.projection.detach().double()
    assert torch.equal(table.merge().weight.detach(), exact.float())


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    inner_dim=st.integers(1, 9),
    padding=st.none() | st.integers(0, 11),
    mode=st.sampled_from([None, "sum", "mean", "max"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_equals_looked_up(shape, inner_dim, padding, mode, seed):
    torch.manual_seed(seed)
    padding = None if padding is None else padding % shape[0]
    ids = torch.randint(shape[0], (4, 3))
    model = nn.Sequential(
        nn.Embedding(*shape, padding_idx=padding)
        if mode is None
        else nn.EmbeddingBag(*shape, mode=mode, padding_idx=padding)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # narrow ones merge, too
        rb.apply_(model, MLET(inner_dim=inner_dim), min_width=1, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    before = model(ids)
    assert bool(rb.merge_(model, verbose=False))
    assert type(model[0]).__module__.startswith("torch.")
    assert_close(model(ids), before, atol=1e-6, rtol=1e-5)
    assert padding is None or not bool(model[0].weight[padding].any())


def test_the_wide_factor_gets_sparse_gradients_and_the_projection_dense_ones():
    model = FM(rb.data.Schema(FIELDS), dim=5)
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    optimizer = rb.optimizer(model, lr=0.1, tables="rowwise")
    held = {id(p) for p in optimizer.param_groups[1]["params"]}
    ids = torch.tensor([[3, 1, 4, 0, 7]])
    batch = rb.Dataset(rb.data.Schema(FIELDS), ids, torch.zeros(1, 0), torch.ones(1))[slice(None)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(batch).sum().backward()
    kinds = {
        name.rpartition(".")[2] if "projection" in name else "wide": p.grad.is_sparse
        for name, p in model.named_parameters()
        if "backbone" in name
    }
    assert kinds == {"projection": False, "wide": True}
    optimizer.step()
    for name, parameter in model.named_parameters():
        if "backbone" in name:
            assert id(parameter) in held, name
            assert not torch.equal(parameter, before[name]), name


def test_mlet_of_buckets():
    model = nn.Sequential(nn.Embedding(20, 3))
    rb.apply_(model, rb.Hashing(buckets=7), verbose=False)
    rb.apply_(model, MLET(inner_dim=5), verbose=False)
    wide, projection = model[0].inner.inner.weight, model[0].inner.projection
    assert wide.shape == (7, 5)
    assert_close(model[0].weight, torch.stack([wide[i % 7] @ projection for i in range(20)]))
    assert float(wide.detach().abs().max()) <= math.sqrt(6 / (7 + 5))


def test_buckets_are_folded_in_float64_too():
    model = nn.Sequential(nn.Embedding(900, 8, padding_idx=3))
    rb.apply_(model, rb.Hashing(buckets=500), verbose=False)
    rb.apply_(model, MLET(inner_dim=64, std=30.0), verbose=False)
    product = model[0].inner
    exact = product.inner.weight.detach().double() @ product.projection.detach().double()
    expected = exact.float()[torch.arange(900) % 500]
    expected[3] = 0.0
    rb.merge_(model, verbose=False)
    assert torch.equal(model[0].weight.detach(), expected)
    assert bool(expected[503].any())  # it shares the bucket of the padding row, which is its own


def test_training_moves_rows_that_were_not_looked_up():
    table = factorized(nn.Embedding(9, 3), MLET(inner_dim=5))
    before = table.weight.detach().clone()
    wide = table.inner.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([4])).sum().backward()
    optimizer.step()
    assert (table.inner.weight != wide).any(dim=1).nonzero().flatten().tolist() == [4]
    assert bool((table.weight != before).any(dim=1).all())


STACKED = rb.data.Schema((*FIELDS, rb.data.Field(name="unused", rows=4)))


def stacked_ids(*shape: int) -> Tensor:
    columns = [torch.randint(f.rows, (*shape, f.max_length)) for f in FIELDS]
    return torch.cat([*columns, torch.full((*shape, 1), 2)], dim=-1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (3, 5)])
def test_the_form_for_fixed_sizes_equals_the_form_for_distinct_rows(shape, dtype, monkeypatch):
    model = FM(STACKED, dim=5).double()
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    (stack,) = model.backbone.tables.stacks
    ids = stacked_ids(*shape).to(dtype)
    upstream = torch.randn(*ids.shape, 5, dtype=torch.float64)
    rows, gradients = [], []
    for compiling in (False, True):
        monkeypatch.setattr("torch.compiler.is_compiling", lambda answer=compiling: answer)
        rows.append(stack(ids))
        weights = list(stack.parameters())
        gradients.append(torch.autograd.grad((rows[-1] * upstream).sum(), weights))
    assert rows[0].shape == upstream.shape
    assert_close(rows[0], rows[1])
    assert_close(gradients[0], gradients[1])


def test_a_row_that_is_looked_up_often_is_read_once():
    model = FM(STACKED, dim=5)
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    (stack,) = model.backbone.tables.stacks
    stack.inner.embedding.sparse = True
    ids = torch.tensor([[3, 1, 1, 0, 7, 2]] * 50)
    stack(ids).sum().backward()
    gradient = stack.inner.embedding.weight.grad
    assert len(gradient._values()) == 5
    slices = [table.projection.T.sum(dim=0) for table in model.backbone.tables.tables()]
    assert_close(gradient.to_dense()[3], 50 * slices[0].detach())
    assert_close(gradient.to_dense()[20 + 1], 100 * slices[1].detach())
