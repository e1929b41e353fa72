"""An entry reads rows of all shards in one round, past replicas that are dead, slow or of something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from serve.shards.shard_folders import IDS, MODEL, TABLES, all_ids, table_ids, values_of, wanted, write_shards

from monolith.cluster import FilesConfig, FilesDiscovery, MemoryDiscovery
from monolith.cluster.discovery import MemoryRegistry
from monolith.cluster.security import SecurityConfig, guard_caller, guard_listener
from monolith.config import Secret
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    RequestError,
    TableArgumentError,
    UnavailableError,
)
from monolith.serve.shards import (
    RemoteRows,
    ServingServer,
    ServingServerConfig,
    ShardsConfig,
    open_remote_rows,
)
from monolith.serve.shards.hedging import Leg, Minder
from monolith.serve.shards.replicas import HedgeDelay, ShardReplicas
from monolith.store import TableIds
from monolith.wire.ports import Limits

SOON = 60.0
"""Seconds within which what happens in the background has happened, on the slowest of machines."""
PATIENT = ShardsConfig(
    deadline=timedelta(seconds=SOON),
    retry=timedelta(milliseconds=20),
    refresh=timedelta(milliseconds=50),
    hedge=False,
)
"""Nothing is late."""
HEDGED = replace(PATIENT, hedge=True, hedge_most=timedelta(milliseconds=5))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


class Shards:
    """Servers of one export in this process, and entries that ask them."""

    def __init__(self, folder: Path, shards: int, stack: ExitStack) -> None:
        self.folder = folder
        self.servable = write_shards(folder, shards=shards)
        self.discovery = MemoryDiscovery(MemoryRegistry())
        self._stack = stack

    def start(
        self, shard: int, replica: int = 0, *, port: int = 0, limits: Limits | None = None, **how: object
    ) -> ServingServer:
        server = ServingServer(
            str(self.folder),
            shard,
            ServingServerConfig(replica=replica, port=port, limits=limits or Limits()),
            discovery=self.discovery,
            **how,  # type: ignore[arg-type]
        )
        self._stack.callback(server.close)
        server.start()
        return server

    def entry(self, config: ShardsConfig = PATIENT, **how: object) -> RemoteRows:
        rows = open_remote_rows(self.servable, config, **{"discovery": self.discovery, **how})  # type: ignore[arg-type]
        self._stack.callback(rows.close)
        return rows


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def two(tmp_path: Path, stack: ExitStack) -> Shards:
    return Shards(tmp_path, 2, stack)


ITEM, USER = torch.tensor([1, 2, -3, IDS, 4, 7]), torch.tensor([7, -(2**63), -8])


def assert_right(rows: RemoteRows) -> None:
    found = rows.lookup(table_ids(ITEM, USER))
    assert found.missing == ()
    assert torch.equal(found.rows, wanted(ITEM, USER))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_id_reads_its_row_whichever_shard_it_is_on(
    tmp_path: Path, stack: ExitStack, shards: int
) -> None:
    each = Shards(tmp_path, shards, stack)
    for shard in range(shards):
        each.start(shard)
    rows = each.entry()
    assert rows.tables == TABLES
    everything = torch.cat([all_ids(), torch.tensor([0, IDS, -IDS, 2**63 - 1, -(2**63)])])
    assert torch.equal(
        rows.lookup(table_ids(everything, everything.flip(0))).rows, wanted(everything, everything.flip(0))
    )


def test_several_batches_are_read_one_after_the_other(two: Shards) -> None:
    for shard in range(2):
        two.start(shard)
    ids = TableIds(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 1, 2, 1]), batches=2)
    parts = [(1, 2), (2, 3), (3, 2), (4, 2), (5, 3)]
    expected = torch.cat([values_of(torch.tensor([one]), dim, "1").flatten() for one, dim in parts])
    assert torch.equal(two.entry().lookup(ids).rows, expected)


def test_a_lookup_is_at_most_one_request_to_each_shard(two: Shards) -> None:
    servers = [two.start(0), two.start(1)]
    rows = two.entry()
    assert_right(rows)
    assert [server.status().lookups for server in servers] == [1, 1]
    rows.lookup(table_ids(torch.tensor([2, 4]), torch.tensor([6])))
    assert [server.status().lookups for server in servers] == [2, 1]
    assert rows.lookup(table_ids(torch.tensor([]).long(), torch.tensor([]).long())).rows.tolist() == []
    assert rows.counts.requests == 3


def test_requests_of_one_lookup_are_under_way_at_once(two: Shards) -> None:
    both = threading.Barrier(2)
    for shard in range(2):
        two.start(shard, on_lookup=lambda: both.wait(SOON) and None)
    assert_right(two.entry())


def test_many_threads_are_answered_rightly(two: Shards) -> None:
    for shard in range(2):
        for replica in range(2):
            two.start(shard, replica)
    rows, wrong = two.entry(HEDGED), []

    def ask(seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        for _ in range(20):
            item, user = (torch.randint(-600, 600, (50,), generator=order) for _ in range(2))
            if not torch.equal(rows.lookup(table_ids(item, user)).rows, wanted(item, user)):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, rows.counts.errors, rows.counts.lookups) == ([], 0, 80)


# Replicas that are gone


def test_a_replica_that_ends_is_routed_around_within_the_lookup(two: Shards) -> None:
    two.start(1)
    first, _ = two.start(0, 0), two.start(0, 1)
    rows = two.entry()
    for _ in range(4):
        assert_right(rows)
    first.close()
    for _ in range(10):
        assert_right(rows)
    assert rows.counts.errors == 0


def test_a_server_that_restarted_is_asked_over_a_new_connection(two: Shards) -> None:
    two.start(1)
    first = two.start(0)
    rows = two.entry()
    assert_right(rows)
    first.close()
    two.start(0, port=first.port)
    assert_right(rows)
    assert rows.counts.errors == 0


def test_a_shard_without_servers_is_an_error_that_names_the_addresses_tried(two: Shards) -> None:
    two.start(1)
    first = two.start(0)
    rows = two.entry()
    first.close()
    with pytest.raises(UnavailableError, match=f"ps_0: none of its 1 servers answers: {first.address}"):
        rows.lookup(table_ids(ITEM, USER))
    assert rows.lookup(table_ids(torch.tensor([1]), torch.tensor([3]))).missing == ()
    two.start(0)
    rows.refresh()
    wait_for(lambda: rows.ready)
    assert_right(rows)


def test_a_shard_without_registered_servers_is_named(two: Shards) -> None:
    two.start(1)
    rows = two.entry()
    assert not rows.ready
    assert not rows.wait_ready(0.0)
    with pytest.raises(UnavailableError, match="ps_0: no server is registered as clicks:ps_0"):
        rows.lookup(table_ids(ITEM, USER))
    two.start(0)
    rows.refresh()
    assert rows.wait_ready(SOON)
    assert_right(rows)


def test_zeros_replace_a_missing_shard_if_allowed_and_it_is_named(two: Shards) -> None:
    two.servable = replace(two.servable, missing_rows="default")
    two.start(1)
    first = two.start(0)
    rows = two.entry()
    assert_right(rows)
    first.close()
    found = rows.lookup(table_ids(torch.tensor([1, 2]), torch.tensor([4, 5])))
    assert found.missing == ("ps_0",)
    assert found.rows.tolist() == [10010, 10011, 0, 0, 0, 0, 0, 10050, 10051, 10052]
    assert rows.counts.missing == 1


# The registry


class Failing(MemoryDiscovery):
    """A registry that can be made to fail, or to know nobody."""

    says: str = "all"

    def query(self, role: str) -> dict[int, str]:
        if self.says == "nothing":
            return {}
        if self.says == "error":
            raise UnavailableError("the registry is gone")
        return super().query(role)


@pytest.mark.parametrize("says", ["nothing", "error"])
def test_the_last_good_map_is_kept_while_the_registry_fails_or_is_empty(two: Shards, says: str) -> None:
    two.discovery = discovery = Failing(MemoryRegistry())
    first, _ = two.start(0), two.start(1)
    rows = two.entry()
    discovery.says = says
    rows.refresh()
    assert_right(rows)
    discovery.says = "all"
    rows.refresh()
    assert list(rows.replicas["ps_0"]) == [first.address]


def test_replicas_that_appear_are_asked_and_those_that_vanish_are_not(two: Shards) -> None:
    two.start(1)
    old = two.start(0, 0)
    rows = two.entry(replace(PATIENT, refresh=timedelta(milliseconds=20)))
    new = two.start(0, 1)
    wait_for(lambda: rows.replicas["ps_0"].get(new.address) == "up")
    two.discovery.deregister(old.role, 0)
    wait_for(lambda: list(rows.replicas["ps_0"]) == [new.address])
    before = old.status().lookups
    assert_right(rows)
    assert (old.status().lookups, new.status().lookups) == (before, 1)


def test_servers_are_found_in_a_registry_by_its_url(two: Shards, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    two.discovery = FilesDiscovery(FilesConfig(folder=str(folder)))  # type: ignore[assignment]
    two.start(0), two.start(1)
    with open_remote_rows(two.servable, replace(PATIENT, discovery=f"files://{folder}")) as rows:
        assert_right(rows)
    two.discovery.close()


# Replicas that are slow


class Held:
    """Makes a server wait before it answers, while it is set."""

    def __init__(self, stack: ExitStack) -> None:
        self._go = threading.Event()
        self._go.set()
        self._stack = stack

    def __call__(self) -> None:
        self._go.wait(SOON)

    def hold(self) -> None:
        self._go.clear()
        self._stack.callback(self._go.set)  # before servers are closed, which wait for it

    def let_go(self) -> None:
        self._go.set()


def test_a_slow_replica_is_raced_and_left_until_it_answers_again(two: Shards, stack: ExitStack) -> None:
    two.start(1)
    held = Held(stack)
    slow, _ = two.start(0, 0, on_lookup=held), two.start(0, 1)
    rows = two.entry(replace(HEDGED, retry=timedelta(seconds=SOON)))
    held.hold()
    while rows.replicas["ps_0"][slow.address] == "up":
        assert_right(rows)
    assert rows.counts.hedged >= 3
    for _ in range(20):
        assert_right(rows)
    assert slow.status().lookups == 0
    assert rows.counts.errors == 0


def test_a_slow_replica_is_used_again_once_it_answers_a_greeting(two: Shards, stack: ExitStack) -> None:
    two.start(1)
    held = Held(stack)
    slow, _ = two.start(0, 0, on_lookup=held), two.start(0, 1)
    rows = two.entry(replace(HEDGED, retry=timedelta(seconds=0.2)))
    held.hold()
    while rows.replicas["ps_0"][slow.address] == "up":
        assert_right(rows)
    held.let_go()
    wait_for(lambda: rows.replicas["ps_0"][slow.address] == "up")
    before = slow.status().lookups
    wait_for(lambda: assert_right(rows) is None and slow.status().lookups > before)


def test_one_that_counts_as_slow_is_asked_where_another_does_not_answer(
    two: Shards, stack: ExitStack
) -> None:
    two.start(1)
    held = Held(stack)
    stuck, other = two.start(0, 0, on_lookup=held), two.start(0, 1)
    rows = two.entry(replace(HEDGED, retry=timedelta(seconds=SOON)))
    held.hold()
    rows._map.shards[0].by_address[other.address].state = "slow"
    assert_right(rows)
    assert (rows.counts.hedges_won, rows.replicas["ps_0"][stuck.address]) == (1, "up")


def test_the_only_replica_is_waited_for(two: Shards, stack: ExitStack) -> None:
    two.start(1)
    held = Held(stack)
    two.start(0, on_lookup=held)
    rows = two.entry(HEDGED)
    held.hold()
    release = threading.Timer(0.1, held.let_go)
    release.start()
    assert_right(rows)
    assert rows.counts.hedged == 0


@pytest.mark.parametrize("given", [True, False], ids=["of the caller", "of the config"])
def test_a_deadline_is_obeyed(two: Shards, stack: ExitStack, given: bool) -> None:
    two.start(1)
    held = Held(stack)
    two.start(0, on_lookup=held)
    rows = two.entry(PATIENT if given else replace(PATIENT, deadline=timedelta(seconds=2)))
    assert rows.wait_ready(SOON)
    held.hold()
    with pytest.raises(DeadlineExceededError, match="ps_0 did not answer before the deadline"):
        rows.lookup(table_ids(ITEM, USER), deadline=time.monotonic() + 1.0 if given else None)
    assert rows.counts.errors == 1


def test_a_deadline_that_has_passed_makes_no_call(two: Shards) -> None:
    servers = [two.start(0), two.start(1)]
    rows = two.entry()
    with pytest.raises(DeadlineExceededError, match="before rows were looked up"):
        rows.lookup(table_ids(ITEM, USER), deadline=time.monotonic() - 1)
    assert [server.status().lookups for server in servers] == [0, 0]


def test_zeros_are_there_before_the_deadline_of_the_caller(two: Shards, stack: ExitStack) -> None:
    two.servable = replace(two.servable, missing_rows="default")
    two.start(1)
    held = Held(stack)
    two.start(0, on_lookup=held)
    rows = two.entry()
    held.hold()
    found = rows.lookup(table_ids(torch.tensor([1, 2]), torch.tensor([4])), deadline=time.monotonic() + 2.0)
    assert found.missing == ("ps_0",)
    assert found.rows.tolist() == [10010, 10011, 0, 0, 0, 0, 0]


# Servers of something else


def test_a_server_that_lacks_the_version_is_not_asked_and_says_so(two: Shards) -> None:
    two.start(1)
    lacking = two.start(0)
    two.servable = replace(two.servable, version="2")
    rows = two.entry()
    with pytest.raises(UnavailableError, match=r"ps_0 has no version 2; .* there are: 1"):
        rows.lookup(table_ids(ITEM, USER))
    write_shards(two.folder, shards=2, version="2")
    wait_for(lambda: rows.ready)
    found = rows.lookup(table_ids(ITEM, USER)).rows
    assert torch.equal(found, wanted(ITEM, USER, "2"))
    assert lacking.status().lookups == 1


def test_entries_of_two_versions_are_served_side_by_side(two: Shards) -> None:
    two.start(0), two.start(1)
    old = two.entry()
    two.servable = write_shards(two.folder, shards=2, version="2")
    new = two.entry()
    for _ in range(3):
        assert torch.equal(old.lookup(table_ids(ITEM, USER)).rows, wanted(ITEM, USER, "1"))
        assert torch.equal(new.lookup(table_ids(ITEM, USER)).rows, wanted(ITEM, USER, "2"))


@pytest.mark.parametrize(
    ("other", "why"),
    [({"digest": "other"}, "digest 'd'"), ({"tables": {}}, "tables"), ({"model": MODEL}, None)],
)
def test_a_server_of_another_export_is_not_asked(
    two: Shards, other: dict[str, object], why: str | None
) -> None:
    two.start(0), two.start(1)
    two.servable = replace(two.servable, **other)  # type: ignore[arg-type]
    rows = two.entry()
    assert rows.ready == (why is None)
    if why is not None:
        assert set(rows.replicas["ps_0"].values()) == {"down"}
        assert why in str(rows._map.shards[0].error())


def test_a_server_of_another_shard_is_not_asked(two: Shards) -> None:
    one = two.start(1)
    two.discovery.register("clicks:ps_0", 0, one.address)
    rows = two.entry()
    with pytest.raises(UnavailableError, match="it has shard 1, where the entry has 0"):
        rows.lookup(table_ids(ITEM, USER))


def test_what_a_server_refuses_is_an_error_and_no_reason_to_ask_another(two: Shards) -> None:
    servers = [two.start(0, replica, limits=Limits(ids=1)) for replica in range(2)]
    two.start(1)
    rows = two.entry()
    with pytest.raises(RequestError, match=r"limits\.ids allows 1"):
        rows.lookup(table_ids(ITEM, USER))
    assert set(rows.replicas["ps_0"].values()) == {"up"}
    assert sum(server.status().lookups for server in servers) == 0


def test_ids_that_do_not_fit_are_refused(two: Shards) -> None:
    two.start(0), two.start(1)
    rows = two.entry()
    with pytest.raises(TableArgumentError, match="sizes"):
        rows.lookup(TableIds(torch.tensor([1, 2]), torch.tensor([1, 2])))
    assert_right(rows)


def test_the_token_is_presented(two: Shards) -> None:
    security = SecurityConfig(token=Secret("one"))
    for shard in range(2):
        two.start(shard, guard=guard_listener("127.0.0.1", security))
    assert_right(two.entry(guard=guard_caller(security)))
    stranger = two.entry()
    with pytest.raises(UnavailableError, match="token"):
        stranger.lookup(table_ids(ITEM, USER))


def test_certificates_are_shown_and_asked_for(two: Shards, certificates: Path) -> None:
    ours, stranger = (
        SecurityConfig(
            cert=certificates / f"{signer}-node.crt",
            key=certificates / f"{signer}-node.key",
            ca=certificates / "ca.crt",
        )
        for signer in ("ca", "other")
    )
    for shard in range(2):
        two.start(shard, guard=guard_listener("127.0.0.1", ours))
    assert_right(two.entry(guard=guard_caller(ours)))
    for guard in (guard_caller(stranger), None):
        with pytest.raises(UnavailableError):
            two.entry(guard=guard).lookup(table_ids(ITEM, USER))


# Opening and closing


def test_what_the_export_does_not_allow_is_refused(two: Shards) -> None:
    with pytest.raises(ConfigError, match="exported without allowing"):
        open_remote_rows(two.servable, replace(PATIENT, missing="default"), discovery=two.discovery)
    with pytest.raises(ConfigError, match="exported for 2"):
        open_remote_rows(two.servable, replace(PATIENT, shards=3), discovery=two.discovery)
    with pytest.raises(ConfigError, match="in its own folder"):
        open_remote_rows(replace(two.servable, shards=0), PATIENT, discovery=two.discovery)
    with pytest.raises(ConfigError, match="discovery"):
        open_remote_rows(two.servable, PATIENT)


def test_the_config_may_be_stricter_than_the_export(two: Shards) -> None:
    two.servable = replace(two.servable, missing_rows="default")
    two.start(1)
    with pytest.raises(UnavailableError, match="ps_0"):
        two.entry(replace(PATIENT, missing="refuse")).lookup(table_ids(ITEM, USER))


def test_after_closing_nothing_is_left_running(two: Shards) -> None:
    two.start(0), two.start(1)
    before = set(threading.enumerate())
    rows = two.entry(HEDGED)
    assert_right(rows)
    rows.close()
    rows.close()
    assert [one.name for one in set(threading.enumerate()) - before if one.name.startswith("shards-")] == []
    with pytest.raises(UnavailableError, match="closed"):
        rows.lookup(table_ids(ITEM, USER))


def test_closing_ends_a_lookup_that_waits(two: Shards, stack: ExitStack) -> None:
    held = Held(stack)
    two.start(0, on_lookup=held), two.start(1)
    rows = two.entry()
    held.hold()
    failed: list[Exception] = []

    def ask() -> None:
        try:
            rows.lookup(table_ids(ITEM, USER))
        except DeadlineExceededError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: rows.counts.requests == 2)
    rows.close()
    thread.join(SOON)
    assert len(failed) == 1


def test_a_request_that_was_sent_while_the_entry_closed_is_given_up() -> None:
    """Between sending and waiting, `close` may have seen no leg to end."""
    minder = Minder(lambda _: None)
    minder.close()
    shard = ShardReplicas(0, "ps", HedgeDelay(0.01, 1.0))
    leg = Leg(shard, b"", np.empty(0, np.uint8), 1, time.monotonic() + SOON, hedged=False)
    minder.watch(leg)
    assert leg.late


def test_a_second_request_that_close_cancelled_is_no_answer(two: Shards) -> None:
    """A lookup that waits for it fails as one whose replica failed, and not with an error of the pool."""
    two.start(0)
    two.start(1)
    rows = two.entry(HEDGED)
    leg = Leg(rows._map.shards[0], b"", np.empty(0, np.uint8), 1, time.monotonic() + SOON, hedged=True)
    leg.hedge = Future()
    leg.hedge.cancel()
    assert rows._hedged(leg) is None
