"""c estimated from rows whose truth is known, and counts that are set in a model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rarebit as rb
from rarebit.errors import DataError, NoTableError
from rarebit.methods._shrinkage_model import MOST, estimate_c_, set_counts_, strength_of_spread
from rarebit.methods._shrinkage_parts import counted_in
from rarebit.methods.shrinkage import Shrinkage
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.tables.table import full_table

SCHEMA = rb.Schema(
    (
        rb.Field(name="user", rows=20),
        rb.Field(name="tags", kind="multi", rows=9, max_length=3),
        rb.Field(name="item", rows=11),
    )
)
ROWS = 20_000


def long_tail(rows: int = ROWS) -> Tensor:
    """Return counts of which half are one, and a few very large."""
    return torch.rand(rows).pow(-1.2).clamp(max=1e5).long()


def noisy_rows(counts: Tensor, tau: float, sigma: float, width: int, mean: float = 0.0) -> Tensor:
    """Return true rows of spread tau around a mean, each as the mean of n noisy observations."""
    true = mean + tau * torch.randn(len(counts), width)
    return true + sigma * torch.randn(len(counts), width) / counts.clamp(min=1).sqrt().unsqueeze(1)


def auto(weight: Tensor, counts: Tensor, **settings: object) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding.from_pretrained(weight, freeze=False))
    rb.apply_(model, Shrinkage(counts=counts, **{"c": "estimated", **settings}), verbose=False)
    return model


@pytest.mark.parametrize(
    ("tau", "sigma"), [(0.5, 2.0), (1.0, 10.0), (0.01, 0.03), (2.0, 2.0), (1.0, 1.7)]
)
@pytest.mark.parametrize("width", [1, 8])
def test_the_strength_of_simulated_rows_is_found(tau, sigma, width):
    counts = long_tail()
    model = auto(noisy_rows(counts, tau, sigma, width), counts)
    assert estimate_c_(model)["0"] == pytest.approx(
        (sigma / tau) ** 2, rel=0.25 if width == 1 else 0.1
    )


def test_it_is_measured_around_the_prior():
    counts = long_tail()
    model = auto(noisy_rows(counts, 0.5, 2.0, 4, mean=3.0), counts)
    around_zero = estimate_c_(model)["0"]
    assert around_zero < 1.0  # a mean of 3 looks like a spread of 3
    with torch.no_grad():
        model[0].prior.mean.fill_(3.0)
    assert estimate_c_(model)["0"] == pytest.approx(16.0, rel=0.15)


def test_the_best_of_all_strengths_is_near_the_one_that_is_found():
    """With the estimate, shrunk rows are closer to the truth than with a third or three times of it."""
    counts, width = long_tail(), 4
    true = 0.5 * torch.randn(ROWS, width)
    seen = true + 2.0 * torch.randn(ROWS, width) / counts.sqrt().unsqueeze(1)
    model = auto(seen, counts)
    found = estimate_c_(model)["0"]

    def error(c: float) -> float:
        shrunk = seen * (counts / (counts + c)).unsqueeze(1)
        return float((shrunk - true).square().sum())

    assert error(found) < min(error(found / 3), error(found * 3), error(0.0))
    left = (model[0].weight.detach() - true).square().sum()
    assert float(left) == pytest.approx(error(found), rel=1e-4)


def test_rows_that_are_all_truth_are_not_shrunk():
    counts = long_tail()
    signs = torch.randint(0, 2, (ROWS, 4)) * 2.0 - 1.0  # each with the same square
    assert estimate_c_(auto(signs, counts))["0"] == pytest.approx(0.0, abs=1e-9)


def test_rows_that_spread_more_the_more_they_were_seen_are_not_shrunk():
    counts = long_tail()
    assert estimate_c_(auto(torch.randn(ROWS, 4) * counts.unsqueeze(1), counts))["0"] == 0.0


def test_rows_that_are_all_noise_are_shrunk_as_much_as_can_be():
    counts = torch.tensor([1, 4, 16, 64])
    assert strength_of_spread(counts, 5.0 / counts) == MOST


@given(
    level=st.floats(0.01, 100.0),
    slope=st.floats(0.01, 1000.0),
    scale=st.floats(1e-6, 1e6),
    counts=st.lists(st.integers(1, 10**6), min_size=2, max_size=30),
)
def test_on_the_line_itself_the_strength_is_exact_whatever_the_scale(level, slope, scale, counts):
    n = torch.tensor(counts)
    found = strength_of_spread(n, scale * (level + slope / n.double()))
    groups = {int(count).bit_length() for count in counts}
    if len(groups) == 1:
        assert found is None
    else:
        # frequent rows alone say little of the slope: rounding is all that is left of it
        resolution = 1e-9 * level / slope / max(1 / min(counts) - 1 / max(counts), 1e-9)
        assert found == pytest.approx(slope / level, rel=1e-6 + resolution)


def test_rows_never_seen_and_padding_say_nothing():
    counts = torch.tensor([1, 2, 4, 0, 8])
    spread = torch.tensor([7.0, 4.0, 2.5, 1e9, 1.75])
    assert strength_of_spread(counts, spread) == pytest.approx(6.0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=3))
    with torch.no_grad():
        model[0].weight.copy_(spread.sqrt().unsqueeze(1))
        model[0].weight[3] = 0.0
    rb.apply_(
        model,
        Shrinkage(counts=counts + torch.tensor([0, 0, 0, 50, 0]), c="estimated"),
        verbose=False,
    )
    assert estimate_c_(model)["0"] == pytest.approx(6.0, rel=1e-5)


@pytest.mark.parametrize(
    ("weight", "counts"),
    [
        (torch.randn(4, 3), torch.tensor([5, 5, 6, 7])),
        (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.tensor([1, 2, 4, 8])),
    ],
    ids=["all seen equally often", "never seen", "all at the prior"],
)
def test_where_rows_tell_nothing_the_strength_stays(weight, counts):
    assert estimate_c_(auto(weight, counts)) == {"0": 10.0}


def test_each_field_gets_a_strength_of_its_own_and_lookups_use_it():
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, Shrinkage(counts=7, c="estimated"), verbose=False)
    weights = [table.inner.weight for table in model.backbone.tables.tables()]
    set_counts_(model, {f.name: 4 ** torch.arange(f.rows).clamp(max=9) for f in SCHEMA.fields})
    with torch.no_grad():
        for table, weight, noise in zip(
            model.backbone.tables.tables(), weights, (1.0, 4.0, 9.0), strict=True
        ):
            square = 1 + noise / table.evidence.counts
            weight.copy_(square.sqrt().unsqueeze(1).expand_as(weight))
    found = estimate_c_(model)
    assert found["backbone.tables.user"] == pytest.approx(1.0, rel=1e-4)
    assert found["backbone.tables.tags"] == pytest.approx(4.0, rel=1e-4)
    assert found["backbone.tables.item"] == pytest.approx(9.0, rel=1e-4)
    assert set(found) == {info.name for info in rb.find_tables(model)}
    # item 1 was seen 4 times: 4 / (4 + 9) of its row, through the lookup of all fields
    ids = torch.tensor([[0, 0, 0, 0, 1]])
    row = model.backbone.tables(ids)[0, 2]
    torch.testing.assert_close(row, weights[2][1].detach() * 4 / 13, rtol=1e-4, atol=0)


def test_only_strengths_that_are_to_be_estimated_are():
    model = nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.Embedding(4, 3)})
    counts = torch.tensor([1, 2, 4, 8])
    rb.apply_(model, Shrinkage(counts=counts, c=5.0), where=lambda t: t.name == "a", verbose=False)
    rb.apply_(
        model, Shrinkage(counts=counts, c="estimated"), where=lambda t: t.name == "b", verbose=False
    )
    assert list(estimate_c_(model)) == ["b"]
    assert model["a"].evidence.c.item() == 5.0
    with pytest.raises(
        NoTableError, match=r'no table .* c to estimate; use Shrinkage\(c="estimated"\)'
    ):
        estimate_c_(nn.Sequential(nn.Embedding(4, 3)))


def test_nothing_is_estimated_without_counts():
    model = nn.Sequential(nn.Embedding(4, 3))
    rb.apply_(model, Shrinkage(c="estimated"), verbose=False)
    with pytest.raises(DataError, match=r"'0' does not know how often .* use set_counts_ first"):
        estimate_c_(model)


@pytest.mark.parametrize("before", [[], [rb.Hashing(buckets=4)]])
@pytest.mark.parametrize("after", [[], [rb.PEP(init=-3.0)]])
def test_counts_that_are_set_are_those_that_were_given_at_once(before, after):
    counts = {field.name: torch.randint(0, 50, (field.rows,)) for field in SCHEMA.fields}
    models = []
    for at_first in (counts, None, {name: count + 1 for name, count in counts.items()}):
        torch.manual_seed(0)
        model = DeepFM(SCHEMA, dim=4, hidden=(8,))
        for method in (*before, Shrinkage(counts=at_first, c=3.0), *after):
            rb.apply_(model, method, verbose=False)
        models.append(model)
    for model in models[1:]:
        set_counts_(model, counts)
        batch = rb.Dataset(SCHEMA, torch.randint(0, 9, (16, 5)))[:]
        assert torch.equal(model(batch), models[0](batch))
        for old, new in zip(
            models[0].backbone.tables.tables(), model.backbone.tables.tables(), strict=True
        ):
            assert torch.equal(
                counted_in(old)[0].evidence.counts, counted_in(new)[0].evidence.counts
            )


def test_counts_of_sets_are_set_and_estimated_set_by_set():
    model = DCNv2(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, rb.MultiEmbedding(num_sets=2), verbose=False)
    rb.apply_(model, Shrinkage(c="estimated"), verbose=False)
    counts = {field.name: torch.randint(1, 50, (field.rows,)) for field in SCHEMA.fields}
    set_counts_(model, counts)
    for field, table in zip(SCHEMA.fields, model.backbone.tables.tables(), strict=True):
        for one in counted_in(table):
            assert torch.equal(one.evidence.counts, counts[field.name])
    assert len(estimate_c_(model)) >= len(SCHEMA.fields)


def test_counts_that_do_not_fit_change_nothing():
    model = nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.Embedding(5, 3)})
    rb.apply_(model, Shrinkage(counts=2, c="estimated"), verbose=False)
    with pytest.raises(DataError, match="there are no counts of 'b', only of a"):
        set_counts_(model, {"a": torch.arange(4)})
    assert model["a"].evidence.counts.tolist() == [2, 2, 2, 2]
    with pytest.raises(NoTableError, match=r"no table .* counts to set; apply_ Shrinkage first"):
        set_counts_(nn.Sequential(nn.Embedding(4, 3)), 3)


def test_a_loaded_model_that_never_had_counts_still_says_so():
    model = nn.Sequential(nn.Embedding(4, 3))
    rb.apply_(model, Shrinkage(c="estimated"), verbose=False)
    other = nn.Sequential(nn.Embedding(4, 3))
    rb.apply_(other, Shrinkage(counts=3, c="estimated"), verbose=False)
    other.load_state_dict(model.state_dict())
    with pytest.raises(DataError, match="does not know how often"):
        other(torch.tensor([1]))


def test_a_typical_strength_is_the_median_of_the_counts_of_ids_that_were_seen():
    model = nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(4, 4)})
    rb.apply_(model, Shrinkage(c="typical"), verbose=False)
    counts = {"user": torch.tensor([0, 1, 2, 9, 40, 0]), "item": torch.tensor([0, 0, 7, 0])}
    set_counts_(model, counts)
    assert [float(model[name].evidence.c) for name in counts] == [2.0, 7.0]
    fixed = nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(4, 4)})
    fixed.load_state_dict({f"{name}.weight": full_table(model[name].inner) for name in counts})
    rb.apply_(fixed, Shrinkage(counts=counts, c={"user": 2.0, "item": 7.0}), verbose=False)
    for name in counts:
        assert torch.equal(full_table(model[name]), full_table(fixed[name]))


def test_a_typical_strength_grows_with_the_counts_and_is_known_at_once_where_they_are():
    model = nn.ModuleDict({"user": nn.Embedding(3, 4)})
    rb.apply_(model, Shrinkage(counts={"user": torch.tensor([1, 5, 5])}), verbose=False)
    assert float(model["user"].evidence.c) == 5.0
    set_counts_(model, {"user": torch.tensor([10, 50, 70])})
    assert float(model["user"].evidence.c) == 50.0


def test_without_any_id_seen_a_typical_strength_is_one_and_all_rows_are_the_prior():
    model = nn.ModuleDict({"user": nn.Embedding(3, 4)})
    rb.apply_(model, Shrinkage(counts={"user": torch.zeros(3, dtype=torch.int64)}), verbose=False)
    assert float(model["user"].evidence.c) == 1.0
    assert torch.equal(full_table(model["user"]), torch.zeros(3, 4))


def test_each_field_of_a_stack_has_a_typical_strength_of_its_own():
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    rb.apply_(model, Shrinkage(), verbose=False)
    set_counts_(model, {f.name: 1 + 10 * torch.arange(f.rows) for f in SCHEMA.fields})
    for site in rb.find_tables(model):
        assert site.methods == (str(Shrinkage(c="typical")),)
    for table, field in zip(model.backbone.tables.tables(), SCHEMA.fields, strict=True):
        assert float(table.evidence.c) == 1 + 10 * ((field.rows - 1) // 2)
