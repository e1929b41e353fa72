"""The heart-beat: running at its pace, stopped once."""

from __future__ import annotations

import threading

from monolith.observe import Metrics
from monolith.train.hooks.reports.heartbeat import HeartBeatHook
from monolith.train.hooks.reports.metric_sinks import MetricClient


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
