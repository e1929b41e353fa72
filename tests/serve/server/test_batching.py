"""Requests that come while the model works are answered together, and nobody pays for another."""

import threading
import time
from datetime import timedelta

import pytest
from serve.server.linear import LinearAnswer, LinearModel, LinearSignature

from monolith.errors import DeadlineExceededError, OverloadedError, RequestError, UnavailableError
from monolith.serve.config import BatchingConfig
from monolith.serve.server.batching import RequestBatcher
from monolith.serve.server.tensors import columns_of, listed_tensor

PATIENCE = 60


def columns(*users):
    return columns_of([listed_tensor("user", "BYTES", [len(users)], users)], LinearSignature())


def batcher(model, *, queue=100, **config):
    return RequestBatcher(model.predict, BatchingConfig(**config), queue=queue, clock=time.monotonic)


class Callers:
    """Threads that ask, each in its turn, and what they were answered."""

    def __init__(self, batching):
        self._batching = batching
        self.answers = {}
        self._threads = []

    def ask(self, name, *users, deadline=None):
        def run():
            try:
                found = self._batching.run(columns(*users), deadline)
                self.answers[name] = found.outputs["score"].tolist()
            except Exception as error:
                self.answers[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self):
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def waiting(batching):
    return len(batching._queue)


def ask_behind_a_slow_one(batching, model, *requests):
    """Ask one that the model holds on to, then the others, and let go when all of them wait."""
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    for number, users in enumerate(requests):
        callers.ask(number, *users)
        until(lambda number=number: waiting(batching) == number + 1)
    model.gate.set()
    callers.wait()
    return callers.answers


def test_a_request_alone_is_answered_on_its_own_thread():
    seen = []

    def predict(values, *, deadline=None):
        seen.append((threading.current_thread(), deadline))
        return LinearModel().predict(values)

    batching = RequestBatcher(predict, BatchingConfig(), queue=1, clock=time.monotonic)
    found = batching.run(columns("abc"), deadline=1e12)
    assert found.outputs["score"].tolist() == [3]
    assert seen == [(threading.current_thread(), 1e12)]


def test_requests_that_come_meanwhile_are_answered_together_each_with_its_rows():
    model = LinearModel()
    answers = ask_behind_a_slow_one(batcher(model), model, ["a", "bb"], ["ccc"])
    assert answers == {"slow": [4], 0: [1, 2], 1: [3]}
    assert model.batches == [1, 3]


def test_no_more_rows_than_allowed_are_answered_together_and_a_larger_request_alone():
    model = LinearModel()
    answers = ask_behind_a_slow_one(batcher(model, max_rows=3), model, ["a"], ["a", "b"], ["a"] * 5, ["a"])
    assert answers == {"slow": [4], 0: [1], 1: [1, 1], 2: [1] * 5, 3: [1]}
    assert sorted(model.batches) == [1, 1, 3, 5]


def test_requests_with_other_columns_are_answered_apart():
    model = LinearModel()
    batching = batcher(model)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    other = columns_of(
        [listed_tensor("user", "BYTES", [1], ["a"]), listed_tensor("item", "INT64", [1], [5])],
        LinearSignature(),
    )
    thread = threading.Thread(
        target=lambda: callers.answers.update(other=batching.run(other, None).outputs["score"].tolist())
    )
    thread.start()
    until(lambda: waiting(batching) == 1)
    callers.ask("same", "b")
    until(lambda: waiting(batching) == 2)
    model.gate.set()
    callers.wait()
    thread.join(PATIENCE)
    assert callers.answers == {"slow": [4], "other": [6], "same": [1]}
    assert model.batches == [1, 1, 1]


def test_a_bad_row_of_one_caller_fails_no_other_caller():
    model = LinearModel()
    answers = ask_behind_a_slow_one(batcher(model), model, ["a"], ["x", "bad"], ["bug"], ["dd"])
    assert answers[0] == [1]
    assert isinstance(answers[1], RequestError)
    assert "row 1" in str(answers[1])  # of its own request, not of the batch
    assert isinstance(answers[2], ZeroDivisionError)
    assert answers[3] == [2]


def test_a_server_that_is_gone_is_not_asked_once_for_each():
    asked = []

    def predict(values, *, deadline=None):  # noqa: ARG001
        asked.append(len(values["user"]))
        if len(asked) > 1:
            raise UnavailableError("shard 3 is gone")
        gate.wait(PATIENCE)
        return LinearAnswer({"score": LinearModel().predict(values).outputs["score"]})

    gate = threading.Event()
    batching = RequestBatcher(predict, BatchingConfig(), queue=9, clock=time.monotonic)
    callers = Callers(batching)
    callers.ask("first", "a")
    until(lambda: asked)
    for number in range(3):
        callers.ask(number, "a")
    until(lambda: waiting(batching) == 3)
    gate.set()
    callers.wait()
    assert asked == [1, 3]
    assert all(isinstance(callers.answers[number], UnavailableError) for number in range(3))


def test_a_caller_is_refused_when_too_many_wait():
    model = LinearModel()
    batching = batcher(model, queue=1)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    callers.ask("waits", "a")
    until(lambda: waiting(batching) == 1)
    with pytest.raises(OverloadedError):
        batching.run(columns("b"), None)
    model.gate.set()
    callers.wait()
    assert callers.answers == {"slow": [4], "waits": [1]}


def test_a_caller_without_time_left_gets_an_error_and_the_model_is_not_run():
    model = LinearModel()
    batching = batcher(model)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    with pytest.raises(DeadlineExceededError):
        batching.run(columns("b"), time.monotonic() + 0.01)
    callers.ask("after", "a")
    until(lambda: waiting(batching) == 1)
    model.gate.set()
    callers.wait()
    assert callers.answers == {"slow": [4], "after": [1]}
    assert model.batches == [1, 1]
    with pytest.raises(DeadlineExceededError):
        batching.run(columns("b"), time.monotonic() - 1)
    assert batching.run(columns("b"), None).outputs["score"].tolist() == [1]


def test_a_leader_waits_for_others_only_as_long_as_it_may():
    model = LinearModel()
    batching = batcher(model, max_delay=timedelta(seconds=PATIENCE), max_rows=2)
    callers = Callers(batching)
    callers.ask(0, "a")
    until(lambda: waiting(batching) == 1)
    callers.ask(1, "bb")  # the batch is full
    callers.wait()
    assert callers.answers == {0: [1], 1: [2]}
    assert model.batches == [2]
    assert batcher(model, max_delay=timedelta(milliseconds=1)).run(columns("a"), None)


@pytest.mark.parametrize("runners", [1, 3])
def test_many_callers_at_once_each_get_their_own(runners):
    model = LinearModel()
    batching = batcher(model, runners=runners, max_rows=16)
    wrong = []

    def run(number):
        for turn in range(60):
            length = (number * 7 + turn) % 30 + 10
            deadline = time.monotonic() + (PATIENCE if turn % 5 else 0.0005)
            try:
                found = batching.run(columns("a" * length, "b"), deadline).outputs["score"].tolist()
            except DeadlineExceededError:
                continue
            if found != [length, 1]:
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not wrong
    assert waiting(batching) == 0
    assert batching._leaders == 0
