"""Products in half precision with rows filled up are those without; nothing else is filled up."""

import pytest
import torch
from torch import Tensor, nn

from rarebit.interactions import basic as aligned
from rarebit.interactions.basic import Block, Linear, affine, as_autocast, filled_up
from rarebit.interactions.cross import CrossNetwork

SETS = pytest.mark.parametrize("num_sets", [None, 3])


@pytest.fixture
def reads_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a device that reads eight numbers at a time."""
    monkeypatch.setitem(aligned.MULTIPLES, "cpu", 8)


@pytest.mark.usefixtures("reads_eight")
def test_fills_up_with_zeros() -> None:
    x = torch.ones(2, 3, 10, dtype=torch.bfloat16)
    whole = filled_up(x, dims=2)
    assert whole.shape == (2, 8, 16)
    assert torch.equal(whole[:, :3, :10], x)
    assert whole.sum() == x.sum()


@pytest.mark.usefixtures("reads_eight")
def test_leaves_alone_what_needs_nothing() -> None:
    single, whole = torch.ones(2, 10), torch.ones(2, 16, dtype=torch.bfloat16)
    assert filled_up(single) is single
    assert filled_up(whole) is whole


def test_fills_up_nothing_where_nothing_is_gained() -> None:
    x = torch.ones(2, 10, dtype=torch.bfloat16)
    assert filled_up(x) is x


def test_takes_the_precision_of_autocast_where_it_is_on() -> None:
    x = torch.ones(2)
    assert as_autocast(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert as_autocast(x).dtype == torch.bfloat16


@SETS
@pytest.mark.usefixtures("reads_eight")
def test_affine_is_the_product_written_out(num_sets: int | None) -> None:
    sets = () if num_sets is None else (num_sets,)
    x, weight, bias = torch.randn(*sets, 5, 10), torch.randn(*sets, 4, 10), torch.randn(*sets, 4)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    naive = torch.einsum("...bw,...uw->...bu", x.double(), weight.double())
    for given, added in ((bias, bias.double().unsqueeze(-2)), (None, 0.0)):
        torch.testing.assert_close(
            affine(x, weight, given).double(), naive + added, rtol=2e-2, atol=2e-2
        )


@SETS
def test_networks_score_and_learn_the_same_filled_up(
    num_sets: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    networks = [
        (CrossNetwork(3, 5, num_layers=2, num_sets=num_sets), (6, 3, 5)),
        (Block(13, 4, num_sets=num_sets), (6, 13)),
    ]
    if num_sets is None:
        networks.append((Linear(13, 4), (6, 13)))
    for network, shape in networks:
        x = torch.randn(shape if num_sets is None else (num_sets, *shape))
        plain = _run(network, x)
        with monkeypatch.context() as patched:
            patched.setitem(aligned.MULTIPLES, "cpu", 8)
            whole = _run(network, x)
        for one, other in zip(plain, whole, strict=True):
            # sums of the same products, perhaps in another order, and then rounded to eight bits
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def _run(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output in half precision, and all gradients."""
    leaf = x.clone().requires_grad_()
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = network(leaf)
    out.float().square().mean().backward()
    assert leaf.grad is not None
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(gradients) == len(list(network.parameters()))
    return [out.detach().float(), leaf.grad, *(gradient.clone() for gradient in gradients)]
