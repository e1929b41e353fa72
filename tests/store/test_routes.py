"""Routes: every row reaches the server of its id, and comes back to where it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import TableArgumentError
from monolith.store.row_requests import Floats, Ids, Routes, RowFlags, RowRequest
from monolith_compat.sharding import shard_of_ids

PIECES = st.lists(
    st.tuples(st.sampled_from([1, 2, 5]), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)),
    min_size=1,
    max_size=5,
)


def routes_of(cells: list[tuple[int, list[int]]], num_servers: int) -> Routes:
    ids = np.array([one for _, ids in cells for one in ids], np.int64)
    sizes = np.array([len(ids) for _, ids in cells], np.int64)
    return Routes(ids, sizes, np.array([width for width, _ in cells], np.int64), 1, num_servers)


def sent(
    routes: Routes, ids: list[int], cells: int, *, times: Ids | None = None, rows: Floats | None = None
) -> list[RowRequest]:
    """Return the request of each shard, as the shard reads it."""
    numbers = [np.array(ids, np.int64)] if times is None else [np.array(ids, np.int64), times]
    data = routes.write_requests(numbers, [] if rows is None else [rows])
    flags = RowFlags.NONE if times is None else RowFlags.TIMES
    return [
        RowRequest(one, cells=cells, ids=num_ids, floats=0 if rows is None else floats, flags=flags)
        for one, num_ids, floats in zip(data, routes.num_ids, routes.num_floats, strict=True)
    ]


@given(PIECES, st.integers(1, 4))
def test_what_is_sent_comes_back_in_order(cells: list[tuple[int, list[int]]], num_servers: int) -> None:
    routes = routes_of(cells, num_servers)
    rows = np.arange(sum(width * len(ids) for width, ids in cells), dtype=np.float32)
    requests = sent(routes, [one for _, ids in cells for one in ids], len(cells), rows=rows)
    assert routes.gather_rows([one.gradients for one in requests]).tolist() == rows.tolist()


@given(PIECES, st.integers(1, 7))
def test_each_server_gets_its_ids_table_after_table(
    cells: list[tuple[int, list[int]]], num_servers: int
) -> None:
    routes = routes_of(cells, num_servers)
    requests = sent(routes, [one for _, ids in cells for one in ids], len(cells))
    for server, request in enumerate(requests):
        mine = [
            [one for one in ids if int(shard_of_ids(torch.tensor(one), num_servers)) == server]
            for _, ids in cells
        ]
        assert request.ids.tolist() == [one for ids in mine for one in ids]
        assert request.sizes.tolist() == [len(ids) for ids in mine]


@pytest.mark.parametrize("widths", [(2, 2), (2, 1), (16, 3)])
def test_rows_and_numbers_go_with_their_ids(widths: tuple[int, int]) -> None:
    routes = routes_of([(widths[0], [4, 5]), (widths[1], [6])], 2)
    rows = np.array([4] * widths[0] + [5] * widths[0] + [6] * widths[1], np.float32)
    even, odd = sent(routes, [4, 5, 6], 2, times=np.array([40, 50, 60]), rows=rows)
    assert even.gradients.tolist() == [4.0] * widths[0] + [6.0] * widths[1]
    assert odd.gradients.tolist() == [5.0] * widths[0]
    assert np.array_equal(even.times, [40, 60])
    assert np.array_equal(odd.times, [50])


def test_cells_of_several_batches_follow_each_other() -> None:
    ids, sizes = np.array([1, 2, 3, 4]), np.array([1, 1, 0, 2])
    routes = Routes(ids, sizes, np.array([1, 2]), 2, 2)
    assert [one.sizes.tolist() for one in sent(routes, [1, 2, 3, 4], 4)] == [[0, 1, 0, 1], [1, 0, 0, 1]]
    assert routes.num_floats == [4, 3]


def test_requests_are_written_into_given_memory() -> None:
    routes = routes_of([(1, [4, 5, 6])], 2)
    memory = np.zeros(64, np.uint8)
    data = routes.write_requests([np.array([4, 5, 6])], memory=lambda _: [memory[:24], memory[32:48]])
    assert memory.view(np.int64).tolist() == [2, 4, 6, 0, 1, 5, 0, 0]
    assert all(np.shares_memory(one, memory) for one in data)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TableArgumentError, match=r"more than the 1 ids given \(1 tables, 1 batches, 1 ids\)"):
        Routes(np.array([1]), np.array([2]), np.array([1]), 1, 2)


def test_the_answer_of_a_single_server_is_not_copied() -> None:
    routes = routes_of([(1, [1, 2])], 1)
    answer = np.zeros(2, np.float32)
    assert routes.gather_rows([answer]) is answer
