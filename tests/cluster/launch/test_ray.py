"""Members on a real Ray: they run, are killed with and without their actors, are looked for afterwards."""

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
from services.ray import RayCluster

from monolith.cluster.launch import LaunchOptions
from monolith.cluster.launch.processes import Member, StopRequest
from monolith.cluster.launch.ray import (
    PLACEMENTS,
    RayLaunch,
    RayPlacement,
    launch_on_ray,
    run_members_on_ray,
)
from monolith.errors import ConfigError, DeadlineExceededError, MissingExtraError, WrongThreadError

GRACE = timedelta(seconds=5)
LITTLE = RayPlacement(cpus=0.1, max_restarts=1)
TWO_LIVES = {"ps": LITTLE, "worker": LITTLE}


def shell(role: str, index: int, script: str) -> Member:
    return Member(role=role, index=index, command=("/bin/sh", "-c", textwrap.dedent(script)))


class Output(io.StringIO):
    """Where members write; does something when one writes a word."""

    def __init__(self, word: str = "", then=lambda: None) -> None:
        super().__init__()
        self._word, self._then = word, then

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._word and self._word in text:
            self._then()
        return count


def without_ids(text: str) -> str:
    """Return lines with the names of who wrote them, without process ids, which each has."""
    assert not text or re.match(r"\[\w+ \d+ pid \d+\]", text)
    return re.sub(r"^(\[\w+ \d+) pid \d+\]", r"\1]", text, flags=re.MULTILINE)


@pytest.fixture
def run(ray_cluster: RayCluster):  # noqa: ARG001
    """Runs members on the cluster of all tests, to which this process is connected."""

    def run(*members: Member, output=None, **options):
        output = Output() if output is None else output
        asked = {
            name: options.pop(name)
            for name in ("address", "placements", "runtime_env", "room_timeout")
            if name in options
        }
        events = options.pop("events", None)
        outcome = run_members_on_ray(
            members,
            RayLaunch(**{"placements": TWO_LIVES, **asked}),
            LaunchOptions(**{"output": output, "grace": GRACE, **options}),
            events,
        )
        return outcome, without_ids(output.getvalue()).splitlines()

    return run


def wait_until(condition, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def stat_of(pid: int) -> list[str]:
    """State and parent of a process, and more; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_running(pid: int) -> bool:
    stat = stat_of(pid)
    return bool(stat) and stat[0] not in "ZX"


def host_of(pid: int) -> int:
    """The worker of Ray above a member's process: over its guardian, and what is between."""
    for _ in range(3):
        pid = int(stat_of(pid)[1])
    assert b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid


# Runs that go well


def test_members_run_each_line_has_a_name_and_followers_stop_in_the_end(run, tmp_path):
    served = f"{tmp_path}/served"  # on a busy machine the worker could end before the server has begun
    outcome, lines = run(
        shell("ps", 0, f"echo serving; touch {served}; exec sleep 100"),
        Member(
            role="worker",
            index=10,
            command=(
                "/bin/sh",
                "-c",
                f"until [ -e {served} ]; do sleep 0.02; done; echo $WHO; printf 'no newline at the end'",
            ),
            environment={"WHO": "me"},
        ),
        grace=timedelta(seconds=0.5),
    )
    assert (outcome.status, outcome.failed, outcome.text) == (0, None, "all done")
    assert [line for line in lines if "ps" in line] == ["[ps 0]      serving"]
    assert [line for line in lines if "worker" in line] == [
        "[worker 10] me",
        "[worker 10] no newline at the end",
    ]


def test_a_member_that_is_asked_to_stop_keeps_its_followers_until_it_has_saved_and_lines_can_be_tapped(
    run, tmp_path
):
    events = queue.SimpleQueue()
    forever = "while :; do sleep 0.02; done"
    served = f"{tmp_path}/served"
    saves = f"sleep 0.3; [ -e {served} ] && echo mark saved; exit 0"
    taken = []

    def tap(name: str, line: str) -> bool:
        if line == "up":
            events.put(StopRequest(signal.SIGINT))
        if line.startswith("mark"):
            taken.append((name, line))
        return line.startswith("mark")

    outcome, lines = run(
        shell("ps", 0, f"trap 'rm {served}; exit 0' TERM; touch {served}; {forever}"),
        shell(
            "worker",
            0,
            f"trap '{saves}' TERM; until [ -e {served} ]; do sleep 0.02; done; echo up; {forever}",
        ),
        tap=tap,
        events=events,
    )
    assert outcome.status == 130
    assert taken == [("worker 0", "mark saved")]
    assert not any("mark" in line for line in lines)
    assert not Path(served).exists()


@pytest.mark.soak
def test_much_output_comes_whole_and_in_order(run):
    _, lines = run(shell("worker", 0, "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"))
    assert lines == [f"[worker 0] line {number}" for number in range(20000)]


MEETING = """
import sys, time
from monolith.cluster.ray_discovery import RayDiscovery

with RayDiscovery("meeting") as discovery:
    if sys.argv[1] == "ps":
        discovery.register("ps", 0, "10.0.0.1:2222")
        time.sleep(100)
    else:
        end = time.monotonic() + 60
        while not discovery.query("ps") and time.monotonic() < end:
            time.sleep(0.1)
        print("met", discovery.query("ps"))
"""


@pytest.mark.soak
def test_members_find_each_other_through_ray(run):
    members = [
        Member(role=role, index=0, command=(sys.executable, "-c", MEETING, role)) for role in ("ps", "worker")
    ]
    outcome, lines = run(*members, grace=timedelta(seconds=1))
    assert outcome.status == 0, lines
    assert "[worker 0] met {0: '10.0.0.1:2222'}" in lines


# Lives


def test_a_killed_member_begins_again(run, tmp_path):
    lives = tmp_path / "lives"
    outcome, lines = run(
        shell("worker", 0, f"echo x >> {lives}; [ $(wc -l < {lives}) -eq 2 ] || kill -9 $$; echo done")
    )
    assert outcome.status == 0
    assert (lines, lives.read_text()) == (["[worker 0] done"], "x\nx\n")


def test_when_a_member_has_no_life_left_the_rest_are_stopped_and_the_outcome_says_which(run, tmp_path):
    lives = tmp_path / "lives"
    outcome, lines = run(
        shell("ps", 0, "trap 'echo bye; exit 9' TERM; while :; do sleep 0.05; done"),
        shell("worker", 0, "exec sleep 100"),
        shell("worker", 1, f"sleep 0.2; echo x >> {lives}; exit 3"),
    )
    assert outcome.failed is not None
    assert (outcome.failed.name, outcome.status) == ("worker 1", 3)
    assert outcome.text == "worker 1 exited with status 3, after 1 restart(s)"
    assert lives.read_text() == "x\nx\n"
    assert "[ps 0]     bye" in lines


@pytest.mark.soak
def test_a_signal_that_ended_a_member_is_named(run):
    outcome, _ = run(shell("worker", 0, "kill -9 $$"), placements={"worker": RayPlacement(max_restarts=0)})
    assert (outcome.status, outcome.text) == (128 + 9, "worker 0 was killed by SIGKILL")


def test_a_command_that_is_not_there_fails_with_a_line_that_says_so(run):
    absent = Member(role="worker", index=0, command=("/no/such/program",))
    outcome, lines = run(absent, placements={"worker": RayPlacement(max_restarts=0)})
    assert outcome.status == 127
    assert "cannot start /no/such/program" in lines[0]


LIVING = """
    echo $$ > {folder}/pid.tmp && mv {folder}/pid.tmp {folder}/pid
    echo begin $$ >> {folder}/story
    trap 'sleep 1; echo end $$ >> {folder}/story; exit 1' TERM
    while :; do [ -e {folder}/enough ] && exit 0; sleep 0.05; done
"""


def test_a_member_whose_actor_is_killed_begins_again_once_its_first_life_has_ended(run, tmp_path):
    outcomes = []
    member = shell("worker", 0, LIVING.format(folder=tmp_path))
    runner = threading.Thread(target=lambda: outcomes.append(run(member)))
    runner.start()
    pid_file, story = tmp_path / "pid", tmp_path / "story"
    wait_until(pid_file.exists, 30)
    first = int(pid_file.read_text())
    os.kill(host_of(first), signal.SIGKILL)
    wait_until(lambda: int(pid_file.read_text()) != first, 30)
    second = int(pid_file.read_text())
    assert not is_running(first)
    tmp_path.joinpath("enough").touch()
    runner.join(30)
    assert outcomes[0][0].status == 0
    assert story.read_text().splitlines() == [f"begin {first}", f"end {first}", f"begin {second}"]


@pytest.mark.soak
def test_a_member_whose_actor_is_killed_too_often_fails(run, tmp_path):
    outcomes = []
    member = shell("worker", 0, LIVING.format(folder=tmp_path))
    runner = threading.Thread(
        target=lambda: outcomes.append(run(member, placements={"worker": RayPlacement(max_restarts=0)}))
    )
    runner.start()
    wait_until((tmp_path / "pid").exists, 30)
    pid = int((tmp_path / "pid").read_text())
    os.kill(host_of(pid), signal.SIGKILL)
    runner.join(30)
    outcome, _ = outcomes[0]
    assert outcome.failed == member
    assert outcome.status == 1
    assert "worker 0 was lost: The actor died" in outcome.text
    wait_until(lambda: not is_running(pid))


# Stops


def test_a_stop_request_ends_all_and_leaves_no_process(run, tmp_path):
    events = queue.SimpleQueue()
    script = f"sleep 100 & echo $$ $! > {tmp_path}/$WHO; echo up; wait"
    members = [
        Member(role=role, index=0, command=("/bin/sh", "-c", script), environment={"WHO": role})
        for role in ("ps", "worker")
    ]
    up = []

    def count() -> None:
        up.append(1)
        if len(up) == 2:
            events.put(StopRequest(signal.SIGTERM))

    outcome, _ = run(*members, output=Output("up", count), events=events)
    assert (outcome.status, outcome.failed, outcome.text) == (143, None, "stopped by SIGTERM")
    pids = [int(pid) for role in ("ps", "worker") for pid in (tmp_path / role).read_text().split()]
    assert len(pids) == 4
    assert not any(map(is_running, pids))


@pytest.mark.soak
def test_a_second_stop_request_ends_the_stubborn_at_once(run):
    events = queue.SimpleQueue()

    def stop() -> None:
        events.put(StopRequest(signal.SIGINT))
        threading.Timer(0.5, events.put, [StopRequest(signal.SIGINT)]).start()

    begun = time.monotonic()
    outcome, _ = run(
        shell("worker", 0, "trap '' TERM; echo up; while :; do sleep 0.05; done"),
        output=Output("up", stop),
        grace=timedelta(seconds=60),
        events=events,
    )
    assert (outcome.status, outcome.failed) == (130, None)
    assert time.monotonic() - begun < 50  # less than the grace period


# Room


def test_a_cluster_without_room_is_an_error_that_says_what_is_missing(run):
    with pytest.raises(DeadlineExceededError, match=r"no room for 1 x {'CPU': 1000.0} for worker"):
        run(
            shell("worker", 0, "true"),
            placements={"worker": RayPlacement(cpus=1000)},
            room_timeout=timedelta(seconds=0.1),
        )


def test_a_launch_that_waits_for_resources_can_be_stopped(run):
    events = queue.SimpleQueue()
    events.put(StopRequest(signal.SIGINT))
    outcome, _ = run(
        shell("worker", 0, "true"), placements={"worker": RayPlacement(cpus=1000)}, events=events
    )
    assert outcome.status == 130


@pytest.mark.soak
def test_what_was_set_aside_is_given_back(run):
    import ray

    run(shell("worker", 0, "true"), placements={"worker": RayPlacement(cpus=8)})
    run(shell("worker", 0, "true"), placements={"worker": RayPlacement(cpus=8)})
    wait_until(lambda: ray.available_resources().get("CPU") == 8)


# What is refused; these need no Ray


def test_a_placement_asks_for_something_and_for_nothing_negative():
    with pytest.raises(ConfigError, match="ask for some resource"):
        RayPlacement(cpus=0)
    with pytest.raises(ConfigError, match="gpus must not be negative"):
        RayPlacement(gpus=-1)
    with pytest.raises(ConfigError, match="tpu must not be negative"):
        RayPlacement(resources={"tpu": -1})
    with pytest.raises(ConfigError, match="max_restarts"):
        RayPlacement(max_restarts=-1)


def test_a_placement_is_written_in_rays_words():
    placement = RayPlacement(cpus=2, gpus=0.5, memory_bytes=1 << 30, resources={"nvme": 1})
    assert placement.bundle == {"CPU": 2.0, "GPU": 0.5, "memory": float(1 << 30), "nvme": 1.0}
    assert RayPlacement().bundle == {"CPU": 1.0}


def test_servers_are_spread_and_others_packed():
    assert (PLACEMENTS["ps"].strategy, RayPlacement().strategy) == ("SPREAD", "PACK")


def test_there_must_be_members_with_different_names():
    with pytest.raises(ConfigError, match="need at least one member, with unique names"):
        run_members_on_ray([])
    with pytest.raises(ConfigError, match="need at least one member, with unique names"):
        run_members_on_ray([shell("ps", 0, "true"), shell("ps", 0, "true")])


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"launching on Ray needs .*monolith-recsys\[ray\]"):
        run_members_on_ray([shell("worker", 0, "true")])


def test_only_the_main_thread_launches():
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            launch_on_ray([shell("worker", 0, "true")])
        except WrongThreadError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(errors) == 1


# The launcher as a process

LAUNCHER = """
import sys
from datetime import timedelta
from monolith.cluster.launch.processes import Member
from monolith.cluster.launch import LaunchOptions, RayLaunch, RayPlacement, launch_on_ray

folder, address = sys.argv[1], sys.argv[2] or None
script = "sleep 100 & echo $$ $! > {0}.tmp; mv {0}.tmp {0}; wait"
members = [
    Member(role=role, index=0, command=("/bin/sh", "-c", script.format(f"{folder}/{role}")))
    for role in ("ps", "worker")
]
little = RayPlacement(cpus=0.1)
outcome = launch_on_ray(
    members,
    RayLaunch(address=address, placements={"ps": little, "worker": little}),
    LaunchOptions(grace=timedelta(seconds=2)),
)
print(outcome.text)
sys.exit(outcome.status)
"""


@pytest.fixture
def launcher(tmp_path, ray_cluster: RayCluster):  # noqa: ARG001
    started: list[subprocess.Popen[str]] = []

    def start(address: str | None) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), address or ""],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        files = [tmp_path / role for role in ("ps", "worker")]
        wait_until(lambda: all(file.exists() for file in files), 60)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(is_running, pids))
        return process, pids

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def session_of(leader: int) -> list[int]:
    """All processes of the session that one began: of a launcher, itself and what it has of Ray."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_running(pid) and stat_of(pid)[3:4] == [str(leader)]]


def test_ctrl_c_stops_all_on_an_existing_cluster_which_stays(run, launcher, ray_cluster: RayCluster):
    process, pids = launcher(ray_cluster.address)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    assert process.wait(30) == 130
    assert not any(map(is_running, pids))
    assert process.stdout.read().splitlines()[-1] == "stopped by SIGINT"
    assert run(shell("worker", 0, "true"))[0].status == 0


def test_kill_9_of_the_launcher_leaves_no_process_behind(launcher, ray_cluster: RayCluster):
    process, pids = launcher(ray_cluster.address)
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), 30)


def test_a_cluster_of_its_own_ends_with_the_run(launcher):
    process, pids = launcher(None)
    assert len(session_of(process.pid)) > 3
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert not any(map(is_running, pids))
    wait_until(lambda: session_of(process.pid) == [], 30)


@pytest.mark.soak
def test_a_cluster_of_its_own_ends_with_a_killed_launcher(launcher):
    process, pids = launcher(None)
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), 30)
    wait_until(lambda: session_of(process.pid) == [], 120)


@pytest.mark.soak
def test_a_cluster_is_reached_through_rays_client_protocol(launcher, ray_cluster: RayCluster):
    process, pids = launcher(ray_cluster.client_address)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert not any(map(is_running, pids))
