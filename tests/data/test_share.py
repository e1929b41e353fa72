"""Workers that train together read one share each, and their task does not know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from monolith.data import (
    BadRecord,
    ByWorker,
    DriftConfig,
    DriftingStream,
    FileSource,
    KafkaConfig,
    KafkaSource,
    MemorySource,
    Records,
    Share,
    format_of,
    my_share,
    reading_share,
)
from monolith.data.service import DataServiceSource
from monolith.data.synthetic.drift import TIME
from monolith.errors import ConfigError, RestoreError


def numbers(source: MemorySource) -> list[int]:
    return [n for records in source for n in records["n"].flat_values.tolist()]


def memory() -> MemorySource:
    return MemorySource({"n": torch.arange(10)}, batch_size=2)


def test_alone_a_process_reads_all() -> None:
    assert my_share() == Share(0, 1)
    assert numbers(memory()) == list(range(10))


def test_sources_made_for_a_worker_read_its_share_even_later() -> None:
    with reading_share(Share(1, 3)):
        source = memory()
    assert numbers(source) == [1, 4, 7]


def test_a_source_that_says_which_share_it_wants_gets_that() -> None:
    with reading_share(Share(1, 3)) as asked:
        source = MemorySource({"n": torch.arange(10)}, batch_size=2, worker=0, num_workers=2)
    assert numbers(source) == [0, 2, 4, 6, 8]
    assert asked.by_anyone


def test_it_is_known_whether_anyone_asked() -> None:
    with reading_share(Share(0, 2)) as asked:
        assert not asked.by_anyone
        memory()
        assert asked.by_anyone


def test_files_are_dealt_out(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.csv").write_text(f"n\n{number}\n")
    paths = [str(tmp_path / f"{number}.csv") for number in range(4)]
    with reading_share(Share(1, 2)):
        source = FileSource(paths, format_of("x.csv"), batch_size=8)
    assert source.position()["shard"] == [1, 2]
    assert [len(records) for records in source] == [2]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_drifting_stream_is_dealt_out_batch_by_batch(workers: int) -> None:
    config = DriftConfig(examples=100, batch_size=8)
    whole = [records[TIME].flat_values for records in DriftingStream(config)]
    shares = []
    for worker in range(workers):
        with reading_share(Share(worker, workers)):
            stream = DriftingStream(config)
        shares.append([records[TIME].flat_values for records in stream])
    dealt = [shares[number % workers][number // workers] for number in range(len(whole))]
    assert sum(map(len, shares)) == len(whole)
    assert all(torch.equal(one, other) for one, other in zip(whole, dealt, strict=True))


def test_a_drifting_stream_goes_on_with_its_own_share_only() -> None:
    config = DriftConfig(examples=100, batch_size=8)
    with reading_share(Share(1, 2)):
        first, second = DriftingStream(config), DriftingStream(config)
    read = iter(first)
    next(read)
    second.restore(first.position())
    for one, other in zip(read, second, strict=True):
        assert torch.equal(one[TIME].flat_values, other[TIME].flat_values)
    with pytest.raises(RestoreError, match=r"\[1, 2\].*this one has \[0, 1\]"):
        DriftingStream(config).restore(first.position())


def decode(payloads: list[bytes]) -> tuple[Records, Sequence[BadRecord]]:
    raise AssertionError(f"nobody sent {payloads}")


def test_kafka_gives_each_worker_fixed_partitions() -> None:
    config = KafkaConfig(servers=("nowhere:1",), topics=("clicks",), group="us")
    with reading_share(Share(1, 2)):
        source = KafkaSource(config, decode)
    assert source.config.assignment == ByWorker(worker=1, num_workers=2)
    assert KafkaSource(config, decode).config.assignment is None


def test_the_data_service_knows_workers_apart() -> None:
    with reading_share(Share(1, 2)):
        source = DataServiceSource("nowhere:1", "trainer")
    assert source.position()["trainer"] == "trainer-1"


@pytest.mark.parametrize("share", [Share(2, 2), Share(-1, 2), Share(0, 0)])
def test_there_must_be_such_a_share(share: Share) -> None:
    with pytest.raises(ConfigError, match="there is no worker"), reading_share(share):
        pass


def test_a_worker_alone_says_too_little() -> None:
    with pytest.raises(ConfigError, match="give num_workers"):
        MemorySource({"n": torch.arange(10)}, batch_size=2, worker=1)
