"""Reading ahead: the next rows are read while these are encoded."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["one_ahead"]

T = TypeVar("T")


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items in order, each while a thread makes the next one.

    >>> list(one_ahead(range(3)))
    [0, 1, 2]
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]  # not the end, so an item
