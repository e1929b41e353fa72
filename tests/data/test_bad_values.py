"""Event times that cannot be: left out, counted, kept by the source, and no end of a run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from data.lists import records

from monolith.data import (
    BadRecord,
    BadRecordPolicy,
    BatchSpec,
    FileSource,
    Pipeline,
    Records,
    Stage,
    make_batch,
)
from monolith.data.bad_values import BadTally
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import MemorySource
from monolith.data.records import timely
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import ConfigError, DataError, TooManyBadRecordsError
from monolith.feature.spec.problems import BadReason
from monolith.observe import Metrics

NOW = 1_700_000_000
SPEC = BatchSpec(ids=("item",), labels={}, event_time="time")
RANGE = "must be Unix seconds from 0 to 4294967295, got"


def source(*times: int, batch_size: int = 4) -> MemorySource:
    return MemorySource({"item": list(range(len(times))), "time": list(times)}, batch_size=batch_size)


def items(batches: Any) -> list[list[int]]:
    return [batch.ids["item"].flat_values.tolist() for batch in batches]


@pytest.mark.parametrize("wrong", [NOW * 1000, NOW * 10**6, NOW * 10**9, -1, 2**32, -(2**63), 2**63 - 1])
def test_a_record_whose_time_is_out_of_range_is_left_out(wrong: int) -> None:
    times = [NOW] * 20
    times[5] = wrong
    batches = list(Pipeline(source(*times)).to_batches(SPEC))
    assert items(batches) == [[0, 1, 2, 3], [4, 6, 7], *([i, i + 1, i + 2, i + 3] for i in (8, 12, 16))]
    assert {batch.ids.event_time for batch in batches} == {NOW}


def test_times_that_are_far_off_and_can_be_are_trained_on() -> None:
    """Files of made-up dates, too; that they do not expire rows is for the clock to see to."""
    times = [0, 1, NOW + 10 * 365 * 86_400, 2**32 - 1]
    (batch,) = Pipeline(source(*times)).to_batches(SPEC)
    assert len(batch) == 4
    assert batch.ids.event_times is not None
    assert batch.ids.event_times.tolist() == times


def test_a_batch_without_good_records_is_skipped() -> None:
    times = [NOW] * 100 + [NOW * 1000] * 4 + [NOW] * 4
    assert [len(batch) for batch in Pipeline(source(*times)).to_batches(SPEC)] == [4] * 26


def test_where_most_times_are_wrong_the_column_is(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TooManyBadRecordsError, match=r"4 of 4 .*milliseconds\? It would be 2023-11-14"):
        list(Pipeline(source(*[NOW * 1000] * 4)).to_batches(SPEC))
    assert caplog.messages[-1].startswith("left out 4 of 4 records: 4: event time 'time'")


def test_the_fraction_is_a_setting_and_checked_after_some_records() -> None:
    times = [-1, *[NOW] * 2000, -1, -1, -1]
    few, none = (replace(SPEC, max_bad=share) for share in (0.001, 0.0))
    with pytest.raises(TooManyBadRecordsError, match="4 of 2004"):
        list(Pipeline(source(*times)).to_batches(few))
    with pytest.raises(TooManyBadRecordsError, match="1 of 4"):
        list(Pipeline(source(*times)).to_batches(none))
    with pytest.raises(ConfigError, match="max_bad"):
        BatchSpec(ids=(), max_bad=1.5)


def test_a_cause_is_said_when_it_is_first_seen_and_counted_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = [NOW * 1000 if i % 20 == 3 else NOW for i in range(2000)]
    list(Pipeline(source(*times)).to_batches(SPEC))
    first, last = caplog.messages
    assert first.startswith("a record of the first 4 is left out: event time 'time' must be Unix seconds")
    assert last.startswith("left out 100 of 2,000 records: 100: event time 'time' must be Unix seconds")


def test_a_label_that_is_nan_is_one_that_is_not_there() -> None:
    spec = replace(SPEC, labels={"a": ("label", 0), "b": ("label", 1)}, event_time=None, max_bad=0.5)
    nan = float("nan")
    some = records(item=[[1], [2], [3], [4]], label=[[1.0, nan], [nan, 0.0], [nan, nan], []])
    stream = Pipeline(MemorySource(some, batch_size=4)).to_batches(spec)
    (batch,) = stream
    assert batch.ids["item"].to_list() == [[1], [2]]
    assert stream.bad_records() == {"label 'label' is empty": 2}


def test_a_number_that_is_missing_is_a_zero() -> None:
    some = records(item=[[1], [2], [3]], x=[[1.0, 2.0], [float("nan"), 3.0], []])
    spec = BatchSpec(ids=("item",), floats={"x": 2}, labels={}, event_time=None)
    assert make_batch(some, spec).floats["x"].tolist() == [[1.0, 2.0], [0.0, 3.0], [0.0, 0.0]]


def test_they_are_counted_and_quarantined_by_the_source_below_whatever_stages(tmp_path: Path) -> None:
    file, folder, metrics = tmp_path / "a.jsonl", tmp_path / "bad", Metrics()
    lines = [{"item": i, "text": "é", "time": NOW * 1000 if i == 7 else NOW} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, lines)))

    def read() -> int:
        files = FileSource(
            [str(file)],
            JsonLinesFormat(),
            batch_size=5,
            bad=BadRecordPolicy(quarantine=str(folder)),
            metrics=metrics,
        )
        piped = Pipeline(files).map(lambda some: some).shuffle(ShuffleConfig(seed=1, buffer=10))
        piped = piped.rebatch(8).take(1000).prefetch(2)
        quiet = piped.with_progress(every=timedelta(hours=1))
        return sum(map(len, quiet.to_batches(SPEC).prefetch(2)))

    assert [read(), read()] == [39, 39]  # a restart reads them again
    (kept,) = folder.iterdir()
    (line,) = [json.loads(line) for line in kept.read_text().splitlines()]
    assert line["path"] == str(file)
    assert f"{RANGE} {NOW * 1000}; milliseconds?" in line["reason"]
    assert json.loads(base64.b64decode(line["payload"])) == {"item": [7], "text": ["é"], "time": [NOW * 1000]}
    assert b"data_bad_records_total 2.0" in metrics.render()


def test_a_shared_time_counts_for_every_record() -> None:
    some = records(shared=["time"], item=[[1], [2]], time=[[NOW * 1000]])
    assert timely(some, "time").tolist() == [False, False]
    assert timely(some, None).tolist() == timely(some, "other").tolist() == [True, True]


def test_making_a_batch_by_hand_raises_an_error() -> None:
    with pytest.raises(DataError, match=r"'time' must be Unix seconds .*milliseconds\?"):
        make_batch(records(item=[[1]], time=[[NOW * 1000]]), SPEC)


def test_stages_reject_them_to_the_source() -> None:
    class Keeps(MemorySource):
        kept: list[BadRecord]

        def reject(self, bad: list[BadRecord]) -> None:
            self.kept = bad

    below = Keeps({"item": list(range(20)), "time": [NOW] * 19 + [-5]}, batch_size=20)
    list(Pipeline(below).to_batches(SPEC))
    assert [(one.place, one.reason) for one in below.kept] == [(19, f"event time 'time' {RANGE} -5")]


def test_a_report_names_each_cause_once_with_its_count_and_the_values_of_the_first() -> None:
    """However different the values are."""
    times = [NOW * 1000 + i if i % 4 == 1 else -i if i % 4 == 3 else NOW for i in range(200)]
    stream = Pipeline(source(*times)).to_batches(replace(SPEC, max_bad=0.9))
    list(stream)
    said = f"event time 'time' {RANGE} … (the first: {NOW * 1000 + 1}; milliseconds? It would be"
    [(why, count)] = stream.bad_records().items()
    assert why.startswith(said)
    assert count == 100


class Counting(Stage[Records, Records]):
    """A source that drops records itself."""

    def __init__(self, source: MemorySource, tally: BadTally) -> None:
        super().__init__(source)
        self._tally = tally

    def __iter__(self) -> Iterator[Records]:
        return iter(self.upstream)

    def bad_records(self) -> dict[str, int]:
        return self._tally.described()


def test_what_a_source_and_a_stage_leave_out_is_in_one_report() -> None:
    tallies = [BadTally(), BadTally()]
    for number in range(9):
        tallies[0].add(BadReason("label 'y' is …", str(number)))
        tallies[1].add(f"broken at {number}")
    assert tallies[0].described() == {"label 'y' is … (the first: 0)": 9}
    some = records(item=[[1]] * 18, y=[[], [1.0]] * 9)
    below = Counting(MemorySource(some, batch_size=18), tallies[1])
    stream = Pipeline(below).to_batches(BatchSpec(ids=("item",), labels={"y": ("y", 0)}, max_bad=0.5))
    list(stream)
    assert sum(stream.bad_records().values()) == 18
    for number in range(100):
        tallies[1].add(f"broken at {number}")  # texts of a user's own, which have no cause
    assert len(tallies[1].counts) == BadTally.REASONS + 1
    assert BadReason("… of …", "1", "2") == "1 of 2"
