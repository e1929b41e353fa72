"""Columns as people have them, made into records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monolith.data.formats.memory import MemorySource, to_column, to_records
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor


class Series:
    """A column of pandas, as far as numpy is concerned."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._values


@pytest.mark.parametrize(
    ("values", "expected", "dtype"),
    [
        (torch.tensor([1, 2]), [[1], [2]], torch.int64),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), [[1, 2], [3, 4]], torch.int64),
        (torch.tensor([0.5, 1.5], dtype=torch.float64), [[0.5], [1.5]], torch.float32),
        (torch.tensor([True, False]), [[1], [0]], torch.int64),
        (np.array([1, 2], dtype=np.uint8), [[1], [2]], torch.int64),
        (np.array([2**64 - 1], dtype=np.uint64), [[-1]], torch.int64),
        (Series([0.5, 1.5]), [[0.5], [1.5]], torch.float32),
        ([1, None, 3], [[1], [], [3]], torch.int64),
        ([1, 0.5], [[1.0], [0.5]], torch.float32),
        ([[1, 2], [], (3,)], [[1, 2], [], [3]], torch.int64),
        ([2**64 - 1], [[-1]], torch.int64),
        ([], [], torch.int64),
        (RaggedTensor.from_list([[1], []], dtype=torch.int32), [[1], []], torch.int64),
    ],
)
def test_numbers_become_int64_or_float32(
    values: Any, expected: list[list[float]], dtype: torch.dtype
) -> None:
    column = to_column(values)
    assert column.to_list() == expected
    assert column.dtype is dtype


@pytest.mark.parametrize("values", [["a", None, b"bc"], np.array(["a", None, "bc"], dtype=object)])
def test_texts_become_bytes(values: Any) -> None:
    assert to_records({"s": values}).strings("s") == [[b"a"], [], [b"bc"]]


def test_lists_of_texts_and_arrays_of_texts_are_read() -> None:
    assert to_records({"s": [["a", "b"], []]}).strings("s") == [[b"a", b"b"], []]
    assert to_records({"s": Series(["a", "bc"])}).strings("s") == [[b"a"], [b"bc"]]


@pytest.mark.parametrize("values", [["a", 1], [object()], torch.zeros(1, 1, 1), [2**70], [[[1]]]])
def test_what_is_neither_is_refused(values: Any) -> None:
    with pytest.raises(DataError, match="column 'x'"):
        to_column(values, "x")


def test_columns_must_be_equally_long() -> None:
    with pytest.raises(DataError, match="one row per record"):
        to_records({"a": [1], "b": [1, 2]})


def test_a_source_over_columns_yields_batches() -> None:
    source = MemorySource({"id": [1, 2, 3], "label": np.array([0.0, 1.0, 0.0])}, batch_size=2)
    assert [batch["label"].to_list() for batch in source] == [[[0.0], [1.0]], [[0.0]]]
    assert [len(batch) for batch in MemorySource({"id": [1, 2, 3]}, batch_size=2, drop_remainder=True)] == [2]


def test_no_records_for_ever_is_nothing() -> None:
    assert list(MemorySource({"id": []}, batch_size=2, epochs=None)) == []


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"worker": -1}, {"epochs": 0}, {"num_workers": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MemorySource({"id": [1]}, **{"batch_size": 1, **options})
