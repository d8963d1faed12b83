"""Apply a method that gives a model several embedding sets: it changes the backbone as a whole."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, UnsupportedTableError
from rarebit.sets.sets import SetsMethod
from rarebit.settings import require
from rarebit.tables.apply import TableChanges, Where, put_tables, refuse_ill_defined_pair
from rarebit.tables.find import FieldSite, Site, TableInfo, find_sites, find_tables

__all__ = ["give_sets_"]

PLACE = "backbone"
"""Where a model has what is made of several sets."""


def give_sets_(
    model: nn.Module,
    method: SetsMethod,
    where: Where | None = None,
    optimizer: Optimizer | None = None,
) -> TableChanges:
    """Let a method give a model several embedding sets, in place, and return what changed.

    Tables outside of the backbone are left alone. There is nothing to choose, and no optimizer can be
    kept in step.

    >>> from rarebit.methods.multi_embedding import MultiEmbedding
    >>> model = nn.Module()
    >>> model.backbone, model.head = nn.Sequential(nn.Embedding(9, 4)), nn.Linear(4, 1)
    >>> print(give_sets_(model, MultiEmbedding(num_sets=3)))
    MultiEmbedding(num_sets=3): 1 of 1 tables, 36 -> 108 weights stored
      backbone.0  9 x 4, 36 -> 108
    """
    require(where is None, f"{method} changes the backbone as a whole; leave out where=")
    if optimizer is not None:
        raise OptimizerError(
            f"{method} draws the network of a model anew, so an optimizer has no state to keep; leave "
            "out optimizer= and build it after this call"
        )
    sites = find_sites(model)
    inside = [site for site in sites if f"{site.info.name}.".startswith(f"{PLACE}.")]
    for site in inside:
        refuse_ill_defined_pair(site, method)
        _refuse_to_copy(site, method)
    collection = method.change_(model)
    changed = [
        site
        for site in find_sites(model)
        if isinstance(site, FieldSite) and site.collection is collection
    ]
    put_tables(model, changed, [method.wrap(site.table) for site in changed])
    before = tuple(site.info for site in inside)
    now = {info.name: info for info in find_tables(model)}
    after = tuple(_all_sets_of(info, now, method) for info in before)
    skipped = [(site.info.name, "outside of the backbone") for site in sites if site not in inside]
    return TableChanges(str(method), before, after, tuple(skipped))


def _refuse_to_copy(site: Site, method: SetsMethod) -> None:
    # a module is copied with all that it does, but a field's table is made anew
    reason = site.info.refusal if isinstance(site, FieldSite) else site.tie
    if not site.info.trainable:
        reason = "it is not trained, and new sets start at random"
    if reason:
        raise UnsupportedTableError(f"{method} cannot be applied to {site.info.name!r}: {reason}")


def _all_sets_of(info: TableInfo, now: Mapping[str, TableInfo], method: SetsMethod) -> TableInfo:
    """Return a table of a backbone as it is now, all sets of it together."""
    if info.name in now:
        return now[info.name]
    place = info.name.removeprefix(PLACE)
    sets = [now[f"{PLACE}.sets.{number}{place}"] for number in range(method.num_sets)]
    return replace(
        info,
        methods=(str(method),),
        num_parameters=sum(table.num_parameters for table in sets),
        num_bytes=sum(table.num_bytes for table in sets),
    )
