"""Whatever happens on the way: after quiet the copy has the rows that are published, and no others.

A machine trains, removes and evicts rows, publishes and follows at random, over a channel that drops,
repeats, reorders and delays messages. It kills publishers and the subscriber, takes tables back to an earlier
state, changes how many shards there are, lets the log overflow, holds publishing back, and spoils rows of the
copy. When it has had enough it lets the channel be well, and compares.
"""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from services.properties import tries
from sync.tables import Clock, config_of, held, ids, make_table
from torch import Tensor

from monolith.sync import BUCKETS, ChannelFaults, MemoryChannel, Publisher, Subscriber, TableTarget
from monolith.table import DictTable, Expiry, NativeTable, Rows, Table, in_share, iterate

HOUR = 3600
KEYS = st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True)
SELDOM = st.sampled_from([False] * 7 + [True])
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: it takes minutes, and a run of 40 steps can be read."""
WELL = ChannelFaults()
ILL = ChannelFaults(drop=0.15, repeat=0.15, reorder=0.15, delay=0.15)


class Fleet:
    """Publishers of rows that publish their shards, and one copy that follows them."""

    def __init__(self, channel: MemoryChannel, cls: Any, *, shards: int, **options: Any) -> None:
        self.channel = channel
        self.clock = Clock()
        self._cls = cls
        self._options = options
        self.shards = [self._table() for _ in range(shards)]
        self.publishers = self._published()
        self.copy = self._table()
        self.positions: dict[int, Any] = {}
        self.subscriber = self._subscribed()

    def _table(self) -> Table:
        return make_table(cls=self._cls, expiry=Expiry(default=timedelta(hours=1)))

    def _published(self) -> list[Publisher]:
        total = len(self.shards)
        return [
            Publisher(
                {"item": table},
                self.channel.writer(),
                config_of({"shard": (number, total), "digest_buckets": BUCKETS, **self._options}),
                clock=self.clock,
                timer=self.clock,
            )
            for number, table in enumerate(self.shards)
        ]

    def _subscribed(self) -> Subscriber:
        return Subscriber(self.channel.reader, TableTarget({"item": self.copy}), positions=self.positions)

    def owner(self, keys: Tensor) -> list[tuple[Table, Tensor]]:
        """Return each shard's table with the positions of its ids."""
        total = len(self.shards)
        return [(one, in_share(keys, (k, total)).nonzero()[:, 0]) for k, one in enumerate(self.shards)]

    def train(self, keys: Tensor, gradients: Tensor, now: int) -> None:
        for table, mine in self.owner(keys):
            table.apply_gradients(keys[mine], gradients[mine], event_time=now)

    def remove(self, keys: Tensor) -> None:
        for table, mine in self.owner(keys):
            table.remove(keys[mine])

    def rows(self) -> list[Rows]:
        return [rows for table in self.shards for rows in iterate(table)]

    def go_back(self, rows: list[Rows], *, shards: int | None = None) -> None:
        """Put the tables back to what they held, on as many shards, as a run that is restored does."""
        same = shards in (None, len(self.shards))
        if same:
            for table in self.shards:
                table.clear()
        else:
            self.kill_publishers()
            self.shards = [self._table() for _ in range(shards or 1)]
        for some in rows:
            for table, mine in self.owner(some.ids):
                table.restore(some.take(mine))
        if same:
            for publisher in self.publishers:
                publisher.begin_epoch("rewound")
        else:
            self.publishers = self._published()

    def kill_publishers(self) -> None:
        """Have all processes that publish end at once: what they had not let out is not let out by them."""
        self.clock.now += 1.0  # nobody starts another in less
        for table, publisher in zip(self.shards, self.publishers, strict=True):
            for touched in publisher._touched.values():
                table.untouch(touched)

    def start_publishers_again(self) -> None:
        self.kill_publishers()
        self.publishers = self._published()

    def kill_subscriber(self, *, keep: bool) -> None:
        """End the process that follows; another begins with what it knew, or with nothing of that."""
        standing = self.subscriber.progress
        self.positions = (
            {k: one.position for k, one in standing.items() if one.position is not None} if keep else {}
        )
        self.subscriber = self._subscribed()

    def quiet(self) -> None:
        """Let the channel be well, and all be published and read."""
        self.channel.faults = WELL
        for publisher in self.publishers:
            publisher.resume()
        for _ in range(3):
            self.clock.now += 10.0
            for publisher in self.publishers:
                assert publisher.flush()
            self.subscriber.catch_up()

    def compare(self) -> None:
        """Fail where a row differs, is missing, or is a ghost."""
        expected, found = held(*self.shards), held(self.copy)
        assert found.keys() - expected.keys() == set(), "ghosts"
        assert expected.keys() - found.keys() == set(), "missing rows"
        assert found == expected, "differing rows"


class Following(RuleBasedStateMachine):
    """All that may happen."""

    cls: Any = NativeTable
    options: ClassVar[dict[str, Any]] = {"touched_capacity": 60}

    @initialize(
        seed=st.integers(0, 2**16),
        shards=st.sampled_from([1, 3]),
        limit=st.sampled_from([3000, 1 << 20]),
    )
    def begin(self, seed: int, shards: int, limit: int) -> None:
        channel = MemoryChannel(limit, faults=ILL, seed=seed)
        self.fleet = Fleet(channel, self.cls, shards=shards, **self.options)
        self.saved = self.fleet.rows()
        self.now = 0

    @rule(seed=st.integers(0, 2**16), rounds=st.integers(1, 8))
    def live(self, seed: int, rounds: int) -> None:
        """Train, publish and follow for a while, as a run does nearly always."""
        chance = random.Random(seed)
        for _ in range(rounds):
            self.train(chance.sample(range(-40, 41), 8), chance.randint(-8, 8))
            self.remove(chance.sample(range(-40, 41), 2))
            for which in range(len(self.fleet.publishers)):
                self.publish(which, 0.25)
            if chance.random() < 0.5:
                self.follow()

    @rule(keys=KEYS, value=st.integers(-8, 8))
    def train(self, keys: list[int], value: int) -> None:
        self.fleet.train(ids(*keys), torch.full((len(keys), 2), value / 4), self.now)

    @rule(keys=KEYS)
    def remove(self, keys: list[int]) -> None:
        self.fleet.remove(ids(*keys))

    @rule(seconds=st.sampled_from([600, 1800, HOUR]))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        for table in self.fleet.shards:
            table.evict(self.now)

    @rule(which=st.integers(0, 2), seconds=st.sampled_from([0.0, 0.25, 1.0]))
    def publish(self, which: int, seconds: float) -> None:
        self.fleet.clock.now += seconds
        self.fleet.publishers[which % len(self.fleet.publishers)].publish_now()

    @rule()
    def follow(self) -> None:
        self.fleet.subscriber.catch_up()

    @rule(faults=st.sampled_from([WELL, ILL]))
    def change_the_channel(self, faults: ChannelFaults) -> None:
        self.fleet.channel.faults = faults

    @rule(broken=SELDOM)
    def break_the_channel(self, broken: bool) -> None:
        self.fleet.channel.broken = broken

    @rule()
    def save(self) -> None:
        self.saved = self.fleet.rows()

    # What makes everybody take a snapshot happens seldom: it would hide whatever went wrong before.

    @rule(now=SELDOM)
    def rewind(self, now: bool) -> None:
        if now:
            self.fleet.go_back(self.saved)

    @rule(now=SELDOM)
    def restart_publishers(self, now: bool) -> None:
        if now:
            self.fleet.start_publishers_again()

    @rule(now=SELDOM, keep=st.booleans())
    def restart_subscriber(self, now: bool, keep: bool) -> None:
        if now:
            self.fleet.kill_subscriber(keep=keep)

    @rule(now=SELDOM, shards=st.sampled_from([1, 2, 3]))
    def change_the_number_of_shards(self, now: bool, shards: int) -> None:
        if now:
            self.fleet.go_back(self.fleet.rows(), shards=shards)

    @rule(paused=SELDOM)
    def pause(self, paused: bool) -> None:
        for publisher in self.fleet.publishers:
            if paused:
                publisher.pause("a person said so")
            else:
                publisher.resume()

    @rule(now=SELDOM)
    def roll_back(self, now: bool) -> None:
        for publisher in self.fleet.publishers if now else ():
            publisher.rollback("1")

    @rule(key=st.integers(-60, 60), value=st.integers(-8, 8))
    def spoil(self, key: int, value: int) -> None:
        self.fleet.copy.assign(ids(key), torch.full((1, 2), value / 4 + 0.125))

    @rule(key=st.integers(-40, 40))
    def spoil_by_removing(self, key: int) -> None:
        self.fleet.copy.remove(ids(key))

    @invariant()
    def the_log_is_bounded(self) -> None:
        for log in self.fleet.channel.logs() if hasattr(self, "fleet") else ():
            assert log.stored_bytes <= 1 << 20

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.channel.broken = False
            self.fleet.quiet()
            self.fleet.compare()


class FollowingPlainTables(Following):
    cls = DictTable


class FollowingByNumbersAlone(Following):
    """Without digests, nothing is found later that went wrong before; so nothing may."""

    options: ClassVar[dict[str, Any]] = {"touched_capacity": 60, "digest_buckets": 0}

    def spoil(self, **_: Any) -> None: ...

    def spoil_by_removing(self, **_: Any) -> None: ...


@pytest.fixture(autouse=True)
def _few_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


TestFollowing = Following.TestCase
TestFollowing.settings = settings(
    max_examples=tries(12), stateful_step_count=40, deadline=None, phases=PHASES
)
TestFollowingPlainTables = FollowingPlainTables.TestCase
TestFollowingPlainTables.settings = settings(
    max_examples=tries(4), stateful_step_count=40, deadline=None, phases=PHASES
)


TestFollowingByNumbersAlone = FollowingByNumbersAlone.TestCase
TestFollowingByNumbersAlone.settings = settings(
    max_examples=tries(12), stateful_step_count=40, deadline=None, phases=PHASES
)


def churn(fleet: Fleet, keys: int, rounds: int, batch: int) -> None:
    """Train on ids that come and go, at random, with everything that may happen in the middle."""
    chance = torch.Generator().manual_seed(7)
    now, saved = 0, fleet.rows()
    for round_ in range(rounds):
        some = torch.randint(-keys // 2, keys // 2, (batch,), generator=chance).unique()
        fleet.train(some, torch.randint(-8, 9, (len(some), 2), generator=chance) / 4, now)
        fleet.remove(some[: batch // 50])
        if round_ % 10 == 9:
            now += HOUR // 2
            for table in fleet.shards:
                table.evict(now)
        fleet.clock.now += 0.25
        for publisher in fleet.publishers:
            publisher.publish_now()
        if round_ % 3 == 2:
            fleet.subscriber.catch_up()
        match round_ * 12 // rounds, round_ * 12 % rounds < 12:
            case 2 | 7, True:
                fleet.start_publishers_again()
            case 3 | 8, True:
                fleet.kill_subscriber(keep=round_ * 12 // rounds == 3)
            case 4, True:
                saved = fleet.rows()
            case 6, True:
                fleet.go_back(saved)
            case 9, True:
                fleet.go_back(fleet.rows(), shards=2)
            case _:
                pass


@pytest.mark.parametrize("digest_buckets", [0, BUCKETS])
def test_a_churning_table_is_followed_through_everything(digest_buckets: int) -> None:
    channel = MemoryChannel(1 << 20, faults=ChannelFaults(0.05, 0.05, 0.05, 0.05), seed=3)
    fleet = Fleet(channel, NativeTable, shards=3, digest_buckets=digest_buckets)
    churn(fleet, keys=5000, rounds=36, batch=300)
    fleet.quiet()
    assert len(fleet.shards) == 2
    fleet.compare()


@pytest.mark.soak
def test_a_million_churning_ids_are_followed_through_everything() -> None:
    channel = MemoryChannel(16 << 20, faults=ChannelFaults(0.05, 0.05, 0.05, 0.05), seed=5)
    fleet = Fleet(channel, NativeTable, shards=3)
    churn(fleet, keys=1_000_000, rounds=240, batch=40_000)
    fleet.quiet()
    assert sum(len(table) for table in fleet.shards) > 100_000
    fleet.compare()
