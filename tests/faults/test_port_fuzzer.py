"""Damaged messages at every port of a run: servers answer, or refuse, and go on. `make fuzz` does more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight")
pytest.importorskip("grpc")

from faults.port_fuzzer import CALLS, Mutator, fuzz

from monolith.runtime.messages import CALLS as FLEET_CALLS
from monolith.runtime.messages import STANDBY_CALLS


@pytest.mark.parametrize("seed", [1, 2])
def test_every_port_keeps_serving_whatever_it_is_sent(tmp_path: Path, seed: int) -> None:
    fuzzer = fuzz(5.0, seed, tmp_path)
    assert set(fuzzer.sent) >= {
        "dispatcher",
        "worker",
        "parameters",
        "serving",
        "deltas",
        "stream",
        "guarded",
        "control",
        "metrics",
    }
    assert fuzzer.outcomes["answered"] > 0
    assert fuzzer.outcomes["RequestError"] > 0


def test_a_seed_makes_the_same_messages_again() -> None:
    def messages() -> list[bytes]:
        mutate = Mutator(random.Random("7/1"))
        return [mutate.body(body) for calls in CALLS.values() for body in calls.values()]

    assert messages() == messages()
    assert len(set(messages())) > 10


def test_every_call_of_a_parameter_server_is_tried() -> None:
    known = FLEET_CALLS.keys() | STANDBY_CALLS.keys()
    assert set(CALLS["parameters"]) >= known - {"server.begin"}, "in a run it would refuse the others"
