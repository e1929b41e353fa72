"""`monolith demo` tells the whole story on one machine, in a minute and a half.

    learn       a process trains a DeepFM on clicks as they happen, publishes and saves
    serve       a checkpoint is exported; a server starts from the export, and follows the run
    freeze      a copy of the same checkpoint learns no more, like a server that does not follow
    new item    a never-seen item appears in the stream; the scene ends when its served score moves
    kill        the training process gets a kill -9; another resumes, and the server answers all the while
    poison      labels are wrong for a while: publishing is paused, and resumes when the model has recovered

Nothing is taken on trust: a prober queries the server all the time and records its answers, the ledger
compares the work of both training processes record by record, and the demo fails if any claim is false.
Each scene waits until the previous one has been seen, however slow the machine is.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from monolith.checkpoint import read_checkpoint_state
from monolith.errors import ConfigError, MissingExtraError, MonolithError, TrainingError
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.serve.client import Client, ClientOptions
from monolith.ui import Feed, Page
from monolith.wire.ports import bound_socket
from monolith_bench.examples.demo.drawing import (
    WIDTH,
    Screen,
    compared_text,
    intro,
    mean,
    resumed_text,
    summary,
)
from monolith_bench.examples.demo.ledger import Ledger
from monolith_bench.examples.demo.live_stream import Cues, LiveScript
from monolith_bench.examples.demo.picture import Marks, draw_picture
from monolith_bench.examples.demo.probing import Prober, ask_scores
from monolith_bench.examples.demo.process import Ended, Event, Started, TrainingProcess, WindowEnded
from monolith_bench.examples.demo.rival import FrozenRival, Judge, Point
from monolith_bench.examples.demo.serving import MODEL, ServingProcess
from monolith_bench.examples.demo.story import (
    Claim,
    ProbeAnswer,
    StoryTimes,
    claims,
    is_followed_again,
    seconds_to_moved,
)
from monolith_bench.examples.demo.task import DemoJob, LiveTask
from monolith_bench.options import DemoOptions
from monolith_bench.timing import one_thread

_log = logging.getLogger(__name__)

SERVE, NEW_ITEM, KILL, POISON = 0.15, 0.3, 0.45, 0.62
"""Shares of the demo after which each scene begins, if those before it are over."""
POISON_SHARE = 0.025
"""For so much of the demo labels are wrong."""
LINES = 12
"""Lines that are drawn in the course of a demo."""
LEAST_AGAIN = 10
"""Steps since the last checkpoint that the kill waits for, so that there is something to compare."""
LEAST_JUDGED = 3
"""Windows that both models must have predicted before the demo may end."""
LEAST_ASKED = 3
"""Answers before the new item appears."""
AHEAD_SECONDS = 1.0
"""Seconds from a cue to its record: no process may have read the record before the cue is given."""
CATCH_UP = 0.5
"""For so much of the demo labels stay right, until the trainer that came back has caught up."""
LOOK_EVERY = 0.1
"""Seconds, at the least, between two looks at whether a scene is over."""
LEAST_PATIENCE = 300.0
"""Seconds that a scene may take, at the least, on a machine that is busy."""
NEEDS = {"grpc": "serve", "uvicorn": "serve", "httptools": "serve"}
"""Packages that a server or the page need, and the extras that bring them."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """The options, settled."""

    seconds: float
    job: DemoJob
    folder: Path
    probe_every: float
    """Seconds from an answer to the next request."""

    @classmethod
    def settle(cls, options: DemoOptions, folder: Path, *, now: float, publish_to: str) -> DemoPlan:
        quick = options.quick
        seconds = min(options.seconds, 12.0) if quick else options.seconds
        rate, batch = (1_000, min(options.batch, 100)) if quick else (2_000, options.batch)
        return cls(
            seconds=seconds,
            job=DemoJob(
                model_dir=str(folder / "model"),
                script=LiveScript(began=int(now), rate=rate, batch=batch, length=seconds, seed=options.seed),
                publish_to=publish_to,
                dim=options.dim,
                window=rate if quick else 3 * rate,
                guard_window=600 if quick else 2_000,
                save_steps=max(2 * LEAST_AGAIN, round(seconds / 20 * rate / batch)),
            ),
            folder=folder,
            probe_every=0.1 if quick else 0.05,
        )


def run(options: DemoOptions) -> int:
    """Show it; return 0 if all of it was seen to be so."""
    for name in ("seconds", "dim", "batch"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"demo: --{name} must be above 0, got {getattr(options, name)}")
    for package, extra in NEEDS.items():
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, "the demo's server")
    folder = Path(tempfile.mkdtemp(prefix="monolith-demo-")) if options.to is None else options.to
    if (folder / "model").exists():
        raise ConfigError(f"demo: {folder} was already used by a demo; choose another folder with --to")
    folder.mkdir(parents=True, exist_ok=True)
    plan = DemoPlan.settle(options, folder, now=time.time(), publish_to=f"grpc://127.0.0.1:{free_port()}")
    console = Console()
    console.print(intro(plan.seconds, str(folder)), width=WIDTH, highlight=False)
    with one_thread():  # this process only watches, and leaves the cores to training and serving
        demo = Demo(plan, Screen(console))
        demo.play()
    return conclude(demo, console)


def free_port() -> int:
    """Return a free port: the restarted trainer must listen on the same port as the killed one."""
    with bound_socket("127.0.0.1", 0, whose="demo") as held:
        return int(held.getsockname()[1])


class Demo:
    """The course of events."""

    def __init__(self, plan: DemoPlan, screen: Screen) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.job.save_steps)
        self.judge = Judge(plan.job)
        self.points: list[Point] = []
        self.cues, self.times = Cues(), StoryTimes()
        self.checkpoint: str | None = None
        """The last one of all, when the demo is over."""
        self.answers: Sequence[ProbeAnswer] = ()
        """All of them, when the demo is over."""
        self._script = plan.job.script
        self._screen = screen
        self._feed = Feed("a copy that stopped")
        self._log = plan.folder / "train.log"
        self._prober: Prober | None = None
        self._fresh: list[Point] = []  # since the last line
        self._lines = 0
        self._resumed = self._compared = False  # whether that was told

    @property
    def progress(self) -> float:
        """How much of the time is over; 1 is all."""
        return (time.time() - self._script.began) / self.plan.seconds

    def play(self) -> None:
        """Tell the story from its beginning to its end. No process outlasts it.

        Raises:
            TrainingError: A scene took too long, or a process ended that should not.
        """
        with ExitStack() as opened:
            opened.enter_context(self._screen)
            threads = opened.enter_context(ThreadPoolExecutor(1))
            first = opened.enter_context(TrainingProcess(self.plan.job, self._log))
            self._serve(first, opened, threads)
            self._show_new_item(first)
            second = opened.enter_context(self._kill(first))
            self._poison(second)
            self._follow(second, "the end", self._may_end)
            second.stop()
            self._follow(second, "its last checkpoint", lambda: self.checkpoint is not None)
        assert self._prober is not None
        self.answers = self._prober.answers

    # The scenes

    def _serve(self, process: TrainingProcess, opened: ExitStack, threads: ThreadPoolExecutor) -> None:
        """Export a checkpoint, serve it and follow the run; ask from now on, and show the page."""
        enough = SERVE * self.plan.seconds * self._script.rate
        self._follow(
            process, "a checkpoint", lambda: self.ledger.next_record >= enough and self._saved_step() > 0
        )
        checkpoint = self._freeze()
        job, servables = self.plan.job, self.plan.folder / "servables"
        self._await(process, "the export", threads.submit(export, job, checkpoint, servables))
        log = self.plan.folder / "serve.log"
        server = opened.enter_context(ServingProcess(servables, job.publish_to, log))
        url = self._await(process, "the server", threads.submit(server.wait_until_ready))
        self._note(
            f"[blue]serving[/] at {url}: monolith serve {servables} --follow {job.publish_to}, "
            f"begun with step {_step_of(checkpoint):,}"
        )
        page = opened.enter_context(Page([self._feed, f"trainer={job.model_dir}", f"server={url}"]))
        self._note(f"[bold]the page[/]: {page.address}")
        client = opened.enter_context(Client(url, options=ClientOptions(timeout=timedelta(minutes=1))))
        prober = Prober(lambda: ask_scores(client, MODEL), every=self.plan.probe_every)
        self._prober = opened.enter_context(prober)

    def _show_new_item(self, process: TrainingProcess) -> None:
        self._follow(
            process,
            "answers of the server",
            lambda: self.progress >= NEW_ITEM and len(self._answered()) >= LEAST_ASKED,
        )
        appears = self._script.record_at(time.time() + AHEAD_SECONDS)
        self._cue(replace(self.cues, new_item=appears))
        appeared = self._script.time_of(appears)
        self.times = replace(self.times, appeared=appeared)
        self._follow(
            process,
            "the new item's score to move",
            lambda: seconds_to_moved(self._answered(), appeared) is not None,
        )
        self._note(
            f"[cyan]new item[/]: first seen in record {appears:,}; its served score moved "
            f"{seconds_to_moved(self._answered(), appeared):.2f} s later"
        )

    def _kill(self, process: TrainingProcess) -> TrainingProcess:
        """Kill the training process, and return the process that resumes training."""
        self._follow(process, "steps to take again", self._may_kill)
        killed_at = process.kill()
        for event in process.events():  # steps from before the kill whose events were not read yet
            self._take(event)
        self.ledger.killed(killed_at)
        self.times = replace(self.times, killed=killed_at, killed_step=self.ledger.step)
        self._note(
            f"[red]kill -9[/] of process {process.pid} after step {self.ledger.step:,}, before record "
            f"{self.ledger.next_record:,}; its last checkpoint is of step {self._saved_step():,}"
        )
        return TrainingProcess(self.plan.job, self._log)

    def _poison(self, process: TrainingProcess) -> None:
        self._follow(process, "the trainer that came back to be followed", self._may_poison)
        poison = self._script.record_at(time.time() + AHEAD_SECONDS)
        many = max(
            2 * self.plan.job.guard_window, round(POISON_SHARE * self.plan.seconds * self._script.rate)
        )
        self._cue(replace(self.cues, poison=poison, cured=poison + many))
        self.times = replace(self.times, poisoned=self._script.time_of(poison))
        self._follow(process, "publishing to be held", lambda: self.times.held is not None)
        self._follow(process, "the model to recover", lambda: self.times.released is not None)
        self._follow(process, "answers of what is current again", self._is_released)
        self._note("[green]recovered[/]: publishing continues, and the server has the current rows")

    def _may_kill(self) -> bool:
        if self.progress < KILL:
            return False
        saved = self._saved_step()
        return saved > 0 and self.ledger.step >= saved + LEAST_AGAIN

    def _may_poison(self) -> bool:
        resume, killed = self.ledger.resume(), self.times.killed
        if resume is None or killed is None or not self._compared or self.progress < POISON:
            return False
        self.times = replace(self.times, resumed=killed + resume.seconds)
        warm = self.plan.job.guard_warm_up + self.plan.job.guard_window
        if self.ledger.next_record - resume.next_record < warm:
            return False
        behind = time.time() - self._script.time_of(self.ledger.next_record)
        caught_up = behind <= AHEAD_SECONDS or self.progress >= POISON + CATCH_UP
        return caught_up and is_followed_again(self._answered(), self.times)

    def _is_released(self) -> bool:
        held, released = self.times.held_step or 0, self.times.released or 0.0
        return any(one.at >= released and one.step > held for one in self._answered())

    def _may_end(self) -> bool:
        judged = sum(point.frozen is not None for point in self.points)
        since = self.ledger.trained_by(self.times.released or 0.0)
        recovered = any(point.window.first >= since for point in self.points)
        return self.progress >= 1 and judged >= LEAST_JUDGED and recovered

    # Following the process that trains

    def _follow(self, process: TrainingProcess, what: str, until: Callable[[], bool]) -> None:
        """Take in what a process tells, until something is so.

        Raises:
            TrainingError: It ended first, or that took too long.
        """
        patience = max(LEAST_PATIENCE, 5 * self.plan.seconds)
        deadline, looked = time.monotonic() + patience, 0.0
        if until():
            return
        for event in process.events():
            self._take(event)
            if time.monotonic() < looked + LOOK_EVERY:
                continue
            looked = time.monotonic()
            self._look_at_publishing()
            if until():
                return
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"demo: waited {patience:.0f} s for {what}. The logs are in {self.plan.folder}"
                )
        if not until():
            raise process.died()

    def _await(self, process: TrainingProcess, what: str, made: Future[_Made]) -> _Made:
        self._follow(process, what, made.done)
        return made.result()

    def _take(self, event: Event) -> None:
        self.ledger.add(event)
        match event:
            case Started():  # windows after the checkpoint are measured again
                for points in (self.points, self._fresh):
                    points[:] = [point for point in points if point.window.end <= event.next_record]
            case WindowEnded():
                self._judge(event)
            case Ended():
                self.checkpoint = event.checkpoint
            case _:
                self._tell_resume()

    def _freeze(self) -> str:
        """Let the last checkpoint be the batch-trained model; return its prefix."""
        state = read_checkpoint_state(self.plan.job.model_dir)
        assert state is not None  # an earlier scene waited for a checkpoint
        step = _step_of(state.model_checkpoint_path)
        since = step * self._script.batch  # the event of this step may not have been read yet
        self.judge.rival = FrozenRival(self.plan.job, state.model_checkpoint_path, since)
        self._note(
            f"[magenta]batch-trained[/]: a copy of step {step:,} learns no more, from record {since:,} on"
        )
        return state.model_checkpoint_path

    def _judge(self, window: WindowEnded) -> None:
        if 2 * (window.end - window.first) < self.plan.job.window:
            return  # what was left over at the end
        point = self.judge.judge(window)
        self.points.append(point)
        self._fresh.append(point)
        if point.frozen is not None:
            self._feed.add("auc", self._script.began + point.seconds, point.frozen)
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
            self._note(resumed_text(resume))
        if resume.compared == resume.again:
            self._compared = True
            self._note(compared_text(resume))

    def _look_at_publishing(self) -> None:
        """Ask the run whether it is held, as `monolith publish status` does, from the wrong labels on."""
        from monolith.train.hooks import ControlClient

        times = self.times
        if times.poisoned is None or times.released is not None:
            return
        try:
            with ControlClient(self.plan.job.model_dir, timeout=60.0) as job:
                (share,) = job.publish("status")
        except MonolithError:
            return  # asked again
        if share.held and times.held is None:
            self.times = replace(times, held=share.since, held_step=share.step)
            after = share.since - times.poisoned
            self._note(
                f"[yellow]publishing paused[/] {after:.1f} s after the first wrong label: {share.reason}"
            )
        elif times.held is not None and not share.held:
            self.times = replace(times, released=share.since)

    def _answered(self) -> list[ProbeAnswer]:
        return [] if self._prober is None else self._prober.answers

    def _cue(self, cues: Cues) -> None:
        self.cues = cues
        self.plan.job.cues.write(cues)

    def _note(self, text: str) -> None:
        """Say what happened, here and on the page."""
        self._screen.note(text)
        self._feed.say(Text.from_markup(text).plain)

    def _saved_step(self) -> int:
        state = read_checkpoint_state(self.plan.job.model_dir)
        return 0 if state is None else _step_of(state.model_checkpoint_path)


def export(job: DemoJob, checkpoint: str, folder: Path) -> None:
    """Make a servable of a checkpoint, as `monolith export` does."""
    config = job.train_config()
    how = how_to_export(ExportConfig(), config)
    with task_exporter(LiveTask(job), config, how, say=_log.debug) as exporter:
        exporter.export(checkpoint, str(folder))


def conclude(demo: Demo, console: Console) -> int:
    """Say what it came to, draw the picture, and return the exit status."""
    judge, ledger, resume = demo.judge, demo.ledger, demo.ledger.resume()
    assert resume is not None
    assert judge.rival is not None
    assert demo.checkpoint is not None
    calm = [point for point in demo.points if is_calm(point, demo)]
    told = claims(demo.answers, demo.times)
    good = is_good(calm, told) and resume.exact and ledger.gapless()
    size = bytes_of(demo.checkpoint)
    console.print(summary(calm, ledger, resume, told, checkpoint_bytes=size, good=good))
    picture = demo.plan.folder / "auc.png"
    began, times = demo.plan.job.script.began, demo.times
    marks = Marks(
        stopped=judge.seconds(judge.rival.since),
        checkpoint=judge.seconds(resume.next_record),
        killed=judge.seconds(resume.killed_record),
        appeared=(times.appeared or began) - began,
        held=judge.seconds(ledger.trained_by(times.held or began)),
        released=judge.seconds(ledger.trained_by(times.released or began)),
    )
    try:
        draw_picture(picture, demo.points, marks)
        console.print(f"The picture: {picture}", highlight=False, soft_wrap=True)
    except MissingExtraError as missing:
        console.print(f"No picture: {missing}", markup=False, highlight=False, soft_wrap=True)
    judge.rival.close()
    return 0 if good else 1


def is_calm(point: Point, demo: Demo) -> bool:
    """Return whether a window ends before the wrong labels, or begins after publishing resumed."""
    poison, released = demo.cues.poison, demo.times.released
    if poison is None or point.window.end <= poison:
        return True
    return released is not None and point.window.first >= demo.ledger.trained_by(released)


def is_good(calm: Sequence[Point], told: Sequence[Claim]) -> bool:
    """Return whether every claim is true, and the model that keeps learning beats the one that stopped."""
    gains = [point.online - point.frozen for point in calm if point.frozen is not None]
    return all(claim.true for claim in told) and bool(gains) and mean(gains) > 0


def bytes_of(checkpoint: str) -> int:
    """Return the size of all files of a checkpoint."""
    beside = Path(checkpoint).parent.glob(f"{Path(checkpoint).name}.*")
    return sum(file.stat().st_size for path in beside for file in (path, *path.rglob("*")) if file.is_file())


def _step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])
