"""The job's state: leases, chunks and turns, without a network."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest

from monolith.data.service.job import DataJobConfig, Job, Place, SplitLease
from monolith.errors import ConfigError, DataError, RestoreError, ShutOutError

CONFIG = DataJobConfig(splits=("a", "b"), lease=timedelta(seconds=10))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def job(tmp_path, clock):
    job = Job(CONFIG, str(tmp_path), clock=clock)
    yield job
    job.close()


def cut(job: Job, lease: SplitLease, count: int) -> None:
    """Announce so many chunks of one record each."""
    for sequence in range(lease.sequence, lease.sequence + count):
        assert job.announce(lease.lease, sequence, Place({"at": sequence}), 1, Place({"at": sequence + 1}))


def ids(chunks):
    return [(chunk.epoch, chunk.split, chunk.sequence) for chunk in chunks]


def test_splits_are_leased_in_order_each_to_one_worker(job):
    first, second = job.lease("w"), job.lease("v")
    assert (first.split, second.split, job.lease("w")) == ("a", "b", None)


def test_a_silent_worker_loses_its_split_from_the_last_chunk_on(job, clock):
    old = job.lease("w")
    cut(job, old, 3)
    clock.now = 10.5
    new = job.lease("v")
    assert (new.split, new.sequence, new.place) == ("a", 3, Place({"at": 3}))
    assert not job.announce(old.lease, 3, Place({}), 1, Place({})), "the old lease is worth nothing"
    assert not job.finish(old.lease, 3)
    assert job.renew("w", [old.lease])[0] == [old.lease]
    cut(job, new, 1)


def test_a_chunk_is_announced_only_under_the_lease_that_its_holder_was_given(job):
    lease, other = job.lease("w"), job.lease("v")
    assert len({lease.lease, other.lease}) == 2
    assert all(len(one.lease) >= 32 for one in (lease, other)), "it cannot be guessed"
    shown = f"{job.status()} {job.renew('x', [])} {job.workers()}"
    assert lease.lease not in shown
    for guess in ("1", "0", "", "w", "lease-1", lease.lease[:-1], lease.lease.upper()):
        assert not job.announce(guess, 0, Place({}), 1, Place({}))
        assert not job.finish(guess, 0)
        job.fail(guess, "torn")
    cut(job, lease, 1)


def test_an_older_job_file_with_numeric_leases_is_resumed(tmp_path, clock):
    with closing(Job(CONFIG, str(tmp_path), clock=clock)) as job:
        job.lease("w")
    with closing(sqlite3.connect(tmp_path / "job.sqlite", isolation_level=None)) as old:
        schema = old.execute("SELECT sql FROM sqlite_master WHERE name = 'splits'").fetchone()[0]
        old.execute("ALTER TABLE splits RENAME TO new")
        old.execute(schema.replace("lease TEXT", "lease INTEGER"))
        old.execute("INSERT INTO splits SELECT * FROM new")
        old.execute("UPDATE splits SET lease = 7 WHERE lease IS NOT NULL")
        old.execute("INSERT INTO about VALUES ('last_lease', '7')")
    with closing(Job(CONFIG, str(tmp_path), clock=clock)) as job:
        assert job.lease("v").split == "b", "the worker of before has its lease for a while"
        clock.now += 11
        again = job.lease("v")
        assert again.split == "a"
        cut(job, again, 2)
        assert job.finish(again.lease, 2)


def test_a_renewed_lease_does_not_expire(job, clock):
    lease = job.lease("w")
    for now in (6.0, 12.0, 18.0):
        clock.now = now
        assert job.renew("w", [lease.lease]) == ([], [])
    assert job.lease("v").split == "b"


def test_a_worker_that_begins_again_gives_back_what_it_had(job):
    cut(job, job.lease("w"), 2)
    job.register("w")
    assert (job.lease("v").split, job.workers()) == ("a", ["v", "w"])


def test_announcing_again_changes_nothing_and_a_gap_is_refused(job):
    lease = job.lease("w")
    cut(job, lease, 2)
    assert job.announce(lease.lease, 1, Place({}), 1, Place({}))
    assert job.status()["chunks"] == 2
    with pytest.raises(DataError, match="2 is next"):
        job.announce(lease.lease, 3, Place({}), 1, Place({}))


def test_a_split_is_not_finished_while_chunks_of_it_are_missing(job):
    lease = job.lease("w")
    cut(job, lease, 2)
    assert not job.finish(lease.lease, 3), "the last announcement was lost with the power of this machine"
    again = job.lease("v")
    assert (again.split, again.sequence, again.place) == ("a", 2, Place({"at": 2}))


def test_a_chunk_goes_to_one_trainer_and_asking_again_gives_the_same(job):
    cut(job, job.lease("w"), 3)
    one, two = job.attach("one", None, 0), job.attach("two", None, 0)
    assert ids(job.turns("one", one, 0, 2)) == [(0, "a", 0), (0, "a", 1)]
    assert ids(job.turns("two", two, 0, 2)) == [(0, "a", 2)]
    assert ids(job.turns("one", one, 0, 2)) == [(0, "a", 0), (0, "a", 1)]
    assert ids(job.turns("one", one, 1, 2)) == [(0, "a", 1)]


def test_renewing_returns_the_chunks_without_a_trainer(job):
    lease = job.lease("w")
    cut(job, lease, 3)
    job.turns("one", job.attach("one", None, 0), 0, 2)
    assert job.renew("w", [lease.lease]) == ([], [(0, 0, 2)])


def test_the_end_is_when_all_is_read_and_given_epoch_after_epoch(tmp_path):
    job = Job(replace(CONFIG, epochs=2), str(tmp_path))
    session = job.attach("one", None, 0)
    for expected in [(0, "a"), (0, "b"), (1, "a"), (1, "b")]:
        lease = job.lease("w")
        assert (lease.epoch, lease.split, lease.sequence) == (*expected, 0)
        cut(job, lease, 1)
        assert job.finish(lease.lease, 1)
        assert not job.is_over()
    assert ids(job.turns("one", session, 0, 9)) == [(0, "a", 0), (0, "b", 0), (1, "a", 0), (1, "b", 0)]
    assert job.is_over()


def test_a_repeated_attach_that_arrives_late_shuts_nobody_out(job):
    cut(job, job.lease("w"), 3)
    job.attach("one", None, 0, "first")
    job.turns("one", "first", 0, 1)
    assert job.attach("one", None, 0, "first") == "first", "the same call, whose answer was lost"
    job.attach("one", None, 0, "second")
    with pytest.raises(ShutOutError, match="shut out"):
        job.attach("one", None, 0, "first")
    assert ids(job.turns("one", "second", 0, 1)) == [(0, "a", 0)]


def test_a_trainer_restored_to_a_turn_gets_the_same_chunks(job):
    cut(job, job.lease("w"), 4)
    before = job.turns("one", job.attach("one", None, 0), 0, 3)
    session = job.attach("one", job.id, 1)
    assert job.turns("one", session, 1, 2) == before[1:]


def test_an_older_process_of_the_same_trainer_is_shut_out(job):
    old = job.attach("one", None, 0)
    job.attach("one", None, 0)
    with pytest.raises(ShutOutError, match="shut out"):
        job.turns("one", old, 0, 1)


def test_what_a_dead_trainer_did_not_acknowledge_goes_to_others(tmp_path, clock):
    job = Job(replace(CONFIG, trainer_timeout=timedelta(seconds=5)), str(tmp_path), clock=clock)
    cut(job, job.lease("w"), 4)
    one, two = job.attach("one", None, 0), job.attach("two", None, 0)
    job.turns("one", one, 0, 3)
    job.acknowledge("one", 1)
    clock.now = 4
    job.turns("two", two, 0, 0)
    clock.now = 6
    assert ids(job.turns("two", two, 0, 9)) == [(0, "a", 1), (0, "a", 2), (0, "a", 3)]
    with pytest.raises(ShutOutError, match="shut out"):
        job.turns("one", one, 3, 1)
    with pytest.raises(RestoreError, match="went to other trainers"):
        job.attach("one", job.id, 3)
    job.attach("one", job.id, 1)


def test_what_is_acknowledged_is_forgotten_after_a_while(tmp_path):
    job = Job(replace(CONFIG, keep_acknowledged=1), str(tmp_path))
    cut(job, job.lease("w"), 4)
    job.turns("one", job.attach("one", None, 0), 0, 4)
    job.acknowledge("one", 3)
    job.acknowledge("one", 1)
    job.attach("one", job.id, 2)
    with pytest.raises(RestoreError, match="has turns 2 to 4 of it; its chunks were forgotten"):
        job.attach("one", job.id, 1)
    with pytest.raises(RestoreError, match="cannot resume from turn 0"):
        job.attach("one", None, 0)


def test_a_position_of_another_job_is_refused(job):
    with pytest.raises(RestoreError, match="a position in job deadbeef"):
        job.attach("one", "deadbeef", 0)


def test_a_split_that_cannot_be_read_fails_the_job_after_some_attempts(job):
    session = job.attach("one", None, 0)
    for _ in range(3):
        lease = job.lease("w")
        assert lease.split == "a"
        job.fail(lease.lease, "torn")
    assert job.lease("w").split == "b"
    with pytest.raises(DataError, match="split 'a' could not be read, 3 times: torn"):
        job.turns("one", session, 0, 1)
    assert job.status()["failed"] == {"a": "torn"}


def test_all_of_it_survives_on_disk(tmp_path, clock):
    job = Job(CONFIG, str(tmp_path), clock=clock)
    lease = job.lease("w")
    cut(job, lease, 3)
    session = job.attach("one", None, 0)
    given = job.turns("one", session, 0, 2)
    with pytest.raises(DataError, match="another dispatcher"):
        Job(CONFIG, str(tmp_path))
    status = job.status()
    job.close()

    clock.now = 1000.0
    again = Job(CONFIG, str(tmp_path), clock=clock)
    assert again.status() == status
    assert again.renew("w", [lease.lease])[0] == [], "the worker has not been silent to this one"
    assert again.turns("one", session, 0, 2) == given
    cut(again, replace(lease, sequence=3), 1)
    again.close()
    with pytest.raises(RestoreError, match="Another job needs another folder"):
        Job(replace(CONFIG, splits=("a",)), str(tmp_path))


@pytest.mark.parametrize(
    "wrong", [{"splits": ()}, {"splits": ("a", "a")}, {"epochs": 0}, {"lease": timedelta()}, {"attempts": 0}]
)
def test_a_config_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="data service"):
        replace(CONFIG, **wrong)
