"""Clipping counts rows once, beside the network."""

import pytest
import torch
from torch import nn
from training.rowwise_models import backward, batch_of, twins

from rarebit import clip_grad_norm_
from rarebit.errors import SettingsError


@pytest.mark.parametrize("max_norm", [0.01, 1000.0], ids=["clips", "lets pass"])
def test_clipping_counts_both_parts_as_torch_does_for_dense_gradients(max_norm):
    (ours, _), (theirs, _) = twins()
    batch = batch_of()
    backward(ours, batch)
    backward(theirs, batch)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(clip_grad_norm_(ours, max_norm), expected, rtol=1e-5, atol=1e-7)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        torch.testing.assert_close(gradient, q.grad, rtol=1e-5, atol=1e-7)


def test_clipping_without_gradients_and_without_a_bound():
    assert float(clip_grad_norm_(nn.Embedding(4, 2), 1.0)) == 0.0
    with pytest.raises(SettingsError, match="max_norm must be above 0"):
        clip_grad_norm_(nn.Embedding(4, 2), 0.0)
