"""Where the embedding rows of a run are while it trains, if its config leaves that open.

A run of one process on a GPU begins with all rows there: that is fastest. But tables grow as long as new IDs
come, and at the start it is not known whether they will fit. So a run that finds no room resumes from its
last checkpoint, with less on the device:

    on the device, as much as rows need ──no room──► there with a budget, then half of it, then half of that;
                    │                                the other rows in host memory
                    │                                                  │ no room
                    └──it cannot hold such tables──► in host memory ◄──┘
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monolith.cuda import Device
from monolith.cuda.device import is_full, room_for_rows
from monolith.errors import AcceleratorError, ConfigError, DeviceFullError, TableClosedError
from monolith.store import MakeStore, Store
from monolith.table import TableConfig
from monolith.train.accelerator import Accelerator
from monolith.train.config import TrainConfig
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.model import Model

if TYPE_CHECKING:
    from monolith.runtime.checkpoints import RunCheckpoints
    from monolith.runtime.report import FirstAndLastSteps
    from monolith.runtime.session import Session
    from monolith.runtime.trainer import LocalRun

_log = logging.getLogger(__name__)

MOST_BUDGETS = 3
"""Budgets that are tried, each half of the one before, until all rows go to host memory: what else a step and
a checkpoint need of the device is not known."""

_ALIKE = 8  # of so many rows, one more is divided among all tables

Less = Literal["budget", "host"]
"""What may be tried next: rows on the device up to a budget, or all of them in host memory."""


class RowsRefusedError(AcceleratorError):
    """The device cannot hold the tables of a model, however much memory it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsPlace:
    """Where the rows are in one attempt to train."""

    config: TrainConfig
    """With `embedding_device` decided, and `device_memory_bytes` if the run has chosen a budget."""
    why: str = ""
    """Why the rows are there, for the log; "" if the config says where they are."""
    device: Device | None = None
    by_default: bool = False
    """Whether the config left open where they are."""
    budgets: int = 0
    """How many budgets the run has tried by now."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """How many rows tables had when the last attempt ended: its budget is divided among them by that."""

    @classmethod
    def of(cls, config: TrainConfig, accelerator: Accelerator | None, *, alone: bool) -> RowsPlace:
        """Return where the rows of a run are at first.

        Args:
            alone: Whether it is a run of one process.
        """
        device = None if accelerator is None or not alone else accelerator.rows_device()
        if config.embedding_device is not None:
            return cls(config=config, device=device)
        if config.device_memory_bytes is not None:
            there = replace(config, embedding_device="device")
            return cls(config=there, why="train.device_memory_bytes is set")
        here = replace(config, embedding_device="host")
        if config.accelerator != "cuda":
            return cls(config=here)
        if not alone:
            return cls(config=here, why="only a run of one process has them on a GPU by default")
        if device is None:
            return cls(config=here, why="the accelerator cannot hold them")
        if config.tables.storage == "tiered":
            why = 'with train.tables.storage = "tiered" they need train.device_memory_bytes on the GPU'
            return cls(config=here, why=why)
        why = "that is the default for a run of one process"
        there = replace(config, embedding_device="device")
        return cls(config=there, why=why, device=device, by_default=True)

    def say(self) -> None:
        """Log where the rows are, and why, if that was decided here."""
        if not self.why:
            return
        on_device = self.config.embedding_device == "device"
        where = "on the GPU" if on_device else "in host memory"
        _log.info("embedding rows are %s (train.embedding_device): %s", where, self.why)

    def makes(self, make: MakeStore) -> MakeStore:
        """Return a maker of stores for this place.

        By default rows need not be on the device: that it cannot hold the tables is a RowsRefusedError then.
        """
        if self.config.embedding_device != "device":
            return make

        def made(configs: Mapping[str, TableConfig], /, **how: Any) -> Store:
            # A share of the budget is for all tables alike: a small one, too, must have room for a batch.
            alike = sum(self.rows.values()) // (_ALIKE * max(1, len(self.rows)))
            expected = {
                name: replace(config, initial_rows=max(config.initial_rows, self.rows[name] + alike))
                if name in self.rows
                else config
                for name, config in configs.items()
            }
            try:
                return make(expected, **how)
            except DeviceFullError:
                raise
            except (AcceleratorError, ConfigError) as cause:
                if not self.by_default:
                    raise
                raise RowsRefusedError(str(cause)) from cause

        return made

    # After an attempt that failed

    def less(self, error: BaseException, collections: int) -> Less | None:
        """Return what to try after an error; None if that would not help, or the config rules it out.

        Args:
            collections: Of embeddings in the model: a budget is divided among the tables of one.
        """
        config = self.config
        may_choose = config.device_memory_bytes is None or self.budgets
        if config.embedding_device != "device" or self.device is None or not may_choose:
            return None
        if isinstance(error, RowsRefusedError):
            return "host"
        if not is_full(error):
            return None
        if self.budgets < MOST_BUDGETS and collections < 2:
            return "budget"
        return "host" if self.by_default else None

    def with_less(self, less: Less, why: str, rows: Mapping[str, int]) -> RowsPlace:
        """Return the place of the rows in the next attempt, once all of the last one is closed.

        Args:
            why: What the last one ended with.
            rows: How many rows its tables had.
        """
        gc.collect()  # what is part of a cycle, such as the modules of a model, keeps memory of the device
        if less == "host":
            if self.device is not None:
                self.device.give_back()
            config = replace(self.config, embedding_device="host", device_memory_bytes=None)
            return replace(self, config=config, why=why, rows={})
        assert self.device is not None
        room = max(1, room_for_rows(self.device) >> self.budgets)
        config = replace(self.config, device_memory_bytes=room)
        return replace(self, config=config, why="", budgets=self.budgets + 1, rows=rows)

    def describe(self) -> str:
        """Say for a warning where the rows are now, what that costs, and how to have it so from the start."""
        room = self.config.device_memory_bytes
        if room is None:
            return (
                "All rows are in host memory now, and steps are launched kernel by kernel, which makes "
                'training several times slower if the model is small. Set train.embedding_device = "host" to '
                "have it so from the start, or train.device_memory_bytes to say how much of the GPU rows take"
            )
        return (
            f"Rows have {room:,} bytes of the GPU now, and those not used for longest are in host memory: "
            "steps that need such rows take longer, up to several times. Set train.device_memory_bytes = "
            f"{room} to have it so from the start"
        )


class _Begun(NamedTuple):
    """What a model had trained on before its run began."""

    step: int
    examples: int
    skipped: int


class WholeRun:
    """What the attempts of one run have in common; most runs have one attempt.

    Args:
        began_at: By `concurrency.monotonic`.
    """

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.windows: dict[str, list[WindowRow]] = {}
        self.restored_from: str | None = None
        self.step = 0
        """What the last attempt has come to."""
        self.live: bool | None = None
        self.collections = 0
        self.rows: dict[str, int] = {}
        self.first_step_at: float | None = None
        # Of the attempts before this one:
        self.save_seconds = self.evaluate_seconds = 0.0
        self.evaluations = 0
        self._begun: _Begun | None = None

    @property
    def begun(self) -> _Begun:
        assert self._begun is not None, "a model is made before it trains"
        return self._begun

    def begin(self, session: Session, restored_from: str | None) -> None:
        """Take note of where an attempt begins: the first one that does is where the run begins."""
        if self._begun is None:
            progress = session.progress
            self._begun = _Begun(session.step, progress.total_examples, progress.total_skipped)
            self.restored_from = restored_from

    def count_rows(self, model: Model) -> None:
        """Take note of how many rows tables have, if the device can still say."""
        with contextlib.suppress(RuntimeError, TableClosedError):
            self.rows = {name: stats.rows for name, stats in model.stats().items()}

    def leave(self, run: LocalRun, keeper: RunCheckpoints | None, ends: FirstAndLastSteps) -> None:
        """Take note of what an attempt has come to, before it is closed."""
        session = run.session
        self.step, self.live = session.step, session.batches.stream.live
        self.collections = len(session.model.stores)
        self.first_step_at = ends.first_at
        if keeper is not None:
            self.save_seconds += keeper.waited_seconds
        if run.evaluate is not None:
            self.evaluate_seconds += run.evaluate.seconds
            self.evaluations += run.evaluate.evaluations
