"""A touched row decays by the steps since its last update, and then the optimizer's step is added."""

import copy

import pytest
import torch
from methods.shrunk_models import deepfm
from methods.training_data import rows_of, training_data
from torch import nn

import rarebit as rb
from rarebit.research.adam_ar import AdamAR
from rarebit.tables.apply import table_parameters


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_each_row_decays_by_its_age_row_by_row(tables):
    model, train, alpha = deepfm(), rows_of(64), 0.2
    with torch.no_grad():  # padding, which a gradient by rows lists, too
        for stacks in (model.backbone.tables.stacks, model.wide.tables.stacks):
            stacks[0].embedding.weight[20] = 0.0
    plain = copy.deepcopy(model)
    aging = AdamAR(alpha=alpha).start(model, training_data(train))
    optimizer = rb.optimizer(model, kind="sgd", lr=0.1, tables=tables)
    its = rb.optimizer(plain, kind="sgd", lr=0.1, tables="dense")
    last = {name: [0] * len(p) for name, p in table_parameters(plain).items()}
    for step, batch in enumerate(train.batches(8), start=1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        with torch.no_grad():
            for name, parameter in table_parameters(plain).items():
                for row in range(len(parameter)):
                    if parameter.grad[row].any():
                        parameter[row] *= 1 - min(1.0, alpha * (step - last[name][row]))
                        last[name][row] = step
        its.step()
        its.zero_grad()
        for name, value in plain.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], value)
    aging.close()


@pytest.mark.parametrize("sparse", [False, True])
def test_by_hand(sparse):
    table = nn.Embedding(2, 3, sparse=sparse)
    nn.init.constant_(table.weight, 8.0)
    aging = AdamAR(alpha=0.25).start(table, training_data(rows_of(8)))
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    for ids in ([0], [0], [0, 1]):
        optimizer.zero_grad()
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
    # row 0: 8 * 3/4 - 1 = 5; 5 * 3/4 - 1 = 2.75; 2.75 * 3/4 - 1; row 1 waited for three steps: 8 / 4 - 1
    assert table.weight.tolist() == [[1.0625] * 3, [1.0] * 3]
    aging.close()


def test_without_decay_training_is_plain_to_the_bit():
    options = {"epochs": 2, "batch_size": 8, "lr": 0.05, "progress": False}
    plain, train = deepfm(), rows_of(64)
    model = copy.deepcopy(plain)
    rb.fit(plain, train, **options)
    rb.fit(model, train, callbacks=[AdamAR(alpha=0.0)], **options)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
