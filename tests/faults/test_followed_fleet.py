"""Three training shares that two serving shards follow, over a wire that loses, repeats, reorders and delays.

Everybody is killed, and the run goes back in the middle. After quiet the servers hold what is trained: no row
differs, and none is a ghost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.followed_fleet import DIM, LEAP_STEPS
from numpy.typing import NDArray
from services import warm
from services.faulty_flight import FaultyProxy
from services.servers import free_port

from monolith.table import FrozenSegment, write_frozen_table

pytest.importorskip("pyarrow.flight")

TESTS = Path(__file__).parents[1]
SHARES, SHARDS = 3, 2

HeldRows = tuple[NDArray[np.int64], NDArray[np.float32]]


class Member:
    """A process of the fleet, see `faults.followed_fleet`."""

    def __init__(self, *words: object) -> None:
        self._words = [str(word) for word in words]
        self._process = self._started()

    def _started(self) -> warm.Popen:
        return warm.Popen(
            ["-m", "faults.followed_fleet", *self._words], cwd=TESTS, stdin=warm.PIPE, stdout=warm.PIPE
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = str(self._process.stdout.readline())
        assert line, f"{self._words} has ended"
        return line.strip()

    def kill(self) -> None:
        """By SIGKILL; and start another in its place."""
        self.close()
        self._process = self._started()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


class Fleet:
    """All processes, the wires between them, and the export that servers begin with."""

    def __init__(self, stack: ExitStack, folder: Path, ids: int) -> None:
        self._folder = folder
        ports = [free_port() for _ in range(SHARES)]
        self.proxies = [FaultyProxy(f"127.0.0.1:{port}", chance=0.05, seed=port) for port in ports]
        for proxy in self.proxies:
            stack.callback(proxy.close)
        self.training = [Member("train", k, SHARES, port, ids, folder) for k, port in enumerate(ports)]
        for one in self.training:
            stack.callback(one.close)
        self.train(1)
        self.save()
        addresses = [proxy.address for proxy in self.proxies]
        self.serving = [Member("serve", shard, SHARDS, folder, *addresses) for shard in range(SHARDS)]
        for one in self.serving:
            stack.callback(one.close)

    def ask(self, line: str) -> list[str]:
        """Tell all that train, and return what they say."""
        for one in self.training:
            one.tell(line)
        return [one.hear() for one in self.training]

    def train(self, steps: int) -> None:
        self.ask(f"steps {steps}")

    def save(self) -> None:
        """Save the run, and export what it holds for servers that start from now on."""
        places = [said.split()[1:] for said in self.ask("save")]
        ids, values = self.rows("saved", SHARES)
        for shard in range(SHARDS):
            mine = ids.view(np.uint64) % SHARDS == shard
            path = str(self._folder / f"export{shard}.rows")
            write_frozen_table(path, [FrozenSegment(DIM, "fp32")], [(ids[mine], values[mine])], rows=len(ids))
        said = {str(share): [epoch, int(sequence)] for share, (epoch, sequence) in enumerate(places)}
        (self._folder / "places.json").write_text(json.dumps(said))

    def settle(self) -> list[dict[str, Any]]:
        """Have training stop, and servers come to where it is; return what each share says at the end."""
        said = [json.loads(one.split(maxsplit=1)[1]) for one in self.ask("enough")]
        for one in self.serving:
            one.tell(json.dumps({share: about["place"] for share, about in enumerate(said)}))
        for one in self.serving:
            assert (heard := one.hear()).startswith("reached"), heard
        return said

    def rows(self, name: str, parts: int) -> HeldRows:
        """Return rows that members wrote, in the order of their ids."""
        files = [np.load(self._folder / f"{name}{number}.npz") for number in range(parts)]
        ids = np.concatenate([file["ids"] for file in files])
        order = ids.argsort()
        return ids[order], np.concatenate([file["values"] for file in files])[order]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.soak
@pytest.mark.parametrize(("ids", "steps"), [(20_000, 3), (1_000_000, 60)])
def test_after_quiet_two_shards_serve_what_three_shares_train(
    stack: ExitStack, tmp_path: Path, ids: int, steps: int
) -> None:
    fleet = Fleet(stack, tmp_path, ids)
    for round_ in range(2):
        for members in zip(fleet.training, [*fleet.serving, None], strict=True):
            for victim in members:
                fleet.train(steps)
                if victim is not None:
                    victim.kill()
        fleet.save()
        fleet.train(steps)
        if round_ == 0:
            fleet.ask("rewind")
    fleet.train(2 * LEAP_STEPS)
    shares = fleet.settle()
    trained, served = fleet.rows("published", SHARES), fleet.rows("served", SHARDS)
    assert len(trained[0]) > ids // 50
    assert set(served[0]) - set(trained[0]) == set(), "ghosts"
    assert set(trained[0]) - set(served[0]) == set(), "missing rows"
    differing = trained[0][(trained[1] != served[1]).any(axis=1)]
    assert not len(differing), "differing rows"
    assert all(proxy.faults > 0 for proxy in fleet.proxies)
    assert all(about["expired"] > 0 and about["driven_out"] > 0 for about in shares), shares
