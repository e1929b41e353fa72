"""Stages one by one; that their positions are exact is in the contract of sources."""

from __future__ import annotations

import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from monolith.data import BatchSpec, Position, Records, Source
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats.memory import MemorySource, to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.pipeline import Pipeline, ProgressLine
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch
from monolith.tensors import RaggedTensor


def source(count: int = 10, batch_size: int = 4) -> MemorySource:
    return MemorySource({"id": list(range(count))}, batch_size=batch_size)


def read(batches: Source) -> list[list[int]]:
    return [batch["id"].flat_values.tolist() for batch in batches]


def test_map_replaces_records() -> None:
    def negative(records: Records) -> Records:
        return to_records({"id": -records["id"].flat_values})

    assert read(Pipeline(source()).map(negative)) == [[0, -1, -2, -3], [-4, -5, -6, -7], [-8, -9]]


def test_map_may_return_more_records_or_fewer_and_empty_batches_are_skipped() -> None:
    def each_as_often_as_it_says(records: Records) -> Records:
        ids = records["id"].flat_values
        return records.take(torch.repeat_interleave(torch.arange(len(ids)), (ids % 4) * (ids < 4)))

    assert read(Pipeline(source()).map(each_as_often_as_it_says)) == [[1, 2, 2, 3, 3, 3]]


def test_map_must_return_records() -> None:
    with pytest.raises(DataError, match="map must return Records, got Tensor"):
        read(Pipeline(source()).map(lambda records: records["id"].flat_values))  # type: ignore[arg-type, return-value]


def test_filter_keeps_what_the_predicate_wants() -> None:
    even = Pipeline(source()).filter(lambda records: records["id"].flat_values % 2 == 0)
    assert read(even) == [[0, 2], [4, 6], [8]]


def test_rebatch_changes_the_size_and_may_drop_the_rest() -> None:
    assert read(Pipeline(source()).rebatch(3)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert read(Pipeline(source()).rebatch(7, drop_remainder=True)) == [[0, 1, 2, 3, 4, 5, 6]]


def test_a_position_is_that_of_the_oldest_record_not_delivered() -> None:
    pipeline = Pipeline(source()).rebatch(6)
    next(iter(pipeline))
    position = pipeline.position()
    assert position["source"]["next"] == 4
    assert position["skip"] == 2


def test_restoring_skips_what_was_delivered_though_batches_differ() -> None:
    pipeline = Pipeline(source(batch_size=9)).rebatch(7)
    next(iter(pipeline))
    smaller = Pipeline(source(batch_size=2)).rebatch(7)
    smaller.restore(pipeline.position())
    assert read(smaller) == [[7, 8, 9]]
    missing = Pipeline(source(batch_size=2)).take(3).rebatch(7)
    missing.restore({**pipeline.position(), "source": Pipeline(source()).take(3).position()})
    with pytest.raises(DataError, match="the data has changed"):
        read(missing)


def test_shuffle_mixes_within_its_buffer() -> None:
    batches = read(Pipeline(source(100)).shuffle(ShuffleConfig(seed=1, buffer=50)))
    ids = [one for batch in batches for one in batch]
    assert sorted(ids[:50]) == list(range(50))
    assert ids[:50] != list(range(50))
    assert sorted(ids[50:]) == list(range(50, 100))
    assert max(map(len, batches)) == 4


def test_take_ends_after_so_many_records() -> None:
    assert read(Pipeline(source()).take(6)) == [[0, 1, 2, 3], [4, 5]]
    assert read(Pipeline(source()).take(0)) == []


@pytest.mark.parametrize(
    "stage",
    [lambda p: p.rebatch(0), lambda p: p.take(-1), lambda p: p.prefetch(-1)],
)
def test_sizes_that_make_no_sense_are_refused(stage: Callable[[Pipeline], Pipeline]) -> None:
    with pytest.raises(ConfigError):
        stage(Pipeline(source()))


def test_batches_for_a_model_have_positions_too() -> None:
    spec = BatchSpec(ids=("id",), labels={})
    batches = Pipeline(source()).to_batches(spec).prefetch(2)
    first = next(iter(batches))
    assert first.ids["id"].to_list() == [[0], [1], [2], [3]]
    again = Pipeline(source()).to_batches(spec)
    again.restore(batches.position())
    assert [len(batch) for batch in again] == [4, 2]
    batches.close()


# Prefetching


class Counted:
    """A source that says how far it was read, and by which thread."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.read = 0
        self.fail_at = fail_at
        self.threads: set[str] = set()
        self.closed = False

    def __iter__(self) -> Iterator[Records]:
        while self.read < 8:
            self.threads.add(threading.current_thread().name)
            if self.read == self.fail_at:
                self.fail_at = None
                raise OSError("out of luck")
            self.read += 1
            yield to_records({"id": [self.read - 1]})

    def position(self) -> Position:
        return {"read": self.read}

    def restore(self, position: Position) -> None:
        self.read = position["read"]

    def close(self) -> None:
        self.closed = True


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_position_of_prefetch_is_that_of_its_consumer() -> None:
    counted = Counted()
    ahead = Pipeline(counted).prefetch(2)
    assert ahead.position() == {"read": 0}
    batches = iter(ahead)
    next(batches)
    wait_until(lambda: counted.read == 4)  # two that are ready, and one more in the making
    assert ahead.position() == {"read": 1}
    assert counted.threads == {"prefetch"}
    assert read(ahead) == [[1], [2], [3], [4], [5], [6], [7]]
    assert ahead.position() == {"read": 8}


def test_prefetch_restarts_after_restoring() -> None:
    counted = Counted()
    ahead = Pipeline(counted).prefetch(2)
    batches = iter(ahead)
    next(batches)
    del batches
    ahead.restore({"read": 6})
    assert ahead.position() == {"read": 6}
    assert read(ahead) == [[6], [7]]


def test_an_error_comes_after_the_records_before_it_and_reading_can_resume() -> None:
    ahead = Pipeline(Counted(fail_at=2)).prefetch(4)
    batches = iter(ahead)
    assert [next(batches)["id"].flat_values.tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(OSError, match="out of luck"):
        next(batches)
    assert ahead.position() == {"read": 2}
    assert read(ahead) == [[2], [3], [4], [5], [6], [7]]


def test_closing_ends_the_thread_and_keeps_the_position() -> None:
    counted = Counted()
    ahead = Pipeline(counted).prefetch(2)
    next(iter(ahead))
    ahead.close()
    assert counted.closed
    assert ahead.position() == {"read": 1}
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_the_thread_ends_with_a_pipeline_that_was_forgotten() -> None:
    ahead = Pipeline(Counted()).prefetch(2)
    next(iter(ahead))
    del ahead
    gc.collect()
    wait_until(lambda: not any(thread.name == "prefetch" for thread in threading.enumerate()))


# Commits


def test_a_commit_reaches_the_queue_through_all_stages(tmp_path: str) -> None:
    form = ParquetFormat(chunk_rows=2)
    path = f"{tmp_path}/a.parquet"
    with form.writer(path) as writer:
        writer.write(to_records({"id": list(range(6))}))
    queue = LocalFileQueue([path])
    files = FileSource(queue, form, batch_size=2, auto_commit=False)
    pipeline = Pipeline(files).map(lambda records: records).rebatch(3).take(100).prefetch(1)
    batches = iter(pipeline)
    next(batches)
    pipeline.commit(pipeline.position())
    ((_, _, progress),) = queue.state()["waiting"]
    assert progress["place"] == 2  # before the batch of which one record was delivered
    pipeline.close()


# Progress


def test_progress_tells_records_speed_and_lag() -> None:
    now, stream = [1000.0], io.StringIO()
    records = to_records({"id": [1, 2, 3], "line_id.req_time": [900, 990, 950]})

    class Slow:
        def __iter__(self) -> Iterator[Records]:
            for _ in range(4):
                now[0] += 10
                yield records

        def position(self) -> Position:
            return {}

        def restore(self, position: Position) -> None: ...
        def close(self) -> None: ...

    pipeline = Pipeline(Slow()).with_progress(
        "Day 3", every=timedelta(seconds=15), clock=lambda: now[0], timer=lambda: now[0], stream=stream
    )
    assert len(list(pipeline)) == 4
    assert stream.getvalue().splitlines() == [
        "Day 3: 6 records, 0.3 records/s, 30s behind",
        "Day 3: 12 records, 0.3 records/s, 50s behind",
        "Day 3: 12 records, 0.3 records/s, 50s behind, done",
    ]


def test_data_that_was_there_already_has_no_lag() -> None:
    ticks, stream = iter(range(1000)), io.StringIO()
    source = MemorySource({"line_id.req_time": [900, 990]}, batch_size=1)
    how: dict[str, Any] = {"clock": lambda: 1000.0, "timer": lambda: next(ticks), "stream": stream}
    list(Pipeline(source).with_progress("Day 3", every=timedelta(seconds=1), **how))
    assert "records" in stream.getvalue()
    assert "behind" not in stream.getvalue()


def test_progress_keeps_quiet_about_what_is_over_soon_and_needs_no_event_time() -> None:
    stream = io.StringIO()
    line = ProgressLine("x", every=timedelta(seconds=30), clock=lambda: 5.0, timer=lambda: 5.0, stream=stream)
    line.advance(10)
    line.finish()
    assert stream.getvalue() == ""
    assert sum(map(len, Pipeline(source()).with_progress(stream=stream))) == 10


def test_a_label_that_is_nan_or_not_there_leaves_its_record_out(caplog: pytest.LogCaptureFixture) -> None:
    labels = RaggedTensor.from_list([[1.0], [float("nan")], [], [0.0]])
    records = Records(4, {"item": RaggedTensor.from_list([[1], [2], [3], [4]], dtype=torch.int64)})
    spec = BatchSpec(ids=("item",), event_time=None, max_bad=0.5)

    def read(spec: BatchSpec) -> Batch:
        labelled = Pipeline(MemorySource(records, batch_size=4)).map(
            lambda some: some.with_columns({"label": labels})
        )
        batches = labelled.to_batches(spec)
        (batch,) = batches
        told.append(batches.bad_records())
        return batch

    told: list[dict[str, int]] = []
    batch = read(spec)
    assert batch.ids["item"].flat_values.tolist() == [1, 4]
    assert batch.label.tolist() == [1.0, 0.0]
    assert "left out 2 of 4 records: 2: label 'label' is empty" in caplog.text
    batch = read(replace(spec, optional=["label"]))  # a task that can do without it
    assert batch.ids["item"].flat_values.tolist() == [1, 2, 3, 4]
    assert batch.label.isnan().tolist() == [False, True, True, False]
    assert told == [{"label 'label' is empty": 2}, {}]


def test_a_record_that_has_one_of_its_labels_is_no_bad_one() -> None:
    records = {"item": [1, 2, 3], "click": [[1.0], [], []], "like": [[], [0.0], []]}
    spec = BatchSpec(
        ids=("item",), labels={"click": ("click", 0), "like": ("like", 0)}, event_time=None, max_bad=0.5
    )
    (batch,) = Pipeline(MemorySource(records, batch_size=3)).to_batches(spec)
    assert batch.ids["item"].flat_values.tolist() == [1, 2]
