"""Numbers for people."""

__all__ = ["size"]


def size(num_bytes: float) -> str:
    """Return bytes in the unit that fits.

    >>> size(3_400_000), size(512)
    ('3.4 MB', '512 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"
