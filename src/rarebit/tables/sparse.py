"""Which tables give their gradient by rows: torch's sparse gradients, switched on and off.

A plain table's gradient is either a tensor of the table's size, zero nearly everywhere, or a sparse
one with a row for each lookup. Only the second costs what the batch costs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rarebit.errors import OptimizerError

__all__ = ["lookups_of", "row_gradient", "row_gradients_kept", "set_row_gradients"]

Plain = nn.Embedding | nn.EmbeddingBag


def set_row_gradients(model: nn.Module, *, by_rows: bool) -> None:
    """Let every plain table of a model give its gradient by rows, or not.

    A table stays dense where torch has no row gradients for it: one that shares its weight with
    another layer, scales gradients by frequency, or takes the maximum over a bag.

    >>> model = nn.Sequential(nn.Embedding(9, 4))
    >>> set_row_gradients(model, by_rows=True)
    >>> model[0].sparse
    True
    """
    shared = _weights_of_other_layers(model)
    wanted = {
        table: by_rows and _can_be_sparse(table) and id(table.weight) not in shared
        for table in _plain_tables(model)
    }
    _refuse_in_ddp(model, [table for table, sparse in wanted.items() if sparse != table.sparse])
    for table, sparse in wanted.items():
        table.sparse = sparse


@contextmanager
def row_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the tables back to the gradients they gave before, after a `with` block."""
    before = {table: table.sparse for table in _plain_tables(model)}
    try:
        yield
    finally:
        for table, sparse in before.items():
            table.sparse = sparse


def row_gradient(shape: torch.Size, ids: Tensor, values: Tensor) -> Tensor:
    """Return a table's gradient with one row a lookup, ids `(T,)` and values `(T, D)`.

    >>> row_gradient(torch.Size([9, 2]), torch.tensor([4, 4]), torch.ones(2, 2)).to_dense()[4]
    tensor([2., 2.])
    """
    # unchecked, as torch's own lookup makes it: a check would wait for the device
    make = torch.ops.aten._sparse_coo_tensor_unsafe  # noqa: SLF001  # it has no other name
    gradient: Tensor = make(ids.unsqueeze(0), values, shape)
    return gradient


def lookups_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids `(T,)` and values `(T, D)` of a gradient by rows, rows that came twice and all.

    >>> table = nn.Embedding(9, 2, sparse=True)
    >>> table(torch.tensor([4, 4])).sum().backward()
    >>> lookups_of(table.weight.grad)[0]
    tensor([4, 4])
    """
    # the public names ask for sums over equal rows first, which is a sort
    return gradient._indices()[0], gradient._values()  # noqa: SLF001  # not coalesced


def _can_be_sparse(table: Plain) -> bool:
    if isinstance(table, nn.EmbeddingBag) and table.mode == "max":
        return False
    return not table.scale_grad_by_freq


def _refuse_in_ddp(model: nn.Module, changed: list[Plain]) -> None:
    """Raise when a wrapper has already noted for good which gradients are sparse."""
    weights = {id(table.weight) for table in changed}
    for wrapper in model.modules():
        if type(wrapper).__name__ != "DistributedDataParallel":
            continue
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        named = wrapper.module.named_parameters()  # type: ignore[union-attr]  # the wrapped model
        if any(id(p) in weights and name not in ignored for name, p in named):
            raise OptimizerError(
                "DistributedDataParallel notes when it is made which gradients come by rows; "
                "build the optimizer of the model first, then wrap it"
            )


def _plain_tables(model: nn.Module) -> Iterator[Plain]:
    for module in model.modules():
        if isinstance(module, Plain):
            yield module


def _weights_of_other_layers(model: nn.Module) -> set[int]:
    return {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, Plain)
        for parameter in module.parameters(recurse=False)
    }
