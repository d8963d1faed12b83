"""Coded tables: each row has as many bits as its class, and is looked up without decoding the others.

    e(i) = m_c + Σ_j (q_ij - 2^(b_cj - 1) + 1/2) s_cj u_j        c the class of row i

    m_c     the mean row of the class
    q_ij    an integer of b_cj bits, 0 to 8
    s_cj    its step
    u_j     the j-th direction of the table; a class may use some of them or none

`methods/evidence_coding.py` chooses classes, directions, bits and steps. Everything that a table stores is one list of
bytes, so that a file holds what it says and little else:

    16 bytes     rows N, width D, directions r, classes C, runs R
    u            r x D of float16, unit vectors          m    C x D of float16
    b            C x r bytes                             s    C x r bytes: s = 2^(byte / 8 - 24)
    classes      of runs of rows: R first rows of 4 bytes and R bytes; with R = 0 half a byte per row
    q            the bits of all rows, in order of their ids, without a gap

Ids that are sorted by their counts have as many runs as classes, and their classes cost next to nothing.

    id ─► run ─► class c ─► first bit = bits before the run + (id - first row of the run) x bits of a row ─► q ─► row

A lookup adds up in float32 in the order of the directions, so that plain torch, the C++ kernel (`coded_kernel.cpp`, compiled on first
use) and the GPU's (`rows_triton.py`) give the same bits; compiled and exported models add up by a product, which may round the last one otherwise. What comes from a file may be anything:
`Layout.read` checks it once, and after that no lookup reads beyond the list.

Shapes: N rows, D width, C classes, r directions, F tables of a stack, S its slots, U ids.
"""

import ctypes
import functools
import itertools
import logging
import os
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]  # it is, but torch does not say so

from rarebit.codes import rows_triton
from rarebit.codes.packed import TakesParts
from rarebit.tables.collection import Stack
from rarebit.tables.compiler import is_plain, is_switched_off, load_compiled
from rarebit.tables.table import CHUNK, AnyTable, Method, Table

HEADER = struct.Struct("<IHHII")
"""Rows, width, directions, classes and runs."""
MOST_BITS = 8
HALF_BYTE = 16
"""Classes of a table that keeps half a byte per row."""
BLOCK = 64
"""Rows whose bits are counted from one place."""
STEPS_PER_OCTAVE, LEAST_OCTAVE = 8, -24
SOURCE = Path(__file__).with_name("coded_kernel.cpp")

Bytes = NDArray[np.uint8]

_log = logging.getLogger(__name__)


def step_of(codes: NDArray[Any]) -> NDArray[np.float64]:
    """Return steps from their bytes.

    >>> step_of(np.array([192, 200])).tolist()
    [1.0, 2.0]
    """
    steps: NDArray[np.float64] = np.exp2(codes.astype(np.float64) / STEPS_PER_OCTAVE + LEAST_OCTAVE)
    return steps


def code_of_step(steps: NDArray[np.float64]) -> Bytes:
    """Return the bytes of the nearest steps."""
    octaves = np.log2(np.maximum(steps, 2.0**LEAST_OCTAVE)) - LEAST_OCTAVE
    codes: Bytes = np.clip(np.rint(octaves * STEPS_PER_OCTAVE), 0, 255).astype(np.uint8)
    return codes


@dataclass(frozen=True)
class Layout:
    """What a coded table stores, without the bits of its rows."""

    rows: int
    basis: NDArray[np.float16]
    """u, `(r, D)`."""
    means: NDArray[np.float16]
    """m, `(C, D)`."""
    bits: Bytes
    """b, `(C, r)`."""
    steps: Bytes
    """s as bytes, `(C, r)`."""
    classes: Bytes
    """The class of each run, or of each row."""
    starts: NDArray[np.uint32] | None
    """The first row of each run; None where each row has its class."""

    @staticmethod
    def of(
        classes: Bytes, basis: NDArray[Any], means: NDArray[Any], bits: Bytes, steps: Bytes
    ) -> "Layout":
        """Return the layout of a table whose rows have these classes `(N,)`, in the smaller of both forms."""
        starts = np.flatnonzero(np.diff(classes, prepend=-1)).astype(np.uint32)
        by_row = len(means) <= HALF_BYTE and len(classes) / 2 < 5 * len(starts)
        return Layout(
            rows=len(classes),
            basis=np.ascontiguousarray(basis, np.float16),
            means=np.ascontiguousarray(means, np.float16),
            bits=np.ascontiguousarray(bits, np.uint8),
            steps=np.ascontiguousarray(steps, np.uint8),
            classes=classes if by_row else classes[starts],
            starts=None if by_row else starts,
        )

    @property
    def width(self) -> int:
        """D."""
        return int(self.means.shape[1])

    @property
    def bits_of_row(self) -> NDArray[np.int64]:
        """Bits of a row of each class, `(C,)`."""
        return np.asarray(self.bits.sum(axis=1, dtype=np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of rows of each run; 1 where each row has its class."""
        if self.starts is None:
            return np.ones(self.rows, np.int64)
        return np.asarray(np.diff(self.starts.astype(np.int64), append=self.rows), np.int64)

    @property
    def class_of_rows(self) -> Bytes:
        """The class of each row, `(N,)`."""
        return np.repeat(self.classes, self.lengths)

    @property
    def num_bits(self) -> int:
        """Bits of all rows."""
        return int(self.lengths @ self.bits_of_row[self.classes])

    def write(self, codes: Bytes) -> Tensor:
        """Return all of it as one list of bytes, the bits of the rows last."""
        runs = 0 if self.starts is None else len(self.starts)
        header = HEADER.pack(self.rows, self.width, len(self.basis), len(self.means), runs)
        if self.starts is None:
            pairs = np.pad(self.classes, (0, self.rows % 2)).reshape(-1, 2)
            index = [np.asarray(pairs[:, 0] | (pairs[:, 1] << 4), np.uint8)]
        else:
            index = [self.starts.view(np.uint8), self.classes]
        parts = [
            np.frombuffer(header, np.uint8),
            self.basis.view(np.uint8),
            self.means.view(np.uint8),
        ]
        parts += [self.bits, self.steps, *index, codes]
        return torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))

    @property
    def num_bytes(self) -> int:
        """Bytes of the list."""
        return self.num_bytes_before_codes + -(-self.num_bits // 8)

    @property
    def num_bytes_before_codes(self) -> int:
        """Where the bits of the rows begin in the list."""
        index = -(-self.rows // 2) if self.starts is None else 5 * len(self.starts)
        small = 2 * (self.basis.size + self.means.size) + 2 * self.bits.size
        return HEADER.size + small + index

    @staticmethod
    def read(blob: Tensor, rows: int, width: int) -> "tuple[Layout, int]":
        """Return the layout at the head of a list of bytes, and how many bytes its table takes; raise `ValueError`."""
        if blob.dtype != torch.uint8 or blob.dim() != 1 or len(blob) < HEADER.size:
            raise ValueError(f"it is a list of {blob.dtype} of shape {tuple(blob.shape)}")
        data = blob.detach().cpu().numpy()
        found_rows, found_width, num_directions, num_classes, num_runs = HEADER.unpack(
            data[: HEADER.size].tobytes()
        )
        if (found_rows, found_width) != (rows, width):
            raise ValueError(
                f"it holds a table of {found_rows} x {found_width}, not {rows} x {width}"
            )
        if num_directions > width or not 1 <= num_classes <= 256 or num_runs > rows:
            raise ValueError(
                f"it has {num_directions} directions, {num_classes} classes and {num_runs} runs"
            )
        place = HEADER.size

        def take(number: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            nonlocal place
            size = number * np.dtype(dtype).itemsize
            if place + size > len(data):
                raise ValueError("it is shorter than it says")
            part = np.frombuffer(data[place : place + size].tobytes(), dtype)
            place += size
            return part.reshape(shape)

        small = (num_classes, num_directions)
        basis = take(num_directions * width, "<f2", (num_directions, width))
        means = take(num_classes * width, "<f2", (num_classes, width))
        bits, steps = (take(num_classes * num_directions, "u1", small) for _ in range(2))
        starts = None
        if num_runs:
            starts = take(num_runs, "<u4", (num_runs,))
            classes = take(num_runs, "u1", (num_runs,))
        else:
            pairs = take(-(-rows // 2), "u1", (-1,))
            classes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:rows]
        layout = Layout(rows, basis, means, bits, steps, classes, starts)
        layout.check()
        if layout.num_bytes > len(data):
            raise ValueError(f"it has {len(data)} of {layout.num_bytes} bytes")
        return layout, layout.num_bytes

    def check(self) -> None:
        """Raise `ValueError` where a lookup could go astray."""
        if not (np.isfinite(self.basis).all() and np.isfinite(self.means).all()):
            raise ValueError("its rows are not finite")
        if self.bits.size and int(self.bits.max()) > MOST_BITS:
            raise ValueError(f"it has integers of {int(self.bits.max())} bits")
        if len(self.classes) and int(self.classes.max()) >= len(self.means):
            raise ValueError(f"it names a class beyond its {len(self.means)}")
        starts = self.starts
        if starts is not None and (
            int(starts[0]) != 0
            or bool((np.diff(starts.astype(np.int64)) <= 0).any())
            or int(starts[-1]) >= self.rows
        ):
            raise ValueError("its runs are not in order")
        if starts is None and self.rows and len(self.means) > HALF_BYTE:
            raise ValueError(f"half a byte cannot name one of {len(self.means)} classes")


EIGHT = 8
LANES = np.dtype(
    [
        *((name, "i4") for name in ("count", "before", "half", "bits")),
        ("direction", "u2", EIGHT),
        *((name, "u4", EIGHT) for name in ("shift", "mask")),
        ("middle", "f4", EIGHT),
    ]
)
"""Eight directions with bits: their number; the bits of the row before them; those of the first four, and of all; which they are; where the
integer of each begins in its half, its mask, and its middle."""


def lanes_of(bits: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the directions with bits `(C, r)` of each class, eight by eight, `(C, L, 32)`."""
    classes, directions = bits.shape
    number = -(-directions // EIGHT)
    # those with bits first, in their order
    order = np.argsort(bits == 0, axis=1, kind="stable")
    own = np.take_along_axis(bits, order, axis=1)
    own = np.pad(own, ((0, 0), (0, number * EIGHT - directions))).reshape(
        classes, number, 2, EIGHT // 2
    )
    found = np.zeros((classes, number), LANES)
    eight = own.reshape(classes, number, EIGHT)
    found["count"] = (eight > 0).sum(axis=2)
    found["bits"] = eight.sum(axis=2)
    found["before"] = found["bits"].cumsum(axis=1) - found["bits"]
    found["half"] = own[:, :, 0].sum(axis=2)
    found["direction"] = np.pad(order, ((0, 0), (0, number * EIGHT - directions))).reshape(
        eight.shape
    )
    found["shift"] = (own.cumsum(axis=3) - own).reshape(eight.shape)
    found["mask"] = 2**eight - 1
    found["middle"] = np.where(eight > 0, 2.0 ** (eight - 1) - 0.5, 0.0)
    return found.view(np.int32).reshape(classes, number, LANES.itemsize // 4)


class Decoder(nn.Module):
    """Finds and decodes the rows of F tables in a list of bytes. Nothing of it is stored: it is read off the layouts."""

    bits: Tensor
    """`(C, r)`, of all tables one after the other."""
    before: Tensor
    """`(C, r)`: the bits of a row before those of a direction."""
    powers: Tensor
    """`(C, r)`: 2^b."""
    powers_of_two: Tensor
    """`(8,)`."""
    terms: Tensor
    """`(C, r, D)`: s u, what one unit of q adds."""
    base: Tensor
    """`(C, D)`: m."""
    middle: Tensor
    """`(C, r)`: the middle of the numbers q, 2^(b - 1) - 1/2."""
    scales: Tensor
    """`(C, r)`: s, and `basis`, `(F, r, D)`: u. Exported models have them in place of the terms."""
    basis: Tensor
    bits_of_row: Tensor
    """`(C,)`."""
    lanes: Tensor
    """`(C, L, 32)`, what the C++ kernel knows of the directions with bits, eight by eight: `LANES`."""
    run_rows: Tensor
    """`(F, R)`, R a power of two: the first row of each run; beyond the last run, the largest number."""
    run_class: Tensor
    run_bit: Tensor
    """`(F, R)`: where the bits of the run begin in the list."""
    row_class: Tensor
    """`(N,)`, of the rows of all tables where those of one have classes of their own; else empty."""
    row_bit: Tensor
    """`(N,)`: the bits between the begin of a row's block and the row."""
    block_bit: Tensor
    """`(ceil(N / 64),)`: where the bits of a block of rows begin in the list."""
    num_rows: Tensor
    """`(F,)`, and `first_row`, `(F,)`: how many rows come before those of a table."""
    first_row: Tensor

    def __init__(self, layouts: Sequence[Layout], first_bytes: Sequence[int]) -> None:
        super().__init__()
        width, most = layouts[0].width, max(len(layout.basis) for layout in layouts)
        self.width, self.num_directions = width, most
        bits, terms, base, scales, bases = [], [], [], [], []
        for layout in layouts:
            extra = most - len(layout.basis)
            own = np.pad(layout.bits.astype(np.int64), ((0, 0), (0, extra)))
            step = np.pad(step_of(layout.steps), ((0, 0), (0, extra)))
            basis = np.pad(layout.basis.astype(np.float64), ((0, extra), (0, 0)))
            term = (np.where(own > 0, step, 0.0)[:, :, None] * basis).astype(np.float32)
            bits.append(own)
            terms.append(term)
            scales.append(np.where(own > 0, step, 0.0))
            bases.append(basis)
            base.append(layout.means)
        joined = np.concatenate(bits)
        self._keep("bits", joined)
        self._keep("before", np.cumsum(joined, axis=1) - joined)
        self._keep("lanes", lanes_of(joined))
        self._keep("powers", 2**joined)
        self._keep("powers_of_two", 2 ** np.arange(8))
        self._keep("bits_of_row", joined.sum(axis=1))
        self.terms = torch.from_numpy(np.concatenate(terms))
        self.base = torch.from_numpy(np.concatenate(base).astype(np.float32))
        middle = np.where(joined > 0, 2.0 ** (joined - 1) - 0.5, 0.0)
        self.middle = torch.from_numpy(middle.astype(np.float32))
        self.scales = torch.from_numpy(np.concatenate(scales).astype(np.float32))
        self.basis = torch.from_numpy(np.stack(bases).astype(np.float32))
        self._keep("num_rows", np.array([layout.rows for layout in layouts]))
        self._index(layouts, first_bytes)

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """Go to another device; what is added up stays in float32, and rows are converted afterwards."""
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in ("terms", "base", "middle", "scales", "basis"):
            setattr(self, name, getattr(self, name).to(self.bits.device))
        return self

    def _keep(self, name: str, values: NDArray[Any]) -> None:
        self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)), persistent=False)

    def _index(self, layouts: Sequence[Layout], first_bytes: Sequence[int]) -> None:
        """Say where the bits of each run of rows begin; or, where rows of a table have classes of their own, of each row."""
        by_row = any(layout.starts is None for layout in layouts)
        runs = 0 if by_row else max(len(layout.classes) for layout in layouts)
        runs = 1 << (runs - 1).bit_length() if runs else 0  # a power of two
        rows = np.full((len(layouts), runs), np.iinfo(np.int64).max)
        classes, places = np.zeros(rows.shape, np.int64), np.zeros(rows.shape, np.int64)
        row_classes, row_places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        first_class = 0
        for table, (layout, first) in enumerate(zip(layouts, first_bytes, strict=True)):
            begin = 8 * (first + layout.num_bytes_before_codes)
            kinds = layout.class_of_rows if by_row else layout.classes
            used = layout.bits_of_row[kinds] * (1 if by_row else layout.lengths)
            place = begin + np.cumsum(used) - used
            if by_row:
                row_classes.append(kinds.astype(np.int64) + first_class)
                row_places.append(place)
            else:
                rows[table, : len(kinds)] = layout.starts
                classes[table, : len(kinds)] = kinds.astype(np.int64) + first_class
                places[table, : len(kinds)] = place
            first_class += len(layout.means)
        place = np.concatenate(row_places)
        blocks = place[::BLOCK]
        small = np.uint8 if first_class <= 256 else np.int16
        self._keep("run_rows", rows)
        self._keep("run_class", classes)
        self._keep("run_bit", places)
        self._keep("row_class", np.concatenate(row_classes).astype(small))
        self._keep("row_bit", (place - np.repeat(blocks, BLOCK)[: len(place)]).astype(np.int32))
        self._keep("block_bit", blocks)
        self._keep(
            "first_row",
            np.array([0, *itertools.accumulate(layout.rows for layout in layouts)][:-1]),
        )

    def locate(self, ids: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class of each id and the place of its first bit, `(..., S)` each; `tables` names those of the slots."""
        if len(self.row_class):
            row = ids + self.first_row[tables]
            return self.row_class[row].long(), self.block_bit[row // BLOCK] + self.row_bit[row]
        # the last run that begins at the id or before: R is a power of two, and each step halves what is left
        starts, step = self.run_rows.reshape(-1), self.run_rows.shape[1] // 2
        place = (tables * self.run_rows.shape[1]).expand(ids.shape)
        while step:
            place = torch.where(ids >= starts[place + step], place + step, place)
            step //= 2
        kind = self.run_class.reshape(-1)[place]
        inside = ids - starts[place]
        return kind, self.run_bit.reshape(-1)[place] + inside * self.bits_of_row[kind]

    def forward(self, blob: Tensor, ids: Tensor, tables: Tensor) -> Tensor:
        """Return the rows `(..., S, D)` of ids `(..., S)` that are in range, in operations that every exporter knows."""
        kind, first = self.locate(ids, tables)
        rows, last = self.base[kind], blob.shape[0] - 1
        place = first.unsqueeze(-1) + self.before[kind]  # (..., S, r)
        byte = place // 8
        shift = self.powers_of_two[place - 8 * byte]
        byte = byte.clamp(max=last)  # where a class has no bits, any byte will do
        pair = blob[byte].long() + 256 * blob[(byte + 1).clamp(max=last)].long()
        number = (pair // shift % self.powers[kind]).to(rows.dtype) - self.middle[kind]
        if torch.compiler.is_compiling():  # few operations, and the order of a product
            scaled = (number * self.scales[kind]).unsqueeze(-2)  # (..., S, 1, r)
            return rows + (scaled @ self.basis[tables]).squeeze(-2)
        for direction in range(self.num_directions):
            rows = rows + number[..., direction, None] * self.terms[kind, direction]
        return rows


class _Coded(TakesParts):
    """What a coded table and a stack of them have in common: a list of bytes, and how to look rows up in it."""

    blob: Tensor
    like: Tensor
    """An empty tensor in the precision of the rows."""
    decoder: Decoder
    tables: Tensor
    """`(S,)`: the table of each slot."""

    @abstractmethod
    def put(self, blob: Tensor) -> None:
        """Replace the list of bytes, or raise `ValueError`."""

    def take(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take over another list of bytes, of any length; or return what is wrong with it."""
        if "blob" not in tensors:
            return "it lacks its bytes"
        try:
            self.put(tensors["blob"].detach().to(self.like.device, copy=True))
        except ValueError as error:
            return str(error)
        return None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        error_messages: list[str] = arguments[-1]
        problem = None
        if f"{prefix}blob" in state_dict:
            problem = self.take({"blob": state_dict[f"{prefix}blob"]})
        if problem is not None:
            error_messages.append(f"the coded table {prefix.rstrip('.')!r} is damaged: {problem}")
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids `(..., S)`, `(..., S, D)`."""
        ids = ids.long()
        found = self._kernel_rows(ids)
        if found is None:
            if not torch.compiler.is_compiling() and ids.numel():  # a graph cannot look at its ids
                wrong = (ids < 0) | (ids >= self.decoder.num_rows[self.tables])
                if bool(wrong.any()):
                    raise IndexError(f"id {int(ids[wrong][0])} has no row in its table")
            with torch.no_grad():
                found = self.decoder(self.blob, ids, self.tables)
        return found.to(self.like.dtype)

    def _kernel_rows(self, ids: Tensor) -> Tensor | None:
        # A traced or compiled model must consist of torch's own operations.
        if torch.compiler.is_compiling() or is_tracing():
            return None
        ids = ids.contiguous()  # a column of a batch has gaps
        if rows_triton.suits(ids, self.blob):
            return rows_triton.coded_rows(ids, self.blob, self.decoder, self.tables)
        kernel = None if ids.is_cuda else coded_kernel()
        return None if kernel is None else kernel.rows(ids, self.blob, self.decoder, self.tables)


@dataclass(frozen=True)
class Origin:
    """The table that a coded one was made from, without its rows."""

    rows: int
    width: int
    padding: int | None = None
    sparse: bool = False
    """Whether it had sparse gradients; the merged table has them again."""
    methods: tuple[Method, ...] = ()
    """The methods that were merged."""


class CodedTable(_Coded, Table):
    """A frozen table whose rows have as many bits as their class."""

    def __init__(self, method: Method, blob: Tensor, like: Tensor, origin: Origin) -> None:
        super().__init__(
            method,
            None,
            num_embeddings=origin.rows,
            embedding_dim=origin.width,
            padding_idx=origin.padding,
        )
        self.origin = origin
        self.source: Tensor | None = None
        """The rows to be coded, until `put` brings the bytes."""
        self.register_buffer("like", like.new_empty(0))
        self.register_buffer("tables", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.put(blob)

    def put(self, blob: Tensor) -> None:
        """Replace the list of bytes, or raise `ValueError`."""
        layout, size = Layout.read(blob, self.origin.rows, self.origin.width)
        if size != len(blob):
            raise ValueError(f"it has {len(blob)} bytes, and its table takes {size}")
        self.layout, self.source = layout, None
        self.decoder = Decoder([layout], [0])
        self.register_buffer("blob", blob)
        self.to(self.like.device)

    def rows(self, ids: Tensor) -> Tensor:
        """Return m_c + Σ_j (q_ij - 2^(b_cj - 1) + 1/2) s_cj u_j."""
        return self._look_up(ids.unsqueeze(-1)).squeeze(-2)

    @property
    def sparse(self) -> bool:
        """Whether the merged table gets sparse gradients."""
        return self.origin.sparse

    @property
    def methods(self) -> tuple[Method, ...]:
        """All methods that were applied, the merged ones first."""
        return (*self.origin.methods, self.method)

    @property
    def num_weights(self) -> int:
        """The integers of all rows, however few bits each of them has, or none."""
        return self.num_embeddings * self.embedding_dim


class CodedStack(_Coded, Stack):
    """Coded tables in one list of bytes, behind one lookup."""

    def __init__(
        self, method: Method, tables: Sequence[CodedTable], lengths: Sequence[int]
    ) -> None:
        super().__init__(lengths)
        self.method, self.origins = method, [table.origin for table in tables]
        self.register_buffer("like", tables[0].like)
        self.register_buffer("tables", self.field_of_slot.clone(), persistent=False)
        self.put(torch.cat([table.blob for table in tables]))

    def put(self, blob: Tensor) -> None:
        """Replace the list of bytes, or raise `ValueError`."""
        layouts, places, blob = [], [0], torch.atleast_1d(blob)
        for origin in self.origins:
            layout, size = Layout.read(blob[places[-1] :], origin.rows, origin.width)
            layouts.append(layout)
            places.append(places[-1] + size)
        if places[-1] != len(blob):
            raise ValueError(f"it has {len(blob)} bytes, and its tables take {places[-1]}")
        self.places = places
        self.decoder = Decoder(layouts, places[:-1])
        self.register_buffer("blob", blob)
        self.to(self.like.device)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of each field's table."""
        return self._look_up(ids)

    def split(self) -> list[AnyTable]:
        """Return the tables one by one; bytes are shared with the stack, not copied."""
        parts = zip(self.origins, self.places, self.places[1:], strict=False)
        return [
            CodedTable(self.method, self.blob[start:end], self.like, origin)
            for origin, start, end in parts
        ]


def pack_codes(layout: Layout, numbers: Bytes) -> Bytes:
    """Return the integers q `(n, r)` of the rows as bits, eight per byte, the lowest first; in chunks of rows."""
    rest = np.zeros(0, np.uint8)
    packed = []
    classes = layout.class_of_rows
    for start in range(0, len(classes), CHUNK):
        kinds, some = classes[start : start + CHUNK], numbers[start : start + CHUNK]
        lengths = layout.bits_of_row[kinds]
        ends = np.cumsum(lengths)
        bits = np.zeros(int(ends[-1]), np.uint8)
        for kind in np.unique(kinds):
            rows = np.flatnonzero(kinds == kind)
            place = (ends - lengths)[rows]
            for direction in np.flatnonzero(layout.bits[kind]):
                for bit in range(layout.bits[kind, direction]):
                    bits[place] = (some[rows, direction] >> bit) & 1
                    place = place + 1
        bits = np.concatenate([rest, bits])
        whole = len(bits) // 8 * 8
        packed.append(np.packbits(bits[:whole], bitorder="little"))
        rest = bits[whole:]
    return np.concatenate([*packed, np.packbits(rest, bitorder="little")])


@functools.cache
def coded_kernel() -> "CodedKernel | None":
    """Return the kernel, compiled and loaded at the first call; None where that is not possible."""
    kernel = load_compiled(SOURCE, _tried, os.environ)
    if kernel is None and not is_switched_off(os.environ):
        _log.warning(
            "no C++ compiler made a kernel for coded tables, so lookups are many times slower; install g++ or "
            "clang++, or set RAREBIT_COMPILE=0 to run without it"
        )
    return kernel


class CodedKernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._fill = library.rarebit_coded_rows
        self._fill.restype = c_int64
        self._fill.argtypes = (
            *(c_void_p, c_int64, c_int, c_void_p),  # ids, their number, threads, rows to write
            *(c_void_p, c_int64),  # the list, its bytes
            *(c_void_p, c_int64),  # table of each slot, slots
            *(
                c_void_p,
                c_int64,
                c_void_p,
                c_void_p,
                c_void_p,
            ),  # rows of each table; runs: number, row, class, bit
            *(
                c_void_p,
                c_int,
                c_void_p,
                c_void_p,
                c_void_p,
            ),  # classes of rows and their bytes, bits, blocks, first rows
            *(
                c_void_p,
                c_int64,
                c_int64,
                c_void_p,
                c_void_p,
                c_int64,
            ),  # lanes and their number, directions, terms, base, width
            c_void_p,  # bits of a row
        )

    def rows(self, ids: Tensor, blob: Tensor, decoder: Decoder, tables: Tensor) -> Tensor | None:
        """Return the rows `(..., S, D)` of these ids `(..., S)`; None where it cannot, or an id has no row."""
        ids = ids.contiguous()
        kinds = {"terms": torch.float32, "base": torch.float32}
        kinds |= {"row_class": decoder.row_class.dtype, "row_bit": torch.int32}
        kinds["lanes"] = torch.int32
        parts = {**dict(decoder.named_buffers()), "terms": decoder.terms, "base": decoder.base}
        readable = (
            is_plain(ids, torch.int64)
            and is_plain(blob, torch.uint8)
            and is_plain(tables, torch.int64)
            and all(is_plain(part, kinds.get(name, torch.int64)) for name, part in parts.items())
        )
        if not readable:
            return None
        rows = torch.empty(*ids.shape, decoder.width, dtype=torch.float32, device="cpu")
        # In some modes torch makes tensors without storage: there is nothing to write to.
        if not is_plain(rows, torch.float32):
            return None
        at = {name: part.data_ptr() for name, part in parts.items()}
        by_row = bool(len(decoder.row_class))
        done = self._fill(
            *(ids.data_ptr(), ids.numel(), torch.get_num_threads(), rows.data_ptr()),
            *(blob.data_ptr(), len(blob), tables.data_ptr(), len(tables)),
            *(
                at["num_rows"],
                decoder.run_rows.shape[1],
                at["run_rows"],
                at["run_class"],
                at["run_bit"],
            ),
            *(at["row_class"] if by_row else None, decoder.row_class.itemsize),
            *(at["row_bit"], at["block_bit"], at["first_row"]),
            *(at["lanes"], decoder.lanes.shape[1], decoder.num_directions),
            *(at["terms"], at["base"], decoder.width),
            at["bits_of_row"],
        )
        return rows if done == ids.numel() else None


def _tried(library: ctypes.CDLL) -> CodedKernel | None:
    """Return a kernel that finds the rows of small tables in both forms, and refuses an id beyond."""
    kernel = CodedKernel(library)
    # rows of the last class have no bits: nothing but their number shows that an id is beyond
    bits = np.zeros((3, 10), np.uint8)
    bits[0], bits[1, 1] = (3, 7, 5, 8, 8, 8, 8, 8, 8, 6), 2
    order = np.arange(200)
    ids, zero = torch.arange(200).view(-1, 1), torch.zeros(1, dtype=torch.int64)
    forms = ((order + 1) % 3, np.searchsorted([2, 150], order, side="right"))
    for classes, width in itertools.product(forms, (16, 11)):  # a whole vector, and not
        basis, means = np.eye(10, width), np.arange(3.0 * width).reshape(3, width)
        layout = Layout.of(classes.astype(np.uint8), basis, means, bits, 192 + bits)
        numbers = np.arange(2000).reshape(200, 10) ** 2 // 3 % 2 ** bits[classes].astype(np.int64)
        blob = layout.write(pack_codes(layout, numbers.astype(np.uint8)))
        decoder = Decoder([layout], [0])
        rows = kernel.rows(ids, blob, decoder, zero)
        if rows is None or not torch.equal(rows, decoder(blob, ids, zero)):
            return None
        if kernel.rows(ids + 1, blob, decoder, zero) is not None:
            return None
    return kernel
