"""How this process of a run uses its machine, and whom it tells: threads, metrics, profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from monolith.config import Checked, Problem
from monolith.run.checks import at_least, not_negative


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadsConfig(Checked):
    """How many threads torch uses; None leaves it to torch."""

    intra_op: int | None = None
    """Threads that share one operation of torch; None is as many as there are cores."""
    inter_op: int | None = None
    """Operations of torch that run at a time; None leaves it to torch."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "intra_op", "inter_op")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Checked):
    """Where Prometheus finds the metrics of this process, and `monolith status watch` how it stands."""

    prefix: str | None = None
    """What names of metrics begin with; None means monolith."""
    port: int | None = None
    """The port on which metrics are served to Prometheus; 0 takes a free one, None serves none."""
    host: str = "127.0.0.1"
    """The address of the metrics port. One that others can reach needs certificates or a token: see
    security."""
    status_every: timedelta | None = None
    """How often this process writes its status to status/ of the model_dir, for `monolith status`; 0 writes
    nothing, None takes 2 s, and 15 s in a model_dir that is remote."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "port", "status_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Checked):
    """Which steps are recorded with torch's profiler."""

    from_step: int | None = None
    """The first of ten steps that are profiled; the profile is a file in the model_dir."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "from_step")
