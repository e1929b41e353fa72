"""What a run that kept going has lost, in words."""

from __future__ import annotations

import pytest

from monolith.runtime.losses import LostServer, LostWorker


@pytest.mark.parametrize(
    ("uncounted", "why", "said"),
    [
        ((), "", "3 updates"),
        (
            (1, 4),
            "worker 1 was lost as well, worker 4 did not answer within 10 s",
            "3 updates, and those of workers 1, 4, which could not be counted: worker 1 was lost as well, "
            "worker 4 did not answer within 10 s",
        ),
        (
            None,
            "the meeting on server 0 did not answer",
            "3 updates, and those of all workers but the chief, which could not be counted: the meeting on "
            "server 0 did not answer",
        ),
    ],
)
def test_workers_that_could_not_be_counted_are_named_with_the_reason(
    uncounted: tuple[int, ...] | None, why: str, said: str
) -> None:
    found = LostServer(
        server=1,
        rows=2,
        updates=3,
        seconds=1.0,
        restored_from=None,
        uncounted=uncounted,
        uncounted_why=why,
    )
    assert found.describe().endswith(said)


def test_a_worker_of_which_it_is_not_known_whether_it_had_trained_is_described_so() -> None:
    said = LostWorker(worker=2, records=None, seconds=0.0).describe()
    assert said.startswith("worker 2 joined after server 0 was lost, which alone knew whether")
