"""Iterators that are let go of when their reader stops, and not when memory is next tidied up."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def closed_after(items: Iterable[Item]) -> Iterator[Iterator[Item]]:
    """Give an iterator over the items; a generator is closed when the block ends, however it ends."""
    iterator = iter(items)
    try:
        yield iterator
    finally:
        if isinstance(iterator, Generator):
            iterator.close()
