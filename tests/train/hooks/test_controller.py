"""Wishes of an operator: flags, and a file."""

from __future__ import annotations

import threading

import pytest
from train.runs import At, FakeClock, FakeRun, train

from monolith.train.hooks import ActionFileHook, ControllerHook, LocalBarrier, WorkerBarrierHook

SECONDS = 60.0


class Saves:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def saves() -> Saves:
    return Saves()


# Flags


@pytest.mark.parametrize("barrier", [None, LocalBarrier(1)])
def test_a_stop_takes_effect_within_two_steps(saves, barrier):
    controller = ControllerHook(saves, barrier)
    run = train([At(3, controller.request_stop, before=True), controller], 10)
    assert run.step <= 5
    assert run.stop_reason == "the controller was told to stop"
    assert barrier is None or barrier.placement() is None
    assert saves.count == 0


def test_a_save_is_triggered_once(saves):
    controller = ControllerHook(saves)
    train([At(3, controller.request_save), controller], 10)
    assert saves.count == 1


def test_wishes_come_from_any_thread(saves):
    controller = ControllerHook(saves)

    def ask() -> None:
        thread = threading.Thread(target=controller.request_save)
        thread.start()
        thread.join(SECONDS)

    train([At(3, ask), At(6, ask), controller], 10)
    assert saves.count == 2


def test_a_stop_goes_before_a_save(saves):
    controller = ControllerHook(saves)
    controller.request_stop()
    controller.request_save()
    assert train([controller], 10).step == 1
    assert saves.count == 0


def test_a_stop_places_one_barrier_and_waits_for_the_workers(saves):
    placed: list[str] = []
    clock = FakeClock()
    barrier = LocalBarrier(2, callbacks=[placed.append])
    controller = ControllerHook(saves, barrier, clock=clock, sleep=clock.sleep)
    controller.request_stop()
    # The run goes on after the request: a second chief of the same job, say, with steps of its own.
    for step in range(1, 4):
        train([controller], 1)
        assert placed == ["Stop"], step
    assert clock.sleeps == [2.0] * 15
    assert barrier.placement() is None


def test_a_barrier_that_is_placed_already_is_no_obstacle(saves):
    clock = FakeClock()
    barrier = LocalBarrier(2)
    barrier.place("Save")
    controller = ControllerHook(saves, barrier, clock=clock, sleep=clock.sleep)
    controller.request_stop()
    assert train([controller], 10).step == 1
    assert barrier.placement().action == "Save"


def test_the_workers_stop_with_the_chief(saves):
    barrier = LocalBarrier(2)
    controller = ControllerHook(saves, barrier, poll=0.001)
    workers = []
    work = threading.Thread(
        target=lambda: workers.append(train([WorkerBarrierHook(barrier, 1, poll=0.001)], 10**9))
    )
    work.start()
    controller.request_stop()
    assert train([controller], 10).step == 1
    work.join(SECONDS)
    assert workers[0].stop_reason == "the chief stopped all workers"


# The file


@pytest.fixture
def controller() -> Wishes:
    return Wishes()


class Wishes(ControllerHook):
    def __init__(self) -> None:
        super().__init__(Saves())
        self.wishes: list[str] = []

    def request_stop(self) -> None:
        self.wishes.append("stop")

    def request_save(self) -> None:
        self.wishes.append("save")


def ask(controller: ControllerHook, folder, text: str | bytes) -> str:
    (folder / "monolith_action").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert ActionFileHook(controller).poll(str(folder))
    assert [path.name for path in folder.iterdir()] == ["monolith_action_response"]
    return (folder / "monolith_action_response").read_text()


@pytest.mark.parametrize(
    "text, wish", [("action: STOP", "stop"), ("action: TRIGGER_SAVE", "save"), ("action: 1", "save")]
)
def test_a_file_says_what_to_do_and_is_answered(controller, tmp_path, text, wish):
    assert ask(controller, tmp_path, text) == "OK"
    assert controller.wishes == [wish]


@pytest.mark.parametrize("text", ["", "action: UNKNOWN", "action: 77"])
def test_an_unknown_action_is_answered(controller, tmp_path, text):
    assert ask(controller, tmp_path, text).startswith("unknown action")
    assert controller.wishes == []


@pytest.mark.parametrize("text", ["action: FLY", "what?", b"\xff\xfe"])
def test_what_cannot_be_parsed_is_answered_with_the_reason(controller, tmp_path, text):
    assert ask(controller, tmp_path, text).startswith("cannot parse the action")
    assert controller.wishes == []


def test_without_a_file_nothing_happens(controller, tmp_path):
    assert not ActionFileHook(controller).poll(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_even_if_acting_on_it_fails(tmp_path):
    class Broken(Wishes):
        def request_stop(self) -> None:
            raise KeyError

    (tmp_path / "monolith_action").write_text("action: STOP")
    with pytest.raises(KeyError):
        ActionFileHook(Broken()).poll(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_thread_looks_for_the_file_and_ends_with_the_run(tmp_path):

    saved = threading.Event()
    controller = ControllerHook(saved.set)
    (tmp_path / "monolith_action").write_text("action: TRIGGER_SAVE")
    hook = ActionFileHook(controller, interval=0.001)

    def stop_when_saved(run: FakeRun) -> None:
        if saved.is_set():
            run.request_stop("saved")

    run = train([controller, hook], 10**9, run=FakeRun(tmp_path), on_step=stop_when_saved)
    assert run.stop_reason == "saved"
    assert "action-file" not in [thread.name for thread in threading.enumerate()]


def test_a_look_that_fails_is_not_the_last(controller, tmp_path, monkeypatch):
    looks = threading.Semaphore(0)
    hook = ActionFileHook(controller, interval=0.001)

    def fail(model_dir: str) -> bool:
        looks.release()
        raise OSError(model_dir)

    monkeypatch.setattr(hook, "poll", fail)

    hook.after_create(FakeRun(tmp_path))
    assert looks.acquire(timeout=SECONDS)
    assert looks.acquire(timeout=SECONDS)
    hook.close()


def test_a_run_without_a_folder_is_left_alone(controller):
    before = threading.active_count()
    hook = ActionFileHook(controller)
    hook.after_create(FakeRun(""))
    assert threading.active_count() == before  # nothing is polled
    hook.close()
