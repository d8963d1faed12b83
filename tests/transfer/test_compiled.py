"""Parts of a transfer that are compiled: the same numbers, and a line where that fails."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.testing import check_resumes
from rarebit.transfer.losses import Adversarial, Draws, StatelessLoss

ITEMS, STEPS = 60, 4
# torch's own, when its compiler is loaded
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def trained(loss, lines, *, compile):
    """Return weights, state and ledger after some steps in double precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ITEMS, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    settings = HarmlessTransfer(loss=loss, samples=8, scale=3.0, compile=compile)
    counts = torch.arange(ITEMS)
    with settings.start(model, counts=counts, where=lambda _: True, say=lines.append) as transfer:
        transfer.rows._static = True
        for ids in torch.randint(ITEMS, (STEPS, 40)):
            optimizer.zero_grad()
            transfer.backward(F.softplus(model(ids)).mean())
            optimizer.step()
        state = copy.deepcopy((model.state_dict(), transfer.state_dict()))
        return state, transfer.ledger.read(), transfer.groups[0]


def parts_of(group):
    return (group._draw, group._find, group.weigh)


def check_same(found, expected):
    """The state holds all that the ledger counts, and what is compiled."""
    assert found[0][1].pop("compiled") != expected[0][1].pop("compiled")
    assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    assert found[1]["tables"]["0"]["rows"] == expected[1]["tables"]["0"]["rows"] > 0


@pytest.mark.slow
def test_compiled_steps_are_those_that_are_not():
    lines, loss = [], Adversarial(lr=0.5)
    found = trained(loss, lines, compile=True)
    assert not lines
    assert all(part._compiled is not None for part in parts_of(found[2]))
    expected = trained(loss, lines, compile=False)
    assert all(part._compiled is None for part in parts_of(expected[2]))
    check_same(found, expected)


@pytest.mark.slow
def test_a_resumed_run_is_compiled_for_the_sizes_of_the_run_before():
    check_resumes(HarmlessTransfer(compile=True))


def test_states_without_compiled_sizes_load():
    state, _, group = trained(Adversarial(), [], compile=False)
    assert [part.sizes for part in parts_of(group)] == [(None, None)] * 3
    assert state[1].pop("compiled") == {"0": [(None, None)] * 3}
    model = nn.Sequential(nn.Embedding(ITEMS, 4), nn.Linear(4, 1)).double()
    settings = HarmlessTransfer(samples=8)
    with settings.start(model, counts=torch.arange(ITEMS), where=lambda _: True) as transfer:
        transfer.load_state_dict(state[1])
        assert int(transfer.draws.step) == STEPS


@pytest.mark.slow
def test_numbers_of_a_step_that_is_compiled_at_once_are_the_same():
    compiled, plain = (Draws(7, torch.device("cpu")) for _ in range(2))
    draw = torch.compile(lambda: compiled.uniform(257, 3), dynamic=False, fullgraph=True)
    for _ in range(3):
        compiled.advance()
        plain.advance()
        assert torch.equal(draw(), plain.uniform(257, 3))


@dataclass(frozen=True, kw_only=True)
class Looks(StatelessLoss):
    """A loss that looks at a number, which no compiler can follow."""

    def loss(self, batch):
        scale = 1.0 if float(batch.rows.detach().sum()) > 0 else 2.0
        return scale * batch.total(batch.rows.square().sum(dim=(1, 2))) / batch.divisor


@pytest.mark.slow
def test_what_cannot_be_compiled_is_run_as_it_is_and_said_once():
    lines = []
    found = trained(Looks(), lines, compile=True)
    assert len(lines) == 1
    assert lines[0].startswith("the loss of the transfer is not compiled: ")
    check_same(found, trained(Looks(), lines, compile=False))
