"""`monolith COMMAND ...`: what it prints, what it hands to a command, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from services import warm

import monolith
from monolith import observe
from monolith.cli import commands
from monolith.cli import main as cli
from monolith.errors import ConfigError, MissingExtraError, OutOfMemoryError
from monolith_bench.options import BenchTableOptions

COMMANDS = commands.all_commands()


class Calls:
    """Stands in for the modules that run commands; records what reaches them."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.setup: list[Any] = []
        self.outcome: int | BaseException = 0

    def run(self, options: Any) -> int:
        self.options.append(options)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    modules = SimpleNamespace(import_module=lambda name: calls)  # noqa: ARG005
    monkeypatch.setattr(cli, "importlib", modules)
    monkeypatch.setattr(
        observe, "configure_logging", lambda level, *, json: calls.setup.append((level, json))
    )
    monkeypatch.setattr(observe, "install_stack_dump", lambda: calls.setup.append("stack dump"))
    return calls


@pytest.mark.parametrize(
    ("cores", "given", "expected"), [(2, None, "PASSIVE"), (2, "ACTIVE", "ACTIVE"), (16, None, None)]
)
def test_on_few_cores_idle_threads_of_torch_sleep(
    cores: int, given: str | None, expected: str | None, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is as before after the test
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    monkeypatch.setattr(cli, "usable_cores", lambda: cores)
    assert cli.main(["bench", "table"]) == 0
    assert calls.options
    assert os.environ.get("OMP_WAIT_POLICY") == expected


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_without_a_command_it_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    listed = {line.split()[0] for line in printed.partition("commands:")[2].splitlines() if line.strip()}
    assert {name.split()[0] for name in COMMANDS} <= listed
    for name, command in COMMANDS.items():
        assert name.split()[-1] in printed
        assert " " in name or command.summary in printed


def test_it_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"monolith {monolith.__version__}\n"


def test_a_command_gets_its_typed_options_and_its_status_is_returned(calls: Calls) -> None:
    calls.outcome = 1
    assert cli.main(["bench", "table", "--rows", "1000", "--json"]) == 1
    assert calls.options == [BenchTableOptions(rows=1000, json=True)]


@pytest.mark.parametrize("argv", [["--log-level", "debug", "demo"], ["demo", "--log-level", "debug"]])
def test_shared_options_may_come_before_or_after_the_command(calls: Calls, argv: list[str]) -> None:
    assert cli.main(argv) == 0
    assert calls.setup == [("debug", False), "stack dump"]


def test_logs_are_json_on_request(calls: Calls) -> None:
    assert cli.main(["demo", "--json-logs"]) == 0
    assert calls.setup == [("info", True), "stack dump"]


def test_nothing_is_set_up_when_the_arguments_are_wrong(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "table", "--rowz", "3"]) == 2
    assert "--rows" in capsys.readouterr().err
    assert calls.setup == []


@pytest.mark.parametrize(
    "argv, says",
    [
        (["doctr"], "Did you mean 'doctor'?"),
        (["fly"], "unknown command 'fly'. The commands are: "),
        (["bench"], "choose one of: bench table"),
        (["--fast", "demo"], "unknown option '--fast' before a command"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    "error", [ConfigError("dim must be at least 1"), MissingExtraError("ray", "ray", "x")]
)
def test_an_error_of_ours_is_one_line_and_exit_two(
    calls: Calls, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = error
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == f"monolith: {error}\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), r"this process has no memory left: .*MemoryError"),
        (ImportError("libarrow: Cannot allocate memory"), r"this process has no memory left: .*libarrow"),
        (OutOfMemoryError("parameter server 1 has no memory left"), r"parameter server 1 has no memory left"),
    ],
)
def test_a_process_without_memory_says_so_and_asks_to_be_started_again(
    calls: Calls, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    error.__cause__ = MemoryError()
    calls.outcome = error
    assert cli.main(["bench", "table"]) == 71
    assert re.fullmatch(rf"monolith: {said}.*\n", capsys.readouterr().err)


def test_a_bug_of_ours_keeps_its_traceback(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "run", 5)  # which main calls
    with pytest.raises(TypeError, match="not callable"):
        cli.main(["demo"])


def test_an_error_in_user_code_is_one_line_with_its_place(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = ZeroDivisionError("by zero\nand more of it")
    assert cli.main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"monolith: {re.escape(__file__)}:\d+, in run: ZeroDivisionError: by zero "
        r"\(--traceback shows the whole traceback\)",
        line,
    )


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ConfigError("dim must be at least 1")])
@pytest.mark.parametrize("argv", [["--traceback", "demo"], ["demo", "--traceback"]])
def test_the_whole_traceback_is_printed_on_request(
    calls: Calls, error: Exception, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    calls.outcome = error
    assert cli.main(argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "raise self.outcome" in printed
    assert "(--traceback" not in printed
    assert str(error) in printed.splitlines()[-1]


@pytest.mark.parametrize("group", ["bench", "data", "checkpoint", "config"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_on_a_group_lists_its_commands(
    group: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([group, flag]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for name, command in COMMANDS.items():
        assert (command.summary in printed.out) == name.startswith(f"{group} ")


@pytest.mark.parametrize("old, new", commands.RENAMED.items())
def test_an_old_name_still_works_and_prints_the_new_one(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new in COMMANDS
    assert old not in COMMANDS
    assert cli.main([*old.split(), "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"monolith: `monolith {old}` is now `monolith {new}`\n"
    assert f"monolith {new}" in printed.out


def test_there_are_about_seventeen_commands_and_two_that_measure() -> None:
    assert " ".join(dict.fromkeys(name.split()[0] for name in COMMANDS)) == (
        "new train evaluate predict export serve query publish status ui data checkpoint config doctor plan "
        "bench demo experiment"
    )


@pytest.mark.parametrize("word", ["bench", "demo", "experiment", "tour"])
def test_a_command_of_a_package_that_is_missing_names_the_package(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "all_commands", lambda: commands.COMMANDS)
    assert cli.main([word, "--help"]) == 2
    said = capsys.readouterr().err
    assert "monolith_bench, which is not installed here" in said
    assert "make setup" in said


def test_a_command_of_the_library_is_found_without_reading_entry_points(
    monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    monkeypatch.setattr(cli, "all_commands", lambda: pytest.fail("entry points were read"))
    assert cli.main(["doctor"]) == 0
    assert len(calls.options) == 1


def test_an_interrupt_exits_with_130(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.outcome = KeyboardInterrupt()
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "monolith: interrupted\n"


@pytest.fixture(scope="module")
def explained() -> dict[str, tuple[int, str, bool]]:
    """Return the status and output of each command's --help, and whether torch is loaded then.

    In one new process, one after the other: whoever loads it is the first who has it.
    """
    program = f"""
import contextlib, io, json, sys
from monolith.cli.main import main
found = {{}}
for name in {list(COMMANDS)}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main([*name.split(), "--help"])
    found[name] = status, out.getvalue(), "torch" in sys.modules
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: tuple(one) for name, one in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_its_options_without_loading_torch(
    name: str, explained: dict[str, tuple[int, str, bool]]
) -> None:
    status, printed, loads_torch = explained[name]
    assert (status, loads_torch) == (0, False)
    assert COMMANDS[name].summary.split(":")[0] in printed
    assert "options" in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_module_that_runs_it(name: str) -> None:
    import importlib

    command = COMMANDS[name]
    assert callable(getattr(importlib.import_module(command.module), command.function))


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monolith", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"monolith {monolith.__version__}\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_uncaught_exception_ends_all_ranks_of_mpi(ranks: int, tmp_path: Path) -> None:
    task = tmp_path / "broken.py"
    task.write_text("class Boom(BaseException): ...\n\n\ndef task():\n    raise Boom\n")
    done = warm.run(
        ["-m", "monolith", "train", f"{task}:task"],
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(ranks)},
    )
    assert done.returncode == 1
    assert "Boom" in done.stderr
    assert ("rank 0 of 2 failed; aborting all ranks" in done.stderr) == (ranks == 2)


def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-m", "monolith", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything was written
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_command_may_open_as_many_files_as_its_user_may() -> None:
    program = """
import resource
from monolith.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
main(["config", "token", "--help"])
before = resource.getrlimit(resource.RLIMIT_NOFILE)
main(["data", "head", "/nowhere.jsonl"])
print("limits", before, resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "limits (256, 4096) (4096, 4096)" in done.stdout


def test_a_log_on_a_full_disk_does_not_change_the_exit_status() -> None:
    with Path("/dev/full").open("w") as full:
        process = warm.Popen(["-m", "monolith", "top", "/nowhere"], stderr=full)
        assert process.wait(60) == 2
