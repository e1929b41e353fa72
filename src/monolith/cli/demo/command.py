"""`monolith demo`: a model that learns while it predicts, one that stopped, and a kill in between.

    learn       a process trains a DeepFM on a drifting stream, and saves beside the training
    freeze      a checkpoint of it becomes the batch-trained model, which learns no more
    kill        the process gets a kill -9, in the middle of whatever it does
    resume      another one goes on from the last checkpoint, until the time is up

Nothing is taken on trust: the ledger compares record by record what both processes did,
and the demo fails if the resume was not exact or the online model is not the better one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from monolith.checkpoint import read_checkpoint_state
from monolith.cli.demo.drawing import WIDTH, Screen, compared_text, intro, mean, resumed_text, summary
from monolith.cli.demo.ledger import Ledger
from monolith.cli.demo.picture import draw_picture
from monolith.cli.demo.process import Ended, Event, Started, TrainingProcess, WindowEnded
from monolith.cli.demo.rival import FrozenRival, Judge, Point
from monolith.cli.demo.task import DemoJob
from monolith.cli.options.shows import DemoOptions
from monolith.errors import ConfigError, MissingExtraError

FREEZE, KILL = 0.2, 0.5
"""Shares of the demo after which the copy stops, and the process is killed."""
LINES = 12
"""Lines that are drawn in the course of a demo."""
LEAST_AGAIN = 10
"""Steps since the last checkpoint that the kill waits for, so that there is something to compare."""
LEAST_JUDGED = 3
"""Windows that both models must have predicted before the demo may end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """The options, settled."""

    seconds: float
    steps: int | None
    """Counts instead of seconds: what a test does must not depend on how fast the machine is."""
    job: DemoJob
    folder: Path

    @classmethod
    def settle(cls, options: DemoOptions, folder: Path) -> DemoPlan:
        quick = options.quick
        batch = min(options.batch, 256) if quick else options.batch
        window = 5_000 if quick else 50_000
        return cls(
            seconds=options.seconds,
            steps=600 if quick else None,
            job=DemoJob(
                model_dir=str(folder / "model"),
                dim=options.dim,
                batch=batch,
                seed=options.seed,
                window=max(1, round(window / batch)) * batch,
                save_steps=50 if quick else 200,
                small=quick,
            ),
            folder=folder,
        )


def run(options: DemoOptions) -> int:
    """Show it; return 0 if the online model was better than the frozen one and the resume was exact."""
    for name in ("seconds", "dim", "batch"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"demo: --{name} must be above 0, got {getattr(options, name)}")
    folder = Path(tempfile.mkdtemp(prefix="monolith-demo-")) if options.to is None else options.to
    if (folder / "model").exists():
        raise ConfigError(f"demo: {folder} was already used by a demo; choose another folder with --to")
    folder.mkdir(parents=True, exist_ok=True)
    plan = DemoPlan.settle(options, folder)
    console = Console()
    console.print(intro(plan.seconds, plan.steps, str(folder)), width=WIDTH, highlight=False)
    with Screen(console) as screen, one_thread():
        demo = Demo(plan, screen)
        demo.play()
    return conclude(demo, console)


@contextmanager
def one_thread() -> Iterator[None]:
    """Predict with one thread: this process looks on, and the one that trains should have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Demo:
    """The course of events."""

    def __init__(self, plan: DemoPlan, screen: Screen) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.job.save_steps)
        self.judge = Judge(plan.job)
        self.points: list[Point] = []
        self.checkpoint: str | None = None
        """The last one of all, when the demo is over."""
        self._screen = screen
        self._log = plan.folder / "train.log"
        self._fresh: list[Point] = []  # since the last line
        self._lines = 0
        self._resumed = self._compared = False  # whether that was told

    @property
    def progress(self) -> float:
        """How much of the demo is done; 1 is all."""
        if self.plan.steps is not None:
            return self.ledger.step / self.plan.steps
        return self.ledger.seconds / self.plan.seconds

    def play(self) -> None:
        """Learn, freeze, kill, resume."""
        with TrainingProcess(self.plan.job, self._log) as first:
            self._follow(first, until=self._may_kill)
            killed_at = first.kill()
            for event in first.events():  # what it had done, and we had not heard of yet
                self._take(event)
        self.ledger.killed(killed_at)
        self._screen.note(
            f"[red]kill -9[/] of process {first.pid} after step {self.ledger.step:,}, before record "
            f"{self.ledger.next_record:,}; its last checkpoint is of step {self._saved_step():,}"
        )
        with TrainingProcess(self.plan.job, self._log) as second:
            self._follow(second, until=self._may_end)
            second.stop()
            self._follow(second, until=lambda: self.checkpoint is not None)

    def _follow(self, process: TrainingProcess, *, until: Callable[[], bool]) -> None:
        """Take in what a process tells, until something is so.

        Raises:
            TrainingError: It ended first.
        """
        for event in process.events():
            self._take(event)
            if until():
                return
        raise process.died()

    def _may_kill(self) -> bool:
        if self.progress < KILL or self.judge.rival is None:
            return False
        saved = self._saved_step()
        return saved > 0 and self.ledger.step >= saved + LEAST_AGAIN

    def _may_end(self) -> bool:
        judged = sum(point.frozen is not None for point in self.points)
        return self.progress >= 1 and self._compared and judged >= LEAST_JUDGED

    def _take(self, event: Event) -> None:
        self.ledger.add(event)
        match event:
            case Started():  # what was lost is measured again
                for points in (self.points, self._fresh):
                    points[:] = [point for point in points if point.window.end <= event.next_record]
            case WindowEnded():
                self._freeze()
                self._judge(event)
            case Ended():
                self.checkpoint = event.checkpoint
            case _:
                self._tell_resume()

    def _freeze(self) -> None:
        """Let the last checkpoint be the batch-trained model, when it is time."""
        if self.judge.rival is not None or self.progress < FREEZE:
            return
        state = read_checkpoint_state(self.plan.job.model_dir)
        if state is None:
            return
        step = _step_of(state.model_checkpoint_path)
        since = self.ledger.end_of(step)
        self.judge.rival = FrozenRival(self.plan.job, state.model_checkpoint_path, since)
        for points in (self.points, self._fresh):  # it might have predicted the last of them already
            points[:] = [self.judge.judge(p.window) if p.window.first >= since else p for p in points]
        self._screen.note(
            f"[magenta]batch-trained[/]: a copy of step {step:,} learns no more, from record {since:,} on"
        )

    def _judge(self, window: WindowEnded) -> None:
        if 2 * (window.end - window.first) < self.plan.job.window:
            return  # what was left over at the end
        point = self.judge.judge(window)
        self.points.append(point)
        self._fresh.append(point)
        if self.progress * LINES >= self._lines + 1:
            self._screen.line(self._fresh, self.ledger)
            self._fresh = []
            self._lines = int(self.progress * LINES)

    def _tell_resume(self) -> None:
        resume = None if self._compared else self.ledger.resume()
        if resume is None:
            return
        if not self._resumed:
            self._resumed = True
            self._screen.note(resumed_text(resume))
        if resume.compared == resume.again:
            self._compared = True
            self._screen.note(compared_text(resume))

    def _saved_step(self) -> int:
        state = read_checkpoint_state(self.plan.job.model_dir)
        return 0 if state is None else _step_of(state.model_checkpoint_path)


def conclude(demo: Demo, console: Console) -> int:
    """Say what it came to, draw the picture, and return the exit status."""
    judge, ledger, resume = demo.judge, demo.ledger, demo.ledger.resume()
    assert resume is not None
    assert judge.rival is not None
    assert demo.checkpoint is not None
    good = is_better(demo.points) and resume.exact and ledger.gapless()
    console.print(
        summary(
            demo.points,
            ledger,
            resume,
            checkpoint_bytes=bytes_of(demo.checkpoint),
            good=good,
        )
    )
    picture = demo.plan.folder / "auc.png"
    try:
        draw_picture(
            picture,
            demo.points,
            stopped=judge.hours(judge.rival.since),
            checkpoint=judge.hours(resume.next_record),
            killed=judge.hours(resume.killed_record),
        )
        console.print(f"The picture: {picture}", highlight=False, soft_wrap=True)
    except MissingExtraError as missing:
        console.print(f"No picture: {missing}", markup=False, highlight=False, soft_wrap=True)
    judge.rival.close()
    return 0 if good else 1


def is_better(points: Sequence[Point]) -> bool:
    """Whether the model that went on learning beats the one that stopped, where both predicted."""
    gains = [point.online - point.frozen for point in points if point.frozen is not None]
    return bool(gains) and mean(gains) > 0


def bytes_of(checkpoint: str) -> int:
    """Return the size of all files of a checkpoint."""
    beside = Path(checkpoint).parent.glob(f"{Path(checkpoint).name}.*")
    return sum(file.stat().st_size for path in beside for file in (path, *path.rglob("*")) if file.is_file())


def _step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])
