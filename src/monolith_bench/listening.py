"""A synthetic log of listening to music in the shape of MLPerf's recommender data: days, and long histories.

Users listen to tracks (items) of albums of artists, which uploaders provide. A user likes two genres at a
time and changes one of them now and then, and listens to more or fewer tracks to their end from day to day.
The popular tracks of a genre change a little every day. The label is a coin thrown with a probability that
depends on all of these, so that the best score a model can reach is known. What a user likes, and how ready
to listen a user is, are in no column: only the history shows them.

Every user has a history before day 0. Then each day has the same number of examples, in the order of time:

    log = ListeningLog(ListeningConfig(users=500, items=2000, max_length=64, days=3, examples=4000))
    source = ListeningDays(log, batch_size=64, first=0, last=1)      # days 0 and 1, as records
    batches = Pipeline(source).to_batches(feature_spec(max_length=64))

The history of an example is a range of its user's events, in the order of time, that ends before the example
itself. It is read from arrays, so a source of these records needs no state but its position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data import Source
from monolith.data.records import Records
from monolith.data.source import Position
from monolith.data.synthetic.click_log import ranks
from monolith.errors import ConfigError, RestoreError
from monolith.feature import FeatureSpec, HistoryFeature, IdFeature, Label
from monolith.nn import auc
from monolith.tensors import RaggedTensor, ranges

TABLES = (
    "item",
    "artist",
    "album",
    "genre",
    "uploader",
    "user",
    "action",
    "device",
    "hour",
    "weekday",
    "surface",
)
"""The features of IDs, each with a table of its own. A step of a history has an item, its artist, album and
genre, an action and a time."""
STEPS = ("artist", "album", "genre", "action")
"""What is kept along with each item of a history, in addition to its time."""
LABEL = "listen_plus"
"""Whether the user listened to the track, or to most of it."""
ACTIONS = ("skip", "part", "listen_plus", "like")
"""What a user does, by the ID of the action. The last two are what the label says."""
DAY = 86_400

_DEVICES, _SURFACES = 5, 6
_DAYS_BEFORE = 60
"""Days over which the events before day 0 are spread."""
_START = 1_704_067_200
"""The Unix second at which day 0 begins, a Monday."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningConfig:
    """The sizes of a `ListeningLog`."""

    users: int
    items: int
    max_length: int
    """The most steps of a history. Before day 0 half of the users have at least half as many events."""
    days: int
    examples: int
    """Of each day."""
    genres: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "max_length", "days", "examples", "genres"):
            if getattr(self, name) < 1:
                raise ConfigError(f"listening log: {name} must be at least 1, got {getattr(self, name)}")

    @property
    def sizes(self) -> dict[str, int]:
        """How many IDs each of `TABLES` may have, in their order."""
        albums, artists = max(self.items // 4, 1), max(self.items // 10, 1)
        uploaders = max(self.items // 40, 1)
        counts = (
            *(self.items, artists, albums, self.genres, uploaders, self.users),
            *(len(ACTIONS), _DEVICES, 24, 7, _SURFACES),
        )
        return dict(zip(TABLES, counts, strict=True))


class ListeningLog:
    """All events of a `ListeningConfig`, in memory, in the order of time.

    Examples are the events from day 0 on; example n of day t is example number t * examples + n.

    Attributes:
        times: int64 of shape (events,): Unix seconds, which never fall.
        probabilities: float64 of shape (examples of all days,): of the label, from which it was drawn.
    """

    def __init__(self, config: ListeningConfig) -> None:
        self.config = config
        random = np.random.default_rng(config.seed)
        sizes = config.sizes
        artist_of_album = random.integers(0, sizes["artist"], sizes["album"])
        self._album_of = random.integers(0, sizes["album"], config.items)
        self._artist_of = artist_of_album[self._album_of]
        self._genre_of = random.integers(0, config.genres, sizes["artist"])[self._artist_of]
        self._uploader_of = random.integers(0, sizes["uploader"], sizes["artist"])[self._artist_of]
        quality = random.normal(0.0, 0.5, config.items)

        # Which users listen, and when: before day 0 some users far more than others, then as many every day.
        lengths = np.exp(random.normal(math.log(config.max_length / 2), 0.8, config.users))
        lengths = np.clip(lengths, 4, 2 * config.max_length).astype(np.int64)
        before, after = int(lengths.sum()), config.days * config.examples
        regular = ranks(random.random(after), config.users, 0.6) - 1
        users = np.concatenate([np.repeat(np.arange(config.users), lengths), regular])
        days = np.concatenate(
            [
                random.integers(-_DAYS_BEFORE, 0, before),
                np.repeat(np.arange(config.days), config.examples),
            ]
        )
        # The sum of two draws: most events are in the middle of the day.
        seconds = ((random.random(before + after) + random.random(before + after)) * DAY / 2).astype(np.int64)
        times = _START + days * DAY + seconds
        order = np.argsort(times, kind="stable")
        self.times, users, days = times[order], users[order], days[order]

        # What they listen to. Half of the time a genre that they like; otherwise any of them, by popularity.
        tastes = _tastes(random, config)
        liked = tastes[days + _DAYS_BEFORE, users, random.integers(0, 2, len(users))]
        other = ranks(random.random(len(users)), config.genres, 0.8) - 1
        genres = np.where(random.random(len(users)) < 0.5, liked, other)
        items = self._pick(random, genres, days)
        genres = self._genre_of[items]  # that of the item: a genre without artists has no items
        matches = (tastes[days + _DAYS_BEFORE, users] == genres[:, None]).any(1)
        surfaces = random.integers(0, _SURFACES, len(users))
        moods = _moods(random, config)[days + _DAYS_BEFORE, users]
        surface = (surfaces - _SURFACES / 2) / _SURFACES
        logits = -0.8 + 1.5 * matches + 1.2 * moods + quality[items] + 0.3 * surface
        probabilities = 1 / (1 + np.exp(-logits))
        listened = random.random(len(users)) < probabilities
        # 2 and 3 if the user listened, of which one in five likes the track; otherwise 0 and 1.
        more = random.random(len(users)) < np.where(listened, 0.2, 0.4)
        devices = users % _DEVICES
        elsewhere = random.random(len(users)) < 0.1
        devices[elsewhere] = random.integers(0, _DEVICES, int(elsewhere.sum()))
        self.probabilities = probabilities[before:]
        self._first_example = before
        self._users, self._items = users.astype(np.int32), items.astype(np.int32)
        self._actions = (2 * listened + more).astype(np.int8)
        self._devices, self._surfaces = devices.astype(np.int8), surfaces.astype(np.int8)

        # The same events by user, each user's in the order of time: a history is a range of these.
        self._by_user = np.argsort(self._users, kind="stable")
        self._place = np.empty(len(users), np.int64)
        self._place[self._by_user] = np.arange(len(users))
        self._begins = np.concatenate(
            [np.zeros(1, np.int64), np.bincount(self._users, minlength=config.users).cumsum()]
        )
        self._steps = {
            "item": self._items[self._by_user],
            "action": self._actions[self._by_user],
            "time": self.times[self._by_user],
        }

    def __len__(self) -> int:
        """Return the number of examples of all days."""
        return self.config.days * self.config.examples

    def best_auc(self, day: int) -> float:
        """Return the AUC of the probabilities of a day, which no model is expected to beat."""
        rows = slice(day * self.config.examples, (day + 1) * self.config.examples)
        return auc(torch.from_numpy(self.probabilities[rows]), self._labels(rows))

    def popularity_auc(self, day: int) -> float:
        """Return the AUC of the share of listeners among those that were offered an item before a day."""
        first = self._first_example + day * self.config.examples
        count = np.bincount(self._items[:first], minlength=self.config.items)
        wanted = np.bincount(self._items[:first], self._actions[:first] >= 2, self.config.items)
        shares = (wanted + 1) / (count + 2)
        rows = slice(day * self.config.examples, (day + 1) * self.config.examples)
        scores = shares[self._items[first : first + self.config.examples]]
        return auc(torch.from_numpy(scores), self._labels(rows))

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """Return how many steps the histories of examples [first, last) have."""
        events = np.arange(first, last) + self._first_example
        before = self._place[events] - self._begins[self._users[events]]
        lengths: NDArray[np.int64] = np.minimum(before, self.config.max_length)
        return lengths

    def records(self, first: int, last: int) -> Records:
        """Return examples [first, last), with their histories as list columns."""
        events = np.arange(first, last) + self._first_example
        lengths = torch.from_numpy(self.lengths(first, last))
        places = ranges(torch.from_numpy(self._place[events]) - lengths, lengths).numpy()
        items, steps, times = self._items[events], self._steps["item"][places], self.times[events]
        one_each: dict[str, NDArray[Any]] = {
            "item": items,
            "artist": self._artist_of[items],
            "album": self._album_of[items],
            "genre": self._genre_of[items],
            "uploader": self._uploader_of[items],
            "user": self._users[events],
            "device": self._devices[events],
            "hour": times % DAY // 3600,
            "weekday": times // DAY % 7,
            "surface": self._surfaces[events],
            "time": times,
        }
        lists: dict[str, NDArray[Any]] = {
            "history": steps,
            "history.artist": self._artist_of[steps],
            "history.album": self._album_of[steps],
            "history.genre": self._genre_of[steps],
            "history.action": self._steps["action"][places],
            "history.time": self._steps["time"][places],
        }
        singles = torch.arange(last - first + 1)
        splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        columns = {name: RaggedTensor(_int64(found), singles) for name, found in one_each.items()}
        columns |= {name: RaggedTensor(_int64(found), splits) for name, found in lists.items()}
        # The action is what is to be predicted: an example has none, only the steps before it have.
        columns["action"] = RaggedTensor(torch.empty(0, dtype=torch.int64), torch.zeros_like(singles))
        columns[LABEL] = RaggedTensor(self._labels(slice(first, last)), singles)
        return Records(last - first, columns, complete=True)

    def _labels(self, examples: slice) -> Tensor:
        first = self._first_example
        return torch.from_numpy(
            (self._actions[first + examples.start : first + examples.stop] >= 2).astype(np.float32)
        )

    def _pick(
        self, random: np.random.Generator, genres: NDArray[np.int64], days: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return an item of each genre. Its popularity moves by a hundredth of the genre's items a day."""
        by_genre = np.argsort(self._genre_of, kind="stable")
        counts = np.bincount(self._genre_of, minlength=self.config.genres)
        begins = counts.cumsum() - counts
        genres = np.where(counts[genres] > 0, genres, int(counts.argmax()))
        many = counts[genres]
        ranked = np.minimum((many + 1.0) ** random.random(len(genres)), many).astype(np.int64) - 1
        moved = (days + _DAYS_BEFORE) * many // 100
        found: NDArray[np.int64] = by_genre[begins[genres] + (ranked + moved) % many]
        return found


class ListeningDays(Source):
    """The examples of some days of a log, in the order of time. Its position is the number of the next one.

    Args:
        first: The first day that is read.
        last: The last one.
    """

    repeats_order = True
    live = False

    def __init__(self, log: ListeningLog, batch_size: int, *, first: int, last: int) -> None:
        self._log, self._batch_size = log, batch_size
        self._next = first * log.config.examples
        self._end = (last + 1) * log.config.examples

    def __iter__(self) -> Iterator[Records]:
        while self._next < self._end:
            first = self._next
            # A day ends with a batch of its own: the next day is evaluated in between.
            day_ends = (first // self._log.config.examples + 1) * self._log.config.examples
            self._next = min(first + self._batch_size, day_ends)
            yield self._log.records(first, self._next)

    def position(self) -> Position:
        return {"source": "listening", "next": self._next}

    def restore(self, position: Position) -> None:
        if not isinstance(position, Mapping) or position.get("source") != "listening":
            raise RestoreError(f"cannot restore days of listening from {position!r:.200}: of another kind")
        number = position.get("next")
        if not isinstance(number, int) or not 0 <= number <= len(self._log):
            raise RestoreError(
                f"cannot restore days of listening: {number!r} is not the number of one of the "
                f"{len(self._log):,} examples"
            )
        self._next = number


def feature_spec(max_length: int) -> FeatureSpec:
    """Return how a model reads the log: features of IDs, and a history that shares the rows of five."""
    history = HistoryFeature(of="item", max=max_length, with_=(*STEPS, "time"))
    return FeatureSpec(
        features={**{name: IdFeature() for name in TABLES}, "history": history},
        labels={LABEL: Label()},
        event_time="time",
    )


def _int64(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _moods(random: np.random.Generator, config: ListeningConfig) -> NDArray[np.float64]:
    """Return how ready each user is to listen to the end on each day, of shape (days, users).

    The mean is 0 and the variance 1.
    """
    moods = random.normal(0.0, 1.0, (_DAYS_BEFORE + config.days, config.users))
    for day in range(1, len(moods)):
        moods[day] = 0.98 * moods[day - 1] + math.sqrt(1 - 0.98**2) * moods[day]
    return moods


def _tastes(random: np.random.Generator, config: ListeningConfig) -> NDArray[np.int64]:
    """Return the two genres that each user likes on each day, of shape (days, users, 2)."""
    days = _DAYS_BEFORE + config.days
    tastes = np.empty((days, config.users, 2), np.int64)
    tastes[0] = random.integers(0, config.genres, (config.users, 2))
    for day in range(1, days):
        tastes[day] = tastes[day - 1]
        changed = random.random(config.users) < 0.02
        tastes[day, changed, 0] = tastes[day, changed, 1]
        tastes[day, changed, 1] = random.integers(0, config.genres, int(changed.sum()))
    return tastes
