import torch

from rarebit.interactions.basic import TwoStreams


def naive(row, weights, stream, depth):
    """One row `(F, D)` through one stream, number by number."""
    numbers = [number for field in row for number in field]
    for layer in range(depth):
        weight, bias = (weights[f"{stream}.{layer}.{n}"] for n in ("weight", "bias"))
        numbers = [
            torch.clamp(sum((w * x for w, x in zip(line, numbers, strict=True)), start=b), min=0.0)
            for line, b in zip(weight, bias, strict=True)
        ]
    return torch.stack(numbers)


def assert_same(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    pulls = [torch.randn_like(part) for part in want]
    totals = [
        sum((part * pull).sum() for part, pull in zip(parts, pulls, strict=True))
        for parts in (got, want)
    ]
    torch.testing.assert_close(
        torch.autograd.grad(totals[0], inputs),
        torch.autograd.grad(totals[1], inputs),
        rtol=0,
        atol=1e-12,
    )


def test_values_and_gradients_equal_two_networks_by_loops():
    streams = TwoStreams(6, (5, 4), (3,)).double()
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    weights = dict(streams.named_parameters())
    want = tuple(
        torch.stack([naive(row, weights, stream, depth) for row in x])
        for stream, depth in (("first", 2), ("second", 1))
    )
    assert_same(streams(x), want, (x, *weights.values()))


def test_sets_with_streams_of_their_own_equal_a_loop_over_sets():
    stacked = TwoStreams(6, (5, 4), (3, 3), num_sets=3).double()
    one = TwoStreams(6, (5, 4), (3, 3)).double()
    x = torch.randn(3, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    loop = []
    for index in range(3):
        weights = {name: weight[index] for name, weight in stacked.named_parameters()}
        loop.append(torch.func.functional_call(one, weights, x[index]))
    want = tuple(torch.stack(parts) for parts in zip(*loop, strict=True))
    assert_same(stacked(x), want, (x, *stacked.parameters()))


def test_the_streams_start_differently():
    streams = TwoStreams(6, (4,), (4,))
    assert not torch.equal(streams.first[0].weight, streams.second[0].weight)


def test_batch_norm_and_dropout_are_those_of_each_stream():
    streams = TwoStreams(6, (4,), (4,), dropout=0.5, batch_norm=True)
    x = torch.randn(64, 3, 2)
    first, second = streams(x)
    assert not torch.equal(first == 0, second == 0)
    assert float(streams.first[0].norm.running_mean.abs().max()) > 0
    assert torch.equal(streams.eval()(x)[0], streams(x)[0])
