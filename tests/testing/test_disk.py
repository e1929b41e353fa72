"""The disk of a simulation keeps what was synced, and tears what was not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from monolith import concurrency
from monolith.errors import FilesystemError
from monolith.filesystem import (
    atomic_write,
    exists,
    glob,
    list_files,
    list_folders,
    make_dirs,
    open_database,
    read_bytes,
    remove,
    remove_tree,
    rename,
)
from monolith.testing.disk import DiskFaults, SimDisk
from monolith.testing.scheduler import SimMachine, Simulation


class World:
    def __init__(self, seed: int = 0, faults: DiskFaults | None = None) -> None:
        self.simulation = Simulation(seed)
        self.disk = SimDisk(self.simulation, faults)

    def machine(self, name: str) -> SimMachine:
        found = self.simulation.machine(name)
        self.disk.attach(found)
        return found

    def run(self, play: Callable[[], object]) -> None:
        self.simulation.run(lambda: self.machine("main").spawn(play).join())


def write(path: str, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def test_files_and_folders_are_made_listed_renamed_and_removed() -> None:
    def play() -> None:
        make_dirs("sim://run/a")
        write("sim://run/a/x", b"one")
        write("sim://run/y", b"two")
        assert list_folders("sim://run") == ["sim://run/a"]
        assert list_files("sim://run") == ["sim://run/y"]
        assert read_bytes("sim://run/a/x") == b"one"
        assert [one.rpartition("/")[2] for one in glob("sim://run/*/x")] == ["x"]
        rename("sim://run/a", "sim://run/b")
        assert read_bytes("sim://run/b/x") == b"one"
        remove("sim://run/y")
        remove_tree("sim://run/b")
        assert not exists("sim://run/b/x")

    World().run(play)


def test_a_machine_killed_while_it_writes_leaves_no_file_of_that_name() -> None:
    world = World(3)

    def play() -> None:
        make_dirs("sim://run")
        write("sim://run/x", b"old")
        writer = world.machine("writer")

        def work() -> None:
            with atomic_write("sim://run/x") as file:
                file.write(b"n" * 100)
                file.flush()
                concurrency.sleep(10)

        writer.spawn(work)
        concurrency.sleep(1)
        writer.kill()
        assert read_bytes("sim://run/x") == b"old"
        (torn,) = set(list_files("sim://run")) - {"sim://run/x"}
        assert len(read_bytes(torn)) < 100

    world.run(play)


def test_synced_bytes_survive_a_kill() -> None:
    world = World(4)

    def play() -> None:
        make_dirs("sim://run")
        writer = world.machine("writer")
        writer.spawn(lambda: write("sim://run/x", b"new")).join()
        writer.kill()
        assert read_bytes("sim://run/x") == b"new"

    world.run(play)


def test_a_full_disk_refuses_the_file_as_a_whole() -> None:
    def play() -> None:
        make_dirs("sim://run")
        with pytest.raises(FilesystemError, match="disk is full"):
            write("sim://run/x", b"1234")
        assert list_files("sim://run") == []

    World(0, DiskFaults(free_bytes=3)).run(play)


def test_a_failing_device_is_an_error_that_names_the_path() -> None:
    def play() -> None:
        make_dirs("sim://run")
        with pytest.raises(FilesystemError, match="sim://run/x"):
            write("sim://run/x", b"1")

    World(0, DiskFaults(error_chance=1.0)).run(play)


def count_rows(synchronous: str) -> list[int]:
    """Return how many of 4 committed rows each of some seeds finds after a kill."""
    found = []
    for seed in range(20):
        world = World(seed)

        def play(world: World = world) -> None:
            writer = world.machine("writer")

            def work() -> None:
                database = open_database("sim://x")
                database.execute(f"PRAGMA synchronous = {synchronous}")
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("CREATE TABLE IF NOT EXISTS t (a)")
                (first,) = database.execute("SELECT count(*) FROM t").fetchone()
                for row in range(first, 4):
                    database.execute("BEGIN")
                    database.execute("INSERT INTO t VALUES (?)", (row,))
                    database.execute("COMMIT")
                database.execute("BEGIN")
                database.execute("INSERT INTO t VALUES (9)")  # never committed

            writer.spawn(work).join()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                open_database("sim://x")
            writer.kill()
            database = open_database("sim://x")
            (known,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            found.append(database.execute("SELECT a FROM t").fetchall() if known else [])
            database.close()

        world.run(play)
    assert all(rows == [(row,) for row in range(len(rows))] for rows in found)
    return [len(rows) for rows in found]


def test_a_database_keeps_whole_transactions_and_with_full_syncs_all_of_them() -> None:
    assert set(count_rows("FULL")) == {4}
    assert set(count_rows("NORMAL")) == {0, 1, 2, 3, 4}
