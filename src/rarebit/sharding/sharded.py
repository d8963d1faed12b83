"""The tables of a model spread over processes, exchanged by TorchRec (`shard`).

    model ─ TableCollection ─ method's stack ─ ShardedStack ─ ShardedRows ─ TorchRec: ids there, rows back
    model ─ ShardedTable (was nn.Embedding), ShardedBag (was nn.EmbeddingBag)  ┘        └─ LocalRows: our lookup of the pieces

Only plain tables are exchanged, wherever they lie: hashing, factors, thresholds, sets and shrinkage stay above them, in every
process, and see the same rows as in one process. TorchRec sends ids to the processes that hold their rows, and rows back. What a
process holds is an `nn.Embedding` of all its pieces, so gradients by rows, optimizers, averages and counts are those of one
process, the lazy ones too. `pieces_of` says which rectangle of which plain weight a parameter holds.

TorchRec averages the gradients of the rows over the processes. So with W processes, a loss that is the mean over a process's
own rows, and as many rows in each, trains on the mean over all of them; the gradients of all other parameters are to be
averaged, too, by `GradientAverage` or by DistributedDataParallel, which leaves the pieces alone.
"""

import logging
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.errors import (
    MissingExtraError,
    TrainingError,
    UnsupportedTableError,
    import_extra,
)
from rarebit.machine import require_memory
from rarebit.settings import require
from rarebit.sharding.plan import (
    NUMBER_BYTES,
    Piece,
    Placement,
    Plan,
    PlanSpec,
    TableSize,
    make_plan,
)
from rarebit.tables.collection import PlainStack, Stack, TableCollection
from rarebit.tables.table import AnyTable, TablePiece, is_trainable, table_name

Fill = Callable[[int, Piece, Tensor], None]
"""Writes the first weights of a table's piece into its memory."""


class Rectangle(NamedTuple):
    """Rows of a parameter that are a part of a plain weight."""

    weight: str
    """The name of the weight in the plain model."""
    shape: tuple[int, int]
    """The shape of that weight."""
    first_row: int
    rows: int
    first_column: int
    columns: int
    first_here: int = 0
    """The row of the parameter that is the first of them."""

    @property
    def inside(self) -> tuple[slice, slice]:
        """Where it lies in the plain weight."""
        ends = self.first_row + self.rows, self.first_column + self.columns
        return slice(self.first_row, ends[0]), slice(self.first_column, ends[1])


@dataclass(frozen=True, eq=False)
class _Run:
    """Pieces of one width, one under another."""

    embedding: nn.Embedding
    starts: dict[int, int]
    """The first row of each table."""
    first: Tensor
    """The same for each slot, `(S,)`."""

    def look_up(self, features: Any, *, at_most_one: bool) -> Tensor:
        slots, width = len(self.first), self.embedding.embedding_dim
        values = features.values()
        if at_most_one and values.numel() == slots * features.stride():  # so each bag has one
            ids = (values.view(slots, -1).t() + self.first).reshape(-1, 1)
            # a bag of one: on a CPU torch finds rows faster for bags
            rows = F.embedding_bag(
                ids, self.embedding.weight, mode="sum", sparse=self.embedding.sparse
            )
            return rows.view(-1, slots * width)
        counts = torch.tensor(features.length_per_key(), device=self.first.device)
        ids = values + torch.repeat_interleave(self.first, counts)
        sums = F.embedding_bag(
            ids,
            self.embedding.weight,
            features.offsets().to(ids.dtype),
            mode="sum",
            sparse=self.embedding.sparse,
            include_last_offset=True,
        )
        return sums.view(slots, -1, width).transpose(0, 1).contiguous().view(-1, slots * width)


class LocalRows(nn.Module):
    """The pieces of some tables in this process, those of a width one under another, in place of TorchRec's own kernels."""

    def __init__(self, config: Any) -> None:
        """`config` is TorchRec's: the tables, and the slots that read each."""
        super().__init__()
        self.config = config
        self.runs: list[_Run] = []
        """Neighbouring tables of one width."""
        self.at_most_one = False
        """Whether no bag of the next lookup has several ids."""
        for width, run in groupby(config.embedding_tables, key=lambda table: table.local_cols):
            tables = [*run]
            starts = [0, *accumulate(table.local_rows for table in tables)]
            memory = torch.empty(starts[-1], width, device=device_of_process())
            slots = [len(table.feature_names) for table in tables]
            first = torch.repeat_interleave(torch.tensor(starts[:-1]), torch.tensor(slots))
            embedding: nn.Embedding = nn.Embedding.from_pretrained(memory, freeze=False)
            names = {int(table.name): start for table, start in zip(tables, starts, strict=False)}
            self.runs.append(_Run(embedding, names, first.to(memory.device)))

    def forward(self, features: Any) -> Tensor:
        """Return the sums of the rows of each bag, `(B, S * D)`; ids and lengths come slot after slot."""
        if len(self.runs) == 1:
            return self.runs[0].look_up(features, at_most_one=self.at_most_one)
        parts = features.split([len(run.first) for run in self.runs])
        found = [
            run.look_up(part, at_most_one=self.at_most_one)
            for run, part in zip(self.runs, parts, strict=True)
        ]
        return torch.cat(found, dim=1)


@dataclass
class _Sent:
    """Ids on their way to the processes with their rows."""

    context: Any
    """What TorchRec notes of it."""
    coming: Any
    """The lookups that this process makes for all: first to be waited for is how many, then which."""
    at_most_one: bool
    """Whether no bag has several ids."""
    waits: int = 2

    def wait(self, left: int = 0) -> Any:
        """Wait until so many waits are left; return the lookups if none is."""
        while self.waits > left:
            self.coming, self.waits = self.coming.wait(), self.waits - 1
        return self.coming


class _Exchange:
    """The last ids that went to the processes with their rows, for tables that look the same ids up in the same places.

    A model looks its ids up in tables of several widths, such as embeddings and first-order weights. The ids travel once, and the
    rows of tables that asked for the same ids in the step before set out together with those of the first.
    """

    def __init__(self) -> None:
        self.sender: ShardedRows | None = None
        """Which tables sent the ids."""
        self.ids: tuple[Tensor, int] | None = None
        """The ids, and how often they had been written to by then."""
        self.sent: _Sent | None = None
        self.early: tuple[Tensor, int, _Sent] | None = None
        """Ids that set out before they were asked for, and how often they had been written to."""
        self.followers: dict[ShardedRows, None] = {}
        """Tables that asked for ids which others had sent, in that order."""
        self.coming: dict[ShardedRows, tuple[Any, tuple[int, ...]]] = {}
        """Rows of followers on their way, with what they depend on."""

    def rows(self, asked: "ShardedRows", ids: Tensor) -> Any:
        """Return the rows of one table's ids `(B, S)`, as TorchRec has them."""
        if not _is_same(self.ids, ids):
            is_early, early = _is_same(self.early, ids), self.early
            self.sender, self.ids, self.early = asked, (ids, ids._version), None  # noqa: SLF001  # it has no other name
            self.sent = early[2] if is_early and early is not None else asked.send(ids)
        assert self.sent is not None
        if asked is not self.sender:
            self.followers[asked] = None
            rows, state = self.coming.pop(asked, (None, ()))
            return asked.request(self.sent) if state != asked.state else rows
        for unwanted in self.coming:
            del self.followers[unwanted]
        rows = asked.request(self.sent)
        self.coming = {
            each: (each.request(self.sent), each.state)
            for each in self.followers
            if each is not asked
        }
        return rows

    def send_early(self, ids: Tensor, last: Tensor) -> None:
        """Let the ids of the next batch set out, where those of the `last` one were asked for as they are."""
        if self.sender is not None and _is_same(self.ids, last):
            self.early = (ids, ids._version, self.sender.send(ids))  # noqa: SLF001  # it has no other name

    def send_on(self) -> None:
        """Let early ids go on, of which all processes know by now how many there are."""
        if self.early is not None:
            self.early[2].wait(left=1)


def _is_same(known: tuple[Any, ...] | None, ids: Tensor) -> bool:
    """Return whether ids are those that are known, and were not written to since."""
    return known is not None and known[0] is ids and known[1] == ids._version  # noqa: SLF001  # it has no other name


class ShardedRows(nn.Module):
    """Tables of one width, spread over processes: ids of S slots to rows `(B, S, D)`."""

    def __init__(
        self,
        tables: Sequence[Placement],
        slots: Sequence[int],
        *,
        weight: str,
        trained: bool,
        fill: Fill,
        exchange: _Exchange,
    ) -> None:
        """`slots` says for each slot which table it reads; `weight` is the plain weight that has all tables, one under another.

        `exchange` is common to all with the same slots, and tables in the same places.
        """
        super().__init__()
        self.weight, self.placements, self.width = weight, tuple(tables), tables[0].table.width
        self.trained = trained
        self.placed = [placement.piece_of(dist.get_rank()) for placement in tables]
        # a list: TorchRec's module has names of its own, and would be in ours
        self._bags = [_sharded_bags(tables, slots)]
        self._kernels: tuple[LocalRows, ...] = tuple(
            kernel
            for lookup in self._bags[0]._lookups  # noqa: SLF001  # it has no other name
            for kernel in lookup._emb_modules  # noqa: SLF001  # it has no other name
        )
        runs = [run for kernel in self._kernels for run in kernel.runs]
        self.pieces = nn.ModuleList(run.embedding for run in runs)
        self.homes: dict[int, tuple[nn.Embedding, int]] = {}
        """For each table with a piece here, what holds it, and the first row there."""
        for run in runs:
            run.embedding.weight.requires_grad_(trained)
            for table, first in run.starts.items():
                piece, self.homes[table] = self.placed[table], (run.embedding, first)
                fill(table, piece, run.embedding.weight.detach()[first : first + piece.rows])
        self._slot_of = {table: slots.index(table) for table in set(slots)}
        self._keys = [str(slot) for slot in range(len(slots))]
        self.exchange = exchange
        self._order: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the sums of the bags' rows, `(B, S, D)`; ids and lengths come slot after slot."""
        return self._arranged(self.request(self._send(values, lengths, at_most_one=False)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def one_each(self, ids: Tensor) -> Tensor:
        """Return one row per id, `(..., S)` to `(..., S, D)`."""
        return self._arranged(self.exchange.rows(self, ids)).view(*ids.shape, -1)

    def send(self, ids: Tensor) -> _Sent:
        """Let ids `(..., S)` set out to the processes that hold their rows; return what `request` needs."""
        slots = ids.reshape(-1, ids.shape[-1]).t()
        return self._send(slots.reshape(-1), ids.new_ones(ids.numel()).int(), at_most_one=True)

    def _send(self, values: Tensor, lengths: Tensor, *, at_most_one: bool) -> _Sent:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        context = self._bags[0].create_context()
        ids = KeyedJaggedTensor(keys=self._keys, values=values, lengths=lengths)
        return _Sent(context, self._bags[0].input_dist(context, ids), at_most_one)

    def request(self, sent: _Sent) -> Any:
        """Look up what all processes asked for, and let the rows set out; to be waited for."""
        for kernel in self._kernels:
            kernel.at_most_one = sent.at_most_one
        return self._bags[0].compute_and_output_dist(sent.context, sent.wait())

    def _arranged(self, coming: Any) -> Tensor:
        found = coming.wait()
        if self._order is None:
            values, keys = found.values(), found.keys()
            self._order = torch.tensor(
                [keys.index(key) for key in self._keys], device=values.device
            )
        rows: Tensor = found.values().view(-1, len(self._keys), self.width)
        return rows.index_select(1, self._order)

    @property
    def state(self) -> tuple[int, ...]:
        """What rows depend on besides their ids: whether gradients are wanted, and how often weights changed."""
        weights = [piece.weight._version for piece in self.pieces]  # noqa: SLF001  # it has no other name
        return (int(torch.is_grad_enabled()), *weights)

    def rows_of(self, table: int, ids: Tensor) -> Tensor:
        """Return rows of one table, `(n,)` to `(n, D)`, where all processes ask for the same."""
        if table not in self._slot_of:
            raise UnsupportedTableError(
                f"no slot reads the table {self.placements[table].table.name!r}, so its rows are nowhere to look up"
            )
        slot = self._slot_of[table]
        lengths = torch.zeros(len(self._keys), ids.numel(), dtype=torch.int32, device=ids.device)
        lengths[slot] = 1
        rows: Tensor = self(ids.reshape(-1), lengths.reshape(-1))
        return rows[:, slot]

    def pieces_of(self) -> Iterator[tuple[Tensor, Rectangle]]:
        """Yield the parameters with the rectangles of the plain weight that they hold."""
        for place, rectangle in self.rectangles(dist.get_rank()).items():
            embedding, first = self.homes[place]
            yield embedding.weight, rectangle._replace(first_here=first)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the plain weight."""
        return sum(placement.table.rows for placement in self.placements), self.width

    def rectangles(self, rank: int) -> dict[int, Rectangle]:
        """Return which rectangle of the plain weight a process holds of each table."""
        firsts = [0, *accumulate(placement.table.rows for placement in self.placements)]
        found = {}
        for place, (first, placement) in enumerate(zip(firsts, self.placements, strict=False)):
            _, first_row, rows, first_column, columns = placement.piece_of(rank)
            if rows * columns:
                at = (first + first_row, rows, first_column, columns)
                found[place] = Rectangle(self.weight, self.shape, *at)
        return found

    def split(self, padding: Sequence[int | None]) -> list[TablePiece]:
        """Return the tables one by one, with the weights that this process holds."""
        tables: list[TablePiece] = []
        for place, (placement, piece) in enumerate(zip(self.placements, self.placed, strict=True)):
            if place in self.homes:
                home, first = self.homes[place]
                weight, trained = home.weight[first : first + piece.rows], is_trainable(home)
            else:
                weight, trained = torch.empty(0, self.width, device=device_of_process()), True
            tables.append(
                TablePiece(
                    placement.table.rows,
                    self.width,
                    nn.Parameter(weight.detach(), requires_grad=trained),
                    first_row=piece.first_row,
                    padding_idx=padding[place],
                    sparse=any(home.sparse for home, _ in self.homes.values()),
                    look_up=partial(self.rows_of, place),
                )
            )
        return tables


def _sharded_bags(tables: Sequence[Placement], slots: Sequence[int]) -> Any:
    require_torchrec()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import (
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingEnv,
        ShardMetadata,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=str(place),
            num_embeddings=placement.table.rows,
            embedding_dim=placement.table.width,
            feature_names=[str(slot) for slot, read in enumerate(slots) if read == place],
            pooling=PoolingType.SUM,
        )
        for place, placement in enumerate(tables)
    ]
    device = device_of_process()

    def sharding(placement: Placement) -> Any:
        shards = [
            ShardMetadata(
                shard_offsets=[piece.first_row, piece.first_column],
                shard_sizes=[piece.rows, piece.columns],
                placement=f"rank:{piece.rank}/{device}",
            )
            for piece in placement.pieces
        ]
        return ParameterSharding(
            sharding_type=f"{placement.kind}_wise",
            compute_kernel="dense",
            ranks=[piece.rank for piece in placement.pieces],
            sharding_spec=EnumerableShardingSpec(shards),
        )

    plan = {str(place): sharding(placement) for place, placement in enumerate(tables)}
    with _own_kernels():
        return EmbeddingBagCollectionSharder().shard(
            EmbeddingBagCollection(device=torch.device("meta"), tables=configs),
            plan,
            ShardingEnv.from_process_group(dist.group.WORLD),
            device,
        )


@contextmanager
def _own_kernels() -> Iterator[None]:
    """Let TorchRec look rows up by `LocalRows` in place of a kernel with weights and optimizers of its own."""
    from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    ours: dict[tuple[type, str], Any] = {
        # where its subclasses would choose a kernel
        (GroupedPooledEmbeddingsLookup, "_create_embedding_kernel"): (
            lambda _, config, *__: LocalRows(config)
        ),
        # it would describe weights that it does not hold
        (ShardedEmbeddingBagCollection, "_initialize_torch_state"): lambda *_: None,
    }
    theirs = {place: getattr(*place) for place in ours}
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of caches that the plan does not ask for
    try:
        for place, function in ours.items():
            setattr(*place, function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names that torch has deprecated
            yield
    finally:
        for place, function in theirs.items():
            setattr(*place, function)
        logger.setLevel(level)


def device_of_process() -> torch.device:
    """Return the device of this process: its GPU with NCCL, the CPU otherwise."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def require_torchrec() -> None:
    """Raise where TorchRec is not installed."""
    has_wheels = sys.platform == "linux" and platform.machine() == "x86_64"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that torch has deprecated
        for package in ("fbgemm_gpu", "torchrec"):
            try:
                import_extra(package, "torchrec", "a table over several processes")
            except MissingExtraError as error:
                then = (
                    ", and then: pip install --no-deps torchrec==1.8.0"
                    if has_wheels
                    else "; its wheels are for Linux on x86-64: elsewhere train in one process, or copies of the model with "
                    "DistributedDataParallel"
                )
                raise TrainingError(f"{error}{then}") from error
    # in its steps it uses names that torch has deprecated, and says so in every process
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class ShardedStack(Stack):
    """A plain stack whose tables are spread over processes."""

    def __init__(self, stack: PlainStack, rows: ShardedRows) -> None:
        super().__init__(stack.lengths)
        self.sizes, self.padding = stack.sizes, stack.padding
        self.sharded = rows
        self.process_group = dist.group.WORLD

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows, from the processes that hold them."""
        found: Tensor = self.sharded.one_each(ids)
        return found

    def split(self) -> list[AnyTable]:
        """Return the tables one by one, with the weights that this process holds."""
        return [*self.sharded.split(self.padding)]


class ShardedTable(TablePiece):
    """An `nn.Embedding` whose rows are spread over processes. All must look up as many ids as each other."""

    def __init__(self, table: nn.Embedding, rows: ShardedRows) -> None:
        [own] = rows.split([table.padding_idx])
        super().__init__(
            table.num_embeddings,
            table.embedding_dim,
            None,
            look_up=own.look_up,
            first_row=own.first_row,
            padding_idx=table.padding_idx,
        )
        self.sharded = rows
        self.process_group = dist.group.WORLD

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # its own parameter is that of the piece
        """The piece of this process."""
        [own] = self.sharded.split([self.padding_idx])
        return self.sharded.homes[0][0].weight if self.sharded.homes else own.weight

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Return the rows, from the processes that hold them."""
        found: Tensor = self.sharded.one_each(input.reshape(-1, 1))
        if self.padding_idx is not None:  # which gets no gradient, as in torch
            is_padding = (input == self.padding_idx).reshape(-1, 1, 1)
            found = torch.where(is_padding, found.detach(), found)
        return found.view(*input.shape, -1)


class ShardedBag(nn.Module):
    """An `nn.EmbeddingBag` whose rows are spread over processes. All must have as many bags as each other."""

    def __init__(self, bag: nn.EmbeddingBag, rows: ShardedRows) -> None:
        super().__init__()
        self.mode, self.include_last_offset = bag.mode, bag.include_last_offset
        self.num_embeddings, self.embedding_dim = bag.num_embeddings, bag.embedding_dim
        self.sharded = rows

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the sum or mean of each bag's rows."""
        require(
            per_sample_weights is None,
            "a bag whose rows are spread over processes has no weights for single rows; look them up by an nn.Embedding",
        )
        if input.dim() == 2:
            lengths = torch.full((len(input),), input.shape[1], device=input.device)
        else:
            require(offsets is not None, "ids of one dimension need offsets, as in nn.EmbeddingBag")
            assert offsets is not None
            ends = offsets.new_tensor([input.numel()])
            bounds = offsets if self.include_last_offset else torch.cat([offsets, ends])
            lengths = bounds.diff()
        sums: Tensor = self.sharded(input.reshape(-1), lengths.int()).squeeze(1)
        return sums / lengths.clamp(min=1).unsqueeze(1) if self.mode == "mean" else sums


def shard(
    model: nn.Module,
    plan: PlanSpec = "auto",
    *,
    whole_rows: bool = False,
    batch_size: int | None = None,
    say: Callable[[str], object] | None = None,
) -> nn.Module:
    """Spread the tables of a model over the processes of `torchrun`, in place; the rest stays in every process.

    Call it after `apply_` and before the optimizer is made, with `torch.distributed` initialised. `plan` is "auto", "table",
    "row" or "column", or the kind for each table by its name; `say` gets the plan in words. Every process must look up as
    many rows as the others in each step, `batch_size` together. `whole_rows` is for optimizers that keep one number per row, as row-wise Adagrad does.
    Wrap the model in DistributedDataParallel for a loop of your own.

    >>> shard(nn.Sequential(nn.Embedding(1_000_000, 16)))
    Traceback (most recent call last):
    rarebit.errors.SettingsError: shard needs the processes to know each other: start them with torchrun, and call ...
    """
    require(
        dist.is_available() and dist.is_initialized(),
        "shard needs the processes to know each other: start them with torchrun, and call "
        "torch.distributed.init_process_group first",
    )
    require_torchrec()
    found = _plain_modules(model)
    made = plan_tables(model, dist.get_world_size(), plan, whole_rows=whole_rows)
    if say is not None:
        say(made.explain(batch_size))
    own = NUMBER_BYTES * made.numbers(dist.get_rank())
    require_memory(
        own, "this process's part of the tables", "use more processes", device_of_process()
    )
    placements = iter(made.placements)
    exchanges: list[tuple[_Found, list[Placement], _Exchange]] = []
    for each in found:
        placed = [next(placements) for _ in each.sizes]
        common = [
            exchange
            for other, at, exchange in exchanges
            if each.slots == other.slots and all(map(Placement.gets_ids_with, placed, at))
        ]
        exchange = common[0] if common else _Exchange()
        exchanges.append((each, placed, exchange))
        _spread(model, each, placed, exchange)
    names = [name for name, _ in pieces_of(model)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # noqa: SLF001  # the only way it has
    return model


def plan_tables(
    model: nn.Module, world: int, plan: PlanSpec = "auto", *, whole_rows: bool = False
) -> Plan:
    """Return where `shard` would put the tables of a model."""
    sizes = [size for each in _plain_modules(model) for size in each.sizes]
    if not sizes:
        raise UnsupportedTableError("the model has no table to shard")
    return make_plan(sizes, world, plan, whole_rows=whole_rows)


class _Found(NamedTuple):
    """A plain module of tables in a model."""

    path: str
    module: PlainStack | nn.Embedding | nn.EmbeddingBag
    sizes: tuple[TableSize, ...]

    @property
    def slots(self) -> list[int]:
        """For each slot, which of its tables it reads."""
        if isinstance(self.module, PlainStack):
            return [int(table) for table in self.module.field_of_slot]
        return [0]


def _plain_modules(model: nn.Module) -> list[_Found]:
    names = _field_names(model)
    found: list[_Found] = []
    inside: set[int] = set()
    leaders: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    counted: dict[int, str] = {}
    if is_spread(model):
        raise UnsupportedTableError("the model is spread over processes already")
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
            # tables of the same fields in another width, such as first-order weights
            shape = (module.sizes, module.lengths)
            besides = leaders.setdefault(shape, fields)
            sizes = [
                TableSize(name, rows, width, length, beside if beside != name else "")
                for name, rows, length, beside in zip(fields, *shape, besides, strict=True)
            ]
            found.append(_Found(path, module, tuple(sizes)))
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module) not in inside:
            mode = getattr(module, "mode", "")
            if module.max_norm is not None or module.scale_grad_by_freq or mode == "max":
                raise UnsupportedTableError(
                    f"TorchRec has no max_norm, scale_grad_by_freq or mode='max', which {path!r} uses"
                )
            if not path:
                raise UnsupportedTableError(
                    "the model is a table itself; put it into a module, such as nn.Sequential"
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


def _spread(
    model: nn.Module, found: _Found, placed: Sequence[Placement], exchange: _Exchange
) -> None:
    module = found.module
    is_stack = isinstance(module, PlainStack)
    table = module.embedding if isinstance(module, PlainStack) else module
    if table.weight.dtype != torch.float32:
        raise UnsupportedTableError(
            f"TorchRec exchanges rows of float32, and those of {found.path!r} are {table.weight.dtype}"
        )
    firsts = [0, *accumulate(size.rows for size in found.sizes)]

    def fill(index: int, piece: Piece, memory: Tensor) -> None:
        if table.weight.is_meta:
            draw = module.draws[index] if isinstance(module, PlainStack) else None
            require(
                draw is not None, f"the table {found.path!r} is on the meta device; draw it first"
            )
            assert draw is not None
            draw.fill_(memory, piece.first_row, piece.first_column)
            return
        first = firsts[index] + piece.first_row
        columns = slice(piece.first_column, piece.first_column + piece.columns)
        memory.copy_(table.weight.detach()[first : first + piece.rows, columns])

    rows = ShardedRows(
        placed,
        found.slots,
        weight=f"{found.path}.embedding.weight" if is_stack else f"{found.path}.weight",
        trained=is_trainable(table),
        fill=fill,
        exchange=exchange,
    )
    new: nn.Module
    if isinstance(module, PlainStack):
        new = ShardedStack(module, rows)
    elif isinstance(module, nn.EmbeddingBag):
        new = ShardedBag(module, rows)
    else:
        new = ShardedTable(module, rows)
    parent, _, attribute = found.path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new.train(module.training))


def sharded_rows(model: nn.Module) -> Iterator[ShardedRows]:
    """Yield every spread lookup of a model."""
    for module in model.modules():
        if isinstance(module, ShardedRows):
            yield module


def is_spread(model: nn.Module) -> bool:
    """Return whether the tables of a model are spread over processes."""
    return next(sharded_rows(model), None) is not None


def pieces_of(model: nn.Module) -> list[tuple[str, Rectangle]]:
    """Return which parameters of a model hold which parts of plain weights, in this process."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (named[id(parameter)], rectangle)
        for rows in sharded_rows(model)
        for parameter, rectangle in rows.pieces_of()
    ]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the plain model by name; those that lie in pieces without numbers, on the meta device."""
    held = {name for name, _ in pieces_of(model)}
    whole = {
        rows.weight: torch.empty(rows.shape, device="meta", requires_grad=rows.trained)
        for rows in sharded_rows(model)
    }
    return {n: p for n, p in model.named_parameters() if n not in held} | whole


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every process holds as a whole."""
    held = {name for name, _ in pieces_of(model)}
    return [parameter for name, parameter in model.named_parameters() if name not in held]


class GradientAverage:
    """The mean over the processes of the gradients of parameters that every process holds.

    It sets out as soon as the last of the gradients that the step before had is there, while the backward through tables goes on.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.expected: list[int] = []
        """The places of the parameters that had a gradient in the step before."""
        self.arrived: list[int] = []
        """The places of gradients of this step, as they came."""
        self.coming: tuple[Any, Tensor] | None = None
        """Their mean on its way, once all that were expected had come."""
        self._hooks: list[Any] = []

    @torch.no_grad()
    def finish(self) -> None:
        """Put the means in place of the gradients, after the backward."""
        had = [place for place, p in enumerate(self.parameters) if p.grad is not None]
        coming, self.coming = self.coming, None
        # a gradient that came later, or again, is not in it
        is_whole = sorted(self.arrived) == self.expected == had
        self.expected, self.arrived = had, []
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._arrive, place))
                for place, parameter in enumerate(self.parameters)
                if parameter.requires_grad
            ]
        if not had:
            return
        work, joined = coming or self._sent()
        work.wait()
        if not is_whole and coming is not None:
            work, joined = self._sent()
            work.wait()
        joined /= dist.get_world_size()
        gradients = [self._gradient(place) for place in had]
        parts = joined.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(
            gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        )

    def close(self) -> None:
        """Let gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrive(self, place: int, _: Tensor) -> None:
        self.arrived.append(place)
        if self.coming is None and sorted(self.arrived) == self.expected:
            self.coming = self._sent()

    def _sent(self) -> tuple[Any, Tensor]:
        joined = torch.cat([self._gradient(place).reshape(-1) for place in self.expected])
        return dist.all_reduce(joined, async_op=True), joined

    def _gradient(self, place: int) -> Tensor:
        gradient = self.parameters[place].grad
        assert gradient is not None
        return gradient
