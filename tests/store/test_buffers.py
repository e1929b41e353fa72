"""What workers lay down on a server for each other."""

from __future__ import annotations

import numpy as np
import pytest

from monolith.errors import FeatureError
from monolith.store.buffers import BufferShelf, LaidDown


def given(worker: int, *data: int) -> LaidDown:
    return LaidDown(worker, 10 * worker, np.array(data, np.uint8))


def taken(shelf: BufferShelf, worker: int | None = None) -> list[tuple[int, int, list[int]]]:
    return [(one.worker, one.examples, one.data.tolist()) for one in shelf.take(worker)]


def test_each_worker_has_what_it_gave_last_in_the_order_of_workers() -> None:
    shelf = BufferShelf()
    for one in (given(2, 5, 6), given(0, 1, 2), given(2, 7, 8)):
        shelf.lay_down(one)
    assert taken(shelf) == [(0, 0, [1, 2]), (2, 20, [7, 8])]
    assert taken(shelf, 2) == [(2, 20, [7, 8])]
    assert taken(shelf, 1) == []


def test_what_was_given_is_kept_whatever_becomes_of_the_callers_bytes() -> None:
    shelf, mine = BufferShelf(), given(1, 5)
    shelf.lay_down(mine)
    mine.data[:] = 9
    assert taken(shelf) == [(1, 10, [5])]


def test_workers_of_different_models_are_refused() -> None:
    shelf = BufferShelf()
    shelf.lay_down(given(0, 1, 2))
    with pytest.raises(FeatureError, match="worker 1 has buffers of 1 bytes, and worker 0 of 2"):
        shelf.lay_down(given(1, 1))


def test_more_than_a_server_keeps_is_refused() -> None:
    shelf = BufferShelf(most_bytes=3)
    shelf.lay_down(given(0, 1, 2))
    shelf.lay_down(given(0, 3, 4))
    with pytest.raises(FeatureError, match="2 workers have buffers of 2 bytes each"):
        shelf.lay_down(given(1, 1, 2))
