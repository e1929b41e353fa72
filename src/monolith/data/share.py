"""Which share of the data this process reads.

Several workers that train together must not read the same records. A task says nothing of that:
sources that are made while `reading_share` is in force read the share of this worker.

    with reading_share(Share(1, 4)) as asked:
        stream = task.dataset(Mode.TRAIN)       # its FileSource takes every fourth file
    asked.by_anyone                             # False: every worker would read everything
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from monolith.errors import ConfigError


class Share(NamedTuple):
    """One of several equal parts of the data."""

    worker: int = 0
    workers: int = 1


@dataclass(slots=True)
class Asked:
    """Whether a source wanted to know which share is its own."""

    share: Share
    by_anyone: bool = False


_asked: ContextVar[Asked | None] = ContextVar("share", default=None)


@contextmanager
def reading_share(share: Share) -> Iterator[Asked]:
    """Give the sources that are made in this block one share of their data.

    Raises:
        ConfigError: There is no such share.
    """
    if share.workers < 1 or not 0 <= share.worker < share.workers:
        raise ConfigError(f"data: there is no worker {share.worker} of {share.workers}")
    asked = Asked(share)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def my_share() -> Share:
    """Return the share that is to be read now: all of it, outside of `reading_share`."""
    asked = _asked.get()
    if asked is None:
        return Share()
    asked.by_anyone = True
    return asked.share


def share_of(source: str, worker: int | None, num_workers: int | None) -> Share:
    """Return the share that a source's arguments name, or this process's where they name none.

    Raises:
        ConfigError: There is no such share, or there is only half of a name.
    """
    mine = my_share()
    if num_workers is None:
        if worker and worker >= mine.workers:
            raise ConfigError(
                f"{source}: there is no worker {worker} of {mine.workers}; give num_workers with it"
            )
        return mine if worker is None else Share(worker, mine.workers)
    if num_workers < 1 or not 0 <= (worker or 0) < num_workers:
        raise ConfigError(f"{source}: there is no worker {worker} of {num_workers}")
    return Share(worker or 0, num_workers)
