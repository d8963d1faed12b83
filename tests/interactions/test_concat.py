import torch

from rarebit.interactions.basic import Concatenation


def test_fields_lie_side_by_side_in_order():
    x = torch.arange(12.0).view(2, 3, 2)
    assert Concatenation()(x).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_each_output_has_the_gradient_of_its_own_input():
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(2, 6, dtype=torch.float64)
    (Concatenation()(x) * pull).sum().backward()
    assert torch.equal(x.grad, pull.view(2, 3, 2))


def test_a_set_axis_equals_a_loop_over_sets():
    x = torch.randn(4, 2, 3, 2)
    assert torch.equal(Concatenation()(x), torch.stack([Concatenation()(one) for one in x]))
