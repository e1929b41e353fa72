"""What an answer promises of its rows, and when it says that it does not know.

How new an answer is, also when the clocks of publisher and server differ.
"""

from __future__ import annotations

import pytest

from monolith.observe import Metrics
from monolith.serve.metrics import FollowMetrics
from monolith.serve.rows import UNKNOWN, ClaimCell, RowsClaim, ServedUpTo, spanning, together
from monolith.serve.shards.protocol import pack_claim, read_claim
from monolith.store.row_requests import RowFlags, pack_answer
from monolith.sync.messages import LearnedUpTo

EXPORT = RowsClaim(100, 100, 1000.0)


def of(step: int, newest: int | None = None, at: float = 2000.0) -> RowsClaim:
    return RowsClaim(step, newest, at)


def promised(claim: RowsClaim) -> tuple[int, int | None] | str:
    return claim.unknown or (claim.step, claim.newest_step)


def test_a_claim_says_its_step_the_newest_and_the_age_of_its_oldest_part() -> None:
    said = RowsClaim(7, 9, 100.0, 50, {"event_at": 40.0, "read_at": 0.0}).said(103.5)
    assert said == {"step": 7, "newest_step": 9, "watermark": 50, "staleness": 3.5, "event_at": 40.0}


def test_one_that_does_not_know_says_why_and_nothing_else() -> None:
    assert UNKNOWN.said(1.0) == {
        "freshness": "unknown",
        "freshness_reason": "the source of the rows did not say how new they are",
    }


def test_rows_that_are_read_while_a_delta_is_applied_are_of_before_or_as_new_as_the_delta() -> None:
    cell = ClaimCell(EXPORT)
    before = cell.now
    cell.applying((0, 1), 112)
    assert promised(spanning(before, cell.now)) == (100, 112)
    middle = cell.now
    cell.applied((0, 1), of(110, 112))
    assert promised(spanning(middle, cell.now)) == (100, 112)
    assert promised(cell.now) == (110, 112)


def test_nothing_is_promised_from_the_first_row_of_a_snapshot_to_its_end() -> None:
    cell = ClaimCell(EXPORT)
    cell.applied((0, 1), of(236, 240))
    before = cell.now
    cell.applying((0, 1), None)
    assert "snapshot" in str(promised(spanning(before, cell.now)))
    assert "snapshot" in str(promised(cell.now))
    cell.applied((0, 1), of(110))
    assert promised(cell.now) == (110, None), "its rows were read while they were trained"
    cell.applying((0, 1), 115)
    cell.applied((0, 1), of(113, 115))
    assert promised(cell.now) == (113, 115), "the run went back, and so does the claim"


def test_rows_that_were_read_over_a_whole_snapshot_are_unknown() -> None:
    cell = ClaimCell(EXPORT)
    before = cell.now
    cell.applying((0, 1), None)
    cell.applied((0, 1), of(50))
    assert (
        promised(spanning(before, cell.now))
        == "rows of another history were applied while the rows were read"
    )


def test_several_shares_are_as_old_as_the_oldest_and_as_new_as_the_newest() -> None:
    cell = ClaimCell(EXPORT)
    cell.applied((0, 2), of(150, 155, 2000.0))
    assert promised(cell.now) == (100, 155), "the other is as exported"
    cell.applied((1, 2), of(140, 141, 3000.0))
    assert promised(cell.now) == (140, 155)
    assert cell.now.as_of == 2000.0
    cell.applying((1, 2), None)
    cell.applied((0, 2), of(160, 161))
    assert "snapshot of shard 1" in str(promised(cell.now)), "one that is known does not speak for the other"


def test_a_newer_export_under_the_same_rows_may_have_newer_rows() -> None:
    cell = ClaimCell(EXPORT)
    cell.applied((0, 1), of(195, 196))
    cell.rebase(RowsClaim(200, 200, 3000.0))
    assert promised(cell.now) == (195, 200)


def test_rows_that_were_dropped_are_unknown_until_all_shares_came_again() -> None:
    cell = ClaimCell(EXPORT, "rows were dropped")
    cell.applied((0, 2), of(150, 151))
    assert promised(cell.now) == "rows were dropped"
    cell.applied((1, 2), of(150, 152))
    assert promised(cell.now) == (150, 152)


def test_another_number_of_shares_forgets_those_of_before() -> None:
    cell = ClaimCell(EXPORT)
    cell.applied((0, 1), of(150, 151))
    cell.applying((1, 2), None)
    cell.applied((1, 2), of(160))
    assert promised(cell.now) == (100, None)


def test_a_serving_server_sends_its_claim_with_the_rows() -> None:
    header = pack_answer(RowFlags.NONE, 4)
    for claim in (RowsClaim(7, 9, 100.0, 50, {"event_at": 40.0}), of(7), UNKNOWN):
        found = read_claim(header + pack_claim(claim) + bytes(5))
        assert found.said(200.0) == claim.said(200.0)
    assert read_claim(header) is UNKNOWN


def test_an_answer_of_several_servers_knows_only_if_all_do() -> None:
    assert promised(together([of(7, 9), of(5, 6)])) == (5, 9)
    assert promised(together([of(7, 9), of(5)])) == (5, None)
    assert promised(together([of(7, 9), UNKNOWN])) == UNKNOWN.unknown


DAY = 86_400.0
BEGAN = 1_700_000_000.0


def served(*, ahead: float, offset: float | None) -> ServedUpTo:
    """An event of second 0, published at 3 and received at 4; the publisher's clock is `ahead`."""
    event, read, trained, published = (BEGAN + ahead + second for second in range(4))
    learned = LearnedUpTo(step=7, event_at=event, read_at=read, trained_at=trained, published_at=published)
    return ServedUpTo(learned, received_at=BEGAN + 4, applied_at=BEGAN + 5, clock_offset=offset)


def test_clocks_that_agree_are_not_mentioned() -> None:
    said = served(ahead=0, offset=0.2).claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 7
    assert "clock_differs_by" not in said


@pytest.mark.parametrize("ahead", [DAY, -DAY])
def test_a_measured_difference_of_clocks_is_taken_into_account_and_named(ahead: float) -> None:
    found = served(ahead=ahead, offset=ahead)
    said = found.claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 7
    assert said["clock_differs_by"] == ahead
    assert found.stages() == {"read": 1, "train": 1, "publish": 1, "wire": 1, "apply": 1}


def test_a_message_from_the_future_is_as_old_as_its_arrival_and_says_that_clocks_differ() -> None:
    said = served(ahead=DAY, offset=None).claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 6  # since it came: 0 would claim more than is known
    assert said["clock_differs_by"] == DAY - 1


def test_the_difference_of_clocks_is_a_metric() -> None:
    metrics = Metrics()
    FollowMetrics(metrics, "clicks").set_gauges(6.0, 0, 0, DAY)
    assert 'serve_follow_clock_offset_seconds{model="clicks"} 86400.0' in metrics.render().decode()
