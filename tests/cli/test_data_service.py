"""`monolith data dispatcher` and `monolith data worker`, as processes: found, guarded, killed, found anew."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from contracts.discoveries import eventually
from services import warm

from monolith.cli.data_service import (
    data_guard,
    dispatcher,
    dispatcher_answers,
    find_function,
    reachable_host,
    told_to_stop,
    worker,
)
from monolith.cli.options.data import DataDispatcherOptions, DataWorkerOptions
from monolith.cli.options.flags import SecurityOptions, guard_of
from monolith.cluster import DATA_DISPATCHER, MemoryDiscovery, locator, open_discovery_url
from monolith.cluster.run_token import RUN_TOKEN, user_security
from monolith.cluster.security import Guard, SecurityConfig, guard_caller
from monolith.config import Secret
from monolith.data.service import DataServiceSource
from monolith.errors import ConfigError, DataError, DeadlineExceededError

pytest.importorskip("pyarrow")

SOON = timedelta(seconds=60)
"""For a process to come up on a machine where others work, too."""
NUMBERS = list(range(120))
SOURCE = """
from monolith.data import Records
from monolith.tensors import RaggedTensor

class Lines:
    def __init__(self, path):
        self._numbers = [int(line) for line in open(path)]
        self._next = 0
    def __iter__(self):
        while self._next < len(self._numbers):
            self._next += 1
            yield Records(1, {"id": RaggedTensor.from_list([[self._numbers[self._next - 1]]])})
    def position(self):
        return {"next": self._next}
    def restore(self, position):
        self._next = position["next"]
    def close(self):
        pass
"""


class Commands:
    """Runs commands in a folder with two files of numbers and a source that reads them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        (folder / "lines_source.py").write_text(SOURCE)
        for name, numbers in {"a": NUMBERS[:60], "b": NUMBERS[60:]}.items():
            (folder / f"{name}.txt").write_text("".join(f"{number}\n" for number in numbers))

    def dispatcher(self, *flags: str, port: int = 0, **environment: str) -> warm.Popen:
        needed = ("--splits", f"{self.folder}/*.txt", "--folder", "job", "--lease", "1", "--port", str(port))
        return self._start("dispatcher", needed + flags, environment)

    def worker(self, *flags: str) -> warm.Popen:
        needed = ("--source", "lines_source:Lines", "--buffer-chunks", "4", "--readers", "1")
        return self._start("worker", needed + flags, {})

    def _start(self, command: str, flags: tuple[str, ...], environment: dict[str, str]) -> warm.Popen:
        process = warm.Popen(
            ["-m", "monolith", "data", command, *flags],
            cwd=self.folder,
            stdout=warm.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), **environment},
        )

        def end() -> None:
            process.kill()
            process.wait()
            process.stdout.close()

        self._stack.callback(end)
        return process

    def guard(self) -> Guard:
        """Return what a trainer of the same user presents."""
        environ = {"XDG_STATE_HOME": str(self.folder / "state")}
        return guard_caller(user_security(SecurityConfig(), environ))


def address_of(process: warm.Popen) -> str:
    """Return the address that a command prints when it is ready."""
    return process.stdout.readline().strip().partition(" ")[2]


def kill(process: warm.Popen) -> None:
    process.kill()
    process.wait()


def stop(process: warm.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def read(source: DataServiceSource) -> list[int]:
    return [some["id"].flat_values.item() for some in source]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with ExitStack() as stack:
        yield Commands(tmp_path, stack)


@pytest.fixture(params=["files", "zookeeper"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "files":
        return f"files://{tmp_path}/registry"
    return f"zookeeper://{request.getfixturevalue('zookeeper').address}/data-{tmp_path.name}"


def test_files_are_read_by_a_worker_and_both_stop_when_told(commands: Commands) -> None:
    (commands.folder / "token").write_text("secret\n")
    first = commands.dispatcher("--token-file", "token")
    address = address_of(first)
    second = commands.worker("--dispatcher", address, "--token-file", "token")
    guard = guard_caller(SecurityConfig(token=Secret("secret")))
    assert sorted(read(DataServiceSource(address, "one", guard=guard, patience=SOON))) == NUMBERS
    stop(second)
    stop(first)


# Started by MLP

HELPER = {
    "MLP_ROLE": "dispatcher",
    "MLP_DISPATCHER_NUM": "1",
    "MLP_WORKER_NUM": "1",
    "MLP_WORKER_0_PRIMARY_HOST": "chief",
    "MLP_SSH_PORT": "2022",
}


def test_a_helper_that_mlp_started_stops_when_the_chief_is_gone() -> None:
    asked: list[tuple[str, int]] = []

    def answers_once(host: str, port: int, _timeout: timedelta) -> bool:
        asked.append((host, port))
        return len(asked) == 1

    with told_to_stop(HELPER, answers_once) as stop:
        assert stop.wait(SOON.total_seconds())
    assert asked == [("chief", 2022)] * 2


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**HELPER, "MLP_ROLE": "worker"},
        {name: text for name, text in HELPER.items() if name != "MLP_WORKER_0_PRIMARY_HOST"},
    ],
)
def test_a_process_without_a_chief_to_help_makes_no_call(environ: dict[str, str]) -> None:
    def never(*_: object) -> bool:
        raise AssertionError

    with told_to_stop(environ, never) as stop:
        assert not stop.is_set()
        assert "mlp-join" not in [thread.name for thread in threading.enumerate()]


def test_a_signal_stops_it_even_if_the_interrupted_code_holds_the_lock_of_the_event() -> None:
    with told_to_stop({}) as stop:
        with stop._cond:  # as `stop.wait` does for a moment before it waits
            signal.raise_signal(signal.SIGTERM)
        assert stop.wait(SOON.total_seconds())


# Found by discovery


def test_a_dispatcher_that_is_killed_and_moves_is_found_again_by_workers_and_trainers(
    commands: Commands, registry: str
) -> None:
    with open_discovery_url(registry) as discovery:
        early = commands.worker("--discovery", registry)  # waits for whom it cannot find yet
        first = commands.dispatcher("--discovery", registry)
        before = address_of(first)
        eventually(lambda: discovery.query(DATA_DISPATCHER) == {0: before})
        address_of(early)
        source = DataServiceSource(
            locator(discovery, DATA_DISPATCHER), "one", guard=commands.guard(), prefetch=1, patience=SOON
        )
        shares = iter(source)
        seen = [some["id"].flat_values.item() for some in itertools.islice(shares, 20)]

        kill(first)  # takes nothing back
        second = commands.dispatcher("--discovery", registry)
        after = address_of(second)
        assert after != before
        seen += [some["id"].flat_values.item() for some in itertools.islice(shares, 20)]

        kill(early)
        address_of(commands.worker("--discovery", registry))
        seen += [some["id"].flat_values.item() for some in shares]
        assert sorted(seen) == NUMBERS

        assert discovery.query(DATA_DISPATCHER) == {0: after}
        stop(second)
        eventually(lambda: discovery.query(DATA_DISPATCHER) == {})  # who stops takes it back


def test_a_worker_that_finds_no_dispatcher_says_what_it_found() -> None:
    discovery = MemoryDiscovery()
    find = locator(discovery, DATA_DISPATCHER)
    with pytest.raises(
        DeadlineExceededError, match=r"waited 0 s for the dispatcher: no process is registered as"
    ):
        dispatcher_answers(find, timedelta(), threading.Event())
    discovery.register(DATA_DISPATCHER, 0, "127.0.0.1:1")
    with pytest.raises(DeadlineExceededError, match=r"at 127\.0\.0\.1:1: .*refused"):
        dispatcher_answers(find, timedelta(), threading.Event())


def test_a_worker_that_is_told_to_stop_waits_no_longer() -> None:
    told = threading.Event()
    told.set()
    assert not dispatcher_answers(locator(MemoryDiscovery(), DATA_DISPATCHER), timedelta(hours=1), told)


def test_what_listens_everywhere_is_registered_under_an_address_that_others_reach(commands: Commands) -> None:
    registry = f"files://{commands.folder}/registry"
    flags = ("--discovery", registry, "--host", "0.0.0.0", "--insecure")
    running = commands.dispatcher(*flags, CLOUDNATIVE_INET_ADDR="127.0.0.1")
    address = address_of(running)
    assert address.startswith("127.0.0.1:")
    with open_discovery_url(registry) as discovery:
        assert discovery.query(DATA_DISPATCHER) == {0: address}


def test_the_host_that_others_reach_is_the_one_advertised_or_listened_on() -> None:
    assert reachable_host("0.0.0.0", "node7") == "node7"
    assert reachable_host("::1", None) == "::1"
    assert reachable_host("[::1]", None) == "::1"


# Who may come in


def test_without_a_word_about_security_only_processes_of_the_same_user_come_in(commands: Commands) -> None:
    address = address_of(commands.dispatcher())
    with pytest.raises(ConfigError, match=r"refused the shared token.*--token-file"):
        read(DataServiceSource(address, "one", patience=timedelta()))
    address_of(commands.worker("--dispatcher", address))
    assert sorted(read(DataServiceSource(address, "one", guard=commands.guard(), patience=SOON))) == NUMBERS


def test_a_service_demands_what_was_set_then_the_runs_token_then_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("mine")
    environ = {"XDG_STATE_HOME": str(tmp_path), RUN_TOKEN: "of-the-run"}

    def token(options: SecurityOptions, environ: dict[str, str]) -> Secret | None:
        return data_guard(options, "127.0.0.1", environ).token

    assert token(SecurityOptions(token_file=tmp_path / "token"), environ) == Secret("mine")
    assert token(SecurityOptions(), environ) == Secret("of-the-run")
    assert token(SecurityOptions(insecure=True), {"XDG_STATE_HOME": str(tmp_path)}) is None
    assert capsys.readouterr().err == ""
    users = tmp_path / "monolith" / "data_service_token"
    assert not users.exists()
    assert token(SecurityOptions(), {"XDG_STATE_HOME": str(tmp_path)}) == Secret(users.read_text())
    assert str(users) in capsys.readouterr().err, "and says where the token is"


def test_with_certificates_from_flags_and_from_a_config_file_only_their_holders_come_in(
    commands: Commands, certificates: Path
) -> None:
    (commands.folder / "run.toml").write_text(
        f"""
[security]
cert = "{certificates}/ca-node.crt"
key = "{certificates}/ca-node.key"
ca = "{certificates}/ca.crt"
"""
    )
    first = commands.dispatcher(
        *("--tls-cert", f"{certificates}/ca-node.crt", "--tls-key", f"{certificates}/ca-node.key"),
        *("--tls-ca", f"{certificates}/ca.crt"),
    )
    address = address_of(first)
    second = commands.worker("--dispatcher", address, "--config", "run.toml")
    options = SecurityOptions(config=commands.folder / "run.toml")
    guard = guard_of(options, "127.0.0.1", {})
    assert sorted(read(DataServiceSource(address, "one", guard=guard, patience=SOON))) == NUMBERS
    with pytest.raises(DataError, match="no answer from"):
        read(DataServiceSource(address, "two", patience=timedelta()))
    stop(second)
    stop(first)


def test_an_address_that_others_reach_needs_a_guard_or_the_word_insecure(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "node7"):
        with pytest.raises(ConfigError, match=r"others can reach it.*--tls-cert.*--token-file.*--insecure"):
            dispatcher(DataDispatcherOptions(splits=("a",), folder=str(tmp_path), host=host, port=0))
        with pytest.raises(ConfigError, match="others can reach it"):
            worker(DataWorkerOptions(source="json:loads", dispatcher="127.0.0.1:1", host=host))
    assert guard_of(SecurityOptions(insecure=True), "0.0.0.0", {}).token is None
    (tmp_path / "token").write_text("secret")
    guarded = guard_of(SecurityOptions(token_file=tmp_path / "token"), "0.0.0.0", {})
    assert guarded.token == Secret("secret")


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    for name in ("flag", "variable", "file"):
        (tmp_path / name).write_text(name)
    file = tmp_path / "run.toml"
    file.write_text(f'[security]\ntoken_file = "{tmp_path}/file"\n')
    environ = {"MONOLITH_SECURITY__TOKEN_FILE": str(tmp_path / "variable")}

    def token(options: SecurityOptions, environ: dict[str, str]) -> str:
        found = guard_of(options, "127.0.0.1", environ).token
        assert found is not None
        return found.reveal()

    assert token(SecurityOptions(config=file, token_file=tmp_path / "flag"), environ) == "flag"
    assert token(SecurityOptions(config=file), environ) == "variable"
    assert token(SecurityOptions(config=file), {}) == "file"


# What cannot be run


def test_what_cannot_be_run_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file matches"):
        dispatcher(DataDispatcherOptions(splits=(str(tmp_path / "*.none"),), folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="must be module:function"):
        worker(DataWorkerOptions(dispatcher="127.0.0.1:1", source="json"))
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        find_function("json:nothing")
    with pytest.raises(ConfigError, match=r"by --dispatcher or by --discovery, not by both"):
        worker(DataWorkerOptions(dispatcher="127.0.0.1:1", discovery="files:///x", source="json:loads"))
    missing = SecurityOptions(token_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot read security\.token_file"):
        dispatcher(DataDispatcherOptions(splits=("a",), folder=str(tmp_path), security=missing))
    alone = SecurityOptions(tls_cert=tmp_path / "cert")
    with pytest.raises(ConfigError, match="needs all three"):
        worker(DataWorkerOptions(source="json:loads", dispatcher="127.0.0.1:1", security=alone))
