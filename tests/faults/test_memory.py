"""Memory over time: a worker that trains on a live stream with constant rows takes no more of it.

`SOAK_MINUTES=60` runs for an hour; by default it is some minutes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.fleet_processes import MEMBERS, LaunchedFleet

_log = logging.getLogger(__name__)

WATCHED = [MEMBERS[0], MEMBERS[2]]
MINUTES = float(os.environ.get("SOAK_MINUTES", "6"))
MOST_MB = 6.0
"""Growth within a third of the time. Metric windows that kept tiny batches took 1.6 MB a minute."""
CONFIG = """
[data]
watch = "{folder}/logs/*.csv"
max_wait = "5ms"

[features.user]
kind = "string"

[features.movie]
kind = "int"

[labels.click]

[examples]
event_time = "time"

[model]
type = "deepfm"
dim = 4
hidden = [8]

[train]
save = {{ secs = 20 }}

[publish]
to = "{folder}/deltas"
keep_bytes = 1048576
"""


class LiveFleet(LaunchedFleet):
    """A server and a worker that train what is appended to a file, by a config file."""

    SHAPE = ("--num-ps", "1", "--num-workers", "1")
    members = WATCHED

    def command(self, *more: str) -> list[str]:
        config = self._folder / "live.toml"
        config.write_text(CONFIG.format(folder=self._folder))
        return [
            *("-m", "monolith", "train", "--config", str(config), "--model-dir", str(self.model_dir)),
            *(*self.SHAPE, "--threads", "1", "--quiet", "--log-level", "info", *self._flags, *more),
        ]

    def resident_mb(self, place: tuple[str, int]) -> float:
        lines = Path(f"/proc/{self.pid(place)}/status").read_text().splitlines()
        (anonymous,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
        return int(anonymous) / 1024


@contextmanager
def events(path: Path) -> Iterator[None]:
    """Append an event at a time, which then is a batch of its own. The same IDs come again and again."""
    stopped = threading.Event()

    def write() -> None:
        with path.open("a", buffering=1) as file:
            file.write("user,movie,time,click\n")
            number = 0
            while not stopped.wait(0.02):
                number += 1
                user, movie = number * 7919 % 200, number * 104729 % 100
                file.write(f"u{user},{movie},{int(time.time())},{int(user % 2 == movie % 2)}\n")

    path.parent.mkdir()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.mark.soak
def test_a_worker_of_a_live_stream_with_constant_rows_takes_no_more_memory(tmp_path: Path) -> None:
    seen: dict[tuple[str, int], list[float]] = {place: [] for place in WATCHED}
    with events(tmp_path / "logs" / "live.csv"), LiveFleet(tmp_path, 0) as fleet:
        fleet.wait_for_another_checkpoint()
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            assert fleet.launcher.poll() is None, fleet.output[-5000:]
            for place in WATCHED:
                seen[place].append(fleet.resident_mb(place))
            time.sleep(2)
    for place, sizes in seen.items():
        # A save takes memory for a moment, so that floors are compared: of the second and of the last third.
        third = len(sizes) // 3
        growth = min(sizes[2 * third :]) - min(sizes[third : 2 * third])
        line = " ".join(f"{one:.0f}" for one in sizes[:: max(len(sizes) // 30, 1)])
        _log.info("%s: %+.1f MB in %g minutes: %s", place, growth, MINUTES / 3, line)
        assert growth < MOST_MB, f"{place} grew: {line}"
