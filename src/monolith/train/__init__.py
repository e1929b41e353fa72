"""Training: the loop, its hooks, and the tasks it runs."""

from monolith.train.hook import Hook, Run, StepResult, drive

__all__ = ["Hook", "Run", "StepResult", "drive"]
