"""Harmless transfer in somebody's own loop: the ledger, going on from a state, mistakes, and the end."""

import copy
import json

import pytest
import torch
from capabilities import needs_cuda
from replaying import Recorder
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import rarebit as rb
from rarebit.data.selection import CoOccurrence, FrequencySplit, select
from rarebit.errors import (
    DataError,
    NoTableError,
    SettingsError,
    TrainingError,
    UnsupportedTableError,
)
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.row_gradients.recorded import WARM_UP, Recorded
from rarebit.transfer.losses import (
    MMD,
    Adversarial,
    AdversarialMLP,
    CosReg,
    Moments,
    Relatives,
    SlicedWasserstein,
)

USERS, ITEMS = 30, 200
ARGUMENTS = {"counts", "data", "say", "seed", "select", "where"}
"""What `start` takes; the other options are settings."""


class Net(nn.Module):
    """Two tables and a network."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 4)
        self.item = nn.Embedding(ITEMS, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        rows = self.user(ids[:, 0]) * self.item(ids[:, 1])
        return self.out(torch.tanh(rows)).squeeze(-1)


COUNTS = {"user": torch.arange(USERS) + 1, "item": torch.arange(ITEMS) + 1}


def batch(size=40):
    return torch.stack([torch.randint(USERS, (size,)), torch.randint(ITEMS, (size,))], dim=1)


def click_log():
    """A log that holds every id."""
    ids = torch.arange(600)
    return rb.Dataset.from_columns({"user": ids % USERS, "item": ids % ITEMS}, label=[0] * 600)


def loss_of(model, ids):
    return F.softplus(model(ids) * (ids[:, 0] % 2 * 2 - 1)).mean()


def started(model, **options):
    options = {"counts": COUNTS, "where": lambda t: True, "samples": 16} | options
    chosen = {name: options.pop(name) for name in ARGUMENTS & set(options)}
    return HarmlessTransfer(**options).start(model, **chosen)


def train(model, transfer, batches, optimizer):
    for ids in batches:
        optimizer.zero_grad()
        transfer.backward(loss_of(model, ids))
        optimizer.step()


def test_the_ledger_counts_what_the_rows_show():
    model, ids = Net(), batch()
    plain = copy.deepcopy(model)
    loss = loss_of(plain, ids)
    loss.backward()
    with started(model, scale=30.0) as transfer:
        transfer.backward(loss_of(model, ids))
        found = transfer.ledger.read()
    assert found["steps"] == 1
    assert found["main_loss"] == pytest.approx(loss.item())
    assert json.loads(json.dumps(found)) == found
    for number, (name, table) in enumerate((("user", plain.user), ("item", plain.item))):
        group, entry = transfer.groups[number], found["tables"][name]
        running = group.running
        w, b = running.weight[0, 0].detach(), running.bias[0, 0].detach()
        seen = ids[:, number].unique().tolist()
        rare = [i for i in seen if i < 0.8 * len(table.weight)]
        lambdas, opposed, norms = [], 0, []
        for i in rare:
            e, g = table.weight[i].detach(), table.weight.grad[i]
            t = -30 * torch.sigmoid(e @ w + b) * w / len(rare)
            opposed += int(t @ g < 0)
            lambdas.append(max(float(2 - t @ g / (g @ g)), 0.0))
            norms.append((g.norm().item(), t.norm().item()))
        assert entry["rows"] == len(rare)
        assert entry["opposed"] == pytest.approx(opposed / len(rare))
        assert 0 < opposed < len(rare)
        ends, last = [float(end) for end in entry["lambda"]], -1.0
        for end in ends:
            share = sum(last < lam / 2 <= end for lam in lambdas) / len(rare)
            assert entry["lambda"][f"{end:g}"] == pytest.approx(share)
            last = end
        assert entry["main_norm"] == pytest.approx(sum(g for g, _ in norms) / len(rare), rel=1e-4)
        assert entry["transfer_norm"] == pytest.approx(
            sum(t for _, t in norms) / len(rare), rel=1e-4
        )
        logits = table.weight[rare].detach() @ w + b
        assert entry["transfer_loss"] == pytest.approx(-F.softplus(logits).mean().item(), rel=1e-4)
        assert 0 <= entry["discriminator_accuracy"] <= 1
        assert entry["loss_is_barrier"] == entry["not_finite"] == entry["realised_rows"] == 0


def test_the_ledger_is_the_mean_of_its_steps_and_one_without_steps_is_empty():
    model = Net()
    with started(model) as transfer:
        assert transfer.ledger.read() == {"steps": 0, "main_loss": None, "tables": {}}
        first, second = batch(), batch()
        losses = []
        for ids in (first, second):
            losses.append(loss_of(model, ids).item())
            transfer.backward(loss_of(model, ids))
        found = transfer.ledger.read()
    assert found["steps"] == found["tables"]["item"]["steps"] == 2
    assert found["main_loss"] == pytest.approx(sum(losses) / 2)
    assert found["tables"]["item"]["rows"] == sum(
        len([i for i in ids[:, 1].unique().tolist() if i < 160]) for ids in (first, second)
    )


def realised(make_optimizer, **options):
    torch.manual_seed(1)
    model = Net().double()
    with started(model, scale=0.1, **options) as transfer:
        train(model, transfer, [batch() for _ in range(20)], make_optimizer(model.parameters()))
        return transfer.ledger.read()["tables"]["item"]


def test_gradient_descent_keeps_the_promise_of_the_barrier_and_momentum_breaks_it():
    plain = realised(lambda p: torch.optim.SGD(p, lr=0.1))
    assert plain["realised_rows"] > 100
    assert plain["realised_kept"] == 1.0
    assert plain["realised_over_promised"] >= 0.9999
    momentum = realised(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert momentum["realised_kept"] < 0.95
    summed = realised(lambda p: torch.optim.SGD(p, lr=0.1), rule="sum")
    assert summed["realised_kept"] < 0.5  # the plain gradient is half of what alpha = 2 promises


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("rule", ["lexico", "global"])
def test_one_step_of_gradient_descent_lowers_the_main_loss_by_what_was_promised(rule, scale):
    """First order: by the learning rate times phi of all rows, and what the network's step adds."""
    model, ids, lr = Net().double(), batch(), 1e-7
    loss = loss_of(model, ids)
    squares = [g.square().sum().item() for g in torch.autograd.grad(loss, list(model.parameters()))]
    promised = 2 * sum(squares[:2]) + sum(squares[2:])
    with started(model, rule=rule, scale=scale) as transfer:
        train(model, transfer, [ids], torch.optim.SGD(model.parameters(), lr=lr))
    fall = (loss - loss_of(model, ids)).item() / lr
    assert fall >= 0.999 * promised
    if rule == "global":
        assert fall == pytest.approx(promised, rel=1e-3)  # one barrier, met exactly


@pytest.mark.parametrize(
    "loss",
    [
        Adversarial(lr=0.5),
        AdversarialMLP(lr=0.5),
        CosReg(),
        MMD(sample=8),
        Moments(),
        SlicedWasserstein(),
    ],
)
def test_training_goes_on_from_a_state_to_the_last_bit(loss):
    model, batches = Net(), [batch() for _ in range(8)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with started(model, loss=loss) as transfer:
        train(model, transfer, batches[:4], optimizer)
        state = copy.deepcopy((model, optimizer.state_dict(), transfer.state_dict()))
        train(model, transfer, batches[4:], optimizer)
        expected = transfer.ledger.read()
    again = Net()
    again.load_state_dict(state[0].state_dict())
    optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
    optimizer.load_state_dict(state[1])
    with started(again, loss=loss, seed=0) as transfer:
        transfer.load_state_dict(state[2])
        train(again, transfer, batches[4:], optimizer)
        assert transfer.ledger.read() == expected
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_another_seed_draws_other_samples():
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        model = Net()
        with started(model, seed=seed) as transfer:
            train(model, transfer, [batch()], torch.optim.SGD(model.parameters(), lr=0.1))
        weights.append(model.item.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_each_step_draws_its_own_sample():
    model, ids, gradients = Net(), batch(), []
    with started(model, loss=MMD()) as transfer:
        for _ in range(2):
            model.zero_grad()
            transfer.backward(loss_of(model, ids))
            gradients.append(model.item.weight.grad.clone())
    assert not torch.equal(*gradients)


def test_a_state_of_other_tables_is_refused():
    model = Net()
    with started(model, where=lambda t: t.name == "item") as transfer:
        state = transfer.state_dict()
    with (
        started(model) as transfer,
        pytest.raises(TrainingError, match="tables item, user, the state given is of item; use"),
    ):
        transfer.load_state_dict(state)


class Waits(TorchDispatchMode):
    """Notes operations whose size or value the host must wait for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "equal")
        if func.__name__.split(".")[0] in waits:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", ["lexico", "global", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        Adversarial(),
        AdversarialMLP(),
        CosReg(),
        MMD(),
        Moments(),
        SlicedWasserstein(),
        Relatives(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_step_waits_for_nothing(loss, rule):
    model, log = Net(), click_log()
    options = {"select": CoOccurrence(), "data": log, "counts": log.counts()}
    with started(model, loss=loss, rule=rule, both=True, **options) as transfer:
        transfer.rows._static = True
        transfer.backward(loss_of(model, batch()))
        with Waits() as waits:
            transfer.backward(loss_of(model, batch()))
    assert not waits.seen


@pytest.mark.parametrize("first", ["rare", "frequent"])
@pytest.mark.parametrize(
    "loss", [Adversarial(), AdversarialMLP(), CosReg(), MMD(), SlicedWasserstein()]
)
def test_compact_and_static_rows_give_the_same_gradients(loss, first):
    model, ids = Net().double(), batch()
    other = copy.deepcopy(model)
    counts = {
        name: count.flip(0) if first == "frequent" else count for name, count in COUNTS.items()
    }
    for net, static in ((model, False), (other, True)):
        with started(net, loss=loss, counts=counts, both=True) as transfer:
            transfer.rows._static = static
            transfer.backward(loss_of(net, ids))
    for name, parameter in model.named_parameters():
        assert_close(dict(other.named_parameters())[name].grad, parameter.grad)


@pytest.mark.parametrize("loss", [Adversarial(lr=0.5), AdversarialMLP(lr=0.5), MMD(sample=8)])
def test_steps_that_are_replayed_are_the_same_to_the_last_bit(loss):
    """Another size of the batch and another scale among them."""
    model, recorder = Net(), Recorder()
    other = copy.deepcopy(model)
    batches = [batch() for _ in range(WARM_UP + 3)] + [batch(30), batch()]
    ledgers = []
    for net, records in ((model, False), (other, True)):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with started(net, loss=loss) as transfer:
            transfer.rows._static = True
            if records:
                transfer.rows._recorded = [Recorded(recorder), Recorded(recorder)]
            train(net, transfer, batches, optimizer)
            transfer.scale = 3.0
            train(net, transfer, batches, optimizer)
            ledgers.append(transfer.ledger.read())
    assert recorder.made == 4  # of two tables, before and after the change
    assert recorder.replays == 2 * (4 + 4)
    assert ledgers[0] == ledgers[1]
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_recording_does_not_outlive_the_memory_of_a_table_or_a_state_that_is_loaded():
    model, recorder = Net(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch() for _ in range(WARM_UP + 1)]
    with started(model) as transfer:
        transfer.rows._static = True
        transfer.rows._recorded = [Recorded(recorder), Recorded(recorder)]
        train(model, transfer, batches, optimizer)
        assert recorder.made == recorder.replays == 2
        model.item.weight.data = model.item.weight.detach().clone()
        train(model, transfer, batches[:1], optimizer)
        assert recorder.replays == 3  # of the other table alone
        transfer.load_state_dict(copy.deepcopy(transfer.state_dict()))
        train(model, transfer, batches[:1], optimizer)
        assert recorder.replays == 3


@pytest.mark.parametrize("loss", [Adversarial(lr=0.5), AdversarialMLP(lr=0.5), MMD(sample=8)])
@pytest.mark.parametrize("static", [False, True], ids=["compact", "static"])
def test_what_is_prepared_beside_the_backward_is_the_same_to_the_last_bit(loss, static):
    model, batches = Net(), [batch() for _ in range(4)]
    other, ledgers = copy.deepcopy(model), []
    for net, is_early in ((model, False), (other, True)):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with started(net, loss=loss, both=True) as transfer:
            transfer.rows._static, transfer.rows._always_early = static, is_early
            train(net, transfer, batches, optimizer)
            # micro-batches are one step: nothing is known of it before its last one
            transfer.backward(loss_of(net, batches[0]) / 2, last=False)
            transfer.backward(loss_of(net, batches[1]) / 2)
            ledgers.append(transfer.ledger.read())
        for name, parameter in model.named_parameters():
            assert torch.equal(dict(net.named_parameters())[name].grad, parameter.grad), name
    assert ledgers[0] == ledgers[1]


def test_what_was_prepared_for_lookups_that_the_loss_does_not_reach_is_refused():
    model, ids = Net(), batch()
    with started(model) as transfer:
        transfer.rows._always_early = True
        unused = model(ids)
        with pytest.raises(TrainingError, match="cannot be recorded with lookups that"):
            transfer.backward(loss_of(model, ids))
        transfer.rows._always_early = False
        transfer.backward(loss_of(model, ids))
        assert unused.shape == (40,)


@needs_cuda
@pytest.mark.parametrize("loss", [Adversarial(lr=0.5), MMD(sample=8), Moments()])
def test_a_whole_step_is_recorded(loss):
    model, batches = Net(), [batch() for _ in range(8)]
    other = copy.deepcopy(model).cuda()
    with started(model, loss=loss) as transfer:
        train(model, transfer, batches, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = transfer.ledger.read()
    ids, graph, stream = batches[0].cuda(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with started(other, loss=loss) as transfer:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for each in batches[:3]:
                train(other, transfer, [ids.copy_(each)], optimizer)
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=stream):
            transfer.backward(loss_of(other, ids))
            optimizer.step()
        for each in batches[3:]:
            ids.copy_(each)
            graph.replay()
        found = transfer.ledger.read()
    assert found["steps"] == expected["steps"] == 8
    assert found["tables"]["item"]["rows"] == expected["tables"]["item"]["rows"]
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("loss", [Adversarial(lr=0.5), MMD(sample=8), Moments()])
def test_the_gpu_replays_what_the_cpu_computes(loss):
    model, batches = Net(), [batch() for _ in range(WARM_UP + 5)] + [batch(30), batch()]
    other = copy.deepcopy(model).cuda()
    ledgers = []
    for net in (model, other):
        with started(net, loss=loss) as transfer:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            train(net, transfer, [ids.to(net.out.weight.device) for ids in batches], optimizer)
            ledgers.append(transfer.ledger.read())
            is_recorded = [each.recording is not None for each in transfer.rows._recorded]
            assert is_recorded == [net is other] * 2
    for name in ("user", "item"):
        assert ledgers[0]["tables"][name]["rows"] == ledgers[1]["tables"][name]["rows"]
        assert ledgers[0]["tables"][name]["main_norm"] == pytest.approx(
            ledgers[1]["tables"][name]["main_norm"], rel=1e-3
        )
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-5)


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_gpu_gives_the_answer_of_the_cpu_and_does_not_wait():
    model, batches = Net(), [batch() for _ in range(4)]
    other = copy.deepcopy(model).cuda()
    with started(model) as transfer:
        train(model, transfer, batches, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = transfer.ledger.read()
    with started(other) as transfer:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        train(other, transfer, [batches[0].cuda()], optimizer)
        rest = [ids.cuda() for ids in batches[1:]]
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(other, transfer, rest, optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = transfer.ledger.read()
    assert found["tables"]["item"]["rows"] == expected["tables"]["item"]["rows"]
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


def test_co_occurrence_selects_from_the_data_given():
    model, log = Net(), click_log()
    counts = {"user": torch.arange(USERS, 0, -1), "item": torch.arange(ITEMS, 0, -1)}
    settings = CoOccurrence(top_items=20, drop=0.5)
    chosen = select(log, counts, settings)
    with started(model, counts=counts, select=settings, data=log) as transfer:
        sides = [transfer.explain("item", i).side == "rare" for i in range(ITEMS)]
        relatives = transfer.explain("item", 150).relatives
    assert sides == chosen["item"].target.tolist()
    assert 0 < sum(sides) < 0.6 * ITEMS
    assert [row for row, _ in relatives] == chosen["item"].relatives[150][: len(relatives)].tolist()


def test_several_losses_are_one_main_loss():
    model, (one, two) = Net(), (batch(), batch())
    other = copy.deepcopy(model)
    with started(model) as transfer:
        transfer.backward(loss_of(model, one), 2 * loss_of(model, two))
        with pytest.raises(TrainingError, match="at least one loss"):
            transfer.backward()
    with started(other) as transfer:
        transfer.backward(loss_of(other, one) + 2 * loss_of(other, two))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, dict(other.named_parameters())[name].grad)


def test_a_data_set_alone_says_who_is_frequent_and_whom_rare_ids_are_like():
    model, log = Net(), click_log()
    chosen = select(log, log.counts(), CoOccurrence())
    for settings, has_relatives in (({}, True), ({"select": "frequency"}, False)):
        with HarmlessTransfer(**settings).start(model, log) as transfer:
            assert transfer.groups[0].names == ("item",)  # by default tables of more than 100 rows
            found = transfer.explain("item", 150)
            assert bool(found.relatives) is has_relatives
    rare = chosen["item"].target
    assert 0 < int(rare.sum()) < ITEMS


def test_a_plain_backward_is_noticed_and_a_closed_transfer_says_so():
    model = Net()
    transfer = started(model)
    loss_of(model, batch()).backward()
    with pytest.raises(TrainingError, match="left tables with row gradients untrained"):
        model(batch())
    transfer.close()
    with pytest.raises(TrainingError, match="closed"):
        transfer.backward(loss_of(model, batch()))
    loss_of(model, batch()).backward()


def test_a_step_that_was_discarded_is_no_part_of_the_next():
    model, ids = Net(), batch()
    other = copy.deepcopy(model)
    with started(model) as transfer:
        transfer.backward(loss_of(model, batch()), last=False)
        transfer.discard()
        model.zero_grad()
        transfer.backward(loss_of(model, ids))
        found = transfer.ledger.read()["main_loss"]
    with started(other) as transfer:
        transfer.backward(loss_of(other, ids))
    assert torch.equal(model.item.weight.grad, other.item.weight.grad)
    assert found == pytest.approx(loss_of(model, ids).item())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"rule": "best"},
            SettingsError,
            "rule must be one of 'lexico', 'global', 'sum', got 'best'",
        ),
        ({"alpha": 0.0}, SettingsError, "alpha must be above 0 and finite, got alpha=0.0"),
        ({"scale": -1.0}, SettingsError, "scale must be 0 or more and finite"),
        ({"samples": 0}, SettingsError, "samples must be at least 1, got samples=0"),
        ({"absent": -1}, SettingsError, "absent must be 'all', or 0 or more, got absent=-1"),
        ({"absent": "some"}, SettingsError, "absent must be int or 'all', got 'some'"),
        ({"counts": None}, DataError, "must know which rows are frequent; pass counts"),
        ({"counts": {"user": COUNTS["user"]}}, DataError, "no counts of the table 'item'"),
        ({"counts": COUNTS["item"]}, DataError, "one tensor of counts is for one table, but 2"),
        (
            {"counts": {**COUNTS, "item": torch.ones(7, dtype=torch.int64)}},
            DataError,
            "200 rows, but its counts have 7",
        ),
        (
            {"counts": {**COUNTS, "item": torch.zeros(ITEMS, dtype=torch.int64)}},
            DataError,
            "'item' has no frequent rows that rare ones could learn from",
        ),
        ({"select": CoOccurrence()}, DataError, "co-occurrence is counted in a Dataset or"),
        ({"loss": Relatives()}, SettingsError, "Relatives needs to know the relatives of user;"),
        ({"where": lambda t: False}, NoTableError, "matched no table"),
    ],
)
def test_mistakes_are_told_and_leave_the_model_alone(options, error, words):
    model = Net()
    with pytest.raises(error, match=words):
        started(model, **options)
    with started(model, select=FrequencySplit(top=0.5)) as transfer:
        transfer.backward(loss_of(model, batch()))


def test_thresholds_that_are_learned_are_refused():
    model = Net()
    rb.apply_(model, rb.PEP(), verbose=False)
    with pytest.raises(UnsupportedTableError, match="has thresholds that are still learned, which"):
        started(model)


def test_a_model_that_was_moved_is_refused():
    model = Net()
    with (
        pytest.raises(TrainingError, match=r"now in torch.float64 on cpu; move the model first"),
        started(model) as transfer,
    ):
        transfer.backward(loss_of(model.double(), batch()))


def test_a_loss_of_one_number_in_a_list_is_a_loss():
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    for model, shape in zip(models, [(), (1,)], strict=True):
        torch.manual_seed(1)
        with started(model) as transfer:
            transfer.backward(loss_of(model, batch()).reshape(shape))
        assert transfer.ledger.read()["steps"] == 1
    assert torch.equal(models[0].item.weight.grad, models[1].item.weight.grad)


def test_only_tables_and_rows_that_are_there_are_explained():
    with started(Net(), where=lambda t: t.name == "item") as transfer:
        assert transfer.explain("item", 199).side == "frequent"
        with pytest.raises(TrainingError, match=r"does not use a table 'user'; it uses item"):
            transfer.explain("user", 0)
        with pytest.raises(SettingsError, match="'item' has ids from 0 to 199, got 200"):
            transfer.explain("item", 200)


def test_small_tables_are_refused_by_the_least_number_of_rows():
    model = nn.Sequential(nn.Embedding(100, 4))
    message = (
        r"takes tables of more than 100 rows, and the model has 0 \(100 rows\); leave it out, or"
    )
    with pytest.raises(NoTableError, match=message):
        rb.HarmlessTransfer().start(model, counts=torch.arange(100))
    with rb.HarmlessTransfer(fields="0").start(model, counts=torch.arange(100)) as transfer:
        assert transfer.groups[0].names == ("0",)
