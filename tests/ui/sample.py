"""A page with something of everything: a run that learns, a copy that does not, and a server."""

from __future__ import annotations

import math
from typing import Any

from monolith.errors import RequestError, UnavailableError
from monolith.ui import Feed
from monolith.ui.figures import (
    STAGES,
    CheckpointFigures,
    CurvePoint,
    Distribution,
    ModelFigures,
    PageReading,
    ProcessFigures,
    PublishFigures,
    RunState,
    SplitFigures,
    StageFigures,
    TableFigures,
)

NOW = 1_790_000_000.0
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, None)


class SampleRun:
    """A run whose publishing can be held; says so when it is."""

    def __init__(self, name: str = "online") -> None:
        self.name = name
        self.held: str | None = None
        self.version: str | None = None
        self.calls: list[tuple[str, str]] = []
        self.problem: str | None = None
        self.state: RunState = "up"
        self._points = curve(0.62, 0.155, 0.03) + [
            CurvePoint("examples", "", NOW - 300 + 3 * at, 5_000 + 350 * math.sin(at / 7))
            for at in range(100)
        ]

    set_split = None

    @property
    def publishing(self) -> SampleRun:
        return self

    def hold(self, reason: str) -> None:
        self.calls.append(("hold", reason))
        self.held = reason

    def resume(self) -> None:
        self.calls.append(("resume", ""))
        self.held = self.version = None

    def rollback(self, version: str) -> None:
        self.calls.append(("rollback", version))
        if version == "9":
            raise UnavailableError("version 9 is not there any more")
        self.held, self.version = f"rolled back to {version}", version

    def read(self) -> PageReading:
        if self.problem is not None:
            raise UnavailableError(self.problem)
        points, self._points = self._points, []
        return PageReading(
            kind="run",
            state=self.state,
            facts={"step": "48,200", "loss": "0.4312", "behind": "1 s"},
            points=points,
            tables=[
                TableFigures(
                    table="item",
                    rows=1_204_331,
                    bytes=193_000_000,
                    births=1_310_002,
                    filtered=88_120,
                    refused=12,
                    expired=105_671,
                ),
                TableFigures(
                    table="user", rows=410_022, bytes=66_000_000, births=410_022, refused=0, expired=0
                ),
            ],
            stages=[stage(name, at) for at, name in enumerate(STAGES)],
            publish=PublishFigures(
                held=self.held is not None,
                reason=self.held or "",
                since=NOW,
                version=self.version,
                versions=("48000", "47000", "46000"),
                controllable=True,
            ),
            checkpoints=[
                CheckpointFigures(
                    name=f"model.ckpt-{step}",
                    step=step,
                    saved_at=NOW - 100 * at,
                    kind="full" if at else "incremental",
                    rows=1_600_000 - at * 1000,
                    bytes=260_000_000 if at else 8_100_000,
                    marks=["latest", "listed"] if not at else ["listed"],
                )
                for at, step in enumerate((48_000, 47_000, 46_000))
            ],
            processes=[
                ProcessFigures(
                    name="ps 1", state="silent for 14 s", place="10.0.0.12:4301", trouble=True, restarts=2
                ),
                ProcessFigures(
                    name="worker 0",
                    state="training",
                    place="here pid 4242",
                    trouble=False,
                    step=48_200,
                    examples_per_s=5_021.5,
                    lag_seconds=0.8,
                ),
                ProcessFigures(
                    name="ps 0",
                    state="serving",
                    place="10.0.0.11:4301",
                    trouble=False,
                    rows=800_112,
                    bytes=131_000_000,
                ),
            ],
        )

    def close(self) -> None:
        """Nothing is held."""


class SampleServer:
    """A server of one model, whose requests are split between two versions."""

    name = "ads"
    publishing = None

    def __init__(self) -> None:
        self.targets = "ads/45000:30,ads/48000:10"
        self._points = [
            point
            for at in range(100)
            for point in (
                CurvePoint("requests", "", NOW - 300 + 3 * at, 410 + 30 * math.sin(at / 5)),
                CurvePoint("latency", "ads p50", NOW - 300 + 3 * at, 1.8 + 0.1 * math.sin(at / 3)),
                CurvePoint("latency", "ads p99", NOW - 300 + 3 * at, 4.9 + math.sin(at / 9)),
            )
        ]

    def read(self) -> PageReading:
        points, self._points = self._points, []
        return PageReading(
            kind="server",
            facts={"requests": "120,331", "rows": "3,850,592"},
            points=points,
            models=[
                ModelFigures(name="ads", version="48000", state="READY"),
                ModelFigures(
                    name="ads", version="45000", state="UNAVAILABLE", reason="the file rows.bin is damaged"
                ),
            ],
            splits=[SplitFigures(name="ads", targets=self.targets)] if self.targets else [],
        )

    def set_split(self, name: str, targets: str) -> None:
        if name != "ads" or "9" in targets:
            raise RequestError(f"ads answers 404: there is no {name}={targets}")
        self.targets = targets

    def close(self) -> None:
        """Nothing is held."""


def curve(start: float, rise: float, noise: float) -> list[CurvePoint]:
    return [
        CurvePoint(
            "auc",
            "",
            NOW - 86_400 + 432 * at,
            start + rise * (1 - math.exp(-at / 40)) + noise * math.sin(at * 12.9) * 0.2,
        )
        for at in range(200)
    ]


def stage(name: str, at: int) -> StageFigures:
    middle = (5, 3, 6, 1, 2, 7)[at]
    counts = [round(400 * math.exp(-((number - middle) ** 2) / 1.6)) for number in range(len(BOUNDS))]
    p50 = BOUNDS[middle]
    assert p50 is not None
    return StageFigures(
        stage=name, seconds=Distribution(bounds=BOUNDS, counts=counts, p50=p50, p99=3.1 * p50)
    )


def sample_sources() -> tuple[SampleRun, list[Any]]:
    run, frozen = SampleRun(), Feed("frozen")
    for point in curve(0.62, 0.155, 0.03)[:60]:
        frozen.add("auc", point.x, point.y - 0.0002)
    for at in range(60, 200):
        frozen.add("auc", NOW - 86_400 + 432 * at, 0.752 - 0.0006 * (at - 60) + 0.003 * math.sin(at * 7.7))
    frozen.say("a copy of step 9,600 that learns no more")
    return run, [run, frozen, SampleServer()]
