"""Requests that come while the model works are answered together, and nobody pays for another."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from serve.server.linear import LinearAnswer, LinearModel, LinearSignature

from monolith.errors import DeadlineExceededError, OverloadedError, RequestError, UnavailableError
from monolith.serve.config import BatchingConfig, ServeLimits
from monolith.serve.server.batching import LONG_BATCH, ModelCall, ModelOutputs, RequestBatcher, joined
from monolith.serve.server.tensors import columns_of, listed_tensor

PATIENCE = 60


def columns(*users):
    return columns_of([listed_tensor("user", "BYTES", [len(users)], users)], LinearSignature())


def batcher(model, *, queue=100, queue_rows=1000, **config):
    limits = ServeLimits(queue=queue, queue_rows=queue_rows)
    return RequestBatcher(model.predict, BatchingConfig(**config), limits=limits, clock=time.monotonic)


class Callers:
    """Threads that ask, each in its turn, and what they were answered."""

    def __init__(self, batching):
        self._batching = batching
        self.answers = {}
        self._threads = []

    def ask(self, name, *users, deadline=None, priority=5):
        def run():
            try:
                found = self._batching.run(columns(*users), deadline, priority)
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

    batching = RequestBatcher(predict, BatchingConfig(), limits=ServeLimits(), clock=time.monotonic)
    found = batching.run(columns("abc"), deadline=1e12)
    assert found.outputs["score"].tolist() == [3]
    assert seen == [(threading.current_thread(), 1e12)]


def test_requests_that_come_meanwhile_are_answered_together_each_with_its_rows():
    model = LinearModel()
    answers = ask_behind_a_slow_one(batcher(model), model, ["a", "bb"], ["ccc"])
    assert answers == {"slow": [4], 0: [1, 2], 1: [3]}
    assert model.batches == [1, 3]


def test_no_more_rows_than_allowed_are_answered_together():
    model = LinearModel()
    answers = ask_behind_a_slow_one(batcher(model, max_rows=3), model, ["a"], ["a", "b"], ["a"] * 3, ["a"])
    assert answers == {"slow": [4], 0: [1], 1: [1, 1], 2: [1] * 3, 3: [1]}
    assert model.batches == [1, 3, 3, 1]


def test_a_small_request_waits_for_one_piece_of_a_large_one():
    model = LinearModel()
    large = ["a" * length for length in range(1, 11)]
    answers = ask_behind_a_slow_one(batcher(model, max_rows=3), model, large, ["bb"], ["ccc", "d"])
    assert answers == {"slow": [4], 0: list(range(1, 11)), 1: [2], 2: [3, 1]}
    assert model.batches == [1, 3, 3, 3, 3, 1]  # the second three are the two small requests


def test_a_batch_with_a_bad_row_is_not_run_again_for_a_request_whose_time_is_over():
    now, asked, gate = [0.0], [], threading.Event()

    def predict(values, *, deadline=None):  # noqa: ARG001
        asked.append(list(values["user"]))
        if b"bad" in values["user"]:
            now[0] = 2.0 * PATIENCE  # the deadline of the other request passes while the batch runs
        return model.predict(values)

    model = LinearModel(gate=gate)
    batching = RequestBatcher(predict, BatchingConfig(), limits=ServeLimits(), clock=lambda: now[0])
    callers = Callers(batching)
    callers.ask("leader", "slow")
    until(lambda: model.busy)
    callers.ask("late", "a", deadline=PATIENCE)
    until(lambda: waiting(batching) == 1)
    callers.ask("bad", "bad")
    until(lambda: waiting(batching) == 2)
    gate.set()
    callers.wait()
    assert isinstance(callers.answers["late"], DeadlineExceededError)
    assert isinstance(callers.answers["bad"], RequestError)
    assert asked[1:] == [[b"a", b"bad"], [b"bad"]]


def test_a_large_request_of_lists_is_cut_between_rows():
    model = LinearModel()
    tags = [[], ["x"], ["x", "y"], [], ["x", "y", "z"]]
    flat = [tag for some in tags for tag in some]
    ends = [0, *np.cumsum([len(some) for some in tags]).tolist()]
    request = columns_of(
        [
            listed_tensor("user", "BYTES", [5], ["a"] * 5),
            listed_tensor("tags", "BYTES", [len(flat)], flat),
            listed_tensor("tags.row_splits", "INT64", [6], ends),
            listed_tensor("price", "FP32", [5], [0.5, 1.5, 2.5, 3.5, 4.5]),
        ],
        LinearSignature(),
    )
    found = batcher(model, max_rows=2).run(request, None)
    assert found.outputs["score"].tolist() == [1.5, 12.5, 23.5, 4.5, 35.5]
    assert model.batches == [2, 2, 1]


def test_a_bad_row_of_a_large_request_is_named_by_its_place_in_the_request():
    model = LinearModel()
    with pytest.raises(RequestError, match="row 4: bad"):
        batcher(model, max_rows=2).run(columns("a", "b", "c", "d", "bad", "e"), None)
    assert model.batches == [2, 2]


def test_a_large_request_whose_time_is_over_runs_no_further():
    now = [0.0]

    def predict(values, *, deadline=None):  # noqa: ARG001
        now[0] += 1
        return LinearModel().predict(values)

    batching = RequestBatcher(predict, BatchingConfig(max_rows=1), limits=ServeLimits(), clock=lambda: now[0])
    with pytest.raises(DeadlineExceededError):
        batching.run(columns("a", "b", "c", "d"), 2.0)
    assert now == [2.0]


def test_the_first_priority_is_answered_first():
    model = LinearModel()
    batching = batcher(model, max_rows=1)
    order = []
    predict = model.predict
    batching._ask = lambda values, **rest: (order.append(values["user"][0]), predict(values, **rest))[1]
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    for number, (user, priority) in enumerate([("late", 9), ("default", 5), ("first", 1), ("next", 1)]):
        callers.ask(user, user, priority=priority)
        until(lambda number=number: waiting(batching) == number + 1)
    model.gate.set()
    callers.wait()
    assert order == [b"slow", b"first", b"next", b"default", b"late"]


def test_a_request_is_refused_when_too_many_rows_wait():
    model = LinearModel()
    batching = batcher(model, queue_rows=5)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: model.busy == 1)
    callers.ask("many", *["a"] * 7)  # more than the limit, but nothing else waits
    until(lambda: waiting(batching) == 1)
    with pytest.raises(OverloadedError, match=r"7 rows wait for this model.*--max-queue-rows"):
        batching.run(columns("b"), None)
    model.gate.set()
    callers.wait()
    assert callers.answers == {"slow": [4], "many": [1] * 7}
    assert batching._queued_rows == 0


def test_an_answer_of_pieces_claims_the_age_of_its_oldest_piece():
    def part(**said):
        return ModelOutputs({"score": np.zeros(1)}, (), said)

    older = part(step=10, newest_step=11, watermark=5, staleness=1.0, published_at=7.0)
    newer = part(step=20, newest_step=20, watermark=6, staleness=0.25, published_at=9.0)
    found = joined([older, newer], [100.0, 102.0])
    expected = {"step": 10, "newest_step": 20, "watermark": 5, "staleness": 3.0, "published_at": 7.0}
    assert found.freshness == expected
    unknown = part(freshness="unknown", freshness_reason="it did not say")
    assert joined([older, unknown], [1.0, 2.0]).freshness == unknown.freshness
    assert "newest_step" not in joined([older, part(step=12, staleness=0.0)], [1.0, 1.0]).freshness


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
    batching = RequestBatcher(predict, BatchingConfig(), limits=ServeLimits(), clock=time.monotonic)
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


# Several requests of one thread


def ask_all(batching, *requests):
    found = batching.run_all([ModelCall(columns(*users), None) for users in requests])
    return [one if isinstance(one, Exception) else one.outputs["score"].tolist() for one in found]


def test_several_requests_of_a_thread_are_answered_in_one_batch():
    model = LinearModel()
    batching = batcher(model)
    assert ask_all(batching, ["a", "bb"], ["ccc"], ["dddd"]) == [[1, 2], [3], [4]]
    assert model.batches == [4]
    assert ask_all(batching, ["a"]) == [[1]]
    assert ask_all(batching) == []
    assert batching._leaders == 0


def test_of_several_requests_only_the_wrong_one_fails():
    found = ask_all(batcher(LinearModel()), ["a"], ["bad"], ["bb"])
    assert (found[0], found[2]) == ([1], [2])
    assert isinstance(found[1], RequestError)


def test_of_several_requests_those_that_find_the_queue_full_are_refused():
    found = ask_all(batcher(LinearModel(), queue=2), ["a"], ["bb"], ["ccc"])
    assert found[:2] == [[1], [2]]
    assert isinstance(found[2], OverloadedError)


def test_of_several_requests_a_large_one_runs_in_pieces():
    model = LinearModel()
    assert ask_all(batcher(model, max_rows=2), ["a"], ["a", "bb", "ccc"], ["dd"]) == [[1], [1, 2, 3], [2]]
    assert sorted(model.batches) == [1, 2, 2]


def test_of_several_requests_the_most_urgent_runs_first():
    model = LinearModel()
    asked = [("a", 9), ("bb", 1), ("ccc", 5)]
    calls = [ModelCall(columns(user), None, priority) for user, priority in asked]
    order = []

    def predict(values, *, deadline=None):
        order.extend(values["user"])
        return model.predict(values, deadline=deadline)

    batching = RequestBatcher(predict, BatchingConfig(max_rows=1), limits=ServeLimits(), clock=time.monotonic)
    assert [one.outputs["score"].tolist() for one in batching.run_all(calls)] == [[1], [2], [3]]
    assert order == [b"bb", b"ccc", b"a"]


# Runners


class TimedModel:
    """A model whose batches take `seconds` by a clock of its own; "slow" waits for `gate`."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0
        self.model = LinearModel()

    def predict(self, values, *, deadline=None):
        self.now += self.seconds
        return self.model.predict(values, deadline=deadline)

    def batcher(self):
        config = BatchingConfig(runners=2)
        return RequestBatcher(self.predict, config, limits=ServeLimits(), clock=lambda: self.now)


@pytest.mark.parametrize("seconds", [LONG_BATCH / 2, 2 * LONG_BATCH])
def test_a_second_runner_starts_only_if_batches_take_long(seconds):
    timed = TimedModel(seconds)
    batching = timed.batcher()
    for _ in range(20):
        batching.run(columns("a"), None)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: timed.model.busy == 1)
    callers.ask("other", "bb")
    if seconds > LONG_BATCH:
        until(lambda: "other" in callers.answers)  # while the first one still runs
    else:
        until(lambda: waiting(batching) == 1)
    timed.model.gate.set()
    callers.wait()
    assert callers.answers == {"slow": [4], "other": [2]}
    assert batching._leaders == 0


def test_one_batch_that_took_long_starts_no_second_runner():
    timed = TimedModel(0.0)
    batching = timed.batcher()
    for seconds in (0.0, 60.0):
        timed.seconds = seconds
        batching.run(columns("a"), None)
    callers = Callers(batching)
    callers.ask("slow", "slow")
    until(lambda: timed.model.busy == 1)
    callers.ask("other", "bb")
    until(lambda: waiting(batching) == 1)
    timed.model.gate.set()
    callers.wait()
    assert callers.answers == {"slow": [4], "other": [2]}
