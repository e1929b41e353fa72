"""`monolith bench freshness`: what it prints, and what it takes for an answer that knows of an event."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from services import warm

pytest.importorskip("grpc")
pytest.importorskip("pyarrow")
pytest.importorskip("uvicorn")

from monolith.cli.main import main
from monolith.data.records import LABEL
from monolith.serve import ClientAnswer, TopKAnswer
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.sync.messages import Delta, PublishState
from monolith_bench.marked_answers import STAGES_OF_MARKS, ListWatch, MarkSeen, MarkWatch, RemovalWatch
from monolith_bench.marked_events import HEAD, MARKED, NOBODY, FreshnessJob, MarkedEvents
from monolith_bench.row_feed import START, RowFeed

JOB = FreshnessJob(model_dir="", rows=1000, batch=10, rate=100, mark_every=25)


class FakeClock:
    """Moves on where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# What it prints


def measured(*words: str) -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "freshness", "--quick", "--json", *words]
    done = warm.run(command, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return measured("--parts", "answers", "lists")


def value(report: dict[str, Any], case: str) -> float:
    found: float = next(one["value"] for one in report["results"] if one["case"] == case)
    return found


def need_marks(report: dict[str, Any], case: str) -> None:
    """Skip where no mark fell into a save, which is short at this size; the bench says so."""
    if any(one["case"] == case and one.get("note") == "no mark was seen" for one in report["results"]):
        pytest.skip("no marked event happened while a checkpoint was saved")


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "freshness"
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}


@pytest.mark.parametrize("case", ["event to answer", "event to answer, while checkpoints are saved"])
def test_every_marked_event_is_answered_and_split_by_stage(report: dict[str, Any], case: str) -> None:
    assert value(report, "marked events that no answer knew of in time") == 0
    need_marks(report, case)
    assert 0 < value(report, f"{case}, p50") <= value(report, f"{case}, p99")
    for stage in STAGES_OF_MARKS:
        assert value(report, f"{case}, {stage}, p50") >= 0


def test_freshness_while_saving_is_compared_with_freshness_alone(report: dict[str, Any]) -> None:
    beside = [(one["case"], one["baseline"]) for one in report["results"] if one["baseline"]]
    saving = "event to answer, while checkpoints are saved"
    need_marks(report, saving)
    assert beside == [(f"{saving}, {name}", f"event to answer, {name}") for name in ("p50", "p99")]


@pytest.mark.parametrize(
    ("case", "stages"), [("event to list", STAGES_OF_MARKS), ("removal to list", STAGES_OF_MARKS[2:])]
)
def test_new_and_removed_items_are_followed_into_lists(
    report: dict[str, Any], case: str, stages: Sequence[str]
) -> None:
    case = f"{case}, 1,000 items"
    assert 0 < value(report, f"{case}, p50") <= value(report, f"{case}, p99")
    for stage in stages:
        assert value(report, f"{case}, {stage}, p50") >= 0
    assert value(report, "new items that were in no list in time") <= 2  # chance may rank an item lower
    assert value(report, "removed items that were not seen to leave a list") <= 2


@pytest.mark.soak
def test_publishing_and_applying_are_compared_with_neither() -> None:
    report = measured("--parts", "training", "serving", "--rollback")
    beside = {one["baseline"] for one in report["results"]} - {None}
    assert beside == {"training, nothing published", "requests, nothing applied"}
    assert value(report, "rows applied") > 0
    assert value(report, "rolling back to a version of 2,000 rows") > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--marks", "0"], "--marks must be at least 1"),
        (["--rows", "10"], "--rows must be at least 1000"),
        (["--catalogue", "10"], "--catalogue must be at least 1000"),
        (["--interval-ms", "0"], "--interval-ms and --seconds must be above 0"),
        (["--rate", "10"], "--marks-per-second must be at most --rate"),
    ],
)
def test_nothing_to_measure_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "freshness", *words]) == 2
    assert said in capsys.readouterr().err


# Events


def test_a_batch_is_read_when_its_last_event_has_happened() -> None:
    clock = FakeClock()
    events = MarkedEvents(JOB, clock=clock, sleep=clock.sleep)
    assert [len(records) for records in islice(events, 3)] == [10, 10, 10]
    assert events.began == 1000.0
    assert events.read == pytest.approx([1000.1, 1000.2, 1000.3])


def test_a_reader_that_is_behind_does_not_wait() -> None:
    clock = FakeClock()
    reading = iter(MarkedEvents(JOB, clock=clock, sleep=clock.sleep))
    next(reading)
    clock.now += 5
    next(reading)
    assert clock.now == pytest.approx(1005.1)


def test_marked_events_show_items_by_their_number() -> None:
    events = MarkedEvents(JOB)
    for batch, marks in enumerate([{0: 0}, {}, {5: 1}, {}, {}, {0: 2}]):
        columns = events.records(batch * JOB.batch).columns
        items = columns["item"].flat_values
        assert {int(at): int(items[at]) - MARKED for at in (items >= MARKED).nonzero()} == marks
        assert all(columns[LABEL].flat_values[at] == 1 for at in marks)
        users = columns["user"].flat_values
        assert all(users[at] == JOB.user_of_mark(number) for at, number in marks.items())
        assert all(JOB.batch_of_mark(number) == batch for number in marks.values())
    assert JOB.mark_at(2) == 0.5


# Answers


class KnowingClient:
    """Answers as a server that knows of a mark some time after it happened."""

    def __init__(self, clock: FakeClock, known_after: Mapping[int, float]) -> None:
        self._clock = clock
        self._known_at = {MARKED + n: 1000.0 + JOB.mark_at(n) + after for n, after in known_after.items()}

    def predict(self, model: str, columns: Mapping[str, Sequence[int]]) -> ClientAnswer:
        items = columns["item"]
        assert items[0] == NOBODY
        scores = [0.5 + 0.1 * (self._known_at.get(item, 1e9) <= self._clock()) for item in items]
        return ClientAnswer(model, "1", {HEAD: np.array(scores)})


def test_a_mark_is_known_when_its_answer_is_another_than_that_of_an_unseen_item() -> None:
    clock = FakeClock()
    client: Any = KnowingClient(clock, {0: 0.3, 1: 0.04, 2: 0.0})
    watch = MarkWatch(JOB, 1000.0, client, "m", clock=clock, sleep=clock.sleep)
    seen = {one.number: one.seconds for one in watch.watch(3)}
    assert seen == pytest.approx({0: 0.3, 1: 0.04, 2: 0.0}, abs=0.011)
    assert (watch.next, watch.lost) == (3, 0)


def test_a_mark_that_no_answer_knows_is_counted() -> None:
    clock = FakeClock()
    client: Any = KnowingClient(clock, {1: 0.1})
    watch = MarkWatch(JOB, 1000.0, client, "m", patience=2.0, clock=clock, sleep=clock.sleep)
    assert [one.number for one in watch.watch(2)] == [1]
    assert watch.lost == 1


def test_earlier_marks_may_be_skipped() -> None:
    clock = FakeClock()
    clock.now += 0.6
    client: Any = KnowingClient(clock, {})
    watch = MarkWatch(JOB, 1000.0, client, "m", clock=clock, sleep=clock.sleep)
    watch.pass_over()
    assert watch.next == 3


class ListingClient:
    """Lists the item of a mark for its user, from some time after its event to a later one."""

    def __init__(self, clock: FakeClock, listed: Mapping[int, tuple[float, float]]) -> None:
        self._clock = clock
        self._listed = listed
        self.most = 0

    def topk(self, model: str, users: Mapping[str, Sequence[int]], k: int) -> TopKAnswer:
        self.most = max(self.most, len(users["user"]))
        lists = [[1, 2, *self._of(user)] for user in users["user"]]
        splits = np.cumsum([0, *map(len, lists)])
        items, scores = np.concatenate([*map(np.array, lists)]), np.zeros(splits[-1])
        assert len(items) <= k * len(lists)
        return TopKAnswer(model, "1", {"item": items, "item.row_splits": splits, "score": scores})

    def _of(self, user: int) -> list[int]:
        number = JOB.rows - 1 - user
        begin, end = self._listed.get(number, (1e9, 1e9))
        return [MARKED + number] if begin <= self._clock() - 1000.0 - JOB.mark_at(number) < end else []


def test_a_new_item_is_known_when_the_list_of_its_user_has_it() -> None:
    clock = FakeClock()
    client: Any = ListingClient(clock, {0: (0.3, 1e9), 1: (0.04, 1e9)})
    watch = ListWatch(JOB, 1000.0, client, "m", patience=2.0, clock=clock, sleep=clock.sleep)
    seen = {one.number: one.seconds for one in watch.watch(3)}
    assert seen == pytest.approx({0: 0.3, 1: 0.04}, abs=0.011)
    assert watch.lost == 1


def test_a_list_is_asked_for_the_oldest_marks_first_and_not_for_more_and_more() -> None:
    clock = FakeClock()
    client: Any = ListingClient(clock, dict.fromkeys(range(60), (5.0, 1e9)))
    clock.now += 20
    watch = ListWatch(JOB, 1000.0, client, "m", patience=60.0, clock=clock, sleep=clock.sleep)
    assert sorted(one.number for one in watch.watch(60)) == list(range(60))
    assert client.most == 32


def test_a_removed_item_is_gone_when_the_list_that_had_it_has_it_no_more() -> None:
    clock = FakeClock()
    job = replace(JOB, remove_after=1.0)
    removed = {number: 1000.0 + JOB.mark_at(number) + 1.05 for number in range(4)}
    # 2 leaves its list before it is removed and 3 was never in it: neither says anything of the removal.
    client: Any = ListingClient(clock, {0: (0.1, 1.3), 1: (0.1, 1.1), 2: (0.1, 0.9)})
    watch = RemovalWatch(job, 1000.0, removed, client, "m", patience=2.0, clock=clock, sleep=clock.sleep)
    seen = {one.number: one.seconds for one in watch.watch(4)}
    assert seen == pytest.approx({0: 0.25, 1: 0.05}, abs=0.011)
    assert watch.lost == 2


def test_stages_of_a_mark_add_up() -> None:
    said = {"published_at": 10.3, "received_at": 10.35, "applied_at": 10.4}
    mark = MarkSeen(0, 10.0, 10.5, said)
    stages = mark.stages(read=10.05, trained=10.15)
    assert list(stages) == list(STAGES_OF_MARKS)
    assert list(stages.values()) == pytest.approx([0.05, 0.1, 0.15, 0.05, 0.05, 0.1])
    assert sum(stages.values()) == pytest.approx(mark.seconds)


# Rows


def test_a_feed_publishes_rows_of_all_tables_and_a_version_to_go_back_to() -> None:
    with RowFeed({"a": 3, "b": 2}, ids=50, rows=20, interval=60.0) as feed:
        feed.publish()
        feed.publish()
        feed.go_back("1")
        reader = FlightDeltaReader([feed.url.removeprefix("grpc://")])
        state, *deltas = reader.read(0, START, wait=0.0)
        reader.close()
    assert isinstance(state, PublishState)
    assert (state.paused, state.version) == (True, "1")
    for number, delta in enumerate(deltas, 1):
        assert isinstance(delta, Delta)
        assert (delta.position.sequence, delta.learned.step) == (number, number)
        assert {name: rows.values.shape for name, rows in delta.rows.items()} == {"a": (10, 3), "b": (10, 2)}
        assert all(len(torch.unique(rows.ids)) == 10 for rows in delta.rows.values())
    assert (len(deltas), feed.sequence, feed.rows) == (2, 2, 20)
