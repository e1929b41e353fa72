"""A Kafka broker in memory, and the part of confluent_kafka that sources, sinks and delta channels use.

It keeps logs of partitions, consumer groups with generations, and committed offsets. Clients reach it over
the simulated network, so their requests are late, cut off, or lose their answers, and the broker may be
killed, paused and restarted as any other process:

    broker = SimKafka(cluster.network)
    cluster.start("kafka", broker.serve)
    ...
    broker.attach()        # first thing in each process that uses Kafka

What is like the real one: messages of a partition have consecutive offsets; a fetch is not fenced, a commit
is, by the generation of the group; a member that is silent for `session.timeout.ms` is removed; callbacks run
inside of a poll; a producer sends in the background, in order, and gives a message up after
`message.timeout.ms`. What is not: assignment is eager only, a broker that restarts has lost nothing that it
acknowledged, messages are deleted only when a client asks for it, and there are no transactions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from monolith import concurrency
from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import SimMachine, SimThread

T = TypeVar("T")

Partition = tuple[str, int]
_Found = tuple[Partition, int | None, bytes | None]

_ANSWER_S = 5.0
"""Seconds that a client waits for the answer to a request that names no time."""
_FETCH_WAIT_S = 0.1
"""Seconds after which a client without messages asks again."""
_FETCH_MESSAGES = 100
"""Most messages of one fetch."""
_REBALANCE_S = 60.0
"""Seconds that a group waits for members to rejoin, before it continues without them."""
_NO_OFFSET = -1001


@dataclass
class _Log:
    """One partition."""

    low: int = 0
    values: list[bytes | None] = field(default_factory=list)

    @property
    def high(self) -> int:
        return self.low + len(self.values)


@dataclass
class _Member:
    topics: list[str]
    session_s: float
    heard: float
    joined: bool = True
    """Whether it has joined the next generation."""


@dataclass
class _Group:
    """A consumer group.

    stable ── a member joins, leaves or is silent ──► preparing ── all have rejoined ──► stable
    """

    generation: int = 0
    members: dict[str, _Member] = field(default_factory=dict)
    assigned: dict[str, list[Partition]] = field(default_factory=dict)
    preparing_since: float | None = None


class SimKafka:
    """The broker of a simulation. It needs no lock: threads do not change while it works."""

    def __init__(self, network: SimNetwork, *, deletes_records: bool = True) -> None:
        self.network = network
        self.deletes_records = deletes_records
        """Whether clients may delete messages: brokers before 0.11 do not know the request."""
        self.simulation = network.simulation
        self.machine: SimMachine | None = None
        self.logs: dict[Partition, _Log] = {}
        self.committed: dict[tuple[str, Partition], tuple[int, str]] = {}
        """By group and partition: the offset and the metadata."""
        self.on_committed: list[Callable[[str, Partition, int], object]] = []
        """Called with each offset that is committed: for invariants."""
        self._groups: dict[str, _Group] = {}
        self._appended: dict[str, tuple[int, int]] = {}
        """By producer: number and offset of its newest message, so that a repeated request adds none."""

    def create_topic(self, name: str, partitions: int = 1) -> str:
        for one in range(partitions):
            self.logs.setdefault((name, one), _Log())
        return name

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Be reachable on the machine of the calling thread: the body of the broker's process."""
        here = concurrency.machine()
        assert isinstance(here, SimMachine)
        for group in self._groups.values():
            for member in group.members.values():
                member.heard = self.simulation.now  # no member could reach the broker meanwhile
        self.machine = here
        while not until():
            concurrency.sleep(0.5)

    def attach(self) -> None:
        """Let `monolith.data.kafka.import_kafka` return the client of this broker, on the calling machine."""
        here = concurrency.machine()
        assert isinstance(here, SimMachine)
        here.kafka = _library(self, here)

    def ask(self, client: SimMachine, work: Callable[[], T], timeout: float = _ANSWER_S) -> T:
        """Return the answer of the broker to a request of a client.

        Raises:
            KafkaException: There is none, although the broker may have acted; or the answer is an error.
        """
        simulation, network = self.simulation, self.network
        kinds = _kafka().KafkaError
        until = simulation.now + timeout
        broker = self.machine
        if broker is None or not broker.alive:
            simulation.block("no broker", 0.02)
            raise _failure(kinds._TRANSPORT)
        breaks = network.breaks()
        before = breaks and simulation.random.random() < 0.5
        if not network.travel(client, broker, at_most=timeout):
            raise _failure(kinds._TIMED_OUT)
        while broker.alive and broker.paused_until > simulation.now:
            if simulation.now >= until:
                raise _failure(kinds._TIMED_OUT)
            simulation.block("paused broker", min(broker.paused_until, until + 0.001) - simulation.now)
        if before or not broker.alive:
            raise _failure(kinds._TRANSPORT)
        refused: Exception | None = None
        try:
            answer = work()
        except _kafka().KafkaException as error:
            refused = error
        if not network.travel(broker, client, at_most=timeout):
            raise _failure(kinds._TIMED_OUT)
        if breaks or not broker.alive:
            raise _failure(kinds._TRANSPORT)
        if refused is not None:
            raise refused
        return answer

    # What requests do

    def append(self, producer: str, number: int, partition: Partition, value: bytes | None) -> int:
        """Add message `number` of a producer, once; return its offset."""
        newest, offset = self._appended.get(producer, (-1, _NO_OFFSET))
        # A producer repeats only its newest request: it sends one at a time.
        if number > newest:
            log = self._log(partition)
            offset = log.high
            log.values.append(value)
            self._appended[producer] = (number, offset)
        return offset

    def add_topic(self, name: str, partitions: int) -> None:
        """As `create_topic`, at the request of a client."""
        if name in self.topics():
            raise _failure(_kafka().KafkaError.TOPIC_ALREADY_EXISTS)
        self.create_topic(name, partitions)

    def delete_before(self, partition: Partition, offset: int) -> None:
        """Delete the messages of a partition before an offset."""
        if not self.deletes_records:
            raise _failure(_kafka().KafkaError._UNSUPPORTED_FEATURE)
        log = self._log(partition)
        if offset > log.high:
            raise _failure(_kafka().KafkaError.OFFSET_OUT_OF_RANGE)
        gone = max(0, offset - log.low)
        log.values, log.low = log.values[gone:], log.low + gone

    def ends(self, partition: Partition) -> tuple[int, int]:
        """Return the offset of a partition's first message, and the one after its last."""
        log = self._log(partition)
        return log.low, log.high

    def _log(self, partition: Partition) -> _Log:
        if partition not in self.logs:
            raise _failure(_kafka().KafkaError._UNKNOWN_PARTITION)
        return self.logs[partition]

    def topics(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for topic, _ in self.logs:
            found[topic] = found.get(topic, 0) + 1
        return found

    def fetch(self, wanted: dict[Partition, int], most: int) -> list[_Found]:
        """Return messages from these offsets on, with None for an offset that does not exist."""
        found: list[_Found] = []
        order = sorted(wanted)
        self.simulation.random.shuffle(order)
        for partition in order:
            log, offset = self.logs[partition], wanted[partition]
            if not log.low <= offset <= log.high:
                found.append((partition, None, None))
                continue
            values = log.values[offset - log.low :][: most - len(found)]
            found += [(partition, offset + place, value) for place, value in enumerate(values)]
        return found

    def commit(
        self, group_id: str, member: str | None, generation: int, offsets: dict[Partition, tuple[int, str]]
    ) -> int:
        """Note offsets of a group; return an error code, 0 for none."""
        kinds = _kafka().KafkaError
        group = self._group(group_id)
        if member is None:
            if group.members:  # a client that assigns its own partitions may not disturb a group
                return int(kinds.UNKNOWN_MEMBER_ID)
        elif member not in group.members:
            return int(kinds.UNKNOWN_MEMBER_ID)
        elif generation != group.generation:
            return int(kinds.ILLEGAL_GENERATION)
        for partition, (offset, metadata) in offsets.items():
            self.committed[group_id, partition] = (offset, metadata)
            for check in self.on_committed:
                check(group_id, partition, offset)
        return 0

    def join(self, group_id: str, member: str, topics: list[str], session_s: float) -> str:
        group = self._group(group_id)
        name = member if member in group.members else concurrency.token_hex(4)
        self._prepare(group)
        group.members[name] = _Member(topics, session_s, self.simulation.now)
        return name

    def sync(self, group_id: str, member: str) -> tuple[int, list[Partition]] | str:
        """Return the generation and partitions of a member, or what it has to do instead."""
        group = self._group(group_id)
        if member not in group.members:
            return "unknown"
        group.members[member].heard = self.simulation.now
        if group.preparing_since is not None:
            return "wait" if group.members[member].joined else "rejoin"
        return group.generation, group.assigned.get(member, [])

    def heartbeat(self, group_id: str, member: str, generation: int) -> str:
        group = self._group(group_id)
        if member not in group.members or generation != group.generation:
            return "unknown"
        group.members[member].heard = self.simulation.now
        return "ok" if group.preparing_since is None else "rebalance"

    def leave(self, group_id: str, member: str) -> None:
        group = self._group(group_id)
        if group.members.pop(member, None) is not None:
            self._prepare(group)

    def _prepare(self, group: _Group) -> None:
        if group.preparing_since is None:
            group.preparing_since = self.simulation.now
            for member in group.members.values():
                member.joined = False

    def _group(self, name: str) -> _Group:
        """Return a group as it is now: without silent members, and stable if all have rejoined."""
        group, now = self._groups.setdefault(name, _Group()), self.simulation.now
        silent = [one for one, member in group.members.items() if now - member.heard > member.session_s]
        if silent:
            self._prepare(group)
        if group.preparing_since is not None and now - group.preparing_since > _REBALANCE_S:
            silent += [one for one, member in group.members.items() if not member.joined]
        for one in silent:
            group.members.pop(one, None)
        if group.preparing_since is not None and all(one.joined for one in group.members.values()):
            group.preparing_since = None
            group.generation += 1
            names = sorted(group.members)
            self.simulation.random.shuffle(names)
            group.assigned = {one: [] for one in names}
            for number, partition in enumerate(sorted(self.logs)):
                readers = [one for one in names if partition[0] in group.members[one].topics]
                if readers:
                    group.assigned[readers[number % len(readers)]].append(partition)
        return group


def _kafka() -> Any:
    import confluent_kafka.admin  # its errors and plain types are used as they are

    return confluent_kafka


def _failure(code: int) -> Exception:
    error: Exception = _kafka().KafkaException(_kafka().KafkaError(code))
    return error


def _metadata(found: dict[str, int], topic: str | None) -> Any:
    """Return the answer of `list_topics`: about one topic, which may not exist, or about all."""
    unknown = _kafka().KafkaError(_kafka().KafkaError.UNKNOWN_TOPIC_OR_PART)
    return SimpleNamespace(
        topics={
            name: SimpleNamespace(
                partitions=dict.fromkeys(range(found.get(name, 0))), error=None if name in found else unknown
            )
            for name in (found if topic is None else [topic])
        }
    )


def _library(broker: SimKafka, machine: SimMachine) -> Any:
    """Return what `import confluent_kafka` would, for one machine."""
    real = _kafka()
    return SimpleNamespace(
        Consumer=lambda settings, logger=None: SimConsumer(broker, machine, settings),  # noqa: ARG005
        Producer=lambda settings, logger=None: SimProducer(broker, machine, settings),  # noqa: ARG005
        KafkaError=real.KafkaError,
        KafkaException=real.KafkaException,
        TopicPartition=real.TopicPartition,
        admin=SimpleNamespace(
            AdminClient=lambda settings, logger=None: SimAdmin(broker, machine),  # noqa: ARG005
            NewTopic=real.admin.NewTopic,
        ),
    )


class SimMessage:
    """A message, or an error in place of one."""

    def __init__(
        self, partition: Partition, offset: int | None, value: bytes | None, error: Any = None
    ) -> None:
        self._partition, self._offset, self._value, self._error = partition, offset, value, error

    def topic(self) -> str:
        return self._partition[0]

    def partition(self) -> int:
        return self._partition[1]

    def offset(self) -> int | None:
        return self._offset

    def value(self) -> bytes | None:
        return self._value

    def error(self) -> Any:
        return self._error


class SimConsumer:
    """As confluent_kafka.Consumer.

    A thread in the background joins the group and sends heartbeats; what it learns becomes a callback that
    the next poll runs.
    """

    def __init__(self, broker: SimKafka, machine: SimMachine, settings: dict[str, Any]) -> None:
        self._broker, self._machine, self._settings = broker, machine, settings
        self._group: str = settings["group.id"]
        self._session_s = float(settings.get("session.timeout.ms", 45_000)) / 1000
        self._beat_s = float(settings.get("heartbeat.interval.ms", 3_000)) / 1000
        self._positions: dict[Partition, int] = {}
        """Of each assigned partition: the next message to fetch."""
        self._fetched: deque[SimMessage] = deque()
        self._callbacks: deque[Callable[[], object]] = deque()
        self._ends: dict[Partition, tuple[int, int]] = {}
        self._member: str | None = None
        self._generation = -1
        self._state = "out"
        """out -> joining -> stable -> (rebalance, or lost) out; "asked" while a callback has not run yet."""
        self._subscribed: list[str] = []
        self._on: dict[str, Any] = {}
        self._closed = False

    # Questions

    def list_topics(self, topic: str | None = None, timeout: float = _ANSWER_S) -> Any:
        return _metadata(self._ask(self._broker.topics, timeout), topic)

    def get_watermark_offsets(
        self, place: Any, timeout: float = _ANSWER_S, cached: bool = False
    ) -> tuple[int, int]:
        partition = (place.topic, place.partition)
        if cached:
            return self._ends.get(partition, (_NO_OFFSET, _NO_OFFSET))
        self._ends[partition] = self._ask(lambda: self._broker.ends(partition), timeout)
        return self._ends[partition]

    def committed(self, places: Iterable[Any], timeout: float = _ANSWER_S) -> list[Any]:
        asked = [(one.topic, one.partition) for one in places]
        found = self._ask(
            lambda: [self._broker.committed.get((self._group, one), (_NO_OFFSET, "")) for one in asked],
            timeout,
        )
        make = _kafka().TopicPartition
        return [
            make(*one, offset, metadata=metadata)
            for one, (offset, metadata) in zip(asked, found, strict=True)
        ]

    def assignment(self) -> list[Any]:
        return [_kafka().TopicPartition(*one) for one in self._positions]

    # Assigning

    def assign(self, places: Iterable[Any]) -> None:
        self._positions = {(one.topic, one.partition): one.offset for one in places}
        self._fetched.clear()

    def unassign(self) -> None:
        self.assign([])

    def subscribe(
        self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None
    ) -> None:
        self._subscribed = topics
        self._on = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._machine.thread(self._stay_in_group, name="kafka-group").start()

    def _stay_in_group(self) -> None:
        while not self._closed:
            try:
                self._step()
            except _kafka().KafkaException as error:
                self._callbacks.append(partial(self._report, error))
            concurrency.sleep(0.05 if self._state in ("out", "joining") else self._beat_s)

    def _step(self) -> None:
        """Do what the state asks for: join the group, wait for partitions, or send a heartbeat."""
        broker, group, member = self._broker, self._group, self._member or ""
        if self._state == "out":
            self._member = self._ask(lambda: broker.join(group, member, self._subscribed, self._session_s))
            self._state = "joining"
        elif self._state == "joining":
            found = self._ask(lambda: broker.sync(group, member))
            if isinstance(found, tuple):
                self._generation, given = found
                self._call_later("assign", given, "stable")
            elif found != "wait":
                self._state = "out"
        else:
            generation = self._generation
            answer = self._ask(lambda: broker.heartbeat(group, member, generation))
            if self._state == "stable" and answer != "ok":
                kind = "revoke" if answer == "rebalance" else "lost"
                self._call_later(kind, list(self._positions), "out")

    def _call_later(self, kind: str, partitions: list[Partition], then: str) -> None:
        self._state = "asked"

        def call() -> None:
            places = [_kafka().TopicPartition(*one) for one in partitions]
            if kind == "lost":
                self._member, self._generation = None, -1
            if self._on[kind] is not None:
                self._on[kind](self, places)
            if kind != "assign":
                self.unassign()
            self._state = then

        self._callbacks.append(call)

    def _report(self, error: Any) -> None:
        if "error_cb" in self._settings:
            self._settings["error_cb"](error.args[0])

    # Reading

    def poll(self, timeout: float = -1) -> SimMessage | None:
        return next(iter(self.consume(1, timeout)), None)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[SimMessage]:
        simulation = self._broker.simulation
        until = simulation.now + timeout if timeout >= 0 else float("inf")
        found: list[SimMessage] = []
        while True:
            simulation.check_alive()
            # The callbacks run after messages were taken, too: they may revoke the partitions of these.
            while self._callbacks:
                self._callbacks.popleft()()
            if not self._fetched and self._positions:
                self._fetch()
            news = bool(self._fetched)
            while self._fetched and len(found) < num_messages:
                found.append(self._fetched.popleft())
            left = until - simulation.now
            if len(found) >= num_messages:
                return found
            if left <= 0:
                if not found:  # a caller that polls for the rest of a timeout reaches its end
                    simulation.block("poll", 0.0)
                return found
            if not news:
                simulation.block("poll", min(_FETCH_WAIT_S, left))

    def _fetch(self) -> None:
        wanted = dict(self._positions)
        try:
            answer = self._ask(lambda: self._broker.fetch(wanted, _FETCH_MESSAGES))
        except _kafka().KafkaException as error:
            self._callbacks.append(partial(self._report, error))
            return
        for partition, offset, value in answer:
            if offset is None:
                gone = _kafka().KafkaError(_kafka().KafkaError._AUTO_OFFSET_RESET)
                self._fetched.append(SimMessage(partition, None, None, gone))
                self._positions.pop(partition, None)
            # The application may have assigned other partitions or offsets while the answer was on its way.
            elif self._positions.get(partition) == offset:
                self._fetched.append(SimMessage(partition, offset, value))
                self._positions[partition] = offset + 1

    # Committing

    def commit(self, offsets: Iterable[Any], asynchronous: bool = True) -> list[Any] | None:
        places = list(offsets)
        sent = {(one.topic, one.partition): (one.offset, one.metadata or "") for one in places}
        member, generation = (self._member, self._generation) if self._subscribed else (None, -1)

        def send() -> Any:
            try:
                code = self._ask(lambda: self._broker.commit(self._group, member, generation, sent))
            except _kafka().KafkaException as error:
                return error.args[0]
            return _kafka().KafkaError(code) if code else None

        if not asynchronous:
            if (error := send()) is not None:
                raise _kafka().KafkaException(error)
            return places

        def send_and_report() -> None:
            error = send()
            self._callbacks.append(lambda: self._settings["on_commit"](error, places))

        self._machine.thread(send_and_report, name="kafka-commit").start()
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._subscribed and self._positions and self._on["revoke"] is not None:
            self._on["revoke"](self, self.assignment())
        if self._member is not None:
            member = self._member
            with suppress(_kafka().KafkaException):  # the broker notices its silence
                self._ask(lambda: self._broker.leave(self._group, member))

    def _ask(self, work: Callable[[], T], timeout: float = _ANSWER_S) -> T:
        return self._broker.ask(self._machine, work, timeout)


@dataclass
class _Produced:
    """A message of a producer that the broker has not acknowledged."""

    number: int
    partition: Partition
    value: bytes | None
    on_delivery: Any
    expires: float


class SimProducer:
    """As confluent_kafka.Producer, with idempotence: a message whose answer was lost is not added twice.

    A thread sends the messages one at a time, so that they keep their order; it lives while there are some.
    Delivery reports wait for `poll` or `flush`.

        produce ──▶ _unsent ── acknowledged, expired or purged ──▶ _reports ── poll, flush ──▶ on_delivery
    """

    def __init__(self, broker: SimKafka, machine: SimMachine, settings: dict[str, Any]) -> None:
        self._broker, self._machine = broker, machine
        self._timeout_s = float(settings.get("message.timeout.ms", 300_000)) / 1000
        self._most = int(settings.get("queue.buffering.max.messages", 100_000))
        self._id = concurrency.token_hex(4)
        self._numbers = 0
        self._unsent: deque[_Produced] = deque()
        self._reports: deque[Callable[[], object]] = deque()
        self._waiting: list[SimThread] = []
        """Threads in `poll` and `flush`."""
        self._sends = False
        """Whether the thread runs."""

    def __len__(self) -> int:
        return len(self._unsent) + len(self._reports)

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        on_delivery: Any = None,
    ) -> None:
        if len(self) >= self._most:
            raise BufferError("Local: Queue full")
        if partition < 0:
            count = self._broker.topics()[topic]
            partition = (sum(key) if key else self._numbers) % count
        expires = self._broker.simulation.now + self._timeout_s
        self._unsent.append(_Produced(self._numbers, (topic, partition), value, on_delivery, expires))
        self._numbers += 1
        if not self._sends:
            self._sends = True
            self._machine.thread(self._send, name="kafka-producer").start()

    def poll(self, timeout: float = 0) -> int:
        """Run the callbacks of delivery reports; wait for one if there are none."""
        if not self._reports and timeout:
            self._broker.simulation.block("poll", timeout if timeout > 0 else None, self._waiting)
        served = 0
        while self._reports:
            self._reports.popleft()()
            served += 1
        return served

    def flush(self, timeout: float = -1) -> int:
        """Wait until all messages are delivered or given up; return how many are neither after `timeout`."""
        simulation = self._broker.simulation
        until = simulation.now + timeout if timeout >= 0 else float("inf")
        while True:
            self.poll(0)
            left = until - simulation.now
            if not self._unsent or left <= 0:
                return len(self)
            simulation.block("flush", None if timeout < 0 else left, self._waiting)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:  # noqa: ARG002
        """Give up all messages. One that is on its way may arrive all the same."""
        assert in_queue
        assert in_flight
        while self._unsent:
            self._report(self._unsent.popleft(), None, _kafka().KafkaError._PURGE_QUEUE)

    def _send(self) -> None:
        kinds, simulation = _kafka().KafkaError, self._broker.simulation
        while self._unsent:
            message = self._unsent[0]
            offset, code = None, 0
            try:
                append = partial(
                    self._broker.append, self._id, message.number, message.partition, message.value
                )
                offset = self._broker.ask(self._machine, append)
            except _kafka().KafkaException as error:
                code = error.args[0].code()
                if code in (kinds._TRANSPORT, kinds._TIMED_OUT):
                    if simulation.now < message.expires:
                        simulation.block("producer", 0.1)
                        continue
                    code = kinds._MSG_TIMED_OUT
            if self._unsent and self._unsent[0] is message:  # else it was purged meanwhile
                self._report(self._unsent.popleft(), offset, code)
        self._sends = False

    def _report(self, message: _Produced, offset: int | None, code: int) -> None:
        if message.on_delivery is not None:
            error = _kafka().KafkaError(code) if code else None
            about = SimMessage(message.partition, offset, message.value, error)
            self._reports.append(partial(message.on_delivery, error, about))
        self._broker.simulation.wake_some(self._waiting)


class SimAdmin:
    """As confluent_kafka.admin.AdminClient."""

    def __init__(self, broker: SimKafka, machine: SimMachine) -> None:
        self._broker, self._machine = broker, machine

    def list_topics(self, topic: str | None = None, timeout: float = _ANSWER_S) -> Any:
        return _metadata(self._broker.ask(self._machine, self._broker.topics, timeout), topic)

    def create_topics(self, topics: Iterable[Any]) -> dict[str, Any]:
        add = self._broker.add_topic
        return {one.topic: self._later(partial(add, one.topic, one.num_partitions)) for one in topics}

    def delete_records(self, places: Iterable[Any]) -> dict[Any, Any]:
        delete = self._broker.delete_before
        return {one: self._later(partial(delete, (one.topic, one.partition), one.offset)) for one in places}

    def _later(self, work: Callable[[], None]) -> Any:
        """Ask the broker on a thread of the client; return a future of the answer."""
        found = self._machine.future()

        def ask() -> None:
            try:
                found.set_result(self._broker.ask(self._machine, work))
            except _kafka().KafkaException as error:
                found.set_exception(error)

        self._machine.thread(ask, name="kafka-admin").start()
        return found
