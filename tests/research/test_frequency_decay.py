"""The squares of rare rows are in the loss: the gradient is that of the loss written out."""

import copy

import pytest
import torch
from methods.shrunk_models import FIELDS, deepfm
from methods.training_data import rows_of, training_data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.models.lr import LR
from rarebit.research.frequency_decay import FrequencyDecay
from rarebit.tables.apply import find_sites


def penalty(model: nn.Module, batch: rb.data.Batch, counts: dict[str, Tensor], c: float) -> Tensor:
    """Return half the mean over the batch of the squares of its values' rows, with loops."""
    total = torch.zeros((), dtype=torch.float64)
    for tables in (model.backbone.tables, model.wide.tables):
        stack = tables.stacks[0]
        for place, field in enumerate(FIELDS):
            first = sum(stack.sizes[:place])
            for i in batch[field.name].flatten().tolist():
                if field.kind == "multi" and i == 0:
                    continue
                share = c / (counts[field.name][i].item() + c)
                total = total + share * stack.embedding.weight[first + i].square().sum()
    return total / 2 / len(batch)


def loss_of(model: nn.Module, batch: rb.data.Batch) -> Tensor:
    logits = model(batch)
    return F.binary_cross_entropy_with_logits(logits, batch.label.to(logits.dtype))


def test_the_gradient_is_that_of_the_loss_with_the_squares():
    model, train = deepfm().double().train(), rows_of(100)
    naive = copy.deepcopy(model)
    decay = FrequencyDecay(strength=0.3, c=4.0).start(model, training_data(train))
    batch = train[:16]
    loss = loss_of(model, batch)
    assert torch.equal(loss, loss_of(naive, batch))
    loss.backward()
    (loss_of(naive, batch) + 0.3 * penalty(naive, batch, train.counts(), 4.0)).backward()
    for parameter, expected in zip(model.parameters(), naive.parameters(), strict=True):
        assert_close(parameter.grad, expected.grad)
    decay.close()
    model.zero_grad()
    loss_of(model, batch).backward()
    assert not torch.allclose(
        model.wide.tables.stacks[0].embedding.weight.grad,
        naive.wide.tables.stacks[0].embedding.weight.grad,
    )


@pytest.mark.parametrize("settings", [{"strength": 0.0}, {"c": 0.0}])
def test_without_strength_it_is_plain_training_bit_by_bit(settings):
    model, train = deepfm().train(), rows_of(100)
    plain = copy.deepcopy(model)
    FrequencyDecay(**settings).start(model, training_data(train))
    for one in (model, plain):
        loss_of(one, train[:16]).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_rare_rows_are_held_more_than_frequent_ones():
    users = torch.cat([torch.zeros(400), torch.arange(1, 101)]).long()
    label = torch.where(users == 0, torch.arange(500) % 10 != 0, users % 2 == 0).float()
    train = rb.Dataset.from_columns({"user": users}, label=label)
    sizes = []
    for strength in (0.0, 0.3):
        torch.manual_seed(1)
        model = LR(train.schema)
        FrequencyDecay(strength=strength, c=5.0).start(model, training_data(train))
        rb.fit(model, train, batch_size=50, epochs=20, lr=0.05, progress=False)
        [site] = find_sites(model)
        rows = site.table.weight.detach().abs()
        sizes.append((rows[0].item(), rows[1:].mean().item()))
    (frequent, rare), (held_frequent, held_rare) = sizes
    assert held_rare < 0.7 * rare
    assert held_frequent > 0.9 * frequent
