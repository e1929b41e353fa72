"""What programs without a token do to a run that publishes, and to a server that follows it."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from data.service.loopback import until
from services import warm
from sync.delta_channels import SmallPublisher
from sync.tables import make_table

from monolith.cli.serve_shards import guard_of_follower
from monolith.cluster.run_token import TOKEN_FILE, read_token
from monolith.cluster.security import Guard, SecurityConfig, derive_token
from monolith.config import Secret
from monolith.errors import ConfigError, RequestError
from monolith.sync import Subscriber, TableTarget
from monolith.sync.flight_channel import SERVICE, DeltaPort
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.wire.flight import Caller

flight = pytest.importorskip("pyarrow.flight")

TESTS = Path(__file__).parents[1]
PUBLISHED = re.compile(r"share 0 of 1 is published at grpc://(\S+)")
FILES = 256
"""The open files that the run of a test may have."""


class PublishingRun:
    """`monolith train` in one process, which publishes and saves, and was told nothing of security."""

    def __init__(self, stack: ExitStack, folder: Path, files: int = FILES) -> None:
        self.model_dir = folder / "m"
        self.log = folder / "err"
        words = (
            *("train", "train.tasks:Clicks", "--model-dir", str(self.model_dir), "--set", "batches=10000000"),
            *("--publish.to", "grpc://127.0.0.1:0", "--save-steps", "50", "--max-to-keep", "2"),
        )
        with self.log.open("w") as log:
            self.process = warm.Popen(
                ["-c", LIMITED.format(files=files, words=list(words))],
                stdout=warm.DEVNULL,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.address = ""
        until(self._is_published, 120)

    def _is_published(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        found = PUBLISHED.search(self.log.read_text())
        self.address = found[1] if found else ""
        return bool(found) and self.saves() > 0

    def saves(self) -> int:
        assert self.process.poll() is None, self.log.read_text()
        return len(re.findall(r"saved step \d+", self.log.read_text()))

    def peak(self) -> int:
        """Return the most bytes of memory it had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    @property
    def guard(self) -> Guard:
        return Guard(token=read_token(self.model_dir / TOKEN_FILE))


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
from monolith.cli.main import main
sys.exit(main({words!r}))
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublishingRun]:
    with ExitStack() as stack:
        yield PublishingRun(stack, tmp_path_factory.mktemp("run"))


def connect(stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    """Open connections that greet as HTTP/2 does and say no more."""
    host, _, port = address.rpartition(":")
    lines = []
    for _ in range(count):
        with suppress(OSError):  # the port may be full
            line = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            lines.append(line)
    return lines


def test_a_run_of_one_process_that_publishes_has_a_token_for_its_user_alone(run: PublishingRun) -> None:
    assert (run.model_dir / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"refused the shared token.*--token-file MODEL_DIR/run_token"):
        FlightDeltaReader([run.address]).logs()
    reader = FlightDeltaReader([run.address], guard=run.guard)
    assert len(reader.logs()) == 1
    reader.close()


def test_the_token_for_following_follows_and_one_for_predicting_does_not(run: PublishingRun) -> None:
    control = read_token(run.model_dir / TOKEN_FILE)
    follow = Guard(token=derive_token(control, "follow"), role="follow")
    reader = FlightDeltaReader([run.address], guard=follow)
    assert len(reader.logs()) == 1
    reader.close()
    predict = Guard(token=derive_token(control, "predict"), role="predict")
    with pytest.raises(ConfigError, match="refused the shared token"):
        FlightDeltaReader([run.address], guard=predict).logs()


def test_a_server_of_the_same_user_finds_the_token_of_the_run_by_itself(run: PublishingRun) -> None:
    inside = run.model_dir / "servables"
    found = guard_of_follower(SecurityConfig(), (f"clicks={inside}",))
    assert found.token == derive_token(read_token(run.model_dir / TOKEN_FILE), "follow")
    assert guard_of_follower(SecurityConfig(follow_token=Secret("own")), (str(inside),)).token == Secret(
        "own"
    )
    assert guard_of_follower(SecurityConfig(), ("/nowhere/servables",)).token is None


def test_a_run_saves_and_publishes_while_many_connections_to_its_port_say_nothing(run: PublishingRun) -> None:
    """Each cost two of its files, for good: the next save failed and ended the run."""
    with ExitStack() as stack:
        connect(stack, run.address, 2 * FILES)
        before = run.saves()
        until(lambda: run.saves() >= before + 3, 60)
        reader = FlightDeltaReader([run.address], guard=run.guard)
        assert len(reader.logs()) == 1
        reader.close()
        until(lambda: "limits.connections" in run.log.read_text(), 60)
    folder = Path(f"/proc/{run.process.pid}/fd")
    until(lambda: len(list(folder.iterdir())) < FILES - 64, 60)


@pytest.mark.soak
def test_a_run_outlives_twelve_hundred_silent_connections(stack: ExitStack, tmp_path: Path) -> None:
    run = PublishingRun(stack, tmp_path, files=1024)
    for _ in range(3):
        with ExitStack() as lines:
            connect(lines, run.address, 1200)
            before = run.saves()
            until(lambda before=before: run.saves() >= before + 3, 120)  # type: ignore[misc]


def test_a_large_json_call_costs_what_it_is_and_not_what_it_would_be_parsed(run: PublishingRun) -> None:
    """63 MB of JSON took 1.7 GB."""
    size = 63 << 20
    before = run.peak()
    with Caller(SERVICE, run.address, guard=run.guard) as caller:
        bomb = {"reader": [[]] * (size // 4)}
        with pytest.raises(RequestError, match=r"limits\.call_bytes allows 1,048,576"):
            caller.call("shares", **bomb)
    assert run.peak() - before < 5 * size
    saves = run.saves()
    until(lambda: run.saves() > saves, 60)


# A program that has taken the port


class Thief(flight.FlightServerBase):  # type: ignore[misc, name-defined]
    """Answers what a publisher of another model would, and keeps what it is sent."""

    def __init__(self, port: int, shares: list[Any]) -> None:
        self.seen: list[str] = []
        seen = self.seen

        class Headers(flight.ServerMiddlewareFactory):  # type: ignore[misc, name-defined]
            def start_call(self, info: Any, headers: Any) -> None:  # noqa: ARG002
                seen.append(repr(headers))

        super().__init__(f"grpc+tcp://127.0.0.1:{port}", middleware={"headers": Headers()})
        self._shares = shares

    def do_action(self, context: Any, action: Any) -> Any:  # noqa: ARG002
        self.seen.append(repr(action.body.to_pybytes()))
        return iter([flight.Result(json.dumps({"answer": {"shares": self._shares}}).encode())])


def test_a_program_that_takes_the_port_while_the_trainer_is_away_is_not_followed(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    token = Secret("a-secret-of-this-run")
    guard = Guard(token=token)
    port = DeltaPort(guard=guard)
    publisher = SmallPublisher(port.writer())
    publisher.publish(range(10))
    shares = Caller(SERVICE, port.address, guard=guard).call("shares", reader="r", model="")["shares"]
    target = TableTarget({"item": make_table()})
    subscriber = Subscriber(lambda: FlightDeltaReader([port.address], guard=guard), target, wait=0.1)
    stack.callback(subscriber.close)
    subscriber.start()
    until(lambda: subscriber.progress.get(0) is not None and subscriber.progress[0].snapshots > 0)
    place = subscriber.progress[0].position
    port.close()
    with caplog.at_level(logging.WARNING):
        thief = Thief(port.port, shares)
        try:
            until(lambda: "does not have this run's token" in subscriber.error)
        finally:
            thief.shutdown()
    assert token.reveal() not in "".join(thief.seen)
    assert subscriber.progress[0].position == place
    again = DeltaPort(port=port.port, guard=guard)
    stack.callback(again.close)
    other = SmallPublisher(again.writer(), epoch="e2")
    other.publish(range(20))
    until(lambda: subscriber.progress[0].snapshots > 1)


class Silent(flight.FlightServerBase):  # type: ignore[misc, name-defined]
    """Takes every call and answers nothing."""

    def __init__(self) -> None:
        super().__init__("grpc+tcp://127.0.0.1:0")
        self.calls = 0

    def do_action(self, context: Any, action: Any) -> Any:  # noqa: ARG002
        self.calls += 1
        return iter([] if self.calls % 2 else [flight.Result(b"%d" % self.calls)])


def test_a_publisher_that_answers_nothing_is_a_line_a_second_at_most(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Silent()
    stack.callback(silent.shutdown)
    reader = FlightDeltaReader([f"127.0.0.1:{silent.port}"])
    subscriber = Subscriber(lambda: reader, TableTarget({"item": make_table()}), wait=0.01)
    with caplog.at_level(logging.INFO):
        began = time.monotonic()
        subscriber.start()
        until(lambda: silent.calls > 30)
        subscriber.close()
    assert 1 <= len(caplog.records) <= 1 + (time.monotonic() - began)
    assert "sent no answer, or one that is not of this service" in caplog.text
    assert caplog.text.count("Traceback") == 0
