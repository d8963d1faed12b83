"""The tables of a model spread over processes, looked up by TorchRec (`shard`).

    model ─ TableCollection ─ method's stack ─ ShardedStack ─ ShardedRows ─ TorchRec's sharded bags
    model ─ TablePiece (was nn.Embedding), ShardedBag (was nn.EmbeddingBag)  ┘

Only plain tables are exchanged, wherever they lie: hashing, factors, thresholds, sets and shrinkage stay above them, in every
process, and see the same rows as in one process. A process holds its pieces as parameters that look like any others to the
optimizer, the averages and `state_dict`; `PiecesOf` says which rectangle of which plain weight each of them is.

    kernel       gradient of the pieces                        optimizers
    fused        none: rows are updated in the backward        SGD, row-wise Adagrad
    dense        a tensor of the piece's size                  Adam, and all others of torch

TorchRec averages gradients over the processes. So with W processes, a loss that is the mean over a process's own rows, and
as many rows in each, trains on the mean over all of them. The gradients of the rest of the model are averaged before the
optimizer's step (`average_gradients`).

The fused kernels need widths that are multiples of four. Narrower tables get columns of zeros, which stay zero; row-wise
Adagrad's mean of squares over D of D' columns is corrected by sqrt(D / D') in the learning rate and epsilon.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rarebit.errors import OptimizerError, SettingsError, UnsupportedTableError, import_extra
from rarebit.settings import require
from rarebit.sharding.plan import COLUMNS, Piece, Placement, PlanSpec, TableSize, make_plan
from rarebit.tables.collection import PlainStack, Stack, TableCollection
from rarebit.tables.table import AnyTable, TablePiece, is_trainable, table_name

FUSED_EPS = 1e-10
"""Epsilon of row-wise Adagrad, as in torch's Adagrad."""


class Rectangle(NamedTuple):
    """Which part of a plain weight a parameter holds."""

    weight: str
    """The name of the weight in the plain model."""
    shape: tuple[int, int]
    """The shape of that weight."""
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Kernel:
    """How the pieces are trained."""

    kind: str = "sgd"
    fused: bool = True

    def padded(self, width: int) -> int:
        """Return the width of the stored rows."""
        return -(-width // COLUMNS) * COLUMNS if self.fused else width

    def ratio(self, width: int) -> float:
        """Return what corrects the learning rate and epsilon for the columns of zeros."""
        return (width / self.padded(width)) ** 0.5 if self.kind == "adagrad" else 1.0


class ShardedRows(nn.Module):
    """Tables of one width, spread over processes: ids of S slots to rows `(B, S, D)`."""

    def __init__(
        self,
        tables: Sequence[Placement],
        slots: Sequence[int],
        kernel: Kernel,
        *,
        trained: bool = True,
        fill: Callable[[int, Piece, Tensor], None] | None = None,
    ) -> None:
        """`slots` says for each slot which table it reads; `fill(table, piece, memory)` writes a piece's first weights."""
        super().__init__()
        self.weight = ""
        """The name in the plain model of the weight that the pieces are parts of."""
        self.width, self.kernel, self.num_slots = tables[0].table.width, kernel, len(slots)
        self.placements = tuple(tables)
        self.placed = [placement.piece_of(dist.get_rank()) for placement in tables]
        self.sizes = [placement.table.rows for placement in tables]
        # a list: TorchRec's module has names of its own, and would be in ours
        self._bags = [_sharded_bags(tables, slots, kernel)]
        found = dict(_local_weights(self._bags[0]))
        pieces, self.sums = [], dict[int, Tensor]()
        for index, piece in enumerate(self.placed):
            weight, state = found.get(str(index), (torch.zeros(0, piece.columns), None))
            with torch.no_grad():
                memory = weight.detach()[:, : piece.columns]
                weight.detach().zero_()
                if fill is not None and piece.numbers:
                    fill(index, piece, memory)
            pieces.append(nn.Parameter(memory, requires_grad=trained))
            if state is not None:
                self.sums[index] = state
        self.pieces = nn.ParameterList(pieces)
        self._keys = [str(slot) for slot in range(len(slots))]
        self._order: Tensor | None = None
        self._lr = (None, 0.0)  # type: tuple[weakref.ref[Optimizer] | None, float]
        if not kernel.fused:
            self._hand_on_gradients(trained=trained)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the sums of the bags' rows, `(B, S, D)`; ids and lengths come slot after slot."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        if torch.is_grad_enabled():
            self._set_lr()
        ids = KeyedJaggedTensor(keys=self._keys, values=values.long(), lengths=lengths)
        found = self._bags[0](ids).wait()
        if self._order is None:
            places = [found.keys().index(key) for key in self._keys]
            self._order = torch.tensor(places, device=values.device)
        batch = lengths.numel() // self.num_slots
        rows = found.values().view(batch, self.num_slots, -1)[..., : self.width]
        in_order = self._order.tolist() == list(range(self.num_slots))
        ordered: Tensor = rows if in_order else rows.index_select(1, self._order)
        return ordered

    def rectangles(self, rank: int) -> list[Rectangle]:
        """Return which part of the plain weight each piece is, in a process."""
        firsts = [0, *accumulate(self.sizes)]
        placed = [placement.piece_of(rank) for placement in self.placements]
        return [
            Rectangle(
                self.weight,
                (firsts[-1], self.width),
                first + piece.first_row,
                piece.rows,
                piece.first_column,
                piece.columns,
            )
            for first, piece in zip(firsts, placed, strict=False)
        ]

    def one_each(self, ids: Tensor) -> Tensor:
        """Return one row per id, `(B, S)` to `(B, S, D)`."""
        lengths = torch.ones(ids.numel(), dtype=torch.int64, device=ids.device)
        rows: Tensor = self(ids.t().reshape(-1), lengths)
        return rows

    def follow(self, optimizer: Optimizer) -> None:
        """Take the learning rate from an optimizer that holds the pieces, and keep the state of the kernel in it."""
        if not self.kernel.fused:
            return
        self._lr = (weakref.ref(optimizer), -1.0)
        for index, total in self.sums.items():
            optimizer.state[self.pieces[index]] = {"sum": total}

        def put_back(changed: Optimizer) -> None:
            for index, total in self.sums.items():
                state = changed.state[self.pieces[index]]
                if "sum" in state and state["sum"] is not total:
                    total.copy_(state["sum"])
                state["sum"] = total

        optimizer.register_load_state_dict_post_hook(put_back)

    def _set_lr(self) -> None:
        """Give the kernel the optimizer's learning rate where that has changed."""
        reference, last = self._lr
        optimizer = None if reference is None else reference()
        if optimizer is None:
            return
        mine = {id(piece) for piece in self.pieces}
        lr = next(
            float(group["lr"])
            for group in optimizer.param_groups
            if any(id(parameter) in mine for parameter in group["params"])
        )
        if lr != last:
            for kernel in _kernels(self._bags[0]):
                kernel.emb_module.set_learning_rate(lr * self.kernel.ratio(self.width))
            self._lr = (reference, lr)

    def _hand_on_gradients(self, *, trained: bool) -> None:
        """Let the gradient of TorchRec's joined weight arrive at the pieces, which are its parts."""
        by_name = {str(index): self.pieces[index] for index in range(len(self.pieces))}
        for kernel in _kernels(self._bags[0]):
            joined = kernel.emb_module.weights
            joined.requires_grad_(trained)
            if trained:
                names = [table.name for table in kernel._config.embedding_tables]  # noqa: SLF001  # it has no other
                parts = [by_name[name] for name in names]
                joined.register_post_accumulate_grad_hook(_hand_on(parts))


def _hand_on(parts: Sequence[nn.Parameter]) -> Callable[[Tensor], None]:
    def hand_on(joined: Tensor) -> None:
        assert joined.grad is not None
        start = 0
        for part in parts:
            own = joined.grad[start : start + part.numel()].view(part.shape)
            part.grad = own if part.grad is None else part.grad + own
            start += part.numel()
        joined.grad = None

    return hand_on


def _kernels(bags: Any) -> Iterator[Any]:
    """Return TorchRec's kernels in this process: each holds pieces of several tables."""
    for lookup in bags._lookups:  # noqa: SLF001  # TorchRec has no public way to a process's own weights without its planner
        yield from lookup._emb_modules  # noqa: SLF001  # as above


def _local_weights(bags: Any) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
    """Yield the memory of each table's piece in this process, and of its optimizer state."""
    for kernel in _kernels(bags):
        tables = kernel._config.embedding_tables  # noqa: SLF001  # as above
        is_fused = hasattr(kernel.emb_module, "split_optimizer_states")
        owner = kernel.emb_module if is_fused else kernel
        weights = owner.split_embedding_weights()
        states = kernel.emb_module.split_optimizer_states() if is_fused else []
        for place, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            state = states[place][0] if place < len(states) and states[place] else None
            yield table.name, (weight, state)


def _sharded_bags(tables: Sequence[Placement], slots: Sequence[int], kernel: Kernel) -> Any:
    require_torchrec()
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import (
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingEnv,
        ShardMetadata,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    width = kernel.padded(tables[0].table.width)
    configs = [
        EmbeddingBagConfig(
            name=str(index),
            num_embeddings=placement.table.rows,
            embedding_dim=width,
            feature_names=[str(slot) for slot, read in enumerate(slots) if read == index],
            pooling=PoolingType.SUM,
        )
        for index, placement in enumerate(tables)
    ]
    device = _device()

    def sharding(placement: Placement) -> Any:
        real = placement.table.width
        shards = [
            ShardMetadata(
                shard_offsets=[piece.first_row, piece.first_column],
                shard_sizes=[
                    piece.rows,
                    # the last piece holds the columns of zeros, too
                    piece.columns
                    + (width - real if piece.first_column + piece.columns == real else 0),
                ],
                placement=f"rank:{piece.rank}/{device}",
            )
            for piece in placement.pieces
        ]
        return ParameterSharding(
            sharding_type=f"{placement.kind}_wise",
            compute_kernel="fused" if kernel.fused else "dense",
            ranks=[piece.rank for piece in placement.pieces],
            sharding_spec=EnumerableShardingSpec(shards),
        )

    kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    options = None
    if kernel.fused:
        ratio = kernel.ratio(tables[0].table.width)
        options = {"optimizer": kinds[kernel.kind], "learning_rate": 0.0, "eps": FUSED_EPS * ratio}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRec's own, about names that torch has deprecated
        return EmbeddingBagCollectionSharder(fused_params=options).shard(
            EmbeddingBagCollection(device=torch.device("meta"), tables=configs),
            {str(index): sharding(placement) for index, placement in enumerate(tables)},
            ShardingEnv.from_process_group(dist.group.WORLD),
            device,
        )


def _device() -> torch.device:
    """Return the device of this process: its GPU with NCCL, the CPU otherwise."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def require_torchrec() -> None:
    """Raise where TorchRec is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that torch has deprecated
        for package in ("fbgemm_gpu", "torchrec"):
            import_extra(package, "torchrec", "a table over several processes")


class ShardedStack(Stack):
    """A plain stack whose tables are spread over processes."""

    def __init__(self, stack: PlainStack, rows: ShardedRows) -> None:
        super().__init__(stack.lengths)
        self.sizes, self.padding = stack.sizes, stack.padding
        self.sharded = rows
        self.method = getattr(stack, "method", None)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows, from the processes that hold them."""
        found = self.sharded.one_each(ids.reshape(-1, ids.shape[-1]))
        return found.view(*ids.shape, -1)

    def split(self) -> list[AnyTable]:
        """Return the tables one by one, with the weights that this process holds."""
        placed = zip(
            self.sizes, self.sharded.pieces, self.sharded.placed, self.padding, strict=True
        )
        tables: list[AnyTable] = [
            TablePiece(
                size, self.sharded.width, weight, first_row=piece.first_row, padding_idx=padding
            )
            for size, weight, piece, padding in placed
        ]
        return tables if self.method is None else [self.method.wrap(table) for table in tables]


class ShardedTable(TablePiece):
    """An `nn.Embedding` whose rows are spread over processes. All must look up as many ids as each other."""

    def __init__(self, table: nn.Embedding, rows: ShardedRows) -> None:
        super().__init__(
            table.num_embeddings,
            table.embedding_dim,
            rows.pieces[0],
            first_row=rows.placed[0].first_row,
            padding_idx=table.padding_idx,
        )
        self._sharded = [rows]  # its only parameter is this one's weight

    @property
    def sharded(self) -> ShardedRows:
        """The lookup."""
        return self._sharded[0]

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Return the rows, from the processes that hold them."""
        found = self.sharded.one_each(input.reshape(-1, 1))
        if self.padding_idx is not None:  # which gets no gradient, as in torch
            found = torch.where(
                (input == self.padding_idx).reshape(-1, 1, 1), found.detach(), found
            )
        return found.view(*input.shape, -1)


class ShardedBag(nn.Module):
    """An `nn.EmbeddingBag` whose rows are spread over processes. All must have as many bags as each other."""

    def __init__(self, bag: nn.EmbeddingBag, rows: ShardedRows) -> None:
        super().__init__()
        self.mode, self.include_last_offset = bag.mode, bag.include_last_offset
        self.num_embeddings, self.embedding_dim = bag.num_embeddings, bag.embedding_dim
        self.sharded = rows

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:  # torch's name
        """Return the sum or mean of each bag's rows."""
        if input.dim() == 2:
            lengths = torch.full((len(input),), input.shape[1], device=input.device)
        else:
            require(offsets is not None, "ids of one dimension need offsets, as in nn.EmbeddingBag")
            assert offsets is not None
            ends = offsets.new_tensor([input.numel()])
            bounds = offsets if self.include_last_offset else torch.cat([offsets, ends])
            lengths = bounds.diff()
        sums: Tensor = self.sharded(input.reshape(-1), lengths.long()).squeeze(1)
        return sums / lengths.clamp(min=1).unsqueeze(1) if self.mode == "mean" else sums


def shard(
    model: nn.Module,
    plan: PlanSpec = "auto",
    *,
    optimizer: str = "sgd",
    fused: bool | None = None,
    say: Callable[[str], object] | None = None,
) -> nn.Module:
    """Spread the tables of a model over the processes of `torchrun`, in place; the rest stays in every process.

    Call it after `apply_` and before `rb.optimizer(model, tables="rowwise", kind=optimizer)`, with `torch.distributed`
    initialised. `plan` is "auto", "table", "row" or "column", or the kind for each table by its name. With SGD and Adagrad
    rows are updated by FBGEMM's fused kernels in the backward; Adam, and `fused=False`, keep a gradient of each piece.
    Every process must look up as many rows as the others in each step.
    """
    require(
        dist.is_available() and dist.is_initialized(),
        "shard needs the processes to know each other: start them with torchrun, and call "
        "torch.distributed.init_process_group first",
    )
    kernel = _kernel(optimizer, fused=fused)
    require_torchrec()
    found = _plain_modules(model)
    sizes = [size for each in found for size in each.sizes]
    if not sizes:
        raise UnsupportedTableError("the model has no table to shard")
    made = make_plan(sizes, dist.get_world_size(), plan, whole_rows=kernel.kind == "adagrad")
    if say is not None:
        say(made.explain())
    placements = iter(made.placements)
    for each in found:
        own = [next(placements) for _ in each.sizes]
        _exchange(model, each, own, kernel)
    # DistributedDataParallel then leaves the pieces alone
    model._ddp_params_and_buffers_to_ignore = list(pieces_of(model))  # type: ignore[assignment]  # noqa: SLF001  # torch's name for it
    return model


def _kernel(kind: str, *, fused: bool | None) -> Kernel:
    kinds = ("sgd", "adagrad", "adam")
    if kind not in kinds:
        raise SettingsError(f"unknown optimizer {kind!r}; choose one of {', '.join(kinds)}")
    can_fuse = kind in ("sgd", "adagrad")
    if fused and not can_fuse:
        raise OptimizerError(
            "FBGEMM has no fused Adam on the CPU; train the tables with SGD or Adagrad, or with tables='dense'"
        )
    return Kernel(kind, fused=can_fuse if fused is None else fused)


class _Found(NamedTuple):
    """A plain module of tables in a model."""

    path: str
    module: PlainStack | nn.Embedding | nn.EmbeddingBag
    sizes: tuple[TableSize, ...]


def _plain_modules(model: nn.Module) -> list[_Found]:
    names = _field_names(model)
    found: list[_Found] = []
    inside: set[int] = set()
    counted: dict[int, str] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            other = counted.setdefault(id(parameter), path)
            if other != path and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise UnsupportedTableError(
                    f"{path!r} shares its weight with {other!r}, which cannot be spread over processes; untie them first"
                )
        if isinstance(module, PlainStack):
            inside.add(id(module.embedding))
            fields = names.get(path) or [f"{path}.{index}" for index in range(len(module.sizes))]
            width = module.embedding.embedding_dim
            sizes = [
                TableSize(name, rows, width, length)
                for name, rows, length in zip(fields, module.sizes, module.lengths, strict=True)
            ]
            found.append(_Found(path, module, tuple(sizes)))
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module) not in inside:
            if isinstance(module, TablePiece):
                raise UnsupportedTableError("the model is spread over processes already")
            if (
                module.max_norm is not None
                or module.scale_grad_by_freq
                or getattr(module, "mode", "") == "max"
            ):
                raise UnsupportedTableError(
                    f"TorchRec has no max_norm, scale_grad_by_freq or mode='max', which {path!r} uses"
                )
            size = TableSize(path, module.num_embeddings, module.embedding_dim)
            found.append(_Found(path, module, (size,)))
    return found


def _field_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the tables in each plain stack of a collection, by the stack's path."""
    found: dict[str, list[str]] = {}
    for place, collection in model.named_modules():
        if not isinstance(collection, TableCollection):
            continue
        for index, (members, stack) in enumerate(
            zip(collection.members, collection.stacks, strict=True)
        ):
            fields = [table_name(place, collection.fields[member].name) for member in members]
            plain = [
                (path, inner)
                for path, inner in stack.named_modules()
                if isinstance(inner, PlainStack)
            ]
            for number, (path, inner) in enumerate(plain):
                if len(inner.sizes) == len(fields):
                    full = ".".join(filter(None, (place, "stacks", str(index), path)))
                    found[full] = [f"{field}:{path}" if number else field for field in fields]
    return found


def _exchange(model: nn.Module, found: _Found, placed: Sequence[Placement], kernel: Kernel) -> None:
    module = found.module
    table = module.embedding if isinstance(module, PlainStack) else module
    slots = module.field_of_slot.tolist() if isinstance(module, PlainStack) else [0]
    firsts = [0, *accumulate(size.rows for size in found.sizes)]

    def fill(index: int, piece: Piece, memory: Tensor) -> None:
        first = firsts[index] + piece.first_row
        columns = slice(piece.first_column, piece.first_column + piece.columns)
        memory.copy_(table.weight.detach()[first : first + piece.rows, columns])

    trained = is_trainable(table)
    own = kernel if trained else Kernel("adam", fused=False)
    rows = ShardedRows(placed, slots, own, trained=trained, fill=fill)
    name = "embedding.weight" if isinstance(module, PlainStack) else "weight"
    rows.weight = f"{found.path}.{name}" if found.path else name
    new: nn.Module
    if isinstance(module, PlainStack):
        new = ShardedStack(module, rows)
    elif isinstance(module, nn.EmbeddingBag):
        new = ShardedBag(module, rows)
    else:
        new = ShardedTable(module, rows)
    if not found.path:
        raise UnsupportedTableError(
            "the model is a table itself; put it into a module, such as nn.Sequential"
        )
    parent, _, attribute = found.path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new.train(module.training))


def sharded_rows(model: nn.Module) -> Iterator[tuple[str, ShardedRows]]:
    """Yield every spread lookup of a model with the path of what holds it."""
    for path, module in model.named_modules():
        if isinstance(module, ShardedTable | ShardedStack | ShardedBag):
            yield path, module.sharded


def pieces_of(model: nn.Module, rank: int | None = None) -> dict[str, Rectangle]:
    """Return which parameters of a model are pieces, and of what; in this process, or in another."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    rank = dist.get_rank() if rank is None else rank
    return {
        named[id(parameter)]: place
        for _, rows in sharded_rows(model)
        for parameter, place in zip(rows.pieces, rows.rectangles(rank), strict=True)
    }


def is_spread(model: nn.Module) -> bool:
    """Return whether the tables of a model are spread over processes."""
    return next(sharded_rows(model), None) is not None


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of parameters that every process holds by their mean over the processes."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    parts = joined.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
    )


def follow(model: nn.Module, optimizer: Optimizer) -> None:
    """Let an optimizer train a model that is spread over processes: average its other gradients, lead its kernels."""
    spread = [rows for _, rows in sharded_rows(model)]
    if not spread:
        return
    fused = {id(piece) for rows in spread for piece in rows.pieces if rows.kernel.fused}
    for group in optimizer.param_groups:
        if any(id(p) in fused for p in group["params"]) and (
            group.get("momentum") or group.get("weight_decay")
        ):
            raise OptimizerError(
                "the fused kernels have no momentum and no weight decay for tables; set both to 0 for the tables, or use "
                "tables='dense'"
            )
    for rows in spread:
        rows.follow(optimizer)
    held = {id(piece) for rows in spread for piece in rows.pieces}
    shared = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
    optimizer.register_step_pre_hook(lambda *_: average_gradients(shared))


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the plain model, in the first process; the others return nothing. All must call it."""
    everywhere = [pieces_of(model, rank) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name not in everywhere[0]:
            if rank == 0:
                found[name] = value
            continue
        whole = everywhere[0][name]
        if rank == 0 and whole.weight not in found:
            found[whole.weight] = value.new_empty(whole.shape)
        for source, at in enumerate(pieces[name] for pieces in everywhere):
            if not at.rows * at.columns:
                continue
            part = value.contiguous() if rank == source else value.new_empty(at.rows, at.columns)
            if source and rank == source:
                dist.send(part, 0)
            elif source and rank == 0:
                dist.recv(part, source)
            if rank == 0:
                rows = slice(at.first_row, at.first_row + at.rows)
                found[at.weight][rows, at.first_column : at.first_column + at.columns] = part
    return found
