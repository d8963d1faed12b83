"""A delta: a small file that turns an exported file into the next one, bit for bit.

    monday.onnx      copied ──────┐    copied ──┐          copied ──┐
    tuesday.delta           new ──┤       new ──┤                   │
    tuesday.onnx     ─────────────┴─────────────┴───────────────────┘

An ONNX file is cut into pieces: rows of tensors, values of vocabularies, and the fields between them. A piece that
the base has, at any place, is copied from there; every other piece is in the delta. So a table may grow in the middle (all fields of a
model lie in one table), a value may be removed or replaced, and weights may change; a value that is not copied is gone.

The file is safetensors, with a description in JSON:

    literals     the bytes of all new pieces
    steps        three numbers per step, 7 bits per byte: so many bytes of `literals`; then move so far in the base, and copy
                 so many of its bytes

Applying needs numpy and safetensors only: a server without torch and onnx can do it.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rarebit.errors import ExportError, ModelFileError

FORMAT, METADATA = 1, "rarebit_delta"
LARGEST = 1 << 31
"""Bytes of a file: an ONNX file has fewer."""
CHUNK = 1 << 22
SHORT = 12
"""Letters of a checksum that name a version, as in an answer of the server."""

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Delta:
    """A delta that was read and found consistent: it can be applied to a base of the right checksum."""

    base: str
    """The checksum of the file that it is for."""
    base_bytes: int
    result: str
    """The checksum of the file that it makes."""
    result_bytes: int
    literals: Bytes
    steps: Numbers
    """`(steps, 3)`: bytes of `literals`, where the copied bytes start in the base, and how many they are."""

    @property
    def base_version(self) -> str:
        """The version that it is for, as a server names it."""
        return self.base[:SHORT]

    @property
    def version(self) -> str:
        """The version that it makes."""
        return self.result[:SHORT]

    def apply(self, base: Path, out: Path) -> None:
        """Write the new file; raise where the base is another file."""
        data, digest = _read(base), hashlib.sha256()
        found = hashlib.sha256(data).hexdigest()
        if found != self.base or len(data) != self.base_bytes:
            raise ModelFileError(
                f"the delta is for version {self.base_version}; {base.name!r} is version {found[:SHORT]}"
            )
        with out.open("xb") as file:
            for chunk in self._chunks(memoryview(data)):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != self.result:
            out.unlink()
            raise ModelFileError("the delta is damaged: what it makes has another checksum")

    def _chunks(self, base: memoryview) -> Iterator[bytes]:
        """Yield the new file in chunks: a thread that hashes piece by piece would wait for the others each time."""
        literals, end = self.literals.data, 0
        parts, size = list[memoryview](), 0
        for literal, source, copied in self.steps.tolist():
            start, end = end, end + literal
            parts += (literals[start:end], base[source : source + copied])
            size += literal + copied
            if size >= CHUNK:
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join(parts)


def read_delta(path: str | os.PathLike[str]) -> Delta:
    """Read a delta; raise where it is damaged, or would read or write beyond the sizes that it names."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = _read(Path(path))
    try:
        found = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        described = json.loads(header["__metadata__"][METADATA])
        return _checked(described, found)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{str(path)!r} is no delta, or a damaged one: {error}") from None


def _checked(described: dict[str, Any], found: dict[str, NDArray[Any]]) -> Delta:
    if described["format"] != FORMAT:
        raise ValueError(f"it is of format {described['format']!r}; this version reads {FORMAT}")
    if sorted(found) != ["literals", "steps"]:
        raise ValueError("it must have the tensors literals and steps")
    if any(one.dtype != np.uint8 or one.ndim != 1 for one in found.values()):
        raise ValueError("its tensors must be lists of bytes")
    base_bytes, result_bytes = (described[name] for name in ("base_bytes", "result_bytes"))
    if not all(type(size) is int and 0 < size < LARGEST for size in (base_bytes, result_bytes)):
        raise ValueError(f"the sizes of its files must lie in [1, {LARGEST - 1}]")
    base, result = described["base"], described["result"]
    if not all(isinstance(one, str) and len(one) == 64 for one in (base, result)):
        raise ValueError("its checksums must have 64 letters")
    literals, steps = found["literals"], _decoded(found["steps"])
    if steps[:, 0].sum() != len(literals) or steps[:, [0, 2]].sum() != result_bytes:
        raise ValueError("its steps do not make a file of the size that it names")
    if steps[:, 1].min(initial=0) < 0 or (steps[:, 1] + steps[:, 2]).max(initial=0) > base_bytes:
        raise ValueError("its steps copy from beyond its base")
    return Delta(base, base_bytes, result, result_bytes, literals, steps)


def apply_delta(
    base: str | os.PathLike[str], delta: str | os.PathLike[str], out: str | os.PathLike[str]
) -> Path:
    """Write the file that a delta makes of its base, bit for bit; return its path.

    >>> import tempfile
    >>> from onnx import ModelProto
    >>> with tempfile.TemporaryDirectory() as name:
    ...     monday, tuesday, delta = (Path(name) / day for day in ("monday", "tuesday", "delta"))
    ...     for path, producer in ((monday, "ann"), (tuesday, "bob")):
    ...         _ = path.write_bytes(ModelProto(producer_name=producer).SerializeToString())
    ...     _ = write_delta(monday, tuesday, delta)
    ...     made = apply_delta(monday, delta, Path(name) / "made").read_bytes()
    >>> ModelProto.FromString(made).producer_name
    'bob'
    """
    from rarebit.storage.files import write_file

    found = read_delta(delta)
    return write_file(
        Path(out), lambda partial: found.apply(Path(base), partial), error=ExportError
    )


def write_delta(
    base: str | os.PathLike[str], new: str | os.PathLike[str], out: str | os.PathLike[str]
) -> Path:
    """Write the delta between two exported files, and check that it makes the new one; return its path.

    A file whose weights lie in a second file, as beyond 2 GB, has no delta.
    """
    from safetensors.numpy import save_file

    from rarebit.storage.files import write_file

    files = [_File(Path(one)) for one in (base, new)]
    literals, steps = _difference(*files)
    described = {
        "format": FORMAT,
        "base": hashlib.sha256(files[0].raw).hexdigest(),
        "base_bytes": len(files[0].data),
        "result": hashlib.sha256(files[1].raw).hexdigest(),
        "result_bytes": len(files[1].data),
    }
    tensors = {"literals": literals, "steps": _coded(steps)}

    def save(partial: Path) -> None:
        save_file(tensors, partial, {METADATA: json.dumps(described)})
        made = partial.with_name(f"{partial.name}.made")
        try:
            read_delta(partial).apply(Path(base), made)
        finally:
            made.unlink(missing_ok=True)

    return write_file(Path(out), save, error=ExportError)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None


# ------------------------------------------------------------------------------------------ numbers of 7 bits per byte


def _coded(steps: Numbers) -> Bytes:
    """Return steps as bytes: literal bytes, the move in the base (its sign in the lowest bit), copied bytes."""
    ends = steps[:, 1] + steps[:, 2]
    moves = steps[:, 1] - np.concatenate([[0], ends[:-1]])
    numbers = np.stack([steps[:, 0], (moves << 1) ^ (moves >> 63), steps[:, 2]], axis=1).reshape(-1)
    parts = numbers[:, None] >> np.arange(0, 35, 7)  # the lowest bits first
    bits = (parts & 127).astype(np.uint8)
    bits[:, :-1] |= (parts[:, 1:] > 0).astype(np.uint8) << 7  # another byte follows
    is_used = parts > 0
    is_used[:, 0] = True
    return bits[is_used]


def _decoded(coded: Bytes) -> Numbers:
    """Return the steps that bytes stand for; the inverse of `_coded`."""
    last = np.flatnonzero(coded < 128)
    if len(coded) == 0 or last[-1:].tolist() != [len(coded) - 1] or len(last) % 3:
        raise ValueError("its steps are cut off")
    first = np.concatenate([[0], last[:-1] + 1])
    lengths = last - first + 1
    if lengths.max() > 5:
        raise ValueError("its steps have a number that is too large")
    shifts = 7 * (np.arange(len(coded)) - np.repeat(first, lengths))
    numbers = np.add.reduceat((coded & 127).astype(np.int64) << shifts, first)
    if numbers.max() >= 2 * LARGEST:
        raise ValueError("its steps have a number that is too large")
    steps = numbers.reshape(-1, 3)
    moves = (steps[:, 1] >> 1) ^ -(steps[:, 1] & 1)
    steps[:, 1] = np.cumsum(moves) + np.cumsum(steps[:, 2]) - steps[:, 2]
    return steps


# ------------------------------------------------------------------------------------------ the difference

INSIDE = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph"},
    "tensor": dict[int, str](),
}
"""Messages of ONNX, and which of their fields are messages again, down to tensors."""
DIMS, RAW_DATA, EXTERNAL_DATA = 1, 9, 13
"""Fields of a tensor."""
VARINT, BYTES, FIXED = 0, 2, {1: 8, 5: 4}
"""Types on the wire of protobuf, and the bytes of those of a fixed size."""
LONGEST = 4096
"""Bytes of a piece."""
WORTH = 24
"""Bytes that are copied from another place; fewer are not worth a step."""


class _File:
    """An ONNX file in pieces."""

    def __init__(self, path: Path) -> None:
        self.raw = _read(path)
        self.data = np.frombuffer(self.raw, np.uint8)
        starts: list[int] = []
        try:
            self._walk(0, len(self.raw), "model", starts)
        except (ValueError, IndexError, RecursionError) as error:
            raise ExportError(f"{str(path)!r} has no delta: {error}") from None
        self.at = np.array([*starts, len(self.raw)], np.int64)
        """Where each piece starts, and the end of the last one."""
        self.hashes = _hashes(self.data, self.at)

    def _walk(self, start: int, end: int, kind: str, starts: list[int]) -> None:
        """Append the starts of the pieces of a message: its fields, and the rows of tensors."""
        dims: list[int] = []
        for number, wire, begin, content, stop in self._fields(start, end):
            starts.append(begin)
            longest = LONGEST
            if kind == "tensor":
                if number == EXTERNAL_DATA:
                    raise ValueError("its weights lie in a second file; serve the whole new file")
                if number == DIMS and wire == VARINT:
                    dims.append(self._number(content)[0])
                if number == RAW_DATA:  # rows; of a list, single numbers
                    rows = math.prod(dims[:-1] or dims)
                    longest = min((stop - content) // max(rows, 1) or 1, LONGEST)
            if wire == BYTES and number in INSIDE[kind]:
                self._walk(content, stop, INSIDE[kind][number], starts)
            elif wire == BYTES and stop - content > longest:
                starts += range(content, stop, longest)

    def _fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the fields of a message: number, type on the wire, start, start of the content, end."""
        while start < end:
            tag, content = self._number(start)
            wire, stop = tag & 7, content
            if wire == VARINT:
                stop = self._number(content)[1]
            elif wire == BYTES:
                size, content = self._number(content)
                stop = content + size
            else:
                stop += FIXED.get(wire, LARGEST)
            if stop > end:
                raise ValueError("it is no ONNX file")
            yield tag >> 3, wire, start, content, stop
            start = stop

    def _number(self, place: int) -> tuple[int, int]:
        """Return a number of 7 bits per byte, and the place behind it."""
        value = shift = 0
        while shift < 70:
            byte = self.raw[place]
            value |= (byte & 127) << shift
            place, shift = place + 1, shift + 7
            if byte < 128:
                return value, place
        raise ValueError("it is no ONNX file")


def _hashes(data: Bytes, at: Numbers) -> NDArray[np.uint64]:
    """Return a number per piece; equal pieces have equal numbers, and others hardly ever."""
    lengths = np.diff(at)
    found = np.empty(len(lengths), np.uint64)
    for length in np.unique(lengths).tolist():
        chosen = np.flatnonzero(lengths == length)
        padded = np.zeros((len(chosen), -(-length // 8) * 8), np.uint8)
        padded[:, :length] = np.lib.stride_tricks.sliding_window_view(data, length)[at[chosen]]
        mixed = np.full(len(chosen), length, np.uint64)
        for word in padded.view(np.uint64).T:
            mixed = (mixed ^ word) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        found[chosen] = mixed
    return found


def _difference(base: _File, new: _File) -> tuple[Bytes, Numbers]:
    """Return the bytes that the base does not have, and the steps that make the new file.

    Pieces are compared in order. After pieces that differ, the next one is expected at the same distance, since most
    changes are in place; otherwise at the first place that has it.
    """
    order = np.argsort(base.hashes, kind="stable")
    ordered = base.hashes[order]
    places = np.minimum(np.searchsorted(ordered, new.hashes), len(ordered) - 1)
    firsts = np.where(ordered[places] == new.hashes, order[places], -1)
    known = np.append(np.flatnonzero(firsts >= 0), len(firsts))
    steps: list[tuple[int, int, int]] = []
    taken = here = there = (
        0  # pieces: the new ones up to `taken` have a step; `here` in the new file, `there` in the base
    )
    while here < len(firsts):
        count = _equal(base, new, there, here)
        if not count and (first := int(firsts[here])) >= 0:
            count = _equal(base, new, first, here)
            if new.at[here + count] - new.at[here] < WORTH:
                count = 0
            else:
                there = first
        if count:
            literal, copied = new.at[here] - new.at[taken], new.at[here + count] - new.at[here]
            steps.append((literal, base.at[there], copied))
            taken = here = here + count
        else:
            count = int(known[np.searchsorted(known, here, side="right")]) - here
            here += count
        there += count
    steps.append((new.at[here] - new.at[taken], 0, 0))
    found = np.array(steps, np.int64)
    starts = np.cumsum(found[:, [0, 2]].sum(axis=1)) - found[:, [0, 2]].sum(axis=1)
    parts = [
        new.data[start : start + size] for start, size in zip(starts, found[:, 0], strict=True)
    ]
    return np.concatenate(parts), found


def _equal(base: _File, new: _File, there: int, here: int) -> int:
    """Return how many pieces are equal from two places on."""
    count, block = 0, 16
    while True:
        one = base.hashes[there + count : there + count + block]
        other = new.hashes[here + count : here + count + block]
        size = min(len(one), len(other))
        differs = np.flatnonzero(one[:size] != other[:size])
        if len(differs):
            return count + int(differs[0])
        count += size
        if size < block:
            return count
        block *= 4
