"""Sources that hand out work let others have what a worker has not done, from any place on."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from data.service.loopback import add_worker, numbers, trainer
from data.service.processes import ALL, CONFIG
from runtime.fleets import TalliedFiles, TalliedQueue

from monolith.data import FileSource, Pipeline, Share, ShuffleConfig, share_out
from monolith.data.files.work_queue import SharedFileQueue
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.handing import HandsOut, handing
from monolith.data.redistribution import redistributed
from monolith.data.service import Dispatcher

pytest.importorskip("pyarrow")


@pytest.fixture
def task(tmp_path: Path) -> TalliedQueue:
    return TalliedQueue(batches=15, folder=str(tmp_path))


def reader(task: TalliedQueue, worker: int, **more: Any) -> FileSource:
    source = FileSource(task.queue(), ParquetFormat(), **{"batch_size": 5, **more})
    share_out(source, Share(worker, 3))
    return source


def records(source: Any, batches: int | None = None) -> list[int]:
    return [
        number for some in itertools.islice(source, batches) for number in some["record"].flat_values.tolist()
    ]


def hands(source: object) -> HandsOut:
    found = handing(source)
    assert found is not None
    return found


@pytest.mark.parametrize("shuffle", [None, ShuffleConfig(buffer=7)])
@pytest.mark.parametrize("batches", [0, 1, 2, 3, 5, 7])
def test_a_queue_gives_what_one_had_left_to_another_from_the_middle_of_a_file(
    task: TalliedQueue, batches: int, shuffle: ShuffleConfig | None
) -> None:
    gone, other = reader(task, 1, shuffle=shuffle), reader(task, 2, shuffle=shuffle)
    hands(gone).entrust()
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
    assert next_one.records == position["good"], "but its records are still counted"


def test_a_worker_that_is_closed_keeps_what_it_has_where_somebody_else_gives_it_back(
    task: TalliedQueue,
) -> None:
    kept, let_go = reader(task, 1), reader(task, 2)
    hands(kept).entrust()
    for source in (kept, let_go):
        records(source, 1)
        source.close()
    assert task.queue().readers() == ["worker 1"]


def test_who_waits_for_others_is_interrupted(task: TalliedQueue) -> None:
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


def test_a_new_run_takes_back_what_any_worker_had_whoever_saved_a_position(task: TalliedQueue) -> None:
    saver, newcomer = reader(task, 1), reader(task, 2)
    for source in (saver, newcomer):
        hands(source).entrust()
    done = records(saver, 3)
    saved = json.loads(json.dumps(saver.position()))
    records(newcomer, 2)
    chief = reader(task, 0)
    first, *_ = redistributed(chief, [saved], 3)
    chief.restore(first)
    assert sorted(done + records(chief)) == list(range(task.records))


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_the_data_service_gives_what_one_had_left_to_another(tmp_path: Path, chunks: int) -> None:
    with ExitStack() as stack:
        dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path)))
        add_worker(stack, dispatcher)
        gone, other, next_one = (trainer(dispatcher) for _ in range(3))
        for worker, source in ((0, gone), (1, other), (0, next_one)):
            share_out(source, Share(worker, 2))
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
    assert handing(Pipeline(source).map(lambda records: records).prefetch(2)) is source
    for held in (
        Pipeline(source).rebatch(4),
        Pipeline(source).shuffle(ShuffleConfig(buffer=4)),
        Pipeline(source).take(4),
    ):
        assert handing(held) is None


def test_a_list_of_files_and_a_queue_that_counts_by_itself_hand_out_nothing(tmp_path: Path) -> None:
    paths = TalliedFiles(batches=15, folder=str(tmp_path)).write()
    assert handing(FileSource(paths, ParquetFormat(), batch_size=5)) is None
    queue = SharedFileQueue(str(tmp_path / "queue"))
    assert handing(FileSource(queue, ParquetFormat(), batch_size=5, auto_commit=True)) is None
