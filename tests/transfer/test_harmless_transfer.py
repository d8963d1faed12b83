"""Harmless transfer in one step: the gradients it leaves, against loops over the rows."""

import copy

import pytest
import torch
from contract.model_checks import SCHEMA, lively, make_batch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.data.selection import FieldSelection, FrequencySplit, Selection
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.models.deepfm import DeepFM
from rarebit.testing import counting_large_tensors
from rarebit.transfer.losses import (
    MMD,
    Adversarial,
    AdversarialMLP,
    CosReg,
    Moments,
    Relatives,
    SlicedWasserstein,
)
from rarebit.transfer.running import Listed

ROWS, WIDTH = 20, 4
ARGUMENTS = {"counts", "data", "say", "seed", "select", "where"}
"""What `start` takes; the other options are settings."""
COUNTS = torch.tensor([0, 9, 1, 1, 8, 7, 1, 2, 2, 0, 1, 1, 3, 1, 1, 2, 1, 1, 1, 1])
FREQUENT = {1, 4, 5, 12}  # the top fifth of the 18 that were seen, rounded up
RARE = {i for i in range(ROWS) if COUNTS[i] > 0} - FREQUENT


class Net(nn.Module):
    """A table, then a network that is not linear."""

    def __init__(self, **options):
        super().__init__()
        self.item = nn.Embedding(ROWS, WIDTH, **options)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.out(torch.tanh(self.item(ids))).squeeze(-1)


class Tied(nn.Module):
    """A language model in small: the output's weight is the table."""

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.item.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.item(ids))))


def some_ids(size=30):
    return torch.randint(ROWS, (size,))


def loss_of(model, ids):
    return F.softplus(2 * model(ids)).mean()


def started(model, **options):
    options = {
        "counts": COUNTS,
        "where": lambda t: True,
        "samples": 8,
        "scale": 50.0,
    } | options
    chosen = {name: options.pop(name) for name in ARGUMENTS & set(options)}
    return HarmlessTransfer(**options).start(model, **chosen)


def transfer_by_hand(weight, present, running, rare=RARE, table=0):
    """The adversarial gradient of each row, by the discriminator as it is after its step."""
    w, b = running.weight[table, 0].detach(), running.bias[table, 0].detach()
    moved = sorted(set(present) & rare)
    found = torch.zeros_like(weight)
    for i in moved:
        found[i] = -torch.sigmoid(weight[i] @ w + b) * w / len(moved)
    return found


def lexico_by_hand(g, t, loss, alpha=2.0):
    found = torch.zeros_like(g)
    for i in range(len(g)):
        square = float(g[i] @ g[i])
        phi = alpha * min(square, float(loss))
        lam = max((phi - float(t[i] @ g[i])) / square, 0.0) if square > 0 else 0.0
        found[i] = t[i] + lam * g[i]
    return found


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def plain_gradients(model, ids):
    plain = copy.deepcopy(model)
    loss = loss_of(plain, ids)
    loss.backward()
    return loss.detach(), {name: dense(p.grad) for name, p in plain.named_parameters()}


@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_rows_get_the_gradient_of_algorithm_1_and_the_network_its_own(sparse, static):
    model, ids = Net(sparse=sparse, padding_idx=12), some_ids()
    loss, plain = plain_gradients(model, ids)
    with started(model) as transfer:
        transfer.rows._static = static
        transfer.backward(loss_of(model, ids))
    weight = model.item.weight.detach()
    t = 50 * transfer_by_hand(weight, ids.tolist(), transfer.groups[0].running)
    expected = lexico_by_hand(plain["item.weight"], t, loss)
    assert model.item.weight.grad.is_sparse == sparse
    assert_close(dense(model.item.weight.grad), expected)
    assert t.any(dim=1).sum() > 5
    assert torch.equal(model.out.weight.grad, plain["out.weight"])
    assert transfer.explain("item", 12).side == "neither"  # padding
    frequent = sorted((FREQUENT - {12}) & set(ids.tolist()))
    assert_close(dense(model.item.weight.grad)[frequent], 2 * plain["item.weight"][frequent])


def test_the_sum_rule_is_plain_backward_of_both_losses():
    model, ids = Net(), some_ids()
    plain = copy.deepcopy(model)
    with started(model, rule="sum", scale=3.0) as transfer:
        transfer.backward(loss_of(model, ids))
    running = transfer.groups[0].running
    rare = plain.item.weight[sorted(set(ids.tolist()) & RARE)]
    logits = rare @ running.weight[0, 0].detach() + running.bias[0, 0].detach()
    (loss_of(plain, ids) - 3.0 * F.softplus(logits).mean()).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, dict(plain.named_parameters())[name].grad)


def test_without_transfer_lexico_doubles_the_row_gradients_and_the_sum_is_plain_backward():
    model, ids = Net(), some_ids()
    _, plain = plain_gradients(model, ids)
    for rule, factor in (("lexico", 2.0), ("global", 2.0), ("sum", 1.0)):
        model.zero_grad()
        with started(model, rule=rule, scale=0.0) as transfer:
            transfer.backward(loss_of(model, ids))
        assert_close(model.item.weight.grad, factor * plain["item.weight"])


def test_the_global_rule_has_one_coefficient_for_the_rows_of_a_step():
    model, ids = Net(), some_ids()
    loss, plain = plain_gradients(model, ids)
    with started(model, rule="global") as transfer:
        transfer.backward(loss_of(model, ids))
    t = 50 * transfer_by_hand(model.item.weight.detach(), ids.tolist(), transfer.groups[0].running)
    g = plain["item.weight"]
    expected = lexico_by_hand(g.reshape(1, -1), t.reshape(1, -1), loss).reshape(g.shape)
    assert_close(model.item.weight.grad, expected)


def test_micro_batches_are_one_step():
    model, ids = Net(), some_ids(40)
    whole = copy.deepcopy(model)
    with started(whole) as transfer:
        transfer.backward(loss_of(whole, ids))
    with started(model) as transfer:
        for part, last in zip(ids.chunk(4), (False, False, False, True), strict=True):
            transfer.backward(loss_of(model, part) / 4, last=last)
        assert transfer.ledger.read()["steps"] == 1
        found = transfer.ledger.read()["main_loss"]
    assert found == pytest.approx(loss_of(whole, ids).item())
    for name, parameter in model.named_parameters():
        assert_close(
            parameter.grad, dict(whole.named_parameters())[name].grad, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("make", [Net, Tied])
def test_a_scaler_changes_nothing_but_the_scale(make):
    model, ids = make(), some_ids()
    plain, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu")
    for net, options in ((plain, {}), (model, {"scaler": scaler})):
        with started(net) as transfer:
            transfer.backward(loss_of(net, ids), **options)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, 65536.0 * dict(plain.named_parameters())[name].grad)


def test_an_overflow_is_left_to_the_scaler_and_spoils_no_ledger():
    model, ids = Net(), some_ids()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with started(model) as transfer:
        transfer.backward(1e4 * loss_of(model, ids), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        optimizer.zero_grad()
        transfer.backward(loss_of(model, ids))
        found = transfer.ledger.read()["tables"]["item"]
    assert found["rows"] == len(set(ids.tolist()) & RARE)
    assert 0 < found["main_norm"] < 1
    assert found["realised_rows"] == 0  # nothing has moved


def test_all_rows_of_a_tied_weight_take_part():
    model, ids = Tied(), some_ids()
    loss, plain = plain_gradients(model, ids)
    with started(model) as transfer:
        transfer.backward(loss_of(model, ids))
    weight = model.item.weight.detach()
    t = 50 * transfer_by_hand(weight, range(ROWS), transfer.groups[0].running)
    assert_close(model.item.weight.grad, lexico_by_hand(plain["item.weight"], t, loss))
    assert model.out.weight is model.item.weight


def test_a_weight_under_two_names_is_one_table():
    model = nn.ModuleDict({"item": nn.Embedding(ROWS, WIDTH), "again": nn.Embedding(ROWS, WIDTH)})
    model["again"].weight = model["item"].weight
    first, second = some_ids(), some_ids()
    with started(model, scale=1.0, rule="sum") as transfer:
        transfer.backward(model["item"](first).sum() + model["again"](second).sum())
        assert [group.names for group in transfer.groups] == [("item",)]
    weight, running = model["item"].weight.detach(), transfer.groups[0].running
    t = transfer_by_hand(weight, range(ROWS), running)
    lookups = torch.cat([first, second]).bincount(minlength=ROWS)
    assert_close(model["item"].weight.grad, t + lookups.unsqueeze(1))


def test_a_tied_language_model_trains():
    model, text = Tied(), torch.randint(ROWS, (400,)) // 2 * 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    with started(model, counts=text.bincount(minlength=ROWS), scale=0.1) as transfer:
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text[:-1]), text[1:])
            losses.append(loss.item())
            transfer.backward(loss)
            optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_a_factorised_table_gets_the_gradient_of_its_product_rows():
    model, ids = Net(), some_ids()
    rb.apply_(model, rb.MLET(inner_dim=6), verbose=False)
    weight = model.item.weight.detach()
    rows = weight.clone().requires_grad_()
    loss = F.softplus(2 * model.out(torch.tanh(rows[ids])).squeeze(-1)).mean()
    (g,) = torch.autograd.grad(loss, rows)
    expected = copy.deepcopy(model)
    with started(model) as transfer:
        transfer.backward(loss_of(model, ids))
    t = 50 * transfer_by_hand(weight, ids.tolist(), transfer.groups[0].running)
    expected.item(torch.arange(ROWS)).backward(lexico_by_hand(g, t, loss.detach()))
    for name, parameter in model.item.named_parameters():
        assert_close(parameter.grad, dict(expected.item.named_parameters())[name].grad)


def test_only_the_entries_that_are_left_of_a_masked_table_count():
    model, ids = Net(), torch.arange(ROWS).repeat(2)
    with torch.no_grad():
        model.item.weight[torch.rand(ROWS, WIDTH) < 0.4] = 0.0
        model.item.weight[[2, 5]] = 0.0  # a rare and a frequent row without survivors
        model.item.weight[3] = torch.tensor([1.0, 0.0, 2.0, 0.0])
    rb.apply_(model, rb.pruning.Masked(), verbose=False)
    weight = model.item.weight.detach()
    loss, plain = plain_gradients(model, ids)
    g = plain["item.inner.weight"]
    assert not g[weight == 0].any()
    with started(model) as transfer:
        transfer.backward(loss_of(model, ids))
    rare = {i for i in RARE if weight[i].any()}
    t = 50 * transfer_by_hand(weight, range(ROWS), transfer.groups[0].running, rare) * (weight != 0)
    assert_close(model.item.inner.weight.grad, lexico_by_hand(g, t, loss))
    assert transfer.explain("item", 2).side == transfer.explain("item", 5).side == "neither"
    assert not model.item.inner.weight.grad[[2, 5]].any()
    # the table drops what its mask leaves out; the ledger counts what is left
    found = transfer.ledger.read()["tables"]["item"]["transfer_norm"]
    assert found == pytest.approx(float(t[sorted(rare)].norm(dim=1).mean()))


def deepfm(num_sets=1):
    model = lively(lambda schema: DeepFM(schema, dim=WIDTH, hidden=(8,)))
    if num_sets > 1:
        rb.apply_(model, rb.MultiEmbedding(num_sets=num_sets), verbose=False)
    return model


def field_counts():
    return {f.name: torch.arange(f.rows) + 1 for f in SCHEMA.table_fields}


def test_each_field_of_a_stack_has_its_own_sides_and_discriminator():
    model, batch = deepfm(), make_batch()
    fields = [f for f in SCHEMA.table_fields if f.name != "words"]
    plain = copy.deepcopy(model)
    loss = F.softplus(plain(batch)).mean()
    loss.backward()
    with started(model, counts=field_counts(), where=lambda t: t.field != "words") as transfer:
        transfer.backward(F.softplus(model(batch)).mean())
    name = "backbone.tables.stacks.0.embedding.weight"
    found, plain_grad = (dict(net.named_parameters())[name].grad for net in (model, plain))
    weight, start = dict(model.named_parameters())[name].detach(), 0
    for table in SCHEMA.table_fields:
        rows = slice(start, start + table.rows)
        start += table.rows
        if table not in fields:
            assert torch.equal(found[rows], plain_grad[rows])
            continue
        seen = set(batch[table.name].flatten().tolist())
        frequent = -(-table.rows // 5)
        rare = set(range(table.rows - frequent)) - ({0} if table.kind == "multi" else set())
        t = 50 * transfer_by_hand(
            weight[rows], seen, transfer.groups[0].running, rare, fields.index(table)
        )
        assert t.any()
        expected = lexico_by_hand(plain_grad[rows], t, loss.detach())
        assert_close(found[rows], expected)


def test_each_embedding_set_has_a_barrier_and_a_discriminator_of_its_own():
    model, batch = deepfm(num_sets=3), make_batch()
    plain = copy.deepcopy(model)
    loss = F.softplus(plain(batch)).mean()
    loss.backward()
    with started(model, counts=field_counts(), where=lambda t: t.field == "item") as transfer:
        transfer.backward(F.softplus(model(batch)).mean())
    running = transfer.groups[0].running
    assert running.weight.shape == (1, 3, WIDTH)
    name = next(n for n, p in model.named_parameters() if ".stacks." in n)
    found, g = (dict(net.named_parameters())[name].grad[-13:] for net in (model, plain))
    weight = dict(model.named_parameters())[name].detach()[-13:]
    for m in range(3):
        columns = slice(m * WIDTH, (m + 1) * WIDTH)
        one = copy.copy(running)
        one.weight, one.bias = running.weight[:, m:], running.bias[:, m:]
        seen = set(batch["item"].tolist())
        t = 50 * transfer_by_hand(weight[:, columns], seen, one, set(range(10)))
        expected = lexico_by_hand(g[:, columns], t, loss.detach())
        assert_close(found[:, columns], expected)


def given_selection(dropped=()):
    source = torch.tensor([i in FREQUENT for i in range(ROWS)])
    target = torch.tensor([i in RARE and i not in dropped for i in range(ROWS)])
    relatives = torch.tensor([[1, 4]]).repeat(ROWS, 1)
    weights = torch.tensor([[3.0, 1.0]]).repeat(ROWS, 1)
    weights[6] = 0.0
    similarity = torch.zeros(ROWS)
    part = FieldSelection(COUNTS, source, target, similarity, relatives, weights)
    return Selection({"item": part}, FrequencySplit())


def test_rare_rows_that_were_not_selected_do_not_move():
    model, ids = Net(), torch.arange(ROWS)
    _, plain = plain_gradients(model, ids)
    with started(model, counts=None, select=given_selection(dropped={2, 3})) as transfer:
        transfer.backward(loss_of(model, ids))
    still = [0, 1, 2, 3, 4, 5, 9, 12]
    doubled = 2 * plain["item.weight"]
    is_doubled = torch.isclose(model.item.weight.grad, doubled, rtol=1e-4).all(dim=1)
    assert is_doubled.nonzero().flatten().tolist() == still
    assert [transfer.explain("item", i).side for i in (0, 2, 4, 6)] == [
        "neither",
        "neither",
        "frequent",
        "rare",
    ]
    assert transfer.explain("item", 6).relatives == ()
    assert transfer.explain("item", 7).relatives == ((1, 3.0), (4, 1.0))
    assert transfer.explain("item", 7).count == 2


def test_relatives_of_a_selection_are_what_rare_rows_are_drawn_to():
    model, ids = Net(), some_ids()
    weight = model.item.weight.detach()
    _, plain = plain_gradients(model, ids)
    options = {"counts": None, "select": given_selection(), "loss": Relatives(), "rule": "sum"}
    with started(model, scale=1.0, **options) as transfer:
        transfer.backward(loss_of(model, ids))
    goal, rare = 0.75 * weight[1] + 0.25 * weight[4], set(ids.tolist()) & RARE
    expected = plain["item.weight"]
    for i in rare - {6}:
        expected[i] += (weight[i] - goal) / len(rare)
    assert_close(model.item.weight.grad, expected)


def test_both_sides_move_where_asked():
    model, ids = Net(), torch.arange(ROWS)
    _, plain = plain_gradients(model, ids)
    with started(model, both=True, rule="sum") as transfer:
        transfer.backward(loss_of(model, ids))
    running, weight = transfer.groups[0].running, model.item.weight.detach()
    t = transfer_by_hand(weight, range(ROWS), running)
    w, b = running.weight[0, 0].detach(), running.bias[0, 0].detach()
    for i in FREQUENT:
        t[i] = torch.sigmoid(-(weight[i] @ w + b)) * w / len(FREQUENT)
    assert_close(model.item.weight.grad, plain["item.weight"] + 50 * t)


def test_cosines_are_those_of_all_rows_frequent_ones_too():
    model, ids = Tied(), some_ids()
    _, plain = plain_gradients(model, ids)
    with started(model, loss=CosReg(), rule="sum", scale=1.0) as transfer:
        transfer.backward(loss_of(model, ids))
    rows = model.item.weight.detach()[sorted(FREQUENT | RARE)].requires_grad_()
    unit = F.normalize(rows)
    total = (unit @ unit.T).fill_diagonal_(0.0).sum() / len(rows)
    expected = plain["item.weight"]
    expected[sorted(FREQUENT | RARE)] += torch.autograd.grad(total, rows)[0]
    assert_close(model.item.weight.grad, expected)


def test_a_table_without_rare_rows_is_left_alone_by_both_sides():
    model, ids = Net(), some_ids()
    _, plain = plain_gradients(model, ids)
    everyone = FrequencySplit(top=1.0)
    with started(model, both=True, rule="sum", select=everyone, counts=COUNTS + 1) as transfer:
        transfer.backward(loss_of(model, ids))
        assert transfer.ledger.read()["tables"]["item"]["opposed"] is None
    assert torch.equal(model.item.weight.grad, plain["item.weight"])


@pytest.mark.parametrize("absent", [50, "all"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_absent_rare_rows_get_the_transfer_gradient_where_asked(sparse, static, early, absent):
    model, ids = Net(sparse=sparse), torch.tensor([1, 2, 3, 3, 7])
    loss, plain = plain_gradients(model, ids)
    with started(model, absent=absent) as transfer:
        transfer.rows._static, transfer.rows._always_early = static, early
        transfer.backward(loss_of(model, ids))
        assert transfer.ledger.read()["tables"]["item"]["rows"] == 3  # of the batch: 2, 3 and 7
    t = 50 * transfer_by_hand(model.item.weight.detach(), range(ROWS), transfer.groups[0].running)
    expected = lexico_by_hand(plain["item.weight"], t, loss)
    assert_close(dense(model.item.weight.grad), expected)
    assert expected.any(dim=1).nonzero().flatten().tolist() == sorted(RARE | {1})


def test_absent_rows_come_a_few_at_a_time_and_all_of_them_in_time():
    model, ids, seen = Net(sparse=True), torch.tensor([1, 1]), set()
    with started(model, absent=3, rule="sum") as transfer:
        for _ in range(40):
            model.zero_grad()
            transfer.backward(loss_of(model, ids))
            moved = dense(model.item.weight.grad).any(dim=1).nonzero().flatten().tolist()
            assert len(set(moved) - {1}) == 3
            seen |= set(moved) - {1}
    assert seen == RARE


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_adam_moves_absent_rows_by_the_transfer_alone(tables):
    model = Net()
    optimizer = rb.optimizer(model, lr=0.01, tables=tables, weight_decay=0.1, table_weight_decay=0)
    weight = model.item.weight.detach().clone()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    with started(model, absent="all", lr=1.0) as transfer:
        for step, seen in enumerate(([1, 2, 3], [5, 2, 2, 9], [3, 4]), start=1):
            ids = torch.tensor(seen)
            loss, plain = plain_gradients(model, ids)
            optimizer.zero_grad()
            transfer.backward(loss_of(model, ids))
            optimizer.step()
            t = 50 * transfer_by_hand(weight, range(ROWS), transfer.groups[0].running)
            g = lexico_by_hand(plain["item.weight"], t, loss)
            for i in range(ROWS):
                if tables == "dense" or i in RARE | set(seen):
                    mean[i] = 0.9 * mean[i] + 0.1 * g[i]
                    square[i] = 0.999 * square[i] + 0.001 * g[i] ** 2
                    size = (square[i] / (1 - 0.999**step)).sqrt() + 1e-8
                    weight[i] -= 0.01 * mean[i] / (1 - 0.9**step) / size
            assert_close(model.item.weight.detach(), weight, rtol=1e-4, atol=1e-6)
    absent = sorted(RARE - {2, 3, 9})
    assert not plain["item.weight"][absent].any()
    assert t[absent].any(dim=1).all()


def test_dense_adam_with_decay_erases_rows_that_are_never_seen_and_without_it_keeps_them():
    for decay, left in ((1e-5, 0.0), (0.0, 1.0)):
        model = Net()
        rows = nn.init.normal_(model.item.weight, std=0.01).detach()[2:].clone()
        optimizer = rb.optimizer(model, weight_decay=1e-5, table_weight_decay=decay)
        for _ in range(300):
            optimizer.zero_grad()
            loss_of(model, torch.tensor([0, 1])).backward()
            optimizer.step()
        assert_close(model.item.weight.detach()[2:], left * rows, rtol=0, atol=1e-6)


def test_absent_rows_of_some_tables_leave_the_other_tables_alone():
    model, ids = deepfm(), torch.randint(4, 9, (3, 7))  # few, and no row 0
    batch = rb.Dataset(SCHEMA, ids, torch.randn(3, 2), torch.tensor([0, 1, 0]))[slice(None)]
    rb.optimizer(model, tables="rowwise")  # gradients by rows, which say what was touched
    counts = {name: count.flip(0) for name, count in field_counts().items()}  # row 0 is not rare
    with started(model, counts=counts, where=lambda t: t.field == "item", absent=99) as t:
        t.backward(F.softplus(model(batch)).mean())
        is_rare = t.groups[0].target
    weight = dict(model.named_parameters())["backbone.tables.stacks.0.embedding.weight"]
    touched, start = set(weight.grad._indices()[0].tolist()), 0
    for table in SCHEMA.table_fields:
        here = {i - start for i in touched if start <= i < start + table.rows}
        seen = set(batch[table.name].flatten().tolist())
        rare = set(is_rare.nonzero().flatten().tolist()) if table.name == "item" else set()
        assert here == seen | rare, table.name
        start += table.rows


def test_rows_that_are_spread_are_all_of_them_or_come_as_often_as_each_other():
    masks = [torch.arange(9) % 3 == 0, torch.arange(40) < 30, torch.zeros(4, dtype=torch.bool)]
    listed, seen = Listed.of(masks), torch.zeros(30)
    for turn in torch.arange(0, 1, 1 / 64, dtype=torch.float64):
        few, many = (listed.spread(turn.expand(3), number) for number in (10, 64))
        assert set(few[:, 0].tolist()) == {0, 3, 6}
        assert set(many[:, 1].tolist()) == set(range(30))
        assert not many[:, 2].any()  # a table without any reads row 0
        assert few[:, 1].unique().numel() == 10
        seen[few[:, 1]] += 1
    assert (seen / 64 - 10 / 30).abs().max() < 0.02


def test_a_hidden_layer_sees_all_rows_of_the_table_but_those_held_out():
    model, ids = Net(), torch.tensor([1, 2, 3])
    with started(model, loss=AdversarialMLP(), samples=50, absent="all") as transfer:
        group = transfer.groups[0]
        _, wanted = group._draw_ids(transfer.draws)
        frequent, rare = wanted[:100].reshape(2, 50).tolist()
        assert set(frequent) == set(frequent[:40]) == set(frequent[40:]) == FREQUENT  # too few
        assert set(rare) == RARE
        assert set(rare[:40]).isdisjoint(rare[40:])
        assert len(set(rare[40:])) == len(RARE) // 5
        transfer.backward(loss_of(model, ids))
        running, rows = group.running, model.item.weight.detach()[sorted(RARE)].requires_grad_()
        first, bias, last, shift = running.weights[0, 0].split(running.sizes)
        hidden = rows / running.size[0, 0] @ first.reshape(WIDTH, -1) + bias
        looks = hidden.clamp(min=0) @ last + shift
        loss = torch.log(1 - torch.sigmoid(looks)).mean()
    [t] = torch.autograd.grad(50 * loss, rows)
    absent = [i for i, row in enumerate(sorted(RARE)) if row not in (2, 3)]
    assert_close(model.item.weight.grad[sorted(RARE)][absent], t[absent])


@pytest.mark.parametrize("loss", [MMD(), Relatives()])
def test_any_loss_reaches_the_rows_of_any_table(loss):
    model, batch = deepfm(), make_batch()
    selection = Selection(
        {
            f.name: FieldSelection(
                torch.ones(f.rows).long(),
                torch.arange(f.rows) < 3,
                torch.arange(f.rows) >= 3,
                torch.zeros(f.rows),
                torch.tensor([[1, 2]]).repeat(f.rows, 1),
                torch.ones(f.rows, 2),
            )
            for f in SCHEMA.table_fields
        },
        FrequencySplit(),
    )
    plain = copy.deepcopy(model)
    F.softplus(plain(batch)).mean().backward()
    with started(model, counts=None, select=selection, loss=loss, rule="sum") as transfer:
        transfer.backward(F.softplus(model(batch)).mean())
    name = "backbone.tables.stacks.0.embedding.weight"
    found, before = (dict(net.named_parameters())[name].grad for net in (model, plain))
    moved = (~torch.isclose(found, before)).any(dim=1)
    start = 0
    for table in SCHEMA.table_fields:
        seen = set(batch[table.name].flatten().tolist()) - set(range(3))
        found_here = moved[start : start + table.rows].nonzero().flatten().tolist()
        assert set(found_here) == seen
        start += table.rows


@pytest.mark.parametrize("loss", [Adversarial(), CosReg(), MMD(), Moments(), SlicedWasserstein()])
@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
def test_a_step_costs_what_the_batch_costs(loss, static):
    rows = 50_000
    model = nn.ModuleDict({"item": nn.Embedding(rows, WIDTH)})
    settings = HarmlessTransfer(samples=8, loss=loss)
    with settings.start(model, counts=torch.arange(rows)) as transfer:
        transfer.rows._static = static
        with counting_large_tensors(rows) as made:
            transfer.backward(model["item"](torch.randint(rows, (40,))).square().sum())
    assert len(made) == 1, made  # the table's dense gradient, as in any backward


def test_large_tables_are_chosen_where_nobody_chooses():
    model = nn.ModuleDict({"small": nn.Embedding(100, 2), "large": nn.Embedding(101, 2)})
    with HarmlessTransfer().start(model, counts={"large": torch.arange(101)}) as transfer:
        assert [group.names for group in transfer.groups] == [("large",)]
