"""Packed tables: a table with many zeros keeps only its other entries, and is looked up without unpacking.

    e(i)[c] = values[k]    where k is the position of the entry (i, c), and 0 where there is none

    values    (V,)              the entries that are not zero, row by row
    columns   (V,)              the column of each: a byte, or more where rows are wider than 256
              (R, ceil(D / 8))  or a bit for each column of a row that has any, whichever is smaller
    offsets   (R + 1,)          where each row that has any begins among the values
    filled    (ceil(N / 64),)   a bit for each row of the table: whether it has any

    id ─► word of `filled` ─► its bit, and the bits below it + rank directory ─► row ─► offsets ─► run

A run is the part of `values` that belongs to an id; an empty row has an empty run. A lookup lays the runs of its
ids end to end; each entry has a position in `values`, and a place in the rows that are returned. These are the
rows of the dense table, to the last bit.

On the CPU, where nothing is trained, a small C++ kernel (`packed_kernel.cpp`, compiled on first use by
`tables/compiler.py`) writes the same rows in one pass. Without a compiler a warning is logged once, and plain
torch does it, slower. On a GPU a Triton kernel does it (`rows_triton.py`).

The values are one parameter: any optimizer trains a packed table in place, and its zeros have neither gradient
nor state. With 8 bits the values are integers with one scale per table, and frozen.

A packed table can be stored in one safetensors file, with a checksum. It is read into memory: a file that is mapped
and then cut by someone ends the process. Parts that come from elsewhere may hold anything, so `problem_of` reads all of them but the values once,
in chunks. After this check no lookup reads beyond a part, and no two entries share a place.

Shapes: N rows of the table, D its width, R rows that are not empty, V entries that are not zero, U ids,
E entries of their rows.
"""

import ctypes
import functools
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]  # it is, but torch does not say so
from torch.nn import functional as F
from torch.optim import Optimizer

from rarebit.codes import rows_triton
from rarebit.errors import ModelFileError, UnsupportedTableError, import_extra
from rarebit.settings import check_types
from rarebit.storage.files import DISK, spell_tensor, write_file
from rarebit.tables.apply import (
    Site,
    TableChanges,
    Where,
    find_sites,
    put_tables,
    refuse_not_finite,
    refuse_wrapped_model,
    reported,
)
from rarebit.tables.collection import Stack
from rarebit.tables.compiler import is_plain, is_switched_off, load_compiled
from rarebit.tables.table import (
    CHUNK,
    AnyTable,
    Method,
    Table,
    full_table,
    is_trainable,
    methods_of,
    stored_tensors,
    unsuited,
    wrap,
)
from rarebit.technique import Rank

WORD = 64
"""Bits of a word that marks filled rows."""
PAIRS, FOURS, BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
ALL_BYTES = 0x0101010101010101
LANES = 4
"""Parts of a list that are gathered at once: torch gathers one list with one thread."""
LOOKED_UP = 1 << 15
"""Ids that are looked up at once: few enough for the caches."""
CHECKED = 1 << 20
"""Numbers that are checked at once."""
LARGEST_CODE = 127
WIDEST = 1 << 31
KIND = "rarebit packed table 2"
OLDER = "rarebit packed table 1"
"""Files without a checksum."""
MAX_DIGITS = 18
SOURCE = Path(__file__).with_name("packed_kernel.cpp")

_log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """The tensors of a packed table."""

    values: Tensor
    columns: Tensor
    offsets: Tensor
    filled: Tensor

    @property
    def has_bitmaps(self) -> bool:
        """Whether columns are bits, not numbers."""
        return self.columns.dim() == 2


def pack_rows(weight: Tensor) -> Parts:
    """Return the parts of a dense table `(N, D)`, built in chunks of bounded memory."""
    weight, width = weight.detach(), weight.shape[1]
    counts = torch.cat([(chunk != 0).sum(dim=1) for chunk in weight.split(CHUNK)])  # (N,)
    filled = counts > 0
    ends = counts[filled].cumsum(0)
    offsets = F.pad(ends, (1, 0))
    numbers = int(offsets[-1]) * column_type(width).itemsize  # bytes of columns as numbers
    bitmaps = len(ends) * -(-width // 8)  # and as bits
    values, columns = [], []
    for chunk in weight.split(CHUNK):
        kept = chunk != 0
        values.append(chunk[kept])
        if bitmaps < numbers:
            columns.append(pack_bits(kept[kept.any(dim=1)]))
        else:
            columns.append(kept.nonzero()[:, 1].to(column_type(width)))
    words = F.pad(filled, (0, -len(filled) % WORD))
    return Parts(
        torch.cat(values),
        torch.cat(columns),
        offsets.to(offset_type(int(offsets[-1]))),
        pack_bits(words.view(1, -1)).view(-1).view(torch.int64),
    )


def offset_type(last: int) -> torch.dtype:
    """Return the smallest type that holds numbers up to the last offset, which the kernel adds up in 64 bits."""
    return torch.int32 if last <= torch.iinfo(torch.int32).max else torch.int64


def column_type(width: int) -> torch.dtype:
    """Return the smallest type that holds any column number."""
    if width <= 1 << 8:
        return torch.uint8
    return torch.int16 if width <= 1 << 15 else torch.int32


def pack_bits(kept: Tensor) -> Tensor:
    """Return booleans `(R, D)` as bits, `(R, ceil(D / 8))`: the first column is the lowest bit."""
    padded = F.pad(kept, (0, -kept.shape[1] % 8)).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=kept.device)
    bits = padded.view(len(kept), padded.shape[1] // 8, 8) << shifts  # (R, ceil(D / 8), 8)
    return bits.sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Return bits `(R, C)` as booleans `(R, 8 C)`."""
    # the eight booleans of a byte are one number of eight bytes, found by one lookup
    numbers = torch.arange(256, dtype=torch.uint8, device=bits.device).unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights = ((numbers >> shifts) & 1).view(torch.int64).view(-1)  # (256,)
    spread = eights.index_select(0, bits.reshape(-1).int()).view(torch.bool)
    return spread.view(bits.shape[0], 8 * bits.shape[1])


def count_bits(words: Tensor) -> Tensor:
    """Return the number of bits set in each word."""
    twos = words - ((words >> 1) & PAIRS)
    fours = (twos & FOURS).add_((twos >> 2).bitwise_and_(FOURS))
    eights = fours.add_(fours >> 4).bitwise_and_(BYTES)
    return eights.mul_(ALL_BYTES).bitwise_right_shift_(56)  # all bytes added up in the highest


def rows_before(filled: Tensor) -> Tensor:
    """Return the rank directory: the number of filled rows before each word."""
    counts = count_bits(filled)
    before = counts.cumsum(0).sub_(counts)
    return before.to(offset_type(int(before[-1]) + WORD if len(before) else 0))


@functools.cache
def packed_kernel() -> "PackedKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible."""
    kernel = load_packed_kernel(os.environ)
    if kernel is None and not is_switched_off(os.environ):
        _log.warning(
            "no C++ compiler made a kernel for packed tables, so lookups are up to four times slower; "
            "install g++ or clang++, or set RAREBIT_COMPILE=0 to run without it"
        )
    return kernel


class PackedKernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._fill = library.rarebit_packed_rows
        self._fill.restype = c_int64
        self._fill.argtypes = (
            *(c_void_p, c_int64, c_int, c_void_p),  # ids, their number, threads, rows to write
            *(c_int64, c_int64, c_int64, c_int64),  # rows, those not empty, values, width
            *(c_void_p, c_void_p, c_void_p),  # filled, rank directory, offsets
            *(c_void_p, c_int, c_void_p, c_int),  # columns and values, and the bytes of each
            c_float,  # scale
        )

    def rows(
        self,
        ids: Tensor,
        parts: Parts,
        before: Tensor,
        shape: tuple[int, int],
        scale: Tensor | None = None,
    ) -> Tensor | None:
        """Return the rows `(U, D)` of these ids `(U,)`, out of a table of this shape.

        None where the kernel cannot read the tensors, where an id has no row, and where the parts do not
        fit each other: plain torch then does it, or raises.
        """
        values, columns, offsets, filled = parts
        sizes = [len(offsets) - 1, -(-shape[1] // 8)] if parts.has_bitmaps else [len(values)]
        is_readable = (
            is_plain(ids, torch.int64)
            and is_plain(values, torch.float32 if scale is None else torch.int8)
            and is_plain(columns, torch.uint8 if parts.has_bitmaps else column_type(shape[1]))
            and is_plain(offsets, torch.int32)
            and is_plain(filled, torch.int64)
            and is_plain(before, torch.int32)
            and (scale is None or is_plain(scale, torch.float32))
            and list(columns.shape) == sizes
            and len(filled) == len(before) == -(-shape[0] // WORD)
        )
        if not is_readable:
            return None
        rows = torch.empty(len(ids), shape[1], dtype=torch.float32, device="cpu")
        # In some modes torch makes tensors without storage: there is nothing to write to.
        if not is_plain(rows, torch.float32):
            return None
        done = self._fill(
            *(ids.data_ptr(), len(ids), torch.get_num_threads(), rows.data_ptr()),
            *(shape[0], len(offsets) - 1, len(values), shape[1]),
            *(filled.data_ptr(), before.data_ptr(), offsets.data_ptr()),
            *(columns.data_ptr(), 0 if parts.has_bitmaps else columns.itemsize),
            *(values.data_ptr(), values.itemsize),
            1.0 if scale is None else float(scale),
        )
        return rows if done == len(ids) else None


def load_packed_kernel(environment: Mapping[str, str]) -> PackedKernel | None:
    """Return a kernel from the cache or the compiler of an environment; None without one."""
    return load_compiled(SOURCE, _tried, environment)


def _tried(library: ctypes.CDLL) -> PackedKernel | None:
    """Return a kernel that finds the rows of two small tables, one per form, and refuses an id beyond."""
    kernel = PackedKernel(library)
    bits = torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]], dtype=torch.float32, device="cpu")
    numbers = torch.eye(3, 20, dtype=torch.float32, device="cpu")
    ids = torch.tensor([2, 1, 0, 2], device="cpu")
    for weight in (bits, numbers):
        parts, shape = pack_rows(weight), (weight.shape[0], weight.shape[1])
        before = rows_before(parts.filled)
        rows = kernel.rows(ids, parts, before, shape)
        if rows is None or not torch.equal(rows, weight[ids]):
            return None
        if kernel.rows(ids + 1, parts, before, shape) is not None:
            return None
    return kernel


class Runs(NamedTuple):
    """Where the entries of each id lie, `(U,)` each."""

    row: Tensor  # the number of rows before it that are not empty
    here: Tensor  # 1 where the row is not empty, else 0
    start: Tensor  # the position of its first value
    length: Tensor  # its number of values


class Entries(NamedTuple):
    """All entries of a batch of ids, `(E,)` each."""

    position: Tensor  # where the entry is in values
    place: Tensor  # where it goes in the flat rows (U * D,)


def find_runs(ids: Tensor, parts: Parts, before: Tensor) -> Runs:
    """Return where the entries of int64 ids `(U,)` are; `before` is the rank directory."""
    block, bit = ids >> 6, ids & (WORD - 1)
    word = parts.filled.index_select(0, block)
    here = (word >> bit).bitwise_and_(1)
    below = word.bitwise_and_((1 << bit).sub_(1))
    row = count_bits(below).add_(before.index_select(0, block))
    start = parts.offsets.index_select(0, row).long()
    # an empty row ends where it starts, so that it needs no special case
    end = parts.offsets.index_select(0, row + here)
    return Runs(row, here, start, end - start)


def find_entries(ids: Tensor, parts: Parts, before: Tensor, width: int) -> Entries:
    """Return the entries of the rows of these int64 ids `(U,)`."""
    runs = find_runs(ids, parts, before)
    ends = runs.length.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    owner = torch.repeat_interleave(runs.length, output_size=total)  # the id of each entry
    shift = runs.start - (ends - runs.length)
    position = torch.arange(total, device=ids.device).add_(pick(shift, owner))
    column = _columns_of_bits(runs, parts) if parts.has_bitmaps else pick(parts.columns, position)
    return Entries(position, owner.mul_(width).add_(column))


def pick(source: Tensor, positions: Tensor) -> Tensor:
    """Return the numbers at these positions, `(E,)`, without a gradient."""
    if source.device.type != "cpu":
        return source.index_select(0, positions)
    picked = torch.empty(len(positions), dtype=source.dtype)
    even = len(positions) // LANES * LANES
    lanes, rest = (LANES, even // LANES), slice(even, None)
    torch.gather(
        source.expand(LANES, -1), 1, positions[:even].view(lanes), out=picked[:even].view(lanes)
    )
    torch.gather(source, 0, positions[rest], out=picked[rest])
    return picked


def _columns_of_bits(runs: Runs, parts: Parts) -> Tensor:
    """Return the column of each entry, from the bits of the rows that are not empty."""
    found = runs.here.nonzero().view(-1)
    rows = runs.row.index_select(0, found)
    kept = unpack_bits(parts.columns.index_select(0, rows))  # (rows found, 8 C)
    owner = torch.repeat_interleave(runs.length.index_select(0, found))
    return kept.view(-1).nonzero().view(-1).sub_(owner.mul_(kept.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Pack(Method):
    """Keep only the entries of a table that are not zero, and where they are.

    >>> Pack(bits=8)
    Pack(bits=8)
    """

    registered_name: ClassVar[str] = "pack"
    composition_rank: ClassVar[Rank] = Rank.QUANTISATION
    masks_entries: ClassVar[bool] = True
    title: ClassVar[str] = "store only the entries of a table that are not zero"
    cost: ClassVar[str] = (
        "a lookup takes about the time of a plain one at 90 % zeros, four times that at 50 %, and up to four "
        "times longer still without a C++ compiler; a table takes 5 bytes per entry that is not zero, 4 per "
        "row that is not empty, and a bit per row"
    )
    applies: ClassVar[str] = (
        "tables whose entries are mostly zero after training; not tables that are still to be pruned, since "
        "a removed entry does not come back"
    )

    bits: Literal[8] | None = None
    """Bits per value; None keeps the values exact and trainable."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def after_training(self) -> bool:
        """Before training no entry is zero."""
        return True

    def wrap(self, base: AnyTable) -> "PackedTable":
        """Return the rows of `base`, packed; methods that it wraps are merged first."""
        # the rows as `merge_` leaves them, the padding row zero
        weight = full_table(base if isinstance(base, nn.Embedding) else base.merge())
        if base.padding_idx is not None and bool(weight[base.padding_idx].any()):
            padding = torch.tensor([base.padding_idx], device=weight.device)
            weight = weight.index_fill(0, padding, 0.0)
        parts, scale = pack_rows(weight), None
        if self.bits is not None:
            codes, scale = _round(parts.values)
            parts = parts._replace(values=codes)
        shape = Shape(base.num_embeddings, base.embedding_dim, base.padding_idx, base.sparse)
        table = PackedTable(self, parts, shape, scale=scale).train(base.training)
        return table.requires_grad_(is_trainable(base))

    def traced(self, tables: Sequence[Table], lengths: Sequence[int]) -> "TracedPackedStack":
        """A lookup of packed tables has sizes that depend on the ids, and shifts: neither has a form in ONNX."""
        return TracedPackedStack([t for t in tables if isinstance(t, PackedTable)], lengths)

    def unsuited(self, rows: int, width: int) -> str | None:
        """A table without entries has nothing to pack."""
        return None if rows and width else "it has no weights"


@dataclass(frozen=True)
class Shape:
    """The shape of a packed table and its flags."""

    rows: int
    width: int
    padding: int | None = None
    sparse: bool = False
    """Whether a plain table made from it gets sparse gradients."""


class TakesParts(nn.Module, ABC):
    """A module whose stored tensors may have any size."""

    @abstractmethod
    def take(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take over the tensors of a file, by their names below the module; or return what is wrong with them."""


class PackedTable(TakesParts, Table):
    """A table that stores the entries that are not zero.

    >>> dense = nn.Embedding.from_pretrained(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> packed = Pack().wrap(dense)
    >>> packed(torch.tensor([2, 0]))
    tensor([[6., 7.],
            [0., 5.]])
    """

    values: Tensor
    columns: Tensor
    offsets: Tensor
    filled: Tensor
    scale: Tensor
    """Only for a table of integers."""
    before: Tensor
    """The rank directory; counted when a table is loaded, and never stored."""

    def __init__(
        self, method: Pack, parts: Parts, shape: Shape, *, scale: Tensor | None = None
    ) -> None:
        super().__init__(
            method,
            None,
            num_embeddings=shape.rows,
            embedding_dim=shape.width,
            padding_idx=shape.padding,
        )
        self.shape = shape
        if scale is None:
            self.values = nn.Parameter(parts.values)
        else:
            self.register_buffer("values", parts.values)
            self.register_buffer("scale", scale)
        for name in Parts._fields[1:]:
            self.register_buffer(name, getattr(parts, name))
        self._count()

    @property
    def parts(self) -> Parts:
        """The stored tensors."""
        return Parts(self.values, self.columns, self.offsets, self.filled)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids; the padding row is empty, so nothing has to be masked."""
        with torch.autocast(ids.device.type, enabled=False):
            return self.rows(ids)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids, `(...)` to `(..., D)`."""
        if torch.is_grad_enabled() and self.values.requires_grad:
            rows = self._trained_rows(self._checked(ids))
        elif (found := self._kernel_rows(ids)) is not None:
            rows = found
        else:
            rows = self._served_rows(self._checked(ids))
        return rows.view(*ids.shape, self.embedding_dim)

    def padded_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and their columns, `(...)` to `(..., L)` each; L is the longest row's length.

        Shorter rows are filled up with zeros in column 0. No size depends on the ids.
        """
        shape = (*ids.shape, self.longest)
        if not self.longest:
            return self._floats(self.values.new_zeros(shape)), ids.new_zeros(shape).long()
        runs = find_runs(self._checked(ids), self.parts, self.before)
        steps = torch.arange(self.longest, device=ids.device)
        missing = steps >= runs.length.unsqueeze(-1)  # (U, L)
        positions = (runs.start.unsqueeze(-1) + steps).clamp_(max=len(self.values) - 1)
        values = F.embedding(positions, self.values.unsqueeze(1)).squeeze(-1)
        if self.parts.has_bitmaps:
            bits = self.columns.index_select(0, runs.row.clamp(max=len(self.columns) - 1))
            order = unpack_bits(bits).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            columns = order[:, : self.longest]
        else:
            columns = self.columns.index_select(0, positions.view(-1)).view_as(positions).long()
        values = self._floats(values).masked_fill(missing, 0.0)
        return values.view(shape), columns.masked_fill(missing, 0).view(shape)

    def to_csr(self) -> Any:
        """Return the table as a SciPy CSR array of shape `(N, D)`."""
        sparse = import_extra("scipy.sparse", "study", "a SciPy array")
        values, columns = self._floats(self.values.detach()).cpu(), self.columns.cpu()
        if values.itemsize < 4:  # SciPy has no shorter numbers
            values = values.float()
        if self.parts.has_bitmaps:
            columns = unpack_bits(columns).nonzero()[:, 1]
        filled = unpack_bits(self.filled.cpu().view(1, -1).view(torch.uint8)).view(-1)
        counts = filled[: self.num_embeddings].long()
        counts[counts.bool()] = self.offsets.cpu().long().diff()
        starts = F.pad(counts.cumsum(0), (1, 0))
        entries = (values.numpy(), columns.long().numpy(), starts.numpy())
        shape = (self.num_embeddings, self.embedding_dim)
        return sparse.csr_array(entries, shape=shape, copy=True)

    @property
    def sparse(self) -> bool:
        """Whether a plain table made from this one gets sparse gradients."""
        return self.shape.sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """Only itself: earlier methods were merged, as by `merge_`."""
        return (self.method,)

    @property
    def num_weights(self) -> int:
        """The entries that are not zero, and the scale where there is one."""
        return len(self.values) + int("scale" in self._buffers)

    def receive(self, method: Method) -> NoReturn:
        """Raise: a method that changes rows needs all of them."""
        raise UnsupportedTableError(
            f"{method} cannot be applied to a packed table, which keeps only some entries of its rows; "
            "merge_ the model first"
        )

    def take(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take over other parts, of any number of entries; or return what is wrong with them."""
        missing = [name for name in self.state_dict() if name not in tensors]
        if missing:
            return f"it lacks its {', '.join(missing)}"
        shape, given = self.shape, Parts(*(tensors[name] for name in Parts._fields))
        problem = problem_of(given, rows=shape.rows, width=shape.width, padding=shape.padding)
        if problem is not None:
            return problem
        if given.values.is_floating_point() != self.values.is_floating_point():
            return f"its values are {given.values.dtype} and not {self.values.dtype}"
        # All parts at once: a table must never hold parts of two tables.
        for name, tensor in given._asdict().items():
            own = getattr(self, name)
            if own.shape != tensor.shape:
                own.grad = None
            # values keep their precision, as in any module; columns and offsets are of any size
            dtype = own.dtype if name == "values" else tensor.dtype
            own.data = tensor.detach().to(own.device, dtype, copy=True)
        self._count()
        return None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        error_messages: list[str] = arguments[-1]
        own = _below(prefix, state_dict)
        problem = self.take(own) if own else None
        if problem is not None:
            error_messages.append(f"the packed table {prefix.rstrip('.')!r} is damaged: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _count(self) -> None:
        """Count the rank directory and the longest row, which are not stored."""
        with torch.no_grad():
            self.register_buffer("before", rows_before(self.filled), persistent=False)
            lengths = self.offsets.diff()
        self.longest = int(lengths.max()) if len(lengths) else 0

    def _checked(self, ids: Tensor) -> Tensor:
        """Return the ids as one list, `(U,)`; raise where one has no row."""
        flat = ids.reshape(-1).long()
        if torch.compiler.is_compiling() or not len(flat):  # a graph cannot look at its ids
            return flat
        low, high = torch.stack(torch.aminmax(flat)).tolist()
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(
                f"ids must be from 0 to {self.num_embeddings - 1} in a table of "
                f"{self.num_embeddings} rows, got {low if low < 0 else high}"
            )
        return flat

    def _trained_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `(U, D)` with a gradient for their entries."""
        with torch.no_grad():
            entries = find_entries(ids, self.parts, self.before, self.embedding_dim)
        # not by indexing: its backward adds in any order
        values = F.embedding(entries.position, self.values.unsqueeze(1)).squeeze(1)
        return values.new_zeros(len(ids) * self.embedding_dim).scatter(0, entries.place, values)

    def _kernel_rows(self, ids: Tensor) -> Tensor | None:
        """Return the rows `(U, D)` without a gradient, by the kernel; None where that is not possible."""
        # A traced or compiled model must consist of torch's own operations.
        if torch.compiler.is_compiling() or is_tracing():
            return None
        shape, scale = (self.num_embeddings, self.embedding_dim), self._buffers.get("scale")
        flat, parts = (
            ids.reshape(-1).long().contiguous(),
            self.parts,
        )  # a column of a batch has gaps
        if rows_triton.suits(flat, *parts):
            return rows_triton.packed_rows(flat, parts, self.before, shape, self.longest, scale)
        kernel = None if ids.is_cuda else packed_kernel()
        return None if kernel is None else kernel.rows(flat, parts, self.before, shape, scale)

    @torch.no_grad()
    def _served_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `(U, D)` without a gradient, by torch, in chunks."""
        width, dtype = self.embedding_dim, self._floats(self.values[:0]).dtype
        rows = torch.zeros(len(ids) * width, dtype=dtype, device=ids.device)
        for some, target in zip(ids.split(LOOKED_UP), rows.split(LOOKED_UP * width), strict=True):
            entries = find_entries(some, self.parts, self.before, width)
            values = self._floats(pick(self.values, entries.position))
            target.scatter_(0, entries.place, values)
        return rows

    def _floats(self, values: Tensor) -> Tensor:
        """Return stored values as numbers: integers times their scale."""
        return values.to(self.scale.dtype) * self.scale if "scale" in self._buffers else values


class TracedPackedStack(Stack):
    """Packed tables behind one lookup in plain arithmetic, for exporters. No size depends on the ids.

    Bits are taken out by division, bytes of columns by a cumulative sum: the k-th column that is set has the k-th value of
    its row. The last row and the last value are zeros, for rows without entries.
    """

    marks: Tensor
    """`(ceil(N / 8),)`: a bit for each row, whether it has entries."""
    before: Tensor
    """`(ceil(N / 8),)`: the number of rows with entries before each byte of marks."""
    starts: Tensor
    """`(R + 1,)`: the place of the first value of each row that has entries."""
    columns: Tensor
    """`(R + 1, ceil(D / 8))`: a bit for each column of such a row."""
    values: Tensor
    """`(V + 1,)`."""
    ones: Tensor
    bits: Tensor
    scales: Tensor
    first_rows: Tensor

    def __init__(self, tables: Sequence[PackedTable], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.width = tables[0].embedding_dim
        marks, columns, counts, values, scales, rows = [], [], [], [], [], [0]
        for table in tables:
            parts = table.parts
            every = parts.filled.view(torch.uint8)[: -(-table.num_embeddings // 8)]
            marks.append(every)
            rows.append(rows[-1] + 8 * len(every))
            kept = _kept_columns(parts, self.width)
            columns.append(pack_bits(kept))
            counts.append(parts.offsets.long().diff())
            values.append(parts.values.detach())
            scales.append(torch.ones(()) if parts.values.is_floating_point() else table.scale)
        bits = 1 << torch.arange(8)
        ones = (torch.arange(256).unsqueeze(1) // bits % 2).sum(dim=1)  # set in a byte
        filled = ones[torch.cat(marks).long()]
        first_rows = torch.tensor(rows[:-1])[self.field_of_slot]
        stored = {
            "ones": ones,
            "bits": bits,
            "marks": torch.cat(marks),
            "before": (filled.cumsum(0) - filled).int(),
            "starts": F.pad(torch.cat(counts).cumsum(0), (1, 0)).int(),
            "columns": F.pad(torch.cat(columns), (0, 0, 0, 1)),
            "values": F.pad(torch.cat(values), (0, 1)),
            "scales": torch.stack(scales)[self.field_of_slot].unsqueeze(-1),
            "first_rows": first_rows,
        }
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows, `(..., S)` to `(..., S, D)`."""
        place = ids + self.first_rows
        byte, bit = place // 8, self.bits[place % 8]
        mark = self.marks[byte].long()
        here = mark // bit % 2
        row = self.before[byte] + self.ones[mark % bit]
        row = torch.where(here == 1, row, len(self.starts) - 1)
        kept = self.columns[row].long().unsqueeze(-1) // self.bits % 2  # (..., S, C, 8)
        kept = kept.flatten(-2)[..., : self.width]
        place = self.starts[row].unsqueeze(-1) + kept.cumsum(-1) - kept
        return self.values[place].to(self.scales.dtype) * self.scales * kept

    def split(self) -> list[AnyTable]:
        """Raise: an exporter reads the stack and takes nothing out of it."""
        raise NotImplementedError


def _kept_columns(parts: Parts, width: int) -> Tensor:
    """Return which columns of each row that is not empty have a value, `(R, D)`."""
    if parts.has_bitmaps:
        return unpack_bits(parts.columns)[:, :width]
    lengths = parts.offsets.long().diff()
    owner = torch.repeat_interleave(lengths)
    kept = torch.zeros(len(lengths), width, dtype=torch.bool, device=owner.device)
    return kept.index_put((owner, parts.columns.long()), torch.ones((), dtype=torch.bool))


def _round(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as integers from -127 to 127, and their scale."""
    if not bool(values.isfinite().all()):
        raise UnsupportedTableError(
            f"Pack(bits=8) needs finite values, and some of {len(values):,} are not; use weights from "
            "before training diverged"
        )
    largest = values.abs().max() if len(values) else values.new_zeros(())
    scale = (largest / LARGEST_CODE).clamp(min=torch.finfo(values.dtype).tiny)
    codes = (values.double() / scale.double()).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scale


def problem_of(parts: Parts, *, rows: int, width: int, padding: int | None) -> str | None:
    """Return what is wrong with the parts of a table of this shape; None when nothing is."""
    return (
        _wrong_kinds(parts, rows, width)
        or _wrong_rows(parts, rows, padding)
        or _wrong_offsets(parts)
        or (_wrong_bits(parts, width) if parts.has_bitmaps else _wrong_columns(parts, width))
    )


def _wrong_kinds(parts: Parts, rows: int, width: int) -> str | None:
    """Sizes and types come first: what follows computes with them."""
    values, columns, offsets, filled = parts
    if not 1 <= width <= WIDEST or rows < 0:
        return f"no table is {rows} x {width}"
    if values.dim() != 1 or not (values.is_floating_point() or values.dtype == torch.int8):
        return f"its values are {values.dtype} of shape {tuple(values.shape)}"
    if filled.dtype != torch.int64 or filled.shape != (-(-rows // WORD),):
        return f"its marks of filled rows are not those of {rows} rows"
    if offsets.dtype not in {torch.int32, torch.int64} or offsets.dim() != 1 or not len(offsets):
        return f"its offsets are {offsets.dtype} of shape {tuple(offsets.shape)}"
    numbers = (column_type(width), (len(values),))
    bits = (torch.uint8, (len(offsets) - 1, -(-width // 8)))
    if (columns.dtype, tuple(columns.shape)) not in {numbers, bits}:
        return f"its columns are {columns.dtype} of shape {tuple(columns.shape)}"
    return None


def _wrong_rows(parts: Parts, rows: int, padding: int | None) -> str | None:
    filled, beyond = parts.filled, -rows % WORD
    # a shift keeps the sign, so rows beyond the last one show as any bit that remains
    if beyond and bool(filled[-1] >> (WORD - beyond)):
        return "it marks rows that the table does not have"
    marked = sum(int(count_bits(chunk).sum()) for chunk in filled.split(CHECKED))
    if marked != len(parts.offsets) - 1:
        return f"it marks {marked} filled rows and has offsets of {len(parts.offsets) - 1}"
    if padding is None:
        return None
    if not 0 <= padding < rows:
        return f"its padding row {padding} is not one of {rows} rows"
    word, bit = divmod(padding, WORD)
    return f"its padding row {padding} is not empty" if bool(filled[word] >> bit & 1) else None


def _wrong_offsets(parts: Parts) -> str | None:
    first, last = int(parts.offsets[0]), int(parts.offsets[-1])
    if first != 0 or last != len(parts.values):
        return f"its offsets go from {first} to {last}, and it has {len(parts.values)} values"
    for start in range(0, len(parts.offsets), CHECKED):
        chunk = parts.offsets[start : start + CHECKED + 1]  # the next chunk's first, too
        if bool((chunk[1:] <= chunk[:-1]).any()):
            return "its offsets do not give every filled row a value"
    return None


def _wrong_columns(parts: Parts, width: int) -> str | None:
    # Offsets are good by now. Columns grow within a row, so each drop must be where a row begins.
    columns, begins = parts.columns, parts.offsets
    for start in range(0, len(columns), CHECKED):
        chunk = columns[start : start + CHECKED + 1].long()  # the next chunk's first, too
        if bool((chunk < 0).any()) or bool((chunk >= width).any()):
            return f"it names columns beyond its width of {width}"
        drops = (chunk[1:] <= chunk[:-1]).nonzero().view(-1).add_(start + 1)
        nearest = torch.searchsorted(begins, drops.to(begins.dtype))
        if not torch.equal(begins[nearest.clamp(max=len(begins) - 1)].long(), drops):
            return "the columns of a row are not in order"
    return None


def _wrong_bits(parts: Parts, width: int) -> str | None:
    offsets, at_once = parts.offsets, max(1, CHECKED // parts.columns.shape[1])
    for start in range(0, len(parts.columns), at_once):
        kept = unpack_bits(parts.columns[start : start + at_once])
        if bool(kept[:, width:].any()):
            return f"it names columns beyond its width of {width}"
        expected = offsets[start : start + at_once + 1].diff()
        if not torch.equal(kept.sum(dim=1), expected.long()):
            return "the bits of a row are not as many as its values"
    return None


def take_parts_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load packed and coded tables of a model from the tensors of a file, once those are checked."""
    for name, module in model.named_modules():
        if isinstance(module, TakesParts):
            problem = module.take(_below(f"{name}." if name else "", tensors))
            if problem is not None:
                kind = "packed" if isinstance(module, PackedTable) else "coded"
                raise ModelFileError(
                    f"the {kind} table {name!r} is damaged: {problem}; save the model again or use "
                    "an older copy"
                )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def save_packed(table: PackedTable, path: str | os.PathLike[str]) -> Path:
    """Write a packed table to a file, replacing an old one, and return the file.

    >>> import tempfile
    >>> dense = nn.Embedding.from_pretrained(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_packed(Pack().wrap(dense), Path(folder) / "items.safetensors")
    ...     table = load_packed(file)
    >>> table(torch.tensor([2]))
    tensor([[6., 7.]])
    """
    shape = {
        "rows": table.num_embeddings,
        "width": table.embedding_dim,
        "padding": table.padding_idx,
    }
    known = {key: str(value) for key, value in shape.items() if value is not None}
    tensors = table.state_dict()
    metadata = {"kind": KIND, **known, "sha256": _checksum(known, tensors)}
    return write_file(
        Path(path),
        lambda partial: DISK.save_tensors(partial, tensors, metadata),
        error=ModelFileError,
    )


def _checksum(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a table: its shape, and the types, shapes and bytes of its parts."""
    found = hashlib.sha256(repr(sorted(about.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {spell_tensor(tensor)} ".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load_packed(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", trainable: bool = False
) -> PackedTable:
    """Return the packed table of a file.

    >>> load_packed("nowhere")
    Traceback (most recent call last):
    rarebit.errors.ModelFileError: 'nowhere' does not exist
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # copied: what safetensors returns is the file itself, mapped
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no mapping
        table = _table(about, tensors)
    except FileNotFoundError:
        raise ModelFileError(f"{str(path)!r} does not exist") from None
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{str(path)!r} is no packed table, or damaged: {error}; write it again or use an older copy"
        ) from None
    return table.requires_grad_(trainable and "scale" not in tensors).to(device)


def _table(about: dict[str, str], tensors: dict[str, Tensor]) -> PackedTable:
    kind, checksum = about.pop("kind", None), about.pop("sha256", None)
    if kind not in {KIND, OLDER}:
        raise ValueError(f"it does not call itself a {KIND}")
    if kind == KIND and checksum != _checksum(about, tensors):
        raise ValueError("it is not what its checksum says")
    scale = tensors.pop("scale", None)
    if set(tensors) != set(Parts._fields):
        raise ValueError(f"it has the parts {sorted(tensors)}")
    shape = Shape(
        _whole_number(about.get("rows", "")),
        _whole_number(about.get("width", "")),
        _whole_number(about["padding"]) if "padding" in about else None,
    )
    parts = Parts(**tensors)
    problem = problem_of(parts, rows=shape.rows, width=shape.width, padding=shape.padding)
    if problem is not None:
        raise ValueError(problem)
    if (scale is None) == (parts.values.dtype == torch.int8):
        raise ValueError("integers have a scale, and other values have none")
    if scale is not None and (scale.dim() or not scale.is_floating_point()):
        raise ValueError(f"its scale is {scale.dtype} of shape {tuple(scale.shape)}")
    return PackedTable(Pack(bits=None if scale is None else 8), parts, shape, scale=scale)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"{text[:MAX_DIGITS]!r} is no number of rows or columns")
    return int(text)


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
    width 1, and those that would not get smaller, are skipped. Methods that a table wraps are merged
    first; buckets of hashed tables are packed as buckets. The report is false when nothing was packed.

    >>> model = nn.Sequential(nn.Embedding(1000, 64))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:990].zero_()
    >>> changes = pack_(model)
    pack: 1 of 1 tables, 256,000 -> 2,812 bytes stored
      0  1,000 x 64, 256,000 -> 2,812
    """
    refuse_wrapped_model(model, trained="pack_")
    method = Pack(bits=bits)
    chosen, tables, skipped = [], [], []
    for site in find_sites(model):
        packed = _packed(site, method, where)
        if isinstance(packed, str):
            skipped.append((site.info.name, packed))
        else:
            chosen.append(site)
            tables.append(packed)
    changes = put_tables(model, "pack", chosen, tables, skipped=skipped, optimizer=optimizer)
    return reported(changes, verbose)


def _packed(site: Site, method: Pack, where: Where | None) -> AnyTable | str:
    """Return the table packed, or why it is skipped."""
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
    refuse_not_finite(site, method)
    table = wrap(site.table, method)
    if sum(tensor.nbytes for tensor in stored_tensors(table)) >= site.info.num_bytes:
        return "it would not get smaller"
    return table
