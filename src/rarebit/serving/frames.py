"""The stream between the front and a worker: frames of a JSON header and a body of bytes.

4 bytes: length of the header   4 bytes: length of the body   header   body
"""

import struct
from typing import Any, NamedTuple

import orjson

SIZES = struct.Struct("<II")


class Frame(NamedTuple):
    """One message."""

    header: dict[str, Any]
    body: bytes = b""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of a frame.

    >>> Inbox().feed(pack({"id": 1}, b"body"))
    [Frame(header={'id': 1}, body=b'body')]
    """
    text = orjson.dumps(header)
    return b"".join((SIZES.pack(len(text), len(body)), text, body))


class Inbox:
    """Bytes as they arrive; whole frames come out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes and return the frames that are whole."""
        self._bytes += data
        frames, start = [], 0
        while len(self._bytes) - start >= SIZES.size:
            header, body = SIZES.unpack_from(self._bytes, start)
            middle = start + SIZES.size + header
            if len(self._bytes) < middle + body:
                break
            text = orjson.loads(self._bytes[start + SIZES.size : middle])
            frames.append(Frame(text, bytes(self._bytes[middle : middle + body])))
            start = middle + body
        del self._bytes[:start]
        return frames
