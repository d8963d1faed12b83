import pytest
import torch

from rarebit.errors import SettingsError
from rarebit.interactions.basic import InnerProducts


def naive(embeddings, num_kept):
    """The kept fields, then <v_i, v_j> for i < j, of one row `(F, D)`, number by number."""
    num_fields, dim = embeddings.shape
    kept = [embeddings[i, d] for i in range(num_kept) for d in range(dim)]
    pairs = [
        sum(embeddings[i, d] * embeddings[j, d] for d in range(dim))
        for i in range(num_fields)
        for j in range(i + 1, num_fields)
    ]
    return torch.stack(kept + pairs)


def test_a_value_worked_by_hand():
    embeddings = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]]])
    # 1*3 + 2*-1 = 1      1*0.5 + 2*4 = 8.5      3*0.5 + -1*4 = -2.5
    assert InnerProducts(3, 2)(embeddings).tolist() == [[1.0, 8.5, -2.5]]
    assert InnerProducts(3, 2, num_kept=1)(embeddings).tolist() == [[1.0, 2.0, 1.0, 8.5, -2.5]]


@pytest.mark.parametrize("num_kept", [0, 1, 4])
def test_values_and_gradients_equal_the_papers_products(num_kept):
    products = InnerProducts(4, 3, num_kept=num_kept)
    x = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    got, want = products(x), torch.stack([naive(row, num_kept) for row in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert products.out_width == got.shape[-1] == num_kept * 3 + 6
    pull = torch.randn_like(got)
    (got_grad,) = torch.autograd.grad((got * pull).sum(), x)
    (want_grad,) = torch.autograd.grad((want * pull).sum(), x)
    torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=1e-13)


def test_one_field_has_its_product_with_itself():
    x = torch.tensor([[[3.0, 4.0]]])
    assert InnerProducts(1, 2)(x).tolist() == [[25.0]]
    assert InnerProducts(1, 2, num_kept=1)(x).tolist() == [[3.0, 4.0, 25.0]]


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_set_axis_equals_a_loop_over_sets(num_kept):
    products = InnerProducts(4, 2, num_kept=num_kept)
    x = torch.randn(3, 5, 4, 2, dtype=torch.float64, requires_grad=True)
    got, want = products(x), torch.stack([products(one) for one in x])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    pull = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * pull).sum(), x),
        torch.autograd.grad((want * pull).sum(), x),
        rtol=0,
        atol=1e-13,
    )


def test_it_has_no_state_to_save():
    assert not InnerProducts(4, 2).state_dict()


@pytest.mark.parametrize("name", ["num_fields", "dim"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got {name}=0"):
        InnerProducts(**{"num_fields": 3, "dim": 2} | {name: 0})


@pytest.mark.parametrize("num_kept", [-1, 4])
def test_keeping_more_fields_than_there_are_is_refused(num_kept):
    message = rf"num_kept must lie in \[0, num_fields\], got num_kept={num_kept} of 3"
    with pytest.raises(SettingsError, match=message):
        InnerProducts(3, 2, num_kept=num_kept)
