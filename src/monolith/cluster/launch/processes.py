"""All processes of a run as children of one: their output side by side, their end together.

Each child has a guardian (see `guardian`), so that none is left over when this process is killed.

    running ──exits 0──► done
       │ ▲
       │ └── restarted: it was killed, or exited to be started again, and has restarts left. If it is the
       │     chief, members that are done are started again, too: the chief may have told them that the run is
       │     over and died before it exited, and would find no server.
       └──exits otherwise──► failed: the other members are stopped, and the outcome names this one
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, TextIO

from monolith.cluster.launch.guardian import PROCESS_ID
from monolith.errors import OUT_OF_MEMORY, ConfigError, WrongThreadError

_log = logging.getLogger(__name__)

GUARD = "import sys; sys.path.append({folder!r}); import guardian; guardian.main(sys.argv[1:])"
_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # SGR foregrounds; red is for errors
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # at the very end, \r may be half of \r\n
_LONGEST_LINE_BYTES = 1 << 20
LATE = timedelta(seconds=5)
"""Beyond its grace, how long a guardian may take to end its command."""
RESTART_AFTER = timedelta(seconds=1)
LEAVE_WITHIN = timedelta(seconds=30)
"""How long members have to end by themselves when the chief is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process to run."""

    role: str
    index: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """How a run ended."""

    status: int
    """The exit status for this process: 0, that of the member that failed, or 128 plus a signal's number."""
    failed: Member | None = None
    """The first member that failed; None if all succeeded, or a signal stopped the run."""
    text: str = "all done"
    """What happened, for a person to read."""


def job_members(
    command: Sequence[str],
    *,
    num_ps: int,
    num_workers: int,
    num_spares: int = 0,
    folder: str | None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Member, ...]:
    """Return the members of a run, parameter servers first.

    Args:
        num_spares: Parameter servers beyond `num_ps`, of which the command line speaks.
        command: Trains, given the flags of a RunConfig after it: ("monolith", "train", "tasks:MyTask").
        folder: An empty folder in which members register; None if `flags` say how they find each other.
        flags: Added to the command of every member.
        environment: Variables of every member.

    Raises:
        ConfigError: There are no workers to run, or fewer than 0 servers.
    """
    if num_ps < 0 or num_workers < 1:
        raise ConfigError(f"a run needs workers, and no fewer than 0 servers; got {num_workers} and {num_ps}")
    shared = [
        *flags,
        *("--cluster.num-ps", str(num_ps), "--cluster.num-workers", str(num_workers)),
        *(("--discovery.kind", "files", "--discovery.folder", folder) if folder is not None else ()),
    ]
    places = [
        *(("ps", index) for index in range(num_ps + num_spares)),
        *(("worker", index) for index in range(num_workers)),
    ]
    return tuple(
        Member(
            role=role,
            index=index,
            command=(*command, *shared, "--cluster.role", role, "--cluster.index", str(index)),
            environment=dict(environment or {}),
        )
        for role, index in places
    )


def launch(members: Sequence[Member], options: LaunchOptions | None = None) -> LaunchOutcome:
    """Run all members until they are done, one fails for good, or a signal stops them (a second, at once).

    For the main thread, since it takes the two signals for as long as it runs. See `run_members`.

    Raises:
        WrongThreadError: This is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise WrongThreadError(
            "launch must be called from the main thread, which receives signals; elsewhere use run_members"
        )
    events: Events = queue.SimpleQueue()
    with signals_into(events):
        return run_members(members, options, events)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop the run; a second one stops it at once."""

    signal: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A member has ended; the status is negative for a signal."""

    member: Member
    status: int


Events = queue.SimpleQueue["StopRequest | MemberEnded"]

Tap = Callable[[str, str], bool]
"""Is given each line after the name of its member; one that it takes, by returning True, is not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """How members run, are shown, and stop."""

    output: TextIO | None = None
    """Where their lines go, each after its member's name; by default standard output."""
    color: bool | None = None
    """Whether names have colours; by default if `output` is a terminal."""
    tap: Tap | None = None
    """Sees all lines before they are shown."""
    grace: timedelta = timedelta(seconds=20)
    """Time from asking a member to stop (SIGTERM) to killing it (SIGKILL)."""
    followers: Collection[str] = ("ps",)
    """Roles that have nothing to do once the other roles are done; they are then asked to stop."""
    restarts: int = 0
    """How often each member is restarted after it was killed, ran out of memory, or exited with
    os.EX_TEMPFAIL (a peer failed).
    A member that failed by itself would fail again. On Ray the placement of a member decides instead."""
    chief: str | None = None
    """The name of the member whose clean end finishes the run, also for a member that restarted so late that
    no process is left to tell it. Not on Ray."""

    def lines(self, members: Sequence[Member]) -> MemberLines:
        """Return the writer of the members' lines.

        Raises:
            ConfigError: No members, or two of one name.
        """
        names = [member.name for member in members]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"cannot launch: need at least one member, with unique names; got {names}")
        stream = sys.stdout if self.output is None else self.output
        return MemberLines(stream, names, stream.isatty() if self.color is None else self.color, self.tap)


def run_members(
    members: Sequence[Member], options: LaunchOptions | None = None, events: Events | None = None
) -> LaunchOutcome:
    """Run all members until they are done, or one fails for good. When it returns, none of them runs.

    A member that stops may need the followers for its last checkpoint, so the followers are asked to stop
    after all other members have ended.

    Args:
        events: A StopRequest put here stops the run; a second one, at once.

    Raises:
        ConfigError: No members, or two of one name.
    """
    options = options or LaunchOptions()
    lines = options.lines(members)
    running = _Running(members, lines, queue.SimpleQueue() if events is None else events, options)
    try:
        return running.until_done(options.followers, options.chief)
    finally:
        running.close()


class _Running:
    """The children of one run."""

    def __init__(
        self, members: Sequence[Member], lines: MemberLines, events: Events, options: LaunchOptions
    ) -> None:
        self._events = events
        self._grace = options.grace
        self._restarts = options.restarts
        self._restarted: Counter[str] = Counter()
        self._due: dict[str, tuple[float, Member]] = {}
        """The members to restart, and when."""
        self._done: dict[str, Member] = {}
        """Members that exited with status 0 while the run was not over."""
        self._lines = lines
        self._alive: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        # Guardians read from the one end, which ends when this process does, whatever ends it.
        self._pipe, self._lifeline = os.pipe()
        try:
            for member in members:
                self._start(member)
        except BaseException:
            self.close()
            raise

    def until_done(self, followers: Collection[str], chief: str | None) -> LaunchOutcome:
        leaders = {name for name in self._alive if name.rpartition(" ")[0] not in followers}
        leaders = leaders or set(self._alive)
        outcome: LaunchOutcome | None = None
        deadline: float | None = None
        stopping = False
        while self._alive or self._due:
            try:
                event = self._events.get(timeout=self._left(deadline))
            except queue.Empty:
                self._start_due()
                if deadline is not None and time.monotonic() >= deadline:
                    self._ask(self._alive)
                    deadline = None
                continue
            if isinstance(event, StopRequest):
                text = f"stopped by {signal.Signals(event.signal).name}"
                outcome = outcome or LaunchOutcome(status=128 + event.signal, text=text)
                leaders -= self._due.keys()
                self._due.clear()
                self._ask(self._alive if stopping or not leaders else leaders)
                stopping = True
                continue
            self._alive.pop(event.member.name, None)
            if outcome is None and self._may_start_again(event):
                if event.member.name == chief:
                    leaders |= self._start_done_again(followers)
                continue
            if event.status == 0:
                self._done[event.member.name] = event.member
            leaders.discard(event.member.name)
            finished = event.status == 0 and event.member.name == chief
            if event.status != 0 and outcome is None:
                outcome = failure_of(event)
                restarted = self._restarted[event.member.name]
                after = f" after {restarted} restarts" if restarted else ""
                _log.error("%s%s; stopping the other processes", outcome.text, after)
                leaders -= self._due.keys()
                self._due.clear()
                self._ask(leaders or self._alive)
                stopping = True
            elif not leaders and stopping and event.member.role not in followers:
                self._ask(self._alive)
            elif (finished or not leaders) and outcome is None:
                # Leaders tell followers to end, and the chief tells all members; the launcher tells the rest.
                self._due.clear()
                patience = LEAVE_WITHIN if finished else self._grace
                deadline = time.monotonic() + patience.total_seconds()
                outcome = LaunchOutcome(status=0)
        return outcome or LaunchOutcome(status=0)

    def _left(self, deadline: float | None) -> float | None:
        """Return the seconds until something is to be done, whatever happens."""
        times = [when for when, _ in self._due.values()] + ([] if deadline is None else [deadline])
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _may_start_again(self, event: MemberEnded) -> bool:
        """Plan the restart of a member that has ended, if a restart may help."""
        name = event.member.name
        may_help = event.status < 0 or event.status in (os.EX_TEMPFAIL, OUT_OF_MEMORY)
        if not may_help or self._restarted[name] >= self._restarts:
            return False
        self._restarted[name] += 1
        _log.warning(
            "%s; restarting it (%d of %d)",
            failure_of(event).text,
            self._restarted[name],
            self._restarts,
        )
        self._due[name] = time.monotonic() + RESTART_AFTER.total_seconds(), event.member
        return True

    def _start_done_again(self, followers: Collection[str]) -> set[str]:
        """Plan another start of members that are done, with the chief; return the leaders among them."""
        again, self._done = self._done, {}
        for name, member in again.items():
            _log.warning("%s had ended; starting it again with the chief", name)
            self._due[name] = time.monotonic() + RESTART_AFTER.total_seconds(), member
        return {name for name, member in again.items() if member.role not in followers}

    def _start_due(self) -> None:
        now = time.monotonic()
        for name, (when, member) in list(self._due.items()):
            if now >= when:
                del self._due[name]
                self._start(member)

    def close(self) -> None:
        """End all members that still run."""
        self._ask(self._alive)
        for child in self._alive.values():
            try:
                child.wait((self._grace + LATE).total_seconds())
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for thread in self._threads:
            thread.join(LATE.total_seconds())
        os.close(self._lifeline)
        os.close(self._pipe)

    def _ask(self, names: Iterable[str]) -> None:
        for name in names:
            self._alive[name].terminate()

    def _start(self, member: Member) -> None:
        guard = GUARD.format(folder=str(Path(__file__).parent))
        child = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", guard),
                *(str(self._pipe), str(self._grace.total_seconds())),
                *member.command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PYTHONUNBUFFERED": "1", **os.environ, **member.environment},
            pass_fds=(self._pipe,),
            start_new_session=True,  # Ctrl-C is for this process alone, which then asks them in order
        )
        assert child.stdout is not None
        self._alive[member.name] = child
        copier = threading.Thread(target=self._lines.copy, args=(member.name, child.stdout), daemon=True)
        waiter = threading.Thread(target=self._wait, args=(member, child, copier), daemon=True)
        self._threads += [copier, waiter]
        copier.start()
        waiter.start()

    def _wait(self, member: Member, child: subprocess.Popen[bytes], copier: threading.Thread) -> None:
        status = child.wait()
        # Its last lines come before the event of its end, unless a process outside its group keeps the pipe.
        copier.join(LATE.total_seconds())
        self._events.put(MemberEnded(member, status))


class MemberLines:
    """Lines of many processes on one stream, whole, each after a name and a process id."""

    def __init__(self, stream: TextIO, names: Sequence[str], color: bool, tap: Tap | None = None) -> None:
        width = max(map(len, names))
        self._stream = stream
        self._tap = tap
        self._lock = threading.Lock()  # one line at a time
        self._pads = {name: " " * (width - len(name)) for name in names}
        self._codes: dict[str, int] = {}
        if color:
            self._codes = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)}

    def copy(self, name: str, source: IO[bytes]) -> None:
        """Copy until the source ends."""
        rest, who = b"", self._prefix(name, name)
        with source:
            while chunk := os.read(source.fileno(), 65536):
                *lines, rest = _LINE_END.split(rest + chunk)
                if len(rest) > _LONGEST_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    if line.startswith(PROCESS_ID):
                        number = line.removeprefix(PROCESS_ID).decode()
                        who = self._prefix(name, f"{name} pid {number}")
                    else:
                        self._write(name, who, line)
        if rest:
            self._write(name, who, rest)

    def _prefix(self, name: str, text: str) -> str:
        prefix = f"[{text}]{self._pads[name]}"
        return f"\033[{self._codes[name]}m{prefix}\033[0m" if name in self._codes else prefix

    def _write(self, name: str, who: str, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        with self._lock:
            if self._tap is not None and self._tap(name, text):
                return
            self._stream.write(f"{who} {text}\n")
            self._stream.flush()


def failure_of(event: MemberEnded) -> LaunchOutcome:
    name, status = event.member.name, event.status
    if status < 0:
        text = f"{name} was killed by {signal.Signals(-status).name}"
        return LaunchOutcome(status=128 - status, failed=event.member, text=text)
    why = ": it had no memory left" if status == OUT_OF_MEMORY else ""
    return LaunchOutcome(status=status, failed=event.member, text=f"{name} exited with status {status}{why}")


@contextmanager
def signals_into(events: Events) -> Iterator[None]:
    """Ctrl-C and SIGTERM as stop requests, as long as the block lasts."""
    before = {
        number: signal.signal(number, lambda number, _: events.put(StopRequest(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
