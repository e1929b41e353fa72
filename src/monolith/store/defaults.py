"""Where rows live that nobody chose a store for.

A task builds its model without knowing how it will be run. Whoever runs it decides, around
the building:

    with default_stores(make):
        model = task.model()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from monolith.store.local import LocalStore
from monolith.store.store import Store
from monolith.table import SlotThresholds, TableConfig


class MakeStore(Protocol):
    """Makes the store of one collection of features."""

    def __call__(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
    ) -> Store: ...


_MAKERS: dict[int, list[MakeStore]] = {}
"""By thread: those in force, the innermost last. A thread touches its own entry alone."""


@contextmanager
def default_stores(make: MakeStore) -> Iterator[None]:
    """Let `make` decide where rows live, for models that this thread builds inside of the block."""
    thread = threading.get_ident()
    makers = _MAKERS.setdefault(thread, [])
    makers.append(make)
    try:
        yield
    finally:
        makers.pop()
        if not makers:
            del _MAKERS[thread]


def make_store(
    configs: Mapping[str, TableConfig],
    *,
    thresholds: Mapping[str, SlotThresholds] | None = None,
    threads: int | None = None,
) -> Store:
    """Make a store as `default_stores` says; outside of it, a `LocalStore`."""
    makers = _MAKERS.get(threading.get_ident())
    make = makers[-1] if makers else LocalStore.from_configs
    return make(configs, thresholds=thresholds, threads=threads)
