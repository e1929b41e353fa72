"""Workers that train together read one share each, and their task does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.sources import some_records

from monolith.data import (
    BadRecord,
    BatchSpec,
    ByWorker,
    DriftConfig,
    DriftingStream,
    FileSource,
    JoinedSource,
    JoinerConfig,
    KafkaConfig,
    KafkaSource,
    MemorySource,
    Pipeline,
    Position,
    Records,
    Shard,
    ShuffleConfig,
    Source,
    as_stream,
    format_of,
)
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.service import DataServiceSource
from monolith.data.synthetic.drift import TIME
from monolith.data.transforms import MergeFlow
from monolith.errors import ConfigError, NotShareableError, RestoreError


def numbers(source: Source) -> list[int]:
    return [n for records in source for n in records["n"].flat_values.tolist()]


def memory(**options: Any) -> MemorySource:
    return MemorySource({"n": torch.arange(10)}, batch_size=2, **options)


class Own:
    """A source of a user's, which cannot be shared out."""

    def __init__(self) -> None:
        self._inner = memory()

    def __iter__(self) -> Iterator[Records]:
        return iter(self._inner)

    def position(self) -> Position:
        return self._inner.position()

    def restore(self, position: Position) -> None:
        self._inner.restore(position)

    def commit(self, position: Position) -> None: ...

    def close(self) -> None: ...


def test_alone_a_process_reads_all() -> None:
    assert numbers(memory()) == list(range(10))


def test_a_worker_reads_its_shard() -> None:
    source = memory()
    source.read_shard(Shard(1, 3))
    assert numbers(source) == [1, 4, 7]


def test_a_source_that_names_its_shard_gets_it() -> None:
    source = memory(worker=0, num_workers=2)
    source.read_shard(Shard(1, 3))
    assert numbers(source) == [0, 2, 4, 6, 8]


def test_a_worker_without_a_number_of_workers_is_one_of_as_many_as_there_are() -> None:
    source = memory(worker=2)
    source.read_shard(Shard(1, 3))
    assert numbers(source) == [2, 5, 8]


def test_the_last_choice_before_the_first_read_counts() -> None:
    source = memory()
    source.read_shard(Shard(1, 3))
    source.read_shard(Shard(0, 5))
    assert numbers(source) == [0, 5]


@pytest.mark.parametrize("worker", [1, 7])
def test_a_worker_alone_says_too_little(worker: int) -> None:
    with pytest.raises(ConfigError, match="give num_workers"):
        numbers(memory(worker=worker))


@pytest.mark.parametrize("given", [{"worker": -1}, {"worker": 2, "num_workers": 2}, {"num_workers": 0}])
def test_a_source_refuses_a_shard_that_does_not_exist(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="there is no worker"):
        memory(**given)


def test_stages_pass_it_on() -> None:
    stages = Pipeline(memory()).shuffle(ShuffleConfig(buffer=2)).rebatch(2).take(9).prefetch(1)
    batches = stages.filter(lambda records: torch.ones(len(records), dtype=torch.bool)).to_batches(
        BatchSpec(ids=("n",), labels={})
    )
    batches.prefetch(1).read_shard(Shard(1, 3))
    assert sorted(n for batch in batches for n in batch.ids.ids.tolist()) == [1, 4, 7]


@pytest.mark.parametrize(
    "stand",
    [
        lambda own: own,
        lambda own: Pipeline(own).rebatch(2).to_batches(BatchSpec(ids=("n",), labels={})).prefetch(1),
        lambda own: MergeFlow({"shared": memory(), "own": own}),
    ],
    ids=["alone", "below a pipeline", "among others"],
)
def test_a_stage_on_a_source_without_shards_has_none_either(stand: Any) -> None:
    with pytest.raises(NotShareableError, match=r"Own cannot be split among workers.*read_shard"):
        as_stream(stand(Own())).read_shard(Shard(0, 2))


def joined(impressions: Source, actions: Source, folder: Path) -> JoinedSource:
    config = JoinerConfig(
        key="id", positives=(frozenset({1}),), window=timedelta(seconds=40), folder=str(folder)
    )
    return JoinedSource(impressions, actions, config)


def test_a_join_shards_its_impressions_and_actions_if_it_can(tmp_path: Path) -> None:
    shown, clicked = MemorySource(some_records(), batch_size=4), memory()
    joined(shown, clicked, tmp_path).read_shard(Shard(1, 2))
    assert shown.position()["shard"] == clicked.position()["shard"] == [1, 2]
    joined(MemorySource(some_records(), batch_size=4), Own(), tmp_path).read_shard(Shard(1, 2))
    with pytest.raises(NotShareableError):
        joined(Own(), memory(), tmp_path).read_shard(Shard(1, 2))


def test_each_worker_joins_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = set()
    for worker in range(2):
        source = joined(MemorySource(some_records(), batch_size=4), memory(), tmp_path)
        source.read_shard(Shard(worker, 2))
        folders.add(source.joiner.config.folder)
    assert folders == {str(tmp_path / "worker-0-of-2"), str(tmp_path / "worker-1-of-2")}


def test_files_are_dealt_out(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.csv").write_text(f"n\n{number}\n")
    paths = [str(tmp_path / f"{number}.csv") for number in range(4)]
    source = FileSource(paths, format_of("x.csv"), batch_size=8)
    source.read_shard(Shard(1, 2))
    assert source.position()["shard"] == [1, 2]
    assert [len(records) for records in source] == [2]


@pytest.mark.parametrize(("given", "name"), [({}, "worker 1"), ({"worker": 0, "num_workers": 1}, "worker 0")])
def test_a_queue_knows_workers_apart(given: dict[str, int], name: str, tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("n\n0\n")
    queue = LocalFileQueue([str(tmp_path / "0.csv")])
    source = FileSource(queue, format_of("x.csv"), batch_size=8, **given)
    source.read_shard(Shard(1, 2))
    assert source.position()["reader"] == name


@pytest.mark.parametrize("workers", [2, 3])
def test_a_drifting_stream_is_dealt_out_batch_by_batch(workers: int) -> None:
    config = DriftConfig(examples=100, batch_size=8)
    whole = [records[TIME].flat_values for records in DriftingStream(config)]
    shares = []
    for worker in range(workers):
        stream = DriftingStream(config)
        stream.read_shard(Shard(worker, workers))
        shares.append([records[TIME].flat_values for records in stream])
    dealt = [shares[number % workers][number // workers] for number in range(len(whole))]
    assert sum(map(len, shares)) == len(whole)
    assert all(torch.equal(one, other) for one, other in zip(whole, dealt, strict=True))


def test_a_drifting_stream_resumes_its_own_shard_only() -> None:
    config = DriftConfig(examples=100, batch_size=8)
    first, second = DriftingStream(config), DriftingStream(config)
    for stream in (first, second):
        stream.read_shard(Shard(1, 2))
    read = iter(first)
    next(read)
    second.restore(first.position())
    for one, other in zip(read, second, strict=True):
        assert torch.equal(one[TIME].flat_values, other[TIME].flat_values)
    with pytest.raises(RestoreError, match=r"\[1, 2\].*this one has \[0, 1\]"):
        DriftingStream(config).restore(first.position())


def decode(payloads: list[bytes]) -> tuple[Records, Sequence[BadRecord]]:
    raise AssertionError(f"nobody sent {payloads}")


def test_a_source_looks_at_nothing_before_it_is_read(tmp_path: Path) -> None:
    FileSource([str(tmp_path / "absent.csv")], format_of("x.csv"), batch_size=8).read_shard(Shard(1, 2))
    config = KafkaConfig(servers=("nowhere:1",), topics=("clicks",), group="us")
    KafkaSource(config, decode).read_shard(Shard(1, 2))
    DataServiceSource("nowhere:1", "trainer").read_shard(Shard(1, 2))


def test_the_data_service_knows_workers_apart() -> None:
    source = DataServiceSource("nowhere:1", "trainer")
    source.read_shard(Shard(1, 2))
    assert source.position()["trainer"] == "trainer-1"
    assert DataServiceSource("nowhere:1", "trainer").position()["trainer"] == "trainer"


def test_kafka_partitions_that_were_given_stay() -> None:
    mine = ByWorker(worker=0, num_workers=1)
    config = KafkaConfig(servers=("nowhere:1",), topics=("clicks",), group="us", assignment=mine)
    source = KafkaSource(config, decode)
    source.read_shard(Shard(1, 2))
    assert source.config.assignment == mine
