"""Memory that runs short is said before it is gone. Faked: the files of Linux that say it, and the clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monolith.observe import MemoryUse, MemoryWatch, memory_use

MIB = 1 << 20


def files(folder: Path, **texts: str) -> Path:
    """Write files; a double underscore stands for a slash."""
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    meminfo = "MemTotal:    102400 kB\nMemFree:   1 kB\nMemAvailable:   40960 kB\nHugePages_Total:   0\n"
    return files(tmp_path / "proc", meminfo=meminfo, self__statm="9000 5000 10 1 0 1 0\n")


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else says")
def test_this_machine_says() -> None:
    use = memory_use()
    assert use is not None
    assert 0 < use.own <= use.limit
    assert 0 < use.share <= 1


def test_without_a_container_the_machine_is_the_limit(proc: Path, tmp_path: Path) -> None:
    use = memory_use(proc, files(tmp_path / "cgroup", **{"memory.max": "max\n"}))
    assert use is not None
    assert (use.used, use.limit) == (60 * MIB, 100 * MIB)


def test_the_limit_of_a_container_counts_and_files_it_caches_do_not(proc: Path, tmp_path: Path) -> None:
    two = {
        "memory.max": f"{50 * MIB}",
        "memory.current": f"{48 * MIB}",
        "memory.stat": f"anon 7\ninactive_file {MIB}",
    }
    one = {
        "memory__memory.limit_in_bytes": f"{50 * MIB}",
        "memory__memory.usage_in_bytes": f"{48 * MIB}",
        "memory__memory.stat": f"total_inactive_file {MIB}",
    }
    for version, texts in (("one", one), ("two", two)):
        use = memory_use(proc, files(tmp_path / version, **texts))
        assert use is not None
        assert (use.used, use.limit) == (47 * MIB, 50 * MIB)


def test_a_system_that_does_not_say_is_not_asked_again_in_vain(tmp_path: Path) -> None:
    assert memory_use(tmp_path, tmp_path) is None


class Watched:
    """A watch, a clock, and uses one after another."""

    def __init__(self, *used: int, own: int = 50) -> None:
        self.now = 0.0
        self._uses: Iterator[int] = iter(used)
        self._own = own
        self.watch = MemoryWatch(
            lambda: MemoryUse(self._own * MIB, next(self._uses) * MIB, 100 * MIB), clock=lambda: self.now
        )

    def look(self, after: float = 5.0) -> int:
        self.watch.look(lambda: "9 rows")
        self.now += after
        return self.watch.warnings


def test_nearing_the_limit_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    one = Watched(50, 60, 70, 86)
    assert [one.look() for _ in range(4)] == [0, 0, 0, 1]
    (message,) = caplog.messages
    for part in ("86 MiB of 100 MiB", "50 MiB of them by this process", "9 rows", "capacity_bytes"):
        assert part in message


def test_what_would_come_until_the_next_look_counts() -> None:
    one = Watched(50, 70)
    assert [one.look() for _ in range(2)] == [0, 1]


def test_it_is_said_again_only_after_a_while() -> None:
    one = Watched(*[90] * 300)
    assert [one.look(after=59.0) for _ in range(12)] == [1] * 11 + [2]


def test_looking_often_costs_nothing() -> None:
    one = Watched(50)
    assert [one.look(after=0.01) for _ in range(100)] == [0] * 100


def test_what_others_use_is_theirs_to_warn_of() -> None:
    assert Watched(95, own=4).look() == 0
