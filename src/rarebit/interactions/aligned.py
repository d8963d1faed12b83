"""Matrix products in half precision, at the speed a GPU has for them.

Its matrix units read rows in pieces of sixteen bytes, which is eight numbers of half precision, and only rows
whose length is a multiple of that. Those of 39 fields of width 10 are not, and their product takes three times as
long. Columns of zeros fill a row up; they change no sum.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Linear", "affine", "as_autocast", "filled_up"]

MULTIPLES = {"cuda": 8}
"""How many numbers of half precision a device reads at a time, where it matters."""


def as_autocast(x: Tensor) -> Tensor:
    """Return a tensor in the precision that autocast has for products, where it is on.

    What goes from one product to the next is then not written in full precision between them.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     as_autocast(torch.zeros(2)).dtype
    torch.bfloat16
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def filled_up(x: Tensor, dims: int = 1) -> Tensor:
    """Return a tensor with zeros at the end of its last dimensions, where a product needs them.

    >>> filled_up(torch.ones(2, 3)).shape  # nothing is gained on the CPU
    torch.Size([2, 3])
    """
    multiple = MULTIPLES.get(x.device.type, 1) if _goes_in_half(x) else 1
    missing = [-size % multiple for size in reversed(x.shape[-dims:])]
    if not any(missing):
        return x
    return F.pad(x, [size for end in missing for size in (0, end)])


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W x + b of rows `(B, W)`, or of each embedding set's `(M, B, W)` with weights of its own.

    >>> affine(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))[0]
    tensor([4., 4., 4., 4.])
    """
    x, weight = filled_up(x), filled_up(weight)
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)  # (M, B, U)


class Linear(nn.Linear):
    """A linear layer that is fast at any width."""

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b."""
        return affine(input, self.weight, self.bias)


def _goes_in_half(x: Tensor) -> bool:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return dtype in (torch.bfloat16, torch.float16)
