"""What several workers have left, as positions of another number of them: every record once, whenever."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from data.files.chunked import Chunks, SplitChunks
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.data import Position, Records, Shard, Source
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats.memory import MemorySource
from monolith.data.pipeline import Pipeline
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import RestoreError


@st.composite
def some_files(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    """Up to 7 files of up to 4 chunks of up to 5 records, with ids from 0 on."""
    sizes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=7))
    ids = iter(range(1000))
    return {f"f{number}": [list(islice(ids, size)) for size in file] for number, file in enumerate(sizes)}


@st.composite
def source_settings(draw: st.DrawFn) -> dict[str, Any]:
    buffer = draw(st.sampled_from([None, 3, 8, 40]))
    shuffle = None if buffer is None else ShuffleConfig(seed=7, buffer=buffer, files=draw(st.booleans()))
    return {"shuffle": shuffle, "batch_size": draw(st.integers(1, 6)), "epochs": draw(st.integers(1, 3))}


def plain(source: Source) -> Source:
    return source


def negative_twice(records: Records) -> Records:
    return Records(records.size, dict(records.columns), records.shared)


STAGES: dict[str, Callable[[Source], Source]] = {
    "none": plain,
    "map": lambda source: Pipeline(source).map(negative_twice).prefetch(2),
    "rebatch": lambda source: Pipeline(source).rebatch(4),
    "shuffle": lambda source: Pipeline(source).shuffle(ShuffleConfig(seed=3, buffer=6)),
    "shuffle, rebatch": lambda source: Pipeline(source).shuffle(ShuffleConfig(buffer=9)).rebatch(5),
    "rebatch, shuffle, ahead": lambda source: (
        Pipeline(source).rebatch(2).prefetch(1).shuffle(ShuffleConfig(buffer=5)).prefetch(2)
    ),
}

Make = Callable[[], Source]


def ids_in(batch: Records) -> list[int]:
    return batch["id"].flat_values.tolist()


def opened(make: Make, share: Shard) -> Source:
    source = make()
    source.read_shard(share)
    return source


def train(make: Make, positions: Sequence[Position] | None, moments: Sequence[int | None]) -> Any:
    """Have each worker read so many batches, or all; return the ids, and where each stands."""
    ids: list[int] = []
    stands: list[Position] = []
    for worker, moment in enumerate(moments):
        source = opened(make, Shard(worker, len(moments)))
        if positions is not None:
            source.restore(positions[worker])
        ids += [one for batch in islice(iter(source), moment) for one in ids_in(batch)]
        stands.append(json.loads(json.dumps(source.position())))
        source.close()
    return ids, stands


def moved(make: Make, positions: Sequence[Position], workers: int) -> list[Position]:
    chief = opened(make, Shard(0, workers))
    chief.position()  # a session has asked for it by then
    found: list[Position] = json.loads(json.dumps(chief.redistribute(positions, workers)))
    chief.close()
    return found


MOMENTS = st.lists(st.integers(0, 12), min_size=1, max_size=4)


def check_every_record_once(make: Make, whole: list[int], runs: list[list[int]], last: int) -> None:
    positions: list[Position] | None = None
    ids: list[int] = []
    for run, following in zip(runs, [*map(len, runs[1:]), last], strict=True):
        more, stands = train(make, positions, run)
        ids += more
        positions = moved(make, stands, following)
    more, _ = train(make, positions, [None] * last)
    assert Counter(ids + more) == Counter(whole)


@pytest.mark.parametrize("stages", STAGES)
@settings(max_examples=tries(8), deadline=None)
@given(
    files=some_files(),
    options=source_settings(),
    runs=st.lists(MOMENTS, min_size=1, max_size=3),
    last=st.integers(1, 4),
)
def test_files_of_a_list_are_read_once_by_however_many_workers(
    stages: str, files: dict[str, list[list[int]]], options: dict[str, Any], runs: list[list[int]], last: int
) -> None:
    if not any(chunk for file in files.values() for chunk in file):
        return
    form = (SplitChunks if last % 2 else Chunks)(files)

    def make() -> Source:
        return STAGES[stages](FileSource(list(files), form, **options))

    whole = [one for file in files.values() for chunk in file for one in chunk] * options["epochs"]
    check_every_record_once(make, whole, runs, last)


def test_a_file_of_another_worker_is_not_found_again_by_a_watch(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"f{number}") for number in range(9)]
    files = {path: [[10 * number, 10 * number + 1], [10 * number + 2]] for number, path in enumerate(paths)}

    def make() -> Source:
        watch = Watch(str(tmp_path / "f*"), stop_after=timedelta(0))
        return FileSource(watch, Chunks(files), batch_size=2, shuffle=ShuffleConfig(buffer=4))

    ids: list[int] = []
    positions: list[Position] | None = None
    for there, moments, following in ((6, [1, 2], 3), (8, [1, 2, 0], 2), (9, [None, None], 1)):
        for path in paths[:there]:
            Path(path).touch()
        more, stands = train(make, positions, moments)
        ids += more
        positions = moved(make, stands, following)
    assert sorted(ids) == [one for file in files.values() for chunk in file for one in chunk]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_queue_is_told_the_positions_and_leases_the_rest(workers: int) -> None:
    files = {f"f{number}": [[10 * number, 10 * number + 1], [10 * number + 2]] for number in range(9)}
    queue = LocalFileQueue(sorted(files))

    def make() -> Source:
        return FileSource(queue, Chunks(files), batch_size=2)

    ids: list[int] = []
    old = [opened(make, Shard(worker, 3)) for worker in range(3)]
    for source, moment in zip(old, [2, 3, 1], strict=True):
        ids += [one for batch in islice(iter(source), moment) for one in ids_in(batch)]
    positions = moved(make, [source.position() for source in old], workers)
    rest: list[int] = []
    sources = [opened(make, Shard(worker, workers)) for worker in range(workers)]
    for source, position in zip(sources, positions, strict=True):
        source.restore(position)
    for source in sources:
        for batch in source:
            rest += ids_in(batch)
            source.commit(source.position())
        source.commit(source.position())
    assert sorted(ids + rest) == [one for file in files.values() for chunk in file for one in chunk]


def test_records_buffered_on_top_of_a_queue_are_refused_with_advice() -> None:
    files = {"f0": [[0, 1, 2]], "f1": [[3, 4, 5]]}
    queue = LocalFileQueue(sorted(files))

    def make() -> Source:
        return Pipeline(FileSource(queue, Chunks(files), batch_size=3)).rebatch(2)

    _, stands = train(make, None, [1])
    with pytest.raises(RestoreError, match="use the batch_size and the shuffle of FileSource"):
        moved(make, stands, 2)


def test_a_stage_that_cannot_redistribute_says_so() -> None:
    def taking() -> Source:
        return Pipeline(FileSource(["f0"], Chunks({"f0": [[0, 1]]}), batch_size=1)).take(1)

    def of_memory() -> Source:
        return Pipeline(MemorySource({"id": [1, 2, 3]}, batch_size=1)).rebatch(2)

    for make, why in (
        (taking, r"take\(1\) of a pipeline counts"),
        (of_memory, "MemorySource cannot redistr"),
    ):
        _, stands = train(make, None, [1])
        with pytest.raises(RestoreError, match=why):
            moved(make, stands, 2)


def test_other_files_than_before_or_only_some_positions_are_refused() -> None:
    files = {f"f{number}": [[number]] for number in range(4)}

    def make() -> Source:
        return FileSource(sorted(files), Chunks(files), batch_size=1)

    _, stands = train(make, None, [1, 1])
    with pytest.raises(RestoreError, match=r"shards \[0, 2\] of the files, which are not all"):
        moved(make, stands[:1], 3)
    del files["f3"]
    with pytest.raises(RestoreError, match="f3 is not among the files of this source"):
        moved(make, stands, 3)


def test_the_records_that_were_counted_stay_counted() -> None:
    files = {f"f{number}": [[number, number], [number]] for number in range(4)}

    def make() -> FileSource:
        return FileSource(sorted(files), Chunks(files), batch_size=3)

    _, stands = train(make, None, [2, 2, 1])
    positions = moved(make, stands, 2)
    assert sum(one["good"] for one in positions) == sum(one["good"] for one in stands)
