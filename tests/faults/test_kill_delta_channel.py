"""A copy that follows over a wire that loses, repeats, reorders and delays, while both ends are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from services import warm
from services.faulty_flight import FaultyProxy
from services.servers import free_port

pytest.importorskip("pyarrow.flight")

TESTS = Path(__file__).parents[1]


class SyncProcess:
    """A publisher or a subscriber, see `sync.sync_process`."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self._process = self._started()

    def _started(self) -> warm.Popen:
        return warm.Popen(
            ["-m", "sync.sync_process", *self._words], cwd=TESTS, stdin=warm.PIPE, stdout=warm.PIPE
        )

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._words} has ended"
        return str(line).strip()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def restart(self) -> None:
        """Kill it with SIGKILL, and start another."""
        self.close()
        self._process = self._started()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("ids", "kills", "steps"),
    [(2_000, 2, 6), pytest.param(1_000_000, 10, 200, marks=pytest.mark.soak)],
)
def test_after_quiet_the_copy_has_what_is_published_and_nothing_else(
    stack: ExitStack, tmp_path: Path, ids: int, kills: int, steps: int
) -> None:
    port = free_port()
    proxy = FaultyProxy(f"127.0.0.1:{port}", chance=0.05, seed=1)
    stack.callback(proxy.close)
    publisher = SyncProcess("publish", str(port), str(ids), str(tmp_path / "published.npz"))
    stack.callback(publisher.close)
    follower = SyncProcess("follow", proxy.address, str(tmp_path / "followed.npz"))
    stack.callback(follower.close)
    for _ in range(kills):
        for victim in (publisher, follower):
            for _ in range(steps):
                publisher.hear()
            victim.restart()
    for _ in range(steps):
        publisher.hear()
    publisher.say("enough")
    while " " not in (place := publisher.hear()):
        pass
    follower.say(place)
    assert follower.hear() == "reached"
    published, followed = np.load(tmp_path / "published.npz"), np.load(tmp_path / "followed.npz")
    assert len(published["ids"]) > 100
    assert np.array_equal(published["ids"], followed["ids"])
    assert np.array_equal(published["values"], followed["values"])
    assert proxy.faults > 5
