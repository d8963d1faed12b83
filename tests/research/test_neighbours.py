"""The neighbours of shrinkage with every method they may be combined with: they train, and leave nothing behind."""

import pytest
import torch
from contract.test_methods import method_of
from torch.nn import functional as F

import rarebit as rb
from rarebit.callbacks import TrainingData, TrainingMethod
from rarebit.models._base import RankingModel
from rarebit.tables.apply import find_sites
from rarebit.technique import compositions, technique_names
from rarebit.testing import small_model

NEIGHBOURS = ("forgetting", "frequency-decay", "fresh-tables", "group-stopping", "id-dropout")
OTHERS = [name for name in technique_names() if name not in NEIGHBOURS]
PAIRS = [
    (name, other) for name in NEIGHBOURS for other in OTHERS if compositions()[other, name] is None
]


def test_there_are_pairs():
    assert len(PAIRS) > 30


def data_of(model: RankingModel) -> TrainingData:
    rows = [
        torch.cat(
            [torch.randint(f.rows, (40, f.max_length)) for f in model.schema.table_fields], dim=1
        )
        for _ in range(2)
    ]
    train, valid = (
        rb.Dataset(model.schema, ids, torch.randn(40, 1), torch.arange(40) % 2) for ids in rows
    )
    return TrainingData(train=train, valid=valid, batch_size=20, steps_per_epoch=2, seed=0)


@pytest.mark.parametrize(("name", "other"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_a_pair_that_is_allowed_trains_and_leaves_nothing_behind(name, other):
    first = method_of(other)
    model = small_model(first).train()
    data = data_of(model)
    acting = [first] if isinstance(first, TrainingMethod) else []
    if not acting and not first.after_training:
        rb.apply_(model, first, verbose=False)
    names = list(model.state_dict())
    parts = [m.start(model, data) for m in (*acting, method_of(name))]
    backward = next((part.backward for part in parts if part.backward), torch.Tensor.backward)
    optimizer = rb.optimizer(model, lr=0.1, kind="sgd")
    batch = data.train[:20]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number in range(1, 5):
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.label)
        assert bool(loss.isfinite())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for part in parts:
            part.after_step(number)
        if number == data.steps_per_epoch:
            for part in parts:
                part.between_epochs(2, optimizer)
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for part in parts:
        part.end()
        part.close()
    assert list(model.state_dict()) == names
    assert not any(module._forward_hooks for module in model.modules())
    rb.merge_(model, verbose=False)
    assert all(bool(site.table.weight.isfinite().all()) for site in find_sites(model))


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_used_one_at_a_time(name):
    for other in NEIGHBOURS:
        assert "use one" in compositions()[other, name]
