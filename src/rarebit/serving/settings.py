"""The settings of a server."""

from dataclasses import dataclass, field

from rarebit.settings import check_types, require


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of a server.

    >>> ServeSettings(port=0, workers=2).max_rows
    10000
    """

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 for all IPv4 addresses of the machine."""
    port: int = 8000
    """The port to listen on. 0 for any free port, which is printed."""
    workers: int = 1
    """Worker processes per model."""
    threads: int = 1
    """Threads of ONNX Runtime per worker process."""
    max_rows: int = 10_000
    """Maximum rows per request."""
    max_bytes: int = 16_000_000
    """Maximum bytes of a request body, also after it is decompressed."""
    wait_ms: float = 1.0
    """Maximum milliseconds that a request waits for others to be scored in the same batch. A worker waits only
    while requests arrive in parallel."""
    timeout: float = 30.0
    """Maximum seconds to read a request, and maximum seconds to answer it."""
    queue: int = 256
    """Maximum requests that wait for an answer; further ones are refused with status 503."""
    token: str = field(default="", repr=False)
    """The token that every request but those for health needs. Empty: none."""
    access_log: bool = False
    """Log every request, without its rows."""

    def __post_init__(self) -> None:
        check_types(self, where="serve")
        require(0 <= self.port < 1 << 16, f"port must lie in [0, 65535], got {self.port}")
        for name in ("workers", "threads", "max_rows", "max_bytes", "queue"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {name}={value}")
        require(
            0 <= self.wait_ms <= 1000, f"wait_ms must lie in [0, 1000], got wait_ms={self.wait_ms}"
        )
        require(self.timeout > 0, f"timeout must be more than 0, got timeout={self.timeout}")
        require(self.max_bytes < 1 << 31, f"max_bytes must be below 2 GiB, got {self.max_bytes}")
        require(
            self.token.isascii() and self.token.isprintable() and " " not in self.token,
            "the token must consist of visible ASCII characters",
        )
