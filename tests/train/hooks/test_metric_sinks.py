"""Numbers and messages of a run: names, tags, and that nothing ever holds up a step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from train.runs import FakeRun

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.observe import Metrics
from monolith.train import StepResult
from monolith.train.hooks.metric_sinks import (
    CustomMetricHook,
    HeartBeatHook,
    MessageCounts,
    MessageQueue,
    MetricClient,
    MetricName,
    ThroughputHook,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("monolith.training")


@pytest.fixture
def client(metrics: Metrics) -> MetricClient:
    return MetricClient(metrics)


def lines(metrics: Metrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]


def result(step: int) -> StepResult:
    batch = Batch(FeatureIds.pack({"user": torch.arange(2)}))
    return StepResult(step, batch, torch.tensor(0.25))


# The client


def test_a_counter_grows_by_name_and_tags(metrics: Metrics, client: MetricClient) -> None:
    client.emit_counter(MetricName.RUN_STEPS, 3, {"model_name": "m", "cluster_type": "x"})
    client.emit_counter(MetricName.RUN_STEPS, 4, {"cluster_type": "x", "model_name": "m"})
    assert 'monolith_training_run_steps_all_total{cluster_type="x",model_name="m"} 7.0' in lines(metrics)


def test_a_timer_counts_durations(metrics: Metrics, client: MetricClient) -> None:
    client.emit_timer(MetricName.SAVE_CHECKPOINT_TIME, 1.5, {"mode": "train"})
    client.emit_timer(MetricName.SAVE_CHECKPOINT_TIME, 2.5, {"mode": "train"})
    assert 'monolith_training_save_checkpoint_time_sum{mode="train"} 4.0' in lines(metrics)
    assert 'monolith_training_save_checkpoint_time_count{mode="train"} 2.0' in lines(metrics)


def test_a_store_holds_the_latest(metrics: Metrics, client: MetricClient) -> None:
    client.emit_store(MetricName.EXPORT_LATEST_VERSION, 3)
    client.emit_store(MetricName.EXPORT_LATEST_VERSION, 4)
    assert "monolith_training_export_models_latest_version 4.0" in lines(metrics)


@pytest.mark.parametrize("value", ["OK", None, True, float("nan")])
def test_text_is_no_value_of_a_timer_nor_of_a_counter(client: MetricClient, value: Any) -> None:
    with pytest.raises(ConfigError, match="worker_failover_cnt"):
        client.emit_timer(MetricName.WORKER_FAILOVER_COUNT, value)
    with pytest.raises(ConfigError, match="worker_failover_cnt"):
        client.emit_counter(MetricName.WORKER_FAILOVER_COUNT, value)


def test_flush_passes_all_metrics_to_the_given_function_if_any(metrics: Metrics) -> None:
    pushed: list[bytes] = []
    client = MetricClient(metrics, pushed.append)
    client.emit_counter("exit_hook")
    client.flush()
    assert b"monolith_training_exit_hook_total 1.0" in pushed[0]
    MetricClient(metrics).flush()


# Custom metrics


def test_a_scalar_is_stored_when_it_is_due(metrics: Metrics, client: MetricClient) -> None:
    hook = CustomMetricHook(
        client, {"depth": lambda r: torch.tensor(r.step, dtype=torch.int32)}, every_steps=2
    )
    for step in (1, 2, 3):
        hook.after_step(None, result(step))  # type: ignore[arg-type]
    assert "monolith_training_depth 2.0" in lines(metrics)


@pytest.mark.parametrize(
    "scalar", [torch.tensor([1.0]), torch.tensor(1.0, dtype=torch.float64), torch.tensor(1)]
)
def test_only_scalars_of_float32_and_int32_are_taken(client: MetricClient, scalar: torch.Tensor) -> None:
    hook = CustomMetricHook(client, {"x": lambda _: scalar}, every_steps=1)
    with pytest.raises(ValueError, match="'x' must be a float32 or int32 scalar"):
        hook.after_step(None, result(1))  # type: ignore[arg-type]


def test_no_scalars_at_all_are_refused(client: MetricClient) -> None:
    with pytest.raises(ValueError, match="at least one"):
        CustomMetricHook(client, {})


# The queue


def test_messages_are_handled_in_order_on_another_thread() -> None:
    handled: list[tuple[str, str]] = []

    def handle(message: str) -> bool:
        handled.append((message, threading.current_thread().name))
        return True

    messages = MessageQueue("sink", handle, clock=lambda: 0.0)
    messages.start()
    messages.put(["a", "b"])
    messages.finish()
    assert handled == [("a", "sink"), ("b", "sink")]
    assert messages.counts == MessageCounts(total=2, success=2)


def test_a_message_that_fails_is_counted_and_the_next_is_taken() -> None:
    def handle(message: str) -> bool:
        if message == "bad":
            raise ValueError(message)
        return True

    messages = MessageQueue("sink", handle, clock=lambda: 0.0)
    messages.start()
    messages.put(["good", "bad", "good"])
    messages.finish()
    assert messages.counts == MessageCounts(total=3, success=2, failed=1)


def test_a_full_queue_drops_and_counts_instead_of_waiting() -> None:
    messages = MessageQueue("sink", lambda _: True, capacity=2, clock=lambda: 0.0)
    messages.put(["a", "b", "c"])
    assert messages.counts == MessageCounts(total=3, dropped=1)
    messages.start()
    messages.finish()
    assert messages.counts == MessageCounts(total=3, success=2, dropped=1)


def test_the_end_is_known_later_where_the_handler_says_so() -> None:
    messages = MessageQueue("sink", lambda _: False, clock=lambda: 0.0)
    messages.start()
    messages.put(["a", "b"])
    messages.finish()
    messages.settle(success=1, failed=1)
    assert messages.counts == MessageCounts(total=2, success=1, failed=1)


def test_regular_work_is_done_also_while_busy_and_may_fail() -> None:
    now, ticks = [0.0], []

    def handle(message: str) -> bool:
        now[0] += float(message)
        return True

    def tick() -> None:
        ticks.append(now[0])
        raise OSError("disk full")

    messages = MessageQueue("sink", handle, tick=tick, tick_secs=600, clock=lambda: now[0])
    messages.start()
    messages.put(["100", "600", "10", "595"])
    messages.finish()
    assert ticks == [700.0, 1305.0]
    assert messages.counts.success == 4


def test_finishing_twice_or_before_the_start_returns() -> None:
    messages = MessageQueue("sink", lambda _: True, clock=lambda: 0.0)
    messages.finish()
    messages.start()
    messages.finish()
    messages.finish()
    assert not any(thread.name == "sink" for thread in threading.enumerate())


def test_a_scalar_is_stored_though_steps_jump(client: MetricClient) -> None:
    asked: list[int] = []

    def note(result: StepResult) -> torch.Tensor:
        asked.append(result.step)
        return torch.tensor(1.0)

    hook = CustomMetricHook(client, {"x": note}, every_steps=10)
    hook.after_create(FakeRun())
    for step in (3, 8, 12, 19, 31, 33):
        hook.after_step(FakeRun(step=step), result(step))
    assert asked == [12, 31]


# The heart-beat: running at its pace, stopped once.


class ThreeBeats(threading.Event):
    """Lets two waits pass at once and holds the third until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self.held = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        if len(self.waited) < 3:
            return False
        self.held.set()
        return super().wait(60)


def beats(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith("m_training_heart_beat_total")]
    return {line.split('type="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_it_beats_every_30_seconds_and_stops_once() -> None:
    metrics, stop = Metrics("m"), ThreeBeats()
    hook = HeartBeatHook(MetricClient(metrics), tags={"model": "feed"}, stop=stop)
    hook.after_create(None)  # type: ignore[arg-type]
    hook.after_create(None)  # type: ignore[arg-type]
    assert stop.held.wait(60)
    assert beats(metrics) == {"running": 3.0}
    hook.close()
    hook.close()
    assert stop.waited == [30.0] * 3
    assert beats(metrics) == {"running": 3.0, "stopped": 1.0}


def test_a_run_that_never_started_does_not_stop() -> None:
    metrics = Metrics("m")
    HeartBeatHook(MetricClient(metrics)).close()
    assert beats(metrics) == {}


# Throughput: steps and their time, every half minute.


TAGS = '{cluster_type="yarn",model_name="feed"}'


class Stub:
    def __init__(self, step: int) -> None:
        self.step = step


def test_the_start_then_steps_time_and_loss() -> None:
    metrics, now = Metrics("monolith.training"), [100.0]
    hook = ThroughputHook(
        MetricClient(metrics),
        model_name="feed",
        cluster_type="yarn",
        started_at=88.0,
        clock=lambda: now[0],
        timer=lambda: now[0],
    )

    def lines() -> list[str]:
        return metrics.render().decode().splitlines()

    def step(number: int, at: float, loss: float) -> None:
        now[0] = at
        batch = Batch(FeatureIds.pack({"user": torch.arange(2)}))
        hook.after_step(Stub(number), StepResult(number, batch, torch.tensor(loss)))  # type: ignore[arg-type]

    hook.after_create(Stub(1000))  # type: ignore[arg-type]
    assert f"monolith_training_run_start_elapsed_time_all_sum{TAGS} 12.0" in lines()
    step(1001, 129.9, 9.0)
    assert f"monolith_training_run_steps_all_total{TAGS} 1.0" not in lines()
    step(1002, 130.0, 0.5)
    assert f"monolith_training_run_steps_all_total{TAGS} 2.0" in lines()
    assert f"monolith_training_run_steps_elapsed_time_all_sum{TAGS} 30.0" in lines()
    assert f"monolith_training_step_loss{TAGS} 0.5" in lines()
    step(1010, 165.0, 0.25)
    assert f"monolith_training_run_steps_all_total{TAGS} 10.0" in lines()
    hook.after_create(Stub(1005))  # type: ignore[arg-type]
    assert f"monolith_training_run_start_elapsed_time_all_count{TAGS} 1.0" in lines()
