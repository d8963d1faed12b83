"""The bytes of a file, decompressed, with a clear word where they cannot be had."""

import bz2
import gzip
import lzma
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from rarebit.errors import DataError

__all__ = ["COMPRESSED", "ByteStream", "cannot_read"]

COMPRESSED = (".gz", ".bz2", ".xz")
PIECE_BYTES = 1 << 20


class ByteStream:
    """The bytes of one file, in order. Damage in a compressed file is met where it is, not before.

    What was whole before the damage is returned first; `failure` then says what is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure = ""
        try:
            if path.is_dir():
                raise DataError(f"{str(path)!r} is a folder where a file was expected")
            self.disk = path.open("rb")
        except OSError as error:
            raise cannot_read(path, error) from None
        self._before = self._state()
        self._file = _decompressed(self.disk, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self.disk.close()

    @property
    def position(self) -> int:
        """How many bytes of the file on the disk have been read."""
        return self.disk.tell()

    @property
    def total(self) -> int:
        """How many bytes the file on the disk has."""
        return self._before[0]

    def read(self, size: int) -> tuple[bytes, bool]:
        """Return the next bytes, to the end of a line if it is near, and whether they are the last."""
        pieces, left = [], size
        while left:
            piece = self._read_piece(
                min(left, PIECE_BYTES) if self._file is not self.disk else left
            )
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        if not left and not pieces[-1].endswith(b"\n"):
            pieces.append(self._read_piece(PIECE_BYTES, to_line_end=True))
        return b"".join(pieces), bool(left)

    def _read_piece(self, size: int, *, to_line_end: bool = False) -> bytes:
        if self.failure:
            return b""
        try:
            if to_line_end:
                return self._file.readline(size)
            # read1 gives what was decompressed so far; read would lose it where damage follows
            return cast("gzip.GzipFile", self._file).read1(size)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            self.failure = f"the file is cut off or damaged ({str(error).rstrip('.')})"
        return b""

    def check_unchanged(self) -> None:
        """Raise where the file is not the one that was opened: it was written to in between."""
        after = self._state()
        if after != self._before:
            raise DataError(
                f"{str(self.path)!r} changed while it was read: {self._before[0]:,} bytes before, "
                f"{after[0]:,} after; read it again when nothing writes to it"
            )

    def _state(self) -> tuple[int, int]:
        """Return the size and the time of the last change."""
        status = os.fstat(self.disk.fileno())
        return status.st_size, status.st_mtime_ns


def cannot_read(path: Path, error: OSError) -> DataError:
    """Return one sentence on why a file cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{str(path)!r} does not exist; check the name and the folder")
    return DataError(f"cannot read {str(path)!r}: {error.strerror or error}")


def _decompressed(disk: IO[bytes], path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=disk))
        case ".bz2":
            return bz2.BZ2File(disk)
        case ".xz":
            return lzma.LZMAFile(disk)
    return disk
