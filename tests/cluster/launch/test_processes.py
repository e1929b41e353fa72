"""Real processes: they are started, spoken to by signals, killed, and looked for afterwards."""

import io
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from monolith.cluster.launch import LaunchOptions, Member, job_members, launch, processes, run_members
from monolith.cluster.launch.processes import StopRequest
from monolith.errors import OUT_OF_MEMORY, ConfigError, WrongThreadError
from monolith.runtime.config_loading import load_run_config

GRACE = timedelta(seconds=5)


def member(role: str, index: int, code: str, *arguments: str) -> Member:
    return Member(
        role=role, index=index, command=(sys.executable, "-S", "-c", textwrap.dedent(code), *arguments)
    )


def shell(role: str, index: int, script: str) -> Member:
    return Member(role=role, index=index, command=("/bin/sh", "-c", script))


def without_ids(text: str) -> str:
    """Return lines with the names of who wrote them, without process ids."""
    return re.sub(r"^(\S*\[\w+ \d+) pid \d+\]", r"\1]", text, flags=re.MULTILINE)


def run(*members: Member, grace: timedelta = GRACE, color: bool | None = None):
    output = io.StringIO()
    outcome = run_members(members, LaunchOptions(output=output, grace=grace, color=color))
    return outcome, without_ids(output.getvalue()).splitlines()


def wait_until(condition, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


# Output


def test_each_line_has_the_name_of_its_process():
    outcome, lines = run(
        shell("ps", 0, "echo one; echo two >&2"), shell("worker", 10, "printf 'no newline at the end'")
    )
    assert outcome.status == 0
    assert [line for line in lines if "ps" in line] == ["[ps 0]      one", "[ps 0]      two"]
    assert [line for line in lines if "worker" in line] == ["[worker 10] no newline at the end"]


def test_each_line_has_the_process_id_of_its_writer_also_after_a_restart():
    output = io.StringIO()
    code = "echo $$; kill -9 $$"
    run_members([shell("worker", 0, code)], LaunchOptions(output=output, restarts=1))
    lines = [re.fullmatch(r"\[worker 0 pid (\d+)\] (\d+)", line) for line in output.getvalue().splitlines()]
    assert len(lines) == 2
    assert all(line is not None and line[1] == line[2] for line in lines)


def test_names_have_colours_on_a_terminal_and_only_there():
    _, plain = run(shell("worker", 0, "echo hi"))
    _, coloured = run(shell("worker", 0, "echo hi"), shell("worker", 1, "echo hi"), color=True)
    assert plain == ["[worker 0] hi"]
    assert sorted(coloured) == ["\033[32m[worker 1]\033[0m hi", "\033[36m[worker 0]\033[0m hi"]


def test_long_lines_carriage_returns_and_bytes_that_are_no_text_survive():
    code = r"import sys; sys.stdout.buffer.write(b'a' * 200_000 + b'\nstep 1\rstep 2\r\n\xff\n')"
    _, lines = run(member("worker", 0, code))
    assert lines[0] == "[worker 0] " + "a" * 200_000
    assert lines[1:] == ["[worker 0] step 1", "[worker 0] step 2", "[worker 0] \ufffd"]


def test_members_have_their_own_variables():
    own = Member(role="worker", index=0, command=("/bin/sh", "-c", "echo $WHO"), environment={"WHO": "me"})
    assert run(own)[1] == ["[worker 0] me"]


def test_a_line_that_is_tapped_is_not_shown():
    seen: list[tuple[str, str]] = []

    def tap(name: str, line: str) -> bool:
        seen.append((name, line))
        return line.startswith("mark ")

    output = io.StringIO()
    run_members([shell("worker", 0, "echo mark one; echo two")], LaunchOptions(output=output, tap=tap))
    assert seen == [("worker 0", "mark one"), ("worker 0", "two")]
    assert without_ids(output.getvalue()) == "[worker 0] two\n"


# Ends


def test_followers_are_asked_to_stop_when_all_other_members_are_done():
    begun = time.monotonic()
    outcome, _ = run(
        shell("ps", 0, "exec sleep 100"), shell("worker", 0, "exit 0"), grace=timedelta(seconds=0.5)
    )
    assert (outcome.status, outcome.failed) == (0, None)
    assert time.monotonic() - begun < 60


def test_a_follower_that_ends_by_itself_is_not_a_failure():
    outcome, _ = run(shell("ps", 0, "exit 0"), shell("worker", 0, "sleep 0.3"))
    assert outcome.status == 0


def test_when_one_fails_the_rest_are_stopped_and_the_outcome_says_which():
    outcome, lines = run(
        shell("ps", 0, "trap 'echo bye; exit 9' TERM; while :; do sleep 0.05; done"),
        shell("worker", 0, "exec sleep 100"),
        shell("worker", 1, "sleep 0.5; exit 3"),
    )
    assert outcome.failed is not None
    assert (outcome.failed.name, outcome.status) == ("worker 1", 3)
    assert outcome.text == "worker 1 exited with status 3"
    assert "[ps 0]     bye" in lines


def test_a_member_that_is_killed_is_named_with_its_signal():
    outcome, _ = run(shell("worker", 0, "exec sleep 100"), shell("worker", 1, "sleep 0.3; kill -9 $$"))
    assert outcome.failed is not None
    assert (outcome.failed.index, outcome.status) == (1, 128 + 9)
    assert "SIGKILL" in outcome.text


def lives(tmp_path: Path, *ends: str) -> str:
    """Return a script that ends otherwise each time it is started."""
    cases = "".join(f"{number}) {end};; " for number, end in enumerate(ends))
    count = tmp_path / "count"
    return f"n=$(wc -l < {count}); echo >> {count}; case $n in {cases} esac"


@pytest.mark.parametrize("end", ["kill -9 $$", f"exit {os.EX_TEMPFAIL}", f"exit {OUT_OF_MEMORY}"])
def test_a_member_that_was_killed_or_may_succeed_another_time_is_restarted(tmp_path: Path, end: str, caplog):
    (tmp_path / "count").touch()
    members = [shell("worker", 0, lives(tmp_path, end, end, "exit 0"))]
    assert run_members(members, LaunchOptions(output=io.StringIO(), restarts=2)).status == 0
    assert [line for line in caplog.messages if "restarting it" in line][1].endswith("restarting it (2 of 2)")
    assert (tmp_path / "count").read_text() == "\n" * 3


def test_a_member_that_died_more_often_than_it_may_ends_the_run(tmp_path: Path):
    (tmp_path / "count").touch()
    members = [
        shell("worker", 0, lives(tmp_path, "kill -9 $$", "kill -9 $$")),
        shell("ps", 0, "exec sleep 100"),
    ]
    outcome = run_members(members, LaunchOptions(output=io.StringIO(), restarts=1, grace=GRACE))
    assert (outcome.status, outcome.failed) == (128 + 9, members[0])


def test_a_member_that_had_no_memory_too_often_is_named_with_the_reason(caplog):
    members = [shell("ps", 1, f"exit {OUT_OF_MEMORY}"), shell("worker", 0, "exec sleep 100")]
    outcome = run_members(members, LaunchOptions(output=io.StringIO(), restarts=1, grace=GRACE))
    assert (outcome.status, outcome.text) == (
        OUT_OF_MEMORY,
        f"ps 1 exited with status {OUT_OF_MEMORY}: it had no memory left",
    )
    assert f"{outcome.text} after 1 restarts; stopping the other processes" in caplog.messages


def test_a_member_that_failed_by_itself_is_not_restarted(tmp_path: Path):
    (tmp_path / "count").touch()
    members = [shell("worker", 0, lives(tmp_path, "exit 2", "exit 0"))]
    assert run_members(members, LaunchOptions(output=io.StringIO(), restarts=3)).status == 2


def test_a_stop_request_is_not_answered_by_a_restart():
    events: queue.SimpleQueue = queue.SimpleQueue()
    threading.Timer(1.0, lambda: events.put(StopRequest(signal.SIGTERM))).start()
    members = [shell("worker", 0, "exec sleep 100"), shell("worker", 1, "kill -9 $$")]
    outcome = run_members(
        members, LaunchOptions(output=io.StringIO(), restarts=1000, grace=GRACE), events=events
    )
    assert (outcome.status, outcome.text) == (128 + 15, "stopped by SIGTERM")


def test_when_the_chief_is_done_the_run_is_and_a_member_that_restarted_too_late_is_asked_to_stop(monkeypatch):
    monkeypatch.setattr(processes, "LEAVE_WITHIN", timedelta(seconds=0.5))
    late = shell("worker", 1, "exec sleep 100")
    outcome = run_members(
        [shell("worker", 0, "exit 0"), late],
        LaunchOptions(output=io.StringIO(), grace=GRACE, chief="worker 0"),
    )
    assert outcome.status == 0


def test_members_that_are_done_are_started_again_if_the_chief_has_to_be(tmp_path: Path):
    """The chief may be killed after it told the servers that the run is over, and before it exits."""
    for name in ("chief", "server"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "count").touch()
    served = tmp_path / "server" / "count"
    waits = f"until [ $(wc -l < {served}) = 1 ]; do sleep 0.05; done; sleep 0.5; kill -9 $$"
    finds = f"until [ $(wc -l < {served}) = 2 ]; do sleep 0.05; done; exit 0"
    members = [
        shell("ps", 0, lives(tmp_path / "server", "exit 0", "exit 0")),
        shell("worker", 0, lives(tmp_path / "chief", waits, finds)),
    ]
    options = LaunchOptions(output=io.StringIO(), restarts=1, grace=GRACE, chief="worker 0")
    outcome = run_members(members, options)
    assert outcome.status == 0
    assert served.read_text() == "\n" * 2


def test_a_command_that_is_not_there_fails_with_a_line_that_says_so():
    outcome, lines = run(Member(role="worker", index=0, command=("/no/such/program",)))
    assert outcome.status == 127
    assert "cannot start /no/such/program" in lines[0]


def test_a_member_that_does_not_stop_when_asked_is_killed_after_the_grace_period():
    stubborn = member(
        "ps", 0, "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(100)"
    )
    begun = time.monotonic()
    outcome, lines = run(stubborn, shell("worker", 0, "sleep 0.5; exit 1"), grace=timedelta(seconds=1))
    assert outcome.status == 1
    assert 1 < time.monotonic() - begun < 60
    assert any("still runs 1 s after it was asked to stop; killing it" in line for line in lines)


def test_what_a_member_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    outcome, _ = run(shell("worker", 0, f"sleep 100 & echo $! > {file}; exit 0"))
    assert outcome.status == 0
    wait_until(lambda: not is_running(int(file.read_text())))


def test_a_stop_request_stops_all_and_a_second_one_at_once():
    events: queue.SimpleQueue = queue.SimpleQueue()
    stubborn = member(
        "worker", 0, "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(100)"
    )

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "up" in text:
                events.put(StopRequest(signal.SIGINT))
                threading.Timer(0.5, events.put, [StopRequest(signal.SIGINT)]).start()
            return super().write(text)

    begun = time.monotonic()
    outcome = run_members(
        [stubborn], LaunchOptions(output=Watched(), grace=timedelta(seconds=60)), events=events
    )
    assert (outcome.status, outcome.failed) == (130, None)
    assert time.monotonic() - begun < 50  # less than the grace period


SAVES = "trap 'sleep 0.3; [ -e {0}/served ] && echo saved; exit 0' TERM; touch {0}/up; {1}"
SERVES = "trap 'rm {0}/served; exit 0' TERM; touch {0}/served; echo up; {1}"
FOREVER = "while :; do sleep 0.02; done"


@pytest.mark.parametrize("why", ["stopped", "failed"])
def test_a_member_that_is_asked_to_stop_keeps_its_followers_until_it_has_saved(tmp_path, why):
    events: queue.SimpleQueue = queue.SimpleQueue()
    ends = "exit 3" if why == "failed" else FOREVER
    watch = f"until [ -e {tmp_path}/up ] && [ -e {tmp_path}/served ]; do sleep 0.02; done; echo ready; {ends}"

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text and why == "stopped":
                events.put(StopRequest(signal.SIGINT))
            return super().write(text)

    output = Watched()
    outcome = run_members(
        [
            shell("ps", 0, SERVES.format(tmp_path, FOREVER)),
            shell("worker", 0, SAVES.format(tmp_path, FOREVER)),
            shell("worker", 1, watch),
        ],
        LaunchOptions(output=output, grace=GRACE),
        events=events,
    )
    assert outcome.status == (3 if why == "failed" else 130)
    assert "[worker 0] saved" in without_ids(output.getvalue())
    assert not (tmp_path / "served").exists()  # it was asked in the end


def test_there_must_be_members_with_different_names():
    with pytest.raises(ConfigError, match="need at least one member, with unique names"):
        run_members([])
    with pytest.raises(ConfigError, match="need at least one member, with unique names"):
        run(shell("ps", 0, "true"), shell("ps", 0, "true"))


def test_only_the_main_thread_launches():
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            launch([shell("worker", 0, "true")])
        except WrongThreadError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_launching_gives_the_signals_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert launch([shell("worker", 0, "true")], LaunchOptions(output=io.StringIO())).status == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# The launcher as a process, with children that write their pids

LAUNCHER = """
import sys
from datetime import timedelta
from monolith.cluster.launch import LaunchOptions, Member, launch

folder, stubborn = sys.argv[1], sys.argv[2] == "stubborn"
handler = "SIG_IGN" if stubborn else "SIG_DFL"
code = f'''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.{handler})
grandchild = subprocess.Popen(["sleep", "100"])
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(f"{{os.getpid()}} {{grandchild.pid}} {{os.getppid()}}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(100)
'''
members = [
    Member(role=role, index=index, command=(sys.executable, "-S", "-c", code, f"{folder}/{role}{index}"))
    for role, index in [("ps", 0), ("worker", 0), ("worker", 1)]
]
outcome = launch(members, LaunchOptions(grace=timedelta(seconds=1)))
print(outcome.text)
sys.exit(outcome.status)
"""


@pytest.fixture
def launcher(tmp_path):
    started: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def start(kind: str = "obedient") -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), kind],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        files = [tmp_path / name for name in ("ps0", "worker0", "worker1")]
        wait_until(lambda: all(file.exists() for file in files), 60)
        pids.extend(int(pid) for file in files for pid in file.read_text().split())
        assert all(map(is_running, pids))
        return process, pids

    yield start
    for pid in [*pids, *(process.pid for process in started)]:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
def test_kill_9_of_the_launcher_leaves_no_process_behind(launcher, kind):
    process, pids = launcher(kind)
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)))


def test_ctrl_c_stops_all(launcher):
    process, pids = launcher()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not any(map(is_running, pids))
    assert process.stdout.read().splitlines()[-1] == "stopped by SIGINT"


def test_sigterm_stops_all(launcher):
    process, pids = launcher()
    process.terminate()
    assert process.wait(20) == 143
    assert not any(map(is_running, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_kill_9_of_a_guardian_ends_its_member_and_the_run(launcher):
    process, pids = launcher()
    member_pid, _, guardian = pids[3:6]
    os.kill(guardian, signal.SIGKILL)
    assert process.wait(20) == 128 + 9
    assert not is_running(member_pid)


# A job on this machine


def test_a_job_has_its_servers_first_and_each_knows_its_place():
    members = job_members(
        ("monolith", "train", "t"), num_ps=1, num_workers=2, folder="/d", flags=("--train.model-dir", "/m")
    )
    assert [each.name for each in members] == ["ps 0", "worker 0", "worker 1"]
    configs = [load_run_config(args=each.command[3:]) for each in members]
    assert [(c.cluster.role, c.cluster.index) for c in configs] == [("ps", 0), ("worker", 0), ("worker", 1)]
    assert {(c.cluster.num_ps, c.cluster.num_workers, c.discovery.folder) for c in configs} == {(1, 2, "/d")}
    elsewhere = job_members(("monolith",), num_ps=0, num_workers=1, folder=None, environment={"A": "b"})
    assert [each.environment for each in elsewhere] == [{"A": "b"}]
    assert not any("discovery" in word for word in elsewhere[0].command)
    with pytest.raises(ConfigError, match="needs workers"):
        job_members(("monolith",), num_ps=1, num_workers=0, folder="/d")
