"""The data service over loopback: every record to one trainer, once; and who is let in."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from data.service.loopback import add_worker, numbers, read, trainer, until
from data.service.processes import ALL, CONFIG, SPLITS, Counting, open_split

from monolith.cluster.security import Guard, SecurityConfig, guard_caller
from monolith.config import Secret
from monolith.data import Epochs, Shard
from monolith.data.service import DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.data.service.messages import DataCaller
from monolith.errors import (
    ConfigError,
    DataError,
    ListenError,
    NotRepeatableError,
    OutOfMemoryError,
    RestoreError,
    ShutOutError,
)
from monolith.wire.ports import Limits

pytest.importorskip("pyarrow")


def token_guard(token: str) -> Guard:
    return Guard(token=Secret(token))


@pytest.fixture
def tls(certificates) -> SecurityConfig:
    return SecurityConfig(
        cert=certificates / "ca-node.crt", key=certificates / "ca-node.key", ca=certificates / "ca.crt"
    )


def test_two_trainers_and_two_workers_divide_an_epoch(stack, dispatcher):
    for _ in range(2):
        add_worker(stack, dispatcher)
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(read, [trainer(dispatcher, "one"), trainer(dispatcher, "two")]))
    assert sorted(shares[0] + shares[1]) == ALL
    assert all(shares), "both had something to do"
    status = dispatcher.status()
    assert (status["over"], status["records"], len(status["workers"])) == (True, len(ALL), 2)


def test_a_dispatcher_without_memory_for_a_call_is_to_end(stack, tmp_path, monkeypatch):
    def full(_):
        raise MemoryError("chunks")

    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path)))
    monkeypatch.setattr(dispatcher._job, "register", full)
    caller = stack.enter_context(DataCaller(dispatcher.address))
    with pytest.raises(OutOfMemoryError, match=r"no memory left, and ends"):
        caller.call("register", worker="127.0.0.1:1")
    with pytest.raises(OutOfMemoryError, match=r"the dispatcher .* has no memory left: chunks"):
        dispatcher.status()


def test_texts_arrive_with_their_records(stack, dispatcher):
    add_worker(stack, dispatcher)
    some = next(iter(trainer(dispatcher)))
    assert some.strings("text") == [[b"x" * (number % 3)] for number in numbers(some)]


def test_every_epoch_delivers_everything_once(stack, tmp_path):
    dispatcher = stack.enter_context(Dispatcher(replace(CONFIG, epochs=3), folder=str(tmp_path)))
    add_worker(stack, dispatcher, chunk_records=50)
    assert sorted(read(trainer(dispatcher))) == sorted(ALL * 3)


def test_how_often_it_is_read_is_said_to_the_service_and_not_to_its_source():
    with pytest.raises(NotRepeatableError, match=r"counts epochs itself.*to the dispatcher as --epochs"):
        DataServiceSource("127.0.0.1:1", "trainer").read_epochs(Epochs(count=2))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_restoring_delivers_the_same_chunks_in_the_same_order(stack, dispatcher, at):
    add_worker(stack, dispatcher)
    source = trainer(dispatcher)
    chunks, positions = [], [source.position()]
    for some in itertools.islice(source, 8):
        chunks.append(numbers(some))
        positions.append(json.loads(json.dumps(source.position())))
    again = trainer(dispatcher)
    again.restore(positions[at])
    assert [numbers(some) for some in itertools.islice(again, 8 - at)] == chunks[at:]
    rest = read(again)
    assert sorted([number for chunk in chunks for number in chunk] + rest) == ALL


def test_stopping_early_and_iterating_again_continues(stack, dispatcher):
    add_worker(stack, dispatcher)
    source = trainer(dispatcher)
    seen = [number for some in itertools.islice(source, 3) for number in numbers(some)]
    assert sorted(seen + read(source)) == ALL
    assert read(source) == []


def test_a_worker_stops_reading_while_no_trainer_fetches(stack, dispatcher):
    counts: list[int] = []
    worker = DataWorker(
        dispatcher.address,
        lambda split: Counting(split, counts),
        DataWorkerConfig(readers=2, buffer_chunks=3, chunk_records=7),
    )
    stack.enter_context(worker)
    until(lambda: dispatcher.status()["chunks_waiting"] >= 3)
    caller = stack.enter_context(DataCaller(dispatcher.address))
    for _ in range(3):  # what it could do by now, it has done
        caller.call("renew", worker=worker.address, leases=[])
    assert sum(counts) <= (3 + 2 * 2) * 7
    assert sorted(read(trainer(dispatcher))) == ALL
    assert sum(counts) == len(ALL), "and nothing was read twice"


def test_two_processes_cannot_be_one_trainer(stack, dispatcher):
    add_worker(stack, dispatcher)
    old = iter(trainer(dispatcher, prefetch=1))
    next(old)
    assert sorted(read(trainer(dispatcher))) == ALL
    with pytest.raises(ShutOutError, match="shut out"):  # a run joins again, which tells whether it may
        list(old)


def test_acknowledging_lets_the_dispatcher_forget(stack, tmp_path):
    dispatcher = stack.enter_context(Dispatcher(replace(CONFIG, keep_acknowledged=0), folder=str(tmp_path)))
    add_worker(stack, dispatcher)
    source = trainer(dispatcher)
    early = source.position()
    source.acknowledge(early)
    list(itertools.islice(source, 3))
    source.acknowledge(source.position())
    assert dispatcher.status()["trainers"]["one"]["acknowledged"] == 3
    source.restore(early)
    with pytest.raises(RestoreError, match="forgotten"):
        list(source)


def test_positions_of_others_are_refused(dispatcher):
    source = trainer(dispatcher)
    with pytest.raises(RestoreError, match="the position is of 'two'"):
        source.restore(trainer(dispatcher, "two").position())
    with pytest.raises(RestoreError, match="not a position"):
        source.restore({"kind": "list"})
    source.restore({"kind": "data_service", "job": "other", "trainer": "one", "turn": 0})
    with pytest.raises(RestoreError, match="position in job other"):
        list(source)


def test_another_number_of_trainers_is_given_what_was_not_saved(stack, dispatcher):
    """Several times, and some of the runs are killed before they have saved anything."""
    add_worker(stack, dispatcher, chunk_records=5)

    def some(workers, positions, chunks):
        found, stands = [], []
        for worker in range(workers):
            source = trainer(dispatcher, prefetch=1)
            source.read_shard(Shard(worker, workers))
            if positions:
                source.restore(positions[worker])
            for records in itertools.islice(source, chunks):
                found += numbers(records)
            stands.append(json.loads(json.dumps(source.position())))
        return found, stands

    def moved(positions, workers):
        chief = trainer(dispatcher)
        chief.read_shard(Shard(0, workers))
        return chief.redistribute(positions, workers)

    first, saved = some(2, None, 3)
    some(3, moved(saved, 3), 2)
    second, saved = some(3, moved(saved, 3), 2)
    some(4, moved(saved, 4), 1)
    third, saved = some(1, moved(saved, 1), 4)
    rest, _ = some(2, moved(saved, 2), None)
    assert sorted(first + second + third + rest) == ALL


def test_what_a_process_outside_of_the_run_took_is_read_again(stack, dispatcher):
    """An earlier attempt of worker 1 was cut off. It attaches when all others have read their data."""
    add_worker(stack, dispatcher, chunk_records=5)
    chief, stale = (trainer(dispatcher, prefetch=1) for _ in range(2))
    chief.read_shard(Shard(0, 3))
    stale.read_shard(Shard(1, 3))
    other = trainer(dispatcher, prefetch=1)
    other.read_shard(Shard(2, 3))
    taken = numbers(next(iter(stale)))
    seen = numbers(next(iter(other))) + read(chief)
    assert not set(taken) & set(seen)
    assert chief.take_back([other.position()])
    seen += read(chief)
    assert sorted(seen) == ALL
    assert not chief.take_back([other.position()])


def test_work_of_other_jobs_stays_with_them(stack, dispatcher):
    add_worker(stack, dispatcher, chunk_records=5)
    next(iter(trainer(dispatcher, "another")))
    chief = trainer(dispatcher)
    read(chief)
    assert not chief.take_back([])


@pytest.mark.parametrize("end", [DataServiceSource.interrupt, DataServiceSource.close])
def test_a_trainer_that_ends_does_not_attach_later(end):
    """Its call to a dispatcher that does not answer is repeated for as long as `patience` says."""
    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as pool:
        mute.settimeout(20)
        source = trainer("{}:{}".format(*mute.getsockname()), patience=timedelta(hours=1))
        reading = pool.submit(read, source)
        mute.accept()[0].close()  # it calls, and is not answered
        end(source)
        mute.close()
        assert reading.result(timeout=20) == []


def test_a_split_that_cannot_be_read_is_an_error_at_the_trainer(stack, dispatcher):
    def broken(split):
        if split == SPLITS[2]:
            raise OSError("the disk is on fire")
        return open_split(split)

    stack.enter_context(DataWorker(dispatcher.address, broken))
    seen = []
    with pytest.raises(DataError, match="split '2' could not be read, 3 times: OSError: the disk is on fire"):
        seen += [some.size for some in trainer(dispatcher)]


def test_a_split_that_changed_is_an_error_not_other_records(stack, dispatcher):
    shrunk = threading.Event()

    def shrinking(split):
        return open_split(split) if not shrunk.is_set() else iter_nothing()

    def iter_nothing():
        source = open_split("0")
        source.restore({"kind": "list", "next": 1000})
        source.restore = lambda _: None
        return source

    worker = stack.enter_context(DataWorker(dispatcher.address, shrinking, DataWorkerConfig(chunk_records=5)))
    caller = stack.enter_context(DataCaller(worker.address))
    until(lambda: dispatcher.status()["chunks"] > 0)
    ticket = {"job": dispatcher.status()["job"], "epoch": 0, "number": 0, "sequence": 0}
    assert caller.fetch(ticket).num_rows == 5
    shrunk.set()
    with pytest.raises(DataError, match=r"5 records were read at .* before, now there are 0"):
        caller.fetch(ticket)


@pytest.mark.parametrize("wrong", [{"job": "other"}, {"epoch": 9}, {"number": 99}, {"sequence": 1 << 40}])
def test_a_chunk_that_the_dispatcher_does_not_know_is_not_read(stack, dispatcher, wrong):
    worker = add_worker(stack, dispatcher)
    ticket = {"job": dispatcher.status()["job"], "epoch": 0, "number": 0, "sequence": 0, **wrong}
    with pytest.raises(DataError, match="this job has no chunk"):
        stack.enter_context(DataCaller(worker.address)).fetch(ticket)


def test_no_call_waits_longer_than_the_dispatcher_allows(stack, tmp_path):
    limits = Limits(wait=timedelta(milliseconds=50))
    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path), limits=limits))
    caller = stack.enter_context(DataCaller(dispatcher.address))
    for split in range(len(SPLITS)):
        assert caller.call("lease", worker="w", wait=1e9)["lease"]["number"] == split
    assert caller.call("lease", worker="w", wait=1e9)["lease"] is None
    session = caller.call("attach", trainer="t", job=None, turn=0)["session"]
    assert caller.call("turns", trainer="t", session=session, turn=0, most=1, wait=1e9)["chunks"] == []


def test_the_state_of_a_job_is_for_its_owner_alone(stack, tmp_path):
    stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path / "job")))
    for file in (tmp_path / "job").iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


def test_without_the_token_calls_are_refused(stack, tmp_path):
    right = token_guard("secret")
    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path), guard=right))
    for wrong in (None, token_guard("Secret"), token_guard("secre")):
        said = "refused the shared token" if wrong is None else "does not have this run's token"
        with pytest.raises(ConfigError, match=said):
            DataWorker(dispatcher.address, open_split, guard=wrong)
        with pytest.raises(ConfigError, match=said):
            list(trainer(dispatcher, guard=wrong))
    worker = add_worker(stack, dispatcher, guard=right, chunk_records=100)
    with pytest.raises(ConfigError, match="does not have this run's token"):
        stack.enter_context(DataCaller(worker.address, guard=token_guard("other"))).fetch({})
    assert sorted(read(trainer(dispatcher, guard=right))) == ALL


def test_with_certificates_every_record_arrives_and_calls_without_are_refused(stack, tls, tmp_path):
    guard = guard_caller(replace(tls, token=Secret("secret")))
    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path), guard=guard))
    add_worker(stack, dispatcher, guard=guard)
    assert sorted(read(trainer(dispatcher, guard=guard))) == ALL
    with pytest.raises(DataError, match=r"no answer from .*, or it expects other certificates"):
        list(trainer(dispatcher, patience=timedelta()))
    with pytest.raises(ConfigError, match="refused the shared token"):
        list(trainer(dispatcher, guard=guard_caller(tls)))


def test_a_dispatcher_that_cannot_be_trusted_is_named_at_once(stack, dispatcher, tls, certificates, tmp_path):
    patient = {"patience": timedelta(minutes=5)}
    with pytest.raises(ConfigError, match="is not trusted: it speaks no TLS"):
        list(trainer(dispatcher, guard=guard_caller(tls), **patient))
    strange = replace(tls, cert=certificates / "other-node.crt", key=certificates / "other-node.key")
    other = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path / "2"), guard=guard_caller(strange)))
    with pytest.raises(ConfigError, match="another authority than ours signed its certificate"):
        list(trainer(other, guard=guard_caller(tls), **patient))
    ours = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path / "3"), guard=guard_caller(tls)))
    with pytest.raises(ConfigError, match="its certificate is of another name"):
        list(trainer(ours, guard=guard_caller(replace(tls, server_name="somebody")), **patient))


def test_an_ipv6_address_is_advertised_in_brackets(stack, tmp_path):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path), host="::1"))
    assert dispatcher.address == f"[::1]:{dispatcher.port}"
    worker = add_worker(stack, dispatcher, host="::1")
    assert worker.address == f"[::1]:{worker.port}"
    assert sorted(read(trainer(dispatcher))) == ALL


def test_a_taken_port_is_an_error_that_says_so(dispatcher, tmp_path):
    with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{dispatcher.port}: the port is in use"):
        Dispatcher(CONFIG, folder=str(tmp_path / "other"), port=dispatcher.port)
    with pytest.raises(ListenError, match="the port is in use"):
        DataWorker(dispatcher.address, open_split, port=dispatcher.port)
    with pytest.raises(ListenError, match="from 0 to 65535"):
        Dispatcher(CONFIG, folder=str(tmp_path / "other"), port=70000)
    Dispatcher(CONFIG, folder=str(tmp_path / "other")).close()  # the folder was let go of


def test_servers_listen_on_loopback_only_and_free_their_ports(stack, dispatcher):
    worker = add_worker(stack, dispatcher)
    assert worker.address.startswith("127.0.0.1:")
    worker.close()
    worker.close()
    dispatcher.close()
    dispatcher.close()
    for port in (worker.port, dispatcher.port):
        with socket.create_server(("127.0.0.1", port)):
            pass
