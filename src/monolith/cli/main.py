"""`monolith COMMAND ...`: the one place that reads arguments and sets up the process.

Exit status: 0 done, 1 done and something is wrong, 2 could not be done (one line on standard error
says why, and --traceback shows the traceback), 71 this process had no memory left (EX_OSERR; a launcher
starts it again), 75 a peer was lost or stopped: the same command, started
again, resumes (EX_TEMPFAIL of sysexits.h), 130 interrupted. A training run that was ended by SIGINT or
SIGTERM, and has saved, exits with 130 or 143.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
import resource
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from monolith import __version__
from monolith.cli.commands import ADDED_BY, COMMANDS, RENAMED, Command, all_commands
from monolith.cli.options.flags import check_flags, split_run_flags
from monolith.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    MonolithError,
    OutOfMemoryError,
    RetryableError,
    lacks_memory,
)
from monolith.observe.machine import usable_cores
from monolith.observe.stacks import describe_own_error

TRACEBACK = "--traceback"
LOG_LEVELS = ("debug", "info", "warning", "error")
FEW_CORES = 4
"""Up to so many, torch's threads sleep while they have nothing to do. Measured with 2 and with 16."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A rank of mpirun that failed ends all ranks.

    Args:
        argv: The arguments after the program's name; by default those of this process.
    """
    status = answer(sys.argv[1:] if argv is None else argv)
    if status and may_be_rank():
        from monolith.runtime.discovery import installed_schedulers

        for scheduler in installed_schedulers().values():
            scheduler.end_ranks(os.environ, status)
    return status


def may_be_rank() -> bool:
    """Whether a variable such as RANK or PMI_RANK is set. To ask the schedulers takes imports of some 0.5 s,
    which other processes are spared."""
    return any(name.endswith("RANK") for name in os.environ)


def answer(words: Sequence[str]) -> int:
    """Run one command; print one line if it fails."""
    try:
        status = run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has ended, as in `monolith --help | head`
        # What is left in the buffer would be an error again when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell says of a process that SIGPIPE ended
    except SystemExit as stop:  # argparse and tyro have printed their help or complaint
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        sys.stderr.write("monolith: interrupted\n")
        return 130
    except MonolithError as error:
        said = str(error)
        found: Exception = error
    except Exception as error:
        own = describe_own_error(error) or (str(error) if lacks_memory(error) else None)
        if own is None:  # a bug of this package: its report needs the whole traceback
            raise
        said = own if TRACEBACK in words else f"{own} ({TRACEBACK} shows the whole traceback)"
        found = error
    shown = "".join(traceback.format_exception(found)) if TRACEBACK in words else ""
    if lacks_memory(found):
        if not isinstance(found, OutOfMemoryError):
            said = f"this process has no memory left: {said or type(found).__name__}"
        write_error(f"{shown}monolith: {said}\n")
        return OUT_OF_MEMORY
    write_error(f"{shown}monolith: {said}\n")
    return retryable_status(words) if isinstance(found, RetryableError) else 2


def write_error(text: str) -> None:
    """Write to standard error; if that is a file on a full disk, the exit status must not change."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # What is left in the buffer would be an error again when the interpreter ends: status 120.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def retryable_status(words: Sequence[str]) -> int:
    """Return the exit status of a command line after a RetryableError (a peer failed)."""
    name, _ = split_command(shared_parser().parse_known_args(words)[1])
    return find_command(name).retryable_status


def run(argv: Sequence[str]) -> int:
    parser = shared_parser()
    shared, rest = parser.parse_known_args(argv)
    if not rest or rest[0] in ("-h", "--help"):
        parser.epilog = "\n".join(
            [grouped(all_commands()), "", "`monolith COMMAND --help` lists the options of a command."]
        )
        parser.print_help()
        return 0
    if (renamed := new_words(rest)) != rest:
        count = next(n for n in (2, 1) if " ".join(rest[:n]) in RENAMED)
        old = " ".join(rest[:count])
        write_error(f"monolith: `monolith {old}` is now `monolith {RENAMED[old]}`\n")
        rest = renamed
    if rest[-1] in ("-h", "--help") and (begun := commands_under(rest[:-1])):
        if " ".join(rest[:-1]) not in all_commands():
            sys.stdout.write(f"usage: monolith {' '.join(rest[:-1])} ... [options]\n\n{listed(begun)}\n")
            return 0
        sys.stdout.write(f"see also `monolith NAME --help` of its other {listed(begun)}\n\n")
    name, flags = split_command(rest)
    options = parse_options(name, flags, argv)

    from monolith import observe

    quiet = getattr(options, "quiet", False)
    observe.configure_logging(shared.log_level or ("warning" if quiet else "info"), json=shared.json_logs)
    # Otherwise torch's profiler writes a line to standard error at every start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    let_idle_threads_sleep()
    observe.install_stack_dump()
    raise_file_limit()
    if may_be_rank():
        from monolith.runtime.discovery import installed_schedulers

        for scheduler in installed_schedulers().values():
            scheduler.abort_on_exception(os.environ)
    command = find_command(name)
    try:
        status: int = getattr(importlib.import_module(command.module), command.function)(options)
    finally:
        observe.say_repeats()
    return status


def let_idle_threads_sleep() -> None:
    """Have the threads of torch sleep between operations on a machine with few cores.

    By default they wait busily for a moment, while threads that read data and update rows need their cores:
    `monolith train` on two cores took a fifth more time. With many cores, waking up costs more than waiting
    does. OpenMP reads the variable when torch is imported, so this comes first; a user's own value counts.
    """
    if usable_cores() <= FEW_CORES:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def raise_file_limit() -> None:
    """Let this process open as many files as its user may. The soft limit is 1,024 on most systems, for
    programs that use `select`; a port with many connections and a table of many files need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # the system has a limit below the one it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shared_parser() -> argparse.ArgumentParser:
    """Return the parser of what every command understands; it may stand before or after the command."""
    parser = argparse.ArgumentParser(
        prog="monolith",
        usage="monolith COMMAND [options]",
        description="Train recommendation and ads models on live data, and serve what they learned.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # --help belongs to the command where there is one
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monolith {__version__}")
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="how much to log; default: info, with --quiet warning"
    )
    parser.add_argument("--json-logs", action="store_true", help="log one JSON object per line")
    parser.add_argument(TRACEBACK, action="store_true", help="print the traceback of an error")
    return parser


def listed(commands: Iterable[str]) -> str:
    """Return commands with what each is for, for a help text."""
    names = list(commands)
    width = max(map(len, names))
    return "\n".join(["commands:", *(f"  {name:<{width}}  {find_command(name).summary}" for name in names)])


def grouped(commands: Iterable[str]) -> str:
    """Return a line for each first word: what the command does, or which commands begin with that word."""
    under: dict[str, list[str]] = {}
    for name in commands:
        word, _, rest = name.partition(" ")
        under.setdefault(word, []).append(rest)
    width = max(map(len, under))
    lines = ["commands:"]
    for word, names in under.items():
        more = " | ".join(filter(None, names))
        text = find_command(word).summary if "" in names else more
        lines.append(f"  {word:<{width}}  {text}")
        if "" in names and more:
            lines.append(f"  {'':<{width}}  also: {word} {more}")
    return "\n".join(lines)


def new_words(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which the old name of a command is replaced by its new one."""
    for count in (2, 1):
        if (new := RENAMED.get(" ".join(arguments[:count]))) is not None:
            return [*new.split(), *arguments[count:]]
    return list(arguments)


def commands_under(words: Sequence[str]) -> list[str]:
    """Return the commands that begin with these words, and have more: those of `bench`."""
    count = len(words)
    known = all_commands()
    return [name for name in known if count < len(name.split()) and name.split()[:count] == list(words)]


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that the first words name, and the arguments after it."""
    arguments = new_words(arguments)
    # A command of the library is found without reading the entry points.
    own = any(name.split()[0] == arguments[0] for name in COMMANDS)
    known = COMMANDS if own else all_commands()
    for name in sorted(known, key=len, reverse=True):  # `status watch` before `status`
        words = name.split()
        if list(arguments[: len(words)]) == words:
            return name, list(arguments[len(words) :])
    word = arguments[0]
    if word.startswith("-"):
        raise ConfigError(f"unknown option {word!r} before a command; see `monolith --help`")
    if begun := commands_under([word]):
        raise ConfigError(f"`monolith {word}` needs a subcommand; choose one of: {', '.join(begun)}")
    if word in ADDED_BY:
        raise ConfigError(
            f"`monolith {word}` is a command of the package {ADDED_BY[word]}, which is not installed here. "
            "Install all packages of the repository: `make setup`, or `pip install .` in a clone."
        )
    near = difflib.get_close_matches(word, [name.split()[0] for name in known], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown command {word!r}. {hint}The commands are: {', '.join(known)}")


def find_command(name: str) -> Command:
    """Return the command of this name; one of the library without reading the entry points."""
    return COMMANDS[name] if name in COMMANDS else all_commands()[name]


def parse_options(name: str, flags: Sequence[str], words: Sequence[str] = ()) -> Any:
    """Return the options dataclass of a command, filled from its flags.

    Args:
        words: The whole command line, for a command that starts others by it.
    """
    import tyro

    command = find_command(name)
    config: tuple[Any, ...] = (tyro.conf.FlagCreatePairsOff,)
    if command.positional:
        config += (tyro.conf.PositionalRequiredArgs,)
    run_flags: list[str] = []
    if command.run_flags:
        own = {field.name for field in dataclasses.fields(command.options)} - {"task"}  # which has no flag
        flags, run_flags = split_run_flags(flags, own | {"help"})
    check_flags(name, command.options, flags)
    options: Any = tyro.cli(command.options, prog=f"monolith {name}", args=flags, config=config)
    if command.run_flags:
        options = dataclasses.replace(options, run_flags=tuple(run_flags), words=tuple(words))
    return options
