"""Pack the tables of a model in place: keep what is not zero."""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from rarebit.errors import UnsupportedTableError
from rarebit.tables.apply import TableChanges, Where, put_tables, told
from rarebit.tables.find import Site, find_sites, refuse_wrapped_model
from rarebit.tables.packed import Pack
from rarebit.tables.table import AnyTable, methods_of, stored_tensors, unsuited, wrap

__all__ = ["pack_"]


def pack_(
    model: nn.Module,
    *,
    where: Where | None = None,
    bits: Literal[8] | None = None,
    optimizer: Optimizer | None = None,
    verbose: bool = True,
) -> TableChanges:
    """Keep only the entries of the tables that are not zero, in place, and return what changed.

    Rows stay the same to the last bit; `bits=8` rounds the values and ends their training. Tables of
    width 1, and those that would not get smaller, are left alone. Whatever a table wraps is folded
    first, as by `merge_`; buckets of hashed tables are packed as buckets. The report is false when
    nothing was packed.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(1000, 64))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:990].zero_()
    >>> changes = pack_(model)
    pack: 1 of 1 tables, 256,000 -> 2,812 bytes stored
      0  1,000 x 64, 256,000 -> 2,812
    """
    refuse_wrapped_model(model)
    method = Pack(bits=bits)
    chosen, tables, skipped = [], [], []
    for site in find_sites(model):
        packed = _packed(site, method, where)
        if isinstance(packed, str):
            skipped.append((site.info.name, packed))
        else:
            chosen.append(site)
            tables.append(packed)
    after = put_tables(model, chosen, tables, optimizer)
    before = tuple(site.info for site in chosen)
    return told(TableChanges("pack", before, after, tuple(skipped)), verbose)


def _packed(site: Site, method: Pack, where: Where | None) -> AnyTable | str:
    """Return the table packed, or why it is left alone."""
    if site.info.width < 2:
        return "narrower than 2"
    if where is not None and not where(site.info):
        return "not chosen"
    if any(isinstance(done, Pack) for done in methods_of(site.table)):
        return "already packed"
    reason = unsuited(site.table, method)
    if reason is not None:
        return reason
    if site.info.refusal:
        raise UnsupportedTableError(
            f"cannot pack {site.info.name!r}: {site.info.refusal}. "
            f"Leave it out with where=lambda t: t.name != {site.info.name!r}"
        )
    table = wrap(site.table, method)
    if sum(tensor.nbytes for tensor in stored_tensors(table)) >= site.info.num_bytes:
        return "it would not get smaller"
    return table
