"""`monolith bench freshness`: from an event to an answer that knows of it, and what that costs both sides.

Answers: one process trains on events at a steady pace and publishes, `monolith serve --follow` serves, and
this one asks for items that are new in the stream until an answer knows of them; then once more while
checkpoints are saved. Lists: the same with a two-tower model, until the list of a user's best items has the
new item, and until it no longer has an item that the trainer removed. Training: as fast as it goes, with
publishing, with a server that follows, and with neither, by turns. Serving: requests with rows being applied
and without, by turns.
"""

from __future__ import annotations

import json
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from monolith.errors import ConfigError, MonolithError, UnavailableError
from monolith.runtime import LocalRun, Trainer
from monolith.serve.client import Client, ClientOptions
from monolith.serve.client_messages import ClientAnswer
from monolith.serve.freshness_probe import quantile
from monolith.train import Hook, StepResult, TrainConfig, TrainingRun
from monolith_bench.marked_answers import STAGES_OF_MARKS, ListWatch, MarkSeen, MarkWatch, RemovalWatch
from monolith_bench.marked_events import NOBODY, EventsWriter, FreshnessJob, MarkedClicks
from monolith_bench.marked_trainer import FillTables, TrainerProcess, export_filled, publish_plan_to
from monolith_bench.options import BenchFreshnessOptions, BenchServeOptions
from monolith_bench.report import Report
from monolith_bench.row_feed import START, RowFeed
from monolith_bench.serve import NAME, ServeCase, Wire, columns_of, grpc_request, over_wire, served
from monolith_bench.serve_load import LoadSeen
from monolith_bench.served_deepfm import names_of, write_deepfm

ANSWER = "event to answer"
SAVING = "event to answer, while checkpoints are saved"
LIST = "event to list, {:,} items"
REMOVAL = "removal to list, {:,} items"
FILE = "event to answer, {:,} lines/s of a growing file"
ALONE = "training, nothing published"
AT_REST = "requests, nothing applied"
ROLLBACK_ROWS = 10_000_000
_REMOVE_AFTER = 2.0
"""Seconds from a marked event until the trainer removes its item, of a list."""
_PATIENCE = 300.0
_FILE_SECONDS = 20
"""How long events of a file are waited for at most."""


def run(options: BenchFreshnessOptions) -> int:
    """Measure, and print what was found."""
    options = quick(options) if options.quick else options
    check(options)
    report = Report("freshness")
    with tempfile.TemporaryDirectory(prefix="monolith-bench-", dir=options.folder) as folder:
        root = Path(folder)
        if {"answers", "file", "training"} & set(options.parts):
            job, exported = job_of(options, root), root / "exported"
            report.say(f"making and exporting a model of {2 * job.rows:,} rows")
            export_filled(job, exported)
            if "answers" in options.parts:
                measure_answers(report, job, exported, options)
            if "file" in options.parts:
                measure_file(report, job, exported, options)
            if "training" in options.parts:
                measure_training(report, job, exported, options)
        if "lists" in options.parts:
            measure_lists(report, root / "towers", options)
        if "serving" in options.parts:
            measure_serving(report, root / "served", options)
        if options.rollback:
            measure_rollback(report, root / "back", options)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def quick(options: BenchFreshnessOptions) -> BenchFreshnessOptions:
    return replace(
        options,
        marks=min(options.marks, 5),
        rate=1000,
        rows=2_000,
        catalogue=1_000,
        dim=4,
        train_batch=64,
        applied=2_000,
        connections=1,
        request_rows=2,
        seconds=0.2,
        repeats=1,
    )


def check(options: BenchFreshnessOptions) -> None:
    """Refuse what cannot be measured."""
    counts = (
        "rate",
        "file_rate",
        "file_batch",
        "marks",
        "marks_per_second",
        "batch",
        "dim",
        "train_batch",
        "applied",
        "connections",
    )
    for name in (*counts, "request_rows", "repeats", "rows", "catalogue"):
        least = 1000 if name in ("rows", "catalogue") else 1
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"bench freshness: --{flag} must be at least {least}, got {getattr(options, name)}"
            )
    if options.interval_ms <= 0 or options.seconds <= 0:
        raise ConfigError("bench freshness: --interval-ms and --seconds must be above 0")
    if options.rate < options.marks_per_second:
        raise ConfigError("bench freshness: --marks-per-second must be at most --rate")


def job_of(options: BenchFreshnessOptions, root: Path) -> FreshnessJob:
    return FreshnessJob(
        model_dir=str(root / "live"),
        rows=options.rows // 2,
        dim=options.dim,
        batch=options.batch,
        rate=options.rate,
        mark_every=options.rate // options.marks_per_second,
        seed=options.seed,
    )


def interval_of(options: BenchFreshnessOptions) -> timedelta:
    return timedelta(milliseconds=options.interval_ms)


# From events to answers


def measure_answers(report: Report, job: FreshnessJob, root: Path, options: BenchFreshnessOptions) -> None:
    """Wait for marked events at rest, and while checkpoints are saved."""
    report.say(f"{options.rate:,} events/s: a process trains, one serves")
    with (
        free_url() as url,
        TrainerProcess(job, url, interval_of(options)) as trainer,
        served(root, follow=url) as ports,
        asking(ports["http"]) as client,
    ):
        trainer.wait_until_started()
        watch = MarkWatch(job, trainer.began, client, NAME)
        wait_for(lambda: followed(watch.ask([NOBODY]).parameters), "the server does not follow")
        watch.pass_over()
        watch.watch(max(1, options.marks // 20))  # to warm up
        report.say(f"waiting for {options.marks} marked events")
        begun, first = time.time(), len(trainer.batches)
        quiet = watch.watch(options.marks)
        trained = (len(trainer.batches) - first) * job.batch / (time.time() - begun)
        report.say(f"waiting for {options.marks} marked events while checkpoints are saved")
        asked = len(trainer.saves)

        def save_again() -> None:
            nonlocal asked
            if len(trainer.saves) == asked:
                asked += 1
                trainer.save()

        busy = watch.watch(options.marks, between=save_again)
        wait_for(lambda: len(trainer.saves) == asked, "a checkpoint is not saved")
    report.add("events trained", "events_per_s", trained, "events/s", note=f"of {options.rate:,} a second")
    saved = [one for one in busy if any(one.happened < b and a < one.answered for a, b in trainer.saves)]
    stages = stages_of(job, trainer)
    add_marks(report, ANSWER, quiet, stages)
    report.add("marked events that no answer knew of in time", "lost", watch.lost, "events")
    report.show(f"From an event to an answer that knows of it, deltas every {options.interval_ms:g} ms")
    add_marks(report, SAVING, saved, stages, beside=quiet)
    report.add("checkpoints saved meanwhile", "count", len(trainer.saves), "checkpoints")
    report.show("The same while checkpoints are saved")


def measure_file(report: Report, job: FreshnessJob, root: Path, options: BenchFreshnessOptions) -> None:
    """Wait for marked events that are lines of a file which grows, slowly enough that no batch is full."""
    per_second = min(options.marks_per_second, options.file_rate)
    job = replace(
        job,
        model_dir=f"{job.model_dir}-of-a-file",
        batch=options.file_batch,
        rate=options.file_rate,
        mark_every=options.file_rate // per_second,
        file=str(root.parent / "events.csv"),
    )
    marks = min(options.marks, _FILE_SECONDS * per_second)
    report.say(f"{options.file_rate:,} events/s are lines of a file that grows")
    with (
        free_url() as url,
        EventsWriter(job) as events,
        TrainerProcess(job, url, interval_of(options)) as trainer,
        served(root, follow=url) as ports,
        asking(ports["http"]) as client,
    ):
        trainer.wait_until_started()
        watch = MarkWatch(job, events.began, client, NAME)
        wait_for(lambda: followed(watch.ask([NOBODY]).parameters), "the server does not follow")
        watch.pass_over()
        watch.watch(max(1, marks // 20))  # to warm up
        report.say(f"waiting for {marks} marked events")
        seen = watch.watch(marks)
    add_marks(report, FILE.format(options.file_rate), seen, lambda one: one.stages())
    report.add("marked lines that no answer knew of in time", "lost", watch.lost, "events")
    report.show("From a line of a file to an answer that knows of it")


def measure_lists(report: Report, root: Path, options: BenchFreshnessOptions) -> None:
    """Wait until lists of best items have new items, and until they have removed ones no more."""
    # Linear towers that end in fewer floats than they begin with: a row that moves by the gradient of one
    # event then moves the item's vector towards the user's, nearer than any other item is by chance.
    job = replace(job_of(options, root), towers=True, dim=64, hidden=(), out=32)
    job = replace(job, rows=options.catalogue, remove_after=_REMOVE_AFTER)
    report.say(f"making and exporting a two-tower model of {job.rows:,} users and items")
    export_filled(job, root / "exported")
    with (
        free_url() as url,
        TrainerProcess(job, url, interval_of(options)) as trainer,
        served(root / "exported", follow=url) as ports,
        asking(ports["http"]) as client,
    ):
        trainer.wait_until_started()
        coming = ListWatch(job, trainer.began, client, NAME)
        going = RemovalWatch(job, trainer.began, trainer.removed, client, NAME)
        user = {"user": [0]}
        wait_for(lambda: followed(client.topk(NAME, user).parameters), "the server does not follow")
        coming.pass_over()
        coming.watch(max(1, options.marks // 20))  # to warm up
        report.say(f"waiting for {options.marks} new items in lists")
        came = coming.watch(options.marks)
        going.pass_over()
        report.say(f"waiting for {options.marks} removed items to leave them")
        went = going.watch(options.marks)
    add_marks(report, LIST.format(job.rows), came, stages_of(job, trainer))
    report.add("new items that were in no list in time", "lost", coming.lost, "items")
    removal = REMOVAL.format(job.rows)
    add_marks(report, removal, went, stages_of_removal)
    report.add("removed items that were not seen to leave a list", "lost", going.lost, "items")
    report.show("From an event, and from a removal, to the list of the best items of a user")


StagesOf = Callable[[MarkSeen], Mapping[str, float]]


def stages_of(job: FreshnessJob, trainer: TrainerProcess) -> StagesOf:
    """Return what splits a mark's time into stages, given when the trainer had read and trained its batch."""
    told = trainer.batches
    return lambda one: one.stages(*told[job.batch_of_mark(one.number)])


def stages_of_removal(one: MarkSeen) -> Mapping[str, float]:
    """Split the time of a removal, which nothing had to read or to train."""
    stages = one.stages(one.happened, one.happened)
    return {name: stages[name] for name in STAGES_OF_MARKS[2:]}


def add_marks(
    report: Report,
    case: str,
    marks: Sequence[MarkSeen],
    stages_of: StagesOf,
    *,
    beside: Sequence[MarkSeen] = (),
) -> None:
    """Record how long marked events took, and where."""
    if not marks:
        report.add(case, "p50", None, "ms", note="no mark was seen")
        return
    note = f"{len(marks)} events"
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = 1e3 * quantile([one.seconds for one in marks], share)
        if beside:
            other = 1e3 * quantile([one.seconds for one in beside], share)
            report.compare(f"{case}, {name}", name, value, "ms", {f"{ANSWER}, {name}": other}, note=note)
        else:
            report.add(f"{case}, {name}", name, value, "ms", note=note)
    stages = [stages_of(one) for one in marks]
    for stage in stages[0]:
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            value = 1e3 * quantile([one[stage] for one in stages], share)
            report.add(f"{case}, {stage}, {name}", f"{stage}_{name}", value, "ms")


def followed(parameters: Mapping[str, Any]) -> bool:
    """Return whether an answer was brought up to date by a delta."""
    return "published_at" in parameters


# Training while publishing


class _Windows(Hook):
    """Counts examples and processor time in windows, after some time to warm up, and then ends the run."""

    def __init__(self, options: BenchFreshnessOptions, *, warm_up: float) -> None:
        self._seconds = options.seconds
        self._count = options.repeats
        self._warm_until = time.perf_counter() + warm_up
        self._begun: tuple[float, float] | None = None
        self._examples = 0
        self.rates: list[float] = []
        """Examples per second."""
        self.processor_rates: list[float] = []
        """Examples per second of processor time, of all threads."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        now = (time.perf_counter(), time.process_time())
        if self._begun is None:
            if now[0] >= self._warm_until:
                self._begun = now
            return
        self._examples += result.examples
        if now[0] - self._begun[0] < self._seconds:
            return
        self.rates.append(self._examples / (now[0] - self._begun[0]))
        self.processor_rates.append(self._examples / (now[1] - self._begun[1]))
        self._begun, self._examples = now, 0
        if len(self.rates) == self._count:
            run.request_stop("measured")


def measure_training(report: Report, job: FreshnessJob, root: Path, options: BenchFreshnessOptions) -> None:
    """Train without publishing, with it, and with a server that follows: two rounds by turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best: dict[str, tuple[float, float]] = {}
    ways = (ALONE, "training, published", "training, published and followed")
    for turn in range(1 if options.quick else 2):
        for way in ways:
            report.say(f"{way}, round {turn + 1}")
            rate, processor = trained(job, root, options, publish=way != ALONE, follow=way == ways[2])
            before = best.get(way, (0.0, 0.0))
            best[way] = (max(before[0], rate), max(before[1], processor))
    torch.set_num_threads(threads)
    for place, metric in enumerate(("examples_per_s", "examples_per_processor_s")):
        unit = "examples/s" if place == 0 else "examples/s of processor"
        alone = best[ALONE][place]
        report.add(ALONE, metric, alone, unit)
        for way in ways[1:]:
            report.compare(way, metric, best[way][place], unit, {ALONE: alone})
    report.show(f"Training, one thread of torch, batches of {options.train_batch}")


def trained(
    job: FreshnessJob, root: Path, options: BenchFreshnessOptions, *, publish: bool, follow: bool
) -> tuple[float, float]:
    """Return the best rate by the clock and by processor time of one run."""
    job = replace(job, model_dir="", batch=options.train_batch, rate=None, mark_every=0)
    windows: list[_Windows] = []

    def hooks(run: LocalRun) -> list[Hook]:
        windows.append(_Windows(options, warm_up=0.0 if options.quick else 4.0))
        return [FillTables(run, job), windows[0]]

    with free_url() as url, served(root, follow=url) if follow else nullcontext():
        plan = publish_plan_to(url, interval_of(options)) if publish else None
        config = TrainConfig(summary_every_steps=None)
        Trainer(MarkedClicks(job), config, hooks=hooks, publish=plan).train()
    return max(windows[0].rates), max(windows[0].processor_rates)


# Serving while applying updates


def serve_options(options: BenchFreshnessOptions, rows: int) -> BenchServeOptions:
    features = 4 if options.quick else 26
    return BenchServeOptions(
        rows=rows,
        features=features,
        dim=options.dim,
        hidden=(8,) if options.quick else (128, 64),
        seconds=options.seconds,
        seed=options.seed,
    )


def measure_serving(report: Report, root: Path, options: BenchFreshnessOptions) -> None:
    """Ask a server with rows being applied and without, by turns."""
    made = serve_options(options, options.rows)
    report.say(f"writing a servable of {options.rows:,} rows")
    widths = write_deepfm(root, made, START)
    interval = options.interval_ms / 1e3
    case = ServeCase(options.request_rows, options.connections)
    request = grpc_request(columns_of(made, options.request_rows, 1)[0])
    rates: dict[bool, list[LoadSeen]] = {False: [], True: []}
    applied: list[float] = []
    with (
        RowFeed(
            widths,
            ids=options.rows // made.features,
            rows=round(options.applied * interval),
            interval=interval,
            seed=options.seed,
        ) as feed,
        served(root, follow=feed.url) as ports,
        asking(ports["http"]) as client,
    ):
        feed.publish()
        wait_for(lambda: step_of(client, made) == feed.sequence, "the server does not follow")
        load = Wire("grpc", ports["grpc"], int(ports["process"]), request)
        for turn in range(options.repeats):
            report.say(f"requests of {case}, round {turn + 1}")
            for applying in (False, True):
                before, begun = step_of(client, made), time.monotonic()
                if applying:
                    feed.go()
                rates[applying].append(over_wire(load, case, made.seconds))
                feed.rest()
                if applying:
                    steps = step_of(client, made) - before
                    applied.append(steps * feed.rows / (time.monotonic() - begun))
    report.add("rows applied", "rows_per_s", max(applied), "rows/s")
    at_rest, busy = (best_load(rates[applying]) for applying in (False, True))
    name = f"requests, {max(applied):,.0f} rows/s applied"
    for metric, unit, value in (("requests_per_s", "requests/s", per_second), ("p99", "ms", p99_ms)):
        report.add(AT_REST, metric, value(at_rest), unit)
        report.compare(name, metric, value(busy), unit, {AT_REST: value(at_rest)})
    report.show(f"Serving while applying, gRPC, requests of {case}")


def best_load(loads: Sequence[LoadSeen]) -> LoadSeen:
    return max(loads, key=per_second)


def per_second(load: LoadSeen) -> float:
    return load.requests / load.seconds


def p99_ms(load: LoadSeen) -> float:
    return load.p99 * 1e3


def step_of(client: Client, made: BenchServeOptions) -> int:
    """Return the step that the server's answers have learned up to."""
    return int(ask_made_up(client, {name: [0] for name in names_of(made.features)}).parameters.get("step", 0))


def scores(client: Client, columns: Mapping[str, Sequence[int]]) -> Mapping[str, list[Any]]:
    """Return what the server says of some rows."""
    return {name: values.tolist() for name, values in ask_made_up(client, columns).outputs.items()}


def ask_made_up(client: Client, columns: Mapping[str, Sequence[int]]) -> ClientAnswer:
    """Ask the made-up model, with as many ids of each feature as rows."""
    return client.predict(NAME, columns)


# Rolling back


def measure_rollback(report: Report, root: Path, options: BenchFreshnessOptions) -> None:
    """Send a server back to its export after a delta, each time with a server of its own."""
    rows = options.rows if options.quick else ROLLBACK_ROWS
    made = replace(serve_options(options, rows), features=4)
    report.say(f"writing a servable of {rows:,} rows")
    widths = write_deepfm(root, made, START)
    took: list[float] = []
    for turn in range(min(options.repeats, 3)):
        report.say(f"rolling back, round {turn + 1}")
        with (
            RowFeed(widths, ids=rows // made.features, rows=min(rows, 100_000), interval=1.0) as feed,
            served(root, follow=feed.url) as ports,
            asking(ports["http"]) as client,
        ):
            took.append(seconds_back(feed, client))
    report.add(f"rolling back to a version of {rows:,} rows", "seconds", min(took), "s")
    report.add(f"rolling back to a version of {rows:,} rows, longest", "longest_seconds", max(took), "s")
    report.show("From the trainer's word to an answer of the exported version")


def seconds_back(feed: RowFeed, client: Client) -> float:
    """Return how long it takes until rows that a delta changed are answered as they were exported."""
    asked = feed.next_ids(8)
    exported = scores(client, asked)
    feed.publish()
    wait_for(lambda: scores(client, asked) != exported, "the server does not follow")
    begun = time.monotonic()
    feed.go_back("1")
    wait_for(lambda: scores(client, asked) == exported, "the server does not roll back")
    return time.monotonic() - begun


# Around all of them


@contextmanager
def free_url() -> Iterator[str]:
    """Yield a URL on this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield f"grpc://127.0.0.1:{port}"


@contextmanager
def asking(address: str) -> Iterator[Client]:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs each of thousands of requests
    with Client(f"http://{address}", options=ClientOptions(retries=0)) as client:
        yield client


def wait_for(reached: Callable[[], bool], otherwise: str, *, pause: float = 0.005) -> None:
    """Look again and again until something is so.

    Raises:
        UnavailableError: It does not become so.
    """
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            if reached():
                return
        except json.JSONDecodeError as cause:
            raise UnavailableError(f"bench freshness: {otherwise}") from cause
        except MonolithError:
            pass  # a server that starts
        time.sleep(pause)
    raise UnavailableError(f"bench freshness: {otherwise} after {_PATIENCE:.0f} s")
