"""What a running system says about itself: logs, progress, metrics and stack dumps."""

from monolith.observe.logs import Doublings, configure_logging, only_warnings, say_repeats
from monolith.observe.machine import (
    ClockWatch,
    MemoryUse,
    MemoryWatch,
    Resting,
    Sightings,
    memory_use,
    yield_to_others,
)
from monolith.observe.metrics import Counter, Gauge, Histogram, Metrics, MetricsServer
from monolith.observe.progress import Progress, progress
from monolith.observe.stacks import install_stack_dump, print_stack_trace

__all__ = [
    "ClockWatch",
    "Counter",
    "Doublings",
    "Gauge",
    "Histogram",
    "MemoryUse",
    "MemoryWatch",
    "Metrics",
    "MetricsServer",
    "Progress",
    "Resting",
    "Sightings",
    "configure_logging",
    "install_stack_dump",
    "memory_use",
    "only_warnings",
    "print_stack_trace",
    "progress",
    "say_repeats",
    "yield_to_others",
]
