"""The factors of theorem 1 and the split of an update, against singular values of whole matrices."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.diagnosis.diagnose import diagnose
from rarebit.diagnosis.measure import Reweighting, reweighting
from rarebit.errors import DataError
from rarebit.methods.mlet import MLET, FactorizedTable
from rarebit.models.fm import FM
from rarebit.research import UpdateSplit, factorized_tables, update_split
from rarebit.tables import spectrum
from rarebit.testing import counting_large_tensors

pytestmark = pytest.mark.filterwarnings("ignore:MLET with inner_dim:UserWarning")

shapes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 14))
"""D, N and k."""
seeds = st.integers(0, 2**32 - 1)


def product(d: int, n: int, k: int, seed: int = 0, padding: int | None = None) -> FactorizedTable:
    torch.manual_seed(seed)
    table = MLET(inner_dim=k, std=0.5).wrap(
        nn.Embedding(n, d, padding_idx=padding, dtype=torch.float64)
    )
    assert isinstance(table, FactorizedTable)
    return table


def moved(table: FactorizedTable, lr: float = 0.05) -> tuple[FactorizedTable, Tensor]:
    """Return the table after a step of SGD, and the gradient of the full table (D, N)."""
    table = copy.deepcopy(table)
    ids = torch.randint(table.num_embeddings, (4,))
    wanted = torch.randn(4, table.embedding_dim, dtype=torch.float64)
    plain = nn.Embedding.from_pretrained(
        table.weight.detach().clone(), freeze=False, padding_idx=table.padding_idx
    )
    (plain(ids) - wanted).square().sum().backward()
    optimizer = torch.optim.SGD(table.parameters(), lr=lr)
    (table(ids) - wanted).square().sum().backward()
    optimizer.step()
    return table, plain.weight.grad.T


def naive_factors(table: FactorizedTable) -> Tensor:
    """Return sigma1_i² + sigma2_j² of all directions, (D, N), from the whole factors."""
    w1, w2 = table.projection.detach().T, table.inner.weight.detach().T
    first = torch.zeros(len(w1), dtype=torch.float64)
    second = torch.zeros(w2.shape[1], dtype=torch.float64)
    for squares, matrix in ((first, w1), (second, w2)):
        values = torch.linalg.svd(matrix).S
        squares[: len(values)] = values.square()
    return first.unsqueeze(1) + second


def naive_parts(before: FactorizedTable, change: Tensor) -> Tensor:
    """Return u_iᵀ dW v_j of all directions, (D, N), from the whole singular vectors."""
    u = torch.linalg.svd(before.projection.detach().T).U
    v = torch.linalg.svd(before.inner.weight.detach().T).Vh.T
    return u.T @ change @ v


@given(shape=shapes, seed=seeds)
def test_the_factors_are_those_of_whole_matrices(shape, seed):
    table = product(*shape, seed)
    found, naive = reweighting(table), naive_factors(table)
    known = found.factors.shape[1]
    assert known == min(shape[1], shape[2])
    assert_close(found.factors, naive[:, :known], rtol=1e-10, atol=1e-12)
    rest = naive[:, known:]
    assert_close(found.rest.unsqueeze(1).expand_as(rest), rest, rtol=1e-10, atol=1e-12)
    assert found.mean_factor == pytest.approx(float(naive.mean()), rel=1e-10)


@given(shape=shapes, seed=seeds)
def test_the_counts_are_those_of_whole_matrices(shape, seed):
    table = product(*shape, seed)
    found, naive = reweighting(table), naive_factors(table)
    values = torch.linalg.svdvals(table.inner.weight.detach())
    assert found.num_directions == naive.numel()
    assert found.num_nonzero == int((naive > 1e-14).sum())
    assert found.num_informative == shape[0] * int((values > 1e-9).sum())


@pytest.mark.parametrize(("k", "non_zero", "informative"), [(1, 6, 2), (2, 10, 4), (4, 10, 8)])
def test_the_counts_of_the_papers_toy(k, non_zero, informative):
    found = reweighting(product(2, 5, k))
    assert (found.num_nonzero, found.num_informative) == (non_zero, informative)


def test_factors_worked_by_hand():
    table = product(2, 3, 2)
    with torch.no_grad():
        table.projection.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        table.inner.weight.copy_(torch.tensor([[0.0, 2.0], [0.5, 0.0], [0.0, 0.0]]))
    found = reweighting(table)
    assert found.projection_values == (3.0, 1.0)
    assert found.wide_values == (2.0, 0.5)
    assert found.factors.tolist() == [[13.0, 9.25], [5.0, 1.25]]
    assert found.rest.tolist() == [9.0, 1.0]
    assert found.mean_factor == pytest.approx((13 + 9.25 + 5 + 1.25 + 9 + 1) / 6)


def test_a_factor_of_lower_rank_has_fewer_directions():
    table = product(3, 20, 6)
    with torch.no_grad():
        table.inner.weight[:, 2:] = table.inner.weight[:, :1]
    found = reweighting(table)
    assert found.num_informative == 3 * 2
    with torch.no_grad():
        table.projection[:, 1] = 0.0
    assert reweighting(table).num_nonzero == 60 - 1 * (20 - 2)


def test_a_table_of_zeros_learns_nothing():
    table = product(3, 20, 6)
    with torch.no_grad():
        table.inner.weight.zero_()
        table.projection.zero_()
    found = reweighting(table)
    assert (found.num_nonzero, found.num_informative, found.mean_factor) == (0, 0, 0.0)


def one_for_zero(squares: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return one row for all u_i whose value is zero: any basis of them is right."""
    d, _, k = shape
    long = min(d, k)
    return torch.cat([squares[:long], squares[long:].sum(dim=0, keepdim=True)])


@given(shape=shapes, seed=seeds)
def test_the_split_is_that_of_whole_singular_vectors(shape, seed):
    before = product(*shape, seed)
    after, _ = moved(before)
    change = (after.weight - before.weight).detach().T
    split, naive = update_split(before, after), naive_parts(before, change)
    known = split.parts.shape[1]
    squares = naive.square()
    found, expected = split.parts.square(), squares[:, :known]
    assert_close(one_for_zero(found, shape), one_for_zero(expected, shape), rtol=1e-6, atol=1e-12)
    found, expected = split.rest.unsqueeze(1), squares[:, known:].sum(dim=1, keepdim=True)
    assert_close(one_for_zero(found, shape), one_for_zero(expected, shape), rtol=1e-6, atol=1e-12)
    assert split.squared_length == pytest.approx(float(change.square().sum()), rel=1e-9)


def test_a_step_of_sgd_splits_as_the_theorem_says():
    before = product(4, 30, 9)
    lr = 1e-7
    after, gradient = moved(before, lr)
    split, factors = update_split(before, after), reweighting(before).factors
    expected = lr * factors * naive_parts(before, gradient)[:, :9].abs()
    assert_close(split.parts.abs(), expected, rtol=1e-5, atol=1e-14)
    rest = naive_parts(before, gradient)[:, 9:].square().sum(dim=1)
    assert_close(split.rest, (lr * reweighting(before).rest) ** 2 * rest, rtol=1e-4, atol=1e-20)


def test_a_change_within_one_direction_is_found_there():
    table = product(2, 3, 2)
    with torch.no_grad():
        table.projection.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        table.inner.weight.copy_(torch.tensor([[0.0, 2.0], [0.5, 0.0], [0.0, 0.0]]))
    after = copy.deepcopy(table)
    with torch.no_grad():
        after.inner.weight[1, 0] += 0.1  # v_2 u_1, made 3 times as long by the projection
    split = update_split(table, after)
    assert_close(split.parts.abs(), torch.tensor([[0.0, 0.3], [0.0, 0.0]], dtype=torch.float64))
    with torch.no_grad():
        after.inner.weight[2, 1] += 0.4  # the third row is in no direction of the wide factor
    split = update_split(table, after)
    assert_close(split.rest, torch.tensor([0.0, 0.16], dtype=torch.float64))
    assert split.informative_share == pytest.approx(0.09 / 0.25)


def test_what_a_wide_factor_of_lower_rank_lacks_is_in_the_rest():
    before = product(3, 20, 6)
    with torch.no_grad():
        before.inner.weight[:, 2:] = before.inner.weight[:, :1]
    after, _ = moved(before)
    change = (after.weight - before.weight).detach().T
    split = update_split(before, after)
    assert not bool(split.parts[:, 2:].any())
    naive = naive_parts(before, change).square()
    assert_close(split.parts[:, :2].square(), naive[:, :2], rtol=1e-6, atol=1e-12)
    assert_close(split.rest, naive[:, 2:].sum(dim=1), rtol=1e-6, atol=1e-12)


def test_no_change_has_no_shares():
    table = product(3, 8, 5)
    split = update_split(table, copy.deepcopy(table))
    assert split.squared_length == 0
    assert split.informative_share == 0
    assert not bool(split.shares.any())


def test_a_change_too_small_for_float32_rows_is_split():
    table = product(4, 50, 8).float()
    with torch.no_grad():
        table.inner.weight.add_(1.0)
    after = copy.deepcopy(table)
    with torch.no_grad():
        after.inner.weight[7].mul_(1 + 2e-7)
    change = after.inner.weight[7].double() - table.inner.weight[7].double()
    expected = float((change @ table.projection.double()).detach().square().sum())
    assert update_split(table, after).squared_length == pytest.approx(expected, rel=1e-6, abs=0)


def test_padding_is_left_out():
    table = product(3, 9, 5, padding=2)
    with torch.no_grad():
        table.inner.weight[2] = 100.0  # stored, and never seen
    rows = torch.cat([table.inner.weight[:2], table.inner.weight[3:]]).detach()
    found = reweighting(table)
    assert found.rows == 8
    assert_close(found.wide_values, tuple(torch.linalg.svdvals(rows).tolist()))
    after, _ = moved(table)
    change = (after.weight - table.weight).detach()
    length = update_split(table, after).squared_length
    assert length == pytest.approx(float(change.square().sum()), rel=1e-9)


def test_rows_are_read_a_few_at_a_time(monkeypatch):
    table = product(3, 50, 4)
    after, _ = moved(table)
    whole = reweighting(table), update_split(table, after)
    monkeypatch.setattr(spectrum, "CPU_CHUNK", 16)
    parts = reweighting(table), update_split(table, after)
    assert_close(parts[0].factors, whole[0].factors)
    assert_close(parts[1].parts.abs(), whole[1].parts.abs())
    assert_close(parts[1].rest, whole[1].rest)


def test_nothing_as_large_as_the_wide_factor_is_made():
    rows = 3000
    table = product(4, rows, 8)
    after, _ = moved(table)
    with counting_large_tensors(rows * 8) as made:
        reweighting(table)
        update_split(table, after)
    assert not made


def test_looking_does_not_change_training():
    torch.manual_seed(0)
    model = nn.ModuleDict({"item": MLET(inner_dim=8).wrap(nn.Embedding(30, 4))})
    other = copy.deepcopy(model)
    for looked_at, trained in ((True, model), (False, other)):
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
        for step in range(3):
            before = copy.deepcopy(factorized_tables(trained)["item"])
            optimizer.zero_grad()
            trained["item"](torch.tensor([step, 4])).square().sum().backward()
            optimizer.step()
            if looked_at:
                assert update_split(before, factorized_tables(trained)["item"]).squared_length > 0
                assert math.isfinite(reweighting(factorized_tables(trained)["item"]).mean_factor)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_the_tables_of_a_model_are_found_by_field_and_share_their_weights():
    fields = (rb.data.Field(name="user", rows=20), rb.data.Field(name="item", rows=11))
    model = FM(rb.data.Schema(fields), dim=5)
    rb.apply_(model, rb.Hashing(buckets=7), where=lambda t: t.field == "user", verbose=False)
    rb.apply_(model, MLET(inner_dim=8), verbose=False)
    tables = factorized_tables(model)
    assert [name.rpartition(".")[2] for name in tables] == ["user", "item"]
    assert [reweighting(table).rows for table in tables.values()] == [7, 11]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(reweighting(table).mean_factor == 0 for table in tables.values())


def test_a_hashed_table_is_looked_into():
    model = nn.Sequential(nn.Embedding(20, 3))
    rb.apply_(model, rb.Hashing(buckets=7), verbose=False)
    rb.apply_(model, MLET(inner_dim=5), verbose=False)
    assert reweighting(model[0]) == reweighting(model[0].inner)


def test_a_plain_table_is_refused():
    with pytest.raises(DataError, match="got a Embedding without MLET; apply_ MLET to it first"):
        reweighting(nn.Embedding(9, 4))


def test_two_tables_are_refused():
    with pytest.raises(DataError, match="before and after are two states of one table"):
        update_split(product(3, 9, 5), product(3, 9, 6))


@pytest.mark.parametrize("part", ["inner.weight", "projection"])
def test_numbers_that_are_not_finite_are_refused(part):
    table, good = product(3, 9, 5), product(3, 9, 5)
    with torch.no_grad():
        dict(table.named_parameters())[part][1, 1] = math.nan
    with pytest.raises(DataError, match="the factors hold NaN or infinite numbers"):
        reweighting(table)
    for pair in ((table, good), (good, table)):
        with pytest.raises(DataError, match="the factors hold NaN or infinite numbers"):
            update_split(*pair)


def test_figures_are_plain_values_and_words():
    found = reweighting(product(2, 5, 4))
    mapping = found.to_mapping()
    assert mapping["num_informative"] == 8
    assert mapping["wide_values"] == list(found.wide_values)
    assert isinstance(found, Reweighting)
    assert str(found).startswith(
        "of 10 directions 10 are learned, 8 of them together with other ids"
    )
    assert "Tensor" not in repr(UpdateSplit(parts=torch.zeros(1, 1), rest=torch.zeros(1)))


def test_the_largest_factor_is_the_largest_of_all():
    for shape in ((2, 5, 4), (4, 3, 8), (3, 9, 2)):
        found = reweighting(product(*shape))
        assert found.largest_factor == pytest.approx(float(found.factors.max()))
        assert found.to_mapping()["largest_factor"] == found.largest_factor


def test_a_diagnosis_has_the_factors_of_products_and_of_no_other_table():
    names = ("plain", "product", "hashed", "quantised", "merged")
    model = nn.ModuleDict({name: nn.Embedding(20, 3, padding_idx=0) for name in names})

    def apply(method, name):
        rb.apply_(model, method, where=lambda t: t.name == name, verbose=False)

    apply(rb.Hashing(buckets=7), "hashed")
    for name in names[1:]:
        apply(MLET(inner_dim=4), name)
    apply(rb.Quantize(), "quantised")
    rb.merge_(model, where=lambda t: t.name == "merged", verbose=False)
    assert list(factorized_tables(model)) == ["product", "hashed"]
    found = {table.name: table for table in diagnose(model).tables}
    assert found["product"].reweighting == reweighting(model["product"])
    assert found["hashed"].reweighting.rows == 7
    assert [name for name, table in found.items() if table.reweighting] == ["product", "hashed"]
    mapping = found["product"].to_mapping()["reweighting"]
    assert mapping["num_informative"] == 3 * 4
    assert mapping["largest_factor"] >= mapping["mean_factor"]
    assert found["plain"].to_mapping()["reweighting"] is None


def test_a_diagnosis_of_a_product_that_diverged_says_so_and_has_no_factors():
    table = product(3, 9, 4)
    with torch.no_grad():
        table.projection[0, 0] = math.nan
    [found] = diagnose(nn.ModuleDict({"item": table})).tables
    assert found.reweighting is None
    assert found.not_finite_rows == 9
