from __future__ import annotations

import threading

import pytest

from monolith.errors import TableArgumentError
from monolith.table.sharded_files import StopTogether, in_parallel


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert in_parallel(lambda item, _: item * 2, [3, 1, 2], workers) == [6, 2, 4]
    assert in_parallel(lambda item, _: item, [], workers) == []


def test_all_calls_stop_when_one_fails() -> None:
    endless = iter(lambda: 0, 1)
    began = threading.Barrier(2)

    def work(item: str, stop: StopTogether) -> None:
        began.wait(10)
        if item == "fails":
            raise ZeroDivisionError
        for _ in stop.chunks(endless):
            pass

    with pytest.raises(ZeroDivisionError):
        in_parallel(work, ["runs", "fails"], 2)


def test_what_has_not_begun_does_not_begin_after_a_failure() -> None:
    done = []

    def work(item: int, _: StopTogether) -> None:
        done.append(item)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_parallel(work, [1, 2, 3], 1)
    assert done == [1]


def test_there_must_be_a_worker() -> None:
    with pytest.raises(TableArgumentError, match="workers"):
        in_parallel(lambda item, _: item, [1], 0)
