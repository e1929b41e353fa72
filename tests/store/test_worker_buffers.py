"""What workers lay down on a server for each other."""

from __future__ import annotations

import numpy as np
import pytest

from monolith.errors import FeatureError
from monolith.store.server import ModuleBuffers, WorkerBuffers


def given(worker: int, *data: int) -> ModuleBuffers:
    return ModuleBuffers(worker, 10 * worker, np.array(data, np.uint8))


def taken(buffers: WorkerBuffers, worker: int | None = None) -> list[tuple[int, int, list[int]]]:
    return [(one.worker, one.examples, one.data.tolist()) for one in buffers.get(worker)]


def test_each_worker_has_what_it_gave_last_in_the_order_of_workers() -> None:
    buffers = WorkerBuffers()
    for one in (given(2, 5, 6), given(0, 1, 2), given(2, 7, 8)):
        buffers.put(one)
    assert taken(buffers) == [(0, 0, [1, 2]), (2, 20, [7, 8])]
    assert taken(buffers, 2) == [(2, 20, [7, 8])]
    assert taken(buffers, 1) == []


def test_what_was_given_is_kept_whatever_becomes_of_the_callers_bytes() -> None:
    buffers, mine = WorkerBuffers(), given(1, 5)
    buffers.put(mine)
    mine.data[:] = 9
    assert taken(buffers) == [(1, 10, [5])]


def test_workers_of_different_models_are_refused() -> None:
    buffers = WorkerBuffers()
    buffers.put(given(0, 1, 2))
    with pytest.raises(FeatureError, match="worker 1 has buffers of 1 bytes, and worker 0 of 2"):
        buffers.put(given(1, 1))


def test_more_than_a_server_keeps_is_refused() -> None:
    buffers = WorkerBuffers(most_bytes=3)
    buffers.put(given(0, 1, 2))
    buffers.put(given(0, 3, 4))
    with pytest.raises(FeatureError, match="2 workers have buffers of 2 bytes each"):
        buffers.put(given(1, 1, 2))
