"""What a stream knows about its data through its stages, and how unfinished work moves between workers."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data.service.loopback import add_worker, numbers, trainer
from data.service.processes import ALL, CONFIG
from runtime.fleets import TalliedFiles, TalliedQueue

from monolith.data import (
    ArrowSource,
    BatchSpec,
    DriftingStream,
    FileSource,
    IterableSource,
    MemorySource,
    Pipeline,
    Shard,
    ShuffleConfig,
    Watch,
    WorkQueueSource,
    as_stream,
)
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.format import Format
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat, TfRecordFormat
from monolith.data.service import DataServiceSource, Dispatcher
from monolith.data.shuffling import Epochs
from monolith.data.transforms import NegativeDownsample
from monolith.errors import DataError, RestoreError

COLUMNS = {"item": [1, 2, 3, 4, 5], "name": ["a", "bb", "c", "d", "e"], "label": [0.0, 1.0, 0.0, 1.0, 0.0]}
SPEC = BatchSpec(ids=["item"], labels={"label": ("label", 0)}, event_time=None)


def memory() -> Pipeline:
    return Pipeline(MemorySource(COLUMNS, batch_size=2))


def test_a_size_is_known_through_stages_that_keep_all_records() -> None:
    assert memory().rebatch(3).shuffle(ShuffleConfig()).to_batches(SPEC).prefetch(2).size() == 5
    assert memory().take(3).to_batches(SPEC).size() == 3
    assert memory().take(30).size() == 5
    assert Pipeline(MemorySource(COLUMNS, batch_size=2, epochs=3)).size() == 15


def test_a_size_is_not_known_where_a_function_makes_other_records() -> None:
    assert memory().map(lambda records: records).size() is None
    assert Pipeline(MemorySource(COLUMNS, batch_size=2, epochs=None)).size() is None
    assert as_stream([]).size() is None


def test_files_of_parquet_know_theirs(tmp_path: Path) -> None:
    records = next(iter(MemorySource(COLUMNS, batch_size=5)))
    for form, name, size in ((ParquetFormat(), "x.parquet", 5), (CsvFormat(), "x.csv", None)):
        with form.writer(str(tmp_path / name)) as file:
            file.write(records)
        assert FileSource([str(tmp_path / name)], form, batch_size=2).size() == size


def test_raw_columns_ride_along_through_stages() -> None:
    batches = memory().rebatch(3).to_batches(SPEC).prefetch(1)
    assert batches.keep_columns(["name"])
    texts = [[bytes(text) for (text,) in batch.raw["name"].to_list()] for batch in batches]
    assert texts == [[b"a", b"bb", b"c"], [b"d", b"e"]]


def test_without_being_asked_nothing_rides_along() -> None:
    assert all(not batch.raw for batch in memory().to_batches(SPEC))
    assert not as_stream([]).keep_columns(["name"])


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    batches = memory().to_batches(SPEC)
    batches.keep_columns(["nam"])
    with pytest.raises(DataError, match=r"no column 'nam' .*Did you mean 'name'\?"):
        list(batches)


# Which part of the input is done

RECORDS = 1200
BATCH = 100


def files(folder: Path, form: Format, ending: str) -> list[str]:
    """Write three files, the second of which is as large as the others together."""
    paths, first = [], 0
    for name, size in (("a", 300), ("b", 600), ("c", 300)):
        paths.append(str(folder / f"{name}.{ending}"))
        items = [1_000_000 + (7919 * number) % 1_000_000 for number in range(first, first + size)]
        records = next(
            iter(MemorySource({"item": items, "label": [0.0, 1.0] * (size // 2)}, batch_size=size))
        )
        with form.writer(paths[-1]) as file:
            file.write(records)
        first += size
    return paths


def fractions(stream: Any) -> list[float | None]:
    """Return which part is done after each batch."""
    return [stream.fraction_read(stream.position()) for _ in stream]


def near(found: list[float | None], step: float, tolerance: float = 0.03) -> bool:
    return all(
        one is not None and abs(one - min(step * number, 1.0)) <= tolerance
        for number, one in enumerate(found, 1)
    )


FORMATS: list[tuple[Format, str]] = [
    (CsvFormat(chunk_bytes=1000), "csv"),
    (CsvFormat(), "csv"),
    (JsonLinesFormat(chunk_bytes=1000), "jsonl"),
    (ParquetFormat(chunk_rows=64, row_group_rows=128), "parquet"),
    (TfRecordFormat("tf_example", chunk_bytes=1000), "tfrecord"),
    (TfRecordFormat("tf_example", chunk_bytes=1000), "tfrecord.gz"),
]


@pytest.mark.parametrize(("form", "ending"), FORMATS)
def test_files_know_which_part_of_them_is_read_by_their_bytes(
    form: Format, ending: str, tmp_path: Path
) -> None:
    source = FileSource(files(tmp_path, form, ending), form, batch_size=BATCH)
    assert source.fraction_read(source.position()) == 0.0
    found = fractions(source)
    assert near(found, BATCH / RECORDS)
    assert found == sorted(found, key=lambda one: one or 0.0)
    assert found[-1] == pytest.approx(1.0, abs=0.01)


def csv(folder: Path, **options: Any) -> FileSource:
    form = CsvFormat(chunk_bytes=1000)
    return FileSource(files(folder, form, "csv"), form, batch_size=BATCH, **options)


def test_a_part_is_known_through_stages_that_hold_records_back_or_read_ahead(tmp_path: Path) -> None:
    stages = Pipeline(csv(tmp_path)).shuffle(ShuffleConfig(buffer=500)).rebatch(60).prefetch(4)
    assert near(fractions(stages.to_batches(SPEC).prefetch(2)), 60 / RECORDS, 0.05)


def test_a_part_is_one_of_the_input_where_records_are_left_out(tmp_path: Path) -> None:
    half = Pipeline(csv(tmp_path)).filter(lambda records: records["label"].flat_values > 0)
    assert near(fractions(half.to_batches(SPEC)), BATCH / RECORDS)
    sampled = Pipeline(csv(tmp_path)).transform(NegativeDownsample(drop_rate=0.5, seed=1))
    assert near(fractions(sampled.to_batches(SPEC)), BATCH / RECORDS)


def test_the_fraction_is_of_all_epochs_and_continues_after_a_restart(tmp_path: Path) -> None:
    source = csv(tmp_path)
    source.read_epochs(Epochs(count=3, seed=1, buffer=200))
    first = fractions(Pipeline(source).take(1800))
    assert near(first[-1:], 1.0)  # of what is to be taken
    again = csv(tmp_path)
    again.read_epochs(Epochs(count=3, seed=1, buffer=200))
    again.restore(source.position())
    found = fractions(again)
    assert found[0] == pytest.approx(0.5 + BATCH / RECORDS / 3, abs=0.03)
    assert found[-1] == pytest.approx(1.0, abs=0.01)


def test_each_worker_knows_the_fraction_of_its_shard(tmp_path: Path) -> None:
    assert near(fractions(csv(tmp_path, worker=1, num_workers=2)), BATCH / 600)


def test_a_part_is_not_known_of_what_has_no_end_or_does_not_say(tmp_path: Path) -> None:
    endless = csv(tmp_path, epochs=None)
    next(iter(endless))
    assert endless.fraction_read(endless.position()) is None
    assert as_stream([]).fraction_read({}) is None


def test_tables_in_memory_know_their_part() -> None:
    assert fractions(memory()) == [0.4, 0.8, 1.0]
    assert fractions(memory().take(4)) == [0.5, 1.0]
    table = pytest.importorskip("pyarrow").table(COLUMNS)
    arrow = ArrowSource(table, batch_size=2, epochs=2, shuffle=ShuffleConfig(seed=1))
    assert fractions(arrow) == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_what_was_there_already_is_not_live(tmp_path: Path) -> None:
    files = [str(tmp_path / "x.csv")]
    at_rest = [
        memory().rebatch(3).to_batches(SPEC).prefetch(1),
        FileSource(files, CsvFormat(), batch_size=2),
        ArrowSource(pa.table(COLUMNS), batch_size=2),
        DriftingStream(),
    ]
    as_they_come = [
        FileSource(Watch(files), CsvFormat(), batch_size=2),
        IterableSource(lambda: iter([{"item": 1}]), batch_size=2),
        as_stream([]),  # unknown, so it may be
    ]
    assert [one.live for one in at_rest] == [False] * 4
    assert [one.live for one in as_they_come] == [True, True, None]


# Work that moves between workers


@pytest.fixture
def task(tmp_path: Path) -> TalliedQueue:
    return TalliedQueue(batches=15, folder=str(tmp_path))


def reader(task: TalliedQueue, worker: int, **more: Any) -> FileSource:
    source = FileSource(task.queue(), ParquetFormat(), **{"batch_size": 5, **more})
    source.read_shard(Shard(worker, 3))
    return source


def records(source: Any, batches: int | None = None) -> list[int]:
    return [
        number for some in itertools.islice(source, batches) for number in some["record"].flat_values.tolist()
    ]


def hands(source: FileSource | DataServiceSource) -> WorkQueueSource:
    found = source.work_queue
    assert found is not None
    return found


@pytest.mark.parametrize("shuffle", [None, ShuffleConfig(buffer=7)])
@pytest.mark.parametrize("batches", [0, 1, 2, 3, 5, 7])
def test_a_queue_gives_what_one_had_left_to_another_from_the_middle_of_a_file(
    task: TalliedQueue, batches: int, shuffle: ShuffleConfig | None
) -> None:
    gone, other = reader(task, 1, shuffle=shuffle), reader(task, 2, shuffle=shuffle)
    hands(gone).defer_to_chief()
    before = records(gone, batches)
    position = json.loads(json.dumps(gone.position()))
    read_on = records(gone, 1)
    blank = hands(other).give_back(position)
    gone.close()
    after = records(other)
    assert sorted(before + after) == list(range(task.records))
    assert set(read_on) <= set(after), "what it read after the position is lost with it"
    next_one = reader(task, 1, shuffle=shuffle)
    next_one.restore(blank)
    assert records(next_one) == []
    assert next_one.position()["good"] == position["good"], "but its records are still counted"


def test_a_closed_worker_keeps_its_leases_if_the_chief_gives_them_back(
    task: TalliedQueue,
) -> None:
    kept, let_go = reader(task, 1), reader(task, 2)
    hands(kept).defer_to_chief()
    for source in (kept, let_go):
        records(source, 1)
        source.close()
    assert task.queue().readers() == ["worker 1"]


def test_a_worker_that_waits_for_others_is_interrupted(task: TalliedQueue) -> None:
    queue = task.queue()
    while queue.take("another") is not None:
        pass
    source, found = reader(task, 1), threading.Event()
    thread = threading.Thread(target=lambda: (records(source), found.set()))
    thread.start()
    assert not found.wait(0.1), "it waits for what another has"
    hands(source).interrupt()
    assert found.wait(20)
    thread.join()


def test_a_new_run_releases_the_leases_of_all_former_workers(task: TalliedQueue) -> None:
    saver, newcomer = reader(task, 1), reader(task, 2)
    for source in (saver, newcomer):
        hands(source).defer_to_chief()
    done = records(saver, 3)
    saved = json.loads(json.dumps(saver.position()))
    records(newcomer, 2)
    chief = reader(task, 0)
    first, *_ = chief.redistribute([saved], 3)
    chief.restore(first)
    assert sorted(done + records(chief)) == list(range(task.records))


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_the_data_service_gives_what_one_had_left_to_another(tmp_path: Path, chunks: int) -> None:
    with ExitStack() as stack:
        dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path)))
        add_worker(stack, dispatcher)
        gone, other, next_one = (trainer(dispatcher) for _ in range(3))
        for worker, source in ((0, gone), (1, other), (0, next_one)):
            source.read_shard(Shard(worker, 2))
        before = [number for some in itertools.islice(gone, chunks) for number in numbers(some)]
        position = json.loads(json.dumps(gone.position()))
        next(iter(gone))
        blank = hands(other).give_back(position)
        after = [number for some in other for number in numbers(some)]
        assert sorted(before + after) == ALL
        next_one.restore(blank)
        assert list(next_one) == []


def test_stages_that_hold_nothing_back_pass_it_on_and_others_do_not(task: TalliedQueue) -> None:
    source = reader(task, 1)
    assert Pipeline(source).map(lambda records: records).prefetch(2).work_queue is source
    for held in (
        Pipeline(source).rebatch(4),
        Pipeline(source).shuffle(ShuffleConfig(buffer=4)),
        Pipeline(source).take(4),
    ):
        assert held.work_queue is None


def test_a_list_of_files_and_an_auto_committing_queue_have_no_work_queue(tmp_path: Path) -> None:
    paths = TalliedFiles(batches=15, folder=str(tmp_path)).write()
    assert FileSource(paths, ParquetFormat(), batch_size=5).work_queue is None
    queue = SharedFileQueue(str(tmp_path / "queue"))
    assert FileSource(queue, ParquetFormat(), batch_size=5, auto_commit=True).work_queue is None


# Objects that are not derived from Stream


class Minimal:
    """A source of a user's own, which has the methods of earlier versions."""

    def __init__(self) -> None:
        self._inner = MemorySource(COLUMNS, batch_size=2)
        self.committed: Any = None

    def __iter__(self) -> Any:
        return iter(self._inner)

    def position(self) -> Any:
        return self._inner.position()

    def restore(self, position: Any) -> None:
        self._inner.restore(position)

    def read_share(self, share: Shard) -> None:
        self._inner.read_shard(share)


def test_an_object_with_the_methods_of_a_source_is_wrapped_and_keeps_them() -> None:
    source = Minimal()
    stream = as_stream(source)
    assert as_stream(stream) is stream
    stream.read_shard(Shard(1, 2))
    assert len(list(itertools.islice(stream, 1))) == 1
    assert stream.position() == source.position()
    stream.commit(stream.position())
    stream.close()
    assert stream.work_queue is None
    with pytest.raises(RestoreError, match="Minimal cannot redistribute"):
        stream.redistribute([stream.position()], 2)


def test_a_plain_iterable_has_the_number_of_items_as_its_position() -> None:
    stream = as_stream([1, 2, 3, 4])
    assert list(itertools.islice(stream, 2)) == [1, 2]
    again = as_stream([1, 2, 3, 4])
    again.restore(json.loads(json.dumps(stream.position())))
    assert list(again) == list(stream) == [3, 4]
    once = as_stream(iter([1, 2]))
    start = once.position()
    assert next(iter(once)) == 1
    with pytest.raises(RestoreError, match="cannot be read again"):
        once.restore(start)
    with pytest.raises(RestoreError, match="not a position"):
        again.restore({"source": "files"})
