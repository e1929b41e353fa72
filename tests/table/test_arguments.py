from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import TableArgumentError
from monolith.table import Segment, TableConfig, arguments

CONFIG = TableConfig(
    name="t", segments=(Segment(dim=2, learning_rate=0.5), Segment(dim=1, learning_rate=0.25))
)


def test_memory_is_shared_where_it_can_be() -> None:
    ids, values = torch.arange(4), torch.ones(4, 3)
    assert arguments.id_array(ids).ctypes.data == ids.data_ptr()
    assert arguments.float_array(values, (4, 3), "values").ctypes.data == values.data_ptr()


def test_strided_tensors_are_copied_into_order() -> None:
    array = arguments.float_array(torch.arange(6.0).reshape(2, 3).T, (3, 2), "values")
    assert array.flags.c_contiguous
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_parameters_are_read_without_their_gradient() -> None:
    assert arguments.float_array(torch.nn.Parameter(torch.ones(2)), (2,), "values").tolist() == [1, 1]


def test_out_is_never_copied() -> None:
    given = torch.empty(2, 3)
    tensor, array = arguments.out_array(given, 2, 3)
    assert tensor is given
    assert array.ctypes.data == given.data_ptr()
    tensor, array = arguments.out_array(None, 2, 3)
    assert array.ctypes.data == tensor.data_ptr()
    for bad in (torch.empty(3, 2).T, torch.empty(2, 3, requires_grad=True)):
        with pytest.raises(TableArgumentError, match="out"):
            arguments.out_array(bad, 2, 3)


def test_one_event_time_stays_one() -> None:
    assert arguments.event_time_array(5, 3).tolist() == [5]
    assert arguments.event_time_array(torch.tensor([1, 2, 3]), 3).tolist() == [1, 2, 3]
    assert arguments.event_time_array(torch.empty(0, dtype=torch.int64), 0).tolist() == []


def test_rates_are_the_configs_unless_given() -> None:
    assert arguments.rate_array(None, CONFIG, 0).tolist() == [0.5, 0.25]
    assert arguments.rate_array(torch.tensor([1.0, 2.0]), CONFIG, 0).tolist() == [1.0, 2.0]
    assert arguments.rate_array(None, CONFIG, 0).dtype == np.float32


def test_a_message_says_what_was_wanted_and_what_was_found() -> None:
    with pytest.raises(
        TableArgumentError, match=r"ids must be int64 of shape \(n,\).*float32 of shape \(2, 3\) on cpu"
    ):
        arguments.id_array(torch.empty(2, 3))
    with pytest.raises(TableArgumentError, match="got list"):
        arguments.id_array([1])  # type: ignore[arg-type]
