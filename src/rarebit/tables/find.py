"""Where the tables of a model are, what they look like, and why one of them cannot be changed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import nn

from rarebit.errors import UnsupportedTableError
from rarebit.tables.bag import Bag, table_of_bag
from rarebit.tables.collection import TableCollection
from rarebit.tables.table import (
    AnyTable,
    Shared,
    Table,
    is_trainable,
    methods_of,
    num_weights,
    stored_tensors,
)

__all__ = [
    "FieldSite",
    "ModuleSite",
    "Site",
    "TableInfo",
    "find_sites",
    "find_tables",
    "lookup_refusal",
    "refuse_wrapped_model",
    "table_bytes",
    "table_parameters",
]

Kind: TypeAlias = Literal["embedding", "bag", "field"]
TableModule: TypeAlias = nn.Embedding | nn.EmbeddingBag | Table | Bag

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where a module keeps what it calls besides itself."""


@dataclass(frozen=True)
class TableInfo:
    """What a table is, for choosing it: `where=lambda t: t.rows > 100 and t.field == "user"`."""

    name: str
    """Where the table is in the model, such as `backbone.tables.user`."""
    rows: int
    """How many ids it has a row for."""
    width: int
    """How long a row is."""
    kind: "Kind"
    """An `nn.Embedding`, an `nn.EmbeddingBag`, or one field of a stacked table."""
    methods: tuple[str, ...]
    """The methods applied to it, in order."""
    trainable: bool
    """Whether training changes it."""
    num_parameters: int
    """Weights it stores, however few bits each of them has."""
    num_bytes: int
    """Bytes of all that it stores."""
    refusal: str | None
    """Why no method can be applied to it; None when one can."""

    @property
    def field(self) -> str:
        """The last part of the name: the field or attribute it is called by."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class ModuleSite:
    """A table that is a module of its own, and every place in the model that holds it."""

    module: TableModule
    places: list[tuple[nn.Module, str]]
    info: TableInfo
    tie: str | None = None
    """Which other part of the model uses its weight; None when no other does."""

    @property
    def table(self) -> AnyTable:
        """The table, out of its bag."""
        if isinstance(self.module, nn.EmbeddingBag | Bag):
            return table_of_bag(self.module)
        return self.module


@dataclass(frozen=True)
class FieldSite:
    """A table that is one field of a collection."""

    collection: TableCollection
    index: int
    table: AnyTable = field(repr=False)
    info: TableInfo
    tie: str | None = None
    """Which other part of the model uses a weight of the collection; None when no other does."""


Site: TypeAlias = ModuleSite | FieldSite


def find_tables(model: nn.Module) -> list[TableInfo]:
    """Return every table of a model: each `nn.Embedding` and `nn.EmbeddingBag`, each field of a stack.

    >>> [(table.name, table.rows, table.width) for table in find_tables(nn.Sequential(nn.Embedding(9, 4)))]
    [('0', 9, 4)]
    """
    return [site.info for site in find_sites(model)]


def find_sites(model: nn.Module) -> list[Site]:
    """Return every table with the place it can be replaced at."""
    owners = _owners(model)
    sites: list[Site] = []
    for names, module in _table_modules(model):
        tie = _tie_refusal(names, module, owners)
        if isinstance(module, TableCollection):
            # a collection stays where it is: its stacks are replaced
            refusal = tie or _hook_refusal(module.stacks)
            start = f"{names[0]}." if names[0] else ""
            for index, table in enumerate(module.tables()):
                info = _info(start + module.fields[index].name, table, "field", refusal)
                sites.append(FieldSite(module, index, table, info, tie))
        else:
            kind: Kind = "bag" if isinstance(module, nn.EmbeddingBag | Bag) else "embedding"
            stored = module.table if isinstance(module, Bag) else module
            info = _info(names[0], stored, kind, _refusal(names, module, tie))
            parts = [name.rpartition(".") for name in names if name]
            places = [(model.get_submodule(parent), attribute) for parent, _, attribute in parts]
            sites.append(ModuleSite(module, places, info, tie))
    return sites


def table_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all tables by name, each once."""
    return {
        name: parameter
        for names, module in _table_modules(model)
        for name, parameter in module.named_parameters(prefix=names[0])
    }


def table_bytes(model: nn.Module) -> int:
    """Return the bytes of everything that a model's tables store."""
    stored = {
        id(tensor): tensor.nbytes
        for _, module in _table_modules(model)
        for tensor in stored_tensors(module)
    }
    return sum(stored.values())


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raise when the model is compiled, scripted or wrapped: its tables can no longer be replaced."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            reason = "is compiled, and a compiled module keeps calling its old tables"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "is a TorchScript module, whose parts cannot be replaced"
        elif kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            reason = f"is wrapped in {kind}, which has already registered its parameters"
        else:
            continue
        where = f"{name!r} in the model" if name else "the model"
        raise UnsupportedTableError(
            f"{where} {reason}; change the tables first, then compile or wrap it"
        )


def _table_modules(
    model: nn.Module,
) -> Iterator[tuple[list[str], TableModule | TableCollection]]:
    """Yield each table or collection once, with all its names; never what lies inside one."""
    names: dict[nn.Module, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | Table | Bag | TableCollection):
            names.setdefault(module, []).append(name)
            inside = (*inside, f"{name}." if name else "")
    for module, found in names.items():
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag | Table | Bag | TableCollection)
        yield found, module


def _owners(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """For each parameter, every name it goes by: more than one means tied weights."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    return owners


def _refusal(names: list[str], module: TableModule, tie: str | None) -> str | None:
    """Return why this table cannot be changed; None when it can."""
    if names == [""]:
        return "it is the whole model, so there is nothing to replace it in: put it in a module"
    return lookup_refusal(module) or tie or _hook_refusal(module) or _padding_refusal(module)


def lookup_refusal(module: TableModule) -> str | None:
    """Return what this table does besides looking rows up; None when nothing."""
    if isinstance(module, Table | Bag):
        return None
    exact = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    if type(module) is not exact:
        return (
            f"it is a {type(module).__name__}, a subclass of nn.{exact.__name__} "
            "that may look rows up in its own way"
        )
    if module.max_norm is not None:
        return f"max_norm={module.max_norm:g} rewrites rows at every lookup"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True rescales the gradient of a plain table only"
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.is_meta:
        return f"its weight is a {type(weight).__name__} on {weight.device}, no ordinary parameter"
    return None


def _tie_refusal(
    names: list[str], module: nn.Module, owners: dict[nn.Parameter, list[str]]
) -> str | None:
    own = tuple(f"{name}." if name else "" for name in names)
    shared = {id(part.value) for part in module.modules() if isinstance(part, Shared)}
    for parameter in module.parameters():
        for name in owners[parameter]:
            if id(parameter) not in shared and not name.startswith(own):
                return f"its weight is tied to {name!r}, which would keep the old one"
    return None


def _hook_refusal(module: nn.Module) -> str | None:
    if any(getattr(part, kind, None) for part in module.modules() for kind in MODULE_HOOKS):
        return "it has hooks, which a replacement would not run: remove them first"
    gradients = ("_backward_hooks", "_post_accumulate_grad_hooks")
    for parameter in module.parameters():
        if any(getattr(parameter, kind, None) for kind in gradients):
            return "its weight has gradient hooks, which a replacement would not run"
    return None


def _padding_refusal(module: TableModule) -> str | None:
    # A bag leaves padding out, whatever its row holds; an embedding hands the row out.
    if not isinstance(module, nn.Embedding) or module.padding_idx is None:
        return None
    if bool(module.weight[module.padding_idx].any()):
        return f"its padding row {module.padding_idx} is not zero; set it to zero first"
    return None


def _info(
    name: str, table: AnyTable | nn.EmbeddingBag, kind: Kind, refusal: str | None
) -> TableInfo:
    methods = () if isinstance(table, nn.EmbeddingBag) else methods_of(table)
    return TableInfo(
        name=name,
        rows=table.num_embeddings,
        width=table.embedding_dim,
        kind=kind,
        methods=tuple(map(str, methods)),
        trainable=is_trainable(table),
        num_parameters=num_weights(table),
        num_bytes=sum(tensor.nbytes for tensor in stored_tensors(table)),
        refusal=refusal,
    )
