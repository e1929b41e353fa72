"""The simulation of a job: small cases whose answer one can work out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from monolith_bench.scale_costs import Costs, DirectionCost
from monolith_bench.scale_simulation import SimulatedJob, Surroundings, simulate, upkeep

MS = 1e-3


def direction(**costs: float) -> DirectionCost:
    known: dict[str, Any] = dict.fromkeys(
        ("client_call", "client_request", "client_row", "server_request", "server_row", "table_row"), 0.0
    )
    return DirectionCost(**(known | {"bytes_up": 0, "bytes_down": 0} | costs))


def costs(**given: Any) -> Costs:
    known = {
        "lookup": direction(),
        "push": direction(),
        "call_client": 0.0,
        "call_server": 0.0,
        "fan_out_client": 0.0,
        "look_for_lost": 0.0,
        "wait_for_news": 0.0,
        "wake": 0.0,
        "delays": np.zeros(1),
        "row_bytes": 100.0,
        "saved_bytes": 100.0,
        "save_row": 0.0,
        "restore_row": 0.0,
        "connection_files": 2.0,
        "connection_bytes": 0.0,
        "connection_threads": 1.0,
    }
    return Costs(**(known | given))


JOB = SimulatedJob(workers=1, servers=1, compute=10 * MS, latency=0.0, bandwidth=1e12)


def median(found: Costs, job: SimulatedJob) -> float:
    return simulate(found, job).median / MS


def test_a_step_takes_as_long_as_its_longer_half_or_both_where_nothing_overlaps() -> None:
    found = costs(lookup=direction(server_request=3 * MS), push=direction(server_request=4 * MS))
    assert median(found, JOB) == pytest.approx(10)
    assert median(found, replace(JOB, compute=5 * MS)) == pytest.approx(7)
    assert median(found, replace(JOB, overlapped=False)) == pytest.approx(17)


def test_servers_work_at_the_same_time_and_a_worker_on_one_request_after_the_other() -> None:
    alone = replace(JOB, servers=8, compute=0.0)
    served = costs(lookup=direction(server_request=3 * MS))
    assert median(served, alone) == pytest.approx(3)
    asked = costs(lookup=direction(client_request=2 * MS))
    assert median(asked, alone) == pytest.approx(16)


def test_the_network_is_paid_for_there_and_back_and_by_the_byte() -> None:
    assert median(costs(), replace(JOB, latency=6 * MS, compute=0.0)) == pytest.approx(12)  # two exchanges
    found = costs(lookup=direction(bytes_up=8, bytes_down=64))
    job = replace(JOB, ids=100_000, bandwidth=1e9, compute=0.0)
    assert median(found, job) == pytest.approx(7.2, rel=0.01)


def test_workers_that_call_one_server_wait_for_each_other() -> None:
    found = costs(lookup=direction(server_request=3 * MS))
    job = replace(JOB, workers=10)
    steps = simulate(found, job)
    assert steps.busy == pytest.approx(1.0, abs=0.1)
    assert steps.examples_per_s == pytest.approx(job.examples / (3 * MS), rel=0.1)


def test_as_many_servers_as_workers_help_no_more_once_every_worker_asks_all() -> None:
    found = costs(lookup=direction(server_request=1 * MS))
    rates = [simulate(found, replace(JOB, workers=n, servers=n)).examples_per_s for n in (5, 50, 100)]
    assert rates[0] == pytest.approx(5 * JOB.examples / JOB.compute)
    assert rates[1] == pytest.approx(rates[2], rel=0.05)
    assert rates[1] == pytest.approx(JOB.examples / MS, rel=0.05)


def test_a_step_is_as_late_as_the_latest_of_all_answers() -> None:
    delays = np.zeros(100)
    delays[0] = 50 * MS  # one of a hundred
    found = costs(delays=delays)
    assert median(found, JOB) == pytest.approx(10)
    assert median(found, replace(JOB, servers=300)) == pytest.approx(100)  # in both exchanges
    assert median(found, replace(JOB, servers=300, late=False)) == pytest.approx(10)


def test_only_servers_that_have_rows_of_a_batch_are_asked() -> None:
    found = costs(lookup=direction(client_request=1 * MS))
    some = median(found, replace(JOB, servers=1000, ids=100, compute=0.0))
    assert some == pytest.approx(95, rel=0.2)


def test_the_same_seed_gives_the_same_steps() -> None:
    found = costs(lookup=direction(server_row=1e-6), delays=np.linspace(0, 0.1, 50))
    job = replace(JOB, workers=3, servers=4)
    assert simulate(found, job) == simulate(found, job)
    assert simulate(found, job) != simulate(found, replace(job, seed=1))


# Beside the steps


def test_rows_are_kept_saved_and_restored_in_equal_shares() -> None:
    around = Surroundings(storage=1e12, disk=1e9, cores=4, restart=30, notice=2, rejoin=5, save_every=600)
    job = replace(JOB, servers=100, workers=50)
    found = costs(save_row=4e-6, restore_row=1e-9)
    kept = upkeep(found, job, 1e9, simulate(found, JOB), around)
    assert kept.server_bytes == 1e9
    assert kept.save == pytest.approx(10.0)  # 1e7 rows, by four cores; the disk takes 1 s
    assert kept.keep_going == pytest.approx(2 + 30 + 1)
    assert kept.exact == pytest.approx(2 + 30 + 5 + 1 + 300, abs=0.1)
    assert kept.lost_updates == 0.01
    assert (kept.connections, kept.worker_files, kept.server_threads) == (2 * 50 * 100, 200.0, 50.0)


def test_storage_that_all_share_is_what_a_large_job_waits_for() -> None:
    around = Surroundings(storage=1e9, disk=1e9)
    steps = simulate(costs(), JOB)
    one = upkeep(costs(), JOB, 1e7, steps, around)
    many = upkeep(costs(), replace(JOB, servers=100), 1e9, steps, around)
    assert (one.save, many.save) == (1.0, 100.0)


def test_the_chief_s_calls_and_the_meeting_grow_with_the_job() -> None:
    found = costs(fan_out_client=1 * MS, call_server=0.5 * MS, look_for_lost=1e-6, wait_for_news=9e-6)
    kept = upkeep(
        found, replace(JOB, workers=1000, servers=1000), 1.0, simulate(costs(), JOB), Surroundings()
    )
    assert kept.fan_out == pytest.approx(1.0005)
    assert kept.halt == pytest.approx(0.010 + 0.5 + 1.0005)
    assert kept.meeting == pytest.approx(0.05)  # of a core
