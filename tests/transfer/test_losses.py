"""Transfer losses, against their formulas written as loops over tables, sets and rows."""

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rarebit.errors import SettingsError, TrainingError
from rarebit.transfer.losses import (
    MMD,
    Adversarial,
    AdversarialMLP,
    CosReg,
    Draws,
    LossTables,
    Moments,
    Relatives,
    SlicedWasserstein,
    TransferBatch,
)

CPU, DOUBLE = torch.device("cpu"), torch.float64
SETS, WIDTH, ROWS = 2, 3, 40
LOSSES = {
    "adversarial": Adversarial(),
    "adversarial_mlp": AdversarialMLP(hidden=5),
    "cos_reg": CosReg(),
    "mmd": MMD(sample=50),
    "moments": Moments(moments=3),
    "sliced_wasserstein": SlicedWasserstein(directions=5, sample=50),
    "relatives": Relatives(sample=50),
}


def make_batch(tables=(0, 0, 0, 0, 1, 1, 1, 3), moves=None, number=4, samples=7, *, padded=False):
    """Rows of four tables, of which one has none in the batch, and one has no rare ones."""
    generator = torch.Generator().manual_seed(len(tables))
    table = torch.tensor(tables)
    weights = torch.randn(number, ROWS, SETS, WIDTH, generator=generator, dtype=DOUBLE)
    ids = torch.arange(len(tables)) % ROWS
    rows = weights[table, ids]
    moves = torch.tensor(
        [True, False, True, True, True, True, False, False] if moves is None else moves
    )
    ids = ids + table * ROWS
    if padded:
        ids = torch.cat([torch.tensor([-1]), ids, torch.tensor([-1, -1])])
        table = torch.cat([torch.tensor([0]), table, torch.tensor([0, 0])])
        rows = torch.cat([torch.full((1, SETS, WIDTH), 9.0), rows, torch.ones(2, SETS, WIDTH)])
        moves = torch.cat([torch.tensor([False]), moves, torch.tensor([False, False])])
    draws = Draws(5, CPU)
    draws.advance()
    others, rare = torch.randn(2, number, samples, SETS, WIDTH, generator=generator, dtype=DOUBLE)
    return TransferBatch(
        ids=ids,
        table=table,
        rows=rows.clone().requires_grad_(),
        moves=moves,
        others=others,
        turn=torch.rand(number, generator=generator, dtype=DOUBLE),
        draws=draws,
        look_up=lambda ids: torch.stack([weights[f, ids[:, f]] for f in range(number)], dim=1),
        rare=rare,
    )


def tables(relatives=None, number=4):
    names = tuple(f"table{f}" for f in range(number))
    return LossTables(names, SETS, WIDTH, CPU, DOUBLE, relatives)


def some_relatives(number=4):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(ROWS, (number * ROWS, 2), generator=generator)
    weights = torch.rand(number * ROWS, 2, generator=generator)
    weights[::4] = 0.0  # some have none
    return ids, weights


def start(loss):
    return loss.start(tables(some_relatives()))


class Part(NamedTuple):
    """One set of one table: its rows that move, and those to move to."""

    running: object
    batch: TransferBatch
    f: int
    m: int
    rare: list
    frequent: list


def adversarial(part):
    logits = [
        (row * part.running.weight[part.f, part.m]).sum() + part.running.bias[part.f, part.m]
        for row in part.rare
    ]
    return sum(torch.log(1 - torch.sigmoid(logit)) for logit in logits) / len(part.rare)


def hidden_layer(weights):
    """A discriminator with a hidden layer of five; its weights lie side by side: W, b, v, c."""
    first, bias, last, shift = weights.clone().split((5 * WIDTH, 5, 5, 1))
    layers = torch.nn.Linear(WIDTH, 5, dtype=DOUBLE), torch.nn.Linear(5, 1, dtype=DOUBLE)
    layers[0].weight.data, layers[0].bias.data = first.reshape(WIDTH, 5).mT, bias
    layers[1].weight.data, layers[1].bias.data = last.reshape(1, 5), shift
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])


def adversarial_mlp(part):
    looks = hidden_layer(part.running.weights[part.f, part.m])
    size = part.running.size[part.f, part.m].item()
    logits = [looks(row / size)[0] for row in part.rare]
    return sum(torch.log(1 - torch.sigmoid(logit)) for logit in logits) / len(part.rare)


def cos_reg(part):
    pairs = [
        F.cosine_similarity(a, b, dim=0)
        for i, a in enumerate(part.rare)
        for j, b in enumerate(part.rare)
        if i != j
    ]
    return sum(pairs, torch.zeros((), dtype=DOUBLE)) / len(part.rare)


def mmd(part):
    scale = sum((a - b).square().sum() for a in part.rare for b in part.frequent)
    scale = scale.detach() / len(part.rare) / len(part.frequent)

    def kernel(a, b):
        square = (a - b).square().sum()
        return sum(torch.exp(-square / (width * scale)) for width in part.running.widths) / 5

    def mean(first, second):
        return sum(kernel(a, b) for a in first for b in second) / len(first) / len(second)

    return (
        mean(part.rare, part.rare)
        - 2 * mean(part.rare, part.frequent)
        + mean(part.frequent, part.frequent)
    )


def moments(part):
    total = 0.0
    for d in range(WIDTH):
        column = [row[d] for row in part.frequent]
        mean = sum(column) / len(column)
        far = sum((x - mean) ** 2 for x in column) / len(column)
        far += sum((row[d].detach() - mean) ** 2 for row in part.rare) / len(part.rare)
        spread = math.sqrt(far / 2)
        for k in range(1, part.running.moments + 1):
            own = sum(((row[d] - mean) / spread) ** k for row in part.rare) / len(part.rare)
            theirs = sum(((x - mean) / spread) ** k for x in column) / len(column)
            total += (own - theirs) ** 2 / WIDTH
    return total


def sliced_wasserstein(part):
    directions = part.running._directions(part.batch)
    assert_close(directions.norm(dim=0), torch.ones(5, dtype=DOUBLE))
    total = 0.0
    for direction in directions.T:
        own = torch.stack([row @ direction for row in part.rare]).sort().values
        theirs = sorted(float(row @ direction) for row in part.frequent)
        for r, x in enumerate(own):
            quantile = math.floor((r + 0.5) / len(own) * len(theirs))
            total += (x - theirs[quantile]) ** 2 / len(own) / 5
    return total


def relatives(part):
    ids, weights = some_relatives()
    total = torch.zeros((), dtype=DOUBLE)
    numbers = part.batch.ids[part.batch.moves & (part.batch.table == part.f)].tolist()
    for number, row in zip(numbers, part.rare, strict=True):
        if weights[number].sum() > 0:
            near = part.batch.look_up(ids[number][:, None].expand(-1, 4))[:, part.f, part.m]
            share = (weights[number] / weights[number].sum()).to(DOUBLE)
            total = total + 0.5 * (row - share @ near).square().sum() / len(part.rare)
    return total


@pytest.mark.parametrize("padded", [False, True], ids=["compact", "static"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_table_by_table_and_set_by_set(name, padded):
    batch, running = make_batch(padded=padded), start(LOSSES[name])
    running.learn(batch)
    found = running.loss(batch)
    assert found.shape == (4,)
    (gradient,) = torch.autograd.grad(found.sum(), batch.rows)
    naive = torch.zeros(4, dtype=DOUBLE)
    rows = batch.rows.detach().requires_grad_()
    for f in range(4):
        is_rare = batch.moves & (batch.table == f)
        if is_rare.any():
            parts = [(rows[is_rare][:, m], batch.others[f, :, m]) for m in range(SETS)]
            naive = naive.index_add(
                0,
                torch.tensor([f]),
                sum(
                    globals()[name](Part(running, batch, f, m, list(x), list(y)))
                    for m, (x, y) in enumerate(parts)
                ).reshape(1),
            )
    assert_close(found, naive)
    assert found[2:].tolist() == [0.0, 0.0]
    (expected,) = torch.autograd.grad(naive.sum(), rows)
    assert_close(gradient, expected)
    assert gradient[batch.moves].any()
    assert not gradient[~batch.moves].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_rare_rows_is_no_loss_and_no_step(name):
    batch, running = make_batch(moves=[False] * 8), start(LOSSES[name])
    before = {key: str(value) for key, value in running.state_dict().items()}
    running.learn(batch)
    loss = running.loss(batch)
    (gradient,) = torch.autograd.grad(loss.sum(), batch.rows)
    assert not loss.any()
    assert not gradient.any()
    assert {key: str(value) for key, value in running.state_dict().items()} == before


def test_a_hidden_layer_learns_from_the_samples_by_adam_and_is_judged_on_rows_held_out():
    batch, settings = make_batch(samples=11), AdversarialMLP(hidden=5, lr=0.1, weight_decay=0.2)
    running, accuracy = settings.start(tables()), torch.zeros(4, 2)
    nets, optimizers = {}, {}
    for step in range(3):  # two tables have no rare rows in the batch, so they take no step
        batch = replace(batch, others=batch.others + step, rare=batch.rare - 2 * step)
        for f, m in itertools.product((0, 1), range(SETS)):
            frequent, rare = batch.others[f, :, m], batch.rare[f, :, m]
            size = torch.cat([frequent, rare]).square().mean().sqrt()
            if step == 0:
                nets[f, m] = hidden_layer(running.weights[f, m])
                assert nets[f, m][0].weight.abs().max() <= WIDTH**-0.5
                optimizers[f, m] = torch.optim.Adam(
                    nets[f, m].parameters(), lr=0.1, weight_decay=0.2
                )
            high, low = nets[f, m](frequent / size)[:, 0], nets[f, m](rare / size)[:, 0]
            # of eleven rows each, the last two are held out
            loss = -torch.log(torch.sigmoid(high[:9])).mean() / 2
            loss = loss - torch.log(1 - torch.sigmoid(low[:9])).mean() / 2
            accuracy[f, m] = ((high[9:] > 0).float().mean() + (low[9:] < 0).float().mean()) / 2
            optimizers[f, m].zero_grad()
            loss.backward()
            optimizers[f, m].step()
        before = running.weights.clone()
        found = running.learn(batch)
        assert_close(found[:2].float(), accuracy[:2].mean(dim=1))
        assert torch.equal(running.weights[2:], before[2:])
    for (f, m), net in nets.items():
        first, bias, last, shift = (parameter.detach() for parameter in net.parameters())
        expected = torch.cat([first.mT.flatten(), bias, last.flatten(), shift])
        assert_close(running.weights[f, m], expected)
    assert batch.rows.grad is None


def test_what_a_hidden_layer_learns_by_heart_is_not_what_it_is_judged_by():
    """Rows without any difference: those it learns from are told apart, those held out are not."""
    batch = make_batch(tables=[0] * 30, moves=[True] * 30, number=1, samples=40)
    running = AdversarialMLP(hidden=64, lr=0.05, weight_decay=0.0).start(tables(number=1))
    for _ in range(150):
        judged = running.learn(batch)
    learned = replace(batch, others=batch.others[:, :32].repeat(1, 2, 1, 1))
    learned = replace(learned, rare=batch.rare[:, :32].repeat(1, 2, 1, 1))
    assert running.learn(learned) > 0.95
    assert judged < 0.75


@pytest.mark.parametrize("samples", [1, 4])
def test_a_hidden_layer_is_judged_by_all_rows_of_a_sample_too_small_to_hold_any_out(samples):
    batch = make_batch(samples=samples)
    apart = replace(batch, others=batch.others + 9, rare=batch.rare - 9)
    running = AdversarialMLP(hidden=5, lr=0.1).start(tables())
    for _ in range(50):
        accuracy = running.learn(apart)
    assert accuracy[:2].tolist() == [1.0, 1.0]


RATES = {"adversarial": 3.0, "mmd": 3.0, "moments": 0.05, "sliced_wasserstein": 3.0}


@pytest.mark.parametrize(("name", "rate"), RATES.items())
def test_a_few_steps_bring_rare_rows_to_frequent_ones(name, rate):
    batch = make_batch(tables=[0] * 30, moves=[True] * 30, number=1, samples=60)
    batch = replace(batch, others=batch.others * 0.1 + 2.0)
    running = LOSSES[name].start(tables(number=1))

    def gap(rows):
        return (rows.mean(0) - batch.others.mean((0, 1))).norm()

    rows = batch.rows.detach()
    for _ in range(400):
        step = replace(batch, rows=rows.requires_grad_())
        running.learn(step)
        (gradient,) = torch.autograd.grad(running.loss(step).sum(), step.rows)
        rows = (rows - rate * gradient).detach()
        batch.draws.advance()
    assert gap(rows) < 0.5 * gap(batch.rows)


def test_cos_reg_leaves_rows_of_zeros_out():
    batch = make_batch(tables=[0] * 4, moves=[True] * 4)
    rows = batch.rows.detach().clone()
    rows[1] = 0.0
    whole = replace(batch, rows=rows.requires_grad_())
    left = replace(whole, moves=torch.tensor([True, False, True, True]))
    assert_close(CosReg().loss(whole), CosReg().loss(left))
    (gradient,) = torch.autograd.grad(CosReg().loss(whole).sum(), rows)
    assert torch.isfinite(gradient).all()
    assert not gradient[1].any()


@given(moves=st.lists(st.booleans(), min_size=30, max_size=30), most=st.integers(1, 12))
def test_picked_rows_are_as_many_as_there_are_of_each_table_and_no_others(moves, most):
    table = sorted(i % 3 for i in range(30))
    batch = make_batch(tables=table, moves=moves)
    picked = batch.pick(most)
    for f in range(4):
        rare = [i for i in range(30) if moves[i] and table[i] == f]
        found = picked.index[f][picked.weight[f] > 0].tolist()
        assert len(found) == len(set(found)) == min(len(rare), most) == int(picked.number[f])
        assert set(found) <= set(rare)
        assert picked.weight[f].sum().item() == pytest.approx(1.0 if rare else 0.0)


def test_every_rare_row_is_picked_as_often_as_another():
    batch = make_batch(tables=[0] * 20, moves=[i % 2 == 0 for i in range(20)])
    seen = torch.zeros(20)
    for _ in range(2000):
        picked = replace(batch, turn=torch.rand(4)).pick(3)
        seen[picked.index[0]] += 1
    assert not seen[1::2].any()
    assert (seen[0::2] / 2000 - 0.3).abs().max() < 0.05


def test_the_discriminators_step_is_one_of_gradient_descent_with_both_classes_alike():
    batch, settings = make_batch(), Adversarial(lr=0.5, weight_decay=0.1)
    running = settings.start(tables())
    weight, bias = (p.detach().clone().requires_grad_() for p in (running.weight, running.bias))
    assert weight.abs().max() <= 0.1
    total, right = 0.0, torch.zeros(2)
    for f in (0, 1):
        rare = batch.rows.detach()[batch.moves & (batch.table == f)]
        for m in range(SETS):
            low, high = rare[:, m] @ weight[f, m], batch.others[f, :, m] @ weight[f, m]
            low, high = low + bias[f, m], high + bias[f, m]
            total = total - torch.log(1 - torch.sigmoid(low)).mean() / 2
            total = total - torch.log(torch.sigmoid(high)).mean() / 2
            right[f] += ((low < 0).float().mean() + (high > 0).float().mean()) / 4
    total.backward()
    accuracy = running.learn(batch)
    for found, before in ((running.weight, weight), (running.bias, bias)):
        expected = before - 0.5 * (before.grad + 0.1 * before)
        assert_close(found.detach(), expected.detach())
    assert_close(accuracy[:2].float(), right)
    assert batch.rows.grad is None


def test_a_discriminator_learns_to_tell_what_can_be_told():
    batch = make_batch(tables=[0] * 30, moves=[True] * 30, number=1)
    apart = replace(batch, others=batch.others + 3.0)
    running = Adversarial(lr=0.5).start(tables(number=1))
    first = running.learn(apart)
    for _ in range(50):
        last = running.learn(apart)
    assert first < 0.9 < last


def test_flipped_sides_move_frequent_rows_towards_rare_ones():
    batch, running = make_batch(), Adversarial().start(tables())
    flipped = replace(batch, flipped=True)
    (down,) = torch.autograd.grad(running.loss(flipped).sum(), batch.rows)
    (up,) = torch.autograd.grad(running.loss(batch).sum(), batch.rows)
    assert ((down * up).sum(dim=-1)[batch.moves] < 0).all()


def test_discriminators_go_on_from_their_state():
    batch, running = make_batch(), Adversarial(lr=0.3).start(tables())
    running.learn(batch)
    other = Adversarial(lr=0.3, seed=1).start(tables())
    # older states also have that of an optimizer
    other.load_state_dict(running.state_dict() | {"optimizer": {"state": {}, "param_groups": []}})
    for each in (running, other):
        each.learn(batch)
    assert torch.equal(running.weight, other.weight)
    assert torch.equal(running.bias, other.bias)
    with pytest.raises(TrainingError, match=r"'weight' is .*\(4, 2, 3\) in the state and"):
        Adversarial().start(tables(number=2)).load_state_dict(running.state_dict())


def test_relatives_must_be_known():
    with pytest.raises(
        SettingsError, match="Relatives needs to know the relatives of table0, table1"
    ):
        Relatives().start(tables())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adversarial(lr=0.0), "lr must be above 0, got lr=0.0"),
        (lambda: Adversarial(weight_decay=-1.0), "weight_decay must be at least 0"),
        (lambda: AdversarialMLP(hidden=0), "hidden must be at least 1, got hidden=0"),
        (lambda: AdversarialMLP(lr=0.0), "lr must be above 0, got lr=0.0"),
        (lambda: AdversarialMLP(weight_decay=-1.0), "weight_decay must be at least 0"),
        (lambda: MMD(widths=()), "widths must be above 0"),
        (lambda: MMD(sample=0), "sample must be at least 1, got sample=0"),
        (lambda: Moments(moments=0), "moments must be at least 1"),
        (lambda: SlicedWasserstein(directions=0), "directions must be at least 1"),
        (lambda: SlicedWasserstein(sample=0), "sample must be at least 1"),
        (lambda: Relatives(sample=0), "sample must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(SettingsError, match=words):
        make()
