"""How this process of a run stands: put together for `monolith status watch`, from what it does.

starting ──► training ◄──► halted          a worker; `rejoining` after others were lost
waiting for the chief ──► serving ◄──► saving, restoring          a server
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from monolith import concurrency
from monolith.cluster.status import (
    EVERY,
    ProcessStatus,
    Rates,
    StatusBoard,
    StatusPage,
    StatusWriter,
    TierStatus,
)
from monolith.errors import MonolithError
from monolith.runtime.config import RunConfig
from monolith.store.store import add_tiered

if TYPE_CHECKING:
    from monolith.runtime import LocalRun
    from monolith.runtime.parameter_server import ServedShard
    from monolith.table import TableStats
    from monolith.train import Hook
    from monolith.train.hooks.live_line import StepCountsHook
    from monolith.wire.bulk import Traffic

IDLE_SECONDS = 15.0
"""A worker that has taken no step for so long is said to have taken none."""

Look = Callable[[ProcessStatus], ProcessStatus]


class OwnStatus:
    """What this process says of itself, from when it starts to when it ends. Thread-safe."""

    def __init__(
        self,
        run: RunConfig,
        *,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        cluster, every = run.cluster, run.metrics.status_every
        self._clock = clock
        self._timer = timer
        self._distributed = run.distributed
        self._every = every
        kept = bool(run.train.model_dir) and (every is None or bool(every))
        self._board = StatusBoard(run.train.model_dir) if kept else None
        self._start = ProcessStatus(
            role=cluster.role,
            index=cluster.index,
            state="starting",
            time=clock(),
            every=(every or EVERY).total_seconds(),
            started=clock(),
            host=socket.gethostname(),
            pid=os.getpid(),
            job=run.job.name or run.job.task or run.model_name,
            num_ps=cluster.num_ps if run.distributed else 0,
            num_workers=cluster.num_workers,
        )
        self._lock = concurrency.Lock()  # guards the fields below; held during a call of _look
        self._look: Look = lambda status: status
        self.control: Callable[[], str] = lambda: ""
        """Says where this process is controlled; empty while it is not."""
        self.metrics_url = ""
        """The URL of this process's metrics; empty if it has none."""
        self._writer: StatusWriter | None = None
        self._failovers = 0
        self.page = StatusPage(self._board, self._now, clock=clock, timer=timer)
        """The whole job as JSON, as far as its model_dir tells; else this process."""

    @contextmanager
    def written(self) -> Iterator[None]:
        """Keep a file in the model_dir up to date while the block lasts."""
        if self._board is None:
            yield
            return
        self._writer = StatusWriter(self._board, self.status, every=self._every, clock=self._clock)
        with self._writer:
            yield

    def status(self) -> ProcessStatus:
        """Return the status of this process now."""
        with self._lock:
            now = replace(
                self._start,
                time=self._clock(),
                failovers=self._failovers,
                control=self.control(),
                metrics=self.metrics_url,
            )
            return self._look(now)

    def _now(self) -> ProcessStatus:
        return self.status() if self._writer is None else self._writer.now()

    # A worker

    def watch_worker(self, local: LocalRun) -> Hook:
        """Return what counts the steps of an attempt to train, which is looked at from now on."""
        from monolith.runtime.publish_pause import describe_publishing
        from monolith.train.hooks.live_line import Outlook, StepCountsHook

        config = local.session.config
        outlook = Outlook(
            steps=config.steps,
            max_steps=config.max_steps,
            read=local.session.fraction_read,
            timer=self._timer,
        )
        counts = StepCountsHook(outlook.begin)
        live = local.session.batches.live
        rates, bytes_rates, tier_rates = (Rates(clock=self._timer) for _ in range(3))
        moved: list[float] = [0, self._timer()]  # the steps when there was last one more, and when that was

        def look(status: ProcessStatus) -> ProcessStatus:
            now = self._timer()
            if counts.steps != moved[0]:
                moved[:] = [counts.steps, now]
            grown = rates.of(
                {"examples": counts.examples, "steps": counts.steps, "model": float(counts.step or 0)}
            )
            received, sent = _wire_rates(bytes_rates, local.session.coordinator.status().traffic)
            tables = None if self._distributed else _tables(local)
            ahead = outlook.look(counts.step) if counts.steps and counts.step is not None else None
            troubles = [
                "" if local.save is None else local.save.trouble,
                local.session.batches.stream.trouble,
                local.session.progress.expiry.trouble,
            ]
            return replace(
                status,
                state=_worker_state(counts, local, now - moved[1]),
                step=counts.step,
                examples_per_s=grown.get("examples"),
                steps_per_s=grown.get("steps"),
                lag_seconds=max(status.time - counts.event_time, 0.0)
                if live and counts.event_time > 0
                else None,
                staleness=self._staleness(grown),
                rows=None if tables is None else sum(table.rows for table in tables),
                bytes=None if tables is None else sum(table.bytes_total for table in tables),
                tiers=_tiers(tier_rates, add_tiered(tables or ())),
                received_per_s=received,
                sent_per_s=sent,
                data_read=None if ahead is None else ahead.data_read,
                seconds_left=None if ahead is None else ahead.seconds_left,
                saved_at=None if local.save is None else local.save.saved_at,
                save_trouble="; ".join(filter(None, troubles)),
                publishing="" if local.publish is None else describe_publishing(local.publish.statuses),
                standbys=local.session.coordinator.status().standbys,
            )

        with self._lock:
            self._look = look
        return counts

    def lost_others(self) -> None:
        """Note that other processes were lost: this worker waits for them, and retries."""
        with self._lock:
            self._failovers += 1
            self._look = lambda status: replace(status, state="rejoining")

    def _staleness(self, grown: dict[str, float]) -> float | None:
        if not self._distributed or not grown.get("steps"):
            return None
        return max(grown["model"] / grown["steps"] - 1, 0.0)

    # A dispatcher or data worker

    def watch_reader(self, address: str, state: str) -> None:
        """Say from now on where this process of the data service listens, and that it is at work."""
        with self._lock:
            self._look = lambda status: replace(status, address=address, state=state)

    # A server

    def watch_server(self, share: ServedShard, address: str) -> None:
        """Look at a server from now on."""
        rates, bytes_rates, tier_rates = (Rates(clock=self._timer) for _ in range(3))

        def look(status: ProcessStatus) -> ProcessStatus:
            standing = share.figures()
            grown = rates.of({"steps": standing.step})
            received, sent = _wire_rates(bytes_rates, standing.traffic)
            return replace(
                status,
                state=standing.state,
                address=address,
                step=standing.step,
                steps_per_s=grown.get("steps") if standing.step else None,
                rows=standing.rows,
                bytes=standing.bytes,
                tiers=_tiers(tier_rates, standing.tiered),
                received_per_s=received,
                sent_per_s=sent,
            )

        with self._lock:
            self._look = look


def _wire_rates(rates: Rates, traffic: Traffic | None) -> tuple[float | None, float | None]:
    """Return bytes per second that came and went; their own rates, since a new connection begins at 0."""
    grown = {} if traffic is None else rates.of(traffic._asdict())
    return grown.get("received"), grown.get("sent")


def _worker_state(counts: StepCountsHook, local: LocalRun, idle: float) -> str:
    if counts.state != "training":
        return counts.state
    if local.barrier.placement() is not None:
        return "halted"
    if idle < IDLE_SECONDS:
        return "training"
    return f"no step for {idle:.0f} s"


def _tables(local: LocalRun) -> list[TableStats] | None:
    """Return the statistics of the tables in this process; None if they are closed by now."""
    try:
        return list(local.session.model.stats().values())
    except MonolithError:
        return None


def _tiers(rates: Rates, tiered: TableStats | None) -> TierStatus | None:
    if tiered is None:
        return None
    grown = rates.of(
        {
            "ids": tiered.tiered_ids,
            "ids_read": tiered.cold_ids_read,
            "reads": tiered.cold_reads,
            "read": tiered.cold_bytes_read,
            "written": tiered.cold_bytes_written,
        }
    )
    return TierStatus(
        rows=tiered.rows,
        hot_rows=tiered.rows - tiered.cold_rows,
        file_bytes=tiered.cold_bytes,
        compactions=tiered.compactions,
        ids_per_s=grown.get("ids"),
        ids_read_per_s=grown.get("ids_read"),
        reads_per_s=grown.get("reads"),
        read_per_s=grown.get("read"),
        written_per_s=grown.get("written"),
        device_rows=tiered.device_rows,
        device_bytes=tiered.device_bytes,
        memory_bytes=tiered.bytes_total - tiered.device_bytes,
    )
