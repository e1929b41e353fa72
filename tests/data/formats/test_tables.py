"""Tables and rows that a program has at hand; that positions are exact is in the contract of sources."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from monolith.data import ArrowSource, Epochs, IterableSource, PandasSource, PolarsSource, Source
from monolith.errors import ConfigError, DataError, MissingExtraError

COLUMNS: dict[str, Any] = {
    "user": [1, 2, 3],
    "price": [0.5, None, 2.0],
    "title": ["a", None, "c"],
    "tags": [[1, 2], [], [3]],
    "when": [datetime(1970, 1, 1, 0, 0, second, tzinfo=UTC) for second in (7, 8, 9)],
    "bought": [True, False, True],
}
READ = {
    "user": [[1], [2], [3]],
    "price": [[0.5], [], [2.0]],
    "title": [[b"a"], [], [b"c"]],
    "tags": [[1, 2], [], [3]],
    "when": [[7], [8], [9]],
    "bought": [[1], [0], [1]],
}


def columns_of(source: Source) -> dict[str, list[list[Any]]]:
    (records,) = source
    return {
        name: records.strings(name) if name == "title" else records[name].to_list()
        for name in records.columns
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: ArrowSource(pa.table(COLUMNS), batch_size=9),
        lambda: ArrowSource(pa.table(COLUMNS).to_reader(), batch_size=9),
        lambda: ArrowSource(pa.table(COLUMNS).to_batches()[0], batch_size=9),
        lambda: PandasSource(pd.DataFrame(COLUMNS, index=[7, 8, 9]), batch_size=9),
        lambda: PolarsSource(pl.DataFrame(COLUMNS), batch_size=9),
    ],
)
def test_every_kind_of_table_reads_alike(make: Callable[[], Source]) -> None:
    assert columns_of(make()) == READ


def test_columns_can_be_chosen() -> None:
    assert columns_of(PandasSource(pd.DataFrame(COLUMNS), columns=["user"], batch_size=9)) == {
        "user": READ["user"]
    }


def test_rows_are_dicts_of_python_and_numpy() -> None:
    rows = [
        {"user": np.int64(1), "price": np.float32(0.5), "title": "a", "tags": np.array([1, 2])},
        {"user": 2, "price": None, "tags": []},
        {"user": 3, "price": 2, "title": b"c", "tags": (3,)},
    ]
    assert columns_of(IterableSource(rows, batch_size=9)) == {
        name: READ[name] for name in ("user", "price", "title", "tags")
    }


def test_declared_types_pass_over_other_keys_and_read_whole_numbers_as_floats() -> None:
    source = IterableSource([{"price": 1, "other": {}}], types={"price": float, "user": int}, batch_size=9)
    assert columns_of(source) == {"price": [[1.0]], "user": [[]]}


@pytest.mark.parametrize(
    "rows, types, problem",
    [
        ([{"a": 1}, {"a": "x"}], {"a": int}, "record 1: key 'a': 'x' is not a whole number"),
        ([{"a": 1}, {"b": 1}], None, "record 1: key 'b' was not in the first 1; give types"),
        ([[1]], None, "a record must be a dict, got a list"),
        ([{"a": {}}], {"a": int}, "record 0: key 'a': {} is not a whole number"),
    ],
)
def test_a_row_that_does_not_fit_is_named(rows: list[Any], types: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        list(IterableSource(rows, types=types, infer_rows=1, batch_size=9))


def test_a_generator_continues_after_a_restart_and_is_not_read_twice() -> None:
    def numbers() -> Any:
        return ({"n": n} for n in range(10))

    source = IterableSource(numbers(), batch_size=3)
    seen = [one for batch in islice(source, 2) for one in batch["n"].flat_values.tolist()]
    resumed = IterableSource(numbers(), batch_size=3)
    resumed.restore(source.position())
    assert seen + [one for batch in resumed for one in batch["n"].flat_values.tolist()] == list(range(10))
    with pytest.raises(DataError, match="can be read only once, and it was"):
        list(IterableSource(numbers(), batch_size=3, epochs=2))


def test_fewer_rows_than_before_are_an_error() -> None:
    source = IterableSource([{"n": n} for n in range(10)], batch_size=8)
    next(iter(source))
    fewer = IterableSource([{"n": n} for n in range(5)], batch_size=8)
    fewer.restore(source.position())
    with pytest.raises(DataError, match="the data has changed"):
        list(fewer)


def test_reading_nothing_for_ever_ends() -> None:
    assert list(IterableSource([], batch_size=8, epochs=None)) == []


def test_each_epoch_has_an_order_of_its_own() -> None:
    from monolith.data import ShuffleConfig

    source = IterableSource(
        [{"n": n} for n in range(8)], batch_size=8, epochs=3, shuffle=ShuffleConfig(seed=1, buffer=8)
    )
    orders = [tuple(batch["n"].flat_values.tolist()) for batch in source]
    assert len(set(orders)) == 3


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: PandasSource([1], batch_size=1), "expected a DataFrame, got a list"),
        (lambda: PolarsSource(pl.DataFrame(COLUMNS).lazy(), batch_size=1), "pass frame.collect"),
        (lambda: PolarsSource(pd.DataFrame(COLUMNS), batch_size=1), "expected a DataFrame"),
        (lambda: ArrowSource("x", batch_size=1), "expected a table, a reader"),
        (lambda: IterableSource({"a": 1}, batch_size=1), "expected dicts"),
        (lambda: IterableSource([], types={"a": dict}, batch_size=1), "column 'a' must be int, float or str"),
        (lambda: IterableSource([], batch_size=0), "batch_size must be at least 1"),
        (lambda: IterableSource([], batch_size=1, epochs=0), "epochs must be at least 1"),
    ],
)
def test_what_is_no_table_is_refused(make: Callable[[], Source], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


@pytest.mark.parametrize(
    "package, source", [("pandas", PandasSource), ("polars", PolarsSource), ("pyarrow", ArrowSource)]
)
def test_without_its_package_the_extra_is_named(
    package: str, source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'monolith-recsys\[(pandas|polars|arrow)\]'"):
        source(None, batch_size=1)


def test_a_run_may_say_how_often_a_table_is_read_and_each_time_it_is_in_another_order() -> None:
    source = PandasSource(pd.DataFrame({"user": range(50)}), batch_size=50)
    source.read_epochs(Epochs(count=2, seed=3))
    first, second = (records["user"].flat_values.tolist() for records in source)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    with pytest.raises(ConfigError, match="too late to set its number of epochs"):
        source.read_epochs(Epochs(count=3))
