"""What every source does, wherever its records come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from contracts import sources
from contracts.sources import SOURCES, Case, ids_of
from store.ranks import all_at_once, connected

from monolith.data import Records, Shard, Source
from monolith.data.service import Dispatcher
from monolith.errors import ConfigError, MonolithError, RestoreError
from monolith.runtime.lockstep import aligned
from monolith.runtime.prefetch import Silence
from monolith.store import RankGroups


class Maker:
    """Makes the same source over and over, and closes all of them."""

    def __init__(self, case: Case, folder: Path, request: pytest.FixtureRequest) -> None:
        self.case = case
        self._service = {} if case.service is None else {"service": request.getfixturevalue(case.service)}
        self._folder = folder
        self._made: list[Source] = []

    def __call__(self, **options: Any) -> Source:
        self._made.append(self.case.make(self._folder, **self._service, **options))
        return self._made[-1]

    def close(self) -> None:
        for source in self._made:
            source.close()


@pytest.fixture
def data_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with sources.data_service(tmp_path_factory.mktemp("job")) as dispatcher:
        yield dispatcher


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(SOURCES[request.param], tmp_path, request)
    yield maker
    maker.close()


@pytest.fixture(params=[name for name, case in SOURCES.items() if "seed" in case.options])
def make_shuffled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(SOURCES[request.param], tmp_path, request)
    yield maker
    maker.close()


def some(source: Source, batches: int) -> list[Records]:
    """Read so many batches, then stop."""
    iterator = iter(source)
    return list(islice(iterator, batches))


def test_every_record_comes_once(make: Maker) -> None:
    assert sorted(ids_of(make())) == sorted(make.case.ids)


def test_records_come_in_the_same_order_each_time(make: Maker) -> None:
    assert ids_of(make()) == ids_of(make())


def test_a_position_survives_json(make: Maker) -> None:
    source = make()
    positions = [source.position(), *(source.position() for _ in source), source.position()]
    assert json.loads(json.dumps(positions)) == positions


def test_asking_for_the_position_moves_nothing(make: Maker) -> None:
    source = make()
    for _ in source:
        assert source.position() == source.position()


def files_in(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()
    }


def test_asking_for_the_position_writes_no_file(make: Maker, tmp_path: Path) -> None:
    source = make()
    for _ in source:
        before = files_in(tmp_path)
        for _ in range(3):
            source.position()
        assert files_in(tmp_path) == before


def test_asking_for_the_position_does_not_change_later_records(make: Maker) -> None:
    source, ids = make(), list[int]()
    for batch in source:
        source.position()
        source.position()
        ids += ids_of([batch])
    assert ids == ids_of(make())


def test_committing_again_and_again_changes_nothing_that_follows(make: Maker) -> None:
    source, ids = make(), list[int]()
    for batch in source:
        ids += ids_of([batch])
        position = json.loads(json.dumps(source.position()))
        source.commit(position)
        after = source.position()
        source.commit(position)
        assert source.position() == after
    source.commit(source.position())
    assert ids == ids_of(make())


def test_a_new_source_resumes_from_the_last_commit(make: Maker) -> None:
    """As a trainer does that is killed after every checkpoint."""
    whole, ids = ids_of(make()), list[int]()
    source = make()
    position = source.position()
    while True:
        source = make()
        source.restore(position)
        source.commit(position)  # the kill may have come before it
        batches = some(source, 1)
        if not batches:
            break
        position = json.loads(json.dumps(source.position()))
        source.commit(position)
        ids += ids_of(batches)
    assert ids == whole


def test_a_new_source_resumes_at_any_batch(make: Maker) -> None:
    whole = ids_of(make())
    source = make()
    positions = [(0, source.position())]
    read = 0
    for batch in source:
        read += len(batch)
        positions.append((read, json.loads(json.dumps(source.position()))))
    assert read == len(whole)
    for count, position in positions:
        again = make()
        again.restore(position)
        assert again.position() == position
        assert ids_of(again) == whole[count:]


def test_restoring_again_and_again_loses_nothing(make: Maker) -> None:
    """As a trainer does that is killed after every batch."""
    whole, ids = ids_of(make()), list[int]()
    source = make()
    position = source.position()
    while True:
        source = make()
        source.restore(position)
        batches = some(source, 1)
        if not batches:
            break
        position = json.loads(json.dumps(source.position()))
        ids += ids_of(batches)
    assert ids == whole


def test_a_source_returns_to_an_earlier_position(make: Maker) -> None:
    source = make()
    whole = ids_of(make())
    first = ids_of(some(source, 2))
    position = source.position()
    assert first + ids_of(source) == whole
    source.restore(position)
    assert first + ids_of(source) == whole


def test_a_consumer_that_stops_early_resumes_there(make: Maker) -> None:
    source = make()
    whole = ids_of(make())
    ids = []
    while batches := some(source, 1):
        ids += ids_of(batches)
    assert ids == whole


def test_at_the_end_there_is_nothing_more(make: Maker) -> None:
    source = make()
    ids_of(source)
    assert ids_of(source) == []
    again = make()
    again.restore(source.position())
    assert ids_of(again) == []


GARBAGE: list[dict[str, Any]] = [
    {},
    {"source": "a kind of its own"},
    {"stage": "none"},
    {"source": {}, "skip": 0, "stage": "rebatch"},
]


def test_a_position_of_something_else_is_refused(make: Maker) -> None:
    source = make()
    for garbage in GARBAGE:
        with pytest.raises(RestoreError):
            source.restore(garbage)
    assert sorted(ids_of(source)) == sorted(make.case.ids)


NEW = ("pass",)
"""Keys that positions of older versions do not have."""


def test_a_position_with_nonsense_in_it_is_refused(make: Maker) -> None:
    source = make()
    some(source, 1)
    position = source.position()
    for name, value in position.items():
        if isinstance(value, int):
            for nonsense in (-1, "1", None, 1.5):
                with pytest.raises(RestoreError):
                    source.restore({**position, name: nonsense})
        if name in NEW:
            continue
        with pytest.raises(RestoreError):
            source.restore({other: value for other, value in position.items() if other != name})


def test_closing_twice_does_nothing(make: Maker) -> None:
    source = make()
    some(source, 1)
    position = source.position()
    source.close()
    source.close()
    assert ids_of(some(source, 0)) == []
    again = make()
    again.restore(position)
    assert len(ids_of(again)) < len(make.case.ids)  # what was taken stays taken


# Where several workers can share it out


SHARED = [name for name, case in SOURCES.items() if case.shares is not None]


@pytest.fixture(params=SHARED)
def make_shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(SOURCES[request.param], tmp_path, request)
    yield maker
    maker.close()


def shared(make: Maker, share: Shard) -> Source:
    source = make(**make.case.shares or {})
    source.read_shard(share)
    return source


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_the_shards_of_all_workers_are_the_whole_without_repeats(make_shared: Maker, workers: int) -> None:
    ids = [one for worker in range(workers) for one in ids_of(shared(make_shared, Shard(worker, workers)))]
    assert sorted(ids) == sorted(make_shared.case.ids)


@pytest.mark.parametrize("cut", sources.CUTS[:-1], ids=lambda cut: f"{len(cut)} files")
@pytest.mark.parametrize("name", [name for name in SHARED if SOURCES[name].in_files])
def test_they_are_the_whole_whatever_the_number_of_files(
    name: str, cut: tuple[int, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / sources.CUT).write_text(json.dumps(cut))
    make = Maker(SOURCES[name], tmp_path, request)
    for workers in (1, 2, 3, 4):
        ids = [one for worker in range(workers) for one in ids_of(shared(make, Shard(worker, workers)))]
        assert sorted(ids) == sorted(make.case.ids), f"{workers} workers"
    make.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankGroups]]:
    with connected(3) as groups:
        yield groups


def test_ranks_get_the_whole_without_repeats(make_shared: Maker, ranks: list[RankGroups]) -> None:
    def read(rank: int) -> list[Records | Silence]:
        source = shared(make_shared, Shard(rank, len(ranks)))
        nothing = Records(0, {})
        return list(
            aligned(
                iter(source), ranks[rank].lookups, empty=lambda: nothing, every=60.0, pressed=lambda: False
            )
        )

    found = all_at_once(*(partial(read, rank) for rank in range(len(ranks))))
    assert len({len(batches) for batches in found}) == 1, "all take the same number of steps"
    ids = [ids_of([one for one in batches if isinstance(one, Records) and len(one)]) for batches in found]
    assert sorted(one for mine in ids for one in mine) == sorted(make_shared.case.ids)


def test_a_shard_resumes_at_any_batch(make_shared: Maker) -> None:
    source, whole, positions = shared(make_shared, Shard(0, 2)), list[int](), list[Any]()
    for batch in source:
        whole += ids_of([batch])
        positions.append((len(whole), json.loads(json.dumps(source.position()))))
    assert positions
    for count, position in positions:
        again = shared(make_shared, Shard(0, 2))
        again.restore(position)
        assert ids_of(again) == whole[count:]


@pytest.mark.parametrize("use", ["read", "position", "restore"])
def test_a_source_that_was_used_refuses_a_shard(make_shared: Maker, use: str) -> None:
    source = make_shared()
    if use == "read":
        some(source, 1)
    elif use == "position":
        source.position()
    else:
        source.restore(make_shared().position())
    with pytest.raises(ConfigError, match="call read_shard\\(\\) first"):
        source.read_shard(Shard(1, 2))


@pytest.mark.parametrize("share", [Shard(2, 2), Shard(-1, 2), Shard(0, 0)])
def test_a_shard_that_does_not_exist_is_refused(make_shared: Maker, share: Shard) -> None:
    with pytest.raises(ConfigError, match="there is no worker"):
        make_shared().read_shard(share)


# Where it takes the option


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("name", [name for name, case in SOURCES.items() if "worker" in case.options])
def test_workers_together_read_all_records(name: str, num_workers: int, tmp_path: Path) -> None:
    case = SOURCES[name]
    ids = [
        one
        for worker in range(num_workers)
        for one in ids_of(case.make(tmp_path, worker=worker, num_workers=num_workers))
    ]
    assert sorted(ids) == sorted(case.ids)


@pytest.mark.parametrize("name", [name for name, case in SOURCES.items() if "worker" in case.options])
def test_a_position_of_another_worker_is_refused(name: str, tmp_path: Path) -> None:
    source = SOURCES[name].make(tmp_path, worker=0, num_workers=2)
    some(source, 1)
    with pytest.raises(RestoreError):
        SOURCES[name].make(tmp_path, worker=1, num_workers=2).restore(source.position())


@pytest.mark.parametrize("name", [name for name, case in SOURCES.items() if "epochs" in case.options])
@pytest.mark.parametrize("seed", [None, 5])
def test_epochs_follow_each_other_in_full_batches(name: str, seed: int | None, tmp_path: Path) -> None:
    case = SOURCES[name]
    count = len(case.ids)
    batches = list(case.make(tmp_path, epochs=3, seed=seed))
    assert [len(batch) for batch in batches] == [4] * (3 * count // 4) + [3 * count % 4]
    ids = ids_of(batches)
    for epoch in range(3):
        assert sorted(ids[epoch * count : (epoch + 1) * count]) == sorted(case.ids)
    endless = case.make(tmp_path, epochs=None, seed=seed)
    assert ids_of(islice(endless, len(batches) - 1)) == ids[: 4 * (len(batches) - 1)]


@pytest.mark.parametrize("name", [name for name, case in SOURCES.items() if "epochs" in case.options])
def test_a_new_source_resumes_in_any_epoch(name: str, tmp_path: Path) -> None:
    case = SOURCES[name]
    whole = ids_of(case.make(tmp_path, epochs=3, seed=5))
    source = case.make(tmp_path, epochs=3, seed=5)
    read = 0
    for batch in source:
        read += len(batch)
        again = case.make(tmp_path, epochs=3, seed=5)
        again.restore(source.position())
        assert ids_of(again) == whole[read:]


def test_shuffling_gives_the_same_records_in_another_order(make_shuffled: Maker) -> None:
    plain, shuffled = ids_of(make_shuffled()), ids_of(make_shuffled(seed=1))
    assert sorted(shuffled) == sorted(plain)
    assert shuffled != plain


def test_the_seed_decides_the_order(make_shuffled: Maker) -> None:
    assert ids_of(make_shuffled(seed=1)) == ids_of(make_shuffled(seed=1))
    assert ids_of(make_shuffled(seed=1)) != ids_of(make_shuffled(seed=2))


@pytest.mark.parametrize("batch_size", [1, 5, 12, 1000])
def test_the_order_is_the_same_for_any_batch_size(make_shuffled: Maker, batch_size: int) -> None:
    assert ids_of(make_shuffled(seed=1, batch_size=batch_size)) == ids_of(make_shuffled(seed=1))


def test_a_new_source_resumes_in_the_middle_of_shuffling(make_shuffled: Maker) -> None:
    whole = ids_of(make_shuffled(seed=1, batch_size=3))
    source = make_shuffled(seed=1, batch_size=3)
    read = 0
    for batch in source:
        read += len(batch)
        again = make_shuffled(seed=1, batch_size=3)
        again.restore(json.loads(json.dumps(source.position())))
        assert ids_of(again) == whole[read:]


def test_a_position_from_another_order_is_refused(make_shuffled: Maker) -> None:
    source = make_shuffled(seed=1)
    some(source, 1)
    with pytest.raises(MonolithError):
        make_shuffled(seed=2).restore(source.position())
