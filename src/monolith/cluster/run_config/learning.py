"""How a run learns: where rows and weights live, how updates travel, what is saved and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from monolith.cluster.run_config.checks import at_least, at_most_one, not_negative
from monolith.config import Checked, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(Checked):
    """How the processes train together, and on what."""

    synchronous: bool = False
    """All ranks make each step together: dense gradients are summed, tables are spread over the ranks."""
    partially_synchronous: bool = False
    """Dense gradients are summed over the ranks, tables are on parameter servers."""
    realtime: bool = False
    """From a stream that does not end: servers stay up, and send changed rows to whoever answers requests."""
    gpu: bool = False
    """The dense part may run on a GPU."""
    processes_per_gpu: int = 1
    """Ranks that share a GPU."""
    defer_sparse_updates: bool = False
    """Synchronous training: apply the gradients of rows behind the next step."""
    overlap_forward: bool = False
    """Synchronous training: exchange rows while the step before still computes."""
    overlap_backward: bool = False
    """Synchronous training: exchange gradients of rows while the step still computes."""
    intra_op_threads: int = 8
    """Threads within an operation of torch."""
    inter_op_threads: int = 16
    """Operations of torch at a time."""

    @property
    def fully_synchronous(self) -> bool:
        """Whether there are no parameter servers: tables are spread over the ranks."""
        return self.synchronous and not self.partially_synchronous

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "processes_per_gpu", "intra_op_threads", "inter_op_threads")
        for name in ("defer_sparse_updates", "overlap_forward", "overlap_backward"):
            if getattr(self, name) and not self.synchronous:
                yield Problem((name, "synchronous"), "only synchronous training knows it")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig(Checked):
    """Which unseen ids earn a row: how their sightings are counted."""

    kind: Literal["sliding_hash_filter", "probabilistic_filter", "no_filter"] = "sliding_hash_filter"
    """Count exactly for a while, admit by chance without counting, or admit all."""
    capacity: int = 300_000_000
    """Ids that are counted at a time."""
    splits: int = 7
    """Parts the counter is made of; the oldest is emptied when the newest is full."""
    equal_probability: bool = True
    """By chance: the same chance at each sighting, instead of one that grows."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "capacity", "splits")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig(Checked):
    """The rows of the tables: how they are found and updated."""

    filter: FilterConfig = FilterConfig()
    initial_capacity: int = 0
    """Rows that each table has room for from the beginning; 0 begins small."""
    prefetch: int = 0
    """Batches whose rows are looked up ahead of the step; 0 looks them up in it."""
    postpush: bool = False
    """Push gradients of rows behind the step, without waiting for the servers."""
    fused_layout: bool = False
    """Look up all features of a batch and lay them out for the model in one call."""
    dedup: bool = False
    """Send an id that a batch has twice only once."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "initial_capacity", "prefetch")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig(Checked):
    """The weights that are not rows, in asynchronous training."""

    prefetch: bool = False
    """Compute with weights fetched behind the step before, which are a little old."""
    postpush: bool = False
    """Push their gradients behind the step, without waiting for the servers."""
    partition: bool = True
    """Split large weights over the servers. They are not: each lies whole on one, so to ask for it is an
    error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Checked):
    """When state is saved, and how much of it is kept."""

    every: timedelta | None = None
    """Save all after this long. Not beside `every_steps`."""
    every_steps: int | None = None
    """Save all after so many steps."""
    dense_every: timedelta | None = None
    """Save the dense weights after this long. None means 30 minutes in real time, and else never."""
    dense_every_steps: int | None = None
    """Save the dense weights after so many steps."""
    dense_barrier: bool = False
    """Hold the workers while the dense weights are saved, as is done when all is saved."""
    keep: int = 10
    """The newest checkpoints to keep, beside one a day and those exempted."""
    merge_ranks: bool = True
    """Synchronous training: all ranks write into one checkpoint. Off gives each rank a folder of its own."""
    evict_expired: bool = False
    """Drop rows that have expired before saving; without it a save writes all rows there are."""
    max_expired_share: float = 0.1
    """The share of a table that may expire at once, 0 to 1. Where more has expired, the table keeps all of
    its rows and a warning says so; 1 lets all go."""
    max_clock_ahead: timedelta = timedelta(hours=1)
    """How far event times may move the clock of expiry ahead of the wall clock."""
    count_fids: bool = False
    """Write beside a checkpoint how many ids each slot has."""

    def problems(self) -> Iterator[Problem]:
        yield from at_most_one(self, "every", "every_steps")
        yield from at_most_one(self, "dense_every", "dense_every_steps")
        yield from at_least(1, self, "every_steps", "dense_every_steps", "keep")
        if not 0 <= self.max_expired_share <= 1:
            yield Problem(("max_expired_share",), f"must be from 0 to 1, got {self.max_expired_share}")
        if self.max_clock_ahead < timedelta(0):
            yield Problem(("max_clock_ahead",), f"must not be negative, got {self.max_clock_ahead}")
        for name in ("every", "dense_every"):
            given = getattr(self, name)
            if given is not None and given <= timedelta(0):
                yield Problem((name,), f"must be more than 0, got {given}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig(Checked):
    """What a run begins with."""

    folder: str | None = None
    """Another run's model_dir to start from, where this one has no checkpoint yet."""
    checkpoint: str | None = None
    """Name of the checkpoint to take, there or in model_dir; None takes the newest. Training does it once."""
    reset_dense: bool = False
    """Initialise the dense weights anew and restore only rows."""
    keep_step: bool = False
    """With `reset_dense`: go on counting steps where the checkpoint ended."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old name -> new name of weights that the checkpoint has under another name."""
    guess_renamed: bool | None = None
    """Derive these names from the shapes and the order of the weights."""

    def problems(self) -> Iterator[Problem]:
        if self.keep_step and not self.reset_dense:
            yield Problem(("keep_step", "reset_dense"), "the step is kept anyway, unless reset_dense is on")


@dataclass(frozen=True, kw_only=True, slots=True)
class TideConfig(Checked):
    """The daily window, in UTC, in which borrowed machines may be used. All four numbers, or none."""

    start_hour: int | None = None
    """0 to 23."""
    start_minute: int | None = None
    """0 to 59."""
    end_hour: int | None = None
    """0 to 23. An end before the start is on the next day."""
    end_minute: int | None = None
    """0 to 59."""
    save_every: timedelta | None = None
    """Save all after this long outside the window."""

    def problems(self) -> Iterator[Problem]:
        names = ("start_hour", "start_minute", "end_hour", "end_minute")
        for name in names:
            given, limit = getattr(self, name), 24 if name.endswith("hour") else 60
            if given is not None and not 0 <= given < limit:
                yield Problem((name,), f"must be from 0 to {limit - 1}, got {given}")
        missing = [name for name in names if getattr(self, name) is None]
        if missing and len(missing) < len(names):
            yield Problem(names, f"a window needs all four; {', '.join(missing)} is missing")
        if self.save_every is not None and self.save_every <= timedelta(0):
            yield Problem(("save_every",), f"must be more than 0, got {self.save_every}")
