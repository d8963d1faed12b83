"""How evenly the tables of a model use their width: their information abundance, in one number."""

import statistics

from torch import nn

from rarebit.tables.find import find_sites
from rarebit.tables.sets import SetsMethod
from rarebit.tables.spectrum import information_abundance
from rarebit.tables.table import full_table, methods_of

__all__ = ["mean_abundance"]


def mean_abundance(model: nn.Module) -> float | None:
    """Return the mean information abundance of the tables wider than 1; each embedding set by itself.

    >>> import torch
    >>> mean_abundance(nn.Sequential(nn.Embedding.from_pretrained(torch.eye(5))))
    5.0
    """
    found = []
    for site in find_sites(model):
        if site.info.width > 1:
            sets = [m.num_sets for m in methods_of(site.table) if isinstance(m, SetsMethod)]
            weight = full_table(site.table)
            found += [information_abundance(one) for one in weight.chunk(max([1, *sets]), dim=1)]
    return statistics.fmean(found) if found else None
