"""The data service when somebody is killed, goes away or never comes: nothing lost, nothing twice."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from data.service.loopback import SOON, add_process, add_worker, numbers, read, trainer, until
from data.service.processes import ALL, CONFIG, open_split

from monolith.cluster import DATA_DISPATCHER, MemoryDiscovery, locator
from monolith.data.service import DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.data.service.messages import DataCaller
from monolith.errors import DataError, DiscoveryError

pytest.importorskip("pyarrow")


def test_a_worker_killed_in_the_middle_costs_nothing(stack, dispatcher):
    victim, _ = add_process(stack, "worker", dispatcher.address)
    shares = iter(trainer(dispatcher))
    seen = [number for some in itertools.islice(shares, 6) for number in numbers(some)]
    until(lambda: dispatcher.status()["chunks_waiting"] >= 3)  # some are cut and with nobody
    victim.kill()
    victim.wait()
    add_worker(stack, dispatcher)
    seen += [number for some in shares for number in numbers(some)]
    assert sorted(seen) == ALL


def test_one_of_two_workers_killed_while_two_trainers_read(stack, dispatcher):
    victim, _ = add_process(stack, "worker", dispatcher.address)
    add_worker(stack, dispatcher, readers=1)
    with ThreadPoolExecutor(2) as pool:
        shares = [pool.submit(read, trainer(dispatcher, name)) for name in ("one", "two")]
        until(lambda: dispatcher.status()["chunks"] > 20)
        victim.kill()
    assert sorted(shares[0].result() + shares[1].result()) == ALL


def test_a_killed_trainer_resumes_from_its_saved_position(stack, dispatcher, tmp_path):
    add_worker(stack, dispatcher)
    checkpoint = tmp_path / "checkpoint.json"
    victim, line = add_process(stack, "trainer", dispatcher.address, "one", str(checkpoint))
    while line != "8":  # the last saved position is that of turn 6
        line = victim.stdout.readline().strip()
    victim.kill()
    victim.wait()
    saved = json.loads(checkpoint.read_text())
    assert saved["position"]["turn"] >= 6

    two = iter(trainer(dispatcher, "two"))
    others = [number for some in itertools.islice(two, 5) for number in numbers(some)]
    again = trainer(dispatcher, "one")
    again.restore(saved["position"])
    rest = read(again)
    others += [number for some in two for number in numbers(some)]
    assert sorted(saved["seen"] + rest + others) == ALL


def test_a_restarted_dispatcher_resumes(stack, tmp_path):
    folder = str(tmp_path / "job")
    victim, address = add_process(stack, "dispatcher", folder, "0")
    add_worker(stack, address)
    shares = iter(trainer(address))
    seen = [number for some in itertools.islice(shares, 5) for number in numbers(some)]
    victim.kill()
    victim.wait()
    add_process(stack, "dispatcher", folder, address.rpartition(":")[2])
    seen += [number for some in shares for number in numbers(some)]
    assert sorted(seen) == ALL


def test_a_dispatcher_at_another_address_is_found_by_asking(stack, tmp_path):
    folder, where = str(tmp_path / "job"), []
    first = Dispatcher(CONFIG, folder=folder)
    where.append(first.address)
    stack.enter_context(DataWorker(lambda: where[-1], open_split, DataWorkerConfig(chunk_records=5)))
    shares = iter(DataServiceSource(lambda: where[-1], "one", prefetch=1, patience=SOON))
    seen = numbers(next(shares))
    first.close()
    where.append(stack.enter_context(Dispatcher(CONFIG, folder=folder)).address)
    seen += [number for some in shares for number in numbers(some)]
    assert sorted(seen) == ALL


def test_an_unknown_dispatcher_is_waited_for_and_then_given_up(stack, tmp_path, caplog):
    registry = MemoryDiscovery()
    where = locator(registry, DATA_DISPATCHER)
    with pytest.raises(
        DataError, match="lost the dispatcher: no process is registered as dataservice_dispatcher 0"
    ):
        list(DataServiceSource(where, "one", patience=timedelta()))
    with pytest.raises(DataError, match="no process is registered as"):
        DataWorker(where, open_split, DataWorkerConfig(patience=timedelta()))
    with ThreadPoolExecutor(1) as pool:
        share = pool.submit(read, DataServiceSource(where, "one", patience=SOON))
        until(
            lambda: "no process is registered as dataservice_dispatcher 0; retrying for 20 s" in caplog.text
        )
        dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(tmp_path)))
        registry.register(DATA_DISPATCHER, 0, dispatcher.address)
        stack.enter_context(DataWorker(where, open_split, DataWorkerConfig(chunk_records=5)))
        assert sorted(share.result()) == ALL


def test_a_registry_that_refuses_is_no_reason_to_wait():
    def refuse():
        raise DiscoveryError("no such realm")

    with pytest.raises(DiscoveryError, match="no such realm"):
        list(DataServiceSource(refuse, "one"))


def test_a_closed_worker_gives_its_splits_back_at_once(stack, tmp_path):
    slow = replace(CONFIG, lease=timedelta(hours=1))
    dispatcher = stack.enter_context(Dispatcher(slow, folder=str(tmp_path)))
    with DataWorker(dispatcher.address, open_split, DataWorkerConfig(chunk_records=5, buffer_chunks=1)):
        until(lambda: dispatcher.status()["chunks_waiting"] > 0)
    add_worker(stack, dispatcher)
    assert sorted(read(trainer(dispatcher))) == ALL


def test_a_trainer_that_never_fetches_does_not_stop_other_trainers(stack, dispatcher):
    add_worker(stack, dispatcher, buffer_chunks=2)
    caller = stack.enter_context(DataCaller(dispatcher.address))
    session = caller.call("attach", trainer="dead", job=None, turn=0)["session"]
    taken: list[dict] = []
    while len(taken) < 12:
        taken += caller.call("turns", trainer="dead", session=session, turn=len(taken), most=4, wait=1.0)[
            "chunks"
        ]
    seen = read(trainer(dispatcher, "one"))
    assert len(seen) == len(ALL) - sum(chunk["size"] for chunk in taken)
    assert dispatcher.release("dead") == len(taken)
    assert sorted(seen + read(trainer(dispatcher, "two"))) == ALL


def test_a_worker_whose_dispatcher_stays_away_stops_with_the_reason(stack, dispatcher):
    worker = add_worker(stack, dispatcher, patience=timedelta(seconds=0.1))
    dispatcher.close()
    with pytest.raises(DataError, match="no answer"):
        worker.wait(20)


def test_a_trainer_without_data_workers_waits_and_then_says_so(stack, dispatcher):
    worker = add_worker(stack, dispatcher, readers=1, buffer_chunks=2)
    until(lambda: dispatcher.status()["chunks_waiting"] >= 2)
    worker.close()
    with pytest.raises(DataError, match="no data worker has chunk 0 of '0'; 0 are alive"):
        list(trainer(dispatcher, patience=timedelta(seconds=0.1)))


def test_a_missing_dispatcher_is_reported(dispatcher):
    gone = dispatcher.address
    dispatcher.close()
    with pytest.raises(DataError, match=f"lost the dispatcher: no answer from {gone}"):
        list(trainer(gone, patience=timedelta()))
    with pytest.raises(DataError, match="no answer"):
        DataWorker(gone, open_split, DataWorkerConfig(patience=timedelta()))
