"""Routes: every row reaches the server of its id, and comes back to where it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.compat.sharding import shard_of_ids
from monolith.store.routes import Routes

PIECES = st.lists(
    st.tuples(st.sampled_from([1, 2, 5]), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)),
    min_size=1,
    max_size=5,
)


def routes_of(cells: list[tuple[int, list[int]]], num_servers: int) -> Routes:
    ids = np.array([one for _, ids in cells for one in ids], np.int64)
    sizes = np.array([len(ids) for _, ids in cells], np.int64)
    return Routes(ids, sizes, np.array([width for width, _ in cells], np.int64), num_servers)


@given(PIECES, st.integers(1, 4))
def test_what_is_sent_comes_back_in_order(cells: list[tuple[int, list[int]]], num_servers: int) -> None:
    routes = routes_of(cells, num_servers)
    rows = np.arange(sum(width * len(ids) for width, ids in cells), dtype=np.float32)
    answers = [np.empty(count, np.float32) for count in routes.num_floats]
    for server, out in enumerate(answers):
        routes.send_rows(rows, server, out)
    assert routes.receive_rows(answers).tolist() == rows.tolist()


@given(PIECES, st.integers(1, 4))
def test_each_server_gets_its_ids_table_after_table(
    cells: list[tuple[int, list[int]]], num_servers: int
) -> None:
    routes = routes_of(cells, num_servers)
    for server in range(num_servers):
        mine = [
            [one for one in ids if int(shard_of_ids(torch.tensor(one), num_servers)) == server]
            for _, ids in cells
        ]
        out = np.empty(routes.num_ids[server], np.int64)
        routes.send_ids(server, out)
        assert out.tolist() == [one for ids in mine for one in ids]
        assert routes.sizes[server].tolist() == [len(ids) for ids in mine]


@pytest.mark.parametrize("widths", [(2, 2), (2, 1)])
def test_rows_go_with_their_ids(widths: tuple[int, int]) -> None:
    routes = routes_of([(widths[0], [4, 5]), (widths[1], [6])], 2)
    rows = np.array([4] * widths[0] + [5] * widths[0] + [6] * widths[1], np.float32)
    even = np.empty(routes.num_floats[0], np.float32)
    routes.send_rows(rows, 0, even)
    assert even.tolist() == [4.0] * widths[0] + [6.0] * widths[1]
    numbers = np.empty(1, np.int64)
    routes.send_numbers(np.array([40, 50, 60]), 1, numbers)
    assert numbers.tolist() == [50]


def test_the_answer_of_a_single_server_is_not_copied() -> None:
    routes = routes_of([(1, [1, 2])], 1)
    answer = np.zeros(2, np.float32)
    assert routes.receive_rows([answer]) is answer
