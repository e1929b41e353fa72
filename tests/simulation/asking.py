"""The world of requests over gRPC: clients ask replicas of a server while versions roll and servers restart.

Servers are `InferenceServer`s with their gRPC port: interceptors, quotas, batching, leases of versions, and
the poll for new ones. Clients are `monolith.serve.Client`s that retry, with deadlines and `max_staleness`.
Both are those of the product, below them is the simulated gRPC of `monolith.testing.grpc`.

The model returns what it was asked: numbers that no other request has, its version, and the step that its
rows are of. So every value of an answer is judged exactly.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from monolith import concurrency
from monolith.cluster.security import Guard, SecurityConfig
from monolith.config import Secret
from monolith.errors import (
    RequestError,
    RetryableError,
    StaleAnswerError,
    UnavailableError,
    UnknownModelError,
)
from monolith.serve.candidates import CandidateColumns
from monolith.serve.client import Client, ClientOptions
from monolith.serve.client_messages import ClientAnswer
from monolith.serve.config import BatchingConfig, ServeConfig, ServedFolder, ServeLimits, VersionPolicy
from monolith.serve.manifest import Signature, TensorSpec
from monolith.serve.predictor import Prediction
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.inference import InferReply, InferRequest, code_of
from monolith.serve.server.server import InferenceServer
from monolith.testing.cluster import Faults, SimCluster
from monolith.testing.grpc import SimGrpcServer

MODEL = "clicks"
PORT = 8001
TOKEN = Secret("of-the-simulated-servers")
STEP_SECONDS = 0.25
"""Virtual seconds that a step of the trainer takes; step n ends at n times as long."""
BAD = -1
"""A number that the model refuses."""
_MOST_ROWS = 8
_SLACK = 0.1
"""Seconds after its deadline in which a request ends: clocks are wrong by a hundredth."""
_SETTLED = 3
"""Answers from the newest version that each thread must get in the end."""


@dataclass(frozen=True)
class Shape:
    """The choices of a seed."""

    replicas: int
    clients: int
    threads: int
    """Threads of a client process that ask; they share one client of each server."""
    versions: int
    widened: int
    """From this version on the model takes one more input, and needs it."""
    slow: float
    """Most seconds that the model takes for a batch."""
    lag: float
    """Most seconds by which the rows of a server are behind the trainer."""
    restarts: float
    """Chance in each second that a server is stopped in good order, and started again."""
    bad: float
    """Chance that a request has a row that the model refuses."""
    named: float
    """Chance that a request names a version."""
    pause: float
    """Most seconds between two requests of a thread."""
    config: ServeConfig
    policy: VersionPolicy

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        draw = random.Random(f"asking {seed}")
        versions = draw.choice([1, 2, 3])
        return cls(
            replicas=draw.choice([1, 1, 2]),
            clients=draw.choice([1, 2]),
            threads=draw.choice([1, 2, 3]),
            versions=versions,
            widened=draw.choice([versions, versions + 1]),
            slow=draw.choice([0.01, 0.1, 0.4]),
            lag=draw.choice([0.5, 2.0]),
            restarts=draw.choice([0.0, 0.0, 0.2]),
            bad=draw.choice([0.0, 0.2]),
            named=draw.choice([0.0, 0.1]),
            pause=draw.choice([0.1, 0.4]),
            config=ServeConfig(
                http_port=None,
                grpc_port=PORT,
                drain=timedelta(seconds=20),
                threads=draw.choice([1, 4, 8]),
                limits=ServeLimits(
                    concurrency=draw.choice([3, 16, 16]),
                    queue=draw.choice([1, 16, 16]),
                    peer_requests=draw.choice([2, 16, 16]),
                    in_flight_bytes=draw.choice([6_000, 1 << 30]),
                    timeout=timedelta(seconds=draw.choice([0.5, 10])),
                ),
                batching=BatchingConfig(
                    max_rows=draw.choice([3, 16, 32]),
                    max_delay=timedelta(seconds=draw.choice([0.0, 0.0, 0.02])),
                    runners=draw.choice([1, 1, 2]),
                ),
            ),
            policy=VersionPolicy(draw.choice([1, 2])),
        )


class World:
    """What all processes of a run have done, for comparisons. The code under test uses nothing of it."""

    def __init__(self, seed: int, cluster: SimCluster) -> None:
        self.shape, self.cluster = Shape.drawn(seed), cluster
        self.versions = [1]
        """As exported."""
        self.servers: dict[str, ServerProcess] = {}
        self.good: Counter[tuple[int, int]] = Counter()
        """Client and thread -> its answers from the newest version since the last one from an older version,
        after the faults have ended."""
        self.numbers = itertools.count(1)
        self.answered = 0
        self.stopping = False

    def fail(self, why: str) -> None:
        """Fail the run. An assertion in the model would be an answer of the server."""
        self.cluster.simulation.fail(AssertionError(why))

    def export(self) -> None:
        for version in range(len(self.versions) + 1, self.shape.versions + 1):
            concurrency.sleep(self.cluster.random.uniform(0.2, 2))
            self.versions.append(version)

    def is_over(self) -> bool:
        """Whether nothing goes wrong any more, and every request is answered from the last version."""
        cluster, shape = self.cluster, self.shape
        if not cluster.quiet:
            return False
        cluster.network.faults.break_chance = cluster.network.faults.slow_chance = 0.0
        return (
            cluster.processes["exporter"].finished
            and all(one.running or one.finished for one in cluster.processes.values())
            and len(self.good) == shape.clients * shape.threads
            and min(self.good.values()) >= _SETTLED
        )

    def check_bounds(self) -> None:
        for one in self.servers.values():
            one.check_bounds()


class ServerProcess:
    """A process that serves."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lag = world.cluster.random.uniform(0, world.shape.lag)
        self.asked: Counter[int] = Counter()
        """Requests that are being answered, by their number."""
        self.left_at: dict[int, float] = {}
        """Number of a request -> virtual time at which the last one of it was answered or refused."""
        self.machine: Any = concurrency.machine()
        self.server: InferenceServer | None = None
        self.port: SimGrpcServer | None = None
        world.servers[name] = self

    def run(self) -> None:
        world, shape = self.world, self.world.shape
        server = self.server = InferenceServer(
            replace(shape.config, host=self.name, poll=timedelta(seconds=0.5)),
            [ServedFolder(folder="folder", name=MODEL, policy=shape.policy)],
            AskedCatalog(self),
            guard=Guard(token=TOKEN),
        )
        assert server._grpc is not None
        self.port = server._grpc._server
        self._watch(server)
        while not world.stopping:
            concurrency.sleep(1)
            if not world.cluster.quiet and world.cluster.random.random() < shape.restarts:
                break
        if world.stopping:
            self._check_idle(server)
        server.close()
        assert not self.port.cut_short, f"{self.port.cut_short} calls were cancelled by a close in good order"
        if not world.stopping:
            raise UnavailableError("an operator restarts it")

    def _watch(self, server: InferenceServer) -> None:
        """Note which requests are being answered, and what goes wrong with them."""
        inference: Any = server.inference
        right, refuse = inference.infer, inference.refuse

        def infer(request: InferRequest) -> InferReply:
            number = int(request.id)
            self.asked[number] += 1
            try:
                return right(request)
            finally:
                self.asked[number] -= 1
                self.left_at[number] = self.world.cluster.simulation.now

        def note(transport: str, error: BaseException, *about: str) -> None:
            if code_of(error) == "internal":
                self.world.fail(f"a bug in the server: {error!r}")
            refuse(transport, error, *about)

        inference.infer, inference.refuse = infer, note

    def computes(self, numbers: Sequence[int]) -> None:
        """Check that the model is asked only for requests that wait for it."""
        now = self.world.cluster.simulation.now
        for number in numbers:
            left = self.left_at.get(number, float("-inf"))
            # A pause may lie between a leader's look at the deadline of a request and the model.
            if not self.asked[number] and left < now and self.machine.paused_until < left:
                self.world.fail(f"request {number} is computed {now - left:g} s after it was refused")

    def check_bounds(self) -> None:
        server, limits = self.server, self.world.shape.config.limits
        if server is None or not self.machine.alive:
            return
        quotas, inference = server._quotas, server.inference
        assert 0 <= quotas._bytes <= limits.in_flight_bytes, f"{quotas._bytes} bytes are in flight"
        for peer, count in quotas._requests.items():
            assert 0 < count <= limits.peer_requests, f"{count} requests of {peer} are in flight"
        assert 0 <= inference._in_flight <= limits.concurrency, f"{inference._in_flight} are in flight"
        for loaded in inference.repository._serving[MODEL].values():
            batcher = loaded.batcher
            assert batcher._queued_rows >= 0, f"{batcher._queued_rows} rows are queued"
            assert 0 <= batcher._leaders <= batcher._runners, f"{batcher._leaders} requests lead"
            # A request that runs in pieces returns to the queue, and another one may have its place.
            most = limits.queue + batcher._runners
            assert len(batcher._queue) <= most, f"{len(batcher._queue)} requests are queued"

    def _check_idle(self, server: InferenceServer) -> None:
        """Check that nothing is left of requests, some time after the last one."""
        concurrency.sleep(5)
        quotas, inference = server._quotas, server.inference
        assert quotas._bytes == 0, f"{quotas._bytes} bytes of no request are in flight"
        assert not quotas._requests, f"requests that are over count: {quotas._requests}"
        assert inference._in_flight == 0, f"{inference._in_flight} requests of no client are in flight"
        for loaded in inference.repository._serving[MODEL].values():
            batcher = loaded.batcher
            left = len(batcher._queue), batcher._queued_rows, batcher._leaders
            assert left == (0, 0, 0), f"requests, rows and leaders are left in a batcher: {left}"
            assert loaded._leases == 1, f"{loaded._leases - 1} leases of no request are left"
        assert inference.repository.retiring == 0, "a version that no request uses is not closed"


class AskedCatalog(ServableCatalog):
    """The exported versions of the world."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._server = server

    def versions(self, folder: str) -> Sequence[str]:  # noqa: ARG002
        return [f"{version}" for version in self._server.world.versions]

    def withheld(self, folder: str, versions: Sequence[str]) -> dict[str, str]:  # noqa: ARG002
        return {}

    def load(self, folder: str, version: str) -> Any:  # noqa: ARG002
        draw, quiet = self._server.world.cluster.random, self._server.world.cluster.quiet
        concurrency.sleep(draw.uniform(0, 0.3))
        if not quiet and self._server.server is not None and draw.random() < 0.1:
            raise UnavailableError("the disk cannot be read")
        return AskedModel(self._server, int(version))


class AskedModel:
    """A version that says what it was asked, as a `Predictor` would answer."""

    answers_here = False
    towers: dict[str, Any] = {}  # noqa: RUF012
    rows: Any = None

    def __init__(self, server: ServerProcess, version: int) -> None:
        self._server, self.number, self.version = server, version, f"{version}"
        self._closed = False
        names = ["item", "factor"] if version >= server.world.shape.widened else ["item"]
        self.signature = Signature(
            inputs=tuple(TensorSpec(name=name, datatype="INT64", shape=(-1,)) for name in names),
            outputs=tuple(
                TensorSpec(name=name, datatype="INT64", shape=(-1,)) for name in ("item", "version", "step")
            ),
        )

    def pack(self, request: Any) -> None:  # noqa: ARG002
        return None

    def predict(self, columns: Any, *, deadline: float | None = None) -> Prediction:  # noqa: ARG002
        world, now = self._server.world, self._server.world.cluster.simulation.now
        if self._closed:
            world.fail(f"version {self.version} is asked after it was closed")
        if isinstance(columns, CandidateColumns):
            columns = columns.full()
        items = np.asarray(columns["item"])
        self._server.computes(sorted({item // _MOST_ROWS for item in items.tolist() if item != BAD}))
        for row, item in enumerate(items.tolist()):
            if item == BAD:
                raise RequestError(f"column 'item', row {row}: {BAD}")
        if self.number >= world.shape.widened:
            if "factor" not in columns:
                raise RequestError("the model needs the input 'factor'")
            items = items + np.asarray(columns["factor"])
        step = int(max(0.0, now - self._server.lag) / STEP_SECONDS)
        concurrency.sleep(world.cluster.random.uniform(0, world.shape.slow))
        if self._closed:
            world.fail(f"version {self.version} is closed while it answers")
        age = world.cluster.simulation.now - step * STEP_SECONDS
        return Prediction(
            {
                "item": items,  # type: ignore[dict-item]
                "version": np.full(len(items), self.number),  # type: ignore[dict-item]
                "step": np.full(len(items), step),  # type: ignore[dict-item]
            },
            freshness={"step": step, "newest_step": step, "staleness": round(age, 3)},
        )

    def warm_up(self) -> int:
        return 0

    def close(self) -> None:
        if self._closed:
            self._server.world.fail(f"version {self.version} is closed twice")
        self._closed = True


class ClientProcess:
    """A process whose threads ask servers."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.clients = [
            Client(f"grpc://{name}:{PORT}", security=SecurityConfig(token=TOKEN))
            for name in (f"server-{one}" for one in range(world.shape.replicas))
        ]

    def run(self) -> None:
        threads = [
            concurrency.Thread(target=self._ask, args=(number,), name=f"requests-{number}")
            for number in range(self.world.shape.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in self.clients:
            client.close()

    def _ask(self, thread: int) -> None:
        world, draw = self.world, self.world.cluster.random
        while not world.stopping:
            concurrency.sleep(draw.uniform(0, world.shape.pause))
            was_quiet, newest = world.cluster.quiet, world.versions[-1]
            version = self._ask_once()
            if was_quiet and version is not None:
                good = world.good[self.number, thread]
                world.good[self.number, thread] = good + 1 if version >= newest else 0

    def _ask_once(self) -> int | None:
        """Ask once, and judge the answer; return the version that the server chose, if it did."""
        world, draw, simulation = self.world, self.world.cluster.random, self.world.cluster.simulation
        shape = world.shape
        number, rows = next(world.numbers), draw.randint(1, _MOST_ROWS)
        items = [number * _MOST_ROWS + row for row in range(rows)]
        factors = [draw.randint(0, 3) << 32 for _ in items]
        is_bad = draw.random() < shape.bad
        if is_bad:
            items[draw.randrange(rows)] = BAD
        named = f"{draw.choice(world.versions)}" if draw.random() < shape.named else ""
        options = ClientOptions(
            timeout=timedelta(seconds=draw.choice([0.05, 0.3, 1.0, 3.0])),
            retries=draw.choice([0, 2, 5]),
            backoff=timedelta(milliseconds=20),
            max_staleness=draw.choice([None, timedelta(seconds=1), timedelta(seconds=2)]),
            priority=draw.choice([0, 0, 1, 9]),
        )
        machine, asked_at = simulation.current.machine, simulation.now
        version: int | None = None
        try:
            answer = draw.choice(self.clients).predict(
                MODEL,
                {"item": items, "factor": factors},
                version=named,
                request_id=f"{number}",
                options=options,
            )
            assert not is_bad, f"request {number} is answered though the model refuses it"
            self._judge(answer, number, items, factors)
            assert named in ("", answer.version), f"version {answer.version} answers in place of {named}"
            self._judge_age(answer, options)
            version = None if named else int(answer.version)
            world.answered += 1
        except StaleAnswerError as error:
            self._judge(error.answer, number, items, factors)
            assert options.max_staleness is not None
            simulation.note(f"stale: {error!r:.200}")
            version = None if named else int(error.answer.version)
        except RetryableError as error:
            simulation.note(f"no answer: {error!r:.200}")
        except RequestError as error:
            self._judge_refusal(error, number, is_bad=is_bad, names_a_version=bool(named))
        # A paused machine is late, whatever its program does.
        took = simulation.now - max(asked_at, machine.paused_until)
        limit = options.timeout.total_seconds()
        assert took < limit + _SLACK, f"request {number} of {limit:g} s ended after {took:g} s"
        return version

    def _judge(self, answer: ClientAnswer, number: int, items: list[int], factors: list[int]) -> None:
        """Check every value of an answer, and what it says of itself."""
        assert answer.id == f"{number}", f"request {number} got the answer to request {answer.id}"
        version = int(answer.version)
        wide = version >= self.world.shape.widened
        expected = [item + factor * wide for item, factor in zip(items, factors, strict=True)]
        found = answer.outputs["item"].tolist()
        assert found == expected, f"request {number}: version {version} of {expected} is {found}"
        versions, steps = set(answer.outputs["version"].tolist()), answer.outputs["step"].tolist()
        assert versions == {version}, f"request {number}: version {version} has rows of {versions}"
        claims = answer.parameters["step"], answer.parameters["newest_step"]
        assert claims == (min(steps), max(steps)), f"request {number}: rows of {steps} say {claims}"

    def _judge_refusal(
        self, error: RequestError, number: int, *, is_bad: bool, names_a_version: bool
    ) -> None:
        """Check that a request was refused for what is wrong with it."""
        if isinstance(error, UnknownModelError):
            assert names_a_version, f"request {number}: {error}"
        else:
            assert is_bad, f"request {number} is refused: {error}"
            assert f": {BAD}" in str(error), f"request {number} is refused for another reason: {error}"

    def _judge_age(self, answer: ClientAnswer, options: ClientOptions) -> None:
        """Check that rows are not older than the client accepts, when it has the answer."""
        if options.max_staleness is None:
            return
        machine, now = self.world.cluster.simulation.current.machine, self.world.cluster.simulation.now
        age = now - min(answer.outputs["step"].tolist()) * STEP_SECONDS
        if machine.paused_until < now - options.timeout.total_seconds():
            most = options.max_staleness.total_seconds()
            assert age < most + _SLACK, f"rows are {age:g} s old, the client accepts {most:g} s"


def asking(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    drawn = Faults.drawn(seed)
    # More late messages than in other worlds: deadlines and ages are what this one is about.
    network = replace(drawn.network, slow_chance=5 * drawn.network.slow_chance)
    cluster = SimCluster(seed, replace(drawn, longest=4.0, network=network), traced=traced, calm=150.0)
    world = World(seed, cluster)

    def play(cluster: SimCluster) -> None:
        shape = world.shape
        for number in range(shape.replicas):
            name = f"server-{number}"
            cluster.start(name, lambda name=name: ServerProcess(world, name).run())
        for number in range(shape.clients):
            cluster.start(f"client-{number}", lambda number=number: ClientProcess(world, number).run())
        cluster.start("exporter", world.export)
        cluster.simulation.invariants.append(world.check_bounds)
        cluster.wait(done=world.is_over)
        world.stopping = True
        end = cluster.simulation.now + 60
        while left := [name for name, one in cluster.processes.items() if not one.finished]:
            assert cluster.simulation.now < end, f"{', '.join(left)} did not end in good order"
            concurrency.sleep(0.5)
        assert world.answered, "no request was answered"

    cluster.run(play)
    return cluster
