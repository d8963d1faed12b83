"""What priors of shrunk tables take from training rows: parents, and frequent relatives.

parent       of an id, the value of the parent field that it is seen with most often
relatives    of a rare id, the frequent ids of its field that meet what it meets (`data/selection.py`)
"""

import torch
from torch import Tensor, nn

from rarebit.callbacks import TrainingData
from rarebit.data.dataset import Dataset
from rarebit.data.schema import PADDING
from rarebit.data.selection import CoOccurrence, FieldSelection, stored_selection
from rarebit.errors import DataError
from rarebit.methods._shrinkage_parts import counted_in
from rarebit.methods._shrinkage_priors import (
    NUM_RELATIVES,
    Relatives,
    SharedRows,
    most_frequent_parents,
)
from rarebit.methods.hashing import HashedTable
from rarebit.settings import suggest
from rarebit.tables.find import Site, find_sites

__all__ = ["set_relations_"]


@torch.no_grad()
def set_relations_(model: nn.Module, data: TrainingData, parent: str | None) -> None:
    """Give the priors of a model's tables the parents and relatives of their ids, in place."""
    sites = [(site, _priors(site)) for site in find_sites(model)]
    if parent is not None:
        for site, priors in sites:
            _set_parents(site, priors, data.train, parent)
    fields = [
        site.info.field
        for site, priors in sites
        if any(isinstance(prior, Relatives) for prior in priors)
    ]
    if not fields:
        return
    selection = stored_selection(
        data.train,
        CoOccurrence(relatives=NUM_RELATIVES),
        fields=list(dict.fromkeys(fields)),
        folder=data.folder,
        data_checksum=data.checksum,
    )
    for site, priors in sites:
        for prior in priors:
            if isinstance(prior, Relatives):
                _set_relatives(site, prior, selection[site.info.field])


def _priors(site: Site) -> list[object]:
    """Return the priors of a table, one a set."""
    return [getattr(table, "prior", None) for table in counted_in(site.table)]


def _set_parents(site: Site, priors: list[object], train: Dataset, parent: str) -> None:
    for prior in priors:
        # one row that is shared by all is a mean: such a table has no parents
        if not isinstance(prior, SharedRows) or prior.sizes == [1]:
            continue
        ids, parents = _met(train, site.info.field, parent)
        if isinstance(site.table, HashedTable):
            ids = ids % site.table.buckets
        found = most_frequent_parents(ids, parents, len(prior.index), prior.sizes[0] - 1)
        prior.index.copy_(found)


def _met(train: Dataset, name: str, parent: str) -> tuple[Tensor, Tensor]:
    """Return the values of a field, and with each the value of the parent field in the same row."""
    known = [field.name for field in train.schema.table_fields]
    for field in (name, parent):
        if field not in known:
            raise DataError(f"the training rows have no ids of {field!r}{suggest(field, known)}")
    if train.schema[parent].kind == "multi":
        raise DataError(f"a parent is one value a row, and {parent!r} has several; choose another")
    ids = train.ids[:, train.schema.slots[name]]  # (n, L)
    parents = train.ids[:, train.schema.slots[parent]].expand_as(ids)
    if train.schema[name].kind == "multi":
        present = ids != PADDING
        return ids[present], parents[present]
    return ids.reshape(-1), parents.reshape(-1)


def _set_relatives(site: Site, prior: Relatives, found: FieldSelection) -> None:
    if len(found.relatives) != len(prior.relatives):
        raise DataError(
            f"relatives are of ids, and {site.info.name!r} has {len(prior.relatives):,} rows for "
            f"{len(found.relatives):,} of them; use another prior for a table that is hashed"
        )
    chosen = found.target.unsqueeze(1)
    weights = torch.where(chosen, found.weights.double(), 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)
    columns = weights.shape[1]  # fewer where a field has few frequent values
    prior.weights.zero_()
    prior.weights[:, :columns] = weights.to(prior.weights)
    prior.relatives[:, :columns] = found.relatives.to(prior.relatives)
