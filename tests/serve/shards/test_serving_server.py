"""A serving server answers lookups in its rows, of the versions that entries ask for, and nothing else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from serve.shards.shard_folders import IDS, MODEL, values_of, write_shards

from monolith.cluster import MemoryDiscovery
from monolith.cluster.discovery import MemoryRegistry
from monolith.cluster.security import Guard, SecurityConfig, guard_caller, guard_listener
from monolith.config import Secret
from monolith.errors import (
    ConfigError,
    FileMissingError,
    LostStateError,
    MonolithError,
    RequestError,
    TableArgumentError,
)
from monolith.serve.shards import ServingServer, ServingServerConfig, shard_role
from monolith.serve.shards.protocol import SERVICE, ShardAbout, ShardStatus
from monolith.serve.versions import remove_versions
from monolith.store.row_requests import RowCall, RowFlags, RowHeader, RowRequest, incarnation_bytes
from monolith.wire.flight import Caller
from monolith.wire.messages import read_message
from monolith.wire.ports import Limits


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of two shards, for tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, shards=2)
    return folder


@pytest.fixture(scope="module")
def shared(untouched: Path) -> Iterator[ServingServer]:
    with ServingServer(str(untouched), 1, ServingServerConfig(limits=Limits(ids=1000))) as made:
        yield made


@pytest.fixture
def caller(shared: ServingServer) -> Iterator[Caller]:
    with Caller(SERVICE, shared.address) as made:
        yield made


@pytest.fixture
def folder(untouched: Path, tmp_path: Path) -> Path:
    """A copy, for tests that change it."""
    return Path(shutil.copytree(untouched, tmp_path / "shards"))


@pytest.fixture
def server(folder: Path) -> Iterator[ServingServer]:
    with ServingServer(str(folder), 1) as made:
        yield made


@pytest.fixture
def own_caller(server: ServingServer) -> Iterator[Caller]:
    with Caller(SERVICE, server.address) as made:
        yield made


def hello(caller: Caller, version: str) -> ShardAbout:
    return read_message(ShardAbout, caller.call("hello", version=version))


def ask(caller: Caller, item: list[int], user: list[int], version: str = "1") -> torch.Tensor:
    """Return the rows that a stream answers with."""
    request = RowRequest(cells=2, ids=len(item) + len(user))
    request.sizes[:] = len(item), len(user)
    request.ids[:] = item + user
    header = RowHeader(RowCall.LOOKUP, 0, 1, len(request.ids), incarnation=incarnation_bytes(version))
    return send(caller, header.packed(), request.data)


def send(caller: Caller, header: bytes, data: np.ndarray) -> torch.Tensor:
    stream = caller.open_stream()
    try:
        stream.send_message(header, data)
        return torch.from_numpy(stream.receive().data.view(np.float32).copy())
    finally:
        stream.close()


def test_it_says_whose_rows_it_has_and_answers_with_those(caller: Caller) -> None:
    about = hello(caller, "1")
    assert (about.model, about.version, about.shard, about.shards) == (MODEL, "1", 1, 2)
    assert about.tables == {"item": 2, "user": 3}
    answer = ask(caller, [1, 3, IDS], [5])
    assert answer.tolist() == [*values_of(torch.tensor([1, 3, IDS]), 2, "1").flatten(), 10050, 10051, 10052]


def test_ids_of_other_shards_have_no_rows(caller: Caller) -> None:
    hello(caller, "1")
    assert ask(caller, [2], []).tolist() == [0, 0]
    # As a number without a sign, -1 is odd: 2^64 - 1.
    assert ask(caller, [-1], []).tolist() == [9990, 9991]


def test_each_entry_gets_the_version_that_it_asks_for(folder: Path, own_caller: Caller) -> None:
    caller = own_caller
    write_shards(folder, shards=2, version="2")
    assert hello(caller, "2").version == "2"
    assert hello(caller, "1").version == "1"
    assert ask(caller, [1], [], "1").tolist() == [10010, 10011]
    assert ask(caller, [1], [], "2").tolist() == [20010, 20011]


def test_a_version_that_it_lacks_is_an_error_that_says_which_there_are(caller: Caller) -> None:
    with pytest.raises(FileMissingError, match=r"ps_1 has no version 7; .* there are: 1"):
        hello(caller, "7")
    with pytest.raises(LostStateError, match="it has 1 open"):
        ask(caller, [1], [], "7")


@pytest.mark.parametrize("version", ["../ps_0/1", ".held", "", "x" * 2000])
def test_a_version_is_a_name_and_no_path(caller: Caller, version: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=r"version"):
        hello(caller, version)


def test_a_damaged_version_is_said_to_be(folder: Path, own_caller: Caller) -> None:
    caller = own_caller
    write_shards(folder, shards=2, version="2")
    rows = folder / "ps_1" / "2" / "tables" / "item.rows"
    rows.write_bytes(rows.read_bytes()[:-64])
    with pytest.raises(FileMissingError, match=r"version 2 is damaged: .*item\.rows: corrupt"):
        hello(caller, "2")
    hello(caller, "1")


def test_only_so_many_versions_are_open(folder: Path) -> None:
    for version in ("2", "3"):
        write_shards(folder, shards=2, version=version)
    with (
        ServingServer(str(folder), 1, ServingServerConfig(versions=2)) as server,
        Caller(SERVICE, server.address) as caller,
    ):
        hello(caller, "1")
        ask(caller, [1], [], "3")
        hello(caller, "2")  # 1 was asked for longest ago
        assert [one.version for one in server.status().versions] == ["3", "2"]
        assert ask(caller, [1], [], "3").tolist() == [30010, 30011]
        removed, kept = remove_versions([str(folder / "ps_1")], ["1", "2"])
    assert len(removed) == len(kept) == 1
    assert (folder / "ps_1" / "2").exists()
    assert not (folder / "ps_1" / "1").exists()


def test_a_new_version_is_opened_when_it_appears(folder: Path, server: ServingServer) -> None:
    server.check_versions()
    assert [one.version for one in server.status().versions] == ["1"]
    write_shards(folder, shards=2, version="2")
    server.check_versions()
    assert [one.version for one in server.status().versions] == ["1", "2"]


def test_a_folder_without_rows_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="monolith export"):
        ServingServer(str(tmp_path), 0)


@pytest.mark.parametrize("how", [{"shard": -1}, {"replica": -1}, {"versions": 0}])
def test_numbers_that_make_no_sense_are_refused(untouched: Path, how: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a serving server has"):
        ServingServer(str(untouched), how.pop("shard", 0), ServingServerConfig(**how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "size", "why"),
    [
        (RowHeader(RowCall.PUSH, 0, 1, 1, number=1), 24, "answers only lookups"),
        (RowHeader(RowCall.LOOKUP, 1, 1, 1), 24, "answers only lookups"),
        (RowHeader(RowCall.LOOKUP, 0, 1, 1, flags=RowFlags.TIMES), 32, "answers only lookups"),
        (RowHeader(RowCall.LOOKUP, 0, 1, 1001), 24, "limits.ids allows 1,000"),
        (RowHeader(RowCall.LOOKUP, 0, 1, 2), 24, "expected 32"),
        (RowHeader(RowCall.LOOKUP, 0, 1 << 20, 1), 24, "expected"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_next_is_answered(
    caller: Caller, header: RowHeader, size: int, why: str
) -> None:
    hello(caller, "1")
    packed = header._replace(incarnation=incarnation_bytes("1")).packed()
    with pytest.raises((RequestError, TableArgumentError), match=why):
        send(caller, packed, np.zeros(size, np.uint8))
    assert ask(caller, [1], []).tolist() == [10010, 10011]


@pytest.mark.parametrize("sizes", [(-1, 3), (3, -1), (2**62, 2**62), (1, 0)])
def test_sizes_that_do_not_fit_are_refused(caller: Caller, sizes: tuple[int, int]) -> None:
    hello(caller, "1")
    request = RowRequest(cells=2, ids=2)
    request.sizes[:], request.ids[:] = sizes, 1
    header = RowHeader(RowCall.LOOKUP, 0, 1, 2, incarnation=incarnation_bytes("1"))
    with pytest.raises((RequestError, TableArgumentError), match="ids"):
        send(caller, header.packed(), request.data)


def test_an_answer_that_is_too_large_is_refused_before_it_is_made(untouched: Path) -> None:
    with (
        ServingServer(str(untouched), 1, ServingServerConfig(limits=Limits(message_bytes=100))) as server,
        Caller(SERVICE, server.address) as caller,
    ):
        hello(caller, "1")
        assert ask(caller, [1] * 8, []).shape == (16,)
        with pytest.raises(RequestError, match="answer would have 108 bytes"):
            ask(caller, [], [1] * 9)


@pytest.mark.parametrize(
    "header", [b"", b"x" * 16, b"{}", b"\xff" * 80], ids=["none", "short", "empty", "wild"]
)
def test_strange_messages_are_refused(caller: Caller, header: bytes) -> None:
    hello(caller, "1")
    with pytest.raises(MonolithError):
        send(caller, header, np.zeros(8, np.uint8))
    assert ask(caller, [1], []).tolist() == [10010, 10011]


def test_it_is_registered_while_it_is_ready(untouched: Path) -> None:
    discovery = MemoryDiscovery(MemoryRegistry())
    with ServingServer(str(untouched), 1, ServingServerConfig(replica=3), discovery=discovery) as server:
        assert not server.ready
        assert discovery.query(shard_role(MODEL, 1)) == {}
        server.start()
        assert server.ready
        assert discovery.query("clicks:ps_1") == {3: server.address}
        with Caller(SERVICE, server.address) as caller:
            status = read_message(ShardStatus, caller.call("status"))
        assert (status.ready, status.shard, status.replica) == (True, 1, 3)
        assert [asdict(one)["version"] for one in status.versions] == ["1"]
    assert not server.ready
    assert discovery.query(shard_role(MODEL, 1)) == {}


def test_it_is_registered_by_the_host_that_entries_reach_it_by(untouched: Path) -> None:
    discovery = MemoryDiscovery(MemoryRegistry())
    with (
        ServingServer(str(untouched), 1, ServingServerConfig(host="0.0.0.0"), discovery=discovery) as server,
        pytest.raises(ConfigError, match=r"cannot reach a serving server at 0\.0\.0\.0:\d+"),
    ):
        server.start()
    with ServingServer(
        str(untouched), 1, ServingServerConfig(advertise="localhost"), discovery=discovery
    ) as server:
        server.start()
        assert discovery.query(server.role) == {0: f"localhost:{server.port}"}


def test_serve_returns_when_it_is_told_to_stop(untouched: Path) -> None:
    stop, server = threading.Event(), ServingServer(str(untouched), 0)
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    server.close()


def test_a_caller_without_a_token_is_refused(untouched: Path) -> None:
    security = SecurityConfig(token=Secret("one"))
    guard: Guard = guard_listener("127.0.0.1", security)
    with ServingServer(str(untouched), 0, guard=guard) as server:
        with Caller(SERVICE, server.address, guard=guard_caller(security)) as caller:
            assert hello(caller, "1").shard == 0
        with Caller(SERVICE, server.address) as stranger, pytest.raises(ConfigError, match="token"):
            hello(stranger, "1")
