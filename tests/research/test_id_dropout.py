"""In training a rare id is dropped in c/(n+c) of its lookups, and gets the unknown row; served, it is itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, counts_by_field, deepfm, ids_of
from methods.training_data import rows_of, training_data
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.callbacks import Callback
from rarebit.data.dataset import Dataset
from rarebit.errors import UnsupportedTableError
from rarebit.research._neighbours import OpenShares, find_lookups
from rarebit.research.id_dropout import IdDropout

LOOKUPS = 20_000


def seen(counts: list[int]) -> Dataset:
    """Return rows in which each user is as often as it is said; the last one at least once."""
    users = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Dataset.from_columns({"user": users}, label=torch.zeros(len(users)))


class Model(nn.Module):
    def __init__(self, rows: int, **options: int) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, 3, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.user(ids)


def dropped(model: nn.Module, ids: Tensor) -> Tensor:
    """Return which lookups were given the unknown row, which is zero at first."""
    return (model(ids) == 0).all(dim=-1)


@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), c=st.floats(0.0, 1e4))
def test_the_open_share_is_that_of_the_equation(counts, c):
    [place] = find_lookups(nn.ModuleDict({"user": nn.Embedding(len(counts), 2)}))
    shares = OpenShares(place, {"user": torch.tensor(counts)}, c)
    expected = [c / (n + c) if c else 0.0 for n in counts]
    assert_close(shares(torch.arange(len(counts))), torch.tensor(expected))


def test_shares_of_a_stack_are_those_of_its_fields_and_none_of_padding():
    model, counts = deepfm(), counts_by_field()
    ids = ids_of()
    for place in find_lookups(model):
        found = OpenShares(place, counts, 5.0)(ids)
        columns = ids.split([field.max_length for field in FIELDS], dim=1)
        for field, column, own in zip(FIELDS, columns, found.split([1, 3, 1], dim=1), strict=True):
            for i, share in zip(column.flatten().tolist(), own.flatten().tolist(), strict=True):
                is_padding = field.kind == "multi" and i == 0
                n = counts[field.name][i].item()
                assert share == pytest.approx(0.0 if is_padding else 5 / (n + 5))


def test_an_id_is_dropped_as_often_as_the_equation_says():
    counts = [1, 10, 40, 1]
    model = Model(4, padding_idx=3)
    IdDropout(c=10.0).start(model, training_data(seen(counts)))
    ids = torch.arange(3).repeat(LOOKUPS, 1)
    found = dropped(model, ids).double().mean(dim=0)
    expected = torch.tensor([10 / 11, 10 / 20, 10 / 50], dtype=torch.float64)
    spread = (expected * (1 - expected) / LOOKUPS).sqrt()
    assert bool(((found - expected).abs() < 5 * spread).all())


def test_served_a_row_is_itself_and_nothing_is_left_behind():
    model, ids = deepfm(), ids_of()
    names = list(model.state_dict())
    batch = rows_of(16)[:]
    expected = model.eval()(batch)
    dropping = IdDropout(c=100.0).start(model, training_data(rows_of(30)))
    assert torch.equal(model(batch), expected)
    model.train()
    assert not torch.equal(model(batch), expected)
    dropping.close()
    assert list(model.state_dict()) == names
    assert torch.equal(model(batch), expected)
    assert bool(model.backbone.tables.stacks[0](ids).any())


def test_without_strength_nothing_is_dropped():
    model = Model(3)
    IdDropout(c=0.0).start(model, training_data(seen([2, 1, 1])))
    ids = torch.randint(3, (64,))
    assert torch.equal(model(ids), model.user.weight[ids])


def test_a_dropped_value_is_dropped_from_all_tables_of_its_field():
    model, ids = deepfm().train(), ids_of(64).clamp(min=1)
    dropping = IdDropout(c=5.0).start(model, training_data(rows_of(100)))
    [rows], [first] = model.backbone.tables.stacks, model.wide.tables.stacks
    masks = [dropped(rows, ids), dropped(first, ids)]
    assert torch.equal(*masks)
    assert 0 < int(masks[0].sum()) < masks[0].numel()
    dropping.after_step(1)
    assert not torch.equal(dropped(rows, ids), masks[0])


def test_the_gradient_of_a_dropped_lookup_goes_to_the_unknown_row():
    model, ids = deepfm().train(), ids_of(64).clamp(min=1)
    IdDropout(c=5.0).start(model, training_data(rows_of(100)))
    [stack] = model.backbone.tables.stacks
    rows = stack(ids)
    upstream = torch.randn_like(rows)
    mask = (rows == 0).all(dim=-1)
    (rows * upstream).sum().backward()
    unknown = torch.zeros(len(FIELDS), rows.shape[-1])
    own = torch.zeros_like(stack.embedding.weight)
    field_of_slot, offsets = [0, 1, 1, 1, 2], [0, 20, 20, 20, 29]
    for b in range(len(ids)):
        for s in range(5):
            if mask[b, s]:
                unknown[field_of_slot[s]] += upstream[b, s]
            else:
                own[offsets[s] + ids[b, s]] += upstream[b, s]
    assert_close(stack.unknown.rows.grad, unknown)
    assert_close(stack.embedding.weight.grad, own)


def test_the_unknown_row_is_trained_with_the_model():
    model, train = deepfm(), rows_of(64)
    dropping, steps = IdDropout(c=50.0).start(model, training_data(train)), Callback()
    steps.after_step = dropping.after_step
    rb.fit(
        model,
        train,
        rows_of(32),
        batch_size=8,
        epochs=2,
        lr=0.01,
        callbacks=[steps],
        progress=False,
    )
    assert bool(model.backbone.tables.stacks[0].unknown.rows.any(dim=1).all())
    assert bool(model.wide.tables.stacks[0].unknown.rows.any(dim=1).all())
    dropping.close()
    assert not any("unknown" in name for name in model.state_dict())


def test_a_bag_is_refused():
    model = nn.ModuleDict({"user": nn.EmbeddingBag(4, 3)})
    with pytest.raises(
        UnsupportedTableError, match="'user' pools its rows, so single rows are out of reach"
    ):
        IdDropout().start(model, training_data(seen([1, 1, 1, 1])))
