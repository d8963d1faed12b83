"""e(i) = E[i, :d_m] P_m with the width of the group of an id, which validation rows search."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.research import DartsEmb
from rarebit.research.darts_emb import LR, MixedRows, SearchedTable, _Search, widths_of
from rarebit.testing import method_checks
from rarebit.training.fit import training_data


def made(width=8, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, width).double())
    rb.apply_(model, DartsEmb(**{"width": 3.0, "group": 8} | settings), verbose=False)
    return model


def projected(table, i, place):
    """Return E[i, :d_m] P_m, with plain numbers."""
    width = table.widths[place]
    row = table.inner.weight[i]
    if width == table.embedding_dim:
        return row.tolist()
    projection = table.projections[place]
    return [
        sum(float(row[c] * projection[c, column]) for c in range(width))
        for column in range(table.embedding_dim)
    ]


def test_rows_equal_the_equation():
    table = made()[0].requires_grad_(requires_grad=False)
    table.choice.copy_(torch.tensor([2, 0, 1, 1, 0]))
    rows = table(torch.arange(40))
    for i in range(40):
        wanted = projected(table, i, int(table.choice[i // 8]))
        assert rows[i].tolist() == pytest.approx(wanted, abs=1e-12)


def test_rows_of_a_search_are_mixtures_of_all_widths():
    table = made(stage="search")[0].requires_grad_(requires_grad=False)
    nn.init.normal_(table.logits)
    rows = table(torch.arange(40))
    for i in range(40):
        shares = table.logits[i // 8].exp()
        shares = (shares / shares.sum()).tolist()
        parts = [projected(table, i, place) for place in range(3)]
        wanted = [
            sum(y * p for y, p in zip(shares, column, strict=True))
            for column in zip(*parts, strict=True)
        ]
        assert rows[i].tolist() == pytest.approx(wanted, abs=1e-12)


def test_rows_start_with_the_variance_of_the_table():
    for choice in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4000, 64))
        rb.apply_(model, DartsEmb(width=8.0), verbose=False)
        model[0].choice.fill_(choice)
        assert float(model[0].weight.detach().std()) == pytest.approx(1.0, rel=0.2)


def test_widths_are_the_spaces_of_peps_comparison():
    assert [widths_of(d) for d in (8, 16, 32)] == [[1, 2, 8], [2, 4, 16], [4, 8, 32]]


def test_choices_are_as_even_as_the_mean_width_allows():
    # widths 1, 2 and 8 of groups of 8 ids
    even = {w: DartsEmb(width=w, group=8).even(40, 8).tolist() for w in (1.0, 1.4, 2.0, 3.2, 8.0)}
    assert even == {
        1.0: [0] * 5,
        1.4: [1, 1, 0, 0, 0],
        2.0: [1] * 5,
        3.2: [2, 1, 1, 1, 1],
        8.0: [2] * 5,
    }
    # two groups, the last of two ids: (8 x 8 + 2 x 1) / 10 columns in the mean
    assert DartsEmb(width=6.6, group=8).even(10, 8).tolist() == [1, 1]
    assert DartsEmb(width=6.8, group=8).even(10, 8).tolist() == [2, 1]


def test_what_is_stored_is_what_is_said():
    for width, rows, columns in ((1.0, 300, 16), (3.3, 300, 16), (1.0, 40, 4), (16.0, 300, 16)):
        model = nn.Sequential(nn.Embedding(rows, columns))
        method = DartsEmb(width=width, group=64)
        model[0] = method.wrap(model[0]).served()
        groups = -(-rows // 64)
        numbers = sum(p.numel() for p in model.parameters())
        assert numbers + -(-groups // 4) == method.stored(rows, columns)
    with pytest.raises(rb.errors.SettingsError, match=r"darts-emb cannot keep a share of 0.0625"):
        DartsEmb.for_share([(10_000, 16)], share=1 / 16)  # two of sixteen columns are an eighth


def test_the_likeliest_widths_within_the_numbers_are_picked():
    table = made(stage="search")[0]
    # the first group likes eight columns far better than the others like any
    table.logits.copy_(torch.tensor([[0.0, 0.0, 9.0], *[[0.0, 0.5, 0.0]] * 4]))
    # 40 rows of 3.2 columns, 128 numbers: eight columns for the first group, and two for the others
    [choice] = DartsEmb(width=3.2, group=8).pick([table])
    assert choice.tolist() == [2, 1, 1, 1, 1]
    # two groups may have two columns: a number is worth 9 / 8 in the third, 0.5 / 8 in the others, and all of those do not fit
    table.logits.copy_(torch.tensor([[0.0, 0.5, 0.0]] * 5))
    table.logits[2, 1] = 9.0
    [choice] = DartsEmb(width=1.4, group=8).pick([table])
    assert choice.tolist() == [0, 0, 1, 0, 0]


def test_a_step_of_the_search_is_adam_on_a_batch_of_validation_rows():
    log = rb.data.generate(rb.data.SyntheticLog(rows=2_000))
    settings = rb.Training(batch_size=128, seed=3)
    model = rb.models.build_model("fm", log.train.schema, {"dim": 8})
    rb.apply_(model, DartsEmb(width=3.0, group=8, stage="search"), verbose=False)
    tables = [table for table in model.modules() if isinstance(table, SearchedTable)]
    assert len(tables) > 1
    for table in tables:
        nn.init.normal_(table.logits)
    before = [table.logits.clone() for table in tables]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    search = _Search()
    search.start(model, training_data(settings, log.train, log.valid))
    search.after_step(1)
    # the first step of Adam is the rate times the sign of the gradient, where that is not tiny
    batch = log.valid[log.valid.order(seed=3, epoch=1)[:128]]
    twins = [one.clone().requires_grad_() for one in before]
    for table, twin in zip(tables, twins, strict=True):
        table._buffers["logits"] = twin
    loss = F.binary_cross_entropy_with_logits(model(batch), batch.label)
    gradients = torch.autograd.grad(loss, twins)
    for moved, start, gradient in zip(
        search.optimizer.param_groups[0]["params"], before, gradients, strict=True
    ):
        assert not moved.requires_grad
        assert_close(moved, start - LR * gradient / (gradient.abs() + 1e-8), rtol=0, atol=1e-6)
        assert bool((gradient != 0).any())
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_a_search_needs_validation_rows():
    log = rb.data.generate(rb.data.SyntheticLog(rows=1_000))
    model = rb.models.build_model("fm", log.train.schema, {"dim": 8})
    method = DartsEmb(width=3.0, stage="search")
    rb.apply_(model, method, verbose=False)
    with pytest.raises(rb.errors.TrainingError, match="searches on validation rows"):
        rb.fit(model, log.train, epochs=1, callbacks=[method], progress=False)


@pytest.mark.parametrize("choice", [[2, 0, 1, 1, 0], [0] * 5, [2] * 5])
def test_after_training_only_what_is_used_is_stored(choice, tmp_path):
    model = made()
    model[0].choice.copy_(torch.tensor(choice))
    before = model(torch.arange(40)).detach()
    table = model[0] = model[0].served()
    assert isinstance(table, MixedRows)
    assert_close(model(torch.arange(40)), before, rtol=0, atol=1e-12)
    assert len(table.values) == sum(8 * widths_of(8)[one] for one in choice)
    fresh = nn.Sequential(nn.Embedding(40, 8).double())
    loaded = rb.load_model(rb.save_model(model, tmp_path / "model"), into=fresh)
    assert torch.equal(loaded(torch.arange(40)), model(torch.arange(40)))
    rb.merge_(loaded, verbose=False)
    assert torch.equal(loaded[0].weight, model(torch.arange(40)))


def test_a_damaged_file_is_refused():
    table = made()[0].served()
    kept = dict(table.state_dict())
    assert table.take(kept) is None
    assert "shape" in table.take(kept | {"projections": kept["projections"][:-1]})
    assert "missing" in table.take({})
    for name, wrong in (("values", kept["values"][:-1]), ("choice", kept["choice"] + 9)):
        assert table.take(kept | {name: wrong}) is not None


def test_a_run_searches_and_stores_rows_within_the_size():
    settings = rb.RunSettings(
        model="fm",
        data=rb.data.SyntheticLog(rows=4_000),
        training=rb.Training(epochs=1, batch_size=128),
        methods=(DartsEmb(width=3.0, group=32),),
    )
    result = rb.run(settings, progress=False, say=lambda line: None)
    tables = [m for m in result.model.modules() if isinstance(m, MixedRows)]
    assert tables
    assert not any(isinstance(m, SearchedTable) for m in result.model.modules())
    method = tables[0].darts
    whole = sum(method.stored(t.num_embeddings, t.embedding_dim) for t in tables)
    assert sum(t.num_weights for t in tables) <= whole
    assert len({place for t in tables for place in t.choice.tolist()}) == 3


ROWS = DartsEmb(width=2.0, group=4, stage="frozen")
PROMISES = {name: check for name, check in method_checks(ROWS) if "composition" not in name}


@pytest.mark.parametrize("name", PROMISES)
def test_the_contract_holds_for_what_is_stored(name):
    PROMISES[name]()
