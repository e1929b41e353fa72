"""All processes of a run on a Ray cluster: it finds machines for them, where they run as under `launch`.

A member's work is done by its command, in a process of its own with a guardian (see `guardian`), never
inside of Ray: an actor on the machine that Ray chose starts the command, hands on what it writes, and says
how it ended. An actor hosts one life of a member. When the command fails, or the actor is lost with its
worker or its machine, another actor begins the next life, as often as the member's role allows: one count
for both, which Ray's own restarts, that know only of actors, could not keep.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TextIO

from monolith.cluster.launch.processes import (
    GUARD,
    LATE,
    Events,
    LaunchOptions,
    LaunchOutcome,
    Member,
    MemberEnded,
    MemberLines,
    StopRequest,
    failure_of,
    signals_into,
)
from monolith.cluster.ray_discovery import LOCAL, connected
from monolith.errors import ConfigError, DeadlineExceededError, WrongThreadError

_log = logging.getLogger(__name__)

_PURPOSE = "launching on Ray"
_LOOK_EVERY_S = 0.5
"""How often a wait for machines looks whether it is still wanted."""
_SAY_EVERY_S = 15.0
_SILENCE_S = 1.0
"""How long a host waits for output before it answers that there is none."""
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlacement:
    """The resources of each member of a role, the placement of the members, and the number of restarts."""

    cpus: float = 1.0
    """The CPUs that Ray reserves for a member; OMP_NUM_THREADS is set to them."""
    gpus: float = 0.0
    memory_bytes: int = 0
    """The memory that a machine must have free for a member; Ray does not stop a process that uses more."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of the cluster that a member needs, by name."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Whether members are packed on few machines or spread; the strict ones wait until that is possible."""
    max_restarts: int = 3
    """How often each member is restarted in one run, whatever ended it."""

    def __post_init__(self) -> None:
        amounts = {"cpus": self.cpus, "gpus": self.gpus, "memory_bytes": self.memory_bytes, **self.resources}
        for name, amount in amounts.items():
            if amount < 0:
                raise ConfigError(f"placement on Ray: {name} must not be negative, got {amount}")
        if not any(amounts.values()):
            raise ConfigError("placement on Ray: a member must ask for some resource; set cpus, even below 1")
        if self.max_restarts < 0:
            raise ConfigError(f"placement on Ray: max_restarts must be at least 0, got {self.max_restarts}")

    @property
    def bundle(self) -> dict[str, float]:
        """What one member asks for, in Ray's words."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes, **self.resources}
        return {name: float(amount) for name, amount in asked.items() if amount}


PLACEMENTS: Mapping[str, RayPlacement] = {"ps": RayPlacement(strategy="SPREAD")}
"""By role, where nothing else is said: servers share neither memory bandwidth nor a network card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayLaunch:
    """The Ray cluster that members run on, and their placement there."""

    address: str | None = None
    """As `ray.init` takes it: "auto", "host:port" or "ray://host:port". None starts a cluster on this
    machine, on which there is room for all members, and stops it in the end. A process that is connected to
    Ray already stays so."""
    placements: Mapping[str, RayPlacement] = field(default_factory=dict)
    """By role; a role that is not named has the placement of `PLACEMENTS`."""
    runtime_env: Mapping[str, Any] | None = None
    """Files and packages that Ray takes to the machines, such as {"working_dir": "."}."""
    room_timeout: timedelta = timedelta(minutes=10)
    """How long to wait until the cluster has room for all members."""


def launch_on_ray(
    members: Sequence[Member], place: RayLaunch | None = None, options: LaunchOptions | None = None
) -> LaunchOutcome:
    """Run all members on Ray until they are done, one fails for good, or Ctrl-C or SIGTERM says to stop.

    For the main thread, since it takes the two signals for as long as it runs. See `run_members_on_ray`.

    Raises:
        WrongThreadError: This is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise WrongThreadError(
            "launch_on_ray must be called from the main thread, which receives signals; elsewhere use "
            "run_members_on_ray"
        )
    events: Events = queue.SimpleQueue()
    with signals_into(events):
        return run_members_on_ray(members, place, options, events)


def run_members_on_ray(
    members: Sequence[Member],
    place: RayLaunch | None = None,
    options: LaunchOptions | None = None,
    events: Events | None = None,
) -> LaunchOutcome:
    """Run all members on Ray until they are done, or one has failed beyond its restarts.

    When it returns, none of them runs; only one whose actor was lost may take its grace to end. Should this
    process be killed, Ray ends the actors, and guardians end the commands.

    A command has the variables of its machine, overridden by those of the member; RAY_ADDRESS names the
    cluster, and PATH includes the folder of the machine's Python, so programs installed there are found.

    Args:
        events: A StopRequest put here stops the run; a second one, at once.

    Raises:
        ConfigError: No members, or two of one name.
        DeadlineExceededError: The cluster has no room for them.
        MissingExtraError: Ray is not installed.
        UnavailableError: There is no cluster at `address`.
    """
    place, options = place or RayLaunch(), options or LaunchOptions()
    lines = options.lines(members)
    wanted = {**PLACEMENTS, **place.placements}
    by_role = {member.role: wanted.get(member.role) or RayPlacement() for member in members}
    cpus = math.ceil(sum(by_role[member.role].cpus for member in members))
    with connected(
        _PURPOSE,
        LOCAL if place.address is None else place.address,
        cpus=max(cpus, os.cpu_count() or 1),
        runtime_env=place.runtime_env,
    ) as ray:
        run = _RayRun(
            ray,
            members,
            placements=by_role,
            lines=lines,
            events=queue.SimpleQueue() if events is None else events,
            grace=options.grace,
        )
        try:
            return run.wait_for_room(place.room_timeout) or run.until_done(options.followers)
        finally:
            run.close()


@dataclass(frozen=True, slots=True)
class _Lost(MemberEnded):
    """An actor is gone, with its worker or its machine; the exit status of its command is unknown."""

    why: str


Home = tuple[str, int]
"""The machine, by Ray's id, and the process id of a guardian."""


@dataclass(slots=True)
class _Life:
    """One actor, and the thread that listens to it."""

    member: Member
    actor: Any
    predecessor: Home | None
    """Where an earlier life may not have ended yet, since its actor was lost."""
    thread: threading.Thread = field(init=False)
    home: Home | None = None
    """Where its command runs, once it does."""


class _RayRun:
    """The actors of one run."""

    def __init__(
        self,
        ray: Any,
        members: Sequence[Member],
        *,
        placements: Mapping[str, RayPlacement],
        lines: MemberLines,
        events: Events,
        grace: timedelta,
    ) -> None:
        self._ray = ray
        self._members = members
        self._placements = placements
        self._lines = lines
        self._events = events
        self._grace = grace
        self._alive: dict[str, _Life] = {}
        self._restarts: Counter[str] = Counter()
        self._groups: dict[str, Any] = {}
        self._bundles: dict[str, int] = {}
        """The place of each member in its role's group."""
        self._due: tuple[float | None, Callable[[], None]] = (None, self._ask_all)
        """Until when to wait for news, and what to do then."""

    def wait_for_room(self, timeout: timedelta) -> LaunchOutcome | None:
        """Reserve the resources of all members; return an outcome if a StopRequest comes before that."""
        from ray.util import placement_group

        for role, placement in self._placements.items():
            names = [member.name for member in self._members if member.role == role]
            self._bundles |= {name: index for index, name in enumerate(names)}
            self._groups[role] = placement_group(
                [placement.bundle for _ in names], strategy=placement.strategy
            )
        begun = said = time.monotonic()
        for role, group in self._groups.items():
            while not group.wait(_LOOK_EVERY_S):
                with suppress(queue.Empty):
                    event = self._events.get_nowait()
                    assert isinstance(event, StopRequest)  # no member runs yet, so no other event can come
                    return _stopped(event)
                now = time.monotonic()
                needs = f"{group.bundle_count} x {self._placements[role].bundle} for {role}"
                if now - begun > timeout.total_seconds():
                    raise DeadlineExceededError(
                        f"launching on Ray: the cluster has no room for {needs} after {timeout}; in all it "
                        f"has {self._ray.cluster_resources()}, of which are free "
                        f"{self._ray.available_resources()}. Ask for less, or add machines."
                    )
                if now - said > _SAY_EVERY_S:
                    said = now
                    _log.info("waiting for free resources on Ray: %s", needs)
        return None

    def until_done(self, followers: Collection[str]) -> LaunchOutcome:
        for member in self._members:
            self._begin(member, None)
        leaders = {member.name for member in self._members if member.role not in followers}
        leaders = leaders or set(self._alive)
        outcome: LaunchOutcome | None = None
        stopping = False
        while self._alive:
            due, late = self._due
            try:
                event = self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                late()
                continue
            if isinstance(event, StopRequest):
                self._ask(self._alive if outcome or not leaders else leaders, at_once=outcome is not None)
                outcome = outcome or _stopped(event)
                stopping = True
                continue
            life = self._alive.pop(event.member.name)
            self._ray.kill(life.actor)  # it has nothing more to do, and holds the member's place
            if event.status != 0 and outcome is None and self._may_begin_again(event):
                lost = isinstance(event, _Lost)
                self._begin(event.member, (life.home or life.predecessor) if lost else None)
                continue
            leaders.discard(event.member.name)
            if event.status != 0 and outcome is None:
                outcome = _failed(event, self._restarts[event.member.name])
                _log.error("%s; stopping the other processes", outcome.text)
                self._ask(leaders or self._alive)
                stopping = True
            elif not leaders and stopping and event.member.role not in followers:
                self._ask(self._alive)
            elif not leaders and outcome is None:
                # Leaders tell followers to end; the launcher tells the rest.
                self._due = (time.monotonic() + self._grace.total_seconds(), self._ask_all)
                outcome = LaunchOutcome(status=0)
        return outcome or LaunchOutcome(status=0)

    def close(self) -> None:
        """End all members that still run, and release the reserved resources."""
        from ray.util import remove_placement_group

        if self._alive:
            self._ask(self._alive, at_once=True)
            end = time.monotonic() + LATE.total_seconds()
            for life in self._alive.values():
                life.thread.join(max(0.0, end - time.monotonic()))
            self._kill_all()
        for group in self._groups.values():
            remove_placement_group(group)

    def _may_begin_again(self, event: MemberEnded) -> bool:
        name = event.member.name
        allowed = self._placements[event.member.role].max_restarts
        if self._restarts[name] == allowed:
            return False
        self._restarts[name] += 1
        text = _failed(event).text
        _log.warning("%s; restarting it (%d of %d)", text, self._restarts[name], allowed)
        return True

    def _ask_all(self) -> None:
        self._ask(self._alive)

    def _ask(self, names: Iterable[str], at_once: bool = False) -> None:
        for life in [self._alive[name] for name in names]:
            life.actor.stop.remote(at_once)
            if at_once and life.home is None:  # it may be waiting for a machine
                self._ray.kill(life.actor)
        patience = LATE if at_once else self._grace + LATE
        self._due = (time.monotonic() + patience.total_seconds(), self._kill_all)

    def _kill_all(self) -> None:
        for life in self._alive.values():
            self._ray.kill(life.actor)
        self._due = (time.monotonic() + LATE.total_seconds(), self._give_up)

    def _give_up(self) -> None:
        _log.error("Ray does not confirm that these have ended: %s", ", ".join(self._alive))
        self._alive.clear()

    def _begin(self, member: Member, predecessor: Home | None) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement = self._placements[member.role]
        actor = (
            self._ray.remote(_Host)
            .options(
                num_cpus=placement.cpus,
                num_gpus=placement.gpus,
                memory=placement.memory_bytes or None,
                resources=dict(placement.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[member.role], placement_group_bundle_index=self._bundles[member.name]
                ),
                max_restarts=0,
                max_concurrency=2,  # it is told to stop while it waits for output
            )
            .remote(member.name, member.command, dict(member.environment), self._grace.total_seconds())
        )
        life = _Life(member, actor, predecessor)
        life.thread = threading.Thread(
            target=self._follow, args=(life,), name=f"ray-{member.name}", daemon=True
        )
        self._alive[member.name] = life
        life.thread.start()

    def _follow(self, life: _Life) -> None:
        """Copy a member's output until it ends, then say so."""
        reader, writer = os.pipe()
        source = os.fdopen(reader, "rb", buffering=0)
        copier = threading.Thread(target=self._lines.copy, args=(life.member.name, source), daemon=True)
        copier.start()
        status: int | None = None
        try:
            with os.fdopen(writer, "wb") as sink:
                life.home = self._ray.get(life.actor.start.remote(life.predecessor))
                while status is None:
                    chunk, status = self._ray.get(life.actor.news.remote())
                    sink.write(chunk)
                    sink.flush()
            event = MemberEnded(life.member, status)
        except Exception as error:  # whatever it is, the run must not wait for this member any more
            event = _Lost(life.member, 1, _why(error))
        copier.join(LATE.total_seconds())  # last words come before the news of the end
        self._events.put(event)


class _Host:
    """One life of a member: runs in an actor, on the member's machine."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], grace_s: float
    ) -> None:
        self._name = name
        self._command = command
        self._environment = environment
        self._grace_s = grace_s
        self._lock = threading.Lock()  # held while starting and stopping
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._guardian = 0
        self._report: TextIO | None = None
        self._lifeline = -1

    def __repr__(self) -> str:
        return self._name  # Ray's tools list actors by it

    def start(self, predecessor: Home | None) -> Home:
        """Run the command, once that of the life before is gone from this machine."""
        import ray

        context = ray.get_runtime_context()
        machine = context.get_node_id()
        if predecessor is not None and predecessor[0] == machine:
            _wait_until_gone(predecessor[1], self._grace_s + LATE.total_seconds())
        with self._lock:
            if not self._stopped:
                self._run({"RAY_ADDRESS": context.gcs_address, **self._environment})
        return machine, self._guardian

    def news(self) -> tuple[bytes, int | None]:
        """Return output, none after a while without; and the status as in `MemberEnded`, once known."""
        if self._process is None:
            return b"", -signal.SIGTERM
        assert self._process.stdout is not None
        assert self._report is not None
        if select.select([self._process.stdout], [], [], _SILENCE_S)[0]:
            chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
            if chunk:
                return chunk, None
        elif self._process.poll() is None:
            return b"", None
        # All was read; or a process that left the command's group keeps the output open: do not wait for it.
        self._process.wait()
        status = self._report.readline()
        return b"", int(status) if status else -signal.SIGKILL

    def stop(self, at_once: bool) -> None:
        """Ask the command to stop; asked again, its guardian makes it."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                for pause_s in (0.0, 0.1) if at_once else (0.0,):  # two at the same time count as one
                    time.sleep(pause_s)
                    with suppress(ProcessLookupError):
                        os.kill(self._guardian, signal.SIGTERM)

    def _run(self, environment: Mapping[str, str]) -> None:
        pipe, self._lifeline = os.pipe()  # the guardian reads an end when this process is gone
        reader, writer = os.pipe()
        guard = GUARD.format(folder=str(Path(__file__).parent))
        programs = str(Path(sys.executable).parent)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _BETWEEN, str(writer)),
                *(sys.executable, "-I", "-S", "-c", guard, str(pipe), str(self._grace_s)),
                *self._command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                "PYTHONUNBUFFERED": "1",
                **os.environ,
                "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                **environment,
            },
            pass_fds=(pipe, writer),
            start_new_session=True,
        )
        os.close(pipe)
        os.close(writer)
        self._report = os.fdopen(reader)
        self._guardian = int(self._report.readline())


# Ray kills children of a worker that exits, so a guardian must not be one: it would die before its work.
# In between is a process that may, which says the guardian's process id, and later its status.
_BETWEEN = """
import os, sys
report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
os.set_inheritable(report.fileno(), False)
child = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
print(child, file=report)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), file=report)
"""


def _wait_until_gone(process: int, timeout_s: float) -> None:
    """Wait for a guardian whose host has died, which is ending its command: two of a member must not meet."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def _stopped(event: StopRequest) -> LaunchOutcome:
    return LaunchOutcome(status=128 + event.signal, text=f"stopped by {signal.Signals(event.signal).name}")


def _failed(event: MemberEnded, restarts: int = 0) -> LaunchOutcome:
    outcome = failure_of(event)
    text = f"{event.member.name} was lost: {event.why}" if isinstance(event, _Lost) else outcome.text
    return replace(outcome, text=f"{text}, after {restarts} restart(s)" if restarts else text)


def _why(error: Exception) -> str:
    """Return the line that says most of Ray's many: of a failed call the last, of a dead actor the first."""
    from ray.exceptions import RayTaskError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1 if isinstance(error, RayTaskError) else 0]
