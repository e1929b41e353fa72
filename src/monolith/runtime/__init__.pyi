"""The runtime: what runs a task, in one process, on parameter servers or across ranks."""

from monolith.runtime.context import Launch, Output, RunResult
from monolith.runtime.run import Run

__all__ = ["Launch", "Output", "Run", "RunResult"]
