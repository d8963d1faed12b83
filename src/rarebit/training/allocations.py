"""Memory that is refused before it is asked for: what a file describes may be absurd.

A model is built inside `AllocationLimit`. Every tensor it makes is sized first, without memory, and
refused where all of them together are more than the limit, or than what there is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rarebit.errors import ModelFileError
from rarebit.training.memory import available_memory

__all__ = ["OBJECT_BYTES", "AllocationLimit"]

OBJECT_BYTES = 4096
"""What a small tensor takes with the module around it, so that millions of them are seen."""
COPIES = 2
"""How often a table is in memory while a model is built: by itself, and joined to others."""
UNKNOWN = 1 << 40
"""Bytes where the system does not say: enough for all that is real, and no sum of sizes overflows."""
FACTORIES = (
    torch.arange,
    torch.empty,
    torch.full,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
)
"""What models make their weights by."""


class AllocationLimit(TorchFunctionMode):
    """Refuses tensors beyond `limit` bytes in all, and beyond the memory there is.

    >>> with AllocationLimit(1 << 20):
    ...     torch.zeros(1 << 40)
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: it asks for larger weights than the folder holds; take an older copy of it
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit, self.asked = limit, 0
        available = available_memory(torch.device("cpu"))
        self.available = UNKNOWN if available is None else available

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if func in FACTORIES:
            size = int(func(*args, **given | {"device": "meta"}).nbytes)
            self.ask(max(size, OBJECT_BYTES))
        return func(*args, **given)

    def ask(self, num_bytes: int) -> None:
        """Raise where so many bytes more are more than the limit, or than there are."""
        self.asked += num_bytes
        if self.limit is not None and self.asked > self.limit:
            raise ModelFileError(
                "it asks for larger weights than the folder holds; take an older copy of it"
            )
        self.require(self.asked)

    def require(self, num_bytes: int) -> None:
        """Raise where there are not so many bytes."""
        if COPIES * num_bytes > self.available:
            raise ModelFileError(
                "it asks for more memory than there is; load it on a larger machine, or take an "
                "older copy where its sizes are wrong"
            )
