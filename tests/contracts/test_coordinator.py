"""Every coordinator keeps this contract: a session need not know which one it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from contracts.coordinators import CREWS, Crew, Process

from monolith.data import Shard
from monolith.errors import RetryableError
from monolith.runtime.coordinator import Outcome, Quiesced, Start
from monolith.train.hook import DATA_ENDED

SECONDS = 30.0
START = Start(step=7, positions=({"next": 1}, {"next": 2}, {"next": 3}))


class Thread(threading.Thread):
    """What runs meanwhile; `result` waits for it."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._run_it = run
        self._found: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._run_it()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(SECONDS)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._found


@pytest.fixture(params=CREWS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with CREWS[request.param]() as crew:
        yield crew


@pytest.fixture
def training(crew: Crew) -> Crew:
    """A crew that has begun, at step 7."""
    each(crew, lambda process: process.join(START))
    for process in crew:
        process.step = START.step
    return crew


def each(crew: Crew, call: Callable[[Process], Any]) -> list[Any]:
    """Make a call of all of them, at the same time: those in step wait for each other."""
    threads = [Thread(lambda one=one: call(one)) for one in crew]  # type: ignore[misc]
    return [thread.result() for thread in threads]


def step_of_each(crew: Crew) -> list[int]:
    """Have each take a step: one after the other, unless they take it together."""
    if crew[0].coordinator.membership.lockstep:
        return each(crew, Process.take_step)
    return [process.take_step() for process in crew]


class Meetings:
    """Lets processes meet the others between steps that they do not take, until it is closed.

    Args:
        leader: Meets with them once more then, where all do so together.
    """

    def __init__(self, *processes: Process, leader: Process | None = None) -> None:
        self._over = threading.Event()
        self._leader = leader
        self._threads = [Thread(lambda one=one: self._meet(one)) for one in processes]  # type: ignore[misc]

    def _meet(self, process: Process) -> str | None:
        while not self._over.wait(0.005):
            if (reason := process.at_step()) is not None:
                return reason
        return None

    def reasons(self) -> list[str | None]:
        """Wait until each was told to stop."""
        return [thread.result() for thread in self._threads]

    def __enter__(self) -> Meetings:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._leader is not None and self._leader.coordinator.membership.lockstep:
            self._leader.at_step()  # for which they wait
        for thread in self._threads:
            thread.join(SECONDS)


def test_the_first_one_leads_and_each_reads_a_share_of_its_own(crew: Crew) -> None:
    assert [one.coordinator.membership.is_chief for one in crew] == [True, *[False] * (len(crew) - 1)]
    assert [one.coordinator.membership.shard for one in crew] == [
        Shard(index, len(crew)) for index in range(len(crew))
    ]


def test_what_trains_the_weights_trains_those_of_the_model(crew: Crew) -> None:
    for process in crew:
        assert process.weights is not None
        trained = {id(weight) for group in process.weights.param_groups for weight in group["params"]}
        assert trained == {id(weight) for weight in process.model.weights().values()}


def test_a_checkpoint_keeps_rows_and_weights(crew: Crew) -> None:
    leader = crew[0]
    parts = leader.coordinator.placement.parts(leader.model, incremental=False, background=False)
    assert [part.name for part in parts] == ["tables", "dense"]
    assert leader.coordinator.placement.dense_part(leader.model).name == "dense"


def test_all_resume_from_the_step_that_the_leader_names(crew: Crew) -> None:
    assert each(crew, lambda process: process.join(START)) == [START] * len(crew)


def test_a_process_that_is_interrupted_while_it_waits_to_begin_has_nothing_to_do(crew: Crew) -> None:
    for process in crew[1:]:
        process.interrupted = True
        assert process.join(Start(step=0)) is None


def test_the_steps_of_all_are_counted_one_by_one(training: Crew) -> None:
    rounds = 2
    found = [step for _ in range(rounds) for step in step_of_each(training)]
    if training[0].coordinator.membership.lockstep:  # one step of all of them is one of the model
        assert found == [8] * len(training) + [9] * len(training)
    else:
        assert found == list(range(8, 8 + rounds * len(training)))


def test_a_process_that_waited_can_take_the_trained_weights_of_others(training: Crew) -> None:
    first, last = training[0], training[-1]
    for weight in first.model.weights().values():
        weight.grad = torch.ones_like(weight)
    step_of_each(training if first.coordinator.membership.lockstep else training[:1])
    last.coordinator.placement.refresh()
    trained = first.model.weights()
    assert all(torch.equal(weight, trained[name]) for name, weight in last.model.weights().items())


def test_without_requests_all_processes_train(training: Crew) -> None:
    assert each(training, Process.at_step) == [None] * len(training)
    assert [process.committed for process in training] == [[]] * len(training)


def quiesced(training: Crew) -> tuple[ExitStack, Quiesced | None]:
    """Quiesce all; the stack releases them."""
    stack = ExitStack()
    stack.enter_context(Meetings(*training[1:], leader=training[0]))
    return stack, stack.enter_context(training[0].quiesce())


def test_when_all_are_quiesced_the_leader_knows_their_steps(training: Crew) -> None:
    steps = step_of_each(training)
    stack, gathered = quiesced(training)
    with stack:
        assert gathered == Quiesced(step=max(steps), others=tuple(one.said for one in training[1:]))
        assert all(process.drained for process in training[1:]), "no update is under way"


def test_no_process_continues_while_a_snapshot_is_taken(training: Crew) -> None:
    leader, others = training[0], training[1:]
    went_on = [threading.Event() for _ in others]

    def meet_once(process: Process, event: threading.Event) -> None:
        while not process.drained:  # until it has heard of the halt
            process.at_step()
        event.set()

    threads = [Thread(lambda one=one: meet_once(*one)) for one in zip(others, went_on, strict=True)]  # type: ignore[misc]
    with leader.quiesce():
        assert not any(event.is_set() for event in went_on)
    leader.at_step()
    for thread in threads:
        thread.result()


def test_each_process_is_told_once_of_a_committed_checkpoint(training: Crew) -> None:
    stack, _ = quiesced(training)
    with stack:
        pass
    leader = training[0]
    leader.coordinator.committed(leader.said.position)

    while not all(process.committed for process in training[1:]):
        each(training, Process.at_step)
    each(training, Process.at_step)
    assert leader.committed == [], "it knows by itself"
    assert [one.committed for one in training[1:]] == [[one.said.position] for one in training[1:]]


def test_a_clean_end_is_one_for_all(training: Crew) -> None:
    leader, others = training[0], training[1:]
    looked: list[None] = []
    outcome = Outcome(reason=DATA_ENDED)
    left = [Thread(lambda one=one: one.end(outcome)) for one in others]  # type: ignore[misc]
    gathered = leader.coordinator.finish(outcome, leader.progress, lambda: looked.append(None))
    assert gathered == Quiesced(step=START.step, others=tuple(one.said for one in others))
    assert leader.coordinator.leave(outcome, leader.said) is False, "it has told its source itself"
    assert [thread.result() for thread in left] == [(None, True)] * len(others)
    assert all(process.coordinator.status().finished for process in training)


def test_a_process_that_is_stopped_stops_all_and_the_run_is_not_finished(training: Crew) -> None:
    leader, others = training[0], training[1:]
    outcome = Outcome(reason="SIGTERM", interrupted=True)
    with Meetings(*others) as meeting:
        gathering = Thread(lambda: leader.coordinator.finish(outcome, leader.progress, lambda: None))
        assert meeting.reasons() == ["SIGTERM"] * len(others)

    left = [Thread(lambda one=one: one.end(outcome)) for one in others]  # type: ignore[misc]
    assert gathering.result().others == tuple(one.said for one in others)
    leader.coordinator.leave(outcome, leader.said)
    for thread in left:
        thread.result()
    assert not any(process.coordinator.status().finished for process in others)


@pytest.mark.parametrize("who", [0, -1], ids=["the one that leads", "the last"])
def test_when_one_process_fails_all_stop(training: Crew, who: int) -> None:
    failing = training[who]
    failing.coordinator.leave(Outcome(failed=True, error=OSError("no disk")))
    for process in (one for one in training if one is not failing):
        meeting = Meetings(process)
        with pytest.raises(RetryableError, match="no disk"):
            meeting.reasons()


def test_failing_before_anything_began_is_no_error(crew: Crew) -> None:
    for process in crew:
        process.coordinator.leave(Outcome(failed=True))


def test_the_barrier_is_for_all_of_them(crew: Crew) -> None:
    assert crew[0].coordinator.barrier.capacity == len(crew)
